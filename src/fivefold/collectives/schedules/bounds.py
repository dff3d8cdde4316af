"""Times that no schedule can beat, each with the reason why.

Latency of the shortest way; bytes that come from afar, or one's news through a few ports; bytes
that must cross a cut over its capacity; 2 (k - 1) messages for
each byte of an all-reduce among k groups; whole chunks where a link takes one at a time.
References: SCCL, arXiv 2008.08708, section 3; ForestColl, arXiv 2402.06787, section 4; Patarasuk
and Yuan, J. Parallel Distrib. Comput. 69(2), 2009 (the all-reduce).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules.arrays import Array, Floats, Longs
from fivefold.collectives.schedules.schedule import require_match
from fivefold.collectives.schedules.throughput import throughput_optimum
from fivefold.network.topology import Topology
from fivefold.units import format_bytes

# Collectives whose throughput optimum is a cut.
_OPTIMAL = ("all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "gather")
_EXACT_WORK = 15_000_000  # ranks times arcs up to which max-flows are run unasked
_ALL_CUTS = 12  # nodes up to which all cuts are tried
_MOST_SWEPT = 20_000_000  # pairs of neighbours times size of the network that are swept
_LOOKS = 8  # how far two links are compared
_MOST_PAIRS = 4_000_000  # chunks times receivers whose distances are sorted
_MOST_FAR = 1024  # ranks between which all distances are looked up
_TO_ALL = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
)  # in which one rank's part reaches every other, or every other's part one rank
_MOST_LEVELS = 16  # latencies below which cuts are looked for
# The throughput optima by cuts whose worst cut is that of a collective.
_FLOWS = {name: (name,) for name in _OPTIMAL} | {"all_reduce": ("broadcast", "reduce")}


def _require_match(collective: Collective, topology: Topology) -> None:
    require_match(collective, topology)
    topology.require_connected()


def latency_bound(collective: Collective, topology: Topology) -> Bound:
    """Return the largest latency from where a chunk starts to where it must be."""
    _require_match(collective, topology)
    ranks, names, router = topology.rank_nodes, topology.ranks, topology.router
    most, ends_of = 0, (-1, -1)
    for starts, ends, from_all in _kinds_of_chunks(collective):
        ticks = np.full(ends.size, -1 if from_all else np.iinfo(np.int64).max)
        origin = np.zeros(ends.size, dtype=np.int64)
        for start in starts.tolist():
            away = router.distances(start)[0][ranks[ends]]
            better = away > ticks if from_all else away < ticks
            ticks[better], origin[better] = away[better], start
        far = int(np.argmax(ticks))
        if ticks[far] > most:
            most, ends_of = int(ticks[far]), (int(origin[far]), int(ends[far]))
    if not most:
        return NO_BOUND
    first, last = ends_of
    return Bound(
        seconds=router.seconds(most),
        kind="latency",
        certificate=(int(ranks[first]), int(ranks[last])),
        reason=f"the shortest way from {names[first]} to {names[last]} takes so long",
    )


def _kinds_of_chunks(collective: Collective) -> Iterator[tuple[Longs, Longs, bool]]:
    """Yield where chunks start and must end, each once, and whether all starts must reach all."""
    if collective.name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        yield np.arange(collective.num_ranks), np.arange(collective.num_ranks), True
        return
    seen = set()
    for chunk in range(collective.num_chunks):
        starts, ends = collective.holders(chunk), collective.receivers(chunk)
        key = (starts.tobytes(), ends.tobytes())
        if key not in seen and starts.size and ends.size:
            seen.add(key)
            yield starts.astype(np.int64), ends.astype(np.int64), collective.reducing


def ends_bound(collective: Collective, topology: Topology, size_bytes: float) -> Bound:
    """Return when a rank can have received what comes from farthest, or sent what goes farthest.

    What comes from afar enters by the rank's links after its latency, however it travels.
    """
    _require_match(collective, topology)
    chunk_bytes, num_ranks = collective.chunk_bytes(size_bytes), collective.num_ranks
    few = collective.post_chunks.size <= _MOST_PAIRS and num_ranks <= _MOST_FAR
    whole = collective.name == "all_reduce"
    if num_ranks < 2 or not few:
        return NO_BOUND
    if collective.reducing and collective.single_target and not whole:
        found = ends_bound(collective.inverted(), topology.reversed(), size_bytes)
        return replace(found, certificate=found.certificate[::-1])
    if not whole and (collective.reducing or not collective.single_source):
        return NO_BOUND
    node_ticks = [topology.router.distances(rank)[0] for rank in range(num_ranks)]
    away_s = topology.router.seconds(1) * np.array(node_ticks)[:, topology.rank_nodes]
    ranks = np.arange(num_ranks)
    if whole:  # every rank's part of every byte enters every other one
        total = np.full(num_ranks, chunk_bytes.sum())
        sides = [
            (ranks, away_s.max(axis=0), total, away_s.argmax(axis=0)),
            (ranks, away_s.max(axis=1), total, away_s.argmax(axis=1)),
        ]
    else:
        owner = np.full(collective.num_chunks, -1)
        owner[collective.pre_chunks] = collective.pre_ranks
        chunks, ends = collective.post_chunks, collective.post_ranks
        fine = owner[chunks] != ends
        chunks, ends = chunks[fine], ends[fine]
        far_s = away_s[owner[chunks], ends]
        order = np.lexsort((far_s, chunks))  # the last of each chunk goes farthest
        last = order[np.diff(chunks[order], append=-1) != 0]
        sides = [
            (ends, far_s, chunk_bytes[chunks], owner[chunks]),
            (owner[chunks[last]], far_s[last], chunk_bytes[chunks[last]], ends[last]),
        ]
    best = NO_BOUND
    for side, (own, far_s, carried, others) in enumerate(sides):
        if not own.size:
            continue
        ports = topology.link_sources if side else topology.link_targets
        rates = np.bincount(ports, topology.capacities_bytes_per_s, topology.num_nodes)
        rates = rates[topology.rank_nodes]
        order = np.lexsort((-far_s, own))
        running = np.cumsum(carried[order])
        begins = np.flatnonzero(np.append(True, own[order][1:] != own[order][:-1]))
        before = np.repeat(running[begins] - carried[order][begins], np.diff([*begins, own.size]))
        seconds = far_s[order] + (running - before) / rates[own[order]]
        if seconds.max() <= best.seconds:
            continue
        at = int(np.argmax(seconds))
        rank, other = int(own[order][at]), int(others[order][at])
        ends_of = (rank, other) if side else (other, rank)
        best = Bound(
            seconds=float(seconds[at]),
            kind="ends",
            certificate=tuple(int(topology.rank_nodes[end]) for end in ends_of),
            reason=(
                f"{format_bytes(running[at] - before[at])} must "
                f"{'leave' if side else 'reach'} {topology.ranks[rank]}, and "
                f"{'go as far as' if side else 'come from as far as'} {topology.ranks[other]}"
            ),
        )
    return best


def rounds_bound(collective: Collective, topology: Topology) -> Bound:
    """Return how long one rank's news takes to all others, if each tells one after the other.

    It holds in the serial model, where a message keeps a port busy for the latency of its way: with
    p ports, the ranks that know something grow by a factor of p + 1 in each such time.
    """
    _require_match(collective, topology)
    copying = any(one.multicast or one.aggregation is not None for one in topology.switches)
    if collective.num_ranks < 2 or collective.name not in _TO_ALL or copying:
        return NO_BOUND
    latency_s = float(topology.rank_graph.latencies_s.min())
    if latency_s <= 0:
        return NO_BOUND
    rounds = []
    for ends in (topology.link_sources, topology.link_targets):
        ports, known = int(np.bincount(ends[topology.is_rank[ends]]).max()), 1
        rounds.append(0)
        while known < collective.num_ranks:
            known, rounds[-1] = known * (ports + 1), rounds[-1] + 1
    one_way = {"broadcast": rounds[0], "scatter": rounds[0], "reduce": rounds[1]}
    least = one_way.get(collective.name, rounds[1] if collective.name == "gather" else max(rounds))
    return Bound(
        seconds=least * latency_s,
        kind="rounds",
        reason=f"one rank and {collective.num_ranks - 1} others are {least} rounds of messages "
        "apart, with all ports in use",
    )


def bandwidth_bound(
    collective: Collective, topology: Topology, size_bytes: float, *, exact: bool | None = None
) -> Bound:
    """Return the largest time that the bytes across some cut take; names and order do not matter.

    Every cut is tried in networks of up to 12 nodes. In larger ones the worst is found by max-flows
    for those collectives whose cuts are those of a flow (``exact``: whether; None for where they
    take seconds); for the others single ranks, hosts and the two sides of links are tried.
    """
    _require_match(collective, topology)
    if collective.num_ranks < 2:
        return NO_BOUND
    chunk_bytes = collective.chunk_bytes(size_bytes)
    work = topology.num_ranks * (topology.num_links + topology.num_ranks)
    by_flows = work <= _EXACT_WORK if exact is None else exact
    if topology.num_nodes <= _ALL_CUTS:
        candidates = [_worst_of_all_cuts(collective, topology, chunk_bytes)]
    elif by_flows and collective.has_equal_chunks and collective.name in _FLOWS:
        candidates = [*_exact_cuts(collective, topology, chunk_bytes)]
    else:
        candidates = [*_group_cuts(collective, topology, chunk_bytes)]
        candidates += _sweep_cuts(collective, topology, chunk_bytes)
    candidates.append(_message_bound(collective, topology, size_bytes))
    return max(candidates, key=lambda bound: bound.seconds)


def _message_bound(collective: Collective, topology: Topology, size_bytes: float) -> Bound:
    """Bound an all-reduce of k groups by 2 (k - 1) messages a byte, unless switches aggregate."""
    adding = any(switch.aggregation is not None for switch in topology.switches)
    if collective.name != "all_reduce" or adding:
        return NO_BOUND
    copying = any(switch.multicast for switch in topology.switches)
    best = NO_BOUND
    for _, count, nodes in _groupings(topology):
        if count < 2:
            continue
        into, out_of = _group_capacities(topology, nodes, count)
        # Where a switch copies, one message out may be several in.
        total = float(into.sum() if copying else min(into.sum(), out_of.sum()))
        seconds = 2 * (count - 1) * size_bytes / total if total > 0 else 0.0
        if seconds > best.seconds:
            best = Bound(
                seconds=seconds,
                kind="messages",
                reason=f"each byte needs 2 x {count - 1} messages among {count} groups, "
                f"which send {format_bytes(total)}/s together",
            )
    return best


def discrete_ingress_bound(collective: Collective, topology: Topology, size_bytes: float) -> Bound:
    """Return when whole chunks can have entered, and left, every rank (serial model).

    It holds for schedules of just this collective's chunks, each a message of its own, whose links
    take one at a time.
    """
    _require_match(collective, topology)
    chunk_bytes = collective.chunk_bytes(size_bytes)
    if collective.num_ranks < 2 or not collective.has_equal_chunks or not chunk_bytes.size:
        return NO_BOUND
    everyone = np.arange(collective.num_ranks)
    traffic = _group_traffic(collective, chunk_bytes, everyone, num_groups=everyone.size)
    lasts_s = topology.latencies_s + chunk_bytes[0] / topology.capacities_bytes_per_s
    best = NO_BOUND
    sides = ((traffic[2], topology.in_links, "enter"), (traffic[3], topology.out_links, "leave"))
    for counts, links_of, verb in sides:
        for rank in np.flatnonzero(counts):
            node = int(topology.rank_nodes[rank])
            seconds = _whole_chunks_s(lasts_s[links_of(node)], int(counts[rank]))
            if seconds > best.seconds:
                best = Bound(
                    seconds=seconds,
                    kind="chunks",
                    certificate=(node,),
                    reason=f"{counts[rank]} whole chunks must {verb} {topology.ranks[rank]}",
                )
    return best


def _whole_chunks_s(lasts_s: Floats, count: int) -> float:
    """Return the least T with sum of floor(T / lasts) >= count."""
    if not lasts_s.size or float(lasts_s.min()) <= 0:
        return 0.0
    done = np.floor(count / np.sum(1 / lasts_s) / lasts_s * (1 + 1e-12))
    while True:
        seconds = float((done * lasts_s).max())
        missing = count - int(done.sum())
        if missing <= 0:
            return seconds
        done[int(np.argmin((done + 1) * lasts_s))] += 1


def lower_bound(
    collective: Collective, topology: Topology, size_bytes: float, *, exact: bool | None = None
) -> Bound:
    """Return the best of the bounds.

    Args:
        collective: The collective.
        topology: The network.
        size_bytes: Size of the collective.
        exact: As in `bandwidth_bound`.

    Raises:
        ConfigurationError: The two have different numbers of ranks.
        InfeasibleError: The topology is not connected.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> network = ring(8, bandwidth="1 GB/s", latency="1 us")
        >>> [lower_bound(all_gather(8), network, size).kind for size in (8, 8e9)]
        ['ends', 'cut']
    """
    found = [
        latency_bound(collective, topology),
        bandwidth_bound(collective, topology, size_bytes, exact=exact),
        ends_bound(collective, topology, size_bytes),
    ]
    return max(found, key=lambda bound: bound.seconds)


BoundKind = Literal["none", "latency", "ends", "rounds", "cut", "messages", "chunks"]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A time that no schedule of a collective can beat."""

    seconds: float
    kind: BoundKind
    certificate: tuple[int, ...] = field(default=(), repr=False)
    reason: str = ""
    optimal_cut: bool = False


