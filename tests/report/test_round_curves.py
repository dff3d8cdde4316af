"""The curves over rounds: what is drawn, what is left out, and the page around them."""

from __future__ import annotations

import json
import re
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from fivefold.report import (
    build_report,
    print_page,
    read_run,
    render_html,
    report_page,
    report_text,
)
from fivefold.report._html import timeline_svg
from fivefold.report._records import Manifest, Metrics, RankTrace, Run, Span, SyncPoint, TauPoint
from fivefold.report._run_charts import round_charts, timeline_section
from fivefold.report.perfetto import trace_events

STEP_S = 0.25


def played(taus, *, rank=0, in_flight_s=0.5, fragments=1, name="all-reduce round"):
    """One rank that takes steps of 0.25 s and launches behind each round, fragment by fragment."""
    spans = []
    now_s = 0.0
    for number, tau in enumerate(taus):
        for step in range(tau):
            spans.append(Span("compute", f"step {number}.{step}", now_s, now_s + STEP_S))
            now_s += STEP_S
        title = f"{name} {number}"
        details = {"round": number, "fragment": number % fragments, "sent_bytes": 10**6}
        spans.append(Span("in_flight", title, now_s, now_s + in_flight_s, **details))
        if number + 1 == len(taus):
            spans.append(Span("wait", title, now_s, now_s + in_flight_s))
    return RankTrace(rank, tuple(spans))


def run_of(*ranks, method="co2", label="CO2", sync=(), tau=()):
    fields = {"schema": 1, "fivefold": "0", "method": method, "label": label, "world_size": 2}
    metrics = Metrics(sync=tuple(sync), tau=tuple(tau))
    manifest = Manifest(**fields)
    return Run(Path(method), method, label, manifest, metrics=metrics, ranks=ranks)


def figures_of(runs):
    return {chart.key: chart.curves for chart in round_charts(runs)}


def test_rounds_of_one_length_need_no_curve_of_their_length():
    run = run_of(played([4, 4, 4, 2]), played([4, 4, 4, 2], rank=1))
    figures = figures_of([run])
    assert list(figures) == ["messages", "sent"]
    waited, flown = figures["messages"]
    assert waited.y == (0, 0, 0, 0.5)
    assert flown.y == (0.5,) * 4
    assert flown.x == (1.0, 2.0, 3.0, 3.5)


def test_steps_of_each_round_with_the_decisions_and_the_ranks_that_differ():
    decision = TauPoint(
        step=8,
        wall_s=2.0,
        round=1,
        previous=4,
        tau=6,
        step_s=0.25,
        all_reduce_s=1.4,
        reason="exposed",
    )
    ranks = [played([4, 4, 6, 6]), played([4, 4, 3, 3], rank=1), played([4, 4, 6, 6], rank=2)]
    figure = figures_of([run_of(*ranks, tau=[decision])])["steps"]
    first, other, decisions = figure
    assert (first.y, other.y) == ((4, 4, 6, 6), (4, 4, 3, 3))
    assert (first.stepped, first.dash, other.dash) == (True, "", "6 4")
    assert (decisions.x, decisions.y) == ((2.0,), (6,))
    assert "round 1: tau 4 to 6, exposed" in decisions.texts[0]


def test_staggered_fragments_of_equal_rounds_need_no_curve_of_their_length():
    assert "steps" not in figures_of([run_of(played([4] * 12, fragments=4))])


def test_rounds_have_a_curve_of_their_length_where_more_than_the_last_differ():
    (curve,) = figures_of([run_of(played([4, 4, 6, 6]))])["steps"]
    assert curve.y == (4, 4, 6, 6)
    assert "steps" not in figures_of([run_of(played([4, 4, 4, 2]))])


def test_gap_and_bytes_come_from_the_engines_totals():
    points = [
        SyncPoint(step=step, wall_s=step, sent_bytes=step * 10**6, last_staleness_gap=gap)
        for step, gap in [(5, None), (10, 1.0), (15, 1.5)]
    ]
    figures = figures_of([run_of(sync=points)])
    assert list(figures) == ["gap", "sent"]
    assert (figures["gap"][0].x, figures["gap"][0].y) == ((10, 15), (1, 1.5))
    assert figures["sent"][0].y == (5, 10, 15)


def test_what_would_be_flat_or_empty_is_left_out():
    flat = [SyncPoint(step=n, wall_s=n, sent_bytes=0, last_staleness_gap=1.0) for n in range(3)]
    assert figures_of([run_of(sync=flat)]) == {}
    assert figures_of([run_of(method="ddp")]) == {}
    assert figures_of([]) == {}


def test_what_ddp_sent_is_added_up_from_its_messages():
    figures = figures_of([run_of(played([1, 2, 3]), method="ddp")])
    assert list(figures) == ["sent"]
    (curve,) = figures["sent"]
    assert (curve.x, curve.y) == ((1, 3, 6), (1, 2, 3))


