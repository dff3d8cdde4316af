"""What the caches hold under each policy, and what that leaves for the disk.

Device slots are filled first, by access count, and never change. Host slots hold the next rows by
count (``static``) or follow the known order of the batches (``belady``): Belady, IBM Systems
Journal 5(2), 1966; Ginex (Park et al.), VLDB 2022, section 4.
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import DataError, InfeasibleError, StorageError
from fivefold.gnn.planning.id_sets import IdSet, SortedIds, is_dense, set_of, sort_distinct
from fivefold.gnn.planning.layout import read_costs
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import DiskProfile
from fivefold.gnn.storage.pages import Array, Bytes, Ids
from fivefold.units import format_bytes

_MEMORY_BYTES = 128 << 20
_COUNTED_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Folder and most bytes of the files that planning may write."""

    folder: Path | None = None  # None: the system's for temporary files
    most_bytes: float = math.inf


class KeptArrays:
    """Whole numbers below ``limit`` per batch, in a file from ``memory_bytes`` on.

    They are walked through again and again, also backwards. The file has no name, goes with the
    process and counts towards the disk budget: the records of a plan hold the same ids.
    """

    def __init__(
        self,
        arrays: Iterable[Array],
        *,
        limit: int,
        scratch: Scratch | None = None,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        self._scratch = scratch or Scratch()
        self._dtype = np.dtype(np.int32 if limit <= np.iinfo(np.int32).max else np.int64)
        self._kept: list[Array] = []
        self._file: IO[bytes] | None = None
        self._kept_bytes = 0
        sizes = []
        for array in arrays:
            narrow = array.astype(self._dtype)
            self._kept_bytes += narrow.nbytes
            sizes.append(len(narrow))
            self._kept.append(narrow)
            if self._file is not None or self._kept_bytes > memory_bytes:
                self._spill()
        self.sizes = np.array(sizes, np.int64)
        self._stops = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, batch: int) -> Ids:
        if self._file is None:
            return self._kept[batch].astype(np.int64)
        size = int(self.sizes[batch])
        self._file.seek((int(self._stops[batch]) - size) * self._dtype.itemsize)
        narrow = np.frombuffer(self._file.read(size * self._dtype.itemsize), self._dtype)
        return narrow.astype(np.int64)

    def segment(self, first: int, stop: int) -> list[Ids]:
        """Return the arrays of batches ``first`` to ``stop - 1``."""
        return [self[batch] for batch in range(first, stop)]

    def close(self) -> None:
        """Give memory and file back."""
        self._kept.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take
                self._file.close()

    def _spill(self) -> None:
        if self._kept_bytes > self._scratch.most_bytes:
            self.close()
            raise InfeasibleError(
                f"the disk budget of {format_bytes(self._scratch.most_bytes)} does not hold the "
                "scratch file of planning, which has the node ids of all batches",
                hint="give more disk_bytes: the packed store would need more, too",
            )
        folder = self._scratch.folder or Path(tempfile.gettempdir())
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives with it
            for narrow in self._kept:
                self._file.write(narrow.data)
            self._file.flush()
        except OSError as error:
            self.close()
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            free = f" ({format_bytes(shutil.disk_usage(folder).free)} free)" if full else ""
            raise StorageError(
                f"the scratch file of planning cannot be written in {folder}: "
                f"{error.strerror or error}{free}",
                hint="free some space there, or plan elsewhere: scratch_folder of make_plan, "
                "data.store of a configuration, the samples' folder on the command line",
            ) from error
        self._kept.clear()


