"""Rows of features as they lie: in memory, on disk, and behind a cache that learns what comes.

One batch is one transaction of the cache, as in GraphBolt's: all ids are looked up, then those that
missed are admitted, one after another. Its lists are linked through arrays, so that hundreds of
thousands of ids cost milliseconds. SIEVE: Zhang et al., NSDI 2024.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.gnn.data.arrays import as_array
from fivefold.gnn.loading.shared_rows import rows_in_memory
from fivefold.gnn.storage import Container, RowReader
from fivefold.gnn.storage.pages import Array, Ids, aligned_empty, gather_rows
from fivefold.gnn.storage.reader import Backend, ReadStatistics

Slots = NDArray[np.int32]
Mask = NDArray[np.bool_]
CachePolicy = Literal["lru", "sieve"]
_HEAD, _TAIL, _HAND, _USED = 0, 1, 2, 3  # of the state array
_TABLE_BYTES_PER_NODE, _TABLE_BYTES_PER_SLOT = 4, 17  # of a cache, which count as its rows do


class OnlineCache:
    """Slots for the ids that were used last (LRU) or that were used again (SIEVE).

    Ids are 0 to ``num_ids - 1``; a cache of no slots never hits.
    """

    def __init__(self, num_ids: int, *, num_slots: int, policy: CachePolicy = "lru") -> None:
        if num_ids < 0 or num_slots < 0:
            raise ConfigurationError(
                f"counts must not be negative; got num_ids={num_ids}, num_slots={num_slots}"
            )
        require_one_of(policy, ("lru", "sieve"), f"policy is {policy!r}")
        self.num_slots = min(num_slots, num_ids)
        self.policy = policy
        self._slot_of = np.full(num_ids, -1, np.int32)
        self._id_in = np.full(self.num_slots, -1, np.int64)
        self._older = np.full(self.num_slots, -1, np.int32)
        self._newer = np.full(self.num_slots, -1, np.int32)
        self._visited = np.zeros(self.num_slots, np.bool_)
        self._state = np.array([-1, -1, -1, 0], np.int64)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tables, which a fair budget counts as well as the rows."""
        arrays = (self._slot_of, self._id_in, self._older, self._newer, self._visited)
        return sum(array.nbytes for array in arrays)

    def lookup(self, ids: Ids) -> NDArray[np.int32]:
        """Return the slots of distinct ids, which count as used; -1 where one is not there."""
        slots = np.empty(len(ids), np.int32)
        _lookup(ids, slots, self.policy == "lru", *self._lists())
        return slots

    def admit(self, ids: Ids) -> NDArray[np.int32]:
        """Take in distinct ids that are not there, one by one, each in the place of another.

        Returns their slots in the end; -1 where a later one of the same call took the place.
        """
        slots = np.full(len(ids), -1, np.int32)
        if self.num_slots:
            _admit(ids, self._id_in, self.policy == "lru", *self._lists())
            slots[:] = self._slot_of[ids]
        return slots

    def held(self) -> tuple[Ids, Ids]:
        """Return the ids that are there and their slots."""
        slots = np.flatnonzero(self._id_in >= 0)
        return self._id_in[slots], slots

    def _lists(self) -> tuple[Any, ...]:
        return self._slot_of, self._older, self._newer, self._visited, self._state


@njit
def _unlink(slot: int, older: Slots, newer: Slots, state: Ids) -> None:
    before, after = newer[slot], older[slot]
    if before >= 0:
        older[before] = after
    else:
        state[_HEAD] = after
    if after >= 0:
        newer[after] = before
    else:
        state[_TAIL] = before


@njit
def _push(slot: int, older: Slots, newer: Slots, state: Ids) -> None:
    head = state[_HEAD]
    older[slot] = head
    newer[slot] = -1
    if head >= 0:
        newer[head] = slot
    else:
        state[_TAIL] = slot
    state[_HEAD] = slot


