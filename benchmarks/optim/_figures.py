"""The ablations' plots, drawn from their results file alone, as SVG.

Needs matplotlib (``pip install 'fivefold[bench]'``). The same results give the same file, byte by
byte, so that a plot in the repository changes only when its data does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError

__all__ = ["Curve", "Figure", "draw"]

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fivefold",
    "svg.fonttype": "none",  # text stays text: it can be searched, and fonts are the reader's
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_MARKERS = "osD^vP*Xhd"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a plot.

    Attributes:
        name: For the legend.
        x: Where; numbers, or names for a categorical axis.
        y: Medians.
        low: Lowest of the seeds.
        high: Highest of the seeds.
        dashed: For variants of a solid curve.
    """

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One plot.

    Attributes:
        name: File name without its ending.
        title: What it shows.
        x_label: With unit.
        curves: What is drawn.
        x_scale: "log2", "log10", "linear" or "names".
        lines: Level of a horizontal line by its name, such as DDP's loss.
        y_max: Where the axis ends at the latest: what lies beyond has as good as diverged.
    """

    name: str
    title: str
    x_label: str
    curves: Sequence[Curve]
    x_scale: str
    lines: dict[str, float]
    y_max: float


def draw(figure: Figure, folder: Path) -> Path:
    """Write one plot.

    Args:
        figure: What to draw.
        folder: Where; made if it is missing.

    Returns:
        The SVG file.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - measuring does not need it
        from matplotlib import figure as mpl_figure  # noqa: PLC0415 - as above
    except ImportError as error:
        message = "plots need matplotlib, which is not installed"
        raise ConfigurationError(message, hint="pip install 'fivefold[bench]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{figure.name}.svg"
    with mpl.rc_context(_STYLE):
        canvas = mpl_figure.Figure(figsize=(9, 4.5), layout="constrained")
        _fill(canvas.subplots(), figure)
        canvas.savefig(path, metadata={"Date": None})
    return path


def _fill(axes: Any, figure: Figure) -> None:
    for number, curve in enumerate(figure.curves):
        below = [y - low for y, low in zip(curve.y, curve.low, strict=True)]
        above = [high - y for y, high in zip(curve.y, curve.high, strict=True)]
        axes.errorbar(
            curve.x,
            curve.y,
            yerr=(below, above),
            label=curve.name,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            capsize=2,
            linewidth=1.3,
            linestyle="--" if curve.dashed else "-",
        )
    for name, level in figure.lines.items():
        axes.axhline(level, color="black", linewidth=1, linestyle=":", label=name)
    if figure.x_scale.startswith("log"):
        axes.set_xscale("log", base=int(figure.x_scale.removeprefix("log")))
        places = sorted(
            {x for curve in figure.curves for x in curve.x if isinstance(x, int | float)}
        )
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
    axes.set_ylim(top=min(figure.y_max, axes.get_ylim()[1]))
    axes.set_title(figure.title, loc="left", fontsize=11)
    axes.set(xlabel=figure.x_label, ylabel="validation loss, bits per byte")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
