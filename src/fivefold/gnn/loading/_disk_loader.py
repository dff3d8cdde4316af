"""``DiskLoader``: mini-batches from a packed store, prepared ahead on background threads.

It puts the parts together: the order of the batches (pure), the pipeline with its stages, the
ring of buffers, the four-level feature store. Stages: read a batch's record, wait for a buffer,
read its cold rows into it, copy the cached rows, build the tensors, and copy to the device where
there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.gnn.data import Dataset
from fivefold.gnn.loading._base import (
    BatchLoader,
    LoaderOptions,
    LoaderSettings,
    LoaderStatistics,
    batch_order,
    checked_ids,
)
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.loading._pipeline import BufferRing, Pipeline, Stage, Ticket, buffer_count
from fivefold.gnn.loading._pyg_batches import LabelledData, SlicedData, cache_folder, dataset_of
from fivefold.gnn.loading.batch import Form, MiniBatch, SeedTable, assemble, checked_form
from fivefold.gnn.loading.prepare import Progress, StoreRecipe, prepare
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.packing.record import BatchRecord
from fivefold.gnn.planning import Budgets
from fivefold.gnn.sampling.batches import as_count, checked_fanouts
from fivefold.gnn.storage.arrays import Array, Ids
from fivefold.gnn.storage.pages import aligned_empty, gather_rows
from fivefold.units import parse_bytes

# Two batches are read side by side where a third one can be at work in memory: the disk does not
# idle between one and the next. With two buffers they would only wait for each other.
_BUFFERS_FOR_TWO_READERS = 3
_RECORD_READERS = 2  # one alone, beside those of rows, gets too little of the disk to keep up


class DiskLoader(BatchLoader[Any]):  # of MiniBatch, or of Data of PyG
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
        edges: Packed store of the rows of edges (``from_dataset`` makes it); None without
            ``edge_attr``.
        labels: Label of every node; None for batches without ``y``.
        shuffle: New random order of the batches in every epoch; None shuffles where the plan
            allows it. A Belady plan holds for the planned order alone.
        seed: Seed of the order.
        prefetch: Batches that are prepared ahead; None for as many as are useful and fit.
        threads: Threads of the reading engine; None for its default.
        memory_bytes: What the buffers of this process may take for rows; None takes what the plan
            keeps for batches in flight, or what ``prefetch`` needs where that is given. Edges and
            ids of the batches, and a few megabytes of each reading engine, are not in it.
        form: "edge_index", or "blocks" for layered models.
        options: Those that all loaders take: ``device``, where the tensors are put; ``rank`` of
            this process among ``world_size`` that share the epoch; ``remainder``, whether the
            last batches that do not fill a step of all ranks are left out ("drop") or the first
            ones handed out again ("repeat"); ``backend``, the reading engine; ``verify``, whether
            the checksum of every page that is read is checked; ``timeout_s``, the longest wait
            for one batch before an error names the stage that hangs.

    Raises:
        ConfigurationError: A setting is not allowed, or does not fit the plan of the store.
        InfeasibleError: The buffers do not fit ``memory_bytes``.
        UnsupportedError: torch has no dtype for the features.
    """

    def __init__(  # noqa: PLR0913 - independent options, each with a default
        self,
        store: PackedStore,
        *,
        edges: PackedStore | None = None,
        labels: Array | torch.Tensor | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        prefetch: int | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
        form: Literal["edge_index", "blocks"] = "edge_index",
        **options: Unpack[LoaderOptions],
    ) -> None:
        settings = LoaderSettings(
            shuffle=store.plan.policy != "belady" if shuffle is None else shuffle,
            seed=seed,
            prefetch=prefetch,
            **options,
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
            threads=threads,
            **settings.engine,
            readers=2 if self._buffers >= _BUFFERS_FOR_TWO_READERS else 1,
        )
        self._edges = None
        if edges is not None:
            self._edges = FeatureStore(edges, threads=threads, **settings.engine)
        # Closed in this order: engines, then what from_dataset opened for them.
        self._closing = contextlib.ExitStack()
        for rows in (self._features, self._edges):
            if rows is not None:
                self._closing.callback(rows.close)
        super().__init__(settings, self._closing.close)
        pinned = settings.device.type == "cuda"
        self._ring = BufferRing(self._buffers, size_bytes=batch_bytes, pinned=pinned)
        self._transfer: DeviceTransfer | None = None
        if settings.device.type != "cpu":
            self._transfer = DeviceTransfer(self._features, settings.device)
        self._seeds = SeedTable(store.train_ids, _checked_labels(labels, store.plan.num_nodes))

    @classmethod
    def from_dataset(  # noqa: PLR0913 - those of NeighborLoader, and what is packed
        cls,
        dataset: Any,
        fanouts: Sequence[int],
        batch_size: int,
        *,
        input_nodes: ArrayLike | None = None,
        budgets: Budgets | str | None = None,
        cache: str | Path | None = None,
        form: Literal["data", "edge_index", "blocks"] = "data",
        sampled_epochs: int = 1,
        policy: Literal["static", "belady"] = "static",
        shuffle: bool | None = None,
        seed: int = 0,
        edge_ids: bool = False,
        prefetch: int = 2,
        progress: Progress | None = None,
        **options: Any,
    ) -> DiskLoader:
        """Sample, plan and pack into a cache folder, once, and yield the batches from there.

        It takes the place of PyG's ``NeighborLoader(data, num_neighbors, batch_size=...)``. What
        is in the folder is known by a hash of the data and of all options that decide it: other
        data or options are prepared beside it, and a warning says what differs. A call that was
        killed goes on where it was; of several processes one prepares, the others wait for it.

        Args:
            dataset: ``Dataset``, the folder of one, or a ``Data`` of PyG. The features and edges
                of a ``Data`` are written to the cache once; its other attributes are sliced from
                memory, as PyG does it.
            fanouts: Neighbours per hop, -1 for all: ``num_neighbors`` of PyG.
            batch_size: Seeds per batch.
            input_nodes: Seeds as ids or a mask; None: the training nodes of a data set, of a
                ``Data`` all nodes.
            budgets: What may be taken; a text such as "4 GB" is host memory, and None 1 GB of it,
                each with four fifths of the free disk.
            cache: Folder of what is made; None: ``prepared`` inside the data set's folder, for a
                ``Data`` below the user's cache folder (``XDG_CACHE_HOME``).
            form: "data" yields ``torch_geometric.data.Data``; the others a ``MiniBatch``.
            sampled_epochs: Different epochs that are sampled; iterating repeats them.
            policy: "static" for batches in any order, "belady" for the planned one.
            shuffle: As for the loader itself.
            seed: Seed of samples and order.
            edge_ids: Whether batches have ``e_id``; with features of edges they always do.
            prefetch: Batches that are prepared ahead.
            progress: Told of (stage, done, total) while it prepares.
            options: Further options of the loader: device, rank, world_size, verify, ...

        Returns:
            The loader; closing it closes all that it opened.

        Raises:
            ConfigurationError: An option is out of range.
            DataError: The data set or what is in the cache is damaged, or there are no seeds.
            InfeasibleError: A budget is too small; says what would do.
            StorageError: The disk refuses or is full; the same call goes on afterwards.
            UnsupportedError: ``form`` is "data" and torch_geometric is not installed.

        Examples:
            >>> import tempfile
            >>> from fivefold.gnn.data import generate_graph
            >>> folder = tempfile.mkdtemp()
            >>> generate_graph(folder, nodes=300, dim=4, seed=0).close()
            >>> with DiskLoader.from_dataset(folder, [3, 3], 16, form="edge_index") as loader:
            ...     batch = next(iter(loader))
            >>> batch.batch_size, tuple(batch.x.shape) == (batch.num_nodes, 4)
            (16, True)
        """
        with contextlib.ExitStack() as opened:
            source = _open_source(dataset, cache, form, opened)
            recipe = StoreRecipe(
                fanouts=checked_fanouts(fanouts),
                batch_size=as_count(batch_size, "batch_size"),
                epochs=as_count(sampled_epochs, "sampled_epochs"),
                seed=as_count(seed, "seed", least=0),
                policy=policy,
                buffer_batches=as_count(prefetch, "prefetch") + 1,
                edge_ids=edge_ids or source.has_edges,
                **_budget_fields(budgets),
            )
            prepared = prepare(
                source.dataset,
                recipe,
                source.cache,
                ids=source.seeds(input_nodes),
                progress=progress,
            )
            opened.callback(prepared.close)
            loader = cls(
                prepared.store,
                edges=prepared.edges,
                labels=source.labels if form != "data" else None,
                shuffle=shuffle,
                seed=seed,
                prefetch=prefetch,
                form="edge_index" if form == "data" else form,
                **options,
            )
            if form == "data":
                loader._made_into = source.made_into
            engines = loader._closing.pop_all()
            loader._closing.push(opened.pop_all())
            loader._closing.push(engines)
        return loader

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
            edges=self._edges,
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
            edge_bytes=0 if self._edges is None else self._edges.reading.bytes_read,
            fill_bytes=features.filling.bytes_read,
            fill_s=features.filling.seconds,
            stage_s=self._stage_s(self._pipeline),
            wait_s=self._wait_s(self._pipeline),
            buffer_bytes=self._ring.nbytes,
        )

    def _make_room(self) -> None:
        self._ring.make_room()

    def _hand_over(self, prepared: _Work) -> Any:
        batch = prepared.batch
        assert batch is not None, "the last stage builds the batch"
        if self._transfer is not None:
            batch = self._transfer.handed_over(batch)
        else:
            self._ring.delivered(prepared.loan)
        return batch

    def _numbers(self, epoch: int) -> Ids:
        """Return the batches of this rank in an epoch, in order."""
        settings, batches = self._settings, self._store.epoch_batches(epoch)
        order = np.arange(len(batches), dtype=np.int64)
        if settings.shuffle:
            order = batch_order(len(batches), seed=settings.seed, epoch=epoch)
        return settings.share(order) + batches.start

    def _identity(self) -> dict[str, Any]:
        return {"store": self._store.plan.order_fingerprint, **self._settings.identity()}


