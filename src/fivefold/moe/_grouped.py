"""Experts on the CPU (or any device) by sorting the assignments: one matrix product per expert.

The rows of an expert stand together, so each of its products is one dense call. Experts are taken
in blocks of at least ``_BLOCK_ROWS`` rows: what is done elementwise is done per block, so that many
small experts cost few calls and what a block makes is still in the cache when it is read. The
outputs go back by [T, K] slots and are added in the order of k in float32 at least, so the result
does not depend on how the rows were sorted or split.

Shapes: T tokens, K experts per token, R assignments that were not dropped, H width, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fivefold.moe._activations import Activation
from fivefold.moe._grouped_whole import backward_whole, forward_whole, is_for_whole

__all__ = ["Assignments", "backward_grouped", "forward_grouped", "sort_assignments"]

_BLOCK_ROWS = 128

Ranges = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Assignments:
    """Assignments in the order of their experts.

    Attributes:
        slots: Flat place t K + k of each, int64 [R]; dropped ones are left out.
        tokens: Its token, int64 [R].
        ranges: (expert, first, stop) of each expert that has any.
        ends: Where the rows of each expert end, int32 [E].
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    ranges: Ranges
    ends: torch.Tensor


def sort_assignments(ids: torch.Tensor, num_experts: int) -> Assignments:
    """Bring assignments of one expert together; within an expert by token, then slot.

    Args:
        ids: [T, K]; -1 for none.
        num_experts: E.

    Returns:
        The order.
    """
    flat = ids.reshape(-1).long()
    found = torch.bincount(flat + 1, minlength=num_experts + 1)
    counts = found.tolist()
    slots = torch.sort(flat, stable=True).indices[counts[0] :]
    ranges, first = [], 0
    for expert, count in enumerate(counts[1:]):
        if count:
            ranges.append((expert, first, first + count))
        first += count
    tokens = torch.div(slots, max(ids.shape[1], 1), rounding_mode="floor")
    ends = found[1:].cumsum(0, dtype=torch.int32)
    return Assignments(slots=slots, tokens=tokens, ranges=tuple(ranges), ends=ends)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The rows of all assignments in order, and their weights."""

    order: Assignments
    rows: torch.Tensor  # [R, H], as they enter the first product
    weights: torch.Tensor  # [R, 1], at least float32
    num_tokens: int
    top_k: int

    def is_whole(
        self, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, biased: bool
    ) -> bool:
        """Whether all experts go through one grouped product."""
        busy = len(self.order.ranges)
        return not biased and is_for_whole(x, (w13, w2), num_rows=len(self.rows), busy_experts=busy)


def _work(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, experts: int, weigh_rows: bool
) -> _Work:
    order = sort_assignments(ids, experts)
    wide = torch.promote_types(x.dtype, torch.float32)
    by_row = weights.reshape(-1).index_select(0, order.slots).to(wide).unsqueeze(1)
    rows = x.index_select(0, order.tokens)
    return _Work(
        order=order,
        rows=(rows * by_row).to(x.dtype) if weigh_rows else rows,
        weights=by_row,
        num_tokens=len(x),
        top_k=ids.shape[1],
    )


def _most_rows(blocks: tuple[Ranges, ...]) -> int:
    """Rows of the largest block."""
    return max((block[-1][2] - block[0][1] for block in blocks), default=0)


def _blocks(ranges: Ranges) -> tuple[Ranges, ...]:
    """Experts in a row that have enough work together."""
    found: list[Ranges] = []
    first = 0
    for number, (_, _, stop) in enumerate(ranges):
        if stop - ranges[first][1] >= _BLOCK_ROWS or number == len(ranges) - 1:
            found.append(ranges[first : number + 1])
            first = number + 1
    return tuple(found)


def _products(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    block: Ranges,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """rows[a:b] @ weights[e] for each expert of a block, of which these are the rows."""
    sizes = [stop - first for _, first, stop in block]
    # Cut all at once: with many small experts a slice costs as much as a product.
    parts, results = torch.split(rows, sizes), torch.split(out, sizes)
    for (expert, _, _), part, result in zip(block, parts, results, strict=True):
        if bias is None:
            torch.mm(part, weights[expert], out=result)
        else:
            torch.addmm(bias[expert], part, weights[expert], out=result)


def forward_grouped(  # noqa: PLR0913 - the operator's own operands
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: Activation,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    weight_on_input: bool = False,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what ``experts_one_by_one`` does, an expert at a time; same arguments.

    What the activation takes goes to ``hidden`` [T K, rows of w13], where that is not None.
    """
    work = _work(x, ids, weights, experts=len(w2), weigh_rows=weight_on_input)
    if work.is_whole(x, w13, w2, biased=b13 is not None or b2 is not None):
        ends = work.order.ends
        found = forward_whole(work.rows, w13, w2, ends, activation=activation, hidden=hidden)
        return _added(found, work, None if weight_on_input else weights).to(x.dtype)
    # One row more, of zeros, for what was dropped.
    outputs = x.new_empty((len(work.rows) + 1, x.shape[1]))
    outputs[-1] = 0.0
    first_weights, second_weights = w13.mT.unbind(0), w2.mT.unbind(0)
    blocks = _blocks(work.order.ranges)
    scratch = x.new_empty((_most_rows(blocks) if hidden is None else 0, w13.shape[1]))
    for block in blocks:
        start, stop = block[0][1], block[-1][2]
        entering = scratch[: stop - start] if hidden is None else hidden[start:stop]
        _products(work.rows[start:stop], first_weights, block, out=entering, bias=b13)
        inner = activation(entering)
        _products(inner, second_weights, block, out=outputs[start:stop], bias=b2)
    return _added(outputs, work, None if weight_on_input else weights).to(x.dtype)


