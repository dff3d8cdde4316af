"""Random operands, and what the operator makes of them: one by one, in float64."""

import torch

from fivefold.moe import ACTIVATIONS

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-6, torch.float64: 1e-13}


def experts_one_by_one(  # noqa: PLR0913 - the operator's own operands
    x, w13, w2, ids, weights, *, activation, b13=None, b2=None, weight_on_input=False
):
    """y[t] = sum_k weight[t, k] * W2[e] f(W13[e] x[t] + b13[e]) + b2[e], with e = ids[t, k].

    Slow and obviously right: what every backend is tested against; differentiable in all but ids.
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


def operands(shape, activation="swiglu", *, bias=False, dtype=torch.float64, seed=0):
    tokens, hidden, inner, experts, top_k = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    rows = ACTIVATIONS[activation].width(inner)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    biases = {"b13": draw(experts, rows), "b2": draw(experts, hidden)} if bias else {}
    return {
        "x": draw(tokens, hidden),
        "w13": draw(experts, rows, hidden) / hidden**0.5,
        "w2": draw(experts, hidden, inner) / inner**0.5,
        "topk_ids": ids,
        "topk_weights": torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(
            torch.promote_types(dtype, torch.float32)
        ),
    } | biases


def expected(given, activation, **options):
    wide = {
        name: value.double() if value.is_floating_point() else value
        for name, value in given.items()
    }
    return experts_one_by_one(
        wide["x"],
        wide["w13"],
        wide["w2"],
        wide["topk_ids"],
        wide["topk_weights"],
        activation=ACTIVATIONS[activation],
        b13=wide.get("b13"),
        b2=wide.get("b2"),
        **options,
    )


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def cancelling(dtype):
    """One token with W13 x = 0 exactly, and a weight that its elements cannot be multiplied with.

    The output is then 0 as well, for the activation "silu", whose slope is 1 / 2 there.
    """
    return {
        "x": torch.tensor([[3.0, 1.0]], dtype=dtype),
        "w13": torch.tensor([[[1.0, -3.0]]], dtype=dtype),
        "w2": torch.tensor([[[1.0], [0.0]]], dtype=dtype),
        "topk_ids": torch.zeros(1, 1, dtype=torch.int64),
        "topk_weights": torch.tensor([[1 / 3]]),
    }
