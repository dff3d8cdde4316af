"""How many local steps each rank takes, so that all reach the boundary together.

The fastest rank takes tau steps; a rank whose steps last r times as long takes tau / r, rounded.
The counts change at once where a rank is far off, and otherwise only where the mean over several
rounds says so: one noisy round moves nothing. Pure: equal numbers give equal counts everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Counts stay while no rank's mean share is off by more than this.
_SLACK_STEPS = 0.75


class StepBalance:
    """Local steps per rank, for a given tau.

    Args:
        world_size: Number of slots that ranks can have.
        tau: Steps of every rank until their times are known.
        patience: Rounds whose mean counts for small corrections.
    """

    def __init__(self, world_size: int, *, tau: int, patience: int) -> None:
        self.steps = [tau] * world_size
        self.sums = [0.0] * world_size
        self.rounds = 0
        self._patience = patience

    def update(self, step_s: Sequence[float], *, tau: int, at_once: bool) -> bool:
        """Count one round's measurements; return whether a rank's steps changed.

        Args:
            step_s: Per rank, seconds of one local step; 0.0 for unknown, which stands for the
                fastest. At least one is known.
            tau: Steps of the fastest rank.
            at_once: Whether to set the counts without waiting (tau has changed).
        """
        fastest_s = min(time_s for time_s in step_s if time_s > 0)
        shares = [tau * fastest_s / (time_s or fastest_s) for time_s in step_s]
        if at_once or self._is_far_off(shares):
            return self._set(shares)
        self.sums = [total + share for total, share in zip(self.sums, shares, strict=True)]
        self.rounds += 1
        if self.rounds < self._patience:
            return False
        means = [total / self.rounds for total in self.sums]
        pairs = zip(means, self.steps, strict=True)
        if any(abs(mean - steps) > _SLACK_STEPS for mean, steps in pairs):
            return self._set(means)
        self._forget()
        return False

    def restore(self, *, steps: Sequence[int], sums: Sequence[float], rounds: int) -> None:
        """Go on from the three public attributes of another one."""
        self.steps, self.sums, self.rounds = list(steps), list(sums), rounds

    def _is_far_off(self, shares: Sequence[float]) -> bool:
        """Whether a rank is off by more than a step and more than a quarter of its steps."""
        pairs = zip(shares, self.steps, strict=True)
        return any(abs(share - steps) > max(1.0, steps / 4) for share, steps in pairs)

    def _set(self, shares: Sequence[float]) -> bool:
        self._forget()
        before = self.steps
        self.steps = [max(1, math.floor(share + 0.5)) for share in shares]
        return before != self.steps

    def _forget(self) -> None:
        self.sums, self.rounds = [0.0] * len(self.steps), 0
