"""What out-of-core training of a graph would take, from its counts alone, before anything is made.

A batch is followed hop by hop as an expectation over classes of nodes of equal popularity, which
follows a Pareto law clipped at 2000 times the mean, as citation graphs have it. The uses of a node
in B batches are binomial. Seconds come of bytes, and of prices that were fitted to measured runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, gammainc, gammaincinv, gammaln, pdtr, pdtrc, xlogy

from fivefold.errors import ConfigurationError, InfeasibleError, require_whole
from fivefold.gnn.planning._plan import Budgets
from fivefold.gnn.planning.geometry import Geometry, PackingTask, least_memory_bytes
from fivefold.gnn.planning.id_sets import IdSet
from fivefold.units import format_bytes, format_duration_s

Floats = NDArray[np.float64]

_PARETO = 1.1  # P(weight > w) ~ w^-1.1
_CLIP = 2000.0  # of the mean weight
_CLASSES = 400
_LUCKS = 12
_MOST_SPLIT = 400  # out-edges of a node; with more, their spread is a few percent
_LEAST_EXTENT_BYTES = 256 << 10  # shorter ones cost a disk bandwidth, so segments stay smaller
_INTERPRETER_BYTES = 350_000_000  # Python with torch and the compiled kernels
_KEPT_BYTES = 128 << 20  # of cold ids, before planning writes them to a file
_HIDDEN_BYTES = 8 * 4 * 128  # of a node that is expanded: what a layer of the default width keeps
_EDGE_BYTES = 100
_INGEST_BYTES = 600_000_000  # Python and half of the buffers' 1 GB: buckets are planned for less
_DESCRIBE_BYTES = 200_000_000  # of Python and blocks, while what was written is described
_SPILL_BYTES_PER_EDGE = 8
_BYTES_PER_CACHED_NODE = 1.5  # of a record: its slot, as the difference to the one before
# Seconds on two cores of 2.5 GHz; fitted to benchmarks/results/gnn/scale.json and size.json.
_INGEST_S_PER_EDGE = 0.085e-6
_OPEN_BYTES_PER_S = 0.53e9  # of topology and labels: they are the first to touch that memory
_SAMPLE_S_PER_EDGE = 0.062e-6
_PROBE_S = 2.3  # of a disk, before a plan for features of a gigabyte and more
_PROBE_BYTES = 1 << 30
_PLAN_S_PER_ACCESS = 0.044e-6
_EPOCH_S_PER_ROW = 0.02e-6
_EPOCH_S_PER_BYTE = 0.255e-9  # of a row: it is checked and copied
_RECORD_S_PER_ACCESS = 0.155e-6  # of packing, beside the rows
_EPOCH_S_PER_BATCH = 0.03
_START_S = 0.25
_PACKING_SHARE = 0.83  # of the disk's speed; laying out comes before
_HALVING = 0.137  # of the disk's speed that packing loses, each time that its output doubles
_WHOLE_SPEED = 20  # up to so many times the memory


@dataclass(frozen=True, kw_only=True)
class GraphSize:
    """The counts of a graph that decide what its training takes.

    Edges are directed ones that are stored: both directions count twice. Seeds are training nodes.
    """

    nodes: int
    edges: int
    row_bytes: int
    seeds: int
    name: str = "graph"

    def __post_init__(self) -> None:
        for name in ("nodes", "edges", "row_bytes", "seeds"):
            require_whole(name, getattr(self, name))
        if self.seeds > self.nodes:
            raise ConfigurationError(
                f"there are {self.seeds} seeds and {self.nodes} nodes",
                hint="train on nodes of the graph, each once per epoch",
            )


KNOWN_GRAPHS = {
    "papers100M": GraphSize(
        name="papers100M", nodes=111_059_956, edges=1_615_685_872, row_bytes=512, seeds=1_207_179
    ),
    "MAG240M": GraphSize(
        name="MAG240M", nodes=121_751_666, edges=1_297_748_926, row_bytes=1536, seeds=1_112_392
    ),
    "IGB-full": GraphSize(
        name="IGB-full", nodes=269_346_174, edges=3_995_777_033, row_bytes=4096, seeds=136_278_514
    ),
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Seconds of one stage, the most memory it takes, and bytes that stay on the disk."""

    name: str
    seconds: float
    memory_bytes: int
    disk_bytes: int
    scratch_bytes: int = 0
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The answer of ``estimate``: means per batch, what is packed, and the stages in their order.

    ``hit_rate`` is the share of the rows that the caches serve; ``segment_batches`` share rows on
    disk.
    """

    graph: GraphSize
    batches: int
    nodes_per_batch: float
    edges_per_batch: float
    hit_rate: float
    segment_batches: int
    packed_rows: int
    read_bytes_per_epoch: int
    packing: Geometry
    stages: tuple[Stage, ...]
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def memory_bytes(self) -> int:
        """Return the most memory of any stage."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def disk_bytes(self) -> int:
        """Return the most disk space of any moment: all that stays, and the largest scratch."""
        kept = np.cumsum([stage.disk_bytes for stage in self.stages])
        scratch = [stage.scratch_bytes for stage in self.stages]
        return int(max(a + b for a, b in zip(kept.tolist(), scratch, strict=True)))

    def explain(self) -> str:
        """Return the estimate as a table for people."""
        graph = self.graph
        lines = [
            (
                f"{graph.name}: {graph.nodes:,} nodes, {graph.edges:,} edges, rows of "
                f"{graph.row_bytes:,} bytes ({format_bytes(graph.nodes * graph.row_bytes)} of "
                f"features), {graph.seeds:,} training nodes"
            ),
            (
                f"{self.batches:,} batches an epoch, each of about {self.nodes_per_batch:,.0f} "
                f"rows and {self.edges_per_batch:,.0f} edges; {self.hit_rate:.0%} of the rows are "
                f"cached, {self.segment_batches} batches share rows on disk"
            ),
            "",
            f"{'stage':<22}{'time':>10}{'memory':>12}{'disk':>12}{'scratch':>12}",
        ]
        lines += [
            f"{stage.name:<22}{format_duration_s(stage.seconds):>10}"
            f"{format_bytes(stage.memory_bytes):>12}{format_bytes(stage.disk_bytes):>12}"
            f"{format_bytes(stage.scratch_bytes):>12}  {stage.remark}".rstrip()
            for stage in self.stages
        ]
        end = (
            f"{'most at a time':<32}{format_bytes(self.memory_bytes):>12}"
            f"{format_bytes(self.disk_bytes):>12}\n"
            f"Times: two cores of 2.5 GHz, and a disk that reads "
            f"{format_bytes(self.read_bytes_per_s)}/s and writes "
            f"{format_bytes(self.write_bytes_per_s)}/s.\n"
            "Memory: fivefold gnn train, which keeps topology and labels from start to end and "
            "trains a\nGraphSAGE of 128 hidden values. The single commands sample, plan and pack "
            "take less."
        )
        return "\n".join([*lines, end])


