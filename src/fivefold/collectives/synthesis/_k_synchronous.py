"""Exact synthesis in synchronous steps (SCCL): one point, and the Pareto front of all.

A point (C, S, R) has C chunks per buffer, S steps and R rounds; its time is S * alpha + R times
that of one chunk on a link of the smallest unit of capacity. Feasibility is *not* monotone: that
(C, S, R) cannot be done says nothing about a larger C with a smaller R / C, because whole chunks
must fit whole rounds. So the front asks every (C, R) whose R / C is not below the bound.

References: SCCL, arXiv 2008.08708, sections 3 and 4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.schedules.bounds import bandwidth_bound
from fivefold.collectives.synthesis._instance import (
    ExactResult,
    Instance,
    Logical,
    NoSchedule,
    Orbits,
    Refuted,
    Undecided,
    answer,
    integer_capacities,
    logical_of,
    prune,
    reach,
    schedule_of,
)
from fivefold.collectives.synthesis._solver import (
    CpOutcome,
    OutOfTime,
    check_time,
    new_model,
    solve,
    time_limit,
)
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology

_MOST_VARIABLES = 3_000_000


def k_synchronous(
    collective: Collective,
    topology: Topology,
    *,
    steps: int,
    rounds: int,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> ExactResult:
    """Find a schedule of ``steps`` steps and ``rounds`` rounds, or prove that there is none.

    In a round a link carries as many chunks as its capacity has units, the unit being the largest
    common divisor of all capacities. A sum is solved as its inverse; an all-reduce as a
    reduce-scatter and an all-gather with half the steps and rounds each, so that "infeasible"
    then means: in this form.

    Args:
        collective: What is to be done, with its chunks.
        topology: Where.
        steps: Steps S.
        rounds: Rounds R, at least S.
        time_limit_s: Limit of each solver call, with the building of its model.
        seed: Seed of the solver.

    Returns:
        The schedule (its steps are set, the rounds of each are ``attributes["rounds"]``), a proof
        that there is none, or "unknown" when time ran out.

    Raises:
        ConfigurationError: Steps or rounds are not allowed, chunks differ in size, the link rates
            have no common measure, or the instance is too large for an exact search.
        InfeasibleError: Some rank cannot be reached at all.

    References:
        SCCL, arXiv 2008.08708, section 4.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> result = k_synchronous(all_gather(4), ring(4), steps=2, rounds=2)
        >>> result.status, result.schedule.attributes["rounds"]
        ('found', [1, 1])
    """
    halves = 2 if collective.name == "all_reduce" else 1
    if steps < 0 or rounds < steps or steps % halves or rounds % halves:
        message = f"steps={steps}, rounds={rounds} is no point of {collective.name}"
        hint = "rounds must not be below steps, and both even for an all-reduce"
        raise ConfigurationError(message, hint=hint)
    shape = (steps // halves, rounds // halves)
    rounds_of_steps: list[int] = []

    def find(part: Collective, place: Topology) -> tuple[Schedule, float]:
        logical = logical_of(part, place)
        _check_size(logical, shape[0])
        schedule, solver_s = _find(logical, shape, time_limit_s, seed)
        found = schedule.attributes["rounds"]
        # A part that is solved as its inverse runs backwards afterwards.
        rounds_of_steps.extend(found if place is topology else reversed(found))
        return schedule, solver_s

    result = answer(collective, topology, find)
    if result.schedule is None:
        return result
    attributes = {**result.schedule.attributes, "model": "synchronous", "rounds": rounds_of_steps}
    schedule = result.schedule.replaced(attributes=attributes, name="k_synchronous")
    return replace(result, schedule=schedule)


def _find(
    logical: Logical, shape: tuple[int, int], time_limit_s: float, seed: int
) -> tuple[Schedule, float]:
    steps, rounds = shape
    logical.chunk_bytes(1.0)
    capacities, unit_bytes_per_s = integer_capacities(logical.topology)
    what = f"{logical.collective.name} in {steps} steps and {rounds} rounds"
    if _hops(logical.instance) > steps:
        raise Refuted(f"{what}: some chunk has {_hops(logical.instance)} hops")
    if time_limit_s <= 0:
        raise Undecided(f"{what}: not decided, for there was no time")
    if steps == 0:
        return _schedule(logical, StepPlan((), ()), unit_bytes_per_s), 0.0
    try:
        with time_limit(time_limit_s):
            outcome, plan = search_steps(
                logical.instance,
                capacities.tolist(),
                steps=steps,
                rounds=rounds,
                time_limit_s=time_limit_s,
                seed=seed,
            )
    except OutOfTime as late:
        raise Undecided(f"{what}: {late.message}") from late
    if plan is None:
        if outcome.status == "infeasible":
            raise Refuted(f"{what}: the solver proved that there is none")
        raise Undecided(f"{what}: not decided within {time_limit_s:g} s")
    return _schedule(logical, plan, unit_bytes_per_s), outcome.solver_s


def _schedule(logical: Logical, plan: StepPlan, unit_bytes_per_s: float) -> Schedule:
    return schedule_of(
        logical,
        [(chunk, link) for _, chunk, link in plan.transfers],
        steps=[step for step, _, _ in plan.transfers],
        name="k_synchronous",
        attributes={
            "model": "synchronous",
            "rounds": list(plan.rounds),
            "unit_bytes_per_s": unit_bytes_per_s,
        },
    )


def _hops(instance: Instance) -> int:
    return reach(instance, np.ones(instance.num_links, np.int64)).horizon(instance)


def _check_size(logical: Logical, steps: int) -> None:
    instance = logical.instance
    count = instance.num_chunks * instance.num_links * max(steps, 1)
    if count > _MOST_VARIABLES:
        message = f"{instance.num_chunks} chunks on {instance.num_links} logical links in {steps}"
        hint = "use method='trees', 'matching' or 'flow', or fewer chunks"
        raise ConfigurationError(f"{message} steps are too many for an exact search", hint=hint)


@dataclass(frozen=True)
class ParetoPoint:
    """One point of the front.

    Args:
        chunks: Chunks per buffer C, as the collective's constructor counts them.
        steps: Steps S.
        rounds: Rounds R.
        schedule: The verified schedule.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> front = pareto_synthesis(lambda c: all_gather(3, c), ring(3), max_chunks=1)
        >>> point = front.points[0]
        >>> point.chunks, point.steps, point.rounds, point.rounds_per_chunk
        (1, 1, 1, Fraction(1, 1))
    """

    chunks: int
    steps: int
    rounds: int
    schedule: Schedule

    @property
    def rounds_per_chunk(self) -> Fraction:
        """Rounds per chunk R / C: the cost per byte."""
        return Fraction(self.rounds, self.chunks)


@dataclass(frozen=True)
class ParetoFront:
    """Points that no other beats in both steps and rounds per chunk.

    Args:
        points: The points, fewest steps first.
        undecided: (C, S, R) that ran out of time; the front is proved where this is empty.
        bound: No point has fewer rounds per chunk.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> front = pareto_synthesis(lambda c: all_gather(4, c), ring(4), max_chunks=2)
        >>> [(p.chunks, p.steps, p.rounds) for p in front.points], front.bound
        ([(2, 2, 3)], Fraction(3, 2))
    """

    points: tuple[ParetoPoint, ...]
    undecided: tuple[tuple[int, int, int], ...]
    bound: Fraction


def pareto_synthesis(
    make: Callable[[int], Collective],
    topology: Topology,
    *,
    max_chunks: int = 6,
    max_steps: int | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> ParetoFront:
    """Return all points that no other beats: fewer steps against fewer rounds per chunk.

    For each number of steps, every (C, R) with R / C below the best so far and not below the
    bound is asked in the order of R / C; nothing is inferred from another point.

    Args:
        make: The collective for a number of chunks, such as ``lambda c: all_gather(8, c)``; it
            must not sum (the front of the inverse is the same on the reversed topology).
        topology: Where.
        max_chunks: Largest C.
        max_steps: Largest S; None: until the bound is met, at most twice the number of ranks.
        time_limit_s: Limit of the whole front.
        seed: Seed of the solver.

    Returns:
        The front. Points not decided in time are named.

    Raises:
        ConfigurationError: The collective sums, or ``max_chunks`` is not positive.
        InfeasibleError: Some rank cannot be reached.

    References:
        SCCL, arXiv 2008.08708, section 4.3; the front here skips no pair.

    Examples:
        >>> from fivefold.collectives.schedules import broadcast
        >>> from fivefold.network.topology import line
        >>> front = pareto_synthesis(lambda c: broadcast(3, c), line(3), max_chunks=2)
        >>> [(p.chunks, p.steps, p.rounds) for p in front.points]
        [(1, 2, 2), (2, 3, 3)]
    """
    if max_chunks < 1:
        raise ConfigurationError(f"max_chunks must be positive; got {max_chunks}")
    deadline_s = time.perf_counter() + time_limit_s
    logicals = {chunks: logical_of(make(chunks), topology) for chunks in range(1, max_chunks + 1)}
    capacities, _ = integer_capacities(topology)
    bound = _bound(logicals[1], capacities.tolist())
    first = _hops(logicals[1].instance)
    last = max_steps if max_steps is not None else max(2 * topology.num_ranks, first)
    points: list[ParetoPoint] = []
    undecided: list[tuple[int, int, int]] = []
    for steps in range(first, last + 1):
        best = points[-1].rounds_per_chunk if points else None
        for chunks, rounds in _candidates(max_chunks, steps, (bound, best), 4 * last):
            left_s = deadline_s - time.perf_counter()
            try:
                schedule, _ = _find(logicals[chunks], (steps, rounds), left_s, seed)
            except NoSchedule as no:
                if no.status == "unknown":
                    undecided.append((chunks, steps, rounds))
                if left_s <= 0:
                    break
                continue
            points.append(ParetoPoint(chunks, steps, rounds, schedule))
            break
        if deadline_s <= time.perf_counter() or (points and points[-1].rounds_per_chunk <= bound):
            break
    return ParetoFront(tuple(points), tuple(undecided), bound)


def _candidates(
    max_chunks: int, steps: int, limits: tuple[Fraction, Fraction | None], most: int
) -> Iterator[tuple[int, int]]:
    least, best = limits
    pairs = [
        (Fraction(rounds, chunks), chunks, rounds)
        for chunks in range(1, max_chunks + 1)
        for rounds in range(steps, max(most, steps) + 1)
        if Fraction(rounds, chunks) >= least and (best is None or Fraction(rounds, chunks) < best)
    ]
    for _, chunks, rounds in sorted(pairs):
        yield chunks, rounds


def _bound(logical: Logical, capacities: list[int]) -> Fraction:
    """Return the least rounds per chunk by simple sets of ranks and by the bottleneck cut."""
    simple = _least_ratio(logical, capacities)
    _, unit_bytes_per_s = integer_capacities(logical.topology)
    # With chunks of one unit's bytes per second a round takes one second.
    size_bytes = unit_bytes_per_s * logical.collective.buffer_weight
    place = logical.topology.scaled(latency=0.0)
    rounds = bandwidth_bound(logical.collective, place, size_bytes).seconds
    ratio = Fraction(rounds).limit_denominator(10_000)
    if abs(float(ratio) - rounds) > 1e-9 * rounds:
        ratio = Fraction(rounds * (1 - 1e-9))
    return max(simple, ratio)


def _least_ratio(logical: Logical, capacities: list[int]) -> Fraction:
    """Chunks that must enter a set of ranks over what can enter in a round, over simple sets."""
    instance = logical.instance
    everyone = frozenset(range(instance.num_ranks))
    sets = [frozenset([rank]) for rank in everyone] + [frozenset(box) for box in logical.boxes]
    ratios = [Fraction(0)]
    for ranks in (part for inside in sets for part in (inside, everyone - inside)):
        lacking = sum(
            1
            for holders, wanted in zip(instance.holders, instance.wanted, strict=True)
            if not holders & ranks and wanted & ranks
        )
        # The last resource of a route ends in the rank: all that enters the rank shares it.
        ends = zip(instance.sources.tolist(), instance.targets.tolist(), strict=True)
        entering = {
            resources[-1]
            for resources, (source, target) in zip(instance.resources, ends, strict=True)
            if source not in ranks and target in ranks
        }
        room = sum(capacities[resource] for resource in entering)
        if lacking and room:
            ratios.append(Fraction(lacking, room))
    return max(ratios)


@dataclass(frozen=True)
class StepPlan:
    """A point that was found: the rounds of each step, and (step, chunk, link) of each transfer."""

    rounds: tuple[int, ...]
    transfers: tuple[tuple[int, int, int], ...]


class _Model:
    """Variables and constraints of one point."""

    def __init__(
        self, instance: Instance, capacities: Sequence[int], shape: tuple[int, int], orbits: Orbits
    ) -> None:
        self.instance, self.orbits = instance, orbits
        self.steps, num_rounds = shape
        self.model = new_model()
        most = num_rounds - self.steps + 1
        self.rounds = [self.model.new_int_var(1, most, f"r{step}") for step in range(self.steps)]
        self.model.add(sum(self.rounds) == num_rounds)
        self.sends: dict[tuple[int, int], Any] = {}
        self.active: list[tuple[int, int, int]] = []  # (chunk, link, step) that have a variable
        self._add_sends()
        self._add_arrivals()
        self._add_loads(capacities)

    def _add_sends(self) -> None:
        instance = self.instance
        hops = np.ones(instance.num_links, np.int64)
        windows = reach(instance, hops).windows(instance, hops, self.steps)
        for chunk, link, first, end in windows:
            check_time()
            for step in range(first, end):
                self.active.append((chunk, link, step))
                self._variable(chunk, link, step, make=True)

    def _variable(self, chunk: int, link: int, step: int, *, make: bool = False) -> Any:
        key = (int(self.orbits.link_orbits[chunk, link]), step)
        if make and key not in self.sends:
            self.sends[key] = self.model.new_bool_var(f"x{key[0]}.{step}")
        return self.sends.get(key)

    def _add_arrivals(self) -> None:
        """At most one arrival per chunk and rank; a send needs an earlier one at its source."""
        first = self.orbits.representative_ranks()
        into: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        out_of: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for chunk, link, step in self.active:
            check_time()
            send = self._variable(chunk, link, step)
            target, source = int(self.instance.targets[link]), int(self.instance.sources[link])
            if first[chunk, target]:
                into.setdefault((chunk, target), []).append((step, send))
            if first[chunk, source] and source not in self.instance.holders[chunk]:
                out_of.setdefault((chunk, source), []).append((step, send))
        self._receive_once(into, first)
        for pair, sends in out_of.items():
            check_time()
            arrivals = into.get(pair, [])
            for step, send in sends:
                earlier = [arrival for when, arrival in arrivals if when < step]
                self.model.add_bool_or([send.negated(), *earlier])

    def _receive_once(
        self, into: dict[tuple[int, int], list[tuple[int, Any]]], first: NDArray[np.bool_]
    ) -> None:
        for chunk, wanted in enumerate(self.instance.wanted):
            for rank in wanted - self.instance.holders[chunk]:
                if first[chunk, rank]:
                    arrivals = into.get((chunk, rank), [])
                    self.model.add(sum(send for _, send in arrivals) == 1)
        for (chunk, rank), arrivals in into.items():
            if rank not in self.instance.wanted[chunk]:
                self.model.add(sum(send for _, send in arrivals) <= 1)

    def _add_loads(self, capacities: Sequence[int]) -> None:
        loads: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for chunk, link, step in self.active:
            key = (int(self.orbits.link_orbits[chunk, link]), step)
            check_time()
            for resource in self.instance.resources[link]:
                loads.setdefault((resource, step), []).append((key[0], self.sends[key]))
        seen = set()
        for (resource, step), users in loads.items():
            # Resources that a symmetry makes equal carry the same variables: one row for all.
            check_time()
            row = (step, capacities[resource], tuple(sorted(orbit for orbit, _ in users)))
            if row not in seen:
                seen.add(row)
                load = sum(send for _, send in users)
                self.model.add(load <= capacities[resource] * self.rounds[step])

    def plan(self, outcome: CpOutcome) -> StepPlan:
        found = [
            (step, chunk, link)
            for chunk, link, step in self.active
            if outcome.value(self._variable(chunk, link, step))
        ]
        rounds = tuple(outcome.value(count) for count in self.rounds)
        return StepPlan(rounds, tuple(prune(self.instance, found)))


def search_steps(
    instance: Instance,
    capacities: Sequence[int],
    *,
    steps: int,
    rounds: int,
    orbits: Orbits | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> tuple[CpOutcome, StepPlan | None]:
    """Find a schedule of ``steps`` steps and ``rounds`` rounds, or prove that there is none."""
    model = _Model(instance, capacities, (steps, rounds), orbits or Orbits(instance))
    outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed)
    return outcome, model.plan(outcome) if outcome.found else None
