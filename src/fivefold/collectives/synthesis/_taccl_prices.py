"""Times of one chunk as whole numbers, for solvers, in TACCL's model of a link.

A message keeps every resource of its route for the latency of the route and its bytes over that
resource's rate; it has arrived after the latency and its bytes over the narrowest rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._logical import Logical

_UNITS_PER_SHORTEST = 2_000  # so that rounding is far below what any model of a link is worth
_MOST_UNITS = 20_000_000  # per transfer: beyond it sums could leave what solvers handle well


@dataclass(frozen=True)
class Prices:
    """Whole units of time per logical link.

    Args:
        unit_s: Seconds per unit.
        latencies: Latency of each logical link, int64 [links].
        sends: Time of one chunk on the narrowest resource, without latency, int64 [links].
        busy: For each logical link the time that one chunk keeps each of its resources.
    """

    unit_s: float
    latencies: NDArray[np.int64]
    sends: NDArray[np.int64]
    busy: tuple[tuple[int, ...], ...]

    @cached_property
    def delays(self) -> NDArray[np.int64]:
        """From the start of one chunk to its arrival, int64 [links]."""
        return np.asarray(np.maximum(self.latencies + self.sends, 1), np.int64)


def prices_of(logical: Logical, *, size_bytes: float) -> Prices:
    """The prices of one chunk.

    Args:
        logical: The logical links.
        size_bytes: Size of the collective.

    Raises:
        ConfigurationError: Chunks differ in size.
    """
    chunk_bytes = logical.chunk_bytes(size_bytes)
    sends_s = chunk_bytes * logical.seconds_per_byte()
    whole_s = logical.latencies_s + sends_s
    positive = whole_s[whole_s > 0]
    shortest_s = float(positive.min()) if len(positive) else 1.0
    longest_s = float(positive.max()) if len(positive) else 1.0
    unit_s = max(shortest_s / _UNITS_PER_SHORTEST, longest_s / _MOST_UNITS)
    latencies = np.rint(logical.latencies_s / unit_s).astype(np.int64)
    rates = logical.capacities_bytes_per_s
    busy = tuple(
        tuple(
            max(int(latency) + round(chunk_bytes / float(rates[resource]) / unit_s), 1)
            for resource in resources
        )
        for latency, resources in zip(latencies, logical.instance.resources, strict=True)
    )
    return Prices(unit_s, latencies, np.rint(sends_s / unit_s).astype(np.int64), busy)
