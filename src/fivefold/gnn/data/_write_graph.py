"""Writing edges as compressed rows by target: streamed when sorted, bucketed when not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError
from fivefold.gnn.data._buckets import EdgeBuckets
from fivefold.gnn.data._parts import EdgeBlock, EdgePart, Progress, index_dtype
from fivefold.gnn.storage import ContainerWriter

_MARK_EVERY_EDGES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class EdgeRules:
    """What is done to edges before they are stored.

    Attributes:
        add_reverse: Store every edge in both directions.
        drop_self_loops: Leave out edges from a node to itself.
        drop_duplicates: Keep the first of edges with the same source and target.
    """

    add_reverse: bool = False
    drop_self_loops: bool = False
    drop_duplicates: bool = False


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
    if part.sorted_by_target and part.num_edges is not None and rules == EdgeRules():
        _write_sorted(path, part, attributes, memory_bytes, progress)
    else:
        _write_bucketed(path, part, attributes, rules, (memory_bytes, progress))


def _sections(
    attributes: Mapping[str, Any], num_edges: int | None, *, weighted: bool
) -> dict[str, Any]:
    num_nodes = int(attributes["num_nodes"])
    sections: dict[str, Any] = {
        "indptr": (np.dtype(np.int64), (num_nodes + 1,)),
        "indices": (index_dtype(num_sources(attributes)), (num_edges,)),
    }
    if weighted:
        sections["weights"] = (np.dtype(np.float32), (num_edges,))
    return sections


class _SortedWriter:
    """Turns edges in the order of their targets into compressed rows as they come."""

    def __init__(self, writer: ContainerWriter, num_nodes: int, state: Mapping[str, int]) -> None:
        self.writer = writer
        self.num_nodes = num_nodes
        self.edges = state["edges"]
        self.node = state["node"]  # indptr is written up to and with this node
        self.dtype = index_dtype(num_nodes)
        if self.node == 0:
            writer.write("indptr", 0, np.zeros(1, np.int64))

    def add(self, block: EdgeBlock) -> None:
        if block.targets.size == 0:
            return
        last = int(block.targets[-1])
        if int(block.targets[0]) < self.node or np.any(np.diff(block.targets) < 0):
            message = "the edges are not sorted by target"
            raise DataError(message, hint="set sorted_by_target of the source to False")
        self._close_nodes(block, last)
        self.writer.write("indices", self.edges, block.sources.astype(self.dtype, copy=False))
        if block.weights is not None:
            self.writer.write("weights", self.edges, block.weights)
        self.edges += block.sources.size

    def _close_nodes(self, block: EdgeBlock, last: int) -> None:
        """Write the ends of the nodes before ``last``, which may go on in the next block."""
        nodes = np.arange(self.node, last, dtype=block.targets.dtype)
        ends = np.searchsorted(block.targets, nodes, side="right")
        self.writer.write("indptr", self.node + 1, ends.astype(np.int64) + self.edges)
        self.node = last

    def finish(self, max_rows: int) -> None:
        while self.node < self.num_nodes:
            rows = min(max_rows, self.num_nodes - self.node)
            self.writer.write("indptr", self.node + 1, np.full(rows, self.edges, np.int64))
            self.node += rows

    def state(self, position: int) -> dict[str, int]:
        return {"position": position, "edges": self.edges, "node": self.node}


def _write_sorted(
    path: Path,
    part: EdgePart,
    attributes: Mapping[str, Any],
    memory_bytes: int,
    progress: Progress,
) -> None:
    num_nodes = int(attributes["num_nodes"])
    total = part.num_edges or 0
    max_edges = max(1, min(memory_bytes // 128, 4 << 20))
    with ContainerWriter(
        path,
        kind="graph",
        sections=_sections(attributes, total, weighted=part.weighted),
        attributes=attributes,
        resume=True,
    ) as writer:
        start = writer.progress or {"position": 0, "edges": 0, "node": 0}
        rows = _SortedWriter(writer, num_nodes, start)
        marked = rows.edges
        for block in part.blocks(start["position"], max_edges):
            rows.add(block)
            progress("edges", rows.edges, total)
            if rows.edges - marked >= _MARK_EVERY_EDGES:
                writer.mark(rows.state(block.position))
                marked = rows.edges
        rows.finish(max_edges)
        writer.commit().close()


def work_folder(path: Path) -> Path:
    """Return where edges are spilled while graph.fvf is made."""
    return path.with_name(path.name + ".work")


def num_sources(attributes: Mapping[str, Any]) -> int:
    """Return the number of nodes that edges can come from."""
    return int(attributes.get("num_sources", attributes["num_nodes"]))


def _write_bucketed(
    path: Path,
    part: EdgePart,
    attributes: Mapping[str, Any],
    rules: EdgeRules,
    run: tuple[int, Progress],
) -> None:
    memory_bytes, progress = run
    copies = 2 if rules.add_reverse else 1
    expected = part.num_edges if part.num_edges is not None else part.expected_edges
    buckets = EdgeBuckets(
        work_folder(path),
        num_nodes=int(attributes["num_nodes"]),
        num_sources=num_sources(attributes),
        expected_edges=expected * copies,
        weighted=part.weighted,
        memory_bytes=memory_bytes,
        drop_duplicates=rules.drop_duplicates,
    )
    buckets.resume(_recipe_id(attributes, rules))
    if not buckets.complete:
        _fill(buckets, part, attributes, rules, run)
    _write_buckets(path, buckets, attributes, part, progress)
    buckets.remove()


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
    for block in part.blocks(buckets.position, max_edges):
        _check_ids(block, attributes)
        buckets.add(_ruled(block, rules))
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
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
            raise DataError(
                f"an edge has {end} {int(ids[wrong])}, but there are {size} nodes"
                f" (edge {int(block.sources[wrong])} -> {int(block.targets[wrong])})",
                hint="ids count from 0; give the number of nodes if it is larger",
            )
    if block.weights is not None and not _is_weight(block.weights):
        message = "an edge weight is negative, infinite or not a number"
        raise DataError(message, hint="give finite weights of 0 or more")


def _is_weight(weights: NDArray[np.float32]) -> bool:
    return bool(np.isfinite(weights).all() and (weights >= 0).all())


def _ruled(block: EdgeBlock, rules: EdgeRules) -> EdgeBlock:
    sources, targets, weights = block.sources, block.targets, block.weights
    if rules.drop_self_loops:
        kept = sources != targets
        sources, targets = sources[kept], targets[kept]
        weights = None if weights is None else weights[kept]
    if rules.add_reverse:
        sources, targets = both_ways(sources, targets), both_ways(targets, sources)
        weights = None if weights is None else np.repeat(weights, 2)
    return EdgeBlock(sources, targets, block.position, weights)


def both_ways(these: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Take turns, so that the order of edges does not depend on how they were cut into blocks."""
    merged = np.empty(2 * these.size, np.result_type(these, others))
    merged[0::2], merged[1::2] = these, others
    return merged


