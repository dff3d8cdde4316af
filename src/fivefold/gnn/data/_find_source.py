"""Which source a path is, from what lies there."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from fivefold.errors import ConfigurationError, DataError, require_one_of
from fivefold.gnn.data._benchmarks import is_papers, ogb_adds_reverse, ogb_source, papers_source
from fivefold.gnn.data._dataset import HeteroSource
from fivefold.gnn.data._dgl import dgl_source, is_dgl
from fivefold.gnn.data._heads import other_format
from fivefold.gnn.data._ogb_types import has_types, typed_ogb_source
from fivefold.gnn.data._pyg import pyg_source
from fivefold.gnn.data._table_source import TableSource, open_edges, table_source
from fivefold.gnn.data._tables import TableColumns
from fivefold.gnn.data.arrays import (
    ArraySource,
    FileRows,
    Rows,
    array_source,
    as_rows,
    leave_out_rest,
    npz_members,
    one_split,
)
from fivefold.gnn.data.parts import EDGE_FEATURES, Source
from fivefold.reading import Reading

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
        kind: One of npy, ogb, mag240m, igb, dgl, pyg and table; None: found from the path.
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

    A folder with ``raw/`` is of the Open Graph Benchmark, one with papers and their citations is
    MAG240M or IGB, one with ``meta.yaml`` or ``metadata.yaml`` is of DGL, one with
    ``edge_index.npy`` holds arrays, any other holds parts of an edge table, and maybe a node table
    named ``nodes``. A file is an array (.npy), an archive of arrays (.npz), a PyTorch Geometric
    object (.pt) or an edge table.

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
        return _ogb_at(path, options.leave_out)
    if kind in {"mag240m", "igb"}:
        return papers_source(path, options.arrays.get("labels"), options.splits), False
    if kind == "dgl":
        return dgl_source(path, options.columns), False
    if kind == "pyg":
        return pyg_source(path, split=options.split, leave_out=options.leave_out), False
    if kind == "npy":
        return _npy_source(path, options), False
    table = _with_arrays(path, options)
    return table, isinstance(table, TableSource) and table.wants_reverse


def _ogb_at(path: Path, leave_out: Collection[str]) -> tuple[Source | HeteroSource, bool]:
    if has_types(path):
        return typed_ogb_source(path, leave_out), False
    found = ogb_source(path, leave_out=leave_out)
    return found, ogb_adds_reverse(path, found.reading)


_FITTING = {  # what may be said about a source of each kind
    "npy": {"arrays", "splits", "num_nodes", "split", "leave_out"},
    "pyg": {"split", "leave_out"},
    "ogb": {"leave_out"},
    "mag240m": set(),
    "igb": {"arrays", "splits"},
    "dgl": {"columns"},
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
        if path.suffix in _TABLE_ENDS or path.name.startswith("out."):  # the name of KONECT's
            return "table"
        raise DataError(f"{path} is of no known kind", hint=other_format(path))
    igb = any((place / "paper__cites__paper").is_dir() for place in (path, path / "processed"))
    signs = {
        "ogb": (path / "raw").is_dir(),
        "igb": igb,
        "mag240m": is_papers(path),
        "dgl": is_dgl(path),
        "npy": _first_array(path, _NPY_NAMES["edge_index"]) is not None,
    }
    signs["table"] = not any(signs.values()) and bool(_table_files(path))
    if (kind := next((kind for kind, there in signs.items() if there), None)) is not None:
        return kind
    names = ", ".join(sorted(entry.name for entry in path.iterdir()))[:99]
    raise DataError(
        f"{path} holds nothing that is known: {names or 'it is empty'}",
        hint="name the file of edges itself, with --kind table where its name does not say so",
    )


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
    parts = _other_parts(path, options.leave_out)
    source = _arrays(arrays, splits, path, options, parts)
    used = [*arrays.items(), *splits.items()]
    used += [(f"{of}s carry it", rows) for of, found in parts.items() for rows in found.values()]
    _tell_arrays(source.reading, path, used, options.leave_out)
    return source


def _other_parts(path: Path, left_out: Collection[str]) -> dict[str, dict[str, Rows]]:
    """Return what nodes and edges carry by names of their own: node_year, edge_time, ..."""
    names = sorted(file.stem for file in path.glob("*.npy")) if path.is_dir() else []
    if path.suffix == ".npz":
        names = npz_members(path)
    roles = {name for known in (*_NPY_NAMES.values(), *_NPY_SPLITS.values()) for name in known}
    found: dict[str, dict[str, Rows]] = {"node": {}, "edge": {}}
    for name in names:
        of = name.partition("_")[0]
        if of in found and "_" in name and name not in {*roles, *left_out}:
            rows = FileRows(path / f"{name}.npy") if path.is_dir() else FileRows(path, name)
            found[of][name] = rows
    return found


def _tell_arrays(
    reading: Reading, path: Path, used: list[tuple[str, Any]], left_out: Collection[str]
) -> None:
    """Say of every array given, and of every file or member beside them, what became of it."""
    taken = set()
    for role, rows in used:
        place = Path(rows) if not isinstance(rows, FileRows) else Path(rows.member or rows.path)
        taken.add(place.name)
        if place.name not in reading.names():
            reading.take(place.name, role)
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if path.suffix == ".npz":
        names = [f"{name}.npy" for name in sorted(npz_members(path))]
    for name in names:
        if name not in taken:
            asked = name.removesuffix(".npy") in left_out
            why = "--leave-out" if asked else "its name is none of a part: --array ROLE=FILE"
            reading.leave_out(name, why)


def _arrays(
    arrays: dict[str, Any],
    splits: Mapping[str, Any],
    path: Path,
    options: SourceOptions,
    parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ArraySource:
    one_each: Any = {name: one_split(as_rows(rows), options.split) for name, rows in splits.items()}
    return array_source(
        arrays.get("edge_index"),
        features=arrays.get("features"),
        labels=arrays.get("labels"),
        weights=arrays.get("weights"),
        edge_features=arrays.get("edge_features"),
        splits=one_each,
        node_parts=parts.get("node"),
        edge_parts=parts.get("edge"),
        num_nodes=options.num_nodes,
        name=path.stem,
    )


def _table_files(folder: Path) -> list[Path]:
    """Return the edge tables of a folder, or of its partitions such as ``year=2020/``."""
    for pattern in ("*", "*=*/**/*"):
        found = sorted(
            path
            for path in folder.glob(pattern)
            if path.suffix in _TABLE_ENDS
            and path.name[0] not in "._"
            and path.is_file()
            and not path.name.lower().startswith(_PROSE)
        )
        if found:
            return found
    return []


_PROSE = ("readme", "license", "licence", "copying", "changelog", "notice")
_SPLIT_WORDS = {"train", "training", "valid", "validation", "val", "dev", "test"}


def _once(files: list[Path]) -> tuple[list[Path], dict[Path, Path]]:
    """Return the files that hold a table each, and those that hold one of them again."""
    kept: dict[tuple[Path, str], Path] = {}
    again: dict[Path, Path] = {}
    for path in sorted(files, key=lambda path: (path.suffix in _PACKED_ENDS, path)):
        own = path.with_suffix("") if path.suffix in _PACKED_ENDS else path
        stem = path.parent, (own.stem if own.suffix in _TABLE_ENDS else own.name)
        first = kept.setdefault(stem, path)
        if first == path:
            continue
        if path.suffix in _PACKED_ENDS and _same_text(first, path):
            again[path] = first
            continue
        raise DataError(
            f"{first} and {path.name} have one name: they may be one table twice",
            hint="name the file itself, or remove one of them",
        )
    return sorted(kept.values()), again


_PACKED_ENDS = (".gz", ".bz2", ".zst")


def _same_text(first: Path, second: Path) -> bool:
    with pa.input_stream(str(first)) as one, pa.input_stream(str(second)) as other:
        while True:
            blocks = one.read(1 << 20), other.read(1 << 20)
            if blocks[0] != blocks[1]:
                return False
            if not blocks[0]:
                return True


def _check_parts(folder: Path, files: list[Path], columns: TableColumns) -> None:
    """Raise where parts of a folder have other columns than the first, or are splits or copies."""
    if len(files) < 2:
        return
    names = [str(file.relative_to(folder)) for file in files]
    splits = [name for name in names if set(re.split(r"[^a-z]+", name.lower())) & _SPLIT_WORDS]
    if splits:
        raise DataError(
            f"{folder} holds {', '.join(splits)[:99]}: parts of one graph, or a split of its "
            "edges?",
            hint="name the file to read, such as the edges of training; or put all rows into one "
            "file where they are one graph",
        )
    sizes: dict[int, list[Path]] = {}
    for file in files:
        for other in sizes.setdefault(file.stat().st_size, []):
            if filecmp.cmp(file, other, shallow=False):
                raise DataError(
                    f"{file} is a copy of {other.name}: every edge would be there twice",
                    hint="name the file itself, or remove one of them",
                )
        if file.stat().st_size:
            sizes[file.stat().st_size].append(file)
    parts = {file: open_edges(file, columns).names for file in files}
    first = parts[files[0]]
    for file, found in parts.items():
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
    arrays.parts_of["edge"] = table.edge_parts()
    arrays.recipe = {**table.recipe, "arrays": dict(arrays.recipe)}
    return arrays


def _tables_at(path: Path, options: SourceOptions) -> TableSource:
    files, again = _once(_table_files(path)) if path.is_dir() else ([path], {})
    nodes = options.nodes
    if nodes is None and path.is_dir():
        nodes = next((file for file in files if file.name.partition(".")[0] in _NODE_TABLES), None)
    if nodes is not None:
        own = nodes.resolve()
        same = [(file.resolve(), first.resolve()) for file, first in again.items()]
        twins = {own, *(end for pair in same if own in pair for end in pair)}
        files = [file for file in files if file.resolve() not in twins]
    if path.is_dir():
        _check_parts(path, files, options.columns)
    source = table_source(
        files,
        nodes=nodes,
        columns=options.columns,
        ids=options.ids,
        num_nodes=options.num_nodes,
        name=path.name.partition(".")[0],
        folder=path if path.is_dir() else path.parent,
    )
    if path.is_dir():
        _tell_of_folder(source.reading, path, [*files, *([] if nodes is None else [nodes])], again)
    return source


def _tell_of_folder(
    reading: Reading, folder: Path, used: list[Path], again: Mapping[Path, Path]
) -> None:
    for file, first in again.items():
        if file not in used:
            reading.leave_out(str(file.relative_to(folder)), f"the same as {first.name}, packed")
    inside = [file.relative_to(folder) for file in used if file.is_relative_to(folder)]
    keys = {part.partition("=")[0] for file in inside for part in file.parent.parts}
    for key in sorted(keys):
        reading.leave_out(f"partition {key}", "a value in the names of folders is not stored")
    why = "no table of edges or nodes by its name"
    leave_out_rest(reading, folder, {*used, *again}, why)
