"""``Pipeline``: items pass through stages on a few threads and come out in order.

A bounded channel stands between neighbours. What keeps it from hanging: every wait ends when the
pipeline is closed; the first failure is raised at the consumer's next call; the consumer waits a
limited time and then names the stage that does not move. Threads hold nothing that the user holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fivefold.errors import FivefoldError, InfeasibleError, StorageError, UnsupportedError
from fivefold.gnn.storage.pages import Array, Bytes, aligned_empty
from fivefold.units import format_bytes

_LOG = logging.getLogger(__name__)
END = object()  # after the last item
_CLOSED, _FAILED = object(), object()
_GRACE_S = 5.0


class StallError(StorageError, TimeoutError):
    """A stage of the pipeline did not finish a batch in time; names the stage and the batch."""


class ClosedChannelError(Exception):
    """The channel was closed while somebody waited at it, or before."""


class Channel:
    """A queue with an end, of ``capacity`` items; None: of any number, and ``put`` never waits."""

    def __init__(self, capacity: int | None = None) -> None:
        # The only queue whose put is safe inside a weakref callback, where buffers come back from.
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = None if capacity is None else Channel()
        for _ in range(capacity or 0):
            self.give_room()

    def give_room(self) -> None:
        """Let one more item in."""
        if self._room is not None:
            self._room.put(None)

    def put(self, item: Any) -> None:
        """Wait for room and add an item; without a capacity safe in destructors."""
        if self._room is not None:
            self._room.take()
        self._items.put(item)

    def take(self, timeout_s: float | None = None) -> Any:
        """Wait for an item and take it."""
        item = self._items.get(timeout=timeout_s)
        if item is _CLOSED:
            self._items.put(_CLOSED)  # for the next waiter
            raise ClosedChannelError
        self.give_room()
        return item

    def wake(self, item: Any) -> None:
        """Add an item without waiting, whether or not there is room."""
        self._items.put(item)

    def drain(self) -> None:
        """Throw away what is inside a closed channel."""
        with contextlib.suppress(ClosedChannelError):
            while True:
                self.take()

    def close(self) -> None:
        """Wake all waiters; items still inside may be taken before they see the end."""
        if self._room is not None:
            self._room.close()
        self._items.put(_CLOSED)


@dataclasses.dataclass(slots=True)
class Ticket:
    """One batch on its way: its number and whatever the last stage made of it."""

    batch: int
    value: Any = None

    def release(self) -> Any:
        """Hand the value on and forget it: a thread that waits must hold no batch alive."""
        value, self.value = self.value, None
        return value


@dataclasses.dataclass(slots=True)
class Stage:
    """A named step."""

    name: str
    run: Callable[[Ticket], Any]
    patience_s: float = 0.0
    waits: bool = False
    seconds: float = 0.0
    began_s: float | None = None
    batch: int = -1


class Pipeline:
    """Run tickets through groups of stages on daemon threads, and keep their order."""

    def __init__(
        self,
        tickets: Iterator[int],
        groups: Sequence[Sequence[Stage]],
        *,
        lanes: Sequence[int] | None = None,
        capacity: int = 1,
        timeout_s: float = 120.0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._failure: BaseException | None = None
        self._done = False
        self.finished = False  # all tickets came out
        self._process = os.getpid()
        self.wait_s = 0.0
        self.stages: list[Stage] = []
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        widths = [*(lanes or [1] * len(groups)), 1]
        assert widths[0] == widths[-2] == 1, "tickets come one by one and go one by one"
        source: Iterator[int] | list[Channel] = tickets
        rooms = [1] * (len(groups) - 1) + [capacity]
        for group, width, next_width, room in zip(groups, widths, widths[1:], rooms, strict=False):
            assert width == next_width or 1 in (width, next_width), "no way to keep the order"
            sink = [Channel(room) for _ in range(max(width, next_width))]
            for lane in range(width):
                stages = [dataclasses.replace(stage) for stage in group]
                self._threads.append(
                    threading.Thread(
                        target=self._work,
                        args=(source, stages, sink, lane, width),
                        name=stages[0].name,
                        daemon=True,
                    )
                )
                self.stages += stages
            self._channels += sink
            source = sink
        for thread in self._threads:
            thread.start()

    def take(self) -> Any:
        """Return the next finished value."""
        if os.getpid() != self._process:
            message = f"this loader was started in process {self._process} and does not exist here"
            raise UnsupportedError(message, hint="make the loader after the fork, in the child")
        began_s = time.perf_counter()
        try:
            return self._take()
        except KeyboardInterrupt:
            self.close()  # an item may be lost between two instructions: do not go on without it
            raise
        finally:
            self.wait_s += time.perf_counter() - began_s

    def _take(self) -> Any:
        if self._failure is None and not self._done:
            try:
                item = self._wait()
            except queue.Empty:
                self._failure = self._stall()
            except ClosedChannelError:
                self._done = True
            else:
                if isinstance(item, Ticket) and self._failure is None:
                    return item.release()
                self.finished = item is END and self._failure is None
                self._done = True
        failure = self._failure
        self.close()
        if failure is not None:
            raise failure
        raise StopIteration

    def _wait(self) -> Any:
        while True:
            try:
                return self._channels[-1].take(self._timeout_s)
            except queue.Empty:
                now_s = time.perf_counter()
                busy = ((stage.began_s, stage.patience_s) for stage in self.stages)
                if not any(began is not None and now_s - began < most for began, most in busy):
                    raise

    @property
    def ended(self) -> bool:
        """Return whether no thread of this pipeline is alive."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End all threads, or leave those behind that hang; a second call changes nothing."""
        self._done = True
        if os.getpid() != self._process:
            return  # the threads stayed in the parent, and their locks may be held here
        for channel in self._channels:
            channel.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
        grace_s = 0.0 if isinstance(self._failure, StallError) else _GRACE_S
        until_s = time.monotonic() + grace_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        if self.ended:
            for channel in self._channels:
                channel.drain()  # batches that nobody will take give their buffers back
        elif threading.current_thread() not in self._threads:
            alive = [thread.name for thread in self._threads if thread.is_alive()]
            _LOG.warning("stages did not end in %.0f s and are left behind: %s", grace_s, alive)

    def _work(
        self,
        source: Iterator[int] | list[Channel],
        stages: list[Stage],
        sink: list[Channel],
        lane: int,
        width: int,
    ) -> None:
        """Take every ``width``-th ticket through the stages of one thread, until there are no more.

        Ticket i waits in channel i, counted round and round, of the threads before: so tickets
        keep their order although the threads of a group work side by side.
        """
        try:
            for number in itertools.count(lane, width):
                if isinstance(source, list):
                    ticket = source[number % len(source)].take()
                else:
                    batch = next(source, None)
                    ticket = END if batch is None else Ticket(batch)
                if ticket is END:
                    break
                for stage in stages:
                    self._run(stage, ticket)
                sink[number % len(sink)].put(ticket)
                del ticket
            for place in range(number, number + len(sink), width):
                sink[place % len(sink)].put(END)
        except ClosedChannelError:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must see it
            self._fail(error)

    def _run(self, stage: Stage, ticket: Ticket) -> None:
        began_s = time.perf_counter()
        stage.batch, stage.began_s = ticket.batch, began_s
        try:
            ticket.value = stage.run(ticket)
        except ClosedChannelError:
            raise
        except BaseException as error:
            place = f"stage {stage.name!r} of batch {ticket.batch}"
            if isinstance(error, FivefoldError) and type(error).__init__ is FivefoldError.__init__:
                raise type(error)(f"{place}: {error.message}", hint=error.hint) from error
            error.add_note(f"in {place} of the loading pipeline")
            raise
        finally:
            stage.seconds += time.perf_counter() - began_s
            stage.began_s = None

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._channels[-1].wake(_FAILED)

    def _stall(self) -> StallError:
        now_s = time.perf_counter()
        busy = [(stage.began_s, stage) for stage in self.stages if stage.began_s is not None]
        if not busy:
            return StallError(
                f"no batch for {self._timeout_s:.1f} s, and no stage is at work",
                hint="this is a defect of the loader: please report it",
            )
        began_s, stage = min(busy, key=lambda pair: (pair[1].waits, pair[0]))
        return StallError(
            f"stage {stage.name!r} of batch {stage.batch} has not ended for "
            f"{now_s - began_s:.1f} s, and the training loop waits",
            hint="see whether the disk hangs; raise timeout_s where it is only slow",
        )


