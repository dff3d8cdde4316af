"""Which source a path is, from what lies there; and the benchmark's folders after their download.

Node property prediction (arXiv 2005.00687): ``raw/data.npz`` and ``raw/node-label.npz``
(papers100M), or ``raw/*.csv.gz`` (products, arxiv), with ``split/KIND/{train,valid,test}.csv.gz``.
Large-scale challenge (arXiv 2103.09430): the paper nodes of MAG240M under ``processed/``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError, DataError, require_one_of
from fivefold.gnn.data._dataset import HeteroSource
from fivefold.gnn.data._pyg import load_plain, pyg_source
from fivefold.gnn.data._table_source import TableSource, table_source
from fivefold.gnn.data._tables import CsvRows, TableColumns, open_table
from fivefold.gnn.data.arrays import (
    ArrayRows,
    ArraySource,
    FileRows,
    Rows,
    array_source,
    as_rows,
    existing,
    npz_members,
    one_split,
)
from fivefold.gnn.data.parts import EDGE_FEATURES, SPLITS, Source
from fivefold.gnn.storage.pages import Ids

_UNDIRECTED = ("products", "proteins")  # those whose raw files hold one direction of each edge


def ogb_adds_reverse(folder: str | Path) -> bool:
    """Return whether the benchmark stores both directions of the edges in this folder."""
    name = Path(folder).resolve().name.lower()
    return any(part in name for part in _UNDIRECTED)


def ogb_source(folder: str | Path, *, leave_out: Collection[str] = ()) -> Source:
    """Return a node property prediction data set of the Open Graph Benchmark."""
    folder = Path(folder)
    raw = folder / "raw"
    if (raw / "data.npz").is_file():
        rows, counts = _binary_rows(raw)
    elif (raw / "edge.csv.gz").is_file():
        rows, counts = _csv_rows(raw)
    elif (raw / "relations").is_dir():
        raise DataError(
            f"{folder} has several node types",
            hint="load it with torch_geometric.datasets.OGB_MAG, and ingest pyg_source(data)",
        )
    else:
        raise DataError(
            f"{folder} holds neither raw/data.npz nor raw/edge.csv.gz",
            hint="give the folder into which the benchmark's archive was unpacked",
        )
    if len(counts) != 1:
        raise DataError(f"{folder} holds {len(counts)} graphs", hint="one graph is needed")
    return ArraySource(
        name=folder.resolve().name,
        edge_rows=rows["edge"],
        edge_pairs=isinstance(rows["edge"], CsvRows) or None,
        feature_rows=rows.get("node-feat"),
        label_rows=rows.get("node-label"),
        edge_feature_rows=None if "edge_feat" in leave_out else rows.get("edge-feat"),
        split_rows=_read_splits(folder) if "node-label" in rows else {},
        given_nodes=counts[0],
        kind="ogb",
    )


def _binary_rows(raw: Path) -> tuple[dict[str, Rows], list[int]]:
    """Return the arrays that are there, and the number of nodes of each graph."""
    data, label_file = raw / "data.npz", raw / "node-label.npz"
    members = npz_members(data)
    for name in ("edge_index", "num_nodes_list"):
        if name not in members:
            raise DataError(f"{data} has no array {name}", hint="get the file again")
    names = {"edge": "edge_index", "node-feat": "node_feat", "edge-feat": "edge_feat"}
    rows: dict[str, Rows] = {
        role: FileRows(data, name) for role, name in names.items() if name in members
    }
    if label_file.is_file():
        rows["node-label"] = FileRows(label_file, "node_label")
    counts = FileRows(data, "num_nodes_list").blocks(0, 2)
    return rows, [int(count) for block in counts for count in block]


def _csv_rows(raw: Path) -> tuple[dict[str, Rows], list[int]]:
    """Return the same from tables without headers: an edge, a row or a label per line."""
    nodes, edges = (_read_ids(raw / f"num-{what}-list.csv.gz") for what in ("node", "edge"))
    kinds = {
        "edge": (np.int64, edges),
        "node-feat": (np.float32, nodes),
        "node-label": (np.float64, nodes),
        "edge-feat": (np.float32, edges),
    }
    paths = {role: raw / f"{role}.csv.gz" for role in kinds}
    rows: dict[str, Rows] = {
        role: CsvRows(paths[role], dtype, int(counts.sum()))
        for role, (dtype, counts) in kinds.items()
        if paths[role].is_file()
    }
    return rows, nodes.tolist()


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
        return {name: ArrayRows(np.asarray(load_plain(file)[name])) for name in SPLITS}
    return {name: ArrayRows(_read_ids(kinds[0] / f"{name}.csv.gz")) for name in SPLITS}


def _read_ids(path: Path) -> Ids:
    existing(path, hint="unpack the benchmark's archive again")
    blocks = [block[:, 0] for block in CsvRows(path, np.int64).blocks(0, 1 << 62)]
    return np.concatenate([np.empty(0, np.int64), *blocks])


def mag240m_source(folder: str | Path) -> Source:
    """Return the papers of MAG240M and their citations."""
    folder = Path(folder)
    if (folder / "mag240m_kddcup2021").is_dir():
        folder /= "mag240m_kddcup2021"
    processed = folder / "processed"
    edges = processed / "paper___cites___paper" / "edge_index.npy"
    features = processed / "paper" / "node_feat.npy"
    for path in (edges, features):
        existing(path, hint="give the folder mag240m_kddcup2021 of the large-scale challenge")
    labels = processed / "paper" / "node_label.npy"
    split_file, meta_file = folder / "split_dict.pt", folder / "meta.pt"
    splits = load_plain(split_file) if split_file.is_file() else {}
    meta = load_plain(meta_file) if meta_file.is_file() else {}
    splits.setdefault("test", splits.get("test-whole", splits.get("test-dev", [])))
    return ArraySource(
        name="MAG240M papers",
        edge_rows=FileRows(edges),
        feature_rows=FileRows(features),
        label_rows=FileRows(labels) if labels.is_file() else None,
        split_rows={
            name: ArrayRows(np.asarray(splits.get(name, []), np.int64))
            for name in (SPLITS if labels.is_file() else ())
        },
        num_classes=meta.get("num_classes"),
        kind="mag240m",
    )


_TABLE_ENDS = (".csv", ".tsv", ".txt", ".parquet", ".pq", ".gz", ".bz2", ".zst", ".edges")
_NODE_TABLES = ("nodes", "node", "vertices")  # names of the one table that is not of edges
_NPY_NAMES = {
    "edge_index": ("edge_index", "edges"),
    "features": ("features", "node_feat", "feat", "x"),
    "labels": ("labels", "node_label", "label", "y"),
    "weights": ("weights", "edge_weight"),
    "edge_features": EDGE_FEATURES,
}
_NPY_SPLITS = {
    "train": ("train", "train_idx", "train_mask"),
    "valid": ("valid", "valid_idx", "val", "val_idx", "val_mask"),
    "test": ("test", "test_idx", "test_mask"),
}


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options of a source: all that its path alone does not say.

    Attributes:
        kind: One of npy, ogb, mag240m, pyg and table; None: found from the path.
        arrays: Paths of .npy files by role (features, labels, weights), for npy and table.
        splits: Paths of .npy files by split, for npy and table.
        nodes: Node table, for table.
        columns: Columns of the tables.
        ids: auto, number or text, for table.
        num_nodes: Number of nodes; None: found.
        split: Where masks have several columns, the one to take, for npy, table and pyg.
        leave_out: Features of edges that are left out, by name, for npy, pyg and ogb.
    """

    kind: str | None = None
    arrays: Mapping[str, Path] = field(default_factory=dict)
    splits: Mapping[str, Path] = field(default_factory=dict)
    nodes: Path | None = None
    columns: TableColumns = field(default_factory=TableColumns)
    ids: Any = "auto"
    num_nodes: int | None = None
    split: int | None = None
    leave_out: Collection[str] = ()


