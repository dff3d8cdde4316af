"""Measures how preparation, epochs and memory grow with the graph, and packing against copying.

For each size a graph is generated, sampled, packed and read for some epochs, every stage in a fresh
process under a memory cgroup of topology + cache + 512 MB. Memory is the process's highest resident
set, less the topology and the cache where the stage holds them: what is left must not grow with
the graph beyond a few bytes per node. Before and after each packing the features are copied twice,
large direct reads and writes, and packing is compared with the mean of their bytes per second.
Rows of 512 bytes are those of the published configuration; with 256 the processor has twice the
work per byte.

    python -m benchmarks.gnn.scale [--nodes 1,5,10,20] [--dims 128,64] [--keep FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import mmap
import os
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gnn._harness._memory_limit import drop_caches
from benchmarks.gnn._harness._table import Order, loader_bytes
from benchmarks.gnn._harness._worker import Answer, Worker
from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.gnn.data import Dataset
from fivefold.gnn.storage import probe_disk

RESULTS = Path(__file__).parents[1] / "results" / "gnn" / "scale.json"
WORKING_BYTES = 512 << 20
STAGE_BYTES = 320 << 20  # what generation and packing may take: a segment's rows are laid out in it
TRAIN_SHARE = 0.01
CACHE_SHARE = 0.1
BATCH_SIZE = 1024
FANOUTS = [10, 10, 10]
COPY_BLOCK_BYTES = 4 << 20
COPY_BYTES = 2 << 30
COPY_SHARE = 0.7
COPIES = 2  # before and after packing
Stages = dict[str, Any]


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def copy_speed(source: Path, target: Path) -> float:
    """Bytes read plus bytes written per second of a copy with large direct requests."""
    size = min(source.stat().st_size, COPY_BYTES) // COPY_BLOCK_BYTES * COPY_BLOCK_BYTES
    free: queue.Queue[mmap.mmap] = queue.Queue()
    full: queue.Queue[mmap.mmap | None] = queue.Queue()
    for _ in range(4):
        free.put(mmap.mmap(-1, COPY_BLOCK_BYTES))
    origin = os.open(source, os.O_RDONLY | os.O_DIRECT)
    copied = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)

    def read() -> None:
        for at in range(0, size, COPY_BLOCK_BYTES):
            buffer = free.get()
            os.preadv(origin, [buffer], at)
            full.put(buffer)
        full.put(None)

    started_s = time.perf_counter()
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        at = 0
        while (buffer := full.get()) is not None:
            at += os.pwritev(copied, [buffer], at)
            free.put(buffer)
        os.fsync(copied)
        seconds = time.perf_counter() - started_s
    finally:
        thread.join(timeout=60)
        os.close(origin)
        os.close(copied)
        target.unlink()
    return 2 * at / seconds


def stages(nodes: int, dim: int, arguments: argparse.Namespace, folder: Path) -> Stages:
    """All stages of one size."""
    dataset, work = folder / f"graph-{nodes}-{dim}", folder / f"work-{nodes}"
    samples = folder / f"samples-{nodes}-{dim}.fvf"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    features = nodes * dim * 4
    cache = int(CACHE_SHARE * features)
    profile = probe_disk(work, seconds=1.0)

    def worker(limit: int, batch_bytes: int = 0) -> Worker:
        order = Order(
            name="ours static", dataset=str(dataset), samples=str(samples), folder=str(work),
            cache_bytes=cache, packing_bytes=STAGE_BYTES, profile=profile.to_json(),
            loader_bytes=loader_bytes(limit, cache, batch_bytes),
        )  # fmt: skip
        return Worker(order, limit_bytes=limit)

    with worker(STAGE_BYTES + WORKING_BYTES) as one:
        made = one.ask("generate", nodes=nodes, dim=dim, memory_bytes=STAGE_BYTES)
        note(f"{nodes} nodes: generated in {made['seconds']:.1f} s")
    with Dataset.open(dataset) as opened:
        topology = opened.topology(mapped=True).nbytes
        path = opened.features.path
    limit = topology + cache + WORKING_BYTES
    with worker(limit) as one:
        train = max(BATCH_SIZE, int(TRAIN_SHARE * nodes))
        sampled = one.ask("sample", batch_size=BATCH_SIZE, fanouts=FANOUTS, train=train, seed=1)
        note(f"{nodes} nodes: {sampled['batches']} batches in {sampled['seconds']:.1f} s")
    drop_caches()
    copies = [copy_speed(path, work / "copy") for _ in range(COPIES)]
    rows = sampled["accesses"] / sampled["batches"]
    with worker(limit, int(rows * (4 * dim + 56))) as one:
        packed = one.ask("prepare")
        copies += [copy_speed(path, work / "copy") for _ in range(COPIES)]
        note(f"{nodes} nodes: packed in {packed['seconds']:.1f} s; copies "
             f"{', '.join(f'{copy / 1e6:.0f}' for copy in copies)} MB/s")  # fmt: skip
        runs = _epochs(one, arguments.repetitions)
    shutil.rmtree(work)
    if arguments.keep is None:
        shutil.rmtree(dataset)
        samples.unlink()
    return {
        "nodes": nodes, "dim": dim, "features": features, "topology": topology,
        "cache": cache, "limit": limit, "made": made, "sampled": sampled, "packed": packed,
        "runs": runs, "copies": copies,
    }  # fmt: skip


def _epochs(worker: Worker, repetitions: int) -> list[Answer]:
    """A warm-up on a few batches, then whole epochs."""
    worker.ask("epoch", number=0, start=0, stop=2, train=False, seek=False)
    runs = []
    for number in range(repetitions):
        drop_caches()
        run = worker.ask("epoch", number=number, start=0, stop=None, train=False, seek=False)
        note(f"epoch {number}: {run['seconds']:.2f} s, "
             f"{run['bytes_read'] / run['seconds'] / 1e6:.0f} MB/s")  # fmt: skip
        runs.append(run)
    return runs


def rows_of(found: Stages) -> list[BenchmarkRow]:
    """Rows of one size."""
    case = f"{found['nodes'] / 1e6:g} M nodes, {4 * found['dim']} B rows"
    runs, packed = found["runs"], found["packed"]
    epoch, spread = median_and_spread([run["seconds"] for run in runs])
    rows = [
        BenchmarkRow(case=case, metric=f"{stage}: time", unit="s", ours=found[key]["seconds"])
        for stage, key in (("generation", "made"), ("sampling", "sampled"),
                           ("planning and packing", "packed"))
    ]  # fmt: skip
    rows += [
        BenchmarkRow(
            case=case, metric="epoch, data path", unit="s", ours=epoch, spread=spread
        ),
        BenchmarkRow(
            case=case, metric="epoch, data path, per million nodes", unit="s",
            ours=1e6 * epoch / found["nodes"],
        ),
        BenchmarkRow(
            case=case, metric="preparation per million nodes", unit="s",
            ours=1e6 * (found["sampled"]["seconds"] + packed["seconds"]) / found["nodes"],
        ),
    ]  # fmt: skip
    return [*rows, *_packing_rows(case, found), *_memory_rows(case, found)]


def _packing_rows(case: str, found: Stages) -> list[BenchmarkRow]:
    packed, details = found["packed"], found["packed"]["details"]
    seconds = details["packing seconds"]
    copy = statistics.mean(found["copies"])
    useful = found["features"] + packed["bytes_written"]
    moved = packed["disk_bytes_read"] + packed["disk_bytes_written"]
    return [
        BenchmarkRow(
            case=case, metric=f"packing, {what}, against the copy speed", unit="ratio",
            ours=size / seconds / copy, target=COPY_SHARE, met=size / seconds / copy >= COPY_SHARE,
        )
        for what, size in (("features read + store written", useful), ("all bytes moved", moved))
    ] + [
        BenchmarkRow(case=case, metric="copy: bytes read + written", unit="B/s", ours=copy,
                     spread=(min(found["copies"]), max(found["copies"]))),
    ]  # fmt: skip


def _memory_rows(case: str, found: Stages) -> list[BenchmarkRow]:
    """Highest resident set, less what the stage is meant to hold."""
    held = {
        "made": 0,
        "sampled": found["topology"],
        "packed": 0,  # the cache is loaded after packing has let its buffers go
        "runs": found["cache"],
    }
    names = {"made": "generation", "sampled": "sampling", "packed": "packing", "runs": "epochs"}
    rows = []
    for key, less in held.items():
        answer = found[key][-1] if key == "runs" else found[key]
        rows.append(
            BenchmarkRow(
                case=case, metric=f"{names[key]}: resident memory beside topology and cache",
                unit="B", ours=max(0, answer["max_resident_bytes"] - less),
            )
        )  # fmt: skip
    peak = max(run["peak_bytes"] or 0 for run in found["runs"])
    rows.append(
        BenchmarkRow(
            case=case, metric="peak of the memory group, packing and epochs, page cache included",
            unit="B", ours=peak, limit=found["limit"], target=found["limit"],
            met=peak <= found["limit"],
        )
    )  # fmt: skip
    return rows


def flatness(sizes: list[Stages]) -> list[BenchmarkRow]:
    """How much memory grows per node from the smallest graph to the largest."""
    small, large = sizes[0], sizes[-1]
    span = f"{small['nodes'] / 1e6:g} to {large['nodes'] / 1e6:g} M nodes"
    case = f"{span}, {4 * small['dim']} B rows"
    first = {row.metric: row.ours for row in _memory_rows("", small)}
    last = {row.metric: row.ours for row in _memory_rows("", large)}
    added = large["nodes"] - small["nodes"]
    return [
        BenchmarkRow(
            case=case, metric=f"{metric}: growth", unit="B per node",
            ours=(last[metric] - first[metric]) / added,
        )
        for metric in first
        if "resident" in metric
    ]  # fmt: skip


def main() -> None:
    """Run all sizes, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="1,5,10,20", help="millions, comma-separated")
    parser.add_argument("--dims", default="128,64", help="float32 values per row")
    parser.add_argument("--repetitions", type=int, default=3, help="epochs")
    parser.add_argument("--keep", type=Path, help="use and keep graphs and samples here")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small graphs, no results file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.nodes, arguments.repetitions = "0.05,0.1", 1
    rows = []
    with ExitStack() as stack:
        folder = arguments.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-gnn-")))
        folder.mkdir(parents=True, exist_ok=True)
        for dim in map(int, arguments.dims.split(",")):
            sizes = [int(1e6 * float(size)) for size in arguments.nodes.split(",")]
            found = [stages(nodes, dim, arguments, folder) for nodes in sizes]
            rows += [row for one in found for row in rows_of(one)]
            rows += flatness(found) if len(found) > 1 else []
    for row in rows:
        met = "" if row.met is None else (" met" if row.met else " NOT MET")
        print(f"{row.case} | {row.metric}: {row.ours:.4g} {row.unit}{met}", flush=True)
    if not arguments.quick:
        write_results(arguments.output, topic="gnn/scale", rows=rows)
    sys.exit(0)


if __name__ == "__main__":
    main()
