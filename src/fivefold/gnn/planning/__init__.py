"""Decide which feature row goes to which level, and in which layout, before anything is written.

``make_plan`` takes sampled batches, the features, budgets and the disk's measured speed. It fills
the caches (static by count, or Belady's for a known order), lays out what is left in segments of
the cheapest size that the disk budget allows, and predicts every byte that will be read.
"""

from fivefold.gnn.planning._caches import Policy
from fivefold.gnn.planning._make import make_plan
from fivefold.gnn.planning._plan import Budgets, Plan, Prediction

__all__ = ["Budgets", "Plan", "Policy", "Prediction", "make_plan"]
