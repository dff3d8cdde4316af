"""Full-graph inference, layer by layer, with features and layer outputs on disk.

A layer has a table of outputs for each node type, which goes over ranges of targets: their sums are
in memory while the rows of all in-neighbours stream by, sorted, each read once. A range that is
done is marked on disk. A graph of one type is one of several types that has only one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fivefold.errors import ConfigurationError, DataError, StorageError, require_whole
from fivefold.gnn.data import Dataset
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.sampling.batches import ONE_TYPE, EdgeType
from fivefold.gnn.storage import Container, ContainerWriter, DiskProfile, probe_disk
from fivefold.gnn.storage.pages import Ids
from fivefold.gnn.storage.reader import ReadStatistics
from fivefold.gnn.training._graph import TypedData
from fivefold.gnn.training._inference_layers import (
    Aggregate,
    LayerParts,
    Outputs,
    RowStream,
    choose_reading,
    profitable_gap_bytes,
    ranges,
    share_memory,
    sorted_keys,
    take_apart,
)
from fivefold.gnn.training.config import Backend
from fivefold.gnn.training.models import LayeredModel, TypedSAGE, as_layered
from fivefold.units import format_bytes, format_duration_s

_LOG = logging.getLogger(__name__)
_KIND = "embeddings"
_ONES_ROWS = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Ranges, reads and seconds of one layer."""

    layer: int
    ranges: int = 0
    gathered: int = 0
    swept: int = 0
    bytes_read: int = 0
    bytes_used: int = 0
    requests: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """Return one line for people."""
        if not self.ranges:
            return f"layer {self.layer}: was done before"
        ways = {"by sequential passes": self.swept, "by gathering": self.gathered}
        used = [f"{count} {way}" for way, count in ways.items() if count]
        way = used[0].partition(" ")[2] if len(used) == 1 else ", ".join(used)
        ranges_ = "1 range" if self.ranges == 1 else f"{self.ranges} ranges"
        return (
            f"layer {self.layer}: {ranges_} of targets, {way or 'no edges'}; read "
            f"{format_bytes(self.bytes_read)} in {format_duration_s(self.seconds)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceResult:
    """File of the outputs, and what each layer took.

    Args:
        path: Container of kind "embeddings" with section "x", float32 [nodes, classes].
        layers: What each layer took.
    """

    path: Path
    layers: tuple[LayerReport, ...]

    def explain(self) -> str:
        """Return a line per layer."""
        return "\n".join(layer.line() for layer in self.layers)


def infer_layers(  # noqa: PLR0913 - independent options, each with a default
    model: torch.nn.Module,
    dataset: Dataset | TypedData,
    folder: str | Path,
    *,
    memory_bytes: int = 1_000_000_000,
    mapped: bool = False,
    keep_layers: bool = False,
    profile: DiskProfile | None = None,
    backend: Backend = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> InferenceResult:
    """Compute the outputs of all nodes from all of their in-neighbours, out of core.

    Equals ``model(x, edge_index)`` over the whole graph, to the rounding of float32 sums.

    Args:
        model: GraphSAGE, GCN or GAT of this package, or GraphSAGE or GAT of PyTorch Geometric;
            used as if in evaluation mode, on the CPU.
        dataset: Graph and features.
        folder: Where the layers' outputs go; the same call resumes what is unfinished there.
        memory_bytes: Budget of rows, sums, edges and buffers; topology and model are not in it.
        mapped: Leave the topology on disk and map it.
        keep_layers: Keep the hidden layers' outputs; otherwise each goes when the next is done.
        profile: The disk; None probes it.
        backend: Reading engine.
        progress: Called with targets done and targets in all, over all layers.

    Raises:
        ConfigurationError: The model does not fit the features.
        DataError: The folder holds the layers of another model or graph, or a file is damaged.
        InfeasibleError: The budget holds not even one row.
        StorageError: The disk is full or refuses; the same call goes on afterwards.
        UnsupportedError: The model is of another kind, or has options that change its layers.

    Examples:
        >>> from fivefold.gnn.data import generate_graph
        >>> from fivefold.gnn.training import GraphSAGE
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with generate_graph(f"{folder}/graph", nodes=50, dim=4, seed=0) as dataset:
        ...     result = infer_layers(GraphSAGE(4, 8, 3), dataset, f"{folder}/out")
        >>> with Container.open(result.path) as outputs:
        ...     outputs.sections["x"].shape
        (50, 3)
    """
    require_whole("memory_bytes", memory_bytes)
    taken = model if isinstance(model, TypedSAGE) else as_layered(model)
    width = dataset.dim if isinstance(dataset, Dataset) else None
    if isinstance(taken, LayeredModel) and width is not None and taken.in_dim != width:
        message = f"the model takes rows of {taken.in_dim}, the features have {width}"
        raise ConfigurationError(message, hint="use the model that was trained on this data set")
    place = Path(folder).absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write in {place}: {error.strerror or error}"
        raise StorageError(message, hint="name a folder that you may write") from error
    edges: Mapping[EdgeType, Adjacency]
    features: dict[str, Container]
    if isinstance(dataset, Dataset):
        topology = dataset.topology(mapped=mapped)
        edges, num_nodes = {ONE_TYPE: topology}, {ONE_TYPE[2]: topology.num_nodes}
        features = {ONE_TYPE[2]: dataset.features}
    else:
        typed, graph = dataset.topology(mapped=mapped), dataset.graph
        edges, num_nodes = typed.edges, typed.num_nodes
        features = {name: graph.features(name) for name in num_nodes if graph.has_features(name)}
    run = _Run(
        tables=take_apart(taken),
        edges=edges,
        num_nodes=num_nodes,
        features=features,
        folder=place,
        typed=isinstance(dataset, TypedData),
        identity=_identity_of(taken, dataset.fingerprint),
        profile=probe_disk(place) if profile is None else profile,
        memory_bytes=memory_bytes,
        backend=backend,
        progress=progress or (lambda _done, _total: None),
    )
    with torch.no_grad():
        return run.layers(keep_layers=keep_layers)


@dataclasses.dataclass(kw_only=True)
class _Run:
    """Settings that all tables of one inference share."""

    tables: list[list[Outputs]]  # of each layer
    edges: Mapping[EdgeType, Adjacency]
    num_nodes: Mapping[str, int]
    features: Mapping[str, Container]
    folder: Path
    typed: bool
    identity: str
    profile: DiskProfile
    memory_bytes: int
    backend: Backend
    progress: Callable[[int, int], None]
    done: int = 0  # targets, over all tables

    def layers(self, *, keep_layers: bool) -> InferenceResult:
        """Compute what is missing of all layers."""
        finished = next((n for n in range(len(self.tables), 0, -1) if self._is_done(n)), 0)
        reports = [LayerReport(layer=number) for number in range(1, finished + 1)]
        self.done = sum(map(self._targets, self.tables[:finished]))
        for number in range(finished + 1, len(self.tables) + 1):
            with contextlib.ExitStack() as opened:
                sources = self._sources(number - 1, opened)
                report = self._layer(number, sources)
            reports.append(report)
            _LOG.info("%s", report.line())
            for name in sources:
                if number == 1 or not keep_layers:  # what stands for features is no layer's output
                    self._path(number - 1, name).unlink(missing_ok=True)
        return InferenceResult(path=self._path(len(self.tables), ""), layers=tuple(reports))

    def _path(self, number: int, name: str) -> Path:
        """Return the file of a layer's outputs of a node type; the last layer has one."""
        if number == len(self.tables):
            return self.folder / "output.fvf"
        place = f"-{list(self.num_nodes).index(name):02d}" if self.typed else ""
        return self.folder / f"layer-{number:02d}{place}.fvf"

    def _attributes(self, number: int, name: str) -> dict[str, Any]:
        """Return what a file must say to be of this model, layer and node type."""
        found = {"model": self.identity, "layer": number}
        return found | {"node_type": name} if self.typed else found

    def _opened(self, number: int, name: str) -> Container:
        path = self._path(number, name)
        container = Container.open(path, kind=_KIND)
        if container.attributes != self._attributes(number, name):
            container.close()
            message = f"{path} was made by another model or from another graph"
            raise DataError(message, hint="choose another folder, or delete that one")
        return container

    def _is_done(self, number: int) -> bool:
        names = [table.name for table in self.tables[number - 1]]
        there = all(self._path(number, name).exists() for name in names)
        for name in names if there else ():
            self._opened(number, name).close()
        return there

    def _sources(self, number: int, opened: contextlib.ExitStack) -> dict[str, Container]:
        """Return the rows that the layer after ``number`` reads, by node type."""
        tables, found = self.tables[number], {}
        names = {table.name for table in tables} | {kind[0] for t in tables for kind in t.into}
        for name in names:
            if number == 0 and name in self.features:
                found[name] = self.features[name]  # closed with the data set
                continue
            if number == 0 and not self._path(0, name).exists():
                self._write_ones(name)
            found[name] = opened.enter_context(self._opened(number, name))
        return found

    def _write_ones(self, name: str) -> None:
        """Write the rows of a node type without features."""
        count = self.num_nodes[name]
        with ContainerWriter(
            self._path(0, name),
            kind=_KIND,
            sections={"x": (np.float32, (count, 1))},
            attributes=self._attributes(0, name),
        ) as writer:
            for low in range(0, count, _ONES_ROWS):
                writer.write("x", low, np.ones((min(_ONES_ROWS, count - low), 1), np.float32))
            writer.commit().close()

    def _targets(self, tables: list[Outputs]) -> int:
        return sum(self.num_nodes[table.name] for table in tables)

    def told(self, targets: int) -> None:
        """Count targets that are done."""
        self.done += targets
        self.progress(self.done, sum(map(self._targets, self.tables)))

    def _layer(self, number: int, sources: Mapping[str, Container]) -> LayerReport:
        """Compute the tables of a layer that are not there yet."""
        started_s, tables = time.perf_counter(), []
        for outputs in self.tables[number - 1]:
            path = self._path(number, outputs.name)
            if path.exists():
                self.told(self.num_nodes[outputs.name])
                continue
            table = _Table(self, outputs, sources, activated=number < len(self.tables))
            with ContainerWriter(
                path,
                kind=_KIND,
                sections={"x": (np.float32, (table.num_nodes, outputs.out_dim))},
                attributes=self._attributes(number, outputs.name),
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


class _Table:
    """The outputs of one layer for one node type, range by range."""

    def __init__(
        self, run: _Run, outputs: Outputs, sources: Mapping[str, Container], *, activated: bool
    ) -> None:
        self._run, self._outputs, self._sources = run, outputs, sources
        self._activated, self.num_nodes = activated, run.num_nodes[outputs.name]
        self.cost, self.ways, self.ranges = ReadStatistics(), list[str](), 0
        starts = [run.edges[kind].indptr for kind in outputs.into]
        self._indptr: Ids = (
            starts[0] if len(starts) == 1 else sum(starts, np.zeros(self.num_nodes + 1, np.int64))
        )
        rows = [sources[outputs.name], *(sources[kind[0]] for kind in outputs.into)]
        self._shares = share_memory(
            run.memory_bytes,
            outputs,
            row_bytes=max(source.section("x").row_bytes for source in rows),
            num_nodes=self.num_nodes,
            num_edges=int(self._indptr[-1]),
        )
        self._gap_bytes = profitable_gap_bytes(run.profile)
        self._keys = np.empty(self._shares.edges, np.int64)
        self._shift = max(1, (self._shares.targets - 1).bit_length())
        self._opened: tuple[str, RowStream] | None = None

    def run(self, writer: ContainerWriter) -> None:
        """Compute all ranges that are not done yet."""
        first = (writer.progress or {"next": 0})["next"]
        self._run.told(first)
        try:
            for piece in ranges(self._indptr, self._shares, first=first):
                writer.write("x", piece.start, self._range(piece).numpy())
                writer.mark({"next": piece.stop})
                self._run.told(len(piece))
                self.ranges += 1
        finally:
            self._close_stream()
        self._keys = self._keys[:0].copy()  # the counts stay until the layer is done

    def _stream(self, name: str) -> RowStream:
        """Return the rows of a node type; one table is open at a time, for its buffers."""
        if self._opened is None or self._opened[0] != name:
            self._close_stream()
            stream = RowStream(
                self._sources[name],
                self._shares,
                backend=self._run.backend,
                gap_bytes=self._gap_bytes,
            )
            self._opened = name, stream
        return self._opened[1]

    def _close_stream(self) -> None:
        if self._opened is not None:
            self.cost += self._opened[1].statistics
            self._opened[1].close()
            self._opened = None

    def _own_rows(self, piece: range) -> Iterator[tuple[int, Tensor]]:
        """Yield the targets' own rows, with the place of the first in the range."""
        for row, own in self._stream(self._outputs.name).sequence(piece.start, piece.stop):
            yield row - piece.start, own

    def _range(self, piece: range) -> Tensor:
        """Return the outputs [T, out_dim] of a range of targets."""
        out = torch.zeros(len(piece), self._outputs.out_dim)
        if self._outputs.own is not None:
            for place, own in self._own_rows(piece):
                out[place : place + len(own)] = functional.linear(own, *self._outputs.own)
        for kind, parts in self._outputs.into.items():
            self._add(kind, parts, piece, out)
        return out.relu_() if self._activated else out

    def _add(self, kind: EdgeType, parts: LayerParts, piece: range, out: Tensor) -> None:
        """Add what comes along one edge type."""
        edges, aggregate = self._run.edges[kind], Aggregate(len(out), parts)
        if parts.with_own:
            for place, own in self._own_rows(piece):
                parts.begin(aggregate, place, own)
        stream, section = self._stream(kind[0]), self._sources[kind[0]].section("x")
        low, high = int(edges.indptr[piece.start]), int(edges.indptr[piece.stop])
        for start in range(low, high, len(self._keys)):
            stop, shift = min(start + len(self._keys), high), self._shift
            how: dict[str, Any] = {
                "shift": shift,
                "drops_loops": parts.with_own,
                "keys": self._keys,
            }
            keys = sorted_keys(edges, piece.start, (start, stop), **how)
            if not len(keys):
                continue
            disk: dict[str, Any] = {"profile": self._run.profile, "gap_bytes": self._gap_bytes}
            way = choose_reading(keys, shift, row_bytes=section.row_bytes, **disk)
            self.ways.append(way)
            for found, rows in stream.sources(keys, shift, way):
                parts.add(aggregate, found, shift, parts.messages(rows))
        for start in range(0, len(out), self._shares.rows):
            places = slice(start, min(start + self._shares.rows, len(out)))
            out[places] += parts.finish(aggregate, places)


def _identity_of(model: LayeredModel | TypedSAGE, data: str) -> str:
    """Return the digest of whatever decides the outputs; ``data`` is the graph's fingerprint."""
    digest = hashlib.sha256(f"{model.name} {data}".encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
