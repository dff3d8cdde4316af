"""Models of a ``config.json``: what transformers makes of the file, and the account of its keys."""

import json
import logging
from pathlib import Path

import hypothesis.strategies as st
import pytest
from benchmarks.strategy import model_configurations as judge
from hypothesis import given

from fivefold.errors import DataError, UnsupportedError
from fivefold.reading import Reading
from fivefold.strategy import load_job, load_model
from fivefold.strategy.hugging_face import (
    model_from_hugging_face,
    model_of_config,
    read_model,
)

# Parameters of each class of transformers 5.24 with its default configuration, built on the meta
# device: the file names the type and little else, so that the defaults are tested as well.
COUNTED = json.loads((Path(__file__).parent / "parameters_of_families.json").read_text())
PLAIN = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 100,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(COUNTED))
def test_parameters_are_those_of_transformers_default(family):
    config, parameters = COUNTED[family]
    length = None if "vit" in family else 1024
    assert model_from_hugging_face(config, seq_len=length).num_parameters == parameters


@pytest.mark.nightly
def test_no_class_of_transformers_gets_another_count_without_a_word():
    pytest.importorskip("transformers")
    logging.disable(logging.WARNING)
    try:
        found = [
            one for name in judge.families() for one in judge.outcomes(name, changes=6, seed=0)
        ]
    finally:
        logging.disable(logging.NOTSET)
    assert [one for one in found if one.kind == "WRONG"] == []
    assert sum(one.kind == "equal" for one in found) > len(found) / 3


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_next", {"full_attention_interval": 2}),
        ("deepseek_v32", {"index_n_heads": 8}),
        (
            "gemma4_text",
            {"num_hidden_layers": 12, "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
        ),
        ("minimax_m3_vl_text", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}),
    ],
)
def test_a_changed_key_changes_the_parameters_as_in_transformers(family, change):
    pytest.importorskip("transformers")
    outcome = judge.judge(family, change)
    assert outcome.kind == "equal", outcome.said


# A class for each kind of layer; windows and choices are as long as the sample, as transformers
# computes scores that it masks. Mamba-2 is not here: what it runs without kernels is no scan.
KINDS = {
    "llama": {}, "falcon": {}, "cohere2": {"sliding_window": 64}, "gpt_neox": {}, "qwen3_moe": {},
    "deepseek_v32": {"index_topk": 64, "num_key_value_heads": 4}, "lfm2": {},
    "afmoe": {"sliding_window": 64}, "qwen3_next": {}, "minimax": {"block_size": 64},
    "gemma4_text": {"sliding_window": 64},
}  # fmt: skip


@pytest.mark.parametrize("family", list(KINDS))
def test_flops_are_those_of_its_forward(family):
    torch, tf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = tf.CONFIG_MAPPING[family](**(judge.small_sizes(family) | KINDS[family]))
    theirs = tf.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        theirs.eval()(input_ids=torch.zeros(1, 64, dtype=torch.int64), use_cache=False)
    saved = json.loads(config.to_json_string(use_diff=True))
    ours = model_from_hugging_face(saved, seq_len=64).flops_per_sequence() / 3
    # The chunks of a delta net are a little more than its model's.
    near = 0.03 if family == "qwen3_next" else 1e-3
    assert ours == pytest.approx(counted.get_total_flops(), rel=near)


