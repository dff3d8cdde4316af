"""Loaders that sample mini-batches when they are asked for, from features as they lie.

``OnlineLoader`` is for validation and test ids, for training that fits in memory, and as the
yardstick of packed training: the same batches, without any packing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError
from fivefold.gnn.data import Dataset
from fivefold.gnn.data.arrays import as_array
from fivefold.gnn.loading._base import (
    Batch,
    BatchLoader,
    LoaderOptions,
    LoaderSettings,
    LoaderStatistics,
    checked_ids,
)
from fivefold.gnn.loading._pipeline import Pipeline, Stage, Ticket
from fivefold.gnn.loading._pyg_batches import LabelledData
from fivefold.gnn.loading.batch import (
    MiniBatch,
    SeedTable,
    assemble,
    checked_form,
)
from fivefold.gnn.loading.online_cache import CachePolicy, OnlineCache
from fivefold.gnn.sampling import Adjacency, NeighborSampler
from fivefold.gnn.sampling.batches import (
    SampledBatch,
    as_count,
    epoch_batches,
)
from fivefold.gnn.sampling.temporal import TemporalSampler, TemporalStrategy
from fivefold.gnn.storage import Container, RowReader
from fivefold.gnn.storage.pages import Array, Ids, aligned_empty, gather_rows
from fivefold.gnn.storage.reader import Backend, ReadStatistics

_TABLE_BYTES_PER_NODE, _TABLE_BYTES_PER_SLOT = 4, 17  # of a cache that learns


class MemoryRows:
    """Rows of an array [nodes, dim] in memory."""

    def __init__(self, features: Array) -> None:
        self._features = features
        self.served = {"memory": 0}
        self.row_shape: tuple[int, ...] = features.shape[1:]
        self.dtype: np.dtype[Any] = features.dtype

    def read(self, node_ids: Ids, out: Array) -> ReadStatistics:
        """Put the rows of ``node_ids`` into ``out``, in their order."""
        gather_rows(self._features, node_ids, out)
        self.served["memory"] += len(node_ids)
        return ReadStatistics()

    def close(self) -> None:
        """Do nothing: there are no files."""


class DiskRows:
    """Rows of section ``x`` of a feature file, read in ascending order."""

    def __init__(
        self, container: Container, *, backend: Backend = "auto", verify: bool = True
    ) -> None:
        section = container.sections["x"]
        self._reader = RowReader(container, "x", backend=backend, verify=verify)
        self.row_shape: tuple[int, ...] = tuple(section.shape[1:])
        self.row_bytes, self.num_rows = section.row_bytes, section.num_rows
        self.dtype: np.dtype[Any] = np.dtype(section.dtype)
        self.served = {"file": 0}

    def read(self, node_ids: Ids, out: Array, *, places: Ids | None = None) -> ReadStatistics:
        """Put the rows of distinct ``node_ids`` into ``out``, in their order or at ``places``."""
        order = np.argsort(node_ids, kind="stable")
        self.served["file"] += len(node_ids)
        return self._reader.read_rows(
            node_ids[order], out, destinations=order if places is None else places[order]
        )

    def read_any(self, ids: Ids) -> tuple[Array, ReadStatistics]:
        """Return the rows of ids that may repeat, each read once, and what that cost."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        repeated = len(distinct) < len(ids)
        wanted = distinct if repeated else ids
        out = np.empty((len(wanted), *self.row_shape), self.dtype)
        cost = self.read(wanted, out)
        return out[inverse] if repeated else out, cost

    def close(self) -> None:
        """Close the reading engine."""
        self._reader.close()


