"""Full-graph inference of several node and edge types, layer by layer, out of core.

As ``_inference`` has it, with a table of outputs per layer and node type. A range of targets is as
long as the edges of all types into it allow; within it the edge types come one after another, each
with sums of its own, and add to the outputs of the range.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.errors import DataError
from fivefold.gnn.sampling import Adjacency, HeteroAdjacency
from fivefold.gnn.sampling.batches import EdgeType
from fivefold.gnn.storage import Container, ContainerWriter, DiskProfile, probe_disk
from fivefold.gnn.storage.pages import Ids
from fivefold.gnn.storage.reader import ReadStatistics
from fivefold.gnn.training._graph import TypedData
from fivefold.gnn.training._inference import (
    OUTPUT_KIND,
    InferenceResult,
    LayerReport,
    identity_of,
    make_folder,
)
from fivefold.gnn.training._inference_layers import (
    Aggregate,
    MeanParts,
    Piece,
    RowStream,
    Shares,
    choose_reading,
    profitable_gap_bytes,
    ranges,
    share_memory,
    sorted_keys,
)
from fivefold.gnn.training.config import Backend
from fivefold.gnn.training.models import TypedLayer, TypedSAGE

_ONES_ROWS = 1 << 20


def infer_types(  # noqa: PLR0913 - independent options, each with a default
    model: TypedSAGE,
    data: TypedData,
    folder: Path,
    *,
    memory_bytes: int,
    mapped: bool = False,
    keep_layers: bool = False,
    profile: DiskProfile | None = None,
    backend: Backend = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> InferenceResult:
    """Compute the outputs of all nodes of the model's type; arguments as for ``infer_layers``."""
    make_folder(folder)
    run = _TypedRun(
        model=model.eval(),
        data=data,
        topology=data.topology(mapped=mapped),
        folder=folder,
        identity=identity_of(model, data.fingerprint),
        profile=probe_disk(folder) if profile is None else profile,
        memory_bytes=memory_bytes,
        backend=backend,
        progress=progress or (lambda _done, _total: None),
    )
    with torch.no_grad():
        return run.layers(keep_layers=keep_layers)


@dataclasses.dataclass(kw_only=True)
class _TypedRun:
    """Settings that all tables of one inference share."""

    model: TypedSAGE
    data: TypedData
    topology: HeteroAdjacency
    folder: Path
    identity: str
    profile: DiskProfile
    memory_bytes: int
    backend: Backend
    progress: Callable[[int, int], None]
    done: int = 0  # targets, over all tables

    def layers(self, *, keep_layers: bool) -> InferenceResult:
        """Compute what is missing of all layers."""
        layers: list[Any] = list(self.model.layers)
        finished = next(
            (number for number in range(len(layers), 0, -1) if self._is_done(number)), 0
        )
        reports = [LayerReport(layer=number) for number in range(1, finished + 1)]
        self.done = sum(self._targets(layer) for layer in layers[:finished])
        for number in range(finished + 1, len(layers) + 1):
            with contextlib.ExitStack() as opened:
                sources = self._sources(number - 1, opened)
                report = self._layer(number, layers[number - 1], sources)
            reports.append(report)
            for source in sources.values():  # what stands for features is no layer's output
                if source.path.parent == self.folder and (number == 1 or not keep_layers):
                    source.path.unlink()
        return InferenceResult(path=self._path(len(layers)), layers=tuple(reports))

    def _path(self, number: int, name: str | None = None) -> Path:
        """Return the file of a layer's outputs of a node type; the last layer has one."""
        if number == len(self.model.layers):
            return self.folder / "output.fvf"
        place = self.topology.node_types.index(name or "")
        return self.folder / f"layer-{number:02d}-{place:02d}.fvf"

    def _attributes(self, number: int, name: str) -> dict[str, Any]:
        return {"model": self.identity, "layer": number, "node_type": name}

    def _is_done(self, number: int) -> bool:
        layer: Any = self.model.layers[number - 1]
        return all(self._path(number, name).exists() for name in layer.targets)

    def _sources(self, number: int, opened: contextlib.ExitStack) -> dict[str, Container]:
        """Return the rows that the layer after ``number`` reads, by node type."""
        following: Any = self.model.layers[number]
        graph, found = self.data.graph, {}
        for name in following.sources:
            if number == 0 and graph.has_features(name):
                found[name] = graph.features(name)  # closed with the data set
                continue
            path = self._path(number, name)
            if number == 0 and not path.exists():
                self._write_ones(path, name)
            found[name] = opened.enter_context(Container.open(path, kind=OUTPUT_KIND))
            if found[name].attributes != self._attributes(number, name):
                message = f"{path} was made by another model or from another graph"
                raise DataError(message, hint="choose another folder, or delete that one")
        return found

    def _write_ones(self, path: Path, name: str) -> None:
        """Write the rows of a node type without features."""
        count = self.topology.num_nodes[name]
        with ContainerWriter(
            path,
            kind=OUTPUT_KIND,
            sections={"x": (np.float32, (count, 1))},
            attributes=self._attributes(0, name),
        ) as writer:
            for low in range(0, count, _ONES_ROWS):
                writer.write("x", low, np.ones((min(_ONES_ROWS, count - low), 1), np.float32))
            writer.commit().close()

    def _targets(self, layer: TypedLayer) -> int:
        return sum(self.topology.num_nodes[name] for name in layer.targets)

    def told(self, targets: int) -> None:
        """Count targets that are done."""
        self.done += targets
        self.progress(self.done, sum(map(self._targets, self.model.layers)))  # type: ignore[arg-type]

    def _layer(
        self, number: int, layer: TypedLayer, sources: Mapping[str, Container]
    ) -> LayerReport:
        """Compute the tables of a layer that are not there yet."""
        started_s, tables = time.perf_counter(), []
        for name, own in zip(layer.targets, layer.own, strict=True):
            path, last = self._path(number, name), number == len(self.model.layers)
            if path.exists():
                self.told(self.topology.num_nodes[name])
                continue
            into = {
                kind: MeanParts(linear)
                for kind, linear in zip(layer.edge_types, layer.neighbors, strict=True)
                if kind[2] == name
            }
            table = _Table(self, name, own, into, sources, activated=not last)
            with ContainerWriter(
                path,
                kind=OUTPUT_KIND,
                sections={"x": (np.float32, (table.num_nodes, table.out_dim))},
                attributes=self._attributes(number, name),
                resume=True,
            ) as writer:
                table.run(writer)
                writer.commit().close()
            tables.append(table)
        cost = sum((table.cost for table in tables), ReadStatistics())
        return LayerReport(
            layer=number,
            ranges=sum(table.ranges for table in tables),
            gathered=sum(table.ways.count("gather") for table in tables),
            swept=sum(table.ways.count("sweep") for table in tables),
            bytes_read=cost.bytes_read,
            bytes_used=cost.bytes_used,
            requests=cost.requests,
            seconds=time.perf_counter() - started_s,
        )


