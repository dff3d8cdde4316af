"""Edges as compressed rows by target, sorted without holding them.

A stable counting sort in two passes: edges are spilled to buckets, each a range of targets; then
each bucket is read and sorted. The spill is a container, so that a killed run goes on and damage is
seen; a bucket that does not fit is read once for each part of its targets.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.errors import DataError, InfeasibleError, require_flag
from fivefold.gnn.data.parts import EdgeBlock, EdgePart, Progress, index_dtype
from fivefold.gnn.storage import Container, ContainerWriter, RowReader
from fivefold.gnn.storage.pages import Array, Ids, first_outside

_SORT_BYTES_PER_EDGE = 56  # ids, weights and numbers twice, places, and NumPy's temporaries
_MOST_BUCKETS = 512
_MARK_EVERY_EDGES = 32 << 20
_KIND_SPILL = "edge-spill"
_READ_BLOCK_BYTES = 1 << 20


@njit
def count_keys(values: Any, counts: Any) -> None:
    """Add to ``counts[value]`` for every value."""
    for value in values:
        counts[value] += 1


@njit
def assign_places(values: Any, starts: Any, places: Any) -> None:
    """Write each value's place in a stable sort; ``starts`` is used up."""
    for index in range(values.size):
        places[index] = starts[values[index]]
        starts[values[index]] += 1


@njit
def scatter(values: Any, places: Any, out: Any) -> None:
    """Write each value to its place."""
    for index in range(places.size):
        out[places[index]] = values[index]


@dataclass(frozen=True, slots=True)
class CsrPiece:
    """The next edges by target, and the degrees of the nodes that end with them.

    ``degrees`` may be empty: then the edges belong to a node that ends in a later piece.
    """

    degrees: Ids
    values: Mapping[str, Array]  # of "sources", and of "weights" and "edge_ids" where asked