class CachedRows:
    """Rows of a file behind a cache in memory that learns which ones come again.

    The cache's own tables count as well: 4 bytes per node, and 17 per row that is kept.
    """

    def __init__(self, rows: DiskRows, *, cache_bytes: int, policy: CachePolicy) -> None:
        tables_bytes = _TABLE_BYTES_PER_NODE * rows.num_rows
        slots = (cache_bytes - tables_bytes) // (rows.row_bytes + _TABLE_BYTES_PER_SLOT)
        if slots < 1:
            least = tables_bytes + rows.row_bytes + _TABLE_BYTES_PER_SLOT
            raise ConfigurationError(
                f"cache_bytes is {cache_bytes}, which holds no row beside the cache's own tables",
                hint=f"give more than {least} bytes, or 0 for no cache",
            )
        self._rows = rows
        self._cache = OnlineCache(rows.num_rows, num_slots=slots, policy=policy)
        self._kept = aligned_empty((self._cache.num_slots, *rows.row_shape), rows.dtype)
        self.row_shape, self.dtype = rows.row_shape, rows.dtype
        self._hits = 0

    @property
    def served(self) -> dict[str, int]:
        """Return the rows that each level served."""
        return {"host": self._hits, **self._rows.served}

    def read(self, node_ids: Ids, out: Array) -> ReadStatistics:
        """Put the rows of distinct ``node_ids`` into ``out``, in their order."""
        slots = self._cache.lookup(node_ids)
        hits, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        gather_rows(self._kept, slots[hits].astype(np.int64), out, destinations=hits)
        self._hits += len(hits)
        if not len(missing):
            return ReadStatistics()
        reading = self._rows.read(node_ids[missing], out, places=missing)
        entered = self._cache.admit(node_ids[missing])
        kept = np.flatnonzero(entered >= 0)
        gather_rows(out, missing[kept], self._kept, destinations=entered[kept].astype(np.int64))
        return reading

    def close(self) -> None:
        """Close the reading engine."""
        self._rows.close()


def open_rows(
    container: Container,
    features: Any,
    *,
    backend: Backend,
    verify: bool,
    cache_bytes: int = 0,
    cache_policy: CachePolicy = "lru",
) -> CachedRows | DiskRows | MemoryRows:
    """Return the rows named by ``features``: "disk", "memory" (read once) or an array."""
    if not isinstance(features, str):
        in_memory, num_nodes = as_array(features, "features"), container.section("x").num_rows
        if in_memory.ndim != 2 or len(in_memory) != num_nodes or in_memory.dtype.kind not in "iufb":
            raise ConfigurationError(
                f"features have dtype {in_memory.dtype} and shape {list(in_memory.shape)} for "
                f"{num_nodes} nodes",
                hint="give one row of numbers per node, in the order of the node ids",
            )
        features, in_memory = "memory", np.ascontiguousarray(in_memory)
    elif features == "memory":
        in_memory = container.read("x")
    elif features != "disk":
        raise ConfigurationError(
            f"features is {features!r}", hint='use "disk", "memory" or an array'
        )
    if cache_policy not in {"lru", "sieve"}:
        raise ConfigurationError(f"cache_policy is {cache_policy!r}", hint='use "lru" or "sieve"')
    if as_count(cache_bytes, "cache_bytes", least=0) and features == "memory":
        raise ConfigurationError(
            f"cache_bytes is {cache_bytes}, but all rows are in memory",
            hint='leave it out, or take features="disk"',
        )
    if features == "memory":
        return MemoryRows(in_memory)
    on_disk = DiskRows(container, backend=backend, verify=verify)
    if not cache_bytes:
        return on_disk
    return CachedRows(on_disk, cache_bytes=cache_bytes, policy=cache_policy)


