"""From runs of rows to requests: which pages are read, in how many pieces, and for which runs.

Runs (ascending, apart) become page ranges; ranges that touch, or lie within the allowed gap, are
joined and cut into requests of at most one block, so that a page belongs to one request only.
Workers take the next request by an atomic counter, and look at a stop word in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.gnn.storage._machine import atomic_add, copy_bytes
from fivefold.gnn.storage.pages import PAGE_BYTES, Ids, hash_page

#: Codes: all well; a system call failed; the file ended; a page is damaged; told to stop.
DONE, FAILED, ENDED, DAMAGED, STOPPED = 0, 1, 2, 3, 4


class Requests(NamedTuple):
    """Requests of one call, in the order of the file, and the runs they serve, in bytes."""

    first_pages: Ids
    num_pages: Ids
    first_runs: Ids  # of which each request holds bytes
    stop_runs: Ids
    run_begins: Ids  # in the file
    run_bytes: Ids
    run_places: Ids  # in the output
    bytes_used: int


class Work(NamedTuple):
    """Arguments that all workers of one call share."""

    requests: Requests
    out: int  # address of the output
    checksums: NDArray[np.uint32]  # of the file's pages; empty where nothing is to be checked
    file_id: np.uint64
    shared: int  # address of two int64: the next request; not 0 when all shall stop


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
    runs: Ids,
    *,
    offset: int,
    row_bytes: int,
    num_rows: int,
    out_rows: int,
    block_bytes: int,
    max_gap_bytes: int,
) -> Requests:
    """Check runs (rows of starts, counts, places) and turn them into requests."""
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
    first_pages, num_pages, first_runs, stop_runs = requests
    return Requests(
        first_pages,
        num_pages,
        first_runs,
        stop_runs,
        run_begins=begins,
        run_bytes=lengths,
        run_places=places * row_bytes,
        bytes_used=int(lengths.sum()),
    )


@njit
def halt(shared: Any) -> None:
    """Tell all workers to stop."""
    atomic_add(shared + 8, np.int64(1))


@njit
def take(work: Any, status: Any) -> Any:
    """Return the next request, or -1: none is left, or all shall stop (see the status)."""
    request = atomic_add(work.shared, np.int64(1))
    if request >= len(work.requests.first_pages):
        return -1
    if atomic_add(work.shared + 8, np.int64(0)) != 0:
        if status[0] == DONE:
            status[0] = STOPPED
        return -1
    return request


@njit
def deliver(buffer: Any, request: Any, work: Any, status: Any) -> Any:
    """Check the pages of a request that was read and copy its rows to their places.

    Returns False with the status set if a page is damaged: no row is copied before all pages of
    the request were found right.
    """
    requests = work.requests
    first = requests.first_pages[request]
    stop = first + requests.num_pages[request]
    if len(work.checksums):
        for page in range(first, stop):
            seed = work.file_id + np.uint64(page)
            if hash_page(buffer + (page - first) * PAGE_BYTES, seed) != work.checksums[page]:
                status[0], status[2] = DAMAGED, page
                return False
    begin, end = first * PAGE_BYTES, stop * PAGE_BYTES
    for run in range(requests.first_runs[request], requests.stop_runs[request]):
        low = max(requests.run_begins[run], begin)
        high = min(requests.run_begins[run] + requests.run_bytes[run], end)
        if low < high:
            place = requests.run_places[run] + low - requests.run_begins[run]
            copy_bytes(work.out + place, buffer + (low - begin), high - low)
    return True
