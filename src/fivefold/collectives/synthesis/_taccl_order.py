"""Stage 2 of TACCL: an order on every link, by list scheduling.

Of all transfers whose chunk has a place to start from, the one that can start first goes first;
ties go to the chunk with the longest way still to go. Several priorities and random ones are
tried, and the shortest schedule is kept.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._instance import Instance, Logical
from fivefold.collectives.synthesis._sketched import Sketched
from fivefold.collectives.synthesis._solver import CpOutcome, check_time, clock_s, new_model, solve


@dataclass(frozen=True)
class Timed:
    """Transfers with whole-number times."""

    moves: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    arrivals: tuple[int, ...]
    length: int

    def in_order(self) -> Timed:
        """Return the same by starts."""
        order = sorted(range(len(self.moves)), key=self.starts.__getitem__)
        return Timed(
            tuple(self.moves[number] for number in order),
            tuple(self.starts[number] for number in order),
            tuple(self.arrivals[number] for number in order),
            self.length,
        )


def chunk_by_chunk(
    prices: Prices, moves: Sequence[tuple[int, int]], starts: Sequence[int], length: int
) -> Timed:
    """Return transfers that travel on their own, each for its own time."""
    pairs = zip(starts, moves, strict=True)
    arrivals = tuple(start + int(prices.delays[link]) for start, (_, link) in pairs)
    return Timed(tuple(moves), tuple(starts), arrivals, length)


def parents_of(instance: Instance, moves: Sequence[tuple[int, int]]) -> list[int]:
    """Return by transfer the one that brings its chunk to its source; -1 where it is held."""
    brought = {
        (chunk, int(instance.targets[link])): number for number, (chunk, link) in enumerate(moves)
    }
    return [
        -1
        if int(instance.sources[link]) in instance.holders[chunk]
        else brought[chunk, int(instance.sources[link])]
        for chunk, link in moves
    ]


def best_order(
    sketch: Sketched,
    prices: Prices,
    moves: Sequence[tuple[int, int]],
    *,
    time_limit_s: float = 2.0,
    seed: int = 0,
) -> Timed:
    """Return the best of several list schedules."""
    deadline_s = clock_s() + time_limit_s
    parents = parents_of(sketch.logical, moves)
    tails, weights = _urgencies(prices, moves, parents)
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    own = [0] * len(moves)
    if sketch.sketch.own_chunks_first:  # what crosses and was passed on comes last
        sources, holders = sketch.logical.sources.tolist(), sketch.logical.holders
        crosses = sketch.logical.crosses.tolist()
        own = [int(crosses[link] and sources[link] not in holders[c]) for c, link in moves]
    longest = max(tails, default=1)
    priorities = [
        [(first, -tail) for first, tail in zip(own, tails, strict=True)],
        [(first, -weight) for first, weight in zip(own, weights, strict=True)],
    ]
    found: Timed | None = None
    for attempt in range(200):
        if attempt < len(priorities):
            priority = priorities[attempt]
        elif clock_s() < deadline_s:
            spread = longest * chance.choice((0.05, 0.2, 0.6))
            priority = [
                (first, -tail + round(chance.uniform(0, spread)))
                for first, tail in zip(own, tails, strict=True)
            ]
        else:
            break
        timed = _list_schedule(sketch.logical, prices, moves, parents, priority)
        if found is None or timed.length < found.length:
            found = timed
    assert found is not None, "the plain priorities always run"
    return found


def _urgencies(
    prices: Prices, moves: Sequence[tuple[int, int]], parents: list[int]
) -> tuple[list[int], list[int]]:
    """Return the time to the last arrival that depends on each transfer, and how many depend."""
    tails, weights = [int(prices.delays[link]) for _, link in moves], [1] * len(moves)
    for number in reversed(range(len(moves))):
        parent = parents[number]
        if parent >= 0:
            delay = int(prices.delays[moves[parent][1]])
            tails[parent] = max(tails[parent], delay + tails[number])
            weights[parent] += weights[number]
    return tails, weights


def _list_schedule(
    instance: Instance,
    prices: Prices,
    moves: Sequence[tuple[int, int]],
    parents: list[int],
    priority: Sequence[tuple[int, int]],
) -> Timed:
    children: list[list[int]] = [[] for _ in moves]
    for number, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(number)
    free = [0] * instance.num_resources
    starts = [0] * len(moves)
    ready = [0] * len(moves)
    heap = [(0, priority[number], number) for number in range(len(moves)) if parents[number] < 0]
    heapq.heapify(heap)
    length = 0
    while heap:
        check_time()
        known, rank, number = heapq.heappop(heap)
        link = moves[number][1]
        resources = instance.resources[link]
        start = max(ready[number], *(free[resource] for resource in resources))
        if start > known:  # something else took the link meanwhile
            heapq.heappush(heap, (start, rank, number))
            continue
        starts[number] = start
        for resource, busy in zip(resources, prices.busy[link], strict=True):
            free[resource] = start + busy
        arrival = start + int(prices.delays[link])
        length = max(length, arrival)
        for child in children[number]:
            ready[child] = arrival
            heapq.heappush(heap, (arrival, priority[child], child))
    return chunk_by_chunk(prices, moves, starts, length)


_UNITS_PER_SHORTEST = 2_000  # so that rounding is far below what any model of a link is worth
_MOST_UNITS = 20_000_000  # per transfer: beyond it sums could leave what solvers handle well


@dataclass(frozen=True)
class Prices:
    """Whole units of time per logical link."""

    unit_s: float
    latencies: NDArray[np.int64]
    sends: NDArray[np.int64]
    busy: tuple[tuple[int, ...], ...]

    @cached_property
    def delays(self) -> NDArray[np.int64]:
        """From the start of one chunk to its arrival, int64 [links]."""
        return np.asarray(np.maximum(self.latencies + self.sends, 1), np.int64)


def prices_of(logical: Logical, *, size_bytes: float) -> Prices:
    """Return the prices of one chunk."""
    chunk_bytes = logical.chunk_bytes(size_bytes)
    sends_s = chunk_bytes * logical.seconds_per_byte()
    whole_s = logical.latencies_s + sends_s
    positive = whole_s[whole_s > 0]
    shortest_s = float(positive.min()) if len(positive) else 1.0
    longest_s = float(positive.max()) if len(positive) else 1.0
    unit_s = max(shortest_s / _UNITS_PER_SHORTEST, longest_s / _MOST_UNITS)
    latencies = np.rint(logical.latencies_s / unit_s).astype(np.int64)
    rates = logical.capacities_bytes_per_s
    busy = tuple(
        tuple(
            max(int(latency) + round(chunk_bytes / float(rates[resource]) / unit_s), 1)
            for resource in resources
        )
        for latency, resources in zip(latencies, logical.resources, strict=True)
    )
    return Prices(unit_s, latencies, np.rint(sends_s / unit_s).astype(np.int64), busy)


_LARGEST_MESSAGE = 6  # chunks, as in TACCL


class _Joining:
    """Fixed order on every resource; on links between boxes runs of chunks may be one message."""

    def __init__(self, sketch: Sketched, prices: Prices, timed: Timed) -> None:
        self.prices, self.timed, self.model = prices, timed, new_model()
        self.resources = sketch.logical.resources
        times = [
            [self.model.new_int_var(0, timed.length, "") for _ in timed.moves] for _ in range(2)
        ]
        self.starts, self.arrivals = times
        self.length = self.model.new_int_var(0, timed.length, "T")
        for number, parent in enumerate(parents_of(sketch.logical, timed.moves)):
            self.model.add(self.arrivals[number] <= self.length)
            if parent >= 0:
                self.model.add(self.starts[number] >= self.arrivals[parent])
        self.users: dict[int, set[int]] = {}  # links that use each resource
        by_link: dict[int, list[int]] = {}
        for number, (_, link) in enumerate(timed.moves):
            by_link.setdefault(link, []).append(number)
            for resource in self.resources[link]:
                self.users.setdefault(resource, set()).add(link)
        for link, numbers in by_link.items():
            # Where no other link shares the resources, this link's order is the only one.
            alone = all(self.users[resource] == {link} for resource in self.resources[link])
            joins = alone and bool(sketch.logical.crosses[link])
            self._add_link(link, numbers, _LARGEST_MESSAGE if joins else 1)
        self._add_shared()
        self.model.minimize(self.length)

    def _add_link(self, link: int, numbers: list[int], largest: int) -> None:
        latency, send = int(self.prices.latencies[link]), int(self.prices.sends[link])
        busiest = max(self.prices.busy[link]) - latency
        covers: dict[int, list[Any]] = {number: [] for number in numbers}
        for first in range(len(numbers)):
            check_time()
            for last in range(first, min(first + largest, len(numbers))):
                run = numbers[first : last + 1]
                chosen = self.model.new_bool_var("")
                for number in run:
                    covers[number].append(chosen)
                    start, arrival = self.starts[number], self.arrivals[number]
                    self.model.add(start == self.starts[run[0]]).only_enforce_if(chosen)
                    whole = self.starts[run[0]] + max(latency + send * len(run), 1)
                    self.model.add(arrival == whole).only_enforce_if(chosen)
                if last + 1 < len(numbers):
                    free = self.starts[run[0]] + latency + busiest * len(run)
                    following = self.starts[numbers[last + 1]] >= free
                    self.model.add(following).only_enforce_if(chosen)
        for options in covers.values():
            self.model.add_exactly_one(options)

    def _add_shared(self) -> None:
        """Keep the order of consecutive users of a resource that several links share."""
        for resource, links in self.users.items():
            check_time()
            if len(links) < 2:
                continue
            numbers = [
                number
                for number, (_, link) in enumerate(self.timed.moves)
                if resource in self.resources[link]
            ]
            for before, after in itertools.pairwise(numbers):
                link = self.timed.moves[before][1]
                place = self.resources[link].index(resource)
                free = self.starts[before] + self.prices.busy[link][place]
                self.model.add(self.starts[after] >= free)

    def result(self, outcome: CpOutcome) -> Timed:
        """Return the times of a solution."""
        starts = tuple(outcome.value(start) for start in self.starts)
        arrivals = tuple(outcome.value(arrival) for arrival in self.arrivals)
        return Timed(self.timed.moves, starts, arrivals, outcome.value(self.length)).in_order()


def join_messages(
    sketch: Sketched, prices: Prices, timed: Timed, *, time_limit_s: float = 10.0, seed: int = 0
) -> Timed:
    """Let consecutive chunks between boxes travel together where that is shorter."""
    timed = timed.in_order()
    crossing = any(sketch.logical.crosses[link] for _, link in timed.moves)
    if not crossing or not int(prices.latencies.max(initial=0)):
        return timed
    joining = _Joining(sketch, prices, timed)
    for number, start in enumerate(timed.starts):
        joining.model.add_hint(joining.starts[number], start)
    outcome = solve(joining.model, time_limit_s=time_limit_s, seed=seed)
    return joining.result(outcome) if outcome.found else timed
