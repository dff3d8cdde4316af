"""``DiskLoader``: mini-batches from a packed store, prepared ahead on background threads.

It puts the parts together: the order of the batches (pure), the pipeline with its stages, the
ring of buffers, the four-level feature store. Stages: read a batch's record, wait for a buffer,
read its cold rows into it, copy the cached rows, build the tensors, and copy to the device where
there is one.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.gnn.loading._assemble import SeedTable, checked_form
from fivefold.gnn.loading._base import BatchLoader
from fivefold.gnn.loading._batch import MiniBatch
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.loading._order import Remainder, batch_order, rank_share
from fivefold.gnn.loading._pipeline import Pipeline
from fivefold.gnn.loading._ring import BufferRing
from fivefold.gnn.loading._rows import Backend
from fivefold.gnn.loading._settings import LoaderSettings, buffer_count, checked_device
from fivefold.gnn.loading._stages import BatchStages, Prepared
from fivefold.gnn.loading._statistics import LoaderStatistics
from fivefold.gnn.loading._transfer import DeviceTransfer
from fivefold.gnn.packing import PackedStore

# Two batches are read side by side where a third one can be at work in memory: the disk does not
# idle between one and the next. With two buffers they would only wait for each other.
_BUFFERS_FOR_TWO_READERS = 3


class DiskLoader(BatchLoader[MiniBatch]):
    """Iterate over the mini-batches of a packed store, in the shape of PyG's loaders.

    Every iteration is one epoch; the epochs that were sampled are used in turn. After a whole
    epoch the next one begins. Leaving an epoch early and iterating again begins it anew; to go on
    in its middle, load the state that ``state_dict`` gave.

    Tensors of a batch are copy-free views of the loader's buffers. A buffer is used again only
    when nothing refers to its batch any more, so batches may be kept, at the cost of memory.

    Data parallel training: all ranks open the same store and pass their ``rank`` and the
    ``world_size``. Each batch goes to one rank, all ranks make the same number of steps. Caches
    and buffers are per rank: plan with the memory of one.

    Args:
        store: Packed store.
        labels: Label of every node; None for batches without ``y``.
        device: Where the tensors are put.
        shuffle: New random order of the batches in every epoch; "segments" keeps the batches of
            a segment together; None shuffles where the plan allows it. A Belady plan holds for
            the planned order alone.
        seed: Seed of the order.
        prefetch: Batches that are prepared ahead; None for as many as are useful and fit.
        backend: Reading engine of the storage.
        threads: Its reading threads; None for its default.
        verify: Check the checksum of every page that is read.
        rank: Rank of this process.
        world_size: Number of processes that share the epoch.
        memory_bytes: What the buffers of this process may take for rows; None takes what the plan
            keeps for batches in flight, or what ``prefetch`` needs where that is given. Edges and
            ids of the batches, and a few megabytes of each reading engine, are not in it.
        form: "edge_index", or "blocks" for layered models.
        remainder: What happens with batches that do not fill a step of all ranks: "drop" leaves
            out the last ones of the epoch's order, "repeat" hands the first ones out again.
        timeout_s: Longest wait for one batch before an error names the stage that hangs.

    Raises:
        ConfigurationError: A setting is not allowed, or does not fit the plan of the store.
        InfeasibleError: The buffers do not fit ``memory_bytes``.
        UnsupportedError: torch has no dtype for the features.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.data import generate_graph
        >>> from fivefold.gnn.packing import pack
        >>> from fivefold.gnn.planning import Budgets, FeatureInfo, make_plan
        >>> from fivefold.gnn.sampling import NeighborSampler, sample_epochs
        >>> from fivefold.gnn.storage import probe_disk
        >>> folder = tempfile.TemporaryDirectory()
        >>> dataset = generate_graph(f"{folder.name}/data", nodes=300, dim=4, seed=0)
        >>> samples = sample_epochs(NeighborSampler(dataset.topology(), [3, 3]), dataset.train,
        ...     f"{folder.name}/samples.fvf", batch_size=16, seed=0)
        >>> info = FeatureInfo(
        ...     num_nodes=300, row_bytes=16, fingerprint=dataset.features.fingerprint)
        >>> budgets = Budgets(host_bytes=20_000, disk_bytes=10**8)
        >>> plan = make_plan(samples, info, budgets, probe_disk(folder.name, seconds=0.05))
        >>> store = pack(dataset.features, samples, plan, f"{folder.name}/store",
        ...     memory_bytes=1 << 25)
        >>> with DiskLoader(store, labels=dataset.labels) as loader:
        ...     for batch in loader:
        ...         _ = batch.x, batch.edge_index, batch.y  # the model's turn
        ...     statistics = loader.statistics()
        >>> statistics.batches == len(loader), round(sum(statistics.hit_rates.values()), 9)
        (True, 1.0)
        >>> store.close(); dataset.close(); folder.cleanup()
    """

    def __init__(  # noqa: PLR0913 - independent options, each with a default
        self,
        store: PackedStore,
        *,
        labels: npt.NDArray[Any] | torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        shuffle: bool | Literal["segments"] | None = None,
        seed: int = 0,
        prefetch: int | None = None,
        backend: Backend = "auto",
        threads: int | None = None,
        verify: bool = True,
        rank: int = 0,
        world_size: int = 1,
        memory_bytes: int | None = None,
        form: Literal["edge_index", "blocks"] = "edge_index",
        remainder: Remainder = "drop",
        timeout_s: float = 120.0,
    ) -> None:
        self._store = store
        self._settings = LoaderSettings(
            device=checked_device(device),
            shuffle=store.plan.policy != "belady" if shuffle is None else shuffle,
            seed=seed,
            prefetch=prefetch,
            rank=rank,
            world_size=world_size,
            memory_bytes=memory_bytes,
            form=form,
            remainder=remainder,
            timeout_s=timeout_s,
        )
        _check_policy(store, self._settings)
        _check_dtype(store.dtype)
        self._buffers = _buffers_for(store, memory_bytes, prefetch)
        self._features = FeatureStore(
            store,
            device=device,
            backend=backend,
            threads=threads,
            verify=verify,
            readers=2 if self._buffers >= _BUFFERS_FOR_TWO_READERS else 1,
        )
        super().__init__(self._features.close)
        self._ring = BufferRing(
            self._buffers,
            size_bytes=store.max_nodes * store.row_bytes,
            pinned=self._settings.device.type == "cuda",
        )
        self._transfer: DeviceTransfer | None = None
        if self._settings.device.type != "cpu":
            self._transfer = DeviceTransfer(self._features, self._settings.device)
        self._seeds = SeedTable(store.train_ids, _checked_labels(labels, store.plan.num_nodes))

    def _length(self, epoch: int) -> int:
        return len(self._numbers(epoch))

    def _start(self, epoch: int, first: int) -> Pipeline:
        numbers = self._numbers(epoch)[first:].tolist()
        self._ring.abandon()
        stages = BatchStages(
            self._features,
            self._ring,
            seeds=self._seeds,
            form=checked_form(self._settings.form),
            transfer=self._transfer,
        )
        return Pipeline(
            iter(numbers),
            stages.groups(),
            lanes=stages.lanes(),
            capacity=max(1, self._buffers - 1),
            timeout_s=self._settings.timeout_s,
            on_close=stages.stop_waiting,
        )

    def fill_caches(self) -> None:
        """Fill the caches now; otherwise the first batch of the first epoch waits for it.

        Raises:
            ConfigurationError: An epoch is under way.
        """
        if self._iterator is not None and self._iterator() is not None:
            message = "the caches are in use: an epoch is under way"
            raise ConfigurationError(message, hint="fill them before the first epoch")
        numbers = self._numbers(self._epoch)
        if len(numbers):
            self._features.start(int(numbers[min(self._position, len(numbers) - 1)]))

    def statistics(self) -> LoaderStatistics:
        """Counts since the loader was made."""
        features = self._features
        return LoaderStatistics(
            batches=self._delivered,
            rows=dict(features.rows),
            row_bytes=features.row_bytes,
            requests=features.reading.requests,
            bytes_read=features.reading.bytes_read,
            cold_bytes=features.reading.bytes_used,
            record_bytes=features.record_bytes,
            fill_bytes=features.filling.bytes_read,
            fill_s=features.filling.seconds,
            stage_s=self._stage_s(self._pipeline),
            wait_s=self._wait_s(self._pipeline),
            buffer_bytes=self._ring.nbytes,
        )

    def _make_room(self) -> None:
        self._ring.make_room()

    def _hand_over(self, prepared: Prepared) -> MiniBatch:
        batch = prepared.batch
        assert batch is not None, "the last stage builds the batch"
        if self._transfer is not None:
            return self._transfer.handed_over(batch)
        self._ring.delivered(prepared.loan)
        return batch

    def _numbers(self, epoch: int) -> npt.NDArray[np.int64]:
        """Batches of this rank in an epoch, in order."""
        settings, batches = self._settings, self._store.epoch_batches(epoch)
        order = np.arange(len(batches), dtype=np.int64)
        if settings.shuffle:
            segments = self._segments(batches) if settings.shuffle == "segments" else ()
            order = batch_order(len(batches), seed=settings.seed, epoch=epoch, segments=segments)
        share = rank_share(
            order,
            rank=settings.rank,
            world_size=settings.world_size,
            remainder=settings.remainder,
        )
        return share + batches.start

    def _segments(self, batches: range) -> list[tuple[int, int]]:
        """The plan's segments within an epoch, counted from its first batch."""
        inside = (
            (max(first, batches.start), min(stop, batches.stop))
            for first, stop in self._store.plan.segments
        )
        return [(a - batches.start, b - batches.start) for a, b in inside if a < b]

    def _identity(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "store": self._store.plan.order_fingerprint,
            "seed": settings.seed,
            "shuffle": settings.shuffle,
            "world_size": settings.world_size,
            "remainder": settings.remainder,
        }


