"""Experts on the CPU (or any device) by sorting the assignments: few dense products for all rows.

Forward and backward go block by block (``_expert_products``): what is done elementwise is done per
block, while it is in the cache. ``_assignments`` owns the order and the sums back by token.

Shapes: T tokens, K experts per token, R assignments that were not dropped, H width, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.moe.operator._assignments import Assignments, added, sort_assignments
from fivefold.moe.operator._large_memory import large_empty
from fivefold.moe.operator._products import Block, ExpertGradient, ExpertWeights, by_row, cut
from fivefold.moe.operator.activations import Activation

Gradients = tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]
_ALL = (True,) * 6


@dataclass(frozen=True, kw_only=True)
class Call:
    """The operands of one call, with its assignments in order: forward and backward.

    Attributes:
        x: [T, H].
        w13: [E, 2I or I, H].
        w2: [E, H, I].
        weights: [T, K].
        b13: [E, 2I or I], or None.
        b2: [E, H], or None.
        activation: Between the products.
        weight_on_input: Whether W13 x is weighed, which is W13 (w x), instead of the output.
        order: The assignments in order.
        blocks: In which their rows are taken, from ``cut``.
    """

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    order: Assignments
    blocks: tuple[Block, ...]
    activation: Activation
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    weight_on_input: bool = False

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        **options: Any,
    ) -> Call:
        """Put the assignments of a call in order."""
        order = sort_assignments(ids, len(w2))
        blocks = cut(order, x.dtype)
        return cls(x=x, w13=w13, w2=w2, weights=weights, order=order, blocks=blocks, **options)

    def forward(self, kept: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Compute the output, [T, H].

        Args:
            kept: What the activation takes is put there, block by block; None: it is not kept.

        Returns:
            In x's data type.
        """
        with _as_given(self.x):
            order, blocks = self.order, self.blocks
            first = self._first()
            second = ExpertWeights(self.w2, self.b2, order)
            outputs = _RowResults(self.x, order, blocks)
            for block in blocks:
                entering = self._entering(first, self._rows(block), block)
                inner = self.activation(entering)
                outputs.put(second.applied(inner, block, outputs.room(block)))
                if kept is not None:
                    kept.append(entering)
            weights = None if self.weight_on_input else self.weights
            return added(outputs.rows, order, weights).to(self.x.dtype)

    def backward(
        self,
        gradient: torch.Tensor,
        kept: Sequence[torch.Tensor] | None = None,
        wanted: Sequence[bool] = _ALL,
    ) -> Gradients:
        """Compute the gradients of the operands.

        Args:
            gradient: Of the output, [T, H].
            kept: What the forward kept; None: it is computed again.
            wanted: Of which of x, w13, w2, weights, b13 and b2.

        Returns:
            As many; None for what is not wanted.
        """
        with _as_given(self.x):
            return _Backward(self, gradient, wanted).run(kept)

    def _weights_by_row(self) -> torch.Tensor:
        wide = torch.promote_types(self.x.dtype, torch.float32)
        return self.weights.reshape(-1).index_select(0, self.order.slots).to(wide).unsqueeze(1)

    def _rows(self, block: Block) -> torch.Tensor:
        """Return the tokens of a block."""
        return self.x.index_select(0, self.order.tokens[block.rows])

    def _first(self) -> ExpertWeights:
        """Return the first product; its bias comes after a weight on the input."""
        bias = None if self.weight_on_input else self.b13
        return ExpertWeights(self.w13, bias, self.order)

    def _entering(self, first: ExpertWeights, rows: torch.Tensor, block: Block) -> torch.Tensor:
        """Return what the activation takes."""
        found = first.applied(rows, block)
        if not self.weight_on_input:
            return found
        # W13 (w x) = w (W13 x), and without rounding w x to 16 bits: what the kernels do as well.
        weighed = found * self._weights_by_row()[block.rows]
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
        self.first = call._first()  # noqa: SLF001 - its own other half
        self.second = ExpertWeights(call.w2, call.b2, order)
        self.by_row = call._weights_by_row()  # noqa: SLF001 - as above
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
            d_x = added(self.d_rows.rows, call.order).to(call.x.dtype)
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
        rows = call._rows(block)  # noqa: SLF001 - as above
        if entering is None:
            entering = call._entering(self.first, rows, block)  # noqa: SLF001 - as above
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
            self._tokens(block, rows, d_entering, self.d_rows)

    def _tokens(
        self, block: Block, rows: torch.Tensor, d_entering: torch.Tensor, results: _RowResults
    ) -> None:
        d_rows = self.first.pulled(d_entering, block, results.room(block))
        results.put(d_rows)
        if self.call.weight_on_input:
            products = (d_rows * rows).sum(-1, dtype=self.by_row.dtype)
            self.d_weights[block.rows] = products
            d_rows *= self.by_row[block.rows].to(d_rows.dtype)

    def _biases(self, block: Block, incoming: torch.Tensor, d_entering: torch.Tensor) -> None:
        call = self.call
        if self.d_b13 is not None:
            sums = self.d_b13[block.experts]
            for number, part in block.parts(d_entering):
                sums[number] = part.sum(0)
        if call.b2 is None:
            return
        weighed = incoming
        if not call.weight_on_input:
            weighed = incoming * self.by_row[block.rows].to(incoming.dtype)
            of_rows = self.d_weights[block.rows]
            for number, part, sums in block.parts(incoming, of_rows):
                sums.add_(part @ call.b2[block.experts.start + number])
        if self.d_b2 is not None:
            sums = self.d_b2[block.experts]
            for number, part in block.parts(weighed):
                sums[number] = part.sum(0)


def _as_given(x: torch.Tensor) -> AbstractContextManager[object]:
    """Products in the type of their operands, also where torch.autocast is on."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def forward_grouped(
    *operands: torch.Tensor, hidden: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Compute the operator block by block, from x, w13, w2, ids and weights.

    What the activation takes goes to ``hidden`` [T K, rows of w13], where that is not None.
    """
    call = Call.of(*operands, **options)
    if hidden is None:
        return call.forward()
    kept: list[torch.Tensor] = []
    output = call.forward(kept)
    for block, entering in zip(call.blocks, kept, strict=True):
        hidden[block.rows] = entering
    return output


def backward_grouped(
    gradient: torch.Tensor,
    *operands: torch.Tensor,
    hidden: torch.Tensor | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of ``forward_grouped``: of x, w13, w2, weights, b13 and b2.

    ``hidden`` is what the forward put there; None: it is computed again.
    """
    call = Call.of(*operands, **options)
    kept = None if hidden is None else [hidden[block.rows] for block in call.blocks]
    return call.backward(gradient, kept)
