"""Compiled edge arithmetic: from a sample's compact arrays to the ``edge_index`` of a batch.

A sample stores, target by target, the local numbers of the sources and how many there are.
The kernels below write both rows of an ``edge_index`` in one pass with the GIL released, so that
a background thread can build tensors while the training loop computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.integer[Any]]


@njit
def _expand(sources: Int32, degrees: Int32, targets: Ints, edges: Int64) -> None:
    edge = 0
    for row in range(degrees.shape[0]):
        target = targets[row]
        for _ in range(degrees[row]):
            edges[0, edge] = sources[edge]
            edges[1, edge] = target
            edge += 1


def expand_edges(sources: Int32, degrees: Int32, *, targets: Ints | None = None) -> Int64:
    """``edge_index`` [2, edges] of sources that are listed target by target.

    Args:
        sources: Local number of the source of each edge.
        degrees: Edges into each target; adds up to the edges.
        targets: Local number of each target; None: 0, 1, 2, ...

    Returns:
        int64 [2, edges], sources over targets.
    """
    edges = np.empty((2, sources.shape[0]), np.int64)
    numbers = np.arange(degrees.shape[0], dtype=np.int32) if targets is None else targets
    assert int(degrees.sum()) == sources.shape[0], "degrees must add up to the number of edges"
    _expand(sources, degrees, numbers, edges)
    return edges
