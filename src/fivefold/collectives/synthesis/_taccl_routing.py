"""Stage 1 of TACCL: which links each chunk takes, without the order on the links.

Minimised is the length T of a relaxed schedule: no chunk arrives later than T, and what a link or
a side of a switch carries fits into T. Implications between a route and its times are given to
the solver as such; there is no large constant. Symmetric choices are one variable.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._instance import UNREACHABLE, Instance, Orbits, prune
from fivefold.collectives.synthesis._sketched import Sketched
from fivefold.collectives.synthesis._solver import CpOutcome, check_time, new_model, solve
from fivefold.collectives.synthesis._taccl_order import Prices, Timed, chunk_by_chunk

_POLICY_WEIGHT = 0.01  # of one chunk's time per connection, as TACCL weighs it


@dataclass(frozen=True)
class Routing:
    """Links of every chunk: (chunk, link) pairs that form a tree per chunk, roots first.

    Args:
        moves: The pairs.
        bound: No routing of this sketch has a shorter relaxed schedule, in units of time.
    """

    moves: tuple[tuple[int, int], ...]
    bound: int


def candidates(sketch: Sketched, *, detour: int = 0) -> NDArray[np.bool_]:
    """Return links that a chunk may take: on its shortest paths in hops, and ``detour`` more."""
    instance = sketch.logical
    kept = np.zeros(sketch.allowed.shape, np.bool_)
    for chunk in range(instance.num_chunks):
        check_time()
        links = np.flatnonzero(sketch.allowed[chunk])
        sources, targets = instance.sources[links], instance.targets[links]
        away = _hops(instance.num_ranks, instance.holders[chunk], sources, targets)
        wanted = sorted(instance.wanted[chunk])
        if not wanted:
            continue
        left = _hops(instance.num_ranks, instance.wanted[chunk], targets, sources)
        useful = (left[targets] < UNREACHABLE) & (away[sources] < UNREACHABLE)
        if len(wanted) == 1:
            whole = away[wanted[0]]
            useful &= away[sources] + 1 + left[targets] <= whole + detour
        else:
            useful &= away[sources] + 1 <= away[targets] + detour
        useful &= ~np.isin(targets, sorted(instance.holders[chunk]))
        kept[chunk, links[useful]] = True
    return kept


def _hops(
    num_ranks: int, starts: frozenset[int], sources: NDArray[Any], targets: NDArray[Any]
) -> NDArray[np.int64]:
    hops = np.full(num_ranks, UNREACHABLE, np.int64)
    hops[sorted(starts)] = 0
    for _ in range(num_ranks):
        before = hops.copy()
        np.minimum.at(hops, targets, before[sources] + 1)
        if np.array_equal(before, hops):
            break
    return hops


class _Model:
    """The routing problem as a CP-SAT model."""

    def __init__(
        self, sketch: Sketched, prices: Prices, kept: NDArray[np.bool_], orbits: Orbits
    ) -> None:
        self.sketch, self.prices, self.orbits = sketch, prices, orbits
        self.instance: Instance = sketch.logical
        self.model = new_model()
        # What symmetry makes equal is taken whole or not at all: a sender may be for one rank only.
        broken = np.zeros(kept.size, np.bool_)
        broken[orbits.link_orbits[~kept]] = True
        kept = kept & ~broken[orbits.link_orbits]
        self.pairs = [(int(c), int(l)) for c, l in np.argwhere(kept)]  # noqa: E741 - (chunk, link)
        self.horizon = self._horizon()
        self.length = self.model.new_int_var(0, self.horizon, "T")
        self.sends: dict[int, Any] = {}
        for chunk, link in self.pairs:
            check_time()
            orbit = int(orbits.link_orbits[chunk, link])
            if orbit not in self.sends:
                self.sends[orbit] = self.model.new_bool_var(f"x{orbit}")
        self.starts: dict[int, Any] = {}
        self._add_trees()
        self._add_loads()
        self._add_cuts()
        self._add_objective()

    def _horizon(self) -> int:
        longest = int(self.prices.delays.max(initial=1))
        return longest * (self.instance.num_ranks + 2) * max(self.instance.num_chunks, 1)

    def send(self, chunk: int, link: int) -> Any:
        """Return the variable of a (chunk, link) pair."""
        return self.sends[int(self.orbits.link_orbits[chunk, link])]

    def _start(self, chunk: int, rank: int) -> Any:
        if rank in self.instance.holders[chunk]:
            return 0
        orbit = int(self.orbits.rank_orbits[chunk, rank])
        if orbit not in self.starts:
            self.starts[orbit] = self.model.new_int_var(0, self.horizon, f"t{orbit}")
        return self.starts[orbit]

    def _add_trees(self) -> None:
        """Require one way into a receiver, at most one elsewhere, only from where the chunk is."""
        first = self.orbits.representative_ranks()
        into: dict[tuple[int, int], list[int]] = {}
        out_of: dict[tuple[int, int], list[int]] = {}
        for chunk, link in self.pairs:
            check_time()
            into.setdefault((chunk, int(self.instance.targets[link])), []).append(link)
            out_of.setdefault((chunk, int(self.instance.sources[link])), []).append(link)
        for chunk, wanted in enumerate(self.instance.wanted):
            check_time()
            for rank in wanted:
                if first[chunk, rank]:
                    ways = [self.send(chunk, link) for link in into.get((chunk, rank), [])]
                    self.model.add(sum(ways) == 1)
                    self.model.add(self._start(chunk, rank) <= self.length)
        for (chunk, rank), links in into.items():
            check_time()
            if first[chunk, rank]:
                self._add_rank(chunk, rank, links, out_of.get((chunk, rank), []))

    def _add_rank(self, chunk: int, rank: int, links: list[int], onward: list[int]) -> None:
        ways = [self.send(chunk, link) for link in links]
        if rank not in self.instance.wanted[chunk]:
            self.model.add(sum(ways) <= 1)
            for link in onward:
                self.model.add_bool_or([self.send(chunk, link).negated(), *ways])
        for link, way in zip(links, ways, strict=True):
            source = int(self.instance.sources[link])
            arrival = self._start(chunk, source) + int(self.prices.delays[link])
            self.model.add(self._start(chunk, rank) >= arrival).only_enforce_if(way)

    def _add_loads(self) -> None:
        loads: dict[int, list[tuple[int, int]]] = {}
        for chunk, link in self.pairs:
            check_time()
            orbit = int(self.orbits.link_orbits[chunk, link])
            taken = zip(self.instance.resources[link], self.prices.busy[link], strict=True)
            for resource, busy in taken:
                loads.setdefault(resource, []).append((orbit, busy))
        self.loads = []
        self.users = {tuple(sorted(users)) for users in loads.values()}  # orbits and their times
        for row in self.users:
            check_time()
            load = sum(busy * self.sends[orbit] for orbit, busy in row)
            self.model.add(load <= self.length)
            self.loads.append(load)

    def _add_cuts(self) -> None:
        """Require that a chunk that a box lacks enters it over at least one link between boxes."""
        ends = self.instance
        for box in self.sketch.needs_cut():
            entering: dict[int, list[Any]] = {}
            for chunk, link in self.pairs:
                check_time()
                if int(ends.sources[link]) not in box and int(ends.targets[link]) in box:
                    entering.setdefault(chunk, []).append(self.send(chunk, link))
            for chunk, holders in enumerate(ends.holders):
                if not holders & box and ends.wanted[chunk] & box:
                    self.model.add_bool_or(entering.get(chunk, []))

    def minimize_ordered(self, *, most: int) -> dict[int, Any]:
        """Return the least starts by orbit; those of one resource come one after another."""
        begins: dict[int, Any] = {}
        for chunk, link in self.pairs:
            check_time()
            orbit = int(self.orbits.link_orbits[chunk, link])
            way = self.sends[orbit]
            if orbit not in begins:
                begins[orbit] = self.model.new_int_var(0, self.horizon, f"s{orbit}")
            begin = begins[orbit]
            source, target = int(self.instance.sources[link]), int(self.instance.targets[link])
            self.model.add(begin >= self._start(chunk, source)).only_enforce_if(way)
            arrival = begin + int(self.prices.delays[link])
            self.model.add(self._start(chunk, target) >= arrival).only_enforce_if(way)
        for row in self.users:
            taken = [
                self.model.new_optional_fixed_size_interval_var(
                    begins[orbit], busy, self.sends[orbit], ""
                )
                for orbit, busy in row
            ]
            self.model.add_no_overlap(taken)
        if self.sketch.sketch.own_chunks_first:
            self._add_own_first(begins)
        self.model.add(self.length <= most)
        self.model.minimize(self.length)
        return begins

    def _add_own_first(self, begins: dict[int, Any]) -> None:
        """Order the sends of each link between boxes: own chunks before those passed on."""
        crossing: dict[int, tuple[list[int], list[int]]] = {}
        for chunk, link in self.pairs:
            if self.sketch.logical.crosses[link]:
                passed = int(self.instance.sources[link]) not in self.instance.holders[chunk]
                orbit = int(self.orbits.link_orbits[chunk, link])
                crossing.setdefault(link, ([], []))[passed].append(orbit)
        for own, relayed in crossing.values():
            for first in own:
                check_time()
                for second in relayed:
                    ways = [self.sends[first], self.sends[second]]
                    self.model.add(begins[first] <= begins[second]).only_enforce_if(ways)

    def timed(self, outcome: CpOutcome, begins: dict[int, Any]) -> Timed:
        """Return the chosen pairs with their times."""
        moves = self.moves(outcome)
        starts = {
            pair: outcome.value(begins[int(self.orbits.link_orbits[pair])])  # by chunk and link
            for pair in moves
        }
        order = sorted(moves, key=lambda pair: starts[pair])  # stable: roots first
        length = outcome.value(self.length)
        return chunk_by_chunk(self.prices, order, [starts[pair] for pair in order], length)

    def _add_objective(self) -> None:
        """Minimise T first, then by the policy of the switches and the balance of the links."""
        scale = round(1 / _POLICY_WEIGHT)
        chunk = int(np.median(self.prices.delays)) if len(self.prices.delays) else 1
        objective = scale * self.length
        for sign, used in self._connections():
            objective += sign * chunk * used
        balance = self.sketch.sketch.balance
        if balance != "none" and self.loads:
            extreme = self.model.new_int_var(0, self.horizon, "extreme")
            for load in self.loads:
                self.model.add(extreme >= load if balance == "minmax" else extreme <= load)
            objective += extreme if balance == "minmax" else -extreme
        self.model.minimize(objective)

    def bound(self, objective: float) -> int:
        """Return the least T of a routing: the objective's bound less all else it can add."""
        few = int(np.count_nonzero(self.sketch.policies > 0))
        added = few * (int(np.median(self.prices.delays)) if len(self.prices.delays) else 1)
        minmax = self.sketch.sketch.balance == "minmax"  # the largest load is T at most
        return max(int((objective - added) / (round(1 / _POLICY_WEIGHT) + minmax)), 0)

    def _connections(self) -> list[tuple[int, Any]]:
        by_link: dict[int, set[int]] = {}
        for chunk, link in self.pairs:
            if self.sketch.policies[link]:
                orbit = int(self.orbits.link_orbits[chunk, link])
                by_link.setdefault(link, set()).add(orbit)
        counted = []
        for link, orbits in by_link.items():
            used = self.model.new_bool_var(f"used{link}")
            for orbit in orbits:
                self.model.add_implication(self.sends[orbit], used)
            self.model.add_bool_or([used.negated(), *(self.sends[orbit] for orbit in orbits)])
            counted.append((int(self.sketch.policies[link]), used))
        return counted

    def moves(self, outcome: CpOutcome) -> tuple[tuple[int, int], ...]:
        """Return the chosen pairs, roots first, without what nobody needs."""
        chosen = [pair for pair in self.pairs if outcome.value(self.send(*pair))]
        return ordered_trees(self.instance, chosen)


