"""The commands: what goes to which stream, exit codes, the whole way from a TOML file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli._gnn import app
from fivefold.errors import ConfigurationError, DataError
from fivefold.runs import format_toml


@pytest.fixture
def run():
    """Call a command; errors come out as they are, as the entry point gets them."""

    def call(*arguments):
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)

    return call


def test_from_a_file_to_scores_of_all_nodes(make_config, tmp_path, run):
    config = make_config(epochs=2)
    file = tmp_path / "gnn.toml"
    file.write_text(format_toml(config.model_dump()))
    trained = run("train", file, "--set", "run.epochs=1", "--json")
    assert trained.exit_code == 0
    record = json.loads(trained.stdout)
    assert (record["epochs"], record["reason"]) == (1, "finished")
    assert "Batches per segment" in trained.stderr  # the plan, before packing
    again = run("train", file)  # one epoch more, from the checkpoint
    assert again.stdout == ""
    assert "Batches per segment" not in again.stderr
    events = (config.run.output / "metrics.jsonl").read_text()
    assert '"event": "resume", "step": 9' in events

    inferred = run("infer", config.run.output, "--memory", "1 MB", "--json")
    record = json.loads(inferred.stdout)
    assert set(record["accuracy"]) == {"train", "valid", "test"}
    assert Path(record["path"]).name == "output.fvf"
    shown = run("infer", config.run.output, "--output", tmp_path / "out", "--memory", "1 MB")
    assert "layer 2: 1 range of targets" in shown.stdout
    assert "test accuracy 0." in shown.stdout


def test_errors_come_before_any_work(tmp_path, run):
    assert run("train", tmp_path / "none.toml").exit_code == 2
    with pytest.raises(DataError, match="holds no run"):
        run("infer", tmp_path)
    with pytest.raises(ConfigurationError, match="not a size"):
        run("infer", tmp_path, "--memory", "much")


def test_help_names_all_commands_in_the_order_of_use(run):
    text = run("--help").stdout
    names = ["ingest", "generate", "info", "verify", "probe", "sample", "plan", "pack", "train"]
    places = [text.index(f" {name} ") for name in [*names, "infer"]]
    assert places == sorted(places)
