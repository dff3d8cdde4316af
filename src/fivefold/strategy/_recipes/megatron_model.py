"""The model of a recipe in the words of Megatron-LM, from its sizes."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

from fivefold.strategy._recipes.models import named_model
from fivefold.strategy._recipes.told import ANY, Told, UnknownError
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import LatentAttention, MambaMixer, MixtureOfExperts

# What makes layers that have no price, and what it is.
_NO_PRICE = {
    "heterogeneous_layers_config_path": "layers that a file of their own describes",
    "heterogeneous_layers_config_encoded_json": "layers that a text of their own describes",
    "decoder_num_layers": "an encoder beside the decoder",
    "linear_attention_freq": "layers of linear attention",
    "linear_attention_type": "layers of linear attention",
    "moe_latent_size": "experts in a space of their own",
    "export_kd_teacher_load": "a teacher beside the model",
    "kd_teacher_load": "a teacher beside the model",
    "num_moe_experts_per_layer": "another number of experts in each layer",
    "flextron": "a model whose sizes change as it trains",
    "retro_add_retriever": "a retriever",
    "patch_dim": "images beside text",
    "img_h": "images beside text",
    "language_model_type": "images beside text",
    "model_provider": "a model that another module builds",
    "block_function": "a model that another module builds",
}
_ATTENTION_VARIANTS = {"none", "dot_product", ""}
_RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
_LOG = logging.getLogger(__name__)
_LEAST_VOCABULARY, _LARGEST_VOCABULARY = 8192, 262_144
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_MAMBA = ("mamba_head_dim", "mamba_state_dim", "mamba_num_heads", "mamba_num_groups")
_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", *_LATENT,
    *_MAMBA, "hybrid_layer_pattern", "hybrid_override_pattern", "hybrid_attention_ratio",
    "hybrid_mlp_ratio", "spec", "mtp_num_layers", "moe_layer_freq", "group_query_attention",
    "moe_shared_expert_intermediate_size", "multi_latent_attention", "swiglu",
)  # fmt: skip
_GATED = {"swiglu", "fast-swiglu", "geglu", "fast-geglu", "reglu", "fast-reglu"}
_PLAIN = {"gelu", "openai-gelu", "quick_gelu", "approx-gelu", "squared-relu", "squared_relu",
          "relu", "silu"}  # fmt: skip
_LEARNED = {"learned_absolute", "learned_parameters"}
_TURNED = {"rope", "mrope", "yarn", "relative", "alibi", "none", "no_pos_emb"}


def sized_model(told: Told, degrees: dict[str, int]) -> ModelSpec:
    """Return the model of the recipe's own sizes; the given one where they stand elsewhere."""
    if told.model is None:
        return _own_model(told, degrees)
    told_here = any(told.gives(name) for name in ("num_layers", *_PATTERNS))
    if told_here and told.gives("hidden_size"):
        try:
            return _own_model(told, degrees)
        except UnknownError:  # such as a layer that has no price, where a config.json may have
            _LOG.debug("%s: the given model is used", told.path)
    given = told.model
    for name, size in {"num_layers": given.num_layers, "hidden_size": given.hidden,
                       "num_attention_heads": given.num_heads}.items():  # fmt: skip
        if told.gives(name) and told.whole(name) != size:
            message = f"{name} is {told.whole(name)} in the recipe, {size} in the given model"
            raise UnknownError(message, hint="give the config.json of the model that it trains")
    length = told.whole("seq_length", "encoder_seq_length", default=given.seq_len)
    told.assume("model", given.name, "as given: the recipe does not say its sizes")
    told.adopt(told.model_reading, of="the model")
    told.idle("the model is given beside the recipe", *_SIZES)
    return dataclasses.replace(given, seq_len=length)


