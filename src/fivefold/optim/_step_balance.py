"""Local steps per rank, so that ranks of uneven speed reach a boundary together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Counts stay while no rank's mean share is off by more than this.
_SLACK_STEPS = 0.75


class StepBalance:
    """Local steps per rank, for a given tau."""

    def __init__(self, world_size: int, *, tau: int, patience: int) -> None:
        self.steps = [tau] * world_size
        self.sums = [0.0] * world_size
        self.rounds = 0
        self._patience = patience

    def update(self, step_s: Sequence[float], *, tau: int, at_once: bool) -> bool:
        """Count one round's measurements; return whether a rank's steps changed."""
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

    def state(self) -> dict[str, Any]:
        """Return plain numbers."""
        sums = {"share_sums": list(self.sums), "share_rounds": self.rounds}
        return {"local_steps": list(self.steps)} | sums

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state()``."""
        self.steps, self.sums = list(state["local_steps"]), list(state["share_sums"])
        self.rounds = state["share_rounds"]

    def _is_far_off(self, shares: Sequence[float]) -> bool:
        """Return whether a rank is off by more than a step and more than a quarter of its steps."""
        pairs = zip(shares, self.steps, strict=True)
        return any(abs(share - steps) > max(1.0, steps / 4) for share, steps in pairs)

    def _set(self, shares: Sequence[float]) -> bool:
        self._forget()
        before = self.steps
        self.steps = [max(1, math.floor(share + 0.5)) for share in shares]
        return before != self.steps

    def _forget(self) -> None:
        self.sums, self.rounds = [0.0] * len(self.steps), 0
