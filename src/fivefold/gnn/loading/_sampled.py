"""``OnlineLoader``: mini-batches sampled when they are asked for, from features as they lie.

It is for validation and test ids, for training that fits in memory, and the yardstick of packed
training: the same batches, without any packing. Graphs may have several node and edge types.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, require_flag, require_whole
from fivefold.gnn.data import Dataset, HeteroDataset
from fivefold.gnn.loading._base import (
    BatchLoader,
    LoaderOptions,
    LoaderSettings,
    LoaderStatistics,
    check_dtype,
    known_options,
)
from fivefold.gnn.loading._pipeline import Pipeline, Stage, Ticket
from fivefold.gnn.loading._pyg_batches import LabelledData, labels_of, seeds_of
from fivefold.gnn.loading.batch import BatchMaker, MiniBatch, SeedTable, checked_form
from fivefold.gnn.loading.prepare import edge_weights_of, rows_of
from fivefold.gnn.loading.rows import CachedRows, CachePolicy, DiskRows, MemoryRows, open_rows
from fivefold.gnn.sampling import Adjacency, HeteroAdjacency, HeteroNeighborSampler, NeighborSampler
from fivefold.gnn.sampling.batches import (
    EdgeType,
    HeteroSampledBatch,
    SampledBatch,
    epoch_batches,
)
from fivefold.gnn.sampling.temporal import TemporalSampler, TemporalStrategy
from fivefold.gnn.storage import Container
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.gnn.storage.reader import ReadStatistics


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


class OnlineLoader(BatchLoader):
    """Sample and gather mini-batches on the fly, a few batches ahead of the training loop.

    Iterating yields the batches of the current epoch; after a whole epoch the next one begins,
    with other samples and, with ``shuffle``, another order of ids. Threads hold the stages and what
    these need, not the loader, so that it can be collected.

    Args:
        dataset: Dataset that holds topology, features and labels.
        ids: Seed node ids, distinct, or a mask over all nodes. Of several types a node type, whose
            training nodes are meant, or a pair of it and of these.
        fanouts: Neighbours per hop, -1 for all; of several types for all edge types alike or by
            edge type.
        batch_size: Seeds per batch; the last batch of an epoch may be smaller.
        topology: Adjacency to sample from; None opens the dataset's.
        features: "disk" reads each batch's rows from the feature file, "memory" loads the file
            first, an array [nodes, dim] of one type serves rows itself.
        cache_bytes: Memory of a cache of rows from disk that learns which ones come again, its
            tables included; 0 for none. For graphs of one type, as are blocks and times.
        cache_policy: "lru" keeps what was used last, "sieve" what was used again.
        shuffle: Put the ids in a new random order every epoch.
        resample: Draw other neighbours every epoch; False repeats the draws of epoch 0.
        seed: Seed of order and samples.
        edge_ids: Whether batches have ``e_id``, and the rows and weights of edges that have some;
            None: where they do.
        form: "edge_index", "blocks" for layered models, or "data" for PyG's ``Data`` or
            ``HeteroData``.
        prefetch: Batches that are prepared ahead.
        node_time: ``[nodes]``, when each node came into being: then only what is not later than a
            seed is sampled, each seed has a tree of its own, and seeds may stand several times. Or
            the name under which the data set has it (``Dataset.part_names``).
        edge_time: In place of it when each edge came into being: an entry for each edge of the
            source, in its order (``e_id``), or a name.
        input_time: ``[seeds]``, the latest time that each seed may see; None: its node's.
        temporal_strategy: "uniform" draws among what is early enough, "last" takes the latest.
        options: Those that all loaders take, as for ``DiskLoader``: device, rank, world_size,
            remainder, backend, verify, timeout_s.

    Raises:
        ConfigurationError: A setting is out of range, or not for graphs of several types.
        UnsupportedError: torch has no dtype for the features.

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
        dataset: Dataset | HeteroDataset,
        ids: ArrayLike | str | tuple[str, ArrayLike | None],
        *,
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        batch_size: int,
        topology: Adjacency | HeteroAdjacency | None = None,
        features: Literal["disk", "memory"] | Array = "disk",
        cache_bytes: int = 0,
        cache_policy: CachePolicy = "lru",
        shuffle: bool = False,
        resample: bool = True,
        seed: int = 0,
        edge_ids: bool | None = None,
        form: Literal["edge_index", "blocks", "data"] = "edge_index",
        prefetch: int = 2,
        node_time: ArrayLike | str | None = None,
        edge_time: ArrayLike | str | None = None,
        input_time: ArrayLike | None = None,
        temporal_strategy: TemporalStrategy = "uniform",
        **options: Unpack[LoaderOptions],
    ) -> None:
        given = known_options(options, type(self).__name__)
        settings = LoaderSettings(shuffle=shuffle, seed=seed, prefetch=prefetch, **given)
        self._prefetch = require_whole("prefetch", prefetch)
        self._batch_size = require_whole("batch_size", batch_size)
        self._form = checked_form("edge_index" if form == "data" else form)
        self._resample = require_flag("resample", resample)
        if edge_ids is not None:
            edge_ids = require_flag("edge_ids", edge_ids)
        timed = node_time is not None or edge_time is not None
        plain = isinstance(features, str) and not (timed or cache_bytes or form == "blocks")
        _check_kind(dataset, plain=plain)
        if not timed and (input_time is not None or temporal_strategy != "uniform"):
            message = "input_time and temporal_strategy need times of nodes or edges"
            raise ConfigurationError(message, hint="give node_time or edge_time too")
        self._input_type, seeds = seeds_of(dataset, ids, distinct=not timed)
        node_time, edge_time = (
            part_of(dataset, "node", node_time),
            part_of(dataset, "edge", edge_time),
        )
        labels = labels_of(dataset, self._input_type)
        self._seeds = SeedTable(seeds, labels)
        graph = dataset.topology() if topology is None else topology
        if graph.num_nodes != dataset.num_nodes:
            raise ConfigurationError(
                f"the topology has {graph.num_nodes} nodes, the data set {dataset.num_nodes}",
                hint="give the topology of this data set, or None",
            )
        nodes, edges = rows_of(dataset)
        edges = {} if edge_ids is False else edges
        self._weights = {} if edge_ids is False else edge_weights_of(dataset)
        times = {"node_time": node_time, "edge_time": edge_time, "strategy": temporal_strategy}
        draws = {"seed": seed, "edge_ids": bool(edge_ids or edges or self._weights)}
        self._sampler = _sampler_of(graph, fanouts, times if timed else None, **draws)
        self._links: Seeds | None = None
        if isinstance(self._sampler, TemporalSampler) and (len(seeds) or input_time is not None):
            # A loader of links has no such seeds.
            limits = self._sampler.times_of(seeds, input_time)
            self._links = _TimedSeeds(seeds, limits, labels)
            seeds = np.arange(len(seeds))
        self._ids, self._settings = seeds, settings
        # Of all reads so far; not the loader's own, so that its threads need not hold it.
        self._read = {"nodes": ReadStatistics(), "edges": ReadStatistics()}
        self._numbers(0)  # an impossible rank is refused here, not in an epoch
        opened = self._open_rows(nodes, edges, features, cache_bytes, cache_policy, settings)
        super().__init__(settings, opened.close)
        if form == "data":
            self._made_into = LabelledData(dataset)

    def _open_rows(
        self,
        nodes: Mapping[str | None, Container],
        edges: Mapping[EdgeType | None, Container],
        features: Literal["disk", "memory"] | Array,
        cache_bytes: int,
        cache_policy: CachePolicy,
        settings: LoaderSettings,
    ) -> contextlib.ExitStack:
        """Open the rows of nodes and of edges; return the stack that closes them."""
        self._rows: dict[str | None, CachedRows | DiskRows | MemoryRows] = {}
        self._edge_rows: dict[EdgeType | None, DiskRows] = {}
        with contextlib.ExitStack() as opened:
            for kind, container in nodes.items():
                self._rows[kind] = open_rows(
                    container,
                    features,
                    cache_bytes=cache_bytes,
                    cache_policy=cache_policy,
                    shared=settings.world_size > 1,
                    **settings.engine,
                )
                opened.callback(self._rows[kind].close)
            for edge_type, container in edges.items():
                self._edge_rows[edge_type] = DiskRows(container, **settings.engine)
                opened.callback(self._edge_rows[edge_type].close)
            for table in (*self._rows.values(), *self._edge_rows.values()):
                check_dtype(table.dtype)
            return opened.pop_all()

    def _numbers(self, epoch: int) -> Ids:
        del epoch  # all have the same
        return self._settings.share(np.arange(math.ceil(len(self._ids) / self._batch_size)))

    def _epoch_seeds(self, epoch: int) -> Sequence[Ids]:
        size = self._batch_size
        if self._settings.shuffle:
            seed = self._settings.seed
            return epoch_batches(self._ids, batch_size=size, seed=seed, epoch=epoch)
        return [self._ids[i : i + size] for i in range(0, len(self._ids), size)]

    def _start(self, epoch: int, numbers: list[int]) -> Pipeline:
        drawn, reading, seeds = epoch * self._resample, self._read, self._epoch_seeds(epoch)
        sampler, rows, device = self._sampler, self._rows, self._settings.device
        input_type, edge_rows, links = self._input_type, self._edge_rows, self._links
        topology = sampler.topology
        edge_types = topology.edge_types if isinstance(topology, HeteroAdjacency) else ()
        table, form, weights = self._seeds, self._form, self._weights

        def sample(ticket: Ticket) -> SampledBatch | HeteroSampledBatch:
            number, chosen = ticket.batch, seeds[ticket.batch]
            if isinstance(sampler, HeteroNeighborSampler):
                return sampler.sample({str(input_type): chosen}, epoch=drawn, batch=number)
            nodes = chosen if links is None else links.nodes(chosen, epoch=drawn, batch=number)
            if isinstance(sampler, NeighborSampler):
                return sampler.sample(nodes, epoch=drawn, batch=number)
            limits = None if links is None else links.times(chosen)
            assert limits is not None, "whoever sets seeds gives their times"
            return sampler.sample(nodes, limits, epoch=drawn, batch=number)

        def read(ticket: Ticket) -> tuple[Any, dict[Any, torch.Tensor]]:
            sampled, x = ticket.value, {}
            parts = _parts(sampled)
            for kind, source in rows.items():
                ids, places = parts[kind].node_ids, None
                if parts[kind].trees is not None:  # a node may be in several
                    ids, places = np.unique(ids, return_inverse=True)
                out = np.empty((len(ids), *source.row_shape), source.dtype)
                reading["nodes"] += source.read(ids, out)
                x[kind] = torch.from_numpy(out if places is None else out[places])
            return sampled, x

        def build(ticket: Ticket) -> Any:
            sampled, x = ticket.value
            edge_attr = {}
            for kind, source in edge_rows.items():
                edge_ids = sampled.edge_ids if kind is None else sampled.edge_ids[kind]
                edge_attr[kind], cost = source.read_any(edge_ids)
                reading["edges"] += cost
            ends = table if links is None else SeedTable(sampled.seeds, None)
            make = BatchMaker(ends, form, input_type, edge_types, weights)
            made = make(_parts(sampled), x, edge_attr).to(device)
            if links is None:
                return made
            chosen = seeds[ticket.batch]
            made = links.add(made, chosen, epoch=drawn, batch=ticket.batch)
            return _with_times(made, sampled, links.times(chosen)).to(device)

        stages = [Stage("sample", sample), Stage("read rows", read), Stage("build tensors", build)]
        return Pipeline(
            iter(numbers),
            [[stage] for stage in stages],
            capacity=self._prefetch,
            timeout_s=self._settings.timeout_s,
        )

    def _identity(self) -> dict[str, Any]:
        fanouts: Any = self._sampler.fanouts
        typed = {} if self._input_type is None else {"input_type": self._input_type}
        return {
            "topology": self._sampler.topology.fingerprint,
            "fanouts": [[list(kind), list(n)] for kind, n in fanouts.items()]
            if typed
            else list(fanouts),
            **typed,
            "ids": name_of_ids(self._ids),
            "batch_size": self._batch_size,
            "resample": self._resample,
            **({} if self._links is None else {"links": self._links.name}),
            **self._settings.identity(),
        }

    def statistics(self) -> LoaderStatistics:
        """Return counts since the loader was made; rows come from "file", "memory" or "host"."""
        total, tables = self._read["nodes"], list(self._rows.values())
        served: collections.Counter[str] = collections.Counter()
        for table in tables:
            served.update(table.served)
        return LoaderStatistics(
            batches=self._delivered,
            rows=dict(served),
            row_bytes=tables[0].row_bytes if len(tables) == 1 else 0,
            requests=total.requests,
            bytes_read=total.bytes_read,
            cold_bytes=total.bytes_used,
            edge_bytes=self._read["edges"].bytes_read,
            **self._times(),
        )


