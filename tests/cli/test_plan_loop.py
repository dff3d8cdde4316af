"""From a cluster and a job to a file that a program runs."""

import ast
import json
import re
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.cli._plan_files import model_of
from fivefold.collectives.pricing import Group, collective_time_s
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.strategy import load_cluster, load_model
from fivefold.strategy.calibrate import calibrated_fabric
from fivefold.train import Transformer, load_config
from fivefold.train._loop import require_settings
from fivefold.train.config import MixtureConfig, ModelConfig, TrainConfig, settings_fingerprint

ETHERNET = """\
base = "h100-80gb-torchtitan"
gpus = 16
gpus_per_node = 8
nic = "10 Gbit/s"
nics_per_node = 1
"""
TRAINER = """\
[run]
output = "runs/mine"
steps = 40
[optim]
batch_size = 4
grad_clip = inf
warmup_steps = 10
[sync]
method = "delay_corrected"
tau = 8
codec = "int8"
"""


def write(folder, text, name):
    (folder / name).write_text(text)
    return folder / name


def plan(*words):
    found = CliRunner().invoke(app, ["plan", *map(str, words)])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


@pytest.fixture
def ethernet(tmp_path):
    return write(tmp_path, ETHERNET, "eth.toml")


def test_a_large_model_over_ethernet_runs_in_the_trainer(tmp_path, ethernet):
    job = write(tmp_path, 'model = "llama2-7b"\nglobal_batch = 64\n[search]\ntau = [1, 16]\n',
                "job.toml")  # fmt: skip
    out = tmp_path / "out.toml"
    plan(job, "--cluster", ethernet, "--for", "train", "--output", out)
    config = load_config(out)
    assert (config.sync.method, config.sync.tau, config.sync.shard) == ("delay_corrected", 16, 8)
    require_settings(config, world_size=16)
    assert model_of(config, vocab=32000).ffn_width == load_model("llama2-7b").ffn_width
    found = config.prediction
    assert found.settings == settings_fingerprint(config, ranks=16)
    # An all-reduce of a card's share in 32 bits: 2 (n - 1) / n of 4 x 6.7e9 / 8 bytes a GPU.
    link = 10e9 / 8 / 8
    assert found.all_reduce_s == pytest.approx(4 * 6.74e9 / 8 / link / 0.8, rel=0.3)
    assert found.step_s < 3


