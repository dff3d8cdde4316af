"""Models: parameters and FLOPs of known ones, files, bad input."""

import dataclasses
import json

import pytest

from fivefold.errors import ConfigurationError, DataError
from fivefold.strategy import ModelSpec, load_model, named_models
from fivefold.strategy.hugging_face import model_from_hugging_face
from fivefold.strategy.parts import MixtureOfExperts

# From each model's card, or paper where a number is round.
KNOWN = {
    "gpt3-175b": 174.6e9, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096, "phi-4": 14_659_507_200, "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296, "qwen3-30b-a3b": 30.532e9, "qwen3-235b-a22b": 235.09e9,
    "deepseek-v3": 671.03e9, "vit-b16": 86.57e6, "vit-l16": 304.33e6,
    # Without the weights and biases of norms, and the biases of the head.
    "resnet50": 25_557_032 - 2 * 26_560 - 1000, "resnet101": 44_549_160 - 2 * 52_672 - 1000,
}  # fmt: skip


def gpt(h, layers, a, *, seq=2048, vocab=51200):
    return ModelSpec(name="gpt", num_layers=layers, hidden=h, num_heads=a, seq_len=seq, vocab=vocab)


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_their_published_parameters(name):
    rel = 1e-4 if isinstance(KNOWN[name], float) else 0.0
    assert load_model(name).num_parameters == pytest.approx(KNOWN[name], rel=rel, abs=0)


@pytest.mark.parametrize(
    ("h", "layers", "a", "billions"),
    [(2304, 24, 24, 1.7), (4096, 36, 32, 7.5), (10240, 60, 80, 76.1), (25600, 128, 160, 1008.0)],
)
def test_gpt_sizes_of_narayanan(h, layers, a, billions):
    model = gpt(h, layers, a)
    closed = 12 * layers * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h))
    assert model.num_parameters == pytest.approx(closed, rel=1e-4)
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_equal_the_closed_forms(recompute):
    h, layers, s, v = 6144, 40, 2048, 51200
    form = 96 if recompute else 72
    head = 16 if recompute else 12
    expected = form * s * layers * h**2 * (1 + s / (6 * h) + v / (head * layers * h))
    assert gpt(h, layers, 48).flops_per_sequence(recompute=recompute) == pytest.approx(expected)


def test_nvidia_form_of_llama_flops():
    model = load_model("llama3-70b")
    s, h, layers, ffn, v = 8192, 8192, 80, 28672, 128256
    expected = s * (12 * layers * h**2 * (1 + 8 / 64 + s / h) + 18 * layers * ffn * h + 6 * v * h)
    assert model.flops_per_sequence() == pytest.approx(expected)


def test_deepseek_activates_its_published_37_billion():
    model = load_model("deepseek-v3")
    idle = (model.num_layers * model.share_of("E")) * model.routed_parameters * (1 - 8 / 256)
    assert (model.num_parameters - idle) / 1e9 == pytest.approx(37.5, rel=0.02)


def test_a_hugging_face_file_gives_the_preset(tmp_path):
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(tmp_path), seq_len=4096)
    assert model.num_parameters == load_model("mixtral-8x7b").num_parameters
    assert model.seq_len == 4096


def test_hugging_face_gpt2_is_a_gpt():
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
              "vocab_size": 50257, "activation_function": "gelu_new"}  # fmt: skip
    assert model_from_hugging_face(config).num_parameters == 124_439_808


def test_hugging_face_deepseek_is_the_preset():
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 4096, "hidden_act": "silu", "moe_layer_freq": 1,
    }  # fmt: skip
    # The preset leaves the norms of queries and keys out.
    norms = 61 * (1536 + 512)
    ours = model_from_hugging_face(config).num_parameters
    assert ours == load_model("deepseek-v3").num_parameters + norms


@pytest.mark.parametrize("name", named_models())
def test_every_preset_has_operators(name):
    assert load_model(name).flops_per_sequence() > 0


def test_each_further_patch_has_one_learned_position():
    base = load_model("vit-l16")
    more = dataclasses.replace(base, seq_len=base.seq_len + 3)
    assert more.num_parameters - base.num_parameters == 3 * base.hidden


def test_sizes_whose_products_are_no_numbers_of_64_bits_are_refused():
    sizes = {"num_layers": 2, "hidden": 64, "num_heads": 2, "seq_len": 8, "vocab": 100}
    for name in sizes:
        with pytest.raises(ConfigurationError, match=f"^{name} must be .* to 100,000,000; got"):
            ModelSpec(name="m", **{**sizes, name: 2**63 - 1})
    huge = ModelSpec(name="m", **{**sizes, "vocab": 10**8, "hidden": 10**8})
    assert huge.num_parameters > 10**16


def test_bad_input_is_explained(tmp_path):
    with pytest.raises(ConfigurationError, match="did you mean 'llama3-8b'"):
        load_model("lama3-8b")
    with pytest.raises(ConfigurationError, match="whole number from 1"):
        gpt(0, 2, 1)
    with pytest.raises(ConfigurationError, match="not a multiple"):
        gpt(100, 2, 3)
    with pytest.raises(ConfigurationError, match="more than num_experts"):
        MixtureOfExperts(num_experts=2, top_k=3, expert_ffn=8)
    with pytest.raises(DataError, match="hidden_size"):
        model_from_hugging_face({"model_type": "llama"})
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        load_model(str(broken))


def test_vision_transformers_have_their_published_size():
    for name, millions in (("vit-b16", 86), ("vit-l16", 307), ("vit-h14", 632)):
        model = load_model(name)  # arXiv 2010.11929, table 1
        assert model.num_parameters / 1e6 == pytest.approx(millions, rel=0.01)
        assert model.seq_len == (224 // model.patch) ** 2 + 1
