"""When to launch and when to merge: a state machine without tensors, clocks or sockets.

A *boundary* is the end of a round of tau local steps. Synchronous rules launch and merge at the
same boundary; delayed rules merge at a boundary what was launched at the one before, or
``delay_steps`` after the launch. Every launched round is merged once and in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Orders for the boundary that has been reached, in this order."""

    # Round whose all-reduce is waited for and merged first; None if none is.
    arriving_round: int | None
    launched_round: int | None  # round whose pseudo-gradient is launched then; None if none is
    wait_for_launched: bool = False  # whether the launched one is waited for and merged at once
    drains: bool = False  # whether nothing may stay open: all replicas are equal afterwards
    exact: bool = False  # whether the anchor becomes the plain mean, whatever the rule is


_SAVED = (
    *("tau", "round", "steps_in_round", "_skipped_steps", "_filling", "total_steps"),
    *("in_flight_round", "_ends_at", "merge_after", "_steps_to_skip"),
)


class RoundSchedule:
    """Counts local steps into rounds."""

    def __init__(  # noqa: PLR0913 - independent options
        self,
        *,
        tau: int,
        delayed: bool,
        delay_steps: int | None = None,
        first_round_steps: int | None = None,
        first_round_synchronous: bool = False,
        always_sends: bool = False,
        synchronous_until: int = 0,
        synchronous_from: float = math.inf,
    ) -> None:
        self.tau = tau
        self.delayed = delayed
        self.merge_after = delay_steps
        self._first_round_synchronous = first_round_synchronous
        self._always_sends = always_sends
        # Steps up to the one number and after the other are rounds of their own.
        self._local_between = synchronous_until, synchronous_from
        self.round = 0
        # A shorter first round is a whole one that began before the first step.
        self._steps_to_skip = 0 if first_round_steps is None else tau - first_round_steps
        self.ended_steps = 0
        self._ends_at = tau  # steps of the present round
        self._fill()
        self.total_steps = 0
        self.in_flight_round: int | None = None

    @property
    def open_steps(self) -> int:
        """Local steps that have been done since the last launch."""
        return self.steps_in_round - self._skipped_steps

    @property
    def delay_steps(self) -> int:
        """Local steps between a launch and its merge; 0 where it is waited for at once."""
        return (self.merge_after or self.tau) if self.delayed else 0

    @property
    def steps_left(self) -> int:
        """Local steps until the present round ends."""
        return self._ends_at - self.steps_in_round

    def retune(self, tau: int, *, delay_steps: int | None) -> None:
        """Make rounds longer or shorter, the present one in proportion to what is left of it."""
        # So fragments that take turns evenly over a round still do. Rounded down: with a tau that
        # grows at every step a round would never end.
        left = max(1, self.steps_left * tau // self.tau)
        self._ends_at = self.steps_in_round + left
        self._steps_to_skip = self._steps_to_skip * tau // self.tau
        self.tau, self.merge_after = tau, delay_steps

    def take_turn(self, turn: int, *, delay_steps: int, turns: int) -> None:
        """Begin rounds of ``turns`` launches by different fragments, this one's the turn-th."""
        first = (turn + 1) * delay_steps
        self.tau = turns * delay_steps
        self.merge_after = delay_steps if turns > 1 else None
        self._ends_at = self.steps_in_round + first
        self._steps_to_skip = self.tau - first

    def step(self) -> Boundary | None:
        """Count one local step; return what is to be done after it, or None."""
        self.steps_in_round += 1
        self.total_steps += 1
        begins, ends = self._local_between
        if not begins < self.total_steps <= ends:
            return self._end_round(wait=True, drains=True, exact=True)
        if self.total_steps == ends:
            return self.drain()
        if self.steps_in_round < self._ends_at:
            late = self.merge_after is not None and self.steps_in_round >= self.merge_after
            return self._arrive() if late and self.in_flight_round is not None else None
        synchronous = not self.delayed or (self._first_round_synchronous and self._filling)
        return self._end_round(wait=synchronous, drains=False)

    def drain(self) -> Boundary | None:
        """End the round where it stands, leaving nothing in flight; None if nothing is to do."""
        if self.open_steps == 0 and self.in_flight_round is None:
            self._fill()
            return None
        if self.open_steps > 0 or self._always_sends:
            return self._end_round(wait=True, drains=True)
        return self._arrive(drains=True)

    def _fill(self) -> None:
        """Begin as at the start: nothing is in flight and nothing is open."""
        self._filling = True
        self._skipped_steps = self._steps_to_skip
        self.steps_in_round = self._skipped_steps
        self._ends_at = self.tau

    def _arrive(self, *, drains: bool = False) -> Boundary:
        arriving, self.in_flight_round = self.in_flight_round, None
        if drains:
            self._fill()
        return Boundary(arriving_round=arriving, launched_round=None, drains=drains)

    def _end_round(self, *, wait: bool, drains: bool, exact: bool = False) -> Boundary:
        boundary = Boundary(
            arriving_round=self.in_flight_round,
            launched_round=self.round,
            wait_for_launched=wait,
            drains=drains,
            exact=exact,
        )
        self.in_flight_round = None if wait else self.round
        self.ended_steps = self.open_steps
        self.round += 1
        if drains:
            self._fill()
        else:
            self._filling = False
            self.steps_in_round = self._skipped_steps = 0
            self._ends_at = self.tau
        return boundary

    def state(self) -> dict[str, int | None]:
        """Return the counters as plain numbers."""
        return {name.strip("_"): getattr(self, name) for name in _SAVED}

    def restore(self, state: dict[str, int | None]) -> None:
        """Set the counters from ``state()``."""
        for name in _SAVED:
            setattr(self, name, state[name.strip("_")])
