import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold.errors import CommunicationError, ConfigurationError, DataError
from fivefold.runs import exit_code
from fivefold.runs.launch import error_from_record, outcome_record, root_cause
from fivefold.train import config_to_toml, launch
from helpers.listening import addresses_while_it_runs, is_loopback


@pytest.fixture
def write_config(make_config, tmp_path):
    def write(method, **run):
        config = make_config(method, **run)
        path = tmp_path / "config.toml"
        path.write_text(config_to_toml(config))
        return config, path

    return write


COMMAND = "from fivefold.cli import main; main()"


@pytest.fixture
def fivefold():
    """Start the command in a process group of its own; it is ended after the test."""
    started = []

    def start(*arguments):
        started.append(popen(*arguments))
        return started[-1]

    yield start
    for process in started:
        # SIGTERM reaches the workers through the launcher; they are in sessions of their own.
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def popen(*arguments):
    clean = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "train", *map(str, arguments)],
        env=clean | {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout_s=90):
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def error_lines(text):
    return [line for line in text.splitlines() if re.match(r"(error|hint): ", line)]


def wait_for_metrics(config, process, step):
    path = config.run.output / "metrics.jsonl"
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        if path.exists() and any(
            json.loads(line)["step"] >= step
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ):
            return
        time.sleep(0.05)
    pytest.fail(f"step {step} was not reached: {finish(process)}")


def worker_pids(config_path):
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"fivefold.train._worker" in command and str(config_path).encode() in command:
                variables = (folder / "environ").read_bytes().split(b"\0")
                (rank,) = [value[5:] for value in variables if value.startswith(b"RANK=")]
                found[int(rank)] = int(folder.name)
        except (OSError, ValueError):  # it has ended, or is no process of ours
            continue
    return found


@pytest.mark.alone
@pytest.mark.distributed
def test_two_ranks_from_one_command(fivefold, write_config):
    config, path = write_config("co2", line_every_s=0.01)
    process = fivefold(path, "--nproc", "2", "--set", "run.steps=20")
    found = addresses_while_it_runs(process)
    code, _, err = finish(process)
    assert code == 0, err
    assert found, err
    assert all(map(is_loopback, found)), found  # other machines reach none of it
    result = json.loads((config.run.output / "result.json").read_text())
    assert (result["steps"], result["method"]) == (20, "co2")
    assert result["link_bytes"]["interface"] == "lo"
    assert result["link_bytes"]["sent"] > result["communication"]["payload_bytes"]
    # No terminal: plain lines with step, loss and rate, from rank 0 only.
    progress = [line for line in err.splitlines() if "step " in line]
    assert progress
    assert all(re.search(r"CO2 \(tau 4\): step \d+/20", line) for line in progress), err
    assert not error_lines(err)


@pytest.mark.alone
@pytest.mark.distributed
def test_sigterm_to_the_launcher_writes_a_checkpoint(fivefold, write_config):
    config, path = write_config("co2", steps=1_000_000, validate_every_steps=0)
    process = fivefold(path, "--nproc", "2")
    wait_for_metrics(config, process, 20)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0, err
    last = json.loads((config.run.output / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("end", "stopped")
    assert (config.run.output / "checkpoints" / f"step-{last['step']:08d}").is_dir()
    assert not error_lines(err)


@pytest.mark.alone
@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="finds the workers in /proc")
def test_a_killed_worker_is_two_lines_and_a_restart_goes_on(fivefold, write_config):
    config, path = write_config(
        "co2", steps=1_000_000, checkpoint_every_steps=25, timeout_s=10.0, validate_every_steps=0
    )
    process = fivefold(path, "--nproc", "2", "--max-restarts", "1")
    wait_for_metrics(config, process, 60)
    os.kill(worker_pids(path)[1], signal.SIGKILL)
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if '"resume"' in (config.run.output / "metrics.jsonl").read_text():
            break
        time.sleep(0.1)
    resumed = json.loads(
        next(
            line
            for line in (config.run.output / "metrics.jsonl").read_text().splitlines()
            if '"resume"' in line
        )
    )
    assert resumed["step"] >= 50
    wait_for_metrics(config, process, resumed["step"] + 20)
    os.kill(worker_pids(path)[0], signal.SIGKILL)  # no restart is left
    code, _, err = finish(process)
    assert code == 1
    error, hint = error_lines(err)
    assert error == "error: rank 0 was killed by SIGKILL; the other ranks were stopped"
    assert "run the same command again" in hint
    assert "Traceback" not in err


@pytest.mark.alone
@pytest.mark.distributed
def test_an_error_of_the_workers_is_two_lines_once(fivefold, write_config, tmp_path):
    _, path = write_config("ddp")
    folder = tmp_path / "empty"
    folder.mkdir()
    code, _, err = finish(fivefold(path, "--nproc", "2", "--set", f"data.path={folder}"))
    assert code == 1
    error, hint = error_lines(err)
    assert "empty" in error
    assert hint
    assert "Traceback" not in err


@pytest.mark.nightly
def test_one_rank_without_peers_is_refused_before_anything_starts(fivefold, write_config):
    config, path = write_config("co2")
    code, _, err = finish(fivefold(path))
    assert code == 1
    error, hint = error_lines(err)
    assert "world_size=1" in error
    assert "--nproc 2" in hint
    assert not config.run.output.exists()


@pytest.mark.parametrize(("nproc", "restarts"), [(0, 0), (2, -1)])
def test_counts_that_make_no_sense(write_config, nproc, restarts):
    _, path = write_config("co2")
    with pytest.raises(ConfigurationError, match="nproc must be at least 1"):
        launch(path, nproc=nproc, max_restarts=restarts)


def test_launch_refuses_one_rank_of_a_method_that_needs_two(write_config):
    _, path = write_config("co2")
    with pytest.raises(ConfigurationError, match="world_size=1"):
        launch(path, nproc=1)


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("wrong", hint="right"),
        DataError("empty"),
        CommunicationError("lost", hint="look"),
    ],
)
def test_errors_cross_processes_whole(error):
    back = error_from_record(json.loads(json.dumps(outcome_record(error)["error"])))
    assert type(back) is type(error)
    assert (back.message, back.hint) == (error.message, error.hint)


def test_a_foreign_error_stays_internal():
    back = error_from_record(outcome_record(KeyError("x"))["error"])
    assert type(back) is RuntimeError
    assert str(back) == "KeyError: 'x'"


def test_the_root_cause_is_not_the_rank_that_lost_its_peer():
    lost = {"time_s": 1.0, "error": {"kind": "CommunicationError", "message": "a", "hint": None}}
    cause = {"time_s": 2.0, "error": {"kind": "DataError", "message": "b", "hint": None}}
    later = {"time_s": 3.0, "error": {"kind": "DataError", "message": "c", "hint": None}}
    assert root_cause([later, lost, cause]) is cause


def test_exit_codes():
    assert exit_code(None) == 0
    assert exit_code(DataError("x")) == 1
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(KeyError("x")) == 1
