"""Recipes that are functions of a module: torchtitan's ``config_registry.py``.

A module is only parsed. Read are calls with keywords, assignments to attributes of a recipe, and a
recipe that starts from another function of the file; whatever else stands in a function is named.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.strategy._recipes.texts import literal

_RECOMPUTES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
_CONVERTERS = {"Float8LinearConverter": "float8", "MXFP8LinearConverter": "mx",
               "NVFP4LinearConverter": "nvfp4"}  # fmt: skip
# Classes that hold settings of the trainer and no code of their own.
_SETTINGS = {
    "TrainingConfig", "ParallelismConfig", "CompileConfig", "CommConfig", "DebugConfig",
    "MetricsProcessor.Config", "CheckpointManager.Config", "LRSchedulersContainer.Config",
    "Profiler.Config", "Validator.Config", "CrossEntropyLoss.Config", "ChunkedLossWrapper.Config",
    "GrainDataLoader.Config", "HuggingFaceTextDataLoader.Config", "ChatDataLoader.Config",
}  # fmt: skip
_MOST_BASES = 20
_NOTHING_SAID = {"activation_checkpoint": {"activation_checkpoint.mode": "none"}}


def registry_functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return the functions of a registry that give a recipe, by name."""
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns).endswith("Trainer.Config")
        and not node.args.args
    }


def function_settings(
    functions: Mapping[str, ast.FunctionDef], name: str, *, depth: int = 0
) -> dict[str, Any]:
    """Return the settings that one function of a registry gives, by section and name.

    ``python.line N`` is a statement that is not read.
    """
    found: dict[str, Any] = {}
    values: dict[str, ast.expr] = {}  # of names, until they are used
    config = ""
    for node in functions[name].body:
        assigns = ast.Assign | ast.AnnAssign
        value = node.value if isinstance(node, assigns | ast.Return | ast.Expr) else None
        targets = node.targets if isinstance(node, ast.Assign) else []
        target = node.target if isinstance(node, ast.AnnAssign) else targets[0] if targets else None
        called = _called(value) if isinstance(value, ast.Call) else ""
        if called.endswith("Trainer.Config") and not isinstance(node, ast.Expr):
            found |= _sections(value, values)  # type: ignore[arg-type]
            if called != "Trainer.Config":
                found["trainer"] = called
            config = ast.unparse(target) if target is not None else config
        elif called in functions and not isinstance(node, ast.Expr) and depth < _MOST_BASES:
            found |= function_settings(functions, called, depth=depth + 1)
            config = ast.unparse(target) if target is not None else config
        elif len(targets) > 1:  # of one value several
            found[f"python.line {node.lineno}"] = ast.unparse(node)[:60]
        elif isinstance(target, ast.Name) and value is not None:
            values[target.id] = value
        elif isinstance(target, ast.Attribute) and _base(target) == config and value is not None:
            _assign(found, ast.unparse(target).split(".")[1:], value, values)
        elif not _says_nothing(node, config):
            found[f"python.line {node.lineno}"] = ast.unparse(node)[:60]
    return found


def _base(node: ast.Attribute) -> str:
    return ast.unparse(node).partition(".")[0]


def _says_nothing(node: ast.stmt, config: str) -> bool:
    """Return whether a statement is a text, an import, an assertion, or gives the recipe back."""
    if isinstance(node, ast.Return):
        return node.value is not None and ast.unparse(node.value) == config
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.FunctionDef)


def _assign(
    found: dict[str, Any], path: list[str], value: ast.expr, values: Mapping[str, ast.expr]
) -> None:
    """Take one assignment: of a whole section, which another replaces, or of a part of one."""
    if len(path) > 1:
        found[".".join(path)] = literal(value)
        return
    section = "model" if path[0] == "model_spec" else path[0]
    for name in [one for one in found if one.partition(".")[0] == section]:
        del found[name]
    found |= _NOTHING_SAID.get(section, {}) | _section(path[0], value, values)


def _sections(call: ast.Call, values: Mapping[str, ast.expr]) -> dict[str, Any]:
    found: dict[str, Any] = dict(_NOTHING_SAID["activation_checkpoint"])
    for word in call.keywords:
        if word.arg is not None:
            found |= _section(word.arg, word.value, values)
        else:
            found[f"python.line {call.lineno}"] = ast.unparse(word.value)[:60]
    return found


def _section(name: str, value: ast.expr, values: Mapping[str, ast.expr]) -> dict[str, Any]:
    """Return the settings of one section, which a call with keywords gives."""
    if isinstance(value, ast.Name) and value.id in values:
        value = values[value.id]
    if not isinstance(value, ast.Call):
        return {name: literal(value)}
    read: Callable[[ast.Call], dict[str, Any]] | None = _READ.get(name)
    if read is not None:
        return read(value)
    found = {f"{name}.{word.arg}": literal(word.value) for word in value.keywords}
    known = not value.args and _called(value) in _SETTINGS
    return found if known else found | {name: f"{{{ast.unparse(value)[:60]}}}"}


def _model(call: ast.Call) -> dict[str, Any]:
    found = {f"model.{word.arg}": literal(word.value) for word in call.keywords}
    if call.args:
        found["model.flavor"] = literal(call.args[0])
    found.setdefault("model.flavor", f"{{{ast.unparse(call)}}}")
    for word in call.keywords:
        if word.arg == "converters" and isinstance(word.value, ast.List):
            names = [ast.unparse(one).partition(".")[0] for one in word.value.elts]
            found["model.converters"] = [_CONVERTERS.get(one, one) for one in names]
    return found


def _recompute(call: ast.Call) -> dict[str, Any]:
    kind = _called(call).split(".")[0]
    found = {f"activation_checkpoint.{word.arg}": literal(word.value) for word in call.keywords}
    found["activation_checkpoint.mode"] = _RECOMPUTES.get(kind, kind)
    if kind == "SelectiveAC":
        found["activation_checkpoint.selective_ac_option"] = "op"
    return found


def _optimizer(call: ast.Call) -> dict[str, Any]:
    found = {f"optimizer.{word.arg}": literal(word.value) for word in call.keywords}
    return found | {"optimizer.name": _called(call)}


_READ: Mapping[str, Callable[[ast.Call], dict[str, Any]]] = {
    "model_spec": _model, "activation_checkpoint": _recompute, "optimizer": _optimizer,
}  # fmt: skip


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)
