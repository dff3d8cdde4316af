"""The page: complete in itself, escaped, and with the figures that the summaries hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from fivefold.report import build_report, render_html, report_page, write_html
from fivefold.report.page import Timeline

_LOADING = {"src", "srcset", "poster", "data", "background", "action", "formaction", "xlink:href"}


class _Page(HTMLParser):
    """Collects what would make a browser ask the network, the text, and the tag balance."""

    def __init__(self, text):
        super().__init__()
        self.references, self.tags, self.text, self.ids = [], [], [], []
        self._raw = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._raw = tag if tag in ("script", "style") else None
        for name, value in attrs:
            if name in _LOADING or (tag == "link" and name == "href"):
                self.references.append((tag, name, value))
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, _tag):
        self._raw = None

    def handle_data(self, data):
        if self._raw == "style" and re.search(r"@import|url\(", data):
            self.references.append(("style", "", data[:80]))
        if self._raw is None:
            self.text.append(data)


def page_of(folder):
    return render_html(report_page(build_report([folder])))


def timelines_of(folder):
    (section,) = [s for s in report_page(build_report([folder])).sections if s.key == "timeline"]
    return [part for part in section.parts if isinstance(part, Timeline)]


@pytest.fixture
def page(comparison):
    return page_of(comparison)


def test_nothing_is_loaded_from_anywhere(page):
    assert _Page(page).references == []


def test_a_policy_in_the_page_forbids_requests(page):
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_a_page_is_small_and_its_script_is_there_once(page):
    assert len(page) < 100_000
    assert _Page(page).tags.count("script") == 2  # the data, the drawing


def test_sections_are_there_and_ids_are_unique(page):
    ids = _Page(page).ids
    sections = ["comparison", "loss", "seconds", "timeline", "link", "configuration", "machine"]
    assert set(sections) <= set(ids)
    assert len(ids) == len(set(ids))


def test_table_shows_the_hand_computed_figures(page):
    text = " ".join(" ".join(_Page(page).text).split())
    cells = ["7,710", "2.82x", "94 %", "2.6 %", "all-reduce 500 ms", "88 %"]
    cells += [r"1\.5[78] MB", "1.900", "1.900", "18 s", "19 s"]
    assert re.search(r"\s*".join(cells), text)


def test_bars_are_as_long_as_the_seconds(page):
    ddp = page[page.index('aria-label="DDP 50 s"') :]
    widths = re.findall(r'k-(\w+)" style="width:([\d.]+)%', ddp)[:3]
    assert widths == [("compute", "32.0"), ("exposed_communication", "64.0"), ("validation", "4.0")]


def test_curves_hold_the_validation_points(page):
    data = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1]
    wall = json.loads(data)["wall"]
    ddp = next(curve for curve in wall["curves"] if curve["name"] == "DDP" and curve["key"])
    assert (ddp["x"], ddp["y"]) == ([12.5, 25.0, 37.5, 50.0], [3.5, 3.0, 2.5, 2.0])


def test_everything_written_by_others_is_escaped(tmp_path, make_run):
    evil = "<script>alert(1)</script>\"'&"
    make_run(
        tmp_path / "run",
        "co2",
        label=evil,
        command=["x", evil],
        machine={"cpu": evil},
        lab={"hosts": 2, "shaped": False, "reason": evil},
    )
    (tmp_path / "run" / "config.toml").write_text('[run]\nname = "</pre><script>"\n')
    page = page_of(tmp_path)
    parsed = _Page(page)
    assert parsed.tags.count("script") == 2
    assert "<script>alert" not in page
    assert parsed.tags.count("pre") == 3


def test_an_unshaped_link_is_said_at_the_top(tmp_path, make_run):
    lab = {"hosts": 2, "shaped": False, "reason": "no network namespaces here"}
    make_run(tmp_path / "run", "co2", lab=lab)
    page = page_of(tmp_path)
    warning = page.index('<p class="warn" role="note">Unshaped: no network namespaces here')
    assert warning < page.index('id="comparison"')


def test_a_run_that_just_began_still_gives_a_page(tmp_path, make_run):
    folder = make_run(tmp_path / "co2", "co2", finished=False)
    for name in ("metrics.jsonl", "ranks/rank0.jsonl", "ranks/rank1.jsonl", "config.toml"):
        (folder / name).unlink()
    page = page_of(folder)
    assert "There is nothing to report yet." in page
    assert "there is no curve to draw" in page
    assert "<script>" not in page


def test_timelines_share_one_scale_of_two_and_a_half_rounds(comparison):
    timelines = timelines_of(comparison)
    # A CO2 round is 8 steps of 0.25 s and a boundary of 1/16 s: 2.5 of them are 5.15625 s.
    assert {round(t.end_s - t.start_s, 6) for t in timelines} == {5.15625}
    ddp = timelines[1]
    boxes = [span for lane in ddp.lanes for span in lane.spans]
    for box in boxes:
        assert box.end_s > ddp.start_s
        assert box.start_s < ddp.end_s
    waits = {round(b.end_s - b.start_s, 3) for b in boxes if b.kind == "exposed_communication"}
    steps = {round(b.end_s - b.start_s, 3) for b in boxes if b.kind == "compute"}
    assert (waits, steps) == ({0.5}, {0.25})


def test_only_some_ranks_are_drawn(tmp_path, make_run):
    make_run(tmp_path / "ddp", "ddp", world_size=6, hosts=6)
    (timeline,) = timelines_of(tmp_path)
    assert timeline.caption == "2 more ranks are not drawn."
    assert sum(bool(lane.group) for lane in timeline.lanes) == 4


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["/opt/x/fivefold/__main__.py", "train", "a b.toml"],
         "python -m fivefold train 'a b.toml'"),
        (["/opt/x/bin/fivefold", "train", "a.toml"], "<pre>fivefold train a.toml</pre>"),
        ([], "<pre>not recorded</pre>"),
    ],
)  # fmt: skip
def test_commands_are_shown_as_one_types_them(tmp_path, make_run, command, shown):
    make_run(tmp_path / "co2", "co2", command=command)
    assert shown in page_of(tmp_path)


def test_what_scrolls_is_reached_by_the_keyboard(page):
    boxes = re.findall(r'<div class="wide"[^>]*>', page)
    assert boxes
    assert all('tabindex="0"' in box and 'aria-label="' in box for box in boxes)


_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(_BROWSER is None, reason="needs Chromium to run the page's script")
def test_a_browser_draws_the_curves_under_the_policy(comparison, tmp_path):
    page = write_html(report_page(build_report([comparison])), tmp_path / "report.html")
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000",
        "--enable-logging=stderr",
    ]  # fmt: skip
    command = [_BROWSER, *options, "--dump-dom", page.as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    for axis in ("wall", "step", "tokens", "messages"):
        drawn = answer.stdout[answer.stdout.index(f'id="plot-{axis}"') :]
        assert drawn.index('class="main-svg"') < drawn.index("</figure>")
        assert 'stroke="#d55e00"' in drawn[: drawn.index("</figure>")] or axis == "messages"
    assert not re.search(r"CONSOLE.*(error|violates|refused)", answer.stderr, re.IGNORECASE)
