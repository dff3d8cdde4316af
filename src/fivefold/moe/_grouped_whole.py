"""Many small experts on the CPU: torch's own grouped product, one call for all of them.

With a few rows per expert, a call from Python costs more than the product that it starts. torch's
grouped product takes all experts' in one call, for some data types and sizes, and without biases;
what it takes is decided by shapes and loads alone. Rows stand in the order of their experts, as in
``_grouped``, which owns sorting and adding up.
"""

from __future__ import annotations

from typing import Any

import torch

from fivefold.moe._activations import Activation

__all__ = ["backward_whole", "forward_whole", "is_for_whole"]

_ALIGNMENT_BYTES = 16
# Rows of an expert on average from which on products from Python keep up; those of 16 bits take
# less time themselves.
_MOST_ROWS = {torch.float32: 64, torch.bfloat16: 256, torch.float16: 256}


def _grouped_mm() -> Any:
    return getattr(torch.nn.functional, "grouped_mm", None)  # torch 2.10 and newer


def is_for_whole(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    *,
    num_rows: int,
    busy_experts: int,
) -> bool:
    """Whether one call for all experts is possible, and likely the faster way.

    Args:
        x: Tokens; device and data type decide.
        weights: w13 and w2.
        num_rows: Rows of all experts, R.
        busy_experts: Experts with rows.

    Returns:
        Whether to use this module.
    """
    return (
        x.device.type == "cpu"
        and x.dtype in _MOST_ROWS
        and 0 < num_rows < _MOST_ROWS[x.dtype] * busy_experts
        and all(_is_fit(weight) for weight in weights)
        and _grouped_mm() is not None
    )


def _is_fit(weight: torch.Tensor) -> bool:
    item = weight.element_size()
    sizes_fit = all(size * item % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    return sizes_fit and weight.is_contiguous() and weight.data_ptr() % _ALIGNMENT_BYTES == 0


def _product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _grouped_mm()(left, right, offs=ends)
    return found


def forward_whole(
    rows: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ends: torch.Tensor,
    *,
    activation: Activation,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Each row's expert output.

    Args:
        rows: In the order of their experts, [R, H].
        w13: [E, 2I or I, H].
        w2: [E, H, I].
        ends: Where the rows of each expert end, int32 [E].
        activation: Between the products.
        hidden: Where to keep what it takes; None: nowhere.

    Returns:
        [R, H].
    """
    entering = _product(rows, w13.mT, ends)
    if hidden is not None:
        hidden[: len(rows)] = entering
    return _product(activation(entering), w2.mT, ends)


def backward_whole(  # noqa: PLR0913 - the operands of all rows
    incoming: torch.Tensor,
    rows: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: Activation,
    weight_on_input: bool,
    hidden: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of the rows, w13, w2 and, for weights on the output, of the routing weights.

    Args:
        incoming: Gradient of each row's token, [R, H].
        rows: As in the forward.
        w13: As in the forward.
        w2: As in the forward.
        ends: As in the forward.
        weights: Routing weight of each row, [R, 1], float32 at least.
        activation: As in the forward.
        weight_on_input: Whether the rows have their weights in them.
        hidden: What the forward kept; None: it is computed again.

    Returns:
        [R, H], as w13, as w2, and [R, 1] or None.
    """
    entering = _product(rows, w13.mT, ends) if hidden is None else hidden[: len(rows)]
    pulled = _product(incoming, w2, ends)
    by_row, of_weights = weights.to(incoming.dtype), None
    if weight_on_input:
        inner, d_entering = activation.with_gradient(entering, pulled)
    else:
        inner, d_entering = activation.with_gradient(entering, pulled * by_row)
        # <gradient, W2 h> = <W2^T gradient, h>: no need for W2 h itself.
        of_weights = (pulled * inner).sum(-1, keepdim=True, dtype=weights.dtype)
        inner = inner * by_row
    return (
        _product(d_entering, w13, ends),
        _product(d_entering.t(), rows, ends),
        _product(incoming.t(), inner, ends),
        of_weights,
    )