def _added(rows: torch.Tensor, work: _Work, weights: torch.Tensor | None) -> torch.Tensor:
    """Sum over k, in order, of the tokens' rows [R + 1, H], weighted or not; [T, H].

    The last row, of zeros, may be missing; it is added where something was dropped.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros((work.num_tokens, rows.shape[1]), dtype=wide, device=rows.device)
    count = work.num_tokens * work.top_k
    kept = len(work.rows)
    if kept < count and len(rows) == kept:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    place = torch.full((count,), kept, dtype=torch.int64, device=rows.device)
    place.scatter_(0, work.order.slots, torch.arange(kept, device=rows.device))
    # Cut all at once: with few tokens a slice costs as much as an addition.
    of_slot = place.view(work.num_tokens, work.top_k).t().contiguous().unbind(0)
    factors = None if weights is None else weights.to(wide).unsqueeze(2).unbind(1)
    for slot, places in enumerate(of_slot):
        term = rows.index_select(0, places).to(wide)
        if factors is None:
            total += term
        else:
            total.addcmul_(term, factors[slot])
    return total


@dataclass(kw_only=True)
class _Gradients:
    rows: torch.Tensor  # [R + 1, H], the last one zeros
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor  # [R, 1]
    b13: torch.Tensor | None
    b2: torch.Tensor | None


def backward_grouped(  # noqa: PLR0913 - the operator's own operands
    gradient: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: Activation,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    weight_on_input: bool = False,
    hidden: torch.Tensor | None = None,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Gradients of ``forward_grouped``.

    Args:
        gradient: Of the output, [T, H].
        x: As in the forward.
        w13: As in the forward.
        w2: As in the forward.
        ids: As in the forward.
        weights: As in the forward.
        activation: As in the forward.
        b13: As in the forward.
        b2: As in the forward.
        weight_on_input: As in the forward.
        hidden: What the forward put there; None: it is computed again.

    Returns:
        Gradients of x, w13, w2, weights, b13 and b2.
    """
    work = _work(x, ids, weights, experts=len(w2), weigh_rows=weight_on_input)
    incoming = gradient.index_select(0, work.order.tokens)
    if work.is_whole(x, w13, w2, biased=b13 is not None or b2 is not None):
        found = _gradients_of_whole(
            work,
            incoming,
            w13,
            w2,
            hidden,
            activation=activation,
            weight_on_input=weight_on_input,
        )
    else:
        found = _gradients_of_blocks(
            work,
            incoming,
            (w13, w2, b13, b2),
            hidden,
            activation=activation,
            weight_on_input=weight_on_input,
        )
    if weight_on_input:
        plain = x.index_select(0, work.order.tokens)
        found.weights[:] = (found.rows[: len(plain)] * plain).sum(
            -1, keepdim=True, dtype=work.weights.dtype
        )
        found.rows[: len(plain)] *= work.weights.to(found.rows.dtype)
    d_weights = torch.zeros(ids.numel(), dtype=work.weights.dtype, device=x.device)
    d_weights[work.order.slots] = found.weights.squeeze(1)
    d_x = _added(found.rows, work, None).to(x.dtype)
    shaped = d_weights.view(weights.shape).to(weights.dtype)
    return d_x, found.w13, found.w2, shaped, found.b13, found.b2


