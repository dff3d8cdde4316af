"""``fivefold topology`` as a shell sees it."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from fivefold.cli import main
from fivefold.cli._topology import app
from fivefold.network.topology import parse_topology, read_topology
from fivefold.network.topology.text import catalogue


@pytest.fixture
def call():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_list_names_everything_that_can_be_given(call):
    text, known = call("list").stdout, catalogue()
    for name in (*known.machines, *known.generators, "lingjun:", "taccl:ndv2_1MB", ".toml"):
        assert name in text
    table = json.loads(call("list", "--json").stdout)
    assert set(table["machines"]) == set(known.machines)
    for example in table["generators"]:
        if not example.startswith("clos"):
            parse_topology(example)


def test_show_describes(call):
    text = call("show", "dgx_a100:2").stdout
    assert "16 on 2 hosts" in text
    assert "16 gpu -> nvswitch, 2.4 Tbit/s" in text
    assert "ForestColl" in text
    assert "2 us of latency" in call("show", "ring:4", "--latency", "1 us").stdout
    assert "2 x 200 Gbit/s" in call("show", "dgx1").stdout


def test_show_as_json(call):
    facts = json.loads(call("show", "dgx_h100:2", "--json").stdout)
    assert (facts["ranks"], facts["hosts"], facts["connected"]) == (16, 2, True)
    assert facts["fewest_out_bytes_per_s"] == 500e9
    assert sum(link["links"] for link in facts["links"]) == 64
    assert {ability["node"] for ability in facts["switches"]} == {
        "box0/nvswitch0",
        "box1/nvswitch0",
    }


def test_show_says_that_a_topology_is_cut(call, tmp_path):
    path = tmp_path / "cut.toml"
    nodes = '{ name = "a", kind = "gpu" }, { name = "b", kind = "gpu" }'
    path.write_text(f"nodes = [{nodes}]\nlinks = []\n")
    text = call("show", path).stdout
    assert "connected    NO: " in text
    assert "cannot be reached from" in text


def test_convert_writes_what_can_be_read(call, tmp_path):
    path = tmp_path / "t.toml"
    answer = call(
        "convert", "torus:3x3", "--output", path, "--bandwidth", "10 GB/s", "--name", "mine"
    )
    assert answer.exit_code == 0
    assert answer.stdout == ""
    found = read_topology(path)
    assert found.name == "mine"
    assert found == parse_topology("torus:3x3", bandwidth="10 GB/s")
    assert call("convert", path).stdout == path.read_text()


def test_draw_writes_a_picture(call, tmp_path):
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps([0.5] * 8))
    answer = call("draw", "ring:4", tmp_path / "ring.svg", "--loads", loads, "--title", "Loaded")
    assert answer.exit_code == 0
    assert "Loaded" in (tmp_path / "ring.svg").read_text()
    assert "picture" in answer.stderr


def run(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fivefold", "topology", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "toru:4"], "did you mean 'torus'"),
        (["show", "none.toml"], "does not exist"),
        (["convert", "fat_tree:3"], "must be even"),
        (["draw", "ring:4", "ring.bmp"], "use .png"),
    ],
)
def test_errors_are_two_lines(arguments, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, text = run(arguments, monkeypatch, capsys)
    assert code == 2
    assert words in text
    assert [line.partition(":")[0] for line in text.splitlines()] == ["error", "hint"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", '{"a": 1}', '["x"]', "3", "[1]"])
def test_loads_that_are_none(content, monkeypatch, capsys, tmp_path):
    loads = tmp_path / "loads.json"
    loads.write_text(content)
    arguments = ["draw", "ring:4", tmp_path / "a.png", "--loads", loads]
    code, text = run(arguments, monkeypatch, capsys)
    assert code == 1
    assert "loads" in text
