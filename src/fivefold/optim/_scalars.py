"""The scalars of one outer step, from what all ranks wrote into the lane.

Every rank computes them from the same numbers, so all take the same step: with operations that
are rounded alike everywhere (``math.sqrt``; a power is the C library's). Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fivefold.optim._lane import LaneReading
from fivefold.optim._rule import OuterRule
from fivefold.optim._staleness import ConstantPenalty, GapPenalty
from fivefold.optim._state import OuterState
from fivefold.optim._update import ElementGap, OuterCoefficients

ShardSum = Callable[[list[float]], list[float]]
"""Sums numbers over the ranks that hold one worker's shards."""


def outer_coefficients(
    rule: OuterRule,
    state: OuterState,
    *,
    reading: LaneReading,
    send_unit: float,
    step_unit: float,
    elements: int,
    shard_sum: ShardSum,
) -> OuterCoefficients:
    """Return the scalars of the outer step; ``state`` gets the new gap and its reference.

    Args:
        rule: The outer rule.
        state: Scalars of the fragment.
        reading: What all ranks wrote; some weight is positive.
        send_unit: Unit of the pseudo-gradients: the inner learning rate at the launch, or 1.
        step_unit: The same now.
        elements: Elements of this rank's part of the fragment.
        shard_sum: Sums over the worker's other shards.
    """
    penalty = rule.penalty
    gap, element_gap = 1.0, None
    if isinstance(penalty, ConstantPenalty):
        gap = penalty.value
    elif isinstance(penalty, GapPenalty):
        move, received = _norms(penalty, reading, elements=elements, shard_sum=shard_sum)
        reference = penalty.next_reference(state.gap_reference, received)
        state.gap_reference = reference
        if penalty.norm != "element":
            gap = penalty.gap(move=move, reference=reference)
        elif reference is not None:
            element_gap = ElementGap(move_scale=state.last_step, reference=reference)
    state.gap = gap
    return OuterCoefficients(
        momentum=rule.outer_momentum,
        delta_scale=1.0 / (reading.total_weight * gap * send_unit),
        step=rule.outer_lr * step_unit,
        clip=rule.clip,
        element_gap=element_gap,
        with_norms=isinstance(penalty, GapPenalty),
        nesterov=rule.nesterov,
        mean_scale=1.0 / reading.total_weight,
    )


def _norms(
    penalty: GapPenalty, reading: LaneReading, *, elements: int, shard_sum: ShardSum
) -> tuple[float, float]:
    """Norms of the last movement and of the pseudo-gradient before it, over all shards."""
    move, received = reading.agreed(reading.move), reading.agreed(reading.delta)
    move_square, delta_square, total = shard_sum(
        [move * move, received * received, float(elements)]
    )
    scale = 1.0 / max(total, 1.0) if penalty.norm != "l2" else 1.0
    return math.sqrt(move_square * scale), math.sqrt(delta_square * scale)
