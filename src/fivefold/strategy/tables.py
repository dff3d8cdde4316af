"""Fields of a TOML table: keys that exist, types that fit, quantities with their units."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.errors import ConfigurationError
from fivefold.units import parse_bytes, parse_bytes_per_s, parse_duration_s

TEXT_TIER = {
    "bandwidth": "bandwidth_bytes_per_s",
    "base": "base_s",
    "hop": "hop_s",
    "fill": "fill_s",
}
TEXT_DEVICE = {
    "memory": "memory_bytes", "memory_bandwidth": "memory_bandwidth_bytes_per_s",
    "kernel_gap": "kernel_gap_s", "host_kernel": "host_kernel_s", "reserved": "reserved_bytes",
    "host_bandwidth": "host_bandwidth_bytes_per_s", "step_overhead": "step_overhead_s",
}  # fmt: skip
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_READINGS = {"_bytes_per_s": ("Gbit/s", "GB/s"), "_bytes": ("GB", "GiB"), "_s": ("us", "ms")}
_PARSERS: Mapping[str, Callable[[Any], float]] = {
    "_bytes_per_s": parse_bytes_per_s, "_bytes": lambda text: float(parse_bytes(text)),
    "_s": parse_duration_s,
}  # fmt: skip


def with_unit(value: Any, key: str, ending: str, *, where: str) -> Any:
    """Refuse a bare number, with the two readings that are meant most often."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        readings = " or ".join(f'{key} = "{value:g} {unit}"' for unit in _READINGS[ending])
        message = f"{key} of {where!r} has no unit; got {value!r}"
        raise ConfigurationError(message, hint=f"write {readings}")
    return value


def check_keys(table: Mapping[str, Any], allowed: set[str], *, where: str) -> None:
    """Refuse unknown keys, with the nearest known one as a hint."""
    if not isinstance(table, Mapping):
        raise ConfigurationError(
            f"{where} must be a table; got {table!r:.60}", hint="write a table and its keys below"
        )
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, sorted(allowed), n=1)
            near = near or [known for known in sorted(allowed) if key in known]
            message = f"{where} has no key {key!r}"
            known = f"it has {', '.join(sorted(allowed))}"
            raise ConfigurationError(message, hint=f"did you mean {near[0]!r}?" if near else known)


def check_types(values: Mapping[str, Any], kind: type, *, where: str) -> None:
    """Refuse values that the fields of a dataclass do not take."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            wanted = " or ".join(_words(hints[name]))
            message = f"{where}: {key_of(name)} must be {wanted}; got {value!r:.60}"
            hint = f"a {type(value).__name__} cannot stand there"
            raise ConfigurationError(message, hint=hint)


def _words(hint: Any) -> list[str]:
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        inner = typing.get_args(hint)
        return [word for one in inner if one is not type(None) for word in _words(one)]
    return [_WORDS.get(hint) or str(getattr(hint, "__name__", hint)).replace("typing.", "")]


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple and inner[-1] is ...:
        return isinstance(value, list | tuple) and all(_fits(one, inner[0]) for one in value)
    if hint in {int, float}:
        plain = int if hint is int else int | float
        return isinstance(value, plain) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def read_fields(
    table: Mapping[str, Any], kind: type, *, where: str, texts: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return fields of a dataclass from a table, with those whose text in ``texts`` has a unit."""
    names = {field.name for field in dataclasses.fields(kind)} - {"sources"}
    check_keys(table, names | set(texts), where=where)
    values = {}
    for key, value in table.items():
        name = texts.get(key, key)
        values[name] = value
        if key in texts:
            ending = next(ending for ending in _READINGS if name.endswith(ending))
            values[name] = _PARSERS[ending](with_unit(value, key, ending, where=where))
    check_types(values, kind, where=where)
    return values


def build_spec(kind: type, values: Mapping[str, Any], *, where: str) -> Any:
    """Return a dataclass, or refuse a table that lacks a field without a default."""
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in values
        and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        message = f"{where} is incomplete: it does not say {', '.join(map(key_of, missing))}"
        raise ConfigurationError(message, hint="give every size that has no default")
    return kind(**values)


def key_of(name: str) -> str:
    """Return how a file writes a field."""
    keys = {field: key for texts in (TEXT_TIER, TEXT_DEVICE) for key, field in texts.items()}
    return keys.get(name, name)
