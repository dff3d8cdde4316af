"""What ``fivefold new`` writes runs, by the very lines that it prints."""

import shlex
import sys

import pytest

import fivefold.cli._main as entry
from fivefold.gnn.training import load_gnn_config
from fivefold.train.config import load_config

PROBLEMS = ("network", "experts", "graph", "topology", "cluster")


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fivefold", *words])
        with pytest.raises(SystemExit) as ended:
            entry.main()
        seen = capsys.readouterr()
        return ended.value.code, seen.out, seen.err

    return call


def new(shell, problem):
    code, out, err = shell("new", "first", "--for", problem)
    assert code == 0, err
    return [shlex.split(line)[1:] for line in out.splitlines()]


@pytest.mark.parametrize("problem", ["topology", "cluster"])
def test_plans_run_as_printed(shell, problem):
    for words in new(shell, problem):
        code, out, err = shell(*words)
        assert code == 0, err
        assert out


def test_configurations_are_whole_and_few_steps_of_them_run(shell, tmp_path):
    new(shell, "network")
    assert load_config(tmp_path / "first" / "train.toml").sync.tau == 8
    (tmp_path / "first" / "train.toml").unlink()
    new(shell, "experts")
    assert load_config(tmp_path / "first" / "train.toml").model.moe.experts == 8
    new(shell, "graph")
    assert load_gnn_config(tmp_path / "first" / "gnn.toml").run.mode == "disk"


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize("problem", ["network", "experts", "graph"])
def test_training_runs_as_printed(shell, problem):
    for words in new(shell, problem):
        few = ["--set", "run.steps=4", "--set", "optim.warmup_steps=0"]
        few = few if words[0] == "train" else []
        code, _, err = shell(*words, *few)
        assert code == 0, err


def test_nothing_is_overwritten(shell, tmp_path):
    new(shell, "network")
    before = (tmp_path / "first" / "train.toml").read_text()
    code, out, err = shell("new", "first", "--for", "network")
    assert (code, out) == (1, "")
    assert "is there already" in err
    assert (tmp_path / "first" / "train.toml").read_text() == before


@pytest.mark.parametrize("words", [("a b", "network"), ("../x", "network"), ("x", "nothing")])
def test_names_and_problems_that_are_none_are_refused(shell, words):
    code, _, err = shell("new", words[0], "--for", words[1])
    assert code in {1, 2}
    assert err.startswith("error: ")