@dataclasses.dataclass(frozen=True)
class _Widest:
    """What a target and a source row of any edge type take at most, for ``share_memory``."""

    width: int
    in_dim: int
    out_dim: int
    extra: int = 1
    heads: int = 0


class _Table:
    """The outputs of one layer for one node type."""

    def __init__(
        self,
        run: _TypedRun,
        name: str,
        own: Any,
        into: Mapping[EdgeType, MeanParts],
        sources: Mapping[str, Container],
        *,
        activated: bool,
    ) -> None:
        self._run, self._own, self._into, self._sources = run, own, into, sources
        self._name, self._activated = name, activated
        self.num_nodes, self.out_dim = run.topology.num_nodes[name], int(own.out_features)
        self.cost, self.ways, self.ranges = ReadStatistics(), list[str](), 0
        self._edges = {kind: run.topology.edges[kind] for kind in into}
        self._indptr: Ids = sum(
            (edges.indptr for edges in self._edges.values()), np.zeros(self.num_nodes + 1, np.int64)
        )
        inputs = [parts.in_dim for parts in into.values()] + [int(own.in_features)]
        # The outputs of a range are in memory beside the sums.
        width = self.out_dim + max((parts.width for parts in into.values()), default=0)
        rows = [sources[name], *(sources[kind[0]] for kind in into)]
        self._shares: Shares = share_memory(
            run.memory_bytes,
            _Widest(width=width, in_dim=max(inputs), out_dim=self.out_dim),
            row_bytes=max(source.section("x").row_bytes for source in rows),
            num_nodes=self.num_nodes,
            num_edges=int(self._indptr[-1]),
        )
        self._keys = np.empty(self._shares.edges, np.int64)
        self._shift = max(1, (self._shares.targets - 1).bit_length())

    def run(self, writer: ContainerWriter) -> None:
        """Compute all ranges that are not done yet."""
        first = (writer.progress or {"next": 0})["next"]
        self._run.told(first)
        for piece in ranges(self._indptr, self._shares, first=first):
            writer.write("x", piece.first, self._outputs(piece).numpy())
            writer.mark({"next": piece.stop})
            self._run.told(piece.stop - piece.first)
            self.ranges += 1
        self._keys = self._keys[:0].copy()  # the counts stay until the layer is done

    @contextlib.contextmanager
    def _stream(self, name: str) -> Iterator[RowStream]:
        gap_bytes = profitable_gap_bytes(self._run.profile)
        options: dict[str, Any] = {"backend": self._run.backend, "gap_bytes": gap_bytes}
        stream = RowStream(self._sources[name], self._shares, **options)
        try:
            yield stream
        finally:
            self.cost += stream.statistics
            stream.close()

    def _outputs(self, piece: Piece) -> Tensor:
        """Return the outputs [T, out_dim] of a range of targets."""
        out = torch.empty(piece.stop - piece.first, self.out_dim)
        with self._stream(self._name) as stream:
            for place, rows in stream.sequence(piece.first, piece.stop):
                at = place - piece.first
                out[at : at + len(rows)] = self._own(rows)
        for kind, parts in self._into.items():
            self._add(kind, parts, piece, out)
        return out.relu_() if self._activated else out

    def _add(self, kind: EdgeType, parts: MeanParts, piece: Piece, out: Tensor) -> None:
        """Add the neighbours along one edge type."""
        edges: Adjacency = self._edges[kind]
        aggregate = Aggregate.empty(len(out), parts)
        low, high = int(edges.indptr[piece.first]), int(edges.indptr[piece.stop])
        section = self._sources[kind[0]].section("x")
        with self._stream(kind[0]) as stream:
            for start in range(low, high, len(self._keys)):
                part = (start, min(start + len(self._keys), high))
                keys = sorted_keys(
                    edges, piece.first, part,
                    shift=self._shift, drops_loops=False, keys=self._keys,
                )  # fmt: skip
                way = choose_reading(
                    keys,
                    self._shift,
                    row_bytes=section.row_bytes,
                    profile=self._run.profile,
                    gap_bytes=profitable_gap_bytes(self._run.profile),
                )
                self.ways.append(way)
                for found, rows in stream.sources(keys, self._shift, way):
                    parts.add(aggregate, found, self._shift, parts.messages(rows))
        for start in range(0, len(out), self._shares.rows):
            places = slice(start, min(start + self._shares.rows, len(out)))
            out[places] += parts.finish(aggregate, places, None)
