"""The outer update as pure tensor maths, in place on one piece of the flat state; what damps it.

References:
    CO2, arXiv 2401.16265; the elementwise clip follows its released code, and is kept in the
    momentum. Gap-Aware, arXiv 1909.10802 (a penalty linear in how far a gradient is applied from
    where it was computed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, TypeGuard

import torch

from fivefold.errors import ConfigurationError, require_one_of

Number = float | torch.Tensor
"""A number, or a 0-dimensional tensor on the device: reading it there would stop the device."""
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


@dataclass(frozen=True, kw_only=True)
class OuterCoefficients:
    """Scalars of one outer step, equal on all ranks."""

    momentum: float  # beta
    # Factor from the summed pseudo-gradients to D / L: 1 / (sum of the weights * L * unit).
    delta_scale: float
    step: float  # factor from the momentum to the movement of the anchor: alpha * unit
    clip: float | None  # phi, or None
    # Set where L differs by element, as 1 + |gap_slope * m|; delta_scale then has L = 1.
    gap_slope: float | None = None
    with_norms: bool = False  # whether to measure norms (costs two reads of each piece in cache)
    nesterov: bool = False  # whether the anchor moves along beta * m + D / L instead of m
    mean_scale: float = 1.0  # factor from the summed pseudo-gradients to their mean


@dataclass(kw_only=True)
class PieceStatistics:
    """Sums over the pieces of one outer step."""

    delta_square: Number = 0.0  # sum of squares of the *summed* pseudo-gradients
    momentum_square: Number = 0.0  # sum of squares of the new momentum
    gap_sum: Number = 0.0  # sum of the per-element gaps; 0 where the gap is a scalar
    clipped: Number = 0  # elements that the clip changed
    elements: int = 0  # elements seen
    # Least and greatest element of each piece's payload, where one is to be sent.
    extremes: list[torch.Tensor] = field(default_factory=list)

    def look_at(self, payload: torch.Tensor) -> None:
        """Remember what tells whether all elements are finite: not-a-number is passed on."""
        if payload.numel():
            self.extremes += torch.aminmax(payload)


def all_finite(*parts: PieceStatistics) -> bool:
    """Return whether all elements that were looked at are finite; one wait for the device."""
    found = [torch.stack(part.extremes).isfinite().all() for part in parts if part.extremes]
    return not found or bool(torch.stack(found).all())


# Anchor and momentum must have the same bits on ranks with different processors. So every product
# and every sum is rounded by itself: ``add_(x, alpha=a)``, ``addcmul_`` and ``lerp_`` are one fused
# multiply-add or two roundings, by processor, and by whether an element is in a whole vector.


def accumulate_momentum_(
    momentum: torch.Tensor | None,
    delta_sum: torch.Tensor,
    *,
    coefficients: OuterCoefficients,
    statistics: PieceStatistics,
) -> torch.Tensor:
    """Compute m <- clamp(beta * m + D / L, -phi, phi) in place and return m."""
    statistics.elements += delta_sum.numel()
    if coefficients.with_norms:
        statistics.delta_square += _square_norm(delta_sum)
    if momentum is not None and coefficients.gap_slope is not None:
        gap = momentum.abs().mul_(coefficients.gap_slope).add_(1.0)
        statistics.gap_sum += _number(gap.sum(dtype=torch.float64))
        delta_sum.div_(gap)
    result = delta_sum.mul_(coefficients.delta_scale)
    if momentum is not None:
        result = momentum.mul_(coefficients.momentum).add_(delta_sum)
    if coefficients.clip is not None:
        statistics.clipped += _clip_(result, coefficients.clip)
    if coefficients.with_norms:
        statistics.momentum_square += _square_norm(result)
    return result


def move_anchor_(
    anchor: torch.Tensor,
    momentum: torch.Tensor,
    delta: torch.Tensor,
    *,
    coefficients: OuterCoefficients,
) -> None:
    """Compute x <- x - step * m, or with Nesterov x <- x - step * (beta * m + D / L), in place."""
    step = coefficients.step
    if coefficients.nesterov and momentum is not delta:
        anchor.sub_(delta.mul_(step))
        step *= coefficients.momentum
    # Without a momentum buffer beta is 0 and both forms are the same.
    anchor.sub_(torch.mul(momentum, step, out=delta))


def _clip_(momentum: torch.Tensor, bound: float) -> Number:
    if momentum.is_cuda:  # looking at a value would stop the device
        clipped = torch.count_nonzero(momentum.abs() > bound)
        momentum.clamp_(-bound, bound)
        return clipped
    if momentum.numel() == 0:
        return 0
    smallest, largest = torch.aminmax(momentum)
    if max(-float(smallest), float(largest)) <= bound:
        return 0
    count = int(torch.count_nonzero(momentum.abs() > bound))
    momentum.clamp_(-bound, bound)
    return count


def _square_norm(values: torch.Tensor) -> Number:
    norm = _number(torch.linalg.vector_norm(values))
    return norm * norm


def _number(value: torch.Tensor) -> Number:
    return value.double() if value.is_cuda else float(value)
