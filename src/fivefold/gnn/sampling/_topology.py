"""The edges of a graph as in-neighbours in compressed rows, in memory or mapped from a file.

Messages flow from source to target, so a sampler walks from a target to the sources of its edges:
``indices[indptr[v]:indptr[v + 1]]`` are the sources of the edges into ``v``. The arrays are
checked once and then read-only. This module knows nothing of features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling._kernels import (
    LOCAL_BITS,
    check_indices,
    check_indptr,
    check_weights,
)
from fivefold.gnn.storage import WatchedFile

if TYPE_CHECKING:
    from fivefold.gnn.storage import Container

_MOST_NODES = (1 << (63 - LOCAL_BITS)) - 2  # what a slot of the sampler's hash table can hold
_MOST_DEGREE = (1 << 31) - 1  # what the degrees of a batch can hold
_BLOCK_ROWS = 1 << 20


class Topology:
    """In-neighbours of every node.

    Args:
        indptr: ``[num_nodes + 1]``, where each node's edges begin; int64.
        indices: ``[num_edges]``, the source of each edge; int32 or int64, others are converted.
        weights: ``[num_edges]``, finite and not negative; float32. None means all alike.
        num_sources: How many nodes ``indices`` may name, where sources are of another type than
            targets; None means the same nodes.
        check: Check every index and weight now. Without it only ``indptr`` is checked, and an
            index out of range is found when it is sampled.

    Raises:
        DataError: The arrays do not describe a graph; the message names the first fault.

    Examples:
        >>> topology = Topology([0, 2, 2, 3], [1, 2, 0])  # edges 1->0, 2->0, 0->2
        >>> topology.num_nodes, topology.num_edges, topology.neighbors(0).tolist()
        (3, 3, [1, 2])
    """

    def __init__(
        self,
        indptr: ArrayLike,
        indices: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        num_sources: int | None = None,
        check: bool = True,
    ) -> None:
        self._hold(indptr, indices, weights, num_sources)
        self.max_degree: int = self._check_rows([self.indptr])
        if check:
            self.check()

    def _hold(
        self,
        indptr: ArrayLike,
        indices: ArrayLike,
        weights: ArrayLike | None,
        num_sources: int | None,
    ) -> None:
        self.indptr: NDArray[np.int64] = _frozen(indptr, "indptr", np.int64)
        self.indices: NDArray[Any] = _frozen(indices, "indices", _index_dtype(indices))
        self.weights: NDArray[np.float32] | None = None
        if weights is not None:
            self.weights = _frozen(weights, "weights", np.float32)
        if self.indptr.size == 0:
            message = "indptr is empty"
            raise DataError(message, hint="it has one entry more than there are nodes")
        self.num_nodes: int = self.indptr.size - 1
        self.num_edges: int = self.indices.size
        self.num_sources: int = self.num_nodes if num_sources is None else num_sources
        self._fingerprint: str | None = None
        self._watched: WatchedFile | None = None

    @classmethod
    def open(cls, container: Container, mapped: bool = False) -> Topology:  # noqa: FBT001, FBT002
        """Return the topology in a container of kind ``"graph"``.

        Args:
            container: Has sections ``indptr``, ``indices`` and perhaps ``weights``.
            mapped: Leave the arrays on the disk and map them with advice for random access.
                All is read through once and verified in both cases, a mapped file in blocks; and
                samplers refuse a mapped file that is written to afterwards.

        Raises:
            DataError: A section is missing, damaged, or does not describe a graph.
            StorageError: The disk refused.
        """
        missing = {"indptr", "indices"} - set(container.sections)
        if missing:
            raise DataError(
                f"a container of kind {container.kind!r} without {' and '.join(sorted(missing))}",
                hint="a graph container comes from fivefold gnn ingest",
            )
        read = container.memory_map if mapped else container.read
        weights = read("weights") if "weights" in container.sections else None
        topology: Topology = cls.__new__(cls)
        num_sources = container.attributes.get("num_sources")
        topology._hold(read("indptr"), read("indices"), weights, num_sources)
        if mapped:  # what is verified now was written before this moment
            topology._watched = WatchedFile(container.path, container.descriptor)
        rows = _read_blocks(container) if mapped else [topology.indptr]
        topology.max_degree = topology._check_rows(rows)
        for name in ("indices", "weights"):
            if name not in container.sections:
                continue
            blocks = _read_parts(container, name) if mapped else [getattr(topology, name)]
            topology._check_values(name, blocks)
        topology.check_unchanged()
        topology._fingerprint = container.fingerprint
        return topology

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays, in memory or mapped."""
        weights = 0 if self.weights is None else self.weights.nbytes
        return self.indptr.nbytes + self.indices.nbytes + weights

    @property
    def fingerprint(self) -> str:
        """Return a digest of the arrays, or that of the container they came from."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            digest.update(f"{self.num_nodes} {self.num_sources} {self.indices.dtype}".encode())
            for array in (self.indptr, self.indices, self.weights):
                if array is not None:
                    digest.update(array.view(np.uint8).data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def neighbors(self, node: int) -> NDArray[Any]:
        """Return the sources of the edges into ``node``.

        Raises:
            ConfigurationError: There is no such node.
        """
        if not 0 <= node < self.num_nodes:
            raise ConfigurationError(f"node {node} is out of range", hint=f"< {self.num_nodes}")
        sources: NDArray[Any] = self.indices[self.indptr[node] : self.indptr[node + 1]]
        return sources

    def check(self) -> None:
        """Read all indices and weights once.

        Raises:
            DataError: A source is out of range, or a weight is negative or not finite.
        """
        self._check_values("indices", [self.indices])
        if self.weights is not None:
            self._check_values("weights", [self.weights])

    def _check_values(self, name: str, blocks: Iterable[NDArray[Any]]) -> None:
        first = 0
        for block in blocks:
            indices = name == "indices"
            place = check_indices(block, self.num_sources) if indices else check_weights(block)
            if place >= 0 and indices:
                raise DataError(
                    f"edge {first + place} comes from node {block[place]}",
                    hint=f"sources are 0 to {self.num_sources - 1}",
                )
            if place >= 0:
                raise DataError(
                    f"edge {first + place} has weight {block[place]}",
                    hint="weights are finite and not negative; 0 means never sampled",
                )
            first += block.size

    def check_unchanged(self) -> None:
        """Make sure that a mapped file is still the one that was verified.

        Raises:
            DataError: It has been written to since.
        """
        if self._watched is not None:
            self._watched.check()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": None}  # the copy has its arrays in memory

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for array in (self.indptr, self.indices, self.weights):
            if array is not None:
                array.flags.writeable = False  # which pickling forgets

    def _check_rows(self, blocks: Iterable[NDArray[np.int64]]) -> int:
        if max(self.num_nodes, self.num_sources) > _MOST_NODES:
            raise DataError(f"{self.num_nodes} nodes", hint=f"at most {_MOST_NODES}")
        if self.weights is not None and self.weights.size != self.num_edges:
            raise DataError(
                f"{self.weights.size} weights for {self.num_edges} edges", hint="one for each edge"
            )
        node, most = -1, 0
        begin, reached = 0, 0
        for block in blocks:
            wrong, greatest = check_indptr(block)
            if block[0] != reached:
                wrong = 0
            node = begin + wrong if node < 0 <= wrong else node
            most = max(most, greatest)
            begin, reached = begin + block.size - 1, block[-1]
        if node < 0 and reached != self.num_edges:
            node = self.num_nodes
        if node >= 0:
            raise DataError(
                f"indptr is wrong at node {node}",
                hint=f"it starts at 0, never falls and ends at the {self.num_edges} edges",
            )
        if most > _MOST_DEGREE:
            raise DataError(f"a node has {most} in-edges", hint=f"at most {_MOST_DEGREE}")
        return most


def _read_parts(container: Container, name: str) -> Iterator[NDArray[Any]]:
    """Yield a section in verified pieces."""
    rows = container.sections[name].num_rows
    for start in range(0, rows, _BLOCK_ROWS):
        yield container.read(name, start, min(start + _BLOCK_ROWS, rows))


def _read_blocks(container: Container) -> Iterator[NDArray[np.int64]]:
    """Yield ``indptr`` in verified pieces, each beginning with the last number of the one before.

    Reading it in order is far faster than a pass over a map that expects random accesses.
    """
    rows = container.sections["indptr"].num_rows
    for start in range(0, max(rows - 1, 1), _BLOCK_ROWS):
        yield container.read("indptr", start, min(start + _BLOCK_ROWS + 1, rows))


def _index_dtype(indices: ArrayLike) -> type[np.int32 | np.int64]:
    return np.int32 if getattr(indices, "dtype", None) == np.int32 else np.int64


def _frozen(values: ArrayLike, name: str, dtype: Any) -> NDArray[Any]:
    """Return a read-only, contiguous, plain array: one type, so one compiled version."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}", hint="it has one dimension")
    if array.size and array.dtype.kind not in ("f" if name == "weights" else "iu"):
        raise DataError(f"{name} has dtype {array.dtype}", hint=f"use {np.dtype(dtype).name}")
    frozen = np.ascontiguousarray(array, dtype=dtype).view()
    frozen.flags.writeable = False
    return frozen
