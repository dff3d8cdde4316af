"""What the model goes on from at a boundary: one pass over the pieces of the outer state.

Each merge first applies what arrived, if anything did, then leaves in ``payload`` what is to be
sent, if anything. Each piece is read and written once while it is in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fivefold.optim._flat import Piece
from fivefold.optim._metadata import MetadataReading
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._state import OuterState
from fivefold.optim._update import (
    OuterCoefficients,
    PieceStatistics,
    accumulate_momentum_,
    move_anchor_,
)
from fivefold.optim.penalties import ConstantPenalty, GapPenalty


@dataclass(frozen=True, kw_only=True)
class MergeTask:
    """Orders for one pass over a fragment."""

    rule: OuterRule
    coefficients: OuterCoefficients | None  # scalars of the outer step; None where nothing arrived
    send: bool  # whether a payload is to be sent
    settles: bool = False  # whether all replicas are to be equal afterwards
    waits: bool = False  # whether what is sent now is waited for and merged at the same boundary
    weight: float = 1.0  # factor of the payload
    resend: bool = False  # whether the all-reduce was lost: this rank's part of it goes out again
    own_share: float = 0.0  # share of this rank's own part in the mean, for the merge "eager"
    total_weight: float = 0.0  # sum of the weights in what arrived

    def outer_step(self, piece: Piece, statistics: PieceStatistics) -> None:
        """Move the anchor by what arrived; the payload is free afterwards."""
        assert self.coefficients is not None, "callers looked"
        momentum = accumulate_momentum_(
            piece.momentum, piece.payload, coefficients=self.coefficients, statistics=statistics
        )
        move_anchor_(piece.anchor, momentum, piece.payload, coefficients=self.coefficients)

    def put(self, payload: torch.Tensor, pseudo_gradient: torch.Tensor) -> None:
        """Send a pseudo-gradient."""
        if self.weight == 1.0:
            payload.copy_(pseudo_gradient)
        else:
            torch.mul(pseudo_gradient, self.weight, out=payload)

    def put_difference(self, piece: Piece) -> None:
        """Send how far the anchor is from what the worker has."""
        piece.apart(out=piece.payload)
        if self.weight != 1.0:
            piece.payload.mul_(self.weight)

    def keep_and_put(self, piece: Piece, fresh: torch.Tensor) -> None:
        """Send a pseudo-gradient; where it may be lost it is kept, with what was lost before."""
        if piece.sent is not None:
            if self.resend:
                fresh.add_(piece.sent)
            piece.sent.copy_(fresh)
        self.put(piece.payload, fresh)


Merge = Callable[[Piece, MergeTask, PieceStatistics], None]


def merge_pieces(pieces: Iterable[Piece], task: MergeTask, *, merge: Merge) -> PieceStatistics:
    """Apply what arrived, prepare what is sent, and set what the model goes on from."""
    statistics = PieceStatistics()
    for piece in pieces:
        merge(piece, task, statistics)
        if task.send:  # while it is in the processor's cache
            statistics.look_at(piece.payload)
    return statistics


def _replace(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    # The pseudo-gradient to send is taken against the anchor before the outer step, since the
    # local steps began there; then it takes the place of the sum that arrived.
    if task.waits and task.coefficients is None and piece.sent is None:
        # The second pass of this boundary writes the model, and nothing is in the payload's way.
        task.put_difference(piece)
        return
    if not (task.send or task.settles):
        _move_along(piece, task, statistics)
        return
    fresh = piece.apart(out=piece.scratch) if task.send else None
    if task.coefficients is not None:
        task.outer_step(piece, statistics)
    if fresh is not None:
        task.keep_and_put(piece, fresh)
    piece.write(piece.anchor)


def _move_along(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    # In the middle of a round: the local steps since the launch move with the anchor, so that they
    # are the next pseudo-gradient, whole. What was lost is added to them.
    if task.coefficients is not None:
        own = piece.apart(out=piece.scratch).neg_()
        task.outer_step(piece, statistics)
        piece.write(own.add_(piece.anchor))
    elif task.resend:
        assert piece.sent is not None, "what may be lost is kept"
        piece.add(torch.neg(piece.sent, out=piece.scratch))


def _pull(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    # What a worker keeps of its own stays in its next pseudo-gradient, so nothing is sent again
    # when an all-reduce is lost.
    if task.coefficients is not None:
        task.outer_step(piece, statistics)
        apart = piece.apart(out=piece.scratch).neg_()
        piece.write(apart.mul_(task.rule.local_share).add_(piece.anchor))
    if task.settles:
        piece.write(piece.anchor)
    if task.send:
        task.put_difference(piece)


def _correct(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    # The pseudo-gradient to send is that of the corrected parameters against the new anchor.
    sent = piece.sent
    assert sent is not None, "rules that correct keep what they sent"
    if task.coefficients is not None:
        # With d = x - y and D = x - mean(y) this adds mean(y) - y.
        mean = torch.mul(piece.payload, task.coefficients.delta_scale, out=piece.scratch)
        piece.add(sent.sub_(mean))
        task.outer_step(piece, statistics)
    if task.settles:
        piece.write(piece.anchor)
    if task.send:
        task.put(piece.payload, piece.apart(out=sent))


def _eager(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    anchor, local = piece.anchor, piece.local
    start, sent, velocity = piece.start, piece.sent, piece.own_momentum
    assert start is not None, "the eager merge keeps where the round began"
    assert sent is not None, "the eager merge keeps what it sent"
    if task.settles:
        if task.coefficients is not None:
            task.outer_step(piece, statistics)
        for own in (sent, velocity):
            if own is not None:
                own.zero_()
        start.copy_(anchor)
        local.copy_(anchor)
        return
    fresh = piece.as_written(start) - local
    own_offset = start.sub_(anchor)
    if task.coefficients is not None:
        task.outer_step(piece, statistics)
    change = torch.mul(fresh, task.own_share).sub_(sent)
    sent.add_(change)
    direction = change
    if velocity is not None:
        velocity.mul_(task.rule.outer_momentum).add_(change)
        direction = change.add_(torch.mul(velocity, task.rule.outer_momentum, out=piece.scratch))
    own_offset.sub_(direction.mul_(task.rule.outer_lr)).add_(anchor)  # now where the round begins
    task.put(piece.payload, fresh)
    local.copy_(start)


def _hand_over(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    # For an outer optimizer, which steps after this pass: the model is written after that.
    fresh = piece.apart(out=piece.scratch) if task.send else None
    if task.coefficients is not None:
        assert piece.gradient is not None, "an outer optimizer has gradients"
        statistics.elements += piece.payload.numel()
        torch.mul(piece.payload, task.coefficients.delta_scale, out=piece.gradient)
    if fresh is not None:
        task.keep_and_put(piece, fresh)


def _exact(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    # Synchronous steps, whatever the rule: what a round would keep of its own starts from here.
    if task.coefficients is not None:
        statistics.elements += piece.payload.numel()
        scale = task.coefficients.delta_scale
        piece.anchor.sub_(torch.mul(piece.payload, scale, out=piece.scratch))
    if task.settles:
        piece.write(piece.anchor)
        if piece.start is not None:
            piece.start.copy_(piece.anchor)
    if task.send:
        task.put_difference(piece)


def _average(piece: Piece, task: MergeTask, statistics: PieceStatistics) -> None:
    # Buffers: statistics, flags, counters. They travel as values, in float64, and the mean is a
    # quotient: what is equal on all ranks stays what it is bit for bit, and a mean of what is not
    # negative is not negative.
    del statistics
    value = piece.value
    assert value is not None, "what is averaged keeps what it sent"
    if task.coefficients is not None:
        mean = torch.div(piece.payload, task.total_weight, out=piece.payload)
        piece.anchor.copy_(mean)
        piece.write(_brought_to(mean, _value(piece), value))
    if task.settles:
        piece.write(piece.anchor)
    if task.send:
        value.copy_(_value(piece))
        torch.mul(value, task.weight, out=piece.payload)


def _value(piece: Piece) -> torch.Tensor:
    """Return a buffer in the outer state's data type, with what its last write rounded away."""
    local = piece.local.to(piece.anchor.dtype)
    return local if piece.rest is None else local + piece.rest


