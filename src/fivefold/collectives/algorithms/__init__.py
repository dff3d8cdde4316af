"""The library: ring, trees, doubling, Bruck, direct, PAT, hierarchies, in-network trees."""

from fivefold.collectives.algorithms._in_network import InNetworkTree, in_network_tree
from fivefold.collectives.algorithms._library import available_algorithms, build_algorithm
from fivefold.collectives.algorithms._ring_order import ring_order

__all__ = [
    "InNetworkTree",
    "available_algorithms",
    "build_algorithm",
    "in_network_tree",
    "ring_order",
]
