"""Jobs files, placement, ablation and the two commands."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.codesign import CoDesigns, ablate, load_jobs, plan_cluster, synthetic_jobs
from fivefold.codesign.exports import timeline_of
from fivefold.codesign.workloads import place_jobs
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import HostSpec, leaf_spine, switch

JOBS = """
[[jobs]]
id = "a"
gpus = 2
compute = "300 ms"
gradients = "1 GB"
iterations = 3
layers = 2

[[jobs]]
id = "b"
ranks = [3, 1]
compute = 0.6
gradients = 500_000_000
iterations = 2
arrival = "1 s"
"""


@pytest.fixture
def jobs_file(tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text(JOBS)
    return path


def test_jobs_of_a_file(jobs_file):
    a, b = load_jobs(jobs_file, switch(4))
    assert (a.ranks, b.ranks) == ((0, 2), (3, 1))  # a goes where b is not
    assert a.compute_s == pytest.approx(0.3)
    assert a.gradient_bytes == 10**9
    assert [layer.backward_s / layer.forward_s for layer in a.layers] == pytest.approx([2.0] * 2)
    assert (b.arrival_s, b.iterations, len(b.layers)) == (1.0, 2, 4)


@pytest.mark.parametrize(
    ("change", "error", "message", "hint"),
    [
        (("gpus = 2", ""), ConfigurationError, "must name its ranks or its number", "gpus"),
        (("compute", "compte"), ConfigurationError, "compte", "compute"),
        (('"1 GB"', '"1 apple"'), ConfigurationError, "apple", "unit"),
        (("iterations = 3", "iterations = 0"), ConfigurationError, "at least 1; got 0", "iterat"),
        (("gpus = 2", "gpus = 3"), InfeasibleError, "needs 3 ranks, and 2 of 4", "2 or fewer"),
        (("[3, 1]", "[3, 9]"), InfeasibleError, "rank 9", "fewer"),
        (('id = "b"', 'id = "a"'), ConfigurationError, "two jobs are called 'a'", "name"),
        ((JOBS, "[[job]]\n"), ConfigurationError, "'job'", "jobs"),
        ((JOBS, ""), ConfigurationError, "describes no jobs", "[[jobs]]"),
        ((JOBS, "jobs = 3"), ConfigurationError, "describes no jobs", "[[jobs]]"),
        ((JOBS, "[[jobs]]"), ConfigurationError, "jobs[0].id is missing", "jobs.id: name"),
        (('"300 ms"\ngradients = "1 GB"', '"0 s"\ngradients = 0'), ConfigurationError,
         "takes no time", "give it compute"),
        (('gpus = 2\ncompute = "300 ms"', 'gpus = 1\ncompute = "0 s"'), ConfigurationError,
         "takes no time", "two or more ranks"),
        (("layers = 2", "weight = inf"), ConfigurationError, "weight", ""),
    ],
)  # fmt: skip
def test_errors_of_a_jobs_file(jobs_file, change, error, message, hint):
    jobs_file.write_text(JOBS.replace(*change))
    with pytest.raises(error) as caught:
        load_jobs(jobs_file, switch(4))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_whole_hosts_come_before_parts_of_hosts():
    topology = leaf_spine(3, leaves=1, spines=1, host=HostSpec(gpus=4))
    placed = place_jobs(topology, {"a": 4, "b": 2, "c": 4, "d": 2})
    assert placed == {
        "a": (0, 1, 2, 3), "b": (4, 5), "c": (8, 9, 10, 11), "d": (6, 7),
    }  # fmt: skip
    drawn = [place_jobs(topology, {"a": 4}, policy="random", seed=s)["a"] for s in range(9)]
    assert len(set(drawn)) == 3
    assert all(ranks[0] % 4 == 0 for ranks in drawn)


def test_drawn_jobs_depend_on_the_seed_only():
    topology = switch(16)
    once, again, other = (synthetic_jobs(topology, number=4, seed=s, sizes=(4,)) for s in (1, 1, 2))
    assert once == again != other
    assert len({rank for job in once for rank in job.ranks}) == 16
    with pytest.raises(InfeasibleError):
        synthetic_jobs(topology, number=1, seed=0, sizes=(32,))
    for iterations in (0, 1.5):
        with pytest.raises(ConfigurationError, match="iterations of job 'job0'"):
            synthetic_jobs(topology, number=1, seed=0, sizes=(2,), iterations=iterations)


@settings(max_examples=4, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from([CoDesigns.none(), CoDesigns.all()]),
    st.permutations("wxyz"),
)
def test_simulated_times_do_not_depend_on_what_jobs_are_called(seed, co_designs, names):
    cluster = leaf_spine(8, leaves=4, spines=2, host=HostSpec(gpus=2), bandwidth="12.5 GB/s")
    jobs = synthetic_jobs(cluster, number=4, seed=seed, sizes=(2, 4), iterations=3)
    renamed = [replace(job, job_id=name) for job, name in zip(jobs, names, strict=True)]
    first, second = (
        plan_cluster(cluster, own, co_designs, seed=seed).outcome.completion_s
        for own in (jobs, renamed)
    )
    assert [first[job.job_id] for job in jobs] == [second[name] for name in names]


def test_an_ablation_has_a_row_for_each_combination_and_nobody_worse():
    topology = leaf_spine(6, leaves=3, spines=2, host=HostSpec(gpus=2), bandwidth="10 GB/s")
    calls = []
    rows = ablate(
        topology,
        lambda seed: synthetic_jobs(topology, number=3, seed=seed, sizes=(4,), iterations=4),
        seeds=[0, 1],
        combinations=[CoDesigns.none(), CoDesigns(vertical=True), CoDesigns.all()],
        progress=lambda done, total: calls.append((done, total)),
    )
    by_label = {row.label: row for row in rows}
    assert set(by_label) == {"none", "V", "V+H+II+HN", "B1", "B1+V+H+II+HN"}
    assert by_label["none"].to_null == 1.0
    assert by_label["B1"].to_best == 1.0
    assert by_label["V+H+II+HN"].jobs_worse == 0
    assert by_label["V+H+II+HN"].to_null <= 1.0
    assert by_label["B1+V+H+II+HN"].jobs_worse_than_best == 0
    assert all(row.seeds == 2 and row.jobs == 6 for row in rows)
    for row in rows:
        assert row.to_null_interval[0] <= row.to_null <= row.to_null_interval[1]
    assert calls[-1] == (8, 8)
    with pytest.raises(ConfigurationError, match="needs a seed"):
        ablate(topology, lambda _: [], seeds=[])


def test_a_timeline_is_of_the_jobs(jobs_file):
    topology = switch(4, bandwidth="1 GB/s")
    jobs = load_jobs(jobs_file, topology)
    found = plan_cluster(topology, jobs)
    events = timeline_of(found.outcome)["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"a", "b"}
    compute_us = sum(e["dur"] for e in bars if e["pid"] == 0 and e["tid"] == 0)
    assert compute_us == pytest.approx(0.3e6)
    assert any(event["name"].startswith("reduce") for event in bars)


def test_simulate_shows_and_writes(jobs_file, tmp_path):
    cluster = ["--cluster", "switch:4,bandwidth=1GB/s"]
    shown = CliRunner().invoke(app, ["simulate", str(jobs_file), *cluster])
    assert shown.exit_code == 0, shown.output
    assert "Jobs complete in 2.6 s on average" in shown.output
    folder = tmp_path / "out"
    result = CliRunner().invoke(
        app,
        ["simulate", str(jobs_file), *cluster, "--co-designs", "V+H", "--json", "--output",
         str(folder)],
    )  # fmt: skip
    record = json.loads(result.stdout)
    assert set(record["jobs"]) == {"a", "b"}
    assert record["worse"] == []
    written = {path.name for path in folder.iterdir()}
    assert written == {"plan.json", "decisions.jsonl", "timeline.json", "msccl"}


def test_simulate_names_jobs_that_share_ranks(jobs_file):
    jobs_file.write_text(JOBS.replace("gpus = 2", "ranks = [0, 1]"))
    shown = CliRunner().invoke(app, ["simulate", str(jobs_file), "--cluster", "switch:4"])
    assert shown.exit_code == 0
    assert "a and b share 1 rank (1): only the network is shared" in shown.stderr


def test_simulate_of_a_gpus_name_asks_how_many(jobs_file):
    shown = CliRunner().invoke(app, ["simulate", str(jobs_file), "--cluster", "h100-nemo"])
    assert isinstance(shown.exception, ConfigurationError)
    assert "h100-nemo:16" in shown.exception.hint


@pytest.mark.parametrize("option", ["--output", "--report", "--chakra"])
def test_simulate_looks_where_it_writes_before_it_plans(jobs_file, option, monkeypatch):
    monkeypatch.setattr("fivefold.codesign.plan_cluster", lambda *_, **__: pytest.fail("planned"))
    there = str(jobs_file / "below")
    shown = CliRunner().invoke(
        app, ["simulate", str(jobs_file), "--cluster", "switch:4", option, there]
    )
    assert isinstance(shown.exception, ConfigurationError)
    assert "is a file" in str(shown.exception)


def test_ablate_draws_jobs_and_writes_a_page(tmp_path):
    page = tmp_path / "ablation.html"
    result = CliRunner().invoke(
        app,
        ["ablate", "--cluster", "fat_tree:4", "--seeds", "1", "--number", "2", "--sizes", "2",
         "--iterations", "2", "--report", str(page)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "V+H+II+HN" in result.output
    assert page.stat().st_size > 5000


def test_bad_options_are_refused(jobs_file):
    line = ["simulate", str(jobs_file), "--cluster", "switch:4"]
    result = CliRunner().invoke(app, [*line, "--co-designs", "V+X"])
    assert isinstance(result.exception, ConfigurationError)
    assert "no co-design 'X'" in result.exception.message
    result = CliRunner().invoke(app, [*line, "--start", "good"])
    assert result.exit_code == 2
    assert re.search("good.*null.*best", result.output, re.DOTALL)
