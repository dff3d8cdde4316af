"""Everything between a data set and a packed store: samples, plan, rows, made where missing.

Each part has a name that holds a hash of what it depends on, so that other data or other options
make other files and never meet stale ones; and each part goes on where a killed run stopped. The
plan is written before packing begins: a new probe of the disk would give another one. One
process at a time works in a folder, the others wait and then find everything done.

Rows of edges are packed like rows of nodes: a batch's edges are the "nodes" of a batch of
``EdgeSamples``, so that plan, packing and reading know nothing of edges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fivefold.errors import DataError, StorageError
from fivefold.files import lock_file, read_checked_json, write_checked_json
from fivefold.gnn.data import Dataset
from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.planning import Budgets, Plan, make_plan
from fivefold.gnn.sampling import Adjacency, NeighborSampler, SampleFile, sample_epochs
from fivefold.gnn.sampling.edge_samples import EdgeSamples
from fivefold.gnn.storage import Container, DiskProfile, probe_disk
from fivefold.gnn.storage.arrays import Ids
from fivefold.gnn.storage.pages import PAGE_BYTES
from fivefold.units import format_bytes, format_duration_s

_LOG = logging.getLogger(__name__)
_SHARE_OF_FREE_DISK = 0.8
_LEAST_PACKING_BYTES = 4 << 20  # less would be lost in what the interpreter takes
_PROBE_BYTES = 1 << 30  # of features; for fewer, the disk is measured for a shorter time
_PROBE_S = (0.2, 2.0)
Progress = Callable[[str, int, int], None]
Text = Callable[[str], None]
_RECIPE = "recipe.json"
_LESS = {"training_epochs"}  # of a recipe: no reason to pack again


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreRecipe:
    """What a packed store is made by, besides the data set and the seeds.

    ``threads`` and ``training_epochs`` do not make another store; ``disk_bytes`` of None is four
    fifths of what is free, ``segment_batches`` of 0 the number that costs least.
    """

    fanouts: tuple[int, ...]
    batch_size: int
    epochs: int = 1
    first_epoch: int = 0
    seed: int = 0
    device_bytes: int = 0
    host_bytes: int = 1_000_000_000
    disk_bytes: int | None = None
    policy: Literal["static", "belady"] = "static"
    layout: Literal["gray", "minhash", "packed"] = "gray"
    segment_batches: int = 0
    minhash_functions: int = 2
    buffer_batches: int = 3
    edge_ids: bool = False
    training_epochs: int = 50


_OF_SAMPLES = ("fanouts", "batch_size", "epochs", "first_epoch", "seed", "edge_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a loader of packed batches reads; ``edges`` where edges have features."""

    store: PackedStore
    edges: PackedStore | None
    seconds: dict[str, float]
    samples_path: Path

    def close(self) -> None:
        """Let go of the files."""
        for store in (self.store, self.edges):
            if store is not None:
                store.close()

    def remove(self) -> None:
        """Delete what was made; files that are open stay readable for whoever has them."""
        for store in (self.store, self.edges):
            if store is not None:
                shutil.rmtree(store.folder, ignore_errors=True)
        self.samples_path.unlink(missing_ok=True)


def prepare(  # noqa: PLR0913 - all but the first three have defaults
    dataset: Dataset,
    recipe: StoreRecipe,
    folder: Path,
    *,
    ids: Ids,
    topology: Adjacency | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    show: Text | None = None,
    accept: Text | None = None,
) -> Prepared:
    """Sample, plan and pack what is missing; ``accept`` is told the plan before packing."""
    tell = progress or (lambda _name, _done, _total: None)
    work = _Preparation(dataset, recipe, folder, ids, tell)
    with alone_in(folder):
        return work.run(
            lambda: NeighborSampler(
                dataset.topology() if topology is None else topology,
                recipe.fanouts,
                seed=recipe.seed,
                threads=threads,
                edge_ids=recipe.edge_ids,
            ),
            show or _LOG.info,
            accept or (lambda _fingerprint: None),
        )


