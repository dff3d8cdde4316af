"""Experts on the CPU (or any device) by sorting the assignments: few dense products for all rows.

Forward and backward go block by block (``_products``): what is done elementwise is done per block,
while it is in the cache. With a few rows per expert, a custom op's way through torch's dispatcher
and back, and sorting the assignments twice, cost a tenth of a training step. So outside of graphs
and transformations autograd's record is a plain ``torch.autograd.Function``, which keeps the order
for the backward and computes only the gradients that are asked for.

Shapes: T tokens, K experts per token, R assignments that were not dropped, H width, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.errors import UnsupportedError
from fivefold.moe.kernels.arguments import Workspace
from fivefold.moe.operator._products import (
    Assignments,
    Block,
    ExpertGradient,
    ExpertWeights,
    added,
    by_row,
    cut,
    large_empty,
    one_row_each,
    sort_assignments,
)
from fivefold.moe.operator.activations import Activation
from fivefold.moe.operator.operands import as_given

_Optional = torch.Tensor | None
_MOST_SINGLE_ROWS = 64
Gradients = tuple[_Optional, ...]  # of x, w13, w2, weights, b13 and b2


@dataclass(frozen=True, kw_only=True)
class Call:
    """The operands of one call, with its assignments in order: forward and backward."""

    x: torch.Tensor  # [T, H]
    w13: torch.Tensor  # [E, 2I or I, H]
    w2: torch.Tensor  # [E, H, I]
    weights: torch.Tensor  # [T, K]
    order: Assignments
    blocks: tuple[Block, ...]
    activation: Activation
    b13: _Optional = None  # [E, 2I or I]
    b2: _Optional = None  # [E, H]
    weight_on_input: bool = False

    def forward(self, kept: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Return [T, H] in x's type; what the activation takes goes to ``kept``, block by block."""
        with as_given(self.x):
            order, blocks = self.order, self.blocks
            first = self.first_product()
            second = ExpertWeights(self.w2, self.b2, order)
            outputs = _RowResults(self.x, order, blocks)
            for block in blocks:
                entering = self.entering(first, self.rows_of(block), block)
                inner = self.activation(entering)
                outputs.put(second.applied(inner, block, outputs.room(block)))
                if kept is not None:
                    kept.append(entering)
            weights = None if self.weight_on_input else self.weights
            if weights is not None and order.drops:  # an infinity times a row of zeros is NaN
                weights = weights.masked_fill(order.places == order.num_rows, 0.0)
            return added(outputs.rows, order.places, weights).to(self.x.dtype)

    def backward(
        self,
        gradient: torch.Tensor,
        kept: Sequence[torch.Tensor] | None = None,
        wanted: Sequence[bool] = (True,) * 6,
    ) -> Gradients:
        """Return the gradients that are wanted; what was not ``kept`` is computed again."""
        with as_given(self.x):
            return _Backward(self, gradient, wanted).run(kept)

    def weights_by_row(self) -> torch.Tensor:
        """Return the weight of each row, [R, 1], in float32 at least."""
        wide = torch.promote_types(self.x.dtype, torch.float32)
        return self.weights.reshape(-1).index_select(0, self.order.slots).to(wide).unsqueeze(1)

    def rows_of(self, block: Block) -> torch.Tensor:
        """Return the tokens of a block."""
        return self.x.index_select(0, self.order.tokens[block.rows])

    def first_product(self) -> ExpertWeights:
        """Return the first product; its bias comes after a weight on the input."""
        bias = None if self.weight_on_input else self.b13
        return ExpertWeights(self.w13, bias, self.order)

    def entering(self, first: ExpertWeights, rows: torch.Tensor, block: Block) -> torch.Tensor:
        """Return what the activation takes."""
        found = first.applied(rows, block)
        if not self.weight_on_input:
            return found
        # W13 (w x) = w (W13 x), and without rounding w x to 16 bits: what the kernels do as well.
        weighed = found * self.weights_by_row()[block.rows]
        if self.b13 is not None:
            weighed += by_row(self.b13, block)
        return weighed.to(found.dtype)


class _RowResults:
    """A result [H] of each row, from all blocks: that of a single block needs no copy."""

    def __init__(self, x: torch.Tensor, order: Assignments, blocks: Sequence[Block]) -> None:
        self.rows, self._is_single = x[:0], len(blocks) == 1 and not order.drops
        if not self._is_single:
            # One row more, of zeros, for what was dropped.
            self.rows = large_empty(x, order.num_rows + order.drops, x.shape[1])
            self.rows[order.num_rows :] = 0.0

    def room(self, block: Block) -> torch.Tensor | None:
        """Return where a block's belongs; None: anywhere."""
        return None if self._is_single else self.rows[block.rows]

    def put(self, found: torch.Tensor) -> None:
        """Take a block's, which is where it belongs."""
        if self._is_single:
            self.rows = found


