"""When to launch and when to wait: a state machine without tensors, clocks or sockets.

It counts local steps and says what has to be done at the end of each. A *boundary* is the end of
a round of tau local steps. Delayed rules consume at a boundary what was launched at the one
before; synchronous rules launch and consume at the same boundary. The invariant, tested with
random histories: every launched round is consumed exactly once and in order, and at most one is
in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

__all__ = ["Boundary", "RoundSchedule", "ScheduleState"]


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What to do now, in this order.

    Attributes:
        arriving_round: Round whose all-reduce is waited for and merged first; None if none is.
        launched_round: Round whose pseudo-gradient is launched then; None if none is.
        wait_for_launched: Whether the launched one is waited for and merged at once.

    Example:
        >>> Boundary(arriving_round=0, launched_round=1, wait_for_launched=False).launched_round
        1
    """

    arriving_round: int | None
    launched_round: int | None
    wait_for_launched: bool


class ScheduleState(TypedDict):
    """Plain numbers that restore a ``RoundSchedule``; -1 stands for nothing in flight."""

    round: int
    steps_in_round: int
    total_steps: int
    in_flight_round: int


class RoundSchedule:
    """Counts local steps into rounds.

    Args:
        tau: Local steps per round.
        delayed: Whether a round's result is consumed one boundary later.
        first_round_synchronous: Whether a delayed schedule waits at the very first boundary.
        keeps_local: Whether replicas differ between boundaries even without local steps, so that
            a drain has to send once more after the last arrival.

    Example:
        >>> schedule = RoundSchedule(tau=1, delayed=True)
        >>> schedule.step().arriving_round, schedule.step().arriving_round
        (None, 0)
    """

    def __init__(
        self,
        *,
        tau: int,
        delayed: bool,
        first_round_synchronous: bool = False,
        keeps_local: bool = False,
    ) -> None:
        self.tau = tau
        self.delayed = delayed
        self._first_round_synchronous = first_round_synchronous
        self._keeps_local = keeps_local
        self.round = 0
        self.steps_in_round = 0
        self.total_steps = 0
        self.in_flight_round: int | None = None

    def step(self) -> Boundary | None:
        """Count one local step; return the boundary that it ends, or None inside a round."""
        self.steps_in_round += 1
        self.total_steps += 1
        if self.steps_in_round < self.tau:
            return None
        synchronous = not self.delayed or (self._first_round_synchronous and self.round == 0)
        return self._end_round(wait=synchronous)

    def drain(self) -> Boundary | None:
        """End the round where it stands, leaving nothing in flight; None if nothing is to do."""
        if self.steps_in_round == 0 and self.in_flight_round is None:
            return None
        if self.steps_in_round > 0 or self._keeps_local:
            return self._end_round(wait=True)
        boundary = Boundary(
            arriving_round=self.in_flight_round, launched_round=None, wait_for_launched=False
        )
        self.in_flight_round = None
        return boundary

    def _end_round(self, *, wait: bool) -> Boundary:
        boundary = Boundary(
            arriving_round=self.in_flight_round, launched_round=self.round, wait_for_launched=wait
        )
        self.in_flight_round = None if wait else self.round
        self.round += 1
        self.steps_in_round = 0
        return boundary

    def state(self) -> ScheduleState:
        """Return the counters as plain numbers."""
        in_flight = -1 if self.in_flight_round is None else self.in_flight_round
        return ScheduleState(
            round=self.round,
            steps_in_round=self.steps_in_round,
            total_steps=self.total_steps,
            in_flight_round=in_flight,
        )

    def restore(self, state: ScheduleState) -> None:
        """Set the counters from ``state()``."""
        self.round = state["round"]
        self.steps_in_round = state["steps_in_round"]
        self.total_steps = state["total_steps"]
        in_flight = state["in_flight_round"]
        self.in_flight_round = None if in_flight < 0 else in_flight
