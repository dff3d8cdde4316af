"""Neighbour sampling and files of mini-batches sampled offline.

It knows edges and node ids;
features and caches are not its business.
"""

from __future__ import annotations

from fivefold.gnn.sampling._batch import EdgeType, HeteroSampledBatch, SampledBatch
from fivefold.gnn.sampling._epoch import epoch_batches
from fivefold.gnn.sampling._hetero import HeteroTopology, MergedTopology
from fivefold.gnn.sampling._sample_epochs import sample_epochs
from fivefold.gnn.sampling._sample_file import SampleFile
from fivefold.gnn.sampling._sampler import HeteroNeighborSampler, NeighborSampler
from fivefold.gnn.sampling._topology import Topology

__all__ = [
    "EdgeType",
    "HeteroNeighborSampler",
    "HeteroSampledBatch",
    "HeteroTopology",
    "MergedTopology",
    "NeighborSampler",
    "SampleFile",
    "SampledBatch",
    "Topology",
    "epoch_batches",
    "sample_epochs",
]