@njit
def _lookup(  # noqa: PLR0913, PLR0917 - a kernel takes its arrays one by one
    ids: Ids, found: Slots, lru: bool, slot_of: Slots,  # noqa: FBT001
    older: Slots, newer: Slots, visited: Mask, state: Ids,
) -> None:  # fmt: skip
    for i in range(len(ids)):
        slot = slot_of[ids[i]]
        found[i] = slot
        if slot < 0:
            continue
        if lru:
            _unlink(slot, older, newer, state)
            _push(slot, older, newer, state)
        else:
            visited[slot] = True


@njit
def _sieve_victim(newer: Slots, visited: Mask, state: Ids) -> Any:
    """Walk the hand from old to new, sparing each visited slot once; return where it stops."""
    hand = state[_HAND]
    if hand < 0:
        hand = state[_TAIL]
    while visited[hand]:
        visited[hand] = False
        hand = newer[hand] if newer[hand] >= 0 else state[_TAIL]
    state[_HAND] = newer[hand]
    return hand


@njit
def _admit(  # noqa: PLR0913, PLR0917 - a kernel takes its arrays one by one
    ids: Ids, id_in: Ids, lru: bool, slot_of: Slots,  # noqa: FBT001
    older: Slots, newer: Slots, visited: Mask, state: Ids,
) -> None:  # fmt: skip
    for i in range(len(ids)):
        if slot_of[ids[i]] >= 0:
            continue
        if state[_USED] < len(id_in):
            slot = state[_USED]
            state[_USED] += 1
        else:
            slot = state[_TAIL] if lru else _sieve_victim(newer, visited, state)
            slot_of[id_in[slot]] = -1
            _unlink(slot, older, newer, state)
        id_in[slot] = ids[i]
        slot_of[ids[i]] = slot
        visited[slot] = False
        _push(slot, older, newer, state)


class MemoryRows:
    """Rows of an array [nodes, dim] in memory."""

    def __init__(self, features: Array) -> None:
        self._features = features
        self.served = {"memory": 0}
        self.row_shape: tuple[int, ...] = features.shape[1:]
        self.dtype: np.dtype[Any] = features.dtype
        self.row_bytes = features.dtype.itemsize * math.prod(self.row_shape)

    def read(self, node_ids: Ids, out: Array) -> ReadStatistics:
        """Put the rows of ``node_ids`` into ``out``, in their order."""
        gather_rows(self._features, node_ids, out)
        self.served["memory"] += len(node_ids)
        return ReadStatistics()

    def close(self) -> None:
        """Do nothing: there are no files."""