NO_BOUND = Bound(seconds=0.0, kind="none", reason="nothing has to move")


def _cut_bound(
    topology: Topology, inside: Array, crossing_bytes: float, *, optimal: bool = False,
    latency_s: float | None = None,
) -> Bound:  # fmt: skip
    """Return the bound of one set of nodes, given what must leave it; latency None: its least."""
    links = inside[topology.link_sources] & ~inside[topology.link_targets]
    capacity = float(topology.capacities_bytes_per_s[links].sum())
    if crossing_bytes <= 0 or capacity <= 0:
        return NO_BOUND
    latency_s = float(topology.latencies_s[links].min()) if latency_s is None else latency_s
    seconds = crossing_bytes / capacity + latency_s
    few, side = (inside, "out of") if 2 * inside.sum() <= inside.size else (~inside, "into")
    names = [topology.nodes[node].name for node in np.flatnonzero(few & topology.is_rank)[:3]]
    more = int((few & topology.is_rank).sum()) - len(names)
    return Bound(
        seconds=seconds,
        kind="cut",
        certificate=tuple(int(node) for node in np.flatnonzero(inside)),
        reason=(
            f"{format_bytes(crossing_bytes)} must go {side} {', '.join(names)}"
            f"{f' and {more} more' if more else ''} at {format_bytes(capacity)}/s"
        ),
        optimal_cut=optimal,
    )


