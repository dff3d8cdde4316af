"""The peers in one harness: memory map, online cache, Ginex, MariusGNN, DiskGNN, and ours.

Pure cores: ``_change_sets``, ``_partitions``, ``_segments``. Each system is one
module on top of them, all behind the protocol of ``_system``: prepared once, then epochs of batches
whose rows equal those of an in-memory gather.
"""

from benchmarks.gnn.systems._buckets import EdgeBuckets
from benchmarks.gnn.systems._change_sets import ChangeSet, ChangeSets, belady_change_sets
from benchmarks.gnn.systems._ginex import GinexSystem, neighbor_cache_ids
from benchmarks.gnn.systems._marius import MariusSystem
from benchmarks.gnn.systems._online import OnlineSystem
from benchmarks.gnn.systems._packed import DiskGnnSystem, PackedLoaderSystem
from benchmarks.gnn.systems._page_reads import PageReader
from benchmarks.gnn.systems._partitions import (
    assign_buckets,
    assign_training_nodes,
    beta_states,
    comet_states,
    dispersed_states,
    partition_rows,
    sequential_states,
    training_first_order,
)
from benchmarks.gnn.systems._pyg import PygMappedSystem
from benchmarks.gnn.systems._segments import first_feasible_segment
from benchmarks.gnn.systems._simple import InMemorySystem, MappedSystem, source_counts, top_rows
from benchmarks.gnn.systems._system import (
    Preparation,
    System,
    SystemBatch,
    SystemStatistics,
    Workload,
    prefetched,
)
from fivefold.gnn.loading.rows import OnlineCache

__all__ = [
    "ChangeSet",
    "ChangeSets",
    "DiskGnnSystem",
    "EdgeBuckets",
    "GinexSystem",
    "InMemorySystem",
    "MappedSystem",
    "MariusSystem",
    "OnlineCache",
    "OnlineSystem",
    "PackedLoaderSystem",
    "PageReader",
    "Preparation",
    "PygMappedSystem",
    "System",
    "SystemBatch",
    "SystemStatistics",
    "Workload",
    "assign_buckets",
    "assign_training_nodes",
    "belady_change_sets",
    "beta_states",
    "comet_states",
    "dispersed_states",
    "first_feasible_segment",
    "neighbor_cache_ids",
    "partition_rows",
    "prefetched",
    "sequential_states",
    "source_counts",
    "top_rows",
    "training_first_order",
]