_ABSENT, _PINNED = -1, -2


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheSchedule:
    """Misses of each batch, and the rows that enter the cache after it."""

    hit_bits: Bytes  # a bit per node id of the samples, each batch from a new byte on
    hit_starts: Ids  # [batches + 1], first byte of each batch
    admitted_rows: Ids  # node ids that enter after each batch, ascending per batch
    admitted_slots: NDArray[np.int32]  # the slots that they take
    admitted_starts: Ids  # [batches + 1], first place of each batch in both

    @property
    def num_slots(self) -> int:
        """Slots that are ever used."""
        return int(self.admitted_slots.max(initial=-1)) + 1

    def misses(self, batch: int, num_ids: int) -> NDArray[np.bool_]:
        """Return which ids of a batch, in the order of the samples, come from disk."""
        packed = self.hit_bits[self.hit_starts[batch] : self.hit_starts[batch + 1]]
        missed: NDArray[np.bool_] = np.unpackbits(packed, count=num_ids) == 0
        return missed

    def admissions(self, batch: int) -> tuple[Ids, NDArray[np.int32]]:
        """Return the node ids that enter after a batch, ascending, and the slots that they take."""
        place = slice(self.admitted_starts[batch], self.admitted_starts[batch + 1])
        return self.admitted_rows[place], self.admitted_slots[place]

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return dict(vars(self))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> CacheSchedule:
        """Return the schedule whose ``arrays`` these are; others are ignored."""
        return cls(**{name: np.asarray(arrays[name]) for name in cls.__dataclass_fields__})


def belady(samples: SampleFile, *, num_rows: int, pinned: Array, scratch: Scratch) -> CacheSchedule:
    """Return the best course of a cache of ``num_rows`` rows for this order of the batches.

    After each batch, of the cache and the batch together the rows of soonest next use stay; ties:
    rows in the cache, then lower ids. ``pinned`` rows are cached elsewhere and never enter.
    """
    size, never = min(num_rows, samples.num_nodes), samples.num_batches
    nexts = _next_uses(samples, scratch)
    slot_of = np.full(samples.num_nodes, _ABSENT, np.int32)
    slot_of[np.asarray(pinned, np.int64)] = _PINNED
    node_in, next_in = np.full(size, _ABSENT, np.int64), np.full(size, never, np.int32)
    uses = np.zeros(never + 1, np.int64)  # rows held or offered, by their next use
    bits, rows, slots = list[Array](), list[Ids](), list[Array]()
    for batch in range(never):
        ids, following = np.asarray(samples.node_ids(batch), np.int64), nexts[never - 1 - batch]
        hits = np.zeros(len(ids), np.bool_)
        _use(ids, following, slot_of, next_in, uses, hits)
        limit = _threshold(uses, batch, size)
        # Only rows of the batch at hand enter: others would cost a read each, as a miss does, so
        # that no cache of this size has fewer misses. Rows never used again would only take room.
        wanted = np.flatnonzero(~hits & (following < never))
        wanted = wanted[np.argsort(ids[wanted])]
        entering, places = _exchange(
            ids[wanted], following[wanted], limit, slot_of, node_in, next_in, uses
        )
        bits.append(np.packbits(hits))
        rows.append(entering)
        slots.append(places)
    nexts.close()
    return CacheSchedule(
        hit_bits=np.concatenate([np.empty(0, np.uint8), *bits]),
        hit_starts=_starts(bits),
        admitted_rows=np.concatenate([np.empty(0, np.int64), *rows]),
        admitted_slots=np.concatenate([np.empty(0, np.int32), *slots]),
        admitted_starts=_starts(rows),
    )


def _starts(parts: Sequence[Array]) -> Ids:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)


def _next_uses(samples: SampleFile, scratch: Scratch) -> KeptArrays:
    """Return the next use of every id of every batch, last batch first; never: their number."""
    following = np.full(samples.num_nodes, samples.num_batches, np.int32)

    def backwards() -> Iterator[Array]:
        # Seen from the end, the batch at which an id was met last is that of its next use.
        for batch in reversed(range(samples.num_batches)):
            ids = np.asarray(samples.node_ids(batch), np.int64)
            nexts = np.empty(len(ids), np.int32)
            bad = _look_ahead(ids, batch, following, nexts)
            if bad >= 0:
                raise DataError(
                    f"batch {batch} has node id {ids[bad]} twice, or it is not one of 0 to "
                    f"{samples.num_nodes - 1}",
                    hint="the ids of a batch are distinct and those of the graph",
                )
            yield nexts

    return KeptArrays(backwards(), limit=samples.num_batches + 1, scratch=scratch)


@njit
def _look_ahead(ids: Any, batch: Any, following: Any, nexts: Any) -> Any:
    """Find the next use of each id; return the first place that is wrong, or -1."""
    for i in range(ids.shape[0]):
        if ids[i] < 0 or ids[i] >= following.shape[0] or following[ids[i]] == batch:
            return i
        nexts[i] = following[ids[i]]
        following[ids[i]] = batch
    return -1