def _groupings(topology: Topology) -> Iterator[tuple[Array, int, Array]]:
    """Return the groups of ranks and the nodes of each group: single ranks, then hosts."""
    nodes = np.full(topology.num_nodes, -1, dtype=np.int64)
    nodes[topology.rank_nodes] = np.arange(topology.num_ranks)
    yield np.arange(topology.num_ranks), topology.num_ranks, nodes
    hosts = [node.host or "" for node in topology.nodes]
    numbers = {host: index for index, host in enumerate(topology.hosts)}
    groups = np.array([numbers.get(hosts[node], -1) for node in topology.rank_nodes])
    if 1 < len(numbers) < topology.num_ranks and (groups >= 0).all():
        with_switches = np.array([numbers.get(host, -1) for host in hosts])
        yield groups, len(numbers), with_switches
        yield groups, len(numbers), np.where(topology.is_rank, with_switches, -1)


def _group_capacities(topology: Topology, nodes: Array, count: int) -> tuple[Floats, Floats]:
    """Return the capacity of the links into and out of each group of nodes; -1 is no group."""
    first, last = nodes[topology.link_sources], nodes[topology.link_targets]
    crossing, capacities = first != last, topology.capacities_bytes_per_s
    entering, leaving = crossing & (last >= 0), crossing & (first >= 0)
    into = np.bincount(last[entering], capacities[entering], count)
    out_of = np.bincount(first[leaving], capacities[leaving], count)
    return into.astype(np.float64), out_of.astype(np.float64)


