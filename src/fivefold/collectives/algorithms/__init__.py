"""The library: ring, trees, doubling, Bruck, direct, PAT, hierarchies."""

from fivefold.collectives.algorithms._library import (
    algorithm_named,
    available_algorithms,
    build_algorithm,
)

__all__ = ["algorithm_named", "available_algorithms", "build_algorithm"]
