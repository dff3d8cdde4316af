"""What planning asks of its surroundings: sampled batches, and a disk that has a price.

Only protocols, so that plans can be made for sample files, for lists in memory and for traces of
tests alike. Nothing here knows how batches are stored or how a disk is measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError

Ids = NDArray[np.int64]
Array = NDArray[Any]


class SampleSource(Protocol):
    """Sampled batches whose node ids can be asked for one batch at a time.

    ``fivefold.gnn.sampling.SampleFile`` is one, ``BatchList`` another.

    Examples:
        >>> source: SampleSource = BatchList([np.array([4, 1])], num_nodes=5)
        >>> source.node_ids(0).tolist()
        [4, 1]
    """

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        ...

    @property
    def num_nodes(self) -> int:
        """Ids are 0 to ``num_nodes - 1``."""
        ...

    @property
    def counts(self) -> Array:
        """In how many batches each node is, [num_nodes]."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that changes when the batches change."""
        ...

    def node_ids(self, batch: int, /) -> Array:
        """The distinct node ids of one batch, in any order."""
        ...


class DiskCost(Protocol):
    """A disk that knows its speed, as ``fivefold.gnn.storage.DiskProfile`` does.

    Examples:
        >>> class Disk:
        ...     sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9
        ...     def seconds(self, requests: float, size_bytes: float) -> float:
        ...         return requests * 1e-5 + size_bytes / 1e9
        >>> disk: DiskCost = Disk()
        >>> disk.seconds(100, 1e6)
        0.002
    """

    @property
    def sequential_read_bytes_per_s(self) -> float:
        """Bytes per second of large reads."""
        ...

    @property
    def sequential_write_bytes_per_s(self) -> float:
        """Bytes per second of large writes."""
        ...

    def seconds(self, requests: float, size_bytes: float, /) -> float:
        """Seconds to read ``size_bytes`` in so many requests."""
        ...


class BatchList:
    """Batches in memory, as a source of samples; also a known order of the batches of another.

    Args:
        batches: Distinct node ids of each batch, in any order.
        num_nodes: Ids are 0 to ``num_nodes - 1``.
        fingerprint: Text that stands for the content; None: computed from it.

    Raises:
        DataError: An id is out of range.

    Examples:
        >>> batches = BatchList([np.array([2, 0]), np.array([2])], num_nodes=4)
        >>> batches.counts.tolist()
        [1, 0, 2, 0]
    """

    def __init__(
        self, batches: Sequence[Array], *, num_nodes: int, fingerprint: str | None = None
    ) -> None:
        self._batches = [np.asarray(batch, np.int64) for batch in batches]
        self.num_batches = len(self._batches)
        self.num_nodes = num_nodes
        for number, ids in enumerate(self._batches):
            if len(ids) and not (ids.min() >= 0 and ids.max() < num_nodes):
                raise DataError(
                    f"batch {number} has node ids outside 0 to {num_nodes - 1}",
                    hint="give num_nodes of the graph that the batches were sampled from",
                )
        self.fingerprint = fingerprint or _fingerprint(self._batches, num_nodes)

    @cached_property
    def counts(self) -> Array:
        """In how many batches each node is."""
        counts = np.zeros(self.num_nodes, np.uint32)
        for ids in self._batches:
            counts[ids] += np.uint32(1)
        return counts

    def node_ids(self, batch: int, /) -> Ids:
        """The node ids of one batch, as they were given."""
        return self._batches[batch]


def _fingerprint(batches: Sequence[Ids], num_nodes: int) -> str:

    digest = hashlib.sha256(str((num_nodes, [len(ids) for ids in batches])).encode())
    for ids in batches:
        digest.update(ids.tobytes())
    return digest.hexdigest()[:32]


def folder_of(samples: object) -> Path | None:
    """The folder of the samples, where they are a file: scratch files belong on that disk."""
    path = getattr(samples, "path", None)
    return None if path is None else Path(path).parent


def sample_bytes(samples: SampleSource) -> int:
    """Bytes of the samples on disk; 0 where the source does not say."""
    return int(getattr(samples, "nbytes", 0))


def record_bytes(samples: SampleSource, packed_rows: int, cold_rows: int) -> int:
    """About the bytes that packing writes besides rows: records, and until it ends the layouts.

    Records are about as large as the samples; the layouts take a node id per packed row and a
    number per cold row of a batch.
    """
    id_bytes = 4 if samples.num_nodes <= 2**32 else 8
    return sample_bytes(samples) + packed_rows * id_bytes + 4 * cold_rows


def sampled_epochs(samples: SampleSource) -> int:
    """Epochs that the batches make up; 1 where the source does not say."""
    return max(1, int(getattr(samples, "num_epochs", 1)))


def sizes_of(samples: SampleSource) -> Iterator[int]:
    """Number of nodes of each batch, without reading them where the source can do that."""
    num_nodes_of = getattr(samples, "num_nodes_of", lambda batch: len(samples.node_ids(batch)))
    return (int(num_nodes_of(batch)) for batch in range(samples.num_batches))
