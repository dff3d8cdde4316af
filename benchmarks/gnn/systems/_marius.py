"""MariusGNN: partitions in a buffer, and sampling that sees nothing outside it.

Training nodes are numbered first, features are rewritten in that order, edges are sorted into
buckets. A state of the buffer is read in bulk, its induced graph is built from its buckets, and
mini-batches are sampled from that graph alone: no random reads at all, at the price of every edge
that leaves the buffer. A background thread prepares the next state. Waleffe et al., EuroSys 2023.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.gnn.systems._buckets import EdgeBuckets
from benchmarks.gnn.systems._partitions import (
    assign_training_nodes,
    dispersed_states,
    partition_rows,
    sequential_states,
    training_first_order,
)
from benchmarks.gnn.systems._system import Preparation, SystemBatch, SystemStatistics, Workload
from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling import Adjacency, NeighborSampler
from fivefold.gnn.storage import Container, ContainerWriter, RowReader
from fivefold.gnn.storage.pages import gather_rows

__all__ = ["MariusSystem"]

_COPY_BYTES = 64 << 20
Ids = NDArray[np.int64]
BufferPolicy = Literal["sequential", "dispersed"]


class MariusSystem:
    """Bulk reads of partitions and in-buffer sampling.

    Args:
        workload: What to run on; its cache budget is the buffer. Of the samples only the settings
            are used: training ids, batch size, fan-outs.
        topology: The graph, in memory.
        policy: ``"sequential"``: one state per epoch with all training nodes; ``"dispersed"``: all
            partitions pass through, one swap per step.
        num_partitions: Partitions on disk.
        shuffle: Number nodes at random within the two groups, as published. Without it, where ids
            are random anyhow, features are rewritten in one sequential pass.
        seed: Of numbering, orders and samples.

    Raises:
        ConfigurationError: The buffer does not hold a partition, or the policy is unknown.

    Example:
        >>> MariusSystem.__name__
        'MariusSystem'
    """

    def __init__(
        self,
        workload: Workload,
        topology: Adjacency,
        *,
        policy: BufferPolicy = "sequential",
        num_partitions: int = 32,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if policy not in {"sequential", "dispersed"}:
            raise ConfigurationError(f"policy must be 'sequential' or 'dispersed'; got {policy!r}")
        self.workload, self.topology, self.policy = workload, topology, policy
        self.name = f"MariusGNN {policy}"
        self.num_partitions, self.seed = num_partitions, seed
        self.rows = partition_rows(workload.num_nodes, num_partitions)
        staged = 1 if policy == "dispersed" else 0
        fits = workload.cache_bytes // max(1, self.rows * workload.row_bytes) - staged
        self.buffer_partitions = min(fits, num_partitions)
        if self.buffer_partitions < 1:
            raise ConfigurationError(
                f"a buffer of {workload.cache_bytes} bytes holds no partition of {self.rows} rows",
                hint="use more partitions or a larger budget",
            )
        self.order = training_first_order(
            workload.num_nodes, workload.samples.train_ids, seed=seed if shuffle else None
        )
        self._num_train = len(workload.samples.train_ids)
        # Both policies read the same files.
        recipe = f"{workload.features.fingerprint[:12]}-{num_partitions}-{seed}-{int(shuffle)}"
        self._folder = workload.folder / f"marius-{recipe}"
        self._reader: RowReader | None = None
        self._buckets: EdgeBuckets | None = None
        self._buffer = workload.empty_rows(0)
        self._statistics = SystemStatistics()

    def prepare(self) -> Preparation:
        """Rewrite the features in the new order and sort the edges into buckets, once for all."""
        started_s = time.perf_counter()
        self._folder.mkdir(parents=True, exist_ok=True)
        path, edges = self._folder / "features.fvf", self._folder / "edges"
        if path.exists():
            container = Container.open(path, kind="features")
        else:
            container = _rewrite(self.workload, self.order, path)
        self._buckets = EdgeBuckets.open(
            edges, num_nodes=self.workload.num_nodes, rows=self.rows
        ) or EdgeBuckets.write(
            edges,
            self.topology,
            order=self.order,
            rows=self.rows,
            num_partitions=self.num_partitions,
        )
        self._reader = RowReader(container, self.workload.section)
        self._buffer = self.workload.empty_rows(self.buffer_partitions * self.rows)
        written = container.path.stat().st_size + self._buckets.nbytes
        return Preparation(
            seconds=time.perf_counter() - started_s,
            bytes_written=written,
            details={
                "partitions": self.num_partitions,
                "buffer partitions": self.buffer_partitions,
            },
        )

    def states(self, epoch: int) -> list[Ids]:
        """Return the states of the buffer in an epoch."""
        seed = self.seed * 1_000_003 + epoch
        if self.policy == "dispersed":
            return dispersed_states(self.num_partitions, self.buffer_partitions, seed=seed)
        train_partitions = -(-self._num_train // self.rows)
        return sequential_states(
            self.num_partitions,
            self.buffer_partitions,
            train_partitions=train_partitions,
            seed=seed,
        )

    def batches(self, epoch: int) -> list[list[Ids]]:
        """Return the seeds of each batch of each state, in new numbers."""
        states = self.states(epoch)
        train = np.arange(self._num_train)
        chosen = assign_training_nodes(
            states,
            train // self.rows,
            num_partitions=self.num_partitions,
            seed=self.seed * 1_000_003 + epoch,
        )
        draw = np.random.default_rng([self.seed, epoch, 7])
        size, found = self.workload.samples.batch_size, []
        for state in range(len(states)):
            seeds = draw.permutation(train[chosen == state])
            found.append([seeds[at : at + size] for at in range(0, len(seeds), size)])
        return found

    def seek(self, start: int) -> None:
        """Do nothing: a stretch of batches begins with its state's bulk read."""

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Sample and hand out batches, state by state."""
        assert self._buckets is not None, "prepare() comes first"
        states, batches = self.states(number), self.batches(number)
        last = sum(map(len, batches)) if stop is None else stop
        at, nothing = 0, np.full(self.buffer_partitions, -1, np.int64)
        with ThreadPoolExecutor(1, thread_name_prefix="swap") as background:
            staged = background.submit(self._stage, states[0], nothing)
            for place, (state, seeds_of_state) in enumerate(zip(states, batches, strict=True)):
                rows, slots, graph = staged.result()
                self._swap_in(rows, slots)
                if place + 1 < len(states):
                    staged = background.submit(self._stage, states[place + 1], state)
                sampler = NeighborSampler(graph, self.workload.samples.fanouts, seed=self.seed)
                for seeds in seeds_of_state:
                    if start <= at < last:
                        yield self._batch(sampler, seeds, state, number, at)
                    at += 1
                if at >= last:
                    return

    def _stage(self, state: Ids, resident: Ids) -> tuple[NDArray[Any], Ids, Adjacency]:
        """Read the partitions that a state brings in, and build its graph."""
        assert self._reader is not None, "prepare() comes first"
        assert self._buckets is not None, "prepare() comes first"
        slots = np.flatnonzero(state != resident)
        slots = slots[np.argsort(state[slots])]
        starts = state[slots] * self.rows
        counts = np.clip(self.workload.num_nodes - starts, 0, self.rows)
        # The first state goes straight to its place; later ones wait until theirs is free.
        whole = bool((resident < 0).all())
        rows = self._buffer if whole else self.workload.empty_rows(len(slots) * self.rows)
        places = slots if whole else np.arange(len(slots))
        some = counts > 0
        if some.any():
            read = self._reader.read_runs(
                starts[some], counts[some], places[some] * self.rows, rows
            )
            self._statistics.bytes_read += read.bytes_read
            self._statistics.requests += read.requests
        return rows, slots, self._buckets.induced(state)

    def _swap_in(self, rows: NDArray[Any], slots: Ids) -> None:
        if rows is self._buffer:
            return
        for i, slot in enumerate(slots.tolist()):
            part = slice(slot * self.rows, (slot + 1) * self.rows)
            self._buffer[part] = rows[i * self.rows : (i + 1) * self.rows]

    def _batch(
        self, sampler: NeighborSampler, seeds: Ids, state: Ids, epoch: int, number: int
    ) -> SystemBatch:
        slot_of = np.full(self.num_partitions, -1, np.int64)
        slot_of[state] = np.arange(len(state))
        local = slot_of[seeds // self.rows] * self.rows + seeds % self.rows
        sample = sampler.sample(local, epoch=epoch, batch=number)
        inside = sample.node_ids
        x = self.workload.empty_rows(len(inside))
        gather_rows(self._buffer, inside, x)
        new = state[inside // self.rows] * self.rows + inside % self.rows
        self._statistics.rows_requested += len(x)
        self._statistics.rows_cached += len(x)
        return SystemBatch(number, self.order[new], x, len(seeds), sample.edge_index, sample)

    def work(self, start: int, stop: int) -> int:
        """Batches."""
        return stop - start

    def statistics(self) -> SystemStatistics:
        """Return the running totals."""
        return self._statistics

    def close(self) -> None:
        """Free the buffer and close the reader."""
        if self._reader is not None:
            self._reader.close()
        self._buffer = self.workload.empty_rows(0)


def _rewrite(workload: Workload, order: Ids, path: Path) -> Container:
    """Write the features in another order, a stretch of memory at a time."""
    section = workload.features.sections[workload.section]
    step = max(1, _COPY_BYTES // max(1, workload.row_bytes))
    reader = RowReader(workload.features, workload.section)
    sections = {workload.section: (np.dtype(section.dtype), tuple(section.shape))}
    writer = ContainerWriter(path, kind="features", sections=sections, attributes={})
    try:
        for start in range(0, workload.num_nodes, step):
            old = order[start : start + step]
            sort = np.argsort(old)
            rows = workload.empty_rows(len(old))
            reader.read_rows(old[sort], rows, destinations=sort)
            writer.write(workload.section, start, rows)
    except BaseException:
        writer.abort()
        raise
    finally:
        reader.close()
    return writer.commit()
