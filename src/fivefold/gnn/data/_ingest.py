"""Writing a data set from any source: in blocks, resumable, within a memory bound.

Each file is written under a temporary name with a journal of what is durable, so that the same
call, made again after a kill, goes on where it was. The recipe of the source is stored in every
file: a file of another recipe is never reused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

import numpy as np

from fivefold.errors import ConfigurationError, DataError, require_whole
from fivefold.files import read_checked_json, write_checked_json
from fivefold.gnn.data._dataset import (
    BESIDE_GRAPH,
    EDGE_FEATURES_FILE,
    EDGE_PARTS_FILE,
    FEATURES_FILE,
    GRAPH_FILE,
    HETERO_FILE,
    HETERO_VERSION,
    LABELS_FILE,
    NAMES_FILE,
    NODE_PARTS_FILE,
    Dataset,
    HeteroDataset,
    HeteroSource,
)
from fivefold.gnn.data._write_graph import EdgeRules, work_folder, write_graph
from fivefold.gnn.data.parts import FeaturePart, LabelPart, Progress, Source, overlaps
from fivefold.gnn.sampling.batches import EdgeType
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.gnn.storage.pages import Array, Ids, first_outside
from fivefold.units import format_bytes

_LOG = logging.getLogger(__name__)
_LEAST_MEMORY_BYTES = 16_000_000
_MOST_CLASSES = 1 << 24
_PARTS = {NODE_PARTS_FILE: "node_parts", EDGE_PARTS_FILE: "edge_parts"}
_FILES = (LABELS_FILE, FEATURES_FILE, EDGE_FEATURES_FILE, *_PARTS, GRAPH_FILE)
_MARK_EVERY_BYTES = 256 << 20  # a mark syncs the file: seldom enough to cost nothing


def _check_free(folder: Path, other: str) -> None:
    """Refuse a folder with a data set of the other form: of one type, or of several."""
    if (folder / other).is_file():
        raise DataError(
            f"{folder} holds a data set of another form: {other}", hint="choose another folder"
        )


def no_progress(_stage: str, _done: int, _total: int) -> None:
    """Tell nobody."""


def write_parts(
    folder: Path,
    attributes: Mapping[str, Any],
    recipe: Mapping[str, Any],
    *,
    parts: Mapping[str, Callable[[], Any]],
    rules: EdgeRules,
    memory_bytes: int,
    progress: Progress,
) -> None:
    """Write the parts, by the names of their files, each unless it is there already."""
    _check_free(folder, HETERO_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = json.loads(json.dumps(recipe))  # tuples become lists, as they will when read
    attributes = {**attributes, "recipe": recipe}
    # All are looked at before any work. The graph last: a folder with a graph is complete.
    todo = [name for name in _FILES if not _is_finished(folder / name, recipe)]
    run: dict[str, Any] = {"memory_bytes": memory_bytes, "progress": progress}
    for name in todo:
        path, part = folder / name, parts[name]() if name in parts else None
        if part is None:
            continue
        if name == LABELS_FILE:
            _write_labels(path, part, attributes, progress)
        elif name == FEATURES_FILE:
            count = int(attributes["num_nodes"])
            _write_features(path, part, "nodes", count, attributes=attributes, **run)
        elif name in _PARTS:
            _write_named(path, part, attributes, memory_bytes)
        elif name == EDGE_FEATURES_FILE:
            _write_features(path, part, "edges", part.num_rows, attributes=attributes, **run)
        else:
            files = _fingerprints(folder, BESIDE_GRAPH)
            if (names := _names_hash(folder)) is not None:
                files[NAMES_FILE] = names
            write_graph(path, part, {**attributes, "files": files}, rules=rules, **run)
    shutil.rmtree(work_folder(folder / GRAPH_FILE), ignore_errors=True)


def _fingerprints(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the fingerprints of the files of these names that are in a folder."""
    found = {}
    for name in names:
        if (folder / name).is_file():
            with Container.open(folder / name) as container:
                found[name] = container.fingerprint
    return found


def _names_hash(folder: Path) -> str | None:
    """Return a hash of the list of names; None where ids were numbers."""
    path = folder / NAMES_FILE
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def check_names_file(folder: Path, graph: Container) -> None:
    """Refuse a list of names that is damaged or of another graph."""
    if _names_hash(folder) != graph.attributes["files"].get(NAMES_FILE):
        raise DataError(
            f"{NAMES_FILE} in {folder} is damaged or does not belong to this data set",
            hint="put the right file back, or ingest the data set again into a new folder",
        )


