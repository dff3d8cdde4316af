"""Out-of-core training of graph neural networks: features many times larger than memory.

Mini-batches are sampled offline, their feature rows are packed in the order in which training
will read them, and a pipeline streams them at the speed of the disk (DiskGNN, arXiv 2405.05231).

The packages, each importing only those before it: ``storage`` (files and fast reads), ``sampling``
and ``data``, ``planning`` (which row goes to which level), ``packing``, ``loading`` and
``training``. They are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.gnn import (
        data,
        loading,
        packing,
        planning,
        sampling,
        storage,
        training,
    )

__all__ = ["data", "loading", "packing", "planning", "sampling", "storage", "training"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"fivefold.gnn.{name}")
    message = f"module 'fivefold.gnn' has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