def _check_kind(dataset: object, *, plain: bool) -> None:
    """Refuse what is no data set, and options that are not ``plain`` for several types."""
    if not isinstance(dataset, Dataset | HeteroDataset):
        message = f"the data set is a {type(dataset).__name__}"
        raise ConfigurationError(message, hint="open it with fivefold.gnn.data.open_dataset")
    if isinstance(dataset, HeteroDataset) and not plain:
        message = "times, caches, blocks and features in an array are for graphs of one type"
        raise ConfigurationError(message, hint="leave them out for a HeteroDataset")


def part_of(dataset: Dataset | HeteroDataset, of: str, given: Any) -> Any:
    """Return what was given of nodes or edges; by a name, what the data set has under it."""
    if isinstance(given, str) and isinstance(dataset, Dataset):
        return dataset.part(of, given)
    return given


def _sampler_of(
    graph: Adjacency | HeteroAdjacency, fanouts: Any, times: dict[str, Any] | None, **draws: Any
) -> NeighborSampler | TemporalSampler | HeteroNeighborSampler:
    if isinstance(graph, HeteroAdjacency):
        return HeteroNeighborSampler(graph, fanouts, **draws)
    if times is None:
        return NeighborSampler(graph, fanouts, **draws)
    return TemporalSampler(graph, fanouts, **times, **draws)


def _parts(sampled: SampledBatch | HeteroSampledBatch) -> dict[str | None, SampledBatch]:
    """Return what is sampled of each node type; None is the only one of a graph of one type."""
    if isinstance(sampled, SampledBatch):
        return {None: sampled}
    return {kind: sampled.part(kind) for kind in sampled.node_ids}


def _with_times(made: MiniBatch, sampled: SampledBatch, limits: Array | None) -> MiniBatch:
    if limits is None or sampled.trees is None:
        return made
    times = {"seed_time": torch.from_numpy(limits), "batch": torch.from_numpy(sampled.trees)}
    return dataclasses.replace(made, links={**(made.links or {}), **times})


def name_of_ids(ids: Ids) -> str:
    """Return a short name of seeds, for resuming."""
    return f"{len(ids)} {zlib.crc32(ids.tobytes()):08x}"
