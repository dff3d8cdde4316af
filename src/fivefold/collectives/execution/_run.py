"""Carries out one rank's plan over an inner process group with its sends and receives.

Receives are posted as early as the memory they write is free, and a window ahead: the pipeline.
What arrives first is used first, whichever peer sent it, and added in the program's order, so
results are the same bits in every run. No send is waited for before the end: gloo's end only when
the peer takes them, and ranks could wait in a circle; what is written again before is copied.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch

from fivefold.collectives.execution._calls import NUM_TAGS, CollectiveError
from fivefold.collectives.execution._plan import RankPlan, Span, Task
from fivefold.collectives.lowering.program import Buffer, OpKind

_AHEAD = 32  # receives of one queue that are posted and not yet used
_WORTH_THREADS_BYTES = 1 << 18  # below, what is sent is over before a thread has woken up
_OTHER_ERRORS_S = 0.3  # after a failed wait: those that failed with it
_MOST_THREADS = 64  # a direct exchange among thousands is no reason for thousands of threads

_PLAIN_RECEIVES = {OpKind.RECEIVE, OpKind.RECEIVE_COPY_SEND}


@dataclass
class RunContext:
    """Buffers, group and settings of one collective."""

    inner: Any  # group that carries the messages
    inputs: torch.Tensor  # input buffer, flat
    outputs: torch.Tensor  # output buffer, flat; the input again where the program runs in place
    unit: int  # elements of the unit that is cut into chunks; see :meth:`Layout.offsets`
    # ``combine(first, second, out=...)``; None where nothing is added
    combine: Callable[..., Any] | None
    timeout: timedelta  # longest wait for one message
    what: str  # name of the collective for messages
    tag: int  # first tag of the messages; a queue's number is added
    # threads that wait for messages; None to wait for one after the other
    threads: ReceiveThreads | None = None
    keep: list[Any] = field(default_factory=list)


class Runner:
    """One run of one plan."""

    def __init__(self, plan: RankPlan, context: RunContext) -> None:
        self._tasks = plan.tasks
        self._context = context
        self._offsets = plan.layout.offsets(context.unit)
        size = self._offsets[Buffer.SCRATCH][-1]
        scratch = context.inputs.new_empty(size) if size else context.inputs
        self._buffers = {
            Buffer.INPUT: context.inputs,
            Buffer.OUTPUT: context.outputs,
            Buffer.SCRATCH: scratch,
        }
        self._unposted: dict[tuple[int, int], deque[int]] = {}
        for at, task in enumerate(plan.tasks):
            if task.receive_peer >= 0:
                key = (task.receive_peer, task.channel)
                self._unposted.setdefault(key, deque()).append(at)
        self._thread_of = {key: number for number, key in enumerate(self._unposted)}
        self._windows = dict.fromkeys(self._unposted, 0)  # posted and not yet used
        largest = max(context.inputs.nbytes, context.outputs.nbytes)
        few = 1 < len(self._thread_of) <= _MOST_THREADS
        worth_it = few and largest >= _WORTH_THREADS_BYTES
        self._threads = context.threads if worth_it else None
        # Tasks whose messages came, and what the waits for those that did not ended with.
        self._arrivals: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self._sends: dict[int, Any] = {}
        self._copied = {sender for task in plan.tasks for sender in task.settle}

    def run(self) -> None:
        ready = ReadyTasks(self._tasks)
        self._post_receives(ready)
        while not ready.is_done:
            at = ready.next()
            if at is None:
                self._await_one(ready)
                continue
            task = self._tasks[at]
            data = self._result_of(at, task)
            if task.send_peer >= 0:
                self._send(at, task, data)
            ready.done(at)
            self._post_receives(ready)
        for at, (work, _) in self._sends.items():
            task = self._tasks[at]
            self._wait(work, task, f"rank {task.send_peer} to take data")

    def _view(self, span: Span) -> torch.Tensor:
        offsets = self._offsets[span.buffer]
        return self._buffers[span.buffer][offsets[span.first] : offsets[span.last]]

    def _received_into(self, task: Task) -> torch.Tensor:
        """Return the memory like which a message is; it lies there, or is added to it."""
        span = task.read if task.kind.reduces else task.write
        assert span is not None, "what is received is written or added to what is read"
        return self._view(span)

    def _post_receives(self, ready: ReadyTasks) -> None:
        """Post what may arrive now; in order, since a queue hands over in order."""
        for key, waiting in list(self._unposted.items()):
            while waiting and self._windows[key] < _AHEAD:
                at = waiting[0]
                if not self._tasks[at].kind.reduces and not ready.may_be_written(at):
                    break
                waiting.popleft()
                self._windows[key] += 1
                self._post(at, self._tasks[at], ready)
            if not waiting:  # or every task would look at a thousand empty queues
                del self._unposted[key]

    def _post(self, at: int, task: Task, ready: ReadyTasks) -> None:
        target = self._received_into(task)
        if task.kind.reduces:
            target = torch.empty_like(target)
        work = self._post_one(target, task, sending=False)
        self._posted[at] = (work, target)
        if work is None:
            ready.arrived(at)
        elif self._threads is not None:
            number = self._thread_of[task.receive_peer, task.channel]
            self._threads.wait(number, partial(self._report_data, at, work, task))

    def _wait_for_data(self, work: Any, task: Task) -> None:
        self._wait(work, task, f"data from rank {task.receive_peer}")

    def _report_data(self, at: int, work: Any, task: Task) -> None:
        error: BaseException | None = None
        try:
            self._wait_for_data(work, task)
        except BaseException as caught:  # noqa: BLE001 - raised by who takes the report
            error = caught
        self._arrivals.put((at, error))

    def _await_one(self, ready: ReadyTasks) -> None:
        """Wait until a message is there that some task waits for."""
        if self._threads is None:
            at = min(at for at, (work, _) in self._posted.items() if work is not None)
            work, target = self._posted[at]
            self._wait_for_data(work, self._tasks[at])
            self._posted[at] = (None, target)
            ready.arrived(at)
            return
        arrivals = [self._arrivals.get()]
        while not self._arrivals.empty():
            arrivals.append(self._arrivals.get())
        for at, error in arrivals:
            if error is not None:
                raise self._first_error(dict(arrivals))
            ready.arrived(at)

    def _first_error(self, found: dict[int, BaseException | None]) -> BaseException:
        """Return the error of the earliest task: who is late makes others late."""
        end_s = time.monotonic() + _OTHER_ERRORS_S
        while (left_s := end_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                found.update([self._arrivals.get(timeout=left_s)])
        return next(error for _, error in sorted(found.items()) if error is not None)

    def _result_of(self, at: int, task: Task) -> torch.Tensor:
        """Carry out a task up to its sending; what it would send."""
        received = self._received(at, task)
        if task.kind in _PLAIN_RECEIVES:
            assert received is not None, "it has received"
            return received
        assert task.read is not None, "all others read"
        own = self._view(task.read)
        if task.kind is OpKind.SEND:
            return own
        return self._combined(task, own, received)

    def _received(self, at: int, task: Task) -> torch.Tensor | None:
        """Return what a task received; it has arrived."""
        if task.receive_peer < 0:
            return None
        self._windows[task.receive_peer, task.channel] -= 1
        return self._posted.pop(at)[1]

    def _combined(
        self, task: Task, own: torch.Tensor, received: torch.Tensor | None
    ) -> torch.Tensor:
        target = received if task.write is None else self._view(task.write)
        assert target is not None, "it writes, or sends what it received"
        if task.kind is OpKind.COPY:
            if target.data_ptr() != own.data_ptr():
                target.copy_(own)
            return target
        combine = self._context.combine
        assert combine is not None, "only reductions have tasks that add"
        first = target if received is None else received
        combine(first, own, out=target)
        return target

    def _send(self, at: int, task: Task, data: torch.Tensor) -> None:
        if at in self._copied:
            data = data.clone()
        work = self._post_one(data, task, sending=True)
        if work is not None:  # the data goes with it: what was staged must live until it is sent
            self._sends[at] = (work, data)

    def _post_one(self, data: torch.Tensor, task: Task, *, sending: bool) -> Any:
        """Post a message, as bytes: gloo knows no float8, nor means of bool and complex."""
        if not data.numel():
            return None
        inner, tag = self._context.inner, (self._context.tag + task.channel) % NUM_TAGS
        post, peer = (inner.send, task.send_peer) if sending else (inner.recv, task.receive_peer)
        try:
            return post([data.view(torch.uint8)], peer, tag)
        except RuntimeError as error:
            self._fail(task, f"talking to rank {peer}", error)

    def _wait(self, work: Any, task: Task, for_what: str) -> None:
        started_s = time.monotonic()
        try:
            work.wait(self._context.timeout)
        except RuntimeError as error:
            waited_s = time.monotonic() - started_s
            self._fail(task, f"after waiting {waited_s:.1f} s for {for_what}", error)

    def _fail(self, task: Task, how: str, error: RuntimeError) -> NoReturn:
        # Receives under way may still write: their memory must outlive this call.
        self._context.keep += [self._posted, self._sends, self._buffers]
        number = self._tasks.index(task)
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CollectiveError(
            f"{self._context.what} failed {how} (operation {number} of {len(self._tasks)}): "
            f"{cause}",
            hint="a peer ended, is stuck, or called another collective; the group cannot go on",
        ) from error


class ReadyTasks:
    """The tasks that may run now, the first of the plan first."""

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
        return self._left == 0

    def next(self) -> int | None:
        """Take the first task that may run; None where all wait."""
        return heapq.heappop(self._ready) if self._ready else None

    def may_be_written(self, at: int) -> bool:
        """Return whether nothing earlier uses the memory of a task any more."""
        return not self._unmet[at]

    def arrived(self, at: int) -> None:
        """Note that what a task receives is there."""
        self._one_less(at)

    def done(self, at: int) -> None:
        """Note that a task is done: others may follow it."""
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


class ReceiveThreads:
    """Threads that wait, one for each queue of messages; they begin when they are first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def wait(self, number: int, wait: Callable[[], None]) -> None:
        """Have a thread wait, after what it was given before."""
        while number >= len(self._waits):
            waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            name = f"{self._name}, thread {len(self._waits)}"
            # Daemons: one whose peer hangs must not keep the process from ending.
            threading.Thread(target=_wait_for_all, args=(waits,), name=name, daemon=True).start()
            self._waits.append(waits)
        self._waits[number].put(wait)

    def close(self) -> None:
        for waits in self._waits:
            waits.put(None)
        self._waits = []


