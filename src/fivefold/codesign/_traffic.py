"""What a collective of a job puts on the network: phases of flows that end together.

A ring, a hierarchy and a tree of summing switches, each as bytes per edge and steps of latency.
These are the closed forms of the algorithms in ``fivefold.collectives`` (a test compares them with
the schedules), without an object per chunk, so that hundreds of jobs can be simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import JobPlan
from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology

SUMMED_AXES = {"", "data"}
"""Axes over which switches may sum; the empty one stands for all ranks of a job."""


@dataclass(frozen=True)
class Phase:
    """Flows that one step of a collective keeps going at one rate.

    Attributes:
        edges: Source and target rank of each flow.
        edge_bytes: Bytes of each.
        steps: How often the route's latency is paid.
        tree: Parent of each node of an aggregation tree; None for flows between ranks.
        coupled: Whether the slowest edge holds the others back.

    Examples:
        >>> Phase(((0, 1), (1, 0)), 1e9, steps=2).coupled
        True
    """

    edges: tuple[tuple[int, int], ...]
    edge_bytes: float
    steps: int
    tree: tuple[tuple[str, str], ...] | None = None
    coupled: bool = True


def phases_of(
    topology: Topology, job: JobSpec, plan: JobPlan, *, kind: str, size_bytes: float
) -> list[list[Phase]]:
    """The phases of one collective, one after the other; those of one entry run side by side.

    Args:
        topology: The cluster.
        job: The job.
        plan: Its plan.
        kind: ``"all_reduce"``, ``"all_to_all"`` and so on; of a split job followed by ``" over "``
            and the axis.
        size_bytes: The buffer; for all-to-all what one rank sends, its own share included.

    Returns:
        The phases; none where there is nobody to talk to, or nothing to say.

    Raises:
        InfeasibleError: The plan's algorithm is not possible on these ranks.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2)
        >>> job = JobSpec(job_id="a", ranks=(0, 1, 2), layers=(layer,))
        >>> plan = JobPlan(order=(0, 1, 2))
        >>> phases_of(switch(3), job, plan, kind="all_reduce", size_bytes=3e9)[0][0].edge_bytes
        4000000000.0
    """
    if size_bytes == 0:
        return []
    chosen = job.split_as(plan.split)
    collective, _, axis = kind.partition(" over ")
    if collective in {"send", "return"}:
        sent = _sent(chosen, axis, size_bytes, back=collective == "return")
        return _at_reached_rate(topology, chosen, sent, exchange=True)
    found: list[list[list[Phase]]] = []
    trees = 0
    for group in job_groups(chosen, plan, axis):
        if len(group) == 1:
            continue
        if collective == "all_to_all":
            pairs = tuple((a, b) for a in group for b in group if a != b)
            found.append([[Phase(pairs, size_bytes / len(group), steps=1, coupled=False)]])
            continue
        how = _Collective(topology, chosen, plan, collective, size_bytes)
        found.append(how.phases(group, sums=axis in SUMMED_AXES, first_tree=trees))
        if plan.algorithm == "in_network" and axis in SUMMED_AXES:
            trees += len((host_groups(topology, group) or [()])[0])
    steps = max(map(len, found), default=0)
    joint = [[phase for own in found if i < len(own) for phase in own[i]] for i in range(steps)]
    return _at_reached_rate(topology, chosen, joint, exchange=collective == "all_to_all")


def _at_reached_rate(
    topology: Topology, job: JobSpec, steps: list[list[Phase]], *, exchange: bool
) -> list[list[Phase]]:
    """Phases with as many bytes as take the time at the link's rate that they take in truth."""
    if job.mesh is None:
        return steps
    inside, across = (reached[exchange] for reached in job.mesh.reached)
    if inside == across == 1.0:
        return steps

    def slowed(phase: Phase) -> Phase:
        hosts = ((topology.host_of(a), topology.host_of(b)) for a, b in phase.edges)
        far = phase.tree is not None or any(a is None or a != b for a, b in hosts)
        return dataclasses.replace(phase, edge_bytes=phase.edge_bytes / (across if far else inside))

    return [[slowed(phase) for phase in phases] for phases in steps]


