r"""Measures how preparation, epochs and memory grow with the graph, and packing against copying.

For each size a graph is generated, sampled, packed and read for some epochs, every stage in a fresh
process under a memory cgroup of topology + cache + 512 MB. Memory is the process's highest resident
set, less the topology and the cache where the stage holds them: what is left must not grow with
the graph beyond a few bytes per node. Before and after each packing the features are copied twice,
large direct reads and writes, and packing is compared with the mean of their bytes per second.
Rows of 512 bytes are those of the published configuration; with 256 the processor has twice the
work per byte.

With --budget one graph is taken through the commands as a user types them, each under a memory
group of that size: ``plan --estimate`` before anything is there, ``generate``, and ``train`` with
its default settings, which samples, plans and packs, until it has trained --train-batches batches.
Each stage's time, memory, disk space and bytes stand beside what the estimate said. Then the same
batches are read without a model, and packing is killed half-way and gone on with.

    python -m benchmarks.gnn.scale [--nodes 1,5,10,20] [--dims 128,64] [--keep FOLDER] [--quick]
    python -m benchmarks.gnn.scale --nodes 100 --dims 32 --degree 16 --seeds 0.006 \
        --budget 16GiB --train-batches 100
"""

from __future__ import annotations

import argparse
import itertools
import json
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
from benchmarks.gnn._harness._watch import Taken, Watched, disk_bytes
from benchmarks.gnn._harness._worker import Answer, Worker
from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.gnn.data import Dataset
from fivefold.gnn.storage import probe_disk
from fivefold.units import format_bytes, parse_bytes

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
BUDGET_RESULTS = RESULTS.with_name("size.json")
BUDGET_SHARE = 0.9  # of the budget that the estimate may fill
NEAR = 0.15  # an estimate is right that is so near to what was measured
PATIENCE_S = 1800.0
ESTIMATED_AS = {"generate": "ingest", "train": "epoch, data path"}
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


# -- one graph within a budget, by the commands ----------------------------------------------------


class Commands:
    """The commands for one graph, each in a memory group of the budget."""

    def __init__(self, nodes: int, dim: int, arguments: argparse.Namespace, folder: Path) -> None:
        self.nodes, self.dim, self.folder = nodes, dim, folder
        self.degree, self.seeds = arguments.degree, int(arguments.seeds * nodes)
        self.share, self.batches = arguments.seeds, arguments.train_batches
        self.budget = parse_bytes(arguments.budget)
        self.graph, self.run = f"graph-{nodes}-{dim}", f"run-{nodes}-{dim}"

    def watch(self, *arguments: str) -> Watched:
        """Start ``fivefold gnn`` with these arguments."""
        command = [sys.executable, "-m", "fivefold", "gnn", *arguments]
        return Watched(command, limit_bytes=self.budget, folder=self.folder)

    def estimate(self, host_bytes: int) -> dict[str, Any]:
        """Ask for the estimate from counts alone."""
        counts = (
            f"nodes={self.nodes},edges={int(self.degree * self.nodes)},row_bytes={4 * self.dim},"
            f"seeds={self.seeds}"
        )
        with self.watch("plan", counts, "--estimate", "--json",
                        "--host-memory", f"{host_bytes} B") as one:  # fmt: skip
            found: dict[str, Any] = json.loads(one.finish(timeout_s=PATIENCE_S))
            return found

    def choose_host(self) -> tuple[int, dict[str, Any]]:
        """Return the host memory that makes the estimate's largest stage fill the budget."""
        host = self.budget // 4
        beside = self.estimate(host)["memory_bytes"] - host
        host = int((BUDGET_SHARE * self.budget - beside) // 10**8 * 10**8)
        host = min(host, 4 * self.dim * self.nodes)
        return host, self.estimate(host)

    def generate(self) -> Taken:
        """Write the graph."""
        rest = f"{(1 - self.share) / 100:.6f}"
        options = {"mean_degree": self.degree, "train": self.share, "valid": rest, "test": rest}
        given = [text for name in options for text in ("--option", f"{name}={options[name]}")]
        with self.watch("generate", self.graph, "--nodes", str(self.nodes), "--dim", str(self.dim),
                        *given) as one:  # fmt: skip
            one.finish(timeout_s=PATIENCE_S)
            return one.taken()

    def train(self, host_bytes: int) -> Watched:
        """Start training, which makes what is missing first."""
        return self.watch(
            "train", str(self._config()), "--set", f"budgets.host={host_bytes}",
            "--set", "run.line_every_s=0.2", "--set", "run.log_every_steps=1",
        )  # fmt: skip

    def _config(self) -> Path:
        path = self.folder / "gnn.toml"
        path.write_text(f'[data]\npath = "{self.graph}"\n[run]\noutput = "{self.run}"\n')
        return path

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the run's events of one kind."""
        path = self.folder / self.run / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]


