"""Graphs of PyTorch Geometric: ``Data`` and ``HeteroData``, in memory or saved in a file.

Files of ``torch.save`` are pickles, and a pickle can call anything. Here only tensors, NumPy
arrays, plain containers and, where asked for, the classes of PyTorch Geometric are let in.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np

from fivefold.errors import DataError, UnsupportedError
from fivefold.gnn.data._dataset import HeteroSource
from fivefold.gnn.data.arrays import (
    ArrayEdges,
    ArrayFeatures,
    ArrayRows,
    ArraySource,
    Rows,
    as_array,
    existing,
    file_stamp,
    one_split,
)
from fivefold.reading import Reading


def _numpy_names() -> list[Any]:
    """Return what a pickled NumPy array refers to, under the names of NumPy 1 and 2."""
    import _codecs  # noqa: PLC0415 - only for its name

    rebuild = np.zeros(1).__reduce__()[0]
    scalar = np.int64(0).__reduce__()[0]
    kinds = [type(np.dtype(code)) for code in "?bhilqBHILQefd"]
    old = "numpy.core.multiarray"
    return [
        rebuild,
        (rebuild, f"{old}._reconstruct"),
        scalar,
        (scalar, f"{old}.scalar"),
        np.ndarray,
        np.dtype,
        *kinds,
        _codecs.encode,
        bytes,  # the contents of an array without elements
    ]


def load_plain(path: Path) -> dict[str, Any]:
    """Return a dictionary of tensors, arrays and numbers."""
    value = _load(path, _numpy_names())
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}", hint="a dictionary is needed")
    return {
        key: entry.numpy() if hasattr(entry, "detach") else entry for key, entry in value.items()
    }


def load_pyg(path: Path) -> Any:
    """Return a ``Data`` or ``HeteroData`` of PyTorch Geometric."""
    with warnings.catch_warnings():  # of deprecations inside PyTorch Geometric, on import
        warnings.simplefilter("ignore")
        try:
            from torch_geometric.data import Data, HeteroData, storage  # noqa: PLC0415
            from torch_geometric.data import data as classes  # noqa: PLC0415
        except ImportError as error:
            message = "PyTorch Geometric is not installed"
            raise UnsupportedError(message, hint="pip install 'fivefold[gnn]'") from error
    names = [Data, HeteroData, classes.DataEdgeAttr, classes.DataTensorAttr]
    names += [storage.BaseStorage, storage.NodeStorage, storage.EdgeStorage, storage.GlobalStorage]
    value = _load(path, [*names, *_numpy_names()])
    kind = Data
    if isinstance(value, tuple | list) and value:
        kind = HeteroData if len(value) > 2 and value[2] is HeteroData else Data
        value = _only_graph(value, path)
    if isinstance(value, dict) and any(isinstance(key, tuple) for key in value):
        kind = HeteroData  # its to_dict()
    if isinstance(value, dict) and (kind is HeteroData or "edge_index" in value):
        value = kind.from_dict(value)
    if not isinstance(value, Data | HeteroData):
        raise DataError(
            f"{path} holds a {type(value).__name__}",
            hint="a Data, a HeteroData or a dictionary with edge_index is needed",
        )
    return value


def _only_graph(value: Any, path: Path) -> Any:
    """Return the graph in what data sets of PyG save: (graph or dictionary, slices, class)."""
    is_list = len(value) > 1 and hasattr(value[1], "stores")
    slices = None if is_list or len(value) < 2 else value[1]
    first = slices
    while isinstance(first, dict):  # by attribute, and before that by type
        first = next(iter(first.values()), None)
    count = len(value) if is_list else 1 if first is None else len(first) - 1
    if count != 1:
        raise DataError(
            f"{path} holds {count} graphs", hint="one graph is needed: save dataset[0] alone"
        )
    return value[0]


def _load(path: Path, names: list[Any]) -> Any:
    import torch  # noqa: PLC0415 - heavy, and needed for these files alone

    existing(path)
    with torch.serialization.safe_globals(names):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        except Exception as error:  # whatever bytes of another kind do to the unpickler
            hint = "save a dictionary of tensors, or a Data object, with torch.save"
            if "AttrType" in str(error):  # a graph that was used notes whose its attributes are
                hint = "save the graph's tensors alone: torch.save(data.to_dict(), ...)"
            raise DataError(f"{path} cannot be read safely: {_reason(error)}", hint=hint) from error


def _reason(error: BaseException) -> str:
    """Return what is wrong, without torch's advice to load the file unsafely."""
    text = str(error)
    found = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", text)
    if "unsupported" in text.lower() and found:
        return f"it refers to {found[1]}"
    if isinstance(error, pickle.UnpicklingError) or not text:
        return "it is no file of torch.save"
    return text.partition("\n")[0][:200]