def estimate(  # noqa: PLR0913 - the facts of a graph, a machine and a run
    graph: GraphSize,
    fanouts: Sequence[int],
    batch_size: int,
    budgets: Budgets,
    *,
    read_bytes_per_s: float,
    write_bytes_per_s: float,
    epochs: int = 1,
    buffer_batches: int = 3,
    packing_bytes: int | None = None,
) -> Estimate:
    """Estimate time, memory and disk space by stage, from counts alone.

    ``epochs`` different ones are sampled and packed; ``packing_bytes`` of None is the host budget.

    Examples:
        >>> found = estimate(KNOWN_GRAPHS["papers100M"], [10, 15, 20], 1024,
        ...     Budgets(host_bytes=6 * 10**9, disk_bytes=10**12),
        ...     read_bytes_per_s=1e9, write_bytes_per_s=1e9)
        >>> found.batches, 0.4e6 < found.nodes_per_batch < 1.6e6
        (1179, True)
    """
    _check_run(fanouts, batch_size, epochs, (read_bytes_per_s, write_bytes_per_s))
    size = min(batch_size, graph.seeds)
    model = _Popularity.of(graph)
    of_class, used, edges, expanded = model.batch(size, fanouts)
    batches = math.ceil(graph.seeds / batch_size)
    nodes = float((of_class * used).sum())
    slots = sum(
        budgets.cache_slots(
            graph.row_bytes,
            buffer_batches=buffer_batches,
            buffer_bytes=int(buffer_batches * nodes * graph.row_bytes),
        )
    )
    cold = _Cold.beside_cache(of_class, used, batches * epochs, slots)
    cold_rows = cold.rows_of(1)
    work = _Work(
        graph=graph,
        batches=batches * epochs,
        nodes=nodes,
        edges=edges,
        expanded=expanded,
        cold=cold,
        cached_rows=int(min(slots, (of_class * (1 - (1 - used) ** (batches * epochs))).sum())),
        budgets=budgets,
        packing_bytes=max(
            budgets.host_bytes if packing_bytes is None else packing_bytes,
            least_memory_bytes(graph.row_bytes),
        ),
        disk=(read_bytes_per_s, write_bytes_per_s),
    )
    segment, packed_rows, packing = work.smallest_cost()
    stages = work.stages(packed_rows, packing, epochs)
    return Estimate(
        graph=graph,
        batches=batches,
        nodes_per_batch=nodes,
        edges_per_batch=edges,
        hit_rate=1 - cold_rows / nodes,
        segment_batches=segment,
        packed_rows=packed_rows,
        read_bytes_per_epoch=int(cold_rows * batches * graph.row_bytes),
        packing=packing,
        stages=stages,
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
    )