@pytest.mark.parametrize(
    ("change", "said", "hint"),
    [
        ({"model_type": "new_model"}, "'new_model' cannot be read", "named as left out"),
        ({"model_type": None}, "no model_type", "add the model_type"),
        ({"model_type": None, "architectures": ["NewForCausalLM"]}, "'NewForCausalLM' is not known",
         "add the model_type"),
        ({"hidden_act": "sinus"}, "hidden_act='sinus'", "[model]"),
        ({"model_type": "arcee", "hidden_act": "swiglu"}, "has a gate that its family has not",
         "[model]"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 5 + ["new_attention"]},
         "no price: 'new_attention'", "layer_types may have"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "=True has products",
         "[model]"),
        ({"model_type": "opt", "word_embed_proj_dim": 32}, "=32 has products", "[model]"),
        ({"model_type": "helium", "head_dim": 32}, "4 heads of 32 has products", "hidden_size ="),
        ({"model_type": "minimax_m3_vl_text", "num_local_experts": 8, "num_experts_per_tok": 2,
          "sparse_attention_config": {"use_sparse_attention": True}},
         "does not say which layers are sparse", "[model]"),
    ],
    ids=["type", "no type", "class", "activation", "gate", "layers", "cross", "width", "square",
         "blocks"],
)  # fmt: skip
def test_what_is_not_understood_is_refused(change, said, hint):
    config = {key: value for key, value in {**PLAIN, **change}.items() if value is not None}
    with pytest.raises(UnsupportedError, match=said) as caught:
        model_from_hugging_face(config)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {"model_type": "llama"}),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 2}, "text_config": {}},
         {"model_type": "qwen3_vl_text"}),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
         {"model_type": "mistral"}),
    ],
    ids=["class", "parent", "part"],
)  # fmt: skip
def test_the_family_is_that_of_type_class_or_parent(config, same):
    sizes = {key: value for key, value in PLAIN.items() if key != "model_type"}
    text = {"text_config": {**sizes, **config["text_config"]}} if "text_config" in config else sizes
    reading = Reading("config.json")
    found = model_of_config({**config, **text}, reading)
    assert found == model_from_hugging_face({**sizes, **same})
    left = {"vision_config"} & config.keys() or (
        {"other parts"} if "text_config" in text else set()
    )
    assert {note.name for note in reading.decisive()} == left


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("index_topk", 2048, "nothing that is known"),
        ("num_nextn_predict_layers", 1, "no layers that predict"),
        ("residual_streams", 4, "nothing that is known"),
    ],
)
def test_a_hint_that_is_followed_loses_nothing_without_a_word(key, value, said):
    config, _ = COUNTED["deepseek_v3"]
    reading = Reading("config.json")
    model_of_config({**config, key: value}, reading, seq_len=64)
    assert [note.name for note in reading.decisive()] == [key]
    assert said in reading.decisive()[0].why
    off = Reading("config.json")
    model_of_config({**config, key: None}, off, seq_len=64)
    assert not off.decisive()
    assert key in off.names()


def _read(family, change):
    base = PLAIN if family == "llama" else COUNTED[family][0]
    config = {key: value for key, value in {**base, **change}.items() if value != "absent"}
    reading = Reading("config.json")
    return model_of_config(config, reading, seq_len=64), reading


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_moe", "num_experts_per_token", 4), ("qwen3_moe", "top_k", 4),
        ("llama", "ffn_dim_multiplier", 1.3), ("llama", "hidden_size_scale", 2),
        ("llama", "layer_init", 3), ("llama", "mup_width", 2), ("llama", "heads_alpha", 2),
        ("llama", "expand_ratio_scaling", [2, 4]), ("llama", "qk_rope_head_dim", 64),
        ("llama", "pruned_heads", {"1": [2]}), ("deepseek_v3", "moe_layer_freq", 2),
        ("qwen3_next", "attn_output_gate", False),
        ("kimi_linear", "linear_attn_config", {"num_groups": 3}),
    ],
)  # fmt: skip
def test_what_may_change_a_size_is_never_harmless(family, key, value):
    decisive = [note.name for note in _read(family, {key: value})[1].decisive()]
    assert decisive == [key if family != "kimi_linear" else f"{key}.num_groups"]


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "layer_norm_eps", 1e-5), ("llama", "num_beams", 1), ("llama", "top_k", 20),
        ("qwen3_moe", "top_k", 50), ("llama", "num_image_token_id", 7),
        ("deepseek_v3", "routed_scaling_factor", 2.5), ("deepseek_v3", "moe_layer_freq", 1),
        ("kimi_linear", "moe_layer_freq", 1), ("qwen3_next", "attn_output_gate", True),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_no_alarm(family, key, value):
    assert not _read(family, {key: value})[1].decisive()


