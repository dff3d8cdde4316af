"""A convolution taken apart for inference out of core: messages, running sums, finish.

Messages are a function of a source's row alone, and are added in any order and number of parts, so
that a hub's neighbours can be read a few at a time. Rows are gathered, or swept from the first to
the last as in a broadcast of ATLAS (arXiv 2605.09402), whichever costs less on the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold._compiler import njit
from fivefold.errors import InfeasibleError, UnsupportedError
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.sampling.batches import ONE_TYPE, EdgeType
from fivefold.gnn.storage import Container, DiskProfile, RowReader
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Ids, aligned_empty
from fivefold.gnn.storage.parallel import read_ahead
from fivefold.gnn.storage.reader import ReadStatistics
from fivefold.gnn.training.config import Backend
from fivefold.gnn.training.models import GAT, GCN, GraphSAGE, LayeredModel, TypedSAGE
from fivefold.units import format_bytes

Pair = tuple[int, int]
Int64 = Ids
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


class Aggregate:
    """Messages that targets have received so far: sums [T, width] and norms [T, extra].

    Norms are float64, which counts any number of neighbours.
    """

    def __init__(self, targets: int, parts: LayerParts) -> None:
        self.sums: Float32 = np.zeros((targets, parts.width), np.float32)
        self.norms: Float64 = np.zeros((targets, parts.extra), np.float64)


class MeanParts:
    """A mean of rows, or of rows made narrower first where the output is narrower."""

    heads, extra = 0, 1

    def __init__(self, linear: Any, *, with_own: bool = False) -> None:
        self.with_own = with_own  # whether a node is among its neighbours, once
        self.weight: Tensor = linear.weight.detach().cpu()
        bias = torch.zeros(()) if linear.bias is None else linear.bias
        self.bias: Tensor = bias.detach().cpu()
        self.out_dim, self.in_dim = int(self.weight.shape[0]), int(self.weight.shape[1])
        self.narrows = self.out_dim < self.in_dim
        self.width = min(self.in_dim, self.out_dim)

    def messages(self, rows: Tensor) -> tuple[Float32, Float32]:
        """Return the values [S, width] and scores [S, heads] of source rows [S, in_dim]."""
        values = rows @ self.weight.T if self.narrows else rows
        return values.numpy(), np.empty((len(rows), 0), np.float32)

    def begin(self, aggregate: Aggregate, start: int, own: Tensor) -> None:
        """Put the targets' own rows [T, in_dim] into the aggregate from place start on."""
        values, _ = self.messages(own)
        aggregate.sums[start : start + len(own)] = values
        aggregate.norms[start : start + len(own)] = 1

    def add(
        self, aggregate: Aggregate, keys: Int64, shift: int, messages: tuple[Float32, Float32]
    ) -> None:
        """Add messages along sorted edges."""
        add_mean(keys, shift, messages[0], aggregate.sums, aggregate.norms[:, 0])

    def finish(self, aggregate: Aggregate, places: slice) -> Tensor:
        """Return the outputs [T, out_dim] of the targets at some places of the aggregate."""
        sums = torch.from_numpy(aggregate.sums[places])
        means = sums / torch.from_numpy(aggregate.norms[places]).clamp(min=1).float()
        return (means if self.narrows else means @ self.weight.T) + self.bias


class _Gat:
    """Attention; the aggregate keeps running maxima, denominators and the targets' scores."""

    with_own = True

    def __init__(self, conv: Any) -> None:
        self.weight: Tensor = conv.lin.weight.detach().cpu()
        self.bias: Tensor = conv.bias.detach().cpu()
        self.source: Tensor = conv.att_src.detach().cpu()[0]
        self.target: Tensor = conv.att_dst.detach().cpu()[0]
        self.heads, self.head_dim = self.source.shape
        self.slope, self.concat = float(conv.negative_slope), bool(conv.concat)
        self.width, self.in_dim = self.weight.shape
        self.out_dim = self.width if self.concat else self.head_dim
        self.extra = 3 * self.heads

    def messages(self, rows: Tensor) -> tuple[Float32, Float32]:
        """Return the values [S, width] and scores [S, heads] of source rows [S, in_dim]."""
        values = rows @ self.weight.T
        return values.numpy(), self._scores(values, self.source).numpy()

    def _scores(self, values: Tensor, vector: Tensor) -> Tensor:
        return (values.view(-1, self.heads, self.head_dim) * vector).sum(-1)

    def begin(self, aggregate: Aggregate, start: int, own: Tensor) -> None:
        """Put the targets' own rows [T, in_dim] in from place start on, as first neighbours."""
        values = own @ self.weight.T
        places = slice(start, start + len(own))
        tops, totals, targets = self._norms(aggregate)
        score = self._scores(values, self.target)
        targets[places] = score.numpy()
        score = score + self._scores(values, self.source)
        tops[places] = torch.where(score > 0, score, score * self.slope).numpy()
        totals[places] = 1
        aggregate.sums[places] = values.numpy()

    def add(
        self, aggregate: Aggregate, keys: Int64, shift: int, messages: tuple[Float32, Float32]
    ) -> None:
        """Add messages along sorted edges, weighted by a running softmax."""
        values, scores = messages
        into = {"sums": aggregate.sums, "norms": aggregate.norms}
        add_attention(keys, shift, values, scores, slope=self.slope, **into)

    def finish(self, aggregate: Aggregate, places: slice) -> Tensor:
        """Return the outputs [T, out_dim]: each head divided by the sum of its weights."""
        totals = torch.from_numpy(self._norms(aggregate)[1][places])
        sums = torch.from_numpy(aggregate.sums[places]).view(-1, self.heads, self.head_dim)
        heads = sums / totals.float().unsqueeze(-1)
        return (heads.flatten(1) if self.concat else heads.mean(1)) + self.bias

    def _norms(self, aggregate: Aggregate) -> tuple[Float64, Float64, Float64]:
        heads, norms = self.heads, aggregate.norms
        return norms[:, :heads], norms[:, heads : 2 * heads], norms[:, 2 * heads :]


