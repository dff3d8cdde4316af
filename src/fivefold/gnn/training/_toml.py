"""TOML in and out for a checked configuration, and errors that name the key and the remedy.

Pydantic decides what is wrong; this module says it in one sentence and finds the key that was
probably meant. It knows nothing of what the keys mean.
"""

from __future__ import annotations

import copy
import difflib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["apply_overrides", "format_toml", "read_toml", "readable_error"]

_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
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
}


def read_toml(path: Path) -> dict[str, Any]:
    r"""Read a TOML file.

    Raises:
        ConfigurationError: The file is missing, cannot be read, or is not TOML.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.toml"
        >>> _ = file.write_text("[run]\nepochs = 1\n")
        >>> read_toml(file)
        {'run': {'epochs': 1}}
    """
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        message = f"configuration file {path} does not exist"
        raise ConfigurationError(message, hint=_nearest_file(path)) from None
    except OSError as error:
        message = f"configuration file {path} cannot be read: {error.strerror}"
        raise ConfigurationError(message, hint="name a TOML file that you may read") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"configuration file {path} is not TOML: {error}"
        hint = 'tables look like [run], keys like epochs = 10; strings need quotes: "disk"'
        raise ConfigurationError(message, hint=hint) from None


def apply_overrides(
    tables: dict[str, Any], overrides: Sequence[str], *, schema: type[BaseModel]
) -> dict[str, Any]:
    """Put ``table.key=value`` assignments on top of the tables of a file.

    The value is read as TOML; what is not TOML is taken as a string.

    Raises:
        ConfigurationError: An assignment is not of the form ``table.key=value``.

    Example:
        >>> from fivefold.gnn.training._config import GnnConfig
        >>> apply_overrides({}, ["run.epochs=5", "data.path=/graphs/a"], schema=GnnConfig)
        {'run': {'epochs': 5}, 'data': {'path': '/graphs/a'}}
    """
    merged = copy.deepcopy(tables)
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            message = f"override {override!r} is not of the form table.key=value"
            raise ConfigurationError(message, hint="write for example run.epochs=20")
        table = merged.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = _override_value(text.strip(), _keys(schema).get(section, {}).get(key))
    return merged


def format_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Write tables of plain values as TOML; None is left out.

    Example:
        >>> format_toml({"run": {"epochs": 5, "mode": "disk"}})
        '[run]\nepochs = 5\nmode = "disk"\n'
    """
    blocks = []
    for name, table in tables.items():
        lines = [f"{k} = {_format(v)}\n" for k, v in table.items() if v is not None]
        blocks.append(f"[{name}]\n{''.join(lines)}")
    return "\n".join(blocks)


def readable_error(
    error: ValidationError, *, schema: type[BaseModel], source: str
) -> ConfigurationError:
    """Say the first problem that pydantic found in one sentence with a hint.

    Example:
        >>> from fivefold.gnn.training._config import GnnConfig
        >>> from pydantic import ValidationError
        >>> try:
        ...     GnnConfig.model_validate({"data": {"path": "g"}, "model": {"hiden_dim": 64}})
        ... except ValidationError as error:
        ...     print(readable_error(error, schema=GnnConfig, source="a.toml").hint[:30])
        did you mean model.hidden_dim?
    """
    # A misspelled key first: it often explains the others.
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    message, hint = _explain(problems[0], schema)
    others = dict.fromkeys(_name(problem) for problem in problems[1:])
    others.pop(_name(problems[0]), None)
    more = f"; also wrong: {', '.join(others)}" if others else ""
    return ConfigurationError(f"{message} (in {source}){more}", hint=hint)


def _explain(problem: ErrorDetails, schema: type[BaseModel]) -> tuple[str, str | None]:
    kind, key, context = problem["type"], _name(problem), problem.get("ctx", {})
    if kind == "extra_forbidden":
        return _explain_unknown(problem["loc"], schema)
    if kind == "missing":
        needed = [name for name, f in _keys(schema).get(key, {}).items() if f.is_required()]
        key = f"{key}.{needed[0]}" if needed else key
        return f"{key} is missing", f"{key} is the {_description(schema, key)}"
    cause = context.get("error")
    if isinstance(cause, ConfigurationError):
        prefix = "" if cause.message.startswith(tuple(schema.model_fields)) else f"{key}: "
        return prefix + cause.message, cause.hint
    got = _shown(problem["input"])
    if kind in {"model_type", "model_attributes_type"}:
        return f"{key} must be a table; got {got}", f"write [{key}] and its keys below it"
    if kind in _BOUNDS:
        word, bound = _BOUNDS[kind]
        wanted = f"{word} {context[bound]:g}"
    elif kind == "literal_error":
        wanted = f"one of {context['expected']}"
    else:
        wanted = _WANTED.get(kind, problem["msg"])
    return f"{key} must be {wanted}; got {got}", f"{key} is the {_description(schema, key)}"


def _explain_unknown(location: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[str, str]:
    tables = _keys(schema)
    names = [str(part) for part in location]
    if len(names) == 1:
        known = ", ".join(f"[{table}]" for table in tables)
        everywhere = {key: table for table in reversed(tables) for key in tables[table]}
        meant = [f"[{near}]" for near in difflib.get_close_matches(names[0], tables, n=1)]
        meant += [f"{everywhere[k]}.{k}" for k in difflib.get_close_matches(names[0], everywhere)]
        hint = f"did you mean {meant[0]}? The" if meant else "the"
        return f"unknown table or key {names[0]!r} at the top level", f"{hint} tables are {known}"
    table, key = names[0], names[-1]
    known = f"[{table}] has {', '.join(tables[table])}"
    homes = [f"{other}.{key}" for other, keys in tables.items() if key in keys]
    near = [f"{table}.{k}" for k in difflib.get_close_matches(key, tables[table], n=1)]
    far = [
        f"{other}.{k}"
        for other, keys in tables.items()
        for k in difflib.get_close_matches(key, keys, n=1)
    ]
    meant = (homes or near or far)[:1]
    return f"unknown key {table}.{key}", f"did you mean {meant[0]}? {known}" if meant else known


def _keys(schema: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The fields of each table."""
    return {
        name: dict(field.annotation.model_fields)
        for name, field in schema.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _description(schema: type[BaseModel], key: str) -> str:
    table, _, name = key.partition("[")[0].partition(".")
    field = _keys(schema).get(table, {}).get(name)
    if field is None:
        return f"table [{table}]"
    unset = field.is_required() or field.default is None
    default = "" if unset else f"; its default is {_format(field.default)}"
    return f"{field.description}{default}"


def _override_value(text: str, field: Any) -> Any:
    if field is not None and field.annotation in (str, Path) and not text.startswith(('"', "'")):
        return text  # a folder may be called 2024
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_format(item) for item in value)}]"
    if isinstance(value, int | float):
        return repr(value)
    # JSON's escapes are TOML's, but for DEL, which TOML forbids in a raw string.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _name(problem: ErrorDetails) -> str:
    text = ""
    for part in problem["loc"]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _shown(value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value  # TOML knows lists only
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _nearest_file(path: Path) -> str:
    names = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    return "give the path of a TOML file, such as examples/gnn_train.toml"
