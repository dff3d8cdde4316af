# ruff: noqa: E402 - the environment is looked at first
"""The backward's kernels in Triton's CPU interpreter: a child of ``test_backward_kernel``.

Prints one line of JSON for each case that it is asked for: its name, and either the worst relative
error of any gradient against float64 autograd of one token and one expert at a time, or what
happened.
"""

import os
import warnings

assert os.environ["TRITON_INTERPRET"] == "1"

import torch

from fivefold.moe import ACTIVATIONS, fused_moe
from fivefold.moe.kernels.launch import backward_fused, forward_fused, forward_split
from oracles.children import run_cases
from oracles.experts import expected, operands
from oracles.interpreter import hurry

torch.set_num_threads(1)
hurry()
CASES = {}
NAMES = ("x", "w13", "w2", "topk_weights", "b13", "b2")
SHAPES = {  # T, H, I, E, K; tiles are 16 x 16 x 16, counting tasks 32 assignments
    "one token": (1, 16, 16, 3, 1),
    "every expert": (7, 16, 24, 4, 4),
    "more experts than used": (9, 32, 16, 24, 2),
    "several tiles per expert": (45, 32, 20, 3, 2),
    "odd sizes without descriptors": (19, 17, 7, 3, 2),
    "sizes that cut a descriptor's block": (11, 24, 40, 3, 2),
    "all sizes one": (3, 1, 1, 1, 1),
    "expert of exactly one tile": (16, 16, 16, 1, 1),
}
plain_empty = torch.empty


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def poisoned(*sizes, **options):
    """Fresh memory holds NaN, or the largest numbers of an unsigned type."""
    found = plain_empty(*sizes, **options)
    return found.fill_(float("nan")) if found.is_floating_point() else found.fill_(85)


def outgoing(given):
    generator = torch.Generator().manual_seed(7)
    shape = given["x"].shape
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(given["x"].dtype)


def wanted(given, activation, gradient, **options):
    leaves = {
        name: value.double().requires_grad_() if value.is_floating_point() else value
        for name, value in given.items()
    }
    out = expected(leaves, activation, **options)
    names = [name for name in NAMES if name in given]
    found = torch.autograd.grad(
        (out * gradient.double()).sum(), [leaves[name] for name in names], materialize_grads=True
    )
    return dict(zip(names, found, strict=True))


def run(given, activation="swiglu", gradient=None, *, keep=False, programs=None, **options):
    gradient = outgoing(given) if gradient is None else gradient
    positional = [given[n] for n in ("x", "w13", "w2", "topk_ids", "topk_weights")]
    options |= {"activation": ACTIVATIONS[activation]}
    options |= {name: given.get(name) for name in ("b13", "b2")}
    hidden = None
    if keep:
        hidden = poisoned(given["topk_ids"].numel(), given["w13"].shape[1], dtype=gradient.dtype)
        forward = forward_split if keep == "split" else forward_fused
        forward(*positional, hidden=hidden, **options)
    before = None if hidden is None else hidden.clone()
    found = backward_fused(gradient, *positional, hidden=hidden, programs=programs, **options)
    assert before is None or torch.equal(before.nan_to_num(), hidden.nan_to_num())
    return {name: g for name, g in zip(NAMES, found, strict=True) if g is not None}


def worst(found, correct):
    errors = []
    for name, right in correct.items():
        assert found[name].shape == right.shape
        assert bool(torch.isfinite(found[name]).all()), f"an element of d_{name} was not written"
        difference = (found[name].double() - right).norm()
        errors.append(float(difference / right.norm()) if right.any() else float(difference))
    return max(errors)


def error(given, activation="swiglu", *, keep=False, **options):
    correct = wanted(given, activation, outgoing(given), **options)
    return {"error": worst(run(given, activation, keep=keep, **options), correct)}


def single(shape, activation="swiglu", **options):
    return operands(shape, activation, bias=True, dtype=torch.float32, **options)


for name, shape in SHAPES.items():
    CASES[name] = lambda shape=shape: error(operands(shape, dtype=torch.float32))
for name in ACTIVATIONS:
    CASES[name] = lambda name=name: error(single((5, 16, 20, 3, 2), name), name)
for kind in ("bfloat16", "float16"):
    CASES[kind] = lambda kind=kind: error(
        operands((37, 32, 24, 4, 2), bias=True, dtype=getattr(torch, kind))
    )
CASES["relu in bfloat16"] = lambda: error(  # a sum must not cross the kink by being rounded
    operands((96, 16, 64, 3, 2), "relu", bias=True, dtype=torch.bfloat16), "relu", keep="fused"
)
for form in ("gelu", "swiglu"):
    for keep in (False, True):
        CASES[f"{form} with weights on the input{', kept' * keep}"] = lambda f=form, k=keep: error(
            single((9, 16, 16, 3, 1), f), f, keep=k, weight_on_input=True
        )
for keep in ("fused", "split"):
    CASES[f"kept by {keep}"] = lambda keep=keep: error(single((21, 24, 20, 4, 2)), keep=keep)


@case
def one_expert_for_all():
    given = operands((40, 16, 16, 3, 1), dtype=torch.float32)
    given["topk_ids"].fill_(2)
    result = error(given)
    found = run(given)
    assert not found["w13"][:2].any()
    return result


@case
def dropped_and_foreign_ids():
    given = single((20, 16, 16, 4, 2))
    given["topk_ids"][::3] = -1
    given["topk_ids"][1, 0] = -1
    correct = wanted(given, "swiglu", outgoing(given))
    given["topk_weights"][1, 0] = float("inf")  # a dropped weight is not looked at
    given["topk_ids"][1, 0] = 99  # where nothing checks the values, out of range is dropped
    found = run(given)
    assert not found["topk_weights"][::3].any()
    return {"error": worst(found, correct)}