def _check_run(
    fanouts: Sequence[int], batch_size: int, epochs: int, speeds: tuple[float, float]
) -> None:
    """Refuse counts and speeds that no run can have."""
    if batch_size < 1 or not fanouts or min(fanouts) < -1 or epochs < 1:
        raise ConfigurationError(
            f"batch_size={batch_size}, fanouts={list(fanouts)}, epochs={epochs}",
            hint="use positive numbers; a fan-out of -1 takes all neighbours",
        )
    if not all(0 < speed < math.inf for speed in speeds):  # also NaN
        raise ConfigurationError(
            f"the disk reads {speeds[0]} and writes {speeds[1]} bytes/s",
            hint="give the positive speed of a disk, or none to measure this one",
        )


@dataclass(frozen=True)
class _Popularity:
    """Nodes in classes: how many, their in-edges, and how often an edge comes from one of them.

    ``drawn`` is relative to the mean.
    """

    nodes: Floats
    in_degrees: Floats
    drawn: Floats

    @classmethod
    def of(cls, graph: GraphSize) -> _Popularity:
        """Return the classes of a graph; weights follow a clipped power law of mean 1."""
        bounds = np.unique(np.geomspace(1, graph.nodes + 1, _CLASSES).astype(np.int64)) - 1
        nodes = np.diff(bounds).astype(np.float64)
        middle = (bounds[:-1] + bounds[1:]) / 2
        weights = (np.maximum(middle, 0.5) / graph.nodes) ** (-1 / _PARETO)
        for _ in range(20):  # the clip is at a multiple of the mean, which it lowers
            mean = (nodes * weights).sum() / graph.nodes
            weights = np.minimum(weights, _CLIP * mean)
        weights /= (nodes * weights).sum() / graph.nodes
        degree = graph.edges / graph.nodes
        nodes, weights, drawn = _by_out_edges(nodes, weights, degree)
        return cls(nodes, degree * (1 + weights) / 2, drawn)

    def batch(self, seeds: int, fanouts: Sequence[int]) -> tuple[Floats, Floats, float, float]:
        """Return nodes by class and the share of batches that use one, edges, expanded nodes."""
        total = self.nodes.sum()
        seed = min(1.0, seeds / total)  # the sum is rounded
        used = np.full_like(self.nodes, seed)
        frontier, edges = self.nodes * used, 0.0
        for fanout in fanouts:
            expanding = used
            taken = self.in_degrees
            if fanout >= 0:
                taken = _mean_of_least(taken, fanout)
            edges += float((frontier * taken).sum())
            found = 1 - (1 - seed) * np.exp(-edges * self.drawn / total)
            frontier = self.nodes * (found - used)
            used = found
        # How often an edge is taken depends on its target: the mean and the spread of that.
        rates = expanding * taken / self.in_degrees
        share = self.nodes * self.in_degrees / (self.nodes * self.in_degrees).sum()
        mean = float((share * rates).sum())
        spread = float((share * (rates - mean) ** 2).sum()) / (mean**2 or 1.0)
        out_edges = self.drawn * (self.nodes * self.in_degrees).sum() / total
        nodes, factors = _by_luck(self.nodes, out_edges, spread)
        drawn = np.repeat(self.drawn, _LUCKS) * factors
        used = 1 - (1 - seed) * np.exp(-edges * drawn / total)
        return nodes, used, edges, float((self.nodes * expanding).sum())


