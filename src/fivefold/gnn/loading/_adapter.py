"""PyTorch Geometric's ``FeatureStore`` over feature files; needs torch_geometric."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.loading.batch import import_geometric
from fivefold.gnn.loading.rows import DiskRows
from fivefold.gnn.storage import Container
from fivefold.gnn.storage.pages import Ids
from fivefold.gnn.storage.reader import Backend, ReadStatistics

_geometric = import_geometric("data")


class FeatureStoreAdapter(_geometric.FeatureStore):  # type: ignore[name-defined]  # untyped
    """Feature files as a ``torch_geometric.data.FeatureStore`` that is only read.

    PyG's loaders and remote back ends ask it for rows by index; it reads them from disk, each
    once, in ascending order, however the index is ordered. Rows of integer indices, masks and
    slices are served; None means all rows.

    Args:
        features: Container with a section ``x``, or one per node type.
        attr_name: Name of the attribute, "x" in PyG's models.
        backend: Reading engine.
        verify: Check the checksums of what is read.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.data import generate_graph
        >>> folder = tempfile.mkdtemp()
        >>> dataset = generate_graph(folder, nodes=50, dim=4, seed=0)
        >>> store = FeatureStoreAdapter(dataset.features)
        >>> store.get_tensor(None, "x", index=torch.tensor([7, 3, 7])).shape
        torch.Size([3, 4])
        >>> store.get_tensor_size(None, "x")
        (50, 4)
        >>> store.close()
    """

    def __init__(
        self,
        features: Container | Mapping[str, Container],
        *,
        attr_name: str = "x",
        backend: Backend = "auto",
        verify: bool = True,
    ) -> None:
        groups = features if isinstance(features, Mapping) else {None: features}
        paths = {group: Path(container.path) for group, container in groups.items()}
        self._open(dict(groups), (paths, attr_name, backend, verify))

    def _open(self, groups: dict[Any, Container], settings: tuple[Any, ...]) -> None:
        super().__init__()
        # PyG's stores forward attributes elsewhere, hence __dict__, as in PyG itself.
        _, attr_name, backend, verify = settings
        rows = {
            group: DiskRows(container, backend=backend, verify=verify)
            for group, container in groups.items()
        }
        sizes = {group: tuple(container.section("x").shape) for group, container in groups.items()}
        self.__dict__.update(_rows=rows, _sizes=sizes, _attr_name=attr_name, _settings=settings)
        self.__dict__.update(_lock=threading.Lock(), reading=ReadStatistics())

    def close(self) -> None:
        """Close the reading engines; a second call does nothing."""
        for rows in self.__dict__["_rows"].values():
            rows.close()

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return the attributes there are, without an index."""
        return [
            _geometric.TensorAttr(group, self.__dict__["_attr_name"])
            for group in self.__dict__["_rows"]
        ]

    def _get_tensor(self, attr: Any) -> Tensor | None:
        if attr.attr_name != self.__dict__["_attr_name"]:
            return None
        rows = self.__dict__["_rows"].get(attr.group_name)
        if rows is None:
            return None
        ids = _positions(attr.index, self.__dict__["_sizes"][attr.group_name][0])
        with self.__dict__["_lock"]:
            found, cost = rows.read_any(ids)
            self.__dict__["reading"] += cost
        return torch.from_numpy(found)

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...] | None:
        if attr.attr_name != self.__dict__["_attr_name"]:
            return None
        size: tuple[int, ...] | None = self.__dict__["_sizes"].get(attr.group_name)
        return size

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        """Return False, PyG's word for refused: files of features are not changed."""
        del tensor, attr
        return False

    def _remove_tensor(self, attr: Any) -> bool:
        """Return False, as ``_put_tensor``."""
        del attr
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Return paths and settings: a worker process opens the files itself."""
        return {"_settings": self.__dict__["_settings"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = state["_settings"]
        files = {group: Container.open(path) for group, path in settings[0].items()}
        self._open(files, settings)


def _positions(index: Any, count: int) -> Ids:
    """Return the row numbers of an index as PyG allows them."""
    if index is None:
        return np.arange(count)
    if isinstance(index, slice):
        return np.arange(count)[index]
    array = index.cpu().numpy() if isinstance(index, Tensor) else np.atleast_1d(np.asarray(index))
    if array.dtype == np.bool_:
        if array.shape != (count,):
            raise ConfigurationError(
                f"the mask has shape {array.shape}, there are {count} rows",
                hint=f"give a mask of shape ({count},)",
            )
        return np.flatnonzero(array)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigurationError(
            f"the index has dtype {array.dtype} and shape {array.shape}",
            hint="use integers or a mask in one dimension, a slice, or None",
        )
    ids = array.astype(np.int64)
    outside = (ids < -count) | (ids >= count)
    if outside.any():
        raise DataError(
            f"the index has row {ids[outside][0]}, there are {count} rows",
            hint=f"use {-count} to {count - 1}; below 0 counts from the end",
        )
    return np.where(ids < 0, ids + count, ids)
