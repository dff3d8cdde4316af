"""Stage 1 of TACCL: which links each chunk takes, without the order on the links.

Minimised is the length T of a relaxed schedule: no chunk arrives later than T, and what a link
carries fits into T. Implications are given to the solver as such; there is no large constant.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._instance import UNREACHABLE, Instance, Orbits, hops_from, prune
from fivefold.collectives.synthesis._sketched import Sketched
from fivefold.collectives.synthesis._solver import CpOutcome, check_time, new_model, solve
from fivefold.collectives.synthesis._taccl_order import Prices, Timed, chunk_by_chunk

_SCALE = 100  # a connection counts a hundredth of one chunk's time, as TACCL weighs it


@dataclass(frozen=True)
class Routing:
    """(chunk, link) pairs that form a tree per chunk, roots first."""

    moves: tuple[tuple[int, int], ...]
    bound: int  # no routing of this sketch has a shorter relaxed schedule, in units of time


def candidates(sketch: Sketched, *, detour: int = 0) -> NDArray[np.bool_]:
    """Return links that a chunk may take: on its shortest paths in hops, and ``detour`` more."""
    logical = sketch.logical
    kept = np.zeros(sketch.allowed.shape, np.bool_)
    for chunk, wanted in enumerate(logical.wanted):
        check_time()
        links = np.flatnonzero(sketch.allowed[chunk])
        sources, targets = logical.sources[links], logical.targets[links]
        away = hops_from(logical.holders[chunk], sources, targets, logical.num_ranks)
        left = hops_from(wanted, targets, sources, logical.num_ranks)
        useful = (left[targets] < UNREACHABLE) & (away[sources] < UNREACHABLE)
        if len(wanted) == 1:
            whole = away[min(wanted)]
            useful &= away[sources] + 1 + left[targets] <= whole + detour
        else:
            useful &= away[sources] + 1 <= away[targets] + detour
        useful &= ~np.isin(targets, sorted(logical.holders[chunk]))
        kept[chunk, links[useful]] = True
    return kept


class _Model:
    """The routing problem as a CP-SAT model."""

    def __init__(
        self, sketch: Sketched, prices: Prices, kept: NDArray[np.bool_], *, symmetric: bool = False
    ) -> None:
        self.sketch, self.prices, self.logical = sketch, prices, sketch.logical
        self.sources, self.targets = self.logical.sources.tolist(), self.logical.targets.tolist()
        self.delays: list[int] = prices.delays.tolist()
        self.typical = int(np.median(prices.delays)) if self.delays else 1
        self.horizon = max(self.delays, default=1) * (self.logical.num_ranks + 2)
        self.horizon *= max(self.logical.num_chunks, 1)
        self.orbits = Orbits(self.logical, sketch.symmetries if symmetric else ())
        # What symmetry makes equal is taken whole or not at all: a sender may be for one rank only.
        whole = np.ones(kept.size, np.bool_)
        whole[self.orbits.link_orbits[~kept]] = False
        places = np.nonzero(kept & whole[self.orbits.link_orbits])
        columns = (*places, self.orbits.link_orbits[places])
        self.choices = list(zip(*(column.tolist() for column in columns), strict=True))
        self.model = new_model()
        self.length = self.model.new_int_var(0, self.horizon, "T")
        self.sends: dict[int, Any] = {}  # by orbit
        self.starts: dict[int, Any] = {}
        self.into: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by chunk and rank
        self.out_of: dict[tuple[int, int], list[int]] = {}
        users: dict[int, list[tuple[int, int]]] = {}
        for chunk, link, orbit in self.choices:
            check_time()
            if orbit not in self.sends:
                self.sends[orbit] = self.model.new_bool_var(f"x{orbit}")
            self.into.setdefault((chunk, self.targets[link]), []).append((link, orbit))
            self.out_of.setdefault((chunk, self.sources[link]), []).append(orbit)
            for resource, busy in zip(self.logical.resources[link], prices.busy[link], strict=True):
                users.setdefault(resource, []).append((orbit, busy))
        self.users = {tuple(sorted(row)) for row in users.values()}  # orbits and their times
        self._add_trees()
        self.loads = [sum(busy * self.sends[orbit] for orbit, busy in row) for row in self.users]
        for load in self.loads:
            check_time()
            self.model.add(load <= self.length)
        self._add_cuts()
        self._add_objective()

    def _start(self, chunk: int, rank: int) -> Any:
        if rank in self.logical.holders[chunk]:
            return 0
        orbit = int(self.orbits.rank_orbits[chunk, rank])
        if orbit not in self.starts:
            self.starts[orbit] = self.model.new_int_var(0, self.horizon, f"t{orbit}")
        return self.starts[orbit]

    def _add_trees(self) -> None:
        """Require one way into a receiver, at most one elsewhere, only from where the chunk is."""
        first = self.orbits.representative_ranks()
        for chunk, wanted in enumerate(self.logical.wanted):
            check_time()
            for rank in wanted:
                if first[chunk, rank]:
                    ways = self.into.get((chunk, rank), [])
                    self.model.add(sum(self.sends[orbit] for _, orbit in ways) == 1)
                    self.model.add(self._start(chunk, rank) <= self.length)
        for (chunk, rank), ways in self.into.items():
            check_time()
            if first[chunk, rank]:
                self._add_rank(chunk, rank, ways)

    def _add_rank(self, chunk: int, rank: int, ways: list[tuple[int, int]]) -> None:
        sends = [self.sends[orbit] for _, orbit in ways]
        if rank not in self.logical.wanted[chunk]:
            self.model.add(sum(sends) <= 1)
            for orbit in self.out_of.get((chunk, rank), []):
                self.model.add_bool_or([self.sends[orbit].negated(), *sends])
        for (link, _), way in zip(ways, sends, strict=True):
            arrival = self._start(chunk, self.sources[link]) + self.delays[link]
            self.model.add(self._start(chunk, rank) >= arrival).only_enforce_if(way)

    def _add_cuts(self) -> None:
        """Require that a chunk that a box lacks enters it over at least one link between boxes."""
        boxes = self.logical.boxes
        for box in map(frozenset, boxes if len(boxes) > 1 else ()):
            entering: dict[int, list[Any]] = {}
            for chunk, link, orbit in self.choices:
                check_time()
                if self.sources[link] not in box and self.targets[link] in box:
                    entering.setdefault(chunk, []).append(self.sends[orbit])
            for chunk, holders in enumerate(self.logical.holders):
                if not holders & box and self.logical.wanted[chunk] & box:
                    self.model.add_bool_or(entering.get(chunk, []))

    def minimize_ordered(self, *, most: int) -> dict[int, Any]:
        """Return the least starts by orbit; those of one resource come one after another."""
        begins = {orbit: self.model.new_int_var(0, self.horizon, "") for orbit in self.sends}
        for chunk, link, orbit in self.choices:
            check_time()
            begin, way = begins[orbit], self.sends[orbit]
            start = self._start(chunk, self.sources[link])
            self.model.add(begin >= start).only_enforce_if(way)
            end = self._start(chunk, self.targets[link])
            self.model.add(end >= begin + self.delays[link]).only_enforce_if(way)
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
        for chunk, link, orbit in self.choices:
            if self.logical.crosses[link]:
                passed = self.sources[link] not in self.logical.holders[chunk]
                crossing.setdefault(link, ([], []))[passed].append(orbit)
        for own, relayed in crossing.values():
            for first in own:
                check_time()
                for second in relayed:
                    ways = [self.sends[first], self.sends[second]]
                    self.model.add(begins[first] <= begins[second]).only_enforce_if(ways)

    def timed(self, outcome: CpOutcome, begins: dict[int, Any]) -> Timed:
        """Return the chosen pairs with their times."""
        starts = {
            pair: outcome.value(begins[int(self.orbits.link_orbits[pair])])  # by chunk and link
            for pair in self.moves(outcome)
        }
        order = sorted(starts, key=starts.__getitem__)  # stable: roots first
        length = outcome.value(self.length)
        return chunk_by_chunk(self.prices, order, [starts[pair] for pair in order], length)

    def _add_objective(self) -> None:
        """Minimise T first, then by the policy of the switches and the balance of the links."""
        objective = _SCALE * self.length
        by_link: dict[int, set[int]] = {}
        for _, link, orbit in self.choices:
            if self.sketch.policies[link]:
                by_link.setdefault(link, set()).add(orbit)
        for link, orbits in by_link.items():
            used = self.model.new_bool_var(f"used{link}")
            for orbit in orbits:
                self.model.add_implication(self.sends[orbit], used)
            self.model.add_bool_or([used.negated(), *(self.sends[orbit] for orbit in orbits)])
            objective += int(self.sketch.policies[link]) * self.typical * used
        balance = self.sketch.sketch.balance
        if balance != "none" and self.loads:
            extreme = self.model.new_int_var(0, self.horizon, "extreme")
            for load in self.loads:
                self.model.add(extreme >= load if balance == "minmax" else extreme <= load)
            objective += extreme if balance == "minmax" else -extreme
        self.model.minimize(objective)

    def bound(self, objective: float) -> int:
        """Return the least T of a routing: the objective's bound less all else it can add."""
        added = int(np.count_nonzero(self.sketch.policies > 0)) * self.typical
        minmax = self.sketch.sketch.balance == "minmax"  # the largest load is T at most
        return max(int((objective - added) / (_SCALE + minmax)), 0)

    def moves(self, outcome: CpOutcome) -> tuple[tuple[int, int], ...]:
        """Return the chosen pairs, roots first, without what nobody needs."""
        chosen = {orbit for orbit, send in self.sends.items() if outcome.value(send)}
        pairs = [(chunk, link) for chunk, link, orbit in self.choices if orbit in chosen]
        return ordered_trees(self.logical, pairs)


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
    """Choose the links of all chunks; None where no routing was found (in time, or symmetric)."""
    model = _Model(sketch, prices, candidates(sketch, detour=detour), symmetric=symmetric)
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
    model = _Model(sketch, prices, candidates(sketch, detour=detour))
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
    model = _Model(sketch, prices, kept, symmetric=symmetric)
    begins = model.minimize_ordered(most=timed.length)
    if not symmetric:
        for (chunk, link), start in zip(timed.moves, timed.starts, strict=True):
            model.model.add_hint(begins[int(model.orbits.link_orbits[chunk, link])], start)
    outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed)
    return model.timed(outcome, begins) if outcome.found else timed.in_order()