def _buffers_for(store: PackedStore, memory_bytes: int | None, prefetch: int | None) -> int:
    if memory_bytes is None and prefetch is None:
        memory_bytes = store.plan.predicted.buffer_bytes or None
    return buffer_count(
        batch_bytes=store.max_nodes * store.row_bytes, memory_bytes=memory_bytes, prefetch=prefetch
    )


def _check_policy(store: PackedStore, settings: LoaderSettings) -> None:
    if store.plan.policy != "belady":
        return
    if settings.shuffle:
        raise ConfigurationError(
            "this store was packed with a Belady plan, which holds for the planned order of the "
            f"batches alone; got shuffle={settings.shuffle!r}",
            hint='use shuffle=False, or plan with policy="static"',
        )
    if settings.world_size > 1:
        raise ConfigurationError(
            "the cache of a Belady plan changes with every batch, so that its batches cannot be "
            f"shared by {settings.world_size} ranks",
            hint='plan with policy="static"',
        )


def _checked_labels(
    labels: npt.NDArray[Any] | torch.Tensor | None, num_nodes: int
) -> npt.NDArray[Any] | None:
    if labels is None:
        return None
    array = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if len(array) != num_nodes:
        raise ConfigurationError(
            f"there are {len(array)} labels and {num_nodes} nodes",
            hint="give one label per node of the graph, in the order of the node ids",
        )
    return array


def _check_dtype(dtype: np.dtype[Any]) -> None:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError as error:
        raise UnsupportedError(
            f"the features are {dtype}, for which torch has no dtype",
            hint="convert them on ingestion",
        ) from error
