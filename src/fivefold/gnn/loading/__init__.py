"""Mini-batches for training: from a packed store, or sampled as they are asked for.

Pure parts: ``_order`` (which batch when), ``_assemble`` and ``_edges`` (what a batch is). The data
path: ``_feature_store`` (four levels), ``_ring`` (buffers), ``_pipeline`` (threads), ``_stages``
(what they do), ``_transfer`` (to an accelerator). Public objects: ``DiskLoader``,
``OnlineLoader``, ``HeteroLoader``, ``MiniBatch``, ``FeatureStore``, ``FeatureStoreAdapter``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.gnn.loading._batch import Block, MiniBatch
from fivefold.gnn.loading._failure import StallError
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.loading._hetero_batch import HeteroMiniBatch
from fivefold.gnn.loading._hetero_loader import HeteroLoader
from fivefold.gnn.loading._loader import DiskLoader
from fivefold.gnn.loading._online import OnlineLoader
from fivefold.gnn.loading._order import batch_order, rank_share
from fivefold.gnn.loading._statistics import LoaderStatistics

if TYPE_CHECKING:
    from fivefold.gnn.loading._geometric import FeatureStoreAdapter

__all__ = [
    "Block",
    "DiskLoader",
    "FeatureStore",
    "FeatureStoreAdapter",
    "HeteroLoader",
    "HeteroMiniBatch",
    "LoaderStatistics",
    "MiniBatch",
    "OnlineLoader",
    "StallError",
    "batch_order",
    "rank_share",
]


def __getattr__(name: str) -> Any:
    # torch_geometric takes seconds to load, and only this class needs it.
    if name == "FeatureStoreAdapter":
        from fivefold.gnn.loading._geometric import FeatureStoreAdapter  # noqa: PLC0415

        return FeatureStoreAdapter
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
