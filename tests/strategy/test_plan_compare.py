"""One job on several clusters: each column is the search of that cluster, costs are arithmetic."""

import csv
import dataclasses
import io
import json

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.cli._plan_columns import PLAN_COLUMNS
from fivefold.cli._plan_work import price_of, tokens_of
from fivefold.errors import ConfigurationError
from fivefold.report.columns import Column
from fivefold.strategy import (
    SearchSpace,
    error_bar,
    load_cluster,
    load_job,
    load_model,
    search_plans,
)

A = 'base = "h100-nemo"\ngpus = 16\n'
B = 'base = "a100-megatron"\ngpus = 32\n'
JOB = 'model = "gpt3-1.3b"\nglobal_batch = 64\n[search]\nzero = [1]\nrecompute = "none"\n'


@pytest.fixture
def files(tmp_path):
    for name, text in (("a", A), ("b", B), ("job", JOB)):
        (tmp_path / f"{name}.toml").write_text(text)
    return [str(tmp_path / f"{name}.toml") for name in ("job", "a", "b")]


def call(*words):
    return CliRunner().invoke(app, ["plan", *words])


def test_each_column_is_the_search_of_its_cluster(files):
    job, a, b = files
    words = ["--compare", a, b, job, "--price", "2.5 USD/GPU h", "--tokens", "26B", "--json"]
    record = json.loads(call(*words).stdout)
    for path, column in zip((a, b), record["clusters"], strict=True):
        cluster = load_cluster(path)
        space = load_job(job, cluster=cluster).space
        model = load_job(job, cluster=cluster).model

        def fastest(factor, cluster=cluster, space=space, model=model):
            node, *outer = cluster.fabric.tiers
            tiers = [
                dataclasses.replace(t, bandwidth_bytes_per_s=factor * t.bandwidth_bytes_per_s)
                for t in outer
            ]
            fabric = dataclasses.replace(cluster.fabric, tiers=(node, *tiers))
            return search_plans(model, cluster.device, fabric, space=space, top=1).best[0]

        best = fastest(1.0)
        tokens = 64 * model.seq_len
        assert column["gpus"] == cluster.num_gpus
        assert column["time_s"] == best.time_s
        assert column["tokens_per_s"] == pytest.approx(tokens / best.time_s)
        assert column["tokens_per_s_per_gpu"] * column["gpus"] == pytest.approx(
            column["tokens_per_s"]
        )
        hours = 26e9 / (tokens / best.time_s) * cluster.num_gpus / 3600
        assert column["gpu_hours"] == pytest.approx(hours)
        assert column["cost"] == pytest.approx(2.5 * hours)
        half = best.time_s / fastest(0.5).time_s - 1
        assert column["network_half_change"] == pytest.approx(half)
        assert column["network_half_change"] <= 0 <= column["network_twice_change"]