@pytest.mark.parametrize(
    ("family", "change", "key", "value"),
    [
        ("llama", {"num_key_value_heads": "absent"}, "num_key_value_heads", 4),
        ("llama", {"num_key_value_heads": None}, "num_key_value_heads", 4),
        ("llama", {"head_dim": None}, "head_dim", 16),
        ("llama", {}, "head_dim", 16),
        ("gpt2", {"n_inner": None}, "n_inner", 3072),
        ("qwen3_next", {}, "full_attention_interval", 4),
        ("mimo_v2_flash", {}, "swa_num_attention_heads", 64),
        ("deepseek_v4", {}, "residual streams", 1),
        ("gemma3n_text", {}, "residual streams", 1),
    ],
)
def test_what_code_supplies_is_assumed(family, change, key, value):
    assumed = {note.name: note for note in _read(family, change)[1].assumed}
    assert assumed[key].value == value
    assert assumed[key].decisive == (key == "residual streams")


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"intermediate_size": None}, "intermediate_size .* must be a number, or left"),
        ("qwen3_next", {"full_attention_interval": None}, "full_attention_interval .* has 4 then"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step .* above 0; got 0"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval .* above 0; got 0"),
        ("minimax_m3_vl_text", {"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 of"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 of"),
        ("minimax", {"attn_type_list": [1, 0]}, "attn_type_list names 2 of"),
        ("qwen3", {"layer_types": ["full_attention"] * 99}, "layer_types names 99 of"),
        ("kimi_linear", {"linear_attn_config": {"num_heads": True}}, "config.num_heads .* True"),
        ("kimi_linear", {"linear_attn_config": {"head_dim": 128.5}}, "config.head_dim .* 128.5"),
        ("kimi_linear", {"linear_attn_config": 5}, "linear_attn_config .* a table; got 5"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
         "do not name each of"),
        ("nemotron_h", {"num_hidden_layers": 80}, "num_hidden_layers=80, but"),
        ("nemotron_h", {"hybrid_override_pattern": "absent", "layers_block_type": "absent",
                        "layer_types": "absent"}, "neither hybrid_override_pattern nor"),
        ("gpt2", {"n_embd": 1600, "n_head": 12}, "n_embd=1600 .* no multiple of n_head=12"),
        ("llama", {"num_key_value_heads": 3}, "=4 .* no multiple of num_key_value_heads=3"),
        ("llama", {"hidden_act": "bfloat16"}, "hidden_act='bfloat16'"),
    ],
)  # fmt: skip
def test_a_null_or_a_contradiction_is_refused_by_name(family, change, said):
    with pytest.raises((DataError, UnsupportedError), match=said):
        _read(family, change)


SIZES = {key: value for key, value in PLAIN.items() if key != "hidden_size"}


@pytest.mark.parametrize(
    ("config", "decisive"),
    [
        ({"hidden_size": 128, "text_config": SIZES}, {"hidden_size", "text_config.hidden_size"}),
        ({"hidden_size": 128, "text_config": PLAIN}, {"hidden_size"}),
        ({"hidden_size": 64, "text_config": PLAIN}, {"other parts"}),
        ({"tie_word_embeddings": True, "text_config": {**PLAIN, "tie_word_embeddings": False}},
         {"tied embedding", "other parts"}),
        ({"thinker_config": {"audio_config": {}, "text_config": PLAIN}},
         {"thinker_config.audio_config"}),
    ],
    ids=["parent's", "different", "same", "tied", "two levels"],
)  # fmt: skip
def test_a_size_beside_the_language_model_is_not_lost(config, decisive):
    reading = Reading("config.json")
    model_of_config({"model_type": "llava", **config}, reading)
    assert {note.name for note in reading.decisive()} == decisive


