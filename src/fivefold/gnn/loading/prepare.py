"""Everything between a data set and a packed store: samples, plan, rows, made where missing.

Each part is named by a hash of what it depends on, and goes on where a killed run stopped. One
process at a time works in a folder, the others wait. Rows of edges, and of each node type, are
packed as rows of nodes of their own samples (``EdgeSamples``, ``NodeSamples``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from fivefold.errors import ConfigurationError, DataError, InfeasibleError, StorageError
from fivefold.files import lock_file, read_checked_json, write_checked_json
from fivefold.gnn.data import Dataset, HeteroDataset
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.planning import Budgets, Plan, Policy, make_plan
from fivefold.gnn.sampling import (
    Adjacency,
    HeteroAdjacency,
    HeteroNeighborSampler,
    NeighborSampler,
    SampleFile,
    sample_epochs,
)
from fivefold.gnn.sampling.batches import EdgeType, checked_fanouts, fanouts_by_type
from fivefold.gnn.sampling.part_samples import EdgeSamples, NodeSamples
from fivefold.gnn.storage import Container, DiskProfile, probe_disk
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Ids
from fivefold.units import format_bytes, format_duration_s

_LOG = logging.getLogger(__name__)
_SHARE_OF_FREE_DISK = 0.8
_LEAST_PACKING_BYTES = 4 << 20  # less would be lost in what the interpreter takes
_PROBE_BYTES = 1 << 30  # of features; for fewer, the disk is measured for a shorter time
_PROBE_S = (0.2, 2.0)
Text = Callable[[str], None]
_RECIPE = "recipe.json"
_LESS = {"training_epochs"}  # of a recipe: no reason to pack again


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreRecipe:
    """Options that make a packed store, besides the data set and the seeds.

    ``threads`` and ``training_epochs`` do not make another store; ``disk_bytes`` of None is four
    fifths of what is free, ``segment_batches`` of 0 the number that costs least.
    """

    fanouts: tuple[Any, ...]  # numbers, or pairs of an edge type and its numbers
    batch_size: int
    epochs: int = 1
    first_epoch: int = 0
    seed: int = 0
    device_bytes: int = 0
    host_bytes: int = 1_000_000_000
    disk_bytes: int | None = None
    policy: Policy = "static"
    segment_batches: int = 0
    buffer_batches: int = 3
    edge_ids: bool = False
    training_epochs: int = 50


_OF_SAMPLES = ("fanouts", "batch_size", "epochs", "first_epoch", "seed", "edge_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Stores that a loader of packed batches reads, by node type and by edge type.

    Of a graph of one type the only keys are None. ``samples`` tells of nodes without features.
    """

    nodes: dict[str | None, PackedStore]
    edges: dict[EdgeType | None, PackedStore]
    samples: SampleFile | None = None
    input_type: str | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_one(cls, store: PackedStore, edges: PackedStore | None) -> Self:
        """Return the stores of a graph of one type."""
        return cls(nodes={None: store}, edges={} if edges is None else {None: edges})

    @property
    def unpacked(self) -> dict[str, SampleFile]:
        """Return the batches' nodes of the types without features, as they were sampled."""
        samples = self.samples
        if self.input_type is None or samples is None:
            return {}
        names = [name for name in samples.types.num_nodes if name not in self.nodes]
        return {name: NodeSamples(samples, name) for name in names}

    @property
    def order_fingerprint(self) -> str:
        """Return a hash of what the order of all rows of nodes depends on."""
        return " ".join(store.plan.order_fingerprint for store in self.nodes.values())

    def explain(self) -> str:
        """Return the plans of all stores of nodes as text."""
        return "\n\n".join(_named(kind, store.plan) for kind, store in self.nodes.items())

    def predicted(self) -> dict[str, Any]:
        """Return what the plan predicted; of several types what they add up to, and each."""
        told = {kind: store.plan.predicted.to_json() for kind, store in self.nodes.items()}
        if None in told:
            return told[None]
        total = sum(plan["read_bytes_per_epoch"] for plan in told.values())
        return {"read_bytes_per_epoch": total, "types": told}

    def close(self) -> None:
        """Let go of the files."""
        for opened in (*self.nodes.values(), *self.edges.values(), self.samples):
            if opened is not None:
                opened.close()

    def remove(self) -> None:
        """Delete what was made; files that are open stay readable for whoever has them."""
        for store in (*self.nodes.values(), *self.edges.values()):
            shutil.rmtree(store.folder, ignore_errors=True)
        if self.samples is not None:
            self.samples.path.unlink(missing_ok=True)


