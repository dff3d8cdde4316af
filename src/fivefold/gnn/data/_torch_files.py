"""Files of ``torch.save`` without running what is inside them.

Such files are pickles, and a pickle can call anything. Here only tensors, NumPy arrays, plain
containers and, where asked for, the classes of PyTorch Geometric are let in.
"""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError, UnsupportedError


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

    if not path.is_file():
        raise DataError(f"there is no file {path}", hint="check the path")
    with torch.serialization.safe_globals(names):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
        except Exception as error:  # whatever bytes of another kind do to the unpickler
            raise DataError(
                f"{path} cannot be read safely: {_reason(error)}",
                hint="save a dictionary of tensors, or a Data object, with torch.save",
            ) from error


def _reason(error: BaseException) -> str:
    """Return what is wrong, without torch's advice to load the file unsafely."""
    text = str(error)
    found = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", text)
    if "unsupported" in text.lower() and found:
        return f"it refers to {found[1]}"
    if isinstance(error, pickle.UnpicklingError) or not text:
        return "it is no file of torch.save"
    return text.partition("\n")[0][:200]


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"
