"""Folders of DGL: tables under ``meta.yaml``, arrays and tables under ``metadata.yaml``.

The first is what ``CSVDataset`` reads, the second what GraphBolt's ``OnDiskDataset`` reads. Graphs
of one node type and one edge type are read; the others are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError, optional_module
from fivefold.gnn.data._table_source import TableSource, table_source
from fivefold.gnn.data._tables import CsvRows, TableColumns
from fivefold.gnn.data.arrays import (
    ArraySource,
    FileRows,
    Rows,
    array_source,
    as_labels,
    existing,
    leave_out_rest,
)
from fivefold.gnn.storage.pages import Array, first_outside
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
            f"the list of files in {folder} has {count} {what}; graphs of one type have one",
            hint="make a HeteroData of PyTorch Geometric of several types and ingest it; where the "
            "list is of another program, say --kind table",
        )
    return entries[0]


def _key(entry: Mapping[str, Any], key: str, folder: Path) -> Any:
    """Return what the list of files says under a key."""
    if key not in entry:
        raise DataError(
            f"an entry of the list of files in {folder} has no {key!r}: {dict(entry)}",
            hint="mend the list",
        )
    return entry[key]


def _of_tables(folder: Path, listing: Mapping[str, Any], columns: TableColumns) -> TableSource:
    edges = _only(listing.get("edge_data"), "edge tables", folder)
    nodes = _only(listing.get("node_data"), "node tables", folder)
    if listing.get("graph_data"):
        raise DataError(
            f"{folder} holds many graphs, of which {TABLES} lists the labels", hint="one is needed"
        )
    files = [folder / str(_key(entry, "file_name", folder)) for entry in (edges, nodes)]
    source = table_source(
        files[:1],
        nodes=files[1],
        columns=replace(
            columns,
            source=columns.source or edges.get("src_id_field", "src_id"),
            target=columns.target or edges.get("dst_id_field", "dst_id"),
            node=columns.node or nodes.get("node_id_field", "node_id"),
        ),
        name=str(listing.get("dataset_name", folder.resolve().name)),
        folder=folder,
    )
    source.reading.take(TABLES, "which file is what")
    leave_out_rest(source.reading, folder, {*files, folder / TABLES}, _UNLISTED)
    return source


_UNLISTED = "the list of files does not have it as part of the graph"


class _Listed:
    """The files that a list names, each noted when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reading = folder, Reading(folder.resolve().name)
        self.used = {folder / ARRAYS: "which file is what"}

    def rows(self, entry: Mapping[str, Any], what: str) -> Rows:
        """Return the array of an entry."""
        path = existing(self.folder / str(_key(entry, "path", self.folder)))
        self.used.setdefault(path, what)
        rows = _rows_at(path, entry)
        if isinstance(rows, CsvRows):
            return CsvRows(path, np.int64, sum(map(len, rows.blocks(0, 1 << 20))))
        return rows

    def array(self, entry: Mapping[str, Any], what: str) -> Array:
        """Return the same in memory."""
        return np.concatenate(list(self.rows(entry, what).blocks(0, 1 << 20)))

    def tell(self, named: Mapping[Path, str]) -> Reading:
        """Return the account: of these files, which the list names, too, why they are not read."""
        for path, what in self.used.items():
            self.reading.take(str(path.relative_to(self.folder)), what)
        for path, why in named.items():
            if path not in self.used and path.is_file():
                self.reading.leave_out(str(path.relative_to(self.folder)), why)
        leave_out_rest(self.reading, self.folder, {*self.used, *named}, _UNLISTED)
        return self.reading


def _rows_at(path: Path, entry: Mapping[str, Any]) -> Rows:
    """Return an array; the rows of a table are not counted yet."""
    if (kind := entry.get("format")) not in {"csv", "numpy", None}:
        raise DataError(f"{path} is of format {kind!r}", hint="save it as numpy: np.save")
    return CsvRows(path, np.int64) if kind == "csv" else FileRows(path)


