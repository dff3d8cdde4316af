import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from fivefold.errors import CheckpointError, ConfigurationError
from fivefold.runs import FolderLock

HOLD = """
import pathlib, sys
from fivefold.runs import FolderLock
with FolderLock(pathlib.Path(sys.argv[1]), "run.output"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of ``tmp_path / "run"``."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_by_the_name_of_the_first(holder, tmp_path):
    with (
        pytest.raises(ConfigurationError) as caught,
        FolderLock(tmp_path / "run", "gnn.output"),
    ):
        pytest.fail("two runs hold one folder")
    assert f"gnn.output {tmp_path / 'run'} is in use by process {holder.pid}" in str(caught.value)
    assert socket.gethostname() in caught.value.message
    assert sys.executable in caught.value.message
    assert "another gnn.output" in caught.value.hint


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_the_lock_ends_with_its_process(holder, tmp_path, number):
    holder.send_signal(number)  # not waited for: a resume may come sooner than the end
    with FolderLock(tmp_path / "run", "run.output"):
        assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == os.getpid()


def test_it_can_be_taken_again_when_it_was_released(tmp_path):
    for _ in range(2):
        with FolderLock(tmp_path, "run.output"):
            pass


def test_a_forked_child_does_not_hold_it(tmp_path):
    read, write = os.pipe()
    with FolderLock(tmp_path, "run.output"):
        child = os.fork()
        if child == 0:  # it lives on until the pipe is closed
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    os.close(read)
    try:
        with FolderLock(tmp_path, "run.output"):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_holder_without_a_name_is_still_refused(holder, tmp_path):
    (tmp_path / "run" / ".lock").write_bytes(b"\xff[")
    with (
        pytest.raises(ConfigurationError, match="in use by another process"),
        FolderLock(tmp_path / "run", "run.output"),
    ):
        pytest.fail("two runs hold one folder")
    assert holder.poll() is None


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"), FolderLock(tmp_path / "file", "x"):
        pytest.fail("a file is no folder")
