"""``DiskLoader``: mini-batches from a packed store, prepared ahead on background threads.

It puts the parts together: the order of the batches (pure), the pipeline with its stages, the
ring of buffers, the four-level feature store. Stages: read a batch's record, wait for a buffer,
read its cold rows into it, copy the cached rows, build the tensors, and copy to the device where
there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, require_whole
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.loading._base import (
    BatchLoader,
    LoaderOptions,
    LoaderSettings,
    LoaderStatistics,
    batch_order,
    check_dtype,
)
from fivefold.gnn.loading._feature_store import LEVELS, FeatureStore
from fivefold.gnn.loading._pipeline import BufferRing, Pipeline, Stage, Ticket, buffer_count
from fivefold.gnn.loading._pyg_batches import labels_of, open_source
from fivefold.gnn.loading.batch import (
    Form,
    Maker,
    MiniBatch,
    Records,
    SeedTable,
    batch_maker,
    checked_form,
)
from fivefold.gnn.loading.prepare import Prepared, StoreRecipe, prepare
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.packing.record import BatchRecord
from fivefold.gnn.planning import Budgets
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.sampling.batches import EdgeType, SampledBatch
from fivefold.gnn.storage.pages import Array, Ids, aligned_empty, gather_rows
from fivefold.gnn.storage.reader import ReadStatistics
from fivefold.units import parse_bytes

# Two batches are read side by side where a third one can be at work in memory: the disk does not
# idle between one and the next. With two buffers they would only wait for each other.
_BUFFERS_FOR_TWO_READERS = 3
_ALIGNMENT = 64  # of each type's rows in the buffer of a batch
_RECORD_READERS = 2  # one alone, beside those of rows, gets too little of the disk to keep up


class DiskLoader(BatchLoader[Any]):  # of MiniBatch, HeteroMiniBatch, or of PyG's classes
    """Iterate over the mini-batches of a packed store, in the shape of PyG's loaders.

    Every iteration is one epoch; the epochs that were sampled are used in turn. After a whole
    epoch the next one begins. Leaving an epoch early and iterating again starts it over; to go on
    in its middle, load the state that ``state_dict`` gave.

    Tensors of a batch are copy-free views of the loader's buffers. A buffer is used again only
    when nothing refers to its batch any more, so batches may be kept, at the cost of memory.

    Data parallel training: all ranks open the same store and pass their ``rank`` and the
    ``world_size``. Each batch goes to one rank, all ranks make the same number of steps. Ranks of
    one host have one cache in host memory together; buffers are per rank: plan with the memory of
    one.

    Args:
        store: Packed store, or what ``from_dataset`` prepares of a graph of several types.
        edges: Packed store of the rows of edges (``from_dataset`` makes it); None without
            ``edge_attr``.
        labels: Label of every node (of the type of the seeds); None for batches without ``y``.
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
        store: PackedStore | Prepared,
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
        packed = store if isinstance(store, Prepared) else Prepared.of_one(store, edges)
        stores = packed.nodes
        planned = any(rows.plan.policy == "belady" for rows in stores.values())
        settings = LoaderSettings(
            shuffle=not planned if shuffle is None else shuffle,
            seed=seed,
            prefetch=prefetch,
            **options,
        )
        self._stores = stores
        if planned:
            _check_planned(settings)
        for rows in (*stores.values(), *packed.edges.values()):
            check_dtype(rows.dtype)
        if memory_bytes is None and prefetch is None:
            memory_bytes = sum(rows.plan.predicted.buffer_bytes for rows in stores.values()) or None
        places = _places_in_buffer(stores)
        batch_bytes = max(place.stop for place in places.values())
        self._buffers = buffer_count(
            batch_bytes=batch_bytes, memory_bytes=memory_bytes, prefetch=prefetch
        )
        self._open_engines(packed, settings, threads)
        super().__init__(settings, self._closing.close)
        pinned = settings.device.type == "cuda"
        self._ring = BufferRing(self._buffers, size_bytes=batch_bytes, pinned=pinned)
        self._transfer: DeviceTransfer | None = None
        if settings.device.type != "cpu":
            self._transfer = DeviceTransfer(self._features, settings.device)
        self._stages = functools.partial(
            BatchStages,
            self._features,
            self._ring,
            places=places,
            unpacked=packed.unpacked,
            build=_maker(packed, labels, checked_form(form)),
            transfer=self._transfer,
            edges=self._edges,
        )

    def _open_engines(
        self, packed: Prepared, settings: LoaderSettings, threads: int | None
    ) -> None:
        """Open a reading engine for each store of rows of nodes and of edges."""
        # Closed in this order: engines, then what from_dataset opened for them.
        self._closing = contextlib.ExitStack()
        readers = 2 if self._buffers >= _BUFFERS_FOR_TWO_READERS else 1
        how: dict[str, Any] = {"threads": threads, "shared": settings.world_size > 1}
        how |= settings.engine
        self._features: dict[str | None, FeatureStore] = {}
        self._edges: dict[EdgeType | None, FeatureStore] = {}
        for kind, rows in packed.nodes.items():
            self._features[kind] = FeatureStore(
                rows, device=settings.device, readers=readers, **how
            )
            self._closing.callback(self._features[kind].close)
        for edge_type, rows in packed.edges.items():
            self._edges[edge_type] = FeatureStore(rows, **how)
            self._closing.callback(self._edges[edge_type].close)

    @classmethod
    def from_dataset(  # noqa: PLR0913 - those of NeighborLoader, and what is packed
        cls,
        dataset: Any,
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        batch_size: int,
        *,
        input_nodes: ArrayLike | str | tuple[str, ArrayLike | None] | None = None,
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

        It takes the place of PyG's ``NeighborLoader(data, num_neighbors, batch_size=...)``, of one
        type of nodes and edges (``Data``) or of several (``HeteroData``). What
        is in the folder is known by a hash of the data and of all options that decide it: other
        data or options are prepared beside it, and a warning says what differs. A call that was
        killed goes on where it was; of several processes one prepares, the others wait for it.

        Args:
            dataset: ``Dataset`` or ``HeteroDataset``, the folder of one, or a ``Data`` or
                ``HeteroData`` of PyG. The features and edges of PyG's objects are written to the
                cache once; their other attributes are sliced from memory, as PyG does it.
            fanouts: Neighbours per hop, -1 for all: ``num_neighbors`` of PyG; of several types
                for all edge types alike or by edge type.
            batch_size: Seeds per batch.
            input_nodes: Seeds as ids or a mask; None: the training nodes of a data set, of a
                ``Data`` all nodes. Of several types a node type, or a pair of it and of these.
            budgets: What may be taken; a text such as "4 GB" is host memory, and None 1 GB of it,
                each with four fifths of the free disk.
            cache: Folder of what is made; None: ``prepared`` inside the data set's folder, for a
                ``Data`` below the user's cache folder (``XDG_CACHE_HOME``).
            form: "data" yields PyG's ``Data`` or ``HeteroData``, "edge_index" and "blocks" a
                ``MiniBatch``; of several types "edge_index" a ``HeteroMiniBatch``.
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
            source = open_source(dataset, cache, form, opened)
            input_type, seeds = source.seeds(input_nodes)
            recipe = StoreRecipe(
                fanouts=source.fanouts(fanouts),
                batch_size=require_whole("batch_size", batch_size),
                epochs=require_whole("sampled_epochs", sampled_epochs),
                seed=require_whole("seed", seed, least=0),
                policy=policy,
                buffer_batches=require_whole("prefetch", prefetch) + 1,
                edge_ids=edge_ids or source.has_edges,
                **_budget_fields(budgets),
            )
            prepared = prepare(
                source.dataset,
                recipe,
                source.cache,
                ids=seeds,
                input_type=input_type,
                progress=progress,
            )
            opened.callback(prepared.close)
            loader = cls(
                prepared,
                labels=labels_of(source.dataset, input_type) if form != "data" else None,
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
        stages = self._stages()
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
        features, edges = list(self._features.values()), list(self._edges.values())
        reading = sum((store.reading for store in features), ReadStatistics())
        filling = sum((store.filling for store in features), ReadStatistics())
        return LoaderStatistics(
            batches=self._delivered,
            rows={level: sum(store.rows[level] for store in features) for level in LEVELS},
            row_bytes=features[0].row_bytes if len(features) == 1 else 0,
            requests=reading.requests,
            bytes_read=reading.bytes_read,
            cold_bytes=reading.bytes_used,
            record_bytes=sum(store.record_bytes for store in features),
            edge_bytes=sum(store.reading.bytes_read for store in edges),
            fill_bytes=filling.bytes_read,
            fill_s=filling.seconds,
            stage_s=self._stage_s(self._pipeline),
            wait_s=self._wait_s(self._pipeline),
            buffer_bytes=self._ring.nbytes,
        )

    def _make_room(self) -> None:
        self._ring.make_room()

    def _hand_over(self, prepared: _Work) -> Any:
        batch = prepared.batch
        if self._transfer is not None:
            batch = self._transfer.handed_over(batch)
        else:
            self._ring.delivered(prepared.loan)
        return batch

    def _numbers(self, epoch: int) -> Ids:
        """Return the batches of this rank in an epoch, in order."""
        settings, store = self._settings, next(iter(self._stores.values()))
        batches = store.epoch_batches(epoch)
        order = np.arange(len(batches), dtype=np.int64)
        if settings.shuffle:
            order = batch_order(len(batches), seed=settings.seed, epoch=epoch)
        return settings.share(order) + batches.start

    def _identity(self) -> dict[str, Any]:
        stores = " ".join(store.plan.order_fingerprint for store in self._stores.values())
        return {"store": stores, **self._settings.identity()}


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


def _check_planned(settings: LoaderSettings) -> None:
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


def _places_in_buffer(stores: Mapping[str | None, PackedStore]) -> dict[str | None, slice]:
    """Return where the rows of each node type begin in a batch's buffer, and most end."""
    places, stop = {}, 0
    for kind, store in stores.items():
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        stop = start + store.max_nodes * store.row_bytes
        places[kind] = slice(start, stop)
    return places


def _maker(packed: Prepared, labels: Array | torch.Tensor | None, form: Form) -> Maker:
    """Return what makes a batch of its records, its rows and the rows of its edges."""
    store, kind, samples = next(iter(packed.nodes.values())), packed.input_type, packed.samples
    if kind is None or samples is None:
        seeds = SeedTable(store.train_ids, _checked_labels(labels, store.plan.num_nodes))
        return batch_maker(seeds, form, None, ())
    types = samples.types
    seeds = SeedTable(store.train_ids, _checked_labels(labels, types.num_nodes[kind]))
    return batch_maker(seeds, form, kind, types.edge_types)


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


@dataclasses.dataclass(slots=True)
class _Work:
    """A batch on its way, and the number of its buffer's loan."""

    number: int
    records: dict[Any, BatchRecord | SampledBatch]
    buffer: torch.Tensor | None = None
    rows: dict[Any, Array] = dataclasses.field(default_factory=dict)
    edge_attr: dict[Any, Array] = dataclasses.field(default_factory=dict)
    batch: Any = None
    loan: int = 0

    def packed(self, kind: str | None) -> BatchRecord:
        """Return the record of a node type that has a store."""
        record = self.records[kind]
        assert isinstance(record, BatchRecord), "stores hold records"
        return record


class BatchStages:
    """The stages from the number of a batch to its tensors.

    They hold the feature stores, the ring of buffers and the labels, and not the loader, so that a
    loader can be collected while its threads still run. All types of nodes share a buffer.
    """

    def __init__(
        self,
        features: Mapping[str | None, FeatureStore],
        ring: BufferRing,
        *,
        places: Mapping[str | None, slice],
        unpacked: Mapping[str, SampleFile],
        build: Maker,
        transfer: DeviceTransfer | None,
        edges: Mapping[EdgeType | None, FeatureStore],
    ) -> None:
        self._features, self._ring, self._edges = features, ring, edges
        self._places, self._unpacked = places, unpacked
        self._make, self._transfer = build, transfer
        self._dtypes = {
            kind: torch.from_numpy(np.empty(0, store.dtype)).dtype
            for kind, store in features.items()
        }
        self._started = False

    def groups(self) -> list[list[Stage]]:
        """Return the stages of each group of threads.

        Buffers are lent by one thread, in order, so that the batch that comes first is never the
        one without a buffer.
        """
        patience_s = sum(store.fill_patience_s for store in self._features.values())
        groups = [
            [Stage("fill the caches", self._fill, patience_s=patience_s)],
            [Stage("read record", self._read_record)],
            [Stage("wait for a buffer", self._lend, waits=True)],
            [Stage("read cold rows", self._read_cold)],
            [Stage("gather cached rows", self._gather), Stage("build tensors", self._build)],
        ]
        if self._edges:
            groups.insert(2, [Stage("read rows of edges", self._read_edges)])
        if self._transfer is not None:
            groups.append([Stage("copy to the device", self._copy)])
        return groups

    def lanes(self) -> list[int]:
        """Return the threads of each group: the disk never waits between one batch and the next."""
        cold = 4 if self._edges else 3
        readers = min(store.readers for store in self._features.values())
        several = {1: _RECORD_READERS, cold: readers}
        return [several.get(i, 1) for i in range(len(self.groups()))]

    def stop_waiting(self) -> None:
        """Wake the stage that waits for a buffer."""
        self._ring.stop_waiting(self)

    def _fill(self, ticket: Ticket) -> None:
        if not self._started:
            for store in (*self._features.values(), *self._edges.values()):
                store.start(ticket.batch)
            self._started = True

    def _read_record(self, ticket: Ticket) -> _Work:
        number = ticket.batch
        records: dict[Any, BatchRecord | SampledBatch] = {
            kind: store.record(number) for kind, store in self._features.items()
        }
        for kind, samples in self._unpacked.items():
            records[kind] = samples.batch(number)
        return _Work(number, records)

    def _read_edges(self, ticket: Ticket) -> _Work:
        """Read the rows of the edges, and put them into the order of the edges."""
        work: _Work = ticket.value
        for kind, store in self._edges.items():
            record = store.record(work.number)
            rows = aligned_empty((len(record.node_ids), *store.row_shape), store.dtype)
            store.read_cold(record, rows)
            store.gather_cached(record, rows)
            work.edge_attr[kind] = np.empty((len(record.sources), *rows.shape[1:]), rows.dtype)
            gather_rows(rows, record.sources.astype(np.int64), work.edge_attr[kind])
        return work

    def _lend(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        places, stop = {}, 0
        for kind, store in self._features.items():
            start = self._places[kind].start
            stop = start + len(work.records[kind].node_ids) * store.row_bytes
            places[kind] = slice(start, stop)
        whole = self._ring.lend((stop,), np.dtype(np.uint8), borrower=self)
        for kind, place in places.items():
            store = self._features[kind]
            rows = whole[place].view(store.dtype)
            work.rows[kind] = rows.reshape(len(work.records[kind].node_ids), *store.row_shape)
        work.loan = id(whole)
        work.buffer = torch.from_numpy(whole)  # it, and what is made of it, keeps the loan
        return work

    def _read_cold(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        for kind, store in self._features.items():
            store.read_cold(work.packed(kind), work.rows[kind])
        return work

    def _gather(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        for kind, store in self._features.items():
            store.gather_cached(work.packed(kind), work.rows[kind])
        return work

    def _build(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        assert work.buffer is not None, "a stage before lends the buffer"
        x = {}
        for kind, rows in work.rows.items():
            start = self._places[kind].start
            part = work.buffer[start : start + rows.nbytes].view(self._dtypes[kind])
            x[kind] = part.view(rows.shape)
        work.batch = self._make(work.records, x, work.edge_attr)
        work.buffer, work.rows = None, {}  # from here on the tensors alone hold the loan
        return work

    def _copy(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        assert self._transfer is not None, "the stage exists only with a transfer"
        work.batch = self._transfer.copy(work.records, work.batch)
        return work


class DeviceTransfer:
    """Copy batches to ``device`` and add the rows of the cache that lives there.

    The copy runs on a stream of its own beside the training loop's. The thread waits for the copy
    before it lets go of the pinned buffer, and the loop's stream is told that it uses the tensors,
    so that the allocator does not hand their memory out too early. Without CUDA the same code runs
    with no streams.
    """

    def __init__(self, stores: Mapping[str | None, FeatureStore], device: torch.device) -> None:
        self._stores, self._device = stores, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, records: Records, batch: Any) -> Any:
        """Return the batch on the device, complete, when the copies are done."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if isinstance(batch, MiniBatch):
                batch = dataclasses.replace(batch, x=self._rows(None, records, batch.x))
            else:
                x = {kind: self._rows(kind, records, rows) for kind, rows in batch.x_dict.items()}
                batch = dataclasses.replace(batch, x_dict=x)
            there = batch.to(self._device, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return there

    def _rows(self, kind: str | None, records: Records, rows: torch.Tensor) -> torch.Tensor:
        """Copy the rows of a node type, and add those that are there."""
        record = records[kind]
        assert isinstance(record, BatchRecord), "rows come from stores"
        x = torch.empty_like(rows, device=self._device)
        # Rows of the device cache lie behind the seeds and are not in host memory.
        cached = len(record.device_slots)
        among_seeds = int((record.device_destinations < record.batch_size).sum())
        rest = record.batch_size + cached - among_seeds
        for part in (slice(0, record.batch_size), slice(rest, None)):
            x[part].copy_(rows[part], non_blocking=True)
        self._stores[kind].fill_device(record, x)
        return x

    def handed_over(self, batch: Any) -> Any:
        """Tie the batch to the stream of the caller, who will use it there."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            for tensor in batch.tensors():
                tensor.record_stream(current)
        return batch