def _own_model(told: Told, degrees: dict[str, int]) -> ModelSpec:
    _refuse_unpriced(told)
    hidden = told.whole("hidden_size")
    activation = told.word("activation", "activation_func", among=_GATED | _PLAIN)
    gated = told.on("swiglu", "geglu", "quick_geglu", "gated_linear_unit")
    gated = gated or activation in _GATED
    ffn = 4 * hidden if not gated else int(4 * hidden * 2 / 3 / 64) * 64
    inner = told.whole("ffn_hidden_size", default=ffn)
    layers, pattern = _layers(told)
    heads = told.whole("num_attention_heads", default=1 if pattern and "*" not in pattern else None)
    width = told.whole("kv_channels", default=0)
    told.refuse_unless(
        heads % degrees["tensor"] == 0,
        f"tensor={degrees['tensor']} does not divide num_attention_heads={heads}",
        "each rank has whole heads",
    )
    told.refuse_unless(
        bool(width) or bool(pattern) or hidden % heads == 0,
        f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}",
        "give kv_channels, the width of a head",
    )
    positions = told.word("position_embedding_type", among=_LEARNED | _TURNED,
                          default="learned_absolute")  # fmt: skip
    rotary = told.on("use_rotary_position_embeddings", "no_position_embedding")
    rotary = rotary or told.off("add_position_embedding")
    biased = not told.on("disable_bias_linear") and not told.off("bias")
    biased = biased and not told.off("add_bias_linear")
    tied = not told.on("untie_embeddings_and_output_weights")
    tied = tied and not told.off("share_embeddings_and_output_weights")
    # On the command line the number of groups counts beside its flag alone.
    groups = told.whole("num_query_groups", default=heads)
    said = told.on("group_query_attention") or "launch.yaml" in told.settings
    latent = _latent(told)
    if "M" not in pattern:
        told.idle("no layer is a Mamba mixer", *_MAMBA)
    window = _window(told, layers)
    return ModelSpec(
        name=told.path.stem, num_layers=layers, hidden=hidden, num_heads=heads,
        vocab=_vocabulary(told, degrees["tensor"]), ffn=inner, gated=gated,
        seq_len=_length(told),
        num_kv_heads=groups if said and latent is None else None,
        head_dim=told.whole("qk_head_dim", default=128) if latent
        else width or None,
        tied=tied, learned_positions=positions in _LEARNED and not rotary,
        biases=biased, dropout=told.share("hidden_dropout", default=0.1) > 0,
        experts=_experts(told, layers, inner, pattern), latent=latent, pattern=pattern,
        mamba=_mamba(told, hidden) if "M" in pattern else None,
        predicted_tokens=told.whole("mtp_num_layers", default=0), **window,
    )  # fmt: skip


def _length(told: Told) -> int:
    if samples := told.whole("max_seq_length", default=0):  # of NeMo's fine-tuning data
        told.idle("samples of the data are no longer", "seq_length", "encoder_seq_length")
        return samples
    said = told.whole("seq_length", "encoder_seq_length", "data.seq_length")
    if (samples := told.whole("data.seq_length", default=said)) != said:
        why = f"samples of the data have {samples}, and the model takes {said}"
        told.assume_model("sequence length", samples, why, least={"seq_len": min(said, samples)},
                          most={"seq_len": max(said, samples)})  # fmt: skip
    return samples


def _refuse_unpriced(told: Told) -> None:
    for name, what in _NO_PRICE.items():
        if name not in told.settings or told.settings[name].inherited:
            continue  # a base lists every default
        value = told.text(name)
        if value not in {"", "none", "null", "false", "0"}:
            message = f"{name} {value} is not read: {what} has no price here"
            raise UnknownError(message, hint="give its config.json with --model, where it has one")
    variant = told.text("experimental_attention_variant")
    if variant not in _ATTENTION_VARIANTS:
        message = f"experimental_attention_variant {variant} is not read: it has no price here"
        raise UnknownError(message, hint="plan the model from its config.json with --model")
    if told.on("use_checkpoint_args") and told.get("num_layers") is None:
        message = "the model's sizes stand in a checkpoint (use_checkpoint_args)"
        raise UnknownError(message, hint="add num_layers and the like, or --model config.json")