def _group_cuts(collective: Collective, topology: Topology, chunk_bytes: Floats) -> Iterator[Bound]:
    for groups, count, nodes in _groupings(topology):
        if count < 2:
            continue
        traffic = _group_traffic(collective, chunk_bytes, groups, num_groups=count)
        capacities = _group_capacities(topology, nodes, count)
        first, last = nodes[topology.link_sources], nodes[topology.link_targets]
        for carried, capacity, ends in zip(traffic[:2], capacities, (last, first), strict=True):
            crossing = (first != last) & (ends >= 0)
            latency_s = np.full(count, np.inf)
            np.minimum.at(latency_s, ends[crossing], topology.latencies_s[crossing])
            seconds = _cut_seconds(carried, capacity, latency_s)
            worst = int(np.argmax(seconds))
            members = nodes == worst
            inside = ~members if ends is last else members
            yield _cut_bound(topology, inside, float(carried[worst]))


def _cut_seconds(carried: Floats, capacity: Floats, latency_s: Floats) -> Floats:
    """Return how long each of many cuts takes; 0 where nothing can or must cross."""
    fine = (carried > 0) & (capacity > 0)
    seconds = np.divide(carried, capacity, out=np.zeros(carried.size), where=fine)
    return seconds + np.where(fine, latency_s, 0.0)


