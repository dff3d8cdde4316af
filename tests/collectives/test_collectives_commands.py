"""``fivefold collectives``: files that go in and come out, exit codes, two-line errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fivefold.cli import main
from fivefold.cli._collectives_report import (
    Price,
    Prices,
    fastest_ranges,
    loads_title,
    price_sizes,
    used_shares,
)
from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.schedules import Schedule, all_gather, evaluate
from fivefold.network.topology import ring, torus
from fivefold.units import parse_bytes


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


def test_the_limits_of_the_output_are_part_of_the_search(run):
    """A ring's chunks are two steps of a block: 8,192 ones are best, and what fits is written."""
    network = ("all_reduce", "ring:4", "--bandwidth", "1GB/s", "--latency", "0s", "--size", "64MB")
    words = (*network, "--method", "trees", "--json", "--output")
    found = {}
    for name in ("free.json", "small.xml"):
        code, out, _ = run("synthesize", *words, name)
        assert code == 0
        found[name] = json.loads(out)
    assert found["small.xml"]["chunks"] <= 128
    assert found["small.xml"]["time_s"] <= 1.25 * found["free.json"]["time_s"]
    code, _, err = run("synthesize", *words, "large.xml", "--chunks", "4096")
    assert code == 3
    assert re.search(r"steps|transfers", err)
    assert "fewer chunks" in err


@pytest.mark.parametrize(
    ("collective", "words", "in_place"),
    [
        ("all_reduce", (), "1"),
        ("all_gather", (), "1"),
        ("reduce_scatter", (), "1"),
        ("all_gather", ("--out-of-place",), "0"),
        ("all_to_all", (), "0"),
    ],
)
def test_programs_are_in_place_where_they_can(run, collective, words, in_place):
    """MSCCL's executor compares these two attributes with the pointers of the call."""
    words = (collective, "ring:4", "--method", "library", "--output", "a.xml", *words)
    assert run("synthesize", *words)[0] == 0
    text = Path("a.xml").read_text()
    assert f'inplace="{in_place}" outofplace="{1 - int(in_place)}"' in text
    assert run("verify", "a.xml")[0] == 0
    assert run("run", "a.xml")[0] == 0