def _wait_for_all(waits: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (wait := waits.get()) is not None:
        wait()
        del wait  # a waiting thread keeps no message alive


class RoundRunner(Runner):
    """One run of one plan in rounds: what NCCL can do, all messages of a round at once."""

    def __init__(self, plan: RankPlan, context: RunContext) -> None:
        super().__init__(plan, context)
        self._num_rounds = plan.num_rounds
        self._outbox: dict[int, torch.Tensor] = {}
        self._arrived: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        by_level: dict[int, list[int]] = {}
        by_sent_level: dict[int, list[int]] = {}
        for at, task in enumerate(self._tasks):
            by_level.setdefault(task.level, []).append(at)
            by_sent_level.setdefault(task.sent_level, []).append(at)
        for level in range(self._num_rounds):
            for at in by_level.get(level, ()):
                self._carry_out(at)
            self._exchange(by_sent_level.get(level, []))

    def _carry_out(self, at: int) -> None:
        task = self._tasks[at]
        for sender in task.settle:
            if sender in self._outbox:  # sent in this very round, and written before it goes
                self._outbox[sender] = self._outbox[sender].clone()
        data = self._result_of(at, task)
        if task.write is not None and task.receive_peer >= 0 and not task.kind.reduces:
            place = self._view(task.write)
            place.copy_(data)
            data = place
        if task.send_peer >= 0:
            self._outbox[at] = data

    def _received(self, at: int, task: Task) -> torch.Tensor | None:
        del task  # what it received came with the last round
        return self._arrived.pop(at, None)

    def _exchange(self, receives: list[int]) -> None:
        """Send and receive all messages of one round."""
        tasks, works = self._tasks, []
        sends = sorted(self._outbox, key=lambda at: (tasks[at].send_peer, tasks[at].channel, at))
        receives.sort(key=lambda at: (tasks[at].receive_peer, tasks[at].channel, at))
        inner, device = self._context.inner, self._context.inputs.device
        grouped = device.type != "cpu" and bool(sends or receives)
        if grouped:
            inner._start_coalescing(device)  # noqa: SLF001 - torch's own batch_isend_irecv does it
        for at in receives:
            self._arrived[at] = torch.empty_like(self._received_into(tasks[at]))
            works.append((self._post_one(self._arrived[at], tasks[at], sending=False), tasks[at]))
        works += [
            (self._post_one(self._outbox[at], tasks[at], sending=True), tasks[at]) for at in sends
        ]
        if grouped:
            works = [(inner._end_coalescing(device), works[0][1])]  # noqa: SLF001 - as above
        for work, task in works:
            if work is not None:
                self._wait(work, task, f"the round's messages with rank {task.receive_peer}")
        self._outbox.clear()