def _of_arrays(folder: Path, listing: Mapping[str, Any]) -> ArraySource:
    graph = listing.get("graph")
    if not isinstance(graph, dict):
        raise DataError(f"{folder / ARRAYS} lists no graph", hint="give the folder as it was made")
    files = _Listed(folder)
    nodes = _only(graph.get("nodes"), "node types", folder)
    edges = files.rows(_only(graph.get("edges"), "edge types", folder), "edges")
    parts: dict[str, Rows] = {}
    named: dict[Path, str] = {}
    for entry in listing.get("feature_data") or []:
        domain, name = entry.get("domain"), str(entry.get("name"))
        role = {("node", "feat"): "features", ("edge", "feat"): "edge_features"}.get((domain, name))
        if role is None:
            why = f"{name!r} of {domain}s: only 'feat' is stored"
            named[folder / str(_key(entry, "path", folder))] = why
        elif role in parts:
            raise DataError(f"{folder / ARRAYS} lists {name!r} of {domain}s twice", hint="mend it")
        else:
            parts[role] = files.rows(entry, f"{domain} features")
    count = _key(nodes, "num", folder)
    labels, splits, classes = _tasks(files, listing, int(count), named)
    source = array_source(
        edges,  # type: ignore[arg-type]  # rows are taken as they are
        features=parts.get("features"),  # type: ignore[arg-type]
        edge_features=parts.get("edge_features"),  # type: ignore[arg-type]
        labels=labels,
        splits=splits,
        num_nodes=int(count),
        name=str(listing.get("dataset_name", folder.resolve().name)),
    )
    source.num_classes = classes
    source.reading = files.tell(named)
    return source


def _tasks(
    files: _Listed, listing: Mapping[str, Any], num_nodes: int, named: dict[Path, str]
) -> tuple[Array | None, dict[str, Array], int | None]:
    """Return the labels, splits and number of classes of the first task on nodes.

    The files of other tasks are ``named``, with the reason.
    """
    found: tuple[Array | None, dict[str, Array], int | None] = (None, {}, None)
    for task in listing.get("tasks") or []:
        labels, splits = np.full(num_nodes, -1, np.int64), dict[str, Array]()
        for split, key in _SETS.items():
            for part in task.get(key) or []:
                data = {str(entry.get("name")): entry for entry in part.get("data") or []}
                seeds = data.get("seeds", data.get("seed_nodes"))
                nodes = seeds is not None and _are_nodes(files, seeds)
                if found[1] or "labels" not in data or seeds is None or not nodes:
                    why = "of a task that is not the first on nodes with labels"
                    named |= {files.folder / str(e.get("path")): why for e in data.values()}
                    continue
                ids = _ids_of(files.array(seeds, f"{split} split"), num_nodes)
                given = as_labels(files.array(data["labels"], f"labels of {split}"))
                if given.shape != ids.shape:
                    raise DataError(
                        f"the {split} split of {files.folder} has {ids.size} nodes and "
                        f"{given.size} labels",
                        hint="give one label per node",
                    )
                labels[ids] = given
                splits[split] = np.concatenate([splits.get(split, ids[:0]), ids])
        if splits and not found[1]:
            found = labels, splits, task.get("num_classes")
    return found


def _are_nodes(files: _Listed, seeds: Mapping[str, Any]) -> bool:
    """Return whether seeds are one id each; those of links have two."""
    shape = _rows_at(existing(files.folder / str(_key(seeds, "path", files.folder))), seeds).shape
    return math.prod(shape[1:]) == 1


def _ids_of(seeds: Array, num_nodes: int) -> Array:
    """Return seeds that are nodes."""
    if seeds.dtype.kind in "iu":
        ids = seeds.reshape(-1).astype(np.int64)
        if first_outside(ids, num_nodes) < 0:
            return ids
    raise DataError(
        f"seeds have dtype {seeds.dtype} and go from {seeds.min(initial=0)} to "
        f"{seeds.max(initial=0)}, for {num_nodes} nodes",
        hint="seeds of nodes are ids from 0",
    )
