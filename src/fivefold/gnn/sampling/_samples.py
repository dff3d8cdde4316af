"""Offline sampling: mini-batches of some epochs, drawn in parallel, in one file read by batch.

A record is node ids, sources, edge ids (if any) and degrees, each in the narrowest type, without
gaps; its counts are a row of the index: first page, epoch, nodes per hop, edges per hop. Of several
types each of these is there type after type, and node ids count through all types.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError, DataError, require_flag, require_whole
from fivefold.gnn.sampling._sampler import HeteroNeighborSampler, NeighborSampler
from fivefold.gnn.sampling.batches import (
    GraphTypes,
    SampledBatch,
    as_ids,
    check_distinct,
    epoch_batches,
    one_type,
)
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.gnn.storage.files import Closing
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Bytes, Ids

KIND = "samples"
FORMAT_VERSION = 1
_MARK_BYTES = 64 << 20  # a mark waits for the disk: after this much, it costs little beside writing


@dataclass(frozen=True, kw_only=True)
class RecordForm:
    """The types in a record; the same for a whole file."""

    node_dtype: np.dtype[Any]
    degree_dtype: np.dtype[Any]
    edge_dtype: np.dtype[Any] | None  # None where there are no edge ids
    num_hops: int
    types: GraphTypes

    @classmethod
    def narrowest(
        cls,
        *,
        num_nodes: int,
        num_edges: int,
        max_degree: int,
        fanouts: Sequence[int],
        edge_ids: bool,
        types: GraphTypes | None = None,
    ) -> Self:
        """Return the narrowest form for what a sampler may yield."""
        return cls(
            node_dtype=_signed(num_nodes),
            degree_dtype=np.min_scalar_type(_most_drawn(max_degree, fanouts)),
            edge_dtype=_signed(num_edges) if edge_ids else None,
            num_hops=len(fanouts),
            types=one_type(num_nodes) if types is None else types,
        )

    @classmethod
    def of(cls, sampler: NeighborSampler | HeteroNeighborSampler) -> Self:
        """Return the narrowest form for what a sampler may yield."""
        edges, fanouts = sampler.edges, sampler.fanouts_by_type
        drawn = (_most_drawn(edges[kind].max_degree, numbers) for kind, numbers in fanouts.items())
        return cls.narrowest(
            num_nodes=sampler.types.total_nodes,
            num_edges=max(t.num_source_edges for t in edges.values()),
            max_degree=max(drawn),
            fanouts=[-1] * len(next(iter(fanouts.values()))),
            edge_ids=sampler.edge_ids,
            types=sampler.types,
        )

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> Self:
        """Return the form of the records of a file."""
        try:
            edge_dtype, fanouts = attributes["edge_dtype"], attributes["fanouts"]
            types = one_type(attributes["num_nodes"])
            if "types" in attributes:
                types, fanouts = GraphTypes.from_json(attributes["types"]), fanouts[0]
            return cls(
                node_dtype=np.dtype(attributes["node_dtype"]),
                degree_dtype=np.dtype(attributes["degree_dtype"]),
                edge_dtype=None if edge_dtype is None else np.dtype(edge_dtype),
                num_hops=len(fanouts),
                types=types,
            )
        except (KeyError, TypeError) as error:
            raise DataError(f"a sample file without {error}", hint="sample again") from error

    @property
    def index_width(self) -> int:
        """Return the number of columns of the index."""
        return self._edge_column + len(self.types.edge_types) * self.num_hops

    @property
    def _edge_column(self) -> int:
        return 2 + len(self.types.num_nodes) * (self.num_hops + 1)

    @cached_property
    def _target_columns(self) -> list[int]:
        """Return the columns of nodes, once for each edge type into them, that are targets."""
        firsts = {name: i * (self.num_hops + 1) for i, name in enumerate(self.types.num_nodes)}
        kinds = self.types.edge_types
        return [firsts[target] + hop for _, _, target in kinds for hop in range(self.num_hops)]

    def _parts(self, row: Ids) -> dict[str, tuple[int, np.dtype[Any]]]:
        """Return (elements, type) of each array of the record that an index row describes."""
        nodes, edges = self.counts(row)
        num_edges = int(edges.sum())
        parts = {
            "node_ids": (int(nodes.sum()), self.node_dtype),
            "sources": (num_edges, np.dtype(np.int32)),
        }
        if self.edge_dtype is not None:
            parts["edge_ids"] = (num_edges, self.edge_dtype)
        return {**parts, "degrees": (int(nodes[self._target_columns].sum()), self.degree_dtype)}

    def counts(self, row: Ids) -> tuple[Ids, Ids]:
        """Return the nodes and the edges per hop, type after type."""
        return row[2 : self._edge_column], row[self._edge_column :]

    def encode(self, batch: SampledBatch, *, first_page: int, epoch: int) -> tuple[Ids, Bytes]:
        """Return the row of the index and the record, ``[pages, 4096]``."""
        row = np.array([first_page, epoch, *batch.nodes_per_hop, *batch.edges_per_hop], np.int64)
        pages = np.zeros((self.num_pages(row), PAGE_BYTES), np.uint8)
        flat, place = pages.reshape(-1), 0
        for name, (_, dtype) in self._parts(row).items():
            part = getattr(batch, name).astype(dtype).view(np.uint8)
            flat[place : place + part.nbytes] = part
            place += part.nbytes
        return row, pages

    def num_pages(self, row: Ids) -> int:
        """Return the length of the record that an index row describes."""
        size = sum(count * dtype.itemsize for count, dtype in self._parts(row).values())
        return -(-size // PAGE_BYTES)

    def num_node_pages(self, row: Ids) -> int:
        """Return how many pages of the record hold node ids."""
        return -(-int(self.counts(row)[0].sum()) * self.node_dtype.itemsize // PAGE_BYTES)

    def decode_node_ids(self, pages: Bytes, row: Ids) -> Ids:
        """Return the node ids from the front pages of a record."""
        count, dtype = self._parts(row)["node_ids"]
        return pages.reshape(-1)[: count * dtype.itemsize].view(dtype).astype(np.int64)

    def decode(self, pages: Bytes, row: Ids, *, number: int) -> SampledBatch:
        """Return the batch of a record."""
        arrays: dict[str, Array] = {}
        flat, place = pages.reshape(-1), 0
        for name, (count, dtype) in self._parts(row).items():
            stop = place + count * dtype.itemsize
            # A copy by bytes: later arrays may not lie on a multiple of their item size.
            array = np.frombuffer(flat[place:stop].tobytes(), dtype)
            arrays[name] = array.astype(np.int64) if name.endswith("_ids") else array
            place = stop
        nodes, edges = self.counts(row)
        return SampledBatch(
            number=number,
            node_ids=arrays["node_ids"],
            batch_size=int(nodes[0]),
            nodes_per_hop=nodes.copy(),
            edges_per_hop=edges.copy(),
            degrees=arrays["degrees"].astype(np.int32),
            sources=arrays["sources"],
            edge_ids=arrays.get("edge_ids"),
        )


def _signed(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count <= 1 << 31 else np.int64)


def _most_drawn(max_degree: int, fanouts: Sequence[int]) -> int:
    return max_degree if min(fanouts) < 0 else min(max_degree, max(fanouts))


class SampleFile(Closing):
    """The batches of one or more epochs; made by :func:`sample_epochs`.

    Every batch is one record on page boundaries, so that it takes one read. Batches of all epochs
    are numbered through: batch ``i`` of epoch ``e`` has the number ``e * batches_per_epoch + i``.
    Of a graph of several types they are flat: ``HeteroSampledBatch.from_flat`` takes them apart.

    Args:
        container: An open container of kind ``"samples"``.

    Raises:
        DataError: It is of another kind or version.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.sampling import NeighborSampler, Adjacency, sample_epochs
        >>> sampler = NeighborSampler(Adjacency([0, 2, 2, 3], [1, 2, 0]), [-1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sample_epochs(sampler, [0, 2], f"{folder}/s.fvf", batch_size=1) as samples:
        ...         print(samples.num_batches, samples.counts.tolist())
        2 [2, 1, 2]
    """

    def __init__(self, container: Container) -> None:
        container.check_kind(KIND)
        self.container = container
        version = container.attributes.get("format_version")
        if version != FORMAT_VERSION:
            raise DataError(
                f"{container.path} holds samples of format {version}",
                hint=f"this version reads format {FORMAT_VERSION}; sample again",
            )
        attributes = container.attributes
        self._form = RecordForm.from_attributes(attributes)
        self._index: Ids = container.read("index")
        self.num_batches: int = len(self._index)
        self.batch_size: int = attributes["batch_size"]
        self.num_epochs: int = attributes["epochs"]
        self.first_epoch: int = attributes["first_epoch"]
        self.num_nodes: int = attributes["num_nodes"]
        self.types: GraphTypes = self._form.types
        self.fanouts: tuple[Any, ...] = tuple(attributes["fanouts"])
        self.seed: int = attributes["seed"]
        self.topology_fingerprint: str = attributes["topology"]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file.

        Raises:
            DataError: There is none, or it is foreign, damaged, truncated or of another version.
            StorageError: The disk refused.
        """
        container = Container.open(path, kind=KIND)
        try:
            return cls(container)
        except BaseException:
            container.close()
            raise

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self.container.path

    @property
    def has_edge_ids(self) -> bool:
        """Return whether the batches say which edges they have."""
        return self._form.edge_dtype is not None

    @property
    def fingerprint(self) -> str:
        """Return a hash over all contents."""
        return self.container.fingerprint

    @property
    def nbytes(self) -> int:
        """Return the length of the file."""
        return self.container.nbytes

    @cached_property
    def counts(self) -> NDArray[np.uint32]:
        """Return how many batches use each node."""
        return self.container.read("counts")

    @cached_property
    def train_ids(self) -> Ids:
        """Return the seeds of an epoch, as they were given."""
        return self.container.read("train_ids")

    def batch(self, number: int) -> SampledBatch:
        """Read one batch.

        Raises:
            ConfigurationError: There is no batch of this number.
            DataError: A page is damaged.
            StorageError: The disk refused.
        """
        row = self._row(number)
        pages = self._pages(row, self._form.num_pages(row))
        return self._form.decode(pages, row, number=number)

    def node_ids(self, number: int) -> Ids:
        """Read the node ids of one batch, and nothing else of it; errors are those of ``batch``."""
        row = self._row(number)
        return self._form.decode_node_ids(self._pages(row, self._form.num_node_pages(row)), row)

    def num_nodes_of(self, number: int) -> int:
        """Return how many nodes a batch has, without reading it."""
        return int(self._form.counts(self._row(number))[0].sum())

    def num_edges_of(self, number: int) -> int:
        """Return how many edges a batch has, without reading it."""
        return int(self._form.counts(self._row(number))[1].sum())

    def record_bytes_of(self, number: int) -> int:
        """Return how many bytes a batch takes in the file, without reading it."""
        return self._form.num_pages(self._row(number)) * PAGE_BYTES

    def close(self) -> None:
        """Let go of the file."""
        self.container.close()

    def __len__(self) -> int:
        return self.num_batches

    def _row(self, number: int) -> Ids:
        if not 0 <= number < self.num_batches:
            raise ConfigurationError(
                f"there is no batch {number}", hint=f"batches are 0 to {self.num_batches - 1}"
            )
        row: Ids = self._index[number]
        return row

    def _pages(self, row: Ids, count: int) -> Bytes:
        first = int(row[0])
        return self.container.read("records", first, first + count)


def sample_epochs(  # noqa: PLR0913 - settings of one run, nearly all keyword-only
    sampler: NeighborSampler | HeteroNeighborSampler,
    train_ids: ArrayLike,
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    input_type: str | None = None,
    epochs: int = 1,
    first_epoch: int = 0,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
) -> SampleFile:
    """Sample whole epochs and write them to one file.

    Memory: 4 bytes for each node of the graph (access counts), 24 for each training node, and
    ``sampler.threads + 1`` batches, whatever the number of batches. The contents depend only on
    topology, sampler settings and arguments, not on threads, interruptions or ``path``.

    Args:
        sampler: Draws the batches, ``sampler.threads`` at a time.
        train_ids: Seeds of an epoch, each once.
        path: Where the file shall be; it appears there when it is whole.
        batch_size: Seeds of a batch.
        input_type: Node type of the seeds, with a ``HeteroNeighborSampler``.
        epochs: How many epochs, each in its own order with its own random numbers.
        first_epoch: Number of the first, part of the key of the random numbers.
        seed: Of the order of the batches; None takes the sampler's.
        progress: Called after each batch with the batches done and the batches in all.
        resume: Go on where an interrupted run stopped, and take a finished file of the same
            settings as it is. Otherwise begin anew and replace what is there.

    Raises:
        ConfigurationError: ``train_ids`` is empty or has an id twice or out of range, a number
            is not positive, or ``input_type`` does not fit the sampler.
        DataError: With ``resume``: what is there was made with other settings, or is damaged.
        StorageError: The disk refused or is full; what was written stays for resuming.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.sampling import NeighborSampler, Adjacency
        >>> sampler = NeighborSampler(Adjacency([0, 1, 2, 2], [1, 2]), [1, 1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sample_epochs(
        ...         sampler, [0, 1, 2], f"{folder}/s.fvf", batch_size=2, epochs=3
        ...     ) as samples:
        ...         print(samples.num_batches, samples.batch(5).batch_size)
        6 1
    """
    ids = as_ids(train_ids, "train_ids")
    order_seed = sampler.seed if seed is None else require_whole("seed", seed, least=-(2**63))
    first = require_whole("first_epoch", first_epoch, least=-(2**63))
    numbers = range(first, first + require_whole("epochs", epochs))
    size = require_whole("batch_size", batch_size)
    work = _Sampling(sampler, input_type, ids, batch_size=size, epochs=numbers, seed=order_seed)
    finished = _finished(Path(path), work.attributes) if require_flag("resume", resume) else None
    if finished is not None:
        return finished
    with ContainerWriter(
        path, kind=KIND, sections=work.sections(), attributes=work.attributes, resume=resume
    ) as writer:
        return SampleFile(work.write(writer, progress))


def _finished(path: Path, attributes: dict[str, Any]) -> SampleFile | None:
    if not path.exists():
        return None
    samples = SampleFile.open(path)
    found = samples.container.attributes
    name = min((key for key, value in attributes.items() if found.get(key) != value), default=None)
    if name is None:
        return samples
    samples.close()
    raise DataError(
        f"{path} was sampled with another {name}: {found.get(name)} instead of {attributes[name]}",
        hint="sample with resume=False to replace it, or choose another path",
    )


class _Sampling:
    """Batches that are to be sampled, and the running totals."""

    def __init__(
        self,
        sampler: NeighborSampler | HeteroNeighborSampler,
        input_type: str | None,
        train_ids: Ids,
        *,
        batch_size: int,
        epochs: range,
        seed: int,
    ) -> None:
        typed, types = isinstance(sampler, HeteroNeighborSampler), sampler.types
        if typed != (input_type is not None) or (typed and input_type not in types.num_nodes):
            known = f"one of {', '.join(types.num_nodes)}" if typed else "None: there is one type"
            raise ConfigurationError(
                f"the sampler is a {type(sampler).__name__}, and input_type is {input_type!r}",
                hint=f"give as input_type {known}",
            )
        if not types.edge_types:
            message = "the graph has no edge types"
            raise ConfigurationError(message, hint="give it at least one")
        self.input_type = next(iter(types.num_nodes)) if input_type is None else input_type
        check_distinct(train_ids, types.num_nodes[self.input_type])
        if train_ids.size == 0:
            message = "there are no training nodes"
            raise ConfigurationError(message, hint="give at least one")
        self.sampler = sampler
        self.train_ids = train_ids
        self.batch_size = batch_size
        self.epochs = epochs
        self.seed = seed
        self.per_epoch = -(-train_ids.size // batch_size)
        self.total = self.per_epoch * len(epochs)
        self.counts = np.zeros(types.total_nodes, np.uint32)
        self.form = RecordForm.of(sampler)
        self.attributes = self._attributes()

    def _attributes(self) -> dict[str, Any]:
        sampler, types, of_types = self.sampler, self.form.types, {}
        fanouts: list[Any] = [list(numbers) for numbers in sampler.fanouts_by_type.values()]
        if isinstance(sampler, HeteroNeighborSampler):
            of_types = {"types": types.to_json(), "input_type": self.input_type}
        else:
            (fanouts,) = fanouts
        return {
            "format_version": FORMAT_VERSION,
            "topology": sampler.topology.fingerprint,
            "num_nodes": types.total_nodes,
            "fanouts": fanouts,
            "seed": sampler.seed,
            "order_seed": self.seed,
            "batch_size": self.batch_size,
            "epochs": len(self.epochs),
            "first_epoch": self.epochs.start,
            "train_ids": hashlib.blake2b(self.train_ids.data, digest_size=16).hexdigest(),
            **of_types,
            "node_dtype": self.form.node_dtype.str,
            "degree_dtype": self.form.degree_dtype.str,
            "edge_dtype": None if self.form.edge_dtype is None else self.form.edge_dtype.str,
        }

    def sections(self) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
        """Return the sections of the file."""
        return {
            "records": (np.uint8, (None, PAGE_BYTES)),
            "index": (np.int64, (self.total, self.form.index_width)),
            "counts": (np.uint32, self.counts.shape),
            "train_ids": (np.int64, self.train_ids.shape),
        }

    def write(self, writer: ContainerWriter, progress: Callable[[int, int], None] | None) -> Any:
        """Sample from where ``writer`` stands to the end; return the finished container."""
        done = 0 if writer.progress is None else int(writer.progress["batches"])
        if done:
            self._count_again(writer, done)
        unmarked_bytes = 0
        for number, epoch, batch in self._batches(done):
            row, pages = self.form.encode(batch, first_page=writer.rows("records"), epoch=epoch)
            writer.append("records", pages)
            writer.write("index", number, row[None])
            self.counts[batch.node_ids] += 1
            unmarked_bytes += pages.nbytes
            if unmarked_bytes >= _MARK_BYTES:
                writer.mark({"batches": number + 1})
                unmarked_bytes = 0
            if progress is not None:
                progress(number + 1, self.total)
        writer.write("counts", 0, self.counts)
        writer.write("train_ids", 0, self.train_ids)
        return writer.commit()

    def _batches(self, done: int) -> Iterator[tuple[int, int, SampledBatch]]:
        whole = done // self.per_epoch
        for place, epoch in enumerate(self.epochs[whole:], whole):
            first = max(done - place * self.per_epoch, 0)
            seeds = epoch_batches(
                self.train_ids, batch_size=self.batch_size, seed=self.seed, epoch=epoch
            )[first:]
            if isinstance(self.sampler, NeighborSampler):
                stream = self.sampler.sample_many(seeds, epoch=epoch, first=first)
            else:
                by_type = [{self.input_type: ids} for ids in seeds]
                found = self.sampler.sample_many(by_type, epoch=epoch, first=first)
                stream = (batch.flat(self.sampler.types) for batch in found)
            for number, batch in enumerate(stream, place * self.per_epoch + first):
                yield number, epoch, batch

    def _count_again(self, writer: ContainerWriter, done: int) -> None:
        """Rebuild the counts from the batches that an interrupted run had written."""
        for row in writer.read("index", 0, done):
            first = int(row[0])
            pages = writer.read("records", first, first + self.form.num_node_pages(row))
            self.counts[self.form.decode_node_ids(pages, row)] += 1
