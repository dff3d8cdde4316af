"""``DiskLoader``: mini-batches from a packed store, prepared ahead on background threads.

It puts the parts together: the order of the batches (pure), the pipeline with its stages, the
ring of buffers, the four-level feature store. Stages: read a batch's record, wait for a buffer,
read its cold rows into it, copy the cached rows, build the tensors, and copy to the device where
there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.gnn.loading._base import (
    BatchLoader,
    Ids,
    LoaderSettings,
    LoaderStatistics,
    Remainder,
    batch_order,
    checked_device,
)
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.loading._pipeline import BufferRing, Pipeline, Stage, Ticket, buffer_count
from fivefold.gnn.loading.batch import Form, MiniBatch, SeedTable, assemble, checked_form
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.packing.record import BatchRecord
from fivefold.gnn.storage.reader import Backend

# Two batches are read side by side where a third one can be at work in memory: the disk does not
# idle between one and the next. With two buffers they would only wait for each other.
_BUFFERS_FOR_TWO_READERS = 3
_RECORD_READERS = 2  # one alone, beside those of rows, gets too little of the disk to keep up


class DiskLoader(BatchLoader[MiniBatch]):
    """Iterate over the mini-batches of a packed store, in the shape of PyG's loaders.

    Every iteration is one epoch; the epochs that were sampled are used in turn. After a whole
    epoch the next one begins. Leaving an epoch early and iterating again starts it over; to go on
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
        >>> from fivefold.gnn.planning import Budgets, make_plan
        >>> from fivefold.gnn.sampling import NeighborSampler, sample_epochs
        >>> from fivefold.gnn.storage import probe_disk
        >>> folder = tempfile.TemporaryDirectory()
        >>> dataset = generate_graph(f"{folder.name}/data", nodes=300, dim=4, seed=0)
        >>> samples = sample_epochs(NeighborSampler(dataset.topology(), [3, 3]), dataset.train,
        ...     f"{folder.name}/samples.fvf", batch_size=16, seed=0)
        >>> budgets = Budgets(host_bytes=20_000, disk_bytes=10**8)
        >>> plan = make_plan(samples, dataset.features, budgets,
        ...     probe_disk(folder.name, seconds=0.05))
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
        settings = LoaderSettings(
            device=checked_device(device),
            shuffle=store.plan.policy != "belady" if shuffle is None else shuffle,
            seed=seed,
            prefetch=prefetch,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            timeout_s=timeout_s,
        )
        self._store, self._form = store, checked_form(form)
        _check_policy(store, settings)
        _check_dtype(store.dtype)
        if memory_bytes is None and prefetch is None:
            memory_bytes = store.plan.predicted.buffer_bytes or None
        batch_bytes = store.max_nodes * store.row_bytes
        self._buffers = buffer_count(
            batch_bytes=batch_bytes, memory_bytes=memory_bytes, prefetch=prefetch
        )
        self._features = FeatureStore(
            store,
            device=settings.device,
            backend=backend,
            threads=threads,
            verify=verify,
            readers=2 if self._buffers >= _BUFFERS_FOR_TWO_READERS else 1,
        )
        super().__init__(settings, self._features.close)
        pinned = settings.device.type == "cuda"
        self._ring = BufferRing(self._buffers, size_bytes=batch_bytes, pinned=pinned)
        self._transfer: DeviceTransfer | None = None
        if settings.device.type != "cpu":
            self._transfer = DeviceTransfer(self._features, settings.device)
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
            form=self._form,
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

    def statistics(self) -> LoaderStatistics:
        """Return counts since the loader was made."""
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

    def _numbers(self, epoch: int) -> Ids:
        """Return the batches of this rank in an epoch, in order."""
        settings, batches = self._settings, self._store.epoch_batches(epoch)
        order = np.arange(len(batches), dtype=np.int64)
        if settings.shuffle:
            segments = self._segments(batches) if settings.shuffle == "segments" else ()
            order = batch_order(len(batches), seed=settings.seed, epoch=epoch, segments=segments)
        return settings.share(order) + batches.start

    def _segments(self, batches: range) -> list[tuple[int, int]]:
        """Return the plan's segments within an epoch, counted from its first batch."""
        inside = (
            (max(first, batches.start), min(stop, batches.stop))
            for first, stop in self._store.plan.segments
        )
        return [(a - batches.start, b - batches.start) for a, b in inside if a < b]

    def _identity(self) -> dict[str, Any]:
        return {"store": self._store.plan.order_fingerprint, **self._settings.identity()}


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


