"""What is in a data set, and whether it is whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.gnn.data._dataset import Dataset, HeteroDataset
from fivefold.gnn.data._ingest import check_names_file, no_progress
from fivefold.gnn.data._write_graph import count_keys
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.storage import Container
from fivefold.gnn.storage.pages import Ids


def describe(dataset: Dataset | HeteroDataset) -> dict[str, Any]:
    """Return the sizes, degrees, classes and fingerprints of a data set, as JSON.

    Degrees count edges into a node (whom it hears from) and out of it (who hears it). The graph's
    file is read once, in blocks; counters take 16 bytes per node.
    """
    if isinstance(dataset, HeteroDataset):
        return _describe_hetero(dataset)
    into, out = _degrees(dataset.graph, dataset.num_nodes)
    facts: dict[str, Any] = {
        "name": dataset.name,
        "nodes": dataset.num_nodes,
        "edges": dataset.num_edges,
        "weighted": dataset.weighted,
        "isolated_nodes": int(np.count_nonzero((into == 0) & (out == 0))),
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
        facts["labels"] = {
            "classes": dataset.num_classes,
            "labelled": int(np.count_nonzero(dataset.labels >= 0)),
            **{name: int(getattr(dataset, name).size) for name in ("train", "valid", "test")},
        }
    return {**facts, **_files(dataset)}


def _describe_hetero(dataset: HeteroDataset) -> dict[str, Any]:
    edges = {
        " ".join(kind): int(dataset.graph(kind).sections["indices"].shape[0])
        for kind in dataset.edge_types
    }
    return {"name": dataset.name, "nodes": dataset.num_nodes, "edges": edges, **_files(dataset)}


def _files(dataset: Dataset | HeteroDataset) -> dict[str, Any]:
    files = {
        name: {"bytes": file.path.stat().st_size, "fingerprint": file.fingerprint}
        for name, file in dataset.containers.items()
    }
    return {"files": files, "fingerprint": dataset.fingerprint}


def _degrees(graph: Container, num_nodes: int) -> tuple[Ids, Ids]:
    ends = [np.diff(block) for block in graph.blocks("indptr", overlap=1)]
    out = np.zeros(num_nodes, np.int64)
    for sources in graph.blocks("indices"):
        if sources.size and not 0 <= int(sources.min()) <= int(sources.max()) < num_nodes:
            raise DataError(
                f"{graph.path} names a node that is not there", hint="ingest the graph again"
            )
        count_keys(sources, 1, out)
    return np.concatenate(ends), out


def _spread(degrees: Ids) -> dict[str, Any]:
    """Return the mean, median, largest, and the share of the edges at the top 1 % of the nodes."""
    if degrees.size == 0:
        return {"mean": 0.0, "median": 0.0, "max": 0, "top_1_percent_share": 0.0}
    top = max(1, degrees.size // 100)
    highest = np.partition(degrees, degrees.size - top)[degrees.size - top :]
    total = int(degrees.sum())
    return {
        "mean": total / degrees.size,
        "median": float(np.median(degrees)),
        "max": int(degrees.max()),
        "top_1_percent_share": float(highest.sum() / max(1, total)),
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