_LOG = logging.getLogger(__name__)
_STORED = frozenset(
    {"x", "y", "edge_index", "edge_weight", "edge_attr", "adj_t", "num_nodes", "batch", "ptr"}
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
    ``val_mask`` and ``test_mask``, of every node and edge type, and features of edges
    (``edge_attr``) unless ``leave_out`` names them; further attributes that are not stored are
    named in a warning of the log. In the place of ``edge_index``, ``adj_t`` will
    do, the transposed adjacency matrix as a sparse tensor; its values are weights unless all are
    one.

    Args:
        data: ``Data``, ``HeteroData``, or the path of a file made by ``torch.save`` of one, or by
            a data set of PyG. Files are read without running code that is in them.
        name: For people; None: the file's name or the class.
        split: Where masks have several columns, the one to take.
        leave_out: Attributes that may be left out, such as "edge_attr".

    Raises:
        DataError: There are no edges in ``edge_index``, features are not one row each, or the file
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
    reading = Reading(name)
    with warnings.catch_warnings():  # that it counts nodes by the edges
        warnings.simplefilter("ignore")
        named = {of: _other_parts(data, of, leave_out, stamp) for of in ("node", "edge")}
    _account(reading, data, leave_out, parts={*named["node"], *named["edge"]})
    edges, weights = _edges(data, "the graph", stamp)
    parts = _node_parts(data, stamp, split)
    attributes = None if "edge_attr" in leave_out else _rows(data, "edge_attr", stamp)
    with warnings.catch_warnings():  # that it counts them by the edges
        warnings.simplefilter("ignore")
        count = getattr(data, "num_nodes", None)
    source = ArraySource(
        name=name,
        edge_rows=edges,
        weight_rows=weights,
        edge_feature_rows=attributes,
        node_part_rows=named["node"],
        edge_part_rows=named["edge"],
        given_nodes=count,
        kind="pyg",
        **parts,
    )
    source.reading = reading
    return source


def _other_parts(data: Any, of: str, left_out: Collection[str], stamp: Any) -> dict[str, Rows]:
    """Return what nodes or edges carry by names of their own, as far as it is numbers."""
    data = copy.copy(data)  # it notes whose its attributes are, which would be saved with it
    of_this = getattr(data, f"is_{of}_attr", lambda _name: False)
    names = data.keys() if callable(getattr(data, "keys", None)) else []
    found: dict[str, Rows] = {}
    for name in names:
        if name in {*_STORED, *left_out} or not of_this(name):
            continue
        value = data[name]
        real = hasattr(value, "detach") and not (value.is_complex() or value.is_sparse)
        if real and value.ndim in {1, 2} and data.__cat_dim__(name, value) == 0:
            found[name] = ArrayRows(
                as_array(value, name), None if stamp is None else [*stamp, name]
            )
    return found


def _account(
    reading: Reading,
    store: Any,
    allowed: Collection[str],
    where: str = "",
    parts: Collection[str] = (),
) -> None:
    """Say what becomes of each attribute; what is left out against nobody's word is a warning."""
    names = store.keys() if callable(getattr(store, "keys", None)) else vars(store)
    given = [name for name in names if getattr(store, name, None) is not None]
    lost = []
    for name in given:
        place, why = f"{where}{name}", None if name in parts else _why_not(name, given)
        if name in allowed:
            reading.leave_out(place, "--leave-out")
        elif name in _HARMLESS:
            reading.ignore(place, _HARMLESS[name])
        elif name == "adj_t" and "edge_index" in given:
            reading.ignore(place, "edge_index says the same edges")
        elif why is not None:
            reading.leave_out(place, why)
            lost.append(name)
        else:
            reading.take(place)
    if lost:
        what = f"{reading.source}, type {where[:-2]}" if where else reading.source
        _LOG.warning("%s: not stored: %s", what, ", ".join(lost))


_HARMLESS = dict.fromkeys(("batch", "ptr"), "of batches; the graph is one")


def _why_not(name: str, given: Sequence[str]) -> str | None:
    """Return why an attribute is not stored; None where it is."""
    if name not in _STORED:
        return "no part of a data set has this name"
    if name.endswith("_mask") and "y" not in given:
        return "a split, but there are no labels"
    return None


def _hetero_source(
    data: Any, name: str, stamp: Any, split: int | None, leave_out: Collection[str]
) -> HeteroSource:
    reading = Reading(name)
    for kind in (*data.node_types, *data.edge_types):
        where = kind if isinstance(kind, str) else " ".join(kind)
        _account(reading, data[kind], leave_out, f"{where}: ")
    _account(reading, getattr(data, "_global_store", {}), leave_out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = {kind: data[kind].num_nodes for kind in data.node_types}
    for kind, count in counts.items():
        if count is None:
            raise DataError(
                f"node type {kind!r} says neither features nor num_nodes",
                hint=f"set data[{kind!r}].num_nodes",
            )
    kept = {kind: _rows(data[kind], "edge_attr", stamp) for kind in data.edge_types}
    attributes = (
        {} if "edge_attr" in leave_out else {k: v for k, v in kept.items() if v is not None}
    )
    edges = {
        kind: ArrayEdges(*_edges(data[kind], f"edge type {kind}", stamp))
        for kind in data.edge_types
    }
    # Labels and features are those of a graph without edges.
    nodes = {
        kind: ArraySource(
            name=kind,
            edge_rows=None,
            given_nodes=counts[kind],
            kind="pyg",
            **_node_parts(data[kind], stamp, split),
        )
        for kind in data.node_types
    }
    features = {
        kind: ArrayFeatures(rows, what=f"edge_attr of {kind}") for kind, rows in attributes.items()
    }
    return HeteroSource(
        name=name, nodes=nodes, edges=edges, edge_features=features, reading=reading
    )


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
    if matrix is not None and getattr(store, "edge_weight", None) is not None:
        raise DataError(
            f"{what} has adj_t and edge_weight, and nothing says which weight is whose",
            hint="ToSparseTensor(attr='edge_weight') puts them into adj_t; or use edge_index",
        )
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
