"""Edges in any order, brought into the order of their targets without holding them in memory.

A counting sort in two passes. Edges are spilled to buckets, each a range of target ids; then each
bucket is read and sorted by counting. Both passes are stable: the edges of a target stay in the
order in which they came, whatever the memory. A bucket that does not fit is read several times,
for one part of its targets at a time; a single target with more edges than fit is passed on as it
comes. What was spilled is journalled, so that a killed run goes on.
"""

from __future__ import annotations

import math
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import DataError, InfeasibleError, StorageError
from fivefold.files import read_checked_json, write_checked_json
from fivefold.gnn.data._parts import EdgeBlock, index_dtype

_SORT_BYTES_PER_EDGE = 48  # ids twice, weights twice, places, and NumPy's temporaries
_MOST_BUCKETS = 512
_MARK_EVERY_EDGES = 32 << 20
_JOURNAL = "journal.json"


@njit
def count_keys(values: Any, width: int, counts: Any) -> None:
    """Add to ``counts[value // width]`` for every value."""
    for value in values:
        counts[int(value) // width] += 1


@njit
def assign_places(values: Any, width: int, starts: Any, places: Any) -> None:
    """Write each value's place in a stable sort by ``value // width``; ``starts`` is used up."""
    for index in range(values.size):
        bucket = int(values[index]) // width
        places[index] = starts[bucket]
        starts[bucket] += 1


@dataclass(frozen=True, slots=True)
class CsrPiece:
    """The next edges in the order of targets, and the degrees of the nodes that end with them.

    ``degrees`` may be empty: then the edges belong to a node that ends in a later piece.
    """

    degrees: NDArray[np.int64]
    sources: NDArray[Any]
    weights: NDArray[np.float32] | None


class EdgeBuckets:
    """Collects edges and hands them out by target."""

    def __init__(
        self,
        folder: Path,
        *,
        num_nodes: int,
        num_sources: int,
        expected_edges: int,
        weighted: bool,
        memory_bytes: int,
        drop_duplicates: bool = False,
    ) -> None:
        self.folder = folder
        self.num_nodes = num_nodes
        self.drop_duplicates = drop_duplicates
        self.limit = max(1024, memory_bytes // _SORT_BYTES_PER_EDGE)
        by_edges = math.ceil(2 * expected_edges / self.limit)
        by_nodes = math.ceil(num_nodes * 8 / max(1, memory_bytes // 8))
        count = min(max(1, by_edges, by_nodes), _MOST_BUCKETS, max(1, num_nodes))
        self.width = max(1, math.ceil(num_nodes / count))
        self._spilled_buckets = max(1, math.ceil(num_nodes / self.width))
        self.in_memory = expected_edges <= self.limit and by_nodes <= 1
        self.columns: dict[str, np.dtype[Any]] = {
            "targets": np.dtype(np.uint32 if self.width < 2**32 else np.int64),
            "sources": index_dtype(num_sources),
        }
        if weighted:
            self.columns["weights"] = np.dtype(np.float32)
        self.sizes = np.zeros(self._spilled_buckets, np.int64)
        self._sums: dict[str, int] = {}  # of what was spilled, by the file's name
        self.position = 0
        self.complete = False
        self._held: list[EdgeBlock] = []
        self._marked = 0

    # --- first pass ---------------------------------------------------------------------------

    def resume(self, recipe_id: str) -> None:
        """Take over what an earlier, killed run has spilled, or begin with an empty folder."""
        self.recipe_id = recipe_id
        if self.in_memory:
            return
        if not self._take_over():
            self.sizes[:] = 0
            self._sums = {}
            self.position, self.complete, self._marked = 0, False, 0
            self.remove()
            self.folder.mkdir(parents=True)

    def _take_over(self) -> bool:
        try:
            journal = read_checked_json(self.folder / _JOURNAL)
        except (DataError, OSError):
            return False  # the edges are read again
        if journal["recipe_id"] != self.recipe_id or journal["width"] != self.width:
            return False
        sizes = np.array(journal["sizes"], np.int64)
        for bucket, size in enumerate(sizes.tolist()):
            for name, dtype in self.columns.items():
                path = self._path(bucket, name)
                stop = size * dtype.itemsize
                if stop and (not path.is_file() or path.stat().st_size < stop):
                    return False
                if path.is_file():
                    os.truncate(path, stop)
        self.sizes, self.position = sizes, journal["position"]
        self._sums = journal["sums"]
        self.complete = journal["complete"]
        self._marked = int(sizes.sum())
        return True

    def add(self, block: EdgeBlock) -> None:
        """Take edges; their ids must be in range."""
        self.position = block.position
        if self.in_memory and self.num_edges + block.targets.size > self.limit:
            self._leave_memory()
        if self.in_memory:
            self._held.append(block)
            self.sizes[0] += block.targets.size
            return
        self._spill(block)
        if self.num_edges - self._marked >= _MARK_EVERY_EDGES:
            self._mark()

    @property
    def num_buckets(self) -> int:
        """Return how many there are to hand out: in memory all edges are in one."""
        return 1 if self.in_memory else self._spilled_buckets

    @property
    def num_edges(self) -> int:
        """Return the number of edges taken so far."""
        return int(self.sizes.sum())

    def finish_adding(self) -> None:
        """Note that all edges are here."""
        self.complete = True
        if not self.in_memory:
            self._mark()

    def _leave_memory(self) -> None:
        """Begin to spill: there are more edges than expected."""
        self.in_memory = False
        self.sizes[:] = 0
        self.remove()
        self.folder.mkdir(parents=True)
        held, self._held = self._held, []
        for block in held:
            self._spill(block)

    def _spill(self, block: EdgeBlock) -> None:
        counts = np.zeros(self.num_buckets, np.int64)
        targets = block.targets.astype(np.int64, copy=False)
        count_keys(targets, self.width, counts)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        places = np.empty(targets.size, np.int64)
        assign_places(targets, self.width, starts[:-1].copy(), places)
        values = {"targets": targets % self.width, "sources": block.sources}
        if block.weights is not None:
            values["weights"] = block.weights
        for name, dtype in self.columns.items():
            ordered = np.empty(targets.size, dtype)
            ordered[places] = values[name]
            self._append(name, ordered, starts)
        self.sizes += counts

    def _append(self, name: str, ordered: NDArray[Any], starts: NDArray[np.int64]) -> None:
        for bucket in np.flatnonzero(np.diff(starts)).tolist():
            path = self._path(bucket, name)
            data = ordered[starts[bucket] : starts[bucket + 1]].data.cast("B")
            self._sums[path.name] = zlib.crc32(data, self._sums.get(path.name, 0))
            try:
                with path.open("ab") as file:
                    file.write(data)
            except OSError as error:
                raise StorageError(
                    f"writing edges to {path} failed: {error.strerror}",
                    hint="free some space and run the same command again, it goes on",
                ) from error

    def _mark(self) -> None:
        """Make what is in the buckets durable."""
        for path in self.folder.glob("*.*"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        journal = {
            "recipe_id": self.recipe_id,
            "width": self.width,
            "sizes": self.sizes.tolist(),
            "position": self.position,
            "complete": self.complete,
            "sums": self._sums,
        }
        write_checked_json(self.folder / _JOURNAL, journal)
        self._marked = self.num_edges

    def _path(self, bucket: int, name: str) -> Path:
        return self.folder / f"bucket_{bucket:04d}.{name}"

    def remove(self) -> None:
        """Delete what was spilled."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- second pass --------------------------------------------------------------------------

    def nodes_of(self, bucket: int) -> int:
        """Return how many targets a bucket covers."""
        return min(self.width, self.num_nodes - bucket * self.width)

    def pieces(self, bucket: int) -> Iterator[CsrPiece]:
        """Yield the edges of a bucket in the order of their targets."""
        if self.in_memory:
            yield from self._all_in_memory()
            return
        self._check(bucket)
        num_nodes = self.nodes_of(bucket)
        for first, stop in self._fitting_parts(bucket, num_nodes):
            if stop - first == 1 and first >= 0 and self._is_giant:
                yield from self._giant(bucket, first)
            else:
                yield self._sorted(self._load(bucket, first, stop), stop - first)

    def _all_in_memory(self) -> Iterator[CsrPiece]:
        """Yield everything at once: there is so little."""
        columns: dict[str, NDArray[Any]] = {
            "targets": _joined([block.targets for block in self._held], np.dtype(np.int64)),
            "sources": _joined([block.sources for block in self._held], self.columns["sources"]),
        }
        if "weights" in self.columns:
            weights = [block.weights for block in self._held if block.weights is not None]
            columns["weights"] = _joined(weights, np.dtype(np.float32))
        yield self._sorted(columns, self.num_nodes)

    def _fitting_parts(self, bucket: int, num_nodes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of targets whose edges fit, relative to the bucket's first."""
        self._is_giant = False
        if self.sizes[bucket] <= self.limit:
            yield 0, num_nodes
            return
        degrees = np.zeros(num_nodes, np.int64)
        for chunk in self._chunks(bucket, "targets"):
            count_keys(chunk, 1, degrees)
        ends = np.cumsum(degrees)
        first = 0
        while first < num_nodes:
            before = ends[first - 1] if first else 0
            stop = int(np.searchsorted(ends, before + self.limit, side="right"))
            self._is_giant = stop <= first
            stop = max(stop, first + 1)
            yield first, stop
            first = stop

    def _check(self, bucket: int) -> None:
        """Compare what was spilled with its checksums, before it is used as indices."""
        for name in self.columns if self.sizes[bucket] else ():
            path, checksum = self._path(bucket, name), 0
            for chunk in self._chunks(bucket, name):
                checksum = zlib.crc32(chunk.data.cast("B"), checksum)
            if checksum != self._sums[path.name]:
                raise DataError(
                    f"{path} is damaged: its checksum is wrong",
                    hint=f"remove {self.folder} and run the same command again",
                )

    def _chunks(self, bucket: int, name: str) -> Iterator[NDArray[Any]]:
        """Yield a column of a bucket, a part that surely fits at a time."""
        step = max(1, self.limit // 4)
        with self._path(bucket, name).open("rb") as file:
            for first in range(0, int(self.sizes[bucket]), step):
                count = min(step, int(self.sizes[bucket]) - first)
                chunk = np.fromfile(file, self.columns[name], count)
                if chunk.size != count:
                    raise StorageError(
                        f"{self._path(bucket, name)} is too short: {chunk.size} of {count} edges",
                        hint=f"remove {self.folder} and run the same command again",
                    )
                yield chunk

    def _load(self, bucket: int, first: int, stop: int) -> dict[str, NDArray[Any]]:
        """Return the edges into targets first..stop-1 of a bucket; these become 0..stop-first-1."""
        if self.sizes[bucket] == 0:
            return {name: np.empty(0, dtype) for name, dtype in self.columns.items()}
        chunks: dict[str, list[NDArray[Any]]] = {name: [] for name in self.columns}
        columns = (self._chunks(bucket, name) for name in self.columns)
        everything = first == 0 and stop == self.nodes_of(bucket)
        for parts in zip(*columns, strict=True):
            targets = parts[0]
            wanted = slice(None) if everything else (targets >= first) & (targets < stop)
            for name, part in zip(self.columns, parts, strict=True):
                chunks[name].append(part[wanted])
        loaded = {name: _joined(chunks.pop(name), self.columns[name]) for name in self.columns}
        if first:
            loaded["targets"] -= loaded["targets"].dtype.type(first)
        return loaded

    def _giant(self, bucket: int, target: int) -> Iterator[CsrPiece]:
        """Yield one target with more edges than fit: they are in the right order already."""
        if self.drop_duplicates:
            node = bucket * self.width + target
            raise InfeasibleError(
                f"node {node} has more than {self.limit} edges, too many to find duplicates",
                hint="allow more memory_bytes, or keep duplicates",
            )
        nothing, degree = np.empty(0, np.int64), 0
        columns = (self._chunks(bucket, name) for name in self.columns)
        for targets, sources, *weights in zip(*columns, strict=True):
            wanted = targets == target
            degree += int(np.count_nonzero(wanted))
            yield CsrPiece(nothing, sources[wanted], weights[0][wanted] if weights else None)
        empty = np.empty(0, self.columns["sources"])
        no_weights = np.empty(0, np.float32) if "weights" in self.columns else None
        yield CsrPiece(np.array([degree]), empty, no_weights)

    def _sorted(self, columns: dict[str, NDArray[Any]], num_nodes: int) -> CsrPiece:
        if self.drop_duplicates:
            columns = _without_duplicates(columns)
        targets = columns["targets"]
        degrees = np.zeros(num_nodes, np.int64)
        count_keys(targets, 1, degrees)
        starts = np.cumsum(degrees) - degrees
        places = np.empty(targets.size, np.int64)
        assign_places(targets, 1, starts, places)
        ordered = {}
        for name in ("sources", "weights"):
            if name in columns:
                ordered[name] = np.empty_like(columns[name])
                ordered[name][places] = columns[name]
        return CsrPiece(degrees, ordered["sources"], ordered.get("weights"))


def _joined(parts: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    if not parts:
        return np.empty(0, dtype)
    return np.concatenate(parts).astype(dtype, copy=False)


def _without_duplicates(columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the edges by target and source, the first of equal ones."""
    order = np.lexsort((columns["sources"], columns["targets"]))
    targets, sources = columns["targets"][order], columns["sources"][order]
    first = np.ones(order.size, bool)
    first[1:] = (targets[1:] != targets[:-1]) | (sources[1:] != sources[:-1])
    return {name: values[order[first]] for name, values in columns.items()}
