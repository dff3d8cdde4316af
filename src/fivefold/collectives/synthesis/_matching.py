"""Greedy matching in time: schedules for thousands of ranks in seconds.

Time advances from one completion to the next, and every link that is free is given a chunk that
its source holds and its target neither has nor awaits, the rarest first. Several random seeds and
two rules are tried. Reference: TACOS, arXiv 2304.05301.
"""

from __future__ import annotations

import numpy as np

from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.schedules.bounds import discrete_ingress_bound
from fivefold.collectives.schedules.schedule import require_match
from fivefold.collectives.synthesis._instance import by_inversion
from fivefold.collectives.synthesis._matching_kernel import (
    DONE,
    Fabric,
    Holdings,
    Neighbourhoods,
    Rules,
    Transfers,
    build_fabric,
    build_neighbourhoods,
    match,
    new_loop,
)
from fivefold.collectives.synthesis._solver import (
    SLACK_S,
    OutOfTime,
    check_time,
    clock_s,
    time_limit,
)
from fivefold.errors import (
    ConfigurationError,
    InfeasibleError,
    require_number,
    require_one_of,
    require_whole,
)
from fivefold.network.topology import Topology

_DOES = ("all_gather", "broadcast", "reduce_scatter", "reduce", "all_reduce")
_MUCH_FASTER = 4.0
_MOST_SEEDS = 256
_SEEDED_TRANSFERS = 2_000_000  # decided in about two seconds
_DEADLINES = (1.0, 0.99, 0.9, 0.7)  # of the best time so far, in turn
_TURNS = 64  # between two looks at the clock
_ROUTE_LINKS = 8  # room per transfer behind switches, on average


