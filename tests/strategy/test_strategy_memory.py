"""Memory: the closed forms of the literature, digit by digit, and ZeRO's."""

import dataclasses

import pytest

from fivefold.errors import ConfigurationError
from fivefold.strategy import ModelSpec, ParallelPlan, evaluate_plan, load_cluster, load_model
from fivefold.strategy._operators import LayerShape, layer_operators
from fivefold.strategy.parts import MixtureOfExperts

DEVICE = load_cluster("a100-megatron").device
# Korthikanti et al., arXiv 2205.05198: model, tensor, pipeline, virtual, micro-batch.
MODELS = {
    "22B": ((6144, 48, 64), 8, 1, 1, 4),
    "175B": ((12288, 96, 96), 8, 8, 3, 1),
    "530B": ((20480, 105, 128), 8, 35, 3, 1),
    "1T": ((25600, 128, 160), 8, 64, 1, 1),
}
# Its figure 1: GiB of parameters and optimizer, of activations, of those with both techniques.
FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625), "175B": (45.5625, 66.84, 12.35),
    "530B": (31.64, 114.02, 23.08), "1T": (32.96, 131.25, 26.56),
}  # fmt: skip
# Its figure 7: percent of the baseline with sequence parallelism, with selective recomputation,
# with both, with full recomputation.
FIGURE_7 = {
    "22B": (66.84, 49.42, 16.18, 7.64), "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42), "1T": (58.31, 62.04, 20.27, 9.42),
}  # fmt: skip


def gpt(h, layers, a):
    return ModelSpec(
        name="gpt", num_layers=layers, hidden=h, num_heads=a, seq_len=2048, vocab=51200
    )


def stored(model, *, tensor, micro_batch, sequence, selective):
    shape = LayerShape(
        device=DEVICE, micro_batch=micro_batch, tensor=tensor, sequence_parallel=sequence
    )
    return sum(
        op.stored_bytes
        for op in layer_operators(model, shape, "*-")
        if not (selective and op.scores)
    )


def test_a_norm_reads_and_writes_its_input_and_keeps_it():
    """Backward it reads the input and the gradient, and writes one."""
    size = 2 * 2048 * 1024  # two bytes an element
    shape = LayerShape(device=DEVICE, micro_batch=1, tensor=1)
    operators = layer_operators(gpt(1024, 1, 8), shape, "*-")
    norms = [op for op in operators if op.name.endswith("norm")]
    assert [(op.moved_bytes, op.backward_moved_bytes, op.stored_bytes) for op in norms] == [
        (2 * size, 3 * size, size)
    ] * 2


@pytest.mark.parametrize("name", MODELS)
def test_stored_bytes_equal_figure_1(name):
    (h, layers, a), t, p, v, b = MODELS[name]
    factor = layers * (1 + (p - 1) / (p * v) if v > 1 else 1) / 2**30
    for sequence, printed in ((False, FIGURE_1[name][1]), (True, FIGURE_1[name][2])):
        ours = factor * stored(
            gpt(h, layers, a), tensor=t, micro_batch=b, sequence=sequence, selective=sequence
        )
        assert ours == pytest.approx(printed, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_shares_equal_figure_7(name):
    (h, layers, a), t, _, _, b = MODELS[name]
    model = gpt(h, layers, a)
    plain = stored(model, tensor=t, micro_batch=b, sequence=False, selective=False)
    ways = [(True, False), (False, True), (True, True)]
    shares = [
        100 * stored(model, tensor=t, micro_batch=b, sequence=s, selective=r) / plain
        for s, r in ways
    ]
    shares.append(100 * 2 * 2048 * b * h / plain)
    assert shares == pytest.approx(FIGURE_7[name], abs=0.16)


@pytest.mark.parametrize("name", MODELS)
def test_states_are_18_bytes_of_the_layers(name):
    (h, layers, a), t, p, v, b = MODELS[name]
    closed = 18 * 12 * layers * h**2 / (t * p) / 2**30
    assert closed == pytest.approx(FIGURE_1[name][0], rel=1e-3)
    cluster = load_cluster("a100-megatron")
    plan = ParallelPlan(
        global_batch=8 * p * b, micro_batch=b, tensor=t, pipeline=p, virtual=v, recompute="full",
        schedule="interleaved" if v > 1 else "1f1b",
    )  # fmt: skip
    memory = evaluate_plan(gpt(h, layers, a), cluster.device, cluster.fabric, plan=plan).memory
    # Ours counts embedding and head as well, which the figure leaves out.
    outside = 18 * 51200 * h / t / 2**30
    assert closed <= memory.states_bytes / 2**30 <= closed + 2.2 * outside + 0.1


@pytest.mark.parametrize(
    ("zero", "bytes_per_parameter"), [(0, 18.0), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)]
)
def test_zero_shares_states(zero, bytes_per_parameter):
    model, cluster = load_model("gpt3-1.3b"), load_cluster("a100-megatron")
    plan = ParallelPlan(global_batch=8, data=8, zero=zero)
    memory = evaluate_plan(model, cluster.device, cluster.fabric, plan=plan).memory
    assert memory.states_bytes == pytest.approx(bytes_per_parameter * model.num_parameters)