@pytest.mark.parametrize(
    ("target", "suffix", "words"),
    [("torchtitan", "py", ["--torchtitan-base", "llama3.llama3_8b"]), ("megatron", "sh", [])],
)
def test_programs_get_files_of_plans_that_they_can_run(tmp_path, ethernet, target, suffix, words):
    job = write(tmp_path, 'model = "llama3-8b"\nglobal_batch = 64\n', "job.toml")
    out = tmp_path / f"out.{suffix}"
    plan(job, "--cluster", ethernet, "--for", target, "-o", out, *words)
    if suffix == "py":
        ast.parse(out.read_text())
        return
    subprocess.run(["bash", "-n", out], check=True)
    shown = subprocess.run(  # the script's own quoting: torchrun's words as it would get them
        ["bash", "-c", f'torchrun() {{ printf "%s\\n" "$@"; }}; . {out}', "x"],
        check=True, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"},
    ).stdout.split()  # fmt: skip
    assert shown[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    assert shown[shown.index("--num-query-groups") + 1] == "8"


def test_a_program_that_cannot_run_what_is_asked_says_so(tmp_path, ethernet):
    job = write(
        tmp_path, 'model = "gpt3-1.3b"\nglobal_batch = 64\n[search]\nzero = [1]\n', "j.toml"
    )
    with pytest.raises(InfeasibleError, match="torchtitan cannot run zero"):
        plan(job, "--cluster", ethernet, "--for", "torchtitan")
    words = ["plan", str(job), "--cluster", str(ethernet), "--for", "nemo"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert re.search("nemo.*torchtitan", refused.output, re.DOTALL)


def test_the_trainers_own_file_comes_back_with_the_plan_in_it(tmp_path):
    job, out = write(tmp_path, TRAINER, "train.toml"), tmp_path / "out.toml"
    plan(job, "--cluster", "cpu-lab:2", "--for", "train", "--output", out)
    before, after = load_config(job), load_config(out)
    assert after.run == before.run
    assert after.optim.grad_clip == before.optim.grad_clip
    assert (after.sync.method, after.sync.codec) == ("delay_corrected", "int8")
    assert after.prediction.ranks == 2
    changed = load_config(out, ["model.layers=5"])
    assert settings_fingerprint(after, ranks=2) == after.prediction.settings
    assert settings_fingerprint(changed, ranks=2) != after.prediction.settings


def test_a_config_json_is_a_job(tmp_path):
    config = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8,
              "vocab_size": 999, "num_hidden_layers": 4, "intermediate_size": 512,
              "max_position_embeddings": 512}  # fmt: skip
    write(tmp_path, json.dumps(config), "config.json")
    where = ("--cluster", "h100-nemo", "--gpus", 8)
    for source in (tmp_path, tmp_path / "config.json"):
        found = plan(source, *where, "--global-batch", 64, "--seq-len", 128, "--json")
        assert json.loads(found.stdout)["best"][0]["plan"]["global_batch"] == 64
    # A file says how long sequences may be, not how long they are: what is priced is shown.
    said = " ".join(plan(tmp_path, *where, "--global-batch", 64).stdout.split())
    assert "batch 64 x 512 tokens" in said
    with pytest.raises(ConfigurationError, match="how it is trained"):
        plan(tmp_path, *where)


@pytest.mark.parametrize(
    "model",
    [ModelConfig(layers=3, width=48, heads=2), ModelConfig(ffn_width=40),
     ModelConfig(layers=4, moe=MixtureConfig(experts=4, shared=1, every=2))],
)  # fmt: skip
def test_the_planner_counts_the_trainers_parameters(model):
    made = Transformer(model, vocab_size=257, sequence_length=64)
    assert model_of(TrainConfig(model=model)).num_parameters == made.num_parameters


@pytest.mark.parametrize("name", ["cpu-lab", "h100-nemo"])
def test_a_calibrated_fabric_gives_the_measured_times(name):
    cluster = load_cluster(name)
    sizes, times = (1e6, 8e6), (0.11, 0.81)
    fabric = calibrated_fabric(cluster, ranks=16, sizes_bytes=sizes, times_s=times)
    for size, time_s in zip(sizes, times, strict=True):
        group = Group(size=16, ranks=16)
        found = collective_time_s(fabric, "all_reduce", size_bytes=size, group=group)
        assert found == pytest.approx(time_s, rel=0.02)
    with pytest.raises(ConfigurationError, match="larger sizes"):
        calibrated_fabric(cluster, ranks=2, sizes_bytes=sizes, times_s=(0.2, 0.2))
    with pytest.raises(ConfigurationError):
        calibrated_fabric(cluster, ranks=2, sizes_bytes=sizes, times_s=(0.2, float("nan")))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_examples_are_planned():
    plan("examples/plan_job.toml", "--cluster", "examples/cluster_10g_ethernet.toml", "--for",
         "train", "--json")  # fmt: skip


def test_codecs_send_their_bytes_and_what_is_hidden_fits(tmp_path):
    """Two processors, 100 Mbit/s: the round that is chosen is as long as its exchange."""
    cluster = write(
        tmp_path, 'base = "cpu-lab"\ngpus = 2\ngpus_per_node = 1\nnic = "100 Mbit/s"\n', "lab.toml"
    )
    found = {}
    for codec in ("fp32", "bf16", "int8", "int4", "topk"):
        text = TRAINER.replace("tau = 8", 'tau = "auto"').replace("int8", codec)
        job, out = write(tmp_path, text, f"{codec}.toml"), tmp_path / f"{codec}-out.toml"
        plan(job, "--cluster", cluster, "--for", "train", "--output", out)
        config = load_config(out)
        found[codec] = config.prediction.all_reduce_s
        tau, expected = config.sync.tau or 1, config.prediction
        if tau > 1:
            assert config.sync.fragments is None  # the trainer's own choice fills the round
        beside_s = expected.compute_s + expected.other_s
        assert expected.exposed_communication_s >= expected.all_reduce_s / tau - beside_s
    assert found["fp32"] > found["bf16"] > found["int8"] > found["int4"] > found["topk"]
    assert found["fp32"] == pytest.approx(2 * found["bf16"], rel=0.1)