class _Backward:
    """The gradients of a call on their way."""

    def __init__(self, call: Call, gradient: torch.Tensor, wanted: Sequence[bool]) -> None:
        self.call, self.gradient, self.wanted = call, gradient, wanted
        order, x = call.order, call.x
        self.first = call.first_product()
        self.second = ExpertWeights(call.w2, call.b2, order)
        self.by_row = call.weights_by_row()
        self.d_w13 = ExpertGradient(self.first)
        self.d_w2 = ExpertGradient(self.second)
        self.d_rows: _RowResults | None = None
        if wanted[0] or call.weight_on_input:
            self.d_rows = _RowResults(x, order, call.blocks)
        self.d_weights = self.by_row.new_zeros(order.num_rows + order.drops)
        self.d_b13 = torch.zeros_like(call.b13) if wanted[4] and call.b13 is not None else None
        self.d_b2 = torch.zeros_like(call.b2) if wanted[5] and call.b2 is not None else None

    def run(self, kept: Sequence[torch.Tensor] | None) -> Gradients:
        """Return all of them, block by block."""
        call, wanted = self.call, self.wanted
        for number, block in enumerate(call.blocks):
            self._block(block, None if kept is None else kept[number])
        d_x = None
        if wanted[0] and self.d_rows is not None:
            d_x = added(self.d_rows.rows, call.order.places).to(call.x.dtype)
        places = call.order.places
        d_weights = self.d_weights.index_select(0, places.view(-1)).view(places.shape)
        return (
            d_x,
            self.d_w13.result() if wanted[1] else None,
            self.d_w2.result() if wanted[2] else None,
            d_weights.to(call.weights.dtype) if wanted[3] else None,
            self.d_b13,
            self.d_b2,
        )

    def _block(self, block: Block, entering: torch.Tensor | None) -> None:
        call = self.call
        weights = self.by_row[block.rows]
        rows = call.rows_of(block)
        if entering is None:
            entering = call.entering(self.first, rows, block)
        incoming = self.gradient.index_select(0, call.order.tokens[block.rows])
        pulled = self.second.pulled(incoming, block)
        if call.weight_on_input:
            inner, d_entering = call.activation.with_gradient(entering, pulled)
        else:
            weighed = weights.to(pulled.dtype)
            inner, d_entering = call.activation.with_gradient(entering, pulled * weighed)
            # <gradient, W2 h> = <W2^T gradient, h>: no need for W2 h itself.
            of_rows = pulled.mul_(inner).sum(-1, dtype=weights.dtype)
            self.d_weights[block.rows] = of_rows
            inner *= weighed
        if self.wanted[2]:
            self.d_w2.add(incoming, inner, block)
        if self.wanted[1]:
            seen = (rows * weights).to(rows.dtype) if call.weight_on_input else rows
            self.d_w13.add(d_entering, seen, block)
        self._biases(block, incoming, d_entering)
        if self.d_rows is not None:
            d_rows = self.first.pulled(d_entering, block, self.d_rows.room(block))
            self.d_rows.put(d_rows)
            if call.weight_on_input:
                self.d_weights[block.rows] = (d_rows * rows).sum(-1, dtype=weights.dtype)
                d_rows *= weights.to(d_rows.dtype)

    def _biases(self, block: Block, incoming: torch.Tensor, d_entering: torch.Tensor) -> None:
        call = self.call
        if self.d_b13 is not None:
            _add_by_expert(self.d_b13, d_entering, block)
        if call.b2 is None:
            return
        weighed = incoming
        if not call.weight_on_input:
            weighed = incoming * self.by_row[block.rows].to(incoming.dtype)
            of_rows = self.d_weights[block.rows]
            for number, part, sums in block.parts(incoming, of_rows):
                sums.add_(part @ call.b2[block.experts.start + number])
        if self.d_b2 is not None:
            _add_by_expert(self.d_b2, weighed, block)


def _add_by_expert(total: torch.Tensor, rows: torch.Tensor, block: Block) -> None:
    sums = total[block.experts]
    for number, part in block.parts(rows):
        sums[number] = part.sum(0)


def forward_grouped(
    *operands: torch.Tensor, hidden: _Optional = None, **options: Any
) -> torch.Tensor:
    """Compute the operator block by block, from x, w13, w2, ids and weights.

    What the activation takes goes to ``hidden`` [T K, rows of w13], where that is not None.
    """
    if hidden is None:
        simply = _row_by_row(*operands, **options)
        return _call(*operands, **options).forward() if simply is None else simply
    call = _call(*operands, **options)
    kept: list[torch.Tensor] = []
    output = call.forward(kept)
    for block, entering in zip(call.blocks, kept, strict=True):
        hidden[block.rows] = entering
    return output


