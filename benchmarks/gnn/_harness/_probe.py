"""What the disk can do at this moment: a second of sequential and a second of random reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.systems import PageReader

__all__ = ["Probe", "probe"]

Blocks = NDArray[np.int64]
_BLOCK_BYTES = 1 << 20
_PAGE_BYTES = 4096
_STREAMS = 4  # reads under way: deeper queues of long reads bring nothing
_RANDOM_STREAMS = 16


@dataclass(frozen=True)
class Probe:
    """One look at the disk."""

    sequential_bytes_per_s: float
    random_pages_per_s: float

    def __str__(self) -> str:
        sequential = self.sequential_bytes_per_s / 1e6
        return f"{sequential:.0f} MB/s sequential, {self.random_pages_per_s / 1e3:.1f} k pages/s"


def probe(path: Path, *, seconds: float = 1.0, seed: int = 0) -> Probe:
    """Read a large file in order and at random, past the page cache.

    Args:
        path: The file; a few hundred MB at least.
        seconds: For each of the two.
        seed: Of the places.
    """
    size = path.stat().st_size
    draw = np.random.default_rng(seed)
    sequential = _timed(
        path,
        block_bytes=_BLOCK_BYTES,
        streams=_STREAMS,
        seconds=seconds,
        # Each stream takes every fourth block, so that the file is read in order.
        next_blocks=_in_order(size // _BLOCK_BYTES, start=int(draw.integers(1 << 30))),
    )
    pages = max(1, size // _PAGE_BYTES)
    random = _timed(
        path,
        block_bytes=_PAGE_BYTES,
        streams=_RANDOM_STREAMS,
        seconds=seconds,
        next_blocks=lambda: draw.integers(0, pages, 4096),
    )
    return Probe(sequential * _BLOCK_BYTES, random)


def _in_order(blocks: int, *, start: int) -> Callable[[], Blocks]:
    at = start % max(1, blocks)

    def following() -> Blocks:
        nonlocal at
        taken = (at + np.arange(64)) % max(1, blocks)
        at += 64
        return taken.reshape(-1, _STREAMS).T.reshape(-1)

    return following


def _timed(
    path: Path,
    *,
    block_bytes: int,
    streams: int,
    seconds: float,
    next_blocks: Callable[[], Blocks],
) -> float:
    """Blocks per second."""
    reader = PageReader(path, base=0, row_bytes=block_bytes, threads=streams)
    try:
        first = next_blocks()
        out = np.empty((len(first), block_bytes), np.uint8)
        places = np.arange(len(first))
        reader.read(first[:streams], places[:streams], out)  # compiled and opened
        done, started_s = 0, time.perf_counter()
        while (passed_s := time.perf_counter() - started_s) < seconds:
            reader.read(next_blocks(), places, out)
            done += len(places)
    finally:
        reader.close()
    return done / passed_s
