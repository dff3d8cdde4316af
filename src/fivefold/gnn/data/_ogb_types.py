"""Folders of the Open Graph Benchmark with several types of nodes and edges, as ogbn-mag.

Tables lie in ``raw/relations/HEAD___RELATION___TAIL`` and ``raw/node-feat/TYPE``, or arrays by type
in ``raw/edge_index_dict.npz`` and its like, as the benchmark's own writer makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fivefold.errors import DataError
from fivefold.gnn.data._dataset import HeteroSource
from fivefold.gnn.data._pyg import load_plain
from fivefold.gnn.data._tables import CsvRows, open_table
from fivefold.gnn.data.arrays import (
    ArrayEdges,
    ArrayFeatures,
    ArrayRows,
    ArraySource,
    FileRows,
    Rows,
    existing,
    leave_out_rest,
    npz_members,
)
from fivefold.gnn.data.parts import SPLITS
from fivefold.gnn.sampling.batches import EdgeType
from fivefold.reading import Reading

_UNSTORED = "no part of a data set has this name"


def has_types(folder: Path) -> bool:
    """Return whether a folder of the benchmark has several types."""
    raw = folder / "raw"
    return (raw / "relations").is_dir() or (raw / "edge_index_dict.npz").is_file()


def typed_ogb_source(folder: Path, leave_out: Collection[str]) -> HeteroSource:
    """Return the graph of such a folder; edges are taken in the direction of the files."""
    raw, reading = folder / "raw", Reading(folder.resolve().name)
    parts = _Tables(raw) if (raw / "relations").is_dir() else _Archives(raw)
    counts, edges = parts.counts(), parts.of("edge_index", np.int64)
    splits = _splits(folder)
    labels = parts.of("node_label", np.float64)
    features = parts.of("node_feat", np.float32)
    of_edges = {} if "edge_feat" in leave_out else parts.of("edge_feat", np.float32)
    nodes = {
        kind: ArraySource(
            name=kind,
            edge_rows=None,
            feature_rows=features.get(kind),
            label_rows=labels.get(kind),
            split_rows=splits.get(kind, {}) if kind in labels else {},
            given_nodes=count,
            kind="ogb",
        )
        for kind, count in counts.items()
    }
    for name, used in parts.used.items():
        reading.take(name, used)
    for name in parts.rest():
        reading.leave_out(name, "--leave-out" if "edge_feat" in name.replace("-", "_") and leave_out
                          else _UNSTORED)  # fmt: skip
    for path in sorted((folder / "split").glob("*")):
        reading.take(f"split/{path.name}")
    reading.assume(
        "direction", "as in the files", "OGB's loader adds no reverse where types differ"
    )
    leave_out_rest(
        reading, folder, {raw, *(folder / "split").glob("*")}, "neither below raw nor split"
    )
    kinds: dict[EdgeType, Any] = {_edge_type(name): rows for name, rows in edges.items()}
    return HeteroSource(
        name=folder.resolve().name,
        nodes=nodes,
        edges={kind: ArrayEdges(rows, None, pairs=parts.pairs) for kind, rows in kinds.items()},
        edge_features={
            _edge_type(name): ArrayFeatures(rows, what=f"edge features of {name}")
            for name, rows in of_edges.items()
        },
        reading=reading,
    )


def _edge_type(name: str) -> EdgeType:
    head, relation, tail = [*name.split("___"), "", ""][:3]
    if not tail:
        raise DataError(f"{name!r} is no HEAD___RELATION___TAIL", hint="unpack the archive again")
    return head, relation, tail


class _Tables:
    """Tables in a folder for each type; of lists of graphs there must be one entry."""

    pairs = True

    def __init__(self, raw: Path) -> None:
        self.raw, self.used = raw, dict[str, str]()

    def counts(self) -> dict[str, int]:
        """Return the number of nodes of each type."""
        path = existing(self.raw / "num-node-dict.csv.gz", hint="unpack the archive again")
        table = open_table(path, None, lambda _: True)
        self._use(path, "numbers of nodes")
        (numbers,) = table.batches(table.names, [pa.int64()] * len(table.names))
        _check_one(numbers.num_rows, self.raw)
        self._sizes: dict[str, int] = {
            name: column[0].as_py()
            for name, column in zip(table.names, numbers.columns, strict=True)
        }
        return self._sizes

    def of(self, part: str, dtype: type) -> dict[str, Rows]:
        """Return a part by node or edge type."""
        file = "edge" if part == "edge_index" else part.replace("_", "-")
        place = self.raw / ("relations" if part.startswith("edge") else file)
        found: dict[str, Rows] = {}
        for path in sorted(place.glob(f"*/{file}.csv.gz")):
            kind = path.parent.name
            self._use(path, f"{part} of {kind}")
            if part.startswith("edge"):
                listed = existing(path.with_name("num-edge-list.csv.gz"))
                (numbers,) = CsvRows(listed, np.int64).blocks(0, 1 << 20)
                _check_one(len(numbers), self.raw)
                count = int(numbers[0, 0])
                self.used.setdefault(str(listed.relative_to(self.raw.parent)), "number of edges")
            else:
                count = self._sizes[kind]
            found[kind] = CsvRows(path, dtype, count)
        return found

    def _use(self, path: Path, what: str) -> None:
        self.used[str(path.relative_to(self.raw.parent))] = what

    def rest(self) -> Iterator[str]:
        """Yield the files that were not used."""
        for path in sorted(self.raw.rglob("*")):
            name = str(path.relative_to(self.raw.parent))
            if path.is_file() and name not in self.used:
                yield name


class _Archives:
    """Archives of arrays by type, a member for each."""

    pairs = False

    def __init__(self, raw: Path) -> None:
        self.raw, self.used = raw, dict[str, str]()

    def counts(self) -> dict[str, int]:
        """Return the number of nodes of each type."""
        sizes = {}
        for kind, rows in self._members("num_nodes_dict").items():
            _check_one(rows.shape[0], self.raw)
            sizes[kind] = int(next(rows.blocks(0, 1))[0])
        return sizes

    def of(self, part: str, dtype: type) -> dict[str, Rows]:
        """Return a part by node or edge type."""
        del dtype  # arrays have their own
        return self._members("node-label" if part == "node_label" else f"{part}_dict")

    def _members(self, name: str) -> dict[str, Rows]:
        path = self.raw / f"{name}.npz"
        if not path.is_file():
            return {}
        self.used[f"raw/{path.name}"] = name
        return {member: FileRows(path, member) for member in npz_members(path)}

    def rest(self) -> Iterator[str]:
        """Yield the files that were not used."""
        for path in sorted(self.raw.iterdir()):
            if f"raw/{path.name}" not in self.used:
                yield f"raw/{path.name}"


def _check_one(count: int, raw: Path) -> None:
    if count != 1:
        raise DataError(f"{raw} holds {count} graphs", hint="one graph is needed")


def _splits(folder: Path) -> Mapping[str, dict[str, Rows]]:
    """Return the ids of the splits by node type."""
    kinds = sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if len(kinds) > 1:
        raise DataError(
            f"{folder / 'split'} holds {len(kinds)} kinds of splits", hint="leave one of them"
        )
    found: dict[str, dict[str, Rows]] = {}
    if kinds and (file := kinds[0] / "split_dict.pt").is_file():
        for split, by_type in load_plain(file).items():
            for kind, ids in by_type.items():
                found.setdefault(kind, {})[split] = ArrayRows(np.asarray(ids))
        return found
    for place in kinds:
        for path in sorted(place.glob("*/*.csv.gz")):
            split = path.name.partition(".")[0]
            if split in SPLITS:
                blocks = CsvRows(path, np.int64).blocks(0, 1 << 62)
                ids = np.concatenate([np.empty(0, np.int64), *(block[:, 0] for block in blocks)])
                found.setdefault(path.parent.name, {})[split] = ArrayRows(ids)
    return found
