"""Routers and layers by a configuration of Hugging Face transformers: what each family does.

A family is known by ``model_type``. What it does cannot be read off the configuration's fields: a
DeepSeek-V3 router is chosen by biased sigmoids and the two best of a group, a DeepSeek-V2 router,
with fields of the same names, by probabilities and the best alone. So every family is written down
here and compared with transformers' own block in the tests, and one that is not is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fivefold.errors import ConfigurationError, UnsupportedError

_Options = dict[str, Any]


def _names(text: str) -> list[str]:
    return text.split()


def _sigmoid_of_groups(config: Any) -> _Options:
    return {
        "score": "sigmoid",
        "normalize": config.norm_topk_prob,
        "groups": config.n_group or 1,
        "top_groups": config.topk_group or 1,
        "group_score": "top2_sum",
        "scale": getattr(config, "routed_scaling_factor", 1.0),
    }


def _axk2(config: Any) -> _Options:
    if (config.n_group or 1) > 1:
        raise _unfit(
            config.model_type, "lets a token leave its groups where a bias makes scores negative"
        )
    return _sigmoid_of_groups(config)


def _sigmoid(scale: str | None = None) -> Callable[[Any], _Options]:
    """Return a router by sigmoids, normalised, with a factor on the weights."""
    return lambda config: {"score": "sigmoid", "scale": getattr(config, scale) if scale else 1.0}


def _softmax(config: Any) -> _Options:
    return {"score": "softmax", "normalize": config.norm_topk_prob}


def _deepseek_v2(config: Any) -> _Options:
    groups = {"greedy": 1, "group_limited_greedy": config.n_group}
    if config.topk_method not in groups:
        raise _unfit(config.model_type, f"chooses by topk_method {config.topk_method!r}")
    return {
        "normalize": False,  # whatever norm_topk_prob says: transformers does not look at it
        "groups": groups[config.topk_method],
        "top_groups": config.topk_group if groups[config.topk_method] != 1 else 1,
        "scale": config.routed_scaling_factor,
    }


def _softmax_of_groups(config: Any) -> _Options:
    return {
        "normalize": getattr(config, "norm_topk_prob", True),
        "groups": config.n_group or 1,
        "top_groups": config.topk_group or 1,
        "group_score": "top2_sum",
        "scale": config.routed_scaling_factor,
    }


def _by_scoring_func(config: Any) -> _Options:
    if config.scoring_func not in {"sigmoid", "sqrtsoftplus"}:
        raise _unfit(config.model_type, f"scores by {config.scoring_func!r}")
    return {"score": config.scoring_func, "scale": config.routed_scaling_factor}


def _cohere2(config: Any) -> _Options:
    scores = {"softmax": "topk_softmax", "sigmoid": "topk_sigmoid"}
    if config.expert_selection_fn not in scores:
        raise _unfit(config.model_type, f"scores by {config.expert_selection_fn!r}")
    return {"score": scores[config.expert_selection_fn], "normalize": config.norm_topk_prob}


def _dbrx(config: Any) -> _Options:
    norm = config.ffn_config.moe_normalize_expert_weights
    if norm not in {None, 1}:
        raise _unfit(config.model_type, f"normalises weights by their {norm}-norm")
    return {"normalize": norm is not None}


def _ernie(config: Any) -> _Options:
    if config.moe_norm_min > 1e-6:
        raise _unfit(config.model_type, f"normalises by no less than {config.moe_norm_min}")
    return {"normalize": True}


def _laguna(config: Any) -> _Options:
    if config.moe_router_logit_softcapping > 0.0:
        raise _unfit(config.model_type, "caps its logits (moe_router_logit_softcapping)")
    return {"score": "sigmoid", "scale": config.moe_routed_scaling_factor}


def _muse(config: Any) -> _Options:
    if config.output_multiplier != 1.0:
        raise _unfit(config.model_type, "multiplies its logits (output_multiplier)")
    return {"score": "sigmoid", "scale": config.routed_scaling_factor, "epsilon": 1e-15}


def _longcat(config: Any) -> _Options:
    return {"normalize": False, "scale": config.routed_scaling_factor}


_ROUTERS: dict[str, Callable[[Any], _Options]] = {
    **dict.fromkeys(
        _names(
            """axk1 bailing_hybrid beam deepseek_v3 deepseek_v32 dots1 dots3_note exaone_moe
            glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa hy_v4 kimi_linear
            mimo_v2_flash nemotron_h solar_open"""
        ),
        _sigmoid_of_groups,
    ),
    **dict.fromkeys(
        _names(
            """flex_olmo mellum olmoe qwen2_moe qwen3_moe qwen3_next qwen4_exp qwen3_omni_moe
            qwen3_omni_moe_talker"""
        ),
        _softmax,
    ),
    **dict.fromkeys(
        ("hunyuan_v1_moe", "minimax", "mixtral", "qwen3_5_moe", "qwen3_vl_moe"),
        lambda _: {"normalize": True},
    ),
    **dict.fromkeys(
        _names(
            """aria gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared
            jetmoe openai_privacy_filter"""
        ),
        lambda _: {"score": "topk_softmax"},
    ),
    **dict.fromkeys(("deepseek_ocr2", "deepseek_v2", "unlimited_ocr"), _deepseek_v2),
    **dict.fromkeys(("mistral4", "mistral_large4"), _softmax_of_groups),
    **dict.fromkeys(("deepseek_v4", "inkling2"), _by_scoring_func),
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe"), _ernie),
    "afmoe": _sigmoid("route_scale"),
    "axk2": _axk2,
    "cohere2_moe": _cohere2,
    "dbrx": _dbrx,
    "flint": lambda config: {"score": "sigmoid", "normalize": config.norm_topk_prob},
    "hy_v3": _sigmoid("router_scaling_factor"),
    "jamba": lambda _: {"normalize": False},
    "kolibri1": lambda config: {"score": "topk_sigmoid", "normalize": config.norm_topk_prob},
    "laguna": _laguna,
    "lfm2_moe": lambda config: {
        "score": "sigmoid",
        "normalize": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
        "epsilon": 1e-6,
    },
    "llama4": lambda _: {"score": "topk_sigmoid", "normalize": False},
    "longcat_flash": _longcat,
    "minimax_m2": _sigmoid(),
    "minimax_m3_vl": _sigmoid("routed_scaling_factor"),
    "muse_spark": _muse,
    "step3p5": _sigmoid("moe_router_scaling_factor"),
}

_NO_ROUTER = {
    **dict.fromkeys(
        ("gemma4", "diffusion_gemma"), "scales weights by expert, and normalises tokens"
    ),
    "doge": "chooses by product keys",
    "inkling": "weighs shared experts among the others",
    **dict.fromkeys(("nllb-moe", "switch_transformers"), "drops tokens in the router"),
    "phimoe": "samples its experts (sparse mixer)",
    "vitpose_backbone": "chooses by the data set",
    "zaya": "routes by a network with a state",
}
_NO_LAYER = {
    **dict.fromkeys(
        _names(
            """deepseek_v4 glm5_next gpt_oss hy_v4 inkling2 minimax_m3_vl
            openai_privacy_filter step3p5"""
        ),
        "has a gate of its own in its experts",
    ),
    "axk1": "normalises its output",
    "ernie4_5_vl_moe": "has experts by modality",
    "jetmoe": "adds a bias to its output",
    "longcat_flash": "has experts that return their tokens",
    "muse_spark": "projects tokens before its experts",
}
_BIASED = frozenset(
    {"afmoe", "axk2", "deepseek_v4", "ernie4_5_moe", "ernie4_5_vl_moe", "hy_v3", "inkling2"}
    | {"kolibri1", "laguna", "longcat_flash", "minimax_m2", "minimax_m3_vl", "muse_spark"}
    | {"step3p5"}
    | {name for name, make in _ROUTERS.items() if make is _sigmoid_of_groups}
)
_INNER_OF_THE_MODEL = frozenset(
    {"aria", "cohere2_moe", "flex_olmo", "granitemoe", "granitemoe_swa", "granitemoehybrid"}
    | {"granitemoeshared", "hunyuan_v1_moe", "jamba", "llama4", "minimax", "minimax_m2", "mixtral"}
    | {"olmoe"}
)
_GATED_SHARED = frozenset(
    {"qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen4_exp", "qwen3_omni_moe_talker"}
)


def _times(number: str, width: str = "moe_intermediate_size") -> Callable[[Any], int]:
    return lambda config: getattr(config, width) * (getattr(config, number) or 0)


_SHARED: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(
        _names(
            """axk2 bailing_hybrid deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 dots1
            glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa mistral4 mistral_large4
            solar_open unlimited_ocr"""
        ),
        _times("n_shared_experts"),
    ),
    **dict.fromkeys(("afmoe", "exaone_moe", "hy_v3"), _times("num_shared_experts")),
    **dict.fromkeys(
        ("flint", "kolibri1", "laguna", *_GATED_SHARED),
        lambda config: int(config.shared_expert_intermediate_size),
    ),
    **dict.fromkeys(
        ("granitemoehybrid", "granitemoeshared"),
        lambda config: int(config.shared_intermediate_size),
    ),
    **dict.fromkeys(("hunyuan_v1_moe", "llama4"), lambda config: int(config.intermediate_size)),
    "aria": _times("moe_num_shared_experts", "intermediate_size"),
    "dots3_note": _times("n_shared_experts", "shared_experts_intermediate_size"),
    "cohere2_moe": _times("num_shared_experts", "intermediate_size"),
    "ernie4_5_moe": _times("moe_num_shared_experts"),
    "kimi_linear": _times("num_shared_experts"),
    "nemotron_h": lambda config: int(config.moe_shared_expert_intermediate_size),
}
_PLAIN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


def router_options(config: Any) -> _Options:
    """Return the fields of a ``Router`` for a configuration of transformers."""
    config, family = _text_part(config)
    if family in _NO_ROUTER:
        raise _unfit(family, _NO_ROUTER[family])
    if family not in _ROUTERS:
        raise UnsupportedError(
            f"the router of model_type {family!r} is not known here",
            hint="write it as a Router by hand, and compare it with the model's own block",
        )
    part = config.ffn_config if family == "dbrx" else config
    names = ("num_experts_per_tok", "moe_topk", "moe_top_k")
    with _fields_of(family):
        return {"top_k": _number(part, *names), **_ROUTERS[family](config)}


def layer_options(config: Any) -> _Options:
    """Return the fields of a ``MoEConfig``, all but the router."""
    router_options(config)
    config, family = _text_part(config)
    with _fields_of(family):
        _check_layer(config, family)
        return _layer_options(config, family)


def _layer_options(config: Any, family: str) -> _Options:
    part = config.ffn_config if family == "dbrx" else config
    inner = "intermediate_size" if family in _INNER_OF_THE_MODEL else "moe_intermediate_size"
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return {
        "hidden": _number(config, "hidden_size"),
        "intermediate": _number(part, "ffn_hidden_size" if family == "dbrx" else inner),
        "experts": _number(part, *names),
        "activation": _activation(part, family),
        "shared_intermediate": _SHARED.get(family, lambda _: 0)(config),
        "shared_gate": family in _GATED_SHARED,
        "selection_bias": family in _BIASED or bool(getattr(config, "use_expert_bias", False)),
        "weight_on_input": family == "llama4",
    }


@contextlib.contextmanager
def _fields_of(family: str) -> Iterator[None]:
    """Name a field that a configuration lacks."""
    try:
        yield
    except AttributeError as error:
        raise ConfigurationError(
            f"the configuration of {family} lacks a field: {error}",
            hint="load it with AutoConfig.from_pretrained, of the transformers that runs the model",
        ) from error


def _check_layer(config: Any, family: str) -> None:
    """Refuse what the block does and the layer does not."""
    shared = _SHARED.get(family, lambda _: 0)(config)
    average = getattr(config, "shared_expert_combination_strategy", "sum") != "sum"
    biased = getattr(config, "mlp_bias", False) or getattr(config, "use_bias", False)
    problems = (
        (_NO_LAYER.get(family, ""), family in _NO_LAYER),
        ("averages the shared expert's output with the others'", shared and average),
        ("projects tokens before its experts", getattr(config, "moe_latent_size", None)),
        ("adds noise to tokens in training", getattr(config, "router_jitter_noise", 0.0)),
        ("has biases in its shared expert", shared and biased),
    )
    for problem, is_there in problems:
        if is_there:
            raise _unfit(family, problem)


def _activation(config: Any, family: str) -> str:
    fixed = {"aria": "silu", "lfm2_moe": "silu"}
    if family == "dbrx":
        name = config.ffn_act_fn["name"]
    else:
        name = fixed.get(family) or getattr(
            config, "mlp_hidden_act" if family == "nemotron_h" else "hidden_act"
        )
    plain = _PLAIN.get(name)
    found = plain if family == "nemotron_h" else _GATED.get(plain or "")
    if found is None:
        raise _unfit(family, f"has the activation {name!r}")
    return found


def _text_part(config: Any) -> tuple[Any, str]:
    """Return the configuration of the language model, and its family."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    family = getattr(config, "model_type", None)
    if not isinstance(family, str):
        raise ConfigurationError(
            f"a {type(config).__name__} is no configuration of transformers: it has no model_type",
            hint="pass model.config, or AutoConfig.from_pretrained(...)",
        )
    return config, family.removesuffix("_text")


def _number(config: Any, *names: str) -> int:
    """Return the first of some fields that there is; a whole number."""
    found = [(name, getattr(config, name)) for name in names if hasattr(config, name)]
    if not found or isinstance(found[0][1], bool) or not isinstance(found[0][1], int):
        name, value = found[0] if found else (names[0], None)
        raise ConfigurationError(
            f"{name} of the configuration is {value!r}; it must be one whole number",
            hint="set it; where it differs by layer, to that of the layer",
        )
    return found[0][1]


def _unfit(family: str, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"{family} {problem}, which there is no option for",
        hint="use the model's own block, with its experts by register_transformers_backend()",
    )
