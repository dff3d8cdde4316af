"""Charts of training runs: loss, what happened round by round, and zoomed timelines.

Training is a thin line, validation a thick one with markers. Local steps, messages and waits are
what the ranks recorded, not what was configured. A chart is left out where it would be empty or a
flat line that the configuration says already. Timelines are drawn to one time scale, so that widths
compare; their stretch is long enough for a few rounds of the slowest cycle, lies near the middle of
the run, and avoids validation and checkpoints.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

from fivefold.report._records import RankTrace, Run, Span, TrainPoint, ValidationPoint
from fivefold.report._spans import LANE_CATEGORIES, RoundPoint, round_points, separate_fragments
from fivefold.report.format import CATEGORY_NAMES, MARKERS, run_colours, thinned
from fivefold.report.page import Curve, CurveChart, LaneSpan, PageSection, Timeline, TimelineLane
from fivefold.report.summary import final_bits_per_byte, validation_curve
from fivefold.units import format_bytes, format_duration_s

_TICKS = (0.5, 0.7, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20)
_AXES = {
    "wall": (
        "wall time (s)",
        (
            "Against wall time. What matters to whoever waits for the model: the curve further "
            "left gets there sooner. The dotted line is where DDP ended."
        ),
    ),
    "step": ("optimizer step", "Against step. Speed taken away: what each update is worth."),
    "tokens": ("tokens, all ranks", "Against tokens. What each token of text is worth."),
}
_BASELINES = ("none", "ddp")
_MOST_OTHER_RANKS = 7


def loss_charts(runs: Sequence[Run]) -> list[CurveChart]:
    """Return bits per byte against wall time, steps and tokens; empty without any metrics."""
    if not any(run.metrics.train or run.metrics.validation for run in runs):
        return []
    target = _ddp_target(runs)
    return [
        CurveChart(
            key=axis,
            x_name=name,
            y_name="bits per byte",
            curves=tuple(_loss_curves(runs, axis)),
            caption=caption,
            y_log=True,
            y_ticks=tuple((tick, f"{tick:g}") for tick in _TICKS),
            x_from_zero=True,
            marks=() if target is None else ((f"DDP's final: {target:.3f}", target),),
        )
        for axis, (name, caption) in _AXES.items()
    ]


def _loss_curves(runs: Sequence[Run], axis: str) -> list[Curve]:
    curves = []
    place = attrgetter("wall_s" if axis == "wall" else axis)
    for index, (run, colour) in enumerate(zip(runs, run_colours(runs), strict=True)):
        batches, judged = (
            [(place(point), point.bits_per_byte) for point in points if _drawable(point)]
            for points in (run.metrics.train, run.metrics.validation)
        )
        if batches:
            looks = {"colour": colour, "width": 1.2, "in_legend": False}
            curves.append(Curve.through(run.label, thinned(batches), **looks))
        if judged or run.metrics.train:
            looks = {"colour": colour, "width": 2.4, "marker": MARKERS[index % len(MARKERS)]}
            curves.append(Curve.through(run.label, judged, **looks))
    return curves


def _drawable(point: TrainPoint | ValidationPoint) -> bool:
    return math.isfinite(point.bits_per_byte) and point.bits_per_byte > 0  # the axis is logarithmic


def _ddp_target(runs: Sequence[Run]) -> float | None:
    ddp = next((run for run in runs if run.is_plain_ddp), None)
    if ddp is None or len(runs) < 2 or not validation_curve(ddp):
        return None
    target = final_bits_per_byte(ddp)
    return target if target is not None and math.isfinite(target) and target > 0 else None


def round_charts(runs: Sequence[Run]) -> list[CurveChart]:
    """Return the charts over rounds that have something to show."""
    pairs = list(zip(runs, run_colours(runs), strict=True))
    by_round = [pair for pair in pairs if pair[0].manifest.method not in _BASELINES]

    def chart(
        key: str, x_name: str, y_name: str, make: Any, of: Sequence[tuple[Run, str]],
        *, caption: str, y_from_zero: bool = True,
    ) -> CurveChart:  # fmt: skip
        return CurveChart(
            key=key, x_name=x_name, y_name=y_name, caption=caption, x_from_zero=True,
            y_from_zero=y_from_zero, curves=tuple(curve for pair in of for curve in make(*pair)),
        )  # fmt: skip

    charts = [
        chart(
            "messages", "wall time (s)", "seconds per message", _messages_in_flight, by_round,
            caption="Time in flight, and the part that was waited for. One point per message of "
            "rank 0. Where the filled area is flat, the message was hidden; where it rises, the "
            "round was too short for it, or the run was at its end.",
        ),
        chart(
            "steps", "wall time (s)", "local steps", _local_steps, by_round,
            caption="Local steps per round. Counted between launches. Diamonds are decisions; "
            "hover over one for the times that led to it. Dashed lines are ranks that took other "
            "numbers of steps than rank 0.",
        ),
        chart(
            "gap", "optimizer step", "staleness gap", _gap, by_round, y_from_zero=False,
            caption="Staleness gap. By how much a pseudo-gradient that arrives late was divided, "
            "at the last merge before each step shown.",
        ),
        chart(
            "sent", "optimizer step", "MB sent by rank 0", _sent, pairs,
            caption="Bytes sent. By rank 0 for the method's messages, added up over the run.",
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart.curves]


def _messages_in_flight(run: Run, colour: str) -> list[Curve]:
    points = thinned(_messages(run.ranks[0]) if run.ranks else [])
    if not points:
        return []
    start_s = _start_s(run)
    waited = [(point.launched_s - start_s, point.waited_s) for point in points]
    flown = [(point.launched_s - start_s, point.in_flight_s) for point in points]
    below = tuple(f"waited {y:.3g} s at {x:.1f} s" for x, y in waited)
    above = tuple(f"in flight {y:.3g} s at {x:.1f} s" for x, y in flown)
    looks: dict[str, Any] = {"width": 1.0, "dash": "2 3", "filled": True, "in_legend": False}
    return [
        Curve.through(run.label, waited, colour=colour, texts=below, **looks),
        Curve.through(run.label, flown, colour=colour, texts=above, width=1.6, marker="circle"),
    ]


def _local_steps(run: Run, colour: str) -> list[Curve]:
    by_rank = [_whole_rounds(rank) for rank in run.ranks]
    if not any(by_rank) or not (run.metrics.tau or _varies(by_rank)):
        return []
    start_s = _start_s(run)
    first = [point.local_steps for point in by_rank[0]]
    others = [points for points in by_rank[1:] if [p.local_steps for p in points] != first]
    curves = []
    for rank, points in enumerate([by_rank[0], *others[:_MOST_OTHER_RANKS]]):
        steps = [(point.launched_s - start_s, point.local_steps) for point in thinned(points)]
        looks: dict[str, Any] = {"width": 1.1, "dash": "6 4"} if rank else {"width": 2.2}
        looks |= {"colour": colour, "stepped": True, "in_legend": rank == 0}
        curves.append(Curve.through(run.label, steps, **looks))
    if run.metrics.tau:
        curves.append(_decisions(run, colour))
    return curves


def _decisions(run: Run, colour: str) -> Curve:
    points = [(decision.wall_s, decision.tau) for decision in run.metrics.tau]
    texts = tuple(
        f"round {d.round}: tau {d.previous} to {d.tau}, {d.reason}\n"
        f"communication {d.all_reduce_s:.3g} s, step {d.step_s:.3g} s"
        for d in run.metrics.tau
    )
    return Curve.through(
        run.label, points, colour=colour, texts=texts, width=0.0, marker="diamond", in_legend=False
    )


def _gap(run: Run, colour: str) -> list[Curve]:
    gaps = ((point.step, point.last_staleness_gap) for point in run.metrics.sync)
    points = [(step, gap) for step, gap in gaps if gap is not None and math.isfinite(gap)]
    return _whole_curve(run, points, colour) if any(gap != 1.0 for _, gap in points) else []


def _sent(run: Run, colour: str) -> list[Curve]:
    sizes = ((point.step, point.sent_bytes) for point in run.metrics.sync)
    points = [(step, size / 1e6) for step, size in sizes if size is not None]
    points = points or _sent_by_spans(run)
    return _whole_curve(run, points, colour) if any(size > 0 for _, size in points) else []


def _whole_curve(run: Run, points: Sequence[tuple[int, float]], colour: str) -> list[Curve]:
    return [Curve.through(run.label, thinned(points), colour=colour)]


def _sent_by_spans(run: Run) -> list[tuple[int, float]]:
    """Return what rank 0's messages add up to, for methods that keep no totals of their own."""
    messages = round_points(run.ranks[0]) if run.ranks else []
    sent = accumulate(point.sent_bytes or 0 for point in messages)
    return [(point.step, total / 1e6) for point, total in zip(messages, sent, strict=True)]


