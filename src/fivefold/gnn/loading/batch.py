"""What a loader yields: a mini-batch in the shape of PyTorch Geometric's, and layered blocks.

``MiniBatch`` is plain tensors under the names that PyG models and training loops use. ``Block``
is one layer of a layered mini-batch, for models that compute in each layer only what the later
layers need. Nothing here knows where the rows came from.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold._compiler import njit
from fivefold.errors import optional_module, require_one_of
from fivefold.gnn.packing.record import BatchRecord
from fivefold.gnn.sampling.batches import EdgeType, SampledBatch
from fivefold.gnn.storage.pages import Array, Ids


def import_geometric(name: str) -> Any:
    """Return a package of torch_geometric, which takes seconds to load and is an optional extra."""
    with warnings.catch_warnings():
        # On import it uses what newer torch deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        return optional_module(f"torch_geometric.{name}", extra="gnn", use="a PyG object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """The edges of one layer, from ``num_sources`` input rows to ``num_targets`` output rows.

    A layer of PyG's bipartite form is called as ``conv((h, block.targets(h)), block.edge_index)``
    and returns one row per target; those rows are the input of the next block.

    Args:
        edge_index: int64 [2, edges]; row 0 numbers rows of the layer's input, row 1 rows of its
            output.
        num_sources: Rows of the layer's input.
        num_targets: Rows of the layer's output.
        target_rows: int64 [num_targets], the input row of each target.
        targets_first: Whether the targets are the first rows of the input, in order, as in
            every block but the first.

    Examples:
        >>> block = Block(edge_index=torch.tensor([[2], [0]]), num_sources=3, num_targets=1,
        ...     target_rows=torch.tensor([1]))
        >>> block.targets(torch.tensor([[5.0], [6.0], [7.0]]))
        tensor([[6.]])
    """

    edge_index: Tensor
    num_sources: int
    num_targets: int
    target_rows: Tensor
    targets_first: bool = False

    def targets(self, rows: Tensor) -> Tensor:
        """Return the input rows of this block's targets, in the order of its output."""
        if self.targets_first:
            return rows[: self.num_targets]
        return rows.index_select(0, self.target_rows)

    @property
    def size(self) -> tuple[int, int]:
        """``(num_sources, num_targets)``, what PyG calls the size of a bipartite graph."""
        return self.num_sources, self.num_targets