def find_source(
    path: str | Path, options: SourceOptions | None = None
) -> tuple[Source | HeteroSource, bool]:
    """Return the source at a path, and whether it wants both directions of its edges.

    A folder with ``raw/`` is of the Open Graph Benchmark, one with ``processed/paper`` is MAG240M,
    one with ``edge_index.npy`` holds arrays, any other holds parts of an edge table, and maybe a
    node table named ``nodes``. A file is an
    array (.npy), an archive of arrays (.npz), a PyTorch Geometric object (.pt) or an edge table.

    Args:
        path: The file or folder.
        options: What the path does not say.

    Raises:
        ConfigurationError: The kind is unknown.
        DataError: There is nothing, or nothing known, at the path.
    """
    path, options = Path(path), options or SourceOptions()
    if not path.exists():
        raise DataError(f"there is no {path}", hint="check the path")
    kind = options.kind or _kind_of(path)
    require_one_of(kind, _FITTING, f"source kind {kind!r}")
    _check_options(kind, options)
    if kind == "ogb":
        return ogb_source(path, leave_out=options.leave_out), ogb_adds_reverse(path)
    if kind == "mag240m":
        return mag240m_source(path), False
    if kind == "pyg":
        return pyg_source(path, split=options.split, leave_out=options.leave_out), False
    if kind == "npy":
        return _npy_source(path, options), False
    return _with_arrays(path, options), False