@pytest.mark.parametrize(("zero", "shard", "holders"), [(0, None, 1), (3, 4, 4)])
def test_local_updates_keep_anchor_payload_and_momentum(zero, shard, holders):
    """Of CO2, in 32 bits; ranks that share states are one worker and share these too."""
    model, cluster = load_model("gpt3-1.3b"), load_cluster("a100-megatron")
    device = dataclasses.replace(cluster.device, outer_owned_bytes=4.0)
    plain, local = (
        evaluate_plan(
            model, device, cluster.fabric,
            plan=ParallelPlan(global_batch=16, data=16, tau=tau, zero=zero, shard=shard),
        )
        for tau in (1, 4)
    )  # fmt: skip
    extra = local.memory.working_bytes - plain.memory.working_bytes
    expected = (12 + 4 * holders / 16) * model.num_parameters / holders
    assert extra == pytest.approx(expected)
    assert zero or local.time.data_s <= 2 * plain.time.data_s / 4  # twice as wide, too


def memory_of(model, device, **plan):
    fabric = load_cluster("h100-nemo").fabric
    return evaluate_plan(model, device, fabric, plan=ParallelPlan(**plan)).memory


def test_inputs_that_are_not_gathered_again_are_kept_whole():
    """Two inputs of 2 bytes an element a layer, of which a tensor rank had its part already."""
    model, device = gpt(1024, 4, 8), load_cluster("h100-nemo").device
    for tensor in (2, 4):
        again, kept = (
            memory_of(model, device, global_batch=1, tensor=tensor, sequence_parallel=True,
                      recompute="none", regather=regather).activations_bytes
            for regather in (True, False)
        )  # fmt: skip
        wanted = 4 * 2 * (2 * 2048 * 1024) * (1 - 1 / tensor)
        assert kept - again == pytest.approx(wanted, rel=1e-12)


def test_one_stage_keeps_the_logits_of_its_micro_batch():
    """Twice the vocabulary is twice the logits; they do not grow with the number of layers."""
    device = load_cluster("h100-nemo").device

    def added(layers):
        small = gpt(1024, layers, 8)
        large = dataclasses.replace(small, vocab=2 * small.vocab)
        few, many = (memory_of(one, device, global_batch=1) for one in (small, large))
        return many.activations_bytes - few.activations_bytes

    assert added(4) == pytest.approx(added(8), rel=1e-12)
    assert added(4) >= 2 * 2048 * 51200


