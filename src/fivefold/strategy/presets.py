"""Known models by name (``models.toml``), or from a job file's tables or a ``config.json``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
from importlib.resources import files
from typing import Any

from fivefold.errors import ConfigurationError
from fivefold.strategy.hugging_face import is_configuration, read_model
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import (
    ConvolutionStage,
    LatentAttention,
    LowRankAdapters,
    MambaMixer,
    MixtureOfExperts,
)
from fivefold.strategy.tables import build_spec, check_keys, read_fields

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
    if not is_configuration(source):
        if source not in _models():
            near = difflib.get_close_matches(source, _models(), n=1, cutoff=0.0)[0]
            message = f"model {source!r} is unknown"
            raise ConfigurationError(message, hint=f"did you mean {near!r}? Or give a file")
        model = _models()[source]
        return model if seq_len is None else dataclasses.replace(model, seq_len=seq_len)
    return read_model(source, seq_len=seq_len)[0]
