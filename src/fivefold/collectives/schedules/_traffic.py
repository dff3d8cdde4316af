"""What must cross a cut, for any collective: bytes into and out of groups, and past a sweep.

A copied chunk must cross from S to the rest if all its holders are in S and a receiver is not; a
summed one if any contributor is in S and a receiver is not, for no one outside knows that part of
the sum. Either way at least the chunk's bytes cross, once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Array, Floats, Longs
from fivefold.collectives.schedules._collective import Collective


def group_traffic(
    collective: Collective, chunk_bytes: Floats, groups: Array, *, num_groups: int
) -> tuple[Floats, Floats, Longs, Longs]:
    """Least bytes and chunks into and out of each group of ranks.

    Args:
        collective: The collective.
        chunk_bytes: Bytes of each chunk.
        groups: Group of each rank.
        num_groups: Groups.

    Returns:
        Bytes in, bytes out, chunks in, chunks out, each [num_groups].
    """
    found = _group_traffic(
        (collective.pre_offsets, groups[collective.pre_ranks].astype(np.int32)),
        (collective.post_offsets, groups[collective.post_ranks].astype(np.int32)),
        np.ascontiguousarray(chunk_bytes),
        (num_groups, int(collective.reducing)),
    )
    return found[0], found[1], found[2], found[3]


@njit
def _group_traffic(
    pre: tuple[Any, Any], post: tuple[Any, Any], chunk_bytes: Any, shape: tuple[int, int]
) -> tuple[Any, Any, Any, Any]:
    num_groups, reducing = shape
    bytes_in, bytes_out = np.zeros(num_groups), np.zeros(num_groups)
    chunks_in, chunks_out = np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64)
    seen = np.zeros(num_groups, np.int64)  # bit 0: starts here, bit 1: arrives here
    for chunk in range(chunk_bytes.size):
        starts = pre[1][pre[0][chunk] : pre[0][chunk + 1]]
        ends = post[1][post[0][chunk] : post[0][chunk + 1]]
        num_starts, num_ends = 0, 0
        for group in starts:
            num_starts += seen[group] & 1 == 0
            seen[group] |= 1
        for group in ends:
            num_ends += seen[group] & 2 == 0
            seen[group] |= 2
        for group in starts:
            state = seen[group]
            if state == 0:
                continue
            leaves = reducing or num_starts == 1
            if leaves and num_ends > (state >> 1):  # someone else receives it
                bytes_out[group] += chunk_bytes[chunk]
                chunks_out[group] += 1
            if state == 3 and reducing and num_starts > 1:
                bytes_in[group] += chunk_bytes[chunk]
                chunks_in[group] += 1
            seen[group] = 0
        for group in ends:
            if seen[group] == 2:  # arrives here without having started here
                bytes_in[group] += chunk_bytes[chunk]
                chunks_in[group] += 1
            seen[group] = 0
    return bytes_in, bytes_out, chunks_in, chunks_out


def sweep_traffic(collective: Collective, chunk_bytes: Floats, places: Longs) -> Floats:
    """Least bytes from the first k ranks of an order to the others, for k = 0..N.

    Args:
        collective: The collective.
        chunk_bytes: Bytes of each chunk.
        places: Place of each rank in the order.

    Returns:
        float64 [N + 1].
    """
    pre, post = collective.pre_offsets, collective.post_offsets
    used = np.flatnonzero((np.diff(pre) > 0) & (np.diff(post) > 0))
    total = np.zeros(collective.num_ranks + 2)
    if used.size:
        spread = np.minimum if collective.reducing else np.maximum
        # Segments of unused chunks are empty, so the next used one starts where this one ends.
        first = spread.reduceat(places[collective.pre_ranks], pre[used])
        last = np.maximum.reduceat(places[collective.post_ranks], post[used])
        crosses = last > first  # for every k with first < k <= last
        sizes = chunk_bytes[used][crosses]
        np.add.at(total, first[crosses] + 1, sizes)
        np.add.at(total, last[crosses] + 1, -sizes)
    return np.maximum(np.cumsum(total)[:-1], 0.0)