@njit
def _use(ids: Any, nexts: Any, slot_of: Any, next_in: Any, uses: Any, hits: Any) -> Any:
    for i in range(ids.shape[0]):
        slot = slot_of[ids[i]]
        hits[i] = slot != _ABSENT
        if slot >= 0:
            uses[next_in[slot]] -= 1
            next_in[slot] = nexts[i]
        if slot != _PINNED:
            uses[nexts[i]] += 1


@njit
def _threshold(uses: Any, batch: Any, size: Any) -> Any:
    """Return the next use up to which rows stay, and how many of those at it have room."""
    never, held = uses.shape[0] - 1, 0
    for following in range(batch + 1, never):
        if held + uses[following] > size:
            return following, size - held
        held += uses[following]
    return never, 0


@njit
def _exchange(
    ids: Any, nexts: Any, limit: Any, slot_of: Any, node_in: Any, next_in: Any, uses: Any
) -> Any:
    """Let rows in, in the place of free slots and of rows of later use."""
    threshold, room = limit
    staying = 0  # cached rows of the threshold itself have the first claim to the room
    for slot in range(node_in.shape[0]):
        if staying < room and next_in[slot] == threshold:
            staying += 1
    room -= staying
    entering, slots = np.empty(ids.shape[0], np.int64), np.empty(ids.shape[0], np.int32)
    number, slot = 0, -1
    for i in range(ids.shape[0]):
        if nexts[i] > threshold or (nexts[i] == threshold and room <= 0):
            uses[nexts[i]] -= 1
            continue
        if nexts[i] == threshold:
            room -= 1
        slot += 1
        while next_in[slot] < threshold or (next_in[slot] == threshold and staying > 0):
            if next_in[slot] == threshold:
                staying -= 1
            slot += 1
        if node_in[slot] >= 0:
            slot_of[node_in[slot]] = _ABSENT
            uses[next_in[slot]] -= 1
        node_in[slot], next_in[slot], slot_of[ids[i]] = ids[i], nexts[i], slot
        entering[number], slots[number] = ids[i], slot
        number += 1
    return entering[:number].copy(), slots[:number].copy()


