"""What a collective of a job puts on the network: phases of flows that end together.

A ring, a hierarchy and a tree of summing switches, each as bytes per edge and steps of latency.
These are the closed forms of the algorithms in ``fivefold.collectives`` (a test compares them with
the schedules), without an object per chunk, so that hundreds of jobs can be simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import JobPlan
from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology

__all__ = ["Phase", "aggregation_tree", "host_groups", "phases_of"]


@dataclass(frozen=True)
class Phase:
    """Flows that one step of a collective keeps going at one rate.

    Attributes:
        edges: Source and target rank of each flow.
        edge_bytes: Bytes of each.
        steps: How often the route's latency is paid.
        tree: Parent of each node of an aggregation tree; None for flows between ranks.
        coupled: Whether the slowest edge holds the others back.

    Example:
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
        kind: ``"all_reduce"`` or ``"all_to_all"``.
        size_bytes: The buffer; for all-to-all what one rank sends, its own share included.

    Returns:
        The phases; none where there is nobody to talk to, or nothing to say.

    Raises:
        InfeasibleError: The plan's algorithm is not possible on these ranks.

    Example:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2)
        >>> job = JobSpec(job_id="a", ranks=(0, 1, 2), layers=(layer,))
        >>> plan = JobPlan(order=(0, 1, 2))
        >>> phases_of(switch(3), job, plan, kind="all_reduce", size_bytes=3e9)[0][0].edge_bytes
        4000000000.0
    """
    number = len(job.ranks)
    if number == 1 or size_bytes == 0:
        return []
    if kind == "all_to_all":
        pairs = tuple((a, b) for a in plan.order for b in plan.order if a != b)
        return [[Phase(pairs, size_bytes / number, steps=1, coupled=False)]]
    if plan.algorithm == "ring":
        return [[_ring(plan.order, 2 * size_bytes, rounds=2)]]
    groups = host_groups(topology, plan.order)
    if groups is None:
        raise InfeasibleError(
            f"job {job.job_id!r} has not the same number of ranks on each host",
            hint="use the ring there",
        )
    local = len(groups[0])
    inside = [_ring(group, size_bytes, rounds=1) for group in groups] if local > 1 else []
    columns = [tuple(group[place] for group in groups) for place in range(local)]
    if plan.algorithm == "hierarchical":
        across = [
            _ring(column, 2 * size_bytes / local, rounds=2) for column in columns if len(column) > 1
        ]
    else:
        across = [_tree_phase(topology, column, plan, size_bytes / local) for column in columns]
    return [phase for phase in (inside, across, inside) if phase]


def host_groups(topology: Topology, ranks: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Ranks by host, in order of first appearance; None where hosts have different numbers."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        host = topology.host_of(rank)
        groups.setdefault(host if host is not None else f"rank {rank}", []).append(rank)
    if len({len(group) for group in groups.values()}) != 1:
        return None
    return [tuple(group) for group in groups.values()]


def aggregation_tree(
    topology: Topology, leaves: Sequence[int], root: str
) -> tuple[tuple[str, str], ...] | None:
    """Child and parent of each node of the tree of shortest paths to a root.

    Args:
        topology: The cluster.
        leaves: Ranks that contribute.
        root: The switch where the sum is made last.

    Returns:
        The edges; None where a node at which streams meet cannot sum, or there is no way.

    Example:
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


def _tree_phase(
    topology: Topology, leaves: Sequence[int], plan: JobPlan, size_bytes: float
) -> Phase:
    assert plan.root is not None, "checked by the plan"
    tree = aggregation_tree(topology, leaves, plan.root)
    if tree is None:
        raise InfeasibleError(
            f"switch {plan.root!r} cannot sum for ranks {tuple(leaves)}",
            hint="choose another root, or a host algorithm",
        )
    return Phase(tuple((rank, rank) for rank in leaves), size_bytes, steps=1, tree=tree)
