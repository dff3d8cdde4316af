"""A picture of a schedule: one row for each link, one bar for each message on it.

Where bars would be too many to be seen, a row shows how busy its link is instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.collectives.schedules.arrays import Floats, Ints, Longs, rows_of
from fivefold.collectives.schedules.messages import messages_of
from fivefold.collectives.schedules.routes import require_topology, route_table
from fivefold.collectives.schedules.schedule import Schedule
from fivefold.collectives.schedules.timing import Timing
from fivefold.errors import ConfigurationError, optional_module
from fivefold.network.topology import Topology
from fivefold.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_BARS = 6_000  # beyond, bars are too thin to be told apart
_MOST_LABELS = 400
_MOST_NAMES = 40
_MOST_BANDS = 360  # rows of pixels; beyond, neighbouring links share one
_BINS = 700  # columns of pixels
_BAND_COLOURS = {"adds": (0.84, 0.46, 0.13), "copies": (0.20, 0.50, 0.74)}
_BAR_COLOURS = {"adds": "YlOrBr", "copies": "GnBu"}
_IDLE = (0.955, 0.96, 0.965)


def draw_schedule(
    schedule: Schedule,
    timing: Timing,
    path: str | Path | None = None,
    *,
    topology: Topology | None = None,
    most_rows: int = 64,
    title: str | None = None,
) -> Figure:
    """Draw what each link does over time.

    Rows are links, the busiest ones where there are too many. A bar is one message, coloured by
    its first chunk: sums in browns, copies in blues; where there is room it bears the number of its
    chunk, or how many it has. Where messages are thousands, all links are shown, and the depth of
    the colour is the share of the time in which something is on its way; of more than 360 links
    neighbours share a row.

    Args:
        schedule: The schedule.
        timing: Its times, from `evaluate`.
        path: Where to save the picture (``.png``, ``.svg``, ``.pdf``); None not to save it.
        topology: The network; None for the schedule's own.
        most_rows: Most links shown with bars.
        title: Title; None for the algorithm, the collective, its size and its time.

    Raises:
        ConfigurationError: The timing is not of this schedule, or there is no topology.
        UnsupportedError: Matplotlib is not installed.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather, evaluate
        >>> from fivefold.network.topology import ring
        >>> network = ring(4)
        >>> schedule = build_algorithm("ring", all_gather(4), network)
        >>> figure = draw_schedule(schedule, evaluate(schedule, size_bytes=1e6))
        >>> len(figure.axes[0].get_yticks())
        4
    """
    if timing.starts_s.shape != schedule.chunks.shape:
        raise ConfigurationError(
            f"the timing has {timing.starts_s.size} transfers, the schedule "
            f"{schedule.num_transfers}",
            hint="pass what evaluate() said of this very schedule",
        )
    module = optional_module("matplotlib.figure", extra="collectives", use="a picture")
    network = require_topology(schedule, topology)
    # The message (its first transfer) and link of every bar.
    routes = route_table(schedule, network)
    leaders = messages_of(schedule)
    first = np.flatnonzero(leaders == np.arange(leaders.size))
    offsets, places = rows_of(routes.offsets, routes.rows[first])
    transfers = np.repeat(first, np.diff(offsets))
    many = transfers.size > _MOST_BARS and timing.total_s > 0
    rows = _rows(timing, None if many else most_rows)
    row_of_link = np.full(network.num_links, -1, dtype=np.int64)
    row_of_link[rows] = np.arange(rows.size)
    bars = np.stack([transfers, row_of_link[routes.links[places]]])
    bars = bars[:, bars[1] >= 0]
    height = min(max(len(rows), 4), _MOST_NAMES if many else most_rows)
    figure: Figure = module.Figure(figsize=(9.5, 1.6 + 0.2 * height), layout="constrained")
    axes = figure.add_subplot()
    scale, unit = _time_scale(timing.total_s)
    if many:
        first = _paint_bands(axes, schedule, timing, bars)
        note = "the deeper the colour, the busier"
        if first.size < rows.size:
            note = f"{rows.size} links, {rows.size / first.size:.3g} in a row; {note}"
        rows = rows[first]
    else:
        _paint_bars(axes, schedule, timing, bars)
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        busy = int((timing.link_busy_s > 0).sum())
        note = f"the {len(rows)} busiest of {busy} links" if len(rows) < busy else ""
    named = np.arange(0, len(rows), max(-(-len(rows) // _MOST_NAMES), 1) if many else 1)
    links = [network.links[row] for row in rows[named].tolist()]
    names = [f"{link.source} \N{RIGHTWARDS ARROW} {link.target}" for link in links]
    axes.set_yticks(named, names, fontsize=6.5 if len(rows) > 20 else 8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(timing.total_s, 1e-12) * scale)
    axes.set_xlabel(f"time ({unit})", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_title(title or _title(schedule, timing), fontsize=10, loc="left", pad=8)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(note, (1, 0), (0, -22), fontsize=7.5, color="0.35", ha="right", va="top", **place)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _rows(timing: Timing, most_rows: int | None) -> Ints:
    """Choose the links shown: all, or the busiest; of equally busy ones some from everywhere."""
    busy_s = timing.link_busy_s
    used = np.flatnonzero(busy_s > 0)
    if most_rows is not None and used.size > most_rows:
        least_s = np.sort(busy_s[used])[-most_rows]
        above = used[busy_s[used] > least_s * (1 + 1e-9)]
        equal = used[np.abs(busy_s[used] - least_s) <= least_s * 1e-9]
        picked = np.linspace(0, equal.size - 1, most_rows - above.size).round().astype(np.int64)
        used = np.sort(np.concatenate([above, equal[picked]]))
    return used.astype(np.int32)


def _paint_bars(axes: Axes, schedule: Schedule, timing: Timing, bars: Longs) -> None:
    """Paint a bar for each message on each of its links, with its chunk or their number."""
    import matplotlib as mpl  # noqa: PLC0415 - heavy and optional

    scale, _ = _time_scale(timing.total_s)
    transfers, rows = bars
    starts = timing.starts_s[transfers] * scale
    lasts = timing.ends_s[transfers] * scale - starts
    few = transfers.size <= _MOST_LABELS
    share = 0.2 + 0.65 * schedule.chunks[transfers] / max(schedule.collective.num_chunks - 1, 1)
    adds, copies = (mpl.colormaps[name](share) for name in _BAR_COLOURS.values())
    colours: Any = np.where(schedule.reduces[transfers][:, None], adds, copies)
    style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4 if few else 0.15}
    painted = axes.barh(rows, lasts, left=starts, height=0.82, color=colours, **style)
    if few:
        wide = lasts > timing.total_s * scale / 60
        together = np.bincount(messages_of(schedule), minlength=schedule.num_transfers)[transfers]
        names = np.where(
            together > 1,
            np.char.add(together.astype(str), " chunks"),
            schedule.chunks[transfers].astype(str),
        )
        labels = np.where(wide, names, "").tolist()
        axes.bar_label(painted, labels, label_type="center", fontsize=6, color="0.1")
    shades = {name: mpl.colormaps[colour](0.6) for name, colour in _BAR_COLOURS.items()}
    _explain(axes, schedule, shades)


def _explain(axes: Axes, schedule: Schedule, colours: dict[str, Any]) -> None:
    """Say which colour adds and which copies, where a schedule does both."""
    from matplotlib.patches import Patch  # noqa: PLC0415 - heavy and optional

    if schedule.reduces.any() and not schedule.reduces.all():
        patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
        style: dict[str, Any] = {"fontsize": 8, "frameon": False, "borderaxespad": 0.2, "ncols": 2}
        axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), **style)


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


def busy_shares(starts: Floats, ends: Floats, rows: Longs, *, num_rows: int, bins: int) -> Floats:
    """Return how busy each row is in each span of time; above 1 where messages overlap."""
    # Each start raises what is going on by one and each end lowers it: in full in all later
    # spans, in its own span for the rest of it.
    places = np.clip(np.concatenate([starts, ends]), 0.0, float(bins))
    signs = np.repeat([1.0, -1.0], [len(starts), len(ends)])
    spans = np.floor(places).astype(np.int64)
    wide = bins + 2
    cells = np.concatenate([rows, rows]).astype(np.int64) * wide + spans
    size = num_rows * wide
    own = np.bincount(cells, signs * (1 - (places - spans)), size).reshape(num_rows, wide)
    later = np.bincount(cells + 1, signs, size).reshape(num_rows, wide).cumsum(axis=1)
    shares: Floats = np.maximum(own + later, 0.0)[:, :bins]
    return shares


def _paint_bands(axes: Axes, schedule: Schedule, timing: Timing, bars: Longs) -> Longs:
    """Paint a row for each link, or for several, the stronger the busier; each row's first link."""
    transfers, links = bars
    num_links = int(links.max(initial=-1)) + 1
    num_rows = min(num_links, _MOST_BANDS)
    row_of = np.arange(num_links) * num_rows // max(num_links, 1)
    together = np.bincount(row_of, minlength=num_rows)[:, None]
    starts, ends = (
        times_s[transfers] * (_BINS / timing.total_s)
        for times_s in (timing.starts_s, timing.ends_s)
    )
    sums = schedule.reduces[transfers]
    shares = [
        busy_shares(starts[own], ends[own], row_of[links[own]], num_rows=num_rows, bins=_BINS)
        / together
        for own in (sums, ~sums)
    ]
    whole = np.maximum(shares[0] + shares[1], 1.0)
    image = np.ones((num_rows, _BINS, 3)) * _IDLE
    for share, colour in zip(shares, _BAND_COLOURS.values(), strict=True):
        image += (share / whole)[:, :, None] * (np.array(colour) - _IDLE)
    extent = (0, timing.total_s * _time_scale(timing.total_s)[0], num_rows - 0.5, -0.5)
    axes.imshow(image.clip(0, 1), extent=extent, aspect="auto", interpolation="nearest")
    if num_rows <= 64:
        axes.hlines(np.arange(1, num_rows) - 0.5, *extent[:2], color="white", linewidth=1.2)
    _explain(axes, schedule, _BAND_COLOURS)
    return np.searchsorted(row_of, np.arange(num_rows))