def _write_buckets(
    path: Path,
    buckets: EdgeBuckets,
    attributes: Mapping[str, Any],
    part: EdgePart,
    progress: Progress,
) -> None:
    """Write bucket after bucket to the file, the second pass."""
    known = None if buckets.drop_duplicates else buckets.num_edges
    with ContainerWriter(
        path,
        kind="graph",
        sections=_sections(attributes, known, weighted=part.weighted),
        attributes=attributes,
        resume=True,
    ) as writer:
        start = writer.progress or {"bucket": 0, "edges": 0}
        edges = marked = start["edges"]
        if start["bucket"] == 0:
            writer.write("indptr", 0, np.zeros(1, np.int64))
        for bucket in range(start["bucket"], buckets.num_buckets):
            node, degree_sum = bucket * buckets.width, edges
            for piece in buckets.pieces(bucket):
                _put(writer, "indices", edges, piece.sources, known)
                if piece.weights is not None:
                    _put(writer, "weights", edges, piece.weights, known)
                edges += piece.sources.size
                ends = np.cumsum(piece.degrees) + degree_sum
                writer.write("indptr", node + 1, ends)
                node += ends.size
                degree_sum = int(ends[-1]) if ends.size else degree_sum
                progress("edges sorted", edges, buckets.num_edges)
            if edges - marked >= _MARK_EVERY_EDGES:
                writer.mark({"bucket": bucket + 1, "edges": edges})
                marked = edges
        writer.commit().close()


def _put(
    writer: ContainerWriter, name: str, row: int, values: NDArray[Any], known: int | None
) -> None:
    if known is None:
        writer.append(name, values)
    else:
        writer.write(name, row, values)
