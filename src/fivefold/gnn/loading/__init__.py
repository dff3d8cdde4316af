"""Mini-batches for training: from a packed store, or sampled as they are asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fivefold.gnn.loading._base import LoaderStatistics
from fivefold.gnn.loading._disk_loader import DiskLoader
from fivefold.gnn.loading._links import LinkLoader
from fivefold.gnn.loading._pipeline import StallError
from fivefold.gnn.loading._sampled import OnlineLoader
from fivefold.gnn.loading.batch import Block, HeteroMiniBatch, MiniBatch

if TYPE_CHECKING:
    from fivefold.gnn.loading._adapter import FeatureStoreAdapter

__all__ = [
    "Block",
    "DiskLoader",
    "FeatureStoreAdapter",
    "HeteroMiniBatch",
    "LinkLoader",
    "LoaderStatistics",
    "MiniBatch",
    "OnlineLoader",
    "StallError",
]


def __getattr__(name: str) -> Any:
    # torch_geometric takes seconds to load, and only this class needs it.
    if name == "FeatureStoreAdapter":
        return importlib.import_module("fivefold.gnn.loading._adapter").FeatureStoreAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
