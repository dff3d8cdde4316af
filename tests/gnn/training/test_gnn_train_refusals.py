"""What cannot end well is refused before hours of work, in the words of the configuration."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fivefold.codesign import explain_run
from fivefold.errors import CheckpointError, DataError, InfeasibleError
from fivefold.gnn.data import array_source, ingest
from fivefold.gnn.training import infer_run, train_graph
from fivefold.runs import format_toml
from fivefold.runs.checkpoints import find_checkpoint
from fivefold.train import TrainConfig
from fivefold.train._loop import describe_run
from helpers.training_graphs import Disk


def test_another_run_in_the_folder_is_refused_before_sampling_and_packing(make_config, tmp_path):
    config = make_config(epochs=1)
    train_graph(config)
    other = make_config(epochs=1, store="other", model={"hidden_dim": 16})
    with pytest.raises(CheckpointError, match="hidden_dim = 8; now it is 16"):
        train_graph(other)
    assert not (tmp_path / "other").exists()
    stores = {path.name for path in (tmp_path / "store").glob("store-*")}
    plan = config.plan.model_copy(update={"segment_batches": 2})
    with pytest.raises(CheckpointError, match="another plan") as refused:
        train_graph(config.model_copy(update={"plan": plan}))
    assert "[plan]" in refused.value.hint
    assert {path.name for path in (tmp_path / "store").glob("store-*")} == stores


def test_what_is_for_language_models_names_a_run_on_a_graph(make_config):
    """Two problem pages, one folder: neither ranks nor a missing run are what is wrong."""
    config = make_config(epochs=1)
    train_graph(config)
    description = describe_run(TrainConfig(), data_fingerprint="x")
    with pytest.raises(CheckpointError, match="another kind of training") as refused:
        find_checkpoint(config.run.output, "auto", description=description, world_size=2)
    assert "run.output" in refused.value.hint
    with pytest.raises(DataError, match="is a run on a graph") as refused:
        explain_run(config.run.output)
    assert "fivefold report" in refused.value.hint


def test_a_store_that_was_deleted_is_made_again_and_the_run_goes_on(
    make_config, tmp_path, monkeypatch
):
    whole = train_graph(make_config(output="whole", epochs=2))
    train_graph(make_config(epochs=1))
    shutil.rmtree(tmp_path / "store")
    slower = Disk(byte_s=1.1e-9)  # the probe never says the same twice
    slower.sequential_read_bytes_per_s = slower.sequential_write_bytes_per_s = 0.9e9
    monkeypatch.setattr("fivefold.gnn.loading.prepare.probe_disk", lambda *_, **__: slower)
    again = train_graph(make_config(epochs=2))
    assert again.parameters_sha256 == whole.parameters_sha256


def test_budgets_are_named_as_in_the_file(make_config):
    config = make_config()
    budgets = config.budgets.model_copy(update={"host": 10})
    with pytest.raises(InfeasibleError) as refused:
        train_graph(config.model_copy(update={"budgets": budgets}))
    assert refused.value.hint.startswith("give at least budgets.host = ")
    assert "loader.prefetch" in refused.value.hint
    budgets = config.budgets.model_copy(update={"disk": 10})
    with pytest.raises(InfeasibleError) as refused:
        train_graph(config.model_copy(update={"budgets": budgets}))
    assert "budgets.disk = " in refused.value.hint


def odd_graph(folder, *, labels=None, x=None):
    rng = np.random.default_rng(0)
    nodes = 200
    source = array_source(
        rng.integers(0, nodes, (2, 900)),
        features=rng.standard_normal((nodes, 4)) if x is None else x,
        labels=rng.integers(0, 3, nodes) if labels is None else labels,
        splits={"train": np.arange(80), "valid": np.arange(80, 120)},
    )
    ingest(source, folder).close()
    return folder


def test_training_on_numbers_that_are_none_ends_at_the_first_step(make_config, tmp_path):
    x = np.full((200, 4), np.finfo(np.float32).max)  # finite, but no sum of them is
    config = make_config(mode="memory")
    data = config.data.model_copy(update={"path": odd_graph(tmp_path / "g", x=x)})
    with pytest.raises(DataError, match="the loss of step 1 is nan") as refused:
        train_graph(config.model_copy(update={"data": data}))
    assert "features that are not finite" in refused.value.hint


def test_training_nodes_without_labels_are_refused(make_config, tmp_path):
    labels = np.zeros(200, np.int64)
    labels[:80] = -1
    config = make_config(mode="memory")
    data = config.data.model_copy(update={"path": odd_graph(tmp_path / "g", labels=labels)})
    with pytest.raises(DataError, match="none of the 80 training nodes"):
        train_graph(config.model_copy(update={"data": data}))


def test_inference_says_where_a_relative_path_counts_from(make_config, tmp_path):
    config = make_config()
    data = config.data.model_copy(update={"path": Path("graphs/here")})
    config = config.model_copy(update={"data": data})
    (tmp_path / "config.toml").write_text(format_toml(config.model_dump()))
    with pytest.raises(DataError, match="not in the current folder") as refused:
        infer_run(tmp_path)
    assert "where the run was started" in refused.value.hint
