"""Graphs of PyTorch Geometric: ``Data`` and ``HeteroData``, in memory or saved in a file."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.gnn.data._array_source import ArraySource, array_part, as_array
from fivefold.gnn.data._hetero import HeteroSource
from fivefold.gnn.data._parts import refuse_edge_features
from fivefold.gnn.data._rows import ArrayRows, Rows, file_stamp, one_split
from fivefold.gnn.data._torch_files import load_pyg

_LOG = logging.getLogger(__name__)
_STORED = frozenset(
    {"x", "y", "edge_index", "edge_weight", "adj_t", "num_nodes", "batch", "ptr"}
    | {"train_mask", "val_mask", "test_mask"}
)
_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def pyg_source(
    data: Any,
    *,
    name: str | None = None,
    split: int | None = None,
    leave_out: Collection[str] = (),
) -> ArraySource | HeteroSource:
    """Return a graph of PyTorch Geometric.

    Stored are ``x``, ``edge_index``, ``edge_weight``, ``y`` and the masks ``train_mask``,
    ``val_mask`` and ``test_mask``, of every node and edge type. Features of edges (``edge_attr``)
    cannot be stored, and are refused unless ``leave_out`` names them; further attributes that are
    not stored are named in a warning of the log. In the place of ``edge_index``, ``adj_t`` will
    do, the transposed adjacency matrix as a sparse tensor; its values are weights unless all are
    one.

    Args:
        data: ``Data``, ``HeteroData``, or the path of a file made by ``torch.save`` of one, or by
            a data set of PyG. Files are read without running code that is in them.
        name: For people; None: the file's name or the class.
        split: Where masks have several columns, the one to take.
        leave_out: Attributes that may be left out, such as "edge_attr".

    Returns:
        The source, for ``ingest``.

    Raises:
        DataError: There are no edges in ``edge_index``, there are features of edges, or the file
            is of something else.
        UnsupportedError: PyTorch Geometric is not installed.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace  # here for Data, which takes seconds to load
        >>> edges = torch.tensor([[0, 1], [1, 0]])
        >>> data = SimpleNamespace(x=torch.zeros(2, 5), edge_index=edges, num_nodes=2)
        >>> pyg_source(data).features().dim
        5
    """
    stamp = None
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        data, stamp = load_pyg(path), file_stamp(path)
        name = name or path.stem
    name = name or type(data).__name__
    if hasattr(data, "edge_types"):
        return _hetero_source(data, name, stamp, split, leave_out)
    _check_left_out(data, name, leave_out)
    edges, weights = _edges(data, "the graph", stamp)
    parts = _node_parts(data, stamp, split)
    with warnings.catch_warnings():  # that it counts them by the edges
        warnings.simplefilter("ignore")
        count = getattr(data, "num_nodes", None)
    return ArraySource(
        name=name,
        edge_rows=edges,
        weight_rows=weights,
        given_nodes=count,
        kind="pyg",
        **parts,
    )


def _check_left_out(store: Any, what: str, allowed: Collection[str]) -> None:
    """Refuse or name what would be left out."""
    names = store.keys() if callable(getattr(store, "keys", None)) else vars(store)
    given = [name for name in names if getattr(store, name, None) is not None]
    refuse_edge_features(what, given, allowed)
    lost = [name for name in given if name not in _STORED and name not in allowed]
    if lost:
        _LOG.warning("%s: not stored: %s", what, ", ".join(lost))


def _hetero_source(
    data: Any, name: str, stamp: Any, split: int | None, leave_out: Collection[str]
) -> HeteroSource:
    for kind in (*data.node_types, *data.edge_types):
        _check_left_out(data[kind], f"type {kind}", leave_out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = {kind: data[kind].num_nodes for kind in data.node_types}
    sizes = {kind: _known(count, kind) for kind, count in counts.items()}
    edges = {
        kind: array_part(*_edges(data[kind], f"edge type {kind}", stamp))
        for kind in data.edge_types
    }
    # Labels and features are those of a graph without edges.
    nodes = {
        kind: ArraySource(
            name=kind,
            edge_rows=None,
            given_nodes=sizes[kind],
            kind="pyg",
            **_node_parts(data[kind], stamp, split),
        )
        for kind in data.node_types
    }
    return HeteroSource(name=name, nodes=nodes, edges=edges)


def _known(count: int | None, kind: str) -> int:
    if count is None:
        raise DataError(
            f"node type {kind!r} says neither features nor num_nodes",
            hint=f"set data[{kind!r}].num_nodes",
        )
    return int(count)


def _node_parts(store: Any, stamp: Any, split: int | None) -> dict[str, Any]:
    masks = {name: _rows(store, mask, stamp) for name, mask in _MASKS.items()}
    labels = _rows(store, "y", stamp)
    return {
        "feature_rows": _rows(store, "x", stamp),
        "label_rows": labels,
        # Without labels there is nothing to train on, so masks alone are left out.
        "split_rows": {
            name: one_split(mask, split)
            for name, mask in masks.items()
            if mask is not None and labels is not None
        },
    }


def _edges(store: Any, what: str, stamp: Any) -> tuple[Rows, Rows | None]:
    rows = _rows(store, "edge_index", stamp)
    if rows is not None:
        return rows, _rows(store, "edge_weight", stamp)
    matrix = getattr(store, "adj_t", None)
    if matrix is None:
        raise DataError(f"{what} has neither edge_index nor adj_t", hint="set edge_index")
    return _of_matrix(matrix, None if stamp is None else [*stamp, "adj_t"])


def _of_matrix(matrix: Any, stamp: Any) -> tuple[Rows, Rows | None]:
    """Return the edges of a transposed adjacency matrix: rows are targets, columns are sources."""
    if hasattr(matrix, "coo"):  # of torch_sparse
        targets, sources, values = matrix.coo()
    else:
        with warnings.catch_warnings():  # sparse tensors are called new in every version of torch
            warnings.simplefilter("ignore")
            sparse = matrix.to_sparse_coo()
            # As they are stored: coalescing would add up equal edges.
            targets, sources = sparse._indices()  # noqa: SLF001
            values = sparse._values()  # noqa: SLF001
    pairs = np.stack([as_array(sources, "adj_t"), as_array(targets, "adj_t")])
    weighted = values is not None and not bool((values == 1).all())
    weights = ArrayRows(as_array(values, "adj_t"), stamp) if weighted else None
    return ArrayRows(pairs, stamp), weights


def _rows(store: Any, key: str, stamp: Any) -> Rows | None:
    value = getattr(store, key, None)
    if value is None:
        return None
    if not hasattr(value, "detach"):
        raise DataError(f"{key} is a {type(value).__name__}", hint="use a dense tensor")
    return ArrayRows(as_array(value, key), stamp=None if stamp is None else [*stamp, key])
