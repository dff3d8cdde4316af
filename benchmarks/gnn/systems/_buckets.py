"""Edge buckets of a partitioned graph, and the graph that a buffer of partitions spans.

Bucket (i, j) holds the edges into partition i from partition j. They lie in one file, sorted by
bucket, so that the c * c buckets of a buffer's state are read in c * c pieces and everything else
stays on disk. Node numbers in a buffer: slot times partition length plus place in the partition.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.gnn.sampling import Adjacency

__all__ = ["EdgeBuckets"]

Ids = NDArray[np.int64]


class EdgeBuckets:
    """The buckets on disk.

    Args:
        folder: Where they are.
        bounds: ``[p, p + 1]``, where the buckets of each target partition begin in the files.
        rows: Nodes per partition.
        dtype: Of the node numbers in the files.

    Example:
        >>> import tempfile
        >>> graph = Adjacency(np.array([0, 1, 2, 3, 4]), np.array([3, 0, 1, 2]))
        >>> place = Path(tempfile.mkdtemp())
        >>> buckets = EdgeBuckets.write(place, graph, order=np.arange(4), rows=2, num_partitions=2)
        >>> buckets.induced(np.array([1])).indices.tolist()  # 2 -> 3 lies inside partition 1
        [0]
    """

    def __init__(self, folder: Path, *, bounds: Ids, rows: int, dtype: np.dtype[Any]) -> None:
        self.folder, self.bounds, self.rows, self.dtype = folder, bounds, rows, dtype

    @classmethod
    def write(
        cls, folder: Path, topology: Adjacency, *, order: Ids, rows: int, num_partitions: int
    ) -> EdgeBuckets:
        """Renumber and sort the edges, one target partition at a time.

        Args:
            folder: Where to write; it is made.
            topology: The graph, old ids.
            order: The old id of each new one.
            rows: Nodes per partition.
            num_partitions: Number of partitions.

        Returns:
            The buckets.
        """
        folder.mkdir(parents=True, exist_ok=True)
        dtype = _dtype(topology.num_nodes)
        new_of = np.empty(topology.num_nodes, dtype)
        new_of[order] = np.arange(topology.num_nodes, dtype=dtype)
        indptr, indices = np.asarray(topology.indptr), topology.indices
        bounds = np.zeros((num_partitions, num_partitions + 1), np.int64)
        written = 0
        with (folder / "targets").open("wb") as targets, (folder / "sources").open("wb") as sources:
            for i in range(num_partitions):
                old = order[i * rows : (i + 1) * rows]
                target, source = _edges_into(old, i * rows, indptr, indices, new_of)
                by = source // rows
                sort = np.argsort(by, kind="stable")
                counts = np.bincount(by, minlength=num_partitions)
                bounds[i] = written + np.concatenate([[0], np.cumsum(counts)])
                written += len(target)
                targets.write(target[sort].tobytes())
                sources.write(source[sort].tobytes())
            for file in (targets, sources):
                file.flush()
                os.fsync(file.fileno())
        np.save(folder / "bounds.npy", bounds)  # the last one: it says that the others are whole
        return cls(folder, bounds=bounds, rows=rows, dtype=dtype)

    @classmethod
    def open(cls, folder: Path, *, num_nodes: int, rows: int) -> EdgeBuckets | None:
        """Take buckets that were written before; None where there are none.

        Args:
            folder: Where they are.
            num_nodes: Nodes of the graph.
            rows: Nodes per partition.
        """
        if not (folder / "bounds.npy").exists():
            return None
        return cls(
            folder, bounds=np.load(folder / "bounds.npy"), rows=rows, dtype=_dtype(num_nodes)
        )

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum((self.folder / name).stat().st_size for name in ("targets", "sources"))

    def induced(self, state: Ids) -> Adjacency:
        """Read the buckets of a state and put them together.

        Args:
            state: Partitions by slot.

        Returns:
            The graph of the edges with both ends in the buffer, in the buffer's numbers.
        """
        size = len(state) * self.rows
        slot_of = np.full(len(self.bounds), -1, np.int64)
        slot_of[state] = np.arange(len(state))
        pieces = [(int(i), int(j)) for i in state for j in np.sort(state)]
        edges = [self._read(i, j) for i, j in pieces]
        indptr = np.zeros(size + 1, np.int64)
        indices = np.empty(sum(len(t) for t, _ in edges), np.int32)
        for (i, _), (target, _) in zip(pieces, edges, strict=True):
            _count(target, (slot_of[i] - i) * self.rows, indptr)
        np.cumsum(indptr, out=indptr)
        ends = indptr[:-1].copy()
        for (i, j), (target, source) in zip(pieces, edges, strict=True):
            to, origin = (slot_of[i] - i) * self.rows, (slot_of[j] - j) * self.rows
            _place(target, source, to, origin, ends, indices)
        return Adjacency(indptr, indices)

    def _read(self, i: int, j: int) -> tuple[NDArray[Any], NDArray[Any]]:
        start, stop = int(self.bounds[i, j]), int(self.bounds[i, j + 1])
        target, source = (
            np.fromfile(
                self.folder / name,
                self.dtype,
                count=stop - start,
                offset=start * self.dtype.itemsize,
            )
            for name in ("targets", "sources")
        )
        return target, source


def _dtype(num_nodes: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64)


def _edges_into(
    old: Ids, first: int, indptr: Ids, indices: NDArray[Any], new_of: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """New numbers of targets and sources of all edges into some nodes."""
    degrees = indptr[old + 1] - indptr[old]
    target = np.repeat(np.arange(first, first + len(old), dtype=new_of.dtype), degrees)
    places = np.repeat(indptr[old] - np.cumsum(degrees) + degrees, degrees)
    places += np.arange(len(target))
    return target, new_of[indices[places]]


@njit
def _count(targets: NDArray[Any], shift: int, indptr: Ids) -> None:
    for e in range(len(targets)):
        indptr[targets[e] + shift + 1] += 1


@njit
def _place(
    targets: NDArray[Any],
    sources: NDArray[Any],
    to: int,
    origin: int,
    ends: Ids,
    indices: NDArray[np.int32],
) -> None:
    for e in range(len(targets)):
        v = targets[e] + to
        indices[ends[v]] = sources[e] + origin
        ends[v] += 1
