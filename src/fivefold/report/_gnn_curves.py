"""Accuracy and loss of graph runs as plotly figures; needs plotly (the ``report`` extra)."""

from __future__ import annotations

import html
import json
import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.report._gnn_records import GraphRun

_COLOURS = ("#1f83c8", "#d55e00", "#109668", "#b45fa0", "#a3791b", "#6f78dd", "#7d858f")
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star")
_MOST_POINTS = 1500  # more do not show on a screen and make the file heavy


def graph_figures(runs: Sequence[GraphRun]) -> dict[str, Any]:
    """Validation accuracy against time and epoch, training loss against step, as plotly JSON."""
    figures = {}
    if any(run.validation for run in runs):
        figures["graph-accuracy-wall"] = _accuracy(runs, axis="wall_s", title="training time (s)")
        figures["graph-accuracy-epoch"] = _accuracy(runs, axis="epoch", title="epoch")
    if any(run.train for run in runs):
        figures["graph-loss"] = _loss(runs)
    return figures


def _accuracy(runs: Sequence[GraphRun], *, axis: str, title: str) -> Any:
    figure = go.Figure(layout={"template": "none"})
    for index, run in enumerate(runs):
        points = [point for point in run.validation if point.accuracy is not None]
        label = html.escape(run.label, quote=False)
        figure.add_scatter(
            x=[getattr(point, axis) for point in points],
            y=[point.accuracy for point in points],
            mode="lines+markers",
            name=label,
            line={"color": _COLOURS[index % len(_COLOURS)], "width": 2.4},
            marker={"symbol": _SYMBOLS[index % len(_SYMBOLS)], "size": 8},
            hovertemplate=f"{label}<br>%{{y:.4f}} at %{{x}}<extra></extra>",
        )
    return _finished(figure, x=title, y="validation accuracy")


def _loss(runs: Sequence[GraphRun]) -> Any:
    figure = go.Figure(layout={"template": "none"})
    for index, run in enumerate(runs):
        points = run.train[:: max(1, math.ceil(len(run.train) / _MOST_POINTS))]
        label = html.escape(run.label, quote=False)
        figure.add_scatter(
            x=[point.step for point in points],
            y=[point.loss for point in points],
            mode="lines",
            name=label,
            line={"color": _COLOURS[index % len(_COLOURS)], "width": 1.4},
            hovertemplate=f"{label}<br>%{{y:.4f}} at step %{{x}}<extra></extra>",
        )
    return _finished(figure, x="optimizer step", y="training loss (nats)")


def _finished(figure: go.Figure, *, x: str, y: str) -> Any:
    figure.update_layout(
        margin={"l": 52, "r": 14, "t": 12, "b": 48},
        showlegend=True,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="closest",
        xaxis={
            "title": {"text": x, "font": {"size": 13}},
            "rangemode": "tozero",
            "zeroline": False,
        },
        yaxis={"title": {"text": y, "font": {"size": 13}}, "zeroline": False},
    )
    return json.loads(figure.to_json())
