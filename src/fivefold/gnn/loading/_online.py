"""``OnlineLoader``: mini-batches sampled when they are asked for, from features as they lie.

For validation and test ids, for training that fits in memory, and as the yardstick of packed
training: the same batches, without any packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from fivefold.errors import ConfigurationError
from fivefold.gnn.data import Dataset
from fivefold.gnn.loading._assemble import SeedTable, Structure, assemble, checked_form
from fivefold.gnn.loading._batch import MiniBatch
from fivefold.gnn.loading._rows import Backend, open_rows
from fivefold.gnn.sampling import NeighborSampler, SampledBatch, Topology, epoch_batches

__all__ = ["OnlineLoader"]

Ids = npt.NDArray[np.int64]


class OnlineLoader:
    """Sample and gather mini-batches on the fly.

    Iterating yields the batches of the current epoch; after a whole epoch the next one begins,
    with other samples and, with ``shuffle``, another order of ids.

    Args:
        dataset: Dataset that holds topology, features and labels.
        ids: Seed node ids, distinct.
        fanouts: Neighbours per hop, -1 for all.
        batch_size: Seeds per batch; the last batch of an epoch may be smaller.
        topology: Topology to sample from; None opens the dataset's.
        features: "disk" reads each batch's rows from the feature file, "memory" loads the file
            first, an array [nodes, dim] serves rows itself.
        shuffle: Put the ids in a new random order every epoch.
        resample: Draw other neighbours every epoch; False repeats the draws of epoch 0.
        seed: Seed of order and samples.
        form: "edge_index", or "blocks" for layered models.
        device: Where the tensors are put.
        backend: Reading engine for features on disk.
        verify: Check the checksums of what is read.

    Example:
        >>> import tempfile
        >>> from fivefold.gnn.data import generate_graph
        >>> folder = tempfile.mkdtemp()
        >>> dataset = generate_graph(folder, nodes=200, dim=4, seed=0)
        >>> loader = OnlineLoader(dataset, dataset.train, fanouts=[3, 3], batch_size=8)
        >>> batch = next(iter(loader))
        >>> batch.batch_size, tuple(batch.x.shape) == (batch.num_nodes, 4)
        (8, True)
        >>> loader.close()
    """

    def __init__(  # noqa: PLR0913 - independent options, each with a default
        self,
        dataset: Dataset,
        ids: Ids,
        *,
        fanouts: Sequence[int],
        batch_size: int,
        topology: Topology | None = None,
        features: Literal["disk", "memory"] | npt.NDArray[Any] = "disk",
        shuffle: bool = False,
        resample: bool = True,
        seed: int = 0,
        form: Literal["edge_index", "blocks"] = "edge_index",
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
        verify: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size must be positive; got {batch_size}")
        self._form = checked_form(form)
        self._ids = np.ascontiguousarray(ids, np.int64)
        self._batch_size = batch_size
        self._shuffle, self._resample, self._seed = shuffle, resample, seed
        self._device = torch.device(device)
        self._sampler = NeighborSampler(
            dataset.topology() if topology is None else topology, fanouts, seed=seed
        )
        self._rows = open_rows(dataset.features, features, backend=backend, verify=verify)
        self._seeds = SeedTable(self._ids, dataset.labels if dataset.has_labels else None)
        self._epoch = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return math.ceil(len(self._ids) / self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be iterated."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[MiniBatch]:
        epoch = self._epoch
        for number, seeds in enumerate(self._epoch_seeds(epoch)):
            sample = self._sampler.sample(seeds, epoch=epoch if self._resample else 0, batch=number)
            yield self._load(sample)
        self._epoch = epoch + 1

    def close(self) -> None:
        """Let go of files and threads; a second call does nothing."""
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _epoch_seeds(self, epoch: int) -> Sequence[Ids]:
        if self._shuffle:
            return epoch_batches(
                self._ids, batch_size=self._batch_size, seed=self._seed, epoch=epoch
            )
        size = self._batch_size
        return [self._ids[i : i + size] for i in range(0, len(self._ids), size)]

    def _load(self, sample: SampledBatch) -> MiniBatch:
        out = np.empty((len(sample.node_ids), *self._rows.row_shape), self._rows.dtype)
        self._rows.read(sample.node_ids, out)
        batch = assemble(
            Structure.of_sample(sample), torch.from_numpy(out), self._seeds, form=self._form
        )
        return batch.to(self._device)