def _worst_of_all_cuts(collective: Collective, topology: Topology, chunk_bytes: Floats) -> Bound:
    """Return the bound of the worst of all sets of nodes."""
    sets = np.arange(1, 2**topology.num_nodes - 1)
    sides = [(sets >> node & 1).astype(np.bool_) for node in range(topology.num_nodes)]
    carried = np.zeros(sets.size)
    kinds: dict[tuple[int, int], float] = {}
    for chunk, size_bytes in enumerate(chunk_bytes):
        nodes = topology.rank_nodes
        key = (_bits(nodes[collective.holders(chunk)]), _bits(nodes[collective.receivers(chunk)]))
        kinds[key] = kinds.get(key, 0.0) + float(size_bytes)
    for (starts, ends), size_bytes in kinds.items():
        held = sets & starts
        leaves = held != 0 if collective.reducing else (held == starts) & (starts != 0)
        carried[leaves & (sets & ends != ends)] += size_bytes
    capacity, latency_s = np.zeros(sets.size), np.full(sets.size, np.inf)
    for link in range(topology.num_links):
        crosses = sides[topology.link_sources[link]] & ~sides[topology.link_targets[link]]
        capacity[crosses] += topology.capacities_bytes_per_s[link]
        latency_s[crosses] = np.minimum(latency_s[crosses], topology.latencies_s[link])
    seconds = _cut_seconds(carried, capacity, latency_s)
    alike = np.flatnonzero(seconds >= seconds.max() * (1 - 1e-12))
    inside = np.stack([side[alike] for side in sides], axis=1)
    few = np.minimum(inside.sum(axis=1), (~inside).sum(axis=1))  # the plainest says why
    worst = alike[np.flatnonzero(few == few.min())[-1]]
    optimal = collective.name in _OPTIMAL
    inside = sets[worst] >> np.arange(topology.num_nodes) & 1 == 1
    return _cut_bound(topology, inside, float(carried[worst]), optimal=optimal)


def _bits(nodes: Array) -> int:
    return int(np.bitwise_or.reduce(1 << nodes, initial=0))


def _sweep_cuts(collective: Collective, topology: Topology, chunk_bytes: Floats) -> Iterator[Bound]:
    """Cut along each of some orders of the nodes, both ways round and never between equals."""
    for order in _orders(topology):
        for levels in (order, order.max() - order):
            cuts = np.arange(1, levels.max() + 1)
            carried = _sweep_traffic(collective, chunk_bytes, levels[topology.rank_nodes], cuts)
            first, last = levels[topology.link_sources], levels[topology.link_targets]
            crosses = (first[:, None] < cuts) & (last[:, None] >= cuts)
            capacity = topology.capacities_bytes_per_s @ crosses
            latency_s = np.where(crosses, topology.latencies_s[:, None], np.inf).min(axis=0)
            worst = int(np.argmax(_cut_seconds(carried, capacity, latency_s)))
            yield _cut_bound(topology, levels <= worst, float(carried[worst]))


