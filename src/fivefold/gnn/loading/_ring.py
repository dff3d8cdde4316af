"""``BufferRing``: a bounded set of page-aligned buffers that return when nobody looks at them.

A buffer is lent as an array; a tensor made of that array, and every view of it, keep the array
alive. When the last of them is gone, a weakref callback puts the buffer back. So a buffer is
never written while the training loop, a saved activation or a view still refers to it, and no
copy is needed.

The ring counts on a loop that lets go of one batch before it asks for the next but one. A loop
that holds more gets more buffers, so that it cannot wait for itself; what it holds is then its
own memory, above the loader's budget, and a warning says so once.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.errors import InfeasibleError
from fivefold.gnn.loading._pipeline import ClosedChannelError, Mailbox
from fivefold.gnn.storage.pages import aligned_empty
from fivefold.units import format_bytes

_LOG = logging.getLogger(__name__)
_DEFAULT_PREFETCH = 4
_FEWEST_BUFFERS = 2  # one is with the training loop while the next is prepared

Buffer = npt.NDArray[np.uint8]


def buffer_count(*, batch_bytes: int, memory_bytes: int | None, prefetch: int | None) -> int:
    """Return the buffers of a ring: one with the training loop, the others filled or ready.

    ``batch_bytes`` are those of the largest batch; ``prefetch`` None: as many as are useful and
    fit ``memory_bytes``.
    """
    wanted = 1 + (_DEFAULT_PREFETCH if prefetch is None else prefetch)
    fitting = wanted if memory_bytes is None else memory_bytes // max(batch_bytes, 1)
    least = _FEWEST_BUFFERS if prefetch is None else wanted
    if fitting < least:
        raise InfeasibleError(
            f"{least} buffers of the largest batch take {format_bytes(least * batch_bytes)}, more "
            f"than memory_bytes={memory_bytes}",
            hint="raise memory_bytes, lower prefetch, or sample smaller batches",
        )
    return min(wanted, fitting)


@dataclasses.dataclass(frozen=True, slots=True)
class _StopWaiting:
    """A message among the free buffers; borrowers for whom it is not throw it away."""

    borrower: object


class BufferRing:
    """Lend ``count`` buffers of ``size_bytes`` bytes, each to one batch at a time.

    ``pinned`` ones are page-locked, for copies to a GPU.
    """

    def __init__(self, count: int, *, size_bytes: int, pinned: bool = False) -> None:
        self._size_bytes, self._pinned = size_bytes, pinned
        self._count = count
        self._made = 0
        self._free = Mailbox()
        self._inside: set[int] = set()  # loans in the running pipeline, by id of the array
        self._outside: set[int] = set()  # loans that only somebody else can end
        self._warned = False
        for _ in range(count):
            self._add()

    @property
    def nbytes(self) -> int:
        """Return bytes of all buffers that exist."""
        return self._made * self._size_bytes

    @property
    def count(self) -> int:
        """Buffers that exist."""
        return self._made

    def lend(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, borrower: object = None
    ) -> npt.NDArray[Any]:
        """Wait for a free buffer and lend its first bytes as an array.

        The lender must pass the array itself on, or a tensor made of it: NumPy's views of it
        point past it to the buffer and do not keep the loan alive. ``ClosedChannelError`` where
        ``borrower`` was told to stop waiting.
        """
        while isinstance(buffer := self._free.take(), _StopWaiting):
            if buffer.borrower is borrower:
                raise ClosedChannelError
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        assert size_bytes <= self._size_bytes, "a batch is larger than the plan's largest"
        array: npt.NDArray[Any] = buffer[:size_bytes].view(dtype).reshape(shape)
        number = id(array)
        weakref.finalize(array, _give_back, weakref.ref(self), buffer, number).atexit = False
        self._inside.add(number)
        return array

    def delivered(self, number: int) -> None:
        """Note that the loan with this ``id`` of its array is now in the consumer's hands."""
        self._inside.discard(number)
        self._outside.add(number)

    def abandon(self) -> None:
        """Note that the pipeline has ended: what it still holds hangs on an error or a thread."""
        self._outside |= self._inside
        self._inside = set()

    def make_room(self) -> None:
        """Add a buffer for each loan outside of the pipeline but one."""
        held = len(self._outside)
        while self._made < self._count + held - 1:
            self._add()
            if not self._warned:
                self._warned = True
                _LOG.warning(
                    "the training loop holds %d batches at a time; each takes %d bytes beyond the "
                    "loader's budget (batch.clone() keeps a batch in memory of its own)",
                    held,
                    self._size_bytes,
                )

    def stop_waiting(self, borrower: object) -> None:
        """Wake ``borrower`` if it waits for a buffer, or else when it next does."""
        self._free.put(_StopWaiting(borrower))

    def _add(self) -> None:
        self._made += 1
        self._free.put(aligned_empty((self._size_bytes,), np.uint8, pin=self._pinned))

    def _return(self, buffer: Buffer, number: int) -> None:
        """Take a buffer back; runs inside a destructor, in any thread, so it must not wait."""
        self._inside.discard(number)
        self._outside.discard(number)
        if self._made > self._count + max(0, len(self._outside) - 1):
            self._made -= 1
        else:
            self._free.put(buffer)


def _give_back(ring: weakref.ref[BufferRing], buffer: Buffer, number: int) -> None:
    alive = ring()
    if alive is not None:
        alive._return(buffer, number)  # noqa: SLF001 - same module
