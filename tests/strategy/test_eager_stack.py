"""The stack of plain PyTorch: what it keeps and moves against real operators, and measured rows."""

import contextlib
import dataclasses
import statistics
import weakref

import pytest
import torch
from benchmarks.strategy import one_gpu
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.strategy import (
    ModelSpec,
    ParallelPlan,
    SearchSpace,
    evaluate_plan,
    load_model,
    search_plans,
)
from fivefold.strategy.parts import MixtureOfExperts
from helpers.night import by_day

SPEC = one_gpu.llama("small", 4, 64, 4, ffn=192, vocab=1000, seq_len=64, tied=False)
EAGER = one_gpu.told("h200-pytorch", "bf16")
AUTOCAST = one_gpu.told("h200-pytorch", "autocast")


def predicted(model, cluster, **changes):
    batch = changes.pop("batch", 16)
    plan = {"micro_batch": batch, "global_batch": batch} | changes.pop("plan", {})
    device = dataclasses.replace(cluster.device, **changes)
    return evaluate_plan(model, device, cluster.fabric, plan=ParallelPlan(**plan))


def of_a_layer(model, cluster, value, **changes):
    few, more = (
        value(predicted(dataclasses.replace(model, num_layers=layers), cluster, **changes))
        for layers in (4, 8)
    )
    return (more - few) / 4


class KernelNorm(torch.autograd.Function):
    """A norm that keeps its input alone, as the fused kernel of GPUs does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch.utils._python_dispatch._disable_current_modes():
            scale = x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            return (x.float() * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with torch.utils._python_dispatch._disable_current_modes():
            moved = (gradient * weight).to(x.dtype)
            return moved, torch.zeros_like(weight)


class Norm(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        return KernelNorm.apply(x, self.weight)


def with_kernels(module):
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.RMSNorm):
                setattr(parent, name, Norm(child))
    return module


def casts(autocast):
    return torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()


def a_block(batch, *, autocast):
    """Return a block, its input and the tables of its rotation."""
    kind = torch.float32 if autocast else torch.bfloat16
    block = with_kernels(one_gpu.Block(SPEC)).to(kind)
    width = SPEC.hidden // SPEC.num_heads
    turn = (torch.rand(SPEC.seq_len, width), torch.rand(SPEC.seq_len, width))
    x = torch.rand(batch, SPEC.seq_len, SPEC.hidden, dtype=kind, requires_grad=True)
    return block, x, turn


def kept_bytes(batch, *, autocast):
    block, x, turn = a_block(batch, autocast=autocast)
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, casts(autocast):
        result = block(x, turn)
    assert result.requires_grad
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    return sum(t.untyped_storage().nbytes() for place, t in held.items() if place not in own)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_keeps_what_autograd_saves(autocast):
    """Each storage once; casts of weights, and the model's own tables, do not grow with tokens."""
    cluster = AUTOCAST if autocast else EAGER
    saved = [kept_bytes(batch, autocast=autocast) for batch in (8, 16)]
    kept = [
        of_a_layer(SPEC, cluster, lambda found: found.memory.activations_bytes, batch=batch)
        for batch in (8, 16)
    ]
    assert kept[1] - kept[0] == pytest.approx(saved[1] - saved[0], rel=1e-12)
    tables = 4 * 2 * SPEC.seq_len * SPEC.head_width
    assert kept[0] == pytest.approx(saved[0] - tables, rel=1e-12)