def job_groups(job: JobSpec, plan: JobPlan, axis: str) -> tuple[tuple[int, ...], ...]:
    """The groups that run a collective side by side, each in the order of the plan's ring.

    Args:
        job: The job, as its split has it.
        plan: Its plan.
        axis: Axis of the split's mesh; empty for all ranks together.
    """
    if not axis or job.mesh is None:
        return (plan.order,)
    place = {rank: number for number, rank in enumerate(plan.order)}
    groups = job.mesh.groups(axis)
    return tuple(tuple(sorted(group, key=place.__getitem__)) for group in groups)


def summed_columns(topology: Topology, job: JobSpec, plan: JobPlan) -> list[tuple[int, ...]] | None:
    """Ranks that a tree of switches would sum, tree by tree; None where hosts differ.

    Inside a host ranks sum first, so a tree has one rank per host.
    """
    chosen = job.split_as(plan.split)
    axis = "data" if chosen.mesh is not None else ""
    if chosen.mesh is not None and not any(
        m.axis == "data" and m.kind == "all_reduce" for m in chosen.mesh.demand.messages
    ):
        return None
    found: list[tuple[int, ...]] = []
    for group in job_groups(chosen, plan, axis):
        hosts = host_groups(topology, group)
        if hosts is None or len(hosts) == 1:
            return None
        found += [tuple(own[place] for own in hosts) for place in range(len(hosts[0]))]
    return found


@dataclass(frozen=True)
class _Collective:
    """How one reduction of a job runs."""

    topology: Topology
    job: JobSpec
    plan: JobPlan
    kind: str
    size_bytes: float

    def phases(self, group: tuple[int, ...], *, sums: bool, first_tree: int) -> list[list[Phase]]:
        """Steps of one group.

        Raises:
            InfeasibleError: The plan's algorithm is not possible on these ranks.
        """
        rounds = 2 if self.kind == "all_reduce" else 1
        algorithm = self.plan.algorithm
        if algorithm == "in_network" and not (sums and rounds == 2):
            algorithm = "hierarchical"
        hosts = host_groups(self.topology, group)
        if algorithm == "ring" and self.job.mesh is not None and hosts is not None:
            return [_rings(hosts, rounds * self.size_bytes, rounds=rounds)]
        if algorithm == "ring" or hosts is None:
            if algorithm != "ring" and self.job.mesh is None:
                raise InfeasibleError(
                    f"job {self.job.job_id!r} has not the same number of ranks on each host",
                    hint="use the ring there",
                )
            return [[_ring(group, rounds * self.size_bytes, rounds=rounds)]]
        return self._by_host(hosts, algorithm, rounds, first_tree)

    def _by_host(
        self, hosts: list[tuple[int, ...]], algorithm: str, rounds: int, first_tree: int
    ) -> list[list[Phase]]:
        local = len(hosts[0])
        inside = [_ring(own, self.size_bytes, rounds=1) for own in hosts] if local > 1 else []
        columns = [tuple(own[place] for own in hosts) for place in range(local)]
        share = self.size_bytes / local
        if len(hosts) == 1:
            across = []
        elif algorithm == "hierarchical":
            across = [_ring(column, rounds * share, rounds=rounds) for column in columns]
        else:
            across = [
                _tree_phase(self.topology, column, self.plan.root_of(first_tree + i), share)
                for i, column in enumerate(columns)
            ]
        steps = {
            "reduce_scatter": (inside, across),
            "all_gather": (across, inside),
        }.get(self.kind, (inside, across, inside))
        return [step for step in steps if step]


def _sent(job: JobSpec, axis: str, size_bytes: float, *, back: bool) -> list[list[Phase]]:
    """Every stage to the next one, or to the one before."""
    if job.mesh is None:
        return []
    chains = job.mesh.groups(axis)
    edges = tuple(
        (b, a) if back else (a, b) for chain in chains for a, b in itertools.pairwise(chain)
    )
    return [[Phase(edges, size_bytes, steps=1, coupled=False)]] if edges else []


