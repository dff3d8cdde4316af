"""Curves over the rounds of a run: local steps, flights and waits, staleness gap, bytes sent.

Local steps, flights and waits are what the ranks recorded, not what was configured. A figure is
left out where it would be empty or a flat line that the configuration says already. This module
needs plotly (the ``report`` extra).
"""

from __future__ import annotations

import html
import json
import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from fivefold.report._curves import run_colours
from fivefold.report._rounds import RoundPoint, round_points

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fivefold.report._records import RankTrace, Run

ROUND_CAPTIONS = {
    "flights": (
        "Time in flight, and the part that was waited for.",
        (
            "One point per message of rank 0. Where the filled area is flat, the message was "
            "hidden; where it rises, the round was too short for it, or the run was at its end."
        ),
    ),
    "steps": (
        "Local steps per round.",
        (
            "Counted between launches. Diamonds are decisions; hover over one for the times that "
            "led to it. Dashed lines are ranks that took other numbers of steps than rank 0."
        ),
    ),
    "gap": (
        "Staleness gap.",
        (
            "By how much a pseudo-gradient that arrives late was divided, at the last merge before "
            "each step shown."
        ),
    ),
    "sent": (
        "Bytes sent.",
        "By rank 0 for the method's messages, added up over the run.",
    ),
}
_BASELINES = ("none", "ddp")
_MOST_POINTS = 1500
_MOST_OTHER_RANKS = 7


def round_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Build the figures that have something to show as plain plotly JSON, by their name."""
    colours = run_colours(runs)
    writers: dict[str, tuple[Callable[[go.Figure, Run, str], None], str, str]] = {
        "flights": (_add_flights, "wall time (s)", "seconds per message"),
        "steps": (_add_steps, "wall time (s)", "local steps"),
        "gap": (_add_gap, "optimizer step", "staleness gap"),
        "sent": (_add_sent, "optimizer step", "MB sent by rank 0"),
    }
    figures = {}
    for name, (add, x_title, y_title) in writers.items():
        figure = go.Figure(layout={"template": "none"})
        for run, colour in zip(runs, colours, strict=True):
            if name == "sent" or run.manifest.method not in _BASELINES:
                add(figure, run, colour)
        if figure.data:
            # A gap is never below 1, all else never below 0.
            mode = "normal" if name == "gap" else "tozero"
            _set_layout(figure, x_title=x_title, y_title=y_title, y_mode=mode)
            figures[name] = json.loads(figure.to_json())
    return figures


def _add_flights(figure: go.Figure, run: Run, colour: str) -> None:
    points = _thinned(_messages(run.ranks[0]) if run.ranks else [])
    if not points:
        return
    start_s = _start_s(run)
    common = {"x": [point.launched_s - start_s for point in points], "legendgroup": run.name}
    figure.add_scatter(
        **common,
        y=[point.waited_s for point in points],
        mode="lines",
        fill="tozeroy",
        showlegend=False,
        line={"color": colour, "width": 1, "dash": "dot"},
        hovertemplate=f"{_label(run)}<br>waited %{{y:.3g}} s at %{{x:.1f}} s<extra></extra>",
    )
    figure.add_scatter(
        **common,
        y=[point.flight_s for point in points],
        mode="lines+markers",
        name=_label(run),
        line={"color": colour, "width": 1.6},
        marker={"size": 5},
        hovertemplate=f"{_label(run)}<br>in flight %{{y:.3g}} s at %{{x:.1f}} s<extra></extra>",
    )


def _add_steps(figure: go.Figure, run: Run, colour: str) -> None:
    by_rank = [_whole_rounds(rank) for rank in run.ranks]
    if not any(by_rank) or not (run.metrics.tau or _varies(by_rank)):
        return
    start_s = _start_s(run)
    first = [point.local_steps for point in by_rank[0]]
    others = [points for points in by_rank[1:] if [p.local_steps for p in points] != first]
    for rank, points in enumerate([by_rank[0], *others[:_MOST_OTHER_RANKS]]):
        thin = _thinned(points)
        dash = {"dash": "dash", "width": 1.1} if rank else {"width": 2.2}
        figure.add_scatter(
            x=[point.launched_s - start_s for point in thin],
            y=[point.local_steps for point in thin],
            mode="lines",
            name=_label(run),
            legendgroup=run.name,
            showlegend=rank == 0,
            line={"color": colour, "shape": "vh", **dash},
            hovertemplate=f"{_label(run)}<br>%{{y}} steps at %{{x:.1f}} s<extra></extra>",
        )
    if run.metrics.tau:
        _add_decisions(figure, run, colour)


def _add_decisions(figure: go.Figure, run: Run, colour: str) -> None:
    decisions = run.metrics.tau
    figure.add_scatter(
        x=[decision.wall_s for decision in decisions],
        y=[decision.tau for decision in decisions],
        mode="markers",
        legendgroup=run.name,
        showlegend=False,
        marker={"symbol": "diamond", "size": 9, "color": colour},
        text=[
            f"round {d.round}: tau {d.previous} to {d.tau}, {html.escape(d.reason)}<br>"
            f"communication {d.flight_s:.3g} s, step {d.step_s:.3g} s"
            for d in decisions
        ],
        hovertemplate=f"{_label(run)}<br>%{{text}}<extra></extra>",
    )


def _add_gap(figure: go.Figure, run: Run, colour: str) -> None:
    points = [
        (point.step, gap)
        for point in run.metrics.sync
        if (gap := point.last_staleness_gap) is not None and math.isfinite(gap)
    ]
    if any(gap != 1.0 for _, gap in points):
        _add_line(figure, run, colour, points=points, shown="gap %{y:.3g}")


def _add_sent(figure: go.Figure, run: Run, colour: str) -> None:
    points = [
        (point.step, sent / 1e6)
        for point in run.metrics.sync
        if (sent := point.sent_bytes) is not None
    ]
    points = points or _sent_by_spans(run)
    if any(megabytes > 0 for _, megabytes in points):
        _add_line(figure, run, colour, points=points, shown="%{y:.4g} MB")


def _sent_by_spans(run: Run) -> list[tuple[int, float]]:
    """What rank 0's messages add up to, for methods that keep no totals of their own."""
    messages = round_points(run.ranks[0]) if run.ranks else []
    sent = accumulate(point.sent_bytes or 0 for point in messages)
    return [(point.step, total / 1e6) for point, total in zip(messages, sent, strict=True)]


