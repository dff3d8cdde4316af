"""Parameters of every family that is read, against those that transformers makes of the file."""

import json

import pytest

from fivefold.errors import DataError, UnsupportedError
from fivefold.strategy.presets import FAMILIES, model_from_hugging_face

OWN_TEST = {"bamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h"}  # test_hybrid
SIZES = {
    "vocab_size": 4000, "hidden_size": 512, "n_embd": 512, "num_attention_heads": 8, "n_head": 8,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 5, "n_layer": 5,
    "intermediate_size": 1280, "moe_intermediate_size": 192, "num_experts": 8,
    "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 96, "q_lora_rank": 128,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "pad_token_id": 0,
    "num_labels": 10,
}  # fmt: skip
# The head of a masked model has a square layer of its own, which a model of this size feels.
ENCODERS = {name for name in FAMILIES if "bert" in name} | {"camembert", "data2vec-text", "ernie"}


def small(family, changes=None):
    """Return transformers' model without memory, and its configuration as it is saved."""
    torch, tf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind = tf.CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | {"num_labels"}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if family == "falcon":
        sizes.pop("head_dim", None)  # follows from the others
    config = kind(**sizes, **(changes or {}))
    head = tf.AutoModelForImageClassification if "vit" in family else tf.AutoModelForCausalLM
    with torch.device("meta"):
        model = head.from_config(config, attn_implementation="eager")
    return model, json.loads(config.to_json_string(use_diff=True))


@pytest.mark.parametrize("family", sorted(FAMILIES - OWN_TEST))
@pytest.mark.parametrize("tied", [None, True, False])
def test_parameters_are_those_that_transformers_makes(family, tied):
    theirs, saved = small(family, {} if tied is None else {"tie_word_embeddings": tied})
    count = sum(parameter.numel() for parameter in theirs.parameters())
    length = None if {"max_position_embeddings", "n_positions", "patch_size"} & saved.keys() else 64
    ours = model_from_hugging_face(saved, seq_len=length).num_parameters
    assert ours == pytest.approx(count, rel=0.03 if family in ENCODERS else 0.01)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "relu"}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("nanochat", {"hidden_act": "silu"}),
        ("bert", {"hidden_act": "silu"}),
        ("gpt_bigcode", {"multi_query": False}),
        ("hy_v3", {"num_shared_experts": 0}),
        ("vit", {"patch_size": 32}),
        ("vit", {"patch_size": 8}),
        ("nemotron_h", {"tie_word_embeddings": True}),
    ],
)
def test_the_family_says_what_is_built(family, changes):
    theirs, saved = small(family, changes)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    ours = model_from_hugging_face(saved).num_parameters
    assert ours == pytest.approx(count, rel=0.01 if family == "vit" else 0.03)


@pytest.mark.parametrize(
    "family",
    ["bert", "bitnet", "cohere2", "falcon", "gemma2", "gpt_neox", "llama", "nemotron", "phi3",
     "qwen3", "starcoder2"],
)  # fmt: skip
def test_flops_are_those_of_its_forward(family):
    theirs, saved = small(family)
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        theirs.eval()(input_ids=torch.zeros(1, 256, dtype=torch.int64, device="meta"))
    ours = model_from_hugging_face(saved, seq_len=256).flops_per_sequence() / 3
    assert ours == pytest.approx(counted.get_total_flops(), rel=0.03)


@pytest.mark.parametrize(
    ("config", "said", "hint"),
    [
        ({"model_type": "gemma4_text"}, "'gemma4_text' cannot be read", "describe it under"),
        ({"model_type": "llama4", "text_config": {"hidden_size": 8}}, "and more", "text_config"),
        ({"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512}, "=512", "[model]"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "=True has products", "[model]"),
        ({"model_type": "helium", "hidden_size": 512, "num_attention_heads": 8, "head_dim": 32},
         "head_dim=32 has products", "[model]"),
    ],
)  # fmt: skip
def test_a_family_that_nobody_counted_is_refused(config, said, hint):
    with pytest.raises(UnsupportedError, match=said) as caught:
        model_from_hugging_face(config)
    assert hint in caught.value.hint


def test_a_file_without_a_family_is_a_plain_decoder():
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 32,
    }  # fmt: skip
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert model_from_hugging_face(config).num_parameters == 2 * 100 * 64 + 2 * layer + 64


@pytest.mark.parametrize(
    ("keys", "window", "windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 16, None),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, 0, None),
        ({"model_type": "gemma2", "sliding_window": 16}, 16, 3),
        ({"model_type": "gemma3_text", "sliding_window": 16}, 16, 5),
        ({"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": 4}, 16, 5),
        ({"model_type": "gpt_oss", "sliding_window": 16,
          "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2}, 16, 4),
        ({"model_type": "llama4_text", "attention_chunk_size": 64,
          "layer_types": ["chunked_attention"] * 5 + ["full_attention"]}, 32, 5),
        ({"model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layers": []}, 32, 5),
        ({"model_type": "llama4_text", "attention_chunk_size": 64,
          "no_rope_layers": [1, 0, 1, 0, 1, 0]}, 32, 3),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True,
          "max_window_layers": 4}, 16, 2),
    ],
)  # fmt: skip
def test_which_layers_look_back_how_far(keys, window, windowed):
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
             "vocab_size": 100}  # fmt: skip
    model = model_from_hugging_face({**sizes, **keys}, seq_len=128)
    assert (model.window, model.windowed_layers) == (window, windowed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 1.5),
        ("vocab_size", True),
        ("hidden_size", -4096),
        ("num_hidden_layers", "many"),
        ("num_attention_heads", [32]),
        ("intermediate_size", 0),
        ("moe_intermediate_size", 0),
        ("num_key_value_heads", 2.5),
        ("n_routed_experts", True),
        ("kv_lora_rank", 512.5),
    ],
)
def test_a_size_that_is_no_whole_number_is_refused(key, value):
    config = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2,
        "intermediate_size": 8192, "vocab_size": 1000, "max_position_embeddings": 2048,
        "n_routed_experts": 4,
    }  # fmt: skip
    with pytest.raises(DataError, match=f"{key} of the model's configuration must be"):
        model_from_hugging_face(config | {key: value})


def test_a_dense_hybrid_without_its_feed_forward_part_is_refused():
    config = {
        "model_type": "granitemoehybrid", "hidden_size": 64, "num_attention_heads": 4,
        "vocab_size": 100, "layer_types": ["attention"] * 2, "num_hidden_layers": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 0, "intermediate_size": 96, "mamba_d_state": 16,
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "mamba_chunk_size": 64, "max_position_embeddings": 32,
    }  # fmt: skip
    with pytest.raises(DataError, match="shared_intermediate_size of the model's configuration"):
        model_from_hugging_face(config)
