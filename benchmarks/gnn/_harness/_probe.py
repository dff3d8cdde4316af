"""What the disk can do at this moment: a second of sequential and a second of random reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.gnn.systems import PageReader

__all__ = ["Probe", "probe"]

Blocks = NDArray[np.int64]
_BLOCK_BYTES = 1 << 20
_PAGE_BYTES = 4096
# Reads under way. Four are enough for some disks and a third too few for others, so that both
# are tried and the better one is the disk's.
_STREAMS = (4, 16)
_RANDOM_STREAMS = (16, 64)


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
        seconds: For each of the two; shared by the depths that are tried.
        seed: Of the places.
    """
    size = path.stat().st_size
    draw = np.random.default_rng(seed)
    blocks, pages = size // _BLOCK_BYTES, max(1, size // _PAGE_BYTES)
    sequential = max(
        _timed(
            path,
            block_bytes=_BLOCK_BYTES,
            streams=streams,
            seconds=seconds / len(_STREAMS),
            # Each stream takes every n-th block, so that the file is read in order.
            next_blocks=_in_order(blocks, streams, start=int(draw.integers(1 << 30))),
        )
        for streams in _STREAMS
    )
    random = max(
        _timed(
            path,
            block_bytes=_PAGE_BYTES,
            streams=streams,
            seconds=seconds / len(_RANDOM_STREAMS),
            next_blocks=lambda: draw.integers(0, pages, 4096),
        )
        for streams in _RANDOM_STREAMS
    )
    return Probe(sequential * _BLOCK_BYTES, random)


def _in_order(blocks: int, streams: int, *, start: int) -> Callable[[], Blocks]:
    at = start % max(1, blocks)

    def following() -> Blocks:
        nonlocal at
        taken = (at + np.arange(64)) % max(1, blocks)
        at += 64
        return taken.reshape(-1, streams).T.reshape(-1)

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
