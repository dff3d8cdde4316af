"""What is asked of the front, and the chunkings that it may choose from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fivefold.collectives.schedules import (
    COLLECTIVES,
    Collective,
    CostModel,
    Schedule,
    named_collective,
)
from fivefold.collectives.synthesis._sketch import Sketch
from fivefold.network.topology import Topology

Candidate = tuple[Schedule, float]
"""A schedule and the seconds of its solver."""

_FINEST = 0.25  # chunks that take less than this share of the latency are not worth their cost


@dataclass(frozen=True, kw_only=True)
class Request:
    """A collective on a topology, for a size, under a deadline.

    Args:
        collective: The collective, exactly as it is to be cut into chunks; or, where ``free``,
            with one chunk per buffer, to be cut as suits.
        free: Whether the number of chunks may be chosen.
        topology: Where.
        size_bytes: Size of the collective.
        model: Cost model by which schedules are compared.
        sketch: For TACCL; None: derived.
        deadline_s: On the clock of ``time.perf_counter``.
        seed: Seed of everything random.
        progress: Called with one line per step of the work.
    """

    collective: Collective
    free: bool
    topology: Topology
    size_bytes: float
    model: CostModel
    sketch: Sketch | None
    deadline_s: float
    seed: int
    progress: Callable[[str], None] | None

    def left_s(self, share: float = 1.0) -> float:
        """A share of the time that is left; 0 where none is."""
        return max((self.deadline_s - time.perf_counter()) * share, 0.0)

    def say(self, line: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(line)

    def with_chunks(self, count: int) -> Collective:
        """The collective with ``count`` chunks where there was one."""
        plain = self.collective
        if count == 1:
            return plain
        ranks = plain.num_ranks if plain.name == "all_reduce" else 1
        root = plain.root if plain.root is not None else 0
        return named_collective(plain.name, plain.num_ranks, chunks=count * ranks, root=root)

    def chunkings(self, *, most: int) -> Iterator[tuple[int, Collective]]:
        """The collective in 1, 2, 4, ... chunks where that is free, as far as it can pay."""
        yield 1, self.collective
        if not self.free or self.collective.name not in COLLECTIVES:
            return
        count = 2
        while count <= min(most, self._finest()):
            yield count, self.with_chunks(count)
            count *= 2

    def _finest(self) -> int:
        chunk_bytes = float(np.max(self.collective.chunk_bytes(self.size_bytes), initial=0.0))
        rates = self.topology.capacities_bytes_per_s
        latencies = self.topology.latencies_s
        if not len(rates) or chunk_bytes <= 0:
            return 1
        latency_s = float(np.median(latencies))
        if latency_s <= 0:
            return 1 << 20
        sending_s = chunk_bytes / float(np.min(rates))
        return int(sending_s / (latency_s * _FINEST))
