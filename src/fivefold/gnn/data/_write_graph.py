"""Writing edges as compressed rows by target: streamed when sorted, bucketed when not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.gnn.data._parts import EdgeBlock, EdgePart, Progress, index_dtype
from fivefold.gnn.storage import ContainerWriter

__all__ = ["write_graph"]

_MARK_EVERY_EDGES = 32 << 20


def write_graph(
    path: Path,
    part: EdgePart,
    attributes: Mapping[str, Any],
    *,
    memory_bytes: int,
    progress: Progress,
) -> None:
    """Write graph.fvf.

    Args:
        path: The file.
        part: The edges.
        attributes: ``num_nodes`` and what else the file should say.
        memory_bytes: What buffers may take.
        progress: Told of the stages.

    Raises:
        DataError: An edge names a node that is not there.
    """
    if part.sorted_by_target and part.num_edges is not None:
        _write_sorted(path, part, attributes, memory_bytes, progress)
    else:
        raise NotImplementedError


def graph_sections(num_nodes: int, num_edges: int | None, *, weighted: bool) -> dict[str, Any]:
    """Sections of a graph container."""
    sections: dict[str, Any] = {
        "indptr": (np.dtype(np.int64), (num_nodes + 1,)),
        "indices": (index_dtype(num_nodes), (num_edges,)),
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
            raise DataError("the edges are not sorted by target", hint="report this: it is a bug")
        self._close_nodes(block, last)
        self.writer.write("indices", self.edges, block.sources.astype(self.dtype, copy=False))
        if block.weights is not None:
            self.writer.write("weights", self.edges, block.weights)
        self.edges += block.sources.size

    def _close_nodes(self, block: EdgeBlock, last: int) -> None:
        """Ends of the nodes before ``last``, which may have more edges in the next block."""
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
        sections=graph_sections(num_nodes, total, weighted=part.weighted),
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
