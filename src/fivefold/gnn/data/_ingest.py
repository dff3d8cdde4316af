"""One call for every source."""

from __future__ import annotations

from pathlib import Path
from typing import overload

from fivefold.gnn.data._dataset import Dataset
from fivefold.gnn.data._hetero import HeteroDataset, HeteroSource, ingest_hetero
from fivefold.gnn.data._parts import Progress, Source
from fivefold.gnn.data._write import check_memory, write_dataset
from fivefold.gnn.data._write_graph import EdgeRules


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
        return ingest_hetero(
            source, folder, rules=rules, memory_bytes=memory_bytes, progress=progress
        )
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