def test_a_language_model_without_sizes_is_refused():
    with pytest.raises(DataError, match=r"none of text_config\.hidden_size"):
        model_from_hugging_face({"model_type": "llava", "text_config": {"model_type": "llama"}})


KEYS = st.sampled_from(
    ["rope_theta", "bos_token_id", "head_dim", "attention_bias", "mlp_bias", "some_layers", "gate",
     "quantization_config", "torch_dtype", "num_experts", "sliding_window", "rms_norm_eps",
     "hidden_act", "num_nextn_predict_layers"]
)  # fmt: skip
VALUES = st.sampled_from([None, False, True, 1, 8, 0.5, "silu", [], [1], {}, {"a": 1}])


@given(more=st.dictionaries(KEYS, VALUES), nested=st.booleans())
def test_every_key_has_exactly_one_place(more, nested):
    config = {**PLAIN, **more}
    if nested:
        config = {"model_type": "llava", "image_size": 8, "text_config": config}
    reading = Reading("config.json")
    try:
        model_of_config(config, reading)
    except (DataError, UnsupportedError, TypeError):
        return
    inner = [f"text_config.{key}" for key in config.get("text_config", ())]
    names = [note.name for note in (*reading.read, *reading.assumed, *reading.left_out,
                                    *reading.harmless)]  # fmt: skip
    assert sorted(names) == sorted(set(names))
    assert set(names) >= {*config, *inner}


@pytest.mark.parametrize("unused", [True, False])
def test_infinity_is_wrong_only_where_it_is_read(tmp_path, unused):
    key = "time_step_limit" if unused else "vocab_size"
    text = json.dumps({**PLAIN, key: float("inf")})
    (tmp_path / "config.json").write_text(text)
    if unused:
        found, reading = read_model(tmp_path)
        assert found.num_parameters == model_from_hugging_face(PLAIN).num_parameters
        assert key in {note.name for note in reading.harmless}
        return
    with pytest.raises(DataError, match="vocab_size of the model's configuration must be"):
        read_model(tmp_path)


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
    model = model_from_hugging_face({**PLAIN, **keys}, seq_len=128)
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
        ("qk_rope_head_dim", float("nan")),
    ],
)
def test_a_size_that_is_no_whole_number_is_refused(key, value):
    family = "glm4_moe" if "key_value" in key else "deepseek_v3"
    config, _ = COUNTED[family]
    with pytest.raises(DataError, match=f"{key} of the model's configuration must be"):
        model_from_hugging_face({**config, key: value})


def test_more_layers_than_any_model_has_are_refused_at_once():
    with pytest.raises(DataError, match="num_hidden_layers=1000000000 is more than 10,000"):
        model_from_hugging_face({**PLAIN, "num_hidden_layers": 10**9})


# Published totals and parameters that a token meets, without the embedding where the authors leave
# it out, in billions: arXiv 2508.10925 (table 1), 2505.09388 and the model's card.
@pytest.mark.parametrize(
    ("model", "total", "active", "embedding"),
    [
        (model_from_hugging_face(COUNTED["gpt_oss"][0]), 116.83, 5.13, False),
        (load_model("qwen3-30b-a3b"), 30.53, 3.35, True),
    ],
    ids=["gpt-oss-120b", "qwen3-30b-a3b"],
)
def test_active_parameters_are_those_of_the_experts_that_a_token_visits(
    model, total, active, embedding
):
    met = model.active_parameters - (0 if embedding else model.embedding_parameters)
    assert model.num_parameters / 1e9 == pytest.approx(total, abs=0.01)
    assert met / 1e9 == pytest.approx(active, abs=0.01)


def test_a_job_tells_what_of_its_model_was_not_counted(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"residual_streams": 4}))
    job = tmp_path / "job.toml"
    job.write_text('model = "config.json"\ngpus = 1\nglobal_batch = 1\n')
    reading = load_job(job).reading
    assert [note["name"] for note in reading.to_json()["left_out"]] == ["residual_streams"]
    assert "not counted: residual_streams" in caplog.text
