"""Time shifts that let the communication of one job fall into the compute of another.

Each job's demand on a link repeats with its iteration, so it lives on a circle; jobs of one link
share one whose perimeter is the least common multiple of their periods. A job's shift turns its
demand on all its links at once, so the shifts of all jobs that links join are sought together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, require_number, require_whole
from fivefold.flows.routing import Routing

FloatArray = npt.NDArray[np.float64]
_GRID_MOST = 20_000  # combinations that are tried one by one
_ROUNDS = 20
_LONGEST_CIRCLE = 4096  # slots; periods whose common multiple is longer are taken as incommensurate


@dataclass(frozen=True)
class Shifts:
    """By how much each job begins later.

    Attributes:
        shift_s: By job, in [0, period).
        period_s: By job: seconds of an iteration without contention.
        score: 1 less the demand above capacity over all demand, on links that jobs share; 1 where
            the jobs fit beside each other.
        score_before: The same with no shift.
        left_out: Pairs of jobs whose periods have no common multiple that is short enough: no
            constant shift keeps them apart.
    """

    shift_s: Mapping[str, float]
    period_s: Mapping[str, float]
    score: float
    score_before: float
    left_out: tuple[tuple[str, str], ...]


def time_shifts(
    routing: Routing,
    *,
    slots_per_period: int = 48,
    period_tolerance: float = 0.01,
) -> Shifts:
    """Find the shifts of least demand above capacity.

    Args:
        routing: Paths of all jobs.
        slots_per_period: Places on the circle of the shortest period.
        period_tolerance: Periods that differ by this share are taken for equal.

    Returns:
        The shifts; never of a lower score than no shift.

    Raises:
        ConfigurationError: The number of slots or the tolerance is not allowed.

    References:
        CASSINI, NSDI 2024, arXiv 2308.00852: circles, affinity graph, compatibility score. There
        the graph is walked link by link; here a component is searched together: the whole grid
        where it is small, else from several starts one job at a time.

    Examples:
        >>> from fivefold.flows import FlowDemand, JobTraffic, route_flows
        >>> from fivefold.network.topology import switch
        >>> jobs = [
        ...     JobTraffic(job_id=name, compute_s=1.0, flows=(FlowDemand(0, 1, 1e9),))
        ...     for name in ("a", "b")
        ... ]
        >>> found = time_shifts(route_flows(switch(2, bandwidth="1 GB/s"), jobs))
        >>> found.score_before, found.score, found.shift_s["b"] - found.shift_s["a"]
        (0.5, 1.0, 1.0)
    """
    require_whole("slots_per_period", slots_per_period, least=2)
    if require_number("period_tolerance", period_tolerance) >= 1:
        raise ConfigurationError(f"period_tolerance must be below 1; got {period_tolerance}")
    periods = {
        job.job_id: job.compute_s + routing.communication_s(job.job_id) for job in routing.traffic
    }
    turning = {name: period for name, period in periods.items() if period > 0}
    shifts = dict.fromkeys(periods, 0.0)
    left_out: list[tuple[str, str]] = []
    before = after = demand = 0.0
    for group in _components(_sharing(routing, list(turning))):
        # Slots of its own: no period of jobs on other links makes its circles longer.
        own_periods = {name: period for name, period in turning.items() if name in group}
        slot_s = min(own_periods.values()) / slots_per_period
        slots = _in_slots(own_periods, slot_s, period_tolerance)
        circles, without = _circles(routing, slots)
        left_out += without
        for component in _components([set(circle.jobs) for circle in circles]):
            own = [circle for circle in circles if component & set(circle.jobs)]
            names = sorted(
                (name for name in own_periods if name in component),
                key=lambda name: (
                    periods[name], routing.jobs[name].compute_s, routing.link_bytes(name).tobytes()
                ),
            )  # fmt: skip
            steps = _search(names, own, slots)
            before += sum(circle.excess({}) for circle in own)
            after += sum(circle.excess(steps) for circle in own)
            demand += sum(circle.demand for circle in own)
            shifts |= {name: (steps[name] * slot_s) % periods[name] for name in component}
    return Shifts(
        shifts,
        periods,
        1.0 - after / demand if demand else 1.0,
        1.0 - before / demand if demand else 1.0,
        tuple(sorted(left_out)),
    )


def _in_slots(periods: Mapping[str, float], slot_s: float, tolerance: float) -> dict[str, int]:
    """Return each period as a whole number of slots; near ones, and near multiples, are made so."""
    found: dict[str, int] = {}
    for name, period in sorted(periods.items(), key=lambda item: item[1]):
        number = max(1, round(period / slot_s))
        near = [k * m for k in found.values() for m in range(1, 9)]
        found[name] = min(
            (n for n in near if abs(n - number) <= tolerance * number),
            key=lambda n: abs(n - number),
            default=number,
        )
    return found


@dataclass(frozen=True)
class _Circle:
    """One link and the jobs on it: demand over capacity of each job, slot by slot."""

    jobs: tuple[str, ...]
    waves: tuple[FloatArray, ...]  # each as long as the perimeter
    count: int  # links that look alike

    @property
    def demand(self) -> float:
        """Return the mean demand of all jobs, in units of one link's capacity."""
        return self.count * float(sum(wave.mean() for wave in self.waves))

    def excess(self, steps: Mapping[str, int]) -> float:
        """Return the mean demand above capacity."""
        total = np.zeros(len(self.waves[0]))
        for name, wave in zip(self.jobs, self.waves, strict=True):
            total += np.roll(wave, steps.get(name, 0))
        return self.count * float(np.maximum(total - 1.0, 0.0).mean())