@dataclasses.dataclass(slots=True)
class Prepared:
    """A batch on its way, and the number of its buffer's loan."""

    record: BatchRecord
    rows: npt.NDArray[Any] | None = None
    batch: MiniBatch | None = None
    loan: int = 0


class BatchStages:
    """The stages from the number of a batch to its tensors.

    They hold the feature store, the ring of buffers and the labels, and not the loader, so that a
    loader can be collected while its threads still run.
    """

    def __init__(
        self,
        features: FeatureStore,
        ring: BufferRing,
        *,
        seeds: SeedTable,
        form: Form,
        transfer: DeviceTransfer | None,
    ) -> None:
        self._features, self._ring = features, ring
        self._seeds, self._form, self._transfer = seeds, form, transfer
        self._started = False

    def groups(self) -> list[list[Stage]]:
        """Return the stages of each group of threads.

        Buffers are lent by one thread, in order, so that the batch that comes first is never the
        one without a buffer.
        """
        groups = [
            [Stage("fill the caches", self._fill, patience_s=self._features.fill_patience_s)],
            [Stage("read record", self._read_record)],
            [Stage("wait for a buffer", self._lend, waits=True)],
            [Stage("read cold rows", self._read_cold)],
            [Stage("gather cached rows", self._gather), Stage("build tensors", self._build)],
        ]
        if self._transfer is not None:
            groups.append([Stage("copy to the device", self._copy)])
        return groups

    def lanes(self) -> list[int]:
        """Return the threads of each group: the disk never waits between one batch and the next."""
        several = {1: _RECORD_READERS, 3: self._features.readers}
        return [several.get(i, 1) for i in range(len(self.groups()))]

    def stop_waiting(self) -> None:
        """Wake the stage that waits for a buffer."""
        self._ring.stop_waiting(self)

    def _fill(self, ticket: Ticket) -> None:
        if not self._started:
            self._features.start(ticket.batch)
            self._started = True

    def _read_record(self, ticket: Ticket) -> Prepared:
        return Prepared(self._features.record(ticket.batch))

    def _lend(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        shape = (len(work.record.node_ids), *self._features.row_shape)
        work.rows = self._ring.lend(shape, self._features.dtype, borrower=self)
        work.loan = id(work.rows)
        return work

    def _read_cold(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        self._features.read_cold(work.record, _rows_of(work))
        return work

    def _gather(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        self._features.gather_cached(work.record, _rows_of(work))
        return work

    def _build(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        x = torch.from_numpy(_rows_of(work))
        work.batch = assemble(work.record, x, self._seeds, form=self._form)
        work.rows = None  # from here on the tensor alone holds the loan
        return work

    def _copy(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        assert self._transfer is not None, "the stage exists only with a transfer"
        assert work.batch is not None, "the stage before builds the batch"
        work.batch = self._transfer.copy(work.record, work.batch)
        return work


def _rows_of(work: Prepared) -> npt.NDArray[Any]:
    assert work.rows is not None, "a stage before lends the buffer"
    return work.rows


class DeviceTransfer:
    """Copy batches to ``device`` and add the rows of the cache that lives there.

    The copy runs on a stream of its own beside the training loop's. The thread waits for the copy
    before it lets go of the pinned buffer, and the loop's stream is told that it uses the tensors,
    so that the allocator does not hand their memory out too early. Without CUDA the same code runs
    with no streams.
    """

    def __init__(self, store: FeatureStore, device: torch.device) -> None:
        self._store, self._device = store, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, record: BatchRecord, batch: MiniBatch) -> MiniBatch:
        """Return the batch on the device, complete, when the copies are done."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            x = torch.empty_like(batch.x, device=self._device)
            # Rows of the device cache lie behind the seeds and are not in host memory.
            cached = len(record.device_slots)
            among_seeds = int((record.device_destinations < batch.batch_size).sum())
            rest = batch.batch_size + cached - among_seeds
            for part in (slice(0, batch.batch_size), slice(rest, None)):
                x[part].copy_(batch.x[part], non_blocking=True)
            self._store.fill_device(record, x)
            there = dataclasses.replace(batch, x=x).to(self._device, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return there

    def handed_over(self, batch: MiniBatch) -> MiniBatch:
        """Tie the batch to the stream of the caller, who will use it there."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            for tensor in batch.tensors():
                tensor.record_stream(current)
        return batch
