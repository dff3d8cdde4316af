"""How layer-wise inference divides its memory, and how a range of targets is best read.

Pure arithmetic. A layer goes over ranges of targets. Each range keeps running sums in memory
while the rows of all its in-neighbours stream by in ascending order. They are gathered (only the
needed pages are read) or swept (everything between the first and the last is read, as in a
broadcast of ATLAS, arXiv 2605.09402), whichever costs less on the disk at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from fivefold.errors import InfeasibleError
from fivefold.gnn.storage import DiskProfile
from fivefold.gnn.training._inference_kernels import reading_cost
from fivefold.gnn.training._inference_layers import Aggregate, LayerParts
from fivefold.units import format_bytes

PAGE_BYTES = 4096
_SWEEP_BYTES = 1 << 20
_KEY_BYTES = 8
_READER_SHARE = 4  # a quarter of a small budget goes to the engine's own buffers
_MOST_READER_BYTES = 16 << 20
_BOOKKEEPING_BYTES = 72  # row numbers, runs and places of a read
_CHUNK_SHARE = 0.25

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """How much of each thing is in memory at once.

    Args:
        targets: Nodes whose sums are kept.
        edges: Edges that are sorted together.
        rows: Rows of a chunk that is read and used.
        reader_bytes: Buffers of the reading engine.
    """

    targets: int
    edges: int
    rows: int
    reader_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the rows of one piece are read, and what that is expected to cost.

    Args:
        way: "gather" reads the needed pages, "sweep" everything between first and last row.
        rows: Distinct rows that are needed.
        requests: Requests to the disk.
        num_bytes: Bytes read.
        seconds: Expected time.
    """

    way: Literal["gather", "sweep"]
    rows: int
    requests: int
    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of targets.

    Args:
        first: First target.
        stop: Target after the last.
        low: First in-edge.
        high: In-edge after the last.
    """

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

    Args:
        memory_bytes: Budget of everything but model and topology.
        parts: The layer.
        row_bytes: Bytes of a stored row of the layer's input.
        num_nodes: Nodes of the graph.
        num_edges: Edges of the graph.

    Raises:
        InfeasibleError: Not even one row fits.
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
    """Bytes that a row of a chunk takes on its way.

    As it is stored three times (one is read ahead, one is picked), in float32, as a message with
    what scores take, and the reader's bookkeeping.
    """
    stored = 3 * row_bytes + 4 * parts.in_dim + _BOOKKEEPING_BYTES
    source = 4 * ((2 if parts.heads else 1) * parts.width + 3 * parts.heads)
    target = 4 * (2 * parts.width + 3 * parts.out_dim)
    return stored + max(source, target)


def ranges(indptr: Int64, shares: Shares, *, first: int = 0) -> Iterator[Piece]:
    """Ranges of targets from a node on, each as long as sums and edges allow, at least one node.

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
    """Gather or sweep the sources of sorted keys, by predicted time.

    Args:
        keys: Sorted keys of a piece, not empty.
        shift: Bits of the targets' places.
        row_bytes: Bytes of a stored row.
        profile: The disk.
        gap_bytes: Gaps that a gather reads through.
    """
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
