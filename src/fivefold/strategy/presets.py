"""Known models by name (``models.toml``), or from a job file's tables or a ``config.json``.

A Hugging Face ``config.json`` does not say what the family's code makes of it: whether the
feed-forward part has a gate, what a missing key means, which layers have experts. So only those
families are read for which this module finds as many parameters as transformers makes, within 1 %
(norms inside attention and a few biases are left out); a family that nobody checked is refused and
not read as a Llama.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, DataError, FivefoldError, UnsupportedError
from fivefold.files import read_json
from fivefold.strategy.cluster import build_spec, check_keys, read_fields
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import (
    ConvolutionStage,
    LatentAttention,
    LowRankAdapters,
    MambaMixer,
    MixtureOfExperts,
)

_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-",
    "moe": "E",
}  # fmt: skip
_PLAIN = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
HYBRIDS = ("nemotron_h", "bamba", "granitemoehybrid", "jamba", "mamba", "falcon_mamba", "mamba2")
# Keys of layers that are neither attention nor one of these families' Mamba.
_OTHERS = ("mamba_", "ssm_", "linear_num_", "linear_key_", "rwkv", "conv_L_cache")


def hybrid_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``ModelSpec`` that say which layers are of Mamba; none without."""
    family = str(config.get("model_type", ""))
    if family not in HYBRIDS:
        kinds = set(config.get("layer_types") or ()) - _PLAIN
        kinds |= {key for key in config if key.startswith(_OTHERS)}
        if kinds:
            message = f"a model of type {family!r} has layers that have no price: {min(kinds)}"
            raise UnsupportedError(message, hint=f"known hybrids are {', '.join(HYBRIDS)}")
        return {}
    words = _words(config, family)
    layers: dict[str, Any] = {
        "num_layers": len(words), "mamba": _mixer(config, family), "learned_positions": False,
        # A letter a layer, or a word a layer.
        "pattern": ("" if all(len(word) == 1 for word in words) else " ").join(words),
    }  # fmt: skip
    if "M" not in layers["pattern"]:
        layers["mamba"] = None
    return layers


def _words(config: Mapping[str, Any], family: str) -> list[str]:
    if family == "nemotron_h":
        pattern = config.get("hybrid_override_pattern")
        if pattern is not None:
            return list(pattern)
        return [_LETTERS[kind] for kind in config["layers_block_type"]]
    count = range(int(config["num_hidden_layers"]))
    if family == "jamba":
        attends = (int(config["attn_layer_period"]), int(config["attn_layer_offset"]))
        routes = (int(config["expert_layer_period"]), int(config["expert_layer_offset"]))
        return [
            ("*" if n % attends[0] == attends[1] else "M")
            + ("E" if n % routes[0] == routes[1] and int(config["num_experts"]) > 1 else "-")
            for n in count
        ]
    if family == "bamba":
        attention = set(config.get("attn_layer_indices") or ())
        return ["*-" if n in attention else "M-" for n in count]
    if family == "granitemoehybrid":
        second = "E" if config.get("num_local_experts") else "-"
        return [_LETTERS[kind] + second for kind in config["layer_types"]]
    return ["M" for _ in count]