def _is_finished(path: Path, recipe: Mapping[str, Any]) -> bool:
    if not path.is_file():
        return False
    with Container.open(path) as container:
        found = container.attributes.get("recipe")
    if found != recipe:
        changed = sorted(
            key for key in {*recipe, *(found or {})} if (found or {}).get(key) != recipe.get(key)
        )
        files = " ".join(sorted(file.name for file in path.parent.glob("*.fvf")))
        raise DataError(
            f"{path} was made otherwise: it differs in {', '.join(changed)}",
            hint=f"choose another folder, or remove {files} there to make them again",
        )
    return True


def _write_labels(
    path: Path, part: LabelPart, attributes: Mapping[str, Any], progress: Progress
) -> None:
    """Write labels in one go, without resuming: they are small beside all else."""
    num_nodes = int(attributes["num_nodes"])
    sections: dict[str, tuple[Any, tuple[int, ...]]] = {"y": (np.int64, (num_nodes,))}
    for name, ids in part.splits.items():
        _check_split(name, ids, num_nodes)
        sections[name] = (np.int64, (ids.size,))
    _tell_of_overlaps(part.splits)
    num_classes = part.num_classes
    if num_classes is None:  # read once more than where it is known
        num_classes = _count_classes(part, num_nodes, progress)
    attributes = {**attributes, "num_classes": num_classes, "class_names": part.class_names}
    with ContainerWriter(path, kind="labels", sections=sections, attributes=attributes) as writer:
        row = 0
        for block in _checked_labels(part, num_nodes, progress, "labels"):
            writer.write("y", row, block)
            row += block.size
        for name, ids in part.splits.items():
            writer.write(name, 0, ids)
        writer.commit().close()


def _tell_of_overlaps(splits: Mapping[str, Ids]) -> None:
    """Say how many nodes two splits share: what they measure is less than it seems."""
    for names, count in overlaps(splits).items():
        _LOG.warning(
            "%s nodes are in two splits, %s: an accuracy of nodes that were trained on says little "
            "of others",
            *(f"{count:,}", names),
        )


def _count_classes(part: LabelPart, num_nodes: int, progress: Progress) -> int:
    """Return one more than the largest label."""
    num_classes, used = 0, set[int]()
    for block in _checked_labels(part, num_nodes, progress, "classes"):
        num_classes = max(num_classes, int(block.max(initial=-1)) + 1)
        if num_classes <= 2 and len(used) < 3:
            used.update(np.unique(block).tolist())
    if num_classes == 2 and used == {-1, 1}:
        message = "labels are -1 and 1 alone, but -1 is no class, it stands for unknown"
        raise DataError(message, hint="number the classes 0 and 1")
    return num_classes


def _checked_labels(
    part: LabelPart, num_nodes: int, progress: Progress, stage: str
) -> Iterator[Ids]:
    """Yield the blocks of labels; what no class can be, and too few or too many, are errors."""
    rows = 0
    for block in part.blocks(0):
        rows += block.size
        largest = int(block.max(initial=-1))
        if block.size and int(block.min()) < -1:
            raise DataError(
                f"a label is {int(block.min())}", hint="classes count from 0; unknown is -1"
            )
        if largest >= _MOST_CLASSES:
            raise DataError(
                f"a label is {largest}", hint=f"number the classes from 0; at most {_MOST_CLASSES}"
            )
        if part.num_classes is not None and largest >= part.num_classes:
            raise DataError(
                f"a label is {largest}, but there are {part.num_classes} classes",
                hint="classes count from 0",
            )
        progress(stage, rows, num_nodes)
        if rows <= num_nodes:
            yield block
    if rows != num_nodes:
        raise DataError(
            f"there are {rows} labels for {num_nodes} nodes", hint="give one label per node"
        )


def _check_split(name: str, ids: Ids, num_nodes: int) -> None:
    if first_outside(ids, num_nodes) >= 0:
        raise DataError(
            f"the {name} split has ids from {ids.min()} to {ids.max()}, "
            f"the graph {num_nodes} nodes",
            hint="ids of nodes count from 0",
        )
    if np.unique(ids).size != ids.size:
        raise DataError(f"the {name} split names a node twice", hint="name each node once")


