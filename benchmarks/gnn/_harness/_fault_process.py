"""Runs a stage in a forked process that may be killed, and tells how it ended."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import FivefoldError

__all__ = ["Ended", "in_child", "outcome_of_error"]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    Attributes:
        killed: By us, as planned.
        hung: It was still there at its deadline.
        seconds: Until then.
        answer: What it returned; None where it was killed or died.
        error: Class, message, hint, and whether it is one of ours.
    """

    killed: bool = False
    hung: bool = False
    seconds: float = 0.0
    answer: Any = None
    error: dict[str, Any] | None = None

    @property
    def actionable(self) -> bool:
        """An error of ours that says what to do."""
        return self.error is not None and self.error["ours"] and bool(self.error["hint"])


def outcome_of_error(error: BaseException) -> dict[str, Any]:
    """What of an exception goes to the parent."""
    ours = isinstance(error, FivefoldError)
    return {
        "class": type(error).__name__,
        "ours": ours,
        "message": error.message if isinstance(error, FivefoldError) else str(error),
        "hint": error.hint if isinstance(error, FivefoldError) else None,
    }


class Countdown:
    """Kills the process at a certain report of progress; counts them otherwise."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at, self.calls = kill_at, 0

    def __call__(self, *_progress: Any) -> None:
        self.calls += 1
        if self.calls == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(
    function: Callable[[Countdown], Any],
    *,
    timeout_s: float,
    kill_after_s: float | None = None,
    kill_at: int | None = None,
) -> Ended:
    """Run a function in a fork of this process.

    Args:
        function: Gets the countdown as its report of progress; its result must be JSON.
        timeout_s: After which it counts as hung and is ended.
        kill_after_s: When to kill it by the clock; None for never.
        kill_at: At which report of progress it kills itself; None for never.
    """
    with tempfile.TemporaryDirectory(prefix="fivefold-fault-") as name:
        answer = Path(name) / "answer.json"
        started_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(function, answer, Countdown(kill_at))
        code, hung, killed = _wait(pid, started_s, timeout_s, kill_after_s)
        seconds = time.monotonic() - started_s
        if hung:
            return Ended(hung=True, seconds=seconds)
        if code == -signal.SIGKILL and (killed or kill_at is not None):
            return Ended(killed=True, seconds=seconds)
        if not answer.exists():
            error = {"class": f"exit {code}", "ours": False, "message": "died", "hint": None}
            return Ended(seconds=seconds, error=error)
        found = json.loads(answer.read_text(encoding="utf-8"))
        return Ended(seconds=seconds, answer=found.get("answer"), error=found.get("error"))


def _child(function: Callable[[Countdown], Any], answer: Path, tell: Countdown) -> None:
    """Never returns: a fork must not run its parent's clean-up."""
    try:
        found: dict[str, Any] = {"answer": {"result": function(tell), "reports": tell.calls}}
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        if not isinstance(error, FivefoldError):
            traceback.print_exc()
        found = {"error": outcome_of_error(error)}
    answer.with_suffix(".new").write_text(json.dumps(found), encoding="utf-8")
    answer.with_suffix(".new").rename(answer)
    os._exit(0)


def _wait(
    pid: int, started_s: float, timeout_s: float, kill_after_s: float | None
) -> tuple[int, bool, bool]:
    """Exit code, whether it hung, whether we killed it by the clock."""
    killed = False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False, killed
        passed_s = time.monotonic() - started_s
        if kill_after_s is not None and passed_s >= kill_after_s and not killed:
            os.kill(pid, signal.SIGKILL)
            killed = True
        if passed_s > timeout_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL, True, False
        time.sleep(0.002)
