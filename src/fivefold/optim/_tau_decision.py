"""What ``tau="auto"`` decided, and a log of it that packs into lists of fixed length.

Checkpoints are loaded into prepared structures, so nothing saved may grow with the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TauReason = Literal["exposed", "margin", "slack", "balance"]

_REASONS: tuple[TauReason, ...] = ("exposed", "margin", "slack", "balance")
_KEPT = 64
_NO_DECISION = (-1, -1, -1, -1)


@dataclass(frozen=True, kw_only=True)
class TauDecision:
    """One change of tau, or of the ranks' local steps ("balance"), for logs and timelines.

    Attributes:
        round: Round whose message brought the measurements; the round that begins when it has
            arrived is the first with the new tau.
        previous: tau before.
        tau: tau from now on.
        step_s: Compute seconds of one step of tau: of the slowest rank, or with ``balance`` of
            the fastest.
        flight_s: Seconds that the network needs for one round's communication.
        reason: "exposed": the communication took longer than the round. "margin": it fitted, but
            without the margin. "slack": fewer steps hide it too. "balance": only the local steps
            of some ranks changed.

    Examples:
        >>> print(TauDecision(round=5, previous=8, tau=18, step_s=0.1, flight_s=1.6,
        ...                   reason="exposed"))
        round 5: tau 8 -> 18 (exposed: communication 1.6 s, step 0.1 s)
    """

    round: int
    previous: int
    tau: int
    step_s: float
    flight_s: float
    reason: TauReason

    def __str__(self) -> str:
        times = f"communication {self.flight_s:.3g} s, step {self.step_s:.3g} s"
        return f"round {self.round}: tau {self.previous} -> {self.tau} ({self.reason}: {times})"


class DecisionLog:
    """The last 64 decisions, oldest first."""

    def __init__(self) -> None:
        self.decisions: deque[TauDecision] = deque(maxlen=_KEPT)

    def numbers(self) -> list[int]:
        """Return round, previous tau, tau and reason of each, -1 where there is none."""
        rows = [(d.round, d.previous, d.tau, _REASONS.index(d.reason)) for d in self.decisions]
        rows += [_NO_DECISION] * (_KEPT - len(rows))
        return [number for row in rows for number in row]

    def times(self) -> list[float]:
        """Return step and flight time of each in seconds, 0.0 where there is none."""
        times = [time_s for d in self.decisions for time_s in (d.step_s, d.flight_s)]
        return times + [0.0] * (2 * _KEPT - len(times))

    def restore(self, *, numbers: Sequence[int], times: Sequence[float]) -> None:
        """Set the log from ``numbers()`` and ``times()``."""
        self.decisions.clear()
        for i in range(_KEPT):
            round_number, previous, tau, reason = numbers[4 * i : 4 * i + 4]
            if round_number < 0:
                break
            decision = TauDecision(
                round=round_number,
                previous=previous,
                tau=tau,
                step_s=times[2 * i],
                flight_s=times[2 * i + 1],
                reason=_REASONS[reason],
            )
            self.decisions.append(decision)
