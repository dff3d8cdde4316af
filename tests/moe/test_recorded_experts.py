"""The CPU's own ways: blocks, grouped and turned products, its record for autograd, memory."""

import copy
import io

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe import ACTIVATIONS, fused_moe
from fivefold.moe.operator import _products as products
from oracles.experts import expected, operands, relative

FLOATS = ("x", "w13", "w2", "topk_weights", "b13", "b2")
WAYS = {  # T, H, I, E, K
    "a few rows of many experts": (12, 256, 128, 24, 3),
    "one block of small experts": (40, 16, 24, 12, 3),
    "several blocks of small experts": (450, 8, 8, 80, 10),
    "an expert a block": (200, 16, 8, 3, 2),
    "blocks of two experts": (190, 8, 16, 6, 4),
    "sizes that grouped products refuse": (33, 6, 10, 5, 2),
    "one token": (1, 256, 128, 8, 4),
    "every expert": (9, 16, 8, 4, 4),
    "one choice": (30, 16, 8, 4, 1),
}


def every_expert_for_every_token(given, activation="swiglu", *, weight_on_input=False):
    """The definition by masks, in float64: all experts compute all tokens."""
    given = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
    total = torch.zeros_like(given["x"])
    for expert, (w13, w2) in enumerate(zip(given["w13"], given["w2"], strict=True)):
        chosen = (given["topk_ids"] == expert).double()
        weight = (chosen * given["topk_weights"]).sum(1, keepdim=True)
        entering = given["x"] * (weight if weight_on_input else 1.0) @ w13.T
        if "b13" in given:
            entering = entering + given["b13"][expert]
        output = ACTIVATIONS[activation](entering) @ w2.T
        if "b2" in given:
            output = output + given["b2"][expert]
        total = total + output * (chosen.sum(1, keepdim=True) if weight_on_input else weight)
    return total


def leaves_of(given, names=FLOATS):
    return given | {n: given[n].detach().clone().requires_grad_() for n in names if n in given}


def output_and_gradients(compute, given, names=FLOATS):
    given = leaves_of(given, names)
    output = compute(given)
    direction = torch.cos(torch.arange(output.numel())).view(output.shape).to(output.dtype)
    output.backward(direction)
    return output.detach(), {n: given[n].grad for n in FLOATS if n in given}


def agree(given, tolerance, **options):
    found = output_and_gradients(lambda g: fused_moe(**g, **options), given)
    options.pop("recompute", None)
    wanted = output_and_gradients(lambda g: every_expert_for_every_token(g, **options), given)
    assert relative(found[0], wanted[0]) < tolerance
    for name, gradient in wanted[1].items():
        assert found[1][name].dtype == given[name].dtype
        assert relative(found[1][name], gradient.double()) < tolerance, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_way_computes_the_definition_and_its_gradients(way, recompute):
    given = operands(WAYS[way], dtype=torch.float32)
    agree(given, 3e-6, recompute=recompute)
    given["topk_ids"][1::3] = -1
    given["topk_ids"][given["topk_ids"] == 1] = -1  # an expert without rows
    agree(given, 3e-6, recompute=recompute)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_every_way_computes_every_type(way, dtype, tolerance):
    agree(operands(WAYS[way], dtype=dtype), tolerance, recompute=False)


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way][-1] < 4])
@pytest.mark.parametrize("activation", ["geglu", "relu2"])
def test_every_way_computes_biases(way, activation):
    agree(operands(WAYS[way], activation, bias=True, dtype=torch.float32), 3e-6,
          activation=activation)  # fmt: skip


@pytest.mark.parametrize("way", ["one choice", "an expert a block"])
def test_weights_on_the_input_in_blocks(way):
    given = operands((*WAYS[way][:4], 1), bias=True, dtype=torch.float32)
    agree(given, 3e-6, weight_on_input=True)


