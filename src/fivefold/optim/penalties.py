"""What damps a late pseudo-gradient: the divisor L_t of the outer update, by name or as an object.

References:
    CO2, arXiv 2401.16265. Gap-Aware, arXiv 1909.10802 (a penalty linear in how far a gradient is
    applied from where it was computed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeGuard

from fivefold.errors import ConfigurationError, require_one_of

PENALTY_NAMES = ("gap", "gap-rms", "gap-param", "constant", "none")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a setting is a finite number, NumPy's included."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class NoPenalty:
    """L_t = 1: the stale pseudo-gradient is used as it is (for ablations and synchronous rules)."""


@dataclass(frozen=True)
class ConstantPenalty:
    """L_t = value, the form of CO2's released code (whose value is 1.0).

    Args:
        value: The divisor, at least 1 in any sensible use; must be positive.

    Raises:
        ConfigurationError: The value is not a positive finite number.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.value) and self.value > 0):
            message = f"ConstantPenalty value must be a positive number; got {self.value!r}"
            raise ConfigurationError(message, hint="use 1.0 for no damping, 2.0 to halve")


@dataclass(frozen=True, kw_only=True)
class GapPenalty:
    """L_t = 1 + (how far the anchor moved since the pseudo-gradient was computed) / C_t.

    With ``norm="l2"`` the distance is ||x_{t,0} - x_{t-1,0}||, with ``"rms"`` its root mean
    square; both give one scalar. ``"element"`` gives 1 + |x_{t,0} - x_{t-1,0}| / C_t for each
    element, which is *not* the scalar that the paper speaks of. The paper's own expression, its
    Eq. 3, was not available to us: these are readings that agree with every fact known of it (a
    scalar that uses x_{t,0}, at least 1, equal on all replicas).

    C_t is the reference distance. ``"ema"`` takes an exponential moving average of the norm of
    the mean pseudo-gradients applied before this one: no assumption about the learning-rate
    schedule is made. A number fixes C, in the units of the norm. While no reference exists yet
    (the first applied round) the anchor has not moved either, and L_t = 1.

    Args:
        norm: How the distance is measured.
        reference: "ema" or a positive number.
        decay: Decay of the moving average, in [0, 1).

    Raises:
        ConfigurationError: A value is outside its range.

    Examples:
        >>> GapPenalty().gap(move=3.0, reference=1.5)
        3.0
    """

    norm: Literal["l2", "rms", "element"] = "l2"
    reference: Literal["ema"] | float = "ema"
    decay: float = 0.9

    def __post_init__(self) -> None:
        require_one_of(self.norm, ("l2", "rms", "element"), f"GapPenalty norm is {self.norm!r}")
        fixed = self.reference != "ema"
        if fixed and not (is_number(self.reference) and self.reference > 0):
            message = f"GapPenalty reference must be 'ema' or positive; got {self.reference!r}"
            raise ConfigurationError(message)
        if not (is_number(self.decay) and 0 <= self.decay < 1):
            raise ConfigurationError(f"GapPenalty decay must be in [0, 1); got {self.decay!r}")

    def gap(self, *, move: float, reference: float | None) -> float:
        """Return L_t for a distance and a reference in the same units; 1 without a reference."""
        if reference is None or reference <= 0:
            return 1.0
        return 1.0 + move / reference

    def next_reference(self, previous: float | None, received: float) -> float | None:
        """Return the moving average after one more pseudo-gradient norm; 0 stands for none."""
        if self.reference != "ema":
            return float(self.reference)
        if previous is None or received <= 0:
            return received if received > 0 else previous
        return self.decay * previous + (1 - self.decay) * received


StalenessPenalty = NoPenalty | ConstantPenalty | GapPenalty


def named_penalty(penalty: str | StalenessPenalty) -> StalenessPenalty:
    """Return the penalty that a name stands for; an object is returned as it is."""
    if isinstance(penalty, StalenessPenalty):
        return penalty
    if not isinstance(penalty, str):
        message = f"staleness must be a name or a penalty; got {penalty!r}"
        raise ConfigurationError(message, hint='"none" for no penalty, "constant:2.0" to halve')
    name, _, value = penalty.partition(":")
    if name == "constant":
        try:
            number = float(value or 1.0)
        except ValueError:
            message = f"staleness {penalty!r} has no number after the colon"
            raise ConfigurationError(message, hint="write it as 'constant:2.0'") from None
        return ConstantPenalty(number)
    known: dict[str, StalenessPenalty] = {
        "gap": GapPenalty(),
        "gap-rms": GapPenalty(norm="rms"),
        "gap-param": GapPenalty(norm="element"),
        "none": NoPenalty(),
    }
    if value or name not in known:
        message = f"staleness {penalty!r} is not known"
        raise ConfigurationError(message, hint=f"use one of {', '.join(PENALTY_NAMES)}")
    return known[name]
