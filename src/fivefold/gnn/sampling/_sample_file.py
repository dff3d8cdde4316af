"""A file of mini-batches that were sampled offline, read batch by batch."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling._batch import SampledBatch
from fivefold.gnn.sampling._sample_record import PAGE_BYTES, RecordForm
from fivefold.gnn.storage import Container

KIND = "samples"
FORMAT_VERSION = 1


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
        """Where the file is."""
        return self.container.path

    @property
    def batches_per_epoch(self) -> int:
        """Batches in each epoch."""
        return self.num_batches // self.num_epochs

    @property
    def fingerprint(self) -> str:
        """A hash over all contents."""
        return self.container.fingerprint

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self.container.nbytes

    @property
    def counts(self) -> NDArray[np.uint32]:
        """How many batches use each node."""
        if self._counts is None:
            self._counts = self.container.read("counts")
        return self._counts

    @property
    def train_ids(self) -> NDArray[np.int64]:
        """The seeds of an epoch, as they were given."""
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
