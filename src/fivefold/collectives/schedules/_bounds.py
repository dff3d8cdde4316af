"""Times that no schedule can beat, each with the reason why.

Latency: a chunk needs the latency of its shortest way. Bandwidth: what must cross a cut needs the
cut's capacity; single ranks, hosts and sweeps over the network are tried for every collective, and
for those whose optimum is a cut the worst one is found exactly. An all-reduce needs besides that
2 (k - 1) messages for each byte among any k groups: k - 1 to bring all parts together and k - 1 to
tell the others. Whole chunks: a link that takes a chunk at a time carries whole numbers of them.

References: SCCL, arXiv 2008.08708, section 3; ForestColl, arXiv 2402.06787, section 4; Patarasuk
and Yuan, J. Parallel Distrib. Comput. 69(2), 2009 (the all-reduce).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fivefold.collectives.schedules._arrays import Floats, Longs
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._cuts import (
    NO_BOUND,
    Bound,
    exact_cuts,
    group_capacities,
    group_cuts,
    groupings,
    sweep_cuts,
)
from fivefold.collectives.schedules._evaluate import CostModel, evaluate
from fivefold.collectives.schedules._routes import require_topology
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.collectives.schedules._traffic import group_traffic
from fivefold.errors import ConfigurationError
from fivefold.units import format_bytes

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

_EXACT_WORK = 15_000_000  # ranks times arcs up to which max-flows are run unasked


def _require_match(collective: Collective, topology: Topology) -> None:
    if collective.num_ranks != topology.num_ranks:
        raise ConfigurationError(
            f"the collective has {collective.num_ranks} ranks, the topology {topology.num_ranks}",
            hint="make the collective for topology.num_ranks ranks",
        )
    topology.require_connected()


def latency_bound(collective: Collective, topology: Topology) -> Bound:
    """Largest latency from where a chunk starts to where it must be.

    Args:
        collective: The collective.
        topology: The network.

    Returns:
        The bound with the two nodes; of a copied chunk the nearest holder counts, of a summed one
        the farthest contributor.

    Raises:
        ConfigurationError: The two have different numbers of ranks.
        InfeasibleError: The topology is not connected.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> latency_bound(all_gather(8), ring(8, latency="1 us")).seconds
        4e-06
    """
    _require_match(collective, topology)
    ranks, router = topology.rank_nodes, topology.router
    worst = (0, -1, -1)
    for chunks_alike in _kinds_of_chunks(collective):
        if chunks_alike is None:  # all start somewhere and all end everywhere
            starts = ends = np.arange(collective.num_ranks)
        else:
            starts, ends = chunks_alike
        nearest = np.full(ends.size, np.iinfo(np.int64).max)
        origin = np.zeros(ends.size, dtype=np.int64)
        for start in starts:
            ticks = router.distances(int(start))[0][ranks[ends]]
            far = int(np.argmax(ticks))
            if ticks[far] > worst[0] and (chunks_alike is None or collective.reducing):
                worst = (int(ticks[far]), int(start), int(ends[far]))
            closer = ticks < nearest
            nearest[closer], origin[closer] = ticks[closer], start
        far = int(np.argmax(nearest))
        if chunks_alike is not None and nearest[far] > worst[0]:
            worst = (int(nearest[far]), int(origin[far]), int(ends[far]))
    if worst[1] < 0:
        return NO_BOUND
    names = topology.ranks
    return Bound(
        seconds=router.seconds(worst[0]),
        kind="latency",
        certificate=(int(ranks[worst[1]]), int(ranks[worst[2]])),
        reason=f"the shortest way from {names[worst[1]]} to {names[worst[2]]} takes so long",
    )


def _kinds_of_chunks(collective: Collective) -> Iterator[tuple[Longs, Longs] | None]:
    """Where chunks start and must end, each combination once; None: every rank to every rank."""
    if collective.name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        yield None
        return
    seen = set()
    for chunk in range(collective.num_chunks):
        starts, ends = collective.holders(chunk), collective.receivers(chunk)
        key = (starts.tobytes(), ends.tobytes())
        if key not in seen and starts.size and ends.size:
            seen.add(key)
            yield starts.astype(np.int64), ends.astype(np.int64)


def bandwidth_bound(
    collective: Collective, topology: Topology, size_bytes: float, *, exact: bool | None = None
) -> Bound:
    """Largest time that the bytes across some cut take.

    Args:
        collective: The collective.
        topology: The network.
        size_bytes: Size of the collective.
        exact: Whether to search all cuts with max-flows, where the collective's optimum is a cut
            (all but the all-reduce and the all-to-alls); None to do so unless it takes long. The
            other cuts are single ranks, hosts, and sweeps in index order and along the network's
            slowest mode.

    Returns:
        The bound with its cut; it counts the least latency across the cut as well.

    Raises:
        ConfigurationError: The two have different numbers of ranks.
        InfeasibleError: The topology is not connected.

    Examples:
        >>> from fivefold.collectives.schedules import all_to_all
        >>> from fivefold.network.topology import torus
        >>> network = torus((4, 4), bandwidth="1 GB/s", latency="0 s")
        >>> bandwidth_bound(all_to_all(16), network, 16e9).seconds
        8.0
    """
    _require_match(collective, topology)
    chunk_bytes = collective.chunk_bytes(size_bytes)
    best = NO_BOUND
    candidates = [*group_cuts(collective, topology, chunk_bytes)]
    candidates += sweep_cuts(collective, topology, chunk_bytes)
    if exact or (exact is None and _worth_it(topology)):
        candidates += exact_cuts(collective, topology, chunk_bytes)
    for candidate in candidates:
        if candidate.seconds > best.seconds or (
            candidate.optimal_cut and candidate.seconds >= best.seconds * (1 - 1e-12)
        ):
            best = candidate
    messages = _message_bound(collective, topology, size_bytes)
    return messages if messages.seconds > best.seconds else best


def _worth_it(topology: Topology) -> bool:
    return topology.num_ranks * (topology.num_links + topology.num_ranks) <= _EXACT_WORK


def _message_bound(collective: Collective, topology: Topology, size_bytes: float) -> Bound:
    """An all-reduce among k groups: 2 (k - 1) messages for each byte, unless switches add up."""
    adding = any(switch.aggregation is not None for switch in topology.switches)
    if collective.name != "all_reduce" or adding:
        return NO_BOUND
    copying = any(switch.multicast for switch in topology.switches)
    best = NO_BOUND
    for _, count, nodes in groupings(topology):
        if count < 2:
            continue
        into, out_of = group_capacities(topology, nodes, count)
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
    """Time until whole chunks can have entered, and left, every rank (serial model).

    A link that is busy for latency + bytes / capacity with each chunk has carried floor(T / that)
    chunks by T. Chunks are those of the collective, so the bound holds for schedules of just this
    collective whose links take one chunk at a time.

    Args:
        collective: The collective, of equal chunks.
        topology: The network.
        size_bytes: Size of the collective.

    Returns:
        The bound with the rank's node; none where chunks differ in size.

    Raises:
        ConfigurationError: The two have different numbers of ranks.
        InfeasibleError: The topology is not connected.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import mesh
        >>> network = mesh((5, 5), bandwidth=50 * 2**30, latency="0.5 us")
        >>> round(discrete_ingress_bound(all_gather(25), network, 2**30).seconds * 1e6, 1)
        9606.0
    """
    _require_match(collective, topology)
    chunk_bytes = collective.chunk_bytes(size_bytes)
    if collective.num_ranks < 2 or not collective.has_equal_chunks or not chunk_bytes.size:
        return NO_BOUND
    everyone = np.arange(collective.num_ranks)
    traffic = group_traffic(collective, chunk_bytes, everyone, num_groups=everyone.size)
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
    """Least T with sum of floor(T / lasts) >= count."""
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
    collective: Collective,
    topology: Topology,
    size_bytes: float,
    *,
    whole_chunks: bool = False,
    exact: bool | None = None,
) -> Bound:
    """The best of the bounds.

    Args:
        collective: The collective.
        topology: The network.
        size_bytes: Size of the collective.
        whole_chunks: Whether to count `discrete_ingress_bound`, which holds for schedules of this
            very chunking under the serial model only.
        exact: As in `bandwidth_bound`.

    Returns:
        The bound.

    Raises:
        ConfigurationError: The two have different numbers of ranks.
        InfeasibleError: The topology is not connected.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> network = ring(8, bandwidth="1 GB/s", latency="1 us")
        >>> [lower_bound(all_gather(8), network, size).kind for size in (8, 8e9)]
        ['latency', 'cut']
    """
    found = [
        latency_bound(collective, topology),
        bandwidth_bound(collective, topology, size_bytes, exact=exact),
    ]
    if whole_chunks:
        found.append(discrete_ingress_bound(collective, topology, size_bytes))
    return max(found, key=lambda bound: bound.seconds)


def gap(
    schedule: Schedule,
    topology: Topology | None = None,
    *,
    size_bytes: float,
    model: CostModel = "serial",
    bound: Bound | None = None,
) -> float:
    """How far a schedule is above the lower bound: time / bound - 1.

    Args:
        schedule: The schedule.
        topology: The network; None for the schedule's own.
        size_bytes: Size of the collective.
        model: Cost model for the time.
        bound: The bound, if it is known; None to compute it.

    Returns:
        0 for a schedule that is proved optimal; infinite where the bound is 0 and the time is not.

    Raises:
        ConfigurationError: There is no topology.
        InfeasibleError: The topology is not connected.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> schedule = build_algorithm("bidirectional_ring", all_gather(5))
        >>> round(gap(schedule, ring(5, latency="0 s"), size_bytes=1e6), 9)
        0.0
    """
    network = require_topology(schedule, topology)
    seconds = evaluate(schedule, network, size_bytes=size_bytes, model=model).total_s
    least = bound or lower_bound(schedule.collective, network, size_bytes)
    if least.seconds <= 0:
        return 0.0 if seconds <= 0 else float("inf")
    return seconds / least.seconds - 1.0