@dataclasses.dataclass(frozen=True)
class _Source:
    """What ``from_dataset`` was given."""

    dataset: Dataset
    cache: Path
    made_into: LabelledData | SlicedData | None
    has_edges: bool  # with attributes of their own, so that batches must name them

    @property
    def labels(self) -> Ids | None:
        return self.dataset.labels if self.dataset.has_labels else None

    def seeds(self, ids: ArrayLike | None) -> Ids:
        if ids is not None:
            return checked_ids(ids, self.dataset.num_nodes)
        if isinstance(self.made_into, SlicedData) or not self.dataset.has_labels:
            return np.arange(self.dataset.num_nodes)
        return self.dataset.train


def _open_source(
    data: Any, cache: str | Path | None, form: str, opened: contextlib.ExitStack
) -> _Source:
    if form not in ("data", "edge_index", "blocks"):
        raise ConfigurationError(f'form is {form!r}; use "data", "edge_index" or "blocks"')
    if isinstance(data, str | os.PathLike):
        data = opened.enter_context(Dataset.open(Path(data)))
    if isinstance(data, Dataset):
        labels = data.labels if data.has_labels else None
        made_into = LabelledData(labels) if form == "data" else None
        folder = data.folder / "prepared" if cache is None else Path(cache)
        return _Source(data, folder, made_into, data.edge_features is not None)
    if not hasattr(data, "edge_index"):
        raise ConfigurationError(
            f"the graph is a {type(data).__name__}",
            hint="give a Dataset, its folder, or a torch_geometric.data.Data; several node types "
            "go through HeteroLoader",
        )
    if form != "data":
        raise ConfigurationError(
            f"form is {form!r}, but batches of a Data are Data", hint="ingest it, or form='data'"
        )
    folder = cache_folder() if cache is None else Path(cache)
    found = opened.enter_context(dataset_of(data, folder))
    beside = [name for name in data.edge_attrs() if name != "edge_index"]
    return _Source(found, folder, SlicedData(data), bool(beside))


