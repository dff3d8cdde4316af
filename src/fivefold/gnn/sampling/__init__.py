"""Neighbour sampling and files of mini-batches sampled offline.

It knows edges and node ids; features and caches are not its business.
"""

from __future__ import annotations

from fivefold.gnn.sampling._sampler import HeteroNeighborSampler, NeighborSampler
from fivefold.gnn.sampling._samples import SampleFile, sample_epochs
from fivefold.gnn.sampling._topology import Adjacency, HeteroAdjacency

__all__ = [
    "Adjacency",
    "HeteroAdjacency",
    "HeteroNeighborSampler",
    "NeighborSampler",
    "SampleFile",
    "sample_epochs",
]
