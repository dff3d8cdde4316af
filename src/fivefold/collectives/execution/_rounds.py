"""Carries out a plan in rounds, each one batch of sends and receives: what NCCL needs.

NCCL pairs a send with a receive only inside one group call, and knows no tags. So every round
posts all sends of the round together with the receives of the same messages, both in the order of
peer, channel and program; sums follow when the round has ended. What is received gets memory of
its own, so no message of a round can touch what another one still reads.
"""

from __future__ import annotations

from typing import Any

import torch

from fivefold.collectives.execution._plan import RankPlan, Task
from fivefold.collectives.execution._run import Runner, Transfers, as_bytes


def run_in_rounds(plan: RankPlan, transfers: Transfers) -> None:
    """Run a plan in rounds.

    Args:
        plan: The rank's plan.
        transfers: Buffers and the inner group.

    Raises:
        CollectiveError: A peer is gone, or a message did not come in time.

    Examples:
        See ``examples/collectives_backend.py``: it takes several processes.
    """
    _RoundRunner(plan, transfers).run()


class _RoundRunner(Runner):
    def __init__(self, plan: RankPlan, transfers: Transfers) -> None:
        super().__init__(plan, transfers)
        self._num_rounds = plan.num_rounds
        self._outbox: dict[int, torch.Tensor] = {}
        self._arrived: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        """Carry out all rounds."""
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
            place = self._memory.view(task.write)
            place.copy_(data)
            data = place
        if task.send_peer >= 0:
            self._outbox[at] = data

    def _received(self, at: int, task: Task) -> torch.Tensor | None:
        del task  # what it received came with the last round
        return self._arrived.pop(at, None)

    def _exchange(self, receives: list[int]) -> None:
        """All messages of one round."""
        sends = sorted(self._outbox, key=lambda at: (*self._queue(at, sending=True), at))
        receives = sorted(receives, key=lambda at: (*self._queue(at, sending=False), at))
        works: list[tuple[Any, Task]] = []
        inner, device = self._transfers.inner, self._transfers.inputs.device
        grouped = device.type != "cpu" and bool(sends or receives)
        if grouped:
            inner._start_coalescing(device)  # noqa: SLF001 - torch's own batch_isend_irecv does it
        for at in receives:
            task = self._tasks[at]
            span = task.read if task.kind.reduces else task.write
            assert span is not None, "what is received is written or added to what is read"
            self._arrived[at] = torch.empty_like(self._memory.view(span))
            works.append((self._post_one(self._arrived[at], task, sending=False), task))
        for at in sends:
            task = self._tasks[at]
            works.append((self._post_one(self._outbox[at], task, sending=True), task))
        if grouped:
            works = [(inner._end_coalescing(device), works[0][1])]  # noqa: SLF001 - as above
        for work, task in works:
            if work is not None:
                self._wait(work, task, f"the round's messages with rank {task.receive_peer}")
        self._outbox.clear()

    def _queue(self, at: int, *, sending: bool) -> tuple[int, int]:
        task = self._tasks[at]
        if sending:
            return task.send_peer, task.send_channel
        return task.receive_peer, task.receive_channel

    def _post_one(self, data: torch.Tensor, task: Task, *, sending: bool) -> Any:
        if not data.numel():
            return None
        inner = self._transfers.inner
        if sending:
            tag = self._transfers.tag_of(task.send_channel)
            return self._call(lambda: inner.send([as_bytes(data)], task.send_peer, tag), task)
        tag = self._transfers.tag_of(task.receive_channel)
        return self._call(lambda: inner.recv([as_bytes(data)], task.receive_peer, tag), task)
