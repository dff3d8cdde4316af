"""Folders of benchmarks after their download, known by their files.

Node property prediction (arXiv 2005.00687): ``raw/data.npz`` and ``raw/node-label.npz``
(papers100M), or ``raw/*.csv.gz`` (products, arxiv), with ``split/KIND/{train,valid,test}.csv.gz``.
Large-scale challenge (arXiv 2103.09430): the paper nodes of MAG240M under ``processed/``, and those
of IGB (arXiv 2302.13522), which lie alike.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data._pyg import load_plain
from fivefold.gnn.data._tables import CsvRows
from fivefold.gnn.data.arrays import (
    ArrayRows,
    ArraySource,
    FileRows,
    Rows,
    as_rows,
    existing,
    leave_out_rest,
    npz_members,
)
from fivefold.gnn.data.parts import SPLITS
from fivefold.gnn.storage.pages import Ids
from fivefold.reading import Reading

# Benchmarks by the name of their split, and whether their own loader adds the reverse of each edge.
_BY_SPLIT = {
    "sales_ranking": ("ogbn-products", True),
    "species": ("ogbn-proteins", True),
    "throughput": ("ogbl-ppa", True),
    "target": ("ogbl-ddi", True),
}
_OGB_PARTS = {  # of a folder raw/: what is read, and what is only named
    "edge": "edges", "node-feat": "features", "node-label": "labels", "edge-feat": "edge features",
    "edge_weight": "weights", "num-node-list": "numbers of nodes", "num-edge-list": "and of edges",
}  # fmt: skip


def ogb_adds_reverse(folder: Path, reading: Reading) -> bool:
    """Return whether the benchmark stores both directions of the edges in this folder.

    The folder's name says nothing: the split does, and what lies in ``raw``.
    """
    files = {path.name.partition(".")[0] for path in (folder / "raw").iterdir()}
    splits = [path.name for path in (folder / "split").glob("*") if path.is_dir()]
    name, both = next((_BY_SPLIT[split] for split in splits if split in _BY_SPLIT), ("", False))
    if {"edge_weight", "edge_year"} <= files:
        name, both = "ogbl-collab", True
    if name:
        reading.assume("direction", "both" if both else "one", f"as {name}, whose split this is")
    else:
        reading.assume(
            "direction", "as in the files",
            "OGB's own loader adds the reverse of some benchmarks' edges (ogbn-products and "
            "-proteins; ogbl-ppa, -ddi and -collab): --undirected does",
        )  # fmt: skip
    return both


def ogb_source(folder: str | Path, *, leave_out: Collection[str] = ()) -> ArraySource:
    """Return a node property prediction data set of the Open Graph Benchmark."""
    folder = Path(folder)
    raw = folder / "raw"
    if (raw / "data.npz").is_file():
        rows, counts = _binary_rows(raw)
    elif (raw / "edge.csv.gz").is_file():
        rows, counts = _csv_rows(raw)
    else:
        raise DataError(
            f"{folder} holds neither raw/data.npz nor raw/edge.csv.gz",
            hint="give the folder into which the benchmark's archive was unpacked",
        )
    if len(counts) != 1:
        raise DataError(f"{folder} holds {len(counts)} graphs", hint="one graph is needed")
    source = ArraySource(
        name=folder.resolve().name,
        edge_rows=rows["edge"],
        edge_pairs=isinstance(rows["edge"], CsvRows) or None,
        feature_rows=rows.get("node-feat"),
        label_rows=rows.get("node-label"),
        edge_feature_rows=None if "edge_feat" in leave_out else rows.get("edge-feat"),
        weight_rows=None if "edge_weight" in leave_out else rows.get("edge_weight"),
        node_part_rows=_named(rows, "node_", leave_out),
        edge_part_rows=_named(rows, "edge_", {*leave_out, "edge_weight"}),
        split_rows=_read_splits(folder) if "node-label" in rows else {},
        given_nodes=counts[0],
        kind="ogb",
    )
    source.reading = _ogb_reading(folder, rows, leave_out)
    return source


def _named(rows: Mapping[str, Rows], start: str, leave_out: Collection[str]) -> dict[str, Rows]:
    """Return what the benchmark calls additional files, such as node_year."""
    return {
        key: part for key, part in rows.items() if key.startswith(start) and key not in leave_out
    }


def _ogb_reading(folder: Path, rows: Mapping[str, Rows], leave_out: Collection[str]) -> Reading:
    """Say of every file below ``raw`` and of every split what became of it."""
    reading = Reading(folder.resolve().name)
    for path in sorted((folder / "raw").iterdir()):
        name = path.name.partition(".")[0]
        if path.suffix == ".npz":
            for member in sorted(npz_members(path)):
                known = member in {*_BINARY.values(), *rows, "node_label", "num_nodes_list"}
                if known and member not in leave_out:
                    reading.take(f"{path.name}: {member}")
                elif member == "num_edges_list":
                    reading.ignore(f"{path.name}: {member}", "edge_index says it")
                else:
                    reading.leave_out(f"{path.name}: {member}", _NOT_STORED)
        elif (
            (name in _OGB_PARTS or name.startswith(("node_", "edge_")))
            and (name in rows or name.startswith("num-"))
            and (name.replace("-", "_") not in leave_out)
        ):
            reading.take(path.name, _OGB_PARTS.get(name, "a part of its own name"))
        else:
            reading.leave_out(path.name, _NOT_STORED)
    for path in sorted((folder / "split").glob("*")):
        if "node-label" in rows:
            reading.take(f"split/{path.name}")
        else:
            reading.leave_out(f"split/{path.name}", "a split of links, not of nodes")
    told = {folder / name for name in reading.names()}
    raw = {folder / "raw" / path.name for path in (folder / "raw").iterdir()}
    leave_out_rest(reading, folder, told | raw, "neither below raw nor split")
    return reading


_NOT_STORED = "no part of a data set has this name; give it to the loader, in the order of the file"
_BINARY = {"edge": "edge_index", "node-feat": "node_feat", "edge-feat": "edge_feat"}


def _binary_rows(raw: Path) -> tuple[dict[str, Rows], list[int]]:
    """Return the arrays that are there, and the number of nodes of each graph."""
    data, label_file = raw / "data.npz", raw / "node-label.npz"
    members = npz_members(data)
    for name in ("edge_index", "num_nodes_list"):
        if name not in members:
            raise DataError(f"{data} has no array {name}", hint="get the file again")
    rows: dict[str, Rows] = {
        role: FileRows(data, name) for role, name in _BINARY.items() if name in members
    }
    for name in members:
        if name.startswith(("node_", "edge_")) and name not in _BINARY.values():
            rows[name] = FileRows(data, name)
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
        "edge_weight": (np.float32, edges),
    }
    paths = {role: raw / f"{role}.csv.gz" for role in kinds}
    rows: dict[str, Rows] = {
        role: CsvRows(paths[role], dtype, int(counts.sum()))
        for role, (dtype, counts) in kinds.items()
        if paths[role].is_file()
    }
    for path in sorted(raw.glob("*_*.csv.gz")):
        name = path.name.partition(".")[0]
        if name not in rows and name.startswith(("node_", "edge_")):
            whole = all(map(pa.types.is_integer, CsvRows(path, np.int64).table.types))
            count = int((nodes if name.startswith("node_") else edges).sum())
            rows[name] = CsvRows(path, np.int64 if whole else np.float64, count)
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


_CITES = ("paper___cites___paper", "paper__cites__paper")  # of MAG240M and of IGB


def is_papers(folder: Path) -> bool:
    """Return whether a folder holds papers and their citations, as MAG240M and IGB do."""
    places = (folder / "mag240m_kddcup2021" / "processed", folder / "processed", folder)
    return any((place / name).is_dir() for place in places for name in _CITES)


def papers_source(
    folder: str | Path, labels: str | Path | None, splits: Mapping[str, Path]
) -> ArraySource:
    """Return the papers of MAG240M, or of IGB at any size, and their citations."""
    folder = Path(folder)
    if (folder / "processed" / _CITES[1]).is_dir() or (folder / _CITES[1]).is_dir():
        return _igb_source(folder, labels, splits)
    if labels is not None or splits:
        message = "labels or splits were given to MAG240M, which has its own"
        raise ConfigurationError(message, hint="leave them out")
    return mag240m_source(folder)


def _igb_source(folder: Path, labels: str | Path | None, splits: Mapping[str, Path]) -> ArraySource:
    """Return the papers of IGB (arXiv 2302.13522): 19 or 2,983 classes, no split in the files."""
    processed = folder / "processed" if (folder / "processed").is_dir() else folder
    papers = processed / "paper"
    found = sorted(papers.glob("node_label*.npy"))
    if labels is None and len(found) > 1:
        raise DataError(
            f"{papers} has several labels: {', '.join(path.name for path in found)}",
            hint=f"choose: --array labels={found[0]}",
        )
    chosen = Path(labels) if labels is not None else next(iter(found), None)
    source = ArraySource(
        name=folder.resolve().name,
        edge_rows=FileRows(existing(processed / _CITES[1] / "edge_index.npy")),
        edge_pairs=True,
        feature_rows=FileRows(existing(papers / "node_feat.npy")),
        label_rows=None if chosen is None else FileRows(chosen),
        split_rows={name: as_rows(path, name) for name, path in splits.items()},
        kind="igb",
    )
    used = [papers / "node_feat.npy", processed / _CITES[1] / "edge_index.npy"]
    used += [path for path in (chosen, *splits.values()) if path is not None]
    reading = _papers_reading(folder, used)
    if not splits and chosen is not None:
        reading.assume("split", "none", "IGB's loader counts off 60, 20, 20 %: --array train=FILE")
    source.reading = reading
    return source


def mag240m_source(folder: str | Path) -> ArraySource:
    """Return the papers of MAG240M and their citations."""
    folder = Path(folder)
    if (folder / "mag240m_kddcup2021").is_dir():
        folder /= "mag240m_kddcup2021"
    processed = folder / "processed"
    edges = processed / _CITES[0] / "edge_index.npy"
    features = processed / "paper" / "node_feat.npy"
    for path in (edges, features):
        existing(path, hint="give the folder mag240m_kddcup2021 of the large-scale challenge")
    labels = processed / "paper" / "node_label.npy"
    split_file, meta_file = folder / "split_dict.pt", folder / "meta.pt"
    splits = load_plain(split_file) if split_file.is_file() else {}
    meta = load_plain(meta_file) if meta_file.is_file() else {}
    splits.setdefault("test", splits.get("test-whole", splits.get("test-dev", [])))
    source = ArraySource(
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
    used = [edges, features, labels, split_file, meta_file]
    source.reading = _papers_reading(folder, [path for path in used if path.is_file()])
    return source


def _papers_reading(folder: Path, used: Sequence[Path]) -> Reading:
    """Say which files are read, and which are not."""
    reading = Reading(folder.resolve().name)
    for path in used:
        reading.take(os.path.relpath(path, folder))
    leave_out_rest(reading, folder, used, "only papers and their citations are read")
    return reading
