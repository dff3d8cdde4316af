"""The slow, obviously right expert computation: one token and one expert at a time.

It is what every backend is tested against, in float64, and what the documentation means by
"the result". Nothing here is fast on purpose.
"""

from __future__ import annotations

import torch

from fivefold.moe._activations import Activation


def experts_one_by_one(  # noqa: PLR0913 - the operator's own operands
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
    """y[t] = sum_k weight[t, k] * W2[e] f(W13[e] x[t] + b13[e]) + b2[e], with e = ids[t, k].

    Args:
        x: Tokens, [T, H].
        w13: First weights, [E, 2I, H] where the activation is gated, else [E, I, H].
        w2: Second weights, [E, H, I].
        ids: Experts, [T, K]; -1 for none.
        weights: [T, K].
        activation: f.
        b13: [E, 2I] or [E, I]; None for none.
        b2: [E, H]; None for none. Weighted like the rest of the expert's output.
        weight_on_input: Multiply W13 x by the weight instead, which is W13 (weight * x).

    Returns:
        [T, H], differentiable in everything but ``ids``.
    """
    rows = []
    for token, experts in enumerate(ids.tolist()):
        total = torch.zeros_like(x[token])
        for slot, expert in enumerate(experts):
            if expert < 0:
                continue
            weight = weights[token, slot]
            hidden = w13[expert] @ x[token]
            if weight_on_input:
                hidden = hidden * weight
            if b13 is not None:
                hidden = hidden + b13[expert]
            output = w2[expert] @ activation(hidden)
            if b2 is not None:
                output = output + b2[expert]
            total = total + (output if weight_on_input else output * weight)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)
