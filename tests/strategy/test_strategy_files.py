"""Clusters, job files and the command line."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.strategy import (
    load_cluster,
    load_job,
    named_clusters,
    plan_to_toml,
)

JOB = 'model = "llama3-8b"\ngpus = 16\nglobal_batch = 32\n'


def write(folder, text, name="job.toml"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", named_clusters())
def test_every_known_cluster_loads_and_names_its_sources(name):
    cluster = load_cluster(name)
    sources = dict(cluster.device.sources)
    assert {"gemm_efficiency"} <= set(sources) or name == "cpu-lab"
    assert all(sources.values())


def test_a_cluster_file_changes_what_it_names(tmp_path):
    path = write(tmp_path, 'base = "h100-nemo"\ngpus = 64\n[device]\nmemory = "40 GB"\n'
                 '[[tier]]\nname = "cluster"\nbandwidth = "100 Gbit/s"\n', "c.toml")  # fmt: skip
    cluster, base = load_cluster(path), load_cluster("h100-nemo")
    assert cluster.device.memory_bytes == 40e9
    assert cluster.fabric.tiers[1].bandwidth_bytes_per_s == 12.5e9
    assert cluster.fabric.tiers[0] == base.fabric.tiers[0]
    assert (cluster.num_gpus, cluster.name) == (64, "c")
    assert cluster.device.peak_flops == base.device.peak_flops


def test_a_cluster_file_may_name_a_topology(tmp_path):
    path = write(tmp_path, 'base = "a100-megatron"\ntopology = "dgx_a100:4"\n', "c.toml")
    tiers = load_cluster(path).fabric.tiers
    assert [tier.gpus for tier in tiers] == [8, 32]
    assert tiers[1].bandwidth_bytes_per_s == 25e9
    assert tiers[1].efficiency == load_cluster("a100-megatron").fabric.tiers[1].efficiency
    result = run(write(tmp_path, JOB.replace("16", "64")), "--cluster", path)
    assert isinstance(result.exception, InfeasibleError)
    assert "64 GPUs" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "h100-nemo"\n[device]\nmemroy = "1 GB"\n', "did you mean 'memory'"),
        ('base = "h100"\n', "did you mean 'h100-nemo'"),
        ('gpus = 8\n[[tier]]\nname = "x"\n', "incomplete"),
        ('base = "h100-nemo"\ngpus = 0\n', "whole number from 1 to"),
        ('base = "h100-nemo"\n[device]\ngemm_efficiency = 2\n', "between"),
        ('base = "h100-nemo"\n[device]\ngemm_efficiency_fp8 = -0.5\n', "between"),
        ('base = "h100-nemo"\n[device]\nepilogue_share = -1.0\n', "between"),
        ('base = "h100-nemo"\n[device]\nmemory = "many"\n', "not a size"),
    ],
)
def test_a_bad_cluster_file_is_explained(tmp_path, text, words):
    with pytest.raises(ConfigurationError) as caught:
        load_cluster(write(tmp_path, text, "c.toml"))
    assert words in str(caught.value)


def test_a_broken_cluster_file_is_an_error_of_configuration(tmp_path):
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_cluster(write(tmp_path, "= 3", "c.toml"))


def test_a_cluster_file_of_bytes_is_an_error_of_configuration(tmp_path):
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_cluster(tmp_path / "c.toml")


def test_a_base_that_leads_back_is_refused(tmp_path):
    write(tmp_path, f'base = "{tmp_path}/b.toml"\n', "a.toml")
    write(tmp_path, f'base = "{tmp_path}/a.toml"\n', "b.toml")
    with pytest.raises(ConfigurationError, match="made from it"):
        load_cluster(str(tmp_path / "a.toml"))


@pytest.mark.parametrize("name", ["dgx_a100:4", "fat_tree:8,gpus=8", "dgx_h100"])
def test_a_network_is_no_cluster_and_the_hint_makes_one_of_it(tmp_path, name):
    with pytest.raises(ConfigurationError, match="is a network") as caught:
        load_cluster(name)
    hint = caught.value.hint
    assert f'topology = "{name}"' in hint
    text = f'base = "h100-nemo"\ntopology = "{name}"\n'
    assert load_cluster(write(tmp_path, text, "c.toml")).fabric.gpus_per_node == 8


def test_an_unknown_cluster_names_all():
    with pytest.raises(ConfigurationError) as caught:
        load_cluster("zzz")
    assert all(name in caught.value.hint for name in named_clusters())


def test_a_job_with_its_own_model_and_space(tmp_path):
    job = load_job(write(tmp_path, """
        gpus = 8
        global_batch = 16
        [model]
        num_layers = 8
        hidden = 512
        num_heads = 8
        seq_len = 1024
        vocab = 32000
        experts = {num_experts = 8, top_k = 2, expert_ffn = 1024}
        [search]
        zero = [0, 1]
        recompute = "none"
    """))  # fmt: skip
    assert job.model.experts.top_k == 2
    assert (job.space.zero, job.space.recompute) == ((0, 1), ("none",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus = 8\nglobal_batch = 8\n", "does not say 'model'"),
        (JOB + "batch = 3\n", "did you mean"),
        (JOB + "[search]\nzeros = [1]\n", "did you mean 'zero'"),
        (JOB + "[plan]\ndata = 2\n", "takes 2 GPUs"),
        ('model = "llama3-9b"\ngpus = 8\nglobal_batch = 8\n', "did you mean"),
        ("gpus = 8\nglobal_batch = 8\n[model]\nhidden = 8\n", "incomplete"),
    ],
)
def test_a_bad_job_file_is_explained(tmp_path, text, words):
    contradiction = "takes" in words  # between what is asked for: nothing is misspelled
    with pytest.raises(InfeasibleError if contradiction else ConfigurationError) as caught:
        load_job(write(tmp_path, text))
    assert words in str(caught.value)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_command_shows_the_plan_its_parts_and_reasons(tmp_path):
    result = run(write(tmp_path, JOB), "--cluster", "h100-nemo", "--front")
    assert result.exit_code == 0, result.output
    for words in ("Fastest plans", "Where the time", "ruled out by bounds", "cannot run"):
        assert words in result.output
    assert "Time against memory" in result.output
    assert max(map(len, result.output.splitlines())) <= 160


def test_the_written_plan_can_be_judged_again(tmp_path):
    job, plan = write(tmp_path, JOB), tmp_path / "plan.toml"
    first = run(job, "--cluster", "h100-nemo", "--json", "--output", plan)
    found = json.loads(first.stdout)["best"][0]
    again = run(write(tmp_path, JOB + plan.read_text(), "again.toml"), "--cluster", "h100-nemo",
                "--json")  # fmt: skip
    judged = json.loads(again.stdout)["best"]
    assert len(judged) == 1
    assert judged[0]["time_s"] == pytest.approx(found["time_s"])
    assert judged[0]["plan"] == found["plan"]
    job = load_job(tmp_path / "again.toml")
    assert plan_to_toml(job.plan) == plan.read_text()


def test_what_does_not_fit_is_refused(tmp_path):
    tight = 'model = "llama3-70b"\ngpus = 1\nglobal_batch = 8\n'
    result = run(write(tmp_path, tight), "--cluster", "h100-nemo")
    assert isinstance(result.exception, InfeasibleError)
    assert result.exception.exit_code == 3
    forced = run(write(tmp_path, tight + "[plan]\nmicro_batch = 8\n"), "--cluster", "h100-nemo")
    assert isinstance(forced.exception, InfeasibleError)
    assert "memory binds" in str(forced.exception)


def test_a_cluster_takes_no_job_of_more_gpus_than_it_has(tmp_path):
    small = load_cluster(write(tmp_path, 'base = "h100-nemo"\ngpus = 32\n', "small.toml"))
    job = 'model = "llama2-7b"\nglobal_batch = 64\n'
    assert load_job(write(tmp_path, job + "gpus = 32\n"), cluster=small).space.num_gpus == 32
    with pytest.raises(InfeasibleError, match="wants 64 GPUs, cluster 'small' has 32"):
        load_job(write(tmp_path, job + "gpus = 64\n"), cluster=small)


def test_a_job_and_its_plan_agree(tmp_path):
    job = 'model = "llama2-7b"\ngpus = 8\nglobal_batch = 64\n[plan]\ndata = 8\n'
    assert load_job(write(tmp_path, job)).plan.global_batch == 64
    with pytest.raises(ConfigurationError, match=r"global_batch = 64, its \[plan\] 128"):
        load_job(write(tmp_path, job + "global_batch = 128\n"))
    with pytest.raises(ConfigurationError, match=r"optimizer = muon, its \[plan\] adamw"):
        load_job(write(tmp_path, 'optimizer = "muon"\n' + job + 'optimizer = "adamw"\n'))


def test_a_length_of_nothing_is_not_the_models_own(tmp_path):
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 8)
    config = sizes | {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64}
    write(tmp_path, json.dumps(config), "config.json")
    job = 'model = "config.json"\ngpus = 1\nglobal_batch = 1\n'
    assert load_job(write(tmp_path, job)).model.seq_len == 64
    with pytest.raises(ConfigurationError, match=r"seq_len in .* got 0"):
        load_job(write(tmp_path, job + "seq_len = 0\n"))


@pytest.mark.parametrize("key", ["tensor", "pipeline", "context", "micro_batch", "virtual", "tau"])
@pytest.mark.parametrize("value", ["0", "-2", "1.5", "true"])
def test_degrees_of_a_search_are_whole_numbers(tmp_path, key, value):
    text = f'model = "llama2-7b"\ngpus = 8\nglobal_batch = 8\n[search]\n{key} = [{value}]\n'
    with pytest.raises(ConfigurationError, match=f"{key} of the search space .* from 1; got"):
        load_job(write(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "does not say bandwidth"),
        ('bandwidth = "1 GB/s"\nefficiency = "much"\n', "efficiency must be a number; got 'much'"),
    ],
    ids=["missing", "type"],
)
def test_a_tier_is_described_in_the_words_of_the_file(tmp_path, line, words):
    text = f'base = "h100-nemo"\n[[tier]]\nname = "pod"\ngpus = 64\n{line}'
    with pytest.raises(ConfigurationError, match=words) as caught:
        load_cluster(write(tmp_path, text, "c.toml"))
    assert "__init__" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("jitter", np.float32("nan")), ("peak_flops", np.float32(-5)), ("gemm_efficiency", "0.5"),
     ("peak_flops", None)],
)  # fmt: skip
def test_a_constant_that_is_no_number_in_its_range_is_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"{name}=.* is out of range"):
        dataclasses.replace(load_cluster("h100-nemo").device, **{name: value})
