# ruff: noqa: E402 - the environment is looked at first
"""The kernel in Triton's CPU interpreter: a child process of ``test_fused_kernel``, started once.

Prints one line of JSON for each case that it is asked for: its name, and either the error against
float64 or what happened.
The interpreter has to be chosen before triton is imported, hence a process of its own.
"""

import os

assert os.environ["TRITON_INTERPRET"] == "1"

import torch
import triton
import triton.language as tl

from fivefold.errors import FivefoldError
from fivefold.moe import ACTIVATIONS, Workspace, backends, fused_moe
from fivefold.moe.kernels._products import to_tf32
from fivefold.moe.kernels.arguments import sizes_for, tiles_for
from fivefold.moe.kernels.launch import forward_fused, forward_split
from fivefold.moe.kernels.sync import COUNTED, QUEUES
from oracles.children import run_cases
from oracles.experts import cancelling, expected, operands, relative
from oracles.interpreter import hurry

torch.set_num_threads(1)
hurry()
CASES = {}
SHAPES = {  # T, H, I, E, K; tiles are 16 x 16 x 16, counting tasks 32 assignments
    "one token": (1, 16, 16, 3, 1),
    "every expert": (7, 16, 24, 4, 4),
    "more experts than used": (9, 32, 16, 24, 2),
    "several tiles per expert": (45, 32, 20, 3, 2),
    "odd sizes without descriptors": (19, 17, 7, 3, 2),
    "all sizes one": (3, 1, 1, 1, 1),
    "expert of exactly one tile": (16, 16, 16, 1, 1),
}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def poisoned(like, **_options):
    return torch.full(like.shape, float("nan"), dtype=like.dtype)


def run(given, activation="swiglu", forward=forward_fused, **options):
    positional = (given[n] for n in ("x", "w13", "w2", "topk_ids", "topk_weights"))
    biases = {name: given.get(name) for name in ("b13", "b2")}
    if "workspace" not in options:
        options["workspace"] = dirty(given)
    return forward(*positional, activation=ACTIVATIONS[activation], **biases, **options)


def dirty(given):
    """A workspace whose scratch holds NaN everywhere."""
    tokens, top_k = given["topk_ids"].shape
    experts, hidden, inner = given["w2"].shape
    workspace = Workspace.allocate(
        num_tokens=tokens,
        hidden=hidden,
        intermediate=inner,
        num_experts=experts,
        top_k=top_k,
        dtype=given["x"].dtype,
    )
    workspace.scratch.fill_(0xFF)
    return workspace


def error(given, activation="swiglu", forward=forward_fused, **options):
    known = {k: v for k, v in options.items() if k == "weight_on_input"}
    found = run(given, activation, forward, **options)
    assert bool(torch.isfinite(found).all()), "an element was not written"
    return {"error": relative(found, expected(given, activation, **known))}


for name, shape in SHAPES.items():
    CASES[name] = lambda shape=shape: error(operands(shape, dtype=torch.float32))
for name in ACTIVATIONS:
    CASES[name] = lambda name=name: error(
        operands((5, 16, 20, 3, 2), name, bias=True, dtype=torch.float32), name
    )
for kind in ("bfloat16", "float16"):
    CASES[kind] = lambda kind=kind: error(
        operands((37, 32, 48, 5, 3), bias=True, dtype=getattr(torch, kind))
    )


@case
def split():
    return error(
        operands((21, 24, 20, 4, 2), bias=True, dtype=torch.float32), forward=forward_split
    )


@case
def one_expert_for_all():
    given = operands((40, 16, 16, 3, 1), dtype=torch.float32)
    given["topk_ids"].fill_(2)
    return error(given)


@case
def dropped_and_foreign_ids():
    given = operands((20, 16, 16, 4, 2), bias=True, dtype=torch.float32)
    given["topk_ids"][::3] = -1
    given["topk_ids"][1, 0] = -1
    given["topk_weights"][1, 0] = float("inf")  # a dropped weight is not looked at
    wanted = expected(given, "swiglu")
    given["topk_ids"][1, 0] = 99  # where nothing checks the values, out of range is dropped
    found = run(given)
    assert torch.equal(found[::3], torch.zeros_like(found[::3]))
    return {"error": relative(found, wanted)}


@case
def all_dropped():
    given = operands((5, 16, 16, 4, 2), dtype=torch.float32)
    given["topk_ids"].fill_(-1)
    return {"holds": torch.equal(run(given), torch.zeros(5, 16))}


