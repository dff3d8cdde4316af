"""Jobs on a shared cluster: what each computes and reduces, where it runs, when it arrives.

A job may have several ways to split its model, as layer 1 hands them down. A split is one plan of
``fivefold.strategy`` laid on the job's ranks: position 0 of its mesh on the first rank, the tensor
axis innermost, so that tensor groups stay inside hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.errors import (
    ConfigurationError,
    InfeasibleError,
    require_number,
    require_whole,
)
from fivefold.network.topology import Topology
from fivefold.strategy import ParallelPlan
from fivefold.strategy.demand import axis_groups
from fivefold.tasks import LayerCost
from fivefold.tasks.iteration import IterationDemand


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to split a job."""

    name: str
    plan: ParallelPlan
    demand: IterationDemand
    ranks: tuple[int, ...]
    nominal_s: float
    memory_bytes: float
    reached: tuple[tuple[float, float], tuple[float, float]] = ((1.0, 1.0), (1.0, 1.0))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each group of an axis."""
        return groups_over(self.plan, axis, self.ranks)

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """Return the same as layers: compute of all micro-batches, and what is reduced once."""
        demand = self.demand
        reduced = sum(m.size_bytes for m in demand.messages if m.phase == "reduce")
        rest_s = (demand.bubble_s + demand.optimizer_s + demand.overhead_s) / demand.segments
        layer = LayerCost(
            forward_s=demand.micro_batches * demand.forward_s + rest_s,
            backward_s=demand.micro_batches * demand.backward_s,
            gradient_bytes=reduced,
        )
        return (layer,) * demand.segments


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job: data-parallel layers, or ways to split a model of which layer 1 chooses one.

    Args:
        job_id: Its name.
        ranks: Ranks of the topology that it runs on, in its own rank order.
        layers: What one rank computes and reduces per iteration, from input to output; taken from
            the first split where there are splits.
        iterations: How many it does.
        arrival_s: When it arrives.
        weight: How much a second of it counts.
        splits: Ways to split its model, layer 1's own favourite first; none for a job that is
            given by its layers.

    Raises:
        ConfigurationError: A value is not allowed.

    Examples:
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10**9)
        >>> job = JobSpec(job_id="a", ranks=(0, 1), layers=(layer,) * 2)
        >>> round(job.compute_s, 3), job.gradient_bytes
        (0.6, 2000000000)
    """

    job_id: str
    ranks: tuple[int, ...]
    layers: tuple[LayerCost, ...] = ()
    iterations: int = 1
    arrival_s: float = 0.0
    weight: float = 1.0
    splits: tuple[Split, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ranks", "layers", "splits"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.splits and not self.layers:
            object.__setattr__(self, "layers", self.splits[0].layers)
        who = f"job {self.job_id!r}"
        if not self.job_id or not self.ranks or not self.layers:
            raise ConfigurationError(f"{who} needs a name, ranks and layers", hint="give all three")
        if len(set(self.ranks)) != len(self.ranks):
            raise ConfigurationError(f"{who} names a rank twice", hint="each rank once")
        require_whole(f"iterations of {who}", self.iterations)
        require_number(f"weight of {who}", self.weight, positive=True)
        require_number(f"arrival_s of {who}", self.arrival_s)
        for split in self.splits:
            _check_ranks(split, self.ranks, who)
        if not self._takes_time():
            raise ConfigurationError(
                f"{who} takes no time: it neither computes nor sends anything to another rank",
                hint="give it compute, or gradients on two or more ranks",
            )

    def _takes_time(self) -> bool:
        sends = any(layer.gradient_bytes or layer.all_to_all_bytes for layer in self.layers)
        return self.compute_s > 0 or (sends and len(self.ranks) > 1) or bool(self.splits)

    def split_as(self, number: int) -> JobSpec:
        """Return the job as one of its splits has it; a job without splits as it is.

        Raises:
            ConfigurationError: There is no such split.
        """
        if not self.splits and number == 0:
            return self
        if require_whole("a split", number, least=0) >= len(self.splits):
            raise ConfigurationError(
                f"job {self.job_id!r} has no split {number}",
                hint=f"it has {len(self.splits)}, counted from 0",
            )
        return self if len(self.splits) == 1 else self._alone[number]

    @functools.cached_property
    def _alone(self) -> tuple[JobSpec, ...]:
        return tuple(
            replace(self, ranks=one.ranks, layers=one.layers, splits=(one,)) for one in self.splits
        )

    @property
    def mesh(self) -> Split | None:
        """Return the split that holds; None for a job that is given by its layers."""
        return self.splits[0] if self.splits else None

    @property
    def compute_s(self) -> float:
        """Return seconds of compute per iteration."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Return bytes that an iteration reduces."""
        return sum(layer.gradient_bytes for layer in self.layers)


def _check_ranks(split: Split, ranks: tuple[int, ...], who: str) -> None:
    if sorted(split.ranks) != sorted(ranks):
        raise ConfigurationError(
            f"{who} is split as {split.name!r} over other ranks than its own",
            hint="give every split the job's ranks, in the order of its mesh",
        )


def check_jobs(topology: Topology, jobs: Sequence[JobSpec]) -> None:
    """Refuse jobs that the cluster cannot run.

    Ranks may be shared by jobs: then they share links, and their compute runs side by side.
    """
    if not jobs:
        message = "there is no job"
        raise ConfigurationError(message, hint="give one or more jobs")
    names = [job.job_id for job in jobs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigurationError(
            f"two jobs are called {twice[0]!r}", hint="give each a name of its own"
        )
    for job in jobs:
        check_ranks(topology, job.job_id, job.ranks)


def check_ranks(topology: Topology, job_id: str, ranks: Sequence[int]) -> None:
    """Refuse ranks that the cluster does not have."""
    outside = [rank for rank in ranks if not 0 <= rank < topology.num_ranks]
    if outside:
        raise InfeasibleError(
            f"job {job_id!r} wants rank {outside[0]}, but {topology.name!r} has ranks 0 to "
            f"{topology.num_ranks - 1}",
            hint="give the job fewer ranks, or plan for a larger cluster",
        )


@functools.lru_cache(maxsize=4096)
def groups_over(
    plan: ParallelPlan, axis: str, ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group of an axis of a mesh that lies on some ranks."""
    return tuple(tuple(ranks[place] for place in group) for group in axis_groups(plan, axis))


def mesh_ranks(
    topology: Topology, ranks: Sequence[int], *, tensor: int, who: str = "the job"
) -> tuple[int, ...]:
    """Return the ranks in an order that keeps each tensor group inside a host."""
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
