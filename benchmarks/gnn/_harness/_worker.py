"""A process that serves one system under a memory limit, and the handle by which it is driven.

The worker is started inside its group, so that everything it ever allocates is counted. Commands
and answers are lines of JSON. It stays between runs, with its cache full, as in training.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import selectors
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.gnn._harness._memory_limit import MemoryLimit
from benchmarks.gnn._harness._table import Order, make_system
from benchmarks.gnn.systems import System, SystemBatch, prefetched
from fivefold.gnn.data import Dataset, generate_graph
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.sampling import NeighborSampler, SampleFile, sample_epochs
from fivefold.gnn.storage import RowReader

__all__ = ["Worker", "WorkerError"]

CHECKED_EVERY = 8
CHECKED_ROWS = 64
TRAP_SECONDS = 20.0
Answer = dict[str, Any]


class WorkerError(RuntimeError):
    """A worker failed, was killed or did not answer in time."""


class Worker:
    """Drives one worker.

    Args:
        order: What it serves.
        limit_bytes: Of its group; None for no limit.
        start_timeout_s: Until it says that it is ready.
    """

    def __init__(
        self, order: Order, *, limit_bytes: int | None, start_timeout_s: float = 180.0
    ) -> None:
        self.order, self.name = order, order.name
        self.limit = MemoryLimit(limit_bytes, name="fivefold-gnn")
        self._start_timeout_s = start_timeout_s
        self._ready = False
        environment = os.environ | {"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))}
        here = [str(Path(__file__).parents[3]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, here))
        # glibc's own largest threshold, from the start: arrays above go back to the system when
        # they are freed. A lower one has every array of a batch faulted in again, page by page.
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_ARENA_MAX": "2",
                        "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gnn._harness._worker", order.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
            preexec_fn=self.limit.enter,  # noqa: PLW1509 - no threads run yet; it only writes a file
        )

    def ask(self, do: str, *, timeout_s: float = 900.0, **what: Any) -> Answer:
        """Send a command and wait for its answer."""
        if not self._ready:
            self._answer("start", self._start_timeout_s)
            self._ready = True
        assert self._process.stdin is not None, "it has a pipe"
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(self._obituary(do)) from error
        return self._answer(do, timeout_s)

    def _answer(self, do: str, timeout_s: float) -> Answer:
        assert self._process.stdout is not None, "it has a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self._process.kill()
                raise WorkerError(f"{self.name}: no answer to {do!r} within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._obituary(do))
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {do}: {answer['error']}")
        answer["peak_bytes"] = self.limit.peak_bytes()
        answer["anonymous_bytes"] = self.limit.anonymous_bytes()
        return answer

    def _obituary(self, do: str) -> str:
        code = self._process.wait(timeout=30)
        killed = " (killed for memory)" if self.limit.killed() or code == -9 else ""
        return f"{self.name}: ended with code {code}{killed} at {do!r}"

    def close(self) -> None:
        """End the process and remove its group."""
        if self._process.poll() is None:
            assert self._process.stdin is not None, "it has a pipe"
            try:
                self._process.stdin.close()
                self._process.wait(timeout=30)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.limit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# -- within the process ---------------------------------------------------------------------------


class _Served:
    """One system and what is done with it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.samples: SampleFile | None = None
        self.system: System | None = None
        self.model: Any = None
        self.at: int | None = None

    @cached_property
    def dataset(self) -> Dataset:
        """Opened when first used: a worker may be there to make it."""
        return Dataset.open(self.order.dataset)

    def answer(self, do: str, what: dict[str, Any]) -> Answer:
        known = (self.generate, self.sample, self.prepare, self.epoch, self.read_store, self.trap,
                 self.work)  # fmt: skip
        return {method.__name__: method for method in known}[do](**what)

    def work(self, *, start: int, stop: int) -> Answer:
        """Say what the system works on in a stretch of an epoch."""
        assert self.system is not None, "prepared before"
        return {"work": self.system.work(start, stop)}

    def generate(self, *, nodes: int, dim: int, memory_bytes: int) -> Answer:
        """Generate the graph."""
        started_s = time.perf_counter()
        with generate_graph(
            self.order.dataset, nodes=nodes, dim=dim, seed=1, memory_bytes=memory_bytes
        ) as made:
            return {"seconds": time.perf_counter() - started_s, "edges": made.num_edges}

    def sample(self, *, batch_size: int, fanouts: list[int], train: int, seed: int) -> Answer:
        """Sample an epoch offline; the topology is in memory."""
        started_s = time.perf_counter()
        ids = self.dataset.train[:train]
        sampler = NeighborSampler(self.dataset.topology(), fanouts, seed=seed)
        with sample_epochs(
            sampler, np.sort(ids), self.order.samples, batch_size=batch_size, seed=seed
        ) as found:
            return {
                "seconds": time.perf_counter() - started_s,
                "batches": found.num_batches,
                "bytes": found.nbytes,
                "accesses": int(found.counts.sum(dtype=np.int64)),
                "distinct": int(np.count_nonzero(found.counts)),
            }

    def prepare(self, *, disk_rows: int | None = None) -> Answer:
        """Make and prepare the system."""
        if disk_rows is not None:
            self.order = Order(**(vars(self.order) | {"disk_rows": disk_rows}))
        self.samples = SampleFile.open(self.order.samples)
        self.system = make_system(self.order, self.dataset, self.samples)
        done = self.system.prepare()
        return {
            "seconds": done.seconds,
            "bytes_written": done.bytes_written,
            "details": {key: float(value) for key, value in done.details.items()},
            "batches": self.samples.num_batches,
        }

    def epoch(
        self, *, number: int, start: int, stop: int | None, train: bool, seek: bool
    ) -> Answer:
        """Run an epoch or a stretch of one, with or without the model, by the clock."""
        assert self.system is not None, "prepared before"
        # What a memory map had in the page cache is gone: it warms up each time.
        if seek and (self.at != start or "mmap" in self.order.name):
            self.system.seek(start)
        learn = self._learner() if train else None
        before, io_before = self.system.statistics().copy(), _disk_bytes()[0]
        kept: list[tuple[Any, Any]] = []
        started_s = time.perf_counter()
        moments = self._consume(self._batches(number, start, stop), learn, kept)
        seconds = time.perf_counter() - started_s
        done, self.at = self.system.statistics() - before, stop
        return {
            "seconds": seconds,
            "first_s": moments[0] - started_s if moments else seconds,
            "batches": len(moments),
            "rows_requested": done.rows_requested,
            "rows_cached": done.rows_cached,
            "bytes_read": done.bytes_read,
            "requests": done.requests,
            "process_bytes_read": _disk_bytes()[0] - io_before,
            "wrong_rows": self._wrong_rows(kept),
        }

    def read_store(self, *, batches: int) -> Answer:
        """Take batches from a store that a command has packed, and use them for nothing."""
        from fivefold.gnn.loading import DiskLoader  # noqa: PLC0415 - torch takes seconds

        folder = next(Path(self.order.folder).glob("store-*"))
        kept: list[tuple[Any, Any]] = []
        with PackedStore.open(folder) as store, DiskLoader(store, prefetch=2) as loader:
            started_s, done = time.perf_counter(), 0
            for batch in itertools.islice(loader, batches):
                done += 1
                if done % CHECKED_EVERY == 1:
                    at = np.linspace(0, batch.num_nodes - 1, CHECKED_ROWS).astype(np.int64)
                    kept.append((batch.n_id.numpy()[at], batch.x.numpy()[at]))
            seconds, statistics = time.perf_counter() - started_s, loader.statistics()
        return {
            "seconds": seconds,
            "batches": done,
            "bytes_read": statistics.bytes_read,
            "wrong_rows": self._wrong_rows(kept),
        }

    def trap(self, *, rows: int) -> Answer:
        """Gather a few random rows through a plain memory map, for a bounded time."""
        mapped = self.dataset.features.memory_map("x", advice="normal")
        ids = np.random.default_rng(0).integers(0, len(mapped), rows)
        before, started_s, done = _disk_bytes()[0], time.perf_counter(), 0
        for first in range(0, rows, 16):
            done += len(np.array(mapped[ids[first : first + 16]]))
            if time.perf_counter() - started_s > TRAP_SECONDS:
                break
        seconds, row_bytes = time.perf_counter() - started_s, self.dataset.row_bytes
        return {
            "rows": done,
            "rows_per_s": done / seconds,
            "amplification": (_disk_bytes()[0] - before) / (done * row_bytes),
        }

    def _batches(self, number: int, start: int, stop: int | None) -> Iterator[SystemBatch]:
        assert self.system is not None, "prepared before"
        batches = self.system.epoch(number, start=start, stop=stop)
        # Ours has threads of its own; the others gather in one, with a queue of 2 as published.
        return batches if self.order.name.startswith("ours") else prefetched(batches, depth=2)

    @staticmethod
    def _consume(
        batches: Iterator[SystemBatch], learn: Any, kept: list[tuple[Any, Any]]
    ) -> list[float]:
        """Use all batches; when each of them came."""
        moments: list[float] = []
        for batch in batches:
            moments.append(time.perf_counter())
            edges = batch.edge_index()
            if learn is not None:
                learn(batch, edges)
            if len(moments) % CHECKED_EVERY == 1:
                at = np.linspace(0, len(batch.x) - 1, CHECKED_ROWS).astype(np.int64)
                kept.append((batch.node_ids[at].copy(), batch.x[at].copy()))
        return moments

    def _wrong_rows(self, kept: list[tuple[Any, Any]]) -> int:
        """Compare what was handed out with the features, bit for bit, after the clock."""
        wrong = 0
        with RowReader(self.dataset.features, "x") as reader:
            for ids, x in kept:
                order = np.unique(ids, return_index=True)[1]
                rows = np.empty((len(order), x.shape[1]), x.dtype)
                reader.read_rows(ids[order], rows)
                same = rows.view(np.uint8) == np.ascontiguousarray(x[order]).view(np.uint8)
                wrong += int(np.count_nonzero(~same.all(axis=1)))
        return wrong

    def _learner(self) -> Any:
        """A training step of GraphSAGE on a batch."""
        import torch  # noqa: PLC0415 - only a full epoch needs it

        from fivefold.gnn.training import GraphSAGE  # noqa: PLC0415 - as above

        assert self.samples is not None, "prepared before"
        if self.model is None:
            torch.manual_seed(0)
            self.model = GraphSAGE(
                self.dataset.dim,
                self.order.hidden,
                self.dataset.num_classes,
                num_layers=len(self.samples.fanouts),
            )
        labels = torch.from_numpy(self.dataset.labels)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

        def learn(batch: SystemBatch, edges: Any) -> None:
            seeds = torch.from_numpy(batch.node_ids[: batch.batch_size])
            out = self.model(torch.from_numpy(batch.x).float(), torch.from_numpy(edges))
            loss = torch.nn.functional.cross_entropy(out[: batch.batch_size], labels[seeds])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return learn


def _disk_bytes() -> tuple[int, int]:
    """What this process has read from and written to disks, page faults included."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    found = dict(line.split(": ") for line in lines)
    return int(found["read_bytes"]), int(found["write_bytes"])


def serve(order: Order) -> None:
    """Answer commands until the pipe ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    served = _Served(order)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        what = json.loads(line)
        read, written = _disk_bytes()
        try:
            answer = served.answer(what.pop("do"), what)
            now_read, now_written = _disk_bytes()
            answer["disk_bytes_read"], answer["disk_bytes_written"] = (
                now_read - read,
                now_written - written,
            )
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer["max_resident_bytes"] = 1024 * most
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must know
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if served.system is not None:
        served.system.close()


if __name__ == "__main__":
    serve(Order.from_json(sys.argv[1]))
