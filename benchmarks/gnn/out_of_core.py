"""Measures epochs of ours, DiskGNN, MariusGNN, Ginex, an online cache, PyG and mmap out of core.

All systems work on one generated graph, one file of samples and one budget for a cache of feature
rows, each in a process of its own under a memory cgroup of topology + cache + 512 MB + the rows of
the 7 batches that a peer's pipeline holds, in turns,
with the page cache dropped before each run and the disk probed before and after it. Rows that were
handed out are compared with the features, bit for bit, after the clock.

Slow systems run a stretch from the middle of the epoch (their caches are brought to where they
would be), at least 20 batches in all, and are scaled by the reads that the whole epoch takes; their
names say so. Peers have the threads and queues of their papers: a thread for each stage, queues of
2. For Ginex
those include the filling of its cache. What online systems would sample in each epoch is not
charged to them: all take the samples from the file.

    python -m benchmarks.gnn.out_of_core [--only published,rows-4k] [--keep FOLDER] [--quick]

With ``--keep`` graphs, samples and the answers of each finished setting stay in the folder, and
settings may be run one by one; the results file is written from all that are there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gnn._harness._memory_limit import drop_caches
from benchmarks.gnn._harness._probe import probe
from benchmarks.gnn._harness._rows import rows_of
from benchmarks.gnn._harness._settings import BY_DEFAULT, SETTINGS, Setting, quick
from benchmarks.gnn._harness._table import UNLIMITED, Order, loader_bytes
from benchmarks.gnn._harness._worker import Answer, Worker, WorkerError
from benchmarks.results_file import write_results
from fivefold.gnn.data import Dataset, generate_graph
from fivefold.gnn.storage import probe_disk

RESULTS = Path(__file__).parents[1] / "results" / "gnn" / "out_of_core.json"
PACKING_BYTES = 192 << 20
BLOW_UP = 2.1
NEEDED_TIMES = 8.0  # bytes on disk over those of the features: theirs, three stores, scratch
IN_FLIGHT = 7  # batches of a peer with three stages, queues of 2 and one in use
LEAST_BATCHES = 20  # of a slow system's runs together
WHOLE = ("ours static", "ours belady")
PLAIN_BATCH_ROWS = 3000
Measured = dict[str, Any]


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def make_room(folder: Path, place: Path, needed_bytes: float) -> None:
    """Delete graphs of other settings where the disk is short; they can be made again."""
    for other in sorted(folder.glob("graph-*")):
        if other != place and shutil.disk_usage(folder).free < needed_bytes:
            note(f"room is made: {other.name} is deleted")
            shutil.rmtree(other)


def make_graph(setting: Setting, folder: Path) -> Path:
    """Generate the graph, or take the one that is there."""
    place = folder / f"graph-{setting.graph}"
    make_room(folder, place, NEEDED_TIMES * setting.nodes * setting.row_bytes)
    started_s = time.perf_counter()
    with generate_graph(place, nodes=setting.nodes, dim=setting.dim, seed=1) as dataset:
        size, seconds = dataset.features.nbytes / 1e9, time.perf_counter() - started_s
        note(f"graph: {dataset.num_edges} edges, features {size:.1f} GB, {seconds:.0f} s")
    return place


class Bench:
    """One setting: its workers and what they answered."""

    def __init__(self, setting: Setting, folder: Path, arguments: argparse.Namespace) -> None:
        self.setting, self.folder, self.arguments = setting, folder, arguments
        self.dataset = make_graph(setting, folder)
        with Dataset.open(self.dataset) as opened:
            self.topology_bytes = opened.topology(mapped=True).nbytes
            self.feature_bytes = setting.nodes * setting.row_bytes
            self.features_path = opened.features.path
        self.cache_bytes = int(setting.share * self.feature_bytes)
        self.limit_bytes = self.topology_bytes + self.cache_bytes + (arguments.working_mb << 20)
        # While packing, neither the topology nor the cache is in memory.
        self.packing_bytes = max(PACKING_BYTES, 2 * (self.topology_bytes + self.cache_bytes) // 3)
        self.work = folder / f"work-{setting.name}"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        fanouts = "-".join(map(str, setting.fanouts))
        shape = f"{setting.batches}x{setting.batch_size}-{fanouts}"
        # Of one graph: another of as many nodes has other edges and rows.
        self.samples = folder / f"samples-{setting.graph}-{shape}.fvf"
        self.batch_bytes = 0  # until it is sampled
        self.probes: list[list[float]] = []
        self.profile = probe_disk(self.work, seconds=2.0)

    def order(self, name: str) -> Order:
        """What a system's worker gets."""
        return Order(
            name=name,
            dataset=str(self.dataset),
            samples=str(self.samples),
            folder=str(self.work),
            cache_bytes=self.cache_bytes,
            packing_bytes=self.packing_bytes,
            loader_bytes=loader_bytes(self.limit_bytes, self.cache_bytes, self.batch_bytes),
            profile=self.profile.to_json(),
            disk_rows=int(BLOW_UP * self.setting.nodes),
        )

    def run(self) -> Measured:
        """Sample, prepare, measure."""
        with Worker(self.order("sampler"), limit_bytes=self.limit_bytes) as sampler:
            sampling = sampler.ask(
                "sample",
                batch_size=self.setting.batch_size,
                fanouts=list(self.setting.fanouts),
                train=self.setting.batches * self.setting.batch_size,
                seed=1,
            )
            rows = sampling["accesses"] / max(1, sampling["batches"])
            # The rows, and 16 bytes for each edge, of which there are about three per node.
            self.batch_bytes = int(rows * (self.setting.row_bytes + 56))
            self.limit_bytes += IN_FLIGHT * self.batch_bytes
            note(f"sampling: {sampling['batches']} batches of {rows:.0f} rows, "
                 f"{sampling['seconds']:.1f} s")  # fmt: skip
        with ExitStack() as stack:
            workers = self._start(stack)
            kind = next(iter(workers.values())).limit.kind
            prepared = self._prepare(workers, int(sampling["batches"]))
            runs = self._measure(workers, prepared, int(sampling["batches"]))
            plain = self._plain_trap(stack) if self.setting.plain_rows else None
        shutil.rmtree(self.work)
        return {
            "setting": asdict(self.setting),
            "sampling": sampling,
            "prepared": prepared,
            "runs": runs,
            "plain": plain,
            "probes": self.probes,
            "limit_kind": kind,
            "limit_bytes": self.limit_bytes,
            "feature_bytes": self.feature_bytes,
            "topology_bytes": self.topology_bytes,
        }

    def _start(self, stack: ExitStack) -> dict[str, Worker]:
        return {
            name: stack.enter_context(
                Worker(
                    self.order(name), limit_bytes=None if name in UNLIMITED else self.limit_bytes
                )
            )
            for name in self.setting.systems
        }

    def _prepare(self, workers: dict[str, Worker], batches: int) -> dict[str, Answer]:
        """Prepare all, DiskGNN first: ours may take no more rows on disk than it."""
        prepared: dict[str, Answer] = {}
        rows = int(BLOW_UP * self.setting.nodes)
        for name in sorted(workers, key=lambda name: name != "DiskGNN"):
            try:
                allowed = {"disk_rows": rows} if name.startswith("ours") else {}
                prepared[name] = workers[name].ask("prepare", **allowed)
                prepared[name]["work"] = workers[name].ask("work", start=0, stop=batches)["work"]
            except WorkerError as error:
                note(f"FAILED {error}")
                continue
            if name == "DiskGNN":
                rows = min(rows, int(prepared[name]["details"]["rows on disk"]))
            note(f"prepared {name}: {_summary(prepared[name])}")
        return prepared

    def _measure(
        self, workers: dict[str, Worker], prepared: dict[str, Answer], batches: int
    ) -> dict[str, list[Answer]]:
        """Warm each up on a batch, then run them in turns."""
        runs: dict[str, list[Answer]] = {name: [] for name in prepared}
        at = dict.fromkeys(prepared, 0)
        length = {}
        for name in prepared:
            start = 0 if _from_the_front(name) else batches // 2
            self._ask(workers[name], start, min(start + 1, batches))  # compiles and fills
            warm = self._ask(workers[name], start + 1, min(start + 2, batches))
            left = batches - start - 2
            # Steps of the model vary more than reads do.
            allowed_s = self.arguments.seconds * (2 if self.setting.train else 1)
            fits = int(allowed_s / max(1e-3, warm["seconds"]))
            share = batches if _from_the_front(name) else left // self.arguments.repetitions
            whole = name in WHOLE and not self.setting.train
            least = -(-LEAST_BATCHES // self.arguments.repetitions)
            length[name] = batches if whole else max(1, min(max(fits, least), share))
            at[name] = 0 if _from_the_front(name) else start + 2
        before = self._probe()
        for turn in range(self.arguments.repetitions):
            for name in [name for name in prepared if runs.get(name) is not None]:
                start, stop = at[name], min(at[name] + length[name], batches)
                if start >= stop:
                    start, stop = batches // 2, min(batches // 2 + length[name], batches)
                drop_caches()
                try:
                    run = self._ask(workers[name], start, stop, number=turn)
                    scaled = _scaled(name, run, prepared[name], workers[name], start, stop)
                except WorkerError as error:
                    note(f"FAILED {error}")
                    runs.pop(name)
                    continue
                if not _from_the_front(name):
                    at[name] = stop
                after = self._probe()
                run |= {"start": start, "stop": stop, "scaled_s": scaled}
                run |= {"before": before, "after": after}
                runs[name].append(run)
                note(f"{name}, turn {turn}: {scaled:.2f} s ({_run_summary(run, batches)}); "
                     f"disk {before[0] / 1e6:.0f}, {after[0] / 1e6:.0f} MB/s, "
                     f"{before[1] / 1e3:.1f}, {after[1] / 1e3:.1f} k pages/s")  # fmt: skip
                before = after
        return runs

    def _ask(self, worker: Worker, start: int, stop: int, *, number: int = 0) -> Answer:
        return worker.ask(
            "epoch", number=number, start=start, stop=stop, train=self.setting.train, seek=True
        )

    def _probe(self) -> list[float]:
        found = probe(
            self.features_path, seconds=self.arguments.probe_seconds, seed=len(self.probes)
        )
        pair = [found.sequential_bytes_per_s, found.random_pages_per_s]
        self.probes.append(pair)
        return pair

    def _plain_trap(self, stack: ExitStack) -> Answer | None:
        """A memory map without advice, on few rows: only to show what it reads."""
        worker = stack.enter_context(Worker(self.order("mmap plain"), limit_bytes=self.limit_bytes))
        drop_caches()
        try:
            worker.ask("prepare")
            found = worker.ask("trap", rows=self.arguments.plain_rows, timeout_s=300.0)
        except WorkerError as error:
            note(f"FAILED {error}")
            return None
        note(f"plain mmap: {found['rows_per_s']:.0f} rows/s, {found['amplification']:.0f}x")
        return found


def _from_the_front(name: str) -> bool:
    """Those whose epochs do not depend on a state, or begin with a bulk read."""
    return name in WHOLE or name.startswith("MariusGNN")


def _scaled(
    name: str, run: Answer, prepared: Answer, worker: Worker, start: int, stop: int
) -> float:
    """Seconds of the whole epoch, from those of a stretch and the reads of both."""
    seconds = float(run["seconds"])
    if name in WHOLE:
        return seconds * float(prepared["batches"]) / (stop - start)
    if name.startswith("MariusGNN"):
        # The first batch carries the bulk read of the first state, which an epoch has once.
        total = prepared["batches"]
        others = (seconds - run["first_s"]) / max(1, run["batches"] - 1)
        return float(run["first_s"] + others * (total - 1))
    part = worker.ask("work", start=start, stop=stop)["work"]
    return float(seconds * prepared["work"] / max(1, part))


def _summary(prepared: Answer) -> str:
    details = ", ".join(f"{key} {value:.6g}" for key, value in prepared["details"].items())
    peak = (prepared["peak_bytes"] or 0) / 1e6
    return f"{prepared['seconds']:.1f} s, peak {peak:.0f} MB; {details}"


def _run_summary(run: Answer, batches: int) -> str:
    size = run["bytes_read"] or run["process_bytes_read"]
    speed = size / run["seconds"] / 1e6
    return f"{run['stop'] - run['start']} of {batches} batches in {run['seconds']:.2f} s, {speed:.0f} MB/s, {run['wrong_rows']} wrong rows"  # noqa: E501


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ",".join(setting.name for setting in SETTINGS)
    parser.add_argument("--only", default=",".join(BY_DEFAULT), help=f"settings, of {names}")
    parser.add_argument("--systems", help="only these, comma-separated")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a slow system's run")
    parser.add_argument("--probe-seconds", type=float, default=0.8, help="of each half of a probe")
    parser.add_argument("--working-mb", type=int, default=512, help="MiB beside cache, topology")
    parser.add_argument("--plain-rows", type=int, default=PLAIN_BATCH_ROWS)
    parser.add_argument("--nodes", type=int, help="instead of each setting's own")
    parser.add_argument("--batches", type=int, help="instead of each setting's own")
    parser.add_argument("--keep", type=Path, help="use and keep graphs and answers here")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a look: small, no results file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.seconds, arguments.probe_seconds = 1, 1.0, 0.1
        arguments.plain_rows = 200
    return arguments


def chosen(arguments: argparse.Namespace) -> list[Setting]:
    """The settings that were asked for, changed as asked."""
    wanted = arguments.only.split(",")
    found = []
    for setting in SETTINGS:
        if setting.name not in wanted:
            continue
        changes = vars(quick(setting) if arguments.quick else setting).copy()
        if arguments.systems:
            changes["systems"] = tuple(arguments.systems.split(","))
        for name in ("nodes", "batches"):
            if getattr(arguments, name) is not None:
                changes[name] = getattr(arguments, name)
        found.append(Setting(**changes))
    return found


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    with ExitStack() as stack:
        folder = arguments.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-gnn-")))
        folder.mkdir(parents=True, exist_ok=True)
        for setting in chosen(arguments):
            note(f"--- {setting.name}: {setting.case}")
            measured = Bench(setting, folder, arguments).run() | {"quick": arguments.quick}
            answers = folder / f"answers-{setting.name}.json"
            answers.write_text(json.dumps(measured), encoding="utf-8")
        rows = []
        for setting in SETTINGS:
            answers = folder / f"answers-{setting.name}.json"
            if answers.exists():
                measured = json.loads(answers.read_text(encoding="utf-8"))
                if measured.get("quick", False) == arguments.quick:  # a look is no result
                    rows += rows_of(measured)
    for row in rows:
        met = "" if row.met is None else (" met" if row.met else " NOT MET")
        peers = ", ".join(f"{name} {value:.4g}" for name, value in row.peers.items())
        print(f"{row.case} | {row.metric}: {row.ours:.4g} {row.unit}{met} [{peers}]", flush=True)
    wrong = [row for row in rows if "wrong rows" in row.metric and row.ours]
    if not arguments.quick and rows:
        write_results(arguments.output, topic="gnn/out_of_core", rows=rows)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