class EdgeBuckets:
    """Collects edges and hands them out by target."""

    def __init__(  # noqa: PLR0913 - sizes of one sort, all by name
        self,
        folder: Path,
        *,
        num_nodes: int,
        num_sources: int,
        expected_edges: int,
        weighted: bool,
        memory_bytes: int,
        numbers: np.dtype[Any] | None = None,
        drop_duplicates: bool = False,
    ) -> None:
        self.folder = folder
        self.num_nodes = num_nodes
        self.drop_duplicates = drop_duplicates
        self.limit = max(1024, memory_bytes // _SORT_BYTES_PER_EDGE)
        by_edges = math.ceil(2 * expected_edges / self.limit)
        by_nodes = math.ceil(num_nodes * 8 / max(1, memory_bytes // 8))
        count = min(max(1, by_edges, by_nodes), _MOST_BUCKETS, max(1, num_nodes))
        self.width = max(1, math.ceil(num_nodes / count))
        self.num_buckets = max(1, math.ceil(num_nodes / self.width))
        self.in_memory = expected_edges <= self.limit and by_nodes <= 1
        self.columns: dict[str, np.dtype[Any]] = {
            "targets": np.dtype(np.uint32 if self.width < 2**32 else np.int64),
            "sources": index_dtype(num_sources),
            **({"weights": np.dtype(np.float32)} if weighted else {}),
            **({} if numbers is None else {"edge_ids": numbers}),
        }
        self._record = np.dtype(list(self.columns.items()))
        self.sizes = np.zeros(self.num_buckets, np.int64)
        self.position = 0
        self.source_edges = 0  # read so far, before any rule
        self.complete = False
        self._held: list[tuple[Array, Ids]] = []  # blocks while all fit in memory, and their starts
        self._marked = 0
        self._writer: ContainerWriter | None = None
        self._reader: RowReader | None = None
        self._starts: Ids = np.empty((0, self.num_buckets + 1), np.int64)

    def resume(self, recipe_id: str) -> None:
        """Take over what an earlier, killed run has spilled, or begin with an empty folder."""
        self.recipe_id = recipe_id
        if not self.in_memory:
            self._open_spill(resume=True)

    def _open_spill(self, *, resume: bool) -> None:
        path = self.folder / "edges.fvf"
        attributes = {"recipe_id": self.recipe_id, "width": self.width}
        if resume and path.exists():
            spill = Container.open(path, kind=_KIND_SPILL)
            if spill.attributes == attributes:
                self._read_from(spill)
                return
            spill.close()
        sections: dict[str, Any] = {
            "edges": (np.uint8, (None, self._record.itemsize)),
            "starts": (np.int64, (None, self._starts.shape[1])),  # rows of each block's buckets
            "source_edges": (np.int64, (None,)),  # read up to the end of each block
        }
        options: dict[str, Any] = {"sections": sections, "attributes": attributes}
        try:
            writer = ContainerWriter(path, kind=_KIND_SPILL, resume=resume, **options)
        except DataError:  # of another source, or damaged: the edges are read again
            writer = ContainerWriter(path, kind=_KIND_SPILL, **options)
        self._writer = writer
        if resume:
            self.position = (writer.progress or {"position": 0})["position"]
            self.sizes = np.diff(writer.read("starts"), axis=1).sum(0)
            self.source_edges = int(writer.read("source_edges").max(initial=0))
            self._marked = self.num_edges

    def _read_from(self, spill: Container) -> None:
        """Hand out what is in a spill; all edges are there."""
        self.complete, self._starts = True, spill.read("starts")
        self.source_edges = int(spill.read("source_edges").max(initial=0))
        self.sizes = np.diff(self._starts, axis=1).sum(0)
        with spill:  # the reader has the file open itself
            self._reader = RowReader(
                spill,
                "edges",
                backend="threads",
                queue_depth=2,
                block_bytes=_READ_BLOCK_BYTES,
            )

    @property
    def num_edges(self) -> int:
        """Return the number of edges taken so far."""
        return int(self.sizes.sum())

    def add(self, block: EdgeBlock, source_edges: int = 0) -> None:
        """Take edges; their ids must be in range.

        ``source_edges`` says how many the source has given up to the end of the block.
        """
        self.position, self.source_edges = block.position, source_edges
        edges, counts = np.empty(block.targets.size, self._record), np.zeros(1, np.int64)
        values = {**block.values(), "targets": block.targets}
        if self.num_buckets > 1:
            own = (block.targets // self.width).astype(np.uint16)
            values["targets"] = block.targets - own * np.int64(self.width)
            counts, places = np.zeros(self.num_buckets, np.int64), np.empty(own.size, np.int64)
            count_keys(own, counts)
            assign_places(own, np.cumsum(counts) - counts, places)
            for name in self.columns:
                scatter(values[name], places, edges[name])
        else:  # they stay as they come
            counts[0] = block.targets.size
            for name in self.columns:
                edges[name] = values[name]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        if self.in_memory and self.num_edges + edges.size > self.limit:
            self.in_memory = False  # there are more than expected
            self._open_spill(resume=False)
        self._held.append((edges, starts))
        self.sizes += counts
        if self._writer is None:
            return
        for held, starts in self._held:
            self._writer.append("starts", self._writer.rows("edges") + starts[None])
            self._writer.append("edges", held.view(np.uint8).reshape(-1, self._record.itemsize))
            self._writer.append("source_edges", np.array([self.source_edges]))
        self._held = []
        if self.num_edges - self._marked >= _MARK_EVERY_EDGES:
            self._writer.mark({"position": block.position})
            self._marked = self.num_edges

    def finish_adding(self) -> None:
        """Note that all edges are here."""
        self.complete = True
        if self._writer is not None:
            self._read_from(self._writer.commit())
            self._writer = None

    def close(self) -> None:
        """Let go of the spill; it stays."""
        for file in (self._writer, self._reader):
            if file is not None:
                file.close()

    def remove(self) -> None:
        """Delete what was spilled."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _some(self) -> int:
        return max(1, self.limit // 4)  # edges that surely fit at a time

    def nodes_of(self, bucket: int) -> int:
        """Return how many targets a bucket covers."""
        return min(self.width, self.num_nodes - bucket * self.width)

    def pieces(self, bucket: int) -> Iterator[CsrPiece]:
        """Yield the edges of a bucket in the order of their targets, in parts that fit."""
        num_nodes = self.nodes_of(bucket)
        if self.sizes[bucket] <= self.limit:
            yield self._sorted(self._load(bucket, 0, num_nodes), num_nodes)
            return
        degrees = np.zeros(num_nodes, np.int64)
        for edges in self._chunks(bucket, self._some):
            count_keys(np.ascontiguousarray(edges["targets"]), degrees)
        ends = np.cumsum(degrees)
        first = 0
        while first < num_nodes:
            before = ends[first - 1] if first else 0
            stop = int(np.searchsorted(ends, before + self.limit, side="right"))
            if stop > first:
                yield self._sorted(self._load(bucket, first, stop), stop - first)
            else:
                stop = first + 1
                yield from self._giant(bucket, first)
            first = stop

    def _chunks(self, bucket: int, most: int) -> Iterator[Array]:
        """Yield a bucket's edges as they came, about ``most`` at a time."""
        if self.in_memory:
            held = [edges[starts[bucket] : starts[bucket + 1]] for edges, starts in self._held]
            yield np.concatenate([np.empty(0, self._record), *held])
            return
        assert self._reader is not None, "edges are handed out when all have come"
        begins = self._starts[:, bucket]
        counts = self._starts[:, bucket + 1] - begins
        groups = (np.cumsum(counts) - counts) // most
        for blocks in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(groups)) + 1):
            found = np.empty(int(counts[blocks].sum()), self._record)
            ends = np.cumsum(counts[blocks])
            rows = found.view(np.uint8).reshape(-1, self._record.itemsize)
            try:
                self._reader.read_runs(begins[blocks], counts[blocks], ends - counts[blocks], rows)
            except DataError as error:
                hint = f"remove {self.folder} and run the same command again"
                raise DataError(error.message, hint=hint) from error
            yield found

    def _load(self, bucket: int, first: int, stop: int) -> Array:
        """Return the edges into targets first..stop-1 of a bucket; these become 0..stop-first-1."""
        if stop - first == self.nodes_of(bucket):
            return next(self._chunks(bucket, self.limit + 1))
        parts = []
        for edges in self._chunks(bucket, self._some):
            targets = edges["targets"]
            parts.append(edges[(targets >= first) & (targets < stop)])
        loaded = np.concatenate(parts)
        loaded["targets"] -= loaded["targets"].dtype.type(first)
        return loaded

    def _giant(self, bucket: int, target: int) -> Iterator[CsrPiece]:
        """Yield one target with more edges than fit: they are in the right order already."""
        if self.drop_duplicates:
            node = bucket * self.width + target
            raise InfeasibleError(
                f"node {node} has more than {self.limit} edges, too many to find duplicates",
                hint="allow more memory_bytes, or keep duplicates",
            )
        degree = 0
        for edges in self._chunks(bucket, self._some):
            wanted = edges[edges["targets"] == target]
            degree += wanted.size
            yield CsrPiece(np.empty(0, np.int64), _values_of(wanted))
        yield CsrPiece(np.array([degree]), _values_of(np.empty(0, self._record)))

    def _sorted(self, edges: Array, num_nodes: int) -> CsrPiece:
        if self.drop_duplicates:
            edges = _without_duplicates(edges)
        targets = np.ascontiguousarray(edges["targets"])
        degrees = np.zeros(num_nodes, np.int64)
        count_keys(targets, degrees)
        starts = np.cumsum(degrees) - degrees
        places = np.empty(targets.size, np.int64)
        assign_places(targets, starts, places)
        ordered = {}
        for name, values in _values_of(edges).items():
            ordered[name] = np.empty(values.shape, values.dtype)
            scatter(values, places, ordered[name])
        return CsrPiece(degrees, ordered)


def _values_of(edges: Array) -> dict[str, Array]:
    """Return what goes with each target."""
    return {name: edges[name] for name in edges.dtype.names or () if name != "targets"}


def _without_duplicates(edges: Array) -> Array:
    """Return the edges by target and source, the first of equal ones."""
    edges = edges[np.lexsort((edges["sources"], edges["targets"]))]
    targets, sources = edges["targets"], edges["sources"]
    first = np.ones(edges.size, bool)
    first[1:] = (targets[1:] != targets[:-1]) | (sources[1:] != sources[:-1])
    return edges[first]


@dataclass(frozen=True, kw_only=True)
class EdgeRules:
    """Changes to the edges of a source before they are stored.

    Attributes:
        add_reverse: Store every edge in both directions.
        drop_self_loops: Leave out edges from a node to itself.
        drop_duplicates: Keep the first of edges with the same source and target.
    """

    add_reverse: bool = False
    drop_self_loops: bool = False
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_flag(name, value)


def work_folder(path: Path) -> Path:
    """Return where edges are spilled while graph.fvf is made."""
    return path.with_name(path.name + ".work")


def num_sources(attributes: Mapping[str, Any]) -> int:
    """Return the number of nodes that edges can come from."""
    return int(attributes.get("num_sources", attributes["num_nodes"]))


def write_graph(
    path: Path,
    part: EdgePart,
    attributes: Mapping[str, Any],
    *,
    rules: EdgeRules,
    memory_bytes: int,
    progress: Progress,
) -> None:
    """Write graph.fvf."""
    copies = 2 if rules.add_reverse else 1
    expected = part.num_edges if part.num_edges is not None else part.expected_edges
    buckets = EdgeBuckets(
        work_folder(path),
        num_nodes=int(attributes["num_nodes"]),
        num_sources=num_sources(attributes),
        expected_edges=expected * copies,
        weighted=part.weighted,
        numbers=_numbers_of(part),
        memory_bytes=memory_bytes,
        drop_duplicates=rules.drop_duplicates,
    )
    with contextlib.closing(buckets):
        buckets.resume(_recipe_id(attributes, rules))
        if not buckets.complete:
            _fill(buckets, part, attributes, rules, (memory_bytes, progress))
        _write_buckets(path, buckets, attributes, progress)
        buckets.remove()


def _numbers_of(part: EdgePart) -> np.dtype[Any] | None:
    """Return the type of the edges' numbers in their source; None where they have no order."""
    if not getattr(part, "numbered", True):
        return None
    most = part.num_edges if part.num_edges is not None else getattr(part, "most_edges", 1 << 62)
    return index_dtype(most)


def _recipe_id(attributes: Mapping[str, Any], rules: EdgeRules) -> str:
    text = json.dumps([dict(attributes), asdict(rules)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _fill(
    buckets: EdgeBuckets,
    part: EdgePart,
    attributes: Mapping[str, Any],
    rules: EdgeRules,
    run: tuple[int, Progress],
) -> None:
    memory_bytes, progress = run
    max_edges = max(1024, min(memory_bytes // 256, 4 << 20))
    total = (part.num_edges or 0) * (2 if rules.add_reverse else 1)
    numbers = buckets.columns.get("edge_ids")
    for block in part.blocks(buckets.position, max_edges):
        _check_ids(block, attributes)
        first, stop = buckets.source_edges, buckets.source_edges + block.sources.size
        ids = None if numbers is None else np.arange(first, stop, dtype=numbers)
        buckets.add(_ruled(replace(block, edge_ids=ids), rules), stop)
        progress("edges read", buckets.num_edges, total)
    buckets.finish_adding()


def _check_ids(block: EdgeBlock, attributes: Mapping[str, Any]) -> None:
    sizes = (num_sources(attributes), int(attributes["num_nodes"]))
    if block.sources.size != block.targets.size:
        raise DataError(
            f"a block has {block.sources.size} sources and {block.targets.size} targets",
            hint="every edge needs both",
        )
    for end, ids, size in zip(
        ("source", "target"), (block.sources, block.targets), sizes, strict=True
    ):
        if (wrong := first_outside(ids, size)) >= 0:
            raise DataError(
                f"an edge has {end} {int(ids[wrong])}, but there are {size} nodes"
                f" (edge {int(block.sources[wrong])} -> {int(block.targets[wrong])})",
                hint="ids count from 0; give the number of nodes if it is larger",
            )
    if block.weights is not None:
        bad = np.flatnonzero(~(np.isfinite(block.weights) & (block.weights >= 0)))
        if bad.size:
            wrong = int(bad[0])
            raise DataError(
                f"an edge weight is negative, infinite or not a number: {block.weights[wrong]} "
                f"(edge {int(block.sources[wrong])} -> {int(block.targets[wrong])})",
                hint="give finite weights of 0 or more",
            )


def _ruled(block: EdgeBlock, rules: EdgeRules) -> EdgeBlock:
    values = {**block.values(), "targets": block.targets}
    if rules.drop_self_loops:
        kept = block.sources != block.targets
        values = {name: part[kept] for name, part in values.items()}
    if rules.add_reverse:
        sources, targets = values.pop("sources"), values.pop("targets")
        values = {name: np.repeat(part, 2) for name, part in values.items()}
        values["sources"], values["targets"] = (
            both_ways(sources, targets),
            both_ways(targets, sources),
        )
    return EdgeBlock(position=block.position, **values)


def both_ways(these: Array, others: Array) -> Array:
    """Take turns, so that the order of edges does not depend on how they were cut into blocks."""
    merged = np.empty(2 * these.size, np.result_type(these, others))
    merged[0::2], merged[1::2] = these, others
    return merged


def _write_buckets(
    path: Path,
    buckets: EdgeBuckets,
    attributes: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Write bucket after bucket to the file, the second pass."""
    known = None if buckets.drop_duplicates else buckets.num_edges
    names = {name: "indices" if name == "sources" else name for name in buckets.columns}
    sections = {
        "indptr": (np.dtype(np.int64), (buckets.num_nodes + 1,)),
        **{names[key]: (dtype, (known,)) for key, dtype in buckets.columns.items()},
    }
    del sections["targets"]
    numbered = "edge_ids" in buckets.columns
    attributes = {**attributes, "source_edges": buckets.source_edges if numbered else None}
    with ContainerWriter(
        path, kind="graph", sections=sections, attributes=attributes, resume=True
    ) as writer:
        start = writer.progress or {"bucket": 0, "edges": 0}
        edges = marked = start["edges"]
        if start["bucket"] == 0:
            writer.write("indptr", 0, np.zeros(1, np.int64))
        for bucket in range(start["bucket"], buckets.num_buckets):
            node, degree_sum = bucket * buckets.width, edges
            for piece in buckets.pieces(bucket):
                for key, values in piece.values.items():
                    if known is None:
                        writer.append(names[key], values)
                    else:
                        writer.write(names[key], edges, values)
                edges += piece.values["sources"].size
                ends = np.cumsum(piece.degrees) + degree_sum
                writer.write("indptr", node + 1, ends)
                node += ends.size
                degree_sum = int(ends[-1]) if ends.size else degree_sum
                progress("edges sorted", edges, buckets.num_edges)
            if edges - marked >= _MARK_EVERY_EDGES:
                writer.mark({"bucket": bucket + 1, "edges": edges})
                marked = edges
        writer.commit().close()