def _mixer(config: Mapping[str, Any], family: str) -> MambaMixer:
    hidden = int(config["hidden_size"])
    if family in {"jamba", "mamba", "falcon_mamba"}:
        prefix, short = ("mamba_d_", "mamba_") if family == "jamba" else ("", "")
        inner = int(config.get(f"{short}expand", 2)) * hidden
        if family != "jamba":
            inner = int(config.get("intermediate_size") or inner)
        rank = config.get("mamba_dt_rank" if short else "time_step_rank", "auto")
        return MambaMixer(
            state=int(config[f"{prefix}state" if short else "state_size"]), heads=inner,
            kernel=int(config.get("mamba_d_conv" if short else "conv_kernel", 4)),
            step_rank=-(-hidden // 16) if rank == "auto" else int(rank),
            biases=bool(config.get("mamba_conv_bias" if short else "use_conv_bias", True)),
        )  # fmt: skip
    names = {
        "state": ("ssm_state_size", "mamba_d_state", "state_size"),
        "heads": ("mamba_num_heads", "mamba_n_heads", "num_heads"),
        "head_dim": ("mamba_head_dim", "mamba_d_head", "head_dim"),
        "groups": ("mamba_n_groups", "n_groups"),
        "kernel": ("mamba_d_conv", "conv_kernel"),
        "chunk": ("mamba_chunk_size", "chunk_size"),
    }
    sizes: dict[str, int] = {}
    for name, keys in names.items():
        found = next((config[key] for key in keys if key in config), None)
        if found == "auto" and name == "head_dim":
            found = int(config.get("mamba_expand", 2)) * hidden // sizes["heads"]
        if found is None:
            message = f"the configuration of a {family} has none of {', '.join(keys)}"
            raise DataError(message, hint="is it the config.json of the whole model?")
        sizes[name] = int(found)
    bias = config.get("use_conv_bias", config.get("mamba_conv_bias", True))
    return MambaMixer(**sizes, biases=bool(bias))


Config = Mapping[str, Any]

_GPT = {"gpt2", "gpt_bigcode", "opt", "openai-gpt", "biogpt"}  # learned positions, biases
_ROTARY_GPT = {"bloom", "codegen", "gpt_neox", "gptj", "phi", "starcoder2"}  # biases alone
_ENCODERS = {
    "bert", "camembert", "data2vec-text", "ernie", "megatron-bert", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
_GEMMAS = {"gemma", "gemma2", "gemma3_text", "vaultgemma"}
_DECODERS = {
    "apertus", "arcee", "aria_text", "axk1", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm",
    "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon",
    "flex_olmo", "flint", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "llama",
    "llama4_text", "mellum", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
    "persimmon", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "solar_open", "stablelm", "youtu",
}  # fmt: skip
_VISION = {"vit", "vit_msn"}
FAMILIES = frozenset({*_GPT, *_ROTARY_GPT, *_ENCODERS, *_GEMMAS, *_DECODERS, *_VISION, *HYBRIDS})
"""Values of ``model_type`` that are read."""

# Without a gate in the feed-forward part, whatever the activation.
_UNGATED = _GPT | _ROTARY_GPT | _ENCODERS | _VISION | {
    "apertus", "arcee", "falcon", "jais2", "nanochat", "nemotron", "nemotron_h", "persimmon",
}  # fmt: skip

_COUNTS = re.compile(  # keys of whole numbers
    r"(num|n)_.*|(?!use_).*(_size|_dim|_rank|_conv|_kernel|_state|_step|_index|_period|_offset"
    r"|_interval|_window|_layers|_heads?|_groups?|_experts|_replace|expand)"
)

# Where the file does not say: head and embedding are one matrix.
_TIED = _GPT | _ENCODERS | _GEMMAS | {
    "bloom", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "falcon",
    "falcon_mamba", "granite_swa", "mamba", "minicpm3", "smollm3", "starcoder2", "youtu",
}  # fmt: skip

# Where the file does not say: one layer in so many looks at the whole sequence.
_WHOLE_EVERY = {
    "cohere2": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "llama4_text": 4, "olmo3": 4,
    "vaultgemma": 2,
}  # fmt: skip


def model_from_hugging_face(
    config: Config, *, name: str = "model", seq_len: int | None = None
) -> ModelSpec:
    """Read the keys of a Hugging Face ``config.json``; the library itself is not needed.

    Raises:
        UnsupportedError: The model is of a family that is not known, or has layers of a kind that
            has no price.
        DataError: A size is missing.
    """
    config = {key: value for key, value in config.items() if value is not None}
    layers, family = hybrid_layers(config), str(config.get("model_type", ""))
    _check_family(config, family)
    gpt = family in _GPT | _ROTARY_GPT or (not family and "n_embd" in config)
    vision, encoder = "patch_size" in config, family in _ENCODERS
    names = ("num_attention_heads", "n_head", *(("num_heads",) if layers else ()))
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    heads = 1 if set(layers.get("pattern", "")) == {"M"} else _size(config, *names)
    names = ("mlp_hidden_act", "hidden_act", "activation_function", "activation")
    kind = next((config[name] for name in names if config.get(name)), "silu")
    gated = kind in {"silu", "swish", "swiglu"} and not gpt and not vision
    gated = family not in _UNGATED if family else gated
    head_dim = config.get("qk_nope_head_dim") or config.get("head_dim")
    tied = config.get("tie_word_embeddings", family in _TIED or (gpt and not family))
    sizes: dict[str, Any] = {
        "hidden": hidden, "num_heads": heads, "ffn": _ffn(config),
        "seq_len": seq_len or _length(config, vision=vision),
        "vocab": _vocabulary(config, vision=vision),
        "num_kv_heads": None if _latent(config) or heads == 1 else _kv_heads(config, family),
        "head_dim": None if head_dim is None or heads == 1 else int(head_dim),
        "clamped": bool(config.get("swiglu_limit")),
        "gated": gated,
        "tied": bool(tied) and family != "nemotron_h",  # whose code never ties
        "learned_positions": encoder or (gpt and family not in _ROTARY_GPT),
        "dropout": _dropout(config, gpt=gpt), "biases": gpt or vision or encoder,
        "causal": not vision and not encoder, "embeds_tokens": not vision,
        "patch": _whole("patch_size", config.get("patch_size", 16)),
        "latent": _latent(config), **_windows(config, vision=vision), **layers,
    }  # fmt: skip
    if "num_layers" not in sizes:
        sizes["num_layers"] = _size(config, "num_hidden_layers", "n_layer")
    if "E" in layers.get("pattern", "E"):
        # Where a pattern says which layers have experts, the other keys do not.
        routed = sizes["num_layers"] if layers else _expert_layers(config, sizes["num_layers"])
        sizes["experts"] = _experts(config, sizes["num_layers"] - routed) if routed else None
    return ModelSpec(name=name, **sizes)


def _check_family(config: Config, family: str) -> None:
    """Refuse what nobody counted; a file without a family is somebody's own, and plain."""
    if "text_config" in config:
        message = f"a model of type {family!r} has a language model and more"
        hint = "to plan the language model alone, save its text_config as a file of its own"
        raise UnsupportedError(message, hint=hint)
    if family and family not in FAMILIES:
        message = (
            f"models of type {family!r} cannot be read from a config.json: the type is not verified"
        )
        hint = "describe it under [model] in a job file; or, where it is built like a type that is "
        hint += "known (llama, qwen3_moe, deepseek_v3, ...), set that model_type in a copy"
        raise UnsupportedError(message, hint=hint)
    width = config.get("hidden_size")
    own = {"add_cross_attention": False, "moe_latent_size": 0, "word_embed_proj_dim": width}
    if family == "helium" and width and config.get("num_attention_heads"):
        own["head_dim"] = width // config["num_attention_heads"]  # its last product is square
    for key, plain in own.items():
        if config.get(key, plain) != plain:
            message = f"a model with {key}={config[key]!r} has products that have no price"
            raise UnsupportedError(message, hint="describe what is near it under [model]")
    for key, value in config.items():
        part = isinstance(value, bool) or (isinstance(value, float) and not value.is_integer())
        if part and _COUNTS.fullmatch(key):
            message = f"{key} of the model's configuration must be a whole number; got {value!r}"
            raise DataError(message, hint="is it the config.json of a transformer?")


def _vocabulary(config: Config, *, vision: bool) -> int:
    return len(config.get("id2label", range(1000))) if vision else _size(config, "vocab_size")


def _kv_heads(config: Config, family: str) -> int | None:
    if family == "falcon":
        if config.get("new_decoder_architecture"):
            return _size(config, "num_kv_heads")
        return 1 if config.get("multi_query", True) else None
    if family == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else None
    found = config.get("num_key_value_heads")
    return None if found is None else int(found)


def _ffn(config: Config) -> int | None:
    names = ["intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"]
    if not config.get("num_local_experts", 1) and "shared_intermediate_size" in config:
        names = ["shared_intermediate_size"]  # of Granite's dense hybrids
    named = sorted((name for name in names if name in config), key=lambda name: not config[name])
    return _whole(named[0], config[named[0]]) if named else None


def _windows(config: Config, *, vision: bool) -> dict[str, Any]:
    kinds, family = list(config.get("layer_types", ())), config.get("model_type")
    chunk = int(config.get("attention_chunk_size", 0))
    if chunk and (not kinds or "chunked_attention" in kinds):
        # A token sees half a chunk in the mean, as with such a window.
        window, windowed = chunk // 2, "chunked_attention"
        kinds = kinds or [windowed if turned else "" for turned in config.get("no_rope_layers", ())]
    else:
        without = vision or config.get("use_sliding_window") is False
        window = int(0 if without else config.get("sliding_window", 0))
        windowed = "sliding_attention"
    if not window:
        return {}
    if kinds:
        return {"window": window, "windowed_layers": kinds.count(windowed)}
    default = _WHOLE_EVERY.get(str(family))
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", default))
    if family in {"qwen2", "qwen3"} and "max_window_layers" in config:
        whole = int(config["max_window_layers"])
    elif isinstance(every, int):
        whole = _size(config, "num_hidden_layers") // every
    else:
        return {"window": window}
    return {"window": window, "windowed_layers": max(_size(config, "num_hidden_layers") - whole, 0)}


def _size(config: Config, *names: str) -> int:
    for name in names:
        if name in config:
            return _whole(name, config[name])
    message = f"the model's configuration has none of {', '.join(names)}"
    raise DataError(message, hint="is it the config.json of a transformer?")


def _whole(name: str, value: Any) -> int:
    text = str(value).removesuffix(".0")
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        message = f"{name} of the model's configuration must be a whole number; got {value!r}"
        raise DataError(message, hint="is it the config.json of a transformer?")
    return int(text)


def _length(config: Config, *, vision: bool) -> int:
    if vision:
        return (int(config.get("image_size", 224)) // int(config["patch_size"])) ** 2 + 1
    return _size(config, "max_position_embeddings", "n_positions", "n_ctx")


def _dropout(config: Config, *, gpt: bool) -> bool:
    names = ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout")
    return any(float(config.get(name, 0.1 if gpt and name == names[0] else 0.0)) > 0
               for name in names)  # fmt: skip


def _expert_layers(config: Config, count: int) -> int:
    """Return how many of ``count`` layers have experts."""
    kinds, listed = config.get("mlp_layer_types"), config.get("moe_layers")
    if kinds is not None:
        return sum(kind != "dense" for kind in kinds)
    if listed is not None:
        return len(set(listed))
    first = int(config.get("first_k_dense_replace", config.get("num_dense_layers", 0)))
    first = int(config.get("moe_layer_start_index", first))
    last = int(config.get("moe_layer_end_index", -1))
    names = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    step = next((int(config[name]) for name in names if config.get(name)), 1)
    layers = range(first, count if last < 0 else min(last + 1, count))
    dense = {layer for layer in config.get("mlp_only_layers", ()) if layer in layers}
    turns = max(layers.stop // step - layers.start // step, 0)
    return turns - sum(1 for layer in dense if (layer + 1) % step == 0)


def _experts(config: Config, dense_layers: int) -> MixtureOfExperts | None:
    names = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    count = next((config[name] for name in names if name in config), None)
    if not count:
        return None
    inner = _size(config, "moe_intermediate_size", "intermediate_size")
    shares = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = inner * next((int(config[name]) for name in shares if name in config), 0)
    if "intermediate_size_mlp" in config:  # Llama 4: one, as wide as a routed one
        shared = inner
    for key in ("shared_intermediate_size", "moe_shared_expert_intermediate_size"):
        shared = int(config.get(key) or shared)
    if not shared and config.get("model_type") == "hy_v3":  # its code takes 0 for not said
        shared = _size(config, "intermediate_size")
    return MixtureOfExperts(
        num_experts=int(count), top_k=_size(config, "num_experts_per_tok", "moe_topk", "moe_k"),
        expert_ffn=inner, shared_ffn=int(config.get("shared_expert_intermediate_size", shared)),
        dense_layers=dense_layers, groups=int(config.get("n_group") or 1),
        top_groups=config.get("topk_group"),
    )  # fmt: skip


def _latent(config: Config) -> LatentAttention | None:
    if "kv_lora_rank" not in config:
        return None
    return LatentAttention(
        q_rank=int(config.get("q_lora_rank") or 0), kv_rank=int(config["kv_lora_rank"]),
        rope_dim=int(config["qk_rope_head_dim"]), value_dim=int(config["v_head_dim"]),
    )  # fmt: skip


_NESTED = {
    "experts": MixtureOfExperts, "latent": LatentAttention, "mamba": MambaMixer,
    "adapters": LowRankAdapters,
}  # fmt: skip


@functools.cache
def _models() -> dict[str, ModelSpec]:
    text = (files("fivefold.strategy") / "models.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {
        name: model_from_table({"name": name, **table}, where=name)
        for name, table in tables.items()
    }


def named_models() -> tuple[str, ...]:
    """Return the names of the known models.

    Examples:
        >>> "llama3-405b" in named_models()
        True
    """
    return tuple(_models())


def model_from_table(table: Any, *, where: str) -> ModelSpec:
    """Return a model from a table of its sizes, as ``[model]`` of a job file has it."""
    check_keys(table, {field.name for field in dataclasses.fields(ModelSpec)}, where=where)
    values = dict(table)
    for name, kind in _NESTED.items():
        if name in values:
            values[name] = _built(kind, values[name], where=f"[model.{name}]")
    values["stages"] = tuple(
        _built(ConvolutionStage, stage, where="[[model.stages]]")
        for stage in values.get("stages", ())
    )
    model: ModelSpec = _built(ModelSpec, values, where=where)
    return model


def with_adapters(model: ModelSpec, table: Any) -> ModelSpec:
    """Return the model with the adapters of ``[adapters]`` of a job file; None for none."""
    if table is None:
        return model
    return dataclasses.replace(model, adapters=_built(LowRankAdapters, table, where="[adapters]"))


def _built(kind: type, table: Any, *, where: str) -> Any:
    return build_spec(kind, read_fields(table, kind, where=where), where=where)


def load_model(source: str, *, seq_len: int | None = None) -> ModelSpec:
    """Return a model by preset name, or from a Hugging Face ``config.json``.

    Args:
        source: A name of ``named_models()``, a ``config.json`` or the folder that holds one.
        seq_len: Tokens of a sample; None: the model's own.

    Raises:
        DataError: The file is missing or not JSON.
        ConfigurationError: The name is unknown.

    Examples:
        >>> load_model("llama3-8b", seq_len=4096).seq_len
        4096
    """
    path = Path(source)
    if path.suffix != ".json" and not path.is_dir():
        if source not in _models():
            near = difflib.get_close_matches(source, _models(), n=1, cutoff=0.0)[0]
            message = f"model {source!r} is unknown"
            raise ConfigurationError(message, hint=f"did you mean {near!r}? Or give a file")
        model = _models()[source]
        return model if seq_len is None else dataclasses.replace(model, seq_len=seq_len)
    if path.is_dir():
        path = path / "config.json"
    config = read_json(path, what="model configuration")
    if not isinstance(config, dict):
        raise DataError(f"{path} does not hold a JSON object", hint="is it a config.json?")
    try:
        return model_from_hugging_face(config, name=path.parent.name or path.stem, seq_len=seq_len)
    except FivefoldError:
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"{path} has a wrong or missing entry: {error!r}"
        raise DataError(message, hint="is it the config.json of a transformer?") from error
