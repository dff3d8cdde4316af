"""Mini-batches from a packed store: four levels, pipeline, loader."""

from __future__ import annotations

from fivefold.gnn.loading._batch import Block, MiniBatch
from fivefold.gnn.loading._order import batch_order, rank_share

__all__ = ["Block", "MiniBatch", "batch_order", "rank_share"]
