"""``HeteroLoader``: mini-batches of a graph with several node and edge types, from its files.

They are sampled when they are asked for; the feature rows of each node type are read from its
file. Offline sampling and packing know one node type: ``HeteroTopology.merged`` makes one of a
graph whose types have rows of one size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError
from fivefold.gnn.data import HeteroDataset
from fivefold.gnn.loading._base import BatchLoader
from fivefold.gnn.loading._hetero_batch import EdgeType, HeteroMiniBatch
from fivefold.gnn.loading._order import Remainder, rank_share
from fivefold.gnn.loading._pipeline import Pipeline, Stage, Ticket
from fivefold.gnn.loading._rows import Backend, DiskRows
from fivefold.gnn.loading._settings import checked_device, checked_ids
from fivefold.gnn.sampling import (
    HeteroNeighborSampler,
    HeteroSampledBatch,
    HeteroTopology,
    epoch_batches,
)

Ids = npt.NDArray[np.int64]


class HeteroLoader(BatchLoader[HeteroMiniBatch]):
    """Sample and read mini-batches of several types, a few batches ahead of the training loop.

    Iterating yields the batches of the current epoch; after a whole epoch the next one begins.

    Args:
        dataset: Graph, features and labels.
        input_type: Node type of the seeds.
        ids: Seeds, distinct, or a mask; None for the training nodes of that type.
        fanouts: Neighbours per hop, -1 for all; for all edge types alike or by edge type.
        batch_size: Seeds per batch; the last batch of an epoch may be smaller.
        topology: Topology to sample from; None opens the dataset's.
        shuffle: Put the seeds in a new random order every epoch.
        seed: Seed of order and samples.
        device: Where the tensors are put.
        prefetch: Batches that are prepared ahead.
        rank: Rank of this process.
        world_size: Number of processes that share the batches of an epoch.
        remainder: "drop" leaves out the last batches of an epoch that do not fill a step of all
            ranks, "repeat" hands the first ones out again.
        backend: Reading engine.
        verify: Check the checksums of what is read.
        timeout_s: Longest wait for one batch before an error names the stage that hangs.

    Raises:
        ConfigurationError: A setting is out of range, or fan-outs do not fit the edge types.
        DataError: There is no such node type, or it has no labels to take the seeds from.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.data import HeteroSource, array_source, ingest
        >>> one = array_source([[0, 1], [1, 0]], features=np.eye(2, dtype=np.float32))
        >>> source = HeteroSource(
        ...     name="pair", nodes={"a": one}, edges={("a", "to", "a"): one.edges()})
        >>> with ingest(source, tempfile.mkdtemp()) as dataset:
        ...     with HeteroLoader(dataset, "a", [0], fanouts=[2], batch_size=1) as loader:
        ...         next(iter(loader)).x_dict["a"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(  # noqa: PLR0913 - independent options, each with a default
        self,
        dataset: HeteroDataset,
        input_type: str,
        ids: ArrayLike | None = None,
        *,
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        batch_size: int,
        topology: HeteroTopology | None = None,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
        rank: int = 0,
        world_size: int = 1,
        remainder: Remainder = "drop",
        backend: Backend = "auto",
        verify: bool = True,
        timeout_s: float = 120.0,
    ) -> None:
        if batch_size < 1 or prefetch < 1 or not timeout_s > 0:
            raise ConfigurationError(
                "batch_size, prefetch and timeout_s must be positive; got "
                f"batch_size={batch_size}, prefetch={prefetch}, timeout_s={timeout_s}"
            )
        seeds = dataset.split(input_type, "train") if ids is None else ids
        self._labels = dataset.labels(input_type) if dataset.has_labels(input_type) else None
        self._ids = checked_ids(seeds, dataset.num_nodes.get(input_type, 0))
        self._input_type, self._batch_size = input_type, batch_size
        self._shuffle, self._seed, self._prefetch = shuffle, seed, prefetch
        self._device, self._timeout_s = checked_device(device), timeout_s
        self._world: dict[str, Any] = {"world_size": world_size, "remainder": remainder}
        self._rank = rank
        self._sampler = HeteroNeighborSampler(
            dataset.topology() if topology is None else topology, fanouts, seed=seed
        )
        self._rows = {
            name: DiskRows(dataset.features(name), backend=backend, verify=verify)
            for name in dataset.node_types
            if dataset.has_features(name)
        }
        super().__init__(_Closing(list(self._rows.values())))
        self._length(0)  # an impossible rank is refused here and not in the first epoch

    def _length(self, epoch: int) -> int:
        del epoch  # all are of one length
        return len(self._numbers())

    def _numbers(self) -> Ids:
        batches = np.arange(math.ceil(len(self._ids) / self._batch_size))
        return rank_share(batches, rank=self._rank, **self._world)

    def _start(self, epoch: int, first: int) -> Pipeline:
        sampler, device = self._sampler, self._device
        seeds, name = self._epoch_seeds(epoch), self._input_type
        reader = _BatchReader(self._rows, name, self._labels)

        def sample(ticket: Ticket) -> HeteroSampledBatch:
            return sampler.sample({name: seeds[ticket.batch]}, epoch=epoch, batch=ticket.batch)

        def read(ticket: Ticket) -> HeteroMiniBatch:
            return reader.read(ticket.value).to(device)

        return Pipeline(
            iter(self._numbers()[first:].tolist()),
            [[Stage("sample", sample)], [Stage("read rows", read)]],
            capacity=self._prefetch,
            timeout_s=self._timeout_s,
        )

    def _epoch_seeds(self, epoch: int) -> Sequence[Ids]:
        size = self._batch_size
        if self._shuffle:
            return epoch_batches(self._ids, batch_size=size, seed=self._seed, epoch=epoch)
        return [self._ids[i : i + size] for i in range(0, len(self._ids), size)]

    def _hand_over(self, value: Any) -> HeteroMiniBatch:
        batch: HeteroMiniBatch = value
        return batch

    def _identity(self) -> dict[str, Any]:
        return {
            "topology": self._sampler.topology.fingerprint,
            "fanouts": [[list(kind), list(n)] for kind, n in self._sampler.fanouts.items()],
            "input_type": self._input_type,
            "ids": len(self._ids),
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **self._world,
        }


class _Closing:
    """Closes readers; refers to nothing else, so that it does not keep the loader alive."""

    def __init__(self, rows: list[DiskRows]) -> None:
        self._rows = rows

    def __call__(self) -> None:
        for rows in self._rows:
            rows.close()


class _BatchReader:
    """From a sample to a batch with its rows; apart from the loader, as its threads use it."""

    def __init__(
        self, rows: dict[str, DiskRows], input_type: str, labels: npt.NDArray[np.int64] | None
    ) -> None:
        self._rows, self._input_type, self._labels = rows, input_type, labels

    def read(self, sample: HeteroSampledBatch) -> HeteroMiniBatch:
        x = {name: self._features(name, sample.node_ids[name]) for name in self._rows}
        seeds = sample.seeds(self._input_type)
        y = None if self._labels is None else torch.from_numpy(self._labels[seeds])
        return HeteroMiniBatch(
            x_dict=x,
            edge_index_dict={
                kind: torch.from_numpy(sample.edge_index(kind)) for kind in sample.sources
            },
            n_id_dict={name: torch.from_numpy(ids) for name, ids in sample.node_ids.items()},
            y=y,
            input_type=self._input_type,
            batch_size=len(seeds),
            number=sample.number,
            num_sampled_nodes_dict={n: c.tolist() for n, c in sample.nodes_per_hop.items()},
            num_sampled_edges_dict={k: c.tolist() for k, c in sample.edges_per_hop.items()},
        )

    def _features(self, name: str, ids: Ids) -> torch.Tensor:
        rows = self._rows[name]
        out = np.empty((len(ids), *rows.row_shape), rows.dtype)
        if len(ids):
            rows.read(ids, out)
        return torch.from_numpy(out)
