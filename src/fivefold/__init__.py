"""fivefold: communication-efficient distributed training on PyTorch.

Sub-packages are resolved lazily: ``import fivefold`` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from fivefold import (
        codesign,
        collectives,
        errors,
        flows,
        gnn,
        lab,
        moe,
        network,
        optim,
        report,
        runs,
        strategy,
        tasks,
        testing,
        train,
        units,
    )

__all__ = [
    "codesign",
    "collectives",
    "errors",
    "flows",
    "gnn",
    "lab",
    "moe",
    "network",
    "optim",
    "report",
    "runs",
    "strategy",
    "tasks",
    "testing",
    "train",
    "units",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # whose reading costs as much as starting Python does
        metadata = importlib.import_module("importlib.metadata")
        try:
            return str(metadata.version("fivefold"))
        except metadata.PackageNotFoundError:
            return "not installed"  # a checkout on the path
    if name in __all__:
        return importlib.import_module(f"fivefold.{name}")
    raise AttributeError(f"module 'fivefold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
