"""An ablation by several processes, or by a Dask cluster: the figures that one process finds."""

import json
import subprocess
import sys
import time

import pytest

pytest.importorskip("distributed")
pytestmark = [pytest.mark.distributed, pytest.mark.in_pairs]

SMALL = "ablate --cluster switch:4 --seeds 2 --number 2 --sizes 2 --iterations 2 --budget 2 --json"


def fivefold(*options):
    command = [sys.executable, "-m", "fivefold", *SMALL.split(), *options]
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

    def start_all(*, workers):
        start("scheduler", "--port", "0")
        end = time.monotonic() + 60
        while not file.exists():
            assert started[0].poll() is None, (tmp_path / "scheduler-0.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        for _ in range(workers):
            start("worker", "--no-nanny", "--nthreads", "1")
        return json.loads(file.read_text())["address"]

    yield start_all
    for process in started:
        process.kill()
        process.wait()


def test_processes_find_what_one_finds(by_one_process):
    assert json.loads(fivefold("--parallel", "2").stdout) == by_one_process


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
