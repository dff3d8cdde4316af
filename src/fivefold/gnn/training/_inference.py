"""Full-graph inference, layer by layer, with features and layer outputs on disk.

Every node's output is computed from all of its in-neighbours, as in one forward pass over the
whole graph, but never with more than a budget of rows in memory. A layer goes over ranges of
targets; each range keeps running sums while the rows of its in-neighbours stream by once, sorted
and each read once per range. Outputs of a layer are a container that the next layer reads.
A range that is done is marked on disk: a killed run goes on from there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.gnn.data import Dataset
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.storage import Container, ContainerWriter, DiskProfile, probe_disk
from fivefold.gnn.storage.reader import ReadStatistics
from fivefold.gnn.training._inference_layers import (
    Aggregate,
    LayerParts,
    Piece,
    RowStream,
    Shares,
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
OUTPUT_KIND = "embeddings"


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
    dataset: Dataset,
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
    folder, layered = Path(folder), as_layered(model)
    _check(layered, dataset)
    make_folder(folder)
    run = _Run(
        topology=dataset.topology(mapped=mapped),
        profile=probe_disk(folder) if profile is None else profile,
        memory_bytes=memory_bytes,
        backend=backend,
        progress=progress or _no_progress,
        num_layers=layered.num_layers,
    )
    model_id = identity_of(layered, dataset.fingerprint)
    files = _LayerFiles(folder, num_layers=layered.num_layers, model=model_id)
    return run.layers(take_apart(layered), dataset.features, files, keep_layers=keep_layers)


def _check(model: LayeredModel, dataset: Dataset) -> None:
    if model.in_dim != dataset.dim:
        message = f"the model takes rows of {model.in_dim}, the features have {dataset.dim}"
        raise ConfigurationError(message, hint="use the model that was trained on this data set")


def make_folder(folder: Path) -> None:
    """Make a folder for outputs.

    Raises:
        StorageError: It cannot be written in.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot write in {folder}: {error.strerror or error}"
        raise StorageError(message, hint="name a folder that you may write") from error


@dataclasses.dataclass(frozen=True)
class _LayerFiles:
    """Files of the layers' outputs, and the model that they come from."""

    folder: Path
    num_layers: int
    model: str

    def path(self, number: int) -> Path:
        """Return the file of a layer's outputs; the last layer's has a name of its own."""
        last = number == self.num_layers
        return self.folder / ("output.fvf" if last else f"layer-{number:02d}.fvf")

    def attributes(self, number: int) -> dict[str, Any]:
        """Return the attributes by which a file is known to be of this model and layer."""
        return {"model": self.model, "layer": number}

    def newest(self, features: Container) -> tuple[int, Container]:
        """Return the last complete layer and its outputs; (0, the features) where none is."""
        for number in range(self.num_layers, 0, -1):
            path = self.path(number)
            if not path.exists():
                continue
            container = Container.open(path, kind=OUTPUT_KIND)
            if container.attributes != self.attributes(number):
                container.close()
                message = f"{path} was made by another model or from another graph"
                raise DataError(message, hint="choose another folder, or delete that one")
            return number, container
        return 0, features


@dataclasses.dataclass(kw_only=True)
class _Run:
    """Settings that all layers of one inference share."""

    topology: Adjacency
    profile: DiskProfile
    memory_bytes: int
    backend: Backend
    progress: Callable[[int, int], None]
    num_layers: int

    def layers(
        self,
        all_parts: list[LayerParts],
        features: Container,
        files: _LayerFiles,
        *,
        keep_layers: bool,
    ) -> InferenceResult:
        """Compute what is missing of all layers."""
        done, source = files.newest(features)
        reports = [LayerReport(layer=number) for number in range(1, done + 1)]
        for number, parts in list(enumerate(all_parts, start=1))[done:]:
            report, made = self.layer(number, parts, source, files=files)
            reports.append(report)
            _LOG.info("%s", report.line())
            if source is not features:
                source.close()
                if not keep_layers:
                    source.path.unlink()
            source = made
        source.close()
        return InferenceResult(path=source.path, layers=tuple(reports))

    def layer(
        self, number: int, parts: LayerParts, source: Container, *, files: _LayerFiles
    ) -> tuple[LayerReport, Container]:
        """Compute a layer, or what is missing of it."""
        section = source.section("x")
        shares = share_memory(
            self.memory_bytes,
            parts,
            row_bytes=section.row_bytes,
            num_nodes=self.topology.num_nodes,
            num_edges=self.topology.num_edges,
        )
        shape = (self.topology.num_nodes, parts.out_dim)
        gap_bytes = profitable_gap_bytes(self.profile)
        with ContainerWriter(
            files.path(number),
            kind=OUTPUT_KIND,
            sections={"x": (np.float32, shape)},
            attributes=files.attributes(number),
            resume=True,
        ) as writer:
            stream = RowStream(source, shares, backend=self.backend, gap_bytes=gap_bytes)
            try:
                work = _LayerWork(self, parts, stream, writer, shares=shares, number=number)
                report = work.run(section.row_bytes, gap_bytes)
            finally:
                stream.close()
            return report, writer.commit()


