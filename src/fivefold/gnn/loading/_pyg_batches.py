"""Graphs that ``DiskLoader.from_dataset`` takes, and PyG's batches that it yields for them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fivefold.errors import ConfigurationError, DataError, require_one_of
from fivefold.gnn.data import (
    Dataset,
    HeteroDataset,
    HeteroSource,
    array_source,
    ingest,
    open_dataset,
)
from fivefold.gnn.data.arrays import ArrayEdges, ArraySource, as_rows
from fivefold.gnn.loading._base import checked_ids
from fivefold.gnn.loading.batch import HeteroMiniBatch, MiniBatch, import_geometric
from fivefold.gnn.loading.prepare import alone_in, key_of, rows_of
from fivefold.gnn.sampling.batches import checked_fanouts, fanouts_by_type
from fivefold.gnn.storage.pages import Ids


@dataclasses.dataclass(frozen=True)
class GraphSource:
    """The graph that ``from_dataset`` was given, on disk."""

    dataset: Dataset | HeteroDataset
    cache: Path
    made_into: LabelledData | SlicedData | None
    has_edges: bool  # with attributes of their own, so that batches must name them


def labels_of(data: Dataset | HeteroDataset, input_type: str | None) -> Ids | None:
    """Return the classes of all nodes of a type, where there are some."""
    if isinstance(data, Dataset):
        return data.labels if data.has_labels else None
    assert input_type is not None, "one of several types was chosen"
    return data.labels(input_type) if data.has_labels(input_type) else None


def seeds_of(
    data: Dataset | HeteroDataset, given: Any, *, everything: bool = False, distinct: bool = True
) -> tuple[str | None, Ids]:
    """Return the node type of seeds (None where there is one) and their ids.

    Where none are given they are the training nodes, or with ``everything`` and without labels
    all nodes.
    """
    if isinstance(data, Dataset):
        if given is not None:
            return None, checked_ids(given, data.num_nodes, distinct=distinct)
        everything |= not data.has_labels
        return None, np.arange(data.num_nodes) if everything else data.train
    kind, ids = _kind_and_ids(given, data.node_types)
    count = data.num_nodes[kind]
    if ids is not None:
        return kind, checked_ids(ids, count, distinct=distinct)
    everything |= not data.has_labels(kind)
    return kind, np.arange(count) if everything else data.split(kind, "train")


def _kind_and_ids(given: Any, types: Sequence[str]) -> tuple[str, Any]:
    """Return the node type of seeds, and which ones of it, None for all or those of training."""
    kind, ids = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(kind, str) or kind not in types:
        raise ConfigurationError(
            f"the seeds are {given!r}, which names no node type of this graph",
            hint=f"give one of {', '.join(sorted(types))}, or a pair of it and ids or a mask",
        )
    return kind, ids


def _check_seeds(data: Any, fanouts: Any, given: Any) -> None:
    """Refuse fan-outs and seeds that do not fit a graph of PyG."""
    types, count = getattr(data, "node_types", None), None
    if types is None:
        if isinstance(fanouts, Mapping):
            message = "fanouts are given by edge type, but the graph has one"
            raise ConfigurationError(message, hint="give one number per hop")
        checked_fanouts(fanouts)
        with warnings.catch_warnings():  # that it counts nodes by the edges
            warnings.simplefilter("ignore")
            count = data.num_nodes
    else:
        fanouts_by_type(data.edge_types, fanouts)
        kind, given = _kind_and_ids(given, types)
        count = data[kind].num_nodes
    if given is not None and count is not None:
        checked_ids(given, count)


def open_source(
    data: Any,
    cache: str | Path | None,
    form: str,
    opened: contextlib.ExitStack,
    *,
    weight_attr: str | None = None,
    fanouts: Any = None,
    input_nodes: Any = None,
) -> GraphSource:
    """Open a graph: a data set or its folder, or one of PyG, which is written into the cache.

    What is wrong with its seeds and fan-outs is said before that.
    """
    require_one_of(form, ("data", "edge_index", "blocks"), f"form is {form!r}")
    if isinstance(data, str | os.PathLike):
        data = opened.enter_context(open_dataset(Path(data)))
    if form == "blocks" and hasattr(data, "edge_types"):
        message = 'form is "blocks", but the graph has several node types'
        raise ConfigurationError(message, hint='use "data" or "edge_index"')
    if isinstance(data, Dataset | HeteroDataset):
        if weight_attr is not None:
            raise ConfigurationError(
                f"weight_attr is {weight_attr!r}, but the graph is a data set on disk",
                hint="leave it out: neighbours are drawn by the weights that were ingested, if any",
            )
        folder = data.folder / "prepared" if cache is None else Path(cache)
        made_into = LabelledData(data) if form == "data" else None
        return GraphSource(data, folder, made_into, bool(rows_of(data)[1]))
    if not hasattr(data, "edge_types") and not hasattr(data, "edge_index"):
        raise ConfigurationError(
            f"the graph is a {type(data).__name__}",
            hint="give a Dataset, its folder, or a Data or HeteroData of torch_geometric",
        )
    if form != "data":
        raise ConfigurationError(
            f"form is {form!r}, but batches of a {type(data).__name__} are of its class",
            hint="ingest it, or form='data'",
        )
    _check_seeds(data, fanouts, input_nodes)
    own = copy.copy(data)  # it notes whose its attributes are
    for store in own.stores:
        _check_attributes(store)
    folder = cache_folder() if cache is None else Path(cache)
    found = dataset_of(data, folder, weight_attr)
    opened.callback(found.close)
    stores = data.edge_stores
    beside = [name for store in stores for name in store.edge_attrs() if name != "edge_index"]
    return GraphSource(found, folder, SlicedData(data), bool(beside))


_OF_EDGES = {"edge_attr", "edge_weight", "edge_time"}


def _check_attributes(store: Any) -> None:
    """Refuse, before any work, attributes of which a batch would not have its part."""
    by_node = getattr(store, "is_node_attr", lambda _name: False)
    by_edge = getattr(store, "is_edge_attr", lambda _name: False)
    for name, value in store.items():
        if isinstance(value, list | tuple) and (by_node(name) or by_edge(name)):
            raise DataError(
                f"attribute {name!r} is a {type(value).__name__} with an entry for each node or "
                "edge, of which PyG takes no part",
                hint=f"make it a tensor, or leave it out: del data.{name}",
            )
        length = value.shape[0] if len(getattr(value, "shape", ())) else 1
        of_nodes = name.endswith("_mask") or (name == "y" and length > 1)
        count = None
        if name in _OF_EDGES and "edge_index" in store:
            count = store.num_edges
        elif of_nodes and hasattr(store, "is_node_attr"):
            count = store.num_nodes
        if count not in {None, length}:
            raise DataError(
                f"attribute {name!r} has {length} entries for {count} "
                f"{'edges' if name in _OF_EDGES else 'nodes'}",
                hint="give one for each, in their order",
            )


def cache_folder() -> Path:
    """Return where graphs that came from memory are kept, below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fivefold" / "gnn"


