"""What others do with the same graph: features in memory, PyG's loader, or one of numpy alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.gnn.data import Dataset

__all__ = ["LOADERS", "Batches", "Epochs", "Sampler", "train_in_memory"]

_LR = 3e-3
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """One batch: nodes, seeds first, and the edges that each hop drew, as places among them."""

    nodes: torch.Tensor
    edges: list[torch.Tensor]
    num_seeds: int


Batches = Callable[[Ids], Iterator[Blocks]]


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """What training came to.

    Attributes:
        seconds: Of each epoch: drawing, gathering, copying and training.
        test_accuracy: On the test nodes, of as many neighbours.
    """

    seconds: list[float]
    test_accuracy: float


class Sampler:
    """Draws up to so many in-neighbours of each node, without replacement, with numpy.

    Args:
        indptr: [nodes + 1], where each node's edges begin.
        indices: [edges], the source of each.
        fanouts: Neighbours of each hop.
        batch_size: Seeds of a batch.
        seed: Of all draws.
    """

    def __init__(
        self, indptr: Ids, indices: NDArray[Any], *, fanouts: tuple[int, ...], batch_size: int,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self._indptr, self._indices = indptr, indices
        self._fanouts, self._batch_size = fanouts, batch_size
        self._random = np.random.default_rng(seed)
        self._place = np.full(len(indptr) - 1, -1, np.int64)

    def __call__(self, seeds: Ids) -> Iterator[Blocks]:
        """Yield batches of the seeds, in an order drawn anew."""
        order = self._random.permutation(seeds)
        for start in range(0, len(order), self._batch_size):
            yield self._batch(order[start : start + self._batch_size])

    def _batch(self, seeds: Ids) -> Blocks:
        nodes, edges = seeds, []
        first = 0
        self._place[seeds] = np.arange(len(seeds))
        for fanout in self._fanouts:
            targets, sources = self._draw(nodes[first:], fanout)
            fresh = np.unique(sources[self._place[sources] < 0])
            self._place[fresh] = len(nodes) + np.arange(len(fresh))
            edges.append(torch.from_numpy(np.stack([self._place[sources], targets + first])))
            first = len(nodes)
            nodes = np.concatenate([nodes, fresh])
        self._place[nodes] = -1
        return Blocks(torch.from_numpy(nodes), edges, len(seeds))

    def _draw(self, nodes: Ids, fanout: int) -> tuple[Ids, Ids]:
        """Return the place of the target and the source of each edge."""
        starts = self._indptr[nodes]
        counts = self._indptr[nodes + 1] - starts
        target = np.repeat(np.arange(len(nodes)), counts)
        before = np.cumsum(counts) - counts
        edge = np.arange(len(target)) - before[target] + starts[target]
        order = np.lexsort((self._random.random(len(target)), target))
        rank = np.arange(len(target)) - before[target]  # in the drawn order of its target
        kept = order[rank < fanout]
        return target[kept], self._indices[edge[kept]].astype(np.int64)


def _numpy_batches(dataset: Dataset, sizes: Mapping[str, Any]) -> Batches:
    topology = dataset.topology()
    return Sampler(
        topology.indptr, topology.indices,
        fanouts=tuple(sizes["fanouts"]), batch_size=sizes["batch_size"],
    )  # fmt: skip


def _pyg_batches(dataset: Dataset, sizes: Mapping[str, Any]) -> Batches:
    """Return PyG's ``NeighborLoader``, whose worker processes draw; rows are gathered here."""
    from torch_geometric.data import Data  # noqa: PLC0415 - may not be installed
    from torch_geometric.loader import NeighborLoader  # noqa: PLC0415

    topology = dataset.topology()
    target = np.repeat(np.arange(topology.num_nodes), np.diff(topology.indptr))
    edge_index = torch.from_numpy(np.stack([topology.indices.astype(np.int64), target]))
    graph = Data(edge_index=edge_index, num_nodes=topology.num_nodes)

    def batches(seeds: Ids) -> Iterator[Blocks]:
        loader = NeighborLoader(
            graph, num_neighbors=list(sizes["fanouts"]), input_nodes=torch.from_numpy(seeds),
            batch_size=sizes["batch_size"], shuffle=True, num_workers=sizes["workers"],
        )  # fmt: skip
        for batch in loader:
            edges = torch.split(batch.edge_index, batch.num_sampled_edges, dim=1)
            yield Blocks(batch.n_id, list(edges), batch.batch_size)

    return batches


LOADERS: dict[str, Callable[[Dataset, Mapping[str, Any]], Batches]] = {
    "numpy's sampler": _numpy_batches,
    "PyG's NeighborLoader": _pyg_batches,
}


class _Sage(torch.nn.Module):
    """GraphSAGE of means in plain PyTorch; a layer computes what the next one asks for."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.of_neighbours = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairs)
        self.of_self = torch.nn.ModuleList(torch.nn.Linear(*pair, bias=False) for pair in pairs)

    def forward(self, rows: torch.Tensor, blocks: Blocks, ends: list[int]) -> torch.Tensor:
        """Return the scores of the seeds; ``ends`` are the nodes within each hop."""
        for layer, (mean_of, own) in enumerate(zip(self.of_neighbours, self.of_self, strict=True)):
            hops = len(self.of_self) - layer
            source, target = torch.cat(blocks.edges[:hops], dim=1)
            size = ends[hops - 1]
            total = rows.new_zeros(size, rows.shape[1]).index_add_(0, target, rows[source])
            counts = torch.bincount(target, minlength=size).clamp_min(1).unsqueeze(1)
            rows = mean_of(total / counts) + own(rows[:size])
            if hops > 1:
                rows = torch.nn.functional.dropout(rows.relu(), 0.2, self.training)
        return rows


def train_in_memory(dataset: Dataset, loader: str, sizes: Mapping[str, Any]) -> Epochs:
    """Train with all features in the host's memory, in plain PyTorch.

    Args:
        dataset: With labels.
        loader: A key of ``LOADERS``.
        sizes: Of the model and the batches, and the device.
    """
    device = torch.device(sizes["device"])
    features = torch.from_numpy(dataset.features.read("x"))
    labels = torch.from_numpy(np.asarray(dataset.labels))
    batches = LOADERS[loader](dataset, sizes)
    torch.manual_seed(0)
    hops = len(sizes["fanouts"])
    model = _Sage([dataset.dim, *((hops - 1) * [sizes["hidden_dim"]]), dataset.num_classes])
    optimizer = torch.optim.Adam(model.to(device).parameters(), lr=_LR)

    def scored(ids: Ids) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for blocks in batches(ids):
            rows = features[blocks.nodes].to(device)
            wanted = labels[blocks.nodes[: blocks.num_seeds]].to(device)
            ends = _ends(blocks)
            there = Blocks(blocks.nodes, [part.to(device) for part in blocks.edges], ends[0])
            yield model(rows, there, ends), wanted

    seconds = []
    for _ in range(sizes["epochs"]):
        started_s = time.perf_counter()
        for scores, wanted in scored(dataset.train):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(scores, wanted))
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    model.eval()
    with torch.no_grad():
        found = [(scores.argmax(1) == wanted).float() for scores, wanted in scored(dataset.test)]
    return Epochs(seconds=seconds, test_accuracy=float(torch.cat(found).mean()))


def _ends(blocks: Blocks) -> list[int]:
    """Return how many nodes lie within 0, 1, ... hops: those that targets of the next may be."""
    ends = [blocks.num_seeds]
    for edges in blocks.edges[:-1]:
        within = int(edges[0].max()) + 1 if edges.numel() else 0
        ends.append(max(ends[-1], within))
    return ends
