"""A picture of a schedule: one row for each link, one bar for each message on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.collectives.schedules._arrays import Array, Ints
from fivefold.collectives.schedules._evaluate import Timing
from fivefold.collectives.schedules._routes import require_topology, route_table
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fivefold.network.topology import Topology

__all__ = ["draw_schedule"]

_MOST_BARS = 20_000  # beyond, bars are thinner than a pixel
_MOST_LABELS = 400
_SUMS, _COPIES = "YlOrBr", "GnBu"


def draw_schedule(
    schedule: Schedule,
    timing: Timing,
    path: str | Path | None = None,
    *,
    topology: Topology | None = None,
    most_rows: int = 48,
    title: str | None = None,
) -> Figure:
    """Draw what each link does over time.

    Rows are links, the busiest ones where there are too many. A bar is one transfer, coloured by
    its chunk: sums in browns, copies in blues; where there is room it bears the chunk's number.

    Args:
        schedule: The schedule.
        timing: Its times, from `evaluate`.
        path: Where to save the picture (``.png``, ``.svg``, ``.pdf``); None not to save it.
        topology: The network; None for the schedule's own.
        most_rows: Most links shown.
        title: Title; None for the algorithm, the collective, its size and its time.

    Returns:
        The figure.

    Raises:
        ConfigurationError: The timing is not of this schedule, or there is no topology.
        UnsupportedError: Matplotlib is not installed.

    Example:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather, evaluate
        >>> from fivefold.network.topology import ring
        >>> network = ring(4)
        >>> schedule = build_algorithm("ring", all_gather(4), network)
        >>> figure = draw_schedule(schedule, evaluate(schedule, size_bytes=1e6))
        >>> len(figure.axes[0].get_yticks())
        4
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - heavy and optional
    except ImportError as error:  # pragma: no cover - the development environment has it
        message = "Matplotlib is not installed, and pictures need it"
        raise UnsupportedError(message, hint="pip install 'fivefold[collectives]'") from error
    if timing.starts_s.shape != schedule.chunks.shape:
        raise ConfigurationError(
            f"the timing has {timing.starts_s.size} transfers, the schedule "
            f"{schedule.num_transfers}",
            hint="pass what evaluate() said of this very schedule",
        )
    network = require_topology(schedule, topology)
    rows, bars = _bars(schedule, timing, network, most_rows)
    height = min(14.0, 1.6 + 0.22 * max(len(rows), 4))
    figure = Figure(figsize=(9.5, height), layout="constrained")
    axes = figure.add_subplot()
    scale, unit = _time_scale(timing.total_s)
    _paint(axes, schedule, timing, bars, scale)
    _label(axes, network, rows, unit)
    if schedule.reduces.any() and not schedule.reduces.all():
        _explain_colours(axes)
    axes.set_xlim(0, max(timing.total_s, 1e-12) * scale)
    axes.set_title(title or _title(schedule, timing), fontsize=10, loc="left")
    if len(rows) < int((timing.link_busy_s > 0).sum()):
        busy = int((timing.link_busy_s > 0).sum())
        axes.text(
            1.0,
            -0.06,
            f"the {len(rows)} busiest of {busy} links",
            fontsize=7,
            color="0.35",
            ha="right",
            va="top",
            transform=axes.transAxes,
        )
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _bars(
    schedule: Schedule, timing: Timing, topology: Topology, most_rows: int
) -> tuple[Ints, tuple[Array, Array]]:
    """Links shown, and for each bar its transfer and row."""
    used = np.flatnonzero(timing.link_busy_s > 0)
    if used.size > most_rows:
        busiest = np.argsort(-timing.link_busy_s[used], kind="stable")[:most_rows]
        used = np.sort(used[busiest])
    routes = route_table(schedule, topology)
    row_of_link = np.full(topology.num_links, -1, dtype=np.int64)
    row_of_link[used] = np.arange(used.size)
    lengths = np.diff(routes.offsets)[routes.rows]
    transfers = np.repeat(np.arange(schedule.num_transfers), lengths)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    links = routes.links[np.repeat(routes.offsets[:-1][routes.rows], lengths) + within]
    shown = np.flatnonzero(row_of_link[links] >= 0)
    if shown.size > _MOST_BARS:
        longest = timing.ends_s[transfers[shown]] - timing.starts_s[transfers[shown]]
        shown = shown[np.argsort(-longest, kind="stable")[:_MOST_BARS]]
    return used.astype(np.int32), (transfers[shown], row_of_link[links[shown]])


def _paint(
    axes: Axes, schedule: Schedule, timing: Timing, bars: tuple[Array, Array], scale: float
) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - heavy and optional

    transfers, rows = bars
    starts = timing.starts_s[transfers] * scale
    lasts = timing.ends_s[transfers] * scale - starts
    share = 0.2 + 0.65 * schedule.chunks[transfers] / max(schedule.collective.num_chunks - 1, 1)
    sums = schedule.reduces[transfers]
    maps = mpl.colormaps
    colours: Any = np.where(sums[:, None], maps[_SUMS](share), maps[_COPIES](share))
    axes.barh(
        rows, lasts, left=starts, height=0.82, color=colours, edgecolor="white", linewidth=0.4
    )
    if not transfers.size or transfers.size > _MOST_LABELS:
        return
    widest = timing.total_s * scale / 60
    for start, last, row, transfer in zip(starts, lasts, rows, transfers, strict=True):
        if last > widest:
            axes.text(
                start + last / 2,
                row,
                str(schedule.chunks[transfer]),
                fontsize=6,
                color="0.1",
                ha="center",
                va="center",
            )


def _explain_colours(axes: Axes) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - heavy and optional
    from matplotlib.patches import Patch  # noqa: PLC0415 - heavy and optional

    patches = [
        Patch(color=mpl.colormaps[colours](0.6), label=label)
        for colours, label in ((_SUMS, "adds"), (_COPIES, "copies"))
    ]
    axes.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=2,
        fontsize=8,
        frameon=False,
        borderaxespad=0.2,
    )


def _label(axes: Axes, topology: Topology, rows: Ints, unit: str) -> None:
    names = [
        f"{topology.links[row].source} \N{RIGHTWARDS ARROW} {topology.links[row].target}"
        for row in rows
    ]
    axes.set_yticks(np.arange(len(rows)), names, fontsize=6.5 if len(rows) > 20 else 8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"time ({unit})", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _title(schedule: Schedule, timing: Timing) -> str:
    what = schedule.collective.name.replace("_", "-")
    size = format_bytes(round(timing.size_bytes))
    by = f" by {schedule.name.replace('_', ' ')}" if schedule.name else ""
    return (
        f"{what} of {size} among {schedule.collective.num_ranks} ranks{by}: "
        f"{format_duration_s(timing.total_s)} ({timing.model})"
    )


def _time_scale(total_s: float) -> tuple[float, str]:
    for factor, unit, most_s in ((1e9, "ns", 1e-6), (1e6, "us", 1e-3), (1e3, "ms", 1.0)):
        if total_s < most_s:
            return factor, unit
    return 1.0, "s"
