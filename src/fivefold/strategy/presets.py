"""Known models by name (``models.toml``), and models from any Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, DataError, FivefoldError
from fivefold.files import read_json
from fivefold.strategy._hybrid import hybrid_layers
from fivefold.strategy.cluster import check_keys, check_types, require_fields
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import (
    ConvolutionStage,
    LatentAttention,
    LowRankAdapters,
    MambaMixer,
    MixtureOfExperts,
)

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
    """Names of the known models.

    Examples:
        >>> "llama3-405b" in named_models()
        True
    """
    return tuple(_models())


def model_from_table(table: Any, *, where: str) -> ModelSpec:
    """Return a model from a table of its sizes, as ``[model]`` of a job file has it.

    Raises:
        ConfigurationError: A key is missing, unknown or not allowed.
    """
    check_keys(table, {field.name for field in dataclasses.fields(ModelSpec)}, where=where)
    values = dict(table)
    for name, kind in _NESTED.items():
        if name in values:
            values[name] = _build(kind, values[name], where=f"[model.{name}]")
    values["stages"] = tuple(
        _build(ConvolutionStage, stage, where="[[model.stages]]")
        for stage in values.get("stages", ())
    )
    model: ModelSpec = _build(ModelSpec, values, where=where)
    return model


def with_adapters(model: ModelSpec, table: Any) -> ModelSpec:
    """Return the model with the adapters of a table, ``[adapters]`` of a job file; None for none.

    Raises:
        ConfigurationError: A key is missing, unknown or not allowed.
    """
    if table is None:
        return model
    adapters = _build(LowRankAdapters, table, where="[adapters]")
    return dataclasses.replace(model, adapters=adapters)


def _build(kind: type, values: Any, *, where: str) -> Any:
    check_keys(values, {field.name for field in dataclasses.fields(kind)}, where=where)
    check_types(values, kind, where=where)
    require_fields(kind, values, where=where)
    return kind(**values)


def model_from_hugging_face(
    config: Mapping[str, Any], *, name: str = "model", seq_len: int | None = None
) -> ModelSpec:
    """Read the keys of a Hugging Face ``config.json``; the library itself is not needed."""
    config = {**config.get("text_config", {}), **{k: v for k, v in config.items() if v is not None}}
    gpt = "n_embd" in config or config.get("model_type") in {"gpt2", "opt", "gpt_neox", "bloom"}
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    layers = hybrid_layers(config)
    names = ("num_attention_heads", "n_head", *(("num_heads",) if layers else ()))
    heads = 1 if set(layers.get("pattern", "")) == {"M"} else _size(config, *names)
    kind = str(config.get("mlp_hidden_act") or config.get("hidden_act")
               or config.get("activation_function") or "silu")  # fmt: skip
    vision = "patch_size" in config
    length = seq_len or _length(config, vision=vision)
    ffn = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim")
    if not config.get("num_local_experts", 1):  # Granite's dense hybrids
        ffn = config.get("shared_intermediate_size") or ffn
    head_dim = config.get("qk_nope_head_dim") or config.get("head_dim")
    experts = _experts(config) if "E" in layers.get("pattern", "E") else None
    if layers and experts is not None:  # the pattern says where experts are
        experts = dataclasses.replace(experts, dense_layers=0, every=1)
    sizes: dict[str, Any] = {
        "hidden": hidden, "num_heads": heads, "seq_len": length,
        "vocab": int(config.get("vocab_size", 1000)), "ffn": None if ffn is None else int(ffn),
        "num_kv_heads": None if _latent(config) or heads == 1
        else config.get("num_key_value_heads"),
        "head_dim": None if head_dim is None or heads == 1 else int(head_dim),
        "clamped": bool(config.get("swiglu_limit")),
        "gated": not gpt and not vision and kind in {"silu", "swish", "swiglu"},
        "tied": bool(config.get("tie_word_embeddings", gpt)), "learned_positions": gpt,
        "dropout": _dropout(config, gpt=gpt), "biases": gpt or vision, "causal": not vision,
        "embeds_tokens": not vision, "experts": experts, "latent": _latent(config),
        **_windows(config, vision=vision), **layers,
    }  # fmt: skip
    if "num_layers" not in sizes:
        sizes["num_layers"] = _size(config, "num_hidden_layers", "n_layer")
    return ModelSpec(name=name, **sizes)


def _windows(config: Mapping[str, Any], *, vision: bool) -> dict[str, Any]:
    without = vision or config.get("use_sliding_window") is False
    window = 0 if without else config.get("sliding_window") or 0
    kinds = config.get("layer_types")
    if not window or kinds is None:
        return {"window": int(window)}
    count = sum(kind == "sliding_attention" for kind in kinds)
    return {"window": int(window), "windowed_layers": count}


def _size(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if name in config:
            return int(config[name])
    message = f"the model's configuration has none of {', '.join(names)}"
    raise DataError(message, hint="is it the config.json of a transformer?")


def _length(config: Mapping[str, Any], *, vision: bool) -> int:
    if vision:
        return (int(config.get("image_size", 224)) // int(config["patch_size"])) ** 2 + 1
    return _size(config, "max_position_embeddings", "n_positions", "n_ctx")


def _dropout(config: Mapping[str, Any], *, gpt: bool) -> bool:
    names = ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout")
    return any(float(config.get(name, 0.1 if gpt and name == names[0] else 0.0)) > 0
               for name in names)  # fmt: skip


def _experts(config: Mapping[str, Any]) -> MixtureOfExperts | None:
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    count = next((config[name] for name in names if name in config), None)
    if not count:
        return None
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = int(config.get("n_shared_experts", 0)) * int(inner)
    for key in ("shared_intermediate_size", "moe_shared_expert_intermediate_size"):
        shared = int(config.get(key) or shared)
    return MixtureOfExperts(
        num_experts=int(count), top_k=_size(config, "num_experts_per_tok", "moe_topk"),
        expert_ffn=int(inner),
        shared_ffn=int(config.get("shared_expert_intermediate_size", shared)),
        dense_layers=int(config.get("first_k_dense_replace", 0)),
        groups=int(config.get("n_group") or 1), top_groups=config.get("topk_group"),
        every=int(config.get("decoder_sparse_step", config.get("moe_layer_freq", 1)) or 1),
    )  # fmt: skip


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if "kv_lora_rank" not in config:
        return None
    return LatentAttention(
        q_rank=int(config.get("q_lora_rank") or 0), kv_rank=int(config["kv_lora_rank"]),
        rope_dim=int(config["qk_rope_head_dim"]), value_dim=int(config["v_head_dim"]),
    )  # fmt: skip


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
        message = f"{path} does not hold a JSON object"
        raise DataError(message, hint="is it a config.json?")
    try:
        return model_from_hugging_face(config, name=path.parent.name or path.stem, seq_len=seq_len)
    except FivefoldError:
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"{path} has a wrong or missing entry: {error!r}"
        raise DataError(message, hint="is it the config.json of a transformer?") from error
