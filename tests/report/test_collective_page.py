"""The page of a synthesized collective: complete in itself, escaped, right figures."""

import base64
import json
import re

import pytest

from fivefold.errors import DataError
from fivefold.report import (
    CollectivePage,
    MethodRow,
    Picture,
    SizeCurve,
    render_collective_html,
    write_collective_html,
)

SIZES = (1e3, 1e6, 1e9)


def page(**changes):
    parts = {
        "title": "all-gather of 1 MB",
        "finding": "It takes 3 ms.",
        "time_s": 3e-3,
        "bound_s": 2e-3,
        "bound_reason": "1 MB must go into <gpu0> at 500 MB/s.",
        "asked": (("topology", "<b>ring</b>"),),
        "answer": (("chunks", "4"),),
        "methods": (
            MethodRow(name="library", note="ring", time_s=6e-3, solver_s=0.1),
            MethodRow(name="trees", note="trees", time_s=3e-3, solver_s=1.5, chosen=True),
            MethodRow(name="flow", note="does not do it", time_s=None, solver_s=0.0),
        ),
        "curves": (
            SizeCurve(name="a & b", sizes_bytes=SIZES, times_s=(1e-3, 2e-3, 3.0)),
            SizeCurve(name="own", sizes_bytes=SIZES, times_s=(2e-3, 3e-3, 2.0), kind="synthesized"),
            SizeCurve(name="least", sizes_bytes=SIZES, times_s=(1e-3, 1e-3, 2.0), kind="bound"),
        ),
        "fastest": (("1 kB to 2 MB", "a & b"), ("2 MB to 1 GB", "own")),
        "pictures": (Picture(title="links", caption="how", content=b"<svg>1</svg>"),),
        "recipes": (("Keep it", "fivefold collectives verify 'a b.json'"),),
    }
    return CollectivePage(**parts | changes)


def figures_of(text):
    found = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL
    )
    return json.loads(found.group(1))


def body_of(text):
    return text[: text.index("<script")]


def test_the_page_asks_nothing_of_the_network():
    text = render_collective_html(page())
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", body_of(text))
    picture = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    assert base64.b64decode(picture.group(1)) == b"<svg>1</svg>"


def test_all_text_is_escaped():
    text = body_of(render_collective_html(page()))
    assert "<b>ring</b>" not in text
    assert "&lt;b&gt;ring&lt;/b&gt;" in text
    assert "&lt;gpu0&gt;" in text


def test_gaps_and_tiles_follow_from_the_times():
    text = body_of(render_collective_html(page()))
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', text)
    assert tiles == [
        ("3 ms", "predicted time"),
        ("2 ms", "lower bound"),
        ("50 %", "above the bound"),
        ("2.00x", "the speed"),
    ]
    rows = re.findall(r"<tr( class=\"marked\")?><th scope=\"row\">(\w+).*?</tr>", text)
    assert [(bool(marked), name) for marked, name in rows][:3] == [
        (False, "library"),
        (True, "trees"),
        (False, "flow"),
    ]
    assert "<td>6 ms</td><td>200.0 %</td>" in text


def test_what_meets_the_bound_is_called_optimal():
    text = body_of(render_collective_html(page(bound_s=3e-3)))
    assert "optimal, and proved to be" in text
    assert page(bound_s=3e-3).gap == 0.0
    assert page(bound_s=0.0).gap is None
    assert "above the bound</span>" not in body_of(render_collective_html(page(bound_s=0.0)))


def test_curves_are_times_and_times_over_the_bound():
    figures = figures_of(render_collective_html(page()))
    assert sorted(figures) == ["collective-gap", "collective-time"]
    times = {trace["name"]: trace["y"] for trace in figures["collective-time"]["data"]}
    assert times["own"] == [2e-3, 3e-3, 2.0]
    assert "a &amp; b" in times
    shares = {trace["name"]: trace["y"] for trace in figures["collective-gap"]["data"]}
    assert shares["own"] == pytest.approx([2, 3, 1])
    assert "least" not in shares
    assert figures["collective-time"]["layout"]["xaxis"]["type"] == "log"


def test_parts_that_are_not_there_leave_no_headings():
    bare = CollectivePage(title="t", finding="f", time_s=0.0, bound_s=0.0)
    text = render_collective_html(bare)
    assert "No bound is known" in text
    assert not any(word in text for word in ("Methods tried", "Other message sizes", "plotly"))


def test_a_page_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        write_collective_html(page(), tmp_path / "file" / "page.html")
    assert write_collective_html(page(), tmp_path / "new" / "page.html").stat().st_size > 1000
