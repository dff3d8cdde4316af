"""Configurations: checked TOML tables, and errors that name the key and the remedy.

Pydantic decides what is wrong; this module says it in one sentence with the full key, the value
that was got and what is wanted, and finds the key that was probably meant.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from fivefold.errors import ConfigurationError
from fivefold.files import parse_toml
from fivefold.units import parse_bytes, parse_duration_s

_ITEM = re.compile(r"\[\d+\]")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TYPE_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "path_type": "a path in quotes",
    "is_instance_of": "a path in quotes",
    "tuple_type": "a list",
    "too_long": "a shorter list",
    "too_short": "a longer list",
}
_LIST_PROBLEMS = ("tuple_type", "too_long", "too_short")
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _duration(value: Any) -> Any:
    # Strings only: a bool or a list must reach the type check of the field itself.
    return parse_duration_s(value) if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _path(value: Any) -> Any:
    if value == "":
        message = "a path must not be empty"
        raise ConfigurationError(message, hint='name a folder, such as "runs/first"')
    return Path(value) if isinstance(value, str) else value


# The largest that all who take them can hold: JSON's readers, NumPy and torch.
_MOST = 2**53
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(_duration), Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A table: frozen, strict, without unknown keys; its docstrings describe the keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )


Configuration = TypeVar("Configuration", bound=BaseModel)


def apply_overrides(
    tables: dict[str, Any], overrides: Sequence[str], *, schema: type[BaseModel]
) -> dict[str, Any]:
    """Put ``section.key=value`` assignments on top of the tables of a file.

    A key of a table within a table is written ``section.table.key=value``.

    Args:
        tables: What the file holds.
        overrides: The assignments, applied in order.
        schema: The model that the tables are for; tells strings from other values.

    Raises:
        ConfigurationError: An assignment is not of the form ``section.key=value``.

    Examples:
        >>> class Run(BaseModel):
        ...     steps: int = 1
        >>> class Settings(BaseModel):
        ...     run: Run = Run()
        >>> apply_overrides({}, ["run.steps=5"], schema=Settings)
        {'run': {'steps': 5}}
    """
    merged = copy.deepcopy(tables)
    for override in overrides:
        name, equals, text = override.partition("=")
        *sections, key = name.strip().split(".")
        if not (equals and sections and key and all(sections)):
            raise ConfigurationError(
                f"override {override!r} is not of the form section.key=value",
                hint="write for example run.steps=50",
            )
        table: Any = merged
        for section in sections:
            table = table.setdefault(section, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):
            annotation = _annotation(schema, ".".join(sections), key)
            table[key] = _override_value(text.strip(), annotation)
    return merged


def format_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Write tables of plain values as TOML.

    Args:
        tables: Name of the table to its keys and values.

    Raises:
        TypeError: A value is of a type that configurations do not have.

    Examples:
        >>> format_toml({"run": {"steps": 5, "device": "cpu"}})
        '[run]\nsteps = 5\ndevice = "cpu"\n'
    """
    given = {name: table for name, table in tables.items() if table is not None}
    return "\n".join(block for name, table in given.items() for block in _blocks(name, table))


def check_tables(
    tables: Mapping[str, Any], schema: type[Configuration], *, source: str | Path
) -> Configuration:
    """Check the tables of a configuration.

    Args:
        tables: What a file and its overrides hold.
        schema: What they must be.
        source: Where they came from, for messages.

    Returns:
        The configuration, with the default for every key that is not given.

    Raises:
        ConfigurationError: A key or a value is not allowed; says the first problem in one sentence
            with a hint.

    Examples:
        >>> class Run(BaseModel):
        ...     steps: Positive = 1
        >>> try:
        ...     check_tables({"steps": 0}, Run, source="a.toml")
        ... except ConfigurationError as error:
        ...     print(error.message)
        steps must be at least 1; got 0 (in a.toml)
    """
    try:
        return schema.model_validate(tables)
    except ValidationError as error:
        # A misspelled key first: it often explains the others.
        problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    message, hint = _explain(problems[0], schema)
    others = dict.fromkeys(_key(problem) for problem in problems[1:])
    others.pop(_key(problems[0]), None)
    more = f"; also wrong: {', '.join(others)}" if others else ""
    # Not within the handler: its context would show pydantic's own message, with a URL.
    raise ConfigurationError(f"{message} (in {source}){more}", hint=hint)


