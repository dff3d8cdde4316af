"""Batches as PyG's own loaders yield them: ``Data`` with every attribute of its nodes and edges."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import DataError
from fivefold.gnn.data import Dataset, array_source, ingest
from fivefold.gnn.data.arrays import ArraySource
from fivefold.gnn.loading.batch import MiniBatch, import_geometric
from fivefold.gnn.loading.prepare import alone_in
from fivefold.gnn.storage.arrays import Ids


def cache_folder() -> Path:
    """Return where graphs that came from memory are kept, below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fivefold" / "gnn"


def dataset_of(data: Any, cache: Path) -> Dataset:
    """Write features and edges of a ``Data`` into a folder named by their contents, and open it.

    What else it holds stays in memory, where the batches take their part of it from.
    """
    if getattr(data, "x", None) is None or getattr(data, "edge_index", None) is None:
        raise DataError(
            f"the graph has no x or no edge_index: {data}",
            hint="set data.x and data.edge_index (torch_geometric.transforms make it of adj_t)",
        )
    source = array_source(data.edge_index, features=data.x, num_nodes=int(data.num_nodes))
    numbered = ArraySource(
        name="data",
        edge_rows=source.edge_rows,
        edge_pairs=False,
        feature_rows=source.feature_rows,
        given_nodes=source.num_nodes,
        numbered=True,
    )
    text = json.dumps(dict(numbered.recipe), sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    with alone_in(cache):  # the ranks of a run all come here
        return ingest(numbered, cache / f"graph-{key}")


class LabelledData:
    """Make ``Data`` of batches of a data set on disk: its labels are the only attribute."""

    def __init__(self, labels: Ids | None) -> None:
        self._labels = labels
        import_geometric("data")  # a missing package is told of now

    def of(self, batch: MiniBatch) -> Any:
        """Return the batch as PyG has it: ``y`` of all its nodes."""
        data = batch.to_data()
        if self._labels is not None:
            ids = batch.n_id.cpu().numpy()
            data.y = torch.from_numpy(self._labels[ids]).to(batch.x.device)
        return data


class SlicedData:
    """Make ``Data`` of batches with the part of every attribute of the graph in memory."""

    def __init__(self, data: Any) -> None:
        rest = copy.copy(data)
        rest.num_nodes = int(data.num_nodes)
        del rest.x
        self._rest = rest
        self._filter = import_geometric("loader.utils").filter_data

    def of(self, batch: MiniBatch) -> Any:
        """Return the batch as PyG's own slicing of nodes and edges makes it."""
        assert batch.edge_index is not None, "made from batches of one graph"
        ids, edges = batch.n_id.cpu(), batch.e_id
        data = self._filter(
            self._rest, ids, *batch.edge_index, None if edges is None else edges.cpu()
        )
        own = batch.to_data()
        own.y = None
        for key, value in own.items():
            data[key] = value
        return data.to(batch.x.device)
