"""The trainer in all modes: what it makes, what it reaches, what it writes."""

import json
import tomllib

import numpy as np
import pytest
import torch

from fivefold.errors import CheckpointError, ConfigurationError, DataError, InfeasibleError
from fivefold.gnn.data import Dataset, array_source, ingest
from fivefold.gnn.training import _loop, infer_run, load_gnn_config, train_graph
from fivefold.gnn.training._infer_run import load_model
from fivefold.runs import format_toml
from helpers.training_graphs import make_dataset, relabel


def events(config, kind=None):
    lines = (config.run.output / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [event for event in found if kind in {None, event["event"]}]


@pytest.mark.parametrize("mode", ["disk", "memory", "online"])
@pytest.mark.parametrize("name", ["sage", "gat", "gcn"])
def test_every_model_learns_in_every_mode(mode, name, make_config):
    config = make_config(mode=mode, epochs=6, model={"name": name, "hidden_dim": 16})
    result = train_graph(config)
    assert (result.reason, result.epochs, result.steps) == ("finished", 6, 6 * 9)
    # Four classes; the edges say nothing about them, so that a model that gives a node's own row
    # no weight of its own learns less.
    assert result.test_accuracy > {"sage": 0.8, "gat": 0.5, "gcn": 0.45}[name]
    assert len(events(config, "epoch")) == len(events(config, "validation")) == 6
    assert sum(result.seconds.values()) == pytest.approx(result.wall_s, rel=0.05, abs=0.05)


def test_disk_mode_counts_its_bytes_as_the_plan_predicts(make_config):
    config = make_config(epochs=2)
    result = train_graph(config)
    (prepared,) = events(config, "prepare")
    assert set(prepared["seconds"]) == {"sample", "plan", "pack"}
    assert result.data["bytes_read"] == 2 * prepared["plan"]["read_bytes_per_epoch"]
    assert result.data["cold_bytes"] == 2 * prepared["plan"]["cold_rows"] * 28
    assert sum(result.data["rows"].values()) == 2 * prepared["plan"]["accesses"]
    assert "Batches per segment" in (config.run.output / "plan.txt").read_text()


def test_rows_of_edges_are_not_packed_for_models_that_do_not_ask(make_config, tmp_path):
    rng = np.random.default_rng(0)
    source = array_source(
        rng.integers(0, 300, (2, 2000)),
        features=rng.normal(size=(300, 4)).astype(np.float32),
        labels=rng.integers(0, 3, 300),
        splits={"train": range(200), "valid": range(200, 250), "test": range(250, 300)},
        edge_features=rng.normal(size=(2000, 2)).astype(np.float32),
    )
    ingest(source, tmp_path / "graph").close()
    config = make_config(epochs=1)
    data = config.data.model_copy(update={"path": tmp_path / "graph"})
    assert train_graph(config.model_copy(update={"data": data})).steps == 5
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "store").iterdir())
    assert names == ["lock", "samples", "store"]


def test_a_second_run_finds_samples_and_rows_and_the_same_parameters(make_config):
    first = train_graph(make_config(output="a"))
    again = make_config(output="b")
    second = train_graph(again)
    assert second.parameters_sha256 == first.parameters_sha256
    assert "pack" not in events(again, "prepare")[0]["seconds"]
    other = train_graph(make_config(output="c", seed=1))
    assert other.parameters_sha256 != first.parameters_sha256


def test_memory_and_online_train_on_the_same_rows(make_config):
    digests = {
        train_graph(make_config(output=mode, mode=mode, epochs=2)).parameters_sha256
        for mode in ("memory", "online")
    }
    assert len(digests) == 1


def test_other_budgets_make_another_store_beside_the_first(make_config, tmp_path):
    config = make_config()
    train_graph(config)
    smaller = config.model_copy(
        update={
            "budgets": config.budgets.model_copy(update={"host": 60_000}),
            "run": config.run.model_copy(update={"output": tmp_path / "b"}),
        }
    )
    train_graph(smaller)
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "store").iterdir())
    assert names == ["lock", "samples", "store", "store"]


