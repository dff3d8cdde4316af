"""The library: ring, trees, doubling, Bruck, direct, PAT, hierarchies, and trees in the network."""

from fivefold.collectives.algorithms._build import build_algorithm
from fivefold.collectives.algorithms._in_network import InNetworkTree, in_network_tree
from fivefold.collectives.algorithms._library import available_algorithms
from fivefold.collectives.algorithms._named import (
    bidirectional_ring,
    binary_tree,
    binomial_tree,
    bruck,
    double_binary_tree,
    one_shot,
    pat,
    recursive_doubling,
    recursive_halving_doubling,
    ring,
)
from fivefold.collectives.algorithms._orders import ring_order
from fivefold.collectives.algorithms._straight import (
    direct,
    direct_all_to_all,
    hierarchical,
    pairwise_all_to_all,
)

__all__ = [
    "InNetworkTree",
    "available_algorithms",
    "bidirectional_ring",
    "binary_tree",
    "binomial_tree",
    "bruck",
    "build_algorithm",
    "direct",
    "direct_all_to_all",
    "double_binary_tree",
    "hierarchical",
    "in_network_tree",
    "one_shot",
    "pairwise_all_to_all",
    "pat",
    "recursive_doubling",
    "recursive_halving_doubling",
    "ring",
    "ring_order",
]
