from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from fivefold.errors import UnsupportedError
from fivefold.lab import clean_lab
from fivefold.lab._state import ProcessId, make_run_folder, runtime_folder, write_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GONE = {"pid": 2**22 + 1, "start_ticks": 1}  # beyond the largest process id


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def _state(lab: dict[str, int], supervisor: dict[str, int] | None) -> Path:
    folder = make_run_folder([("10.77.0.1", "host0")])
    fields = {
        "lab": lab,
        "supervisor": supervisor,
        "command": ["python", "train.py"],
        "started_at_unix_s": 0.0,
    }
    (folder / "state.json").write_text(json.dumps(fields))
    return folder


def _identity(pid: int) -> dict[str, int]:
    found = ProcessId.of(pid)
    return {"pid": found.pid, "start_ticks": found.start_ticks}


def test_nothing_to_clean() -> None:
    report = clean_lab()
    assert (report.removed, report.active, report.failed) == ((), (), ())


def test_a_run_under_way_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    folder = make_run_folder([])
    write_state(folder, ["python", "train.py"], supervisor_pid=sleeper.pid)
    report = clean_lab()
    assert report.removed == ()
    assert report.active == (f"{folder.name}: process {os.getpid()} runs python train.py",)
    assert folder.exists()
    assert sleeper.poll() is None


def test_a_supervisor_without_its_lab_is_ended(sleeper: subprocess.Popen[bytes]) -> None:
    folder = _state(_GONE, _identity(sleeper.pid))
    report = clean_lab()
    assert report.removed == (
        f"supervisor process {sleeper.pid}, with its ranks and namespaces",
        f"{folder.name}: folder of a run of python train.py",
    )
    assert sleeper.wait(5.0) == -9
    assert not folder.exists()


def test_a_later_process_with_the_same_id_is_not_touched(
    sleeper: subprocess.Popen[bytes],
) -> None:
    other = {**_identity(sleeper.pid), "start_ticks": 1}
    folder = _state(other, other)
    assert clean_lab().removed == (f"{folder.name}: folder of a run of python train.py",)
    assert sleeper.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lab": 3}'])
def test_damaged_state_is_removed_once_it_cannot_be_a_run_that_begins(text: str) -> None:
    folder = make_run_folder([])
    (folder / "state.json").write_text(text)
    assert clean_lab().active == (f"{folder.name}: just being set up",)
    long_ago = time.time() - 3600
    os.utime(folder, (long_ago, long_ago))
    assert clean_lab().removed == (f"{folder.name}: folder of a damaged state",)
    assert not folder.exists()


def test_a_runtime_folder_of_someone_else_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir()
    (runtime / "fivefold-lab").symlink_to(runtime / "elsewhere")
    with pytest.raises(UnsupportedError, match="is not a folder of this user"):
        runtime_folder()