def _train_some(commands: Commands, running: Watched, batches: int) -> None:
    """Wait until so many batches have been trained, then end the run as Ctrl-C does."""
    deadline_s = time.perf_counter() + PATIENCE_S
    running.wait_for("packed on disk: ", timeout_s=PATIENCE_S)
    while max((event["step"] for event in commands.events("train")), default=0) < batches:
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"{batches} batches took too long:\n{running.tail()}")
        time.sleep(0.05)
    running.terminate()
    running.finish(timeout_s=PATIENCE_S)


def _prepared(commands: Commands, running: Watched) -> dict[str, Taken]:
    """Cut a run into its stages."""
    seconds = commands.events("prepare")[-1]["seconds"]
    shown_s = running.wait_for("^Plan [0-9a-f]+:", timeout_s=1.0)
    planned_s, packed_s = shown_s - seconds["plan"], shown_s + seconds["pack"]
    return {
        "sample": running.taken(None, planned_s),
        "plan": running.taken(planned_s, shown_s),
        "pack": running.taken(shown_s, packed_s),
        "train": running.taken(packed_s, None),
    }


def _kill_while_packing(commands: Commands, host_bytes: int) -> dict[str, float]:
    """Pack again, kill that when about half of the rows are written, and go on.

    A graph so small that this goes by between two looks is not killed: nothing is returned.
    """
    for store in (commands.folder / commands.graph / "prepared").glob("store*"):
        shutil.rmtree(store)
    shutil.rmtree(commands.folder / commands.run)
    with commands.train(host_bytes) as first:
        shown_s = first.wait_for("^Plan [0-9a-f]+:", timeout_s=PATIENCE_S)
        killed_s = first.wait_for(r"pack rows: [4-9]\d %|packed on disk", timeout_s=PATIENCE_S)
        first.kill()
        if not any("pack rows" in line for _, line in first.lines):
            return {}
    with commands.train(host_bytes) as second:
        _train_some(commands, second, 1)
    rest_s = commands.events("prepare")[-1]["seconds"]["pack"]
    return {"time before": killed_s - shown_s, "time after the restart": rest_s}


