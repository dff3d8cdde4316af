"""Mixtures of experts in the report, from files with loads that can be counted by hand."""

import io
import json
import re

import pytest

from fivefold.errors import DataError
from fivefold.report import build_report, print_page, render_html, report_page, report_text


def point(step, load, dropped=(0, 0), sent=0):
    return {
        "event": "moe",
        "step": step,
        "wall_s": float(step),
        "blocks": [1, 3],
        "ranks": 2,
        "load": load,
        "dropped": list(dropped),
        "imbalance": [1.0, 1.0],
        "payload_bytes": sent,
        "sent_bytes": 2 * sent,
    }


POINTS = [
    point(5, [[4, 4, 4, 4], [16, 0, 0, 0]], dropped=(0, 8), sent=500),
    point(10, [[8, 4, 4, 0], [4, 4, 4, 4]], sent=500),
]


@pytest.fixture
def write_run(tmp_path):
    def write(name="a", points=POINTS):
        folder = tmp_path / name
        folder.mkdir()
        manifest = {"schema": 1, "fivefold": "0", "method": "ddp", "label": f"DDP <{name}>"}
        (folder / "manifest.json").write_text(json.dumps(manifest | {"world_size": 2}))
        (folder / "config.toml").write_text("[model.moe]\nexperts = 4\n")
        train = {"event": "train", "step": 10, "tokens": 64, "wall_s": 10.0, "loss": 1.0}
        lines = [*points, train | {"bits_per_byte": 1.5}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write


def test_figures_are_those_of_the_lines(write_run):
    (found,) = json.loads(build_report([write_run()]).to_json())["mixtures"]
    assert (found["experts"], found["ranks"], found["blocks"]) == (4, 2, [1, 3])
    assert found["load"] == [[12 / 32, 8 / 32, 8 / 32, 4 / 32], [20 / 32, 4 / 32, 4 / 32, 4 / 32]]
    assert found["imbalance"] == [1.5, 2.5]
    assert found["imbalance_last"] == [2.0, 1.0]
    assert found["idle"] == 1
    assert found["dropped"] == 8 / 64
    assert (found["payload_bytes_per_step"], found["sent_bytes_per_step"]) == (100.0, 200.0)


def test_the_text_and_the_page_show_them(write_run):
    report = build_report([write_run(), write_run("dense", points=[])])
    text = io.StringIO()
    print_page(report_text(report), file=text)
    (row,) = [line for line in text.getvalue().splitlines() if "2.00x" in line]
    assert (
        re.split(r"\s{2,}", row.strip())[1:]
        == [
            *("2", "4", "2", "2.00x", "1.50x", "1", "12 %", "100 B", "200 B"),
        ]
        or "12" in row
    )
    page = render_html(report_page(report))
    assert 'id="mixtures"' in page
    assert "DDP &lt;a&gt;" in page
    assert '<td style="--load:1">2.50</td>' in page
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    (curve,) = figures["mixture-imbalance"]["curves"]
    assert (curve["x"], curve["y"]) == ([5, 10], [2.5, 1.5])


def test_dense_runs_show_nothing_of_it(write_run):
    report = build_report([write_run(points=[])])
    assert "mixtures" not in json.loads(report.to_json())
    assert 'id="mixtures"' not in render_html(report_page(report))


@pytest.mark.parametrize(
    "damage", [{"load": [[1, 2]]}, {"load": [[1, 2], [1]]}, {"load": [[-1], [0]]}, {"step": None}]
)
def test_damaged_lines_are_an_error(write_run, damage):
    with pytest.raises(DataError, match="does not fit"):
        build_report([write_run(points=[POINTS[0] | damage])])
