"""Layers of Mamba in a Hugging Face ``config.json``: which layers have them, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.errors import DataError, UnsupportedError
from fivefold.strategy.parts import MambaMixer

_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-",
    "moe": "E",
}  # fmt: skip
_PLAIN = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
HYBRIDS = ("nemotron_h", "bamba", "granitemoehybrid", "jamba", "mamba", "falcon_mamba", "mamba2")
# Keys of layers that are neither attention nor one of these families' Mamba.
_OTHERS = ("mamba_", "ssm_", "linear_num_", "linear_key_", "rwkv", "conv_L_cache")


def hybrid_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``ModelSpec`` that say which layers are of Mamba; none where none is.

    Raises:
        UnsupportedError: The model has layers that are neither attention nor Mamba in turn.
        DataError: The file says nothing of a size that is needed.
    """
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
