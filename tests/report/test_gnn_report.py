"""Graph runs in the report: read from files alone, in all three forms."""

import io
import json
import re

import pytest

from fivefold.errors import DataError
from fivefold.report import build_report, print_page, render_html, report_page, report_text
from fivefold.report.format import UNKNOWN
from fivefold.report.page import DataTable

STAGES = {"compute": 6.0, "data": 2.0, "validation": 1.0, "checkpoint": 0.5, "other": 0.5}


def manifest(mode="disk", label="GraphSAGE, packed on disk"):
    dataset = {"name": "debian", "nodes": 1000, "edges": 9000, "dim": 128, "dtype": "float32"}
    dataset |= {"row_bytes": 512, "classes": 4, "train": 600, "valid": 200, "test": 200}
    return {
        "schema": 1,
        "kind": "gnn",
        "fivefold": "0.1.0",
        "mode": mode,
        "model": "sage",
        "label": label,
        "world_size": 1,
        "seed": 3,
        "num_parameters": 1234,
        "command": ["fivefold", "gnn", "train", "a b.toml"],
        "dataset": dataset,
    }


def counts(epochs, rows):
    return {
        "rows": {level: epochs * number for level, number in rows.items()},
        "row_bytes": 512,
        "requests": epochs * 10,
        "bytes_read": epochs * 102_400,
        "cold_bytes": epochs * 51_200,
        "stage_s": {"read cold rows": 3.0 * epochs, "wait for a buffer": 1.0},
        "wait_s": 2.0,
    }