class DiskRows:
    """Rows of section ``x`` of a feature file, read in ascending order."""

    def __init__(
        self, container: Container, *, backend: Backend = "auto", verify: bool = True
    ) -> None:
        section = container.sections["x"]
        self._reader = RowReader(container, "x", backend=backend, verify=verify)
        self.row_shape: tuple[int, ...] = tuple(section.shape[1:])
        self.row_bytes, self.num_rows = section.row_bytes, section.num_rows
        self.dtype: np.dtype[Any] = np.dtype(section.dtype)
        self.served = {"file": 0}

    def read(self, node_ids: Ids, out: Array, *, places: Ids | None = None) -> ReadStatistics:
        """Put the rows of distinct ``node_ids`` into ``out``, in their order or at ``places``."""
        order = np.argsort(node_ids, kind="stable")
        self.served["file"] += len(node_ids)
        return self._reader.read_rows(
            node_ids[order], out, destinations=order if places is None else places[order]
        )

    def read_any(self, ids: Ids) -> tuple[Array, ReadStatistics]:
        """Return the rows of ids that may repeat, each read once, and what that cost."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        repeated = len(distinct) < len(ids)
        wanted = distinct if repeated else ids
        out = np.empty((len(wanted), *self.row_shape), self.dtype)
        cost = self.read(wanted, out)
        return out[inverse] if repeated else out, cost

    def close(self) -> None:
        """Close the reading engine."""
        self._reader.close()


class CachedRows:
    """Rows of a file behind a cache in memory that learns which ones come again.

    The cache's own tables count as well: 4 bytes per node, and 17 per row that is kept.
    """

    def __init__(self, rows: DiskRows, *, cache_bytes: int, policy: CachePolicy) -> None:
        tables_bytes = _TABLE_BYTES_PER_NODE * rows.num_rows
        slot_bytes = rows.row_bytes + _TABLE_BYTES_PER_SLOT
        slots = (cache_bytes - tables_bytes) // slot_bytes
        if slots < 1:
            raise ConfigurationError(
                f"cache_bytes is {cache_bytes}, which holds no row beside the cache's own tables",
                hint=f"give more than {tables_bytes + slot_bytes} bytes, or 0 for no cache",
            )
        self._rows = rows
        self._cache = OnlineCache(rows.num_rows, num_slots=slots, policy=policy)
        self._kept = aligned_empty((self._cache.num_slots, *rows.row_shape), rows.dtype)
        self.row_shape, self.row_bytes, self.dtype = rows.row_shape, rows.row_bytes, rows.dtype
        self._hits = 0

    @property
    def served(self) -> dict[str, int]:
        """Return the rows that each level served."""
        return {"host": self._hits, **self._rows.served}

    def read(self, node_ids: Ids, out: Array) -> ReadStatistics:
        """Put the rows of distinct ``node_ids`` into ``out``, in their order."""
        slots = self._cache.lookup(node_ids)
        hits, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        gather_rows(self._kept, slots[hits].astype(np.int64), out, destinations=hits)
        self._hits += len(hits)
        if not len(missing):
            return ReadStatistics()
        reading = self._rows.read(node_ids[missing], out, places=missing)
        entered = self._cache.admit(node_ids[missing])
        kept = np.flatnonzero(entered >= 0)
        gather_rows(out, missing[kept], self._kept, destinations=entered[kept].astype(np.int64))
        return reading

    def close(self) -> None:
        """Close the reading engine."""
        self._rows.close()


def open_rows(
    container: Container,
    features: Any,
    *,
    backend: Backend,
    verify: bool,
    cache_bytes: int = 0,
    cache_policy: CachePolicy = "lru",
    shared: bool = False,
) -> CachedRows | DiskRows | MemoryRows:
    """Return the rows named by ``features``: "disk", "memory" (read once) or an array.

    ``shared`` rows in memory are there once for all processes of this machine.
    """
    named = features if isinstance(features, str) else None
    if named not in {None, "disk", "memory"}:
        message = f"features is {features!r}"
        raise ConfigurationError(message, hint='use "disk", "memory" or an array')
    require_one_of(cache_policy, ("lru", "sieve"), f"cache_policy is {cache_policy!r}")
    if require_whole("cache_bytes", cache_bytes, least=0) and named != "disk":
        raise ConfigurationError(
            f"cache_bytes is {cache_bytes}, but all rows are in memory",
            hint='leave it out, or take features="disk"',
        )
    if named == "disk":
        rows = DiskRows(container, backend=backend, verify=verify)
        if not cache_bytes:
            return rows
        return CachedRows(rows, cache_bytes=cache_bytes, policy=cache_policy)
    if named == "memory":
        return MemoryRows(rows_in_memory(container, "x", shared=shared)[0])
    array, num_nodes = as_array(features, "features"), container.section("x").num_rows
    if array.ndim != 2 or len(array) != num_nodes or array.dtype.kind not in "iufb":
        raise ConfigurationError(
            f"features have dtype {array.dtype} and shape {list(array.shape)} for "
            f"{num_nodes} nodes",
            hint="give one row of numbers per node, in the order of the node ids",
        )
    return MemoryRows(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