def host_groups(topology: Topology, ranks: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Ranks by host, in order of first appearance; None where hosts have different numbers."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        host = topology.host_of(rank)
        groups.setdefault(host if host is not None else f"rank {rank}", []).append(rank)
    if len({len(group) for group in groups.values()}) != 1:
        return None
    return [tuple(group) for group in groups.values()]


@functools.lru_cache(maxsize=1 << 14)
def aggregation_tree(
    topology: Topology, leaves: tuple[int, ...], root: str
) -> tuple[tuple[str, str], ...] | None:
    """Child and parent of each node of the tree of shortest paths to a root.

    Args:
        topology: The cluster.
        leaves: Ranks that contribute.
        root: The switch where the sum is made last.

    Returns:
        The edges; None where a node at which streams meet cannot sum, or there is no way.

    Examples:
        >>> from fivefold.network.topology import Aggregation, SwitchAbility, Topology, switch
        >>> plain = switch(2)
        >>> able = SwitchAbility("switch0", aggregation=Aggregation(slots=8, slot_bytes=256))
        >>> summing = Topology("s", plain.nodes, plain.links, switches=[able])
        >>> aggregation_tree(summing, (0, 1), "switch0")
        (('gpu0', 'switch0'), ('gpu1', 'switch0'))
    """
    parents = _toward(topology, topology.index(root), {topology.node_of_rank(r) for r in leaves})
    tree: dict[str, str] = {}
    for rank in leaves:
        node = topology.node_of_rank(rank)
        while topology.nodes[node].name != root:
            if node not in parents:
                return None
            above = parents[node]
            tree[topology.nodes[node].name] = topology.nodes[above].name
            node = above
    # A node with one child, such as a NIC, only passes on.
    streams = Counter(tree.values())
    summing = {root, *(name for name, number in streams.items() if number > 1)}
    if any(topology.ability_of(name).aggregation is None for name in summing):
        return None
    return tuple(sorted(tree.items()))


def _toward(topology: Topology, root: int, wanted: set[int]) -> dict[int, int]:
    """The next node on a shortest way to the root, by links that exist both ways."""
    parents: dict[int, int] = {}
    frontier, missing = [root], wanted - {root}
    while frontier and missing:
        further = []
        for node in frontier:
            out = {int(topology.link_targets[link]) for link in topology.out_links(node)}
            for link in topology.in_links(node):
                child = int(topology.link_sources[link])
                if child != root and child not in parents and child in out:
                    parents[child] = node
                    missing.discard(child)
                    if not topology.is_rank[child]:  # ranks do not forward
                        further.append(child)
        frontier = further
    return parents


def _ring(order: Sequence[int], sent_bytes: float, *, rounds: int) -> Phase:
    """Every rank passes on all but its own share: once to scatter, once to gather."""
    number = len(order)
    edges = tuple((order[i], order[(i + 1) % number]) for i in range(number))
    return Phase(edges, sent_bytes * (number - 1) / number, steps=rounds * (number - 1))


def _rings(hosts: list[tuple[int, ...]], sent_bytes: float, *, rounds: int) -> list[Phase]:
    """As many rings as a host has members, each leaving it by another one, as NCCL's channels do.

    So all ports of a host carry a share, as layer 1 counts on.
    """
    local, number = len(hosts[0]), len(hosts) * len(hosts[0])
    if local == 1 or len(hosts) == 1:
        return [_ring([rank for own in hosts for rank in own], sent_bytes, rounds=rounds)]
    passed = sent_bytes * (number - 1) / number / local
    inside = tuple((own[i], own[(i + 1) % local]) for own in hosts for i in range(local))
    across = tuple(
        (own[i - 1], further[i])
        for own, further in zip(hosts, (*hosts[1:], hosts[0]), strict=True)
        for i in range(local)
    )
    return [
        Phase(inside, passed * (local - 1), steps=rounds * (number - len(hosts))),
        Phase(across, passed, steps=rounds * (len(hosts) - 1)),
    ]


def _tree_phase(topology: Topology, leaves: Sequence[int], root: str, size_bytes: float) -> Phase:
    tree = aggregation_tree(topology, tuple(leaves), root)
    if tree is None:
        raise InfeasibleError(
            f"switch {root!r} cannot sum for ranks {tuple(leaves)}",
            hint="choose another root, or a host algorithm",
        )
    return Phase(tuple((rank, rank) for rank in leaves), size_bytes, steps=1, tree=tree)
