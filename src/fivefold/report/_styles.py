"""Colours and markers of curves.

The colours are of middle lightness, so that they hold on a light and on a dark page; the shape of
the marker tells curves apart without colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from fivefold.report._records import Run

COLOURS = ("#1f83c8", "#109668", "#b45fa0", "#a3791b", "#6f78dd", "#5aa9a3", "#c2577a", "#8a7a5c")
ORANGE, GREY = "#d55e00", "#7d858f"
MARKERS = ("circle", "diamond", "square", "triangle")
METHOD_COLOURS = {
    "none": GREY,
    "ddp": ORANGE,
    "local_sgd": "#b45fa0",
    "slowmo": "#109668",
    "diloco": "#6f78dd",
    "co2": "#1f83c8",
    "delay_corrected": "#a3791b",
    "overlap_local_sgd": "#8c6a56",
    "eager_diloco": "#4a9fb5",
    "streaming_diloco": "#9a58c9",
    "delayed_gradients": "#7a9a3c",
}
"""Colour of each method, in the order in which runs are listed."""
_SPARE = ("#cf4a6b", "#2f9494", GREY)
_MOST_POINTS = 600  # of a curve: more do not show, and make the page heavy

_PointT = TypeVar("_PointT")


def run_colours(runs: Sequence[Run]) -> list[str]:
    """Return a colour per run: its method's own, a spare one from the second of a method on."""
    colours: list[str] = []
    spare = 0
    for run in runs:
        colour = METHOD_COLOURS.get(run.manifest.method)
        if colour is None or colour in colours:
            colour = _SPARE[spare % len(_SPARE)]
            spare += 1
        colours.append(colour)
    return colours


def thinned(points: Sequence[_PointT]) -> Sequence[_PointT]:
    """Return as many points as a curve shows, evenly from the first on."""
    return points[:: max(1, math.ceil(len(points) / _MOST_POINTS))]