class SampledLoader(BatchLoader[Batch]):
    """A loader of the batches that an epoch's seeds make, in order or shuffled.

    Threads hold the stages and what these need, not the loader, so that it can be collected.
    """

    def __init__(
        self, ids: Ids, batch_size: int, settings: LoaderSettings, release: Callable[[], None]
    ) -> None:
        super().__init__(settings, release)
        self._prefetch = as_count(settings.prefetch, "prefetch")
        self._ids, self._batch_size = ids, as_count(batch_size, "batch_size")
        self._length(0)  # an impossible rank is refused here and not in the first epoch

    def _length(self, epoch: int) -> int:
        del epoch  # all are of one length
        return len(self._numbers())

    def _numbers(self) -> Ids:
        return self._settings.share(np.arange(math.ceil(len(self._ids) / self._batch_size)))

    def _epoch_seeds(self, epoch: int) -> Sequence[Ids]:
        size = self._batch_size
        if self._settings.shuffle:
            seed = self._settings.seed
            return epoch_batches(self._ids, batch_size=size, seed=seed, epoch=epoch)
        return [self._ids[i : i + size] for i in range(0, len(self._ids), size)]

    def _pipeline_of(self, stages: Sequence[Stage], first: int) -> Pipeline:
        """Run the batches from place ``first`` on through the stages, a thread for each."""
        return Pipeline(
            iter(self._numbers()[first:].tolist()),
            [[stage] for stage in stages],
            capacity=self._prefetch,
            timeout_s=self._settings.timeout_s,
        )


class Seeds(Protocol):
    """Seeds that are links or have times: which nodes they need, what they add to a batch."""

    name: str  # of links, times and random pairs, for resuming

    def nodes(self, chosen: Ids, *, epoch: int, batch: int) -> Ids:
        """Return the nodes of a batch of seeds; each once where they have no times."""
        ...

    def times(self, chosen: Ids) -> Array | None:
        """Return the time of each of these nodes."""
        ...

    def add(self, made: MiniBatch, chosen: Ids, *, epoch: int, batch: int) -> MiniBatch:
        """Return the batch with what belongs to its seeds."""
        ...


class _TimedSeeds:
    """Nodes, each with the latest time that its neighbourhood may show."""

    def __init__(self, ids: Ids, times: Array, labels: Array | None) -> None:
        self._ids, self._times, self._labels = ids, times, labels
        self.name = f"{name_of_ids(ids)} at {zlib.crc32(times.tobytes()):08x}"

    def nodes(self, chosen: Ids, *, epoch: int, batch: int) -> Ids:
        """Return the ids."""
        del epoch, batch  # nothing here is drawn
        return self._ids[chosen]

    def times(self, chosen: Ids) -> Array:
        """Return their times."""
        return self._times[chosen]

    def add(self, made: MiniBatch, chosen: Ids, *, epoch: int, batch: int) -> MiniBatch:
        """Return the batch with the labels and places of its seeds."""
        del epoch, batch
        y = None if self._labels is None else torch.from_numpy(self._labels[self._ids[chosen]])
        device = made.x.device
        places = torch.from_numpy(chosen).to(device)
        return dataclasses.replace(made, input_id=places, y=None if y is None else y.to(device))


@dataclasses.dataclass
class ReadingCount:
    """Counts of all reads so far; not the loader's own, so that its threads need not hold it."""

    total: ReadStatistics = dataclasses.field(default_factory=ReadStatistics)
    edges: ReadStatistics = dataclasses.field(default_factory=ReadStatistics)


