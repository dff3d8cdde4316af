"""``DiskLoader``: mini-batches from a packed store, prepared ahead on background threads.

Stages: read a batch's record, wait for a buffer, read its cold rows into it, copy the cached
rows, build the tensors, and copy to the device where there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, require_flag, require_one_of, require_whole
from fivefold.gnn.data.arrays import as_array
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.loading._base import (
    BatchLoader,
    LoaderOptions,
    LoaderSettings,
    LoaderStatistics,
    batch_order,
    check_dtype,
    known_options,
)
from fivefold.gnn.loading._feature_store import LEVELS, FeatureStore
from fivefold.gnn.loading._pipeline import BufferRing, Pipeline, Stage, Ticket, buffer_count
from fivefold.gnn.loading._pyg_batches import (
    SlicedData,
    labels_of,
    open_source,
    seeds_of,
)
from fivefold.gnn.loading.batch import BatchMaker, Form, MiniBatch, Records, SeedTable, checked_form
from fivefold.gnn.loading.prepare import (
    Preparation,
    Prepared,
    StoreRecipe,
    edge_weights_of,
    fanouts_of,
)
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.packing.record import BatchRecord
from fivefold.gnn.planning import Budgets, Policy
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


class DiskLoader(BatchLoader):
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
        if not isinstance(store, PackedStore | Prepared):
            raise ConfigurationError(
                f"store is a {type(store).__name__}",
                hint="give PackedStore.open(folder), or use DiskLoader.from_dataset",
            )
        packed = store if isinstance(store, Prepared) else Prepared.of_one(store, edges)
        self._stores = stores = packed.nodes
        planned = any(rows.plan.policy == "belady" for rows in stores.values())
        sizes = {"threads": threads, "memory_bytes": memory_bytes}
        order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "prefetch": prefetch}
        settings = _checked_settings({**options, **sizes}, planned=planned, **order)
        for rows in (*stores.values(), *packed.edges.values()):
            check_dtype(rows.dtype)
        if memory_bytes is None and prefetch is None:
            memory_bytes = sum(rows.plan.predicted.buffer_bytes for rows in stores.values()) or None
        places, batch_bytes = dict[str | None, int](), 0  # of the rows of each type in a buffer
        for kind, rows in stores.items():
            places[kind] = -(-batch_bytes // _ALIGNMENT) * _ALIGNMENT
            batch_bytes = places[kind] + rows.max_nodes * rows.row_bytes
        buffers = buffer_count(
            batch_bytes=batch_bytes, memory_bytes=memory_bytes, prefetch=prefetch
        )
        make = _maker(packed, labels, checked_form(form))
        features, edge_rows = self._opened(packed, settings, threads, buffers)
        super().__init__(settings, self._closing.close)
        device = settings.device
        self._stages = BatchStages(
            features=features,
            edges=edge_rows,
            ring=BufferRing(buffers, size_bytes=batch_bytes, pinned=device.type == "cuda"),
            places=places,
            unpacked=packed.unpacked,
            make=make,
            transfer=None if device.type == "cpu" else DeviceTransfer(features, device),
        )

    def _opened(
        self, packed: Prepared, settings: LoaderSettings, threads: int | None, buffers: int
    ) -> tuple[dict[str | None, FeatureStore], dict[EdgeType | None, FeatureStore]]:
        """Open a reading engine for each store of rows of nodes and of edges."""
        # Closed in this order: engines, then what from_dataset opened for them.
        self._closing = contextlib.ExitStack()
        readers = 2 if buffers >= _BUFFERS_FOR_TWO_READERS else 1
        how: dict[str, Any] = {"threads": threads, "shared": settings.world_size > 1}
        how |= settings.engine
        nodes, edges = {}, {}
        for kind, rows in packed.nodes.items():
            nodes[kind] = FeatureStore(rows, device=settings.device, readers=readers, **how)
            self._closing.callback(nodes[kind].close)
        for edge_type, rows in packed.edges.items():
            edges[edge_type] = FeatureStore(rows, **how)
            self._closing.callback(edges[edge_type].close)
        return nodes, edges

    @classmethod
    def from_dataset(  # noqa: PLR0913 - those of NeighborLoader, and what is packed
        cls,
        dataset: Any,
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]] | None = None,
        batch_size: int = 0,
        *,
        input_nodes: ArrayLike | str | tuple[str, ArrayLike | None] | None = None,
        budgets: Budgets | str | None = None,
        cache: str | Path | None = None,
        form: Literal["data", "edge_index", "blocks"] = "data",
        sampled_epochs: int = 1,
        policy: Policy = "static",
        shuffle: bool | None = None,
        seed: int = 0,
        edge_ids: bool = False,
        weight_attr: str | None = None,
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
            edge_ids: Whether batches have ``e_id``, and of a weighted data set ``edge_weight`` (4
                bytes of memory an edge); with features of edges they always do.
            weight_attr: Attribute of the edges of a ``Data`` or ``HeteroData`` by which neighbours
                are drawn, as in PyG; None: all alike. A data set has its weights itself.
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
        # All that can be wrong is looked at before anything is written.
        options = known_options(options, "DiskLoader", ("threads", "memory_bytes"))
        if fanouts is None:
            message = "fanouts are missing"
            raise ConfigurationError(message, hint="give the neighbours per hop, such as [10, 5]")
        require_whole("batch_size", batch_size)
        require_one_of(policy, get_args(Policy), f"policy is {policy!r}")
        order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "prefetch": prefetch}
        _checked_settings(options, planned=policy == "belady", **order)
        edge_ids = require_flag("edge_ids", edge_ids)
        for name, value in (("sampled_epochs", sampled_epochs), ("prefetch", prefetch)):
            require_whole(name, value)
        _budget_fields(budgets)
        with contextlib.ExitStack() as opened:
            source = open_source(
                dataset,
                cache,
                form,
                opened,
                weight_attr=weight_attr,
                fanouts=fanouts,
                input_nodes=input_nodes,
            )
            everything = isinstance(source.made_into, SlicedData)
            input_type, seeds = seeds_of(source.dataset, input_nodes, everything=everything)
            recipe = StoreRecipe(
                fanouts=fanouts_of(source.dataset, fanouts),
                batch_size=int(batch_size),
                epochs=int(sampled_epochs),
                seed=require_whole("seed", seed, least=0),
                policy=policy,
                buffer_batches=int(prefetch) + 1,
                edge_ids=edge_ids or source.has_edges,
                **_budget_fields(budgets),
            )
            prepared = Preparation(
                dataset=source.dataset,
                recipe=recipe,
                folder=source.cache,
                ids=seeds,
                input_type=input_type,
                progress=progress,
            ).run()
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
            if recipe.edge_ids and not isinstance(source.made_into, SlicedData):
                weights = edge_weights_of(source.dataset)
                stages = loader._stages
                stages.make = dataclasses.replace(stages.make, weights=weights)
            if form == "data":
                loader._made_into = source.made_into
            engines = loader._closing.pop_all()
            loader._closing.push(opened.pop_all())
            loader._closing.push(engines)
        return loader

    def _start(self, epoch: int, numbers: list[int]) -> Pipeline:
        del epoch  # the numbers say it all
        timeout_s = self._settings.timeout_s
        capacity = max(1, self._stages.ring.first_count - 1)
        return self._stages.pipeline(numbers, capacity=capacity, timeout_s=timeout_s)

    def statistics(self) -> LoaderStatistics:
        """Return counts since the loader was made."""
        stages, features = self._stages, list(self._stages.features.values())
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
            edge_bytes=sum(rows.reading.bytes_read for rows in stages.edges.values()),
            fill_bytes=filling.bytes_read,
            fill_s=filling.seconds,
            **self._times(),
            buffer_bytes=stages.ring.nbytes,
        )

    def _make_room(self) -> None:
        self._stages.ring.make_room()

    def _hand_over(self, prepared: _Work) -> Any:
        if self._stages.transfer is not None:
            return self._stages.transfer.handed_over(prepared.batch)
        self._stages.ring.delivered(prepared.loan)
        return prepared.batch

    def _numbers(self, epoch: int) -> Ids:
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


def _checked_settings(
    options: Mapping[str, Any], *, planned: bool, shuffle: bool | None, **order: Any
) -> LoaderSettings:
    """Return the settings of a loader of packed batches."""
    given = known_options(options, "DiskLoader", ("threads", "memory_bytes"))
    for name in ("threads", "memory_bytes"):
        if (value := given.pop(name, None)) is not None:
            require_whole(name, value)
    settings = LoaderSettings(shuffle=not planned if shuffle is None else shuffle, **order, **given)
    if planned:
        _check_planned(settings)
    return settings


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


def _maker(packed: Prepared, labels: Array | torch.Tensor | None, form: Form) -> BatchMaker:
    """Return what makes a batch of its records, its rows and the rows of its edges."""
    store, kind, samples = next(iter(packed.nodes.values())), packed.input_type, packed.samples
    num_nodes, edge_types = store.plan.num_nodes, tuple[EdgeType, ...]()
    if kind is not None and samples is not None:
        num_nodes, edge_types = samples.types.num_nodes[kind], tuple(samples.types.edge_types)
    if labels is not None:
        labels = as_array(labels, "labels")
        check_dtype(labels.dtype, "labels")
        if len(labels) != num_nodes:
            raise ConfigurationError(
                f"there are {len(labels)} labels and {num_nodes} nodes",
                hint="give one label per node of the graph, in the order of the node ids",
            )
    return BatchMaker(SeedTable(store.train_ids, labels), form, kind, edge_types)


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


@dataclasses.dataclass(kw_only=True)
class BatchStages:
    """The stages from the number of a batch to its tensors.

    They hold the feature stores, the ring of buffers and the labels, and not the loader, so that a
    loader can be collected while its threads still run. All types of nodes share a buffer.
    """

    features: Mapping[str | None, FeatureStore]
    edges: Mapping[EdgeType | None, FeatureStore]
    ring: BufferRing
    places: Mapping[str | None, int]
    unpacked: Mapping[str, SampleFile]
    make: BatchMaker
    transfer: DeviceTransfer | None
    _started: bool = False

    def pipeline(self, numbers: list[int], *, capacity: int, timeout_s: float) -> Pipeline:
        """Start the stages on batches, each with its number of threads.

        Buffers are lent by one thread, in order, so that the batch that comes first is never the
        one without a buffer. The disk never waits between one batch and the next.
        """
        self._started, borrower = False, object()
        self.ring.abandon()
        patience_s = sum(store.fill_patience_s for store in self.features.values())
        readers = min(store.readers for store in self.features.values())
        lend = functools.partial(self._lend, borrower=borrower)
        groups = [
            (1, [Stage("fill the caches", self._fill, patience_s=patience_s)]),
            (_RECORD_READERS, [Stage("read record", self._read_record)]),
            (1, [Stage("wait for a buffer", lend, waits=True)]),
            (readers, [Stage("read cold rows", self._read_cold)]),
            (1, [Stage("gather cached rows", self._gather), Stage("build tensors", self._build)]),
        ]
        if self.edges:
            groups.insert(2, (1, [Stage("read rows of edges", self._read_edges)]))
        if self.transfer is not None:
            groups.append((1, [Stage("copy to the device", self._copy)]))
        return Pipeline(
            iter(numbers),
            [stages for _, stages in groups],
            lanes=[threads for threads, _ in groups],
            capacity=capacity,
            timeout_s=timeout_s,
            on_close=functools.partial(self.ring.stop_waiting, borrower),
        )

    def _fill(self, ticket: Ticket) -> None:
        if not self._started:
            for store in (*self.features.values(), *self.edges.values()):
                store.start(ticket.batch)
            self._started = True

    def _read_record(self, ticket: Ticket) -> _Work:
        number = ticket.batch
        records: dict[Any, BatchRecord | SampledBatch] = {
            kind: store.record(number) for kind, store in self.features.items()
        }
        for kind, samples in self.unpacked.items():
            records[kind] = samples.batch(number)
        return _Work(number, records)

    def _read_edges(self, ticket: Ticket) -> _Work:
        """Read the rows of the edges, and put them into the order of the edges."""
        work: _Work = ticket.value
        for kind, store in self.edges.items():
            record = store.record(work.number)
            rows = aligned_empty((len(record.node_ids), *store.row_shape), store.dtype)
            store.read_cold(record, rows)
            store.gather_cached(record, rows)
            work.edge_attr[kind] = np.empty((len(record.sources), *rows.shape[1:]), rows.dtype)
            gather_rows(rows, record.sources.astype(np.int64), work.edge_attr[kind])
        return work

    def _lend(self, ticket: Ticket, *, borrower: object) -> _Work:
        work: _Work = ticket.value
        stop, counts = 0, {kind: len(work.records[kind].node_ids) for kind in self.features}
        for kind, store in self.features.items():
            stop = self.places[kind] + counts[kind] * store.row_bytes
        whole = self.ring.lend((stop,), np.dtype(np.uint8), borrower=borrower)
        for kind, store in self.features.items():
            start = self.places[kind]
            rows = whole[start : start + counts[kind] * store.row_bytes].view(store.dtype)
            work.rows[kind] = rows.reshape(counts[kind], *store.row_shape)
        work.loan = id(whole)
        work.buffer = torch.from_numpy(whole)  # it, and what is made of it, keeps the loan
        return work

    def _read_cold(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        for kind, store in self.features.items():
            store.read_cold(work.packed(kind), work.rows[kind])
        return work

    def _gather(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        for kind, store in self.features.items():
            store.gather_cached(work.packed(kind), work.rows[kind])
        return work

    def _build(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        assert work.buffer is not None, "a stage before lends the buffer"
        x = {}
        for kind, rows in work.rows.items():
            start = self.places[kind]
            part = work.buffer[start : start + rows.nbytes]
            x[kind] = part.view(torch.from_numpy(rows[:0]).dtype).view(rows.shape)
        work.batch = self.make(work.records, x, work.edge_attr)
        work.buffer, work.rows = None, {}  # from here on the tensors alone hold the loan
        return work

    def _copy(self, ticket: Ticket) -> _Work:
        work: _Work = ticket.value
        assert self.transfer is not None, "the stage exists only with a transfer"
        work.batch = self.transfer.copy(work.records, work.batch)
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
