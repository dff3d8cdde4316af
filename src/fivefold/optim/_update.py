"""The outer update as pure tensor maths, in place on one piece of the flat state.

References:
    CO2, arXiv 2401.16265; the elementwise clip follows its released code, and is kept in the
    momentum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Number = float | torch.Tensor
"""A number, or a 0-dimensional tensor on the device: reading it there would stop the device."""


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

    def include(self, part: PieceStatistics, *, copies: int) -> None:
        """Add those of a part of which this many ranks of a worker hold the same."""
        self.delta_square += part.delta_square / copies
        self.momentum_square += part.momentum_square / copies
        self.gap_sum += part.gap_sum
        self.clipped += part.clipped
        self.elements += part.elements
        self.extremes += part.extremes

    def look_at(self, payload: torch.Tensor) -> None:
        """Remember what tells whether all elements are finite: not-a-number is passed on."""
        if payload.numel():
            self.extremes += torch.aminmax(payload)

    def look_at_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do the same for many tensors, in few launches."""
        held = [tensor for tensor in tensors if tensor.numel()]
        if held:
            self.extremes += torch._foreach_norm(held, math.inf)  # noqa: SLF001 - as its optimizers do


def each_finite(*parts: PieceStatistics) -> list[bool]:
    """Return for each whether all elements looked at are finite; one wait for the device."""
    flags = [torch.stack(part.extremes).isfinite().all() for part in parts if part.extremes]
    found = iter(read_numbers(flags))
    return [next(found) if part.extremes else True for part in parts]


def all_finite(*parts: PieceStatistics) -> bool:
    """Return whether all elements that were looked at are finite; one wait for the device."""
    return all(each_finite(*parts))


def read_numbers(values: Sequence[torch.Tensor]) -> list[Any]:
    """Return 0-dimensional tensors of one data type as numbers; one wait for their device."""
    if not values:
        return []
    found: list[Any] = torch.stack([value.to(values[0].device) for value in values]).tolist()
    return found


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
