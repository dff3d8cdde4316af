"""From runs of rows to requests: which pages are read, in how many pieces, and for which runs.

Runs (ascending, apart) become byte ranges, those become page ranges; page ranges that touch, or lie
within the allowed gap, become one extent; extents are cut into requests of at most one block. A
page therefore belongs to one request only. Rows may straddle pages, requests and blocks: a request
knows its first and last run, and copies the part of each that it holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.gnn.storage._machine import copy_bytes
from fivefold.gnn.storage._pages import PAGE_BYTES, hash_page


class Requests(NamedTuple):
    """Requests of one call, and the runs they serve.

    Attributes:
        first_pages: First page of each request in the file, ascending.
        num_pages: Pages of each request.
        first_runs: First run of which each holds bytes.
        stop_runs: Run after the last one.
        run_begins: Where each run begins in the file, in bytes, ascending.
        run_bytes: Its length.
        run_places: Where its bytes go, from the beginning of the output.
        bytes_used: Sum of ``run_bytes``.
    """

    first_pages: NDArray[np.int64]
    num_pages: NDArray[np.int64]
    first_runs: NDArray[np.int64]
    stop_runs: NDArray[np.int64]
    run_begins: NDArray[np.int64]
    run_bytes: NDArray[np.int64]
    run_places: NDArray[np.int64]
    bytes_used: int


class Work(NamedTuple):
    """What the workers of one call share.

    Attributes:
        requests: What to read.
        out: Address of the output.
        checksums: Of the file's pages; empty where nothing is to be checked.
        file_id: Their seed.
        shared: Address of two int64: the next request, and a word that is not 0 when all shall
            stop.
    """

    requests: Requests
    out: int
    checksums: NDArray[np.uint32]
    file_id: np.uint64
    shared: int


@njit
def _check_runs(starts: Any, counts: Any, places: Any, num_rows: Any, out_rows: Any) -> Any:
    """Return the first run that is not allowed, or -1."""
    previous = np.int64(0)
    for run in range(len(starts)):
        start, count, place = starts[run], counts[run], places[run]
        if count < 0 or start < previous or start > num_rows - count:
            return run
        if place < 0 or place > out_rows - count:
            return run
        previous = start + count
    return -1


@njit
def _extents(begins: Any, lengths: Any, gap_bytes: Any, extents: Any) -> Any:
    """Join page ranges of the runs: (first page, page after, first run, run after) each."""
    used = -1
    for run in range(len(begins)):
        if lengths[run] == 0:
            continue
        first = begins[run] // PAGE_BYTES
        stop = (begins[run] + lengths[run] + PAGE_BYTES - 1) // PAGE_BYTES
        if used >= 0 and (first - extents[used, 1]) * PAGE_BYTES <= gap_bytes:
            extents[used, 1] = max(stop, extents[used, 1])
            extents[used, 3] = run + 1
        else:
            used += 1
            extents[used, 0], extents[used, 1] = first, stop
            extents[used, 2], extents[used, 3] = run, run + 1
    return used + 1


@njit
def _cut(extents: Any, block_pages: Any, begins: Any, lengths: Any, requests: Any) -> None:
    """Cut extents into requests: rows of first page, pages, first run, run after."""
    number = 0
    for index in range(len(extents)):
        run, stop_run = extents[index, 2], extents[index, 3]
        for first in range(extents[index, 0], extents[index, 1], block_pages):
            stop = min(first + block_pages, extents[index, 1])
            while run < stop_run and begins[run] + lengths[run] <= first * PAGE_BYTES:
                run += 1
            last = run
            while last < stop_run and begins[last] < stop * PAGE_BYTES:
                last += 1
            requests[0, number], requests[1, number] = first, stop - first
            requests[2, number], requests[3, number] = run, last
            number += 1


@njit
def join_rows(rows: Any, places: Any, runs: Any) -> Any:
    """Join rows that follow one another in the section and in the output; returns the count."""
    used = -1
    for index in range(len(rows)):
        row, place = np.int64(rows[index]), np.int64(places[index])
        if (
            used >= 0
            and row == runs[0, used] + runs[1, used]
            and place == runs[2, used] + runs[1, used]
        ):
            runs[1, used] += 1
        else:
            used += 1
            runs[0, used], runs[1, used], runs[2, used] = row, 1, place
    return used + 1


def plan_requests(
    runs: NDArray[np.int64],
    *,
    offset: int,
    row_bytes: int,
    num_rows: int,
    out_rows: int,
    block_bytes: int,
    max_gap_bytes: int,
) -> Requests:
    """Check runs and turn them into requests."""
    starts, counts, places = runs
    bad = _check_runs(starts, counts, places, num_rows, out_rows)
    if bad >= 0:
        raise ConfigurationError(
            f"run {bad} ({counts[bad]} rows from {starts[bad]} on, into output row "
            f"{places[bad]}) is not allowed",
            hint=f"runs ascend without overlap within {num_rows} rows, and fit the output's "
            f"{out_rows} rows",
        )
    begins, lengths = offset + starts * row_bytes, counts * row_bytes
    extents = np.empty((len(starts), 4), np.int64)
    extents = extents[: _extents(begins, lengths, max_gap_bytes, extents)]
    block_pages = block_bytes // PAGE_BYTES
    pages = extents[:, 1] - extents[:, 0]
    requests = np.empty((4, int((-(-pages // block_pages)).sum())), np.int64)
    _cut(extents, block_pages, begins, lengths, requests)
    return Requests(
        first_pages=requests[0],
        num_pages=requests[1],
        first_runs=requests[2],
        stop_runs=requests[3],
        run_begins=begins,
        run_bytes=lengths,
        run_places=places * row_bytes,
        bytes_used=int(lengths.sum()),
    )


@njit
def deliver(buffer: Any, request: Any, work: Any) -> Any:
    """Check the pages of a request that was read and copy its rows to their places.

    Returns the number of the first damaged page, or -1. Without checksums (length 0) nothing is
    checked. No row of a request is copied before all of its pages were found right.
    """
    requests = work.requests
    first = requests.first_pages[request]
    stop = first + requests.num_pages[request]
    if len(work.checksums):
        for page in range(first, stop):
            seed = work.file_id + np.uint64(page)
            if hash_page(buffer + (page - first) * PAGE_BYTES, seed) != work.checksums[page]:
                return page
    begin, end = first * PAGE_BYTES, stop * PAGE_BYTES
    for run in range(requests.first_runs[request], requests.stop_runs[request]):
        low = max(requests.run_begins[run], begin)
        high = min(requests.run_begins[run] + requests.run_bytes[run], end)
        if low < high:
            place = requests.run_places[run] + low - requests.run_begins[run]
            copy_bytes(work.out + place, buffer + (low - begin), high - low)
    return -1
