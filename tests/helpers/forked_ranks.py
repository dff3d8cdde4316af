"""Ranks of one run as forked children of the test, which can be killed at any moment."""

import contextlib
import json
import logging
import os
import signal
import sys
import time

import pytest

from fivefold.runs.launch import OUTCOME_VARIABLE
from fivefold.testing import free_port


class ForkedRanks:
    """Each child does the work of one rank and leaves what it said in ``rankN.log``.

    Args:
        folder: New folder for the logs.
        work: Done in each child; its result is the exit code.
        world_size: Number of ranks; a single one gets no place in the environment.
        before: Called with the rank in each child first.
    """

    def __init__(self, folder, work, *, world_size, before=None):
        folder.mkdir(parents=True)
        self.folder, self.codes, self.pids = folder, {}, {}
        self.port = free_port()
        for rank in range(world_size):
            self.pids[rank] = self._fork(work, rank, world_size, before)

    def _fork(self, work, rank, world_size, before):
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            log = os.open(self.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            logging.getLogger().handlers.clear()
            environ = {OUTCOME_VARIABLE: self.folder}
            if world_size > 1:
                environ |= {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
                environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
                environ["GLOO_SOCKET_IFNAME"] = "lo"
            os.environ.update({key: str(value) for key, value in environ.items()})
            if before is not None:
                before(rank)
            code = work()
        except BaseException as error:  # noqa: BLE001 - told by the log
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            code = 1
        finally:
            logging.shutdown()
            sys.stderr.flush()
            os._exit(code)  # a child must never return into pytest

    def kill(self, *ranks, number=signal.SIGKILL):
        """Send a signal to some ranks; to all where none is named."""
        for rank in ranks or self.pids:
            os.kill(self.pids[rank], number)

    def wait(self, timeout_s=60.0, *, ranks=None):
        """Exit codes by rank; the world is killed and the test fails where one hangs."""
        waiting = set(self.pids if ranks is None else ranks) - set(self.codes)
        deadline_s = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline_s:
            for rank in list(waiting):
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    waiting.discard(rank)
            time.sleep(0.005)
        if waiting:
            self.end()
            pytest.fail(f"ranks {sorted(waiting)} hung for {timeout_s} s: {self.logs()}")
        return self.codes

    def end(self):
        """Kill whatever is left."""
        for rank in set(self.pids) - set(self.codes):
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
            self.codes[rank] = -signal.SIGKILL

    def error(self, rank):
        """The record of the error that a rank ended with; None where it ended well."""
        return json.loads((self.folder / f"rank{rank}.json").read_text())["error"]

    def logs(self):
        return {path.name: path.read_text() for path in sorted(self.folder.glob("*.log"))}


@contextlib.contextmanager
def forked_worlds(folder):
    """Yield a function that starts worlds of ranks; what is left of them is killed at the end."""
    worlds = []

    def start(work, **options):
        worlds.append(ForkedRanks(folder / f"world{len(worlds)}", work, **options))
        return worlds[-1]

    try:
        yield start
    finally:
        for world in worlds:
            world.end()


def wait_for_step(world, output, step, *, timeout_s=120):
    """Wait until a run's metrics have a line of a step, or fail the test."""
    path = output / "metrics.jsonl"
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(json.loads(line)["step"] >= step for line in lines if line.endswith("}")):
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} was not reached: {world.logs()}")
