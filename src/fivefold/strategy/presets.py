"""Known models by name, and models from any Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, DataError, FivefoldError
from fivefold.files import read_json
from fivefold.strategy.model import (
    ConvolutionStage,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
)

_PLAIN: dict[str, Any] = {
    "tied": False, "learned_positions": False, "dropout": False, "biases": False, "gated": True,
}  # fmt: skip


def _gpt(name: str, num_layers: int, hidden: int, num_heads: int) -> ModelSpec:
    return ModelSpec(
        name=name, num_layers=num_layers, hidden=hidden, num_heads=num_heads, seq_len=2048,
        vocab=51200,
    )  # fmt: skip


def _llama(name: str, sizes: tuple[int, int, int, int, int], *, vocab: int, seq: int) -> ModelSpec:
    num_layers, hidden, num_heads, kv_heads, ffn = sizes
    return ModelSpec(
        name=name, num_layers=num_layers, hidden=hidden, num_heads=num_heads,
        num_kv_heads=kv_heads, ffn=ffn, vocab=vocab, seq_len=seq, **_PLAIN,
    )  # fmt: skip


def _vit(name: str, num_layers: int, hidden: int, num_heads: int) -> ModelSpec:
    return ModelSpec(
        name=name, num_layers=num_layers, hidden=hidden, num_heads=num_heads, seq_len=197,
        vocab=1000, tied=False, dropout=False, causal=False, embeds_tokens=False,
    )  # fmt: skip


def _resnet(name: str, blocks: tuple[int, int, int, int]) -> ModelSpec:
    stages = tuple(
        ConvolutionStage(
            blocks=count, width=64 << i, outputs=256 << i, inputs=64 if i == 0 else 128 << i,
            size=56 >> i,
        )
        for i, count in enumerate(blocks)
    )  # fmt: skip
    return ModelSpec(
        name=name, num_layers=sum(blocks), hidden=2048, num_heads=1, seq_len=224 * 224, vocab=1000,
        tied=False, dropout=False, causal=False, embeds_tokens=False, stages=stages,
    )  # fmt: skip


_MODELS = {
    model.name: model
    for model in (
        # GPT-3, arXiv 2005.14165; vocabulary padded as Megatron-LM does.
        _gpt("gpt3-1.3b", 24, 2048, 16),
        _gpt("gpt3-6.7b", 32, 4096, 32),
        _gpt("gpt3-13b", 40, 5120, 40),
        _gpt("gpt3-175b", 96, 12288, 96),
        # Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783.
        _llama("llama2-7b", (32, 4096, 32, 32, 11008), vocab=32000, seq=4096),
        _llama("llama2-13b", (40, 5120, 40, 40, 13824), vocab=32000, seq=4096),
        _llama("llama2-70b", (80, 8192, 64, 8, 28672), vocab=32000, seq=4096),
        _llama("llama3-8b", (32, 4096, 32, 8, 14336), vocab=128256, seq=8192),
        _llama("llama3-70b", (80, 8192, 64, 8, 28672), vocab=128256, seq=8192),
        _llama("llama3-405b", (126, 16384, 128, 8, 53248), vocab=128256, seq=8192),
        # Mixtral, arXiv 2401.04088 and its configuration file.
        ModelSpec(
            name="mixtral-8x7b", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8,
            ffn=14336, vocab=32000, seq_len=4096,
            experts=MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=14336), **_PLAIN,
        ),
        ModelSpec(
            name="mixtral-8x22b", num_layers=56, hidden=6144, num_heads=48, num_kv_heads=8,
            ffn=16384, vocab=32768, seq_len=4096,
            experts=MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=16384), **_PLAIN,
        ),
        # Qwen3, arXiv 2505.09388.
        ModelSpec(
            name="qwen3-30b-a3b", num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4,
            head_dim=128, ffn=6144, vocab=151936, seq_len=4096,
            experts=MixtureOfExperts(num_experts=128, top_k=8, expert_ffn=768), **_PLAIN,
        ),
        ModelSpec(
            name="qwen3-235b-a22b", num_layers=94, hidden=4096, num_heads=64, num_kv_heads=4,
            head_dim=128, ffn=12288, vocab=151936, seq_len=4096,
            experts=MixtureOfExperts(num_experts=128, top_k=8, expert_ffn=1536), **_PLAIN,
        ),
        # DeepSeek-V3, arXiv 2412.19437, section 4.2.
        ModelSpec(
            name="deepseek-v3", num_layers=61, hidden=7168, num_heads=128, head_dim=128, ffn=18432,
            vocab=129280, seq_len=4096,
            experts=MixtureOfExperts(
                num_experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3,
                groups=8, top_groups=4,
            ),
            latent=LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128), **_PLAIN,
        ),
        # GPT-OSS, arXiv 2508.10925: every second layer has a window of 128 tokens.
        ModelSpec(
            name="gpt-oss-120b", num_layers=36, hidden=2880, num_heads=64, num_kv_heads=8,
            head_dim=64, ffn=2880, vocab=201088, seq_len=4096, window=128, windowed_layers=18,
            clamped=True,
            experts=MixtureOfExperts(num_experts=128, top_k=4, expert_ffn=2880), **_PLAIN,
        ),
        # Kimi K2, arXiv 2507.20534.
        ModelSpec(
            name="kimi-k2", num_layers=61, hidden=7168, num_heads=64, head_dim=128, ffn=18432,
            vocab=163840, seq_len=4096,
            experts=MixtureOfExperts(
                num_experts=384, top_k=8, expert_ffn=2048, shared_ffn=2048, dense_layers=1
            ),
            latent=LatentAttention(q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128), **_PLAIN,
        ),
        # Vision transformers, arXiv 2010.11929; residual networks, arXiv 1512.03385.
        _vit("vit-b16", 12, 768, 12),
        _vit("vit-l16", 24, 1024, 16),
        _vit("vit-h14", 32, 1280, 16),
        _resnet("resnet50", (3, 4, 6, 3)),
        _resnet("resnet101", (3, 4, 23, 3)),
        _resnet("resnet152", (3, 8, 36, 3)),
    )
}  # fmt: skip


def named_models() -> tuple[str, ...]:
    """Names of the known models.

    Examples:
        >>> "llama3-405b" in named_models()
        True
    """
    return tuple(_MODELS)


def model_from_hugging_face(
    config: Mapping[str, Any], *, name: str = "model", seq_len: int | None = None
) -> ModelSpec:
    """Read the keys of a Hugging Face ``config.json``; the library itself is not needed."""
    config = {**config.get("text_config", {}), **{k: v for k, v in config.items() if v is not None}}
    gpt = "n_embd" in config or config.get("model_type") in {"gpt2", "opt", "gpt_neox", "bloom"}
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    heads = _size(config, "num_attention_heads", "n_head")
    kind = str(config.get("hidden_act", config.get("activation_function", "silu")))
    vision = "patch_size" in config
    length = seq_len or _length(config, vision=vision)
    ffn = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim")
    head_dim = config.get("qk_nope_head_dim") or config.get("head_dim")
    return ModelSpec(
        name=name, num_layers=_size(config, "num_hidden_layers", "n_layer"), hidden=hidden,
        num_heads=heads, seq_len=length, vocab=int(config.get("vocab_size", 1000)),
        ffn=None if ffn is None else int(ffn),
        num_kv_heads=None if _latent(config) else config.get("num_key_value_heads"),
        head_dim=None if head_dim is None else int(head_dim),
        clamped=bool(config.get("swiglu_limit")),
        gated=not gpt and not vision and kind in {"silu", "swish", "swiglu"},
        tied=bool(config.get("tie_word_embeddings", gpt)), learned_positions=gpt,
        dropout=_dropout(config, gpt=gpt), biases=gpt or vision, causal=not vision,
        embeds_tokens=not vision, experts=_experts(config), latent=_latent(config),
        **_windows(config, vision=vision),
    )  # fmt: skip


def _windows(config: Mapping[str, Any], *, vision: bool) -> dict[str, Any]:
    window = (
        0
        if vision or config.get("use_sliding_window") is False
        else (config.get("sliding_window") or 0)
    )
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
    count = next(
        (
            config[n]
            for n in ("num_local_experts", "n_routed_experts", "num_experts")
            if n in config
        ),
        None,
    )
    if not count:
        return None
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = int(config.get("n_shared_experts", 0)) * int(inner)
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
        if source not in _MODELS:
            near = difflib.get_close_matches(source, _MODELS, n=1, cutoff=0.0)[0]
            message = f"model {source!r} is unknown"
            raise ConfigurationError(message, hint=f"did you mean {near!r}? Or give a file")
        model = _MODELS[source]
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
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        message = f"{path} has a wrong or missing entry: {error!r}"
        raise DataError(message, hint="is it the config.json of a transformer?") from error
