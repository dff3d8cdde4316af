"""Which tasks of a plan may run, and threads that wait for messages on behalf of the one that runs.

Messages from several peers come in an order that no plan can know. A rank that waits for them in
a fixed order leaves links idle whose turn has not come; so each queue of messages has a *lane*, a
thread that does nothing but wait, and the rank takes whatever is there. Which sums are formed, and
in which order, is the plan's affair: a task waits for those before it that touch its memory.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fivefold.collectives.execution._plan import Task


class Agenda:
    """The tasks that may run now, the first of the plan first.

    Args:
        tasks: The plan's tasks.

    Examples:
        >>> agenda = Agenda([])
        >>> agenda.next() is None, agenda.is_done
        (True, True)
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._unmet = [len(task.after) for task in tasks]
        self._missing = [
            len(task.after) + (task.receive_peer >= 0) + (task.sends_after >= 0) for task in tasks
        ]
        self._followers: list[list[int]] = [[] for _ in tasks]
        self._next_sender = [-1] * len(tasks)
        for at, task in enumerate(tasks):
            for earlier in task.after:
                self._followers[earlier].append(at)
            if task.sends_after >= 0:
                self._next_sender[task.sends_after] = at
        self._ready = [at for at, missing in enumerate(self._missing) if not missing]
        self._left = len(tasks)

    @property
    def is_done(self) -> bool:
        """Whether every task is done."""
        return self._left == 0

    def next(self) -> int | None:
        """Take the first task that may run; None where all wait."""
        return heapq.heappop(self._ready) if self._ready else None

    def may_be_written(self, at: int) -> bool:
        """Whether nothing earlier uses the memory of a task any more."""
        return not self._unmet[at]

    def arrived(self, at: int) -> None:
        """What a task receives is there."""
        self._one_less(at)

    def done(self, at: int) -> None:
        """A task is done: others may follow it."""
        self._left -= 1
        for follower in self._followers[at]:
            self._unmet[follower] -= 1
            self._one_less(follower)
        if self._next_sender[at] >= 0:
            self._one_less(self._next_sender[at])

    def _one_less(self, at: int) -> None:
        self._missing[at] -= 1
        if not self._missing[at]:
            heapq.heappush(self._ready, at)


class Arrival(NamedTuple):
    """A message that came, or did not.

    Args:
        at: The task that receives it.
        error: What the wait ended with; None where all is well.
    """

    at: int
    error: BaseException | None


Arrivals = queue.SimpleQueue[Arrival]
_Wait = tuple[Callable[[], None], int, Arrivals]


class Lanes:
    """Threads that wait, one for each queue of messages; they begin when they are first needed.

    Args:
        name: Name of the threads.

    Examples:
        >>> lanes, arrivals = Lanes("example"), queue.SimpleQueue()
        >>> lanes.wait(0, lambda: None, 7, arrivals)
        >>> arrivals.get()
        Arrival(at=7, error=None)
        >>> lanes.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits: list[queue.SimpleQueue[_Wait | None]] = []

    def wait(self, lane: int, wait: Callable[[], None], at: int, arrivals: Arrivals) -> None:
        """Have a lane wait, after what it was given before, and report.

        Args:
            lane: Number of the lane.
            wait: Returns when the message is there, or raises.
            at: The task that receives it.
            arrivals: Where to report.
        """
        while lane >= len(self._waits):
            self._waits.append(queue.SimpleQueue())
            name = f"{self._name}, lane {len(self._waits) - 1}"
            # Daemons: one whose peer hangs must not keep the process from ending.
            thread = threading.Thread(
                target=_wait_for_all, args=(self._waits[-1],), name=name, daemon=True
            )
            thread.start()
        self._waits[lane].put((wait, at, arrivals))

    def close(self) -> None:
        """Let the threads end when what they wait for is over."""
        for waits in self._waits:
            waits.put(None)
        self._waits = []


def _wait_for_all(waits: queue.SimpleQueue[_Wait | None]) -> None:
    while (item := waits.get()) is not None:
        wait, at, arrivals = item
        error: BaseException | None = None
        try:
            wait()
        except BaseException as caught:  # noqa: BLE001 - raised by whoever takes the report
            error = caught
        arrivals.put(Arrival(at, error))
        del wait, item, error  # a waiting lane keeps no message alive
