"""Which layers of a model have which mixer and which feed-forward part, as each family's code says.

Each rule is named in ``families.toml`` (``mixers``, ``feed_forwards``) and returns a word a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold.errors import DataError, UnsupportedError
from fivefold.strategy._families import Keys

MIXERS = {
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding",
    "chunked_attention": "chunked", "linear_attention": "linear", "mamba": "linear",
    "indexed_attention": "indexed", "minimax_m3_sparse": "indexed", "conv": "conv",
    "recurrent": "linear", "hybrid": "hybrid",
    "compressed_sparse_attention": "compressed_sparse",
    "heavily_compressed_attention": "heavily_compressed",
}  # fmt: skip
"""Words of ``layer_types``, and ours."""
_FEED_FORWARDS = {"dense": "dense", "sparse": "experts", "moe": "experts", "hash_moe": "experts"}

Rule = Callable[[Keys, int], list[str]]


def mixers(keys: Keys, count: int) -> list[str]:
    """Return the mixer of each of ``count`` layers: what the file lists, else the family's rule."""
    name = "layer_types" if "layer_types" in keys.config else "layers_block_type"
    listed = keys.config.get(name) if keys.of("lists_layers", True) else None
    if listed is not None:
        keys.get(name)
    if listed is None:
        return _MIXER_RULES[keys.table.get("mixers", "full")](keys, count)
    found = [_word(MIXERS, kind, keys, name) for kind in keys.listed(name, listed, count)]
    if keys.family.startswith("gemma4") and found:
        found[-1] = "full"  # whose code forces it
    return found


def feed_forwards(keys: Keys, count: int) -> list[str]:
    """Return "dense" or "experts" for each of ``count`` layers."""
    experts = keys.table.get("experts")
    if not experts or "beside" in experts:
        return ["dense"] * count
    listed = keys.get("mlp_layer_types") if keys.of("lists_feed_forwards", False) else None
    if listed is None:
        return _FEED_FORWARD_RULES[keys.table.get("feed_forwards", "experts")](keys, count)
    name = "mlp_layer_types"
    return [_word(_FEED_FORWARDS, kind, keys, name) for kind in keys.listed(name, listed, count)]


def _word(known: dict[Any, str], kind: Any, keys: Keys, name: str) -> str:
    if kind not in known:
        message = f"a model of type {keys.family!r} has layers that have no price: {kind!r}"
        raise UnsupportedError(message, hint=f"{name} may have {', '.join(known)}")
    return known[kind]


def _every(keys: Keys, count: int) -> list[str]:
    """Every so-manyth layer looks at the whole sequence; 0: all do."""
    step = keys.size_or("whole_every", 0)
    return ["sliding" if step == 0 or (n + 1) % step else "full" for n in range(count)]


def _exaone(keys: Keys, count: int) -> list[str]:
    if not keys.get("sliding_window"):
        return ["full"] * count
    return _every(keys, count)


def _windowed(keys: Keys, count: int) -> list[str]:
    return ["sliding" if keys.of("window") else "full"] * count


def _qwen(keys: Keys, count: int) -> list[str]:
    """Layers from ``max_window_layers`` on have the window."""
    used, first = keys.get("use_sliding_window"), keys.count("max_window_layers", default=0)
    if not used or not keys.of("window"):
        return ["full"] * count
    return ["sliding" if n >= first else "full" for n in range(count)]


def _qwen3_moe(keys: Keys, count: int) -> list[str]:
    use = keys.get("use_sliding_window") and keys.of("window")
    return ["sliding" if use else "full"] * count


def _bamba(keys: Keys, count: int) -> list[str]:
    attends = keys.get("attn_layer_indices") or ()
    return ["full" if n in attends else "linear" for n in range(count)]


def _jamba_mixers(keys: Keys, count: int) -> list[str]:
    step, first = keys.count("attn_layer_period", least=1), keys.count("attn_layer_offset")
    return ["full" if n % step == first else "linear" for n in range(count)]


def _qwen2_moe(keys: Keys, count: int) -> list[str]:
    used, first = keys.get("use_sliding_window"), keys.count("max_window_layers", default=0)
    if not used:
        return ["full"] * count
    return ["full" if n % 2 or n >= first else "sliding" for n in range(count)]


def _gpt_neo(keys: Keys, count: int) -> list[str]:
    listed = keys.get("attention_layers")
    if listed is None:
        turns = keys.get("attention_types", default=[[["global"], count]])
        listed = [kind for kinds, times in turns for _ in range(times) for kind in kinds]
    if len(listed) != count:
        message = f"attention_types names {len(listed)} of {count} layers"
        raise DataError(message, hint="one word for each of num_layers")
    return ["sliding" if kind == "local" else "full" for kind in listed]