_FITTING = {  # what may be said about a source of each kind
    "npy": {"arrays", "splits", "num_nodes", "split", "leave_out"},
    "pyg": {"split", "leave_out"},
    "ogb": {"leave_out"},
    "mag240m": set(),
    "table": {"arrays", "splits", "split", "nodes", "columns", "ids", "num_nodes"},
}


def _check_options(kind: str, options: SourceOptions) -> None:
    """Refuse what would be left unused: somebody counts on it."""
    plain = vars(SourceOptions(kind=options.kind))
    given = {name for name, value in vars(options).items() if value != plain[name]}
    extra = sorted(given - _FITTING[kind])
    if extra:
        raise ConfigurationError(
            f"{extra[0]} was given, which a source of kind {kind} has no use for",
            hint=f"it takes {', '.join(sorted(_FITTING[kind])) or 'nothing but its path'}",
        )


def _kind_of(path: Path) -> str:
    if path.is_file():
        ends = {".npy": "npy", ".npz": "npy", ".pt": "pyg", ".pth": "pyg"}
        if path.suffix in ends:
            return ends[path.suffix]
        if path.suffix in _TABLE_ENDS:
            return "table"
        raise DataError(f"{path} is of no known kind", hint="name it with --kind")
    if (path / "raw").is_dir():
        return "ogb"
    if (path / "mag240m_kddcup2021").is_dir() or (path / "processed" / "paper").is_dir():
        return "mag240m"
    if _first_array(path, _NPY_NAMES["edge_index"]) is not None:
        return "npy"
    if _table_files(path):
        return "table"
    raise DataError(f"{path} holds nothing that is known", hint="name its kind with --kind")


def _first_array(path: Path, names: tuple[str, ...]) -> Path | Rows | None:
    """Return the first of these arrays in a folder of files, or in an archive."""
    if path.is_dir():
        paths = (path / f"{name}.npy" for name in names)
        return next((file for file in paths if file.is_file()), None)
    members = npz_members(path)
    return next((FileRows(path, name) for name in names if name in members), None)


