"""The library: ring, trees, doubling, Bruck, direct, PAT, hierarchies."""

from fivefold.collectives.algorithms._library import available_algorithms, build_algorithm

__all__ = ["available_algorithms", "build_algorithm"]