def _sharing(routing: Routing, names: Sequence[str]) -> list[set[str]]:
    """Return the sets of jobs that meet on some link."""
    if not names:
        return []
    used = np.array([routing.link_bytes(name) > 0 for name in names])
    meeting = np.unique(used[:, used.sum(axis=0) > 1], axis=1).T
    return [{names[i] for i in np.flatnonzero(users).tolist()} for users in meeting]


def _circles(
    routing: Routing, slots: Mapping[str, int]
) -> tuple[list[_Circle], tuple[tuple[str, str], ...]]:
    """Return links that several jobs use; links with the same jobs at the same demand are one."""
    names = [job.job_id for job in routing.traffic if job.job_id in slots]
    capacities = routing.topology.capacities_bytes_per_s
    loads = np.array([routing.link_bytes(name) for name in names]) / capacities
    alone_s = [routing.communication_s(name) for name in names]
    kinds: dict[tuple[tuple[str, float], ...], int] = {}
    for link in np.flatnonzero((loads > 0).sum(axis=0) > 1).tolist():
        # A job sends for as long as its fullest link takes; its other links are less than full.
        key = tuple(
            (name, round(float(loads[i, link]) / alone_s[i], 9))
            for i, name in enumerate(names)
            if loads[i, link] > 0
        )
        kinds[key] = kinds.get(key, 0) + 1
    circles, left_out = [], set()
    for key, count in kinds.items():
        members = [name for name, _ in key]
        perimeter = math.lcm(*(slots[name] for name in members))
        if perimeter > _LONGEST_CIRCLE:
            left_out |= {(a, b) for i, a in enumerate(members) for b in members[i + 1 :]}
            continue
        waves = tuple(_wave(routing, name, rate, slots[name], perimeter) for name, rate in key)
        circles.append(_Circle(tuple(members), waves, count))
    return circles, tuple(sorted(left_out))


def _wave(routing: Routing, name: str, rate: float, slots: int, perimeter: int) -> FloatArray:
    """Return the demand in each slot: nothing while computing, then the rate until all is sent."""
    scale = slots / (routing.jobs[name].compute_s + routing.communication_s(name))
    start = routing.jobs[name].compute_s * scale  # in slots, as is the end of the period
    edges = np.arange(slots + 1)
    covered = np.clip(np.minimum(edges[1:], slots) - np.maximum(edges[:-1], start), 0.0, 1.0)
    return np.tile(covered * rate, perimeter // slots)


def _components(jobs_of: Sequence[set[str]]) -> list[set[str]]:
    """Return the jobs that links join, in the order in which they appear first."""
    found: list[set[str]] = []
    for members in filter(None, jobs_of):
        joined = [jobs for jobs in found if jobs & members] or [set()]
        joined[0] |= members.union(*joined[1:])
        found = [jobs for jobs in found if jobs not in joined[1:]]
        found += [joined[0]] * (joined[0] not in found)
    return found


def _search(
    names: Sequence[str], circles: Sequence[_Circle], slots: Mapping[str, int]
) -> dict[str, int]:
    """Search the least excess; the first job stays, for only differences count."""

    def cost(steps: Mapping[str, int]) -> float:
        return sum(circle.excess(steps) for circle in circles)

    still = dict.fromkeys(names, 0)
    sizes = [slots[name] for name in names[1:]]
    if math.prod(sizes) <= _GRID_MOST:
        tried = (still | dict(zip(names[1:], steps, strict=True)) for steps in np.ndindex(*sizes))
        return min(tried, key=lambda steps: (round(cost(steps), 12), sum(steps.values())))
    draw = np.random.default_rng(0)
    starts = [still] + [{name: int(draw.integers(slots[name])) for name in names} for _ in range(4)]
    found = [_descend(start, names, circles, slots) for start in starts]
    best = min(found, key=cost)
    return best if cost(best) < cost(still) - 1e-12 else still


def _descend(
    start: dict[str, int],
    names: Sequence[str],
    circles: Sequence[_Circle],
    slots: Mapping[str, int],
) -> dict[str, int]:
    """Move one job at a time to its best step, until none moves."""
    steps = dict(start)
    for _ in range(_ROUNDS):
        moved = False
        for name in names[1:]:
            own = [circle for circle in circles if name in circle.jobs]
            costs = [
                sum(circle.excess(steps | {name: step}) for circle in own)
                for step in range(slots[name])
            ]
            best = int(np.argmin(costs))
            if costs[best] < costs[steps[name]] - 1e-12:
                steps[name], moved = best, True
        if not moved:
            break
    return steps
