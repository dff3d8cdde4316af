"""Forked ranks that train on a small graph and can be killed."""

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
from helpers.forked_ranks import forked_worlds
from helpers.training_graphs import Disk, make_dataset

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
    for module in ("loading.prepare", "training._inference"):
        monkeypatch.setattr(f"fivefold.gnn.{module}.probe_disk", lambda *_, **__: disk)
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


@pytest.fixture
def start_ranks(tmp_path):
    """Start a world; whatever is left of it is killed after the test."""
    with forked_worlds(tmp_path) as start:

        def start_run(config, *, world_size=1, before=None):
            def work():
                train_graph(config)
                return 0

            return start(work, world_size=world_size, before=before)

        yield start_run
