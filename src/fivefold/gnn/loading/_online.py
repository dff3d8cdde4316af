"""``OnlineLoader``: mini-batches sampled when they are asked for, from features as they lie.

For validation and test ids, for training that fits in memory, and as the yardstick of packed
training: the same batches, without any packing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError
from fivefold.gnn.data import Dataset
from fivefold.gnn.loading._assemble import SeedTable, Structure, assemble, checked_form
from fivefold.gnn.loading._base import BatchLoader
from fivefold.gnn.loading._batch import MiniBatch
from fivefold.gnn.loading._order import Remainder, rank_share
from fivefold.gnn.loading._pipeline import Pipeline, Stage, Ticket
from fivefold.gnn.loading._rows import Backend, open_rows
from fivefold.gnn.loading._settings import checked_device, checked_ids
from fivefold.gnn.loading._statistics import LoaderStatistics
from fivefold.gnn.sampling import NeighborSampler, SampledBatch, Topology, epoch_batches
from fivefold.gnn.storage import ReadStatistics

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass
class _Reading:
    """What was read so far; apart from the loader, so that its threads need not hold it."""

    total: ReadStatistics = dataclasses.field(default_factory=ReadStatistics)
    rows: int = 0


class OnlineLoader(BatchLoader[MiniBatch]):
    """Sample and gather mini-batches on the fly, a few batches ahead of the training loop.

    Iterating yields the batches of the current epoch; after a whole epoch the next one begins,
    with other samples and, with ``shuffle``, another order of ids.

    Args:
        dataset: Dataset that holds topology, features and labels.
        ids: Seed node ids, distinct, or a mask over all nodes.
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
        prefetch: Batches that are prepared ahead.
        rank: Rank of this process.
        world_size: Number of processes that share the batches of an epoch.
        remainder: "drop" leaves out the last batches of an epoch that do not fill a step of all
            ranks, "repeat" hands the first ones out again.
        backend: Reading engine for features on disk.
        verify: Check the checksums of what is read.
        timeout_s: Longest wait for one batch before an error names the stage that hangs.

    Raises:
        ConfigurationError: A setting is out of range.

    Examples:
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
        ids: ArrayLike,
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
        self._form = checked_form(form)
        self._ids = checked_ids(ids, dataset.num_nodes)
        self._batch_size, self._prefetch, self._timeout_s = batch_size, prefetch, timeout_s
        self._shuffle, self._resample, self._seed = shuffle, resample, seed
        self._device = checked_device(device)
        self._share = functools.partial(
            rank_share, rank=rank, world_size=world_size, remainder=remainder
        )
        self._world = {"world_size": world_size, "remainder": remainder}
        self._sampler = NeighborSampler(
            dataset.topology() if topology is None else topology, fanouts, seed=seed
        )
        self._seeds = SeedTable(self._ids, dataset.labels if dataset.has_labels else None)
        _check_features(features, dataset.num_nodes)
        self._rows = open_rows(dataset.features, features, backend=backend, verify=verify)
        super().__init__(self._rows.close)
        self._read = _Reading()
        self._length(0)  # an impossible rank is refused here and not in the first epoch

    def _length(self, epoch: int) -> int:
        del epoch  # all are of one length
        return len(self._numbers())

    def _start(self, epoch: int, first: int) -> Pipeline:
        seeds = self._epoch_seeds(epoch)
        reading = self._read
        drawn = epoch if self._resample else 0
        sampler, rows, device = self._sampler, self._rows, self._device
        table, form = self._seeds, self._form

        def sample(ticket: Ticket) -> SampledBatch:
            return sampler.sample(seeds[ticket.batch], epoch=drawn, batch=ticket.batch)

        def read(ticket: Ticket) -> tuple[SampledBatch, npt.NDArray[Any]]:
            sampled: SampledBatch = ticket.value
            out = np.empty((len(sampled.node_ids), *rows.row_shape), rows.dtype)
            reading.total += rows.read(sampled.node_ids, out)
            reading.rows += len(out)
            return sampled, out

        def build(ticket: Ticket) -> MiniBatch:
            sampled, out = ticket.value
            structure = Structure.of_sample(sampled)
            return assemble(structure, torch.from_numpy(out), table, form=form).to(device)

        stages = [Stage("sample", sample), Stage("read rows", read), Stage("build tensors", build)]
        return Pipeline(
            iter(self._numbers()[first:].tolist()),
            [[stage] for stage in stages],
            capacity=self._prefetch,
            timeout_s=self._timeout_s,
        )

    def _hand_over(self, value: Any) -> MiniBatch:
        batch: MiniBatch = value
        return batch

    def _identity(self) -> dict[str, Any]:
        return {
            "topology": self._sampler.topology.fingerprint,
            "fanouts": list(self._sampler.fanouts),
            "ids": f"{len(self._ids)} {zlib.crc32(self._ids.tobytes()):08x}",
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "resample": self._resample,
            **self._world,
        }

    def statistics(self) -> LoaderStatistics:
        """Counts since the loader was made; rows come from the "file" or from "memory"."""
        shape, total = self._rows.row_shape, self._read.total
        return LoaderStatistics(
            batches=self._delivered,
            rows={self._rows.level: self._read.rows},
            row_bytes=math.prod(shape) * self._rows.dtype.itemsize,
            requests=total.requests,
            bytes_read=total.bytes_read,
            cold_bytes=total.bytes_used,
            stage_s=self._stage_s(self._pipeline),
            wait_s=self._wait_s(self._pipeline),
        )

    def _numbers(self) -> Ids:
        return self._share(np.arange(math.ceil(len(self._ids) / self._batch_size)))

    def _epoch_seeds(self, epoch: int) -> Sequence[Ids]:
        if self._shuffle:
            return epoch_batches(
                self._ids, batch_size=self._batch_size, seed=self._seed, epoch=epoch
            )
        size = self._batch_size
        return [self._ids[i : i + size] for i in range(0, len(self._ids), size)]


def _check_features(features: str | npt.NDArray[Any], num_nodes: int) -> None:
    if isinstance(features, str):
        if features not in ("disk", "memory"):
            raise ConfigurationError(
                f"features is {features!r}", hint='use "disk", "memory" or an array'
            )
    elif features.ndim != 2 or len(features) != num_nodes:
        raise ConfigurationError(
            f"features have shape {list(features.shape)} for {num_nodes} nodes",
            hint="give one row per node, in the order of the node ids",
        )