def test_the_files_of_a_run(make_config):
    config = make_config(epochs=1)
    result = train_graph(config)
    folder = config.run.output
    assert load_gnn_config(folder / "config.toml") == config
    assert tomllib.loads((folder / "config.toml").read_text())["sampling"]["fanouts"] == [4, 3]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["kind"], manifest["dataset"]["nodes"]) == ("gnn", 600)
    assert json.loads((folder / "result.json").read_text())["steps"] == result.steps == 9
    assert [event["event"] for event in events(config)][-3:] == ["validation", "checkpoint", "end"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000009"]


def test_the_form_of_the_batches_does_not_matter_without_dropout(make_config):
    digests = {
        form: train_graph(
            make_config(output=form, loader={"form": form}, model={"dropout": 0.0}, epochs=1)
        )
        for form in ("edge_index", "blocks")
    }
    losses = {form: result.valid_accuracy for form, result in digests.items()}
    assert losses["blocks"] == pytest.approx(losses["edge_index"], abs=0.02)


def test_inference_of_a_run_judges_all_nodes(make_config):
    config = make_config(epochs=4)
    train_graph(config)
    found = infer_run(config.run.output, memory_bytes=200_000)
    with Dataset.open(config.data.path) as dataset:
        model, step = load_model(config, dataset)
        topology = dataset.topology()
        targets = np.repeat(np.arange(dataset.num_nodes), np.diff(topology.indptr))
        edges = torch.from_numpy(np.stack([topology.indices.astype(np.int64), targets]))
        with torch.no_grad():
            scores = model(torch.from_numpy(dataset.features.read("x")), edges)
        right = scores.argmax(1).numpy() == dataset.labels
        assert step == found.step == 36
        for split in ("train", "valid", "test"):
            assert found.accuracy[split] == pytest.approx(right[getattr(dataset, split)].mean())
    written = json.loads((found.outputs.path.parent / "inference.json").read_text())
    assert written["accuracy"] == found.accuracy


def test_unusable_data_and_budgets_are_refused_before_anything_is_written(make_config, tmp_path):
    config = make_config()
    data = config.data.model_copy(update={"path": tmp_path / "nothing"})
    with pytest.raises(DataError, match="nothing"):
        train_graph(config.model_copy(update={"data": data}))
    budgets = config.budgets.model_copy(update={"host": 10})
    with pytest.raises(InfeasibleError, match="host"):
        train_graph(config.model_copy(update={"budgets": budgets}))
    assert {path.name for path in config.run.output.glob("*")} <= {".lock"}


def test_a_folder_with_a_run_is_not_written_over(make_config):
    config = make_config(epochs=1, mode="memory")
    train_graph(config)
    with pytest.raises(ConfigurationError, match="already has a run"):
        train_graph(make_config(epochs=1, mode="memory", resume="never"))
    with pytest.raises(CheckpointError, match=r"model\.name = 'sage'; now it is 'gcn'"):
        train_graph(make_config(epochs=1, mode="memory", model={"name": "gcn"}))


def test_a_finished_run_can_be_made_longer(make_config):
    whole = train_graph(make_config(output="whole", mode="memory", epochs=4))
    train_graph(make_config(output="part", mode="memory", epochs=2))
    longer = train_graph(make_config(output="part", mode="memory", epochs=4))
    assert longer.parameters_sha256 == whole.parameters_sha256
    assert format_toml(make_config(epochs=4).model_dump()) != format_toml(
        make_config(epochs=2).model_dump()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"policy": "belady"}, "loader": {"shuffle": False}},
        {"plan": {"segment_batches": 1}, "data": {"mapped": True}},
        {"plan": {"segment_batches": 3}, "sampling": {"epochs": 2}},
        {"sampling": {"fanouts": (-1, 2)}, "validation": {"fanouts": (-1, -1)}},
        {"loader": {"backend": "threads", "prefetch": 1}},
        {"loader": {"verify": False}},
    ],
)
def test_policies_and_engines_train_and_resume(changes, make_config, monkeypatch):
    def changed(**options):
        config = make_config(checkpoint_every_steps=5, **options)
        tables = {
            name: getattr(config, name).model_copy(update=values)
            for name, values in changes.items()
        }
        return config.model_copy(update=tables)

    whole = train_graph(changed(output="whole"))
    assert whole.steps == 27
    real = _loop.write_checkpoint

    def dies(folder, state, *, step, **options):
        real(folder, state, step=step, **options)
        if step == 15:
            raise KeyboardInterrupt

    monkeypatch.setattr(_loop, "write_checkpoint", dies)
    with pytest.raises(KeyboardInterrupt):
        train_graph(changed(output="part"))
    monkeypatch.setattr(_loop, "write_checkpoint", real)
    assert train_graph(changed(output="part")).parameters_sha256 == whole.parameters_sha256