def _explain(problem: ErrorDetails, schema: type[BaseModel]) -> tuple[str, str | None]:
    kind, key, context = problem["type"], _key(problem), problem.get("ctx", {})
    if kind == "extra_forbidden":
        return _explain_unknown(problem["loc"], schema)
    cause = context.get("error")
    if isinstance(cause, ConfigurationError):
        told = not key or cause.message.startswith(tuple(schema.model_fields))
        prefix = "" if told else f"{key}: "
        return prefix + cause.message, cause.hint
    if kind == "missing" and isinstance(problem["loc"][-1], str):
        return _explain_missing(key, schema)
    got = _describe(problem["input"])
    if kind in {"model_type", "model_attributes_type"}:
        return f"{key} must be a table; got {got}", f"write [{key}] and its keys below it"
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        wanted = f"{word} {context[name]:g}"
        got = f"{problem['input']}"
    elif kind == "literal_error":
        wanted = f"one of {context['expected']}"
        close = difflib.get_close_matches(
            str(problem["input"]).lower(), re.findall(r"'([^']*)'", context["expected"]), n=1
        )
        meant = [f'did you mean "{name}"?' for name in close]
        hint = " ".join([*meant, *filter(None, [_about(schema, key)])])
        return f"{key} must be {wanted}; got {got}", hint or None
    elif (items := _items(schema, key)) and kind in {"missing", *_LIST_PROBLEMS}:
        wanted = f"a list of {items}"
        key = key.partition("[")[0]  # an item that is not there
    else:
        wanted = _WANTED.get(kind, problem["msg"])
    return f"{key} must be {wanted}; got {got}", _about(schema, key)


def _explain_missing(key: str, schema: type[BaseModel]) -> tuple[str, str | None]:
    fields = _sections(schema).get(_ITEM.sub("", key), {})
    needed = [name for name, field in fields.items() if field.is_required()]
    key = f"{key}.{needed[0]}" if needed else key
    return f"{key} is missing", _about(schema, key)


def _explain_unknown(location: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[str, str]:
    sections = _sections(schema)
    above = [str(part) for part in location[:-1] if not isinstance(part, int)]
    section, name = ".".join(above), str(location[-1])
    homes = [f"{table}.{name}" for table, keys in sections.items() if name in keys]
    if len(location) == 1:
        close = difflib.get_close_matches(name, sections, n=1)
        tables = ", ".join(f"[{table}]" for table in sections)
        meant = [f"[{table}]" for table in close] or homes
        hint = (
            f"did you mean {meant[0]}? The tables are {tables}"
            if meant
            else f"the tables are {tables}"
        )
        return f"unknown table or key {name!r} at the top level", hint
    keys = sections[section]
    close = [f"{section}.{key}" for key in difflib.get_close_matches(name, keys, n=1)]
    everywhere = {key: f"{table}.{key}" for table in sections for key in sections[table]}
    afar = [everywhere[key] for key in difflib.get_close_matches(name, everywhere, n=1)]
    known = f"[{section}] has {', '.join(keys)}"
    meant = homes or close or afar
    return f"unknown key {section}.{name}", f"did you mean {meant[0]}? {known}" if meant else known


def _about(schema: type[BaseModel], key: str) -> str | None:
    key = _ITEM.sub("", key)
    section, _, name = key.rpartition(".")
    field = _sections(schema).get(section, {}).get(name)
    if field is None:
        return None
    if field.is_required():
        return f"{key}: {field.description}"
    if field.default is None:
        return f"{key}: {field.description}; left out, there is none, or the method's own"
    return f"{key}: {field.description}; its default is {_format_value(field.default)}"


def _sections(schema: type[BaseModel], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Return the keys by the dotted name of their table, also of tables within tables."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in schema.model_fields.items():
        for kind in typing.get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[prefix + name] = dict(kind.model_fields)
                found |= _sections(kind, f"{prefix}{name}.")
    return found


def _items(schema: type[BaseModel], key: str) -> str | None:
    """Return how many numbers a list must have, in words; None where it may have any."""
    section, _, name = _ITEM.sub("", key).rpartition(".")
    arguments = typing.get_args(_annotation(schema, section, name))
    if typing.get_origin(_annotation(schema, section, name)) is not tuple or ... in arguments:
        return None
    words = {1: "one number", 2: "two numbers", 3: "three numbers"}
    return words.get(len(arguments), f"{len(arguments)} numbers")


def _annotation(schema: type[BaseModel], section: str, key: str) -> Any:
    field = _sections(schema).get(section, {}).get(key)
    return None if field is None else field.annotation


def _override_value(text: str, annotation: Any) -> Any:
    quoted = text.startswith(('"', "'"))
    if annotation in (str, Path) and not quoted:
        return text  # a folder may be called 2024
    try:
        parsed = parse_toml(f"value = {text}", where="the override")
    except ConfigurationError:
        return text
    value = parsed["value"]
    plain = isinstance(value, bool | int | float | str | list | dict)
    return value if plain and len(parsed) == 1 else text


def _blocks(name: str, table: Mapping[str, Any]) -> list[str]:
    lines, below = [], []
    for key, value in table.items():
        bare = key if _BARE_KEY.fullmatch(key) else _format_value(key)
        if isinstance(value, dict):
            below += _blocks(f"{name}.{bare}", value)
        elif value is not None:
            lines.append(f"{bare} = {_format_value(value)}\n")
    return [f"[{name}]\n{''.join(lines)}", *below]


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(value) if math.isinf(value) or math.isnan(value) else repr(value)
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's, but for DEL, which TOML forbids in a raw string.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    raise TypeError(f"no TOML form for {value!r}")


def _key(problem: ErrorDetails) -> str:
    text = ""
    for part in problem["loc"]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _describe(value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value  # TOML knows lists only
    name = _TYPE_NAMES.get(type(value), f"a {type(value).__name__}")
    if isinstance(value, bool):
        return f"{str(value).lower()} ({name})"
    return f"{value!r} ({name})"
