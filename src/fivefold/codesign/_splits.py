"""Ways to split a job, as layer 1 hands them down: what each computes, sends, and where it lies.

A split is one plan of ``fivefold.strategy`` laid on the job's ranks: position 0 of its mesh on the
first rank, the tensor axis innermost, so that tensor groups stay inside hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology
from fivefold.strategy import ParallelPlan, axis_groups
from fivefold.tasks import IterationDemand, LayerCost


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to split a job.

    Attributes:
        name: Degrees and switches in a few words.
        plan: Its degrees and switches.
        demand: What a rank computes and sends.
        ranks: Ranks of the topology, in the order of the mesh.
        nominal_s: Layer 1's own prediction of an iteration, from nominal constants.
        memory_bytes: On the fullest GPU.
        reached: Shares of a link's rate that collectives and messages (all-to-all, stage to
            stage) reach, between ranks of a host and between hosts, as the devices' file has it.
    """

    name: str
    plan: ParallelPlan
    demand: IterationDemand
    ranks: tuple[int, ...]
    nominal_s: float
    memory_bytes: float
    reached: tuple[tuple[float, float], tuple[float, float]] = ((1.0, 1.0), (1.0, 1.0))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Ranks of each group of an axis."""
        return groups_over(self.plan, axis, self.ranks)

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """The same as layers: compute of all micro-batches, and what is reduced once."""
        demand = self.demand
        reduced = sum(m.size_bytes for m in demand.messages if m.phase == "reduce")
        rest_s = (demand.bubble_s + demand.optimizer_s + demand.overhead_s) / demand.segments
        layer = LayerCost(
            forward_s=demand.micro_batches * demand.forward_s + rest_s,
            backward_s=demand.micro_batches * demand.backward_s,
            gradient_bytes=reduced,
        )
        return (layer,) * demand.segments


@functools.lru_cache(maxsize=4096)
def groups_over(
    plan: ParallelPlan, axis: str, ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Ranks of each group of an axis of a mesh that lies on some ranks."""
    return tuple(tuple(ranks[place] for place in group) for group in axis_groups(plan, axis))


def mesh_ranks(
    topology: Topology, ranks: Sequence[int], *, tensor: int, who: str = "the job"
) -> tuple[int, ...]:
    """The ranks in an order that keeps each tensor group inside a host.

    Args:
        topology: The cluster.
        ranks: Ranks of the job, in any order.
        tensor: GPUs that split every layer; a group larger than a host takes whole hosts.
        who: For the message.

    Returns:
        The ranks: host by host, in the order given.

    Raises:
        InfeasibleError: Tensor groups cannot be kept inside hosts.

    Examples:
        >>> from fivefold.network.topology import HostSpec, leaf_spine
        >>> two = leaf_spine(2, leaves=1, spines=1, host=HostSpec(gpus=4))
        >>> mesh_ranks(two, (0, 4, 1, 5), tensor=2)
        (0, 1, 4, 5)
    """
    if tensor == 1:
        return tuple(ranks)
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        host = topology.host_of(rank)
        hosts.setdefault(f"rank {rank}" if host is None else host, []).append(rank)
    sizes = {len(own) for own in hosts.values()}
    broken = [name for name, own in hosts.items() if len(own) % tensor]
    wide = len(sizes) == 1 and tensor % next(iter(sizes)) == 0  # whole hosts make a group
    if broken and not wide:
        fitting = max(d for d in range(1, tensor) if all(size % d == 0 for size in sizes))
        raise InfeasibleError(
            f"{who} would split layers over {tensor} GPUs, but has {len(hosts[broken[0]])} of "
            f"them on host {broken[0]!r}: a tensor group would lie across hosts",
            hint=f"split layers over {fitting}, or give it a multiple of {tensor} GPUs on each "
            "host",
        )
    return tuple(rank for own in hosts.values() for rank in own)