@pytest.mark.nightly
def test_samples_are_refreshed_in_the_background_and_a_resumed_run_has_the_same(
    make_config, tmp_path, monkeypatch
):
    def refreshed(output, **options):
        config = make_config(output=output, store=f"{output}-store", epochs=5, **options)
        sampling = config.sampling.model_copy(update={"refresh_every_epochs": 2})
        return config.model_copy(update={"sampling": sampling})

    config = refreshed("whole", checkpoint_every_steps=5)
    whole = train_graph(config)
    assert len(events(config, "prepare")) == 3  # epochs 1 and 2, 3 and 4, 5
    left = sorted(path.name.partition("-")[0] for path in (tmp_path / "whole-store").iterdir())
    assert left == ["lock", "samples", "store"]
    fixed = train_graph(make_config(output="fixed", store="whole-store", epochs=5))
    assert fixed.parameters_sha256 != whole.parameters_sha256

    real = _loop.write_checkpoint
    for stop_step in (15, 18, 25):  # inside a round, at the end of one, inside the next
        every = {"checkpoint_every_steps": 0 if stop_step == 18 else 5}

        def dies(folder, state, *, step, stop_step=stop_step, **options):
            real(folder, state, step=step, **options)
            if step == stop_step:
                raise KeyboardInterrupt

        monkeypatch.setattr(_loop, "write_checkpoint", dies)
        part = refreshed(f"part{stop_step}", **every)
        with pytest.raises(KeyboardInterrupt):
            train_graph(part)
        monkeypatch.setattr(_loop, "write_checkpoint", real)
        assert train_graph(part).parameters_sha256 == whole.parameters_sha256


def test_unlabelled_nodes_and_empty_splits_are_no_trouble(make_config, tmp_path):
    with make_dataset(tmp_path / "g", nodes=80, edges=300) as full:
        y, train = full.labels.copy(), full.train
    y[train[::3]] = -1
    empty = np.empty(0, np.int64)
    arrays = {"y": y, "train": train, "valid": empty, "test": empty}
    relabel(tmp_path / "g", arrays, {"num_classes": 4})
    for mode in ("disk", "memory"):
        config = make_config(output=mode, mode=mode, epochs=2)
        data = config.data.model_copy(update={"path": tmp_path / "g"})
        result = train_graph(config.model_copy(update={"data": data}))
        assert (result.steps, result.valid_accuracy, result.best_epoch) == (4, None, None)
        assert events(config, "validation")[0]["accuracy"] is None
        assert infer_run(config.run.output, memory_bytes=10**6).accuracy.keys() == {"train"}


def test_one_batch_one_class_one_layer(make_config, tmp_path):
    make_dataset(tmp_path / "g", nodes=30, edges=60, dim=1, classes=1).close()
    config = make_config(epochs=2, model={"name": "gat"})
    tables = {
        "data": config.data.model_copy(update={"path": tmp_path / "g"}),
        "sampling": config.sampling.model_copy(update={"fanouts": (2,), "batch_size": 1000}),
    }
    result = train_graph(config.model_copy(update=tables))
    assert (result.steps, result.test_accuracy) == (2, 1.0)
