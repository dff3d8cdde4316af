"""The peers in one harness: memory map, online cache, Ginex, MariusGNN, DiskGNN."""

from fivefold.gnn.systems._change_sets import ChangeSet, ChangeSets, belady_change_sets
from fivefold.gnn.systems._online_cache import OnlineCache
from fivefold.gnn.systems._partitions import (
    assign_buckets,
    assign_training_nodes,
    beta_states,
    comet_states,
    dispersed_states,
    partition_rows,
    sequential_states,
    training_first_order,
)

__all__ = [
    "ChangeSet",
    "ChangeSets",
    "OnlineCache",
    "assign_buckets",
    "assign_training_nodes",
    "belady_change_sets",
    "beta_states",
    "comet_states",
    "dispersed_states",
    "partition_rows",
    "sequential_states",
    "training_first_order",
]
