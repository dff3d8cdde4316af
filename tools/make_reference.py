"""Write docs/reference from the docstrings of all exported names; ``--check`` only compares.

One page a room, in the order of its ``__all__``: signature, then the docstring as it stands.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
GNN = ("storage", "sampling", "data", "planning", "packing", "loading", "systems", "training")
NETWORK = ("topology", "profiling", "simulation", "aggregation")
COLLECTIVES = ("schedules", "algorithms", "synthesis", "lowering", "execution")
ROOMS = [
    *(
        "errors",
        "units",
        "runs",
        "optim",
        "moe",
        "flows",
        "tasks",
        "strategy",
        "codesign",
        "train",
        "lab",
        "report",
        "testing",
    ),
    *(f"network.{room}" for room in NETWORK),
    *(f"collectives.{room}" for room in COLLECTIVES),
    *(f"gnn.{room}" for room in GNN),
]
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def page(room: str) -> str:
    """One room's reference as Markdown."""
    module = importlib.import_module(f"fivefold.{room}")
    parts = [f"# fivefold.{room}", inspect.getdoc(module) or ""]
    parts += [entry(module, name) for name in module.__all__]
    return "\n\n".join(parts).rstrip() + "\n"


def entry(module: ModuleType, name: str) -> str:
    """One exported name: heading, signature, docstring, then public methods of a class."""
    value = getattr(module, name)
    parts = [f"## {name}", code(f"{name}{signature(value)}"), prose(value)]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for method_name, method in vars(value).items():
            documented = inspect.isfunction(method) and inspect.getdoc(method)
            if documented and not method_name.startswith("_"):
                parts += [f"### {name}.{method_name}", code(f"{method_name}{signature(method)}")]
                parts.append(prose(method))
    return "\n\n".join(part for part in parts if part)


def signature(value: object) -> str:
    """The call's signature, empty where there is none to show."""
    if not callable(value):
        return ""
    try:
        return _ADDRESS.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""


def prose(value: object) -> str:
    """A docstring as a block that keeps its layout."""
    text = inspect.getdoc(value) or ""
    return "" if not text else code(text, language="text")


def code(text: str, *, language: str = "python") -> str:
    """A fenced block."""
    return f"```{language}\n{textwrap.dedent(text)}\n```"


def main() -> int:
    """Write the pages, or compare them; return an exit code."""
    folder = ROOT / "docs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    stale = []
    for room in ROOMS:
        target, text = folder / f"{room}.md", page(room)
        if not target.exists() or target.read_text() != text:
            stale.append(target.name)
            if "--check" not in sys.argv[1:]:
                target.write_text(text)
    if stale and "--check" in sys.argv[1:]:
        print(f"error: docs/reference is out of date: {', '.join(stale)}", file=sys.stderr)
        print("hint: run make reference", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