def write_run(folder, *, mode="disk", label="GraphSAGE, packed on disk", epochs=2, end=True):
    folder.mkdir(parents=True)
    rows = {"device": 0, "host": 60, "shared": 30, "private": 10}
    rows = rows if mode == "disk" else {"memory": 100}
    (folder / "manifest.json").write_text(json.dumps(manifest(mode, label)))
    (folder / "config.toml").write_text("[model]\nname = 'sage'\n")
    plan = {"read_bytes_per_epoch": 102_400}
    lines = []
    if mode == "disk":
        (folder / "plan.txt").write_text("Plan <1>: 10 batches\n")
        lines += [{"event": "prepare", "seconds": {"sample": 1.0, "pack": 2.0}, "plan": plan}]
    for epoch in range(1, epochs + 1):
        at = {"step": 5 * epoch, "wall_s": 5.0 * epoch, "epoch": epoch, "stages": STAGES}
        score = {"accuracy": 0.5 + epoch / 10, "loss": 1.0, "nodes": 200}
        lines += [
            {"event": "train", **at, "loss": 2.0 / epoch, "accuracy": 0.5, "nodes": 60},
            {"event": "epoch", **at, "loss": 1.0, "accuracy": 0.5, "data": counts(epoch, rows)},
            {"event": "validation", **at, **score, "test_accuracy": 0.45 + epoch / 10},
        ]
    if end:
        lines.append(lines[-1] | {"event": "end", "reason": "finished"})
    text = "".join(json.dumps({"step": 0, "wall_s": 0.0} | line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def text_of(report):
    file = io.StringIO()
    print_page(report_text(report), file=file)
    return file.getvalue()


def test_the_figures_follow_from_the_files(tmp_path):
    write_run(tmp_path / "a")
    (summary,) = build_report([tmp_path]).graph_summaries
    assert (summary.epochs, summary.wall_s, summary.epoch_s) == (2, 10.0, 4.0)
    assert summary.waiting == 0.25
    assert summary.hit_rates == {"device": 0, "host": 0.6, "shared": 0.3, "private": 0.1}
    assert summary.amplification == 2.0
    assert summary.bytes_per_epoch == summary.predicted_bytes_per_epoch == 102_400
    assert (summary.valid_accuracy, summary.test_accuracy) == (0.7, 0.65)
    assert summary.best_epoch == 2


def test_a_run_that_stopped_within_an_epoch_counts_whole_ones(tmp_path):
    run = write_run(tmp_path / "a", end=False)
    more = {"step": 15, "wall_s": 15.0, "epoch": 3, "reason": "stopped"}
    end = {"event": "end", **more, "stages": {name: 2 * s for name, s in STAGES.items()}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    rows = {"host": 90, "private": 10}
    result = {"schema": 1, "label": "x", "epochs": 2, "wall_s": 15.0, "steps": 15}
    (run / "result.json").write_text(json.dumps(result | {"data": counts(4, rows)}))
    (summary,) = build_report([run]).graph_summaries
    assert (summary.status, summary.epochs) == ("stopped", 2)
    assert summary.epoch_s == 4.0  # and not the time of three epochs over two
    assert summary.bytes_per_epoch == 102_400


def test_the_text_compares_modes_and_names_the_bottleneck(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", mode="memory", label="GraphSAGE, in memory", epochs=1, end=False)
    text = " ".join(text_of(build_report([tmp_path])).split())
    assert "test accuracy 0.6500 at the best validation (0.5500 for GraphSAGE, in memory)" in text
    assert "Training waited for data 25 % of an epoch: the data path is the" in text
    assert "GraphSAGE, in memory (unfinished)" in text
    assert "60 % / 30 % / 10 %" in text
    bar = re.search(r"packed on disk +(C+)(w+)(v+)(k+)(\.+) 10 s", text)
    assert [len(part) for part in bar.groups()] == [36, 12, 6, 3, 3]


def test_the_page_is_whole_and_escaped(tmp_path):
    write_run(tmp_path / "a", label="Graph <b>SAGE</b>")
    page = render_html(report_page(build_report([tmp_path])))
    assert "Graph &lt;b&gt;SAGE&lt;/b&gt;" in page
    assert "Plan &lt;1&gt;: 10 batches" in page
    for part in ("Graph neural networks", "Where the rows came from", "plot-graph-accuracy-epoch"):
        assert part in page
    assert "host cache: 61.4 kB" in page
    assert "fivefold gnn train 'a b.toml'" in page
    assert "There is nothing to report" not in page
    assert not re.search(r"(src|href)=[\"']http", page.split("<script>")[0])


def test_json_has_the_graph_runs_and_text_runs_stay_as_they_were(tmp_path):
    write_run(tmp_path / "a")
    values = json.loads(build_report([tmp_path]).to_json())
    assert values["runs"] == []
    assert values["graph_runs"][0]["data"]["requests"] == 20


def test_a_killed_run_is_read_as_far_as_it_got(tmp_path):
    run = write_run(tmp_path / "a", end=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    report = build_report([run])
    assert report.graph_runs[0].status == "unfinished"
    assert "the last line is torn" in text_of(report)
    assert report.graph_summaries[0].epochs == 2


def test_damage_is_an_error(tmp_path):
    run = write_run(tmp_path / "a")
    (run / "manifest.json").write_text(json.dumps(manifest() | {"world_size": 0}))
    with pytest.raises(DataError, match="world_size"):
        build_report([run])
    (run / "manifest.json").write_text(json.dumps(manifest() | {"schema": 9}))
    with pytest.raises(DataError, match="schema 9"):
        build_report([run])


@pytest.mark.parametrize(
    ("epochs", "requests", "shown"), [(0, 10, UNKNOWN), (2, 10, "10"), (2, 0, "0")]
)
def test_requests_are_those_of_whole_epochs(tmp_path, epochs, requests, shown):
    run = write_run(tmp_path / "a", epochs=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    read = {"requests": 2 * requests, "bytes_read": 2 * requests * 10_240}
    data = counts(2, {"host": 60, "private": 40}) | read
    lines = [line | {"data": data} if line["event"] == "epoch" else line for line in lines]
    lines = [line for line in lines if epochs or line["event"] != "epoch"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"schema": 1, "label": "x", "epochs": epochs, "wall_s": 15.0, "steps": 10}
    (run / "result.json").write_text(json.dumps(result | {"data": data}))
    page = report_page(build_report([tmp_path]))
    tables = [
        part for section in page.sections for part in section.parts if isinstance(part, DataTable)
    ]
    (table,) = (table for table in tables if ("requests per epoch", "") in table.columns)
    assert table.rows[0][table.columns.index(("requests per epoch", ""))] == shown
