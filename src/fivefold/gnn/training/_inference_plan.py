"""How layer-wise inference divides its memory, and how a range of targets is best read.

Pure arithmetic. A layer goes over ranges of targets. Each range keeps running sums in memory
while the rows of all its in-neighbours stream by in ascending order. They are gathered (only the
needed pages are read) or swept (everything between the first and the last is read, as in a
broadcast of ATLAS, arXiv 2605.09402), whichever costs less on the disk at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold.errors import InfeasibleError
from fivefold.gnn.storage import Container, DiskProfile, RowReader
from fivefold.gnn.storage.pages import aligned_empty
from fivefold.gnn.storage.reader import ReadStatistics
from fivefold.gnn.training._config import Backend
from fivefold.gnn.training._inference_layers import Aggregate, LayerParts, next_rows, reading_cost
from fivefold.units import format_bytes

PAGE_BYTES = 4096
_SWEEP_BYTES = 1 << 20
_KEY_BYTES = 8
_READER_SHARE = 4  # a quarter of a small budget goes to the engine's own buffers
_MOST_READER_BYTES = 16 << 20
_BOOKKEEPING_BYTES = 72  # row numbers, runs and places of a read
_CHUNK_SHARE = 0.25
_NO_LIMIT = np.iinfo(np.int64).max
_LEAST_BLOCK_BYTES = 16 * PAGE_BYTES
_THREADS = 2
_MOST_BUFFERS = 64  # the engine has at most 16, and as much again in flight and for its plans

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """How much of each thing is in memory at once."""

    targets: int
    edges: int
    rows: int
    reader_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the rows of one piece are read, and what that is expected to cost."""

    way: Literal["gather", "sweep"]
    rows: int
    requests: int
    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of targets."""

    first: int
    stop: int
    low: int
    high: int


def share_memory(
    memory_bytes: int, parts: LayerParts, *, row_bytes: int, num_nodes: int, num_edges: int
) -> Shares:
    """Divide a budget so that few ranges are needed.

    Sums and edges share what is left after a quarter for chunks of rows; both cover the same
    share of the graph, since a range lasts until either is full.
    """
    reader_bytes = min(_MOST_READER_BYTES, memory_bytes // _READER_SHARE)
    free = memory_bytes - reader_bytes
    chunk_bytes = _bytes_per_chunk_row(parts, row_bytes)
    sum_bytes = Aggregate.bytes_per_target(parts)
    rows = int(free * _CHUNK_SHARE) // chunk_bytes
    whole = num_nodes * sum_bytes + num_edges * _KEY_BYTES
    share = min(1.0, free * (1 - _CHUNK_SHARE) / max(whole, 1))
    targets, edges = int(num_nodes * share), int(num_edges * share)
    if rows < 1 or (num_nodes and targets < 1) or (num_edges and edges < 1):
        least = 8 * (chunk_bytes + sum_bytes + _KEY_BYTES) + whole // max(num_nodes, 1) * 8
        raise InfeasibleError(
            f"{format_bytes(memory_bytes)} hold no row of {format_bytes(row_bytes)} with its sums",
            hint=f"give at least {format_bytes(least)}",
        )
    return Shares(
        targets=max(1, targets),
        edges=max(1, edges),
        rows=max(1, min(rows, num_nodes)),
        reader_bytes=reader_bytes,
    )


def _bytes_per_chunk_row(parts: LayerParts, row_bytes: int) -> int:
    """Return the bytes that a row of a chunk takes on its way.

    As it is stored three times (one is read ahead, one is picked), in float32, as a message with
    what scores take, and the reader's bookkeeping.
    """
    stored = 3 * row_bytes + 4 * parts.in_dim + _BOOKKEEPING_BYTES
    source = 4 * ((2 if parts.heads else 1) * parts.width + 3 * parts.heads)
    target = 4 * (2 * parts.width + 3 * parts.out_dim)
    return stored + max(source, target)


def ranges(indptr: Int64, shares: Shares, *, first: int = 0) -> Iterator[Piece]:
    """Yield ranges of targets, each as long as sums and edges allow, at least one node.

    A node with more in-edges than fit is a range of its own, whose edges come in several parts.
    """
    num_nodes = len(indptr) - 1
    while first < num_nodes:
        low = int(indptr[first])
        fit = int(np.searchsorted(indptr, low + shares.edges, side="right")) - 1
        stop = min(max(fit, first + 1), first + shares.targets, num_nodes)
        yield Piece(first=first, stop=stop, low=low, high=int(indptr[stop]))
        first = stop


def choose_reading(
    keys: Int64, shift: int, *, row_bytes: int, profile: DiskProfile, gap_bytes: int
) -> Reading:
    """Gather or sweep the sources of sorted keys, by predicted time."""
    rows, requests, size = reading_cost(keys, shift, row_bytes, PAGE_BYTES, gap_bytes)
    span = int((keys[-1] >> shift) - (keys[0] >> shift) + 1) * row_bytes
    swept_bytes = -(-span // PAGE_BYTES) * PAGE_BYTES
    swept = -(-swept_bytes // _SWEEP_BYTES)
    requests = max(requests, -(-size // _SWEEP_BYTES))  # a long extent is several requests too
    gather_s, sweep_s = profile.seconds(requests, size), profile.seconds(swept, swept_bytes)
    if sweep_s <= gather_s:
        return Reading(
            way="sweep", rows=rows, requests=swept, num_bytes=swept_bytes, seconds=sweep_s
        )
    return Reading(way="gather", rows=rows, requests=requests, num_bytes=size, seconds=gather_s)


class RowStream:
    """Reads chunks of rows of one layer's input."""

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
        """Yield consecutive rows as (place of the first one, their float32 rows)."""
        size = len(self._buffers[0])
        chunks = (_Chunk(low=low, count=min(size, stop - low)) for low in range(first, stop, size))
        for chunk, raw in self._ahead(chunks):
            yield chunk.low, _float32(raw)

    def sources(self, keys: Int64, shift: int, reading: Reading) -> Iterator[tuple[Int64, Tensor]]:
        """Yield the sources of sorted keys as (the keys of these sources, their float32 rows)."""
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
        """Yield each chunk with its raw rows, while the next one is being read."""
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