def within_budget(
    nodes: int, dim: int, arguments: argparse.Namespace, folder: Path
) -> list[BenchmarkRow]:
    """Estimate, generate, prepare, train, read and kill; return the rows."""
    commands = Commands(nodes, dim, arguments, folder)
    host, said = commands.choose_host()
    note(f"{nodes} nodes in {format_bytes(commands.budget)}: budgets.host = {format_bytes(host)}")
    taken = {}
    if not (folder / commands.graph / "graph.fvf").exists():
        taken["generate"] = commands.generate()
        note(f"generated in {taken['generate'].seconds:.0f} s")
    before = disk_bytes(folder)
    drop_caches()
    commands.estimate(host)  # what the interpreter reads is in the page cache
    with commands.train(host) as running:
        _train_some(commands, running, commands.batches)
        taken |= _prepared(commands, running)
        peak = running.limit.peak_bytes() or 0
    for name, one in taken.items():
        note(f"{name}: {one.seconds:.1f} s, {format_bytes(one.memory_bytes)}, "
             f"{format_bytes(one.disk_bytes)} of disk")  # fmt: skip
    plan = commands.events("prepare")[-1]["plan"]
    steps = [event["stages"] for event in commands.events("train")][: commands.batches]
    data = _read_alone(commands, host)
    note(f"{data['batches']} batches without a model in {data['seconds']:.1f} s")
    killed = _kill_while_packing(commands, host)
    note("killed and gone on with: "
         + ", ".join(f"{name}: {seconds:.1f} s" for name, seconds in killed.items()))  # fmt: skip
    if arguments.keep is None:
        shutil.rmtree(folder / commands.graph)
    rows = BudgetRows(commands, said)
    return [
        rows.row("disk, as the estimate probed it: reads", "B/s", said["read_bytes_per_s"]),
        rows.row("disk, as the estimate probed it: writes", "B/s", said["write_bytes_per_s"]),
        rows.row("budgets.host", "B", host),
        *(row for stage, one in taken.items()
          for row in rows.of_stage(stage, one, 0 if stage == "generate" else before)),
        *rows.of_rows(plan),
        *rows.of_batches(steps, data),
        *(rows.row(f"packing killed half-way: {name}", "s", seconds)
          for name, seconds in killed.items()),
        rows.row("peak of the memory group, page cache included", "B", peak,
                 limit=commands.budget, target=commands.budget, met=peak <= commands.budget),
    ]  # fmt: skip


def _read_alone(commands: Commands, host_bytes: int) -> Answer:
    """Read the batches that were trained on, in a process without a model."""
    dataset = commands.folder / commands.graph
    order = Order(
        name="ours static", dataset=str(dataset), folder=str(dataset / "prepared"),
        samples=str(next((dataset / "prepared").glob("samples-*.fvf"))),
        cache_bytes=host_bytes, packing_bytes=0,
    )  # fmt: skip
    drop_caches()
    with Worker(order, limit_bytes=commands.budget) as one:
        return one.ask("read_store", batches=commands.batches)