LayerParts: TypeAlias = "MeanParts | _Gat"
"""One layer of a model, taken apart."""


class Outputs:
    """The outputs of one layer for one node type: how they follow from the rows before.

    ``own`` are weight and bias of a map of a node's own row; None where there is none. The outputs
    of ``into``, the parts of each edge type into this type, add up.
    """

    def __init__(self, name: str, own: Any, into: Mapping[EdgeType, LayerParts]) -> None:
        self.name, self.into, self.own = name, into, None
        parts = list(into.values())
        dims = [(part.in_dim, part.out_dim) for part in parts]
        if own is not None:
            weight = own.weight.detach().cpu()
            self.own = weight, None if own.bias is None else own.bias.detach().cpu()
            dims.append((int(weight.shape[1]), int(weight.shape[0])))
        self.in_dim, self.out_dim = max(dim for dim, _ in dims), dims[0][1]
        self.width = max((part.width for part in parts), default=0)
        self.extra = max((part.extra for part in parts), default=0)
        self.heads = max((part.heads for part in parts), default=0)


def take_apart(model: LayeredModel | TypedSAGE) -> list[list[Outputs]]:
    """Return the layers of a model, each as the outputs of its node types."""
    if isinstance(model, TypedSAGE):
        return [
            [
                Outputs(
                    name,
                    own,
                    {k: MeanParts(part) for k, part in layer.into.items() if k[2] == name},
                )
                for name, own in layer.own_maps.items()
            ]
            for layer in model.typed_layers
        ]
    parts: dict[type[LayeredModel], Callable[[Any], tuple[Any, LayerParts]]] = {
        GraphSAGE: lambda conv: (conv.lin_r, MeanParts(conv.lin_l)),
        GCN: lambda conv: (None, MeanParts(conv.lin, with_own=True)),
        GAT: lambda conv: (None, _Gat(conv)),
    }
    if type(model) not in parts:
        message = f"layer-wise inference knows no {type(model).__name__}"
        raise UnsupportedError(message, hint="use GraphSAGE, GCN or GAT, or sample the nodes")
    layers = [parts[type(model)](conv) for conv in model.convs]
    return [[Outputs(ONE_TYPE[2], own, {ONE_TYPE: part})] for own, part in layers]


