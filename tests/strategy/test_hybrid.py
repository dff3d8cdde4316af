"""Layers of Mamba: parameters as transformers counts them, FLOPs, bytes and limits by hand."""

import dataclasses
import json

import pytest

from fivefold import strategy
from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.strategy.demand import plan_demand
from fivefold.strategy.hugging_face import model_from_hugging_face
from fivefold.strategy.parts import MambaMixer

CLUSTER = strategy.load_cluster("h100-nemo")
MIXER = MambaMixer(state=128, heads=64, head_dim=64, groups=8, chunk=128)
PLAIN = {"tied": False, "learned_positions": False, "dropout": False, "biases": False}
SHAPE = {"name": "x", "hidden": 2048, "num_heads": 16, "seq_len": 4096, "vocab": 32000, **PLAIN}


def price(model, plan=None):
    plan = plan or strategy.ParallelPlan(global_batch=8, data=4)
    return strategy.evaluate_plan(model, CLUSTER.device, CLUSTER.fabric, plan=plan)


def configs():
    tf = pytest.importorskip("transformers")
    few = {"hidden_size": 512, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024}
    second = {"mamba_n_heads": 16, "mamba_d_head": 64}
    return {
        "mamba2": tf.Mamba2Config(num_hidden_layers=3, num_heads=16, head_dim=64, **few),
        "mamba": tf.MambaConfig(num_hidden_layers=3, **few),
        "bamba": tf.BambaConfig(num_hidden_layers=4, attn_layer_indices=[2], **second, **few,
                                **heads),
        "one layer": tf.BambaConfig(num_hidden_layers=1, **second, **few, **heads),
        "jamba": tf.JambaConfig(num_hidden_layers=8, num_experts=4, mamba_dt_rank=32, **few,
                                **heads),
        "granitemoehybrid": tf.GraniteMoeHybridConfig(
            num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **second,
            **few, **heads),
        "nemotron_h": tf.NemotronHConfig(
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=16, mamba_head_dim=64, moe_intermediate_size=256,
            moe_shared_expert_intermediate_size=320, head_dim=64, **few, **heads),
    }  # fmt: skip


@pytest.mark.parametrize(
    "family", ["mamba2", "mamba", "bamba", "one layer", "jamba", "granitemoehybrid", "nemotron_h"]
)
def test_parameters_are_those_that_transformers_makes(family):
    torch = pytest.importorskip("torch")
    config = configs()[family]
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    ours = model_from_hugging_face(config.to_dict(), seq_len=4096).num_parameters
    assert ours == count


def test_published_sizes():
    """Nemotron 3 Nano 30B-A3B: 31.6 billion; Mamba-2 2.7B: 2.7; Jamba 1.5 Mini: 51.6."""
    assert strategy.load_model("nemotron-3-nano").num_parameters / 1e9 == pytest.approx(
        31.6, rel=2e-3
    )
    # As transformers 5 makes them of their configurations: 120B-A12B, 550B-A55B.
    assert strategy.load_model("nemotron-3-super").num_parameters == 120_668_687_360
    assert strategy.load_model("nemotron-3-ultra").num_parameters == 549_308_968_960
    mamba = {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "n_groups": 1,
             "num_heads": 80, "head_dim": 64, "state_size": 128, "vocab_size": 50288,
             "chunk_size": 256, "conv_kernel": 4, "tie_word_embeddings": True}  # fmt: skip
    found = model_from_hugging_face(mamba, seq_len=2048)
    assert found.num_parameters / 1e9 == pytest.approx(2.70, rel=5e-3)
    jamba = {"model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32,
             "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
             "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
             "expert_layer_offset": 1, "num_experts": 16, "num_experts_per_tok": 2,
             "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
             "vocab_size": 65536, "tie_word_embeddings": False}  # fmt: skip
    found = model_from_hugging_face(jamba, seq_len=4096)
    assert found.num_parameters / 1e9 == pytest.approx(51.6, rel=5e-3)
    assert found.pattern.split()[:5] == ["M-", "ME", "M-", "ME", "*-"]


def test_flops_of_the_scan_by_hand():
    """Chunks of 128: scores of groups, values inside, states in and out; two for one backward."""
    model = strategy.ModelSpec(num_layers=1, pattern="M", mamba=MIXER, **SHAPE)
    inner, state, chunk, groups = 64 * 64, 128, 128, 8
    scan = 2 * chunk * groups * state + 2 * chunk * inner + 2 * inner * state + 2 * inner * state
    columns = 2 * inner + 2 * groups * state + 64
    products = 2 * 2048 * (columns + inner) + 2 * 2048 * 32000
    assert model.flops_per_sequence() == pytest.approx(3 * 4096 * (scan + products))
    parameters = 2048 * columns + inner * 2048 + (inner + 2 * groups * state) * 5 + 3 * 64 + inner
    assert model.mamba_parameters == parameters


