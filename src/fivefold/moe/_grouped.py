"""Experts on the CPU (or any device) by sorting the assignments: one matrix product per expert.

The rows of an expert stand together, so each of its products is one dense call. The outputs go
back to [T, K] slots and are added in the order of k in float32 at least, so the result does not
depend on how the rows were sorted or split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fivefold.moe._activations import Activation

__all__ = ["Assignments", "backward_grouped", "forward_grouped", "sort_assignments"]


@dataclass(frozen=True, kw_only=True)
class Assignments:
    """Assignments in the order of their experts.

    Attributes:
        slots: Flat place t K + k of each, int64 [R]; dropped ones are left out.
        tokens: Its token, int64 [R].
        ranges: (expert, first, stop) of each expert that has any.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    ranges: tuple[tuple[int, int, int], ...]


def sort_assignments(ids: torch.Tensor, num_experts: int) -> Assignments:
    """Bring assignments of one expert together; within an expert by token, then slot.

    Args:
        ids: [T, K]; -1 for none.
        num_experts: E.

    Returns:
        The order.
    """
    flat = ids.reshape(-1).long()
    counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
    slots = torch.sort(flat, stable=True).indices[counts[0] :]
    ranges, first = [], 0
    for expert, count in enumerate(counts[1:]):
        if count:
            ranges.append((expert, first, first + count))
        first += count
    tokens = torch.div(slots, max(ids.shape[1], 1), rounding_mode="floor")
    return Assignments(slots=slots, tokens=tokens, ranges=tuple(ranges))


@dataclass(frozen=True, kw_only=True)
class _Expert:
    """What one expert works on: its assignments and its weights."""

    number: int
    tokens: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor  # [rows, 1], in the compute type


def _experts(order: Assignments, weights: torch.Tensor, dtype: torch.dtype) -> Iterator[_Expert]:
    flat = weights.reshape(-1)
    for expert, first, stop in order.ranges:
        slots = order.slots[first:stop]
        yield _Expert(
            number=expert,
            tokens=order.tokens[first:stop],
            slots=slots,
            weights=flat[slots].to(dtype).unsqueeze(1),
        )


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
) -> torch.Tensor:
    """Compute what ``experts_one_by_one`` does, an expert at a time; same arguments."""
    order = sort_assignments(ids, len(w2))
    top_k = ids.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    outputs = x.new_zeros((ids.numel(), x.shape[1]))
    for expert in _experts(order, weights, wide):
        rows = x[expert.tokens]
        if weight_on_input:
            rows = (rows * expert.weights).to(x.dtype)
        hidden = _linear(rows, w13[expert.number], b13, expert.number)
        outputs[expert.slots] = _linear(activation(hidden), w2[expert.number], b2, expert.number)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    by_slot = outputs.view(len(x), top_k, x.shape[1])
    for slot in range(top_k):
        term = by_slot[:, slot]
        if weight_on_input:
            total += term
        else:
            weight = weights[:, slot].to(wide).masked_fill(ids[:, slot] < 0, 0.0)
            total.addcmul_(term.to(wide), weight.unsqueeze(1))
    return total.to(x.dtype)


def _linear(
    rows: torch.Tensor, weight: torch.Tensor, biases: torch.Tensor | None, expert: int
) -> torch.Tensor:
    bias = None if biases is None else biases[expert]
    return torch.nn.functional.linear(rows, weight, bias)


@dataclass(kw_only=True)
class _Gradients:
    x: torch.Tensor  # [T K, H]: added over k at the end, in order
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor  # [T K]
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
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Gradients of ``forward_grouped``; the hidden values are computed again, none were kept.

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

    Returns:
        Gradients of x, w13, w2, weights, b13 and b2.
    """
    order = sort_assignments(ids, len(w2))
    wide = torch.promote_types(x.dtype, torch.float32)
    found = _Gradients(
        x=torch.zeros((ids.numel(), x.shape[1]), dtype=wide, device=x.device),
        w13=torch.zeros_like(w13),
        w2=torch.zeros_like(w2),
        weights=torch.zeros(ids.numel(), dtype=wide, device=x.device),
        b13=None if b13 is None else torch.zeros_like(b13),
        b2=None if b2 is None else torch.zeros_like(b2),
    )
    for expert in _experts(order, weights, wide):
        _backward_of_expert(
            expert,
            gradient[expert.tokens],
            x[expert.tokens],
            w13[expert.number],
            w2[expert.number],
            found,
            activation=activation,
            b13=b13,
            b2=b2,
            weight_on_input=weight_on_input,
        )
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    by_slot = found.x.view(len(x), ids.shape[1], x.shape[1])
    for slot in range(ids.shape[1]):
        total += by_slot[:, slot]
    shaped = found.weights.view(weights.shape).to(weights.dtype)
    return total.to(x.dtype), found.w13, found.w2, shaped, found.b13, found.b2


def _backward_of_expert(  # noqa: PLR0913 - one expert's share of the operands
    expert: _Expert,
    gradient: torch.Tensor,
    rows: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    found: _Gradients,
    *,
    activation: Activation,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
    weight_on_input: bool,
) -> None:
    dtype = rows.dtype
    inputs = (rows * expert.weights).to(dtype) if weight_on_input else rows
    hidden = _linear(inputs, w13, b13, expert.number)
    inner = activation(hidden)
    outgoing = gradient
    if not weight_on_input:
        output = _linear(inner, w2, b2, expert.number)
        found.weights[expert.slots] = (gradient * output).sum(-1, dtype=expert.weights.dtype)
        outgoing = (gradient * expert.weights).to(dtype)
    d_hidden = activation.backward(hidden, outgoing @ w2)
    d_inputs = d_hidden @ w13
    found.w2[expert.number] = outgoing.t() @ inner
    found.w13[expert.number] = d_hidden.t() @ inputs
    if found.b2 is not None:
        found.b2[expert.number] = outgoing.sum(0)
    if found.b13 is not None:
        found.b13[expert.number] = d_hidden.sum(0)
    if weight_on_input:
        found.weights[expert.slots] = (d_inputs * rows).sum(-1, dtype=expert.weights.dtype)
        found.x[expert.slots] = d_inputs * expert.weights
    else:
        found.x[expert.slots] = d_inputs.to(found.x.dtype)
