"""Folders of the Open Graph Benchmark as they lie on disk after its download.

Node property prediction (arXiv 2005.00687): ``raw/data.npz`` and ``raw/node-label.npz``
(papers100M), or ``raw/*.csv.gz`` (products, arxiv), with ``split/KIND/{train,valid,test}.csv.gz``.
Large-scale challenge (arXiv 2103.09430): the paper nodes of MAG240M under ``processed/``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fivefold.errors import DataError
from fivefold.gnn.data._pyg import load_plain
from fivefold.gnn.data._tables import CsvReader
from fivefold.gnn.data.arrays import (
    ArrayRows,
    ArraySource,
    Rows,
    file_stamp,
    npy_rows,
    npz_members,
    npz_rows,
)
from fivefold.gnn.data.parts import Source
from fivefold.gnn.storage.arrays import Ids

_SPLITS = ("train", "valid", "test")
_UNDIRECTED = ("products", "proteins")  # those whose raw files hold one direction of each edge


def ogb_adds_reverse(folder: str | Path) -> bool:
    """Return whether the benchmark stores both directions of the edges in this folder."""
    name = Path(folder).resolve().name.lower()
    return any(part in name for part in _UNDIRECTED)


def ogb_source(folder: str | Path, *, leave_out: Collection[str] = ()) -> Source:
    """Return a node property prediction data set of the Open Graph Benchmark."""
    folder = Path(folder)
    if (folder / "raw" / "data.npz").is_file():
        return _binary_source(folder, with_edges="edge_feat" not in leave_out)
    if (folder / "raw" / "edge.csv.gz").is_file():
        return _csv_source(folder, with_edges="edge_feat" not in leave_out)
    if (folder / "raw" / "relations").is_dir():
        raise DataError(
            f"{folder} has several node types",
            hint="load it with torch_geometric.datasets.OGB_MAG, and ingest pyg_source(data)",
        )
    raise DataError(
        f"{folder} holds neither raw/data.npz nor raw/edge.csv.gz",
        hint="give the folder into which the benchmark's archive was unpacked",
    )


def _binary_source(folder: Path, *, with_edges: bool) -> ArraySource:
    data, label_file = folder / "raw" / "data.npz", folder / "raw" / "node-label.npz"
    members = npz_members(data)
    for name in ("edge_index", "num_nodes_list"):
        if name not in members:
            raise DataError(f"{data} has no array {name}", hint="get the file again")
    counts = [int(n) for block in npz_rows(data, "num_nodes_list").blocks(0, 2) for n in block]
    if len(counts) != 1:
        raise DataError(f"{data} holds {len(counts)} graphs", hint="one graph is needed")
    return ArraySource(
        name=folder.resolve().name,
        edge_rows=npz_rows(data, "edge_index"),
        feature_rows=npz_rows(data, "node_feat") if "node_feat" in members else None,
        label_rows=npz_rows(label_file, "node_label") if label_file.is_file() else None,
        edge_feature_rows=(
            npz_rows(data, "edge_feat") if with_edges and "edge_feat" in members else None
        ),
        split_rows=_read_splits(folder),
        given_nodes=counts[0],
        kind="ogb",
    )


def _read_splits(folder: Path) -> dict[str, Rows]:
    """Return the ids of the only kind of split there is."""
    kinds = sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if not kinds:
        return {}
    if len(kinds) > 1:
        raise DataError(
            f"{folder / 'split'} holds {len(kinds)} kinds of splits", hint="leave one of them"
        )
    if (file := kinds[0] / "split_dict.pt").is_file():
        return {name: ArrayRows(np.asarray(load_plain(file)[name])) for name in _SPLITS}
    return {name: ArrayRows(_read_ids(kinds[0] / f"{name}.csv.gz")) for name in _SPLITS}


def _read_ids(path: Path) -> Ids:
    _existing(path)
    blocks = [block[:, 0] for block, _ in CsvReader(path, header=False).arrays(np.int64)]
    return np.concatenate(blocks) if blocks else np.empty(0, np.int64)


def _csv_source(folder: Path, *, with_edges: bool) -> ArraySource:
    """Return a source over raw tables without headers: an edge, a row or a label per line."""
    raw = folder / "raw"
    counts = _read_ids(raw / "num-node-list.csv.gz")
    if counts.size != 1:
        raise DataError(f"{folder} holds {counts.size} graphs", hint="one graph is needed")
    num_nodes, num_edges = int(counts[0]), int(_read_ids(raw / "num-edge-list.csv.gz").sum())
    features, labels = raw / "node-feat.csv.gz", raw / "node-label.csv.gz"
    of_edges = raw / "edge-feat.csv.gz"
    return ArraySource(
        name=folder.resolve().name,
        edge_rows=_CsvRows(raw / "edge.csv.gz", np.int64, num_edges),
        edge_pairs=True,
        feature_rows=_CsvRows(features, np.float32, num_nodes) if features.is_file() else None,
        label_rows=_CsvRows(labels, np.float64, num_nodes) if labels.is_file() else None,
        edge_feature_rows=(
            _CsvRows(of_edges, np.float32, num_edges) if with_edges and of_edges.is_file() else None
        ),
        split_rows=_read_splits(folder) if labels.is_file() else {},
        given_nodes=num_nodes,
        kind="ogb",
    )


class _CsvRows:
    """A raw table as an array of rows."""

    def __init__(self, path: Path, dtype: DTypeLike, num_rows: int) -> None:
        self.table = CsvReader(path, header=False)
        self.shape: tuple[int, ...] = (num_rows, self.table.num_columns or 2)
        self.dtype = np.dtype(dtype)
        self.stamp = file_stamp(path)

    def blocks(self, first_row: int, max_rows: int, *, stop: int | None = None) -> Iterator[Any]:
        """Yield rows; those before ``first_row`` are read past."""
        row, end = first_row, self.shape[0] if stop is None else stop
        for block, after in self.table.arrays(self.dtype, first_row=first_row, max_rows=max_rows):
            row = after
            yield block
        if row != end:
            raise DataError(
                f"{self.table.path} has {row} rows, the benchmark's lists say {end}",
                hint="unpack the benchmark's archive again",
            )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"there is no file {path}", hint="unpack the benchmark's archive again")
    return path


def mag240m_source(folder: str | Path) -> Source:
    """Return the papers of MAG240M and their citations."""
    folder = Path(folder)
    if (folder / "mag240m_kddcup2021").is_dir():
        folder /= "mag240m_kddcup2021"
    processed = folder / "processed"
    edges = processed / "paper___cites___paper" / "edge_index.npy"
    features = processed / "paper" / "node_feat.npy"
    for path in (edges, features):
        if not path.is_file():
            raise DataError(
                f"there is no file {path}",
                hint="give the folder mag240m_kddcup2021 of the large-scale challenge",
            )
    labels = processed / "paper" / "node_label.npy"
    split_file, meta_file = folder / "split_dict.pt", folder / "meta.pt"
    splits = load_plain(split_file) if split_file.is_file() else {}
    meta = load_plain(meta_file) if meta_file.is_file() else {}
    splits.setdefault("test", splits.get("test-whole", splits.get("test-dev", [])))
    return ArraySource(
        name="MAG240M papers",
        edge_rows=npy_rows(edges),
        feature_rows=npy_rows(features),
        label_rows=npy_rows(labels) if labels.is_file() else None,
        split_rows={name: ArrayRows(np.asarray(splits.get(name, []), np.int64)) for name in _SPLITS}
        if labels.is_file()
        else {},
        num_classes=meta.get("num_classes"),
        kind="mag240m",
    )
