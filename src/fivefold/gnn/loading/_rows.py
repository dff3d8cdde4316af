"""Rows by node id for batches that were not packed: from a feature file, or from an array."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fivefold.gnn.storage import Container, RowReader
from fivefold.gnn.storage.pages import gather_rows
from fivefold.gnn.storage.reader import ReadStatistics

Ids = npt.NDArray[np.int64]
Backend = Literal["auto", "threads", "io_uring"]


class MemoryRows:
    """Rows of an array [nodes, dim] in memory."""

    level = "memory"

    def __init__(self, features: npt.NDArray[Any]) -> None:
        self._features = features
        self.row_shape: tuple[int, ...] = features.shape[1:]
        self.dtype: np.dtype[Any] = features.dtype

    def read(self, node_ids: Ids, out: npt.NDArray[Any]) -> ReadStatistics:
        """Put the rows of ``node_ids`` into ``out``, in their order."""
        gather_rows(self._features, node_ids, out)
        return ReadStatistics()

    def close(self) -> None:
        """Do nothing: there are no files."""


class DiskRows:
    """Rows of section ``x`` of a feature file, read in ascending order."""

    level = "file"

    def __init__(
        self, container: Container, *, backend: Backend = "auto", verify: bool = True
    ) -> None:
        section = container.sections["x"]
        self._reader = RowReader(container, "x", backend=backend, verify=verify)
        self.row_shape: tuple[int, ...] = tuple(section.shape[1:])
        self.dtype: np.dtype[Any] = np.dtype(section.dtype)

    def read(self, node_ids: Ids, out: npt.NDArray[Any]) -> ReadStatistics:
        """Put the rows of distinct ``node_ids`` into ``out``, in their order."""
        order = np.argsort(node_ids, kind="stable")
        return self._reader.read_rows(node_ids[order], out, destinations=order)

    def close(self) -> None:
        """Close the reading engine."""
        self._reader.close()


def open_rows(
    container: Container, features: str | npt.NDArray[Any], *, backend: Backend, verify: bool
) -> DiskRows | MemoryRows:
    """Return the rows named by ``features``: "disk", "memory" (read once) or an array."""
    if not isinstance(features, str):
        return MemoryRows(features)
    if features == "disk":
        return DiskRows(container, backend=backend, verify=verify)
    return MemoryRows(container.read("x"))
