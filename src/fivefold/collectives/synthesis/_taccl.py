"""TACCL: an algorithm from a topology, a collective and a communication sketch, in three stages.

Routing (which links each chunk takes), ordering (a list schedule) and scheduling (exact times,
with chunks between boxes joined into messages). The first and last are CP-SAT models without
large constants; in the last the order is free as well, which TACCL fixes. On small instances the
time that is left goes to routes and times at once, which finds what no order of the first routes
gives. Sums are solved as copies run backwards. Whatever the solvers reach in time is a complete,
verified algorithm.

References: TACCL, arXiv 2111.04867, sections 3 to 5.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fivefold.collectives.schedules import Collective, Schedule, evaluate, verify_schedule
from fivefold.collectives.schedules.timing import with_times
from fivefold.collectives.synthesis._instance import bound_of, by_inversion, schedule_of
from fivefold.collectives.synthesis._sketch import Sketch
from fivefold.collectives.synthesis._sketched import Sketched, derive_sketch, sketched
from fivefold.collectives.synthesis._solver import SLACK_S, OutOfTime, time_limit
from fivefold.collectives.synthesis._taccl_order import (
    Messages,
    Prices,
    Timed,
    best_order,
    improve_order,
    join_messages,
    prices_of,
)
from fivefold.collectives.synthesis._taccl_routing import (
    Routing,
    candidates,
    greedy_routes,
    route,
    route_and_order,
)
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology

Progress = Callable[[str], None]
_MOST_PAIRS = 400_000  # (chunk, link) pairs that the routing model may have
_DETOUR_PAIRS = 20_000  # below it paths one hop longer than the shortest are looked at as well
_SHOP_MOVES = 6_000  # transfers that the scheduling model may have
_JOINT_PAIRS = 3_000  # (chunk, link) pairs up to which routes and times are looked for at once


@dataclass(frozen=True)
class TacclResult:
    """An algorithm with what the stages said.

    TACCL proves nothing about the whole: unless ``is_optimal``, a longer search, another sketch,
    other chunks or another method (see `synthesize`) may find a shorter schedule.

    Args:
        schedule: The verified schedule with times in TACCL's model ("serial").
        time_s: Its length.
        routing_bound_s: No routing that was looked at (shortest paths in hops, in small instances
            one hop more) is shorter; 0 where unknown. For an all-reduce the sum of both parts.
        bound_s: No schedule of this collective is shorter, whatever its sketch; 0 where unknown.
        stages: Seconds spent and lengths reached, by stage.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> result = taccl(all_gather(4), ring(4, bandwidth=1e9, latency=1e-6), size_bytes=4e3)
        >>> result.schedule.num_transfers, round(1e6 * result.time_s, 6)
        (12, 4.0)
    """

    schedule: Schedule
    time_s: float
    routing_bound_s: float
    bound_s: float = 0.0
    stages: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_optimal(self) -> bool:
        """Return whether no schedule of this collective can be shorter."""
        return self.time_s <= self.bound_s * (1 + 1e-9)


def taccl(
    collective: Collective,
    topology: Topology,
    sketch: Sketch | None = None,
    *,
    size_bytes: float,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> TacclResult:
    """Synthesise an algorithm that keeps to a sketch.

    Args:
        collective: What is to be done, already cut into chunks (``sketch.chunks`` says how many
            the sketch means); chunks must be equal in size.
        topology: Where; ranks of a box follow one another.
        sketch: What to keep to; None: ``derive_sketch``.
        size_bytes: Size of the collective.
        time_limit_s: Limit of the whole synthesis, with the building of its models. A first
            schedule without a solver may take up to two seconds more.
        seed: Seed of solvers and random priorities.
        progress: Called with one line per stage and improvement.

    Returns:
        The verified schedule and what the stages said.

    Raises:
        ConfigurationError: The sketch does not fit, chunks differ in size, or the instance is too
            large for the routing model.
        InfeasibleError: The sketch or the topology leaves no way for some chunk, or the time was
            too short even for a schedule without a solver.

    References:
        TACCL, arXiv 2111.04867, section 5.

    Examples:
        >>> from fivefold.collectives.schedules import reduce_scatter
        >>> from fivefold.network.topology import fully_connected
        >>> net = fully_connected(3, bandwidth=1e9, latency=0)
        >>> taccl(reduce_scatter(3), net, size_bytes=3e3).schedule.num_transfers
        6
    """
    with time_limit(time_limit_s, slack_s=SLACK_S):
        if sketch is None:
            sketch = derive_sketch(topology, collective, size_bytes=size_bytes)
        plan = sketch
        parts = 2 if collective.name == "all_reduce" else 1
        run = _Run(size_bytes, time_limit_s / parts, seed, progress)

        def find(part: Collective, place: Topology) -> Schedule:
            # A sum is solved on the reversed topology, where the links run backwards too.
            turned = collective.reducing and place is not topology
            return run.find(part, place, plan.reversed() if turned else plan)

        schedule = by_inversion(collective, topology, find)
    if collective.reducing:
        timing = evaluate(schedule, topology, size_bytes=size_bytes, model="serial")
        schedule = with_times(schedule, timing)
    verify_schedule(schedule, topology=topology)
    length_s = float(schedule.ends_s.max(initial=0.0)) if schedule.ends_s is not None else 0.0
    schedule = schedule.replaced(name=f"taccl:{plan.name}")
    bound_s = bound_of(collective, topology, size_bytes).seconds
    result = TacclResult(schedule, length_s, run.bound_s, bound_s, run.stages)
    if progress is not None and not result.is_optimal:
        progress(f"{length_s:.6g} s, {bound_s:.6g} s is the lower bound: it may be improved")
    return result


class _Run:
    """The three stages under one deadline."""

    def __init__(
        self, size_bytes: float, time_limit_s: float, seed: int, progress: Progress | None
    ) -> None:
        self.size_bytes, self.time_limit_s, self.seed = size_bytes, time_limit_s, seed
        self.progress = progress
        self.bound_s = 0.0
        self.stages: dict[str, Any] = {"routing_s": 0.0, "ordering_s": 0.0, "scheduling_s": 0.0}

    def find(self, collective: Collective, topology: Topology, plan: Sketch) -> Schedule:
        deadline_s = time.perf_counter() + self.time_limit_s
        sketch = sketched(collective, topology, plan)
        prices = prices_of(sketch.logical, size_bytes=self.size_bytes)
        # Routes without a solver come first: there is something to return whenever time is over.
        greedy = greedy_routes(sketch, prices)
        best = self._timed(sketch, greedy.moves, None)
        bounds_s: list[float] = []
        try:
            with time_limit(max(deadline_s - time.perf_counter(), SLACK_S / 4)):
                timed = best_order(sketch, prices, greedy.moves, time_limit_s=0.0, seed=self.seed)
                best = min(best, self._priced(sketch, prices, _plain(prices, timed)), key=_length_s)
            with time_limit(deadline_s - time.perf_counter()):
                for schedule in self._improved(sketch, prices, greedy, bounds_s, deadline_s):
                    if _length_s(schedule) < _length_s(best):
                        best = schedule
                        self._say(f"schedule of {_length_s(best):.6g} s")
        except OutOfTime:
            self._say("the time is over")
        self.bound_s += min(bounds_s, default=0.0)
        return best

    def _improved(
        self,
        sketch: Sketched,
        prices: Prices,
        greedy: Routing,
        bounds_s: list[float],
        deadline_s: float,
    ) -> Iterator[Schedule]:
        """Schedules by the solver, until one meets the lower bound; the routings' bounds."""
        logical = sketch.logical
        least_s = bound_of(logical.collective, logical.topology, self.size_bytes).seconds
        best_s = float("inf")
        for routing, symmetric in self._routings(sketch, prices, greedy, deadline_s):
            if not symmetric or routing.bound:
                bounds_s.append(routing.bound * prices.unit_s)
            for schedule in self._schedules(sketch, prices, routing, symmetric, deadline_s):
                best_s = min(best_s, _length_s(schedule))
                yield schedule
            if best_s <= least_s * (1 + 1e-9):
                return
        yield from self._jointly(sketch, prices, best_s, least_s, deadline_s)

    def _jointly(
        self, sketch: Sketched, prices: Prices, best_s: float, least_s: float, deadline_s: float
    ) -> Iterator[Schedule]:
        """Shorter schedules from routes and times together, in the time that is left."""
        for detour in (0, 1, 2):
            left_s = deadline_s - time.perf_counter()
            pairs = int(candidates(sketch, detour=detour).sum())
            ordered = sketch.sketch.own_chunks_first
            if best_s <= least_s * (1 + 1e-9) or pairs > _JOINT_PAIRS or ordered or left_s <= 0:
                return
            started_s = time.perf_counter()
            below = math.ceil(best_s / prices.unit_s * (1 - 1e-9))
            timed, proved = route_and_order(
                sketch,
                prices,
                below=below,
                detour=detour,
                time_limit_s=left_s / (3 - detour),
                seed=self.seed,
            )
            self.stages["joint_s"] = self.stages.get("joint_s", 0.0) + (
                time.perf_counter() - started_s
            )
            self.stages[f"best_with_detour_{detour}"] = proved
            if timed is None:
                continue
            plain = self._priced(sketch, prices, _plain(prices, timed))
            limit_s = max(deadline_s - time.perf_counter(), 0.0) * 0.2
            joined = join_messages(sketch, prices, timed, time_limit_s=limit_s, seed=self.seed)
            for schedule in (plain, self._priced(sketch, prices, joined)):
                best_s = min(best_s, _length_s(schedule))
                yield schedule

    def _say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def _routings(
        self, sketch: Sketched, prices: Prices, greedy: Routing, deadline_s: float
    ) -> Iterator[tuple[Routing, bool]]:
        """Symmetric routes, then free ones, then the greedy ones where no solver found any."""
        pairs = int(candidates(sketch).sum())
        if pairs > _MOST_PAIRS:
            message = f"{pairs} choices of chunk and link are too many for the routing model"
            hint = "use method='matching' or 'trees', fewer chunks, or a sketch with fewer links"
            raise ConfigurationError(message, hint=hint)
        detours = (0, 1) if pairs <= _DETOUR_PAIRS else (0,)
        ways = [(symmetric, detour) for symmetric in (True, False) for detour in detours]
        if not sketch.symmetries:
            ways = [(False, detour) for detour in detours]
        found = 0
        for number, (symmetric, detour) in enumerate(ways):
            left_s = deadline_s - time.perf_counter()
            limit_s = left_s * 0.5 / (len(ways) - number)
            started_s = time.perf_counter()
            routing = route(
                sketch,
                prices,
                symmetric=symmetric,
                detour=detour,
                time_limit_s=limit_s,
                seed=self.seed,
            )
            self.stages["routing_s"] += time.perf_counter() - started_s
            if routing is not None:
                found += 1
                self._say(f"routing of at least {routing.bound * prices.unit_s:.6g} s")
                yield routing, symmetric
        if not found:
            yield greedy, False

    def _schedules(
        self,
        sketch: Sketched,
        prices: Prices,
        routing: Routing,
        symmetric: bool,  # noqa: FBT001 - one of two private loops
        deadline_s: float,
    ) -> Iterator[Schedule]:
        started_s = time.perf_counter()
        left_s = max(deadline_s - started_s, 0.0)
        timed = best_order(
            sketch, prices, routing.moves, time_limit_s=min(left_s * 0.05, 2.0), seed=self.seed
        )
        self.stages["ordering_s"] += time.perf_counter() - started_s
        started_s = time.perf_counter()
        if len(timed.moves) <= _SHOP_MOVES:
            if symmetric:
                limit_s = max(deadline_s - time.perf_counter(), 0.0) * 0.15
                timed, _ = improve_order(
                    sketch, prices, timed, symmetric=True, time_limit_s=limit_s, seed=self.seed
                )
            if timed.length > routing.bound:
                limit_s = max(deadline_s - time.perf_counter(), 0.0) * 0.2
                timed, _ = improve_order(
                    sketch, prices, timed, time_limit_s=limit_s, seed=self.seed
                )
        yield self._priced(sketch, prices, _plain(prices, timed))
        limit_s = max(deadline_s - time.perf_counter(), 0.0) * 0.2
        joined = join_messages(sketch, prices, timed, time_limit_s=limit_s, seed=self.seed)
        self.stages["scheduling_s"] += time.perf_counter() - started_s
        yield self._priced(sketch, prices, joined)

    def _priced(self, sketch: Sketched, prices: Prices, messages: Messages) -> Schedule:
        """Return the schedule in seconds: the order and the messages found, priced exactly."""
        timed = messages.timed
        beside = _places_beside(sketch, timed)
        # Parallel links start a little apart: equal times would mean one message.
        starts_s = [
            (start + 1e-3 * place) * prices.unit_s
            for start, place in zip(timed.starts, beside, strict=True)
        ]
        ends_s = [arrival * prices.unit_s for arrival in messages.arrivals]
        return self._timed(sketch, timed.moves, (starts_s, ends_s))

    def _timed(
        self,
        sketch: Sketched,
        moves: Sequence[tuple[int, int]],
        times_s: tuple[list[float], list[float]] | None,
    ) -> Schedule:
        """The moves in the order of their times, else as listed, with the times they really get."""
        order = schedule_of(
            sketch.logical,
            moves,
            times_s=times_s,
            name="taccl",
            attributes={"sketch": sketch.sketch.name},
        )
        topology = sketch.logical.topology
        timing = evaluate(order, topology, size_bytes=self.size_bytes, model="serial")
        return with_times(order, timing)


def _plain(prices: Prices, timed: Timed) -> Messages:
    delays = prices.delays
    arrivals = tuple(
        start + int(delays[link])
        for start, (_, link) in zip(timed.starts, timed.moves, strict=True)
    )
    return Messages(timed, arrivals, 0.0)


def _places_beside(sketch: Sketched, timed: Timed) -> list[int]:
    """For each transfer the place of its link among those between the same two ranks."""
    instance = sketch.logical.instance
    counts: dict[tuple[int, int], int] = {}
    places = []
    for link in range(instance.num_links):
        pair = int(instance.sources[link]), int(instance.targets[link])
        places.append(counts.get(pair, 0))
        counts[pair] = places[-1] + 1
    return [places[link] for _, link in timed.moves]


def _length_s(schedule: Schedule) -> float:
    return float(schedule.ends_s.max(initial=0.0)) if schedule.ends_s is not None else 0.0