@dataclasses.dataclass(kw_only=True)
class Preparation:
    """The three steps, with their times.

    ``ids`` are seeds, of ``input_type`` in a graph of several types. ``show`` is told the plan as
    text, and ``accept`` its fingerprint, before packing.
    """

    dataset: Dataset | HeteroDataset
    recipe: StoreRecipe
    folder: Path
    ids: Ids
    input_type: str | None = None
    topology: Adjacency | HeteroAdjacency | None = None
    threads: int | None = None
    progress: Progress | None = None
    show: Text | None = None
    accept: Text | None = None

    def __post_init__(self) -> None:
        self._seconds: dict[str, float] = {}
        fields = dataclasses.asdict(self.recipe)
        seeds = hashlib.blake2b(np.ascontiguousarray(self.ids).data, digest_size=8).hexdigest()
        graph = {"data": self.dataset.fingerprint, "seeds": seeds}
        if self.input_type is not None:
            graph["input_type"] = self.input_type
        samples = graph | {name: fields[name] for name in _OF_SAMPLES}
        self._parts = graph | {key: value for key, value in fields.items() if key not in _LESS}
        self._samples_path = self.folder / f"samples-{key_of(samples)}.fvf"

    def run(self) -> Prepared:
        """Sample, plan and pack what is not there yet; return the opened stores."""
        with alone_in(self.folder):
            tables = self._tables()
            if not all(table.is_packed for table in tables):
                self._note_change()
                with self._sampled() as samples:
                    budgets = self._budgets(tables, samples)
                    for number, table in enumerate(tables):
                        if not table.is_packed:
                            self._make(table, samples, budgets[number], first=number == 0)
                write_checked_json(tables[0].folder / _RECIPE, {"parts": self._parts})
            return self._opened(tables)

    def _opened(self, tables: list[_Table]) -> Prepared:
        found: dict[bool, dict[Any, PackedStore]] = {False: {}, True: {}}
        with contextlib.ExitStack() as on_error:
            samples = on_error.enter_context(SampleFile.open(self._samples_path))
            for table in tables:
                found[table.of_edges][table.kind] = on_error.enter_context(
                    PackedStore.open(
                        table.folder, features=table.features, samples=table.part_of(samples)
                    )
                )
            on_error.pop_all()
        return Prepared(
            nodes=found[False],
            edges=found[True],
            samples=samples,
            input_type=self.input_type,
            seconds=self._seconds,
        )

    def _tables(self) -> list[_Table]:
        """Return what is packed: the rows of nodes, then those of edges."""
        data, key = self.dataset, key_of(self._parts)
        nodes, edges = rows_of(data)
        if not nodes:
            raise DataError(
                f"no node type of {data.folder} has features: there is nothing to pack",
                hint="ingest features of at least one node type",
            )
        if not self.recipe.edge_ids:  # batches do not say which edges they have
            edges = {}
        return [
            _Table(kind, rows, self.folder / f"{name}{number or ''}-{key}", name == "edges")
            for name, found in (("store", nodes), ("edges", edges))
            for number, (kind, rows) in enumerate(found.items())
        ]

    def _budgets(self, tables: list[_Table], samples: SampleFile) -> list[Budgets]:
        """Return the budgets of the tables.

        Each gets its batches in flight, and of what is left a share in proportion to its pages.
        """
        recipe, numbers = self.recipe, range(samples.num_batches)
        disk_bytes = recipe.disk_bytes
        if disk_bytes is None:
            disk_bytes = int(shutil.disk_usage(self.folder).free * _SHARE_OF_FREE_DISK)
        flying, weights = [], []
        for table in tables:
            part, row_bytes = table.part_of(samples), table.features.section("x").row_bytes
            rows = [part.num_nodes_of(number) for number in numbers]
            flying.append(recipe.buffer_batches * max(rows) * row_bytes)
            # Records of a batch, beside its rows: what is narrow or small takes whole pages, too.
            least = sum(map(part.record_bytes_of, numbers)) + PAGE_BYTES * len(numbers)
            weights.append(least + row_bytes * sum(rows))
        spare_bytes = recipe.host_bytes - sum(flying)
        if spare_bytes < 0 and len(tables) > 1:
            raise InfeasibleError(
                f"host memory of {format_bytes(recipe.host_bytes)} does not hold the rows of "
                f"{recipe.buffer_batches} batches in flight, of nodes and edges of all types",
                hint=f"give at least host_bytes={sum(flying)} ({format_bytes(sum(flying))}), lower "
                "buffer_batches, or sample smaller batches",
            )
        of_nodes = [0 if table.of_edges else w for table, w in zip(tables, weights, strict=True)]
        sizes = [table.features.section("x").nbytes for table in tables]
        hosts = _in_proportion(spare_bytes, weights, sizes)
        devices = _in_proportion(recipe.device_bytes, of_nodes, sizes)
        return [
            Budgets(
                device_bytes=devices[i],
                host_bytes=flying[i] + hosts[i],
                disk_bytes=disk_bytes * weights[i] // sum(weights),
            )
            for i in range(len(tables))
        ]

    def _make(self, table: _Table, whole: SampleFile, budgets: Budgets, *, first: bool) -> None:
        """Plan and pack one table."""
        plan_file = self.folder / f"plan-{table.folder.name}.fvf"
        samples = table.part_of(whole)
        plan = self._planned(table, samples, budgets, plan_file)
        if first and self.accept is not None:
            self.accept(plan.order_fingerprint)
        (self.show or _LOG.info)(_named(table.kind, plan))
        with self._timed("pack"):
            pack(
                table.features,
                samples,
                plan,
                table.folder,
                memory_bytes=max(self.recipe.host_bytes, _LEAST_PACKING_BYTES),
                progress=self._told("pack "),
                resume=True,
                profile=lambda: self._probe(table),
            ).close()
        size = format_bytes(sum(file.stat().st_size for file in table.folder.rglob("*")))
        _LOG.info("packed %s in %s", size, format_duration_s(self._seconds["pack"]))
        plan_file.unlink(missing_ok=True)  # the store has its own copy

    def _note_change(self) -> None:
        """Say what differs from the nearest of the stores that are here."""
        found = []
        for path in self.folder.glob(f"store-*/{_RECIPE}"):
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
            self.folder,
            ", ".join(changes) or "files",
            name,
        )

    def _sampled(self) -> SampleFile:
        recipe = self.recipe
        edges = self.dataset.topology() if self.topology is None else self.topology
        options: dict[str, Any] = {
            "seed": recipe.seed, "threads": self.threads, "edge_ids": recipe.edge_ids
        }  # fmt: skip
        sampler: NeighborSampler | HeteroNeighborSampler
        if isinstance(edges, HeteroAdjacency):
            sampler = HeteroNeighborSampler(edges, dict(recipe.fanouts), **options)
        else:
            sampler = NeighborSampler(edges, recipe.fanouts, **options)
        with self._timed("sample"):
            return sample_epochs(
                sampler,
                self.ids,
                self._samples_path,
                batch_size=recipe.batch_size,
                input_type=self.input_type,
                epochs=recipe.epochs,
                first_epoch=recipe.first_epoch,
                progress=functools.partial(self._told(""), "sample"),
                resume=True,
            )

    def _planned(self, table: _Table, samples: SampleFile, budgets: Budgets, path: Path) -> Plan:
        recipe = self.recipe
        if path.exists():
            with contextlib.suppress(DataError):  # it costs seconds to make it again
                found = Plan.open(path)
                inputs = (found.features_fingerprint, found.samples_fingerprint)
                if inputs == (table.features.fingerprint, samples.fingerprint):
                    return found
        with self._timed("plan"):
            plan = make_plan(
                samples,
                table.features,
                budgets,
                self._probe(table),
                policy="static" if table.of_edges else recipe.policy,
                segment_batches=recipe.segment_batches or None,
                buffer_batches=recipe.buffer_batches,
                training_epochs=recipe.training_epochs,
                scratch_folder=self.folder,
                progress=self._told("plan "),
            )
            plan.write(path)
        return plan

    def _told(self, step: str) -> Progress:
        """Return what is told of the stages of a step."""
        tell = self.progress or (lambda _name, _done, _total: None)
        return lambda stage, done, total: tell(f"{step}{stage}", done, total)

    def _probe(self, table: _Table) -> DiskProfile:
        """Measure the disk, for as long as the size of the features makes it matter."""
        share = min(1.0, table.features.nbytes / _PROBE_BYTES)
        return probe_disk(self.folder, seconds=_PROBE_S[0] + share * (_PROBE_S[1] - _PROBE_S[0]))

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        taken_s = time.perf_counter() - started_s
        self._seconds[name] = self._seconds.get(name, 0.0) + taken_s


