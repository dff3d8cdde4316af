"""The edges of a graph as in-neighbours in compressed rows, in memory or mapped from a file.

The arrays are checked once and then read-only. This module knows nothing of features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError, DataError, require_flag, require_whole
from fivefold.gnn.sampling.batches import EdgeType
from fivefold.gnn.sampling.kernels import LOCAL_BITS
from fivefold.gnn.storage.files import WatchedFile
from fivefold.gnn.storage.pages import Array, Ids, first_outside

if TYPE_CHECKING:
    from fivefold.gnn.storage import Container

_MOST_NODES = (1 << (63 - LOCAL_BITS)) - 2  # what a slot of the sampler's hash table can hold
_MOST_IDS = 1 << 62
_OF_FILES = ("arrays", "ogb", "mag240m", "pyg", "tables")  # sources whose edges have an order
_BLOCK_ROWS = 1 << 20
_MOST_DEGREE = (1 << 31) - 1  # what the degrees of a batch can hold


class Adjacency:
    """In-neighbours of every node.

    Args:
        indptr: ``[num_nodes + 1]``, where each node's edges begin; int64.
        indices: ``[num_edges]``, the source of each edge; int32 or int64, others are converted.
        weights: ``[num_edges]``, finite and not negative; float32. None means all alike.
        edge_ids: ``[num_edges]``, a number that samples carry for each edge, such as the row of
            its features: its place in the source. None means its place in ``indices``.
        num_sources: How many nodes ``indices`` may name, where sources are of another type than
            targets; None means the same nodes.
        check: Check every index and weight now. Without it only ``indptr`` is checked, and an
            index out of range is found when it is sampled.

    Raises:
        DataError: The arrays do not describe a graph; the message names the first fault.

    Examples:
        >>> topology = Adjacency([0, 2, 2, 3], [1, 2, 0])  # edges 1->0, 2->0, 0->2
        >>> topology.num_nodes, topology.num_edges, topology.neighbors(0).tolist()
        (3, 3, [1, 2])
    """

    def __init__(
        self,
        indptr: ArrayLike,
        indices: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        edge_ids: ArrayLike | None = None,
        num_sources: int | None = None,
        check: bool = True,
    ) -> None:
        self._hold(indptr, indices, weights, edge_ids, num_sources)
        self._check_rows(self._blocks("indptr"))
        if require_flag("check", check):
            self._check_values(self._blocks)

    def _hold(
        self,
        indptr: ArrayLike,
        indices: ArrayLike,
        weights: ArrayLike | None,
        edge_ids: ArrayLike | None,
        num_sources: int | None,
    ) -> None:
        self.indptr: Ids = _frozen(indptr, "indptr", np.int64)
        self.indices: Array = _frozen(indices, "indices", _narrow(indices))
        self.weights: NDArray[np.float32] | None = None
        if weights is not None:
            self.weights = _frozen(weights, "weights", np.float32)
        self._edge_ids: Array | None = None
        self._unread: _Unread | None = None
        if edge_ids is not None:
            self._edge_ids = _frozen(edge_ids, "edge_ids", _narrow(edge_ids))
        if self.indptr.size == 0:
            message = "indptr is empty"
            raise DataError(message, hint="it has one entry more than there are nodes")
        self.num_nodes: int = self.indptr.size - 1
        self.num_edges: int = self.indices.size
        self.num_sources: int = self.num_nodes
        if num_sources is not None:
            self.num_sources = require_whole("num_sources", num_sources, least=0)
        self.num_source_edges: int = self.num_edges
        if self._edge_ids is not None:
            self.num_source_edges = max(self.num_edges, 1 + int(self._edge_ids.max(initial=-1)))
        self._fingerprint: str | None = None
        self._watched: WatchedFile | None = None

    @property
    def edge_ids(self) -> Array | None:
        """Return the number of each edge, read from the file when first asked for.

        Raises:
            DataError: The file was written without them.
        """
        if self._unread is not None:
            found = self._unread.read()
            _check_block("edge_ids", found, 0, self.num_source_edges)
            self._edge_ids, self._unread = _frozen(found, "edge_ids", found.dtype), None
        return self._edge_ids

    def numbers_of(self, places: Ids) -> Ids:
        """Return the numbers of the edges at these places of ``indices``."""
        ids = self.edge_ids
        return places.copy() if ids is None else ids[places].astype(np.int64, copy=False)

    @classmethod
    def open(
        cls,
        container: Container,
        mapped: bool = False,  # noqa: FBT001, FBT002
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Adjacency:
        """Return the topology in a container of kind ``"graph"``.

        Args:
            container: Has sections ``indptr``, ``indices`` and perhaps ``weights``.
            mapped: Leave the arrays on the disk and map them with advice for random access.
                All is read through once and verified in both cases, a mapped file in blocks; and
                samplers refuse a mapped file that is written to afterwards.
            progress: Told of ("topology", done, total) while all is read.

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

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress("topology", done, total)

        require_flag("mapped", mapped)
        read = container.memory_map if mapped else partial(container.read, progress=tell)
        weights = read("weights") if "weights" in container.sections else None
        topology: Adjacency = cls.__new__(cls)
        about = container.attributes
        topology._hold(read("indptr"), read("indices"), weights, None, about.get("num_sources"))
        count = about.get("source_edges")
        # Earlier versions kept no numbers, except of edges with features.
        earlier = "source_edges" not in about and about.get("recipe", {}).get("source") in _OF_FILES
        if count is not None or "edge_ids" in container.sections or earlier:
            topology.num_source_edges = topology.num_edges if count is None else int(count)
            topology._unread = _Unread(container.path, container.fingerprint, mapped)
        if mapped:  # what is verified now was written before this moment
            topology._watched = WatchedFile(container.path, container.descriptor)
            topology._check_rows(container.blocks("indptr", _BLOCK_ROWS, overlap=1))
            topology._check_values(lambda name: container.blocks(name, _BLOCK_ROWS), tell)
        else:
            topology._check_rows(topology._blocks("indptr"))
            topology._check_values(topology._blocks)
        topology.check_unchanged()
        topology._fingerprint = container.fingerprint
        return topology

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays, in memory or mapped."""
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> list[Array]:
        arrays = (self.indptr, self.indices, self.weights, self._edge_ids)
        return [array for array in arrays if array is not None]

    @property
    def fingerprint(self) -> str:
        """Return a digest of the arrays, or that of the container they came from."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            digest.update(f"{self.num_nodes} {self.num_sources} {self.indices.dtype}".encode())
            for array in self._arrays():
                digest.update(array.view(np.uint8).data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def neighbors(self, node: int) -> Array:
        """Return the sources of the edges into ``node``.

        Raises:
            ConfigurationError: There is no such node.
        """
        if not 0 <= node < self.num_nodes:
            raise ConfigurationError(f"node {node} is out of range", hint=f"< {self.num_nodes}")
        sources: Array = self.indices[self.indptr[node] : self.indptr[node + 1]]
        return sources

    def _blocks(self, name: str) -> Iterator[Array]:
        """Yield an array in parts; those of indptr share an entry."""
        array, overlap = getattr(self, name), int(name == "indptr")
        for start in range(0, max(len(array) - overlap, 1), _BLOCK_ROWS):
            yield array[start : start + _BLOCK_ROWS + overlap]

    def _check_values(
        self,
        blocks: Callable[[str], Iterable[Array]],
        tell: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        """Read all that there is beside ``indptr`` once, in blocks."""
        held = {"indices": self.indices, "weights": self.weights, "edge_ids": self._edge_ids}
        for name, array in held.items():
            first = 0
            for block in blocks(name) if array is not None else ():
                _check_block(name, block, first, self.num_sources)
                first += block.size
                tell(first, self.num_edges)

    def check_unchanged(self) -> None:
        """Raise a DataError where a mapped file has been written to since it was verified."""
        if self._watched is not None:
            self._watched.check()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": None}  # the copy has its arrays in memory

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for array in self._arrays():
            array.flags.writeable = False  # which pickling forgets

    def _check_rows(self, blocks: Iterable[Ids]) -> None:
        if max(self.num_nodes, self.num_sources) > _MOST_NODES:
            raise DataError(f"{self.num_nodes} nodes", hint=f"at most {_MOST_NODES}")
        for what, array in (("weights", self.weights), ("edge ids", self._edge_ids)):
            if array is not None and array.size != self.num_edges:
                message = f"{array.size} {what} for {self.num_edges} edges"
                raise DataError(message, hint="one for each edge")
        node, most, begin, reached = -1, 0, 0, 0
        for block in blocks:
            degrees = np.diff(block)
            falls = np.flatnonzero(degrees < 0)
            if node < 0 and block[0] != reached:
                node = begin
            elif node < 0 and falls.size:
                node = begin + int(falls[0])
            most = max(most, int(degrees.max(initial=0)))
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
        self.max_degree: int = most


@dataclass(frozen=True)
class _Unread:
    """The numbers of edges in the file of a topology, which few readers need."""

    path: Path
    fingerprint: str
    mapped: bool

    def read(self) -> Array:
        """Read them, once, from the same file."""
        from fivefold.gnn.storage import Container  # noqa: PLC0415 - storage stands above

        with Container.open(self.path, kind="graph") as graph:
            if graph.fingerprint != self.fingerprint:
                raise DataError(f"{self.path} was exchanged while it was used", hint="start again")
            if "edge_ids" not in graph.sections:
                raise DataError(
                    f"{self.path} does not say in which order its edges came: an earlier version "
                    "wrote it",
                    hint="ingest the graph again: then all that is given per edge finds its edge",
                )
            return graph.memory_map("edge_ids") if self.mapped else graph.read("edge_ids")


def _check_block(name: str, block: Array, first: int, num_sources: int) -> None:
    """Refuse what no edge can have; ``first`` is the place of the block."""
    what, hint = {
        "indices": ("comes from node", f"sources are 0 to {num_sources - 1}"),
        "weights": ("has weight", "weights are finite and not negative; 0 means never sampled"),
        "edge_ids": ("has the id", "from 0 on"),
    }[name]
    if name == "weights":
        whole = not block.size or (block.min() >= 0 and block.max() < np.inf)
        place = -1 if whole else int(np.argmin((block >= 0) & (block < np.inf)))
    else:
        place = first_outside(block, _MOST_IDS if name == "edge_ids" else num_sources)
    if place >= 0:
        raise DataError(f"edge {first + place} {what} {block[place]}", hint=hint)


def _narrow(values: ArrayLike) -> Any:
    return np.int32 if getattr(values, "dtype", None) == np.int32 else np.int64


def _frozen(values: ArrayLike, name: str, dtype: Any) -> Array:
    """Return a read-only, contiguous, plain array: one type, so one compiled version."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}", hint="it has one dimension")
    if array.size and array.dtype.kind not in ("f" if name == "weights" else "iu"):
        raise DataError(f"{name} has dtype {array.dtype}", hint=f"use {np.dtype(dtype).name}")
    frozen = np.ascontiguousarray(array, dtype=dtype).view()
    frozen.flags.writeable = False
    return frozen


class HeteroAdjacency:
    """One :class:`Adjacency` for each edge type ``(source type, relation, target type)``.

    Args:
        num_nodes: Nodes of each type. Sampling goes by the order of ``edges``, not of this.
        edges: In-neighbours of the target type's nodes; ``indices`` are nodes of the source type.

    Raises:
        DataError: An edge type names an unknown node type, or its sizes do not fit.

    Examples:
        >>> cites = Adjacency([0, 1, 1], [1])
        >>> writes = Adjacency([0, 2, 3], [0, 1, 2], num_sources=3)
        >>> graph = HeteroAdjacency(
        ...     {"paper": 2, "author": 3},
        ...     {("paper", "cites", "paper"): cites, ("author", "writes", "paper"): writes},
        ... )
        >>> graph.num_edges
        4
    """

    def __init__(self, num_nodes: Mapping[str, int], edges: Mapping[EdgeType, Adjacency]) -> None:
        self.num_nodes: dict[str, int] = dict(num_nodes)
        self.edges: dict[EdgeType, Adjacency] = dict(edges)
        for edge_type, topology in self.edges.items():
            source, _, target = edge_type
            unknown = {source, target} - set(self.num_nodes)
            if unknown:
                raise DataError(
                    f"edge type {edge_type} joins {min(unknown)!r}",
                    hint=f"node types are {', '.join(sorted(self.num_nodes))}",
                )
            sizes = (topology.num_sources, topology.num_nodes)
            expected = (self.num_nodes[source], self.num_nodes[target])
            if sizes != expected:
                raise DataError(
                    f"edge type {edge_type} has {sizes} sources and targets",
                    hint=f"its node types have {expected}; give Adjacency its num_sources",
                )

    @property
    def node_types(self) -> list[str]:
        """Return the node types, in the order given."""
        return list(self.num_nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        """Return the edge types, in the order in which a hop visits them."""
        return list(self.edges)

    @property
    def num_edges(self) -> int:
        """Return the number of edges of all types."""
        return sum(topology.num_edges for topology in self.edges.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(topology.nbytes for topology in self.edges.values())

    @property
    def fingerprint(self) -> str:
        """Return a digest of the types and of the fingerprint of each topology."""
        digest = hashlib.blake2b(repr(sorted(self.num_nodes.items())).encode(), digest_size=16)
        for edge_type, topology in self.edges.items():
            digest.update(f"{edge_type} {topology.fingerprint}".encode())
        return digest.hexdigest()
