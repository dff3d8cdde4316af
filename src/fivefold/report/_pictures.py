"""Pictures of matplotlib, as they go into a page."""

from __future__ import annotations

import io
from typing import Any

from fivefold.report._page import Picture

_MOST_SVG_BYTES = 90_000  # beyond, the same picture in pixels is smaller and draws faster
_DOTS_PER_INCH = 100
_COLOURS = 64


def picture_of(figure: Any, title: str, caption: str = "") -> Picture:
    """Return a figure of matplotlib as SVG, or as PNG where that would be large.

    The same picture is the same file: it holds no date, and no ids that depend on the run.

    Args:
        figure: A ``matplotlib.figure.Figure``.
        title: What it is, in a few words.
        caption: How to read it.
    """
    import matplotlib as mpl  # noqa: PLC0415 - optional, and the figure shows that it is there
    from PIL import Image  # noqa: PLC0415 - comes with matplotlib

    content = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "fivefold"}):
        figure.savefig(content, format="svg", bbox_inches="tight", metadata={"Date": None})
    if content.tell() <= _MOST_SVG_BYTES:
        return Picture(title=title, caption=caption, content=content.getvalue())
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", bbox_inches="tight", dpi=_DOTS_PER_INCH)
    content = io.BytesIO()
    Image.open(pixels).convert("RGB").quantize(_COLOURS).save(content, "png", optimize=True)
    return Picture(title=title, caption=caption, content=content.getvalue(), media_type="image/png")
