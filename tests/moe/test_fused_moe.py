"""The operator against one token and one expert at a time, in float64; gradients; bad input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.moe import ACTIVATIONS, Workspace, fused_moe
from fivefold.moe.operator import fused as registry
from fivefold.moe.operator.activations import Activation
from oracles.experts import TOLERANCE, cancelling, expected, experts_one_by_one, operands, relative

GRID = [  # T, H, I, E, K
    (1, 4, 6, 3, 1),
    (5, 8, 4, 4, 2),
    (37, 16, 24, 5, 3),
    (64, 8, 8, 8, 8),
    (3, 1, 1, 1, 1),
    (20, 6, 10, 16, 2),  # more experts than most tokens reach
]


@pytest.mark.parametrize("shape", GRID, ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("bias", [False, True])
def test_equals_one_by_one(shape, activation, bias):
    given = operands(shape, activation, bias=bias)
    found = fused_moe(**given, activation=activation)
    assert relative(found, expected(given, activation)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_precision(dtype):
    given = operands((96, 64, 48, 8, 4), dtype=dtype)
    found = fused_moe(**given)
    assert found.dtype == dtype
    assert relative(found, expected(given, "swiglu")) < TOLERANCE[dtype]


def test_empty_batches_dropped_assignments_and_one_expert_for_all():
    assert fused_moe(**operands((7, 4, 4, 3, 2)) | empty()).shape == (0, 4)
    given = operands((9, 4, 4, 3, 2))
    given["topk_ids"][::2] = -1
    given["topk_ids"][1, 0] = -1
    found = fused_moe(**given)
    assert torch.equal(found[::2], torch.zeros(5, 4, dtype=torch.float64))
    assert relative(found, expected(given, "swiglu")) < 1e-13
    given = operands((9, 4, 4, 3, 1))
    given["topk_ids"].fill_(2)
    assert relative(fused_moe(**given), expected(given, "swiglu")) < 1e-13


def empty():
    return {
        "x": torch.zeros(0, 4, dtype=torch.float64),
        "topk_ids": torch.zeros(0, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(0, 2, dtype=torch.float64),
    }


def test_weights_on_the_input():
    given = operands((11, 6, 5, 4, 1), bias=True)
    found = fused_moe(**given, weight_on_input=True)
    assert relative(found, expected(given, "swiglu", weight_on_input=True)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_on_the_input_multiplies_what_was_not_rounded(dtype, recompute):
    """W x is 0 here, and w times 0 is 0; W times the rounded w x would be 2e-3 in bfloat16."""
    given = cancelling(dtype)
    nothing = torch.zeros(1, 2, dtype=dtype)
    assert torch.equal(fused_moe(**given, activation="silu", weight_on_input=True), nothing)
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()
              if value.is_floating_point()}  # fmt: skip
    found = fused_moe(
        **given | leaves, activation="silu", weight_on_input=True, recompute=recompute
    )
    assert torch.equal(found.detach(), nothing)
    found.sum().backward()
    assert torch.equal(leaves["topk_weights"].grad, torch.zeros(1, 1))  # <gradient, W x>
    for name in ("x", "w13"):
        wanted = {"x": [[1.0, -3.0]], "w13": [[[3.0, 1.0]]]}[name]
        limit = torch.finfo(dtype).eps
        torch.testing.assert_close(
            leaves[name].grad, torch.tensor(wanted, dtype=dtype) / 6, rtol=limit, atol=0.0
        )
    by_definition = experts_one_by_one(
        *(given[n] for n in ("x", "w13", "w2", "topk_ids", "topk_weights")),
        activation=ACTIVATIONS["silu"], weight_on_input=True,
    )  # fmt: skip
    assert torch.equal(by_definition, nothing)


def test_a_token_does_not_depend_on_its_neighbours():
    # Alone, a row may take another path through the matrix library: its bits are not promised.
    given = operands((40, 8, 8, 4, 2), dtype=torch.float32)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    moved = given | {name: given[name][order] for name in ("x", "topk_ids", "topk_weights")}
    assert torch.allclose(fused_moe(**moved), fused_moe(**given)[order], atol=1e-6)


def test_the_same_bits_every_time():
    given = operands((64, 32, 16, 8, 4), dtype=torch.bfloat16)
    first = fused_moe(**given)
    assert all(torch.equal(fused_moe(**given), first) for _ in range(20))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_equal_those_of_one_by_one(activation, bias):
    given = operands((13, 6, 5, 4, 2), activation, bias=bias, seed=2)
    given["topk_ids"][3, 1] = -1
    names = [name for name, value in given.items() if value.is_floating_point()]
    for name in names:
        given[name].requires_grad_()
    weight = torch.randn(13, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = torch.autograd.grad((fused_moe(**given, activation=activation) * weight).sum(),
                                [given[name] for name in names])  # fmt: skip
    wanted = torch.autograd.grad((expected(given, activation) * weight).sum(),
                                 [given[name] for name in names])  # fmt: skip
    for name, a, b in zip(names, found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12), name


def test_gradients_with_weights_on_the_input_and_without_tokens():
    given = operands((7, 4, 3, 3, 1), bias=True)
    for name in ("x", "w13", "topk_weights"):
        given[name].requires_grad_()
    leaves = [given[name] for name in ("x", "w13", "topk_weights")]
    found = torch.autograd.grad(fused_moe(**given, weight_on_input=True).sum(), leaves)
    wanted = torch.autograd.grad(expected(given, "swiglu", weight_on_input=True).sum(), leaves)
    assert all(torch.allclose(a, b, rtol=1e-11) for a, b in zip(found, wanted, strict=True))
    given = operands((7, 4, 4, 3, 2)) | empty()
    given["w2"].requires_grad_()
    fused_moe(**given).sum().backward()
    assert torch.equal(given["w2"].grad, torch.zeros_like(given["w2"]))


def test_capacity_drops_by_the_stated_rule():
    given = operands((10, 4, 4, 2, 1))
    given["topk_ids"].zero_()
    found = fused_moe(**given, capacity=3)
    assert torch.equal(found[3:], torch.zeros(7, 4, dtype=torch.float64))
    # Three rows instead of ten: another path through the matrix library, so rounding may differ.
    assert relative(found[:3], fused_moe(**given)[:3]) < TOLERANCE[torch.float64]
    by_weight = fused_moe(**given, capacity=3, drop_policy="weight")
    heaviest = given["topk_weights"][:, 0].argsort(descending=True)[:3].sort().values
    assert by_weight.abs().sum(-1).nonzero()[:, 0].tolist() == heaviest.tolist()


@pytest.mark.slow
def test_is_a_well_formed_custom_op():
    given = operands((6, 4, 4, 3, 2), bias=True, dtype=torch.float32)
    arguments = [given[n] for n in ("x", "w13", "w2", "topk_ids", "topk_weights", "b13", "b2")]
    for place in (0, 1, 2, 4, 5, 6):
        arguments[place].requires_grad_()
    options = ("swiglu", False, "reference", "ieee", None, None, False)
    torch.library.opcheck(torch.ops.fivefold.fused_moe.default, (*arguments, *options))


def test_compiles_whole_and_once_for_all_numbers_of_tokens():
    compilations = []

    def backend(graph, _inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(fused_moe, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 17, 33):
        given = operands((tokens, 4, 4, 3, 2), dtype=torch.float32)
        assert torch.equal(compiled(**given), fused_moe(**given))
    assert len(compilations) == 1
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 3, dtype=torch.float64)}, "x has shape"),
        ({"x": torch.zeros(5, 8)}, "w13 has dtype torch.float64, x has torch.float32"),
        ({"x": torch.zeros(2, 5, 8)}, "x, w13 and w2 have shapes"),
        ({"w13": torch.zeros(4, 4, 8, dtype=torch.float64)}, "w13 has shape"),
        ({"b2": torch.zeros(4, 1, dtype=torch.float64)}, "b2 has shape"),
        ({"b13": [1.0]}, "b13 is a list; it must be a torch.Tensor"),
        ({"topk_ids": torch.zeros(4, 2, dtype=torch.int64)}, r"topk_ids has shape \(4, 2\)"),
        ({"topk_weights": torch.zeros(5, 3)}, r"\(5, 2\), topk_weights \(5, 3\), x has 5 tokens"),
        ({"topk_ids": torch.zeros(5, 2)}, "topk_ids has dtype torch.float32"),
        ({"topk_ids": torch.tensor([[0, 4]] * 5)}, "topk_ids holds 4, there are 4 experts"),
        ({"topk_ids": torch.tensor([[0, -2]] * 5)}, "topk_ids holds -2"),
        ({"topk_ids": torch.tensor([[1, 1]] * 5)}, "token 0 is routed to an expert twice"),
        ({"topk_weights": torch.zeros(5, 2, dtype=torch.int64)}, "topk_weights has dtype"),
        ({"topk_weights": torch.zeros(5, 2, device="meta")}, "topk_weights is on meta"),
        ({"activation": "tanh"}, "there is no activation 'tanh'"),
        ({"backend": "magic"}, "there is no backend 'magic'"),
        ({"precision": "tf16"}, "there is no precision 'tf16'; choose one of ieee, tf32x3, tf32"),
        ({"weight_on_input": True}, "weight_on_input needs top_k 1; got 2"),
        ({"x": [[1.0]]}, "x is a list; it must be a torch.Tensor"),
        ({"x": torch.zeros(5, 8).to(torch.float8_e4m3fn)}, "x has dtype torch.float8_e4m3fn"),
        ({"w2": torch.zeros(4, 8, 0, dtype=torch.float64)}, "inner size must be positive"),
        ({"w2": torch.zeros(0, 8, 4, dtype=torch.float64)}, "experts, hidden and inner size"),
        ({"capacity": 1.5}, "capacity must be a whole number from 0; got 1.5"),
        ({"capacity": -1}, "capacity must be a whole number from 0; got -1"),
        ({"drop_policy": "luck"}, "drop policy is 'luck'"),
        ({"workspace": 3}, "workspace is a int; Workspace.allocate makes one"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ConfigurationError, match=message):
        fused_moe(**operands((5, 8, 4, 4, 2)) | change)


def test_weights_that_are_no_numbers():
    given = operands((5, 8, 4, 4, 2))
    given["topk_weights"][3, 1] = float("nan")
    with pytest.raises(DataError, match="topk_weights of token 3 hold NaN"):
        fused_moe(**given)
    assert bool(fused_moe(**given, check=False)[3].isnan().all())
    given["topk_weights"][3] = torch.tensor([float("inf"), -float("inf")])  # numbers, if odd ones
    fused_moe(**given)
    given["topk_ids"][3] = -1  # what is dropped adds nothing, whatever its weight
    assert torch.equal(fused_moe(**given)[3], torch.zeros(8, dtype=torch.float64))


SIZES = {"num_tokens": 5, "hidden": 8, "intermediate": 4, "num_experts": 4, "top_k": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"scratch": lambda s: s[:-1]}, "this call needs"),
        ({"control": lambda c: c[:-1]}, "control words; this call needs"),
        ({"scratch": lambda s: s.view(torch.int64)}, "scratch is torch.int64"),
        ({"control": lambda c: c.long()}, "control is torch.int64"),
        ({"scratch": lambda s: torch.empty(len(s) * 2, dtype=s.dtype)[::2]}, "contiguous: False"),
        ({"scratch": lambda s: torch.empty(len(s) + 1, dtype=s.dtype)[1:]}, "multiple of 16"),
        ({"scratch": lambda s: s.to("meta")}, "the workspace is on meta"),
    ],
)
def test_a_workspace_must_fit_whatever_the_backend(change, message):
    whole = Workspace.allocate(**SIZES, dtype=torch.float64)
    parts = {name: getattr(whole, name) for name in ("control", "scratch")}
    workspace = Workspace(**parts | {name: make(parts[name]) for name, make in change.items()})
    given = operands((5, 8, 4, 4, 2))
    if message is None:
        assert torch.equal(fused_moe(**given, workspace=workspace), fused_moe(**given))
    else:
        with pytest.raises(ConfigurationError, match=message):
            fused_moe(**given, workspace=workspace)
    with pytest.raises(ConfigurationError, match="num_tokens must be a whole number from 0"):
        Workspace.size(**SIZES | {"num_tokens": -1}, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_no_zeros_for_a_derivative_in_forward_mode():
    given = operands((5, 8, 4, 4, 2))
    x = given.pop("x")
    with pytest.raises(UnsupportedError, match="no derivative in forward mode"):
        torch.func.jvp(lambda x: fused_moe(x, **given), (x,), (x,))


def test_backends_say_why_they_are_missing(monkeypatch):
    from dataclasses import replace

    real = registry._BACKENDS["reference"]
    absent = replace(real, name="absent", missing=lambda _: "no such thing here")
    monkeypatch.setattr(registry, "_BACKENDS", {"absent": absent, "reference": real})
    assert registry.backends() == {"absent": "no such thing here", "reference": None}
    given = operands((5, 8, 4, 4, 2))
    with pytest.raises(UnsupportedError, match="'absent' cannot work here: no such thing here"):
        fused_moe(**given, backend="absent")
    fused_moe(**given, backend="auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("top_k", "options"), [(3, {}), (3, {"recompute": False}), (1, {"weight_on_input": True})]
)
def test_many_small_experts_at_once_give_what_one_after_the_other_gives(
    monkeypatch, dtype, top_k, options
):
    given = operands((20, 16, 24, 12, top_k), dtype=dtype)
    given["topk_ids"][::4] = -1
    given["topk_ids"][given["topk_ids"] == 5] = -1  # one expert has no rows at all

    def outputs():
        leaves = {n: v.clone().requires_grad_() for n, v in given.items() if v.is_floating_point()}
        found = fused_moe(**(given | leaves), **options)
        found.square().sum().backward()
        return [found.detach(), *(leaf.grad for leaf in leaves.values())]

    at_once = outputs()
    monkeypatch.setattr("fivefold.moe.operator._products._is_grouped", lambda _: False)
    one_by_one = outputs()
    for found, wanted in zip(at_once, one_by_one, strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted)


def test_a_call_without_gradients_is_the_recorded_one():
    given = operands((9, 16, 24, 4, 2), bias=True, dtype=torch.float32)
    plain = fused_moe(**given)
    given["x"].requires_grad_()
    assert torch.equal(plain, fused_moe(**given).detach())


CUBE = (lambda rows: rows**3, lambda gradient, at, out: torch.mul(gradient, 3 * at**2, out=out))
SAME = (lambda rows: rows, lambda gradient, _at, out: out.copy_(gradient))  # of bilinear layers


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("function", "pull"), [CUBE, SAME], ids=["cube", "same"])
def test_an_activation_of_your_own(function, pull, gated, recompute):
    own = Activation(name="own", gated=gated, function=function, pull=pull)
    given = operands((9, 6, 5, 4, 2), "swiglu" if gated else "silu", bias=True)
    names = [name for name, value in given.items() if value.is_floating_point()]
    leaves = {n: v.clone().requires_grad_(n in names) for n, v in given.items()}
    wanted = experts_one_by_one(
        *(leaves[n] for n in ("x", "w13", "w2", "topk_ids", "topk_weights")),
        activation=own, b13=leaves["b13"], b2=leaves["b2"],
    )  # fmt: skip
    slopes = torch.autograd.grad(wanted.square().sum(), [leaves[n] for n in names])
    found = fused_moe(**leaves, activation=own, recompute=recompute)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    gradients = torch.autograd.grad(found.square().sum(), [leaves[n] for n in names])
    for gradient, right in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-10, atol=1e-11)
    with pytest.raises(UnsupportedError, match="'own' is not one of ACTIVATIONS"):
        fused_moe(**{n: v.to("meta") for n, v in given.items()}, activation=own)


@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (40, 12, 12, 9))),
    kind=st.sampled_from(["float64", "float32", "bfloat16", "float16"]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    choices=st.fixed_dictionaries(
        dict.fromkeys(("bias", "on_input", "recompute", "skewed"), st.booleans())
        | {"dropped": st.sampled_from([0.0, 0.2, 1.0])}
    ),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_random_cases_and_their_gradients(sizes, kind, activation, choices, seed, data):
    """A thousand of them every night, each against one token and one expert at a time."""
    tokens, hidden, inner, experts = sizes
    top_k = 1 if choices["on_input"] else data.draw(st.integers(1, min(experts, 4)))
    shape = (tokens, hidden, inner, experts, top_k)
    made = operands(shape, activation, bias=choices["bias"], dtype=getattr(torch, kind), seed=seed)
    if choices["skewed"]:
        made["topk_ids"] = made["topk_ids"][:1].expand(tokens, top_k).contiguous()
    generator = torch.Generator().manual_seed(seed)
    gone = torch.rand(tokens, top_k, generator=generator) < choices["dropped"]
    made["topk_ids"] = made["topk_ids"].masked_fill(gone, -1)
    names = [name for name, tensor in made.items() if tensor.is_floating_point()]
    options = {"weight_on_input": choices["on_input"]}
    slope = torch.randn(tokens, hidden, dtype=torch.float64, generator=generator)

    def outputs(call, kinds):
        leaves = {n: kinds(t).detach().requires_grad_(n in names) for n, t in made.items()}
        out = call(leaves)
        loss = (out.double() * slope).sum() + sum(0.0 * leaves[n].sum() for n in names)
        return [out, *torch.autograd.grad(loss, [leaves[n] for n in names])]

    def ours(leaves):
        how = options | {"recompute": choices["recompute"]}
        return fused_moe(**leaves, activation=activation, **how)

    wanted = outputs(
        lambda leaves: expected(leaves, activation, **options),
        lambda t: t.double() if t.is_floating_point() else t,
    )
    limit = 4 * TOLERANCE[getattr(torch, kind)]
    for name, found, right in zip(["y", *names], outputs(ours, lambda t: t), wanted, strict=True):
        # Where terms cancel, what is left of them is measured by what went in.
        floor = 4.0 if kind.endswith("float16") else 1.0
        scale = max(float(right.detach().norm()), floor * right.numel() ** 0.5)
        assert float((found.detach().double() - right.detach()).norm()) <= limit * scale, name
