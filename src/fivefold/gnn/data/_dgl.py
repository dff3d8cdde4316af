"""Folders of DGL: tables under ``meta.yaml``, arrays and tables under ``metadata.yaml``.

The first is what ``CSVDataset`` reads, the second what GraphBolt's ``OnDiskDataset`` reads. Graphs
of one node type and one edge type are read; the others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError, optional_module
from fivefold.gnn.data._table_source import TableSource, table_source
from fivefold.gnn.data._tables import CsvRows, TableColumns
from fivefold.gnn.data.arrays import ArraySource, FileRows, Rows, array_source, existing
from fivefold.gnn.storage.pages import Array
from fivefold.reading import Reading

TABLES, ARRAYS = "meta.yaml", "metadata.yaml"
_SETS = {"train": "train_set", "valid": "validation_set", "test": "test_set"}


def is_dgl(folder: Path) -> bool:
    """Return whether a folder has DGL's list of its files."""
    return any((folder / name).is_file() for name in (TABLES, ARRAYS))


def dgl_source(folder: Path, columns: TableColumns) -> ArraySource | TableSource:
    """Return the graph of a folder of ``CSVDataset`` or of ``OnDiskDataset``."""
    name = TABLES if (folder / TABLES).is_file() else ARRAYS
    yaml = optional_module("yaml", extra="recipes", use="a folder of DGL")
    try:
        listing = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{folder / name} is no YAML: {str(error)[:200]}"
        raise DataError(message, hint="mend the file") from error
    if not isinstance(listing, Mapping):
        raise DataError(f"{folder / name} holds no list of files", hint="mend the file")
    if name == TABLES:
        return _of_tables(folder, listing, columns)
    return _of_arrays(folder, listing)


def _only(entries: Any, what: str, folder: Path) -> dict[str, Any]:
    """Return the only entry of a list."""
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], dict):
        count = len(entries) if isinstance(entries, list) else "no"
        raise DataError(
            f"{folder} lists {count} {what}; graphs of one type have one",
            hint="make a HeteroData of PyTorch Geometric of several types and ingest it",
        )
    return entries[0]


def _of_tables(folder: Path, listing: Mapping[str, Any], columns: TableColumns) -> TableSource:
    edges = _only(listing.get("edge_data"), "edge tables", folder)
    nodes = _only(listing.get("node_data"), "node tables", folder)
    source = table_source(
        [folder / edges["file_name"]],
        nodes=folder / nodes["file_name"],
        columns=replace(
            columns,
            source=columns.source or edges.get("src_id_field", "src_id"),
            target=columns.target or edges.get("dst_id_field", "dst_id"),
            node=columns.node or nodes.get("node_id_field", "node_id"),
        ),
        name=str(listing.get("dataset_name", folder.resolve().name)),
    )
    source.reading.take(TABLES, "which file is what")
    used = {TABLES, edges["file_name"], nodes["file_name"]}
    _leave_out_rest(source.reading, folder, used)
    return source


def _leave_out_rest(reading: Reading, folder: Path, used: set[str]) -> None:
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in used:
            reading.leave_out(name, "the list of files does not have it as part of the graph")


class _Listed:
    """The files that a list names, each noted when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reading = folder, Reading(folder.resolve().name)
        self.used = {ARRAYS}
        self.reading.take(ARRAYS, "which file is what")

    def rows(self, entry: Mapping[str, Any], what: str) -> Rows:
        """Return the array of an entry."""
        path = existing(self.folder / str(entry["path"]))
        if entry["path"] not in self.used:
            self.used.add(str(entry["path"]))
            self.reading.take(str(entry["path"]), what)
        if entry.get("format") == "csv":
            table = CsvRows(path, np.int64)
            count = sum(len(block) for block in table.blocks(0, 1 << 20))
            return CsvRows(path, np.int64, count)
        return FileRows(path)

    def array(self, entry: Mapping[str, Any], what: str) -> Array:
        """Return the same in memory."""
        return np.concatenate(list(self.rows(entry, what).blocks(0, 1 << 20)))


def _of_arrays(folder: Path, listing: Mapping[str, Any]) -> ArraySource:
    graph = listing.get("graph")
    if not isinstance(graph, dict):
        raise DataError(f"{folder / ARRAYS} lists no graph", hint="give the folder as it was made")
    files = _Listed(folder)
    nodes = _only(graph.get("nodes"), "node types", folder)
    edges = files.rows(_only(graph.get("edges"), "edge types", folder), "edges")
    parts: dict[str, Rows] = {}
    for entry in listing.get("feature_data") or []:
        domain, name = entry.get("domain"), str(entry.get("name"))
        role = {("node", "feat"): "features", ("edge", "feat"): "edge_features"}.get((domain, name))
        if role is not None:
            parts[role] = files.rows(entry, f"{domain} features")
    labels, splits, classes = _tasks(files, listing, int(nodes["num"]))
    source = array_source(
        edges,  # type: ignore[arg-type]  # rows are taken as they are
        features=parts.get("features"),  # type: ignore[arg-type]
        edge_features=parts.get("edge_features"),  # type: ignore[arg-type]
        labels=labels,
        splits=splits,
        num_nodes=int(nodes["num"]),
        name=str(listing.get("dataset_name", folder.resolve().name)),
    )
    source.num_classes = classes
    _leave_out_rest(files.reading, folder, files.used)
    source.reading = files.reading
    return source


def _tasks(
    files: _Listed, listing: Mapping[str, Any], num_nodes: int
) -> tuple[Array | None, dict[str, Array], int | None]:
    """Return the labels, splits and number of classes of the first task on nodes."""
    for task in listing.get("tasks") or []:
        labels, splits = np.full(num_nodes, -1, np.int64), {}
        for split, key in _SETS.items():
            for part in task.get(key) or []:
                data = {entry["name"]: entry for entry in part["data"]}
                seeds = data.get("seeds", data.get("seed_nodes"))
                if seeds is None or "labels" not in data:
                    continue
                ids = files.array(seeds, f"{split} split").reshape(-1)
                labels[ids] = files.array(data["labels"], f"labels of {split}").reshape(-1)
                splits[split] = ids
        if splits:
            return labels, splits, task.get("num_classes")
    return None, {}, None
