"""Rows by node id, straight from a feature file or from an array in memory.

Two sources with one method, for batches that were not packed: the feature file on disk, whose
rows are read in ascending order and put where the batch wants them, and an array.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fivefold.gnn.storage import Container, ReadStatistics, RowReader, gather_rows

Ids = npt.NDArray[np.int64]
Backend = Literal["auto", "threads", "io_uring", "python", "mmap"]


class RowSource(Protocol):
    """Feature rows by node id; ``level`` is the name of their place in statistics."""

    level: str

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its elements."""

    def read(self, node_ids: Ids, out: npt.NDArray[Any]) -> ReadStatistics:
        """Put the rows of distinct ``node_ids`` into ``out``, in their order."""

    def close(self) -> None:
        """Let go of files and threads."""


class MemoryRows:
    """Rows of an array in memory.

    Args:
        features: Array [nodes, dim], contiguous.
    """

    level = "memory"

    def __init__(self, features: npt.NDArray[Any]) -> None:
        self._features = features

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self._features.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its elements."""
        return self._features.dtype

    def read(self, node_ids: Ids, out: npt.NDArray[Any]) -> ReadStatistics:
        """Put the rows of ``node_ids`` into ``out``, in their order."""
        gather_rows(self._features, node_ids, out)
        return ReadStatistics()

    def close(self) -> None:
        """Nothing to let go of."""


class DiskRows:
    """Rows of a feature container, read in ascending order.

    Args:
        container: Feature file with a section ``x`` of shape [nodes, dim].
        backend: Reading engine, as ``RowReader`` has them.
        verify: Check the pages' checksums.
    """

    level = "file"

    def __init__(
        self, container: Container, *, backend: Backend = "auto", verify: bool = True
    ) -> None:
        self._section = container.sections["x"]
        self._reader = RowReader(container, "x", backend=backend, verify=verify)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(self._section.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its elements."""
        return np.dtype(self._section.dtype)

    def read(self, node_ids: Ids, out: npt.NDArray[Any]) -> ReadStatistics:
        """Put the rows of distinct ``node_ids`` into ``out``, in their order."""
        order = np.argsort(node_ids, kind="stable")
        return self._reader.read_rows(node_ids[order], out, destinations=order)

    def close(self) -> None:
        """Close the reading engine."""
        self._reader.close()


def open_rows(
    container: Container, features: str | npt.NDArray[Any], *, backend: Backend, verify: bool
) -> RowSource:
    """The row source named by ``features``: "disk", "memory" (read once) or an array."""
    if isinstance(features, str) and features == "disk":
        return DiskRows(container, backend=backend, verify=verify)
    if isinstance(features, str):
        return MemoryRows(container.read("x"))
    return MemoryRows(features)
