"""Finds what earlier runs left behind, and removes it.

A run's processes and namespaces end with its supervisor, and that with the lab's process; so there
is normally nothing but a small folder of a run that was killed. This module trusts nothing of that:
it looks, ends what still runs without an owner, and says what it did.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.lab._state import RunState, remove_run_folder, runtime_folder

if TYPE_CHECKING:
    from pathlib import Path

    from fivefold.lab._state import ProcessId

_END_WAIT_S = 10.0
_YOUNG_S = 60.0


@dataclass(frozen=True)
class CleanReport:
    """What was found.

    Args:
        removed: One line for each thing that was removed.
        active: One line for each run that is under way and was left alone.
        failed: One line for each thing that could not be removed.

    Examples:
        >>> CleanReport((), (), ()).removed
        ()
    """

    removed: tuple[str, ...]
    active: tuple[str, ...]
    failed: tuple[str, ...]


def clean_lab() -> CleanReport:
    """Remove what runs of this user left behind; runs under way are left alone.

    Returns:
        What was removed, what is active and what could not be removed.

    Raises:
        UnsupportedError: The runtime folder belongs to someone else.

    Examples:
        >>> isinstance(clean_lab().removed, tuple)
        True
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
            remove_run_folder(folder)
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
