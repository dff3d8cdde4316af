"""What ``fivefold new`` writes runs, by the very lines that it prints."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

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
    assert load_config(tmp_path / "first" / "train.toml").sync.tau == "auto"
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
    assert "already exists" in err
    assert (tmp_path / "first" / "train.toml").read_text() == before


@pytest.mark.parametrize("words", [("a b", "network"), ("../x", "network"), ("x", "nothing")])
def test_names_and_problems_that_are_none_are_refused(shell, words):
    code, _, err = shell("new", words[0], "--for", words[1])
    assert code in {1, 2}
    assert err.startswith("error: ")


TINY = """
[run]
output = "runs/first"
steps = 2
device = "cpu"
[data]
path = "texts"
sequence_length = 16
[model]
layers = 1
width = 16
heads = 2
[optim]
batch_size = 2
warmup_steps = 0
validation_batches = 1
"""
STUBS = {"scontrol": "echo localhost", "srun": 'shift; echo "$@" >&2; exec "$@"'}


@pytest.mark.nightly
@pytest.mark.distributed
def test_the_slurm_script_runs_on_one_node(shell, tmp_path):
    code, out, _ = shell("new", "first", "--for", "network", "--launcher", "slurm")
    assert (code, out.splitlines()[0]) == (0, "sbatch first/run.sbatch")
    script = tmp_path / "first" / "run.sbatch"
    assert "{" not in script.read_text().replace("${SLURM", "")
    directives = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --ntasks-per-node=1" in [line.partition("  ")[0] for line in directives]
    (tmp_path / "first" / "train.toml").write_text(TINY)
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text("to be or not to be\n" * 40)
    (tmp_path / "bin").mkdir()
    for name, body in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(
        ["bash", str(script)],
        env=os.environ | slurm | {"PATH": path, "SLURM_GPUS_ON_NODE": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "runs" / "first" / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert json.loads((tmp_path / "runs" / "first" / "result.json").read_text())["steps"] == 2


@pytest.mark.parametrize(
    ("problem", "command"), [("experts", ["train"]), ("graph", ["gnn", "train"])]
)
def test_the_kubernetes_manifest_starts_the_same_configuration(shell, tmp_path, problem, command):
    yaml = pytest.importorskip("yaml")
    code, out, _ = shell("new", "My_run", "--for", problem, "--launcher", "kubernetes")
    assert code == 0
    assert "kubectl apply -f My_run/kubernetes.yaml" in out.splitlines()
    job = yaml.safe_load((tmp_path / "My_run" / "kubernetes.yaml").read_text())
    assert (job["kind"], job["metadata"]["name"]) == ("PyTorchJob", "my-run")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    (config,) = (file.name for file in (tmp_path / "My_run").glob("*.toml"))
    start = container["command"].index("-m")
    assert container["command"][start:] == ["-m", "fivefold", *command, f"/config/{config}"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    elastic = job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"] == 2


@pytest.mark.parametrize("name", ["é", "2nd", "a" * 51])
def test_a_name_that_kubernetes_refuses_is_refused(shell, tmp_path, name):
    code, _, err = shell("new", name, "--for", "network", "--launcher", "kubernetes")
    assert (code, "Kubernetes takes no job" in err) == (1, True)
    assert not (tmp_path / name).exists()
    assert shell("new", name, "--for", "network", "--launcher", "slurm")[0] == 0


def test_a_name_is_no_option(shell, tmp_path):
    code, _, err = shell("new", "--for", "network", "--", "-x")
    assert (code, "must be letters" in err) == (1, True)
    assert not (tmp_path / "-x").exists()


def test_what_is_no_training_run_has_no_launcher(shell, tmp_path):
    code, _, err = shell("new", "first", "--for", "cluster", "--launcher", "slurm")
    assert code == 1
    assert "which --for cluster does not write" in err
    assert list(tmp_path.iterdir()) == []
