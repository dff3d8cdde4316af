"""What out-of-core training of a graph would take, from its counts alone, before anything is made.

A batch is followed hop by hop as an expectation. Nodes are taken in classes of equal popularity: a
node of relative weight w is the source of an edge with probability proportional to w, and has
``mean degree * (1 + w) / 2`` in-edges; weights follow a Pareto law clipped at 2000 times the mean,
as citation graphs have it. Of n nodes with draw probability p, ``n (1 - (1 - p)^m)`` are found by m
draws; from the share q of the batches that use a node follow what a cache of the hottest rows
serves and how many rows a segment of s batches shares. Bytes follow from rows; seconds from bytes
and the disk's speed, and from counts and prices that were fitted to measured runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import pdtr, pdtrc

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.gnn.planning._plan import Budgets
from fivefold.gnn.planning.geometry import Geometry, least_memory_bytes, packing_ways
from fivefold.units import format_bytes, format_duration_s

__all__ = ["KNOWN_GRAPHS", "Estimate", "GraphSize", "Stage", "estimate"]

Floats = NDArray[np.float64]

_PARETO = 1.1  # P(weight > w) ~ w^-1.1
_CLIP = 2000.0  # of the mean weight
_CLASSES = 400
_LEAST_EXTENT_BYTES = 256 << 10  # shorter ones cost a disk bandwidth, so segments stay smaller
_INTERPRETER_BYTES = 450_000_000  # Python with torch and the compiled kernels
_INGEST_BYTES = 1 << 30  # of buffers while a graph is written
_SPILL_BYTES_PER_EDGE = 8
_BYTES_PER_CACHED_NODE = 1.5  # of a record: its slot, as the difference to the one before
# Seconds on two cores of 2.5 GHz; fitted to benchmarks/results/gnn/scale.json.
_INGEST_S_PER_EDGE = 0.085e-6
_SAMPLE_S_PER_EDGE = 0.085e-6
_PLAN_S_PER_ACCESS = 0.1e-6
_EPOCH_S_PER_ROW = 0.15e-6
_EPOCH_S_PER_BATCH = 0.03
_START_S = 0.25
_HALVING = 0.137  # of the disk's speed that packing loses, each time that its output doubles
_WHOLE_SPEED = 20  # up to so many times the memory


@dataclass(frozen=True, kw_only=True)
class GraphSize:
    """The counts of a graph that decide what its training takes.

    Args:
        nodes: Nodes.
        edges: Directed edges that are stored; both directions count twice.
        row_bytes: Bytes of a feature row.
        seeds: Training nodes.
        name: For people.

    Raises:
        ConfigurationError: A count is not positive, or there are more seeds than nodes.
    """

    nodes: int
    edges: int
    row_bytes: int
    seeds: int
    name: str = "graph"

    def __post_init__(self) -> None:
        for name in ("nodes", "edges", "row_bytes", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}", hint="give a positive number"
                )
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
    """The answer of ``estimate``: means per batch, what is packed, and the stages.

    Args:
        graph: What was asked for.
        batches: Batches of an epoch.
        nodes_per_batch: Rows that a batch asks for.
        edges_per_batch: Its sampled edges.
        hit_rate: Share of the rows that the caches serve.
        segment_batches: Batches that share rows on disk.
        packed_rows: Rows of the packed file.
        read_bytes_per_epoch: Bytes of cold rows read in an epoch.
        packing: How the rows are moved.
        stages: In the order in which they run; the last is one epoch.
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
        lines += [
            (
                f"{'most at a time':<32}{format_bytes(self.memory_bytes):>12}"
                f"{format_bytes(self.disk_bytes):>12}"
            ),
            "Times are those of two cores of 2.5 GHz and the disk's speed as given or measured.",
        ]
        return "\n".join(lines)


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

    Args:
        graph: Counts of the graph.
        fanouts: Neighbours per hop; -1 for all.
        batch_size: Seeds of a batch.
        budgets: As for a plan; ``disk_bytes`` bounds the packed rows, records and scratch.
        read_bytes_per_s: Of the disk, in sequence.
        write_bytes_per_s: Of the disk, in sequence.
        epochs: Different epochs that are sampled and packed.
        buffer_batches: Batches in flight.
        packing_bytes: Memory of packing; None: the host budget.

    Returns:
        The estimate.

    Raises:
        ConfigurationError: A count or a fan-out is out of range.
        InfeasibleError: A budget is too small; says what would do.

    Examples:
        >>> found = estimate(KNOWN_GRAPHS["papers100M"], [10, 15, 20], 1024,
        ...     Budgets(host_bytes=6 * 10**9, disk_bytes=10**12),
        ...     read_bytes_per_s=1e9, write_bytes_per_s=1e9)
        >>> found.batches, 0.4e6 < found.nodes_per_batch < 1.6e6
        (1179, True)
    """
    _check_run(fanouts, batch_size, epochs)
    if not (read_bytes_per_s > 0 and write_bytes_per_s > 0):
        raise ConfigurationError(
            f"the disk reads {read_bytes_per_s} and writes {write_bytes_per_s} bytes/s",
            hint="give the positive speed of a disk, or none to measure this one",
        )
    size = min(batch_size, graph.seeds)
    model = _Popularity.of(graph)
    used, edges, expanded = model.batch(size, fanouts)
    batches = math.ceil(graph.seeds / batch_size)
    nodes = float((model.nodes * used).sum())
    slots = sum(
        budgets.cache_slots(
            graph.row_bytes,
            buffer_batches=buffer_batches,
            buffer_bytes=int(buffer_batches * nodes * graph.row_bytes),
        )
    )
    cold = model.without_hottest(slots)
    cold_rows = float((cold * used).sum())
    work = _Work(
        graph=graph,
        batches=batches * epochs,
        nodes=nodes,
        edges=edges,
        expanded=expanded,
        cold=cold,
        used=used,
        cached_rows=int(min(slots, (model.nodes * (1 - (1 - used) ** (batches * epochs))).sum())),
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
    )


def _check_run(fanouts: Sequence[int], batch_size: int, epochs: int) -> None:
    """Refuse counts that no run can have."""
    if batch_size < 1 or not fanouts or min(fanouts) < -1 or epochs < 1:
        raise ConfigurationError(
            f"batch_size={batch_size}, fanouts={list(fanouts)}, epochs={epochs}",
            hint="use positive numbers; a fan-out of -1 takes all neighbours",
        )


@dataclass(frozen=True)
class _Popularity:
    """Nodes in classes of falling weight: how many, and the weight of one relative to the mean."""

    nodes: Floats
    weights: Floats
    mean_degree: float

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
        mean = (nodes * weights).sum() / graph.nodes
        return cls(nodes, weights / mean, graph.edges / graph.nodes)

    def batch(self, seeds: int, fanouts: Sequence[int]) -> tuple[Floats, float, float]:
        """Return the share of batches that use a node of each class, edges, expanded nodes."""
        total = self.nodes.sum()
        degrees = self.mean_degree * (1 + self.weights) / 2
        used = np.full_like(self.nodes, seeds / total)
        frontier, edges, expanded = self.nodes * used, 0.0, 0.0
        for fanout in fanouts:
            expanded = float((self.nodes * used).sum())
            taken = degrees if fanout < 0 else _mean_of_least(degrees, fanout)
            edges += float((frontier * taken).sum())
            found = 1 - (1 - seeds / total) * np.exp(-edges * self.weights / total)
            frontier = self.nodes * (found - used)
            used = found
        return used, edges, expanded

    def without_hottest(self, slots: int) -> Floats:
        """Return the nodes of each class that are left when the hottest, its first, are cached."""
        cached = np.minimum(np.cumsum(self.nodes), slots)
        return self.nodes - np.diff(cached, prepend=0.0)


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
    cold: Floats
    used: Floats
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
        local, cached = _width(self.nodes), self.nodes - float((self.cold * self.used).sum())
        per_batch = _width(self.graph.nodes) * self.nodes + _BYTES_PER_CACHED_NODE * cached
        per_batch += (1 + local) * self.expanded + local * self.edges
        return int(self.batches * per_batch)

    def packed_rows(self, segment: int) -> int:
        """Return the rows on disk when so many batches share theirs."""
        of_one = float((self.cold * (1 - (1 - self.used) ** segment)).sum())
        return int(of_one * self.batches / segment)

    def smallest_cost(self) -> tuple[int, int, Geometry]:
        """Return the largest segment with long extents, or the smallest that fits the disk."""
        row_bytes = self.graph.row_bytes
        cold_bytes = float((self.cold * self.used).sum()) * row_bytes
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
    def _beside(self) -> int:
        return self.record_bytes + self.cached_rows * self.graph.row_bytes

    def _way(self, rows: int) -> Geometry:
        row_bytes, (read, write) = self.graph.row_bytes, self.disk
        return packing_ways(
            num_nodes=self.graph.nodes,
            row_bytes=row_bytes,
            sections={"rows": rows, "host": self.cached_rows, "device": 0},
            memory_bytes=self.packing_bytes,
            read_bytes_per_s=read,
            write_bytes_per_s=write,
        )[0]

    def stages(self, packed_rows: int, packing: Geometry, epochs: int) -> tuple[Stage, ...]:
        """Return the stages with their prices."""
        graph, (read, write) = self.graph, self.disk
        features = graph.nodes * graph.row_bytes
        ids = 4 if graph.nodes <= 2**31 else 8
        topology = 8 * (graph.nodes + 1) + ids * graph.edges
        spill = _SPILL_BYTES_PER_EDGE * graph.edges
        moved = (features + spill) / read + (features + topology + spill) / write
        accesses, edges = self.batches * self.nodes, self.batches * self.edges
        cold = self.batches * float((self.cold * self.used).sum())
        base, host = _INTERPRETER_BYTES, self.budgets.host_bytes
        batch = int(self.nodes * 100 + self.edges * 24)  # ids, tables and edges of one in work
        rows_bytes = (packed_rows + self.cached_rows) * graph.row_bytes
        work_s = accesses * _EPOCH_S_PER_ROW + self.batches * _EPOCH_S_PER_BATCH
        epoch_s = max(cold * graph.row_bytes / read, work_s) / epochs
        return (
            Stage(
                name="ingest",
                seconds=max(moved, graph.edges * _INGEST_S_PER_EDGE),
                memory_bytes=base + _INGEST_BYTES,
                disk_bytes=features + topology + 8 * graph.nodes,
                scratch_bytes=spill,
                remark="graph, features and labels as a data set",
            ),
            Stage(
                name="sample",
                seconds=_START_S + edges * _SAMPLE_S_PER_EDGE,
                memory_bytes=base + topology + 4 * graph.nodes + 3 * batch,
                disk_bytes=self.sample_bytes,
                remark="the topology in memory; data.mapped = true leaves it on the disk",
            ),
            Stage(
                name="plan",
                seconds=_START_S + accesses * _PLAN_S_PER_ACCESS,
                memory_bytes=base + 4 * graph.nodes + 3 * batch,
                disk_bytes=0,
                scratch_bytes=int(4 * accesses),
            ),
            Stage(
                name="pack",
                seconds=packing.seconds / _disk_share(rows_bytes / self.packing_bytes),
                memory_bytes=base + self.packing_bytes,
                disk_bytes=rows_bytes + self.record_bytes,
                scratch_bytes=packing.scratch_bytes,
                remark=f"{packing.strategy}, {format_bytes(packing.moved_bytes)} moved",
            ),
            Stage(
                name="epoch, data path",
                seconds=epoch_s,
                memory_bytes=base + host + 3 * batch,
                disk_bytes=0,
                remark=f"{format_bytes(cold * graph.row_bytes / epochs)} read; training comes on "
                "top where it is slower",
            ),
        )


def _width(numbers: float) -> int:
    """Return the bytes in which a record writes numbers below this."""
    return next(width for width in (1, 2, 4, 8) if numbers <= 2 ** (8 * width))


def _disk_share(times_the_memory: float) -> float:
    """Return the share of the disk's speed that packing reaches: pieces get shorter."""
    return min(1.0, max(0.3, 1 - _HALVING * math.log2(max(1.0, times_the_memory / _WHOLE_SPEED))))