def _layers(told: Told) -> tuple[int, str]:
    """Return the number of layers and, of hybrid models, the pattern."""
    pattern = str(told.get(*_PATTERNS, default=""))
    if not pattern:
        spec = str(told.get("spec", default=""))
        ratios = [told.share(name, default=0.0) > 0 for name in _RATIOS]
        module = f"{told.text('launch.module')} {spec}"
        layers = told.whole("num_layers", default=0)
        own = re.sub(r"[\w.]*mamba_layer_specs|mamba_stack_spec|[\[\]',\s]", "", spec)
        hybrid = re.search("mamba|hybrid", told.text("launch.module"))
        if layers and not own and any(ratios) and hybrid:
            return layers, _spread(layers, *(told.share(name, default=0.0) for name in _RATIOS))
        if told.on("is_hybrid_model") or any(ratios) or re.search("mamba|hybrid", module):
            message = "a hybrid model whose pattern of layers is not said has no price here"
            raise UnknownError(message, hint="add hybrid_layer_pattern, such as M-M*-")
        if spec:
            told.unpriced("spec", "layers of a module of its own; priced as usual", memory=ANY)
        return told.whole("num_layers", "encoder_num_layers"), ""
    main, *heads = pattern.replace("|", "").split("/")
    if heads or set(main) - set("M*-E"):
        message = f"hybrid_layer_pattern {pattern!r} has layers that have no price here"
        raise UnknownError(message, hint="M, *, - and E have one, without prediction heads")
    told.get("num_layers", "spec")
    told.idle("the pattern says which layers there are", "spec", "hybrid_attention_ratio",
              "hybrid_mlp_ratio", "is_hybrid_model")  # fmt: skip
    return len(main), main


def _spread(layers: int, attention: float, mlp: float) -> str:
    """Return Megatron-LM's pattern of a model of which only the shares of layers are said.

    Attention is spread evenly between layers of Mamba, then feed-forward layers between the rest.
    """
    pattern = ["M"] * layers
    for letter, share in (("*", attention), ("-", mlp)):
        count, free = round(layers * share), [i for i in range(layers) if pattern[i] == "M"]
        if not count:
            continue
        gap = (len(free) - count) / (count + (letter == "*"))
        left = gap
        for place in free:
            if left < 0.5:  # to the nearest layer
                pattern[place] = letter
                left += gap
            else:
                left -= 1
    return "".join(pattern)


