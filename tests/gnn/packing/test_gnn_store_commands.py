"""``fivefold gnn sample``, ``plan``, ``pack`` and ``probe`` as a user runs them."""

import json
import re

import pytest
from typer.testing import CliRunner

from fivefold.cli._gnn import app
from fivefold.errors import ConfigurationError, DataError, InfeasibleError
from fivefold.gnn.data import generate_graph
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.storage import probe_disk


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return probe_disk(tmp_path_factory.mktemp("disk"), seconds=0.1, size_bytes=4 << 20)


@pytest.fixture
def run(tmp_path, monkeypatch, profile):
    """Runs a command in a folder with a data set and gives back its JSON."""
    monkeypatch.setattr("fivefold.gnn.storage.probe_disk", lambda *_a, **_k: profile)
    generate_graph(tmp_path / "data", nodes=3000, dim=256, seed=1).close()
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


SAMPLE = ("sample", "data", "s.fvf", "--fanouts", "4,4", "--batch-size", "32", "--seed", "7")
PLAN = ("plan", "data", "s.fvf", "--host-memory", "1.5 MB", "--output", "plan.fvf")


def test_from_a_data_set_to_a_store(run, tmp_path):
    sampled = run(*SAMPLE)
    assert sampled["fanouts"] == [4, 4]
    assert run(*SAMPLE)["fingerprint"] == sampled["fingerprint"]
    planned = run(*PLAN, "--disk", "50 MB", "--policy", "belady")
    assert planned["policy"] == "belady"
    packed = run("pack", "data", "s.fvf", "plan.fvf", "store", "--memory", "2 MB")
    assert packed["batches"] == sampled["batches"]
    assert packed["written_bytes"] >= planned["predicted"]["packed_bytes"]
    with PackedStore.open(tmp_path / "store") as store:
        assert store.plan.fingerprint == planned["fingerprint"]
        assert store.nbytes == packed["bytes"]
    assert run("pack", "data", "s.fvf", "plan.fvf", "store") == packed
    # Other samples: the store is refused until it is to be made anew.
    other = run(*SAMPLE[:-1], "8", "--fresh")
    assert other["fingerprint"] != sampled["fingerprint"]
    with pytest.raises(DataError, match="plan was made for other samples"):
        run("pack", "data", "s.fvf", "plan.fvf", "store")
    run(*PLAN, "--disk", "50 MB")
    with pytest.raises(DataError, match="--fresh"):
        run("pack", "data", "s.fvf", "plan.fvf", "store")
    run("pack", "data", "s.fvf", "plan.fvf", "store", "--fresh", "--strategy", "passes")


def test_what_is_wrong_is_said(run):
    with pytest.raises(ConfigurationError, match="fanouts must be whole numbers; got '4;4'"):
        run("sample", "data", "s.fvf", "--fanouts", "4;4")
    run(*SAMPLE)
    with pytest.raises(ConfigurationError, match="not a size"):
        run(*PLAN, "--disk", "50 XB")
    refused = CliRunner().invoke(app, [*PLAN, "--disk", "50 MB", "--policy", "best"])
    assert refused.exit_code == 2
    assert re.search("best.*static.*belady", refused.output, re.DOTALL)
    with pytest.raises(InfeasibleError, match="disk budget"):
        run(*PLAN, "--disk", "1 kB")


def test_samples_of_another_graph_are_refused(run, tmp_path):
    run(*SAMPLE)
    run(*PLAN, "--disk", "50 MB")
    generate_graph(tmp_path / "other", nodes=3000, dim=256, seed=2).close()
    for command in (
        ("plan", "other", "s.fvf", "--disk", "50 MB"),
        ("pack", "other", "s.fvf", "plan.fvf", "store"),
    ):
        with pytest.raises(DataError, match=r"s\.fvf was sampled from another graph"):
            run(*command)


def test_probe_writes_the_profile(run, tmp_path, profile):
    found = run("probe", str(tmp_path))
    assert found == json.loads(profile.to_json())
    text = CliRunner().invoke(app, ["probe", str(tmp_path)]).output
    assert text == profile.explain() + "\n"


def test_without_json_the_plan_is_a_table(run):
    run(*SAMPLE)
    result = CliRunner().invoke(app, [*PLAN, "--disk", "50 MB"], catch_exceptions=False)
    assert "Batches per segment" in result.output
