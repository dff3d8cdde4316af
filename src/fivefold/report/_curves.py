"""Curves of training runs: loss, and what happened round by round.

Training is a thin line, validation a thick one with markers. Local steps, messages and waits are
what the ranks recorded, not what was configured. A chart is left out where it would be empty or a
flat line that the configuration says already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from fivefold.report._records import RankTrace, Run
from fivefold.report._spans import RoundPoint, round_points
from fivefold.report._styles import MARKERS, run_colours, thinned
from fivefold.report.page import Curve, CurveChart
from fivefold.report.summary import final_bits_per_byte, validation_curve

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
    for index, (run, colour) in enumerate(zip(runs, run_colours(runs), strict=True)):
        batches = [point for point in run.metrics.train if _drawable(point.bits_per_byte)]
        judged = [point for point in run.metrics.validation if _drawable(point.bits_per_byte)]
        place = attrgetter("wall_s" if axis == "wall" else axis)
        if batches:
            points = [(place(point), point.bits_per_byte) for point in thinned(batches)]
            curves.append(
                Curve.through(run.label, points, colour=colour, width=1.2, in_legend=False)
            )
        if judged or run.metrics.train:
            points = [(place(point), point.bits_per_byte) for point in judged]
            marker = MARKERS[index % len(MARKERS)]
            curves.append(Curve.through(run.label, points, colour=colour, width=2.4, marker=marker))
    return curves


def _drawable(value: float) -> bool:
    return math.isfinite(value) and value > 0  # the axis is logarithmic


def _ddp_target(runs: Sequence[Run]) -> float | None:
    ddp = next((run for run in runs if run.is_plain_ddp), None)
    if ddp is None or len(runs) < 2 or not validation_curve(ddp):
        return None
    target = final_bits_per_byte(ddp)
    return target if target is not None and _drawable(target) else None


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
    at_s = [point.launched_s - start_s for point in points]
    waited = [(at, point.waited_s) for at, point in zip(at_s, points, strict=True)]
    flown = [(at, point.in_flight_s) for at, point in zip(at_s, points, strict=True)]
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
        looks = {"width": 1.1, "dash": "6 4"} if rank else {"width": 2.2}
        curves.append(
            Curve.through(
                run.label, steps, colour=colour, stepped=True, in_legend=rank == 0, **looks
            )
        )
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
    points = [
        (point.step, gap)
        for point in run.metrics.sync
        if (gap := point.last_staleness_gap) is not None and math.isfinite(gap)
    ]
    return (
        [Curve.through(run.label, thinned(points), colour=colour)]
        if any(gap != 1.0 for _, gap in points)
        else []
    )


def _sent(run: Run, colour: str) -> list[Curve]:
    points = [
        (point.step, sent / 1e6)
        for point in run.metrics.sync
        if (sent := point.sent_bytes) is not None
    ]
    points = points or _sent_by_spans(run)
    return (
        [Curve.through(run.label, thinned(points), colour=colour)]
        if any(size > 0 for _, size in points)
        else []
    )


def _sent_by_spans(run: Run) -> list[tuple[int, float]]:
    """Return what rank 0's messages add up to, for methods that keep no totals of their own."""
    messages = round_points(run.ranks[0]) if run.ranks else []
    sent = accumulate(point.sent_bytes or 0 for point in messages)
    return [(point.step, total / 1e6) for point, total in zip(messages, sent, strict=True)]


def _messages(rank: RankTrace) -> list[RoundPoint]:
    return [point for point in round_points(rank) if point.round is not None]


def _whole_rounds(rank: RankTrace) -> list[RoundPoint]:
    """The rank's messages without each fragment's first, whose round begins with a stagger."""
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