def _orders(topology: Topology) -> Iterator[Longs]:
    """Return levels of the nodes, from 0 without gaps, between which promising cuts lie.

    How much nearer nodes are to one end of a link than to the other, and how far to or from a node.
    Only the network's shape counts: what depended on rates, a slower link could make better.
    """
    from scipy import sparse  # noqa: PLC0415 - heavy
    from scipy.sparse.csgraph import shortest_path  # noqa: PLC0415 - heavy

    count, ends = topology.num_nodes, (topology.link_sources, topology.link_targets)
    graph = sparse.coo_matrix((np.ones(topology.num_links), ends), shape=(count, count)).tocsr()
    pairs = _unlike_pairs(topology)
    if pairs.shape[0] * (topology.num_links + count) > _MOST_SWEPT:
        return
    nodes, places = np.unique(pairs, return_inverse=True)
    away = shortest_path(graph, directed=False, unweighted=True, indices=nodes)
    for one, other in places.reshape(pairs.shape):
        yield _levels(away[one] - away[other])
    for way in (graph, graph.T):
        yield from map(_levels, shortest_path(way, unweighted=True, indices=nodes))


def _levels(keys: Floats) -> Longs:
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def _unlike_pairs(topology: Topology) -> Longs:
    """Return pairs of neighbours; in a large network one of those that look alike from nearby."""
    first, last = topology.link_sources, topology.link_targets
    pairs = np.unique(np.sort(np.stack([first, last], axis=1), axis=1), axis=0)
    if pairs.shape[0] * (topology.num_links + topology.num_nodes) <= _MOST_SWEPT // 10:
        return pairs.astype(np.int64)
    colours = topology.is_rank.astype(np.uint64)
    for _ in range(_LOOKS):
        colours = recoloured(topology, colours, np.uint64(0))
    looks = np.sort(colours[pairs], axis=1)
    return pairs[np.unique(looks, axis=0, return_index=True)[1]].astype(np.int64)


def recoloured(topology: Topology, colours: Any, of_links: Any) -> Any:
    """Return colours of nodes that tell their neighbours' apart too; all are uint64."""
    ends = (topology.link_sources, topology.link_targets)
    sums = []
    for here, there in (ends, ends[::-1]):  # sums do not depend on the order of what is summed
        total = np.zeros_like(colours)
        np.add.at(total, here, mixed(colours[there] + of_links))
        sums.append(mixed(total))
    return mixed(colours + sums[0] * np.uint64(5) + sums[1] * np.uint64(3))


