"""What an exact search answers: a schedule, a proof that there is none, or "out of time"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fivefold.collectives.schedules import Bound, Collective, Schedule, lower_bound, verify
from fivefold.collectives.synthesis._logical import by_inversion
from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology


@dataclass(frozen=True)
class SearchResult:
    """The answer of an exact search.

    Args:
        status: "found", "infeasible" (proved) or "unknown" (out of time).
        schedule: The verified schedule, None where there is none.
        solver_s: Wall-clock time of the solver.
        reason: What was proved, or why nothing was.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.collectives.synthesis import k_synchronous
        >>> from fivefold.network.topology import ring
        >>> result = k_synchronous(all_gather(4), ring(4), steps=1, rounds=1)
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
) -> SearchResult:
    """Run a search that only copies on any collective; verify what it finds."""
    spent_s = [0.0]

    def timed(part: Collective, place: Topology) -> Schedule:
        schedule, solver_s = find(part, place)
        spent_s[0] += solver_s
        return schedule

    try:
        schedule = by_inversion(collective, topology, timed)
    except NoSchedule as no:
        return SearchResult(no.status, None, spent_s[0], str(no))
    verify(schedule, topology=topology)
    return SearchResult("found", schedule, spent_s[0], "found and verified")


def bound_of(collective: Collective, topology: Topology, size_bytes: float) -> Bound:
    """The best bound, or none where some ranks cannot reach others but nobody asks them to."""
    try:
        return lower_bound(collective, topology, size_bytes)
    except InfeasibleError:
        for chunk in range(collective.num_chunks):
            for holder in collective.holders(chunk).tolist():
                for receiver in collective.receivers(chunk).tolist():
                    if holder != receiver and (collective.reducing or collective.single_source):
                        topology.shortest_route(holder, receiver)
        reason = "the topology is not connected both ways, and the bounds need that"
        return Bound(seconds=0.0, kind="none", reason=reason)