@pytest.mark.parametrize(("tensor", "own"), [(1, None), (2, None), (2, 1), (4, 1)])
def test_shared_states_of_experts_add_up_to_one_copy(tensor, own):
    """Whichever ranks hold which expert, ZeRO keeps one optimizer state of each of its weights."""
    device = load_cluster("h100-nemo").device
    narrow, wide = (
        dataclasses.replace(
            gpt(1024, 4, 8),
            experts=MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=width),
        )
        for width in (512, 1024)
    )
    few, many = (
        memory_of(model, device, global_batch=8, data=8, tensor=tensor, expert=4,
                  expert_tensor=own, zero=1, sequence_parallel=tensor > 1).optimizer_bytes
        for model in (narrow, wide)
    )  # fmt: skip
    added = device.optimizer_state_bytes * (wide.num_parameters - narrow.num_parameters)
    assert 8 * tensor * (many - few) == pytest.approx(added, rel=1e-9)


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (4, False), (4, True)])
def test_the_embeddings_dropout_keeps_a_byte_an_element(tensor, sequence):
    """Those of the layers double with the layers, this one does not."""
    device = load_cluster("h100-nemo").device

    def kept(layers):
        model = gpt(1024, layers, 8)
        with_marks, without = (
            memory_of(one, device, global_batch=1, tensor=tensor, sequence_parallel=sequence)
            for one in (model, dataclasses.replace(model, dropout=False))
        )
        return with_marks.activations_bytes - without.activations_bytes

    split = tensor if sequence else 1
    assert 2 * kept(4) - kept(8) == pytest.approx(2048 * 1024 / split, rel=1e-9)


def test_a_step_in_32_bits_is_twice_as_wide():
    """Parameters, activations and what ranks send of them; no copy of the parameters beside."""
    cluster = load_cluster("cpu-lab")
    device = dataclasses.replace(cluster.device, loss_chunks=1_000_000)  # logits are always wide
    model = load_model("gpt3-1.3b")
    found = {
        dtype: evaluate_plan(
            model, device, cluster.fabric,
            plan=ParallelPlan(global_batch=8, data=2, pipeline=2, dtype=dtype),
        ).memory
        for dtype in ("bf16", "fp32")
    }  # fmt: skip
    narrow, wide = found["bf16"], found["fp32"]
    assert wide.weights_bytes == 2 * narrow.weights_bytes
    assert wide.gradients_bytes == narrow.gradients_bytes
    assert wide.optimizer_bytes == narrow.optimizer_bytes * 8 / 12
    assert 1.7 * narrow.activations_bytes < wide.activations_bytes < 2 * narrow.activations_bytes


def test_experts_in_32_bits_send_twice_the_bytes():
    cluster = load_cluster("cpu-lab")
    tiers = tuple(dataclasses.replace(tier, base_s=0.0, hop_s=0.0) for tier in cluster.fabric.tiers)
    fabric = dataclasses.replace(cluster.fabric, tiers=tiers)
    sent = {}
    for dtype in ("bf16", "fp32"):
        plan = ParallelPlan(global_batch=4, data=4, expert=4, dtype=dtype)
        sent[dtype] = evaluate_plan(load_model("mixtral-8x7b"), cluster.device, fabric, plan=plan)
    assert sent["fp32"].time.expert_s == pytest.approx(2 * sent["bf16"].time.expert_s)


def test_a_gpu_without_a_figure_for_32_bits_is_not_priced_as_if_it_had_16():
    cluster, model = load_cluster("h100-nemo"), load_model("gpt3-1.3b")
    plan = ParallelPlan(global_batch=8, data=8, dtype="fp32")
    with pytest.raises(ConfigurationError, match="32 bits is not known"):
        evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
    device = dataclasses.replace(cluster.device, peak_flops_fp32=67e12)
    slow = evaluate_plan(model, device, cluster.fabric, plan=plan)
    fast = evaluate_plan(
        model, device, cluster.fabric, plan=dataclasses.replace(plan, dtype="bf16")
    )
    assert slow.time.compute_s > 8 * fast.time.compute_s
