"""Tables that answer by node id: which cache slot a node sits in, and its number in a batch.

Static caches never change; under Belady's policy the host cache changes after each batch. Slots
are numbered over both caches: device slots first, host slot s is ``num_device + s``. Tables over
all nodes are fast; where the graph is too large for them, sorted lists answer instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["LocalNumbers", "SlotTracker"]

_COLD = -1


class SlotTracker:
    """The contents of the two caches, asked by node id.

    Args:
        device_rows: Node ids of the device cache, in slot order.
        host_rows: Node ids of the host cache at the start, in slot order; negative: slot is free.
        num_nodes: Node ids are below it.
        later_rows: Ids that may be admitted later.
        dense_bytes: A table over all nodes is used when it is not larger than this, else a
            sorted list of the ids that are ever cached.
    """

    def __init__(
        self,
        device_rows: NDArray[np.int64],
        host_rows: NDArray[np.int64],
        *,
        num_nodes: int,
        later_rows: NDArray[np.int64],
        dense_bytes: int,
    ) -> None:
        cached = np.concatenate([device_rows, host_rows, later_rows]).astype(np.int64)
        self._ids: NDArray[np.int64] | None = None
        if 4 * num_nodes > dense_bytes:
            self._ids = np.unique(cached[cached >= 0])
        size = num_nodes if self._ids is None else len(self._ids)
        self._slot = np.full(size, _COLD, np.int32)
        self.num_device = len(device_rows)
        self._content = np.full(len(host_rows), _COLD, np.int64)
        self._slot[self._place(np.asarray(device_rows))] = np.arange(len(device_rows))
        filled = np.flatnonzero(np.asarray(host_rows) >= 0)
        self.admit(np.asarray(host_rows)[filled], filled)

    @property
    def nbytes(self) -> int:
        """Memory that the tables take."""
        return self._slot.nbytes + self._content.nbytes + getattr(self._ids, "nbytes", 0)

    def slots(self, node_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64, the slot of each node, -1 where it is in no cache."""
        if self._ids is None:
            return self._slot[node_ids].astype(np.int64)
        if self._ids.size == 0:
            return np.full(len(node_ids), _COLD, np.int64)
        place = np.minimum(np.searchsorted(self._ids, node_ids), self._ids.size - 1)
        return np.where(self._ids[place] == node_ids, self._slot[place], _COLD).astype(np.int64)

    def admit(self, node_ids: NDArray[np.int64], host_slots: NDArray[np.integer]) -> None:
        """Put nodes into host slots; what was there is cold from now on."""
        if len(node_ids) == 0:
            return
        if int(np.max(host_slots)) >= len(self._content):
            grown = np.full(int(np.max(host_slots)) + 1, _COLD, np.int64)
            grown[: len(self._content)] = self._content
            self._content = grown
        evicted = self._content[host_slots]
        self._slot[self._place(evicted[evicted >= 0])] = _COLD
        self._content[host_slots] = node_ids
        self._slot[self._place(np.asarray(node_ids))] = self.num_device + np.asarray(host_slots)

    def _place(self, node_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return node_ids if self._ids is None else np.searchsorted(self._ids, node_ids)


class LocalNumbers:
    """The place of each node within one batch.

    Args:
        num_nodes: Node ids are below it.
        dense_bytes: As for :class:`SlotTracker`.
    """

    def __init__(self, num_nodes: int, *, dense_bytes: int) -> None:
        self._dense = 4 * num_nodes <= dense_bytes
        self._table = np.zeros(num_nodes if self._dense else 0, np.int32)
        self._ids = np.empty(0, np.int64)
        self._by_id = np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        """Memory that the table takes."""
        return self._table.nbytes

    def begin(self, node_ids: NDArray[np.int64]) -> None:
        """From now on the batch has these nodes, all distinct."""
        self._ids = node_ids
        if self._dense:
            self._table[node_ids] = np.arange(len(node_ids), dtype=np.int32)
        else:
            self._by_id = np.argsort(node_ids, kind="stable")

    def of(self, node_ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """int64, the place of each node; none of them may be missing from the batch.

        Raises:
            KeyError: A node is not in the batch.
        """
        if len(node_ids) == 0:
            return np.empty(0, np.int64)
        found: NDArray[np.int64]
        if self._dense:
            found = self._table[node_ids].astype(np.int64)
        else:
            places = np.searchsorted(self._ids, node_ids, sorter=self._by_id)
            found = self._by_id[np.minimum(places, len(self._ids) - 1)]
        np.minimum(found, len(self._ids) - 1, out=found)  # what earlier batches have left behind
        if not len(self._ids) or not np.array_equal(self._ids[found], node_ids):
            message = "a node is not in the batch"
            raise KeyError(message)
        return found
