"""What ``HeteroLoader`` yields: a mini-batch of several node and edge types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

EdgeType = tuple[str, str, str]
Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeteroMiniBatch:
    """A sampled subgraph by type, under the names of PyG's ``HeteroData``.

    The first ``batch_size`` nodes of ``input_type`` are the seeds; the nodes of every type stand
    in the order of discovery, hop by hop.

    Args:
        x_dict: Feature rows [nodes, dim] of each node type that has features.
        edge_index_dict: int64 [2, edges] of each edge type, sources over targets.
        n_id_dict: int64 [nodes], ids of the nodes of each type.
        y: Labels of the seeds [batch_size]; None without labels.
        input_type: Node type of the seeds.
        batch_size: Number of seeds.
        number: Number of the batch in its epoch.
        num_sampled_nodes_dict: Nodes of each type found at each hop, seeds first.
        num_sampled_edges_dict: Edges of each type in each hop.

    Examples:
        >>> batch = HeteroMiniBatch(x_dict={"a": torch.ones(2, 3)}, edge_index_dict={},
        ...     n_id_dict={"a": torch.tensor([7, 9])}, y=None, input_type="a", batch_size=1,
        ...     number=0)
        >>> batch
        HeteroMiniBatch(a=[2], 1 seeds of a)
    """

    x_dict: Mapping[str, Tensor]
    edge_index_dict: Mapping[EdgeType, Tensor]
    n_id_dict: Mapping[str, Tensor]
    y: Tensor | None
    input_type: str
    batch_size: int
    number: int
    num_sampled_nodes_dict: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    num_sampled_edges_dict: Mapping[EdgeType, list[int]] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """Counts instead of numbers."""
        parts = [f"{name}=[{len(ids)}]" for name, ids in self.n_id_dict.items()]
        parts += [f"{kind}=[{e.shape[1]}]" for kind, e in self.edge_index_dict.items()]
        return f"HeteroMiniBatch({', '.join(parts)}, {self.batch_size} seeds of {self.input_type})"

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> HeteroMiniBatch:
        """This batch with all tensors on ``device``."""
        target = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(target, non_blocking=non_blocking)

        return dataclasses.replace(
            self,
            x_dict=_each(move, self.x_dict),
            edge_index_dict=_each(move, self.edge_index_dict),
            n_id_dict=_each(move, self.n_id_dict),
            y=None if self.y is None else move(self.y),
        )

    def to_data(self) -> Any:
        """This batch as ``torch_geometric.data.HeteroData``, as PyG's ``NeighborLoader`` has it.

        It fails with ``UnsupportedError`` where torch_geometric is not installed.
        """
        from fivefold.gnn.loading._geometric import hetero_data_of  # noqa: PLC0415 - an extra

        return hetero_data_of(self)


def _each(change: Callable[[Tensor], Tensor], tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    return {key: change(tensor) for key, tensor in tensors.items()}
