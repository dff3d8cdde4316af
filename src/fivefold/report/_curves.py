"""Loss curves as plotly figures: against wall time, step and tokens.

Training is a thin line, validation a thick one with markers, in one colour per run. The colours
are of middle lightness, so that they hold on a light and on a dark page; method and marker shape
tell the runs apart without colour. This module needs plotly (the ``report`` extra).
"""

from __future__ import annotations

import html
import json
import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from fivefold.report._summary import final_bits_per_byte, validation_curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.report._records import Run, TrainPoint, ValidationPoint

_METHOD_COLOURS = {
    "none": "#7d858f",
    "ddp": "#d55e00",
    "co2": "#1f83c8",
    "slowmo": "#109668",
    "local_sgd": "#b45fa0",
    "diloco": "#6f78dd",
    "delay_corrected": "#a3791b",
    "overlap_local_sgd": "#8c6a56",
    "eager_diloco": "#4a9fb5",
    "streaming_diloco": "#9a58c9",
}
_SPARE_COLOURS = ("#cf4a6b", "#2f9494", "#7d858f")
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star")
_TICKS = (0.5, 0.7, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20)
_AXES = {
    "wall": "wall time (s)",
    "step": "optimizer step",
    "tokens": "tokens, all ranks",
}
_MOST_POINTS = 1500  # more do not show on a screen and make the file heavy


def run_colours(runs: Sequence[Run]) -> list[str]:
    """One colour per run: its method's own, a spare one from the second run of a method on."""
    colours: list[str] = []
    spare = 0
    for run in runs:
        colour = _METHOD_COLOURS.get(run.manifest.method)
        if colour is None or colour in colours:
            colour = _SPARE_COLOURS[spare % len(_SPARE_COLOURS)]
            spare += 1
        colours.append(colour)
    return colours


def loss_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Build the figures as plain plotly JSON, by axis: ``wall``, ``step``, ``tokens``."""
    return {axis: _figure(runs, axis) for axis in _AXES}


def _figure(runs: Sequence[Run], axis: str) -> Any:
    figure = go.Figure(layout={"template": "none"})
    for index, (run, colour) in enumerate(zip(runs, run_colours(runs), strict=True)):
        _add_training(figure, run, axis=axis, colour=colour)
        _add_validation(figure, run, axis=axis, colour=colour, symbol=_SYMBOLS[index % 6])
    target = _ddp_target(runs)
    if target is not None:
        figure.add_hline(
            y=target,
            line={"color": "#888888", "dash": "dot", "width": 1.2},
        )
        figure.add_annotation(  # on a logarithmic axis plotly places notes by the exponent
            text=f"DDP's final: {target:.3f}",
            x=0.01,
            xref="paper",
            xanchor="left",
            y=math.log10(target),
            yanchor="top",
            showarrow=False,
            font={"size": 11},
        )
    low, high = _range(runs)
    figure.update_layout(
        margin={"l": 52, "r": 14, "t": 12, "b": 48},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="closest",
        xaxis={
            "title": {"text": _AXES[axis], "font": {"size": 13}},
            "rangemode": "tozero",
            "zeroline": False,
        },
        yaxis={
            "title": {"text": "bits per byte", "font": {"size": 13}},
            "type": "log",
            "tickvals": list(_TICKS),
            "ticktext": [f"{tick:g}" for tick in _TICKS],
            "range": [math.log10(low), math.log10(high)],
            "zeroline": False,
        },
    )
    return json.loads(figure.to_json())


def _add_training(figure: go.Figure, run: Run, *, axis: str, colour: str) -> None:
    points = [point for point in run.metrics.train if _drawable(point.bits_per_byte)]
    points = points[:: max(1, math.ceil(len(points) / _MOST_POINTS))]
    if not points:
        return
    label = html.escape(run.label, quote=False)
    figure.add_scatter(
        x=[_position(point, axis) for point in points],
        y=[point.bits_per_byte for point in points],
        mode="lines",
        name=f"{label}, training",
        legendgroup=run.name,
        showlegend=False,
        opacity=0.4,
        line={"color": colour, "width": 1.2},
        hovertemplate=f"{label}<br>training: %{{y:.3f}} at %{{x}}<extra></extra>",
    )


def _add_validation(figure: go.Figure, run: Run, *, axis: str, colour: str, symbol: str) -> None:
    points = [point for point in run.metrics.validation if _drawable(point.bits_per_byte)]
    if not points and not run.metrics.train:
        return
    label = html.escape(run.label, quote=False)
    figure.add_scatter(
        x=[_position(point, axis) for point in points],
        y=[point.bits_per_byte for point in points],
        mode="lines+markers",
        name=label,
        legendgroup=run.name,
        showlegend=True,
        line={"color": colour, "width": 2.4},
        marker={"symbol": symbol, "size": 8},
        hovertemplate=f"{label}<br>validation: %{{y:.3f}} at %{{x}}<extra></extra>",
    )


def _position(point: TrainPoint | ValidationPoint, axis: str) -> float:
    return {"wall": point.wall_s, "step": point.step, "tokens": point.tokens}[axis]


def _drawable(value: float) -> bool:
    return math.isfinite(value) and value > 0  # the axis is logarithmic


def _range(runs: Sequence[Run]) -> tuple[float, float]:
    values = [
        value
        for run in runs
        for value in (
            *(point.bits_per_byte for point in run.metrics.train),
            *(point.bits_per_byte for point in run.metrics.validation),
        )
        if _drawable(value)
    ]
    return (0.93 * min(values), 1.04 * max(values)) if values else (1.0, 10.0)


def _ddp_target(runs: Sequence[Run]) -> float | None:
    ddp = next((run for run in runs if run.is_plain_ddp), None)
    if ddp is None or len(runs) < 2 or not validation_curve(ddp):
        return None
    return final_bits_per_byte(ddp)
