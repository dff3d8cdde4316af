"""The parent of the ladder: gives steps to a child, ends it where it hangs, and goes on.

Nothing here touches the GPU or waits without an end. A child does one step after another, as long
as it answers; starting one for every step would take longer than most steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.moe._gpu._steps import Step

__all__ = ["Limits", "climb"]

_START_S = 90.0
_COMPILE_S = 60.0  # more for each kernel that a step compiles first
_MOST_COMPILES = 6
_GRACE_S = 4.0  # for a child to say what its control words are
_GOING_S = 5.0  # for a child that crashed to be gone
_MOST_FAILED_STARTS = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take.

    Attributes:
        budget_s: Of the whole; what it does not allow is left out, by name.
        step_s: Most of a step; None: each step's own.
    """

    budget_s: float
    step_s: float | None = None


class Child:
    """A process that runs steps; its lines come through a queue, so that no read can block."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.tail: deque[str] = deque(maxlen=15)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, deadline_s: float) -> dict[str, Any] | None:
        """Return the next line of JSON; None where it ended.

        Raises:
            queue.Empty: There was none in time.
        """
        while True:
            text = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.01))
            if text is None:
                return None
            try:
                found = json.loads(text)
            except ValueError:
                found = None
            if isinstance(found, dict) and "event" in found:
                return found
            self.tail.append(text.rstrip()[:300])

    def send(self, order: dict[str, Any]) -> None:
        """Give it a step; one that has ended does not take it, which its lines will show."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def end(self) -> str:
        """Kill it with all its children, and say how it ended."""
        code = self._process.poll()
        self._reader.join(timeout=0.1)
        if code is None and not self._reader.is_alive():  # its output ended: it is going by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=_GOING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            return "it cannot be killed: the driver holds it"
        self._reader.join(timeout=5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        if code is None:
            return "it was killed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def climb(
    steps: Sequence[Step],
    command: Sequence[str],
    *,
    limits: Limits,
    chosen: Callable[[Step], bool],
    say: Callable[[dict[str, Any]], None],
    plant: Callable[[Step], str] = lambda _step: "",
) -> bool:
    """Run steps in order, whatever happens in them.

    Args:
        steps: All; a child knows them by number.
        command: Starts a child.
        limits: Of time.
        chosen: Which steps to run.
        say: Takes every row, at once.
        plant: The fault to plant in a step, or "".

    Returns:
        Whether all that was chosen was run and right.
    """
    ladder = _Ladder(command, limits, say)
    for number, step in enumerate(steps):
        if chosen(step):
            ladder.run(number, step, plant(step))
    ladder.close()
    counts = ladder.counts
    say({"event": "summary", **counts, "disqualified": ladder.failed_by_name()})
    return set(counts) <= {"good"}


class _Ladder:
    """What is known so far: the child, who is disqualified, what time is left."""

    def __init__(
        self, command: Sequence[str], limits: Limits, say: Callable[[dict[str, Any]], None]
    ) -> None:
        self._command, self._limits, self._say = command, limits, say
        self._end_s = time.monotonic() + limits.budget_s
        self._child: Child | None = None
        self._failed: dict[tuple[str, str], str] = {}  # backend and kind: the step that failed
        self._failed_starts = 0
        self.counts: dict[str, int] = {}

    def run(self, number: int, step: Step, fault: str) -> None:
        """Run a step, or say why not."""
        reason = self._reason_not_to(step)
        if reason is not None:
            self._finish(step, "skipped", reason=reason)
            return
        child = self._ready(step)
        if child is None:
            return
        limit_s = step.limit_s if self._limits.step_s is None else self._limits.step_s
        began_s = time.monotonic()
        deadline_s = began_s + limit_s
        allowed = [name for name in ("fused", "split") if (name, step.kind) not in self._failed]
        order = {"step": number, "fault": fault, "allowed": allowed}
        child.send(order | {"guard_s": max(limit_s - _GRACE_S, limit_s / 2)})
        compiled = 0
        while True:
            try:
                line = child.line(deadline_s)
            except queue.Empty:
                self._lose(step, "hung", f"no end in {deadline_s - began_s:.0f} s")
                return
            if line is None:
                late = time.monotonic() - began_s >= limit_s / 2 and self._control_shown
                self._lose(step, "hung" if late else "crashed", "")
                return
            if line["event"] == "compiled" and compiled < _MOST_COMPILES:
                compiled += 1
                deadline_s += _COMPILE_S
            self._control_shown = line["event"] == "control"
            if line["event"] == "end":
                break
            self._say(line)
        more = {} if line["problem"] is None else {"reason": line["problem"]}
        self._finish(step, "good" if line["good"] else "wrong", seconds=line["seconds"], **more)

    _control_shown = False

    def _reason_not_to(self, step: Step) -> str | None:
        for backend in step.needs:
            before = self._failed.get((backend, step.kind))
            if before is not None:
                return f"{backend} in {step.kind} is disqualified by: {before}"
        if self._failed_starts >= _MOST_FAILED_STARTS:
            return "the child does not start"
        if time.monotonic() > self._end_s:
            return f"the budget of {self._limits.budget_s:.0f} s is used up"
        return None

    def _ready(self, step: Step) -> Child | None:
        if self._child is not None:
            return self._child
        self._child = child = Child(self._command)
        deadline_s = time.monotonic() + _START_S
        try:
            line = child.line(deadline_s)
            while line is not None and line["event"] != "ready":
                self._say(line)
                line = child.line(deadline_s)
        except queue.Empty:
            line = None
        if line is None:
            self._failed_starts += 1
            self._lose(step, "not started", "the child did not start")
            return None
        self._failed_starts = 0
        return child

    def _lose(self, step: Step, status: str, reason: str) -> None:
        """The child is gone, or has to go."""
        assert self._child is not None
        ended = self._child.end()
        tail = list(self._child.tail)
        self._child = None
        parts = ", ".join(filter(None, (reason, ended)))
        self._finish(step, status, reason=parts, tail=tail)

    def _finish(self, step: Step, status: str, **more: Any) -> None:
        if status in {"wrong", "hung", "crashed"} and step.backend:
            self._failed.setdefault((step.backend, step.kind), step.name)
        self.counts[status] = self.counts.get(status, 0) + 1
        self._say({"event": "step", "rung": step.rung, "step": step.name, "status": status} | more)

    def failed_by_name(self) -> dict[str, str]:
        """Who is disqualified, and by which step."""
        return {f"{backend} in {kind}": by for (backend, kind), by in self._failed.items()}

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
