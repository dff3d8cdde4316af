"""Graphs of PyTorch Geometric: ``Data`` and ``HeteroData``, in memory or saved in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fivefold.errors import DataError
from fivefold.gnn.data._array_source import ArraySource, array_part
from fivefold.gnn.data._hetero import HeteroSource
from fivefold.gnn.data._rows import ArrayRows, Rows, file_stamp
from fivefold.gnn.data._torch_files import load_pyg

__all__ = ["pyg_source"]

_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def pyg_source(data: Any, *, name: str | None = None) -> ArraySource | HeteroSource:
    """A graph of PyTorch Geometric.

    Stored are ``x``, ``edge_index``, ``edge_weight``, ``y`` and the masks ``train_mask``,
    ``val_mask`` and ``test_mask``, of every node and edge type; other attributes are left out.

    Args:
        data: ``Data``, ``HeteroData``, or the path of a file made by ``torch.save`` of one. Files
            are read without running code that is in them.
        name: For people; None: the file's name or the class.

    Returns:
        The source, for ``ingest``.

    Raises:
        DataError: There are no edges in ``edge_index``, or the file is of something else.
        UnsupportedError: PyTorch Geometric is not installed.

    Example:
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
        return _hetero_source(data, name, stamp)
    return ArraySource(
        name=name,
        edge_rows=_needed_edges(data, "the graph", stamp),
        weight_rows=_rows(data, "edge_weight", stamp),
        given_nodes=data.num_nodes,
        kind="pyg",
        **_node_parts(data, stamp),
    )


def _hetero_source(data: Any, name: str, stamp: Any) -> HeteroSource:
    sizes = {kind: int(data[kind].num_nodes) for kind in data.node_types}
    edges = {
        kind: array_part(
            _needed_edges(data[kind], f"edge type {kind}", stamp),
            _rows(data[kind], "edge_weight", stamp),
        )
        for kind in data.edge_types
    }
    # Labels and features are those of a graph without edges.
    nodes = {
        kind: ArraySource(
            name=kind,
            edge_rows=None,
            given_nodes=sizes[kind],
            kind="pyg",
            **_node_parts(data[kind], stamp),
        )
        for kind in data.node_types
    }
    return HeteroSource(name=name, nodes=nodes, edges=edges)


def _node_parts(store: Any, stamp: Any) -> dict[str, Any]:
    masks = {name: _rows(store, mask, stamp) for name, mask in _MASKS.items()}
    labels = _rows(store, "y", stamp)
    return {
        "feature_rows": _rows(store, "x", stamp),
        "label_rows": labels,
        # Without labels there is nothing to train on, so masks alone are left out.
        "split_rows": {
            name: mask for name, mask in masks.items() if mask is not None and labels is not None
        },
    }


def _needed_edges(store: Any, what: str, stamp: Any) -> Rows:
    rows = _rows(store, "edge_index", stamp)
    if rows is None:
        raise DataError(
            f"{what} has no edge_index", hint="convert adj_t with its coo() method, and set it"
        )
    return rows


def _rows(store: Any, key: str, stamp: Any) -> Rows | None:
    value = getattr(store, key, None)
    if value is None:
        return None
    if not hasattr(value, "detach") or str(value.layout) != "torch.strided":
        raise DataError(f"{key} is a {type(value).__name__}", hint="use a dense tensor")
    tensor = value.detach().cpu()
    return ArrayRows(_as_array(tensor, key), stamp=None if stamp is None else [*stamp, key])


def _as_array(tensor: Any, key: str) -> Any:
    try:
        return tensor.numpy()
    except TypeError as error:
        raise DataError(
            f"{key} has dtype {tensor.dtype}, which NumPy has not", hint="convert it to float16"
        ) from error