@dataclass(frozen=True)
class _Cold:
    """The nodes that no cache holds: those of at most ``most`` uses, and some of these."""

    nodes: Floats
    used: Floats  # share of the batches
    batches: int
    most: int
    share: float  # of the nodes of exactly ``most`` uses

    @classmethod
    def beside_cache(cls, nodes: Floats, used: Floats, batches: int, slots: int) -> _Cold:
        """Return what is left by a cache of the nodes of most uses."""

        def above(uses: int) -> float:
            return float((nodes * bdtrc(uses, batches, used)).sum())

        low, high = -1, batches  # above(high) fits, for it is nothing
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if above(middle) <= slots else (middle, high)
        of_most = float(nodes.sum() if high == 0 else above(high - 1)) - above(high)
        spare = slots - above(high)
        return cls(nodes, used, batches, high, 1 - min(1.0, spare / max(of_most, 1e-9)))

    def rows_of(self, segment: int) -> float:
        """Return the distinct rows that so many batches read."""
        fewer = self._of_at_most(self.most - 1, segment)
        return fewer + self.share * (self._of_at_most(self.most, segment) - fewer)

    def _of_at_most(self, uses: int, segment: int) -> float:
        """Return the nodes of 1 to ``uses`` uses in all batches that ``segment`` of them use."""
        if uses < 1:
            return 0.0
        rest = self.batches - segment
        unused = (1 - self.used) ** segment * bdtr(min(uses, rest), rest, self.used)
        return float((self.nodes * (bdtr(uses, self.batches, self.used) - unused)).sum())


def _by_out_edges(nodes: Floats, weights: Floats, degree: float) -> tuple[Floats, Floats, Floats]:
    """Split the classes of few out-edges by how many a node has: Poisson numbers about the mean.

    It is these that decide how often it is drawn. Returns the nodes of each class, their mean
    weight, and their out-edges relative to the mean.
    """
    few = degree * weights < _MOST_SPLIT
    means = degree * weights[few]
    edges = np.arange(2 * _MOST_SPLIT)[:, None]
    share = np.exp(xlogy(edges, means) - means - gammaln(edges + 1)) * nodes[few]
    there = share.sum(1) > 0
    split = share[there].sum(1)
    return (
        np.concatenate([nodes[~few], split]),
        np.concatenate([weights[~few], (share[there] * weights[few]).sum(1) / split]),
        np.concatenate([weights[~few], np.flatnonzero(there) / degree]),
    )


def _by_luck(nodes: Floats, out_edges: Floats, spread: float) -> tuple[Floats, Floats]:
    """Split each class by how often the targets of its edges are reached, relative to the mean.

    The sum over k edges of a squared spread each is taken as a gamma number of shape k / spread,
    cut into parts of equal probability, each with its mean.
    """
    shape = np.maximum(out_edges, 1e-3)[:, None] / max(spread, 1e-9)
    ends = gammaincinv(shape, np.arange(_LUCKS + 1) / _LUCKS)
    factors = np.diff(gammainc(shape + 1, ends), axis=1) * _LUCKS
    return np.repeat(nodes / _LUCKS, _LUCKS), factors.ravel()


