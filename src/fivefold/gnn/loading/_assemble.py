"""From arrays of a sampled batch to the tensors of a ``MiniBatch``.

Samples know nodes hop by hop; a store hands rows over in storage order. ``edge_index`` numbers
rows of ``x``, whatever their order. Blocks number the rows of each layer's input: storage order
in the first one, prefixes of the hop order in all others. N: nodes, E: edges, H: hops,
T: expanded nodes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold.errors import ConfigurationError
from fivefold.gnn.loading._batch import Block, MiniBatch
from fivefold.gnn.loading._edges import expand_edges

if TYPE_CHECKING:  # either kind of loader works without the room of the other
    from fivefold.gnn.packing import BatchRecord
    from fivefold.gnn.sampling import SampledBatch

Form = Literal["edge_index", "blocks"]
Ids = npt.NDArray[np.int64]


def checked_form(form: str) -> Form:
    """The form, when it is one of the two.

    Raises:
        ConfigurationError: It is neither.
    """
    if form == "edge_index":
        return "edge_index"
    if form == "blocks":
        return "blocks"
    raise ConfigurationError(f'form is {form!r}; use "edge_index" or "blocks"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    """A sampled subgraph, numbered by the rows of ``x``.

    Args:
        number: Number of the batch.
        node_ids: Node ids [N] in the order of ``x``, seeds first.
        batch_size: Number of seeds.
        sources: int32 [E], the row of ``x`` of each edge's source, target by target.
        degrees: int32 [T], edges into each expanded node, in hop order.
        nodes_per_hop: Nodes found at each hop, seeds first [H + 1].
        edges_per_hop: Edges of each hop [H].
        expanded: int32 [T], the row of ``x`` of each expanded node; None where ``x`` stands in
            hop order, so that they are the first T rows.
        edge_ids: int64 [E], places of the edges in the topology, or None.
    """

    number: int
    node_ids: Ids
    batch_size: int
    sources: npt.NDArray[np.int32]
    degrees: npt.NDArray[np.int32]
    nodes_per_hop: tuple[int, ...]
    edges_per_hop: tuple[int, ...]
    expanded: npt.NDArray[np.int32] | None = None
    edge_ids: Ids | None = None

    @classmethod
    def of_sample(cls, sample: SampledBatch) -> Structure:
        """The structure of a sampled batch, whose rows stand in hop order."""
        return cls(
            number=sample.number,
            node_ids=sample.node_ids,
            batch_size=sample.batch_size,
            sources=sample.sources,
            degrees=sample.degrees,
            nodes_per_hop=tuple(int(n) for n in sample.nodes_per_hop),
            edges_per_hop=tuple(int(n) for n in sample.edges_per_hop),
            edge_ids=sample.edge_ids,
        )

    @classmethod
    def of_record(cls, record: BatchRecord) -> Structure:
        """The structure of a packed batch, whose rows stand in storage order."""
        return cls(
            number=record.number,
            node_ids=record.node_ids,
            batch_size=record.batch_size,
            sources=record.sources,
            degrees=record.degrees,
            nodes_per_hop=tuple(int(n) for n in record.nodes_per_hop),
            edges_per_hop=tuple(int(n) for n in record.edges_per_hop),
            expanded=record.expanded,
            edge_ids=record.edge_ids,
        )


class SeedTable:
    """Places of seeds in the list of ids that a loader was given, and their labels.

    Args:
        ids: The list of ids, int64, distinct.
        labels: Label of every node of the graph [N]; None without labels.
    """

    def __init__(self, ids: Ids, labels: npt.NDArray[np.generic] | None) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = np.asarray(ids)[self._order]
        self._labels = labels

    def places(self, seeds: Ids) -> Ids:
        """Where each seed stands in the list."""
        return self._order[np.searchsorted(self._sorted, seeds)]

    def labels(self, seeds: Ids) -> Tensor | None:
        """Labels of the seeds as a tensor."""
        return None if self._labels is None else torch.from_numpy(self._labels[seeds])


def assemble(structure: Structure, x: Tensor, seeds: SeedTable, *, form: Form) -> MiniBatch:
    """The mini-batch of a structure and its rows."""
    seed_ids = structure.node_ids[: structure.batch_size]
    edge_index, blocks = None, None
    if form == "edge_index":
        edge_index = torch.from_numpy(_edges_into_rows(structure))
    else:
        blocks = _blocks(structure)
    return MiniBatch(
        x=x,
        edge_index=edge_index,
        n_id=torch.from_numpy(structure.node_ids),
        y=seeds.labels(seed_ids),
        batch_size=structure.batch_size,
        input_id=torch.from_numpy(seeds.places(seed_ids)),
        number=structure.number,
        num_sampled_nodes=structure.nodes_per_hop,
        num_sampled_edges=structure.edges_per_hop,
        nodes_by_hop=structure.expanded is None,
        blocks=blocks,
        e_id=None if structure.edge_ids is None else torch.from_numpy(structure.edge_ids),
    )


def _edges_into_rows(structure: Structure) -> Ids:
    return expand_edges(structure.sources, structure.degrees, targets=structure.expanded)


def _blocks(structure: Structure) -> tuple[Block, ...]:
    """One block per hop; block b has the edges into nodes found in the first H - b hops."""
    hops = len(structure.edges_per_hop)
    nodes = np.cumsum(structure.nodes_per_hop)
    edges = np.concatenate([[0], np.cumsum(structure.edges_per_hop)])
    rows = torch.from_numpy(expand_edges(structure.sources, structure.degrees))
    inner = rows if hops < 2 else _by_hop(structure, rows[:, : edges[hops - 1]])
    blocks = []
    for layer in range(hops):
        last = hops - layer
        targets = int(nodes[last - 1])
        first = layer == 0 and structure.expanded is not None
        blocks.append(
            Block(
                edge_index=(inner if layer else rows)[:, : edges[last]].contiguous(),
                num_sources=int(nodes[last]),
                num_targets=targets,
                target_rows=_expanded(structure) if first else torch.arange(targets),
                targets_first=not first,
            )
        )
    return tuple(blocks)


def _expanded(structure: Structure) -> Tensor:
    assert structure.expanded is not None, "asked only where x is not in hop order"
    return torch.from_numpy(structure.expanded.astype(np.int64))


def _by_hop(structure: Structure, edges: Tensor) -> Tensor:
    """The edges with sources numbered in hop order; all of them are expanded nodes."""
    if structure.expanded is None:
        return edges
    places = torch.zeros(len(structure.node_ids), dtype=torch.int64)
    places[_expanded(structure)] = torch.arange(len(structure.expanded))
    return torch.stack([places[edges[0]], edges[1]])