def _row_by_row(
    *operands: torch.Tensor,
    activation: Activation,
    b13: _Optional = None,
    b2: _Optional = None,
    weight_on_input: bool = False,
    **_: Any,
) -> _Optional:
    """Return the output of a token or two, as in decoding; None where it is not as simple as that.

    Hardly two rows have one expert: to sort them and to cut them into blocks would take as long as
    the products.
    """
    x, w13, w2, ids, weights = operands
    if weight_on_input or not 0 < ids.numel() <= _MOST_SINGLE_ROWS:
        return None
    experts = ids.reshape(-1)
    numbers = experts.tolist()
    repeated = len(numbers) - len(set(numbers))
    if repeated * 8 > len(numbers) or min(numbers) < 0 or max(numbers) >= len(w2):
        return None
    with as_given(x):
        rows = x.repeat_interleave(ids.shape[1], 0)
        inner = activation(one_row_each(rows, w13, b13, experts))
        rows = one_row_each(inner, w2, b2, experts)
        places = torch.arange(len(rows), device=x.device).view(ids.shape)
        return added(rows, places, weights).to(x.dtype)


def backward_grouped(
    gradient: torch.Tensor, *operands: torch.Tensor, hidden: _Optional = None, **options: Any
) -> Gradients:
    """Return the gradients of ``forward_grouped``, from what it put into ``hidden`` if not None."""
    call = _call(*operands, **options)
    kept = None if hidden is None else [hidden[block.rows] for block in call.blocks]
    return call.backward(gradient, kept)


def recorded_grouped(
    *operands: torch.Tensor,
    b13: _Optional = None,
    b2: _Optional = None,
    recompute: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Compute ``forward_grouped`` and record it for ``backward()``."""
    x, w13, w2, ids, weights = operands
    found: torch.Tensor = _Recorded.apply(x, w13, w2, weights, b13, b2, ids, options, recompute)  # type: ignore[no-untyped-call]
    return found


def _call(
    *operands: torch.Tensor,
    precision: str = "ieee",
    workspace: Workspace | None = None,
    **options: Any,
) -> Call:
    del precision, workspace  # torch's own products: never less precise than asked for on the CPU
    x, w13, w2, ids, weights = operands
    order = sort_assignments(ids, len(w2))
    blocks = cut(order, x.dtype)
    return Call(x=x, w13=w13, w2=w2, weights=weights, order=order, blocks=blocks, **options)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        """Compute the operator and keep what the backward needs."""
        x, w13, w2, weights, b13, b2, ids, options, recompute = given
        call = _call(x, w13, w2, ids, weights, b13=b13, b2=b2, **options)
        kept: list[torch.Tensor] = []
        output = call.forward(None if recompute else kept)
        order = call.order
        rows = (order.slots, order.tokens, order.places, order.ends)
        ctx.save_for_backward(*given[:6], *rows, *kept)
        ctx.stops, ctx.recompute = order.stops, recompute
        ctx.known = {
            "blocks": call.blocks,
            "activation": call.activation,
            "weight_on_input": call.weight_on_input,
        }
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: _Optional) -> tuple[_Optional, ...]:
        """Return the gradients that are asked for."""
        if gradient is None:  # nothing downstream depends on the output
            return (None,) * 9
        x, w13, w2, weights, b13, b2, slots, tokens, places, ends, *kept = ctx.saved_tensors
        order = Assignments(slots=slots, tokens=tokens, places=places, ends=ends, stops=ctx.stops)
        operands = {"x": x, "w13": w13, "w2": w2, "weights": weights, "b13": b13, "b2": b2}
        call = Call(**operands, order=order, **ctx.known)
        kept = None if ctx.recompute else kept
        with torch.no_grad():
            found = call.backward(gradient.contiguous(), kept, ctx.needs_input_grad[:6])
        if torch.is_grad_enabled():  # somebody wants to differentiate these in turn
            found = _Last.apply(found, gradient, *ctx.saved_tensors[:6])  # type: ignore[no-untyped-call]
        return (*found, None, None, None)


class _Last(torch.autograd.Function):
    """Gradients as they are, whose own gradients are refused instead of taken for zeros.

    Torch's ``once_differentiable`` does not do: it looks at the incoming gradient alone.
    """

    @staticmethod
    def forward(ctx: Any, found: Gradients, *operands: _Optional) -> Gradients:
        """Return the gradients as they are."""
        del ctx, operands
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: _Optional) -> tuple[_Optional, ...]:
        """Refuse second derivatives."""
        del ctx, gradients
        message = "fused_moe has no second derivatives"
        raise UnsupportedError(message, hint="leave create_graph out")
