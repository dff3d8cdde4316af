"""The settings of a recipe as they stand in its text: shell script, YAML, TOML or Python.

Nothing is run: a script's variables and sums are followed, a module is only parsed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.errors import DataError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|declare\s+-\w+\s+)?(\w+)=(.*)$")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\((.*?)\)\)")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
}  # fmt: skip
_MOST_ROUNDS = 20  # of variables that name variables


def script_settings(text: str) -> dict[str, Any]:
    """Return the flags of a shell script, its variables, and what it asks of Slurm.

    A flag ``--tensor-model-parallel-size 8`` is ``tensor_model_parallel_size``; one without a
    value is True; variables are named in lower letters and yield to flags.
    """
    joined = re.sub(r"\\\s*\n", " ", text)
    slurm = " ".join(re.findall(r"^#SBATCH\s+(.*)$", joined, re.MULTILINE))
    lines = [_without_comment(line) for line in _whole_arrays(joined).splitlines()]
    variables: dict[str, str] = {}
    commands = []
    for line in lines:
        found = _ASSIGNMENT.match(line)
        if found is None:
            commands.append(line)
        else:
            variables[found[1]] = _expanded(_bare(found[2]), variables)
    words = _words(slurm)
    for line in commands:
        words += _words(_expanded(line, variables))
    known = {name.lower(): value for name, value in variables.items()}
    if not any("$" not in word and word.startswith("--num-layers") for word in words):
        for value in variables.values():  # flags that stand in variables nobody expands here
            words += _words(value) if "--" in value else []
    return known | _flags(words)


def _whole_arrays(text: str) -> str:
    """Put arrays that stand on several lines on one."""
    return re.sub(r"=\(([^)]*)\)", lambda m: "=(" + _one_line(m[1]) + ")", text)


def _one_line(text: str) -> str:
    return " ".join(_without_comment(line) for line in text.splitlines())


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line)


def _bare(value: str) -> str:
    value = value.strip().rstrip(";")
    if value[:1] == "(" and value[-1:] == ")":
        return value[1:-1]
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    for _ in range(_MOST_ROUNDS):
        before = text
        text = _SUM.sub(lambda m: _summed(m, variables), text)
        text = _VARIABLE.sub(
            lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text
        )
        if text == before:
            break
    return text


def _summed(found: re.Match[str], variables: Mapping[str, str]) -> str:
    inner = _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] or "?"), found[1])
    inner = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], "?"), inner)
    try:
        return str(_value(ast.parse(inner.replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return found[0]


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that another line closes
        return line.split()


def _flags(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, given, value = word[2:].partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        key = name.replace("-", "_")
        found[key] = value if given else True if following.startswith("--") else following
    return found


def toml_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of nested tables, by their name, with the table's, and with all."""
    found: dict[str, Any] = {}

    def walk(inner: Mapping[str, Any], above: str) -> None:
        for key, value in inner.items():
            name = f"{above}{key}"
            if isinstance(value, Mapping):
                walk(value, f"{name}.")
            else:
                found[name] = value
                found.setdefault(".".join(name.split(".")[-2:]), value)
                found.setdefault(str(key), value)

    walk(table, "")
    return found


def python_settings(text: str) -> dict[str, Any] | None:
    """Return the settings of a Python module for torchtitan; None where it is none.

    Arguments of ``ParallelismConfig`` and what is assigned to ``config.training`` and
    ``config.activation_checkpoint`` are read; the model is the function that it starts from.
    """
    if "ParallelismConfig" not in text:
        return None
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        message = f"the module is not Python: {error.msg}, line {error.lineno}"
        raise DataError(message, hint="mend that line") from error
    found: dict[str, Any] = {"activation_checkpoint.mode": "none"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "ParallelismConfig":
            for word in node.keywords:
                if word.arg is not None:
                    found[word.arg] = _literal(word.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").endswith("config_registry"):
            found["config_function"] = node.names[0].name
        elif isinstance(node, ast.Assign):
            found |= _assigned(node)
    return found if "config_function" in found else None


def _assigned(node: ast.Assign) -> dict[str, Any]:
    target = node.targets[0]
    if not isinstance(target, ast.Attribute):
        return {}
    if target.attr == "activation_checkpoint":
        text = ast.unparse(node.value)
        modes = {"SelectiveAC": "selective", "FullAC": "full"}
        mode = next((mode for name, mode in modes.items() if name in text), "none")
        return {"activation_checkpoint.mode": mode}
    return {target.attr: _literal(node.value)}


def _literal(node: ast.expr) -> Any:
    """Return a value that stands in the text; what is computed, as its text in braces."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return f"{{{ast.unparse(node)}}}"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