def _messages(rank: RankTrace) -> list[RoundPoint]:
    return [point for point in round_points(rank) if point.round is not None]


def _whole_rounds(rank: RankTrace) -> list[RoundPoint]:
    """Return the rank's messages without each fragment's first, whose round begins staggered."""
    points = _messages(rank)
    if not any(point.fragment for point in points):
        return points
    seen: set[int] = set()
    whole = []
    for point in points:
        if point.fragment in seen:
            whole.append(point)
        seen.add(point.fragment)
    return whole


def _varies(by_rank: Sequence[Sequence[RoundPoint]]) -> bool:
    """Return whether rounds differ in length, the partial one at the end aside."""
    return len({point.local_steps for points in by_rank for point in points[:-1]}) > 1


def _start_s(run: Run) -> float:
    return min(span.start_s for rank in run.ranks for span in rank.spans)


_MOST_RANKS = 4
_MOST_RANKS_OF_MANY_RUNS = 2
_MANY_RUNS = 4
_CYCLES = 2.5
_MOST_CANDIDATES = 200
_ROWS = (("training", None), ("in flight", "in_flight"), ("waiting", "wait"))
_TRAINING_LANES = ("compute", "data", "boundary", "validation", "checkpoint")
_TOUCHING_S = 1e-4  # spans of one thread may seem to overlap by the rounding of two clocks
_HOW = (
    " from the middle of each run, all to the same time scale. For each rank the upper lane is "
    "what its training thread did, the middle lane which messages were in flight on the network, "
    "and the lower lane when training stood still for them. Communication is hidden where a light "
    "blue box lies under blue computation with nothing orange beneath. The whole run is in the "
    "file timeline.json of each run's folder: open it in Perfetto (ui.perfetto.dev) or in "
    "chrome://tracing."
)


