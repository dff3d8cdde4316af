"""Carries out one rank's plan over an inner process group with its sends and receives.

Receives are posted as early as the memory they write is free, and a window ahead, so that data
is taken off the wire while earlier chunks are still being added: the pipeline. What arrives first
is used first, whichever peer sent it. No send is waited for before the end: gloo's sends end only
when the peer takes them, and a rank that waited for that could wait in a circle. What is sent from
memory that is written again is copied instead. Sums are formed in the program's order, whatever
arrives first, so results are the same bits in every run.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from fivefold.collectives.execution._calls import NUM_TAGS, CollectiveError
from fivefold.collectives.execution._lanes import Agenda, Arrival, Arrivals, Lanes
from fivefold.collectives.execution._plan import RankPlan, Span, Task
from fivefold.collectives.lowering import Buffer, OpKind

_AHEAD = 32  # receives of one queue that are posted and not yet used
_WORTH_LANES_BYTES = 1 << 18  # below, what is sent is over before a thread has woken up
_OTHER_ERRORS_S = 0.3  # after a failed wait: those that failed with it
_MOST_LANES = 64  # a direct exchange among thousands is no reason for thousands of threads

Combine = Callable[..., Any]
PLAIN_RECEIVES = {OpKind.RECEIVE, OpKind.RECEIVE_COPY_SEND}


@dataclass
class Transfers:
    """What one collective works on.

    Args:
        inner: Group that carries the messages.
        inputs: Input buffer, flat.
        outputs: Output buffer, flat; the input again where the program runs in place.
        unit: Elements of the unit that is cut into chunks; see :meth:`Layout.offsets`.
        combine: ``combine(first, second, out=...)``; None where nothing is added.
        timeout: Longest wait for one message.
        what: Name of the collective for messages.
        tag: First tag of the messages; a queue's number is added.
        lanes: Threads that wait for messages; None to wait for one after the other.

    Examples:
        >>> Transfers.__dataclass_fields__["what"].type
        'str'
    """

    inner: Any
    inputs: torch.Tensor
    outputs: torch.Tensor
    unit: int
    combine: Combine | None
    timeout: timedelta
    what: str
    tag: int
    lanes: Lanes | None = None
    keep: list[Any] = field(default_factory=list)

    def tag_of(self, channel: int) -> int:
        """Tag of the messages of a queue."""
        return (self.tag + channel) % NUM_TAGS


def run_plan(plan: RankPlan, transfers: Transfers) -> None:
    """Run a plan, one task after another.

    Args:
        plan: The rank's plan.
        transfers: Buffers and the inner group.

    Raises:
        CollectiveError: A peer is gone, or a message did not come in time.

    Examples:
        See ``examples/collectives_backend.py``: it takes several processes.
    """
    Runner(plan, transfers).run()


class _Memory:
    """Slices of the buffers by chunk slots."""

    def __init__(self, plan: RankPlan, transfers: Transfers) -> None:
        self._offsets = plan.layout.offsets(transfers.unit)
        size = self._offsets[Buffer.SCRATCH][-1]
        scratch = transfers.inputs.new_empty(size) if size else transfers.inputs
        self._buffers = {
            Buffer.INPUT: transfers.inputs,
            Buffer.OUTPUT: transfers.outputs,
            Buffer.SCRATCH: scratch,
        }

    def view(self, span: Span) -> torch.Tensor:
        offsets = self._offsets[span.buffer]
        return self._buffers[span.buffer][offsets[span.first] : offsets[span.last]]


class Runner:
    """One run of one plan.

    Args:
        plan: The rank's plan.
        transfers: Buffers and the inner group.

    Examples:
        See ``examples/collectives_backend.py``: it takes several processes.
    """

    def __init__(self, plan: RankPlan, transfers: Transfers) -> None:
        self._tasks = plan.tasks
        self._transfers = transfers
        self._memory = _Memory(plan, transfers)
        self._unposted: dict[tuple[int, int], deque[int]] = {}
        for at, task in enumerate(plan.tasks):
            if task.receive_peer >= 0:
                key = (task.receive_peer, task.receive_channel)
                self._unposted.setdefault(key, deque()).append(at)
        self._lane_of = {key: lane for lane, key in enumerate(self._unposted)}
        self._windows = dict.fromkeys(self._unposted, 0)  # posted and not yet used
        lanes = transfers.lanes
        size = max(transfers.inputs.nbytes, transfers.outputs.nbytes)
        few = 1 < len(self._lane_of) <= _MOST_LANES
        worth_it = few and size >= _WORTH_LANES_BYTES
        self._lanes = lanes if worth_it else None
        self._arrivals: Arrivals = queue.SimpleQueue()
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self._sends: dict[int, Any] = {}
        self._copied = {sender for task in plan.tasks for sender in task.settle}

    def run(self) -> None:
        """Carry out all tasks.

        Raises:
            CollectiveError: A peer is gone, or a message did not come in time.
        """
        agenda = Agenda(self._tasks)
        self._post_receives(agenda)
        while not agenda.is_done:
            at = agenda.next()
            if at is None:
                self._await_one(agenda)
                continue
            task = self._tasks[at]
            data = self._result_of(at, task)
            if task.send_peer >= 0:
                self._send(at, task, data)
            agenda.done(at)
            self._post_receives(agenda)
        for at in list(self._sends):
            self._finish_send(at)

    # -- receiving -----------------------------------------------------------------------------

    def _post_receives(self, agenda: Agenda) -> None:
        """Post what may arrive now; in order, since a queue hands over in order."""
        for key, waiting in list(self._unposted.items()):
            while waiting and self._windows[key] < _AHEAD:
                at = waiting[0]
                if not self._tasks[at].kind.reduces and not agenda.may_be_written(at):
                    break
                waiting.popleft()
                self._windows[key] += 1
                self._post(at, self._tasks[at], agenda)
            if not waiting:  # or every task would look at a thousand empty queues
                del self._unposted[key]

    def _post(self, at: int, task: Task, agenda: Agenda) -> None:
        span = task.read if task.kind.reduces else task.write
        assert span is not None, "what is received is written or added to what is read"
        target = self._memory.view(span)
        if task.kind.reduces:
            target = torch.empty_like(target)
        work = None
        if target.numel():
            tag = self._transfers.tag_of(task.receive_channel)
            work = self._call(
                lambda: self._transfers.inner.recv([as_bytes(target)], task.receive_peer, tag), task
            )
        self._posted[at] = (work, target)
        if work is None:
            agenda.arrived(at)
        elif self._lanes is not None:
            lane = self._lane_of[task.receive_peer, task.receive_channel]
            self._lanes.wait(lane, lambda: self._wait_for_data(work, task), at, self._arrivals)

    def _wait_for_data(self, work: Any, task: Task) -> None:
        self._wait(work, task, f"data from rank {task.receive_peer}")

    def _await_one(self, agenda: Agenda) -> None:
        """Wait until a message is there that some task waits for."""
        if self._lanes is None:
            at = min(at for at, (work, _) in self._posted.items() if work is not None)
            work, target = self._posted[at]
            self._wait_for_data(work, self._tasks[at])
            self._posted[at] = (None, target)
            agenda.arrived(at)
            return
        arrival = self._arrivals.get()
        while True:
            if arrival.error is not None:
                raise self._first_error(arrival)
            agenda.arrived(arrival.at)
            try:
                arrival = self._arrivals.get_nowait()
            except queue.Empty:
                return

    def _first_error(self, failed: Arrival) -> BaseException:
        """The error of the earliest task: who is late makes others late, which fail with it."""
        found = [failed]
        end_s = time.monotonic() + _OTHER_ERRORS_S
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                found.append(self._arrivals.get(timeout=left_s))
            except queue.Empty:
                break
        errors = [arrival for arrival in found if arrival.error is not None]
        earliest = min(errors, key=lambda arrival: arrival.at).error
        assert earliest is not None, "one of them has failed"
        return earliest

    def _result_of(self, at: int, task: Task) -> torch.Tensor:
        """Carry out a task up to its sending; what it would send."""
        received = self._received(at, task)
        if task.kind in PLAIN_RECEIVES:
            assert received is not None, "it has received"
            return received
        assert task.read is not None, "all others read"
        own = self._memory.view(task.read)
        if task.kind is OpKind.SEND:
            return own
        return self._combined(task, own, received)

    def _received(self, at: int, task: Task) -> torch.Tensor | None:
        """What a task received; it has arrived."""
        if task.receive_peer < 0:
            return None
        self._windows[task.receive_peer, task.receive_channel] -= 1
        return self._posted.pop(at)[1]

    def _combined(
        self, task: Task, own: torch.Tensor, received: torch.Tensor | None
    ) -> torch.Tensor:
        target = received if task.write is None else self._memory.view(task.write)
        assert target is not None, "it writes, or sends what it received"
        if task.kind is OpKind.COPY:
            if target.data_ptr() != own.data_ptr():
                target.copy_(own)
            return target
        combine = self._transfers.combine
        assert combine is not None, "only reductions have tasks that add"
        first = target if received is None else received
        combine(first, own, out=target)
        return target

    # -- sending -------------------------------------------------------------------------------

    def _send(self, at: int, task: Task, data: torch.Tensor) -> None:
        if not data.numel():
            return
        if at in self._copied:
            data = data.clone()
        tag = self._transfers.tag_of(task.send_channel)
        work = self._call(
            lambda: self._transfers.inner.send([as_bytes(data)], task.send_peer, tag), task
        )
        # The data goes with the work: what was staged must live until it is sent.
        self._sends[at] = (work, data)

    def _finish_send(self, at: int) -> None:
        found = self._sends.pop(at, None)
        if found is not None:
            task = self._tasks[at]
            self._wait(found[0], task, f"rank {task.send_peer} to take data")

    # -- waiting -------------------------------------------------------------------------------

    def _wait(self, work: Any, task: Task, for_what: str) -> None:
        started_s = time.monotonic()
        try:
            work.wait(self._transfers.timeout)
        except RuntimeError as error:
            waited_s = time.monotonic() - started_s
            self._fail(task, f"after waiting {waited_s:.1f} s for {for_what}", error)

    def _call(self, post: Callable[[], Any], task: Task) -> Any:
        try:
            return post()
        except RuntimeError as error:
            peer = task.send_peer if task.send_peer >= 0 else task.receive_peer
            self._fail(task, f"talking to rank {peer}", error)

    def _fail(self, task: Task, how: str, error: RuntimeError) -> None:
        # Receives under way may still write: their memory must outlive this call.
        self._transfers.keep += [self._posted, self._sends, self._memory]
        number = self._tasks.index(task)
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CollectiveError(
            f"{self._transfers.what} failed {how} (operation {number} of {len(self._tasks)}): "
            f"{cause}",
            hint="a peer ended, is stuck, or called another collective; the group cannot go on",
        ) from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Messages are bytes: gloo has no float8, and a bool or complex is none of its business."""
    return tensor.view(torch.uint8)
