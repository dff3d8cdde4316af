"""An ablation by several processes, or by a Dask cluster: the figures that one process finds."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import joblib
import pytest

from fivefold.cli import _codesign
from fivefold.cli._codesign import _watched
from fivefold.errors import CommunicationError

distributed = pytest.importorskip("distributed")
pytestmark = [pytest.mark.distributed, pytest.mark.alone]

# The command line, except that it waits for a lost cluster no longer than it takes to notice.
IMPATIENT = """
from fivefold.cli import _codesign, main
_codesign._DASK_PATIENCE_S = 4
main()
"""
SMALL = "ablate --cluster switch:4 --seeds 2 --number 2 --sizes 2 --iterations 2 --budget 2 --json"


def fivefold(*options):
    command = [sys.executable, "-c", IMPATIENT, *SMALL.split(), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def by_one_process():
    rows = json.loads(fivefold().stdout)
    assert [row["seeds"] for row in rows] == [2] * 18
    return rows


@pytest.fixture
def start_dask(tmp_path):
    """Return what starts a scheduler with workers, and returns its address."""
    started, file = [], tmp_path / "scheduler.json"

    def start(program, *options):
        command = [sys.executable, "-m", f"distributed.cli.dask_{program}", "--no-dashboard"]
        command += ["--host", "127.0.0.1", "--scheduler-file", str(file), *options]
        with (tmp_path / f"{program}-{len(started)}.log").open("w") as log:
            started.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log))
            start_all.processes = started

    def start_all(*, workers):
        start("scheduler", "--port", "0")
        end = time.monotonic() + 60
        while not file.exists():
            assert started[0].poll() is None, (tmp_path / "scheduler-0.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        for _ in range(workers):
            start("worker", "--no-nanny", "--nthreads", "1")
        address = json.loads(file.read_text())["address"]
        if workers:
            with distributed.Client(address) as client:
                client.wait_for_workers(workers, timeout=60)
        return address

    yield start_all
    for process in started:
        process.kill()
        process.wait()


def test_processes_find_what_one_finds(by_one_process):
    assert json.loads(fivefold("--parallel", "2").stdout) == by_one_process


def test_processes_leave_ctrl_c_to_the_command():
    """Its own answer ends them; theirs would be a traceback from wherever each was."""
    ask = joblib.delayed(signal.getsignal)
    with _codesign._engine(2, None):
        answers = joblib.Parallel()(ask(signal.SIGINT) for _ in range(4))
    assert set(answers) == {signal.SIG_IGN}


def test_workers_of_dask_find_what_one_process_finds(start_dask, by_one_process):
    found = fivefold("--dask", start_dask(workers=2))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == by_one_process


def test_a_scheduler_without_workers_is_named(start_dask):
    address = start_dask(workers=0)
    found = fivefold("--dask", address)
    assert found.returncode == 1
    assert found.stderr.splitlines() == [
        f"error: the Dask scheduler at {address} has no worker",
        f"hint: start some: dask worker {address}",
    ]


def test_an_address_without_a_scheduler_is_named():
    found = fivefold("--dask", "tcp://127.0.0.1:1")
    assert found.returncode == 1
    assert "no Dask scheduler answers at 'tcp://127.0.0.1:1'" in found.stderr
    assert found.stderr.splitlines()[-1].startswith("hint: start one")


def test_two_ways_at_once_are_refused():
    found = fivefold("--dask", "tcp://127.0.0.1:1", "--parallel", "2")
    assert found.returncode == 2
    assert "leave one of them out" in found.stderr


LONG = "ablate --cluster switch:4 --seeds 1000 --number 2 --sizes 2 --iterations 2 --budget 2"


def told_after(tmp_path, kill, *options):
    """Return what a long ablation says when something is killed while it plans."""
    error = tmp_path / "error"
    command = [sys.executable, "-c", IMPATIENT, *LONG.split(), *options]
    with error.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
    try:
        end = time.monotonic() + 240
        while "ablation: " not in error.read_text():
            assert process.poll() is None, error.read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        kill(process)
        assert process.wait(120) == 1
    finally:
        process.kill()
        process.wait()
    text = error.read_text()
    assert "Traceback" not in text
    return text[text.index("error: ") :].splitlines()


def test_a_killed_process_is_told(tmp_path):
    def kill(process):
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(file.read_text().rpartition(")")[2].split()[1])
                words = (file.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == process.pid and b"popen_loky" in words:
                os.kill(int(file.parent.name), signal.SIGKILL)
                return
        pytest.fail("no process makes plans")

    said = told_after(tmp_path, kill, "--parallel", "2")
    assert said[0] == "error: one of 2 processes that made plans was killed"
    assert said[1].startswith("hint: memory may have run out")


@pytest.mark.parametrize(
    ("lost", "message"), [(slice(1, 2), "has lost all its workers"), (slice(1), "is gone")]
)
def test_a_dask_cluster_that_dies_is_told(start_dask, tmp_path, lost, message):
    address = start_dask(workers=1)

    def kill(_process):
        for each in start_dask.processes[lost]:
            each.kill()

    said = told_after(tmp_path, kill, "--dask", address)
    assert said[0] == f"error: the Dask scheduler at {address} {message}"
    assert len(said) == 2


@pytest.mark.parametrize(
    ("lost", "message"), [(slice(1, 2), "has lost all its workers"), (slice(1), "is gone")]
)
def test_a_wait_that_dask_forgets_is_ended(start_dask, monkeypatch, lost, message):
    """A result on its way from a scheduler that ends is never told to who waits for it."""
    monkeypatch.setattr(_codesign, "_DASK_PATIENCE_S", 4)
    address = start_dask(workers=1)
    usual = signal.getsignal(signal.SIGUSR1)
    with distributed.Client(address) as client:

        def wait():
            with _watched(client, address):
                for each in start_dask.processes[lost]:
                    each.kill()
                threading.Event().wait(100)

        with pytest.raises(CommunicationError, match=f"scheduler at {address} {message}"):
            wait()
    assert signal.getsignal(signal.SIGUSR1) is usual


def test_a_signal_that_comes_when_all_is_done_is_ignored(monkeypatch):
    """Left to itself it ends the process."""
    heard = []
    usual = signal.signal(signal.SIGUSR1, lambda *_: heard.append("late"))
    join = threading.Thread.join

    def late(thread, timeout=None):
        os.kill(os.getpid(), signal.SIGUSR1)
        join(thread, timeout)

    workers = {"one": 1}
    client = SimpleNamespace(
        status="running", nthreads=lambda: workers, scheduler_info=lambda: {"workers": workers}
    )
    monkeypatch.setattr(threading.Thread, "join", late)
    try:
        with _watched(client, "tcp://somewhere"):
            pass
        assert heard == []
        os.kill(os.getpid(), signal.SIGUSR1)  # from here on it is the program's own again
        assert heard == ["late"]
    finally:
        signal.signal(signal.SIGUSR1, usual)