class BudgetRows:
    """Rows of one run by the commands, each beside its estimate where there is one."""

    def __init__(self, commands: Commands, said: dict[str, Any]) -> None:
        self.commands, self.said = commands, said
        self.stages = {stage["name"]: stage for stage in said["stages"]}
        self.case = (
            f"{commands.nodes / 1e6:g} M nodes, {commands.degree * commands.nodes / 1e6:g} M edges,"
            f" {4 * commands.dim} B rows, {format_bytes(commands.budget)} of memory"
        )

    def row(
        self, metric: str, unit: str, ours: float, told: float | None = None, **more: Any
    ) -> BenchmarkRow:
        """Return a row; an estimate is its peer and its target."""
        if told is not None:
            near = abs(ours - told) <= NEAR * told
            more = {"peers": {"estimate": float(told)}, "target": float(told), "met": near}
        return BenchmarkRow(case=self.case, metric=metric, unit=unit, ours=ours, **more)

    def of_stage(self, stage: str, one: Taken, start_bytes: int) -> list[BenchmarkRow]:
        """Return time, memory, disk space and bytes; ``start_bytes`` were on the disk before."""
        told = self.stages[ESTIMATED_AS.get(stage, stage)]
        order = [ESTIMATED_AS.get(name, name) for name in ("sample", "plan", "pack", "train")]
        before = order[: order.index(told["name"])] if told["name"] in order else []
        space = told["disk_bytes"] + told["scratch_bytes"]
        space += sum(self.stages[name]["disk_bytes"] for name in before)
        # The estimate is of graphs that are ingested, and of epochs rather than some batches.
        seconds = told["seconds"] if stage in {"sample", "plan", "pack"} else None
        return [
            self.row(f"{stage}: time", "s", one.seconds, seconds),
            self.row(f"{stage}: memory, without page cache", "B", one.memory_bytes,
                     told["memory_bytes"]),
            self.row(f"{stage}: memory, with page cache", "B", one.group_bytes),
            self.row(f"{stage}: most disk space at a time", "B", one.disk_bytes - start_bytes,
                     space),
            self.row(f"{stage}: read from the disk", "B", one.read_bytes),
            self.row(f"{stage}: written to the disk", "B", one.written_bytes),
            self.row(f"{stage}: taken by other processes and the kernel", "processors", one.others),
        ]  # fmt: skip

    def of_rows(self, plan: dict[str, Any]) -> list[BenchmarkRow]:
        """Return what was sampled, cached and packed."""
        said, row_bytes = self.said, 4 * self.commands.dim
        return [
            self.row("rows of a batch", "rows", plan["accesses"] / said["batches"],
                     said["nodes_per_batch"]),
            self.row("cold rows of an epoch", "B", plan["cold_rows"] * row_bytes,
                     said["read_bytes_per_epoch"]),
            self.row("packed rows", "B", plan["packed_rows"] * row_bytes,
                     said["packed_rows"] * row_bytes),
        ]  # fmt: skip

    def of_batches(self, steps: list[dict[str, float]], data: Answer) -> list[BenchmarkRow]:
        """Return the time of a batch, with a model and without; ``steps`` are running sums."""
        waited, trained = (
            [sum(end[key] - start[key] for key in keys) for start, end in itertools.pairwise(steps)]
            for keys in (("data",), ("data", "compute"))
        )
        half = len(trained) // 2  # the first batches come while threads and caches warm up
        batch_s, spread = median_and_spread(trained[half:])
        batches = self.said["batches"]
        return [
            self.row("a batch of training", "s", batch_s, spread=spread),
            self.row("a batch of training: of it waiting for data", "s",
                     statistics.mean(waited[half:])),
            self.row("a batch, data path alone", "s", data["seconds"] / data["batches"],
                     self.stages["epoch, data path"]["seconds"] / batches),
            self.row("a batch, data path alone: read from the disk", "B",
                     data["bytes_read"] / data["batches"],
                     self.said["read_bytes_per_epoch"] / batches),
            self.row("rows that differ from the features, of those looked at", "rows",
                     data["wrong_rows"]),
        ]  # fmt: skip


def main() -> None:
    """Run all sizes, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="1,5,10,20", help="millions, comma-separated")
    parser.add_argument("--dims", default="128,64", help="float32 values per row")
    parser.add_argument("--repetitions", type=int, default=3, help="epochs")
    parser.add_argument("--keep", type=Path, help="use and keep graphs and samples here")
    parser.add_argument("--budget", help="memory of one run by the commands, such as 16GiB")
    parser.add_argument("--degree", type=float, default=16.0, help="with --budget: edges per node")
    parser.add_argument("--seeds", type=float, default=TRAIN_SHARE,
                        help="with --budget: share of the nodes that are trained on")  # fmt: skip
    parser.add_argument("--train-batches", type=int, default=100, help="with --budget: how many")
    parser.add_argument("--output", type=Path)
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
        sizes = [int(1e6 * float(size)) for size in arguments.nodes.split(",")]
        for dim in map(int, arguments.dims.split(",")):
            if arguments.budget:
                rows += [row for nodes in sizes
                         for row in within_budget(nodes, dim, arguments, folder)]  # fmt: skip
                continue
            found = [stages(nodes, dim, arguments, folder) for nodes in sizes]
            rows += [row for one in found for row in rows_of(one)]
            rows += flatness(found) if len(found) > 1 else []
    for row in rows:
        met = "" if row.met is None else (" met" if row.met else " NOT MET")
        print(f"{row.case} | {row.metric}: {row.ours:.4g} {row.unit}{met}", flush=True)
    if not arguments.quick:
        path = arguments.output or (BUDGET_RESULTS if arguments.budget else RESULTS)
        write_results(path, topic=f"gnn/{path.stem}", rows=rows)
    sys.exit(0)


if __name__ == "__main__":
    main()
