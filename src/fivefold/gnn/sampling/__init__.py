"""Neighbour sampling and files of mini-batches sampled offline.

Core: ``_random`` and ``_kernels`` (compiled), ``_topology``, ``_hop``, ``_epoch``. Files of
batches: ``_sample_record``, ``_sample_file``, ``_sample_epochs``. It knows edges and node ids;
features and caches are not its business.
"""

from __future__ import annotations

from fivefold.gnn.sampling._batch import SampledBatch
from fivefold.gnn.sampling._epoch import epoch_batches
from fivefold.gnn.sampling._hetero import HeteroSampledBatch, HeteroTopology, MergedTopology
from fivefold.gnn.sampling._hetero_sampler import HeteroNeighborSampler
from fivefold.gnn.sampling._sample_epochs import sample_epochs
from fivefold.gnn.sampling._sample_file import SampleFile
from fivefold.gnn.sampling._sampler import NeighborSampler
from fivefold.gnn.sampling._topology import Topology

__all__ = [
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