def rows_of(data: Dataset | HeteroDataset) -> tuple[dict[Any, Container], dict[Any, Container]]:
    """Return the rows of nodes and those of edges by type, where they have some.

    Of a graph of one type the only key is None.
    """
    if isinstance(data, Dataset):
        edges = {None: data.edge_features}
        return {None: data.features}, {k: rows for k, rows in edges.items() if rows is not None}
    nodes = {kind: data.features(kind) for kind in data.node_types if data.has_features(kind)}
    found = {kind: data.edge_features(kind) for kind in data.edge_types}
    return nodes, {kind: rows for kind, rows in found.items() if rows is not None}


def edge_weights_of(data: Dataset | HeteroDataset) -> dict[Any, Array]:
    """Return the weights of edges by their ids, for each type that has some: 4 bytes an edge."""
    kinds = [None] if isinstance(data, Dataset) else data.edge_types
    found = {}
    for kind in kinds:
        graph = data.graph if isinstance(data, Dataset) else data.graph(kind)  # type: ignore[arg-type]
        if "weights" not in graph.sections:
            continue
        weights = graph.read("weights")
        found[kind] = weights
        if (ids := Adjacency.open(graph, mapped=True).edge_ids) is not None:
            found[kind] = np.zeros(1 + int(ids.max(initial=-1)), np.float32)
            found[kind][ids] = weights
    return found


