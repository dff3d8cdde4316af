"""Stopping together: signals on any rank become one decision at one step on all ranks.

A rank that is told to stop must not stop alone, or its peers wait for it in the next
collective. So the ranks sum up their wishes: a small all-reduce (maximum) on a group of its
own is launched every few steps and read the same number of steps later. Since launch and reading
come at the same steps everywhere, all decide alike. The number of steps follows how long such a
message takes, behind a round's payload on a slow link or for a rank that is behind within its
round, so that it has arrived when it is read. This module knows nothing of training.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fivefold.runs import StopRequest
from fivefold.train._spans import Span
from fivefold.train._world import guard

if TYPE_CHECKING:
    from fivefold.train._world import World

# A stop is agreed within about two periods; a message every half second costs nothing.
_PERIOD_S = 0.5
_MAX_PERIOD_STEPS = 1000
# A message is read after twice the time that such messages took lately, but a stop must come
# before a scheduler's patience ends.
_SPARE = 2.0
_LONGEST_PERIOD_S = 10.0
_MEMORY = 0.7


class ControlLane:
    """Agreement on stopping, a few steps behind and never waited for on purpose.

    Args:
        world: The ranks.
        stop: This rank's request.

    Raises:
        CommunicationError: A peer died or did not answer in time.
    """

    def __init__(self, world: World, stop: StopRequest) -> None:
        self._world = world
        self._stop = stop
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._message = torch.zeros(2, dtype=torch.int64)
        self._period_steps = 1
        self._launch_step = 0
        self._launch_s = 0.0
        self._latency_s = 0.0
        self._arrival: torch.futures.Future[float]
        self._spans: list[Span] = []
        if world.world_size > 1:
            with guard(world, "setting up the control lane"):
                self._group = dist.new_group(backend="gloo", timeout=world.timeout)

    def start(self, step: int) -> None:
        """Launch the first agreement before the first step."""
        self._launch(step, step_s=_PERIOD_S)

    def poll(self, step: int) -> bool:
        """Say, after a step, whether all ranks stop here.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self._group is None:
            return self._stop.requested
        if step < self._launch_step + self._period_steps:
            return False
        launched_s, steps = self._launch_s, step - self._launch_step
        stop, self._period_steps = self._read()
        if stop:
            return True
        self._launch(step, step_s=(time.perf_counter() - launched_s) / steps)
        return False

    def drain(self) -> None:
        """Read the last message, so that nothing is in flight when the group ends.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self._work is not None:
            self._read()

    def take_spans(self) -> list[Span]:
        """Waits since the last call."""
        taken, self._spans = self._spans, []
        return taken

    def _launch(self, step: int, *, step_s: float) -> None:
        if self._group is None:
            return
        # The period travels with the wish: ranks measure different step times, but must launch
        # and read at the same steps.
        period_s = min(max(_PERIOD_S, _SPARE * self._latency_s), _LONGEST_PERIOD_S)
        wished = math.ceil(period_s / max(step_s, period_s / _MAX_PERIOD_STEPS))
        self._message[0], self._message[1] = int(self._stop.requested), wished
        self._launch_step, self._launch_s = step, time.perf_counter()
        with guard(self._world, "the agreement on stopping"):
            self._work = dist.all_reduce(
                self._message, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )
            assert self._work is not None, "an asynchronous collective of a member returns its work"
            self._arrival = self._work.get_future().then(lambda _: time.perf_counter())

    def _read(self) -> tuple[bool, int]:
        assert self._work is not None, "start() launches the first message"
        start_s = time.perf_counter()
        with guard(self._world, "the agreement on stopping"):
            self._work.wait()
            arrived_s = self._arrival.wait()
        self._work = None
        self._latency_s = max(arrived_s - self._launch_s, _MEMORY * self._latency_s)
        end_s = time.perf_counter()
        self._spans.append(
            Span(lane="wait", name="agreement on stopping", start_s=start_s, end_s=end_s)
        )
        stop, period = self._message.tolist()
        return bool(stop), period
