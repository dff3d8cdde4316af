"""Training and inference out of core: models, runs from a TOML file, layer-wise inference.

Names are resolved when they are used: the configuration needs neither torch nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.gnn.training._config import (
        BudgetsConfig,
        DataConfig,
        GnnConfig,
        LoaderConfig,
        ModelConfig,
        OptimConfig,
        PlanConfig,
        RunConfig,
        SamplingConfig,
        ValidationConfig,
        config_to_toml,
        load_config,
    )
    from fivefold.gnn.training._inference import (
        InferenceResult,
        LayerReport,
        RunInference,
        infer_layers,
        infer_run,
        load_model,
    )
    from fivefold.gnn.training._loop import train_graph
    from fivefold.gnn.training._models import GAT, GCN, GraphSAGE, LayeredModel, make_model
    from fivefold.gnn.training._result import GnnResult

__all__ = [
    "GAT",
    "GCN",
    "BudgetsConfig",
    "DataConfig",
    "GnnConfig",
    "GnnResult",
    "GraphSAGE",
    "InferenceResult",
    "LayerReport",
    "LayeredModel",
    "LoaderConfig",
    "ModelConfig",
    "OptimConfig",
    "PlanConfig",
    "RunConfig",
    "RunInference",
    "SamplingConfig",
    "ValidationConfig",
    "config_to_toml",
    "infer_layers",
    "infer_run",
    "load_config",
    "load_model",
    "make_model",
    "train_graph",
]

_HOMES = {
    "_config": (
        "BudgetsConfig",
        "DataConfig",
        "GnnConfig",
        "LoaderConfig",
        "ModelConfig",
        "OptimConfig",
        "PlanConfig",
        "RunConfig",
        "SamplingConfig",
        "ValidationConfig",
        "config_to_toml",
        "load_config",
    ),
    "_infer_run": ("RunInference", "infer_run", "load_model"),
    "_inference": ("InferenceResult", "LayerReport", "infer_layers"),
    "_loop": ("train_graph",),
    "_models": ("GAT", "GCN", "GraphSAGE", "LayeredModel", "make_model"),
    "_result": ("GnnResult",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