def _brought_to(mean: torch.Tensor, now: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """Return what a buffer that was ``sent`` and is ``now`` becomes when the mean arrives."""
    # What was added since the launch stays: now + (mean - sent). But a running variance that has
    # shrunk since, and is above the mean, would go below zero; it shrinks by the same factor
    # instead. Both agree where they meet, at now = sent and at mean = sent.
    moved = torch.where(now == sent, mean, now + (mean - sent))
    pulled, decayed = mean / sent, now / sent
    shrinks = (pulled >= 0) & (pulled < 1) & (decayed >= 0) & (decayed < 1)
    return torch.where(shrinks, now * pulled, moved)


MERGES: dict[str, Merge] = {
    "replace": _replace,
    "pull": _pull,
    "correct": _correct,
    "eager": _eager,
    "hand over": _hand_over,
    "exact": _exact,
    "average": _average,
}


def merge_of(rule: OuterRule) -> Merge:
    """Return what a rule does to each piece at a boundary."""
    return rule.merge_piece if rule.merge == "own" else MERGES[rule.merge]


ShardSum = Callable[[list[float]], list[float]]
"""Sums numbers over the ranks that hold one worker's shards."""


def outer_coefficients(
    rule: OuterRule,
    state: OuterState,
    *,
    reading: MetadataReading,
    send_unit: float,
    step_unit: float,
    elements: float,
    shard_sum: ShardSum,
) -> OuterCoefficients:
    """Return the scalars of the outer step; ``state`` gets the new gap and its reference."""
    penalty = rule.penalty
    gap, gap_slope = 1.0, None
    if isinstance(penalty, ConstantPenalty):
        gap = penalty.value
    elif isinstance(penalty, GapPenalty):
        agreed = (reading.agreed(values) for values in (reading.move, reading.delta))
        mine = [*(norm * norm for norm in agreed), elements]
        *squares, total = shard_sum(mine)
        scale = 1.0 / max(total, 1.0) if penalty.norm != "l2" else 1.0
        move, received = (math.sqrt(square * scale) for square in squares)  # of all shards
        reference = penalty.next_reference(state.gap_reference, received)
        state.gap_reference = reference
        if penalty.norm != "element":
            gap = penalty.gap(move=move, reference=reference)
        elif reference is not None:
            gap_slope = state.last_step / reference
    state.gap = gap
    return OuterCoefficients(
        momentum=rule.outer_momentum,
        delta_scale=1.0 / (reading.total_weight * gap * send_unit),
        step=rule.outer_lr * step_unit,
        clip=rule.clip,
        gap_slope=gap_slope,
        with_norms=isinstance(penalty, GapPenalty),
        nesterov=rule.nesterov,
        mean_scale=1.0 / reading.total_weight,
    )
