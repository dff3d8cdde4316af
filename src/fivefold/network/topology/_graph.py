"""Arrays of links by node, and what can be reached over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]
_Array = TypeVar("_Array", bound=npt.NDArray[Any])


def frozen(array: _Array) -> _Array:
    """Return the array itself, from now on read-only."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Adjacency:
    """The links at each node: those of node n are ``links[offsets[n]:offsets[n + 1]]``."""

    offsets: IntArray
    links: IntArray

    def of(self, node: int) -> IntArray:
        """Return the indices of the links at one node, ascending."""
        return self.links[self.offsets[node] : self.offsets[node + 1]]


def group_by(keys: IntArray, *, num_groups: int) -> Adjacency:
    """Sort positions by key, keeping their order within a key."""
    order = np.argsort(keys, kind="stable").astype(np.int32)
    offsets = np.zeros(num_groups + 1, np.int32)
    np.cumsum(np.bincount(keys, minlength=num_groups), out=offsets[1:])
    order.flags.writeable = offsets.flags.writeable = False
    return Adjacency(offsets, order)


def reachable(
    adjacency: Adjacency, ends: IntArray, *, start: Iterable[int]
) -> npt.NDArray[np.bool_]:
    """Return which nodes can be reached from ``start``, following links to their ``ends``."""
    num_nodes = len(adjacency.offsets) - 1
    seen = np.zeros(num_nodes, np.bool_)
    frontier = np.fromiter(start, np.int64)
    seen[frontier] = True
    while len(frontier):
        counts = adjacency.offsets[frontier + 1] - adjacency.offsets[frontier]
        first = np.repeat(adjacency.offsets[frontier], counts)
        within = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        found = np.unique(ends[adjacency.links[first + within]])
        frontier = found[~seen[found]].astype(np.int64)
        seen[frontier] = True
    return seen
