"""The graph of a run, of one type of nodes and edges or of several, and the model for it.

Of several types the nodes of one are classified. ``TypedData`` has the names of ``Dataset`` for
these nodes, so that trainer and inference ask one thing. A node type without features has rows of
a single 1: its nodes differ by their neighbours alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import Dataset, HeteroDataset, open_dataset
from fivefold.gnn.loading import HeteroMiniBatch, MiniBatch
from fivefold.gnn.storage.files import Closing
from fivefold.gnn.training.config import GnnConfig
from fivefold.gnn.training.models import LayeredModel, TypedSAGE, make_model


class TypedData(Closing):
    """A graph of several types as those ask for it who train on the nodes of one.

    A ``node_type`` of None is the only type with labels.
    """

    def __init__(self, graph: HeteroDataset, node_type: str | None) -> None:
        self.graph, self.folder, self.name = graph, graph.folder, graph.name
        labelled = [name for name in graph.node_types if graph.has_labels(name)]
        if not labelled:
            raise DataError(
                f"no node type of {graph.folder} has labels",
                hint="ingest a HeteroData with y and train_mask of a node type",
            )
        if node_type is None and len(labelled) > 1:
            raise ConfigurationError(
                f"{graph.folder} has labels of {', '.join(labelled)}",
                hint=f'set data.node_type to one of them, such as "{labelled[0]}"',
            )
        self.node_type = labelled[0] if node_type is None else node_type
        if self.node_type not in labelled:
            what = "has no labels" if self.node_type in graph.node_types else "does not exist"
            raise ConfigurationError(
                f"data.node_type is {self.node_type!r}, which {what} in {graph.folder}",
                hint=f"with labels there is {', '.join(labelled)}",
            )
        self.labels = graph.labels(self.node_type)
        self.train, self.valid, self.test = (
            graph.split(self.node_type, name) for name in ("train", "valid", "test")
        )
        self.num_classes = graph.num_classes(self.node_type)
        # A run goes on only with the same files and the same type.
        self.fingerprint = f"{graph.fingerprint} {self.node_type}"
        self.topology, self.has_labels = graph.topology, True

    @property
    def in_dims(self) -> dict[str, int]:
        """Return the width of the rows of each node type."""
        graph = self.graph
        return {
            name: graph.features(name).section("x").shape[1] if graph.has_features(name) else 1
            for name in graph.node_types
        }

    def close(self) -> None:
        """Close all files."""
        self.graph.close()


Graph = Dataset | TypedData


def open_graph(config: GnnConfig) -> Graph:
    """Open the data set of a run, and refuse settings that it does not allow."""
    opened = open_dataset(config.data.path)
    try:
        return _checked(opened, config)
    except BaseException:
        opened.close()
        raise


def _checked(opened: Dataset | HeteroDataset, config: GnnConfig) -> Graph:
    node_type, model = config.data.node_type, config.model.name
    if isinstance(opened, Dataset):
        if node_type is not None:
            raise ConfigurationError(
                f"data.node_type is {node_type!r}, but {opened.folder} has nodes of one type",
                hint="leave it out",
            )
        return opened
    data = TypedData(opened, node_type)
    if model != "sage":
        raise ConfigurationError(
            f'model.name is "{model}", but {opened.folder} has nodes or edges of several types',
            hint='use model.name = "sage", or a model of PyG with DiskLoader.from_dataset',
        )
    if config.run.mode == "memory":
        raise ConfigurationError(
            f'run.mode is "memory", but {opened.folder} has nodes or edges of several types',
            hint='use run.mode = "disk" or "online"',
        )
    return data


def require_labels(data: Graph) -> None:
    """Refuse a graph that has nothing to train on."""
    if not data.has_labels or not len(data.train) or data.num_classes < 1:
        message = f"{data.folder} has no labelled training nodes"
        raise DataError(message, hint="ingest labels and a split, or use fivefold gnn generate")
    if not np.any(data.labels[data.train] >= 0):
        message = f"none of the {len(data.train)} training nodes of {data.folder} has a label"
        raise DataError(message, hint="see whether split and labels belong together")


def model_for(data: Graph, config: GnnConfig) -> LayeredModel | TypedSAGE:
    """Make the model of a run."""
    model, num_layers = config.model, len(config.sampling.fanouts)
    if isinstance(data, TypedData):
        return TypedSAGE(
            data.in_dims,
            data.graph.edge_types,
            data.node_type,
            model.hidden_dim,
            data.num_classes,
            num_layers=num_layers,
            dropout=model.dropout,
        )
    return make_model(
        model.name,
        data.dim,
        model.hidden_dim,
        data.num_classes,
        num_layers=num_layers,
        dropout=model.dropout,
        heads=model.heads,
    )


def scores_of(model: torch.nn.Module, batch: MiniBatch | HeteroMiniBatch) -> torch.Tensor:
    """Return the class scores [seeds, classes] of a batch."""
    if isinstance(batch, HeteroMiniBatch):
        rows = {
            name: batch.x_dict[name]
            if name in batch.x_dict
            else torch.ones(len(ids), 1, device=ids.device)
            for name, ids in batch.n_id_dict.items()
        }
        found: torch.Tensor = model(rows, batch.edge_index_dict)[: batch.batch_size]
        return found
    found = model(batch.x, batch.edge_index if batch.blocks is None else batch.blocks)
    return found[: batch.batch_size]


def facts_of(data: Graph) -> dict[str, Any]:
    """Return what a run's manifest says of its graph."""
    own: Any
    if isinstance(data, TypedData):
        graph = data.graph
        sections = {
            name: graph.features(name).section("x")
            for name in graph.node_types
            if graph.has_features(name)
        }
        own = sections.get(data.node_type)
        nodes = sum(graph.num_nodes.values())
        edges = sum(graph.graph(kind).section("indices").shape[0] for kind in graph.edge_types)
        sizes = {name: section.nbytes for name, section in sections.items()}
        typed: dict[str, Any] = {"node_type": data.node_type, "feature_bytes": sizes}
    else:
        own, typed = data.features.section("x"), {}
        nodes, edges = data.num_nodes, data.num_edges
    facts = {
        "nodes": nodes,
        "edges": edges,
        "dim": 0 if own is None else own.shape[1],
        "dtype": "" if own is None else str(np.dtype(own.dtype)),
        "row_bytes": 0 if own is None else own.row_bytes,
        **typed,
    }
    splits = {name: len(getattr(data, name)) for name in ("train", "valid", "test")}
    return {"name": data.name, **facts, "classes": data.num_classes, **splits}
