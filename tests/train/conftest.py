"""Worlds of forked ranks that can be killed, and a small folder of real text."""

import hashlib
import importlib
import shutil
import sysconfig
import uuid
from pathlib import Path

import pytest
import torch

from fivefold.runs.checkpoints import checkpoint_folders, read_checkpoint
from fivefold.runs.ranks import close_ranks, open_ranks
from fivefold.train import TrainConfig, _ddp, _outer, config_to_toml
from fivefold.train import _worker as worker
from fivefold.train.config import DataConfig, ModelConfig, OptimConfig, RunConfig, SyncConfig
from fivefold.train.profile import measure_steps
from helpers.forked_ranks import ForkedRanks, forked_worlds

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

    def make(method, *, output="run", optimizer="adamw", sync=None, **run):
        takes_tau = method not in {"none", "ddp", "delayed_gradients"}
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
            optim=OptimConfig(
                optimizer=optimizer,
                batch_size=2,
                warmup_steps=2,
                validation_batches=4,
                precision="fp32",
            ),
            sync=SyncConfig(method=method, **({"tau": 4} if takes_tau else {}) | (sync or {})),
        )

    return make


@pytest.fixture
def start_ranks(tmp_path):
    """Start a world that runs the worker's own main function; it is killed after the test."""
    with forked_worlds(tmp_path) as start:

        def start_run(config, *, world_size=2, before=None):
            file = tmp_path / f"{uuid.uuid4().hex}.toml"
            file.write_text(config_to_toml(config))
            return start(lambda: worker.main([str(file)]), world_size=world_size, before=before)

        yield start_run


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


@pytest.fixture
def profiled():
    """What a profile of two ranks finds of a run's step, by the name of the figure."""

    def measure(config, folder, name):
        file = folder / "found"

        def work():
            ranks = open_ranks(device="cpu", timeout_s=30.0)
            times = measure_steps(config, ranks)
            if ranks.is_main:
                file.write_text(repr(getattr(times, name)))
            close_ranks(ranks)
            return 0

        world = ForkedRanks(folder, work, world_size=2)
        assert set(world.wait().values()) == {0}, world.logs()
        return float(file.read_text())

    return measure
