"""A file of mini-batches that were sampled offline, read batch by batch.

A record is node ids, sources, edge ids (if any) and degrees, each in the narrowest type that the
graph and the fan-outs allow, one after another without gaps; the rest of its last page is zero.
So one read gets a batch, and one shorter read its node ids. Counts are in the index, a table of
one row per batch: first page, epoch, nodes per hop, edges per hop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling._batch import SampledBatch
from fivefold.gnn.storage import Container

KIND = "samples"
FORMAT_VERSION = 1
PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class RecordForm:
    """The types in a record; the same for a whole file.

    Attributes:
        node_dtype: Of node ids.
        degree_dtype: Of degrees.
        edge_dtype: Of edge ids; None where there are none.
        num_hops: Hops of every batch.
    """

    node_dtype: np.dtype[Any]
    degree_dtype: np.dtype[Any]
    edge_dtype: np.dtype[Any] | None
    num_hops: int

    @property
    def index_width(self) -> int:
        """Return the number of columns of the index."""
        return 2 + 2 * self.num_hops + 1

    def index_row(self, batch: SampledBatch, *, first_page: int, epoch: int) -> NDArray[np.int64]:
        """Return the row of the index for a batch."""
        row = [first_page, epoch, *batch.nodes_per_hop, *batch.edges_per_hop]
        return np.array(row, np.int64)

    def encode(self, batch: SampledBatch) -> NDArray[np.uint8]:
        """Return the record: ``[pages, 4096]``."""
        parts: list[NDArray[Any]] = [
            batch.node_ids.astype(self.node_dtype),
            batch.sources.astype(np.int32),
        ]
        if self.edge_dtype is not None:
            assert batch.edge_ids is not None, "the form has edge ids because the sampler does"
            parts.append(batch.edge_ids.astype(self.edge_dtype))
        parts.append(batch.degrees.astype(self.degree_dtype))
        pages = np.zeros((-(-sum(part.nbytes for part in parts) // PAGE_BYTES), PAGE_BYTES), "u1")
        flat, place = pages.reshape(-1), 0
        for part in parts:
            flat[place : place + part.nbytes] = part.view(np.uint8)
            place += part.nbytes
        return pages

    def num_pages(self, row: NDArray[np.int64]) -> int:
        """Return the length of the record that an index row describes."""
        nodes, edges = self._counts(row)
        size = int(nodes.sum()) * self.node_dtype.itemsize + int(edges.sum()) * 4
        size += int(nodes[:-1].sum()) * self.degree_dtype.itemsize
        if self.edge_dtype is not None:
            size += int(edges.sum()) * self.edge_dtype.itemsize
        return -(-size // PAGE_BYTES)

    def num_node_pages(self, row: NDArray[np.int64]) -> int:
        """Return how many pages of the record hold node ids."""
        return -(-self.num_nodes(row) * self.node_dtype.itemsize // PAGE_BYTES)

    def num_nodes(self, row: NDArray[np.int64]) -> int:
        """Return the nodes of the batch."""
        return int(self._counts(row)[0].sum())

    def decode_node_ids(
        self, pages: NDArray[np.uint8], row: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the node ids from the front pages of a record."""
        count = self.num_nodes(row) * self.node_dtype.itemsize
        return pages.reshape(-1)[:count].view(self.node_dtype).astype(np.int64)

    def decode(
        self, pages: NDArray[np.uint8], row: NDArray[np.int64], *, number: int
    ) -> SampledBatch:
        """Return the batch of a record."""
        nodes, edges = self._counts(row)
        flat = pages.reshape(-1)
        place = self.num_nodes(row) * self.node_dtype.itemsize

        def take(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
            nonlocal place
            # A copy by bytes: later arrays may not lie on a multiple of their item size.
            array = np.frombuffer(flat[place : place + count * dtype.itemsize].tobytes(), dtype)
            place += count * dtype.itemsize
            return array

        num_edges = int(edges.sum())
        sources = take(num_edges, np.dtype(np.int32))
        edge_ids = None
        if self.edge_dtype is not None:
            edge_ids = take(num_edges, self.edge_dtype).astype(np.int64)
        return SampledBatch(
            number=number,
            node_ids=self.decode_node_ids(pages, row),
            batch_size=int(nodes[0]),
            nodes_per_hop=nodes.copy(),
            edges_per_hop=edges.copy(),
            degrees=take(int(nodes[:-1].sum()), self.degree_dtype).astype(np.int32),
            sources=sources,
            edge_ids=edge_ids,
        )

    def _counts(self, row: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        split = 2 + self.num_hops + 1
        return row[2:split], row[split:]


def record_form(
    *, num_nodes: int, num_edges: int, max_degree: int, fanouts: Sequence[int], edge_ids: bool
) -> RecordForm:
    """Return the narrowest form for what a sampler may yield."""
    most = max_degree if min(fanouts) < 0 else min(max_degree, max(fanouts))
    return RecordForm(
        node_dtype=_signed(num_nodes),
        degree_dtype=np.min_scalar_type(most),
        edge_dtype=_signed(num_edges) if edge_ids else None,
        num_hops=len(fanouts),
    )


def _signed(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count <= 1 << 31 else np.int64)


class SampleFile:
    """The batches of one or more epochs; made by :func:`sample_epochs`.

    Every batch is one record on page boundaries, so that it takes one read. Batches of all epochs
    are numbered through: batch ``i`` of epoch ``e`` has the number ``e * batches_per_epoch + i``.

    Args:
        container: An open container of kind ``"samples"``.

    Raises:
        DataError: It is of another kind or version.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.sampling import NeighborSampler, Topology, sample_epochs
        >>> sampler = NeighborSampler(Topology([0, 2, 2, 3], [1, 2, 0]), [-1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sample_epochs(sampler, [0, 2], f"{folder}/s.fvf", batch_size=1) as samples:
        ...         print(samples.num_batches, samples.counts.tolist())
        2 [2, 1, 2]
    """

    def __init__(self, container: Container) -> None:
        container.check_kind(KIND)
        self.container = container
        version = container.attributes.get("format_version")
        if version != FORMAT_VERSION:
            raise DataError(
                f"{container.path} holds samples of format {version}",
                hint=f"this version reads format {FORMAT_VERSION}; sample again",
            )
        attributes = container.attributes
        self._form = form_from_attributes(attributes)
        self._index: NDArray[np.int64] = container.read("index")
        self.num_batches: int = len(self._index)
        self.batch_size: int = attributes["batch_size"]
        self.num_epochs: int = attributes["epochs"]
        self.first_epoch: int = attributes["first_epoch"]
        self.num_nodes: int = attributes["num_nodes"]
        self.fanouts: tuple[int, ...] = tuple(attributes["fanouts"])
        self.seed: int = attributes["seed"]
        self.topology_fingerprint: str = attributes["topology"]
        self._counts: NDArray[np.uint32] | None = None
        self._train_ids: NDArray[np.int64] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file.

        Raises:
            DataError: There is none, or it is foreign, damaged, truncated or of another version.
            StorageError: The disk refused.
        """
        container = Container.open(path, kind=KIND)
        try:
            return cls(container)
        except BaseException:
            container.close()
            raise

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self.container.path

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches of an epoch."""
        return self.num_batches // self.num_epochs

    @property
    def fingerprint(self) -> str:
        """Return a hash over all contents."""
        return self.container.fingerprint

    @property
    def nbytes(self) -> int:
        """Return the length of the file."""
        return self.container.nbytes

    @property
    def counts(self) -> NDArray[np.uint32]:
        """Return how many batches use each node."""
        if self._counts is None:
            self._counts = self.container.read("counts")
        return self._counts

    @property
    def train_ids(self) -> NDArray[np.int64]:
        """Return the seeds of an epoch, as they were given."""
        if self._train_ids is None:
            self._train_ids = self.container.read("train_ids")
        return self._train_ids

    def batch(self, number: int) -> SampledBatch:
        """Read one batch.

        Raises:
            ConfigurationError: There is no batch of this number.
            DataError: A page is damaged.
            StorageError: The disk refused.
        """
        row = self._row(number)
        pages = self._pages(row, self._form.num_pages(row))
        return self._form.decode(pages, row, number=number)

    def node_ids(self, number: int) -> NDArray[np.int64]:
        """Read the node ids of one batch, and nothing else of it.

        Raises:
            ConfigurationError: There is no batch of this number.
            DataError: A page is damaged.
            StorageError: The disk refused.
        """
        row = self._row(number)
        return self._form.decode_node_ids(self._pages(row, self._form.num_node_pages(row)), row)

    def num_nodes_of(self, number: int) -> int:
        """Return how many nodes a batch has, without reading it.

        Raises:
            ConfigurationError: There is no batch of this number.
        """
        return self._form.num_nodes(self._row(number))

    def record_bytes_of(self, number: int) -> int:
        """Return how many bytes a batch takes in the file, without reading it.

        Raises:
            ConfigurationError: There is no batch of this number.
        """
        return self._form.num_pages(self._row(number)) * PAGE_BYTES

    def close(self) -> None:
        """Let go of the file."""
        self.container.close()

    def __len__(self) -> int:
        return self.num_batches

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _row(self, number: int) -> NDArray[np.int64]:
        if not 0 <= number < self.num_batches:
            raise ConfigurationError(
                f"there is no batch {number}", hint=f"batches are 0 to {self.num_batches - 1}"
            )
        row: NDArray[np.int64] = self._index[number]
        return row

    def _pages(self, row: NDArray[np.int64], count: int) -> NDArray[np.uint8]:
        first = int(row[0])
        return self.container.read("records", first, first + count)


def form_from_attributes(attributes: dict[str, Any]) -> RecordForm:
    """Return the form of the records of a file."""
    try:
        edge_dtype = attributes["edge_dtype"]
        return RecordForm(
            node_dtype=np.dtype(attributes["node_dtype"]),
            degree_dtype=np.dtype(attributes["degree_dtype"]),
            edge_dtype=None if edge_dtype is None else np.dtype(edge_dtype),
            num_hops=len(attributes["fanouts"]),
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"a sample file without {error}", hint="sample again") from error
