"""What a plan is made from: sampled batches, the features' size, budgets, and a disk with a price.

Samples and disk are protocols, so that plans can be made for sample files, for lists in memory and
for traces of tests alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError, DataError

Ids = NDArray[np.int64]
Array = NDArray[Any]


class SampleSource(Protocol):
    """Sampled batches whose node ids can be asked for one batch at a time.

    ``fivefold.gnn.sampling.SampleFile`` is one, ``BatchList`` another.
    """

    @property
    def num_batches(self) -> int:
        """Return the number of batches."""
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
        """Return the distinct node ids of one batch, in any order."""
        ...


class DiskCost(Protocol):
    """A disk that knows its speed, as ``fivefold.gnn.storage.DiskProfile`` does."""

    @property
    def sequential_read_bytes_per_s(self) -> float:
        """Return bytes per second of large reads."""
        ...

    @property
    def sequential_write_bytes_per_s(self) -> float:
        """Return bytes per second of large writes."""
        ...

    def seconds(self, requests: float, size_bytes: float, /) -> float:
        """Return the seconds to read ``size_bytes`` in so many requests."""
        ...


class BatchList:
    """Batches in memory, as a source of samples; also a known order of the batches of another.

    Args:
        batches: Distinct node ids of each batch, in any order.
        num_nodes: Ids are 0 to ``num_nodes - 1``.
        fingerprint: Text that stands for the content; None: computed from it.

    Raises:
        DataError: An id is out of range.
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
        """Return the node ids of one batch, as they were given."""
        return self._batches[batch]


def _fingerprint(batches: Sequence[Ids], num_nodes: int) -> str:
    digest = hashlib.sha256(str((num_nodes, [len(ids) for ids in batches])).encode())
    for ids in batches:
        digest.update(ids.tobytes())
    return digest.hexdigest()[:32]


def folder_of(samples: object) -> Path | None:
    """Return the folder of the samples, where they are a file: scratch belongs on that disk."""
    path = getattr(samples, "path", None)
    return None if path is None else Path(path).parent


def sample_bytes(samples: SampleSource) -> int:
    """Return the bytes of the samples on disk; 0 where the source does not say."""
    return int(getattr(samples, "nbytes", 0))


def record_bytes(samples: SampleSource, packed_rows: int, cold_rows: int) -> int:
    """Estimate the bytes that packing writes besides rows: records, and while it runs the layouts.

    Records are about as large as the samples; the layouts take a node id per packed row and a
    number per cold row of a batch.
    """
    id_bytes = 4 if samples.num_nodes <= 2**32 else 8
    return sample_bytes(samples) + packed_rows * id_bytes + 4 * cold_rows


def sampled_epochs(samples: SampleSource) -> int:
    """Return the epochs that the batches make up; 1 where the source does not say."""
    return max(1, int(getattr(samples, "num_epochs", 1)))


def sizes_of(samples: SampleSource) -> Iterator[int]:
    """Return the number of nodes of each batch, without reading them where the source can."""
    num_nodes_of = getattr(samples, "num_nodes_of", lambda batch: len(samples.node_ids(batch)))
    return (int(num_nodes_of(batch)) for batch in range(samples.num_batches))


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """How many bytes a packed store and its training may take.

    Args:
        host_bytes: Host memory for the feature cache, the buffers of batches in flight and the
            scratch memory of packing. The topology, the samples in flight, the model and the
            interpreter are not in it.
        disk_bytes: Disk space for all that is written: packed rows, cached rows, batch records
            and, for a while, the scratch files of packing. The features themselves are not in it.
        device_bytes: Device memory for the feature cache and the batches on the device.

    Raises:
        ConfigurationError: A budget is negative or no whole number.
    """

    host_bytes: int
    disk_bytes: int
    device_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "device_bytes"):
            _check_count(name, getattr(self, name), least=0)


@dataclass(frozen=True, kw_only=True)
class FeatureInfo:
    """What planning has to know of a feature matrix.

    Args:
        num_nodes: Rows of the matrix.
        row_bytes: Bytes of a row, any number above zero.
        fingerprint: Text that changes when the matrix changes.

    Raises:
        ConfigurationError: A number is out of range.
    """

    num_nodes: int
    row_bytes: int
    fingerprint: str

    def __post_init__(self) -> None:
        _check_count("num_nodes", self.num_nodes, least=0)
        _check_count("row_bytes", self.row_bytes, least=1)


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"{name} must be a whole number of at least {least}; got {value!r}",
            hint="sizes are in bytes; fivefold.units.parse_bytes reads texts such as '2 GB'",
        )