def dataset_of(data: Any, cache: Path, weight_attr: str | None = None) -> Dataset | HeteroDataset:
    """Write features and edges of a graph of PyG into a folder named by their contents.

    What else it holds stays in memory, where the batches take their part of it from.
    """
    source: ArraySource | HeteroSource
    if hasattr(data, "edge_types"):
        source = _typed_source(data, weight_attr)
        recipe: Any = {
            "nodes": [[name, dict(part.recipe)] for name, part in source.nodes.items()],
            "edges": [[*kind, part.stamp] for kind, part in source.edges.items()],  # type: ignore[attr-defined]
        }
    else:
        source = _numbered_source(data, weight_attr)
        recipe = dict(source.recipe)
    with alone_in(cache):  # the ranks of a run all come here
        return ingest(source, cache / f"graph-{key_of(recipe)}")


def _weights_of(store: Any, name: str | None, what: str) -> Any:
    """Return the attribute by which neighbours are drawn."""
    if name is None:
        return None
    if name not in store:
        raise ConfigurationError(
            f"{what} has no attribute {name!r}, by which neighbours are to be drawn",
            hint="name an attribute of every edge type: weight_attr=",
        )
    return store[name]


def _numbered_source(data: Any, weight_attr: str | None) -> ArraySource:
    if getattr(data, "x", None) is None or getattr(data, "edge_index", None) is None:
        raise DataError(
            f"the graph has no x or no edge_index: {data}",
            hint="set data.x and data.edge_index (torch_geometric.transforms make it of adj_t)",
        )
    source = array_source(
        data.edge_index,
        features=data.x,
        weights=_weights_of(data, weight_attr, "the graph"),
        num_nodes=int(data.num_nodes),
    )
    return dataclasses.replace(source, name="data", edge_pairs=False)


