"""Which cache slot a node sits in, asked by node id.

Static caches never change; under Belady's policy the host cache changes after each batch. Slots
are numbered over both caches: device slots first, host slot s is ``num_device + s``. Sets of bits
answer; where the graph is too large even for them, sorted lists do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.planning import IdSet, Plan, SortedIds

_COLD = -1


class SlotTracker:
    """The contents of a plan's two caches, before the first batch and then after each.

    The ids that are ever cached are kept as bits when these take no more than ``dense_bytes``.
    """

    def __init__(self, plan: Plan, *, num_nodes: int, dense_bytes: int) -> None:
        self._schedule = plan.cache_schedule
        device, host = plan.device_rows, plan.host_rows
        later = host[:0] if self._schedule is None else self._schedule.admitted_rows
        cached = np.concatenate([device, host, later]).astype(np.int64)
        fits = IdSet.bytes_for(num_nodes) <= dense_bytes
        self._ids = IdSet(num_nodes, cached) if fits else SortedIds(cached)
        # The last entry is that of place -1, where ids are that are never cached.
        self._slot = np.full(len(self._ids) + 1, _COLD, np.int32)
        self._content = np.full(plan.num_host_slots, _COLD, np.int64)
        self.num_device = len(device)
        self._slot[self._ids.locate(device)] = np.arange(len(device))
        self._admit(host, np.arange(len(host)))

    @property
    def nbytes(self) -> int:
        """Memory that the tables take."""
        return self._slot.nbytes + self._content.nbytes + self._ids.nbytes

    def slots(self, node_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the slot of each node, -1 where it is in no cache; several threads may ask."""
        found: NDArray[np.int32] = self._slot[self._ids.locate(node_ids)]
        return found

    def advance(self, batch: int) -> None:
        """Let in what the plan admits after this batch; static caches stay as they are."""
        if self._schedule is not None:
            self._admit(*self._schedule.admissions(batch))

    def _admit(self, node_ids: NDArray[np.int64], host_slots: NDArray[np.integer]) -> None:
        """Put nodes into host slots; what was there is cold from now on."""
        evicted = self._content[host_slots]
        self._slot[self._ids.locate(evicted[evicted >= 0])] = _COLD
        self._content[host_slots] = node_ids
        self._slot[self._ids.locate(node_ids)] = self.num_device + host_slots