def _budget_fields(budgets: Budgets | str | None) -> dict[str, Any]:
    if budgets is None:
        return {}
    if isinstance(budgets, str):
        return {"host_bytes": parse_bytes(budgets)}
    if not isinstance(budgets, Budgets):
        raise ConfigurationError(
            f"budgets is {budgets!r}", hint='write a size such as "4 GB", or give Budgets'
        )
    return dataclasses.asdict(budgets)


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


def _checked_labels(labels: Array | torch.Tensor | None, num_nodes: int) -> Array | None:
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
class _Work:
    """A batch on its way, and the number of its buffer's loan."""

    record: BatchRecord
    rows: Array | None = None
    edge_attr: Array | None = None
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
        edges: FeatureStore | None = None,
    ) -> None:
        self._features, self._ring, self._edges = features, ring, edges
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
        if self._edges is not None:
            groups.insert(2, [Stage("read rows of edges", self._read_edges)])
        if self._transfer is not None:
            groups.append([Stage("copy to the device", self._copy)])
        return groups

    def lanes(self) -> list[int]:
        """Return the threads of each group: the disk never waits between one batch and the next."""
        cold = 3 if self._edges is None else 4
        several = {1: _RECORD_READERS, cold: self._features.readers}
        return [several.get(i, 1) for i in range(len(self.groups()))]

    def stop_waiting(self) -> None:
        """Wake the stage that waits for a buffer."""
        self._ring.stop_waiting(self)

    def _fill(self, ticket: Ticket) -> None:
        if not self._started:
            for store in (self._features, self._edges):
                if store is not None:
                    store.start(ticket.batch)
            self._started = True

    def _read_record(self, ticket: Ticket) -> _Work:
        return _Work(self._features.record(ticket.batch))

    def _read_edges(self, ticket: Ticket) -> _Work:
        """Read the rows of the edges, and put them into the order of the edges."""
        work: _Work = ticket.value
        assert self._edges is not None, "the stage exists only with rows of edges"
        record = self._edges.record(work.record.number)
        rows = aligned_empty((len(record.node_ids), *self._edges.row_shape), self._edges.dtype)
        self._edges.read_cold(record, rows)
        self._edges.gather_cached(record, rows)
        work.edge_attr = np.empty((len(record.sources), *rows.shape[1:]), rows.dtype)
        gather_rows(rows, record.sources.astype(np.int64), work.edge_attr)
        return work

    def _lend(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        shape = (len(work.record.node_ids), *self._features.row_shape)
        work.rows = self._ring.lend(shape, self._features.dtype, borrower=self)
        work.loan = id(work.rows)
        return work

    def _read_cold(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        self._features.read_cold(work.record, _rows_of(work))
        return work

    def _gather(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        self._features.gather_cached(work.record, _rows_of(work))
        return work

    def _build(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        x = torch.from_numpy(_rows_of(work))
        work.batch = assemble(
            work.record, x, self._seeds, form=self._form, edge_attr=work.edge_attr
        )
        work.rows = None  # from here on the tensor alone holds the loan
        return work

    def _copy(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        assert self._transfer is not None, "the stage exists only with a transfer"
        assert work.batch is not None, "the stage before builds the batch"
        work.batch = self._transfer.copy(work.record, work.batch)
        return work


def _rows_of(work: _Work) -> Array:
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