@case
def no_tokens():
    given = operands((5, 16, 16, 4, 2), dtype=torch.float32)
    given |= {name: given[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    return {"holds": run(given).shape == (0, 16)}


@case
def weights_on_the_input():
    given = operands((9, 16, 16, 3, 1), "gelu", bias=True, dtype=torch.float32)
    return error(given, "gelu", weight_on_input=True)


@case
def a_weight_on_the_input_multiplies_what_was_not_rounded():
    given = {dtype: cancelling(dtype) for dtype in (torch.bfloat16, torch.float16)}
    return {
        "holds": all(
            not run(operands, "silu", forward=forward, weight_on_input=True).any()
            for operands in given.values()
            for forward in (forward_fused, forward_split)
        )
    }


@case
def strided_operands_and_other_types():
    given = operands((9, 16, 16, 3, 2), dtype=torch.float32)
    given["topk_weights"] = given["topk_weights"].bfloat16()
    given["topk_ids"] = given["topk_ids"].int().t().contiguous().t()
    for name in ("x", "w13"):
        given[name] = given[name].transpose(0, 1).contiguous().transpose(0, 1)
    return error(given)


@case
def bad_values_stay_where_they_are():
    given = operands((6, 16, 16, 3, 1), dtype=torch.float32)
    given["topk_ids"] = torch.tensor([[0], [1], [0], [1], [0], [2]])
    wanted = expected(given, "swiglu")
    given["w13"][2] = float("nan")
    given["w2"][2] = float("inf")
    given["x"][1] = float("nan")
    found = run(given)
    clean = [0, 2, 3, 4]
    assert bool(torch.isnan(found[[1, 5]]).all()), "a NaN got lost"
    return {"error": relative(found[clean], wanted[clean])}


@case
def same_bits_for_all_grids_launches_and_memory():
    given = operands((40, 32, 40, 5, 3), bias=True, dtype=torch.bfloat16)
    workspace = dirty(given)
    results = [run(given, programs=p, workspace=workspace) for p in (1, 2, 7)]
    shorter = given | {n: given[n][:5] for n in ("x", "topk_ids", "topk_weights")}
    first = run(shorter, workspace=workspace)  # tables of the longer calls lie in its way
    results += [run(given, forward=forward_split), run(given, workspace=None)]
    same = all(torch.equal(results[0], other) for other in results)
    same = same and torch.equal(first, results[0][:5])
    return {"holds": same and not workspace.control.any()}


@case
def a_wait_without_end_is_an_error():
    given = operands((40, 16, 16, 3, 2), dtype=torch.float32)
    workspace = dirty(given)
    workspace.control[QUEUES.value] = 1  # as if someone had taken the first counting task and died
    found = refusal(lambda: run(given, workspace=workspace))
    clean = not workspace.control.any()
    return {"refused": found, "holds": clean and not workspace.control[COUNTED.value]}


@triton.jit
def _rounded(source, target, S: tl.constexpr):  # noqa: N803 - as the kernels
    place = tl.arange(0, 4096)
    tl.store(target + place, to_tf32(tl.load(source + place), S))


@case
def rounding_to_tf32_bit_by_bit():
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).int()
    bits[:6] = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, 0x7F7FFFFF, 0x3F801000, 0x3F800FFF]).int()
    bits[6:9] = torch.tensor([0, -(2**31), 0x1000]).int()  # zeros, and the tie next to them
    value = bits.view(torch.float32)
    found = torch.empty_like(value)
    call = {"num_tokens": 4, "hidden": 16, "intermediate": 16, "num_experts": 2, "top_k": 1}
    how = {"precision": "tf32", "by_descriptor": True}
    call["dtype"] = torch.float32
    tiles = tiles_for(torch.float32, halves=True, **how)
    options = {"activation": ACTIVATIONS["swiglu"], "weight_on_input": False} | how
    sizes = sizes_for(tiles, call, **options)
    _rounded[1,](value, found, sizes)
    # By arithmetic: eleven significant bits, halves away from zero; denormal numbers have fewer.
    _, exponent = torch.frexp(value.double())
    unit = torch.ldexp(torch.ones(4096).double(), exponent.clamp(min=-125) - 11)
    wanted = (value.double().abs() / unit + 0.5).floor() * unit
    wanted = torch.copysign(wanted, value.double()).float()
    wanted = torch.where(value.isinf(), value, wanted)
    number = ~value.isnan()
    same = torch.equal(found[number].view(torch.int32), wanted[number].view(torch.int32))
    return {"holds": same and bool(found[~number].isnan().all()) and int((~number).sum()) > 2}


@case
def tf32():
    given = operands((37, 48, 32, 5, 2), dtype=torch.float32)
    coarse, fine = (error(given, precision=name) for name in ("tf32", "ieee"))
    return coarse | {"holds": coarse["error"] > 100 * fine["error"]}  # it is rounded at all


@case
def a_workspace_too_small():
    given = operands((4, 16, 16, 3, 2), dtype=torch.float32)
    workspace = dirty(given)
    larger = operands((40, 16, 16, 3, 2), dtype=torch.float32)
    return {"refused": refusal(lambda: fused_moe(**larger, backend="fused", workspace=workspace))}


@case
def double_precision():
    given = operands((4, 16, 16, 3, 2))
    return {"refused": refusal(lambda: fused_moe(**given, backend="fused"))}


def refusal(call):
    try:
        call()
    except FivefoldError as found:
        return str(found)
    return "nothing"


@case
def as_the_operator_with_gradients():
    assert {backends()[name] for name in ("fused", "split", "reference")} == {None}
    given = operands((11, 16, 24, 4, 2), bias=True, dtype=torch.float32)
    names = [name for name, value in given.items() if value.is_floating_point()]
    found = {}
    for backend in ("auto", "fused"):
        leaves = {n: v.clone().requires_grad_(n in names) for n, v in given.items()}
        out = fused_moe(**leaves, backend=backend, workspace=dirty(given), precision="tf32x3")
        found[backend] = torch.autograd.grad(out.square().sum(), [leaves[n] for n in names])
    pairs = zip(found["auto"], found["fused"], strict=True)
    return {"holds": all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)}


if __name__ == "__main__":
    torch.empty_like = poisoned  # an output starts as NaN
    run_cases(CASES)