@pytest.mark.parametrize("name", ["a.json", "a.xml"])
def test_what_is_made_is_right_and_runs(run, name):
    file = made(run, name)
    code, out, _ = run("verify", file, "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "right"
    code, out, _ = run("run", file)
    assert code == 0
    assert "right" in out


def test_a_plan_for_mscclpp_is_written_and_not_read(run, tmp_path):
    file = made(run, "a.plan.json")
    assert len(json.loads((tmp_path / file).read_text())["gpus"]) == 4
    for command in ("verify", "run", "draw"):
        code, _, err = run(command, file, *(("--output", "a.png") if command == "draw" else ()))
        assert code == 1
        assert "written and not read" in err


def test_pictures(run, tmp_path):
    file = made(run, "a.json")
    assert run("draw", file, "--output", "chart.png", "--loads", "loads.svg")[0] == 0
    assert (tmp_path / "chart.png").stat().st_size > 5000
    assert (tmp_path / "loads.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.nightly
def test_a_report_is_complete_in_itself(run, tmp_path):
    words = ("all_gather", "torus:3x3", "--bandwidth", "25 GB/s", "--latency", "1 us")
    more = ("--size", "100MB", "--method", "matching", "--report", "page.html", "--json")
    code, out, _ = run("synthesize", *words, *more)
    assert code == 0
    assert json.loads(out)["report"] == "page.html"
    text = (tmp_path / "page.html").read_text()
    assert len(re.findall(r'<figure class="picture"[^>]*><img', text)) == 2
    for part in ("all-gather of 100 MB on torus:3x3", "must reach", "Methods tried", "matching"):
        assert part in text
    ranges = re.findall(r'<th scope="row">(1 kB|[\d.]+ \w+) to ([\d.]+ \w+)</th>', text)
    assert ranges[0][0] == "1 kB"
    assert ranges[-1][1] == "1 GB"
    assert "fivefold collectives verify all_gather.json" in text
    assert "MSCCL_XML_FILES=all_gather.xml" in text
    assert "register_algorithm" in text
    data = re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1]
    figures = {key: figure["curves"] for key, figure in json.loads(data).items()}
    assert set(figures) == {"collective-time", "collective-gap"}
    times = {curve["name"]: curve["y"] for curve in figures["collective-time"]}
    for curve in figures["collective-gap"]:
        over = [a / b for a, b in zip(times[curve["name"]], times["lower bound"], strict=True)]
        assert curve["y"] == pytest.approx(over, rel=1e-4)
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', text)
    assert [what for _, what in tiles][:3] == ["predicted time", "lower bound", "above the bound"]


@pytest.mark.parametrize(("topology", "size"), [("ring:1", "1MB"), ("ring:2", "0B")])
def test_a_report_of_next_to_nothing(run, tmp_path, topology, size):
    words = ("all_gather", topology, "--size", size, "--method", "library")
    assert run("synthesize", *words, "--report", "page.html")[0] == 0
    assert "How to run it" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--report", "file/page.html"), "file is a file"),
        (("--output", "file/a.json"), "file is a file"),
        (("--cache", "file/cache"), "file is a file"),
        (("--output", "a.txt"), "no known ending"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_search(run, tmp_path, words, said):
    (tmp_path / "file").write_text("")
    code, out, err = run("synthesize", "all_gather", "ring:4", *words)
    assert (code, out) == (2 if "a.txt" in words else 1, "")
    first, second = err.splitlines()  # nothing of a search
    assert said in first
    assert second.startswith("hint: ")


def test_folders_of_outputs_are_made(run, tmp_path):
    words = ("--method", "library", "--output", "new/a.xml", "--report", "other/page.html")
    assert run("synthesize", "all_gather", "ring:3", *words)[0] == 0
    assert (tmp_path / "new" / "a.xml").exists()
    assert (tmp_path / "other" / "page.html").exists()


@pytest.mark.parametrize("name", ["broadcast", "reduce", "scatter", "gather"])
def test_any_rank_may_be_the_root(run, name):
    words = (name, "mesh:2x2", "--root", "3", "--method", "library", "--output", "a.json")
    assert run("synthesize", *words)[0] == 0
    assert json.loads((run("verify", "a.json", "--json"))[1])["verdict"] == "right"
    assert run("synthesize", name, "mesh:2x2", "--root", "4")[0] == 1
    schedule = Schedule.from_json(Path("a.json").read_text())
    assert schedule.collective.root == 3
    # The root only sends, or only receives.
    first = {"broadcast": schedule.sources, "scatter": schedule.sources}.get(name)
    assert 3 in (schedule.targets if first is None else first)
    assert 3 not in (schedule.sources if first is None else schedule.targets)


def test_a_root_that_means_nothing_is_refused(run):
    code, _, err = run("synthesize", "all_gather", "ring:3", "--root", "1")
    assert code == 1
    assert "all_gather has no root" in err


def test_chunks_are_taken_as_asked(run):
    words = ("all_reduce", "ring:4", "--chunks", "8", "--method", "library", "--json")
    assert json.loads(run("synthesize", *words)[1])["chunks"] == 8


def test_without_a_lower_bound_nothing_is_said_to_meet_it(run, tmp_path):
    nodes = ", ".join(f'{{name = "{name}", kind = "gpu"}}' for name in "abc")
    links = ", ".join(
        f'{{source = "{a}", target = "{b}", bandwidth = "1 GB/s"}}' for a, b in ("ab", "bc")
    )
    (tmp_path / "one_way.toml").write_text(
        f'name = "one way"\nnodes = [{nodes}]\nlinks = [{links}]\n'
    )
    words = ("synthesize", "broadcast", "one_way.toml", "--method", "library")
    code, out, err = run(*words, "--json")
    facts = json.loads(out)
    assert (code, facts["gap"]) == (0, None)
    assert facts["time_s"] > facts["bound_s"] == 0
    assert "no lower bound is known" in err
    assert "nothing is faster" not in err
    assert re.search("gap +unknown", run(*words)[1])


SKETCH = 'name = "one way out"\nboxes = 2\n[connections]\n0 = [1]\n'


@pytest.mark.nightly
def test_a_sketch_decides_who_sends_between_boxes(run, tmp_path):
    (tmp_path / "sketch.toml").write_text(SKETCH)
    words = ("all_gather", "ndv2:2", "--sketch", "sketch.toml", "--time-limit", "5s")
    assert run("synthesize", *words, "--output", "a.json")[0] == 0
    schedule = Schedule.from_json(Path("a.json").read_text())
    pairs = zip(schedule.sources.tolist(), schedule.targets.tolist(), strict=True)
    assert {pair for pair in pairs if pair[0] // 8 != pair[1] // 8} == {(0, 9), (8, 1)}


@pytest.mark.parametrize(
    ("sketch", "said"),
    [
        ("sketch.toml", "sketch.toml does not exist"),
        ("none.json", "none.json does not exist"),
        ("sk9", "there is no published sketch 'sk9'"),
    ],
)
def test_a_sketch_that_is_not_there(run, sketch, said):
    code, _, err = run("synthesize", "all_gather", "ndv2:2", "--sketch", sketch)
    assert code == 1
    assert said in err


@pytest.mark.parametrize("size", ["0B", "10GB"])
def test_sizes_cross_where_the_times_are_equal(size):
    network = torus((3, 3), bandwidth="25 GB/s", latency="1 us")
    found = build_algorithm("direct", all_gather(9), network)
    prices = price_sizes(found, network, parse_bytes(size))
    assert prices.sizes_bytes[0] == 1e3
    assert prices.sizes_bytes[-1] == max(1e9, parse_bytes(size))
    assert not any(price.name == "direct" for price in prices.curves)  # it is the found one
    ranges = fastest_ranges(prices, "synthesized", "library")
    assert len({name for _, name in ranges}) == len(ranges)
    line = Price("line", "library", tuple(3e-6 + s / 1e9 for s in prices.sizes_bytes))
    steep = Price("steep", "library", tuple(1e-6 + s / 5e8 for s in prices.sizes_bytes))
    both = Prices(prices.sizes_bytes, (line, steep))
    (before, first), (after, second) = fastest_ranges(both, "library")
    assert (first, second) == ("steep", "line")
    start, _, end = before.partition(" to ")
    assert (start, after.partition(" to ")[0]) == ("1 kB", end)
    assert parse_bytes(end) == pytest.approx(2000, rel=0.05)  # both take 5 us at 2 kB


def test_use_of_links_is_a_share_of_their_capacity():
    network = ring(4, bandwidth="1 GB/s", latency="0 s")
    timing = evaluate(build_algorithm("ring", all_gather(4), network), size_bytes=4e9)
    shares = used_shares(network, timing)
    assert sorted(shares.tolist()) == [0.0] * 4 + [1.0] * 4  # one way round, without a pause
    assert "4 of 8 links are used" in loads_title(network, timing)


def test_prices(run):
    words = ("all_reduce", "ring:4", "--sizes", "1KB,4MB", "--bandwidth", "100 MB/s", "--json")
    code, out, _ = run("bench", *words)
    assert code == 0
    small, large = json.loads(out)
    assert small["predicted_s"] <= large["predicted_s"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("verify", "none.json"), 2, "'none.json' does not exist"),
        (("run", "none.xml"), 2, "'none.xml' does not exist"),
        (("synthesize", "all_reduce", "ring:4", "--target", "gpu"), 1, "no target 'gpu'"),
        (("synthesize", "all_to_all", "ring:4", "--in-place"), 2, "cannot run in place"),
        (("bench", "all_reduce"), 2, "neither a topology nor are there ranks"),
        (("synthesize", "all_gather", "nowhere:4"), 2, "nowhere"),
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