def _mean_of_least(degrees: Floats, fanout: int) -> Floats:
    """Return E[min(Poisson(degree), fanout)] for each degree: k P(k) = degree P(k - 1)."""
    if not fanout:
        return np.zeros_like(degrees)
    below = pdtr(fanout - 2, degrees) if fanout > 1 else 0.0
    mean: Floats = degrees * below + fanout * pdtrc(fanout - 1, degrees)
    return mean


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Means of a batch and rows by class, from which all stages are priced."""

    graph: GraphSize
    batches: int
    nodes: float
    edges: float
    expanded: float
    cold: _Cold
    cached_rows: int
    budgets: Budgets
    packing_bytes: int
    disk: tuple[float, float]

    @property
    def sample_bytes(self) -> int:
        """Bytes of the file of samples."""
        ids = 4 if self.graph.nodes <= 2**31 else 8
        per_batch = ids * self.nodes + self.expanded + 4 * self.edges
        return int(self.batches * per_batch) + 4 * self.graph.nodes

    @property
    def record_bytes(self) -> int:
        """Bytes of all batch records."""
        local, cached = _width(self.nodes), self.nodes - self.cold.rows_of(1)
        per_batch = _width(self.graph.nodes) * self.nodes + _BYTES_PER_CACHED_NODE * cached
        per_batch += (1 + local) * self.expanded + local * self.edges
        return int(self.batches * per_batch)

    def packed_rows(self, segment: int) -> int:
        """Return the rows on disk when so many batches share theirs."""
        return int(self.cold.rows_of(segment) * self.batches / segment)

    def smallest_cost(self) -> tuple[int, int, Geometry]:
        """Return the largest segment with long extents, or the smallest that fits the disk."""
        row_bytes = self.graph.row_bytes
        cold_bytes = self.cold.rows_of(1) * row_bytes
        sizes = list(range(1, min(self.batches, 64) + 1))
        # A Gray code over s batches cuts the rows of one of them into about 2^s / 2s extents.
        long = [s for s in sizes if cold_bytes * 2 * s / 2.0**s >= _LEAST_EXTENT_BYTES] or [1]
        for size in (long[-1], *(s for s in sizes if s > long[-1])):
            rows = self.packed_rows(size)
            way = self._way(rows)
            if rows * row_bytes + way.scratch_bytes + self._beside <= self.budgets.disk_bytes:
                return size, rows, way
        least = rows * row_bytes + way.scratch_bytes + self._beside
        raise InfeasibleError(
            f"the packed rows, records and scratch files take {format_bytes(least)}, more than "
            f"the disk budget of {format_bytes(self.budgets.disk_bytes)}",
            hint=f"give {format_bytes(least)} of disk, or more host memory",
        )

    @property
    def plan_bytes(self) -> int:
        """Bytes of the plan: an id for each cached row, and numbers of each batch."""
        return 8 * self.cached_rows + 48 * self.batches

    @property
    def _beside(self) -> int:
        cached_bytes = self.cached_rows * self.graph.row_bytes
        return self.record_bytes + self.plan_bytes + cached_bytes

    def _task(self, rows: int) -> PackingTask:
        return PackingTask(
            num_nodes=self.graph.nodes,
            row_bytes=self.graph.row_bytes,
            sections={"rows": rows, "host": self.cached_rows, "device": 0},
            read_bytes_per_s=self.disk[0],
            write_bytes_per_s=self.disk[1],
        )

    def _way(self, rows: int) -> Geometry:
        """Return the cheapest way beside the records, which are made at the same time."""
        task = self._task(rows)
        least = least_memory_bytes(self.graph.row_bytes) + task.ledger_bytes
        return task.settle(max(self.packing_bytes, least), self.recorder_bytes)[0]

    @property
    def model_bytes(self) -> int:
        """Memory of a training step of the default model, a GraphSAGE of 128 hidden values."""
        return int(_HIDDEN_BYTES * self.expanded + _EDGE_BYTES * self.edges)

    @property
    def batch_bytes(self) -> int:
        """Memory of a batch in work: ids, tables and edges."""
        return int(self.nodes * 100 + self.edges * 24)

    @property
    def recorder_bytes(self) -> int:
        """Memory for making records: a slot for each cached row, bits of the ids, a batch."""
        bits = min(IdSet.bytes_for(self.graph.nodes), self.packing_bytes // 8)
        return 4 * self.cached_rows + 2 * bits + self.batch_bytes

    def stages(self, packed_rows: int, packing: Geometry, epochs: int) -> tuple[Stage, ...]:
        """Return the stages with their prices."""
        graph, (read, write) = self.graph, self.disk
        features = graph.nodes * graph.row_bytes
        width = 4 if graph.nodes <= 2**31 else 8
        topology = 8 * (graph.nodes + 1) + width * graph.edges
        spill = _SPILL_BYTES_PER_EDGE * graph.edges
        moved = (features + spill) / read + (features + topology + spill) / write
        accesses, edges = self.batches * self.nodes, self.batches * self.edges
        cold = self.batches * self.cold.rows_of(1)
        # What training keeps from its start to its end: the topology, and the labels.
        held = _INTERPRETER_BYTES + topology + 8 * graph.nodes
        ids, rows_bytes = 8 * self.cached_rows, (packed_rows + self.cached_rows) * graph.row_bytes
        pack_s = packing.seconds / _disk_share(rows_bytes / self.packing_bytes) / _PACKING_SHARE
        return (
            Stage(
                name="ingest",
                seconds=max(moved, graph.edges * _INGEST_S_PER_EDGE),
                memory_bytes=max(_INGEST_BYTES, _DESCRIBE_BYTES + 4 * graph.nodes),
                disk_bytes=features + topology + 8 * graph.nodes,
                scratch_bytes=spill,
                remark="graph, features and labels as a data set",
            ),
            Stage(
                name="sample",
                seconds=_START_S
                + (topology + 8 * graph.nodes) / _OPEN_BYTES_PER_S
                + edges * _SAMPLE_S_PER_EDGE,
                memory_bytes=held + 4 * graph.nodes + self.batch_bytes,
                disk_bytes=self.sample_bytes,
                remark="the topology in memory; data.mapped = true leaves it on the disk",
            ),
            Stage(
                name="plan",
                seconds=_START_S
                + _PROBE_S * min(1.0, features / _PROBE_BYTES)
                + accesses * _PLAN_S_PER_ACCESS,
                memory_bytes=held
                + 4 * graph.nodes
                + 2 * ids
                + self.batch_bytes
                + int(min(width * cold, _KEPT_BYTES)),
                disk_bytes=0,
                scratch_bytes=int(width * cold) if width * cold > _KEPT_BYTES else 0,
            ),
            Stage(
                name="pack",
                seconds=max(pack_s, accesses * _RECORD_S_PER_ACCESS),
                memory_bytes=held
                + 2 * ids
                + self.recorder_bytes
                + self._task(packed_rows).ledger_bytes
                + packing.buffer_bytes(graph.row_bytes),
                disk_bytes=rows_bytes + self.record_bytes + self.plan_bytes,
                scratch_bytes=packing.scratch_bytes,
                remark=f"{packing.strategy}, {format_bytes(packing.moved_bytes)} moved",
            ),
            self._epoch(cold, held, epochs),
        )

    def _epoch(self, cold: float, held: int, epochs: int) -> Stage:
        """Return the stage of one epoch; ``cold`` rows are read in all, ``held`` are bytes."""
        row_bytes = self.graph.row_bytes
        flying = min(self.budgets.host_bytes, int(3 * self.nodes * row_bytes))
        row_s = _EPOCH_S_PER_ROW + _EPOCH_S_PER_BYTE * row_bytes
        work_s = self.batches * (self.nodes * row_s + _EPOCH_S_PER_BATCH)
        return Stage(
            name="epoch, data path",
            seconds=max(cold * row_bytes / self.disk[0], work_s) / epochs,
            memory_bytes=held
            + self.cached_rows * (8 + row_bytes)
            + flying
            + 3 * self.batch_bytes
            + self.model_bytes,
            disk_bytes=0,
            remark=f"{format_bytes(cold * row_bytes / epochs)} read; training comes on "
            "top where it is slower",
        )


def _width(numbers: float) -> int:
    """Return the bytes in which a record writes numbers below this."""
    return next(width for width in (1, 2, 4, 8) if numbers <= 2 ** (8 * width))


def _disk_share(times_the_memory: float) -> float:
    """Return the share of the disk's speed that packing reaches: pieces get shorter."""
    return min(1.0, max(0.3, 1 - _HALVING * math.log2(max(1.0, times_the_memory / _WHOLE_SPEED))))