@pytest.fixture
def unwritten_is_nan():
    """Fill what nobody wrote with NaN, so that reading it is seen."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("sizes", [(1, 96, 48, 9, 4), (1, 384, 320, 6, 1), (2, 48, 64, 90, 6)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_a_few_rows_without_gradients(dtype, tolerance, sizes, activation, bias):
    """As in decoding: rows are not sorted, and go through products of their own."""
    given = operands(sizes, activation, bias=bias, dtype=dtype)
    with torch.no_grad():
        wanted = every_expert_for_every_token(given, activation)
        found = fused_moe(**given, activation=activation)
        assert (found.dtype, found.shape) == (dtype, given["x"].shape)
        assert relative(found, wanted) < tolerance
        turned = given | {n: given[n].mT.contiguous().mT for n in ("w13", "w2")}
        assert relative(fused_moe(**turned, activation=activation), wanted) < tolerance
        whole = given | {"topk_weights": given["topk_weights"].to(dtype)}
        assert relative(fused_moe(**whole, activation=activation), wanted) < tolerance
        for ids in (given["topk_ids"].clone(), torch.full_like(given["topk_ids"], -1)):
            ids[0, 0] = -1
            less = given | {"topk_ids": ids}
            wanted = every_expert_for_every_token(less, activation)
            found = fused_moe(**less, activation=activation).double()
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=3 * tolerance)
        for number in (-2, sizes[3]):
            ids = given["topk_ids"].clone()
            ids[0, -1] = number
            wrong = given | {"topk_ids": ids}
            with pytest.raises(ConfigurationError, match=f"topk_ids holds {number}, there are"):
                fused_moe(**wrong, activation=activation, check=False)


def test_all_tokens_to_one_expert_and_all_dropped():
    given = operands((300, 16, 8, 5, 1), dtype=torch.float32)
    agree(given | {"topk_ids": torch.full((300, 1), 3)}, 3e-6)
    output, gradients = output_and_gradients(
        lambda g: fused_moe(**g), given | {"topk_ids": torch.full((300, 1), -1)}
    )
    assert not output.any()
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values()
               if gradient is not None)  # fmt: skip


@pytest.mark.parametrize("shape", [(40, 16, 24, 12, 3), (200, 16, 8, 3, 2)], ids=str)
def test_weights_stored_transposed_get_gradients_stored_alike(shape):
    given = operands(shape, dtype=torch.float32)
    turned = {n: given[n].mT.contiguous().mT for n in ("w13", "w2")}
    found = output_and_gradients(lambda g: fused_moe(**g), given | turned)
    wanted = output_and_gradients(lambda g: fused_moe(**g), given)
    assert relative(found[0], wanted[0].double()) < 1e-6
    for name, gradient in wanted[1].items():
        assert relative(found[1][name], gradient.double()) < 1e-6
    leaves = leaves_of(given | turned, ())
    weight = leaves["w13"].requires_grad_()
    gradient = torch.autograd.grad(fused_moe(**leaves).sum(), weight)[0]
    assert gradient.mT.is_contiguous()


@pytest.mark.parametrize("way", WAYS)
def test_the_record_gives_the_bits_of_the_custom_op_every_time(way):
    given = operands(WAYS[way], dtype=torch.float32)

    def through_the_op(g):
        order = ("x", "w13", "w2", "topk_ids", "topk_weights")
        options = (None, None, "swiglu", False, "reference", "ieee", None, None, True)
        return torch.ops.fivefold.fused_moe(*(g[n] for n in order), *options)[0]

    wanted = output_and_gradients(through_the_op, given)
    for _ in range(2):
        found = output_and_gradients(lambda g: fused_moe(**g, recompute=False), given)
        assert torch.equal(found[0], wanted[0])
        assert all(torch.equal(found[1][n], wanted[1][n]) for n in wanted[1])


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_only_the_gradients_asked_for_are_computed(wanted, top_k):
    given = operands((12, 8, 16, 4, top_k), bias=True, dtype=torch.float32)
    options = {"weight_on_input": top_k == 1}
    _, every = output_and_gradients(lambda g: fused_moe(**g, **options), given)
    _, one = output_and_gradients(lambda g: fused_moe(**g, **options), given, (wanted,))
    assert torch.equal(one.pop(wanted), every[wanted])
    assert all(gradient is None for gradient in one.values())


def test_what_was_saved_is_given_back_and_watched():
    given = leaves_of(operands((12, 8, 16, 4, 2), dtype=torch.float32))
    output = fused_moe(**given, recompute=False)
    assert len(output.grad_fn.saved_tensors) == 11  # operands, biases, order, what was kept
    output.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()
    output = fused_moe(**given)
    with torch.no_grad():
        given["w2"] += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_no_second_derivatives():
    given = leaves_of(operands((5, 8, 8, 4, 2)))
    for loss in (lambda y: y.sum(), lambda y: y.square().sum()):
        (gradient,) = torch.autograd.grad(loss(fused_moe(**given)), given["x"], create_graph=True)
        with pytest.raises(UnsupportedError, match="no second derivatives"):
            (gradient.sum() + given["x"].sum()).backward()


def test_modes_without_gradients_record_nothing():
    given = operands((5, 8, 8, 4, 2))
    wanted = fused_moe(**given)
    leaves = leaves_of(given)
    with torch.no_grad():
        assert fused_moe(**leaves).grad_fn is None
    with torch.inference_mode():
        found = fused_moe(**leaves)
    assert found.is_inference()
    assert torch.equal(found, wanted)


def test_a_backward_under_autocast_keeps_its_types():
    given = operands((300, 8, 16, 3, 2), dtype=torch.float32)
    _, wanted = output_and_gradients(lambda g: fused_moe(**g), given)
    leaves = leaves_of(given)
    output = fused_moe(**leaves)
    direction = torch.cos(torch.arange(output.numel())).view(output.shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output.backward(direction)
    assert all(torch.equal(leaves[name].grad, gradient) for name, gradient in wanted.items())


def test_checkpoints_and_hooks_of_saved_tensors_work():
    given = operands((12, 8, 16, 4, 2))
    _, wanted = output_and_gradients(lambda g: fused_moe(**g, recompute=False), given)

    def again(g):
        return checkpoint(lambda: fused_moe(**g, recompute=False), use_reentrant=False)

    assert torch.equal(output_and_gradients(again, given)[1]["w13"], wanted["w13"])
    packed = []

    def hooked(g):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(1) or t.numpy().copy(), torch.from_numpy
        ):
            return fused_moe(**g, recompute=False)

    assert torch.equal(output_and_gradients(hooked, given)[1]["w2"], wanted["w2"])
    assert packed


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
        lambda f, x: torch.func.vjp(f, x)[1](x),
    ],
)
def test_transformations_of_functions_are_refused_by_name(transform):
    given = operands((5, 8, 8, 4, 2))
    x = given.pop("x")
    with pytest.raises(UnsupportedError, match=r"inside of torch\.func's vmap, grad"):
        transform(lambda x: fused_moe(x, **given), x)


def test_who_traces_sees_one_operator():
    given = operands((5, 8, 8, 4, 2))
    x = given.pop("x")
    graph = make_fx(lambda x: fused_moe(x, **given, check=False))(x)
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert torch.ops.fivefold.fused_moe.default in called


def test_ids_out_of_range_are_named_without_checks_too():
    for wrong in (4, -2):
        given = operands((5, 8, 8, 4, 2))
        given["topk_ids"][2, 1] = wrong
        with pytest.raises(ConfigurationError, match=f"topk_ids holds {wrong}, there are 4"):
            fused_moe(**given, check=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_by_token_add_in_the_order_of_choices(dtype):
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(6, generator=generator)[:4] for _ in range(50)])
    ids[::5, 2] = -1
    order = products.sort_assignments(ids, 6)
    rows = torch.randn(order.num_rows + 1, 9, generator=generator).to(dtype)
    rows[-1] = 0.0
    weights = torch.rand(50, 4, generator=generator)
    wide = rows.to(torch.promote_types(dtype, torch.float32))
    for factors in (None, weights):
        slowly = torch.zeros(50, 9, dtype=wide.dtype)
        for token in range(50):
            for slot in range(4):
                row = wide[order.places[token, slot]]
                slowly[token] += row if factors is None else factors[token, slot] * row
        found = products.added(rows, order.places, factors)
        torch.testing.assert_close(found, slowly, rtol=1e-6, atol=1e-6)


def test_blocks_hold_every_row_once():
    sizes = [0, 3, 0, 1700, 5, 0, 90, 90, 90, 1, 4096, 0, 0, 2]
    ids = torch.repeat_interleave(torch.arange(14), torch.tensor(sizes)).unsqueeze(1)
    order = products.sort_assignments(ids[torch.randperm(len(ids))], 14)
    for dtype in (torch.float32, torch.bfloat16):
        blocks = products.cut(order, dtype)
        assert [size for block in blocks for size in block.sizes if size] == [s for s in sizes if s]
        assert [block.rows.start for block in blocks[1:]] == [b.rows.stop for b in blocks[:-1]]
        for block in blocks:
            assert sum(block.sizes) == block.rows.stop - block.rows.start
            assert list(block.sizes) == sizes[block.experts]
    alone = [block.sizes for block in products.cut(order, torch.float32) if len(block.sizes) == 1]
    assert (1700,) in alone
    assert (4096,) in alone


def test_large_gradients_are_ordinary_tensors(monkeypatch):
    given = operands((12, 8, 16, 4, 2), dtype=torch.float32)
    given["topk_ids"][given["topk_ids"] == 1] = -1
    _, wanted = output_and_gradients(lambda g: fused_moe(**g), given)
    monkeypatch.setattr(products, "LARGE_BYTES", 1)
    _, found = output_and_gradients(lambda g: fused_moe(**g), given)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    large = found["w13"]
    assert torch.equal(copy.deepcopy(large), large)
    buffer = io.BytesIO()
    torch.save(large, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), large)
    view = large[1:].flatten()
    del large, found
    assert torch.equal(view, wanted["w13"][1:].flatten())


def test_no_huge_pages_is_no_error(monkeypatch):
    monkeypatch.setattr(products, "LARGE_BYTES", 1)

    def refused(*_, **__):
        raise OSError

    monkeypatch.setattr(products.mmap, "mmap", refused)
    assert products.large_empty(torch.zeros(1), 3, 4).shape == (3, 4)


@pytest.mark.parametrize(
    ("maker", "tokens", "first_is"),
    [("AMD EPYC", 16, 3), ("AMD EPYC", 2, 2), ("Intel(R) Xeon(R)", 16, 2), ("", 16, 2)],
    ids=["AMD", "AMD, a row each", "Intel", "unknown"],
)
def test_a_few_rows_are_turned_where_that_is_faster(monkeypatch, maker, tokens, first_is):
    """As columns for AMD's processors alone; the result is the same whoever made it."""
    real, seen = torch.nn.functional.grouped_mm, []

    def watched(left, right, **options):
        seen.append(left.ndim)
        return real(left, right, **options)

    given = operands((tokens, 256, 128, 64, 8), dtype=torch.float32)
    given["x"].requires_grad_()  # without gradients, a row each goes another way
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": maker})
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    products._is_faster_turned.cache_clear()
    try:
        found = fused_moe(**given)
    finally:
        products._is_faster_turned.cache_clear()
    assert seen[0] == first_is
    given["x"] = given["x"].detach()
    assert relative(found.detach(), expected(given, "swiglu")) < 1e-6
