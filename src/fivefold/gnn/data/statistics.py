"""What is in a data set, and whether it is whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.gnn.data._dataset import LABELS_FILE, Dataset, HeteroDataset
from fivefold.gnn.data._ingest import check_names_file, no_progress
from fivefold.gnn.data._write_graph import count_keys
from fivefold.gnn.data.parts import SPLITS, Progress, overlaps
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.storage import Container
from fivefold.gnn.storage.pages import Ids, first_outside


def describe(dataset: Dataset | HeteroDataset, progress: Progress | None = None) -> dict[str, Any]:
    """Return the sizes, degrees, classes and fingerprints of a data set, as JSON.

    The files of graph and labels are read once, in blocks; counters take 4 to 8 bytes per node.
    """
    if isinstance(dataset, HeteroDataset):
        edges = {
            " ".join(kind): int(dataset.graph(kind).sections["indices"].shape[0])
            for kind in dataset.edge_types
        }
        return {
            "name": dataset.name,
            "nodes": dataset.num_nodes,
            "edges": edges,
            **_files(dataset),
        }
    into, out, isolated = _degrees(dataset.graph, dataset.num_nodes, progress or no_progress)
    facts: dict[str, Any] = {
        "name": dataset.name,
        "nodes": dataset.num_nodes,
        "edges": dataset.num_edges,
        "weighted": dataset.weighted,
        "isolated_nodes": isolated,
        "in_degree": _spread(into),
        "out_degree": _spread(out),
    }
    if dataset.has_features:
        facts["features"] = {
            "dim": dataset.dim,
            "dtype": dataset.dtype.name,
            "row_bytes": dataset.row_bytes,
            "bytes": dataset.row_bytes * dataset.num_nodes,
        }
    if dataset.has_labels:
        splits = {name: getattr(dataset, name) for name in SPLITS}
        facts["labels"] = {
            "classes": dataset.num_classes,
            "labelled": sum(
                int(np.count_nonzero(block >= 0))
                for block in dataset.containers[LABELS_FILE].blocks("y")
            ),
            **{name: ids.size for name, ids in splits.items()},
            **{f"in {names}": count for names, count in overlaps(splits).items()},
        }
    parts = {f"{of} parts": ", ".join(dataset.part_names(of)) for of in ("node", "edge")}
    return {**facts, **{name: names for name, names in parts.items() if names}, **_files(dataset)}


def _files(dataset: Dataset | HeteroDataset) -> dict[str, Any]:
    files = {
        name: {"bytes": file.path.stat().st_size, "fingerprint": file.fingerprint}
        for name, file in dataset.containers.items()
    }
    return {"files": files, "fingerprint": dataset.fingerprint}


def _degrees(graph: Container, num_nodes: int, progress: Progress) -> tuple[Ids, Ids, int]:
    """Return how many nodes have each in-degree and each out-degree, and how many have neither."""
    num_edges = graph.section("indices").num_rows
    # No node has more edges than there are.
    degrees = np.zeros(num_nodes, np.uint32 if num_edges < 2**32 else np.int64)
    done = 0
    for sources in graph.blocks("indices"):
        if first_outside(sources, num_nodes) >= 0:
            raise DataError(
                f"{graph.path} names a node that is not there", hint="ingest the graph again"
            )
        count_keys(sources, degrees)
        done += sources.size
        progress("degrees", done, num_edges)
    into = out = np.zeros(1, np.int64)
    isolated = node = 0
    for ends in graph.blocks("indptr", overlap=1):
        arriving = np.diff(ends)
        leaving = degrees[node : node + arriving.size]
        isolated += int(np.count_nonzero((arriving == 0) & (leaving == 0)))
        into, out = _added(into, np.bincount(arriving)), _added(out, np.bincount(leaving))
        node += arriving.size
    return into, out, isolated


def _added(first: Ids, second: Ids) -> Ids:
    """Return the sum of two histograms, of which one may end earlier."""
    longer, shorter = (first, second) if first.size >= second.size else (second, first)
    total = longer.copy()
    total[: shorter.size] += shorter
    return total


def _spread(nodes: Ids) -> dict[str, Any]:
    """Return mean, median, largest and the top 1 %'s share, where ``nodes[d]`` have degree d."""
    num_nodes = int(nodes.sum())
    if num_nodes == 0:
        return {"mean": 0.0, "median": 0.0, "max": 0, "top_1_percent_share": 0.0}
    below = np.cumsum(nodes)
    middle = np.searchsorted(below, [(num_nodes - 1) // 2, num_nodes // 2], side="right")
    edges = np.arange(nodes.size) * nodes
    total, top = int(edges.sum()), max(1, num_nodes // 100)
    # The degree of the last of the top; of the nodes that have it, only some belong there.
    last = int(np.searchsorted(below, num_nodes - top, side="right"))
    highest = int(edges[last + 1 :].sum()) + last * (top - (num_nodes - int(below[last])))
    return {
        "mean": total / num_nodes,
        "median": float(middle.mean()),
        "max": int(np.flatnonzero(nodes)[-1]),
        "top_1_percent_share": float(highest / max(1, total)),
    }


def verify(dataset: Dataset | HeteroDataset, progress: Progress | None = None) -> int:
    """Read every byte of a data set, compare all checksums, check the edges and the names."""
    show = progress or no_progress
    read_bytes = 0
    for name, file in dataset.containers.items():
        file.verify(lambda done, total, name=name: show(name, done, total))  # type: ignore[misc]
        read_bytes += file.path.stat().st_size
        if file.kind == "graph":
            Adjacency.open(file, mapped=True)  # checks what it opens
    if isinstance(dataset, Dataset):
        check_names_file(dataset.folder, dataset.graph)
    return read_bytes
