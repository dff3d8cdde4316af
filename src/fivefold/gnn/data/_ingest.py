"""One call for every source, whether its graph is of one type or of several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, overload

from fivefold.errors import DataError
from fivefold.files import write_checked_json
from fivefold.gnn.data._dataset import FEATURES_FILE, GRAPH_FILE, HETERO_FILE, LABELS_FILE, Dataset
from fivefold.gnn.data._hetero import HETERO_VERSION, HeteroDataset, HeteroSource
from fivefold.gnn.data._parts import Progress, Source
from fivefold.gnn.data._write import (
    check_memory,
    fingerprints,
    no_progress,
    write_dataset,
    write_parts,
)
from fivefold.gnn.data._write_graph import EdgeRules
from fivefold.gnn.sampling.batches import EdgeType


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
    check_memory(memory_bytes)  # before hours of numbering names
    if isinstance(source, HeteroSource):
        run = {"memory_bytes": memory_bytes, "progress": progress or no_progress}
        return _ingest_hetero(source, Path(folder), rules=rules or EdgeRules(), run=run)
    prepare = getattr(source, "prepare", None)
    if prepare is not None:
        prepare(Path(folder), memory_bytes=memory_bytes, progress=progress)
    dataset = write_dataset(
        source, folder, rules=rules, memory_bytes=memory_bytes, progress=progress
    )
    finish = getattr(source, "finish", None)
    if finish is not None:
        finish(Path(folder))
    return dataset


def _ingest_hetero(
    source: HeteroSource,
    folder: Path,
    *,
    rules: EdgeRules,
    run: dict[str, Any],
) -> HeteroDataset:
    listing = _listing(source)
    for name, entry in listing["nodes"].items():
        part = source.nodes[name]
        attributes = {"name": name, "num_nodes": part.num_nodes, "node_type": name}
        write_parts(
            folder / entry["folder"],
            attributes,
            part.recipe,
            parts=(part.labels, lambda: None, part.features),
            rules=EdgeRules(),
            **run,
        )
    for entry in listing["edges"]:
        _write_edges(folder, source, entry, rules, run)
    for entry in (*listing["nodes"].values(), *listing["edges"]):
        names = (FEATURES_FILE, LABELS_FILE, GRAPH_FILE)
        entry["files"] = fingerprints(folder / entry["folder"], names)
    write_checked_json(folder / HETERO_FILE, listing)  # last: a folder with this file is complete
    return HeteroDataset.open(folder)


def _listing(source: HeteroSource) -> dict[str, Any]:
    nodes = {
        name: {"num_nodes": part.num_nodes, "folder": f"nodes/{index}_{_slug(name)}"}
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
        edges.append({"type": list(kind), "folder": f"edges/{index}_{_slug(kind[1])}"})
    return {"version": HETERO_VERSION, "name": source.name, "nodes": nodes, "edges": edges}


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40]


def _write_edges(
    folder: Path,
    source: HeteroSource,
    entry: dict[str, Any],
    rules: EdgeRules,
    run: dict[str, Any],
) -> None:
    kind: EdgeType = tuple(entry["type"])
    part = source.edges[kind]
    if rules.add_reverse and kind[0] != kind[2]:
        raise DataError(
            f"edges of type {kind} cannot be reversed into themselves",
            hint="give the reverse as an edge type of its own",
        )
    sizes = {"num_nodes": source.nodes[kind[2]].num_nodes}
    if kind[0] != kind[2]:
        sizes["num_sources"] = source.nodes[kind[0]].num_nodes
    recipe = {"edges": part.num_edges, "stamp": getattr(part, "stamp", None), **vars(rules)}
    write_parts(
        folder / entry["folder"],
        {"name": source.name, "edge_type": list(kind), **sizes},
        recipe,
        parts=(lambda: None, lambda: part, lambda: None),
        rules=rules,
        **run,
    )
