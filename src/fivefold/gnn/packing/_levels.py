"""Tables that answer by node id: which cache slot a node sits in, and its number in a batch.

Static caches never change; under Belady's policy the host cache changes after each batch. Slots
are numbered over both caches: device slots first, host slot s is ``num_device + s``. Sets of bits
answer; where the graph is too large even for them, sorted lists do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.planning import IdSet, Plan, is_dense

_COLD = -1


class SlotTracker:
    """The contents of the two caches, asked by node id.

    Args:
        device_rows: Node ids of the device cache, in slot order.
        host_rows: Node ids of the host cache at the start, in slot order; negative: slot is free.
        num_nodes: Node ids are below it.
        later_rows: Ids that may be admitted later.
        dense_bytes: The ids that are ever cached are kept as bits when these take no more than
            this, else as a sorted list.
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
        cached = cached[cached >= 0]
        self._ids: IdSet | NDArray[np.int64] = (
            IdSet(num_nodes, cached)
            if IdSet.bytes_for(num_nodes) <= dense_bytes
            else np.unique(cached)
        )
        # The last entry is that of place -1, where ids are that are never cached.
        self._slot = np.full(len(self._ids) + 1, _COLD, np.int32)
        self.num_device = len(device_rows)
        self._content = np.full(len(host_rows), _COLD, np.int64)
        self._slot[self._place(np.asarray(device_rows))] = np.arange(len(device_rows))
        filled = np.flatnonzero(np.asarray(host_rows) >= 0)
        self.admit(np.asarray(host_rows)[filled], filled)

    @property
    def nbytes(self) -> int:
        """Memory that the tables take."""
        return self._slot.nbytes + self._content.nbytes + self._ids.nbytes

    def slots(self, node_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32, the slot of each node, -1 where it is in no cache; several threads may ask."""
        found: NDArray[np.int32] = self._slot[self._place(node_ids)]
        return found

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

    def _place(self, node_ids: NDArray[np.int64]) -> NDArray[np.integer]:
        if isinstance(self._ids, IdSet):
            return self._ids.locate(node_ids)
        if self._ids.size == 0:
            return np.full(len(node_ids), -1, np.int64)
        place = np.minimum(np.searchsorted(self._ids, node_ids), self._ids.size - 1)
        return np.where(self._ids[place] == node_ids, place, -1)


class LocalNumbers:
    """The place of each node within one batch.

    Args:
        num_nodes: Node ids are below it.
        dense_bytes: As for :class:`SlotTracker`.
    """

    def __init__(self, num_nodes: int, *, dense_bytes: int) -> None:
        self._num_nodes = num_nodes
        fits = IdSet.bytes_for(num_nodes) <= dense_bytes
        self._members = IdSet(num_nodes) if fits else None
        self._sorted = np.empty(0, np.int64)
        self._by_id = np.empty(0, np.int64)
        self._dense = False

    @property
    def nbytes(self) -> int:
        """Memory that the set takes."""
        return 0 if self._members is None else self._members.nbytes

    def begin(self, node_ids: NDArray[np.int64]) -> None:
        """From now on the batch has these nodes, all distinct."""
        self._dense = self._members is not None and is_dense(len(node_ids), self._num_nodes)
        if self._members is None or not self._dense:
            self._by_id = np.argsort(node_ids, kind="stable")
            self._sorted = node_ids[self._by_id]
            return
        self._members.clear()
        self._members.add(node_ids)
        self._by_id = np.empty(len(node_ids), np.int64)
        self._by_id[self._members.locate(node_ids)] = np.arange(len(node_ids))

    def of(self, node_ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """int64, the place of each node; none of them may be missing from the batch.

        Raises:
            KeyError: A node is not in the batch.
        """
        places = self._places(node_ids)
        if len(places) and places.min() < 0:
            message = "a node is not in the batch"
            raise KeyError(message)
        found: NDArray[np.int64] = self._by_id[places]
        return found

    def _places(self, node_ids: NDArray[np.integer]) -> NDArray[np.integer]:
        if self._members is not None and self._dense:
            return self._members.locate(node_ids)
        if not len(self._sorted):
            return np.full(len(node_ids), -1, np.int64)
        places = np.minimum(np.searchsorted(self._sorted, node_ids), len(self._sorted) - 1)
        return np.where(self._sorted[places] == node_ids, places, -1)


def caches_of(plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Node ids of the device cache and of the host cache at the start, in slot order."""
    return np.asarray(plan.device_rows, np.int64), np.asarray(plan.host_rows, np.int64)


def make_tracker(plan: Plan, *, num_nodes: int, dense_bytes: int) -> SlotTracker:
    """The tracker of a plan's caches before the first batch."""
    schedule = plan.cache_schedule
    later = np.empty(0, np.int64) if schedule is None else schedule.admitted_rows
    device, host = caches_of(plan)
    return SlotTracker(device, host, num_nodes=num_nodes, later_rows=later, dense_bytes=dense_bytes)


def advance(tracker: SlotTracker, plan: Plan, batch: int) -> None:
    """Let in what the plan admits after this batch; static caches stay as they are."""
    if plan.cache_schedule is not None:
        tracker.admit(*plan.cache_schedule.admissions(batch))