def ordered_trees(
    instance: Instance, chosen: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Put (chunk, link) pairs in an order in which every sender has received; drop the useless."""
    by_source: dict[tuple[int, int], list[int]] = {}
    for chunk, link in chosen:
        by_source.setdefault((chunk, int(instance.sources[link])), []).append(link)
    transfers = []
    for chunk, holders in enumerate(instance.holders):
        front, depth = sorted(holders), 0
        while front:
            links = [link for rank in front for link in by_source.pop((chunk, rank), [])]
            transfers += [(depth, chunk, link) for link in links]
            front, depth = [int(instance.targets[link]) for link in links], depth + 1
    return tuple((chunk, link) for _, chunk, link in prune(instance, transfers))


def route(
    sketch: Sketched,
    prices: Prices,
    *,
    symmetric: bool = True,
    detour: int = 0,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> Routing | None:
    """Choose the links of all chunks.

    Args:
        sketch: The sketch on its topology.
        prices: Times of one chunk.
        symmetric: Whether to keep to the sketch's symmetries.
        detour: Hops beyond the shortest path that a chunk may take.
        time_limit_s: Limit of the solver.
        seed: Seed of the solver.

    Returns:
        The routing, None where none was found (in time, or none is symmetric).
    """
    instance = sketch.logical
    orbits = Orbits(instance, sketch.symmetries if symmetric else ())
    model = _Model(sketch, prices, candidates(sketch, detour=detour), orbits)
    outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed, gap=1e-4)
    if not outcome.found:
        return None
    return Routing(model.moves(outcome), model.bound(outcome.bound))


def greedy_routes(sketch: Sketched, prices: Prices) -> Routing:
    """Route without a solver: chunk after chunk by the fastest tree, loaded links costing more."""
    instance = sketch.logical
    loads = [0] * instance.num_resources
    out_of: list[list[int]] = [[] for _ in range(instance.num_ranks)]
    for link, source in enumerate(instance.sources.tolist()):
        out_of[source].append(link)
    moves: list[tuple[int, int]] = []
    for chunk in range(instance.num_chunks):
        check_time()
        tree = _fastest_tree(sketch, prices, chunk, loads, out_of)
        for link in tree:
            for resource, busy in zip(instance.resources[link], prices.busy[link], strict=True):
                loads[resource] += busy
        moves += [(chunk, link) for link in tree]
    return Routing(ordered_trees(instance, moves), 0)


def _fastest_tree(
    sketch: Sketched, prices: Prices, chunk: int, loads: list[int], out_of: list[list[int]]
) -> list[int]:
    instance = sketch.logical
    targets, delays = instance.targets.tolist(), prices.delays.tolist()
    allowed = sketch.allowed[chunk].tolist()
    came_by: dict[int, int] = {}
    heap = [(0, rank, -1) for rank in sorted(instance.holders[chunk])]
    seen: set[int] = set()
    missing = set(instance.wanted[chunk])
    while heap and missing:
        time, rank, link = heapq.heappop(heap)
        if rank in seen:
            continue
        seen.add(rank)
        missing.discard(rank)
        if link >= 0:
            came_by[rank] = link
        for onward in out_of[rank]:
            target = targets[onward]
            if target not in seen and allowed[onward]:
                queue = max(loads[resource] for resource in instance.resources[onward])
                arrival = time + delays[onward] + queue
                heapq.heappush(heap, (arrival, target, onward))
    needed: set[int] = set()
    for rank in instance.wanted[chunk]:
        here = rank
        while here in came_by and came_by[here] not in needed:
            needed.add(came_by[here])
            here = int(instance.sources[came_by[here]])
    return sorted(needed)


def route_and_order(
    sketch: Sketched, prices: Prices, *, below: int, detour: int, time_limit_s: float, seed: int = 0
) -> tuple[Timed | None, bool]:
    """Choose links and times of all chunks at once, where TACCL does one after the other."""
    kept = candidates(sketch, detour=detour)
    model = _Model(sketch, prices, kept, Orbits(sketch.logical))
    begins = model.minimize_ordered(most=below - 1)
    outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed)
    if not outcome.found:
        return None, outcome.status == "infeasible"
    return model.timed(outcome, begins), outcome.status == "optimal"


def improve_order(
    sketch: Sketched,
    prices: Prices,
    timed: Timed,
    *,
    symmetric: bool = False,
    time_limit_s: float = 30.0,
    seed: int = 0,
) -> Timed:
    """Return a schedule no longer than the one given, of the same routes."""
    kept = np.zeros(sketch.allowed.shape, np.bool_)
    kept[tuple(np.array(timed.moves).T)] = True
    orbits = Orbits(sketch.logical, sketch.symmetries if symmetric else ())
    model = _Model(sketch, prices, kept, orbits)
    begins = model.minimize_ordered(most=timed.length)
    if not symmetric:
        for (chunk, link), start in zip(timed.moves, timed.starts, strict=True):
            model.model.add_hint(begins[int(orbits.link_orbits[chunk, link])], start)
    outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed)
    return model.timed(outcome, begins) if outcome.found else timed.in_order()
