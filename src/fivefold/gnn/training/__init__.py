"""Training and inference out of core: models, runs from a TOML file, layer-wise inference.

Names are resolved when they are used: the configuration needs neither torch nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.gnn.training._infer_run import RunInference, infer_run
    from fivefold.gnn.training._inference import InferenceResult, infer_layers
    from fivefold.gnn.training._loop import train_graph
    from fivefold.gnn.training._result import GnnResult
    from fivefold.gnn.training.config import GnnConfig, load_gnn_config
    from fivefold.gnn.training.models import GAT, GCN, GraphSAGE

__all__ = [
    "GAT",
    "GCN",
    "GnnConfig",
    "GnnResult",
    "GraphSAGE",
    "InferenceResult",
    "RunInference",
    "infer_layers",
    "infer_run",
    "load_gnn_config",
    "train_graph",
]

_HOMES = {
    "config": ("GnnConfig", "load_gnn_config"),
    "_infer_run": ("RunInference", "infer_run"),
    "_inference": ("InferenceResult", "infer_layers"),
    "_loop": ("train_graph",),
    "models": ("GAT", "GCN", "GraphSAGE"),
    "_result": ("GnnResult",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
