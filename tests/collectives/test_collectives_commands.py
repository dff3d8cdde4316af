"""``fivefold collectives``: files that go in and come out, exit codes, two-line errors."""

from __future__ import annotations

import json
import sys

import pytest

from fivefold.cli import main


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fivefold", "collectives", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


def made(run, name):
    words = ("all_gather", "ring:4", "--method", "library", "--size", "1MB", "--output", name)
    code, out, _ = run("synthesize", *words, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["time_s"] >= facts["bound_s"] > 0
    return name


@pytest.mark.parametrize("name", ["a.json", "a.xml", "a.plan.json"])
def test_what_is_made_is_right_and_runs(run, name):
    file = made(run, name)
    code, out, _ = run("verify", file, "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "right"
    code, out, _ = run("run", file)
    assert code == 0
    assert "right" in out


def test_pictures(run, tmp_path):
    file = made(run, "a.json")
    assert run("draw", file, "--output", "chart.png", "--loads", "loads.svg")[0] == 0
    assert (tmp_path / "chart.png").stat().st_size > 5000
    assert (tmp_path / "loads.svg").read_text().lstrip().startswith("<?xml")


def test_prices(run):
    words = ("all_reduce", "ring:4", "--sizes", "1KB,4MB", "--bandwidth", "100 MB/s", "--json")
    code, out, _ = run("bench", *words)
    assert code == 0
    small, large = json.loads(out)
    assert small["predicted_s"] <= large["predicted_s"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("verify", "none.json"), 1, "none.json cannot be read"),
        (("run", "none.xml"), 1, "none.xml cannot be read"),
        (("bench", "all_reduce"), 1, "neither a topology nor are there ranks"),
        (("synthesize", "all_gather", "nowhere:4"), 1, "nowhere"),
        (("draw", "program.xml"), 1, "holds a program"),
        (("verify", "broken.xml"), 1, "line 1"),
    ],
)
def test_errors_take_two_lines(run, tmp_path, words, code, message):
    (tmp_path / "broken.xml").write_text("<algo>")
    (tmp_path / "program.xml").write_text(
        '<algo name="x" nchunksperloop="1" nchannels="1" ngpus="1" coll="allreduce">'
        '<gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0"/></algo>'
    )
    got, out, err = run(*words)
    assert got == code
    assert message in err
    assert out == ""
    assert len(err.strip().splitlines()) <= 2
