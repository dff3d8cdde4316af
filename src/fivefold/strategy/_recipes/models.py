"""Names of models as recipes write them, matched with the known ones exactly.

Known are the presets, the published ones of ``configs.toml``, and what lies in a folder that the
recipe names or in the cache of Hugging Face's hub on this machine.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fivefold.errors import FivefoldError
from fivefold.reading import Reading
from fivefold.strategy._recipes.told import Told, UnknownError
from fivefold.strategy.hugging_face import model_of_config, read_model
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.presets import load_model, named_models

# Words behind a name that change weights, and no sizes; a month only where it is known to.
_SAME_SIZES = re.compile(
    r"[-_ ](instruct|base|hf|chat|it|bf16|thinking|reasoning|0324|0528|0905|2507|pretrain|sft)$",
    re.IGNORECASE,
)
_BEFORE = re.compile(r"^(meta|nvidia)[-_]", re.IGNORECASE)  # a publisher in the name itself
# Names under which others publish a known model.
_ALIASES = {
    "llama3.18b": "llama3-8b", "llama3.170b": "llama3-70b", "llama3.370b": "llama3-70b",
    "llama3.1405b": "llama3-405b", "deepseekv3671b": "deepseek-v3", "deepseekv3.1": "deepseek-v3",
    "deepseekr1": "deepseek-v3", "nemotron3nano30ba3b": "nemotron-3-nano",
    # Not v0.3, nor the 8x22B that follows instructions: they have another vocabulary.
    "mistral7bv0.1": "mistral-7b", "mistral7binstructv0.1": "mistral-7b",
    "mistral7bv0.2": "mistral-7b", "mistral7binstructv0.2": "mistral-7b",
    "mistral7binstructv0.3": "mistral-7b-v0.3",
    "mixtral8x7bv0.1": "mixtral-8x7b", "mixtral8x7binstructv0.1": "mixtral-8x7b",
    "mixtral8x22bv0.1": "mixtral-8x22b", "deepseekv316b": "deepseek-v2-lite",
    "mistralnemobase2407": "mistral-nemo-2407", "mistralnemoinstruct2407": "mistral-nemo-2407",
    "mistralsmall24bbase2501": "mistral-small-24b-2501",
    "mistralsmall24binstruct2501": "mistral-small-24b-2501",
    "ministral33binstruct2512": "ministral-3-3b-2512",
    "ministral33breasoning2512": "ministral-3-3b-2512",
    "ministral38binstruct2512": "ministral-3-8b-2512",
    "ministral38breasoning2512": "ministral-3-8b-2512",
    "ministral314binstruct2512": "ministral-3-14b-2512",
    "ministral314breasoning2512": "ministral-3-14b-2512",
    "devstralsmall224binstruct2512": "devstral-small-2-24b-2512",
    "qwen2.5math1.5b": "qwen2.5-1.5b", "qwen2.5math7b": "qwen2.5-7b",
    "qwen2.5coder7b": "qwen2.5-7b", "qwen2.5coder32b": "qwen2.5-32b", "qwq32b": "qwen2.5-32b",
    "deepseekr1distillqwen7b": "qwen2.5-7b", "deepseekr1distillqwen14b": "qwen2.5-14b",
    "deepseekr1distillqwen32b": "qwen2.5-32b", "deepseekr1distillllama8b": "llama3-8b",
    "deepseekr1distillllama70b": "llama3-70b", "llama3.1nemotronnano8bv1": "llama3-8b",
    "codellamapython7b": "llama2-7b", "codellama7bpython": "llama2-7b",
    "qwen3coder30ba3b": "qwen3-30b-a3b", "deepseekv3236b": "deepseek-v2-236b",
    "deepseekv2": "deepseek-v2-236b", "llama417bx16e": "llama-4-scout-17b-16e",
    "llama417bx128e": "llama-4-maverick-17b-128e", "llama3.1tulu38b": "llama-3.1-tulu-3-8b",
}  # fmt: skip
_FROZEN_TOWER_BYTES = 8e9  # weights of 2 billion parameters, and a layer's work
_SIZES = {"like", "billions", "tower", "full_every"}  # of configs.toml, and no keys of a config


@dataclass(frozen=True)
class NamedModel:
    """A model that a name means.

    ``tower`` says that images or sounds go beside its text; ``reading`` is the account of its
    ``config.json``, where one lies here.
    """

    spec: ModelSpec
    tower: bool = False
    reading: Reading | None = None


def named_model(name: str, *, beside: Path) -> NamedModel:
    """Return the model that a name of another program means.

    Args:
        name: A preset, a name of the hub, or a folder with a ``config.json``.
        beside: The folder that a relative path is seen from.

    Raises:
        UnknownError: There is none; another size or version is another model.
    """
    plain = _BEFORE.sub("", name.rstrip("/").rsplit("/", maxsplit=1)[-1])
    presets = {_letters(one): one for one in named_models()}
    known = {_letters(one): one for one in _published()} | presets | _ALIASES
    while _letters(plain) not in known and (found := _SAME_SIZES.search(plain)) is not None:
        plain = plain[: found.start()]
    meant = known.get(_letters(plain), "")
    if (
        meant in presets.values()
        and (model := load_model(meant)).embeds_tokens
        and not model.stages
    ):
        return NamedModel(model)
    if meant in _published():
        return _of_published(meant)
    if path := _stored(name, beside):
        model, reading = _read(path)
        return NamedModel(model, reading=reading)
    message = f"the model {name!r} is not known here" if name else "the recipe names no model"
    raise UnknownError(message, hint="give its config.json with --model")


def chosen_model(told: Told, name: str) -> ModelSpec:
    """Return the model that a recipe names; the one given beside it where that is not known."""
    given = told.model
    try:
        found = named_model(name, beside=told.path.parent)
    except UnknownError:
        if given is None:
            raise
        if name:
            why = f"{name} is not known here: as given beside the recipe"
            told.assume("model", given.name, why)
        told.adopt(told.model_reading, of="the model")
        return given
    if given is not None and given.num_parameters != found.spec.num_parameters:
        told.assume("given model", "not used", f"the recipe names {name}")
    told.adopt(found.reading, of=name)
    if found.tower:
        assume_tower(told, name, frozen=told.on("freeze_config.freeze_vision_tower"))
    return found.spec


def assume_tower(told: Told, name: str, *, frozen: bool) -> None:
    """Note what a tower for images or sounds may need: of a frozen one no states are kept."""
    why = f"{name} has a tower for images or sounds, which is not priced"
    if frozen:
        told.assume("tower", "frozen", why, added=_FROZEN_TOWER_BYTES)
    else:
        told.assume("tower", "beside the language model", why, memory=(1.0, 2.0))


def _stored(name: str, beside: Path) -> Path | None:
    """Return where a ``config.json`` of a name lies: a path, or the cache of the hub."""
    if not name or "$" in name:
        return None
    places = [beside / name / "config.json"]
    if name.count("/") == 1:
        home = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
        cache = Path(os.environ.get("HF_HUB_CACHE", str(Path(home) / "hub")))
        folder = cache / f"models--{name.replace('/', '--')}" / "snapshots"
        places += sorted(folder.glob("*/config.json"))
    return next((place for place in places if place.is_file()), None)


def _read(path: Path) -> tuple[ModelSpec, Reading]:
    try:
        return read_model(path)
    except FivefoldError as error:
        message = f"its model is in {path}, which is not read: {error.message}"
        raise UnknownError(message, hint=error.hint or "give another with --model") from error


@functools.cache
def _of_published(name: str) -> NamedModel:
    family, keys = _published()[name]
    config: dict[str, Any] = {key: keys[key] for key in keys if key not in _SIZES}
    if every := keys.get("full_every"):
        kinds = ("sliding_attention", "full_attention")
        count = range(1, config["num_hidden_layers"] + 1)
        config["layer_types"] = [kinds[layer % every == 0] for layer in count]
    spec = model_of_config({"model_type": family, **config}, Reading(name), name=name)
    return NamedModel(spec, tower=bool(keys.get("tower")))


@functools.cache
def _published() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Return family and keys of each model of ``configs.toml``."""
    text = (files("fivefold.strategy._recipes") / "configs.toml").read_text(encoding="utf-8")
    return {
        name: (family, models.get(keys.get("like"), {}) | keys)
        for family, models in tomllib.loads(text).items()
        for name, keys in models.items()
    }


def _letters(name: str) -> str:
    """Return a name without what programs write differently: llama3_8b, Llama-3-8B."""
    return "".join(c for c in name.lower() if c.isalnum() or c == ".")