def test_messages_counted_by_the_method_stand_in_the_place_of_the_least(comparison):
    path = comparison / "co2" / "result.json"
    result = json.loads(path.read_text())
    result["communication"]["sent_bytes"] = 64 * 400_000  # an int8 codec, say
    path.write_text(json.dumps(result))
    report = build_report([comparison])
    co2 = report.summaries[2]
    assert (co2.message_bytes_per_step, co2.payload_bytes_per_step) == (400_000, 1_500_000)
    page = render_html(report_page(report))
    bars = re.findall(r'class="bar" role="img" aria-label="[^"]*? ([\d.]+ [kM]B \w+)"', page)
    assert bars[-4:] == ["1.5 MB payload", "400 kB messages", *bars[-2:]]
    assert sum(bar.endswith("least") for bar in bars) == 1  # DDP's


def test_fragments_are_drawn_one_above_the_other_and_high_enough_for_their_names():
    run = run_of(played([4] * 12, in_flight_s=2.5, fragments=4))
    (timeline,) = timeline_section([run]).parts
    lane = next(lane for lane in timeline.lanes if lane.name == "in flight")
    assert {span.group for span in lane.spans} == {0, 1, 2, 3}
    assert "1 MB sent" in lane.spans[0].title
    drawn = re.findall(r'<rect class="box k-in_flight"[^>]* y="([\d.]+)"[^>]* height="([\d.]+)"',
                       timeline_svg(timeline))  # fmt: skip
    rows = sorted({float(y) for y, _ in drawn})
    assert {after - before for before, after in pairwise(rows)} == {12.0}
    assert {float(height) for _, height in drawn} == {12.0}
    assert re.search(r'<text class="in"[^>]*>round \d+</text>', timeline_svg(timeline))


def test_the_timeline_counts_steps_per_fragment():
    events = trace_events([played([4] * 8, fragments=2)])
    steps = {
        event["name"]: event["args"]["steps"]
        for event in events
        if "steps" in event.get("args", {})
    }
    # A fragment is sent every other round.
    assert steps == {
        "local steps of the round, fragment 0": 8,
        "local steps of the round, fragment 1": 8,
    }


@pytest.fixture
def logged(make_run, tmp_path):
    """A CO2 run that logged the engine's totals and a decision."""
    folder = make_run(tmp_path / "co2", "co2")
    sync = [
        {"event": "sync", "step": step, "wall_s": step / 4, "sent_bytes": sent, "tau": 8,
         "last_staleness_gap": 1.0 + step / 100, "rounds": step // 8, "unknown": [1]}
        for step, sent in zip(range(8, 65, 8), accumulate([10**7] * 8), strict=True)
    ]  # fmt: skip
    tau = {"event": "tau", "step": 16, "wall_s": 4.0, "round": 1, "previous": 6, "tau": 8}
    tau |= {"step_s": 0.25, "flight_s": 1.7, "reason": "<exposed>"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*sync, tau])
    return folder


def test_totals_and_decisions_are_read(logged):
    metrics = read_run(logged).metrics
    assert [point.sent_bytes for point in metrics.sync] == [10**7 * n for n in range(1, 9)]
    assert (metrics.tau[0].tau, metrics.tau[0].reason) == (8, "<exposed>")


def test_the_page_has_the_measured_overlap_and_a_place_for_each_curve(logged):
    page = render_html(report_page(build_report([logged])))
    for rank in range(2):
        assert f'aria-label="CO2 (tau 8), rank {rank} 88 % of 4 s"' in page
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    assert set(figures) == {"wall", "step", "tokens", "messages", "steps", "gap", "sent"}
    for name in figures:
        assert page.count(f'id="plot-{name}"') == 1
    assert "<exposed>" not in page


def test_a_page_without_rounds_has_no_section_of_them(tmp_path, make_run):
    page = render_html(report_page(build_report([make_run(tmp_path / "none", "none")])))
    assert 'id="rounds"' not in page
    assert 'id="overlap"' not in page


def test_the_text_names_each_ranks_share(comparison, tmp_path):
    with (tmp_path / "out.txt").open("w+") as file:
        print_page(report_text(build_report([comparison])), file=file)
        file.seek(0)
        lines = [" ".join(line.split()) for line in file]
    assert "DDP 20 %, 20 % of up to 40 s" in lines
    assert "CO2 (tau 8) 88 %, 88 % of up to 4 s" in lines


def test_spans_that_found_no_room_are_a_note(make_run, tmp_path):
    folder = make_run(tmp_path / "co2", "co2")
    path = folder / "ranks" / "rank1.jsonl"
    path.write_text(path.read_text().replace('"rank_end",', '"rank_end", "spans_dropped": 5000,'))
    assert read_run(folder).notes == (
        "rank 1: the timeline and what is measured from it end 5,000 spans early",
    )
