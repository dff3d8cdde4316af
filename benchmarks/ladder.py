"""A ladder of steps: a parent gives them to a child, ends it where it hangs, and goes on.

Nothing in the parent touches a GPU or waits without an end. A child does one step after another, as
long as it answers; starting one for every step would take longer than most steps. Both write lines
of JSON that have an "event". The standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Child", "Limits", "Rung", "climb", "put_checkout_first", "say", "serve"]

_START_S = 90.0
_COMPILE_S = 60.0  # more for each kernel that a step compiles first
_MOST_COMPILES = 6
_GRACE_S = 4.0  # for a child to say what its control words are
_GOING_S = 5.0  # for a child that crashed to be gone
_MOST_FAILED_STARTS = 2
_BAD = {"wrong", "hung", "crashed"}
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What the parent knows of a step.

    Attributes:
        rung: Name of the rung that it belongs to.
        name: Of this step; unique.
        backend: What a failure of this step disqualifies, together with ``kind``; "" for nothing.
        kind: In which kind, such as a data type; or "".
        needs: Backends that must not have failed in this kind.
        limit_s: Longest time.
        alone: Whether the child ends after it.
        absent: Why it cannot be done here, such as a package that is not installed; or "".
    """

    rung: str
    name: str
    backend: str = ""
    kind: str = ""
    needs: tuple[str, ...] = ()
    limit_s: float = 25.0
    alone: bool = False
    absent: str = ""


