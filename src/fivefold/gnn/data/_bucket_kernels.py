"""The two loops of a counting sort, compiled."""

from __future__ import annotations

from typing import Any

from fivefold.gnn.data._compiler import njit

__all__ = ["assign_places", "count_keys"]


@njit
def count_keys(values: Any, width: int, counts: Any) -> None:
    """Add to ``counts[value // width]`` for every value."""
    for value in values:
        counts[int(value) // width] += 1


@njit
def assign_places(values: Any, width: int, starts: Any, places: Any) -> None:
    """Where each value goes in a stable sort by ``value // width``; ``starts`` is used up."""
    for index in range(values.size):
        bucket = int(values[index]) // width
        places[index] = starts[bucket]
        starts[bucket] += 1
