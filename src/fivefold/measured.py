"""Measured times of sizes, made a model: what a clock says is noise until no later use can fail.

A larger message or request contains a smaller one, and one of twice the size can go as two. So a
time of a size never falls, and per byte it never rises; with both, t(a + b) <= t(a) + t(b).
Measurements break this where a neighbour of the machine, a cache or a token bucket came between.
The largest size is believed most: a delay of fixed length is the least part of it, and what a cache
or a bucket lends is used up in it. Every smaller one is moved just as far as those above it ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from fivefold.errors import DataError

__all__ = ["NOISE", "consistent_times_s"]

NOISE = 0.01
"""Share of a measured time below which a difference to another is the machine's, not the size's."""


def consistent_times_s(
    sizes_bytes: Sequence[float], times_s: Sequence[float], *, least_rise: float = 0.0
) -> list[float]:
    """Return the times nearest to the measured ones that a link, a disk or a codec can have.

    Args:
        sizes_bytes: Sizes, above 0 and ascending.
        times_s: What each took, in seconds.
        least_rise: Least share of its time by which each size takes longer than the one before,
            where no noise hides that; 0 lets times stay level. At most what sizes in proportion
            would rise by.

    Returns:
        Times that never fall, and never rise per byte, the last as it was measured. Times that do
        both already are returned as they are.

    Raises:
        DataError: A time is not above 0 and finite, sizes do not ascend, or their numbers differ.

    Examples:
        >>> consistent_times_s([1, 2, 4], [3.0, 2.0, 2.5])
        [2.0, 2.0, 2.5]
        >>> consistent_times_s([1, 2, 4], [1.0, 1.5, 8.0])
        [2.0, 4.0, 8.0]
    """
    sizes, times = [float(size) for size in sizes_bytes], [float(time_s) for time_s in times_s]
    ascend = all(before < after for before, after in pairwise([0.0, *sizes, math.inf]))
    if not sizes or len(sizes) != len(times) or not ascend:
        raise DataError(
            f"{len(times)} times are for sizes {sizes}",
            hint="give a time for each size, and sizes above 0 that ascend",
        )
    for size, time_s in zip(sizes, times, strict=True):
        if not 0 < time_s < math.inf:
            raise DataError(
                f"{size:g} bytes took {time_s:g} s",
                hint="a time is finite and above 0: measure again, on a machine that is not busy",
            )
    for at in range(len(sizes) - 2, -1, -1):
        least_s = times[at + 1] * (sizes[at] / sizes[at + 1])
        most_s = max(times[at + 1] * (1 - least_rise), least_s)
        times[at] = min(max(times[at], least_s), most_s)
    return times
