"""Forked ranks that train on a small graph and can be killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from fivefold.gnn.training import GnnConfig, _loop, train_graph
from fivefold.gnn.training.config import (
    BudgetsConfig,
    DataConfig,
    LoaderConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ValidationConfig,
)
from fivefold.testing import free_port

sys.path.insert(0, str(Path(__file__).parent))
from training_graphs import Disk, make_dataset

PRELOADED = (_loop, torch._dynamo)  # loaded before the forks, not in each of them


@pytest.fixture(scope="session")
def graph_folder(tmp_path_factory):
    """A data set that all tests of the trainer share."""
    folder = tmp_path_factory.mktemp("graph")
    make_dataset(folder, nodes=600, edges=5000, dim=7).close()
    return folder


@pytest.fixture(autouse=True)
def known_disk(monkeypatch):
    """Plans do not depend on the machine, and no test spends seconds on a probe."""
    disk = Disk()
    disk.sequential_read_bytes_per_s = disk.sequential_write_bytes_per_s = 1e9
    for module in ("_prepare", "_inference"):
        monkeypatch.setattr(f"fivefold.gnn.training.{module}.probe_disk", lambda *_: disk)
    torch.set_num_threads(1)


@pytest.fixture
def make_config(graph_folder, tmp_path):
    """A configuration that trains in a second; samples and packed rows in a folder of its own."""

    def make(*, output="run", mode="disk", store="store", model=None, loader=None, **run):
        return GnnConfig(
            run=RunConfig(
                output=tmp_path / output,
                mode=mode,
                device="cpu",
                **{"epochs": 3, "log_every_steps": 2, "timeout_s": 30.0} | run,
            ),
            data=DataConfig(path=graph_folder, store=str(tmp_path / store)),
            sampling=SamplingConfig(fanouts=(4, 3), batch_size=40, threads=1),
            budgets=BudgetsConfig(host=80_000, disk=10**9),
            loader=LoaderConfig(**{"backend": "threads", "threads": 1} | (loader or {})),
            model=ModelConfig(**{"hidden_dim": 8, "heads": 2, "dropout": 0.3} | (model or {})),
            validation=ValidationConfig(batch_size=200),
        )

    return make


class ForkedRanks:
    """Ranks of one run as forked children."""

    def __init__(self, config, folder, *, world_size=1, before=None):
        folder.mkdir(parents=True)
        self.folder, self.codes, self.pids = folder, {}, {}
        self.port = free_port()
        for rank in range(world_size):
            self.pids[rank] = self._fork(config, rank, world_size, before)

    def _fork(self, config, rank, world_size, before):
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            log = os.open(self.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            if world_size > 1:
                place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
                os.environ.update({key: str(value) for key, value in place.items()})
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            if before is not None:
                before(rank)
            train_graph(config)
            code = 0
        except BaseException as error:  # noqa: BLE001 - told by the log
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            code = 1
        finally:
            sys.stderr.flush()
            os._exit(code)  # a child must never return into pytest

    def kill(self, number=signal.SIGKILL, *, ranks=None):
        for rank in self.pids if ranks is None else ranks:
            os.kill(self.pids[rank], number)

    def wait(self, timeout_s=60.0):
        """Exit codes by rank; the world is killed and the test fails where one hangs."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.codes) < len(self.pids) and time.monotonic() < deadline_s:
            for rank in set(self.pids) - set(self.codes):
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        if len(self.codes) < len(self.pids):
            self.end()
            pytest.fail(f"ranks hung for {timeout_s} s: {self.logs()}")
        return self.codes

    def end(self):
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.codes[rank] = -signal.SIGKILL

    def logs(self):
        return {path.name: path.read_text() for path in sorted(self.folder.glob("*.log"))}


@pytest.fixture
def start_ranks(tmp_path):
    """Start a world; whatever is left of it is killed after the test."""
    worlds = []

    def start(config, **options):
        worlds.append(ForkedRanks(config, tmp_path / f"world{len(worlds)}", **options))
        return worlds[-1]

    yield start
    for world in worlds:
        world.end()
