"""The page of a plan: complete in itself, escaped, every piece where its numbers say."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.report import (
    BarChart,
    BarRow,
    Choice,
    ChoiceLog,
    DataTable,
    LaneLoad,
    LaneSpan,
    Picture,
    PlanPage,
    PlanSection,
    PointChart,
    RangeChart,
    RangeRow,
    Timeline,
    TimelineLane,
    render_plan_html,
)
from fivefold.report._plan_charts import (
    bar_rows,
    point_picture,
    range_picture,
    round_step,
    timeline_picture,
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
        ChoiceLog(
            choices=(
                Choice(
                    who="tasks",
                    about="a",
                    decision="fifo",
                    alternatives=(("fifo", 1.0), ("priority", 2.0)),
                    chosen="fifo",
                    inputs=(("CostQuote.time_s", "collectives"),),
                    allowed_by=("V",),
                ),
                Choice(who="flows", about="all jobs", decision="classes", taken=False),
            )
        ),
        PointChart(x_name="s", y_name="GiB", points=((1.0, 2.0, "p"), (3.0, 1.0, "q"))),
        Picture(title="links", caption="how", content=b"<svg/>"),
    )
    section = PlanSection(heading="All", parts=parts, how="read it")
    return PlanPage(title="a < b", finding="10 % sooner.", sections=(section,), command="fivefold")


def test_the_page_is_complete_in_itself_and_escaped():
    text = render_plan_html(whole_page())
    assert text.lstrip().startswith("<!doctype html>")
    assert "<script" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", text)
    for shown in ("a &lt; b", "a &amp; b", "&lt;job&gt;", "10\u00a0% sooner", "CostQuote.time_s"):
        assert shown in text
    assert "<job>" not in text
    assert text.count("not taken") == 1
    assert re.search(r'class="option taken"><span>fifo</span><i style="width:50.0%">', text)


def test_parts_without_content_leave_no_heading():
    empty = PlanSection(heading="Nothing here", parts=(DataTable(columns=(), rows=()),))
    told = PlanSection(heading="Only words", parts=(), how="too many to draw")
    text = render_plan_html(PlanPage(title="t", finding="f", sections=(empty, told)))
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
        lambda: PointChart(x_name="", y_name="", points=((float("inf"), 0.0, "p"),)),
    ],
)
def test_numbers_that_cannot_be_drawn_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()


moments = st.floats(0, 10, allow_nan=False)


@given(ends=st.lists(st.tuples(moments, moments).map(sorted), max_size=12))
def test_boxes_lie_in_proportion_and_never_on_one_another(ends):
    lane = TimelineLane(name="l", spans=tuple(span(a, b) for a, b in ends))
    drawn = timeline_picture(Timeline(lanes=(lane,), start_s=2.0, end_s=7.0))
    inside = [(a, b) for a, b in ends if b > 2.0 and a < 7.0]
    assert len(drawn.boxes) == len(inside)
    widths = sorted((min(b, 7.0) - max(a, 2.0)) * (RIGHT - LEFT) / 5 for a, b in inside)
    assert sorted(box.width for box in drawn.boxes) == pytest.approx(
        [max(0.2, width) for width in widths], abs=0.01
    )
    for number, box in enumerate(drawn.boxes):
        assert LEFT <= box.x <= RIGHT
        for other in drawn.boxes[number + 1 :]:
            apart = box.x + box.width <= other.x + 0.3 or other.x + other.width <= box.x + 0.3
            assert apart or box.y != other.y


def test_loads_are_stacked_to_the_share_of_the_capacity():
    loads = (
        LaneLoad(kind="job0", title="a", times_s=(0.0, 1.0, 2.0), shares=(0.25, 0.5)),
        LaneLoad(kind="job1", title="b", times_s=(1.0, 3.0), shares=(0.5,)),
    )
    lane = TimelineLane(name="l", loads=loads)
    drawn = timeline_picture(Timeline(lanes=(lane,), start_s=0.0, end_s=4.0))
    (row,) = drawn.rows
    bottom, unit = row.y + row.height, (RIGHT - LEFT) / 4
    first, second = ([float(n) for n in re.findall(r"[\d.]+", area.path)] for area in drawn.areas)
    # x, bottom, top, width, bottom of each slab
    assert first == pytest.approx(
        [
            *(LEFT, bottom, bottom - row.height / 4, unit, bottom),
            *(LEFT + unit, bottom, bottom - row.height / 2, unit, bottom),
        ],
        abs=0.01,
    )
    half = bottom - row.height / 2
    assert second == pytest.approx(
        [LEFT + unit, half, row.y, unit, half, LEFT + 2 * unit, bottom, half, unit, bottom],
        abs=0.01,
    )


def test_bars_and_ranges_are_percent_of_the_longest():
    rows = tuple(
        BarRow(label=n, total=n, segments=(("compute", size, n),))
        for n, size in (("a", 2), ("b", 1))
    )
    assert [segments[0][1] for *_, segments in bar_rows(BarChart(rows=rows))] == [100.0, 50.0]
    assert bar_rows(BarChart(rows=(BarRow(label="a", total="", segments=()),))) == []
    chart = RangeChart(
        rows=(RangeRow(label="V", value=0.5, low=0.25, high=0.75, text=""),), marks=(("B0", 1.0),)
    )
    drawn = range_picture(chart)
    ((_, value, low, width, _),), ((_, mark),) = drawn.rows, drawn.marks
    assert mark == pytest.approx(100 / 1.03, abs=1e-3)
    assert (value / mark, low / mark, width / mark) == pytest.approx((0.5, 0.25, 0.5), abs=1e-3)


def test_points_keep_their_order_on_both_axes():
    drawn = point_picture(
        PointChart(
            x_name="", y_name="", points=((1, 5, "a"), (2, 1, "b"), (4, 3, "c")), marked=(1,)
        )
    )
    xs, ys = [p[0] for p in drawn.points], [p[1] for p in drawn.points]
    assert xs == sorted(xs)
    assert ys[1] > ys[2] > ys[0]  # upward is towards 0
    assert (xs[2] - xs[1]) / (xs[1] - xs[0]) == pytest.approx(2, abs=0.01)
    assert [p[2] for p in drawn.points] == [False, True, False]


@given(length=st.floats(1e-9, 1e9), most=st.integers(2, 12))
def test_a_round_step_is_the_smallest_that_fits(length, most):
    step = round_step(length, most=most)
    assert length / step <= most * (1 + 1e-9)
    assert length / step >= most / 2.5 * (1 - 1e-9)
