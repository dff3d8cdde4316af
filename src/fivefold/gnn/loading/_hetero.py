"""Mini-batches of graphs with several node and edge types, sampled when they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from numpy.typing import ArrayLike

from fivefold.gnn.data import HeteroDataset
from fivefold.gnn.loading._base import (
    LoaderOptions,
    LoaderSettings,
    LoaderStatistics,
    checked_ids,
)
from fivefold.gnn.loading._pipeline import Pipeline, Stage, Ticket
from fivefold.gnn.loading._sampled import DiskRows, ReadingCount, SampledLoader, name_of_ids
from fivefold.gnn.loading.batch import HeteroMiniBatch, SeedTable, assemble_typed
from fivefold.gnn.sampling import HeteroAdjacency, HeteroNeighborSampler
from fivefold.gnn.sampling.batches import EdgeType, HeteroSampledBatch


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
        self._read = ReadingCount()
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