def _typed_source(data: Any, weight_attr: str | None) -> HeteroSource:
    lacking = [kind for kind in data.edge_types if "edge_index" not in data[kind]]
    if lacking or not any("x" in data[name] for name in data.node_types):
        what = f"{lacking[0]} has no edge_index" if lacking else "no node type has x"
        raise DataError(
            f"the graph cannot be packed: {what}: {data}",
            hint="set x of a node type and edge_index of all edge types (not adj_t)",
        )
    nodes, edges = {}, {}
    for name in data.node_types:
        x = data[name].get("x")
        count = data[name].num_nodes
        if count is None:
            raise DataError(
                f"node type {name!r} has neither x nor num_nodes",
                hint=f"set data[{name!r}].num_nodes",
            )
        nodes[name] = array_source(None, features=x, num_nodes=int(count), name=name)
    for kind in data.edge_types:
        rows = as_rows(data[kind].edge_index, f"edge_index of {kind}")
        weights = _weights_of(data[kind], weight_attr, f"edge type {kind}")
        by = None if weights is None else as_rows(weights, f"{weight_attr} of {kind}")
        edges[kind] = ArrayEdges(rows, by, pairs=False)
    return HeteroSource(name="data", nodes=nodes, edges=edges)


class LabelledData:
    """Make PyG's batches of those of a data set on disk: its labels are the only attribute."""

    def __init__(self, dataset: Dataset | HeteroDataset) -> None:
        self._labels: dict[str | None, Ids] = {}
        if isinstance(dataset, Dataset):
            if dataset.has_labels:
                self._labels[None] = dataset.labels
        else:
            named = [name for name in dataset.node_types if dataset.has_labels(name)]
            self._labels = {name: dataset.labels(name) for name in named}
        import_geometric("data")  # a missing package is told of now

    def of(self, batch: MiniBatch | HeteroMiniBatch) -> Any:
        """Return the batch as PyG has it: ``y`` of all its nodes."""
        data = batch.to_data()
        for kind, labels in self._labels.items():
            store = data if kind is None else data[kind]
            y = torch.from_numpy(labels[store.n_id.cpu().numpy()])
            store.y = y.to(store.n_id.device)
        return data


class SlicedData:
    """Make PyG's batches with the part of every attribute of the graph in memory."""

    def __init__(self, data: Any) -> None:
        rest = copy.copy(data)
        for ours, store in zip(rest.node_stores, data.node_stores, strict=True):
            ours.num_nodes = int(store.num_nodes)
            if "x" in ours:
                del ours.x
        self._rest = rest
        self._slicing = import_geometric("loader.utils")

    def of(self, batch: MiniBatch | HeteroMiniBatch) -> Any:
        """Return the batch as PyG's own slicing of nodes and edges makes it."""
        own = batch.to_data()
        if isinstance(batch, MiniBatch):
            assert batch.edge_index is not None, "made from batches of one graph"
            ids, edges = batch.n_id.cpu(), batch.e_id
            own.y = None
            data = self._slicing.filter_data(
                self._rest, ids, *batch.edge_index, None if edges is None else edges.cpu()
            )
            for key, value in own.items():
                data[key] = value
            return data.to(batch.x.device)
        ends, e_id = batch.edge_index_dict, batch.e_id_dict
        data = self._slicing.filter_hetero_data(
            self._rest,
            {name: ids.cpu() for name, ids in batch.n_id_dict.items()},
            {kind: pairs[0] for kind, pairs in ends.items()},
            {kind: pairs[1] for kind, pairs in ends.items()},
            {kind: e_id[kind].cpu() if kind in e_id else None for kind in ends},
        )
        for kind in (*data.node_types, *data.edge_types):
            for key, value in own[kind].items():
                if value is not None:
                    data[kind][key] = value
        return data.to(next(iter(batch.n_id_dict.values())).device)