class _Preparation:
    """The three steps, with their times."""

    def __init__(
        self, dataset: Dataset, recipe: StoreRecipe, folder: Path, ids: Ids, progress: Progress
    ) -> None:
        self._dataset, self._recipe, self._folder, self._ids = dataset, recipe, folder, ids
        self._progress = progress
        self._seconds: dict[str, float] = {}
        fields = dataclasses.asdict(recipe)
        seeds = hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).hexdigest()
        graph = {"data": dataset.fingerprint, "seeds": seeds}
        samples = graph | {name: fields[name] for name in _OF_SAMPLES}
        self._parts = graph | {key: value for key, value in fields.items() if key not in _LESS}
        self._samples_path = folder / f"samples-{_key(samples)}.fvf"
        self._store_key = _key(self._parts)

    def run(self, sampler: Callable[[], NeighborSampler], show: Text, accept: Text) -> Prepared:
        names = ["store"] if self._dataset.edge_features is None else ["store", "edges"]
        folders = {name: self._folder / f"{name}-{self._store_key}" for name in names}
        if not all((folder / "store.json").exists() for folder in folders.values()):
            self._note_change()
            with self._sampled(sampler) as samples:
                for table in self._tables(samples, folders):
                    self._make(table, show, accept if table.name == "store" else None)
            write_checked_json(folders["store"] / _RECIPE, {"parts": self._parts})
        opened: dict[str, PackedStore] = {}
        with contextlib.ExitStack() as on_error, SampleFile.open(self._samples_path) as samples:
            for table in self._tables(samples, folders):
                opened[table.name] = PackedStore.open(
                    table.folder, features=table.features, samples=table.samples
                )
                on_error.callback(opened[table.name].close)
            on_error.pop_all()
        return Prepared(
            store=opened["store"],
            edges=opened.get("edges"),
            seconds=self._seconds,
            samples_path=self._samples_path,
        )

    def _tables(self, samples: SampleFile, folders: dict[str, Path]) -> list[_Table]:
        """Return what is packed, and its share of the budgets: in proportion to its pages."""
        recipe, nodes = self._recipe, self._dataset.features
        edges = self._dataset.edge_features
        nodes_only = _Table("store", folders["store"], samples, nodes, 1.0, recipe.policy)
        if edges is None:
            return [nodes_only]
        of_edges = EdgeSamples(samples, edges.section("x").num_rows)
        numbers = range(samples.num_batches)
        # The records of a batch, beside its rows: what is narrow or small takes whole pages, too.
        least = sum(map(samples.record_bytes_of, numbers)) + PAGE_BYTES * samples.num_batches
        node_bytes = nodes.section("x").row_bytes * sum(map(samples.num_nodes_of, numbers))
        edge_bytes = edges.section("x").row_bytes * sum(map(of_edges.num_nodes_of, numbers))
        share = (least + node_bytes) / (2 * least + node_bytes + edge_bytes)
        return [
            dataclasses.replace(nodes_only, share=share),
            _Table("edges", folders["edges"], of_edges, edges, 1 - share, "static"),
        ]

    def _make(self, table: _Table, show: Text, accept: Text | None) -> None:
        if (table.folder / "store.json").exists():
            return
        plan_file = self._folder / f"plan-{table.folder.name}.fvf"
        plan = self._planned(table, plan_file)
        if accept is not None:
            accept(plan.order_fingerprint)
        show(plan.explain())
        self._pack(table, plan)
        plan_file.unlink(missing_ok=True)  # the store has its own copy

    def _note_change(self) -> None:
        """Say what differs from the nearest of the stores that are here."""
        found = []
        for path in self._folder.glob(f"store-*/{_RECIPE}"):
            with contextlib.suppress(DataError, StorageError, OSError):
                old = read_checked_json(path)["parts"]
                new = json.loads(json.dumps(self._parts))
                differs = [name for name in new if old.get(name) != new[name]]
                found.append((len(differs), path.parent.name, differs, old))
        if not found:
            return
        _, name, differs, old = min(found, key=lambda entry: entry[:2])
        changes = [
            f"{key} ({old.get(key)} -> {self._parts[key]})"
            if key in _OF_SAMPLES or isinstance(self._parts[key], int)
            else {"data": "the data set", "seeds": "the seeds"}.get(key, key)
            for key in differs
        ]
        _LOG.warning(
            "%s holds batches of other %s: preparing again; %s may be removed when nobody uses it",
            self._folder,
            ", ".join(changes) or "files",
            name,
        )

    def _sampled(self, sampler: Callable[[], NeighborSampler]) -> SampleFile:
        recipe = self._recipe
        with self._timed("sample"):
            return sample_epochs(
                sampler(),
                self._ids,
                self._samples_path,
                batch_size=recipe.batch_size,
                epochs=recipe.epochs,
                first_epoch=recipe.first_epoch,
                progress=lambda done, total: self._progress("sample", done, total),
                resume=True,
            )

    def _pack(self, table: _Table, plan: Plan) -> None:
        with self._timed("pack"):
            pack(
                table.features,
                table.samples,
                plan,
                table.folder,
                memory_bytes=max(self._recipe.host_bytes, _LEAST_PACKING_BYTES),
                progress=lambda stage, done, total: self._progress(f"pack {stage}", done, total),
                resume=True,
                profile=lambda: self._probe(table),
            ).close()
        size = format_bytes(sum(file.stat().st_size for file in table.folder.rglob("*")))
        _LOG.info("packed %s in %s", size, format_duration_s(self._seconds["pack"]))

    def _planned(self, table: _Table, path: Path) -> Plan:
        recipe = self._recipe
        if path.exists():
            with contextlib.suppress(DataError):  # it costs seconds to make it again
                found = Plan.open(path)
                inputs = (found.features_fingerprint, found.samples_fingerprint)
                if inputs == (table.features.fingerprint, table.samples.fingerprint):
                    return found
        with self._timed("plan"):
            plan = make_plan(
                table.samples,
                table.features,
                self._budgets(table),
                self._probe(table),
                policy=table.policy,
                layout=recipe.layout,
                segment_batches=recipe.segment_batches or None,
                minhash_functions=recipe.minhash_functions,
                buffer_batches=recipe.buffer_batches,
                training_epochs=recipe.training_epochs,
                scratch_folder=self._folder,
            )
            plan.write(path)
        return plan

    def _budgets(self, table: _Table) -> Budgets:
        """Return the table's share; the cache on the device holds rows of nodes alone."""
        recipe, disk_bytes = self._recipe, self._recipe.disk_bytes
        if disk_bytes is None:
            disk_bytes = int(shutil.disk_usage(self._folder).free * _SHARE_OF_FREE_DISK)
        return Budgets(
            device_bytes=recipe.device_bytes if table.name == "store" else 0,
            host_bytes=int(recipe.host_bytes * table.share),
            disk_bytes=int(disk_bytes * table.share),
        )

    def _probe(self, table: _Table) -> DiskProfile:
        """Measure the disk, for as long as the size of the features makes it matter."""
        share = min(1.0, table.features.nbytes / _PROBE_BYTES)
        return probe_disk(self._folder, seconds=_PROBE_S[0] + share * (_PROBE_S[1] - _PROBE_S[0]))

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        taken_s = time.perf_counter() - started_s
        self._seconds[name] = self._seconds.get(name, 0.0) + taken_s


@dataclasses.dataclass(frozen=True)
class _Table:
    """Rows that are packed: those of the nodes, or of the edges."""

    name: str
    folder: Path
    samples: SampleFile
    features: Container
    share: float
    policy: Literal["static", "belady"]


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out; a lock of a process that died is free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w", encoding="utf-8")
    except OSError as error:
        message = f"cannot write in {folder}: {error.strerror or error}"
        raise StorageError(
            message, hint="choose a folder that you may write (data.store, cache=)"
        ) from error
    with file:
        if not lock_file(file.fileno(), folder, patience_s=0):
            _LOG.info("another process prepares %s; waiting for it", folder)
            lock_file(file.fileno(), folder, patience_s=math.inf)
        yield


def _key(parts: dict[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
