"""The backward's kernels against float64 autograd, in Triton's CPU interpreter; what is kept."""

from pathlib import Path

import pytest
import torch

from fivefold.moe import ACTIVATIONS, MoE, MoEConfig, fused_moe
from helpers.night import by_night
from oracles.children import check_case, lines_of_cases
from oracles.experts import operands

pytestmark = pytest.mark.timeout(1200)  # interpreted, in one child: minutes beside other work
HERE = Path(__file__).parent
LIMITS = {"bfloat16": 5e-3, "float16": 1e-3, "relu in bfloat16": 5e-3}
CASES = [
    "one token",
    "every expert",
    "more experts than used",
    "several tiles per expert",
    "odd sizes without descriptors",
    "sizes that cut a descriptor's block",
    "all sizes one",
    "expert of exactly one tile",
    *ACTIVATIONS,
    *LIMITS,
    "gelu with weights on the input",
    "gelu with weights on the input, kept",
    "swiglu with weights on the input",
    "swiglu with weights on the input, kept",
    "kept by fused",
    "kept by split",
    "one expert for all",
    "dropped and foreign ids",
    "weights of zero",
    "strided operands and other types",
    "bad values stay where they are",
    "counts over more chunks than are read at a time",
    "weights in double precision",
    "as the operator",
    "all dropped",
    "no tokens",
    "same bits for all grids runs and kept or not",
    "well formed custom ops",
    "gradients are those of the kernels own forward",
]

BY_DAY = {"one token", "several tiles per expert", "odd sizes without descriptors", "swiglu"}
BY_DAY |= {"kept by split", "gelu with weights on the input, kept", "dropped and foreign ids"}
BY_DAY |= {"bad values stay where they are", "strided operands and other types", "no tokens"}
FOR_THE_NIGHT = [name for name in CASES if name not in BY_DAY]


@pytest.fixture(scope="module")
def interpreted(request):
    pytest.importorskip("triton")
    return lines_of_cases(HERE / "backward_cases.py", request)


@pytest.mark.parametrize("name", by_night(CASES, FOR_THE_NIGHT))
def test_equals_autograd_of_one_by_one_and_holds_what_it_says(interpreted, name):
    check_case(interpreted[name], LIMITS)


def test_every_case_is_looked_at(interpreted):
    assert set(interpreted["all"]["names"]) == set(CASES)


def leaves(shape, activation="swiglu", **options):
    given = operands(shape, activation, bias=True, **options)
    return {n: v.requires_grad_(v.is_floating_point()) for n, v in given.items()}


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("on_input", [True, False])
def test_gradcheck_of_the_reference(recompute, on_input):
    given = leaves((4, 3, 2, 3, 1), "swiglu")
    ids = given.pop("topk_ids")
    ids[1] = -1
    names = list(given)

    def output(*values):
        options = {"weight_on_input": on_input, "recompute": recompute, "backend": "reference"}
        return fused_moe(**dict(zip(names, values, strict=True)), topk_ids=ids, **options)

    assert torch.autograd.gradcheck(output, tuple(given.values()))


def test_keeps_the_hidden_values_only_where_a_gradient_may_be_asked_for():
    """Counted by what autograd saves: [T K, 2 I] more, or nothing."""

    def saved(recompute):
        sizes = []
        given = leaves((6, 4, 5, 3, 2), dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t
        ):
            out = fused_moe(**given, recompute=recompute)
        out.sum().backward()
        return sizes, given

    lean, first = saved(recompute=True)
    kept, second = saved(recompute=False)
    assert sorted(kept) == sorted([*lean, (12, 10)])
    for name in ("x", "w13", "w2", "topk_weights", "b13", "b2"):
        assert torch.equal(first[name].grad, second[name].grad)
    found = torch.ops.fivefold.fused_moe
    more = ("ieee", None, None, False)
    assert found(*_schema(operands((6, 4, 5, 3, 2), bias=True)), *more)[1].shape == (0, 10)


def _schema(given):
    order = ("x", "w13", "w2", "topk_ids", "topk_weights", "b13", "b2")
    return (*(given[n] for n in order), "swiglu", False, "reference")


def test_kept_values_are_a_well_formed_output_of_the_op():
    given = leaves((5, 4, 4, 3, 2), dtype=torch.float32)
    more = ("ieee", None, None, True)
    torch.library.opcheck(torch.ops.fivefold.fused_moe.default, (*_schema(given), *more))


def test_compiles_with_gradients_kept_or_not():
    for recompute in (True, False):
        compiled = torch.compile(fused_moe, backend="aot_eager", fullgraph=True, dynamic=True)
        for tokens in (5, 9):
            given = leaves((tokens, 4, 4, 3, 2), dtype=torch.float32)
            wanted = torch.autograd.grad(fused_moe(**given).sum(), given["w13"])
            found = torch.autograd.grad(compiled(**given, recompute=recompute).sum(), given["w13"])
            assert torch.equal(found[0], wanted[0])
        torch.compiler.reset()


def test_a_layer_passes_the_choice_on():
    sizes = {"hidden": 4, "intermediate": 5, "experts": 3, "shared_intermediate": 5}
    lean, keeping = (MoE(MoEConfig(**sizes, recompute=choice)) for choice in (True, False))
    keeping.load_state_dict(lean.state_dict())
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    saved = {True: [], False: []}
    for layer in (lean, keeping):
        sizes = saved[layer.config.recompute]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(tuple(t.shape)) or t, lambda t: t
        ):
            out = layer(x)
        out.square().sum().backward()
    assert (12, 10) not in saved[True]
    assert saved[False].count((12, 10)) == 1  # T K rows of gate and up
    assert saved[False].count((6, 10)) == 1  # the shared expert
    for a, b in zip(lean.parameters(), keeping.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
