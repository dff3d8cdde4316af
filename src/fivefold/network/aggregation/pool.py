"""The slots of a switch and what becomes of each chunk: pure decisions, no sockets, no clock.

A chunk takes a slot with the first part that comes and gives it back with its sum; where none is
free all ranks of the job are told, and sum it themselves. A rank begins a collective only when all
have left the one before, so the first chunk of a new one ends whatever is left of the old.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from fivefold.errors import (
    ConfigurationError,
    InfeasibleError,
    require_number,
    require_one_of,
    require_whole,
)
from fivefold.network.aggregation.wire import Frame, Kind, OrderedSum, stored_as

Sharing = Literal["dynamic", "reserved"]
_MOST_NAMED = 16  # ranks in a message: thousands would not fit
Reply = tuple[str, tuple[int, ...], Frame]  # job, ranks, frame


@dataclass(kw_only=True)
class SwitchState:
    """Report of a switch about itself.

    Attributes:
        slots_total: Slots that it has.
        slots_free: Slots that no chunk and no job holds.
        slot_bytes: Longest chunk.
        most_used: Most slots that were in use at a time.
        jobs: Jobs that are joined.
        hits: Chunks that were summed.
        misses: Chunks that were refused for want of a slot.
        expired: Chunks that were given up because parts did not come.
    """

    slots_total: int
    slots_free: int
    slot_bytes: int
    most_used: int = 0
    jobs: int = 0
    hits: int = 0
    misses: int = 0
    expired: int = 0


@dataclass
class _Slot:
    total: OrderedSum
    shape: tuple[int, int, str]
    began_s: float


@dataclass
class _Job:
    size: int
    reserved: int
    sequence: int
    ranks: set[int] = field(default_factory=set)
    slots: dict[int, _Slot] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


class SlotPool:
    """Slots shared by jobs."""

    def __init__(
        self, *, slots: int, slot_bytes: int, sharing: Sharing = "dynamic", expire_s: float = 30.0
    ) -> None:
        require_whole("slots", slots, least=0, hint="0 refuses all chunks")
        if require_whole("slot_bytes", slot_bytes, least=8) % 8:
            message = f"slot_bytes is {slot_bytes}"
            raise ConfigurationError(message, hint="use a positive multiple of 8")
        require_one_of(sharing, get_args(Sharing), f"sharing is {sharing!r}")
        self._slots, self.slot_bytes = slots, slot_bytes
        self._sharing = sharing
        self._expire_s = require_number("expire_s", expire_s, positive=True)
        self._jobs: dict[str, _Job] = {}
        self._state = SwitchState(slots_total=slots, slots_free=slots, slot_bytes=slot_bytes)

    # -- jobs ----------------------------------------------------------------------------------

    def join(self, job: str, rank: int, *, size: int, window: int, sequence: int) -> int:
        """Let a rank of a job in."""
        if size < 1 or not 0 <= rank < size or window < 1 or sequence < 0:
            raise ConfigurationError(f"rank {rank} of {size} cannot join with window {window}")
        entry = self._jobs.get(job)
        if entry is None:
            granted = min(window, self._free() if self._sharing == "reserved" else self._slots)
            if granted < 1:
                raise InfeasibleError(
                    f"no slot is free for job {job!r}", hint=f"all {self._slots} are taken"
                )
            reserved = granted if self._sharing == "reserved" else 0
            entry = self._jobs[job] = _Job(size, reserved, sequence)
        if entry.size != size:
            raise ConfigurationError(
                f"job {job!r} has {entry.size} ranks, not {size}",
                hint="give each job a name of its own",
            )
        entry.ranks.add(rank)
        entry.sequence = sequence  # ranks join before a collective, all before the same one
        entry.slots.clear()
        entry.refused.clear()
        return min(window, entry.reserved or self._slots)

    def leave(self, job: str, rank: int) -> list[Reply]:
        """Let a rank go: its job's chunks cannot be ended, and the others are told."""
        entry = self._jobs[job]
        entry.ranks.discard(rank)
        entry.slots.clear()
        if not entry.ranks:
            del self._jobs[job]
            return []
        gone = Frame(Kind.GONE, chunk=rank, sequence=entry.sequence)
        return [(job, tuple(sorted(entry.ranks)), gone)]

    # -- chunks --------------------------------------------------------------------------------

    def contribute(self, job: str, rank: int, frame: Frame, *, now_s: float) -> list[Reply]:
        """Take a rank's part of a chunk."""
        entry = self._jobs[job]
        if frame.sequence > entry.sequence:
            entry.sequence = frame.sequence
            entry.slots.clear()
            entry.refused.clear()
        if frame.sequence < entry.sequence or frame.chunk in entry.refused:
            return []
        slot = entry.slots.get(frame.chunk)
        if slot is None:
            why = self._why_not(entry)
            if why is not None:
                return [self._refuse(job, frame.chunk, **why)]
            total = OrderedSum(frame.dtype, entry.size)
            slot = entry.slots[frame.chunk] = _Slot(total, _shape(frame), now_s)
            used = sum(len(one.slots) for one in self._jobs.values())
            self._state.most_used = max(self._state.most_used, used)
        if slot.shape != _shape(frame):
            del entry.slots[frame.chunk]
            what = {"reason": "mismatch", "rank": rank, "shapes": [slot.shape, _shape(frame)]}
            return [self._refuse(job, frame.chunk, **what)]
        values = np.frombuffer(frame.payload, dtype=stored_as(frame.dtype))
        if not slot.total.add(rank, values):
            return []
        del entry.slots[frame.chunk]
        self._state.hits += 1
        result = Frame(
            Kind.RESULT, slot.total.result(), frame.dtype, frame.chunk, frame.sequence, frame.total
        )
        return [(job, tuple(range(entry.size)), result)]

    def expire(self, now_s: float) -> list[Reply]:
        """Give up the chunks that have waited too long."""
        replies = []
        for job, entry in self._jobs.items():
            for chunk, slot in list(entry.slots.items()):
                if now_s - slot.began_s > self._expire_s:
                    del entry.slots[chunk]
                    self._state.expired += 1
                    late = slot.total.missing[:_MOST_NAMED]
                    replies.append(self._refuse(job, chunk, reason="late", ranks=late))
        return replies

    def state(self) -> SwitchState:
        """Return what the switch reports."""
        return replace(self._state, slots_free=self._free(), jobs=len(self._jobs))

    def _why_not(self, entry: _Job) -> dict[str, Any] | None:
        if len(entry.ranks) < entry.size:
            absent = sorted(set(range(entry.size)) - entry.ranks)
            return {"reason": "absent", "ranks": absent[:_MOST_NAMED]}
        free = entry.reserved - len(entry.slots) if entry.reserved else self._free()
        if free > 0:
            return None
        self._state.misses += 1
        return {"reason": "slots"}

    def _refuse(self, job: str, chunk: int, **why: Any) -> Reply:
        entry = self._jobs[job]
        entry.refused.add(chunk)
        frame = Frame.of_text(Kind.REFUSED, why, chunk=chunk, sequence=entry.sequence)
        return job, tuple(sorted(entry.ranks)), frame

    def _free(self) -> int:
        held = (job.reserved or len(job.slots) for job in list(self._jobs.values()))
        return self._slots - sum(held)


def _shape(frame: Frame) -> tuple[int, int, str]:
    return len(frame.payload), frame.total, frame.dtype
