"""The second half of packing: the rows, moved by the way that the geometry names.

Marks are counted in rows of the output (and in ranges of the features while spilling), so that a
run with another memory budget can go on where the last one stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.gnn.packing._geometry import Window, cut_windows
from fivefold.gnn.packing._movement import (
    Cells,
    Mover,
    gather_resident,
    order_windows,
    pass_over,
    spill_ranges,
)
from fivefold.gnn.storage import Container, ContainerWriter

KIND_ROWS = "packed-rows"
_KIND_ROUTES = "packing-routes"
_KIND_SPILL = "packing-spill"

Progress = Callable[[str, int, int], None]


def write_rows(
    path: Path,
    mover: Mover,
    *,
    sections: dict[str, int],
    attributes: dict[str, Any],
    scratch: Path,
    progress: Progress,
) -> Container:
    """Write the packed rows and the caches' rows; what an earlier run has done is kept.

    Args:
        path: File to write.
        mover: Source, order and sizes; its windows are made here.
        sections: Rows of each output section.
        attributes: Fingerprints of what the rows come from.
        scratch: Folder for the spill.
        progress: Called with a stage, rows done and rows in all.
    """
    shapes = {name: (mover.dtype, (rows, mover.dim)) for name, rows in sections.items()}
    total = sum(sections.values())
    with ContainerWriter(
        path, kind=KIND_ROWS, sections=shapes, attributes=attributes, resume=True
    ) as writer:
        done = int((writer.progress or {"rows": 0})["rows"])
        windows = cut_windows(sections, mover.geometry.window_rows)
        mover = dataclasses.replace(mover, windows=_remaining(windows, done))
        if mover.geometry.strategy == "spill" and total > done:
            # The spill is cut by all windows, also by those that are done.
            mover = dataclasses.replace(mover, windows=windows)

        def finished(number: int) -> None:
            window = mover.windows[number]
            done = window.first + window.num_rows
            if (number + 1) % mover.geometry.steps_per_mark == 0 or done == total:
                writer.mark({"rows": done})
            progress("rows", done, total)

        _move(mover, writer, finished, done=done, scratch=scratch, progress=progress)  # fmt: skip
        return writer.commit()


def _remaining(windows: list[Window], done: int) -> list[Window]:
    """What is left of the windows when the first ``done`` rows are written."""
    left = []
    for window in windows:
        skip = min(max(done - window.first, 0), window.num_rows)
        if skip < window.num_rows:
            start, first = window.start + skip, window.first + skip
            left.append(dataclasses.replace(window, start=start, first=first))
    return left


def _move(
    mover: Mover,
    writer: ContainerWriter,
    finished: Callable[[int], None],
    *,
    done: int,
    scratch: Path,
    progress: Progress,
) -> None:
    """Write all windows, those that are done excepted."""
    first = sum(window.first + window.num_rows <= done for window in mover.windows)
    if first == len(mover.windows):
        return
    if mover.geometry.strategy != "spill":
        move = gather_resident if mover.geometry.strategy == "resident" else pass_over
        move(mover, writer, finished)
        return
    with _fresh_if_damaged(scratch):
        cells, spill = _spill(mover, scratch, progress)
        with spill, mover.another_reader(spill, "cells") as reader:
            order_windows(mover, cells, reader, writer, done=first, finished=finished)


@contextmanager
def _fresh_if_damaged(scratch: Path) -> Iterator[None]:
    """Remove scratch files that turn out to be damaged, so that the next run makes them anew."""
    try:
        yield
    except DataError as error:
        if str(scratch) not in error.message:
            raise
        for path in (*scratch.glob("spill*"), *scratch.glob("routes*")):
            path.unlink()
        hint = "it has been removed; run packing again, which makes it anew"
        raise DataError(error.message, hint=hint) from error


def _spill(mover: Mover, scratch: Path, progress: Progress) -> tuple[Cells, Container]:
    """The spill, complete, and where everything lies in it."""
    cells, routes = Cells.count(mover)
    path = scratch / "spill.fvf"
    attributes = {"geometry": mover.geometry.to_json()}
    if path.exists():
        return cells, Container.open(path, kind=_KIND_SPILL)
    ids = np.uint32 if mover.num_nodes < 2**32 else np.int64
    total = int(cells.counts.sum())
    routes_path = scratch / "routes.fvf"
    if not routes_path.exists():
        with ContainerWriter(
            routes_path,
            kind=_KIND_ROUTES,
            sections={"nodes": (ids, (total,))},
            attributes=attributes,
        ) as writer:
            place = 0
            for nodes in routes:
                writer.write("nodes", place, nodes.astype(ids))
                place += len(nodes)
            writer.commit().close()
    with (
        Container.open(routes_path, kind=_KIND_ROUTES) as route_file,
        ContainerWriter(
            path,
            kind=_KIND_SPILL,
            sections={"cells": (np.uint8, (cells.total_bytes, 1))},
            attributes=attributes,
            resume=True,
        ) as writer,
    ):
        done = int((writer.progress or {"ranges": 0})["ranges"])

        def finished(number: int) -> None:
            if (number + 1) % mover.geometry.steps_per_mark == 0:
                writer.mark({"ranges": number + 1})
            rows = min((number + 1) * mover.geometry.source_rows, mover.num_nodes)
            progress("spill", rows, mover.num_nodes)

        spill_ranges(mover, cells, route_file, writer, done=done, finished=finished)
        spill = writer.commit()
    routes_path.unlink()
    return cells, spill