def test_bytes_kept_by_hand():
    """The norm's input and output, the projection's result, the scan's and the gate's."""
    two, four = (
        price(
            strategy.ModelSpec(num_layers=n, pattern="M", mamba=MIXER, **SHAPE)
        ).memory.activations_bytes
        for n in (2, 4)
    )
    inner, columns = 4096, 2 * 4096 + 2 * 8 * 128 + 64
    assert (four - two) / 2 / 4096 == pytest.approx(2 * (2048 + 2048 + columns + inner + inner))


def test_a_pattern_without_mamba_is_todays_price():
    """Attention and feed-forward part as layers of their own cost what they cost in one layer."""
    whole = strategy.ModelSpec(num_layers=8, **SHAPE)
    plan = strategy.ParallelPlan(global_batch=64, data=2, tensor=2, zero=1, data_overlap=True)
    expected = price(whole, plan)
    same = price(dataclasses.replace(whole, pattern="*- *- *- *-"), plan)
    assert (same.time, same.memory) == (expected.time, expected.memory)
    halves = dataclasses.replace(whole, num_layers=16, pattern="*-")
    assert halves.num_parameters == whole.num_parameters
    assert halves.flops_per_sequence() == pytest.approx(whole.flops_per_sequence())
    assert price(halves, plan).time.compute_s == pytest.approx(expected.time.compute_s, rel=1e-9)
    found = price(halves, plan).memory.activations_bytes
    assert found == pytest.approx(expected.memory.activations_bytes)


def test_long_sequences_cost_a_scan_linear_time_and_attention_square():
    def compute_s(pattern, length):
        mixer = MIXER if "M" in pattern else None
        model = strategy.ModelSpec(
            num_layers=8, pattern=pattern, mamba=mixer, **{**SHAPE, "seq_len": length}
        )
        return price(model, strategy.ParallelPlan(global_batch=1)).time.compute_s

    assert compute_s("M", 131072) / compute_s("M", 16384) == pytest.approx(8, rel=0.02)
    assert compute_s("*", 131072) / compute_s("*", 16384) > 25
    first = dataclasses.replace(MIXER, heads=4096, head_dim=1, groups=1, step_rank=128)
    model = strategy.ModelSpec(num_layers=8, pattern="M", mamba=first, **SHAPE)
    assert price(model, strategy.ParallelPlan(global_batch=1)).time.compute_s > 0


def test_a_tensor_group_splits_heads_and_sends_once_a_block():
    model = strategy.ModelSpec(num_layers=4, pattern="M", mamba=MIXER, **SHAPE)
    plan = strategy.ParallelPlan(global_batch=4, tensor=4)
    one, four = price(model, strategy.ParallelPlan(global_batch=4)), price(model, plan)
    assert four.memory.weights_bytes < 0.26 * one.memory.weights_bytes
    sent = [m for m in plan_demand(model, CLUSTER.device, plan).messages if m.axis == "tensor"]
    blocks, head = 4 * 2 * 4096 * 2048, 2 * 4096 * 2048
    assert sent[0].size_bytes * 4 == pytest.approx(blocks + head)
    for changed, said in (({"tensor": 16}, "groups=8"), ({"context": 2}, "not split by context")):
        with pytest.raises(ConfigurationError, match=said):
            price(model, strategy.ParallelPlan(global_batch=4, **changed))


def test_search_and_programs():
    model = strategy.load_model("nemotron-3-nano", seq_len=4096)
    space = strategy.SearchSpace(num_gpus=16, global_batch=64)
    best = strategy.search_plans(model, CLUSTER.device, CLUSTER.fabric, space=space).best[0]
    assert best.fits
    for target in ("train", "torchtitan", "megatron"):
        assert "pattern" in str(strategy.target_problem(model, best.plan, target))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pattern": "M-X"}, "'X'"),
        ({"pattern": "M-*"}, "does not repeat to num_layers=4"),
        ({"pattern": "M-", "mamba": None}, "mamba is not given"),
        ({"pattern": ""}, "pattern has no M"),
        ({"pattern": "ME"}, "experts is not given"),
    ],
)
def test_wrong_patterns_are_refused(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        strategy.ModelSpec(**{"num_layers": 4, "mamba": MIXER, **SHAPE, **changes})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next", "layer_types": ["new_attention", "full_attention"]},
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "new_block"]},
        {"model_type": "llama4_text", "layer_types": ["linear_attention", "full_attention"]},
    ],
)
def test_layers_without_a_price_are_refused(config):
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    with pytest.raises(UnsupportedError, match="have no price"):
        model_from_hugging_face({**sizes, **config}, seq_len=1024)


def test_a_file_without_sizes_is_refused():
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-"}
    with pytest.raises(DataError, match="none of hidden_size"):
        model_from_hugging_face(config, seq_len=1024)


def test_a_file_with_periods_of_nothing_is_refused(tmp_path):
    periods = [
        f"{kind}_layer_{what}" for kind in ("attn", "expert") for what in ("period", "offset")
    ]
    config = {"model_type": "jamba", "hidden_size": 512, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 8, **dict.fromkeys(periods, 0)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="_layer_period of the model's configuration must be"):
        strategy.load_model(str(tmp_path / "config.json"))
