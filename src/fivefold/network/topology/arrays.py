"""Arrays of a graph: runs of different lengths one behind the other, and what links reach."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
_Array = TypeVar("_Array", bound=npt.NDArray[Any])


def frozen(array: _Array) -> _Array:
    """Return the array itself, from now on read-only."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class LinksAtNodes:
    """The links at each node: those of node n are ``links[offsets[n]:offsets[n + 1]]``."""

    offsets: IntArray
    links: IntArray

    def of(self, node: int) -> IntArray:
        """Return the indices of the links at one node, ascending."""
        return self.links[self.offsets[node] : self.offsets[node + 1]]


def group_by(keys: IntArray, *, num_groups: int) -> LinksAtNodes:
    """Sort positions by key, keeping their order within a key."""
    order = np.argsort(keys, kind="stable").astype(np.int32)
    offsets = offsets_of(np.bincount(keys, minlength=num_groups)).astype(np.int32)
    return LinksAtNodes(frozen(offsets), frozen(order))


def offsets_of(lengths: npt.ArrayLike) -> LongArray:
    """Return where each of several runs begins that lie one behind the other; int64 [runs + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def places_of(starts: npt.ArrayLike, lengths: npt.ArrayLike) -> LongArray:
    """Return the places start, start + 1, ... of each run, one run behind the other; int64."""
    counts = np.asarray(lengths, np.int64)
    offsets = offsets_of(counts)
    return np.arange(offsets[-1]) + np.repeat(np.asarray(starts) - offsets[:-1], counts)


def reachable(
    adjacency: LinksAtNodes, ends: IntArray, *, start: Iterable[int]
) -> npt.NDArray[np.bool_]:
    """Return which nodes can be reached from ``start``, following links to their ``ends``."""
    num_nodes = len(adjacency.offsets) - 1
    seen = np.zeros(num_nodes, np.bool_)
    frontier: IntArray | LongArray = np.fromiter(start, np.int64)
    seen[frontier] = True
    while len(frontier):
        first = adjacency.offsets[frontier]
        leaving = places_of(first, adjacency.offsets[frontier + 1] - first)
        found = np.unique(ends[adjacency.links[leaving]])
        frontier = found[~seen[found]]
        seen[frontier] = True
    return seen
