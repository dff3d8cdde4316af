"""What exact searches share: the answer with its proof, and when a chunk can be where.

The searches are those that our synthesis is compared with: SCCL's (``k_synchronous``) and TE-CCL's
(``slotted``), both by CP-SAT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import Collective, Schedule, verify_schedule
from fivefold.collectives.schedules.throughput import whole_capacities
from fivefold.collectives.synthesis._instance import UNREACHABLE, Instance, by_inversion
from fivefold.collectives.synthesis._solver import check_time
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Topology

_LARGEST_CAPACITY = 10_000  # units per round; beyond it the capacities have no common measure


@dataclass(frozen=True)
class ExactResult:
    """The answer of an exact search.

    Args:
        status: "found", "infeasible" (proved) or "unknown" (out of time).
        schedule: The verified schedule, None where there is none.
        solver_s: Wall-clock time of the solver.
        reason: What was proved, or why nothing was.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from benchmarks.collectives.slotted import slotted
        >>> from fivefold.network.topology import ring
        >>> result = slotted(all_gather(4), ring(4), size_bytes=4e6, slots=1)
        >>> result.status, result.schedule is None
        ('infeasible', True)
    """

    status: Literal["found", "infeasible", "unknown"]
    schedule: Schedule | None
    solver_s: float
    reason: str

    @property
    def found(self) -> bool:
        """Return whether there is a schedule."""
        return self.schedule is not None

    def require(self) -> Schedule:
        """Return the schedule.

        Raises:
            InfeasibleError: There is none, or none was found in time.
        """
        if self.schedule is None:
            hint = "allow more time" if self.status == "unknown" else "ask for less"
            raise InfeasibleError(self.reason, hint=hint)
        return self.schedule


class NoSchedule(Exception):  # noqa: N818 - not an error, but how a search says no
    """Carries a search's "no" out of an inversion; never leaves this package."""

    status: Literal["infeasible", "unknown"] = "unknown"


class Refuted(NoSchedule):
    """There is no schedule: proved."""

    status = "infeasible"


class Undecided(NoSchedule):
    """None was found, and none was ruled out."""


def answer(
    collective: Collective,
    topology: Topology,
    find: Callable[[Collective, Topology], tuple[Schedule, float]],
) -> ExactResult:
    """Run a search that only copies on any collective; verify what it finds."""
    spent_s = [0.0]

    def timed(part: Collective, place: Topology) -> Schedule:
        schedule, solver_s = find(part, place)
        spent_s[0] += solver_s
        return schedule

    try:
        schedule = by_inversion(collective, topology, timed)
    except NoSchedule as no:
        return ExactResult(no.status, None, spent_s[0], str(no))
    verify_schedule(schedule, topology=topology)
    return ExactResult("found", schedule, spent_s[0], "found and verified")


def integer_capacities(topology: Topology) -> tuple[NDArray[np.int64], float]:
    """Return capacities as whole multiples of their largest common divisor."""
    multiples, unit, exact = whole_capacities(topology, most=_LARGEST_CAPACITY)
    if not exact:
        message = f"the link rates of topology {topology.name!r} have no common measure"
        hint = "round them, or use method='taccl', 'trees' or 'matching'"
        raise ConfigurationError(message, hint=hint)
    return multiples, float(unit)


@dataclass(frozen=True)
class Reach:
    """When a chunk can be where: the window that no schedule can leave."""

    earliest: NDArray[np.int64]
    remaining: NDArray[np.int64]

    def windows(
        self, instance: Instance, delays: NDArray[np.int64], length: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, link, first start, last start + 1) of all transfers that can be of use.

        A transfer starts once its source can hold the chunk, and early enough for some rank that
        wants the chunk; nobody sends to a rank that holds it from the start.
        """
        for chunk, holders in enumerate(instance.holders):
            first = self.earliest[chunk, instance.sources]
            end = length - self.remaining[chunk, instance.targets] - delays + 1
            useful = (end > first) & ~np.isin(instance.targets, sorted(holders))
            check_time()
            for link in np.flatnonzero(useful).tolist():
                yield chunk, link, int(first[link]), int(end[link])

    def horizon(self, instance: Instance) -> int:
        """Least time by which each chunk can be wherever it is wanted (the latency bound)."""
        needs = [
            int(self.earliest[chunk, rank])
            for chunk, ranks in enumerate(instance.wanted)
            for rank in ranks
        ]
        return max(needs, default=0)


def reach(instance: Instance, times: Sequence[int] | NDArray[np.int64]) -> Reach:
    """Shortest times of all chunks to and from all ranks."""
    distances = _all_distances(instance, np.asarray(times, np.int64))
    shape = (instance.num_chunks, instance.num_ranks)
    earliest, remaining = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for chunk in range(instance.num_chunks):
        check_time()
        holders, wanted = sorted(instance.holders[chunk]), sorted(instance.wanted[chunk])
        earliest[chunk] = _least(distances, holders)
        remaining[chunk] = _least(distances.T, wanted)
        lost = [rank for rank in wanted if earliest[chunk, rank] >= UNREACHABLE]
        if lost:
            message = f"chunk {chunk} of rank {holders} cannot reach rank {lost[0]}"
            raise InfeasibleError(message, hint="add links, or allow them in the sketch")
    return Reach(earliest, remaining)


def _least(distances: NDArray[np.int64], ranks: list[int]) -> NDArray[np.int64]:
    if not ranks:
        return np.full(distances.shape[1], UNREACHABLE, np.int64)
    return np.asarray(distances[ranks].min(axis=0))


def _all_distances(instance: Instance, times: NDArray[np.int64]) -> NDArray[np.int64]:
    count = instance.num_ranks
    distances = np.full((count, count), UNREACHABLE, np.int64)
    np.fill_diagonal(distances, 0)
    np.minimum.at(distances, (instance.sources, instance.targets), times)
    for middle in range(count):  # Floyd-Warshall, one row and column at a time
        through = distances[:, middle, None] + distances[None, middle, :]
        np.minimum(distances, through, out=distances)
    return np.minimum(distances, UNREACHABLE)