def matching(
    collective: Collective,
    topology: Topology,
    *,
    size_bytes: float,
    seeds: int | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
) -> Schedule:
    """Match chunks with free links, time after time.

    Args:
        collective: All-gather, reduce-scatter, all-reduce, broadcast or reduce.
        topology: The network.
        size_bytes: Size of the collective, as `Collective.buffer_weight` counts it.
        seeds: Random runs, the best of which is kept; fewer where one meets the lower bound. None
            for 1 to 256, fewer the more transfers there are.
        seed: Of the random choices; the same seed gives the same schedule.
        time_limit_s: When to end with the best run so far; the first one has two seconds more.
            None for no limit. What is compiled at the first use does not count.

    Returns:
        The schedule with its times in the serial model, every transfer with its route.

    Raises:
        ConfigurationError: The collective is none of these, or an argument is out of range.
        InfeasibleError: Some rank cannot be reached, or the time is over.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import torus
        >>> found = matching(all_gather(16), torus((4, 4), bandwidth=1.0), size_bytes=16.0)
        >>> float(found.ends_s.max())
        4.0
    """
    _check(collective, topology, seeds)
    seed = require_whole("seed", seed, least=0)
    collective.chunk_bytes(size_bytes)  # refuses what is no size
    halves = 2 if collective.name == "all_reduce" else 1
    limit_s = None
    if time_limit_s is not None:
        limit_s = require_number("time_limit_s", time_limit_s) / halves

    def find(part: Collective, place: Topology) -> Schedule:
        count = seeds
        if count is None:
            count = min(_MOST_SEEDS, max(1, _SEEDED_TRANSFERS // max(1, part.post_chunks.size)))
        ends_s = None if limit_s is None else clock_s() + limit_s
        return _best(part, place, size_bytes, (seed, count), ends_s)

    return by_inversion(collective, topology, find)


def _check(collective: Collective, topology: Topology, seeds: int | None) -> None:
    require_one_of(collective.name, _DOES, f"matching does no {collective.name}")
    require_match(collective, topology)
    if np.unique(collective.chunk_weights).size > 1:
        message = "the chunks have different sizes"
        raise ConfigurationError(message, hint="matching needs chunks of one size")
    if seeds is not None:
        require_whole("seeds", seeds)
    topology.require_connected()


def _best(
    collective: Collective,
    topology: Topology,
    size_bytes: float,
    seeds: tuple[int, int],
    ends_s: float | None,
) -> Schedule:
    """Return the best of some runs from a seed on: (the seed, how many)."""
    near = build_neighbourhoods(topology)
    fabric = build_fabric(topology, near)
    chunk_bytes = float(collective.chunk_bytes(size_bytes)[0]) if collective.num_chunks else 0.0
    bound_s = discrete_ingress_bound(collective, topology, size_bytes=size_bytes).seconds
    best: Transfers | None = None
    # Links between neighbourhoods may be so slow that each chunk should cross once.
    rates = near.rates[1:]
    fresh = len(rates) > 1 and bool(rates[0] >= _MUCH_FASTER * rates[-1])
    best_s = np.inf
    for number in range(seeds[1]):
        # The second run turns the rule round; later ones keep what was better.
        fresh = fresh if number != 1 else not fresh
        seed = (seeds[0] * 1_000_003 + number) * 2 + 1
        # A slow link that takes a chunk late holds up the end: a deadline leaves it to others.
        deadline_s = best_s * _DEADLINES[number % len(_DEADLINES)] if number > 1 else np.inf
        rules = Rules(collective.num_chunks, chunk_bytes, seed, fresh, deadline_s)
        try:
            # The first run must end, the others are only for better ones.
            left_s = None if ends_s is None else ends_s - clock_s()
            with time_limit(left_s, slack_s=0.0 if number else SLACK_S):
                found = _run(collective, fabric, near, rules)
        except OutOfTime:
            if best is None:
                raise
            break
        end_s = float(found.times[1].max(initial=0.0)) if found is not None else np.inf
        if end_s < best_s or best is None:
            best, best_s = found, end_s
        elif number == 1:
            fresh = not fresh
        if best_s <= bound_s * (1 + 1e-9):
            break
    if best is None:
        message = "matching could not complete the collective"
        raise InfeasibleError(message, hint="check that links go both ways")
    return _schedule(collective, topology, fabric, best, size_bytes)


def _run(
    collective: Collective, fabric: Fabric, near: Neighbourhoods, rules: Rules
) -> Transfers | None:
    holdings, counted = _start(collective, near)
    pairs = (collective.pre_chunks, collective.pre_ranks)
    total = len(collective.post_chunks) - int((collective.output_address(*pairs) >= 0).sum())
    room = total + 1
    switched = fabric.hops.size > 0
    transfers = Transfers(
        chunks=np.empty(room, np.int32),
        ports=np.empty(room, np.int32),
        ends=np.empty(room, np.int32),
        times=np.empty((2, room)),
        route_offsets=np.zeros(room + 1 if switched else 0, np.int64),
        route_links=np.empty(_ROUTE_LINKS * room if switched else 0, np.int32),
    )
    loop = new_loop(fabric, transfers, rules.seed)
    now_s = 0.0
    while now_s >= 0:
        check_time()
        now_s = match(fabric, counted, holdings, transfers, rules, loop, (now_s, _TURNS))
    done = int(loop.numbers[DONE])
    if done < total and rules.fresh_only and np.isinf(rules.deadline_s):
        # The rule kept a chunk from crossing where its neighbourhood cannot pass it on.
        return _run(collective, fabric, near, rules._replace(fresh_only=False))
    if done < total:
        return None
    return Transfers(
        transfers.chunks[:total], transfers.ports[:total], transfers.ends[:total],
        transfers.times[:, :total], transfers.route_offsets[: total + 1], transfers.route_links,
    )  # fmt: skip


def _start(collective: Collective, near: Neighbourhoods) -> tuple[Holdings, Neighbourhoods]:
    """Return bit sets and counts before anything is sent."""
    chunks, ranks = collective.num_chunks, collective.num_ranks
    words = max(1, -(-chunks // 64))
    held = np.zeros((ranks, words), np.uint64)
    bits = np.uint64(1) << (collective.pre_chunks & 63).astype(np.uint64)
    np.bitwise_or.at(held, (collective.pre_ranks, collective.pre_chunks >> 6), bits)
    taken = held.copy()
    taken[:, -1] |= ~np.uint64(0) << np.uint64(chunks % 64) if chunks % 64 else np.uint64(0)
    sizes = [0, *((near.member[1:].max(axis=1) + 1).astype(np.int64) * chunks).tolist()]
    offsets = np.cumsum([0, 0, *sizes[1:-1]]).astype(np.int64)
    counts = np.zeros(sum(sizes), np.int32)
    for level in range(1, len(near.member)):
        sets = near.member[level, collective.pre_ranks].astype(np.int64)
        np.add.at(counts, offsets[level] + sets * chunks + collective.pre_chunks, 1)
    return Holdings(held, taken), near._replace(offsets=offsets, counts=counts)


def _schedule(
    collective: Collective, topology: Topology, fabric: Fabric, found: Transfers, size_bytes: float
) -> Schedule:
    links = fabric.ports[found.ports]
    if len(found.route_offsets):
        offsets = found.route_offsets
        route_links = found.route_links[: offsets[-1]].copy()
    else:
        offsets, route_links = np.arange(len(links) + 1, dtype=np.int64), links
    return Schedule(
        collective=collective,
        chunks=found.chunks,
        sources=topology.rank_of_node[topology.link_sources[links]],
        targets=found.ends,
        starts_s=found.times[0],
        ends_s=found.times[1],
        route_offsets=offsets,
        route_links=route_links,
        topology=topology,
        name="matching",
        solver="TACOS",
        attributes={"model": "serial", "size_bytes": float(size_bytes)},
    )
