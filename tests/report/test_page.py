"""Pages of every part: complete in themselves, escaped, every piece where its numbers say."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.report import render_html
from fivefold.report._html import curve_data, range_rows, round_step, timeline_svg
from fivefold.report.page import (
    BarChart,
    BarRow,
    Curve,
    CurveChart,
    DataTable,
    Decision,
    DecisionLog,
    Folded,
    LaneLoad,
    LaneSpan,
    Page,
    PageSection,
    Picture,
    RangeChart,
    RangeRow,
    SideBySide,
    TextBlock,
    Timeline,
    TimelineLane,
)

LEFT, RIGHT = 170.0, 992.0  # where the stretch of a timeline begins and ends


def span(start_s, end_s, **more):
    parts = {"kind": "forward", "title": "t"} | more
    return LaneSpan(start_s=start_s, end_s=end_s, **parts)


def whole_page():
    lanes = (
        TimelineLane(name="compute", group="<job>", spans=(span(0.0, 1.0), span(0.5, 2.0))),
        TimelineLane(
            name="link",
            loads=(LaneLoad(kind="job0", title="a", times_s=(0.0, 2.0), shares=(0.25,)),),
        ),
    )
    parts = (
        DataTable(columns=(("job", "its name"), ("time", "")), rows=(("a & b", "1 s"),)),
        BarChart(rows=(BarRow(label="x", total="3 s", segments=(("compute", 3.0, "3"),)),)),
        RangeChart(
            rows=(RangeRow(label="V", value=0.5, low=0.4, high=0.6, text="0.5"),),
            marks=(("B0", 1.0),),
        ),
        Timeline(lanes=lanes, start_s=0.0, end_s=2.0, caption="clock"),
        DecisionLog(
            decisions=(
                Decision(
                    who="tasks",
                    about="a",
                    decision="fifo",
                    alternatives=(("fifo", 1.0), ("priority", 2.0)),
                    chosen="fifo",
                    inputs=(("CostQuote.time_s", "collectives"),),
                    allowed_by=("V",),
                ),
                Decision(who="flows", about="all jobs", decision="classes", taken=False),
            )
        ),
        Picture(title="links", caption="how", content=b"<svg/>"),
        SideBySide(parts=(TextBlock(text="<typed>", verbatim=True), TextBlock(text="told"))),
        Folded(title="more", part=TextBlock(text="unfolded")),
    )
    section = PageSection(heading="All", parts=parts, how="read it")
    return Page(title="a < b", finding="10 % sooner.", sections=(section,), command="fivefold")


def test_the_page_is_complete_in_itself_and_escaped():
    text = render_html(whole_page())
    assert text.lstrip().startswith("<!doctype html>")
    assert "<script" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", text)
    for shown in ("a &lt; b", "a &amp; b", "&lt;job&gt;", "10\u00a0% sooner", "CostQuote.time_s"):
        assert shown in text
    assert "<job>" not in text
    assert "<pre>&lt;typed&gt;</pre>" in text
    assert "<details><summary>more</summary>" in text
    assert text.count("not taken") == 1
    assert re.search(r'class="option taken"><span>fifo</span><i style="width:50.0%">', text)


def test_parts_without_content_leave_no_heading():
    empty = PageSection(heading="Nothing here", parts=(DataTable(columns=(), rows=()),))
    told = PageSection(heading="Only words", parts=(), how="too many to draw")
    text = render_html(Page(title="t", finding="f", sections=(empty, told)))
    assert "Nothing here" not in text
    assert "too many to draw" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataTable(columns=(("a", ""),), rows=(("1", "2"),)),
        lambda: RangeRow(label="V", value=1.0, low=2.0, high=1.0, text=""),
        lambda: RangeRow(label="V", value=float("nan"), low=0.0, high=1.0, text=""),
        lambda: LaneLoad(kind="k", title="t", times_s=(0.0,), shares=(1.0,)),
        lambda: Timeline(lanes=(), start_s=1.0, end_s=1.0),
        lambda: Curve(name="c", x=(1.0,), y=()),
        lambda: Curve(name="c", x=(float("inf"),), y=(0.0,)),
        lambda: CurveChart(
            key="c", x_name="", y_name="", curves=(Curve(name="c", x=(0,), y=(1,)),), x_log=True
        ),
    ],
)
def test_numbers_that_cannot_be_drawn_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()


def drawn_boxes(timeline):
    """Return x, y, width and height of each box of a drawn timeline."""
    found = re.findall(
        r'<rect class="box [^"]*" x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"',
        timeline_svg(timeline),
    )
    return [tuple(map(float, box)) for box in found]


moments = st.floats(0, 10, allow_nan=False)


@given(ends=st.lists(st.tuples(moments, moments).map(sorted), max_size=12))
def test_boxes_lie_in_proportion_and_never_on_one_another(ends):
    lane = TimelineLane(name="l", spans=tuple(span(a, b) for a, b in ends))
    boxes = drawn_boxes(Timeline(lanes=(lane,), start_s=2.0, end_s=7.0))
    inside = [(a, b) for a, b in ends if b > 2.0 and a < 7.0]
    assert len(boxes) == len(inside)
    widths = sorted((min(b, 7.0) - max(a, 2.0)) * (RIGHT - LEFT) / 5 for a, b in inside)
    assert sorted(box[2] for box in boxes) == pytest.approx(
        [max(0.2, width) for width in widths], abs=0.02
    )
    for number, (x, y, width, _) in enumerate(boxes):
        assert LEFT <= x <= RIGHT
        for other_x, other_y, other_width, _ in boxes[number + 1 :]:
            apart = x + width <= other_x + 0.3 or other_x + other_width <= x + 0.3
            assert apart or y != other_y


def test_loads_are_stacked_to_the_share_of_the_capacity():
    loads = (
        LaneLoad(kind="job0", title="a", times_s=(0.0, 1.0, 2.0), shares=(0.25, 0.5)),
        LaneLoad(kind="job1", title="b", times_s=(1.0, 3.0), shares=(0.5,)),
    )
    lane = TimelineLane(name="l", loads=loads)
    drawn = timeline_svg(Timeline(lanes=(lane,), start_s=0.0, end_s=4.0))
    place = re.search(r'<rect class="row" x="170" y="([^"]+)" width="822" height="([^"]+)"', drawn)
    top, height = map(float, place.groups())
    bottom, unit = top + height, (RIGHT - LEFT) / 4
    first, second = (
        [float(n) for n in re.findall(r"[\d.]+", path)]
        for path in re.findall(r' d="(M[^"]+)"', drawn)
    )
    # x, bottom, top, width, bottom of each slab
    assert first == pytest.approx(
        [
            *(LEFT, bottom, bottom - height / 4, unit, bottom),
            *(LEFT + unit, bottom, bottom - height / 2, unit, bottom),
        ],
        abs=0.01,
    )
    half = bottom - height / 2
    assert second == pytest.approx(
        [LEFT + unit, half, top, unit, half, LEFT + 2 * unit, bottom, half, unit, bottom],
        abs=0.01,
    )


def test_bars_are_shares_of_the_longest_of_the_track_or_of_themselves():
    rows = tuple(
        BarRow(label=n, total=n, segments=(("compute", size / 2, n), ("other", size / 2, n)))
        for n, size in (("a", 2), ("b", 1))
    )
    for full, shares in ((None, [0.5, 0.25]), (4.0, [0.25, 0.125]), (0.0, [0.5, 0.5])):
        chart = BarChart(rows=rows, full=full)
        assert [chart.shares(row) for row in rows] == [(share, share) for share in shares]
    nothing = BarRow(label="a", total="", segments=())
    page = Page(
        title="t",
        finding="f",
        sections=(PageSection(heading="No bars", parts=(BarChart(rows=(nothing,)),)),),
    )
    assert "No bars" not in render_html(page)


def test_ranges_are_percent_of_the_largest():
    rows = (RangeRow(label="V", value=0.5, low=0.25, high=0.75, text=""),)
    drawn = range_rows(RangeChart(rows=rows, marks=(("B0", 1.0),)))
    mark, value, low, width, _ = map(float, re.findall(r"(?:left|width):([\d.]+)%", drawn))
    assert mark == pytest.approx(100 / 1.03, abs=1e-3)
    assert (value / mark, low / mark, width / mark) == pytest.approx((0.5, 0.25, 0.5), abs=1e-3)


def test_a_curve_s_data_are_its_points_to_five_digits():
    curves = (
        Curve(name="</script>", x=(1, 2.0000001), y=(123456.7, 1 / 3), texts=("a", "b")),
        *(Curve(name=str(n), x=(1,), y=(1,)) for n in range(8)),
    )
    chart = CurveChart(key="c", x_name="x", y_name="y", curves=curves, x_ticks=((1, "one"),))
    data = curve_data(chart)
    assert (data["curves"][0]["x"], data["curves"][0]["y"]) == ([1, 2], [123460, 0.33333])
    assert data["x"]["ticks"] == [[1, "one"]]
    looks = {(curve["colour"], curve["dash"]) for curve in data["curves"]}
    assert len(looks) == len(curves)
    page = Page(title="t", finding="f", sections=(PageSection(heading="h", parts=(chart,)),))
    text = render_html(page)
    assert text.count("</script>") == 2  # the data, the drawing
    assert 'id="plot-c"' in text


@given(length=st.floats(1e-9, 1e9), most=st.integers(2, 12))
def test_a_round_step_is_the_smallest_that_fits(length, most):
    step = round_step(length, most=most)
    assert length / step <= most * (1 + 1e-9)
    assert length / step >= most / 2.5 * (1 - 1e-9)
