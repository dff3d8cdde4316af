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

_MODULES = {
    "GnnConfig": "config",
    "load_gnn_config": "config",
    "RunInference": "_infer_run",
    "infer_run": "_infer_run",
    "InferenceResult": "_inference",
    "infer_layers": "_inference",
    "train_graph": "_loop",
    "GnnResult": "_result",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'models')}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