def _add_line(
    figure: go.Figure, run: Run, colour: str, *, points: Sequence[tuple[int, float]], shown: str
) -> None:
    thin = _thinned(points)
    figure.add_scatter(
        x=[step for step, _ in thin],
        y=[value for _, value in thin],
        mode="lines",
        name=_label(run),
        legendgroup=run.name,
        line={"color": colour, "width": 2},
        hovertemplate=f"{_label(run)}<br>{shown} at step %{{x}}<extra></extra>",
    )


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
    """Whether rounds differ in length, the partial one at the end aside."""
    return len({point.local_steps for points in by_rank for point in points[:-1]}) > 1


def _start_s(run: Run) -> float:
    return min(span.start_s for rank in run.ranks for span in rank.spans)


def _thinned(points: Sequence[Any]) -> Sequence[Any]:
    return points[:: max(1, math.ceil(len(points) / _MOST_POINTS))]


def _label(run: Run) -> str:
    return html.escape(run.label, quote=False)


def _set_layout(figure: go.Figure, *, x_title: str, y_title: str, y_mode: str) -> None:
    figure.update_layout(
        margin={"l": 52, "r": 14, "t": 12, "b": 48},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        showlegend=True,
        hovermode="closest",
        xaxis={
            "title": {"text": x_title, "font": {"size": 13}},
            "rangemode": "tozero",
            "zeroline": False,
        },
        yaxis={
            "title": {"text": y_title, "font": {"size": 13}},
            "rangemode": y_mode,
            "zeroline": False,
        },
    )
