"""TACCL: an algorithm from a topology, a collective and a communication sketch, in three stages.

Routing (which links each chunk takes), ordering (a list schedule) and scheduling (exact times,
with chunks between boxes joined into messages). In the last the order is free as well, and on
small instances the time that is left goes to routes and times at once. Sums are copies run
backwards. References: TACCL, arXiv 2111.04867, sections 3 to 5.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fivefold.collectives.schedules import Collective, Schedule, evaluate, verify_schedule
from fivefold.collectives.schedules.timing import with_times
from fivefold.collectives.synthesis._instance import bound_of, by_inversion, schedule_of
from fivefold.collectives.synthesis._sketch import Sketch
from fivefold.collectives.synthesis._sketched import Sketched, derive_sketch, sketched
from fivefold.collectives.synthesis._solver import SLACK_S, OutOfTime, clock_s, time_limit
from fivefold.collectives.synthesis._taccl_order import (
    Prices,
    Timed,
    best_order,
    join_messages,
    prices_of,
)
from fivefold.collectives.synthesis._taccl_routing import (
    Routing,
    candidates,
    greedy_routes,
    improve_order,
    route,
    route_and_order,
)
from fivefold.errors import ConfigurationError, require_number, require_whole
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
        ConfigurationError: The sketch does not fit, chunks differ in size, a number is out of
            range, or the instance is too large for the routing model.
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
    seed = require_whole("seed", seed, least=0)
    require_number("time_limit_s", time_limit_s)
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
    length_s = schedule.total_s
    schedule = schedule.replaced(name=f"taccl:{plan.name}")
    bound_s = bound_of(collective, topology, size_bytes).seconds
    result = TacclResult(schedule, length_s, run.bound_s, bound_s, run.stages)
    if progress is not None and not result.is_optimal:
        progress(f"{length_s:.6g} s, {bound_s:.6g} s is the lower bound: it may be improved")
    return result


class _Run:
    """The three stages, for one part of the collective after the other, each with its deadline."""

    sketch: Sketched
    prices: Prices
    deadline_s: float
    best: Schedule

    def __init__(
        self, size_bytes: float, time_limit_s: float, seed: int, progress: Progress | None
    ) -> None:
        self.size_bytes, self.time_limit_s, self.seed = size_bytes, time_limit_s, seed
        self.progress = progress
        self.bound_s = 0.0
        self.stages: dict[str, Any] = {"routing_s": 0.0, "ordering_s": 0.0, "scheduling_s": 0.0}

    def find(self, collective: Collective, topology: Topology, plan: Sketch) -> Schedule:
        """Search the stages of TACCL; return the best schedule."""
        self.deadline_s = clock_s() + self.time_limit_s
        self.sketch = sketched(collective, topology, plan)
        self.prices = prices_of(self.sketch.logical, size_bytes=self.size_bytes)
        # Routes without a solver come first: there is something to return whenever time is over.
        greedy = greedy_routes(self.sketch, self.prices)
        self.best = self._timed(greedy.moves, None)
        bounds_s: list[float] = []
        try:
            with time_limit(max(self._left_s(), SLACK_S / 4)):
                self._order(greedy, 0.0)
            with time_limit(self._left_s()):
                self._improve(greedy, bounds_s)
        except OutOfTime:
            self._say("the time is over")
        self.bound_s += min(bounds_s, default=0.0)
        return self.best

    def _left_s(self, share: float = 1.0) -> float:
        return max(self.deadline_s - clock_s(), 0.0) * share

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - started_s

    def _say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def _improve(self, greedy: Routing, bounds_s: list[float]) -> None:
        """Look for shorter schedules until one meets the lower bound; note routings' bounds."""
        logical = self.sketch.logical
        enough_s = bound_of(logical.collective, logical.topology, self.size_bytes).seconds
        enough_s *= 1 + 1e-9
        for routing, symmetric in self._routings(greedy):
            if not symmetric or routing.bound:
                bounds_s.append(routing.bound * self.prices.unit_s)
            self._schedule(routing, symmetric=symmetric)
            if self.best.total_s <= enough_s:
                return
        # Routes and times together, in the time that is left.
        for detour in (0, 1, 2):
            pairs = int(candidates(self.sketch, detour=detour).sum())
            if self.best.total_s <= enough_s or pairs > _JOINT_PAIRS or self._left_s() <= 0:
                return
            with self._stage("joint_s"):
                timed, proved = route_and_order(
                    self.sketch,
                    self.prices,
                    below=math.ceil(self.best.total_s / self.prices.unit_s * (1 - 1e-9)),
                    detour=detour,
                    time_limit_s=self._left_s(1 / (3 - detour)),
                    seed=self.seed,
                )
            self.stages[f"best_with_detour_{detour}"] = proved
            if timed is not None:
                self._offer(timed)
                self._join(timed)

    def _routings(self, greedy: Routing) -> Iterator[tuple[Routing, bool]]:
        """Yield symmetric routes, then free ones, then greedy ones where no solver found any."""
        pairs = int(candidates(self.sketch).sum())
        if pairs > _MOST_PAIRS:
            message = f"{pairs} choices of chunk and link are too many for the routing model"
            hint = "use method='matching' or 'trees', fewer chunks, or a sketch with fewer links"
            raise ConfigurationError(message, hint=hint)
        symmetries = (True, False) if self.sketch.symmetries else (False,)
        detours = (0, 1) if pairs <= _DETOUR_PAIRS else (0,)
        ways = list(itertools.product(symmetries, detours))
        found = 0
        for number, (symmetric, detour) in enumerate(ways):
            with self._stage("routing_s"):
                routing = route(
                    self.sketch,
                    self.prices,
                    symmetric=symmetric,
                    detour=detour,
                    time_limit_s=self._left_s(0.5 / (len(ways) - number)),
                    seed=self.seed,
                )
            if routing is not None:
                found += 1
                self._say(f"routing of at least {routing.bound * self.prices.unit_s:.6g} s")
                yield routing, symmetric
        if not found:
            yield greedy, False

    def _order(self, routing: Routing, limit_s: float) -> Timed:
        timed = best_order(
            self.sketch, self.prices, routing.moves, time_limit_s=limit_s, seed=self.seed
        )
        self._offer(timed)
        return timed

    def _schedule(self, routing: Routing, *, symmetric: bool) -> None:
        """Order and schedule a routing."""
        with self._stage("ordering_s"):
            timed = self._order(routing, min(self._left_s(0.05), 2.0))
        if len(timed.moves) <= _SHOP_MOVES:
            with self._stage("scheduling_s"):
                if symmetric:
                    timed = self._improved(timed, symmetric=True, share=0.15)
                if timed.length > routing.bound:
                    timed = self._improved(timed, symmetric=False, share=0.2)
            self._offer(timed)
        self._join(timed)

    def _improved(self, timed: Timed, *, symmetric: bool, share: float) -> Timed:
        return improve_order(
            self.sketch,
            self.prices,
            timed,
            symmetric=symmetric,
            time_limit_s=self._left_s(share),
            seed=self.seed,
        )

    def _join(self, timed: Timed) -> None:
        """Let chunks between boxes travel together."""
        with self._stage("scheduling_s"):
            limit_s = self._left_s(0.2)
            joined = join_messages(
                self.sketch, self.prices, timed, time_limit_s=limit_s, seed=self.seed
            )
        self._offer(joined)

    def _offer(self, timed: Timed) -> None:
        """Price the order and the messages found exactly, in seconds; keep the best."""
        starts_s = [time * self.prices.unit_s for time in timed.starts]
        ends_s = [time * self.prices.unit_s for time in timed.arrivals]
        schedule = self._timed(timed.moves, (starts_s, ends_s))
        if schedule.total_s < self.best.total_s:
            self.best = schedule
            self._say(f"schedule of {schedule.total_s:.6g} s")

    def _timed(
        self, moves: Sequence[tuple[int, int]], times_s: tuple[list[float], list[float]] | None
    ) -> Schedule:
        """Return moves in order of their times, else as listed, with the times they really get."""
        logical = self.sketch.logical
        attributes = {"sketch": self.sketch.sketch.name}
        order = schedule_of(logical, moves, times_s=times_s, name="taccl", attributes=attributes)
        timing = evaluate(order, logical.topology, size_bytes=self.size_bytes, model="serial")
        return with_times(order, timing)
