"""Run a command in a memory group, and record while it runs what it takes.

A thread looks every tenth of a second: memory of the group with and without page cache, bytes that
the process has read and written, space on the disk under a folder (files that have no name any
more included), and the processor time of everything else on the machine. What was written to
standard error is kept with its moment, so that the record can be cut into the stages of the
command afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.gnn._harness._memory_limit import MemoryLimit

__all__ = ["Moment", "Taken", "Watched"]

_EVERY_S = 0.1
_BLOCK_BYTES = 512  # of st_blocks


@dataclass(frozen=True)
class Moment:
    """What was taken at a moment; bytes read and written count from the start of the process."""

    at_s: float
    memory_bytes: int  # without page cache
    group_bytes: int  # with it
    disk_bytes: int
    read_bytes: int
    written_bytes: int
    others_s: float  # of processors, that all but the process took since the machine was started


@dataclass(frozen=True)
class Taken:
    """What a stretch of time took: its peaks, and bytes read and written within it."""

    seconds: float
    memory_bytes: int
    group_bytes: int
    disk_bytes: int  # most at a time
    left_bytes: int  # on the disk at the end
    read_bytes: int
    written_bytes: int
    others: float  # processors that everything else took, the kernel's own threads included


class Watched:
    """A running command; a context manager that ends it.

    Args:
        command: Program and arguments.
        limit_bytes: Of its memory group.
        folder: Whose space on the disk is recorded; the command runs there.
    """

    def __init__(self, command: Sequence[str], *, limit_bytes: int, folder: Path) -> None:
        self.limit = MemoryLimit(limit_bytes, name="fivefold-gnn")
        self.folder = folder
        self.lines: list[tuple[float, str]] = []
        self.moments: list[Moment] = []
        self._told = threading.Condition()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the command
        self.started_s = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join(_paths())},
            preexec_fn=self.limit.enter,  # noqa: PLW1509 - no threads run yet; it only writes a file
        )
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._listen, self._look)
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None, "it has a pipe"
        for line in self._process.stderr:
            with self._told:
                self.lines.append((time.perf_counter(), line.rstrip()))
                self._told.notify_all()
        with self._told:
            self._told.notify_all()

    def _look(self) -> None:
        while self._process.poll() is None:
            with contextlib.suppress(OSError):  # it ended while it was looked at
                self.moments.append(self._moment())
            time.sleep(_EVERY_S)

    def _moment(self) -> Moment:
        io = Path(f"/proc/{self._process.pid}/io").read_text(encoding="ascii")
        counts = dict(line.split(": ") for line in io.splitlines())
        return Moment(
            at_s=time.perf_counter(),
            memory_bytes=self.limit.anonymous_bytes() or 0,
            group_bytes=self.limit.used_bytes() or 0,
            disk_bytes=disk_bytes(self.folder) + _nameless_bytes(self._process.pid),
            read_bytes=int(counts["read_bytes"]),
            written_bytes=int(counts["write_bytes"]),
            others_s=_busy_s() - _processor_s(self._process.pid),
        )

    def wait_for(self, pattern: str, *, timeout_s: float) -> float:
        """Return when the first line with this pattern came; raise if the command ends before."""
        deadline_s, seen = time.perf_counter() + timeout_s, 0
        with self._told:
            while True:
                for at_s, line in self.lines[seen:]:
                    if re.search(pattern, line):
                        return at_s
                seen = len(self.lines)
                left_s = deadline_s - time.perf_counter()
                if self._process.poll() is not None or left_s <= 0:
                    raise RuntimeError(f"no line {pattern!r} came:\n{self.tail()}")
                self._told.wait(min(left_s, 1.0))

    def tail(self) -> str:
        """Return the last lines of standard error, for a person."""
        return "\n".join(line for _, line in self.lines[-20:])

    def finish(self, *, timeout_s: float) -> str:
        """Wait for the end, raise unless the exit code is 0, and return standard output."""
        code = self._process.wait(timeout=timeout_s)
        for thread in self._threads:
            thread.join(timeout=30)
        if code:
            killed = " (killed for memory)" if self.limit.killed() else ""
            raise RuntimeError(f"ended with code {code}{killed}:\n{self.tail()}")
        self._output.seek(0)
        return self._output.read()

    def terminate(self) -> None:
        """Ask the command to end, as Ctrl-C does."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it, as kill -9 does, and wait until it is gone."""
        self._process.kill()
        self._process.wait(timeout=60)

    def taken(self, start_s: float | None = None, stop_s: float | None = None) -> Taken:
        """Return what was taken between two moments; None for the start and the end."""
        start_s = self.started_s if start_s is None else start_s
        stop_s = self.moments[-1].at_s if stop_s is None else stop_s
        inside = [one for one in self.moments if start_s <= one.at_s <= stop_s]
        if not inside:
            raise RuntimeError(f"nothing was seen in {stop_s - start_s:.2f} s")
        first, last = inside[0], inside[-1]
        return Taken(
            seconds=stop_s - start_s,
            memory_bytes=max(one.memory_bytes for one in inside),
            group_bytes=max(one.group_bytes for one in inside),
            disk_bytes=max(one.disk_bytes for one in inside),
            left_bytes=last.disk_bytes,
            read_bytes=last.read_bytes - first.read_bytes,
            written_bytes=last.written_bytes - first.written_bytes,
            others=max(0.0, last.others_s - first.others_s) / max(_EVERY_S, last.at_s - first.at_s),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=60)
        for thread in self._threads:
            thread.join(timeout=30)
        self._output.close()
        self.limit.close()


def disk_bytes(folder: Path) -> int:
    """Return the space that the files under a folder take."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it was removed
                total += (Path(parent) / name).lstat().st_blocks * _BLOCK_BYTES
    return total


def _nameless_bytes(process: int) -> int:
    """Return the space of files that a process has open and nobody can name."""
    total = 0
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            found = entry.stat()
            if found.st_nlink == 0 and entry.readlink().is_absolute():
                total += found.st_blocks * _BLOCK_BYTES
    return total


def _busy_s() -> float:
    """Return the processor time that the machine has spent since its start."""
    user, nice, system, _idle, _waiting, *interrupts = (
        Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:8]
    )
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def _processor_s(process: int) -> float:
    text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()  # from the third on
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _paths() -> list[str]:
    here = Path(__file__).parents[3]
    return [str(here / "src"), str(here), *filter(None, [os.environ.get("PYTHONPATH", "")])]