class OnlineLoader(SampledLoader[Any]):  # of MiniBatch, or of Data of PyG
    """Sample and gather mini-batches on the fly, a few batches ahead of the training loop.

    Iterating yields the batches of the current epoch; after a whole epoch the next one begins,
    with other samples and, with ``shuffle``, another order of ids.

    Args:
        dataset: Dataset that holds topology, features and labels.
        ids: Seed node ids, distinct, or a mask over all nodes.
        fanouts: Neighbours per hop, -1 for all.
        batch_size: Seeds per batch; the last batch of an epoch may be smaller.
        topology: Adjacency to sample from; None opens the dataset's.
        features: "disk" reads each batch's rows from the feature file, "memory" loads the file
            first, an array [nodes, dim] serves rows itself.
        cache_bytes: Memory of a cache of rows from disk that learns which ones come again, its
            tables included; 0 for none.
        cache_policy: "lru" keeps what was used last, "sieve" what was used again.
        shuffle: Put the ids in a new random order every epoch.
        resample: Draw other neighbours every epoch; False repeats the draws of epoch 0.
        seed: Seed of order and samples.
        edge_ids: Whether batches have ``e_id``; with features of edges they always do.
        form: "edge_index", "blocks" for layered models, or "data" for PyG's ``Data``.
        prefetch: Batches that are prepared ahead.
        node_time: ``[nodes]``, when each node came into being: then only what is not later than a
            seed is sampled, each seed has a tree of its own, and seeds may stand several times.
        edge_time: ``[edges]``, in place of it when each edge came into being, by ``e_id``.
        input_time: ``[seeds]``, the latest time that each seed may see; None: its node's.
        temporal_strategy: "uniform" draws among what is early enough, "last" takes the latest.
        options: Those that all loaders take, as for ``DiskLoader``: device, rank, world_size,
            remainder, backend, verify, timeout_s.

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
        topology: Adjacency | None = None,
        features: Literal["disk", "memory"] | Array = "disk",
        cache_bytes: int = 0,
        cache_policy: CachePolicy = "lru",
        shuffle: bool = False,
        resample: bool = True,
        seed: int = 0,
        edge_ids: bool = False,
        form: Literal["edge_index", "blocks", "data"] = "edge_index",
        prefetch: int = 2,
        node_time: ArrayLike | None = None,
        edge_time: ArrayLike | None = None,
        input_time: ArrayLike | None = None,
        temporal_strategy: TemporalStrategy = "uniform",
        **options: Unpack[LoaderOptions],
    ) -> None:
        settings = LoaderSettings(shuffle=shuffle, seed=seed, prefetch=prefetch, **options)
        self._form = checked_form("edge_index" if form == "data" else form)
        self._resample = resample
        timed = node_time is not None or edge_time is not None
        labels = dataset.labels if dataset.has_labels else None
        seeds = checked_ids(ids, dataset.num_nodes, distinct=not timed)
        self._seeds = SeedTable(seeds, labels)
        if topology is None:
            topology = dataset.topology()
        carried = edge_ids or dataset.edge_features is not None
        self._links: Seeds | None = None
        self._sampler: NeighborSampler | TemporalSampler
        if timed:
            self._sampler = TemporalSampler(
                topology,
                fanouts,
                node_time=node_time,
                edge_time=edge_time,
                strategy=temporal_strategy,
                seed=seed,
                edge_ids=carried,
            )
            if len(seeds) or input_time is not None:  # a loader of links has no such seeds
                times = self._sampler.times_of(seeds, input_time)
                self._links = _TimedSeeds(seeds, times, labels)
                seeds = np.arange(len(seeds))
        elif input_time is not None or temporal_strategy != "uniform":
            message = "input_time and temporal_strategy need times of nodes or edges"
            raise ConfigurationError(message, hint="give node_time or edge_time too")
        else:
            self._sampler = NeighborSampler(topology, fanouts, seed=seed, edge_ids=carried)
        _check_topology(self._sampler.topology, dataset)
        self._read = ReadingCount()
        opened = self._open_rows(dataset, features, cache_bytes, cache_policy, settings)
        super().__init__(seeds, batch_size, settings, opened.close)
        if form == "data":
            self._made_into = LabelledData(dataset)

    def _open_rows(
        self,
        dataset: Dataset,
        features: Literal["disk", "memory"] | Array,
        cache_bytes: int,
        cache_policy: CachePolicy,
        settings: LoaderSettings,
    ) -> contextlib.ExitStack:
        """Open the rows of nodes and of edges; return the stack that closes them."""
        with contextlib.ExitStack() as opened:
            self._rows = open_rows(
                dataset.features,
                features,
                cache_bytes=cache_bytes,
                cache_policy=cache_policy,
                **settings.engine,
            )
            opened.callback(self._rows.close)
            self._edge_rows: DiskRows | None = None
            if dataset.edge_features is not None:
                self._edge_rows = DiskRows(dataset.edge_features, **settings.engine)
                opened.callback(self._edge_rows.close)
            return opened.pop_all()

    def _start(self, epoch: int, first: int) -> Pipeline:
        seeds, reading, drawn = self._epoch_seeds(epoch), self._read, epoch * self._resample
        sampler, rows, device = self._sampler, self._rows, self._settings.device
        table, form, edge_rows = self._seeds, self._form, self._edge_rows
        links = self._links

        def sample(ticket: Ticket) -> SampledBatch:
            number, chosen = ticket.batch, seeds[ticket.batch]
            nodes = chosen if links is None else links.nodes(chosen, epoch=drawn, batch=number)
            if isinstance(sampler, NeighborSampler):
                return sampler.sample(nodes, epoch=drawn, batch=number)
            limits = None if links is None else links.times(chosen)
            assert limits is not None, "whoever sets seeds gives their times"
            return sampler.sample(nodes, limits, epoch=drawn, batch=number)

        def read(ticket: Ticket) -> tuple[SampledBatch, Array]:
            sampled: SampledBatch = ticket.value
            ids, places = sampled.node_ids, None
            if sampled.trees is not None:  # a node may be in several
                ids, places = np.unique(ids, return_inverse=True)
            out = np.empty((len(ids), *rows.row_shape), rows.dtype)
            reading.total += rows.read(ids, out)
            return sampled, out if places is None else out[places]

        def build(ticket: Ticket) -> MiniBatch:
            sampled, out = ticket.value
            attr = None
            if edge_rows is not None and sampled.edge_ids is not None:
                attr, cost = edge_rows.read_any(sampled.edge_ids)
                reading.edges += cost
            x = torch.from_numpy(out)
            if links is None:
                return assemble(sampled, x, table, form=form, edge_attr=attr).to(device)
            ends = SeedTable(sampled.seeds, None)
            made = assemble(sampled, x, ends, form=form, edge_attr=attr).to(device)
            chosen = seeds[ticket.batch]
            made = links.add(made, chosen, epoch=drawn, batch=ticket.batch)
            limits = links.times(chosen)
            if limits is None or sampled.trees is None:
                return made
            of_time = {
                "seed_time": torch.from_numpy(limits),
                "batch": torch.from_numpy(sampled.trees),
            }
            return dataclasses.replace(made, links={**(made.links or {}), **of_time}).to(device)

        stages = [Stage("sample", sample), Stage("read rows", read), Stage("build tensors", build)]
        return self._pipeline_of(stages, first)

    def _identity(self) -> dict[str, Any]:
        return {
            "topology": self._sampler.topology.fingerprint,
            "fanouts": list(self._sampler.fanouts),
            "ids": name_of_ids(self._ids),
            "batch_size": self._batch_size,
            "resample": self._resample,
            **({} if self._links is None else {"links": self._links.name}),
            **self._settings.identity(),
        }

    def statistics(self) -> LoaderStatistics:
        """Return counts since the loader was made; rows come from "file", "memory" or "host"."""
        shape, total = self._rows.row_shape, self._read.total
        return LoaderStatistics(
            batches=self._delivered,
            rows=dict(self._rows.served),
            row_bytes=math.prod(shape) * self._rows.dtype.itemsize,
            requests=total.requests,
            bytes_read=total.bytes_read,
            cold_bytes=total.bytes_used,
            edge_bytes=self._read.edges.bytes_read,
            stage_s=self._stage_s(self._pipeline),
            wait_s=self._wait_s(self._pipeline),
        )


def _check_topology(topology: Adjacency, dataset: Dataset) -> None:
    """Refuse a topology of another graph."""
    if topology.num_nodes != dataset.num_nodes:
        raise ConfigurationError(
            f"the topology has {topology.num_nodes} nodes, the data set {dataset.num_nodes}",
            hint="give the topology of this data set, or None",
        )


def name_of_ids(ids: Ids) -> str:
    """Return a short name of seeds, for resuming."""
    return f"{len(ids)} {zlib.crc32(ids.tobytes()):08x}"
