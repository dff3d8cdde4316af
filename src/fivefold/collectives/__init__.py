"""Layer 3: how one collective becomes chunk transfers, proved, priced, lowered and run.

The packages, each importing only those before it: ``schedules`` (what a collective and a schedule
are; the verifier, the cost models, the bounds), ``algorithms`` (ring, trees and their like),
``pricing`` (how long a collective takes for a group), ``synthesis`` (algorithms made for a
topology), ``lowering`` (programs, MSCCL XML, MSCCL++ plans, an interpreter) and ``execution``
(under ``torch.distributed``). They are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.collectives import algorithms, execution, lowering, pricing, schedules, synthesis

__all__ = ["algorithms", "execution", "lowering", "pricing", "schedules", "synthesis"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"fivefold.collectives.{name}")
    raise AttributeError(f"module 'fivefold.collectives' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
