"""The border to PyTorch Geometric: its ``Data``, and its ``FeatureStore`` over a feature file."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UnsupportedError
from fivefold.gnn.loading._batch import MiniBatch

__all__ = ["data_of"]


def data_of(batch: MiniBatch) -> Any:
    """The batch as ``torch_geometric.data.Data`` with the same attribute names.

    Raises:
        UnsupportedError: torch_geometric is not installed.
    """
    try:
        from torch_geometric.data import Data  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        message = "torch_geometric is not installed"
        raise UnsupportedError(message, hint="pip install 'fivefold[gnn]'") from error
    data = Data(x=batch.x, edge_index=batch.edge_index, y=batch.y, n_id=batch.n_id)
    data.batch_size = batch.batch_size
    data.input_id = batch.input_id
    if batch.nodes_by_hop:
        data.num_sampled_nodes = list(batch.num_sampled_nodes or ())
        data.num_sampled_edges = list(batch.num_sampled_edges or ())
    return data
