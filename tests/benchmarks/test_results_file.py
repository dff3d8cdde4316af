"""The results file: its fields, its checks, its table; the topics of a folder."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import find_topics
from benchmarks.results_file import (
    BenchmarkRow,
    describe_machine,
    median_and_spread,
    read_results,
    write_results,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fivefold.errors import ConfigurationError, DataError

ROW = BenchmarkRow(
    case="200 Mbit/s, tau 8",
    metric="share of compute-only rate",
    unit="%",
    ours=97.5,
    spread=(96.0, 98.25),
    peers={"DDP": 24.0},
    limit=100.0,
    target=95.0,
    met=True,
)


def test_the_file_has_exactly_the_agreed_fields(tmp_path):
    write_results(tmp_path / "deep" / "a.json", topic="optim/a", rows=[ROW], command="python a.py")
    values = json.loads((tmp_path / "deep" / "a.json").read_text())
    assert list(values) == ["topic", "date", "commit", "command", "machine", "versions", "rows"]
    assert values["rows"] == [
        {
            "case": "200 Mbit/s, tau 8",
            "metric": "share of compute-only rate",
            "unit": "%",
            "ours": 97.5,
            "spread": [96.0, 98.25],
            "peers": {"DDP": 24.0},
            "limit": 100.0,
            "target": 95.0,
            "met": True,
        }
    ]
    assert values["command"] == "python a.py"
    assert values["versions"]["python"] == platform.python_version()
    assert read_results(tmp_path / "deep" / "a.json").rows == (ROW,)


def test_no_host_name_is_written(tmp_path):
    write_results(tmp_path / "a.json", topic="a", rows=[ROW], command="c")
    written = (tmp_path / "a.json").read_text() + (tmp_path / "a.md").read_text()
    assert platform.node() not in written
    assert set(describe_machine()) == {"cpu", "cores", "memory_bytes", "system"}


def test_the_table_has_a_column_per_peer(tmp_path):
    other = BenchmarkRow(case="a|b", metric="m", unit="s", ours=2.0, peers={"SlowMo": 3.0},
                         target=1.0, met=False)  # fmt: skip
    write_results(tmp_path / "a.json", topic="a", rows=[ROW, other])
    lines = (tmp_path / "a.md").read_text().splitlines()
    ours = "| 200 Mbit/s, tau 8 | share of compute-only rate | % | 97.5 | 96 to 98.25 | 24 |  "
    assert lines[-4:] == [
        "| case | metric | unit | ours | spread | DDP | SlowMo | limit | target |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ours + "| 100 | 95 (met) |",
        r"| a\|b | m | s | 2 |  |  | 3 |  | 1 (not met) |",
    ]


def test_the_commit_is_that_of_the_scripts_checkout(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    script = tmp_path / "a.py"
    script.touch()
    for command in (["init", "-q"], ["add", "a.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    monkeypatch.setattr(sys, "argv", [str(script), "--rate", "50 Mbit/s"])
    monkeypatch.chdir(tmp_path)
    results = write_results(tmp_path / "a.json", topic="a", rows=[])
    assert results.commit == head.stdout.strip()
    assert results.command == "python a.py --rate '50 Mbit/s'"
    script.write_text("changed")
    dirty = write_results(tmp_path / "a.json", topic="a", rows=[])
    assert dirty.commit == head.stdout.strip() + "-dirty"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ours": float("nan")}, "finite"),
        ({"ours": 99.0}, "outside its spread"),
        ({"met": None}, "exactly where there is a target"),
        ({"colour": "blue"}, "Extra inputs"),
    ],
)
def test_rows_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        BenchmarkRow(**(ROW.model_dump() | change))


def test_two_rows_of_one_case_and_metric_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="two rows have case '200 Mbit/s, tau 8'"):
        write_results(tmp_path / "a.json", topic="a", rows=[ROW, ROW])


def test_the_path_must_be_json(tmp_path):
    with pytest.raises(ConfigurationError, match=r"is no \.json file"):
        write_results(tmp_path / "a.txt", topic="a", rows=[ROW])


def test_a_damaged_results_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"topic": "a"}')
    with pytest.raises(DataError, match=r"a\.json is no results file: date: Field required"):
        read_results(tmp_path / "a.json")


def test_median_and_spread_by_hand():
    assert median_and_spread([5.0, 1.0, 2.0, 9.0]) == (3.5, (1.0, 9.0))
    with pytest.raises(DataError, match="at least one"):
        median_and_spread([])
    with pytest.raises(DataError, match="finite"):
        median_and_spread([1.0, float("inf")])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_half_of_the_samples_lie_on_each_side_of_the_median(samples):
    median, (low, high) = median_and_spread(samples)
    assert 2 * sum(sample <= median for sample in samples) >= len(samples)
    assert 2 * sum(sample >= median for sample in samples) >= len(samples)
    assert all(low <= sample <= high for sample in samples)


@pytest.fixture
def folder(tmp_path):
    scripts = ["optim/hidden", "optim/learning", "optim/_common", "optim/_peers/ddp"]
    for name in [*scripts, "gpu/__main__", "gpu/results", "gpu/_rows"]:
        script = tmp_path / f"{name}.py"
        script.parent.mkdir(exist_ok=True, parents=True)
        script.write_text(f'"""Measures {name}.\n\nMore.\n"""\n')
    return tmp_path


def test_topics_are_the_scripts_with_their_newest_results(folder):
    results = folder / "results"
    write_results(results / "old.json", topic="optim/hidden", rows=[])
    old = json.loads((results / "old.json").read_text()) | {"date": "2020-01-01T00:00:00+00:00"}
    (results / "old.json").write_text(json.dumps(old))
    row = BenchmarkRow(case="a", metric="rate", unit="tokens/s", ours=2.0, spread=(1.0, 3.0),
                       peers={"DDP": 0.5}, limit=4.0, target=5.0, met=False)  # fmt: skip
    write_results(results / "new.json", topic="optim/hidden", rows=[row])
    write_results(results / "gpu" / "a.json", topic="gpu/a", rows=[row])
    gpu, hidden, learning = find_topics(folder)
    assert gpu.lines()[:2] == ["gpu: Measures gpu/__main__.", "  python -m benchmarks.gpu"]
    assert gpu.lines()[-1].startswith("  a: rate 2")
    assert hidden.lines()[:2] == [
        "optim/hidden: Measures optim/hidden.",
        "  python -m benchmarks.optim.hidden",
    ]
    assert hidden.lines()[-1] == (
        "  a: rate 2 tokens/s (1 to 3), DDP 0.5, limit 4, target 5 NOT met"
    )
    assert learning.lines()[-1] == "  no results yet"


def test_this_checkouts_benchmarks_and_their_results_can_be_read():
    topics = find_topics(Path(__file__).parents[2] / "benchmarks")
    assert {"optim/peers", "moe/cpu"} <= {topic.name for topic in topics}
    assert any(topic.results for topic in topics)