def _mamba(told: Told, hidden: int) -> MambaMixer:
    width = told.whole("mamba_head_dim", default=64)
    return MambaMixer(
        state=told.whole("mamba_state_dim", default=128), head_dim=width,
        heads=told.whole("mamba_num_heads", default=2 * hidden // width),
        groups=told.whole("mamba_num_groups", default=8),
    )  # fmt: skip


def _latent(told: Told) -> LatentAttention | None:
    if not told.on("multi_latent_attention"):
        told.idle("attention is not latent", *_LATENT)
        return None
    return LatentAttention(
        q_rank=told.whole("q_lora_rank", default=0), kv_rank=told.whole("kv_lora_rank", default=32),
        rope_dim=told.whole("qk_pos_emb_head_dim", default=64),
        value_dim=told.whole("v_head_dim", default=128),
    )  # fmt: skip


def _window(told: Told, layers: int) -> dict[str, Any]:
    word = told.text("window_size")
    found = re.findall(r"-?\d+", word)
    if re.fullmatch(r"(none)?|[\[(]?(-1|\d+)(\s*,?\s*(-1|\d+))?[\])]?", word) is None:
        message = f"window_size is {word!r}, which is not read"
        raise UnknownError(message, hint="two numbers of tokens, such as 128,0")
    if not found or int(found[0]) in {-1, 0}:
        return {}
    skip = told.text("window_attn_skip_freq")
    if not skip.isdecimal():
        if skip:
            told.unpriced("window_attn_skip_freq", "all layers are priced as windowed")
        return {"window": int(found[0])}
    return {"window": int(found[0]), "windowed_layers": layers - layers // max(int(skip), 1)}


def _experts(told: Told, layers: int, inner: int, pattern: str) -> MixtureOfExperts | None:
    experts = told.whole("num_experts", "num_moe_experts", default=0)
    if not experts or (pattern and "E" not in pattern):
        told.idle("the model has no experts", "moe_layer_freq", "moe_router_topk",
                  "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
                  "moe_router_num_groups", "moe_router_group_topk",
                  "expert_tensor_parallel_size", "moe_shared_expert_overlap",
                  "overlap_moe_expert_parallel_comm")  # fmt: skip
        return None
    dense, every = (0, 1) if pattern else _expert_layers(told, layers)
    groups = told.whole("moe_router_num_groups", default=1)
    return MixtureOfExperts(
        num_experts=experts, top_k=told.whole("moe_router_topk", default=2),
        expert_ffn=told.whole("moe_ffn_hidden_size", default=inner),
        shared_ffn=told.whole("moe_shared_expert_intermediate_size", default=0),
        dense_layers=dense, every=every, groups=groups,
        top_groups=told.whole("moe_router_group_topk", default=0) or None if groups > 1 else None,
    )  # fmt: skip


def _expert_layers(told: Told, layers: int) -> tuple[int, int]:
    """Return how many leading layers are dense, and which one in how many has experts after."""
    text = re.sub(r"\s", "", str(told.get("moe_layer_freq", default="1")))
    if text.isdecimal():
        return 0, max(int(text), 1)
    spread = re.sub(
        r"\(?\[([01,]+)\]\)?\*(\d+)", lambda m: f"[{','.join([m[1]] * int(m[2]))}]", text
    )
    each = [int(digit) for digit in re.findall(r"[01]", re.sub(r"[^01,\[\]+()]", "?", spread))]
    told.refuse_unless(
        not each or "?" in spread or len(each) == layers,
        f"moe_layer_freq says {len(each)} layers, num_layers={layers}", "one digit for each layer",
    )  # fmt: skip
    dense = len(each) - len("".join(map(str, each)).lstrip("0"))
    if "?" in spread or not each or 0 in each[dense:]:
        message = f"moe_layer_freq {text} is not read: which layers have experts is not clear"
        raise UnknownError(message, hint="a number, or leading dense layers as in ([0]*3+[1]*58)")
    return (dense if dense < layers else 0), 1


def _vocabulary(told: Told, tensor: int) -> int:
    if padded := told.whole("padded_vocab_size", default=0):
        return padded
    unit = told.whole("make_vocab_size_divisible_by", default=128) * tensor
    if not (
        vocab := told.whole("vocab_size", "override_vocab_size", "launch.vocab_size", default=0)
    ):
        for own in ("tokenizer_type", "tokenizer.type", "tokenizer_model"):
            try:  # a known model's own tokenizer has as many words as the model
                name = re.sub(r"/tokenizer\.(json|model)$", "", str(told.get(own, default="")))
                if "gpt2" in name.lower() and own != "tokenizer_model":
                    return -(-50257 // unit) * unit
                known = named_model(name, beside=told.path.parent).spec
            except UnknownError:  # or the launch names it
                continue
            return -(-known.vocab // unit) * unit
        why = "the tokenizer decides it, and it is not here"
        told.assume_model("vocabulary", 51200, why, least={"vocab": _LEAST_VOCABULARY},
                          most={"vocab": _LARGEST_VOCABULARY})  # fmt: skip
        return 51200
    return -(-vocab // unit) * unit if told.program == "megatron" else vocab