def _npy_source(path: Path, options: SourceOptions) -> Source:
    arrays: dict[str, Any] = dict(options.arrays)
    splits: dict[str, Any] = dict(options.splits)
    if path.is_file() and path.suffix != ".npz":
        arrays["edge_index"] = path
    else:
        for found, names in ((arrays, _NPY_NAMES), (splits, _NPY_SPLITS)):
            for role, candidates in names.items():
                kept = tuple(name for name in candidates if name not in options.leave_out)
                array = _first_array(path, kept)
                if array is not None:
                    found.setdefault(role, array)
    if "edge_index" not in arrays:
        raise DataError(f"{path} holds no array edge_index", hint="name the file of edges itself")
    return _arrays(arrays, splits, path, options)


def _arrays(
    arrays: dict[str, Any], splits: Mapping[str, Any], path: Path, options: SourceOptions
) -> ArraySource:
    one_each: Any = {name: one_split(as_rows(rows), options.split) for name, rows in splits.items()}
    return array_source(
        arrays.get("edge_index"),
        features=arrays.get("features"),
        labels=arrays.get("labels"),
        weights=arrays.get("weights"),
        edge_features=arrays.get("edge_features"),
        splits=one_each,
        num_nodes=options.num_nodes,
        name=path.stem,
    )


def _table_files(folder: Path) -> list[Path]:
    """Return the edge tables of a folder, or of its partitions such as ``year=2020/``."""
    for pattern in ("*", "*=*/**/*"):
        found = sorted(
            path
            for path in folder.glob(pattern)
            if path.suffix in _TABLE_ENDS and path.name[0] not in "._" and path.is_file()
        )
        if found:
            return found
    return []


def _check_parts(files: list[Path], header: bool | None) -> None:  # noqa: FBT001 - of TableColumns
    """Raise where parts of a folder have other columns than the first."""
    if len(files) < 2:
        return
    names = {file: open_table(file, header=header).names for file in files}
    first = names[files[0]]
    for file, found in names.items():
        if found != first:
            raise DataError(
                f"{file} has columns {', '.join(found)[:99]}, {files[0]} {', '.join(first)[:99]}",
                hint="parts of one edge table have the same; name a node table with --nodes",
            )


_OF_EDGES = {
    "weights": "make them a column: --column weight=NAME",
    "edge_features": "give the edges as an array edge_index, too",
}


def _with_arrays(path: Path, options: SourceOptions) -> Source:
    """Return the tables at a path, with the arrays that were given beside it."""
    if options.split is not None and not options.splits:
        message = f"split {options.split} was given, but no array of a split"
        raise ConfigurationError(message, hint="it says which column of masks to take")
    if not options.arrays and not options.splits:
        return _tables_at(path, options)
    for role, hint in _OF_EDGES.items():
        if role in options.arrays:
            raise ConfigurationError(f"{role} of an edge table were given as an array", hint=hint)
    arrays = _arrays(dict(options.arrays), options.splits, path, options)
    table = _tables_at(path, replace(options, num_nodes=arrays.num_nodes))
    if table.text_ids or table.node_table is not None:
        raise ConfigurationError(
            f"arrays were given to {table.name}, whose nodes are named by tables",
            hint="put features and labels into the node table; arrays go with ids 0, 1, 2, ...",
        )
    arrays.name, arrays.edge_part = table.name, table.edges()
    arrays.recipe = {**table.recipe, "arrays": dict(arrays.recipe)}
    return arrays


def _tables_at(path: Path, options: SourceOptions) -> TableSource:
    files = _table_files(path) if path.is_dir() else [path]
    nodes = options.nodes
    if nodes is None:
        nodes = next((file for file in files if file.name.partition(".")[0] in _NODE_TABLES), None)
    files = [file for file in files if nodes is None or file.resolve() != nodes.resolve()]
    _check_parts(files, options.columns.names)
    return table_source(
        files,
        nodes=nodes,
        columns=options.columns,
        ids=options.ids,
        num_nodes=options.num_nodes,
        name=path.name.partition(".")[0],
    )
