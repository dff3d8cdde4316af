"""Time against message size as plotly figures; needs plotly (the ``report`` extra)."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from fivefold.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.report._collective_page import SizeCurve

_COLOURS = ("#1f83c8", "#109668", "#b45fa0", "#a3791b", "#6f78dd", "#5aa9a3", "#c2577a", "#8a7a5c")
_DASHES = ("solid", "dash", "dot", "dashdot")
_OWN, _BOUND = "#d55e00", "#7d858f"


def collective_figures(curves: Sequence[SizeCurve]) -> dict[str, Any]:
    """Times, and times over the lower bound where there is one, as plotly JSON."""
    if not any(time > 0 for curve in curves for time in curve.times_s):
        return {}  # one rank alone takes no time at any size
    figures = {"collective-time": _figure(curves, None)}
    bound = next((curve for curve in curves if curve.kind == "bound"), None)
    if bound is not None and min(bound.times_s) > 0:
        others = [curve for curve in curves if curve.kind != "bound"]
        figures["collective-gap"] = _figure(others, bound)
    return figures


def _figure(curves: Sequence[SizeCurve], bound: SizeCurve | None) -> Any:
    figure = go.Figure(layout={"template": "none"})
    # The synthesized one is drawn last, on top, and still stands first in the legend.
    for index, curve in enumerate(curves):
        label = html.escape(curve.name, quote=False)
        values = list(curve.times_s)
        if bound is not None:
            values = [time / least for time, least in zip(values, bound.times_s, strict=True)]
        pairs = zip(curve.sizes_bytes, curve.times_s, strict=True)
        figure.add_scatter(
            x=list(curve.sizes_bytes),
            y=values,
            mode="lines",
            name=label,
            line=_line(curve.kind, index),
            legendrank={"synthesized": 1, "bound": 3}.get(curve.kind, 2),
            zorder=2 if curve.kind == "synthesized" else 1,
            text=[f"{format_bytes(size)}: {format_duration_s(time)}" for size, time in pairs],
            hovertemplate=f"{label}<br>%{{text}}"
            + ("" if bound is None else "<br>%{y:.2f} of the bound")
            + "<extra></extra>",
        )
    return _finished(figure, curves, "time" if bound is None else "time over the lower bound")


def _line(kind: str, index: int) -> dict[str, Any]:
    if kind == "synthesized":
        return {"color": _OWN, "width": 3.4}
    if kind == "bound":
        return {"color": _BOUND, "width": 1.6, "dash": "dot"}
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return {"color": _COLOURS[index % len(_COLOURS)], "width": 1.8, "dash": dash}


def _finished(figure: go.Figure, curves: Sequence[SizeCurve], y: str) -> Any:
    sizes = [size for curve in curves for size in curve.sizes_bytes]
    figure.update_layout(
        margin={"l": 60, "r": 14, "t": 12, "b": 48},
        showlegend=True,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "font": {"size": 11}},
        hovermode="closest",
        xaxis={"title": {"text": "message size", "font": {"size": 13}}, "type": "log"},
        yaxis={
            "title": {"text": y, "font": {"size": 13}, "standoff": 14},
            "type": "log",
            "zeroline": False,
        },
    )
    ticks = [size for size in _thousands() if min(sizes) / 1.01 <= size <= max(sizes) * 1.01]
    figure.update_xaxes(tickvals=ticks, ticktext=[format_bytes(size) for size in ticks])
    if y == "time":
        times = [time for curve in curves for time in curve.times_s if time > 0]
        ticks = [10.0**power for power in range(-10, 6)]
        ticks = [tick for tick in ticks if min(times) / 10 <= tick <= max(times) * 10]
        figure.update_yaxes(tickvals=ticks, ticktext=[format_duration_s(tick) for tick in ticks])
    else:
        most = max(value for trace in figure.data for value in trace.y)
        ticks = [1, 1.1, 1.2, 1.5, 2, 3, 5] if most < 8 else [1, 2, 5, 10, 20, 50, 100, 200, 500]
        ticks = ticks if most < 500 else [10**power for power in range(10)]
        figure.update_yaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    return json.loads(figure.to_json())


def _thousands() -> list[float]:
    return [10.0**power for power in range(16)]
