"""The CPU's own record for autograd: what the custom op does, without its price.

With a few rows per expert, a custom op's way through torch's dispatcher and back, and sorting the
assignments twice, cost a tenth of a training step. Outside of graphs and transformations a plain
``torch.autograd.Function`` does as well: it keeps the order for the backward, and computes only the
gradients that are asked for. The custom op stays what ``torch.compile`` and the like see.
"""

from __future__ import annotations

from typing import Any

import torch

from fivefold.errors import UnsupportedError
from fivefold.moe.operator._assignments import Assignments
from fivefold.moe.operator._grouped import Call, Gradients

_Optional = torch.Tensor | None


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch hands operands over by place
        ctx: Any,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        b13: _Optional,
        b2: _Optional,
        ids: torch.Tensor,
        options: dict[str, Any],
        recompute: bool,  # noqa: FBT001 - as above
    ) -> torch.Tensor:
        call = Call.of(x, w13, w2, ids, weights, b13=b13, b2=b2, **options)
        kept: list[torch.Tensor] = []
        output = call.forward(None if recompute else kept)
        order = call.order
        rows = (order.slots, order.tokens, order.places, order.ends)
        ctx.save_for_backward(x, w13, w2, weights, b13, b2, *rows, *kept)
        ctx.options, ctx.stops, ctx.blocks = options, order.stops, call.blocks
        ctx.recompute = recompute
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: _Optional) -> tuple[_Optional, ...]:
        if gradient is None:  # nothing downstream depends on the output
            return (None,) * 9
        x, w13, w2, weights, b13, b2, slots, tokens, places, ends, *kept = ctx.saved_tensors
        order = Assignments(slots=slots, tokens=tokens, places=places, ends=ends, stops=ctx.stops)
        operands = {"x": x, "w13": w13, "w2": w2, "weights": weights, "b13": b13, "b2": b2}
        call = Call(**operands, order=order, blocks=ctx.blocks, **ctx.options)
        wanted = ctx.needs_input_grad[:6]
        with torch.no_grad():
            found = call.backward(gradient.contiguous(), None if ctx.recompute else kept, wanted)
        if torch.is_grad_enabled():  # somebody wants to differentiate these in turn
            found = _Last.apply(found, gradient, *operands.values())  # type: ignore[no-untyped-call]
        return (*found, None, None, None)


class _Last(torch.autograd.Function):
    """Gradients as they are, whose own gradients are refused instead of taken for zeros."""

    @staticmethod
    def forward(ctx: Any, found: Gradients, *operands: _Optional) -> Gradients:
        del ctx, operands
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: _Optional) -> tuple[_Optional, ...]:
        del ctx, gradients
        message = "fused_moe has no second derivatives"
        raise UnsupportedError(message, hint="leave create_graph out")


def recorded_grouped(  # noqa: PLR0913 - the operator's own operands
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    b13: _Optional = None,
    b2: _Optional = None,
    recompute: bool = True,
    **options: Any,
) -> torch.Tensor:
    """``forward_grouped``, recorded for ``backward()``.

    ``recompute`` says whether what the activation takes is computed again in the backward.
    """
    given = (x, w13, w2, weights, b13, b2, ids, options, recompute)
    found: torch.Tensor = _Recorded.apply(*given)  # type: ignore[no-untyped-call]
    return found