class _Tensors:
    """Methods of a batch that treat its tensors alike, whatever its fields are."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors of this batch."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        _changed(self, note)
        return found

    @property
    def nbytes(self) -> int:
        """Return bytes of all tensors of this batch, views counted once per tensor."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return this batch with all tensors on ``device``."""
        target = torch.device(device)
        return _changed(self, lambda tensor: tensor.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, for copies that overlap on a GPU."""
        return _changed(self, Tensor.pin_memory)

    def clone(self) -> Self:
        """Return a copy that shares no memory with the loader, to be kept for long."""
        return _changed(self, Tensor.clone)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniBatch(_Tensors):
    """A sampled subgraph with the feature rows of its nodes, as PyG's ``NeighborLoader`` has it.

    The first ``batch_size`` nodes are the seeds. The other nodes stand in the order in which
    their rows arrive from the store; only ``nodes_by_hop`` batches keep them in hops.

    Args:
        x: Feature rows [nodes, dim] in the dtype of the store.
        edge_index: int64 [2, edges], sources over targets, numbers into ``x``; edges stand by
            hop. None in the form "blocks".
        n_id: int64 [nodes], the node ids of the rows.
        y: Labels of the seeds [batch_size]; None without labels.
        batch_size: Number of seeds.
        input_id: int64 [batch_size], places of the seeds in the ids that the loader was given.
        number: Number of the batch in its sample file or epoch.
        num_sampled_nodes: Nodes found at each hop, seeds first; they are prefixes of ``x`` only
            where ``nodes_by_hop`` holds.
        num_sampled_edges: Edges of each hop.
        nodes_by_hop: Whether the rows stand hop after hop, which PyG's ``trim_to_layer`` needs.
        blocks: One ``Block`` per hop, outermost first, in the form "blocks"; else None.
        e_id: int64 [edges], ids of the edges where the sample has them: their places in the source
            that was ingested, whatever the rules; of a generated graph those in the topology.
        edge_attr: Feature rows [edges, F] of the edges, where they have some; the edges of a
            block are the first ones.
        edge_weight: float32 [edges], the weight of each, where edges have some and an ``e_id``.
        links: What a ``LinkLoader`` predicts, under PyG's names; in temporal batches also
            ``seed_time`` [seeds] and ``batch`` [nodes], the seed that each node was found from.
    """

    x: Tensor
    edge_index: Tensor | None
    n_id: Tensor
    y: Tensor | None
    batch_size: int
    input_id: Tensor
    number: int
    num_sampled_nodes: tuple[int, ...] | None = None
    num_sampled_edges: tuple[int, ...] | None = None
    nodes_by_hop: bool = False
    blocks: tuple[Block, ...] | None = None
    e_id: Tensor | None = None
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None
    links: Mapping[str, Tensor] | None = None

    def __repr__(self) -> str:
        """Show shapes instead of numbers, as PyG prints its batches."""
        parts = [
            f"{field.name}={_shown(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        ]
        return f"MiniBatch({', '.join(parts)})"

    @property
    def num_nodes(self) -> int:
        """Return the number of rows of ``x``."""
        return int(self.n_id.shape[0])

    @property
    def num_edges(self) -> int:
        """Return the number of sampled edges."""
        if self.edge_index is not None:
            return int(self.edge_index.shape[1])
        return int(self.blocks[0].edge_index.shape[1]) if self.blocks else 0

    def to_data(self) -> Any:
        """Return this batch as ``torch_geometric.data.Data`` with the same attribute names.

        It fails with ``UnsupportedError`` where torch_geometric is not installed.
        """
        data = import_geometric("data").Data(
            x=self.x, edge_index=self.edge_index, y=self.y, n_id=self.n_id
        )
        data.batch_size = self.batch_size
        data.input_id = self.input_id
        of_edges = {name: getattr(self, name) for name in ("e_id", "edge_attr", "edge_weight")}
        beside = {**of_edges, **(self.links or {})}
        for name, value in beside.items():
            if value is not None:
                data[name] = value
        if self.nodes_by_hop:
            data.num_sampled_nodes = list(self.num_sampled_nodes or ())
            data.num_sampled_edges = list(self.num_sampled_edges or ())
        return data


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, tuple) and value and isinstance(value[0], Block):
        return str([list(block.size) for block in value])
    return str(value)


Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeteroMiniBatch(_Tensors):
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
        input_id: int64 [batch_size], places of the seeds in the ids that the loader was given.
        nodes_by_hop: Whether the rows of every type stand hop after hop.
        e_id_dict: int64 [edges], ids of the edges of each type where the sample has them.
        edge_attr_dict: Feature rows [edges, F] of each edge type that has some.
        edge_weight_dict: float32 [edges] of each edge type that has weights.
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
    input_id: Tensor | None = None
    nodes_by_hop: bool = True
    e_id_dict: Mapping[EdgeType, Tensor] = dataclasses.field(default_factory=dict)
    edge_attr_dict: Mapping[EdgeType, Tensor] = dataclasses.field(default_factory=dict)
    edge_weight_dict: Mapping[EdgeType, Tensor] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        """Show counts instead of numbers."""
        parts = [f"{name}=[{len(ids)}]" for name, ids in self.n_id_dict.items()]
        parts += [f"{kind}=[{e.shape[1]}]" for kind, e in self.edge_index_dict.items()]
        return f"HeteroMiniBatch({', '.join(parts)}, {self.batch_size} seeds of {self.input_type})"

    def to_data(self) -> Any:
        """Return this batch as ``torch_geometric.data.HeteroData``, as PyG has it.

        It fails with ``UnsupportedError`` where torch_geometric is not installed.
        """
        data = import_geometric("data").HeteroData()
        for name, ids in self.n_id_dict.items():
            data[name].n_id = ids
            data[name].num_nodes = len(ids)
            if name in self.x_dict:
                data[name].x = self.x_dict[name]
        for kind, edges in self.edge_index_dict.items():
            data[kind].edge_index = edges
            if kind in self.e_id_dict:
                data[kind].e_id = self.e_id_dict[kind]
            if kind in self.edge_attr_dict:
                data[kind].edge_attr = self.edge_attr_dict[kind]
            if kind in self.edge_weight_dict:
                data[kind].edge_weight = self.edge_weight_dict[kind]
        seeds = data[self.input_type]
        seeds.batch_size, seeds.y = self.batch_size, self.y
        if self.input_id is not None:
            seeds.input_id = self.input_id
        if self.nodes_by_hop:
            data.num_sampled_nodes_dict = dict(self.num_sampled_nodes_dict)
            data.num_sampled_edges_dict = dict(self.num_sampled_edges_dict)
        return data


def _changed(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """Return a batch, or a part of one, with every tensor in it changed."""
    part: Any = value
    if isinstance(part, Tensor):
        part = change(part)
    elif isinstance(part, Mapping):
        part = {key: _changed(inner, change) for key, inner in part.items()}
    elif isinstance(part, tuple):
        part = tuple(_changed(inner, change) for inner in part)
    elif isinstance(part, _Tensors | Block):
        names = [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]
        part = type(part)(**{name: _changed(getattr(part, name), change) for name in names})
    changed: Value = part
    return changed


Form = Literal["edge_index", "blocks"]
Int32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.integer[Any]]


def checked_form(form: str) -> Form:
    """Return the form, when it is one of the two."""
    require_one_of(form, ("edge_index", "blocks"), f"form is {form!r}")
    return cast("Form", form)


class SeedTable:
    """Places of seeds in the distinct ids that a loader was given, and their labels [nodes]."""

    def __init__(self, ids: Ids, labels: npt.NDArray[np.generic] | None) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = np.asarray(ids)[self._order]
        self._labels = labels

    def places(self, seeds: Ids) -> Ids:
        """Return where each seed stands in the list."""
        return self._order[np.searchsorted(self._sorted, seeds)]

    def labels(self, seeds: Ids) -> Tensor | None:
        """Return the labels of the seeds as a tensor."""
        return None if self._labels is None else torch.from_numpy(self._labels[seeds])


Records = Mapping[Any, BatchRecord | SampledBatch]


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """What makes a batch of its parts, its rows and the rows of its edges, all by type.

    Of a graph of one type, where ``input_type`` is None, the only key is None.
    """

    seeds: SeedTable
    form: Form
    input_type: str | None = None
    edge_types: Sequence[EdgeType] = ()
    weights: Mapping[Any, Array] = dataclasses.field(default_factory=dict)  # by the edges' ids

    def _weights_of(self, kind: Any, ids: Ids | None) -> Tensor | None:
        if ids is None or kind not in self.weights:
            return None
        return torch.from_numpy(self.weights[kind][ids])

    def __call__(
        self, parts: Records, x: Mapping[Any, Tensor], edge_attr: Mapping[Any, Array]
    ) -> Any:
        """Return the ``MiniBatch`` or ``HeteroMiniBatch``."""
        rows = {kind: torch.from_numpy(found) for kind, found in edge_attr.items()}
        if self.input_type is not None:
            return self._typed(parts, x, rows, self.input_type)
        return self._of_one_type(parts[None], x[None], rows.get(None))

    def _of_one_type(
        self, sampled: SampledBatch | BatchRecord, x: Tensor, edge_attr: Tensor | None
    ) -> MiniBatch:
        """Rows of a sample stand in hop order, those of a record do not."""
        expanded = sampled.expanded if isinstance(sampled, BatchRecord) else None
        seed_ids = sampled.node_ids[: sampled.batch_size]
        edge_index, blocks = None, None
        if self.form == "edge_index":
            edges = expand_edges(sampled.sources, sampled.degrees, targets=expanded)
            edge_index = torch.from_numpy(edges)
        else:
            blocks = _blocks(sampled, expanded)
        return MiniBatch(
            x=x,
            edge_index=edge_index,
            n_id=torch.from_numpy(sampled.node_ids),
            y=self.seeds.labels(seed_ids),
            batch_size=sampled.batch_size,
            input_id=torch.from_numpy(self.seeds.places(seed_ids)),
            number=sampled.number,
            num_sampled_nodes=tuple(sampled.nodes_per_hop.tolist()),
            num_sampled_edges=tuple(sampled.edges_per_hop.tolist()),
            nodes_by_hop=expanded is None,
            blocks=blocks,
            e_id=None if sampled.edge_ids is None else torch.from_numpy(sampled.edge_ids),
            edge_attr=edge_attr,
            edge_weight=self._weights_of(None, sampled.edge_ids),
        )

    def _typed(
        self,
        parts: Records,
        x: Mapping[str, Tensor],
        edge_attr: Mapping[EdgeType, Tensor],
        input_type: str,
    ) -> HeteroMiniBatch:
        """Put the parts of a sample (``HeteroSampledBatch.part``) by node type together.

        The ends of an edge are numbered in the parts of its two types: sources in the one, degrees
        and the places of targets in the other.
        """
        edge_index, edge_ids, per_hop = {}, {}, {}
        edge_weight: dict[EdgeType, Tensor] = {}
        next_edge, next_degree = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
        next_kind = dict.fromkeys(parts, 0)
        for kind in self.edge_types:
            source, _, target = kind
            own, ends = parts[source], parts[target]
            hops = len(own.nodes_per_hop) - 1
            per_hop[kind] = own.edges_per_hop[next_kind[source] : next_kind[source] + hops].tolist()
            edges = slice(next_edge[source], next_edge[source] + sum(per_hop[kind]))
            count = int(ends.nodes_per_hop[:-1].sum())
            degrees = ends.degrees[next_degree[target] : next_degree[target] + count]
            places = ends.expanded if isinstance(ends, BatchRecord) else None
            pairs = expand_edges(own.sources[edges], degrees, targets=places)
            edge_index[kind] = torch.from_numpy(pairs)
            if own.edge_ids is not None:
                edge_ids[kind] = torch.from_numpy(own.edge_ids[edges])
                weights = self._weights_of(kind, own.edge_ids[edges])
                edge_weight |= {} if weights is None else {kind: weights}
            next_kind[source] += hops
            next_edge[source] = edges.stop
            next_degree[target] += count
        first = parts[input_type]
        seed_ids = first.node_ids[: first.batch_size]
        return HeteroMiniBatch(
            x_dict=x,
            edge_index_dict=edge_index,
            n_id_dict={name: torch.from_numpy(part.node_ids) for name, part in parts.items()},
            y=self.seeds.labels(seed_ids),
            input_type=input_type,
            batch_size=first.batch_size,
            number=first.number,
            num_sampled_nodes_dict={
                name: part.nodes_per_hop.tolist() for name, part in parts.items()
            },
            num_sampled_edges_dict=per_hop,
            input_id=torch.from_numpy(self.seeds.places(seed_ids)),
            nodes_by_hop=not any(isinstance(part, BatchRecord) for part in parts.values()),
            e_id_dict=edge_ids,
            edge_attr_dict=edge_attr,
            edge_weight_dict=edge_weight,
        )


def _blocks(sampled: SampledBatch | BatchRecord, expanded: Int32 | None) -> tuple[Block, ...]:
    """Return one block per hop; block b has the edges into nodes found in the first H - b hops.

    Samples know nodes hop by hop; a store hands rows over in storage order. So the first block
    numbers its input's rows in storage order, all others in prefixes of the hop order.
    """
    hops = len(sampled.edges_per_hop)
    nodes = np.cumsum(sampled.nodes_per_hop)
    edges = np.concatenate([[0], np.cumsum(sampled.edges_per_hop)])
    rows = torch.from_numpy(expand_edges(sampled.sources, sampled.degrees))
    inner, target_rows = rows, None
    if expanded is not None:
        target_rows = torch.from_numpy(expanded.astype(np.int64))
        if hops > 1:  # their sources, all of them expanded nodes, are numbered in hop order
            places = torch.zeros(len(sampled.node_ids), dtype=torch.int64)
            places[target_rows] = torch.arange(len(expanded))
            inner = rows[:, : edges[hops - 1]]
            inner = torch.stack([places[inner[0]], inner[1]])
    blocks = []
    for layer in range(hops):
        last = hops - layer
        targets = int(nodes[last - 1])
        into = None if layer else target_rows  # only ``x`` may be in another order than hops
        blocks.append(
            Block(
                edge_index=(inner if layer else rows)[:, : edges[last]].contiguous(),
                num_sources=int(nodes[last]),
                num_targets=targets,
                target_rows=torch.arange(targets) if into is None else into,
                targets_first=into is None,
            )
        )
    return tuple(blocks)


def expand_edges(sources: Int32, degrees: Int32, *, targets: Ints | None = None) -> Ids:
    """Return ``edge_index`` int64 [2, edges] of sources that are listed target by target.

    ``targets`` has the local number of each target; None: 0, 1, 2, ... Compiled, in one pass with
    the GIL released, so that a background thread builds tensors while the training loop computes.
    """
    edges = np.empty((2, sources.shape[0]), np.int64)
    numbers = np.arange(degrees.shape[0], dtype=np.int32) if targets is None else targets
    assert int(degrees.sum()) == sources.shape[0], "degrees must add up to the number of edges"
    _expand(sources, degrees, numbers, edges)
    return edges


@njit
def _expand(sources: Int32, degrees: Int32, targets: Ints, edges: Ids) -> None:
    edge = 0
    for row in range(degrees.shape[0]):
        target = targets[row]
        for _ in range(degrees[row]):
            edges[0, edge] = sources[edge]
            edges[1, edge] = target
            edge += 1