def test_what_was_read_of_the_model_is_in_the_json(files, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 32000,
        "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 5632,
        "new_attention": "of a kind that nobody knows",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = tmp_path / "own.toml"
    job.write_text(JOB.replace('"gpt3-1.3b"', '"config.json"\nseq_len = 2048'))
    record = json.loads(call(str(job), *files[1:], "--compare", "--json").stdout)
    places = {note["name"]: kind for kind, notes in record["reading"].items()
              if isinstance(notes, list) for note in notes}  # fmt: skip
    assert places["hidden_size"] == "read"
    assert places["new_attention"] == "left_out"


def test_text_and_csv_name_every_cluster(files):
    shown = call(*files, "--compare", "--price", "2 EUR/GPU h", "--price", "1 EUR/GPU-hour")
    assert shown.exit_code == 0, shown.output
    assert "tokens/s/GPU" in shown.output
    assert "least cost: " in shown.output
    assert "months ago: newer software may be faster" in " ".join(shown.output.split())
    rows = list(csv.DictReader(io.StringIO(call(*files, "--compare", "--csv").stdout)))
    assert [row["cluster"] for row in rows] == ["a", "b"]
    assert all(float(row["memory_gib"]) < 80 for row in rows)
    (row,) = csv.DictReader(
        io.StringIO(call(files[0], "--cluster", files[1], "--top", "1", "--csv").stdout)
    )
    assert row["time_s"] == rows[0]["time_s"]


@pytest.fixture
def nodes_column():
    """A column that is declared in one place."""
    column = Column(
        "nodes", "whole nodes", "{:d} boxes".format, lambda one, _: one.plan.num_gpus // 8
    )
    PLAN_COLUMNS.append(column)
    yield
    PLAN_COLUMNS.remove(column)


@pytest.mark.usefixtures("nodes_column")
def test_a_column_that_is_declared_is_in_all_four_outputs(files, tmp_path):
    page = tmp_path / "page.html"
    one = [files[0], "--cluster", files[1], "--top", "1"]
    shown = call(*one, "--report", str(page)).stdout
    for text in (shown, page.read_text()):
        assert text.count("whole nodes") == 2  # of the fastest, and of the Pareto front
        assert "2 boxes" in text
    (row,) = csv.DictReader(io.StringIO(call(*one, "--csv").stdout))
    (best,) = json.loads(call(*one, "--json").stdout)["best"]
    assert (row["nodes"], best["nodes"]) == ("2", 2)
    assert best.keys() >= row.keys()


@pytest.mark.usefixtures("nodes_column")
def test_a_column_that_is_declared_is_in_comparisons(files):
    shown = call(*files, "--compare").stdout
    assert shown[shown.index("whole nodes") :].split()[2:6] == ["2", "boxes", "4", "boxes"]
    rows = list(csv.DictReader(io.StringIO(call(*files, "--compare", "--csv").stdout)))
    records = json.loads(call(*files, "--compare", "--json").stdout)["clusters"]
    assert [row["nodes"] for row in rows] == ["2", "4"]
    assert [record["nodes"] for record in records] == [2, 4]


def test_a_cluster_on_which_nothing_fits_has_a_reason_and_the_others_a_plan(files, tmp_path):
    job = tmp_path / "large.toml"
    job.write_text('model = "llama3-8b"\nglobal_batch = 64\n')
    small = tmp_path / "small.toml"
    small.write_text('base = "a100-megatron"\ngpus = 1\n')
    record = json.loads(call(str(job), files[1], str(small), "--compare", "--json").stdout)
    assert "memory" in record["clusters"][1]["problem"]
    assert record["clusters"][0]["tokens_per_s"] > 0
    assert call(str(job), str(small), "--compare").exit_code != 0


@pytest.mark.parametrize(
    ("text", "amount", "currency"),
    [("2.5 USD/GPU h", 2.5, "USD"), ("1$/GPU-h", 1.0, "$"), ("0.9 eur / gpu hour", 0.9, "EUR")],
)
def test_prices(text, amount, currency):
    assert (price_of(text).amount, price_of(text).currency) == (amount, currency)


@pytest.mark.parametrize("text", ["2.5", "2.5 USD", "USD/GPU h", "2.5 USD/h", "-1 USD/GPU h"])
def test_what_is_no_price_is_refused(text):
    with pytest.raises(ConfigurationError, match="price"):
        price_of(text)


def test_token_budgets():
    assert tokens_of("15T") == 15e12
    assert tokens_of("300 B tokens") == 300e9
    for text in ("0", "many", "-3T", "1e12 apples"):
        with pytest.raises(ConfigurationError, match="token budget"):
            tokens_of(text)


@pytest.mark.parametrize(
    "words",
    [
        ("--compare",),
        ("--compare", "--price", "1 USD/GPU h", "--price", "1 USD/GPU h", "--price", "3 USD/GPU h"),
        ("--compare", "--output", "x.toml"),
        ("--compare", "--global-batch", "8"),
        ("--price", "1 USD/GPU h"),
        ("--compare", "--json", "--csv"),
    ],
)
def test_options_that_do_not_go_together_are_refused(files, words):
    names = files[:1] if words == ("--compare",) else files
    found = call(*names, *words)
    assert found.exit_code == 1
    assert isinstance(found.exception, ConfigurationError)
    assert found.exception.exit_code == 2


def test_a_plan_says_how_far_off_it_may_be(files):
    job, a, _ = files
    document = json.loads(call(job, "--cluster", a, "--json").stdout)
    cluster, bar = load_cluster(a), document["error_bar"]
    best = search_plans(
        load_job(job, cluster=cluster).model, cluster.device, cluster.fabric,
        space=load_job(job, cluster=cluster).space, top=1,
    ).best[0]  # fmt: skip
    model = load_job(job, cluster=cluster).model
    wanted = error_bar(model, cluster.device, best.plan, time_s=best.time_s)
    assert bar["count"] == wanted.count > 0
    low_s, high_s = bar["interval_s"]
    assert low_s < document["best"][0]["time_s"] < high_s
    assert high_s / best.time_s == pytest.approx(1 + wanted.share)
    equal = sum(one["time_s"] <= best.time_s * (1 + wanted.plan_share) for one in document["best"])
    text = " ".join(call(job, "--cluster", a).stdout.split())
    rows = f"{wanted.count} published ones of {wanted.sources} sources ({wanted.like})"
    assert rows in text
    assert equal > 1
    assert f"the first {equal} cannot be told apart" in text
    kinds = [
        sum(one["plan"][axis] > 1 for axis in ("data", "tensor", "pipeline", "context", "expert"))
        for one in document["best"][:equal]
    ]
    assert document["not_told_apart"] == equal
    assert kinds[document["simplest"] - 1] == min(kinds)
    assert "the simplest of them is" in text


def test_no_plan_says_what_its_stack_cannot_do():
    """Megatron-LM overlaps gradients since August 2023."""
    model = load_model("gpt3-1.3b")
    space = SearchSpace(num_gpus=8, global_batch=64)
    for name, beside in (("a100-megatron", False), ("h100-nemo", True)):
        cluster = load_cluster(name)
        found = search_plans(model, cluster.device, cluster.fabric, space=space, top=5)
        assert {one.plan.data_overlap for one in found.best if one.plan.data > 1} == {beside}
