"""What a run leaves in the user's runtime folder, and the removal of leftovers.

One folder per run with ``state.json``: the lab's process and its supervisor, each by process id
and start time, because ids are used again. There is normally nothing but the folder of a run that
was killed; ``clean_lab`` looks, ends what still runs without an owner, and says what it did.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fivefold.errors import UnsupportedError
from fivefold.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence


_START_TIME_FIELD = 19  # of /proc/PID/stat, counted after the command's closing bracket
_END_WAIT_S = 10.0
_YOUNG_S = 60.0


class ProcessId(NamedTuple):
    """A process, told apart from a later one with the same id."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        ticks = _start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(pid)
        return cls(pid, ticks)

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


class RunState(NamedTuple):
    """The contents of ``state.json``."""

    lab: ProcessId
    supervisor: ProcessId | None
    command: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> RunState | None:
        """Read a run's state; None where it is missing or damaged."""
        try:
            fields = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            lab, supervisor = fields["lab"], fields["supervisor"]
            return cls(
                ProcessId(**lab),
                None if supervisor is None else ProcessId(**supervisor),
                tuple(fields["command"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def runtime_folder() -> Path:
    """Return the user's folder for runs under way, made if need be."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and os.access(session, os.W_OK | os.X_OK):
        folder = Path(session) / "fivefold-lab"
    else:
        folder = Path(tempfile.gettempdir()) / f"fivefold-lab-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UnsupportedError(
            f"{folder} is not a folder of this user", hint="remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def make_run_folder(hosts: Sequence[tuple[str, str]]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=runtime_folder()))
    (folder / "sys").mkdir()
    lines = ["127.0.0.1\tlocalhost"]
    for address, name in hosts:
        # Sockets that serve both families look up the mapped form when they name their peer.
        lines += [f"{address}\t{name}", f"::ffff:{address}\t{name}"]
    (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_state(folder: Path, command: Sequence[str], *, supervisor_pid: int | None) -> None:
    """Write ``state.json``, whole or not at all."""
    supervisor = None
    if supervisor_pid is not None and (ticks := _start_ticks(supervisor_pid)) is not None:
        supervisor = ProcessId(supervisor_pid, ticks)._asdict()
    lab = ProcessId.of(os.getpid())._asdict()
    state = {"lab": lab, "supervisor": supervisor, "command": list(command)}
    write_atomically(folder / "state.json", json.dumps(state))


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[_START_TIME_FIELD])


@dataclass(frozen=True)
class CleanReport:
    """Leftovers of runs: removed, still active, or failed to be removed."""

    removed: tuple[str, ...]
    active: tuple[str, ...]
    failed: tuple[str, ...]


def clean_lab() -> CleanReport:
    """Remove what runs of this user left behind; runs under way are left alone.

    Returns:
        What was removed, what is active and what could not be removed.

    Raises:
        UnsupportedError: The runtime folder belongs to someone else.
    """
    removed: list[str] = []
    active: list[str] = []
    failed: list[str] = []
    for folder in sorted(runtime_folder().glob("run-*")):
        state = RunState.read(folder)
        if state is None and _is_young(folder):
            active.append(f"{folder.name}: just being set up")
        elif state is not None and state.lab.alive:
            active.append(f"{folder.name}: process {state.lab.pid} runs {_short(state.command)}")
        elif state is not None and not _end_supervisor(state.supervisor, removed):
            failed.append(f"{folder.name}: supervisor {state.supervisor} does not end")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            what = "damaged state" if state is None else f"run of {_short(state.command)}"
            removed.append(f"{folder.name}: folder of a {what}")
    return CleanReport(tuple(removed), tuple(active), tuple(failed))


def _end_supervisor(supervisor: ProcessId | None, removed: list[str]) -> bool:
    if supervisor is None or not supervisor.alive:
        return True
    with suppress(ProcessLookupError, PermissionError):
        os.kill(supervisor.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _END_WAIT_S
    while supervisor.alive:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    removed.append(f"supervisor process {supervisor.pid}, with its ranks and namespaces")
    return True


def _is_young(folder: Path) -> bool:
    # A run writes its state right after making its folder.
    try:
        return time.time() - folder.stat().st_mtime < _YOUNG_S
    except FileNotFoundError:
        return True


def _short(command: tuple[str, ...]) -> str:
    text = shlex.join(command)
    return text if len(text) <= 60 else text[:57] + "..."
