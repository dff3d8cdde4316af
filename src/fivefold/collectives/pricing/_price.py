"""One question, three fidelities: how long a collective takes for a group, at a size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing.closed_form import collective_time_s
from fivefold.collectives.pricing.fabric import Group, fabric_from_topology
from fivefold.collectives.pricing.phases import (
    Phase,
    Tree,
    aggregation_tree,
    phases_time_s,
    ranks_by_host,
    tree_switches,
)
from fivefold.errors import ConfigurationError, InfeasibleError, require_number
from fivefold.network.topology import Topology

Pairs = npt.NDArray[np.int32]

if TYPE_CHECKING:
    from fivefold.collectives.schedules import Schedule

Fidelity = Literal["closed_form", "schedule", "simulation"]
_RAILS = "rings over all rails"
_ALGORITHMS = {
    "all_reduce": _RAILS,
    "all_gather": _RAILS,
    "reduce_scatter": _RAILS,
    "all_to_all": "pairwise",
}


def price_s(
    topology: Topology,
    kind: str,
    *,
    size_bytes: float,
    group: Group | None = None,
    fidelity: Fidelity = "closed_form",
    algorithm: str | None = None,
) -> float:
    """Return how long a collective takes for a group of ranks, with its sister groups at work.

    * ``"closed_form"``: tiers of the topology and NCCL's formulas, microseconds each. For searches;
      they ask `collective_time_s` with arrays, and with tiers that were measured. It takes a ring
      through every adapter of a node, and the faster of ring and tree for an all-reduce.
    * ``"schedule"``: the algorithm's transfers walked over the graph, each as soon as its chunk and
      its links are free (`evaluate`, slotted). For choosing and making algorithms: it sees which
      link each transfer takes, and how often messages wait for one another.
    * ``"simulation"``: the same transfers as flows that share links max-min fairly (`evaluate`,
      fluid). For what contends: sister groups, other jobs, links that several messages share.

    For large messages, on hosts that leave by one link, closed form and simulation of an
    all-gather, reduce-scatter or all-to-all are equal where groups divide a host or hold whole
    ones, and the walked schedule takes up to twice as long, where messages wait for one another.
    On hosts with an adapter per rank all three count on every adapter: each of the schedule's rings
    leaves a host by another rank. There walked schedule and simulation lie between 0.7 and 1.6
    times the closed form, an all-to-all walked up to 2.2 times. A ring's all-reduce takes up to
    twice the closed form, which may take a tree. For groups astride of hosts the closed form gives
    every member only its own share of the host's link, which is too little where sister groups
    leave theirs unused: up to the ranks of a host.

    Args:
        topology: The network, with as many ranks on every host.
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        size_bytes: The buffer, the gathered output, the input, or what one rank holds before an
            all-to-all.
        group: Who takes part; None for all ranks.
        fidelity: One of the three above.
        algorithm: What the schedule is built by; None for rings over every adapter of a host, or
            pairwise for an all-to-all.
            The closed form has no schedule: it is of those, whichever algorithm is named.
            ``"in_network"``: the best tree of aggregating switches over all ranks, for an
            all-reduce; its round trip, and the bytes at the least rate of links, adders and slots.

    Returns:
        Seconds; 0 for a group of one.

    Raises:
        ConfigurationError: There is no such kind, fidelity or algorithm, or the group does not fit.
        InfeasibleError: The topology is not connected, or no tree of switches can aggregate.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> network = switch(4, bandwidth="1 GB/s", latency="0 s")
        >>> price_s(network, "all_gather", size_bytes=4e9, fidelity="schedule")
        3.0
    """
    if kind not in _ALGORITHMS or fidelity not in get_args(Fidelity):
        raise ConfigurationError(
            f"there is no price of {kind!r} in the fidelity {fidelity!r}",
            hint=f"kinds are {', '.join(_ALGORITHMS)}; fidelities {', '.join(get_args(Fidelity))}",
        )
    require_number("size_bytes", size_bytes)
    if algorithm not in (None, "in_network"):  # a clear error, also where none is built
        from fivefold.collectives.algorithms import algorithm_named  # noqa: PLC0415 - compiles
        from fivefold.collectives.schedules import named_collective  # noqa: PLC0415 - compiles

        algorithm_named(algorithm, named_collective(kind, 2))
    who = Group(size=topology.num_ranks) if group is None else group
    ranks = who.size * who.stride if who.ranks is None else who.ranks
    if who.size < 2:
        return 0.0
    if not (who.size - 1) * who.stride < ranks <= topology.num_ranks:
        raise ConfigurationError(
            f"{who} does not fit into {topology.num_ranks} ranks",
            hint="size times stride, and ranks, are at most those of the topology",
        )
    if algorithm == "in_network":
        return _in_network_s(topology, kind, size_bytes, who, fidelity=fidelity)
    if fidelity == "closed_form":
        fabric = fabric_from_topology(topology, efficiency=1.0, base_s=0.0, hop_s=0.0)
        return collective_time_s(fabric, kind, size_bytes=size_bytes, group=who)
    from fivefold.collectives.schedules import evaluate  # noqa: PLC0415 - compiles, searches do not

    schedule = _of_all_groups(topology, kind, who, algorithm or _ALGORITHMS[kind])
    model: Literal["slotted", "fluid"] = "slotted" if fidelity == "schedule" else "fluid"
    return evaluate(schedule, topology, size_bytes=size_bytes, model=model).total_s


def _in_network_s(
    topology: Topology, kind: str, size_bytes: float, group: Group, *, fidelity: Fidelity
) -> float:
    """Return the time of an all-reduce of all ranks by the tree that is fastest alone."""
    if kind != "all_reduce" or group.size != topology.num_ranks or fidelity == "schedule":
        raise ConfigurationError(
            f"switches do not aggregate {kind} of {group.size} ranks as a {fidelity}",
            hint="ask for the all-reduce of all ranks, in closed form or as a simulation",
        )
    leaves = tuple(range(topology.num_ranks))
    pools = {s.node: s.aggregation.slots for s in topology.switches if s.aggregation is not None}
    found: list[tuple[float, Tree, int]] = []
    for root in pools:
        tree = aggregation_tree(topology, leaves, root)
        if tree is not None:
            slots = min(pools[name] for name in tree_switches(tree))
            phase = Phase(tuple((rank, rank) for rank in leaves), size_bytes, steps=1, tree=tree)
            time_s = phases_time_s(topology, [phase], route=lambda _: (), slots=slots)
            found.append((time_s, tree, slots))
    if not found:
        raise InfeasibleError(
            f"no tree of the {len(pools)} aggregating switches of {topology.name!r} joins all",
            hint="where branches meet, the switch must aggregate",
        )
    time_s, tree, slots = min(found)
    if fidelity == "closed_form":
        return time_s
    from fivefold.network.simulation import AggregationRequest, simulate  # noqa: PLC0415 - as above

    names = [topology.nodes[topology.node_of_rank(rank)].name for rank in leaves]
    request = AggregationRequest("sum", dict(tree), names, size_bytes, slots=slots)
    return simulate(topology, [request]).finish_of("sum")


def _rails(topology: Topology, groups: list[list[int]]) -> list[list[int]]:
    """Return for every group as many rings as its fewest members of a host, each over a share.

    Each ring leaves a host by another member, so that every adapter carries a share, as the closed
    form over tiers counts on. All groups have as many rings as the one with the fewest.
    """
    hosts = [ranks_by_host(topology, members) for members in groups]
    number = min(min(map(len, own)) if len(own) > 1 else len(own[0]) for own in hosts)
    if all(len(own) == 1 for own in hosts):
        number = 1
    return [
        [rank for own in group for rank in (*own[i % len(own) :], *own[: i % len(own)])]
        for group in hosts
        for i in range(number)
    ]


def _of_all_groups(topology: Topology, kind: str, group: Group, algorithm: str) -> Schedule:
    """Return the same algorithm in every group of an axis, side by side."""
    from fivefold.collectives.algorithms import build_algorithm  # noqa: PLC0415 - as above
    from fivefold.collectives.schedules import (  # noqa: PLC0415 - as above
        Collective,
        Schedule,
        named_collective,
    )

    ranks = group.size * group.stride if group.ranks is None else group.ranks
    first = np.arange(ranks)
    first = first[first // group.stride % group.size == 0]
    first = first[first + (group.size - 1) * group.stride < ranks]
    members = (first[:, None] + group.stride * np.arange(group.size)).astype(np.int32)
    if algorithm == _RAILS:  # each ring of each group, over a share of the data
        members = np.array(_rails(topology, members.tolist()), np.int32)
        algorithm = "ring"
    part = build_algorithm(algorithm, named_collective(kind, group.size))
    one, count = part.collective, len(members)
    chunks = np.arange(count, dtype=np.int32)[:, None] * np.int32(one.num_chunks)

    def side(own: Pairs, ranks_of: Pairs) -> tuple[Pairs, Pairs]:
        own, placed = (chunks + own).reshape(-1), members[:, ranks_of].reshape(-1)
        order = np.lexsort((placed, own))
        return own[order], placed[order]

    pre, post = side(one.pre_chunks, one.pre_ranks), side(one.post_chunks, one.post_ranks)
    collective = Collective(
        name="custom",
        num_ranks=topology.num_ranks,
        num_chunks=one.num_chunks * count,
        reducing=one.reducing,
        pre_chunks=pre[0],
        pre_ranks=pre[1],
        post_chunks=post[0],
        post_ranks=post[1],
    )
    messages = None
    if part.messages is not None:
        messages = part.num_messages * np.arange(count)[:, None] + part.messages
    return Schedule(
        collective=collective,
        messages=None if messages is None else messages.reshape(-1),
        chunks=(chunks + part.chunks).reshape(-1),
        sources=members[:, part.sources].reshape(-1),
        targets=members[:, part.targets].reshape(-1),
        reduces=np.tile(part.reduces, count),
        steps=np.tile(part.steps, count),
        topology=topology,
        name=algorithm,
    )
