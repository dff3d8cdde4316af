"""Worlds of forked ranks that can be killed, and a small folder of real text."""

import hashlib
import importlib
import json
import os
import shutil
import signal
import sysconfig
import time
from pathlib import Path

import pytest
import torch

from fivefold.runs.checkpoints import checkpoint_folders, read_checkpoint
from fivefold.runs.launch import OUTCOME_VARIABLE
from fivefold.testing import free_port
from fivefold.train import TrainConfig, _ddp, _outer, config_to_toml
from fivefold.train import _worker as worker
from fivefold.train.config import DataConfig, ModelConfig, OptimConfig, RunConfig, SyncConfig

# The first optimizer of a process loads torch._dynamo, half a second in each forked rank.
PRELOADED = (_ddp, _outer, importlib.import_module("torch._dynamo"))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Two dozen small files of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in [path for path in files if 500 < path.stat().st_size < 9000][:24]:
        shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture
def make_config(text_folder, tmp_path):
    """A configuration that trains in a second."""

    def make(method, *, output="run", sync=None, **run):
        takes_tau = method not in {"none", "ddp"}
        run = {"steps": 18, "validate_every_steps": 7, "log_every_steps": 3} | run
        return TrainConfig(
            run=RunConfig(output=tmp_path / output, device="cpu", **{"timeout_s": 30.0} | run),
            data=DataConfig(
                path=str(text_folder),
                cache=str(text_folder.parent / "cache"),
                sequence_length=16,
                validation_fraction=0.25,
            ),
            model=ModelConfig(layers=1, width=16, heads=2),
            optim=OptimConfig(batch_size=2, warmup_steps=2, validation_batches=4, precision="fp32"),
            sync=SyncConfig(method=method, **({"tau": 4} if takes_tau else {}) | (sync or {})),
        )

    return make


class ForkedRanks:
    """Ranks of one run as forked children that run the worker's own main function."""

    def __init__(self, config, folder, *, world_size=2, before=None):
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.file = folder / "config.toml"
        self.file.write_text(config_to_toml(config))
        self.port = free_port()
        self.codes = {}
        self.pids = {}
        for rank in range(world_size):
            self.pids[rank] = self._fork(rank, world_size, before)

    def _fork(self, rank, world_size, before):
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            log = os.open(self.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            import logging
            import sys

            sys.stderr = os.fdopen(2, "w", closefd=False)
            logging.getLogger().handlers.clear()
            place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            os.environ.update({key: str(value) for key, value in place.items()})
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            os.environ[OUTCOME_VARIABLE] = str(self.folder)
            if before is not None:
                before(rank)
            code = worker.main([str(self.file)])
            logging.shutdown()
            sys.stderr.flush()
        finally:
            os._exit(code)  # a child must never return into pytest

    def kill(self, rank, number=signal.SIGKILL):
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
            time.sleep(0.01)
        if waiting:
            self.end()
            pytest.fail(f"ranks {sorted(waiting)} hung for {timeout_s} s: {self.logs()}")
        return self.codes

    def end(self):
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.codes[rank] = -signal.SIGKILL

    def error(self, rank):
        """The record of the error that a rank ended with; None where it ended well."""
        return json.loads((self.folder / f"rank{rank}.json").read_text())["error"]

    def logs(self):
        return {path.name: path.read_text() for path in sorted(self.folder.glob("*.log"))}


@pytest.fixture
def start_ranks(tmp_path):
    """Start a world; whatever is left of it is killed after the test."""
    worlds = []

    def start(config, *, world_size=2, before=None):
        folder = tmp_path / f"world{len(worlds)}"
        worlds.append(ForkedRanks(config, folder, world_size=world_size, before=before))
        return worlds[-1]

    yield start
    for world in worlds:
        world.end()


@pytest.fixture
def run_ranks(start_ranks):
    """Run a world to its end, which must be a good one."""

    def run(config, *, world_size=2):
        world = start_ranks(config, world_size=world_size)
        codes = world.wait()
        assert set(codes.values()) == {0}, world.logs()
        return world

    return run


def tensor_digest(value, digest=None):
    """Digest of all tensors in a nested state, bit for bit."""
    digest = digest or hashlib.sha256()
    if isinstance(value, torch.Tensor):
        digest.update(str(value.dtype).encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            tensor_digest(value[key], digest)
    elif isinstance(value, list | tuple):
        for item in value:
            tensor_digest(item, digest)
    return digest.hexdigest()


@pytest.fixture
def final_digest():
    """Digest of parameters, inner and outer state of all ranks in the newest checkpoint."""

    def digest(config, *, world_size=2):
        path = checkpoint_folders(config.run.output)[0]
        assert path.name == f"step-{config.run.steps:08d}"
        states = [read_checkpoint(path, rank=rank) for rank in range(world_size)]
        return tensor_digest([(s["model"], s["optimizer"], s["method"], s["rng"]) for s in states])

    return digest
