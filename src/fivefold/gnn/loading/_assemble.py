"""From arrays of a sampled batch to the tensors of a ``MiniBatch``.

Samples know nodes hop by hop; a store hands rows over in storage order. ``edge_index`` numbers
rows of ``x``, whatever their order. Blocks number the rows of each layer's input: storage order
in the first one, prefixes of the hop order in all others. N: nodes, E: edges, H: hops,
T: expanded nodes.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.gnn.loading._batch import Block, MiniBatch
from fivefold.gnn.packing import BatchRecord
from fivefold.gnn.sampling.batches import SampledBatch

Form = Literal["edge_index", "blocks"]
Ids = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.integer[Any]]


def checked_form(form: str) -> Form:
    """Return the form, when it is one of the two."""
    if form not in ("edge_index", "blocks"):
        raise ConfigurationError(f'form is {form!r}; use "edge_index" or "blocks"')
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


def assemble(
    sampled: SampledBatch | BatchRecord, x: Tensor, seeds: SeedTable, *, form: Form
) -> MiniBatch:
    """Return the mini-batch of a sample, whose rows stand in hop order, or of a record."""
    expanded = sampled.expanded if isinstance(sampled, BatchRecord) else None
    seed_ids = sampled.node_ids[: sampled.batch_size]
    edge_index, blocks = None, None
    if form == "edge_index":
        edge_index = torch.from_numpy(
            expand_edges(sampled.sources, sampled.degrees, targets=expanded)
        )
    else:
        blocks = _blocks(sampled, expanded)
    return MiniBatch(
        x=x,
        edge_index=edge_index,
        n_id=torch.from_numpy(sampled.node_ids),
        y=seeds.labels(seed_ids),
        batch_size=sampled.batch_size,
        input_id=torch.from_numpy(seeds.places(seed_ids)),
        number=sampled.number,
        num_sampled_nodes=tuple(sampled.nodes_per_hop.tolist()),
        num_sampled_edges=tuple(sampled.edges_per_hop.tolist()),
        nodes_by_hop=expanded is None,
        blocks=blocks,
        e_id=None if sampled.edge_ids is None else torch.from_numpy(sampled.edge_ids),
    )


def _blocks(sampled: SampledBatch | BatchRecord, expanded: Int32 | None) -> tuple[Block, ...]:
    """Return one block per hop; block b has the edges into nodes found in the first H - b hops."""
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
