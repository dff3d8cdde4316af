"""Decide which feature row goes to which level, and in which layout, before anything is written.

``make_plan`` takes sampled batches, the size of a feature row, budgets and the disk's prices. It
fills the caches (static by count, or Belady's for a known order), lays out what is left in segments
of the cheapest size that the disk budget allows, and predicts every byte that will be read.
"""

from __future__ import annotations

from fivefold.gnn.planning._geometry import STRATEGIES, Geometry, choose_geometry, reader_shape
from fivefold.gnn.planning._id_set import (
    IdSet,
    SortedIds,
    argsort_distinct,
    is_dense,
    sort_distinct,
)
from fivefold.gnn.planning._inputs import (
    BatchList,
    Budgets,
    DiskCost,
    FeatureInfo,
    SampleSource,
)
from fivefold.gnn.planning._layout import SegmentLayout
from fivefold.gnn.planning._make import make_plan
from fivefold.gnn.planning._pages import PAGE_BYTES, runs_of
from fivefold.gnn.planning._plan import Plan
from fivefold.gnn.planning._prediction import Prediction

__all__ = [
    "PAGE_BYTES",
    "STRATEGIES",
    "BatchList",
    "Budgets",
    "DiskCost",
    "FeatureInfo",
    "Geometry",
    "IdSet",
    "Plan",
    "Prediction",
    "SampleSource",
    "SegmentLayout",
    "SortedIds",
    "argsort_distinct",
    "choose_geometry",
    "is_dense",
    "make_plan",
    "reader_shape",
    "runs_of",
    "sort_distinct",
]