_Step = TypeVar("_Step", bound=Rung)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take.

    Attributes:
        budget_s: Of the whole; what it does not allow is left out, by name.
        step_s: Most of a step; None: each step's own.
        hard_s: When even the step that runs is ended, as one that had no time.
    """

    budget_s: float
    step_s: float | None = None
    hard_s: float = math.inf


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
            if not text.isspace():
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
    steps: Sequence[_Step],
    command: Sequence[str],
    *,
    limits: Limits,
    say: Callable[[dict[str, Any]], None],
    plant: Callable[[_Step], str] = lambda _step: "",
    before: Mapping[str, str] | None = None,
    order: Sequence[int] | None = None,
) -> bool:
    """Run steps in order, whatever happens in them.

    Args:
        steps: All; a child knows them by number.
        command: Starts a child.
        limits: Of time.
        say: Takes every row, at once.
        plant: The fault to plant in a step, or "".
        before: What became of steps of an earlier run, by name: they are not run again, and what
            they disqualified stays so.
        order: Numbers of the steps in the order in which they are run; None: all as they are.

    Returns:
        Whether all that was chosen, and can be done here, was run and right.
    """
    ladder = _Ladder(command, limits, say)
    try:
        known = before or {}
        for step in steps:
            ladder.remember(step, known.get(step.name, ""))
        for number in range(len(steps)) if order is None else order:
            step = steps[number]
            if step.name not in known:
                ladder.run(number, step, plant(step))
    finally:
        ladder.close()
    counts = ladder.counts
    say({"event": "summary", **counts, "disqualified": ladder.failed_by_name()})
    return set(counts) <= {"good", "left out"}


class _Ladder:
    """What is known so far: the child, who is disqualified, what time is left."""

    def __init__(
        self, command: Sequence[str], limits: Limits, say: Callable[[dict[str, Any]], None]
    ) -> None:
        self._command, self._limits, self._say = command, limits, say
        now_s = time.monotonic()
        self._end_s, self._hard_end_s = now_s + limits.budget_s, now_s + limits.hard_s
        self._child: Child | None = None
        self._failed: dict[tuple[str, str], str] = {}  # backend and kind: the step that failed
        self._failed_starts = 0
        self.counts: dict[str, int] = {}

    def run(self, number: int, step: Rung, fault: str) -> None:
        """Run a step, or say why not."""
        reason = self._reason_not_to(step)
        if reason is not None:
            self._finish(step, "left out" if step.absent else "skipped", reason=reason)
            return
        if time.monotonic() > self._end_s:
            budget = f"the budget of {self._limits.budget_s:.0f} s is used up"
            self._finish(step, "no time", reason=budget)
            return
        child = self._ready(step)
        if child is None:
            return
        limit_s = step.limit_s if self._limits.step_s is None else self._limits.step_s
        self._say({"event": "begin", "step": step.name})
        began_s = time.monotonic()
        deadline_s = began_s + limit_s
        allowed = [name for name in ("fused", "split") if (name, step.kind) not in self._failed]
        order = {"step": number, "fault": fault, "allowed": allowed}
        child.send(order | {"guard_s": max(limit_s - _GRACE_S, limit_s / 2)})
        compiled = 0
        while True:
            try:
                line = child.line(min(deadline_s, self._hard_end_s))
            except queue.Empty:
                over = deadline_s > self._hard_end_s
                reason = f"no end in {min(deadline_s, self._hard_end_s) - began_s:.0f} s"
                self._lose(step, "no time" if over else "hung", reason)
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
        if step.alone:
            self.close()

    _control_shown = False

    def _reason_not_to(self, step: Rung) -> str | None:
        if step.absent:
            return step.absent
        for backend in step.needs:
            before = self._failed.get((backend, step.kind))
            if before is not None:
                return f"{backend} in {step.kind} is disqualified by: {before}"
        if self._failed_starts >= _MOST_FAILED_STARTS:
            return "the child does not start"
        return None

    def _ready(self, step: Rung) -> Child | None:
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

    def _lose(self, step: Rung, status: str, reason: str) -> None:
        """The child is gone, or has to go."""
        assert self._child is not None
        ended = self._child.end()
        tail = list(self._child.tail)
        self._child = None
        parts = ", ".join(filter(None, (reason, ended)))
        self._finish(step, status, reason=parts, tail=tail)

    def _finish(self, step: Rung, status: str, **more: Any) -> None:
        self.remember(step, status)
        self.counts[status] = self.counts.get(status, 0) + 1
        self._say({"event": "step", "rung": step.rung, "step": step.name, "status": status} | more)

    def remember(self, step: Rung, status: str) -> None:
        """Disqualify what a bad step is of."""
        if status in _BAD and step.backend:
            self._failed.setdefault((step.backend, step.kind), step.name)

    def failed_by_name(self) -> dict[str, str]:
        """Who is disqualified, and by which step."""
        return {f"{backend} in {kind}": by for (backend, kind), by in self._failed.items()}

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.end()


# -- the child -----------------------------------------------------------------------------------


def say(**line: Any) -> None:
    """Print one line of JSON, at once, whoever has taken ``sys.stdout`` or begun a line there."""
    stream = sys.__stdout__ or sys.stdout
    stream.write("\n" + json.dumps(line) + "\n")
    stream.flush()


def serve(
    steps: Sequence[_Step],
    attempt: Callable[[_Step, Mapping[str, Any]], bool],
    *,
    poisonous: bool,
) -> int:
    """Do the steps that come in by number, until there are no more.

    Args:
        steps: The parent's, in the same order.
        attempt: Does one, given also the parent's order; whether it was right.
        poisonous: Whether nothing works any more in a process after an exception, as after an
            error of the driver.

    Returns:
        The exit code.
    """
    from fivefold.lab._linux import die_with_parent  # noqa: PLC0415 - the parent may lack it

    die_with_parent(signal.SIGKILL)
    say(event="ready", pid=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        step = steps[order["step"]]
        began_s, good, problem = time.monotonic(), False, None
        try:
            good = attempt(step, order)
        except Exception as reason:  # noqa: BLE001 - whatever it is, the others are worth a look
            problem = f"{type(reason).__name__}: {str(reason)[:1500]}"
            where = traceback.format_exc().splitlines()[-12:]
            say(event="error", step=step.name, text=problem, where=where)
        took_s = time.monotonic() - began_s
        say(event="end", step=step.name, good=good, seconds=took_s, problem=problem)
        if problem is not None and poisonous:
            return 1
    return 0


def put_checkout_first() -> None:
    """Have this process and its children import the package of this checkout."""
    ours = [str(_ROOT / "src"), str(_ROOT)]
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *([given] if given else [])])
    sys.path[:0] = ours
