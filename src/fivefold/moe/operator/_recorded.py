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
from fivefold.moe.operator._assignments import Assignments, sort_assignments
from fivefold.moe.operator._grouped import Call, Gradients
from fivefold.moe.operator._products import cut
from fivefold.moe.operator.activations import Activation

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
        options: tuple[Activation, bool, bool],
    ) -> torch.Tensor:
        activation, weight_on_input, recompute = options
        order = sort_assignments(ids, len(w2))
        call = Call(
            x=x,
            w13=w13,
            w2=w2,
            weights=weights,
            b13=b13,
            b2=b2,
            activation=activation,
            weight_on_input=weight_on_input,
            order=order,
            blocks=cut(order, x.dtype),
        )
        kept: list[torch.Tensor] = []
        output = call.forward(None if recompute else kept)
        rows = (order.slots, order.tokens, order.places, order.ends)
        ctx.save_for_backward(x, w13, w2, weights, b13, b2, *rows, *kept)
        ctx.options, ctx.stops, ctx.blocks = options, order.stops, call.blocks
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: _Optional) -> tuple[_Optional, ...]:
        if gradient is None:  # nothing downstream depends on the output
            return (None,) * 8
        x, w13, w2, weights, b13, b2, slots, tokens, places, ends, *kept = ctx.saved_tensors
        activation, weight_on_input, recompute = ctx.options
        order = Assignments(slots=slots, tokens=tokens, places=places, ends=ends, stops=ctx.stops)
        call = Call(
            x=x,
            w13=w13,
            w2=w2,
            weights=weights,
            b13=b13,
            b2=b2,
            activation=activation,
            weight_on_input=weight_on_input,
            order=order,
            blocks=ctx.blocks,
        )
        wanted = ctx.needs_input_grad[:6]
        with torch.no_grad():
            found = call.backward(gradient.contiguous(), None if recompute else kept, wanted)
        if torch.is_grad_enabled():  # somebody wants to differentiate these in turn
            operands = (gradient, x, w13, w2, weights, b13, b2)
            found = _Last.apply(found, *operands)  # type: ignore[no-untyped-call]
        return (*found, None, None)


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
    activation: Activation,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    weight_on_input: bool = False,
    recompute: bool = True,
) -> torch.Tensor:
    """``forward_grouped``, recorded for ``backward()``; same arguments.

    Args:
        x: As in ``forward_grouped``.
        w13: As in ``forward_grouped``.
        w2: As in ``forward_grouped``.
        ids: As in ``forward_grouped``.
        weights: As in ``forward_grouped``.
        activation: As in ``forward_grouped``.
        b13: As in ``forward_grouped``.
        b2: As in ``forward_grouped``.
        weight_on_input: As in ``forward_grouped``.
        recompute: Compute what the activation takes again in the backward, instead of keeping it.

    Returns:
        [T, H].
    """
    options = (activation, weight_on_input, recompute)
    found: torch.Tensor = _Recorded.apply(x, w13, w2, weights, b13, b2, ids, options)  # type: ignore[no-untyped-call]
    return found