def _gradients_of_whole(
    work: _Work,
    incoming: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    hidden: torch.Tensor | None,
    *,
    activation: Activation,
    weight_on_input: bool,
) -> _Gradients:
    rows, d_w13, d_w2, d_weights = backward_whole(
        incoming,
        work.rows,
        w13,
        w2,
        work.order.ends,
        work.weights,
        activation=activation,
        weight_on_input=weight_on_input,
        hidden=hidden,
    )
    if d_weights is None:
        d_weights = torch.empty_like(work.weights)
    return _Gradients(rows=rows, w13=d_w13, w2=d_w2, weights=d_weights, b13=None, b2=None)


def _gradients_of_blocks(
    work: _Work,
    incoming: torch.Tensor,
    parameters: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    hidden: torch.Tensor | None,
    *,
    activation: Activation,
    weight_on_input: bool,
) -> _Gradients:
    w13, w2, b13, b2 = parameters
    found = _Gradients(
        rows=incoming.new_empty((len(work.rows) + 1, incoming.shape[1])),
        w13=_blank(w13, work),
        w2=_blank(w2, work),
        weights=torch.empty_like(work.weights),
        b13=None if b13 is None else torch.zeros_like(b13),
        b2=None if b2 is None else torch.zeros_like(b2),
    )
    found.rows[-1] = 0.0
    turned, first_weights, second_weights = w13.mT.unbind(0), w13.unbind(0), w2.unbind(0)
    blocks = _blocks(work.order.ranges)
    scratch = incoming.new_empty((_most_rows(blocks) if hidden is None else 0, w13.shape[1]))
    for block in blocks:
        start, stop = block[0][1], block[-1][2]
        entering = scratch[: stop - start]
        if hidden is not None:
            entering = hidden[start:stop]
        else:
            _products(work.rows[start:stop], turned, block, out=entering, bias=b13)
        _backward_of_block(
            block,
            work,
            incoming[start:stop],
            entering,
            first_weights,
            second_weights,
            found,
            activation=activation,
            b2=b2,
            weight_on_input=weight_on_input,
        )
    return found


def _blank(weights: torch.Tensor, work: _Work) -> torch.Tensor:
    """Room for gradients: zeros for the experts without rows, anything for the others."""
    made = torch.empty_like(weights, memory_format=torch.contiguous_format)
    busy = {expert for expert, _, _ in work.order.ranges}
    for expert in range(len(weights)):
        if expert not in busy:
            made[expert] = 0.0
    return made


def _backward_of_block(  # noqa: PLR0913 - a block's share of the operands
    block: Ranges,
    work: _Work,
    incoming: torch.Tensor,
    entering: torch.Tensor,
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    found: _Gradients,
    *,
    activation: Activation,
    b2: torch.Tensor | None,
    weight_on_input: bool,
) -> None:
    start, stop = block[0][1], block[-1][2]
    dtype, here = incoming.dtype, slice(start, stop)
    by_row = work.weights[here].to(dtype)
    pulled = incoming.new_empty((stop - start, found.w2.shape[2]))
    _products(incoming, w2, block, out=pulled)
    if weight_on_input:
        inner, d_entering = activation.with_gradient(entering, pulled)
    else:
        inner, d_entering = activation.with_gradient(entering, pulled * by_row)
        # <gradient, W2 h> = <W2^T gradient, h>: no need for W2 h itself.
        found.weights[here] = (pulled * inner).sum(-1, keepdim=True, dtype=work.weights.dtype)
        inner *= by_row
    _products(d_entering, w13, block, out=found.rows[here])
    sizes = [last - first for _, first, last in block]
    _weight_gradients(incoming, inner, block, sizes, out=found.w2)
    _weight_gradients(d_entering, work.rows[here], block, sizes, out=found.w13)
    if found.b13 is not None:
        for (expert, _, _), part in zip(block, torch.split(d_entering, sizes), strict=True):
            found.b13[expert] = part.sum(0)
    if found.b2 is not None and b2 is not None:
        weighted = incoming if weight_on_input else incoming * by_row
        for (expert, first, last), part in zip(block, torch.split(weighted, sizes), strict=True):
            found.b2[expert] = part.sum(0)
            if not weight_on_input:
                plain = incoming[first - start : last - start]
                found.weights[first:last] += (plain @ b2[expert]).unsqueeze(1)


def _weight_gradients(
    outgoing: torch.Tensor,
    entering: torch.Tensor,
    block: Ranges,
    sizes: list[int],
    *,
    out: torch.Tensor,
) -> None:
    """out[e] = outgoing[a:b]^T @ entering[a:b] for each expert of a block."""
    lefts, rights = torch.split(outgoing, sizes), torch.split(entering, sizes)
    for (expert, _, _), left, right in zip(block, lefts, rights, strict=True):
        torch.mm(left.t(), right, out=out[expert])