def _write_features(
    path: Path,
    part: FeaturePart,
    what: str,
    count: int,
    *,
    attributes: Mapping[str, Any],
    memory_bytes: int,
    progress: Progress,
) -> None:
    row_bytes = max(1, part.dim * part.dtype.itemsize)
    max_rows = max(1, min(memory_bytes // 8, 32 << 20) // row_bytes)
    sections = {"x": (part.dtype, (count, part.dim))}
    with ContainerWriter(
        path, kind="features", sections=sections, attributes=attributes, resume=True
    ) as writer:
        row = marked = (writer.progress or {"rows": 0})["rows"]
        for block in _checked_blocks(part, row, max_rows, count=count, what=what):
            writer.write("x", row, block)
            row += block.shape[0]
            progress(f"features of {what}", row, count)
            if (row - marked) * row_bytes >= _MARK_EVERY_BYTES:
                writer.mark({"rows": row})
                marked = row
        writer.commit().close()


def _write_named(
    path: Path, parts: Mapping[str, FeaturePart], attributes: Mapping[str, Any], memory_bytes: int
) -> None:
    """Write what nodes or edges carry by names of their own, in one go, without resuming."""
    sections = {name: (part.dtype, (None, part.dim)) for name, part in parts.items()}
    if not sections:
        return
    with ContainerWriter(path, kind="parts", sections=sections, attributes=attributes) as writer:
        for name, part in parts.items():
            row_bytes = part.dim * part.dtype.itemsize
            for block in part.blocks(0, max(1, min(memory_bytes // 8, 32 << 20) // row_bytes)):
                writer.append(name, np.ascontiguousarray(block))
        writer.commit().close()


def _checked_blocks(
    part: FeaturePart, first_row: int, max_rows: int, *, count: int, what: str
) -> Iterator[Array]:
    """Yield the part's blocks; too many or too few rows are an error, and values not finite."""
    rows = first_row
    for block in part.blocks(first_row, max_rows):
        _check_finite(block, rows, what)
        rows += block.shape[0]
        if rows > count:
            break
        yield block
    if rows != count:
        more = "more than " if rows > count else ""
        raise DataError(
            f"there are {more}{min(rows, count)} feature rows for {count} {what}",
            hint="give one row each, in the order of ids",
        )


def _check_finite(block: Array, first_row: int, what: str) -> None:
    """Refuse what would make every loss, and with it every parameter, not a number."""
    if block.dtype.kind != "f" or (finite := np.isfinite(block)).all():
        return
    row, column = np.argwhere(~finite)[0]
    raise DataError(
        f"a feature of {what} is not finite: row {first_row + row} has {block[row, column]} in "
        f"column {column}",
        hint=f"give finite values; the largest of {block.dtype} is {np.finfo(block.dtype).max:g}",
    )


@overload
def ingest(
    source: Source,
    folder: str | Path,
    *,
    rules: EdgeRules | None = ...,
    memory_bytes: int = ...,
    progress: Progress | None = ...,
) -> Dataset: ...


@overload
def ingest(
    source: HeteroSource,
    folder: str | Path,
    *,
    rules: EdgeRules | None = ...,
    memory_bytes: int = ...,
    progress: Progress | None = ...,
) -> HeteroDataset: ...


def ingest(
    source: Source | HeteroSource,
    folder: str | Path,
    *,
    rules: EdgeRules | None = None,
    memory_bytes: int = 1 << 30,
    progress: Progress | None = None,
) -> Dataset | HeteroDataset:
    """Write a graph from anywhere into a folder and open it.

    The source is read in blocks: it may be much larger than memory. Killed at any time and called
    again with the same arguments, it goes on; files that are complete are kept.

    Args:
        source: From ``array_source``, ``ogb_source``, ``mag240m_source``, ``pyg_source``,
            ``table_source``, or anything of the same form.
        folder: Where to write; made if missing.
        rules: What is done to edges; None: nothing, duplicates and self-loops stay.
        memory_bytes: What buffers may take.
        progress: Told of (stage, done, total); total is 0 where it is not known.

    Returns:
        A ``Dataset``; of a ``HeteroSource`` a ``HeteroDataset``.

    Raises:
        ConfigurationError: The memory bound is too small.
        DataError: The source is damaged or contradicts itself, or the folder holds another
            data set.
        StorageError: The disk refuses or is full; what was written stays.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from fivefold.gnn.data import array_source
        >>> source = array_source([[0, 2, 2], [1, 1, 0]], features=np.eye(3, dtype=np.float32))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ingest(source, folder) as dataset:
        ...         dataset.topology().neighbors(1).tolist(), dataset.features.read("x", 2).tolist()
        ([0, 2], [[0.0, 0.0, 1.0]])
    """
    if require_whole("memory_bytes", memory_bytes) < _LEAST_MEMORY_BYTES:
        raise ConfigurationError(
            f"memory_bytes is {memory_bytes} ({format_bytes(memory_bytes)})",
            hint=f"allow at least {format_bytes(_LEAST_MEMORY_BYTES)}",
        )
    folder, rules = Path(folder), rules or EdgeRules()
    run: dict[str, Any] = {"memory_bytes": memory_bytes, "progress": progress or no_progress}
    if (reading := getattr(source, "reading", None)) is not None and reading.names():
        reading.log()
    if isinstance(source, HeteroSource):
        return _ingest_hetero(source, folder, rules=rules, run=run)
    _check_free(folder, HETERO_FILE)
    if (prepare := getattr(source, "prepare", None)) is not None:
        prepare(folder, **run)
    parts: dict[str, Callable[[], Any]] = {
        LABELS_FILE: source.labels,
        FEATURES_FILE: source.features,
        GRAPH_FILE: source.edges,
    }
    for name, method in {EDGE_FEATURES_FILE: "edge_features", **_PARTS}.items():
        if hasattr(source, method):
            parts[name] = getattr(source, method)
    write_parts(
        folder,
        {"name": source.name, "num_nodes": source.num_nodes},
        {**dict(source.recipe), **asdict(rules)},
        parts=parts,
        rules=rules,
        **run,
    )
    return Dataset.open(folder)


def _ingest_hetero(
    source: HeteroSource, folder: Path, *, rules: EdgeRules, run: dict[str, Any]
) -> HeteroDataset:
    _check_free(folder, GRAPH_FILE)
    listing = _listing(source, rules)
    _check_same(folder, listing)
    for name, entry in listing["nodes"].items():
        part = source.nodes[name]
        write_parts(
            folder / entry["folder"],
            {"name": name, "num_nodes": part.num_nodes, "node_type": name},
            part.recipe,
            parts={LABELS_FILE: part.labels, FEATURES_FILE: part.features},
            rules=EdgeRules(),
            **run,
        )
    for kind, entry in zip(source.edges, listing["edges"], strict=True):
        _write_edges(folder / entry["folder"], source, kind, rules, run)
    for entry in (*listing["nodes"].values(), *listing["edges"]):
        entry["files"] = _fingerprints(folder / entry["folder"], _FILES)
    write_checked_json(folder / HETERO_FILE, listing)  # last: a folder with this file is complete
    return HeteroDataset.open(folder)


def _check_same(folder: Path, listing: Mapping[str, Any]) -> None:
    """Refuse a finished folder that has other types, or other files of them."""
    try:
        finished = read_checked_json(folder / HETERO_FILE)
    except (FileNotFoundError, DataError):  # what is damaged is written again
        return
    if finished["version"] != HETERO_VERSION:
        return

    def facts(of: Mapping[str, Any]) -> list[Any]:
        nodes = {name: [e["num_nodes"], sorted(e["files"])] for name, e in of["nodes"].items()}
        return [nodes, [(entry["type"], sorted(entry["files"])) for entry in of["edges"]]]

    if facts(finished) != facts(listing):
        raise DataError(
            f"{folder / HETERO_FILE} was made otherwise: it differs in its node or edge types",
            hint="choose another folder",
        )


def _listing(source: HeteroSource, rules: EdgeRules) -> dict[str, Any]:
    nodes = {
        name: {
            "num_nodes": part.num_nodes,
            "folder": f"nodes/{index}_{_slug(name)}",
            "files": [
                file
                for file, there in ((FEATURES_FILE, part.features()), (LABELS_FILE, part.labels()))
                if there is not None
            ],
        }
        for index, (name, part) in enumerate(source.nodes.items())
    }
    edges = []
    for index, kind in enumerate(source.edges):
        for end in (kind[0], kind[2]):
            if end not in nodes:
                raise DataError(
                    f"edge type {kind} names node type {end!r}",
                    hint=f"node types are {', '.join(nodes) or 'none'}",
                )
        if rules.add_reverse and kind[0] != kind[2]:
            raise DataError(
                f"edges of type {kind} cannot be reversed into themselves",
                hint="give the reverse as an edge type of its own",
            )
        features = [EDGE_FEATURES_FILE] if kind in source.edge_features else []
        place = f"edges/{index}_{_slug(kind[1])}"
        edges.append({"type": list(kind), "folder": place, "files": [GRAPH_FILE, *features]})
    return {"version": HETERO_VERSION, "name": source.name, "nodes": nodes, "edges": edges}


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40]


def _write_edges(
    folder: Path, source: HeteroSource, kind: EdgeType, rules: EdgeRules, run: dict[str, Any]
) -> None:
    part, rows = source.edges[kind], source.edge_features.get(kind)
    sizes = {"num_nodes": source.nodes[kind[2]].num_nodes}
    if kind[0] != kind[2]:
        sizes["num_sources"] = source.nodes[kind[0]].num_nodes
    recipe = {"edges": part.num_edges, "stamp": getattr(part, "stamp", None), **vars(rules)}
    if rows is not None:
        recipe["edge_features"] = getattr(rows, "stamp", None)
    write_parts(
        folder,
        {"name": source.name, "edge_type": list(kind), **sizes},
        recipe,
        parts={GRAPH_FILE: lambda: part, EDGE_FEATURES_FILE: lambda: rows},
        rules=rules,
        **run,
    )
