"""How busy the links of a schedule are over time, where single messages would not be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fivefold.collectives.schedules._arrays import Array, Floats, Ints, Longs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND_COLOURS = {"adds": (0.84, 0.46, 0.13), "copies": (0.20, 0.50, 0.74)}
_MOST_BANDS = 360  # rows of pixels; beyond, neighbouring links share one
_BINS = 700  # columns of pixels
_IDLE = (0.955, 0.96, 0.965)


def busy_shares(starts: Floats, ends: Floats, rows: Longs, *, num_rows: int, bins: int) -> Floats:
    """Share of each span of time in which each row is busy; above 1 where messages overlap.

    Args:
        starts: Starts in spans, [T].
        ends: Ends in spans, [T].
        rows: Row of each, [T].
        num_rows: Number of rows.
        bins: Number of spans.

    Returns:
        The shares, [rows, spans].
    """
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


def spread_over(num_links: int) -> tuple[Ints, int]:
    """Row of each link in the order of the links, and the number of rows."""
    num_rows = min(num_links, _MOST_BANDS)
    rows = np.arange(num_links) * num_rows // max(num_links, 1)
    return rows.astype(np.int32), num_rows


def paint_bands(
    axes: Axes, times: tuple[Floats, Floats], total: float, *, links: Array, sums: Array
) -> Ints:
    """Paint one row for each link, or for several, the stronger the busier.

    Args:
        axes: Where.
        times: Starts and ends of the messages, in the unit of the axis.
        total: End of the axis.
        links: Which link each is on, counted among those shown.
        sums: Whether each is to be added.

    Returns:
        The first link of each row.
    """
    num_links = int(links.max(initial=-1)) + 1
    row_of, num_rows = spread_over(num_links)
    together = np.bincount(row_of, minlength=num_rows)[:, None]
    scale = _BINS / max(total, 1e-30)
    image = np.ones((num_rows, _BINS, 3)) * _IDLE
    shares = []
    for chosen in (sums, ~sums):
        found = busy_shares(
            times[0][chosen] * scale,
            times[1][chosen] * scale,
            row_of[links[chosen]].astype(np.int64),
            num_rows=num_rows,
            bins=_BINS,
        )
        shares.append(found / together)
    whole = np.maximum(shares[0] + shares[1], 1.0)
    for share, colour in zip(shares, BAND_COLOURS.values(), strict=True):
        image += (share / whole)[:, :, None] * (np.array(colour) - _IDLE)
    axes.imshow(
        image.clip(0, 1),
        extent=(0, total, num_rows - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    if num_rows <= 64:
        for row in range(1, num_rows):
            axes.axhline(row - 0.5, color="white", linewidth=1.2)
    return np.searchsorted(row_of, np.arange(num_rows)).astype(np.int32)
