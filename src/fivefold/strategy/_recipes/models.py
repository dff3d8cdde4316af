"""Names of models as recipes write them, matched with the known ones exactly."""

from __future__ import annotations

import re

from fivefold.strategy._recipes.told import UnknownError
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.presets import load_model, named_models

# Words behind a name that change weights, and no sizes; a month only where it is known to.
_SAME_SIZES = re.compile(
    r"[-_ ](instruct|base|hf|chat|it|bf16|thinking|0324|0528|0905|2507|pretrain|sft)$",
    re.IGNORECASE,
)
# Names under which others publish a known model.
_ALIASES = {
    "llama3.18b": "llama3-8b", "llama3.170b": "llama3-70b", "llama3.370b": "llama3-70b",
    "llama3.1405b": "llama3-405b", "deepseekv3671b": "deepseek-v3", "deepseekv3.1": "deepseek-v3",
    "deepseekr1": "deepseek-v3", "nvidianemotron3nano30ba3b": "nemotron-3-nano",
    "nemotron3nano30ba3b": "nemotron-3-nano",
    # Not v0.3, nor the 8x22B that follows instructions: they have another vocabulary.
    "mistral7bv0.1": "mistral-7b", "mistral7binstructv0.1": "mistral-7b",
    "mistral7bv0.2": "mistral-7b", "mistral7binstructv0.2": "mistral-7b",
    "mixtral8x7bv0.1": "mixtral-8x7b", "mixtral8x7binstructv0.1": "mixtral-8x7b",
    "mixtral8x22bv0.1": "mixtral-8x22b",
    "deepseekv316b": "deepseek-v2-lite",
}  # fmt: skip


def named_model(name: str) -> ModelSpec:
    """Return the known model that a name of another program means.

    Raises:
        UnknownError: There is none; another size or version is another model.
    """
    plain = name.rstrip("/").rsplit("/", maxsplit=1)[-1]
    plain = re.sub(r"^meta[-_]", "", plain, flags=re.IGNORECASE)
    known = {_letters(one): one for one in named_models()} | _ALIASES
    while _letters(plain) not in known and (found := _SAME_SIZES.search(plain)) is not None:
        plain = plain[: found.start()]
    preset = known.get(_letters(plain))
    if preset is not None and (model := load_model(preset)).embeds_tokens and not model.stages:
        return model
    message = f"the model {name!r} is not known here" if name else "the recipe names no model"
    raise UnknownError(message, hint="give its config.json with --model")


def _letters(name: str) -> str:
    """Return a name without what programs write differently: llama3_8b, Llama-3-8B."""
    return "".join(c for c in name.lower() if c.isalnum() or c == ".")
