"""What goes where: cache contents, disk layout, cost and space, before anything is written.

``make_plan`` takes sampled batches, the size of a feature row, budgets and the disk's prices. It
fills the caches (static by count, or Belady's for a known order), lays out what is left in segments
of the cheapest size that the disk budget allows, and predicts every byte that will be read. Its
parts are functions on their own: ``belady``, ``segment_layout``, ``extent_pages`` and others.
A plan is a pure function of what it was made from. Nothing here reads a feature.
"""

from __future__ import annotations

from fivefold.gnn.planning._belady import BeladyCache, belady, lru_misses
from fivefold.gnn.planning._budgets import Budgets, FeatureInfo
from fivefold.gnn.planning._caches import Policy
from fivefold.gnn.planning._id_set import IdSet, argsort_distinct, is_dense, sort_distinct
from fivefold.gnn.planning._layout import Layout, SegmentLayout, segment_layout
from fivefold.gnn.planning._make import make_plan
from fivefold.gnn.planning._packing_cost import packing_ways
from fivefold.gnn.planning._pages import PAGE_BYTES, extent_pages, read_costs, runs_of
from fivefold.gnn.planning._plan import Plan
from fivefold.gnn.planning._prediction import PackingCost, Prediction, SegmentCost
from fivefold.gnn.planning._schedule import CacheSchedule
from fivefold.gnn.planning._sources import BatchList, DiskCost, SampleSource

__all__ = [
    "PAGE_BYTES",
    "BatchList",
    "BeladyCache",
    "Budgets",
    "CacheSchedule",
    "DiskCost",
    "FeatureInfo",
    "IdSet",
    "Layout",
    "PackingCost",
    "Plan",
    "Policy",
    "Prediction",
    "SampleSource",
    "SegmentCost",
    "SegmentLayout",
    "argsort_distinct",
    "belady",
    "extent_pages",
    "is_dense",
    "lru_misses",
    "make_plan",
    "packing_ways",
    "read_costs",
    "runs_of",
    "segment_layout",
    "sort_distinct",
]
