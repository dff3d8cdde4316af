"""The stability law of delayed rules, watched while training.

On a noise-free quadratic mode that a round of local steps contracts by a in (0, 1], a delayed rule
that replaces local work is stable if and only if alpha * a / L < 1 - beta. Modes that converge
within a round have a near 1, so alpha should stay below (1 - beta) * L. Derivation: the
characteristic polynomial r^2 - (1 + beta) r + (beta + alpha a / L) and the Jury test.
"""

from __future__ import annotations

import warnings

from fivefold.optim._rule import OuterRule
from fivefold.optim._statistics import StatisticsMeter

_ROUNDS_BEFORE_WARNING = 8
_FRAMES_TO_THE_CALLER_OF_STEP = 3


class StabilityWarning(UserWarning):
    """The outer learning rate is at or above the stability limit of a delayed rule.

    Examples:
        >>> issubclass(StabilityWarning, UserWarning)
        True
    """


class StabilityWatch:
    """Warns once when the running staleness gap says that the outer learning rate is too high."""

    def __init__(self, rule: OuterRule) -> None:
        self._rule = rule
        self._limited = rule.delayed and rule.merge == "replace"

    def watch(self, meter: StatisticsMeter) -> None:
        """Look at the meter after an outer step."""
        gap = meter.running_gap
        if not self._limited or gap is None or meter.merged_rounds < _ROUNDS_BEFORE_WARNING:
            return
        outer_lr, momentum = self._rule.outer_lr, self._rule.outer_momentum
        limit = (1 - momentum) * gap
        if outer_lr < limit:
            return
        self._limited = False  # once is enough
        message = (
            f"outer_lr={outer_lr} is at or above the stability limit {limit:.3g} = "
            f"(1 - outer_momentum={momentum}) * staleness gap {gap:.3g}: directions that converge "
            f"within a round may diverge; use outer_lr below {limit:.3g}, a smaller "
            "outer_momentum or a penalty"
        )
        warnings.warn(message, StabilityWarning, stacklevel=_FRAMES_TO_THE_CALLER_OF_STEP)
