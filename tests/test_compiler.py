"""Compiled code that is kept on disk: processes take turns at it, and none waits for ever."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold import _compiler

KERNEL = """
from fivefold._compiler import njit

@njit
def twice(x):
    return x + x
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    (tmp_path / "kernel_of_test.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernel_of_test", raising=False)
    import kernel_of_test

    return kernel_of_test.twice


@pytest.fixture
def holder():
    """``holder(folder, seconds)``: another process that has its turn for so long."""
    started = []

    def start(folder, seconds):
        folder.mkdir(exist_ok=True)
        code = (
            "import fcntl, sys, time\n"
            "lock = open(sys.argv[1], 'ab')\n"
            "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
            "print('has it', flush=True)\n"
            f"time.sleep({seconds})\n"
            "open(sys.argv[1] + '.done', 'w').close()\n"
        )
        command = [sys.executable, "-c", code, str(folder / "numba.lock")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"has it\n"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_is_kept_is_written_in_turn(kernel, holder):
    folder = Path(kernel._cache.cache_path)
    holder(folder, 0.5)
    assert kernel(2) == 4
    assert (folder / "numba.lock.done").exists()
    assert kernel(2.5) == 5.0
    assert sum(kernel.stats.cache_misses.values()) == 2


@pytest.mark.parametrize(
    ("comment", "compiled"), [("", 0), ("# another\n", 1)], ids=["same", "new"]
)
def test_what_is_kept_is_good_as_long_as_the_content_is(kernel, comment, compiled):
    assert kernel(2) == 4
    file = Path(kernel.py_func.__code__.co_filename)
    file.write_text(KERNEL + comment)  # as an installation of the same version does
    os.utime(file, (2e9, 2e9))
    _compiler._stamp_of.cache_clear()
    again = _compiler.njit(kernel.py_func)
    assert again(2) == 4
    assert sum(again.stats.cache_misses.values()) == compiled


def test_who_is_stopped_in_its_turn_holds_up_no_one(kernel, holder, monkeypatch):
    monkeypatch.setattr(_compiler, "PATIENCE_S", 0.1)
    holder(Path(kernel._cache.cache_path), 60)
    began_s = time.monotonic()
    assert kernel(2) == 4
    assert time.monotonic() - began_s < 30


def test_a_turn_ends_also_where_a_child_was_forked_in_it(tmp_path):
    with _compiler._turn_in(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), 6)"  # exclusive, at once
        command = [sys.executable, "-c", code, str(tmp_path / "numba.lock")]
        assert subprocess.run(command, check=False).returncode == 0
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_where_nothing_can_be_kept_there_is_nothing_to_wait_for(tmp_path):
    with _compiler._turn_in(tmp_path / "none"):
        assert not (tmp_path / "none").exists()


def test_compiling_for_long_is_said_once_and_loading_is_not(kernel, monkeypatch, caplog):
    monkeypatch.setattr(_compiler, "SILENT_S", 0.0)
    monkeypatch.setattr(_compiler._Notice, "is_said", False)
    caplog.set_level("INFO", logger=_compiler.__name__)
    for value in (2, 2.5, 2j):
        assert kernel(value) == 2 * value
    assert [record.message for record in caplog.records if "compiling loops" in record.message]
    assert len(caplog.records) == 1
    monkeypatch.setattr(_compiler._Notice, "is_said", False)
    caplog.clear()
    again = _compiler.njit(kernel.py_func)  # finds what the first has kept
    for value in (2, 2.5, 2j):
        assert again(value) == 2 * value
    assert caplog.records == []