def fanouts_of(
    data: Dataset | HeteroDataset, given: Sequence[int] | Mapping[EdgeType, Sequence[int]]
) -> tuple[Any, ...]:
    """Return numbers, or of several types pairs of an edge type and its numbers."""
    if isinstance(data, HeteroDataset):
        return tuple(fanouts_by_type(data.edge_types, given).items())
    if isinstance(given, Mapping):
        message = "fanouts are given by edge type, but the graph has one"
        raise ConfigurationError(message, hint="give one number per hop")
    return checked_fanouts(given)


@dataclasses.dataclass(frozen=True)
class _Table:
    """Rows that are packed: those of the nodes, or of the edges, of one type."""

    kind: Any  # node type or edge type; None where there is one
    features: Container
    folder: Path
    of_edges: bool

    @property
    def is_packed(self) -> bool:
        """Return whether its store is whole."""
        return (self.folder / "store.json").exists()

    def part_of(self, samples: SampleFile) -> SampleFile:
        """Return the batches' rows of this table."""
        if self.of_edges:
            return EdgeSamples(samples, self.features.section("x").num_rows, self.kind)
        return samples if self.kind is None else NodeSamples(samples, self.kind)


def _named(kind: Any, plan: Plan) -> str:
    """Return a plan as text, under the name of its type where there are several."""
    if kind is None:
        return plan.explain()
    name = kind if isinstance(kind, str) else " ".join(kind)
    return f"Rows of {name}\n{plan.explain()}"


def _in_proportion(total: int, weights: list[int], most: list[int]) -> list[int]:
    """Share a budget out; who needs less than its share leaves the rest to the others."""
    shares, left = [0] * len(weights), sum(weights)
    order = sorted(np.flatnonzero(weights), key=lambda i: most[i] / weights[i])
    for i in order:
        last = i == order[-1]
        shares[i] = total if last else min(most[i], total * weights[i] // left)
        total, left = total - shares[i], left - weights[i]
    return shares


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


def key_of(parts: dict[str, Any]) -> str:
    """Return a short name of what a file is made of."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
