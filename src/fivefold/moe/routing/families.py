"""Routers and layers by a configuration of Hugging Face transformers: what each family does.

A family is known by ``model_type``. What it does cannot be read off the configuration's fields: a
DeepSeek-V3 router is chosen by biased sigmoids and the two best of a group, a DeepSeek-V2 router,
with fields of the same names, by probabilities and the best alone. So every family has a row in
``families.toml`` and is compared with transformers' own block in the tests; others are refused.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tomllib
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from fivefold.errors import ConfigurationError, UnsupportedError

_Options = dict[str, Any]


def _of_groups(config: Any, **more: Any) -> _Options:
    groups = {"groups": config.n_group or 1, "top_groups": config.topk_group or 1}
    return {**groups, "group_score": "top2_sum", **more}


def _sigmoid_of_groups(config: Any) -> _Options:
    scale = getattr(config, "routed_scaling_factor", 1.0)
    return _of_groups(config, score="sigmoid", normalize=config.norm_topk_prob, scale=scale)


def _axk2(config: Any) -> _Options:
    if (config.n_group or 1) > 1:
        raise _unfit(
            config.model_type, "lets a token leave its groups where a bias makes scores negative"
        )
    return _sigmoid_of_groups(config)


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
    normalize = getattr(config, "norm_topk_prob", True)
    return _of_groups(config, normalize=normalize, scale=config.routed_scaling_factor)


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


_RULES: dict[str, Callable[[Any], _Options]] = {
    "axk2": _axk2,
    "cohere2": _cohere2,
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek_v2,
    "ernie": _ernie,
    "sigmoid_of_groups": _sigmoid_of_groups,
    "softmax_of_groups": _softmax_of_groups,
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


@functools.cache
def _families() -> dict[str, dict[str, Any]]:
    """Return the row of each family in ``families.toml``."""
    text = (files("fivefold.moe.routing") / "families.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["family"]
    return {name: row for row in rows for name in row["names"].split()}


def router_options(config: Any) -> _Options:
    """Return the fields of a ``Router`` for a configuration of transformers."""
    config, family = _text_part(config)
    row = _families().get(family, {})
    if "no_router" in row:
        raise _unfit(family, row["no_router"])
    if not row:
        raise UnsupportedError(
            f"the router of model_type {family!r} is not known here",
            hint="write it as a Router by hand, and compare it with the model's own block",
        )
    part = config.ffn_config if family == "dbrx" else config
    names = ("num_experts_per_tok", "moe_topk", "moe_top_k")
    with _fields_of(family):
        for name, allowed, problem in row.get("refused", ()):
            if (value := getattr(config, name)) not in allowed:
                raise _unfit(family, problem.format(value))
        return {"top_k": _number(part, *names), **_routing(row["router"], config)}


def _routing(rule: str | _Options, config: Any) -> _Options:
    if isinstance(rule, str):
        return _RULES[rule](config)
    return {
        name: getattr(config, value[1:]) if isinstance(value, str) and value[0] == "@" else value
        for name, value in rule.items()
    }


def _shared_width(family: str, config: Any) -> int:
    """Return the inner width of the shared experts, in sum; 0 for none."""
    fields = _families()[family].get("shared")
    widths = (
        math.prod(int(getattr(config, name) or 0) for name in product.split(" * "))
        for product in (fields.split(" or ") if fields else ())
    )
    return next(filter(None, widths), 0)


def layer_options(config: Any) -> _Options:
    """Return the fields of a ``MoEConfig``, all but the router."""
    router_options(config)  # refuses families without a row
    config, family = _text_part(config)
    row = _families()[family]
    inner = "ffn_hidden_size" if family == "dbrx" else row.get("inner", "moe_intermediate_size")
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    biased = row.get("biased", False) or bool(getattr(config, "use_expert_bias", False))
    with _fields_of(family):
        _check_layer(config, family)
        part = config.ffn_config if family == "dbrx" else config
        return {
            "hidden": _number(config, "hidden_size"),
            "intermediate": _number(part, inner),
            "experts": _number(part, *names),
            "activation": _activation(part, family),
            "shared_intermediate": _shared_width(family, config),
            "shared_gate": row.get("shared_gate", False) and _shared_width(family, config) > 0,
            "selection_bias": biased,
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
    shared, no_layer = _shared_width(family, config), _families()[family].get("no_layer", "")
    average = getattr(config, "shared_expert_combination_strategy", "sum") != "sum"
    biased = getattr(config, "mlp_bias", False) or getattr(config, "use_bias", False)
    problems = (
        (no_layer, no_layer),
        ("averages the shared expert's output with the others'", shared and average),
        ("projects tokens before its experts", getattr(config, "moe_latent_size", None)),
        ("adds noise to tokens in training", getattr(config, "router_jitter_noise", 0.0)),
        ("has biases in its shared expert", shared and biased),
        ("has another activation in its shared expert", shared and _is_mixed(config, family)),
    )
    for problem, is_there in problems:
        if is_there:
            raise _unfit(family, problem)


def _is_mixed(config: Any, family: str) -> bool:
    return family == "aria" and _PLAIN.get(config.hidden_act) != "silu"


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
            f"a {type(config).__name__} is not a transformers configuration: it has no model_type",
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
        f"{family} {problem}, which is not supported",
        hint="use the model's own block, with its experts by register_transformers_backend()",
    )
