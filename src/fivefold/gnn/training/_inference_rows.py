"""The rows of a layer's input, chunk by chunk, one chunk read ahead of its use.

What is read, in which order and how is decided by sorted keys and a ``Reading``; this module
turns that into calls of the reading engine, in a thread beside the computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold.gnn.storage import Container, ReadStatistics, RowReader, aligned_empty
from fivefold.gnn.training._config import Backend
from fivefold.gnn.training._inference_kernels import next_rows
from fivefold.gnn.training._inference_plan import PAGE_BYTES, Reading, Shares

Int64 = npt.NDArray[np.int64]
_NO_LIMIT = np.iinfo(np.int64).max
_LEAST_BLOCK_BYTES = 16 * PAGE_BYTES
_THREADS = 2
_MOST_BUFFERS = 64  # the engine has at most 16, and as much again in flight and for its plans


class RowStream:
    """Reads chunks of rows of one layer's input.

    Args:
        container: File of the rows, section "x".
        shares: Sizes of a chunk and of the engine's buffers.
        backend: Reading engine.
        gap_bytes: Gaps that a gather reads through.
        verify: Compare checksums.
    """

    def __init__(
        self,
        container: Container,
        shares: Shares,
        *,
        backend: Backend = "auto",
        gap_bytes: int = 0,
        verify: bool = True,
    ) -> None:
        section = container.section("x")
        block = shares.reader_bytes // _MOST_BUFFERS // PAGE_BYTES * PAGE_BYTES
        self._reader = RowReader(
            container,
            "x",
            backend=backend,
            threads=_THREADS,
            block_bytes=max(_LEAST_BLOCK_BYTES, block),
            max_gap_bytes=gap_bytes,
            verify=verify,
        )
        shape = (shares.rows, *section.shape[1:])
        self._buffers = [aligned_empty(shape, section.dtype) for _ in range(2)]
        self._num_rows = section.num_rows
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fivefold-rows")
        self.statistics = ReadStatistics()

    def close(self) -> None:
        """Wait for a read that is under way and let go of the file."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def sequence(self, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Consecutive rows as (place of the first one, their float32 rows)."""
        size = len(self._buffers[0])
        chunks = (_Chunk(low=low, count=min(size, stop - low)) for low in range(first, stop, size))
        for chunk, raw in self._ahead(chunks):
            yield chunk.low, _float32(raw)

    def sources(self, keys: Int64, shift: int, reading: Reading) -> Iterator[tuple[Int64, Tensor]]:
        """The sources of sorted keys as (the keys of these sources, their float32 rows)."""
        for chunk, raw in self._ahead(self._chunks(keys, shift, sweeps=reading.way == "sweep")):
            picked = raw if chunk.count == len(chunk.rows) else raw[chunk.rows - chunk.low]
            yield chunk.keys, _float32(picked)

    def _chunks(self, keys: Int64, shift: int, *, sweeps: bool) -> Iterator[_Chunk]:
        position, size = 0, len(self._buffers[0])
        while position < len(keys):
            low = int(keys[position] >> shift)
            rows = np.empty(size, np.int64)
            limit = low + size if sweeps else _NO_LIMIT
            found, stop = next_rows(keys, position, shift, limit, rows)
            rows = rows[:found]
            count = int(rows[-1]) + 1 - low if sweeps else found
            yield _Chunk(low=low, count=count, rows=rows, keys=keys[position:stop], sweeps=sweeps)
            position = stop

    def _ahead(self, chunks: Iterator[_Chunk]) -> Iterator[tuple[_Chunk, npt.NDArray[Any]]]:
        """Each chunk with its raw rows, while the next one is being read."""
        waiting: tuple[_Chunk, Future[npt.NDArray[Any]]] | None = None
        for number, chunk in enumerate(chunks):
            # The buffer was handed out two chunks ago; whoever had it has asked for the next since.
            future = self._worker.submit(self._read, chunk, self._buffers[number % 2])
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = chunk, future
        if waiting is not None:
            yield waiting[0], waiting[1].result()

    def _read(self, chunk: _Chunk, buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
        out = buffer[: chunk.count]
        if chunk.sweeps:
            one = np.array([chunk.low]), np.array([chunk.count]), np.array([0])
            self.statistics += self._reader.read_runs(*one, out)
        else:
            self.statistics += self._reader.read_rows(chunk.rows, out)
        return out


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Chunk:
    """Rows that are read together: a run from low on, or picked ones; and the edges for them."""

    low: int
    count: int
    rows: Int64 = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    keys: Int64 = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    sweeps: bool = True


def _float32(raw: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(raw, np.float32))