def timeline_section(runs: Sequence[Run]) -> PageSection | None:
    """Return a timeline per run that recorded one, all to one time scale; None without any."""
    drawn = [run for run in runs if any(rank.spans for rank in run.ranks)]
    cycles = [cycle for run in drawn if (cycle := _cycle_s(run)) is not None]
    if not cycles:
        return None
    window_s = _CYCLES * max(cycles)
    most_ranks = _MOST_RANKS if len(drawn) < _MANY_RUNS else _MOST_RANKS_OF_MANY_RUNS
    return PageSection(
        key="timeline",
        heading="Timeline of some rounds",
        how=format_duration_s(window_s) + _HOW,
        parts=tuple(
            _timeline(run, window_s, most_ranks=most_ranks, first=run is drawn[0]) for run in drawn
        ),
    )


def _cycle_s(run: Run) -> float | None:
    """Return seconds between two rounds; between two steps where the method has no rounds."""
    starts = _cycle_starts(run)
    gaps = [after - before for before, after in pairwise(starts) if after > before]
    return statistics.median(gaps) if gaps else None


def _cycle_starts(run: Run) -> list[float]:
    spans = next((rank.spans for rank in run.ranks if rank.spans), ())
    if run.manifest.method not in ("none", "ddp"):
        messages = separate_fragments(span for span in spans if span.lane == "in_flight")
        launches = [sorted(span.start_s for span in found) for found in messages.values()]
        if launches and len(launches[0]) > 1:
            return launches[0]
    first: dict[str, float] = {}
    for span in spans:
        if span.lane == "compute":
            first.setdefault(span.name, span.start_s)
    return sorted(first.values())


def _window_start(run: Run, window_s: float) -> float:
    """Return a start of a cycle near the middle with least validation and checkpoint behind it."""
    starts = _cycle_starts(run)
    spans = next(rank.spans for rank in run.ranks if rank.spans)
    if not starts:
        return min(span.start_s for span in spans)
    last_s = max(span.end_s for span in spans)
    whole = [start for start in starts if start + window_s <= last_s] or starts[:1]
    middle_s = (starts[0] + last_s - window_s) / 2
    near = sorted(whole, key=lambda start: abs(start - middle_s))[:_MOST_CANDIDATES]
    pauses = [span for span in spans if span.lane in ("validation", "checkpoint")]

    def badness(start: float) -> tuple[float, float]:
        paused = sum(_overlap_s(span, start, start + window_s) for span in pauses)
        return (round(paused, 6), abs(start - middle_s))

    return min(near, key=badness)


def _overlap_s(span: Span, start_s: float, end_s: float) -> float:
    return max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))


def _timeline(run: Run, window_s: float, *, most_ranks: int, first: bool) -> Timeline:
    start_s = _window_start(run, window_s)
    ranks = [rank for rank in run.ranks if rank.spans]
    lanes = [
        _lane(rank, text, lane, start_s, start_s + window_s)
        for rank in ranks[:most_ranks]
        for text, lane in _ROWS
    ]
    hidden = len(ranks) - most_ranks
    kinds = [(kind, name) for kind, name in CATEGORY_NAMES.items() if kind != "other"]
    return Timeline(
        lanes=tuple(lanes),
        start_s=start_s,
        end_s=start_s + window_s,
        kinds=(*kinds, ("in_flight", "in flight")) if first else (),
        heading=run.label,
        caption=f"{hidden} more ranks are not drawn." if hidden > 0 else "",
        touching_s=_TOUCHING_S,
    )


def _lane(
    rank: RankTrace, text: str, lane: str | None, start_s: float, end_s: float
) -> TimelineLane:
    lanes = (lane,) if lane else _TRAINING_LANES
    spans = [
        LaneSpan(
            start_s=span.start_s,
            end_s=span.end_s,
            kind=LANE_CATEGORIES.get(span.lane, span.lane),
            title=_title(span),
            label=span.name.replace("all-reduce ", "") if lane == "in_flight" else "",
            group=(span.fragment or 0) if lane == "in_flight" else 0,
        )
        for span in rank.spans
        if span.lane in lanes and _overlap_s(span, start_s, end_s) > 0
    ]
    group = "" if lane else f"rank {rank.rank}"
    return TimelineLane(name=text, group=group, spans=tuple(spans))


def _title(span: Span) -> str:
    sent = "" if span.sent_bytes is None else f", {format_bytes(span.sent_bytes)} sent"
    return f"{span.name}: {span.lane}{sent}"