@case
def weights_of_zero():
    given = single((9, 16, 16, 3, 1))
    given["topk_weights"][::2] = 0.0
    errors = [error(given, weight_on_input=on)["error"] for on in (False, True)]
    return {"error": max(errors)}


@case
def strided_operands_and_other_types():
    given = single((9, 16, 16, 3, 2))
    given["topk_weights"] = given["topk_weights"].bfloat16()
    given["topk_ids"] = given["topk_ids"].int().t().contiguous().t()
    for name in ("x", "w13", "w2"):
        given[name] = given[name].transpose(0, 1).contiguous().transpose(0, 1)
    gradient = torch.ones(1, 1).expand(9, 16)
    correct = wanted(given, "swiglu", gradient)
    found = run(given, gradient=gradient)
    assert found["topk_weights"].dtype == torch.bfloat16
    weights = worst({"w": found.pop("topk_weights")}, {"w": correct.pop("topk_weights")})
    assert weights < 4e-3  # it is rounded to 8 bits
    return {"error": worst(found, correct)}


@case
def bad_values_stay_where_they_are():
    given = single((6, 24, 24, 3, 1))
    given["topk_ids"] = torch.tensor([[0], [1], [0], [1], [0], [1]])
    correct = wanted(given, "swiglu", outgoing(given))
    for name in ("w13", "w2", "b13", "b2"):  # behind expert 1 lies an expert that nobody asks for
        given[name][2] = float("nan")
    result = {"error": worst(run(given), correct)}
    given["x"][0] = float("nan")
    found = run(given)
    assert bool(torch.isnan(found["w13"][0]).any()), "a NaN got lost"
    assert bool(torch.isfinite(found["w13"][1:]).all())
    assert bool(torch.isfinite(found["x"][1:]).all())
    return result


@case
def all_dropped():
    given = single((5, 16, 16, 4, 2))
    given["topk_ids"].fill_(-1)
    return {"holds": all(not g.any() for g in run(given, keep=True).values())}


@case
def no_tokens():
    given = single((5, 16, 16, 4, 2))
    given |= {name: given[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    found = run(given)
    return {"holds": all(g.shape == given[n].shape and not g.any() for n, g in found.items())}


@case
def same_bits_for_all_grids_runs_and_kept_or_not():
    given = operands((20, 32, 24, 3, 2), bias=True, dtype=torch.bfloat16)
    results = [run(given, programs=p) for p in (None, None, 1, 7)] + [run(given, keep=True)]
    first = results[0]
    return {"holds": all(torch.equal(first[n], r[n]) for r in results for n in first)}


@case
def counts_over_more_chunks_than_are_read_at_a_time():
    """Counting tasks look at 32 assignments each, and their counts are read 32 at a time."""
    return error(operands((600, 1, 1, 3, 2), dtype=torch.float32))


@case
def weights_in_double_precision():
    given = single((6, 16, 16, 3, 2))
    given["topk_weights"] = given["topk_weights"].double()
    found = run(given)
    assert found["topk_weights"].dtype == torch.float64
    return {"error": worst(found, wanted(given, "swiglu", outgoing(given)))}


@case
def as_the_operator():
    given = single((7, 16, 16, 3, 2))
    names = [name for name in NAMES if name in given]
    worst_error = 0.0
    correct = wanted(given, "swiglu", outgoing(given))
    for backend in ("fused", "split"):
        for recompute in (True, False):
            leaves = {n: v.clone().requires_grad_(n in names) for n, v in given.items()}
            out = fused_moe(**leaves, backend=backend, precision="tf32x3", recompute=recompute)
            loss = (out * outgoing(given)).sum()
            operand = [leaves[n] for n in names]
            first = torch.autograd.grad(loss, operand, retain_graph=True)
            again = torch.autograd.grad(loss, operand)  # what was kept is still as it was
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            found = dict(zip(names, first, strict=True))
            worst_error = max(worst_error, worst(found, correct))
    return {"error": worst_error}


def arguments(shape, activation):
    given = single(shape, activation)
    order = ("x", "w13", "w2", "topk_ids", "topk_weights", "b13", "b2")
    return [given[n].requires_grad_(given[n].is_floating_point()) for n in order]


@case
def well_formed_custom_ops():
    operand = arguments((3, 16, 16, 2, 1), "swiglu")
    for keep in (False, True):
        more = ("swiglu", False, "fused", "ieee", None, None, keep)
        torch.library.opcheck(torch.ops.fivefold.fused_moe.default, (*operand, *more))
    plain = [t.detach() for t in operand]
    torch.library.opcheck(
        torch.ops.fivefold.fused_moe_backward.default,
        (torch.ones(3, 16), *plain, "swiglu", False, "fused", "ieee", None),
    )
    return {"holds": True}


@case
def gradients_are_those_of_the_kernels_own_forward():
    """By finite differences, in float32: coarse, but against nothing of ours."""
    x, w13, w2, ids, *others = arguments((3, 16, 8, 2, 1), "silu")

    def output(x, w13, w2, weights, b13, b2):
        options = {"activation": "silu", "b13": b13, "b2": b2, "backend": "fused"}
        return fused_moe(x, w13, w2, ids, weights, **options)

    warnings.filterwarnings("ignore", message="Input #. requires gradient and is not a double")
    close = {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2, "nondet_tol": 0.0, "fast_mode": True}
    return {"holds": torch.autograd.gradcheck(output, (x, w13, w2, *others), **close)}


if __name__ == "__main__":
    torch.empty = poisoned
    torch.empty_like = lambda like, **_options: poisoned(like.shape, dtype=like.dtype)
    run_cases(CASES)
