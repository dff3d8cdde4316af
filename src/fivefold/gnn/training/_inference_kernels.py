"""Compiled parts of layer-wise inference: edges by source, what reading them costs, aggregation.

The in-edges of a range of targets become 64-bit keys, the source above the target's place in the
range, so that one sort in place brings all edges of a source together. A source's message is
then added to its targets while it is in cache. Mean and attention need one pass: the softmax
keeps a running maximum per target and head (arXiv 1805.02867) and rescales what it has.

Shapes: T targets of the range, S sources of a chunk, H heads, W width of a message.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Pair = tuple[int, int]


@njit
def fill_keys(
    indptr: Int64,
    sources: npt.NDArray[Any],
    targets: Pair,
    edges: Pair,
    *,
    shift: int,
    drops_loops: bool,
    keys: Int64,
) -> int:
    """Keys of the in-edges ``edges = (low, high)``, whose sources are given; their number.

    ``targets`` is the target that counts as place 0, and the one that edge low belongs to.
    """
    (first, target), (low, high) = targets, edges
    count = 0
    for edge in range(low, high):
        while indptr[target + 1] <= edge:
            target += 1
        source = np.int64(sources[edge - low])
        if not (drops_loops and source == target):
            keys[count] = (source << shift) | (target - first)
            count += 1
    return count


@njit
def reading_cost(
    keys: Int64, shift: int, row_bytes: int, page_bytes: int, gap_bytes: int
) -> tuple[int, int, int]:
    """Distinct sources of sorted keys, and requests and bytes of reading them page by page.

    Reads that are at most gap_bytes apart count as one that reads through the gap.
    """
    rows, requests, size = 0, 0, 0
    previous, end = np.int64(-1), np.int64(-1)
    for key in keys:
        source = key >> shift
        if source == previous:
            continue
        previous = source
        rows += 1
        low = source * row_bytes // page_bytes * page_bytes
        high = ((source + 1) * row_bytes + page_bytes - 1) // page_bytes * page_bytes
        if end >= 0 and low <= end + gap_bytes:
            size += max(0, high - end)
        else:
            requests += 1
            size += high - low
        end = max(end, high)
    return rows, requests, size


@njit
def next_rows(keys: Int64, start: int, shift: int, limit: int, rows: Int64) -> Pair:
    """Distinct sources from a position on, into rows; stops where rows are full or at limit.

    Returns how many, and the position after their last edge.
    """
    count, position = 0, start
    previous = np.int64(-1)
    while position < keys.shape[0]:
        source = keys[position] >> shift
        if source != previous:
            if count == rows.shape[0] or source >= limit:
                break
            rows[count] = source
            count += 1
            previous = source
        position += 1
    return count, position


@njit
def add_mean(keys: Int64, shift: int, values: Float32, sums: Float32, counts: Float64) -> None:
    """Add each source's values [S, W] to the sums [T, W] of its targets, and count [T]."""
    mask = (np.int64(1) << shift) - 1
    row, previous = -1, np.int64(-1)
    for key in keys:
        source = key >> shift
        if source != previous:
            row += 1
            previous = source
        target = key & mask
        counts[target] += 1
        for column in range(values.shape[1]):
            sums[target, column] += values[row, column]


@njit
def add_attention(
    keys: Int64,
    shift: int,
    values: Float32,
    scores: Float32,
    *,
    slope: float,
    sums: Float32,
    norms: Float64,
) -> None:
    """Add each source's values [S, W], weighted by exp(score - running maximum), per head.

    scores [S, H], sums [T, W]; norms [T, 3 H] are maxima, denominators and the targets' scores.
    """
    mask = (np.int64(1) << shift) - 1
    heads = scores.shape[1]
    width = values.shape[1] // heads
    row, previous = -1, np.int64(-1)
    for key in keys:
        source = key >> shift
        if source != previous:
            row += 1
            previous = source
        target = key & mask
        for head in range(heads):
            score = scores[row, head] + norms[target, 2 * heads + head]
            score = score if score > 0 else score * slope
            base = head * width
            if score > norms[target, head]:
                scale = np.exp(norms[target, head] - score)
                norms[target, head] = score
                norms[target, heads + head] *= scale
                for column in range(base, base + width):
                    sums[target, column] *= scale
            weight = np.exp(score - norms[target, head])
            norms[target, heads + head] += weight
            for column in range(base, base + width):
                sums[target, column] += weight * values[row, column]