@njit
def fill_keys(
    indptr: Int64,
    sources: Array,
    targets: Pair,
    edges: Pair,
    *,
    shift: int,
    drops_loops: bool,
    keys: Int64,
) -> int:
    """Fill in the keys of the in-edges ``edges = (low, high)``; return their number.

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


def sorted_keys(
    topology: Adjacency, first: int, edges: Pair, *, shift: int, drops_loops: bool, keys: Int64
) -> Int64:
    """Return the sorted keys of the in-edges ``edges = (low, high)`` of targets from first on."""
    low, high = edges
    # The kernel looks for the first edge's target from here on.
    start = int(np.searchsorted(topology.indptr, low, side="right")) - 1
    sources = topology.indices[low:high]
    options = {"shift": shift, "drops_loops": drops_loops, "keys": keys}
    count = fill_keys(topology.indptr, sources, (first, start), edges, **options)
    topology.check_unchanged()
    keys[:count].sort()
    return keys[:count]


@njit
def reading_cost(
    keys: Int64, shift: int, row_bytes: int, page_bytes: int, gap_bytes: int
) -> tuple[int, int, int]:
    """Count distinct sources of sorted keys, and requests and bytes of reading them by pages.

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
    """Fill in distinct sources from a position on; stop where rows are full or at limit.

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


class Shares(NamedTuple):
    """Targets, edges and rows that are in memory at once, and bytes of the reader."""

    targets: int
    edges: int
    rows: int
    reader_bytes: int


def share_memory(
    memory_bytes: int, parts: Outputs, *, row_bytes: int, num_nodes: int, num_edges: int
) -> Shares:
    """Divide a budget so that few ranges are needed.

    Sums and edges share what is left after a quarter for chunks of rows; both cover the same
    share of the graph, since a range lasts until either is full.
    """
    reader_bytes = min(_MOST_READER_BYTES, memory_bytes // _READER_SHARE)
    free = memory_bytes - reader_bytes
    # What a row of a chunk takes: as it is stored three times (one is read ahead, one is picked),
    # in float32, as a message with what scores take, and the reader's bookkeeping.
    source = 4 * ((2 if parts.heads else 1) * parts.width + 3 * parts.heads)
    target = 4 * (2 * parts.width + 3 * parts.out_dim)
    stored = 3 * row_bytes + 4 * parts.in_dim + _BOOKKEEPING_BYTES
    chunk_bytes = stored + max(source, target)
    sum_bytes = 4 * (parts.width + parts.out_dim) + 8 * parts.extra  # sums beside outputs
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
    most_rows = max(1, min(rows, num_nodes))
    return Shares(max(1, targets), max(1, edges), most_rows, reader_bytes)


def ranges(indptr: Int64, shares: Shares, *, first: int = 0) -> Iterator[range]:
    """Yield ranges of targets, each as long as sums and edges allow, at least one node.

    A node with more in-edges than fit is a range of its own, whose edges come in several parts.
    """
    num_nodes = len(indptr) - 1
    while first < num_nodes:
        fit = int(np.searchsorted(indptr, indptr[first] + shares.edges, side="right")) - 1
        stop = min(max(fit, first + 1), first + shares.targets, num_nodes)
        yield range(first, stop)
        first = stop


def choose_reading(
    keys: Int64, shift: int, *, row_bytes: int, profile: DiskProfile, gap_bytes: int
) -> Literal["gather", "sweep"]:
    """Gather or sweep the sources of sorted keys, by predicted time."""
    _, requests, size = reading_cost(keys, shift, row_bytes, PAGE_BYTES, gap_bytes)
    span = int((keys[-1] >> shift) - (keys[0] >> shift) + 1) * row_bytes
    swept_bytes = -(-span // PAGE_BYTES) * PAGE_BYTES
    swept = -(-swept_bytes // _SWEEP_BYTES)
    requests = max(requests, -(-size // _SWEEP_BYTES))  # a long extent is several requests too
    gather_s, sweep_s = profile.seconds(requests, size), profile.seconds(swept, swept_bytes)
    return "sweep" if sweep_s <= gather_s else "gather"


def profitable_gap_bytes(profile: DiskProfile) -> int:
    """Return the longest gap that costs less to read through than another request does.

    It is at most the longest request, into which whatever is longer is cut.
    """
    # Neither is negative: times of a profile never fall, and never exceed those of two halves.
    request_s = profile.seconds(2, 2 * PAGE_BYTES) - profile.seconds(1, 2 * PAGE_BYTES)
    page_s = (profile.seconds(2, 66 * PAGE_BYTES) - profile.seconds(2, 2 * PAGE_BYTES)) / 64
    most = _SWEEP_BYTES // PAGE_BYTES
    pages = int(request_s / page_s) if most * page_s > request_s else most
    return pages * PAGE_BYTES if request_s > 0 else 0


class RowStream:
    """Reads chunks of rows of one layer's input."""

    def __init__(
        self,
        container: Container,
        shares: Shares,
        *,
        backend: Backend = "auto",
        gap_bytes: int = 0,
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
        )
        shape = (shares.rows, *section.shape[1:])
        self._buffers = aligned_empty(shape, section.dtype), aligned_empty(shape, section.dtype)
        self.statistics = ReadStatistics()

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()

    def sequence(self, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield consecutive rows as (place of the first one, their float32 rows)."""
        size = len(self._buffers[0])
        chunks = (range(low, min(low + size, stop)) for low in range(first, stop, size))
        for (chunk, raw), _ in read_ahead(chunks, self._read, self._buffers):
            yield int(chunk[0]), _float32(raw)

    def sources(self, keys: Int64, shift: int, way: str) -> Iterator[tuple[Int64, Tensor]]:
        """Yield the sources of sorted keys as (the keys of these sources, their float32 rows)."""
        found: deque[tuple[Int64, Int64]] = deque()  # rows and keys of chunks being read

        def chunks() -> Iterator[range | Int64]:
            position, size = 0, len(self._buffers[0])
            while position < len(keys):
                low = int(keys[position] >> shift)
                rows = np.empty(size, np.int64)
                limit = low + size if way == "sweep" else _NO_LIMIT
                count, stop = next_rows(keys, position, shift, limit, rows)
                rows = rows[:count]
                found.append((rows, keys[position:stop]))
                yield range(low, int(rows[-1]) + 1) if way == "sweep" else rows
                position = stop

        for (chunk, raw), _ in read_ahead(chunks(), self._read, self._buffers):
            rows, edges = found.popleft()
            picked = raw if len(chunk) == len(rows) else raw[rows - chunk[0]]
            yield edges, _float32(picked)

    def _read(self, rows: range | Int64, buffer: Array) -> tuple[range | Int64, Array]:
        """Read a run of rows, or picked ones."""
        out = buffer[: len(rows)]
        if isinstance(rows, range):
            self.statistics += self._reader.read_runs([rows.start], [len(rows)], [0], out)
        else:
            self.statistics += self._reader.read_rows(rows, out)
        return rows, out


def _float32(raw: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(raw, np.float32))
