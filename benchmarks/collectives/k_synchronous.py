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

from benchmarks.collectives.exact import (
    ExactResult,
    NoSchedule,
    Refuted,
    Undecided,
    answer,
    integer_capacities,
    reach,
)
from benchmarks.collectives.slotted import SendModel
from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.schedules.bounds import bandwidth_bound
from fivefold.collectives.synthesis._instance import (
    Instance,
    Logical,
    Orbits,
    logical_of,
    schedule_of,
)
from fivefold.collectives.synthesis._solver import OutOfTime, check_time, solve, time_limit
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
    if _hops(logical) > steps:
        raise Refuted(f"{what}: some chunk has {_hops(logical)} hops")
    if time_limit_s <= 0:
        raise Undecided(f"{what}: not decided, for there was no time")
    if steps == 0:
        return _schedule(logical, [], [], unit_bytes_per_s), 0.0
    try:
        with time_limit(time_limit_s):
            model = _StepModel(logical, capacities.tolist(), shape)
            outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed)
    except OutOfTime as late:
        raise Undecided(f"{what}: {late.message}") from late
    if outcome.status == "infeasible":
        raise Refuted(f"{what}: the solver proved that there is none")
    if not outcome.found:
        raise Undecided(f"{what}: not decided within {time_limit_s:g} s")
    spans = [outcome.value(count) for count in model.rounds]
    return _schedule(logical, model.plan(outcome), spans, unit_bytes_per_s), outcome.solver_s


def _schedule(
    logical: Logical, plan: list[tuple[int, int, int]], spans: list[int], unit_bytes_per_s: float
) -> Schedule:
    """Return the schedule of (step, chunk, link) triples, and how many rounds each step has."""
    found = schedule_of(
        logical,
        [(chunk, link) for _, chunk, link in plan],
        name="k_synchronous",
        attributes={"model": "synchronous", "rounds": spans, "unit_bytes_per_s": unit_bytes_per_s},
    )
    return found.replaced(steps=np.array([step for step, _, _ in plan], np.int32))


def _hops(instance: Instance) -> int:
    return reach(instance, np.ones(instance.num_links, np.int64)).horizon(instance)


def _check_size(logical: Logical, steps: int) -> None:
    instance = logical
    count = instance.num_chunks * instance.num_links * max(steps, 1)
    if count > _MOST_VARIABLES:
        message = f"{instance.num_chunks} chunks on {instance.num_links} logical links in {steps}"
        hint = "use method='trees', 'matching' or 'flow', or fewer chunks"
        raise ConfigurationError(f"{message} steps are too many for an exact search", hint=hint)


@dataclass(frozen=True)
class ParetoPoint:
    """One point of the front."""

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
    """Points that no other beats in both steps and rounds per chunk."""

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
    bound = least_rounds(logicals[1])
    first = _hops(logicals[1])
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


def least_rounds(logical: Logical) -> Fraction:
    """Return the least rounds per chunk: what the bottleneck cut needs."""
    _, unit_bytes_per_s = integer_capacities(logical.topology)
    # With chunks of one unit's bytes per second a round takes one second.
    size_bytes = unit_bytes_per_s * logical.collective.buffer_weight
    place = logical.topology.scaled(latency=0.0)
    rounds = bandwidth_bound(logical.collective, place, size_bytes).seconds
    ratio = Fraction(rounds).limit_denominator(10_000)
    return ratio if abs(float(ratio) - rounds) <= 1e-9 * rounds else Fraction(rounds * (1 - 1e-9))


class _StepModel(SendModel):
    """Whether a point can be done: a send of one step arrives before the next."""

    def __init__(
        self, instance: Instance, capacities: Sequence[int], shape: tuple[int, int]
    ) -> None:
        steps, num_rounds = shape
        hops = np.ones(instance.num_links, np.int64)
        super().__init__(instance, hops, steps, Orbits(instance))
        most = num_rounds - steps + 1
        self.rounds = [self.model.new_int_var(1, most, f"r{step}") for step in range(steps)]
        self.model.add(sum(self.rounds) == num_rounds)
        loads: dict[tuple[int, int], list[Any]] = {}
        for chunk, link, step in self.active:
            check_time()
            for resource in instance.resources[link]:
                loads.setdefault((resource, step), []).append(self.variable(chunk, link, step))
        for (resource, step), sends in loads.items():
            self.model.add(sum(sends) <= capacities[resource] * self.rounds[step])
