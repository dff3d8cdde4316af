"""Layer 5: what carries the traffic, from GPU to core switch.

Its packages, each importing only those before it: ``topology`` (one graph, its files, the named
machines and the generators), ``profiling`` (alpha and beta of real links), ``simulation`` (who gets
which rate, and when each flow ends) and ``aggregation`` (a software switch that sums, and the
ranks' half of it). They are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.network import aggregation, profiling, simulation, topology

__all__ = ["aggregation", "profiling", "simulation", "topology"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"fivefold.network.{name}")
    raise AttributeError(f"module 'fivefold.network' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
