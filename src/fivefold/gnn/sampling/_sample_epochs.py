"""Offline sampling: the batches of some epochs, drawn in parallel and streamed to one file."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling._batch import SampledBatch
from fivefold.gnn.sampling._epoch import as_ids, check_distinct, epoch_batches
from fivefold.gnn.sampling._sample_file import (
    FORMAT_VERSION,
    KIND,
    PAGE_BYTES,
    RecordForm,
    SampleFile,
    form_from_attributes,
    record_form,
)
from fivefold.gnn.sampling._sampler import NeighborSampler
from fivefold.gnn.storage import ContainerWriter

Progress = Callable[[int, int], None]
_MARK_BYTES = 64 << 20  # a mark waits for the disk: after this much, it costs little beside writing


def sample_epochs(  # noqa: PLR0913 - settings of one run, nearly all keyword-only
    sampler: NeighborSampler,
    train_ids: ArrayLike,
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    epochs: int = 1,
    first_epoch: int = 0,
    seed: int | None = None,
    progress: Progress | None = None,
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
        epochs: How many epochs, each in its own order with its own random numbers.
        first_epoch: Number of the first, part of the key of the random numbers.
        seed: Of the order of the batches; None takes the sampler's.
        progress: Called after each batch with the batches done and the batches in all.
        resume: Go on where an interrupted run stopped, and take a finished file of the same
            settings as it is. Otherwise begin anew and replace what is there.

    Returns:
        The file, open.

    Raises:
        ConfigurationError: ``train_ids`` is empty or has an id twice or out of range, or a number
            is not positive.
        DataError: With ``resume``: what is there was made with other settings, or is damaged.
        StorageError: The disk refused or is full; what was written stays for resuming.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.sampling import Topology
        >>> sampler = NeighborSampler(Topology([0, 1, 2, 2], [1, 2]), [1, 1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sample_epochs(
        ...         sampler, [0, 1, 2], f"{folder}/s.fvf", batch_size=2, epochs=3
        ...     ) as samples:
        ...         print(samples.num_batches, samples.batch(5).batch_size)
        6 1
    """
    ids = as_ids(train_ids, "train_ids")
    order_seed = operator.index(sampler.seed if seed is None else seed)
    first = operator.index(first_epoch)
    numbers = range(first, first + operator.index(epochs))
    work = _Work(sampler, ids, operator.index(batch_size), numbers, order_seed)
    finished = _finished(Path(path), work.attributes) if resume else None
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
    differing = sorted(key for key, value in attributes.items() if found.get(key) != value)
    if not differing:
        return samples
    samples.close()
    name = differing[0]
    raise DataError(
        f"{path} was sampled with another {name}: {found.get(name)} instead of {attributes[name]}",
        hint="sample with resume=False to replace it, or choose another path",
    )


class _Work:
    """What is to be sampled, and the running totals."""

    def __init__(
        self,
        sampler: NeighborSampler,
        train_ids: NDArray[np.int64],
        batch_size: int,
        epochs: range,
        seed: int,
    ) -> None:
        if not isinstance(sampler, NeighborSampler):
            raise ConfigurationError(
                f"the sampler is a {type(sampler).__name__}",
                hint="use a NeighborSampler; HeteroTopology.merged() gives it one topology",
            )
        check_distinct(train_ids, sampler.topology.num_nodes)
        if train_ids.size == 0 or len(epochs) < 1:
            raise ConfigurationError(
                f"{train_ids.size} training nodes, {len(epochs)} epochs", hint="use at least one"
            )
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}", hint="use a positive integer")
        self.sampler = sampler
        self.train_ids = train_ids
        self.batch_size = batch_size
        self.epochs = epochs
        self.seed = seed
        self.per_epoch = -(-train_ids.size // batch_size)
        self.total = self.per_epoch * len(epochs)
        self.counts = np.zeros(sampler.topology.num_nodes, np.uint32)
        self.attributes = self._attributes()
        self.form: RecordForm = form_from_attributes(self.attributes)

    def _attributes(self) -> dict[str, Any]:
        sampler, topology = self.sampler, self.sampler.topology
        form = record_form(
            num_nodes=topology.num_nodes,
            num_edges=topology.num_edges,
            max_degree=topology.max_degree,
            fanouts=sampler.fanouts,
            edge_ids=sampler.edge_ids,
        )
        return {
            "format_version": FORMAT_VERSION,
            "topology": topology.fingerprint,
            "num_nodes": topology.num_nodes,
            "fanouts": list(sampler.fanouts),
            "seed": sampler.seed,
            "order_seed": self.seed,
            "batch_size": self.batch_size,
            "epochs": len(self.epochs),
            "first_epoch": self.epochs.start,
            "train_ids": hashlib.blake2b(self.train_ids.data, digest_size=16).hexdigest(),
            "node_dtype": form.node_dtype.str,
            "degree_dtype": form.degree_dtype.str,
            "edge_dtype": None if form.edge_dtype is None else form.edge_dtype.str,
        }

    def sections(self) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
        """Return the sections of the file."""
        return {
            "records": (np.uint8, (None, PAGE_BYTES)),
            "index": (np.int64, (self.total, self.form.index_width)),
            "counts": (np.uint32, self.counts.shape),
            "train_ids": (np.int64, self.train_ids.shape),
        }

    def write(self, writer: ContainerWriter, progress: Progress | None) -> Any:
        """Sample from where ``writer`` stands to the end; return the finished container."""
        done = 0 if writer.progress is None else int(writer.progress["batches"])
        if done:
            self._count_again(writer, done)
        unmarked_bytes = 0
        for number, epoch, batch in self._batches(done):
            pages = self.form.encode(batch)
            row = self.form.index_row(batch, first_page=writer.rows("records"), epoch=epoch)
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
        for place, epoch in enumerate(self.epochs):
            first = min(max(done - place * self.per_epoch, 0), self.per_epoch)
            if first == self.per_epoch:
                continue
            seeds = epoch_batches(
                self.train_ids, batch_size=self.batch_size, seed=self.seed, epoch=epoch
            )
            stream = self.sampler.sample_many(seeds[first:], epoch=epoch, first=first)
            for number, batch in enumerate(stream, place * self.per_epoch + first):
                yield number, epoch, batch

    def _count_again(self, writer: ContainerWriter, done: int) -> None:
        """Rebuild the counts from the batches that an interrupted run had written."""
        index = writer.read("index", 0, done)
        for row in index:
            first = int(row[0])
            pages = writer.read("records", first, first + self.form.num_node_pages(row))
            self.counts[self.form.decode_node_ids(pages, row)] += 1