def _deepseek_v4(keys: Keys, count: int) -> list[str]:
    """Ratios of compression by layer: 0 or 1 for a window alone."""
    ratios = keys.get("compress_ratios")
    if ratios is not None:
        known = {0: "sliding", 1: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
        listed = keys.listed("compress_ratios", ratios, count)
        return [_word(known, ratio, keys, "compress_ratios") for ratio in listed]
    words = ("heavily_compressed", "compressed_sparse")
    return [words[0] if n < 2 else words[n % 2] for n in range(count)]


def _quarter(keys: Keys, count: int) -> list[str]:
    del keys
    return ["sliding" if n % 4 else "full" for n in range(count)]


def _flint(keys: Keys, count: int) -> list[str]:
    del keys
    return ["full" if n < 2 or n % 4 == 1 or n == count - 1 else "sliding" for n in range(count)]


def _cohere_moe(keys: Keys, count: int) -> list[str]:
    dense = min(keys.count("first_k_dense_replace", default=0), count)
    first = keys.count("prefix_dense_sliding_window_pattern", least=1)
    step = keys.count("sliding_window_pattern", least=1)
    steps = [(n, first) for n in range(dense)] + [(n, step) for n in range(count - dense)]
    return ["sliding" if (n + 1) % every else "full" for n, every in steps]


def _without_rope(keys: Keys, count: int) -> list[str]:
    """Layers with rotary positions look at their own chunk only (Llama 4)."""
    return ["chunked" if one else "full" for one in _turned(keys, count)]


def _smollm(keys: Keys, count: int) -> list[str]:
    if not keys.get("use_sliding_window") or not keys.of("window"):
        return ["full"] * count
    return ["full" if one else "sliding" for one in _turned(keys, count)]


def _turned(keys: Keys, count: int) -> list[Any]:
    """Return which layers have rotary positions: all but every so-manyth."""
    if listed := keys.get("no_rope_layers"):
        return keys.listed("no_rope_layers", listed, count)
    step = keys.count("no_rope_layer_interval", default=4, least=1)
    return [(n + 1) % step for n in range(count)]


def _mimo(keys: Keys, count: int) -> list[str]:
    listed = keys.get("hybrid_layer_pattern")
    if listed is not None:
        listed = keys.listed("hybrid_layer_pattern", listed, count)
        return ["sliding" if one else "full" for one in listed]
    return ["full" if n == 0 or not (n + 1) % 6 else "sliding" for n in range(count)]


def _linear_every(keys: Keys, count: int) -> list[str]:
    """Every so-manyth layer has attention, the others a recurrence."""
    step = keys.size_or("whole_every", 4, least=1)
    return ["linear" if (n + 1) % step else "full" for n in range(count)]


def _olmo_hybrid(keys: Keys, count: int) -> list[str]:
    found = _linear_every(keys, count)
    return found if "full" in found else [*found[:-1], "full"]


def _kimi_linear(keys: Keys, count: int) -> list[str]:
    whole = keys.get("linear_attn_config.full_attn_layers")
    linear = keys.get("linear_attn_config.kda_layers")
    if whole is not None and linear is not None:
        if sorted([*whole, *linear]) != list(range(1, count + 1)):
            message = f"full_attn_layers and kda_layers do not name each of {count} layers once"
            raise DataError(message, hint="layers are counted from 1 in linear_attn_config")
        return ["full" if n + 1 in whole else "linear" for n in range(count)]
    return ["full" if n and n % 4 == 0 else "linear" for n in range(count)]


def _minimax(keys: Keys, count: int) -> list[str]:
    listed = keys.get("attn_type_list")
    if listed is not None:
        listed = keys.listed("attn_type_list", listed, count)
        return ["full" if one else "linear" for one in listed]
    return ["linear" if n % 2 else "full" for n in range(count)]


def _lfm2(keys: Keys, count: int) -> list[str]:
    whole = keys.get("full_attn_idxs")
    return ["full" if whole is None or n in whole else "conv" for n in range(count)]


def _lfm3(keys: Keys, count: int) -> list[str]:
    del keys
    return [
        "full" if n % 4 == 2 else "sliding" if n % 4 == 0 and n else "conv" for n in range(count)
    ]


def _sparse_frequency(keys: Keys, count: int) -> list[str]:
    """A list of zeros and ones says which layers choose blocks (MiniMax-M3)."""
    name = "sparse_attention_config.sparse_attention_freq"
    listed = keys.get(name)
    if keys.get("sparse_attention_config.use_sparse_attention") and listed is None:
        key, why = "sparse_attention_config", "does not say which layers are sparse"
        raise keys.refuse(key, why)
    listed = [0] * count if listed is None else keys.listed(name, listed, count)
    return ["indexed" if one else "full" for one in listed]


def _recurrent(keys: Keys, count: int) -> list[str]:
    kinds = keys.get("block_types")
    if not kinds:
        message = "block_types of the configuration is empty"
        raise DataError(message, hint="name a kind of layer")
    return [_word(MIXERS, kinds[n % len(kinds)], keys, "block_types") for n in range(count)]


def _listed_only(keys: Keys, count: int) -> list[str]:
    message = f"the configuration of a {keys.family} does not say layer_types of {count} layers"
    raise DataError(message, hint="is it the config.json of the whole model?")


def _always(word: str) -> Rule:
    """Return the rule that all layers are of a kind."""
    return lambda _, count: [word] * count


_MIXER_RULES: dict[str, Rule] = {
    "full": _always("full"),
    "linear": _always("linear"),
    "indexed": _always("indexed"),
    "hybrid": _always("hybrid"),
    "every": _every, "exaone": _exaone, "windowed": _windowed, "qwen": _qwen,
    "qwen2_moe": _qwen2_moe, "quarter": _quarter, "flint": _flint, "cohere_moe": _cohere_moe,
    "without_rope": _without_rope, "smollm": _smollm, "mimo": _mimo,
    "linear_every": _linear_every, "olmo_hybrid": _olmo_hybrid, "kimi_linear": _kimi_linear,
    "minimax": _minimax, "lfm2": _lfm2, "lfm3": _lfm3, "sparse_frequency": _sparse_frequency,
    "listed_only": _listed_only,
    "gpt_neo": _gpt_neo, "deepseek_v4": _deepseek_v4,
    "recurrent": _recurrent, "qwen3_moe": _qwen3_moe, "bamba": _bamba, "jamba": _jamba_mixers,
}  # fmt: skip


def _first_dense(keys: Keys, count: int) -> list[str]:
    """Leading layers are dense."""
    first = keys.size_or("experts.dense", 0)
    return ["dense" if n < first else "experts" for n in range(count)]


def _frequency(keys: Keys, count: int) -> list[str]:
    """Leading layers are dense, and of the others those that no step meets, or a list says."""
    names = ("moe_layer_freq", "moe_layer_frequency")
    said = keys.get(*names, default=1)
    if isinstance(said, list):
        return ["experts" if one else "dense" for one in keys.listed(names[0], said, count)]
    step = keys.count(*names, default=1, least=1)
    first = keys.size_or("experts.dense", 0)
    return ["experts" if n >= first and n % step == 0 else "dense" for n in range(count)]


def _sparse_step(keys: Keys, count: int) -> list[str]:
    dense, step = (
        keys.get("mlp_only_layers") or (),
        keys.count("decoder_sparse_step", default=1, least=1),
    )
    some = keys.size("experts.count", least=0) > 0
    return [
        "experts" if some and n not in dense and (n + 1) % step == 0 else "dense"
        for n in range(count)
    ]


def _ernie(keys: Keys, count: int) -> list[str]:
    step = keys.count("moe_layer_interval", least=1)
    first, last = keys.count("moe_layer_start_index"), keys.count("moe_layer_end_index", least=-1)
    last = count - 1 if last == -1 else last
    return [
        "experts" if (n + 1) % step == 0 and first <= n <= last else "dense" for n in range(count)
    ]


def _llama4(keys: Keys, count: int) -> list[str]:
    step, listed = keys.count("interleave_moe_layer_step", least=1), keys.get("moe_layers")
    chosen = set(range(step - 1, count, step) if listed is None else listed)
    return ["experts" if n in chosen else "dense" for n in range(count)]


def _jamba(keys: Keys, count: int) -> list[str]:
    step, first = keys.count("expert_layer_period", least=1), keys.count("expert_layer_offset")
    some = keys.size("experts.count", least=0) > 1
    return ["experts" if some and n % step == first else "dense" for n in range(count)]


def _granite(keys: Keys, count: int) -> list[str]:
    return ["experts" if keys.get("num_local_experts") else "dense"] * count


def _listed(keys: Keys, count: int) -> list[str]:
    """A comma-separated list, or whole numbers (Step)."""
    said = keys.get("moe_layers_enum")
    chosen = {int(n) for n in (said.split(",") if isinstance(said, str) else said or range(count))}
    return ["experts" if n in chosen else "dense" for n in range(count)]


_FEED_FORWARD_RULES: dict[str, Rule] = {
    "experts": _always("experts"),
    "first_dense": _first_dense, "frequency": _frequency, "sparse_step": _sparse_step,
    "ernie": _ernie, "llama4": _llama4, "jamba": _jamba, "granite": _granite, "listed": _listed,
}  # fmt: skip