Policy = Literal["static", "belady"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Caches:
    """Contents of both caches."""

    device_rows: Ids  # node id in each slot of the device, ascending
    host_rows: Ids  # node id in the first slots of the host before the first batch, ascending
    num_host_slots: int
    schedule: CacheSchedule | None = None  # how the host's cache changes
    most_set_bytes: int = 192 << 20  # beyond, sorted lists are asked, so that memory stays small

    @classmethod
    def fill(
        cls,
        samples: SampleFile,
        policy: Policy,
        *,
        device_slots: int,
        host_slots: int,
        scratch: Scratch,
    ) -> Caches:
        """Choose the contents for a policy."""
        device = host = np.empty(0, np.int64)
        # Counts are as long as the graph: they are asked for only where something is cached.
        if device_slots:
            device = hottest_rows(samples.counts, device_slots)
        if policy == "static":
            if device_slots + host_slots:
                host = hottest_rows(samples.counts, device_slots + host_slots)
            if len(device):
                host = np.setdiff1d(host, device, assume_unique=True)
            return cls(device_rows=device, host_rows=host, num_host_slots=len(host))
        schedule = belady(samples, num_rows=host_slots, pinned=device, scratch=scratch)
        return cls(
            device_rows=device,
            host_rows=host,
            num_host_slots=schedule.num_slots,
            schedule=schedule,
        )

    @property
    def filled_rows(self) -> int:
        """Rows that are read into the caches before the first batch."""
        return len(self.device_rows) + len(self.host_rows)

    def prepare(self) -> int:
        """Make what ``cold_ids`` asks, before several threads would at once; return its bytes."""
        return self._cached.nbytes if self.schedule is None else 0

    @cached_property
    def _cached(self) -> IdSet | SortedIds:
        return self._set([self.device_rows, self.host_rows])

    @cached_property
    def _on_device(self) -> IdSet | SortedIds:
        return self._set([self.device_rows])

    def _set(self, parts: list[Ids]) -> IdSet | SortedIds:
        bound = 1 + max((int(rows.max()) for rows in parts if len(rows)), default=-1)
        return set_of(parts, bound, most_bytes=self.most_set_bytes)

    def device_hits(self, node_ids: Array) -> int:
        """Return how many of the ids are cached on the device."""
        if not len(self.device_rows):
            return 0
        return int(np.count_nonzero(self._on_device.locate(node_ids) >= 0))

    def cold_ids(self, batch: int, node_ids: Array) -> Ids:
        """Return those ids of a batch, given in sampled order, that come from disk, ascending."""
        ids = np.asarray(node_ids, np.int64)
        bound = 1 + int(ids.max(initial=-1))
        if self.schedule is not None:
            return sort_distinct(ids[self.schedule.misses(batch, len(ids))], bound)
        if isinstance(self._cached, IdSet) and is_dense(len(ids), bound):
            members = IdSet(bound, ids)
            if len(members) == len(ids):
                return members.ascending(without=self._cached)
        ids = np.sort(ids)  # first, for ascending ids are looked up much faster
        return ids[self._cached.locate(ids) < 0]


class Tally:
    """Walk through the batches once, hand out their cold ids and count along the way."""

    def __init__(
        self,
        samples: SampleFile,
        row_bytes: int,
        caches: Caches,
        disk: DiskProfile,
        *,
        progress: Callable[[int, int], None],
    ) -> None:
        self._samples, self._row_bytes, self._caches, self._disk = samples, row_bytes, caches, disk
        self._progress = progress
        self.accesses = self.device_hits = self.cold_rows = 0
        self.online_seconds = 0.0

    @property
    def hit_rates(self) -> dict[str, float]:
        """Share of the accesses by level."""
        host = self.accesses - self.device_hits - self.cold_rows
        counts = {"device": self.device_hits, "host": host, "disk": self.cold_rows}
        return {level: count / max(1, self.accesses) for level, count in counts.items()}

    def cold_ids(self) -> Iterator[Ids]:
        """Yield the cold ids of each batch, ascending."""
        for batch in range(self._samples.num_batches):
            ids = self._samples.node_ids(batch)
            cold = self._caches.cold_ids(batch, ids)
            if not (cold[1:] > cold[:-1]).all():
                raise DataError(
                    f"batch {batch} has a node id twice",
                    hint="the ids of a batch are distinct; sample it again",
                )
            self.accesses += len(ids)
            self.device_hits += self._caches.device_hits(ids)
            self.cold_rows += len(cold)
            self._progress(batch + 1, self._samples.num_batches)
            self.online_seconds += self._online(cold)
            yield cold

    def _online(self, cold: Ids) -> float:
        """Return the seconds to gather these rows from the features, every page once."""
        if not len(cold):
            return 0.0
        ones, no_gap = np.ones(len(cold), np.int64), np.zeros(1, np.int64)
        (by_size,) = read_costs(cold, ones, row_bytes=self._row_bytes, gaps_bytes=no_gap)
        return sum(self._disk.seconds(int(r), int(b)) for r, b in by_size if r)


def hottest_rows(counts: Array, num_rows: int) -> Ids:
    """Return the ``num_rows`` ids of highest count above zero, ties by id; ascending by id."""
    if num_rows <= 0 or not len(counts):
        return np.empty(0, np.int64)
    histogram = np.zeros(int(counts.max()) + 1, np.int64)
    for first in range(0, len(counts), _COUNTED_AT_ONCE):
        part = counts[first : first + _COUNTED_AT_ONCE]
        histogram += np.bincount(part, minlength=len(histogram))
    at_least = np.cumsum(histogram[::-1])[::-1]  # at_least[c]: rows of count c or more
    # All rows of this count or more fit; those of the count just below it fit in part.
    threshold = max(1, int(np.count_nonzero(at_least > num_rows)))
    rows = np.flatnonzero(counts >= threshold)
    if threshold == 1:  # a count of zero is never worth a slot
        return rows
    ties = np.flatnonzero(counts == threshold - 1)[: num_rows - len(rows)]
    rows = np.concatenate([rows, ties])
    rows.sort()  # in place: of a large graph these are gigabytes
    return rows