class Traffic(TorchDispatchMode):
    """Sums the bytes that element-wise operators read and write."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        free = name in {"mm", "addmm", "_unsafe_view", "empty_like", "empty"}
        if not (func.is_view or free or "attention" in name):
            tensors = [t for t in tree_leaves((args, kwargs, result)) if torch.is_tensor(t)]
            self.moved += sum(t.numel() * t.element_size() for t in tensors)
        return result


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_moves_what_the_operators_read_and_write(autocast):
    """All but norms, products and attention; of two batches, so that tables and weights cancel."""
    moved = []
    for batch in (8, 16):
        block, x, turn = a_block(batch, autocast=autocast)
        with casts(autocast), Traffic() as traffic:
            result = block(x, turn)
        gradient = torch.ones_like(result)
        with traffic:
            torch.autograd.grad(result, [x, *block.parameters()], gradient)
        moved.append(traffic.moved)
    h, f, tokens = SPEC.hidden, SPEC.ffn, 8 * SPEC.seq_len
    stream, cast = (4, 4 + 2) if autocast else (2, 0)
    # What one kernel each would move: sums of a residual and of its gradients, rotations of queries
    # and keys, activation; and the casts, of which each kind has some.
    fused = 2 * (2 * stream + 2 + stream + cast) * h + 2 * 4 * 2 * h + 8 * 2 * f + 4 * cast * h
    norms = 2 * 2 * stream * h  # gradient and input are read twice, which is not seen here
    free = {"memory_bandwidth_bytes_per_s": 1e9, "memory_efficiency": 1.0, "kernel_gap_s": 0.0}
    one, apart = (
        of_a_layer(
            SPEC, AUTOCAST if autocast else EAGER, lambda found: found.time.compute_s, batch=8,
            fused_elementwise=kind, host_kernel_s=0.0, **free,
        )
        for kind in (True, False)
    )  # fmt: skip
    wanted = 1e9 * (apart - one) + (fused - norms) * tokens
    assert moved[1] - moved[0] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("dropout", [False, True])
def test_scores_in_several_kernels_are_moved_as_their_operators_move_them(dropout):
    """Of twice the heads, all that is more is the scores: softmax, dropout and their gradients."""
    shape = (8, SPEC.num_heads, SPEC.seq_len, SPEC.seq_len)
    scores = torch.rand(shape, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(shape, dtype=torch.bfloat16)
    with Traffic() as traffic:
        weights = torch.softmax(scores, -1)
        result = torch.native_dropout(weights, 0.1, True)[0] if dropout else weights
    with traffic:
        torch.autograd.grad(result, scores, gradient)
    few, more = (
        of_a_layer(
            dataclasses.replace(SPEC, num_heads=heads, dropout=dropout),
            EAGER, lambda found: found.time.compute_s, batch=8, fused_attention=False,
            memory_bandwidth_bytes_per_s=1e9, memory_efficiency=1.0, kernel_gap_s=0.0,
            host_kernel_s=0.0, peak_flops=1e30,
        )
        for heads in (SPEC.num_heads, 2 * SPEC.num_heads)
    )  # fmt: skip
    products = 6 * 2 * scores.numel()  # two products and their four gradients write or read them
    assert 1e9 * (more - few) == pytest.approx(traffic.moved + products, rel=1e-6)


class Live(TorchDispatchMode):
    """Follows the bytes of all storages that are alive, and their most."""

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.most = set(), 0, 0

    def see(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key, size):
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if torch.is_tensor(tensor):
                self.see(tensor)
        return result


def trained_bytes(spec, *, batch, autocast=False, recompute=False, accumulation=1):
    """Return the most bytes that are alive in a step of training, after two others."""
    live = Live()
    model = with_kernels(one_gpu.Llama(spec, recompute=recompute))
    model = model if autocast else model.to(torch.bfloat16)
    for parameter in model.parameters():
        live.see(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, spec.vocab, (batch, spec.seq_len))
    for _ in range(3):
        live.most = 0
        for _ in range(accumulation):
            with live, casts(autocast):
                loss = model(tokens, tokens)
            with live:
                loss.backward()
        with live:
            optimizer.step()
            optimizer.zero_grad()
    return live.most


TIED = one_gpu.llama("tied", 2, 128, 4, ffn=256, vocab=4000, seq_len=16, tied=True)
WIDE = one_gpu.llama("wide", 2, 256, 4, ffn=1024, vocab=2000, seq_len=16, tied=False)


@pytest.mark.parametrize(
    ("spec", "how"),
    [
        (SPEC, {"batch": 16}),
        (SPEC, {"batch": 16, "recompute": True}),
        (SPEC, {"batch": 16, "accumulation": 2}),
        (SPEC, {"batch": 16, "autocast": True}),
        (SPEC, {"batch": 16, "autocast": True, "recompute": True}),
        (dataclasses.replace(SPEC, tied=True), {"batch": 16}),
        (WIDE, {"batch": 1}),
        (WIDE, {"batch": 6}),
        (WIDE, {"batch": 1, "recompute": True}),
        (WIDE, {"batch": 6, "autocast": True, "recompute": True}),
        (TIED, {"batch": 1}),
        (TIED, {"batch": 1, "recompute": True, "accumulation": 2}),
    ],
    ids=["plain", "recomputed", "accumulated", "autocast", "autocast, recomputed", "tied",
         "gradients", "little more of gradients", "gradients, recomputed", "one layer, recomputed",
         "two gradients of a matrix", "two gradients of a matrix, accumulated"],
)  # fmt: skip
def test_memory_is_what_is_alive_at_the_fullest_moment(spec, how):
    cluster = AUTOCAST if how.get("autocast") else EAGER
    plan = {
        "recompute": "full" if how.get("recompute") else "none",
        "global_batch": how["batch"] * how.get("accumulation", 1),
    }
    ours = predicted(spec, cluster, batch=how["batch"], plan=plan).memory
    assert ours.total_bytes - ours.reserved_bytes == pytest.approx(
        trained_bytes(spec, **how), rel=0.02
    )


def test_gradients_of_a_single_micro_batch_are_not_there_at_the_loss():
    """Two bytes of weights and four of moments; gradients stay where another micro-batch comes."""
    model = load_model("llama3-8b", seq_len=8192)
    one = predicted(model, EAGER, batch=1).memory
    assert one.gradients_bytes == 0
    assert one.states_bytes == pytest.approx(6 * model.num_parameters)
    two = predicted(model, EAGER, batch=1, plan={"global_batch": 2}).memory
    assert two.states_bytes == pytest.approx(8 * model.num_parameters)
    short = predicted(model, EAGER, batch=1, plan={"recompute": "full"}).memory
    assert short.gradients_bytes == pytest.approx(2 * model.num_parameters)
    assert short.activations_bytes == 0


@st.composite
def cases(draw):
    """Draw models, dense and of experts, and plans of one to eight GPUs."""
    heads = draw(st.sampled_from([4, 12]))
    moe = MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=256)
    model = ModelSpec(
        name="drawn", num_layers=draw(st.sampled_from([4, 8])), hidden=64 * heads, num_heads=heads,
        seq_len=draw(st.sampled_from([128, 1024])), vocab=draw(st.sampled_from([1000, 32000])),
        gated=draw(st.booleans()), learned_positions=draw(st.booleans()),
        dropout=draw(st.booleans()), tied=draw(st.booleans()),
        experts=draw(st.sampled_from([None, moe])),
    )  # fmt: skip
    data, pipeline = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    batch = draw(st.sampled_from([1, 2]))
    plan = ParallelPlan(
        data=data, tensor=draw(st.sampled_from([1, 2])), pipeline=pipeline, micro_batch=batch,
        global_batch=batch * data * pipeline * draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        zero=draw(st.sampled_from([0, 1, 3])),
    )  # fmt: skip
    return model, draw(st.sampled_from([EAGER, AUTOCAST])), plan


@given(cases())
def test_operators_one_by_one_are_never_faster_nor_smaller_than_fused(case):
    model, cluster, plan = case
    one, apart = (
        evaluate_plan(
            model, dataclasses.replace(cluster.device, fused_elementwise=fused), cluster.fabric,
            plan=plan,
        )
        for fused in (True, False)
    )  # fmt: skip
    assert apart.time_s >= one.time_s
    assert apart.memory.total_bytes >= one.memory.total_bytes


@given(cases())
def test_gradients_that_are_freed_never_take_more(case):
    model, cluster, plan = case
    model = dataclasses.replace(model, tied=False)  # whose second gradient is counted where freed
    kept, freed = (
        evaluate_plan(
            model, dataclasses.replace(cluster.device, frees_gradients=frees), cluster.fabric,
            plan=plan,
        ).memory.total_bytes
        for frees in (False, True)
    )  # fmt: skip
    assert freed <= kept * (1 + 1e-12)


@given(cases())
def test_recomputation_never_takes_more(case):
    model, cluster, plan = case
    none, some = (
        predicted_use(model, cluster, dataclasses.replace(plan, recompute=kind)).total_bytes
        for kind in ("none", plan.recompute)
    )
    assert some <= none * (1 + 1e-12)


@by_day(30)
@given(cases(), st.booleans())
def test_memory_grows_with_the_work(case, offload):
    model, cluster, plan = case

    def total_bytes(model=model, **changes):
        changed = dataclasses.replace(plan, offload_activations=offload, **changes)
        return predicted_use(model, cluster, changed).total_bytes

    again = total_bytes() * (1 - 1e-12)
    assert total_bytes(global_batch=2 * plan.global_batch) >= again
    assert total_bytes(dataclasses.replace(model, vocab=2 * model.vocab)) >= again
    assert total_bytes(dataclasses.replace(model, seq_len=2 * model.seq_len)) >= again
    assert total_bytes(dataclasses.replace(model, num_layers=2 * model.num_layers)) >= again


def predicted_use(model, cluster, plan):
    return evaluate_plan(model, cluster.device, cluster.fabric, plan=plan).memory


def test_logits_stay_on_the_device():
    """The loss reads logits at once: only what layers keep goes to the host."""
    model = load_model("llama3-8b", seq_len=8192)
    kept = predicted(model, EAGER, batch=1, plan={"global_batch": 2, "recompute": "full"})
    moved = predicted(
        model, EAGER, batch=1,
        plan={"global_batch": 2, "recompute": "full", "offload_activations": True},
    )  # fmt: skip
    inputs = 2 * 8192 * model.hidden * model.num_layers
    on_host = moved.memory.host_bytes
    assert on_host == pytest.approx(inputs * (1 - 2 / 32))
    assert kept.memory.activations_bytes - moved.memory.activations_bytes == pytest.approx(on_host)


@pytest.mark.parametrize("states", ["bf16", "autocast"])
def test_twice_the_tokens_keep_twice_the_activations_but_for_casts(states):
    cluster = one_gpu.told("h200-pytorch", states)
    once, twice = (predicted(one_gpu.LLAMA_1B, cluster, batch=batch) for batch in (1, 2))
    model = one_gpu.LLAMA_1B
    norms = (2 * model.num_layers + 1) * model.hidden
    casts = 2 * (model.num_parameters - norms) * (states == "autocast")
    kept, again = (one.memory.activations_bytes - casts for one in (once, twice))
    assert again == pytest.approx(2 * kept, rel=1e-9)
    assert 1.7 < (twice.time_s - once.time.optimizer_s) / (once.time_s - once.time.optimizer_s) < 2


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("seq_len", [2048, 65536])
def test_bounds_keep_a_plan_whose_gradients_are_freed(recompute, seq_len):
    """With just as much memory as the only plan takes, it is found."""
    space = SearchSpace(
        num_gpus=1, global_batch=1, micro_batch=(1,), recompute=(recompute,), zero=(0,)
    )
    model = load_model("llama3-8b", seq_len=seq_len)
    wanted = predicted(model, EAGER, batch=1, plan={"recompute": recompute})
    device = dataclasses.replace(EAGER.device, memory_bytes=wanted.memory.total_bytes)
    found = search_plans(model, device, EAGER.fabric, space=space).best[0]
    assert found.memory == wanted.memory


def test_rows_that_were_not_fitted_are_within_a_tenth():
    """Steps within 10 % in the mean, memory within 8 %, on an H200; a row is at most 20 % off."""
    rows = one_gpu.kept_rows(one_gpu.KEPT)
    named = {case.name: case for case in one_gpu.cases()}
    errors = {"step": [], "memory": []}
    for row in rows:
        case = named[row["case"]]
        if case.name in one_gpu.fitted_cases():
            continue
        ours = one_gpu.predictions(case, row["gpu"])["h200-pytorch"]
        errors["step"].append(ours.time_s / statistics.median(row["steps_s"]) - 1)
        errors["memory"].append(ours.memory.total_bytes / row["used_bytes"] - 1)
    assert len(errors["step"]) == len(rows) // 2
    for name, most in (("step", 0.10), ("memory", 0.08)):
        assert statistics.fmean(map(abs, errors[name])) < most
        assert max(map(abs, errors[name])) < 0.2