class _LayerWork:
    """One layer: ranges of targets, their sums, their outputs."""

    def __init__(
        self,
        run: _Run,
        parts: LayerParts,
        stream: RowStream,
        writer: ContainerWriter,
        *,
        shares: Shares,
        number: int,
    ) -> None:
        self.run_, self.parts, self.stream, self.writer = run, parts, stream, writer
        self.number, self.shares = number, shares
        self.aggregate = Aggregate.empty(shares.targets, parts)
        self.keys = np.empty(shares.edges, np.int64)
        self.shift = max(1, (shares.targets - 1).bit_length())
        self.ways: list[str] = []

    def run(self, row_bytes: int, gap_bytes: int) -> LayerReport:
        """Compute all target ranges that are not done yet; return what that took."""
        started_s = time.perf_counter()
        first = (self.writer.progress or {"next": 0})["next"]
        count, nodes = 0, self.run_.topology.num_nodes
        for piece in ranges(self.run_.topology.indptr, self.shares, first=first):
            self._range(piece, row_bytes, gap_bytes)
            self.writer.mark({"next": piece.stop})
            count += 1
            done = (self.number - 1) * nodes + piece.stop
            self.run_.progress(done, self.run_.num_layers * nodes)
        statistics: ReadStatistics = self.stream.statistics
        return LayerReport(
            layer=self.number,
            ranges=count,
            gathered=self.ways.count("gather"),
            swept=self.ways.count("sweep"),
            bytes_read=statistics.bytes_read,
            bytes_used=statistics.bytes_used,
            requests=statistics.requests,
            seconds=time.perf_counter() - started_s,
        )

    def _range(self, piece: Piece, row_bytes: int, gap_bytes: int) -> None:
        parts, aggregate = self.parts, self.aggregate.first(piece.stop - piece.first)
        if parts.needs_own_at_start:
            for place, own in self.stream.sequence(piece.first, piece.stop):
                parts.begin(aggregate, place - piece.first, own)
        for low in range(piece.low, piece.high, len(self.keys)):
            keys = sorted_keys(
                self.run_.topology,
                piece.first,
                (low, min(low + len(self.keys), piece.high)),
                shift=self.shift,
                drops_loops=parts.drops_loops,
                keys=self.keys,
            )
            if not len(keys):
                continue
            way = choose_reading(
                keys,
                self.shift,
                row_bytes=row_bytes,
                profile=self.run_.profile,
                gap_bytes=gap_bytes,
            )
            self.ways.append(way)
            for part, rows in self.stream.sources(keys, self.shift, way):
                parts.add(aggregate, part, self.shift, parts.messages(rows))
        self._finish(piece, aggregate)

    def _finish(self, piece: Piece, aggregate: Aggregate) -> None:
        if self.parts.needs_own_at_finish:
            for place, own in self.stream.sequence(piece.first, piece.stop):
                self._write(piece, aggregate, place, own)
            return
        for place in range(piece.first, piece.stop, self.shares.rows):
            self._write(piece, aggregate, place, None)

    def _write(self, piece: Piece, aggregate: Aggregate, place: int, own: Tensor | None) -> None:
        stop = min(place + self.shares.rows, piece.stop)
        places = slice(place - piece.first, stop - piece.first)
        out = self.parts.finish(aggregate, places, own)
        if self.number < self.run_.num_layers:
            out = out.relu_()
        self.writer.write("x", place, out.numpy())


def identity_of(model: LayeredModel | TypedSAGE, data: str) -> str:
    """Return the digest of whatever decides the outputs; ``data`` is the graph's fingerprint."""
    digest = hashlib.sha256(f"{model.name} {data}".encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _no_progress(_done: int, _total: int) -> None:
    """Show nothing."""