_DEFAULT_PREFETCH = 4
_FEWEST_BUFFERS = 2  # one is with the training loop while the next is prepared


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


class _StopWaiting(NamedTuple):
    """A message among the free buffers; borrowers for whom it is not throw it away."""

    borrower: object


class BufferRing:
    """Lend ``count`` buffers of ``size_bytes`` bytes, each to one batch at a time.

    A buffer is lent as an array; a tensor made of that array, and every view of it, keep the array
    alive. When the last of them is gone, a weakref callback puts the buffer back. So a buffer is
    never written while the training loop, a saved activation or a view still refers to it, and no
    copy is needed. A loop that holds more than one batch gets more buffers, so that it cannot wait
    for itself; they are above the loader's budget, and a warning says so once. ``pinned`` ones are
    page-locked, for copies to a GPU.
    """

    def __init__(self, count: int, *, size_bytes: int, pinned: bool = False) -> None:
        self._size_bytes, self._pinned = size_bytes, pinned
        self.first_count = count
        self._made = 0
        self._free = Channel()
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
    ) -> Array:
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
        array: Array = buffer[:size_bytes].view(dtype).reshape(shape)
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
        while self._made < self.first_count + held - 1:
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

    def _return(self, buffer: Bytes, number: int) -> None:
        """Take a buffer back; runs inside a destructor, in any thread, so it must not wait."""
        self._inside.discard(number)
        self._outside.discard(number)
        if self._made > self.first_count + max(0, len(self._outside) - 1):
            self._made -= 1
        else:
            self._free.put(buffer)


def _give_back(ring: weakref.ref[BufferRing], buffer: Bytes, number: int) -> None:
    alive = ring()
    if alive is not None:
        alive._return(buffer, number)  # noqa: SLF001 - same module