def mixed(words: Any) -> Any:
    """Return words whose bits all depend on all bits (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _exact_cuts(collective: Collective, topology: Topology, chunk_bytes: Floats) -> Iterator[Bound]:
    """Find the worst cut by max-flows; again without the quicker links, as its latency counts."""
    levels_s = np.unique(topology.latencies_s)
    if levels_s.size > _MOST_LEVELS:  # a cut's latency is then that of the level below
        levels_s = levels_s[np.linspace(0, levels_s.size - 1, _MOST_LEVELS).astype(np.int64)]
    for name in _FLOWS[collective.name]:
        best_s, bytes_s = 0.0, np.inf
        for level_s in levels_s:
            if bytes_s + level_s <= best_s:
                continue
            optimum = throughput_optimum(
                topology, collective=name, root=collective.root or 0,
                uncut=topology.latencies_s < level_s,
            )  # fmt: skip
            if not optimum.inverse_rate:
                break
            inside = np.zeros(topology.num_nodes, dtype=np.bool_)
            inside[list(optimum.cut)] = True
            # The optimum may be that of capacities rounded to a grid, the bytes of a bound may not.
            sides = (~inside[topology.rank_nodes]).astype(np.int64)
            _, leaving, *_ = _group_traffic(collective, chunk_bytes, sides, num_groups=2)
            optimal = collective.name in _OPTIMAL
            found = _cut_bound(
                topology, inside, float(leaving[0]), optimal=optimal, latency_s=float(level_s)
            )
            yield found
            best_s, bytes_s = max(best_s, found.seconds), found.seconds - level_s


def _group_traffic(
    collective: Collective, chunk_bytes: Floats, groups: Array, *, num_groups: int
) -> tuple[Floats, Floats, Longs, Longs]:
    """Return the least bytes and chunks into and out of each group of ranks."""
    found = _traffic_kernel(
        (collective.pre_offsets, groups[collective.pre_ranks].astype(np.int32)),
        (collective.post_offsets, groups[collective.post_ranks].astype(np.int32)),
        np.ascontiguousarray(chunk_bytes),
        (num_groups, int(collective.reducing)),
    )
    return found[0], found[1], found[2], found[3]


@njit
def _traffic_kernel(
    pre: tuple[Any, Any], post: tuple[Any, Any], chunk_bytes: Any, shape: tuple[int, int]
) -> tuple[Any, Any, Any, Any]:
    num_groups, reducing = shape
    bytes_in, bytes_out = np.zeros(num_groups), np.zeros(num_groups)
    chunks_in, chunks_out = np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64)
    seen = np.zeros(num_groups, np.int64)  # bit 0: starts here, bit 1: arrives here
    for chunk in range(chunk_bytes.size):
        starts = pre[1][pre[0][chunk] : pre[0][chunk + 1]]
        ends = post[1][post[0][chunk] : post[0][chunk + 1]]
        num_starts, num_ends = 0, 0
        for group in starts:
            num_starts += seen[group] & 1 == 0
            seen[group] |= 1
        for group in ends:
            num_ends += seen[group] & 2 == 0
            seen[group] |= 2
        for group in starts:
            state = seen[group]
            if state == 0:
                continue
            leaves = reducing or num_starts == 1
            if leaves and num_ends > (state >> 1):  # someone else receives it
                bytes_out[group] += chunk_bytes[chunk]
                chunks_out[group] += 1
            if state == 3 and reducing and num_starts > 1:
                bytes_in[group] += chunk_bytes[chunk]
                chunks_in[group] += 1
            seen[group] = 0
        for group in ends:
            if seen[group] == 2:  # arrives here without having started here
                bytes_in[group] += chunk_bytes[chunk]
                chunks_in[group] += 1
            seen[group] = 0
    return bytes_in, bytes_out, chunks_in, chunks_out


def _sweep_traffic(
    collective: Collective, chunk_bytes: Floats, levels: Longs, cuts: Longs
) -> Floats:
    """Return the least bytes from the ranks below each level to the others."""
    if collective.name == "all_to_all" and collective.has_equal_chunks:
        below = np.bincount(levels, minlength=cuts.size + 1).cumsum()[:-1]
        others = collective.num_ranks - below
        carried: Floats = below * others * (chunk_bytes.sum() / collective.num_ranks**2)
        return carried
    pre, post = collective.pre_offsets, collective.post_offsets
    used = np.flatnonzero((np.diff(pre) > 0) & (np.diff(post) > 0))
    total, chunks = np.zeros(cuts.size + 2), np.zeros(cuts.size + 2, np.int64)
    if used.size:
        spread = np.minimum if collective.reducing else np.maximum
        # Segments of unused chunks are empty, so the next used one starts where this one ends.
        first = spread.reduceat(levels[collective.pre_ranks], pre[used])
        last = np.maximum.reduceat(levels[collective.post_ranks], post[used])
        crosses = last > first  # for every cut with first < cut <= last
        sizes = chunk_bytes[used][crosses]
        for places, sign in ((first[crosses] + 1, 1), (last[crosses] + 1, -1)):
            np.add.at(total, places, sign * sizes)
            np.add.at(chunks, places, sign)
    # What rounding leaves over where no chunk crosses would still pay for a cut's latency.
    carried = np.where(np.cumsum(chunks) > 0, np.cumsum(total), 0.0)
    return np.maximum(carried[1:-1], 0.0)
