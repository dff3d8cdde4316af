"""Loaders that sample mini-batches when they are asked for, from features as they lie.

``OnlineLoader`` is for validation and test ids, for training that fits in memory, and as the
yardstick of packed training: the same batches, without any packing. ``HeteroLoader`` is its like
for graphs with several node and edge types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, require_whole
from fivefold.gnn.data import Dataset, HeteroDataset
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
    HeteroMiniBatch,
    MiniBatch,
    SeedTable,
    assemble,
    assemble_typed,
    checked_form,
)
from fivefold.gnn.loading.rows import CachePolicy, DiskRows, open_rows
from fivefold.gnn.sampling import Adjacency, HeteroAdjacency, HeteroNeighborSampler, NeighborSampler
from fivefold.gnn.sampling.batches import EdgeType, HeteroSampledBatch, SampledBatch, epoch_batches
from fivefold.gnn.sampling.temporal import TemporalSampler, TemporalStrategy
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.gnn.storage.reader import ReadStatistics


class SampledLoader(BatchLoader[Batch]):
    """A loader of the batches that an epoch's seeds make, in order or shuffled.

    Threads hold the stages and what these need, not the loader, so that it can be collected.
    """

    def __init__(
        self, ids: Ids, batch_size: int, settings: LoaderSettings, release: Callable[[], None]
    ) -> None:
        super().__init__(settings, release)
        self._prefetch = require_whole("prefetch", settings.prefetch)
        self._ids, self._batch_size = ids, require_whole("batch_size", batch_size)
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
class _Reading:
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
        self._read = _Reading()
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


class HeteroLoader(SampledLoader[HeteroMiniBatch]):
    """Sample and read mini-batches of several types, a few batches ahead of the training loop.

    Iterating yields the batches of the current epoch; after a whole epoch the next one begins.

    Args:
        dataset: Graph, features and labels.
        input_type: Node type of the seeds.
        ids: Seeds, distinct, or a mask; None for the training nodes of that type.
        fanouts: Neighbours per hop, -1 for all; for all edge types alike or by edge type.
        batch_size: Seeds per batch; the last batch of an epoch may be smaller.
        topology: Adjacency to sample from; None opens the dataset's.
        shuffle: Put the seeds in a new random order every epoch.
        seed: Seed of order and samples.
        prefetch: Batches that are prepared ahead.
        options: Those that all loaders take, as for ``DiskLoader``: device, rank, world_size,
            remainder, backend, verify, timeout_s.

    Raises:
        ConfigurationError: A setting is out of range, or fan-outs do not fit the edge types.
        DataError: There is no such node type, or it has no labels to take the seeds from.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.data import HeteroSource, array_source, ingest
        >>> one = array_source([[0, 1], [1, 0]], features=[[1.0, 0.0], [0.0, 1.0]])
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
        topology: HeteroAdjacency | None = None,
        shuffle: bool = False,
        seed: int = 0,
        prefetch: int = 2,
        **options: Unpack[LoaderOptions],
    ) -> None:
        settings = LoaderSettings(shuffle=shuffle, seed=seed, prefetch=prefetch, **options)
        chosen = dataset.split(input_type, "train") if ids is None else ids
        labels = dataset.labels(input_type) if dataset.has_labels(input_type) else None
        seeds = checked_ids(chosen, dataset.num_nodes.get(input_type, 0))
        self._input_type = input_type
        self._sampler = HeteroNeighborSampler(
            dataset.topology() if topology is None else topology, fanouts, seed=seed
        )
        self._seeds, self._rows = SeedTable(seeds, labels), dict[str, DiskRows]()
        self._read = _Reading()
        closing = contextlib.ExitStack()
        for name in filter(dataset.has_features, dataset.node_types):
            self._rows[name] = DiskRows(dataset.features(name), **settings.engine)
            closing.callback(self._rows[name].close)
        super().__init__(seeds, batch_size, settings, closing.close)

    def _start(self, epoch: int, first: int) -> Pipeline:
        sampler, rows, device = self._sampler, self._rows, self._settings.device
        seeds, name, table = self._epoch_seeds(epoch), self._input_type, self._seeds
        reading = self._read

        def sample(ticket: Ticket) -> HeteroSampledBatch:
            return sampler.sample({name: seeds[ticket.batch]}, epoch=epoch, batch=ticket.batch)

        def read(ticket: Ticket) -> HeteroMiniBatch:
            found: HeteroSampledBatch = ticket.value
            x = {}
            for kind, part in rows.items():
                own, cost = part.read_any(found.node_ids[kind])
                x[kind], reading.total = torch.from_numpy(own), reading.total + cost
            return assemble_typed(
                {kind: found.part(kind) for kind in found.node_ids},
                x,
                table,
                edge_types=list(found.sources),
                input_type=name,
                edge_attr={},
            ).to(device)

        return self._pipeline_of([Stage("sample", sample), Stage("read rows", read)], first)

    def statistics(self) -> LoaderStatistics:
        """Return counts since the loader was made; all rows come from the files."""
        total = self._read.total
        return LoaderStatistics(
            batches=self._delivered,
            rows={"file": sum(part.served["file"] for part in self._rows.values())},
            requests=total.requests,
            bytes_read=total.bytes_read,
            cold_bytes=total.bytes_used,
            stage_s=self._stage_s(self._pipeline),
            wait_s=self._wait_s(self._pipeline),
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "topology": self._sampler.topology.fingerprint,
            "fanouts": [[list(kind), list(n)] for kind, n in self._sampler.fanouts.items()],
            "input_type": self._input_type,
            "ids": name_of_ids(self._ids),
            "batch_size": self._batch_size,
            **self._settings.identity(),
        }


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
