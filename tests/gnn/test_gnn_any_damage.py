"""Every byte of every file of a prepared graph: damaged or of another graph, it is refused.

A change that is not refused must not change anything that is read.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.gnn.data import (
    Dataset,
    EdgeRules,
    HeteroDataset,
    generate_graph,
    ingest,
    pyg_source,
    table_source,
)
from fivefold.gnn.data.statistics import verify
from fivefold.gnn.loading import DiskLoader
from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.planning import Plan
from fivefold.gnn.sampling import HeteroNeighborSampler, NeighborSampler, SampleFile
from fivefold.gnn.storage import Container
from fivefold.gnn.training import GnnConfig, infer_run, train_graph
from fivefold.gnn.training.config import (
    BudgetsConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
)
from helpers.night import by_day

NOT_READ_BACK = {"lock", ".lock", "plan.txt", "metrics.jsonl"}
NOT_READ_BACK |= {"manifest.json", "result.json", "inference.json"}


class Disk:
    sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9

    def seconds(self, requests, num_bytes):
        return requests * 1e-4 + num_bytes * 1e-9


class Store(dict):
    """Attributes of a type, as PyTorch Geometric keeps them."""

    __getattr__ = dict.__getitem__


class Typed(dict):
    node_types = property(lambda self: [key for key in self if isinstance(key, str)])
    edge_types = property(lambda self: [key for key in self if isinstance(key, tuple)])


def typed_source(seed):
    rng = np.random.default_rng(seed)
    pairs = torch.from_numpy(np.stack([rng.integers(0, 9, 60), rng.integers(0, 20, 60)]))
    papers = Store(x=torch.from_numpy(rng.random((20, 3), np.float32)), num_nodes=20)
    papers["y"] = torch.from_numpy(rng.integers(0, 3, 20))
    kinds = {"paper": papers, "author": Store(num_nodes=9)}
    kinds["author", "writes", "paper"] = Store(edge_index=pairs)
    for store in kinds.values():
        for name in ("x", "y", "edge_weight", "edge_attr", "train_mask", "val_mask", "test_mask"):
            store.setdefault(name, None)
    return pyg_source(Typed(kinds), name="typed")


def make_everything(folder, seed):
    """Every kind of file that is read back, of one graph."""
    generate_graph(folder / "graph", nodes=300, dim=6, seed=seed).close()
    config = GnnConfig(
        run=RunConfig(output=folder / "run", epochs=2, device="cpu", keep_checkpoints=1),
        data=DataConfig(path=folder / "graph", store=str(folder / "prepared")),
        sampling=SamplingConfig(fanouts=(3, 3), batch_size=40, epochs=2, threads=1),
        budgets=BudgetsConfig(host=20_000, disk=10**9),
        model=ModelConfig(hidden_dim=8, dropout=0.0),
    )
    train_graph(config)
    infer_run(folder / "run")
    with PackedStore.open(next((folder / "prepared").glob("store-*"))) as store:
        store.plan.write(folder / "prepared" / "plan.fvf")
    ingest(typed_source(seed), folder / "typed").close()
    rng = np.random.default_rng(seed)
    lines = (f"n{a},n{b}" for a, b in rng.integers(0, 30, (90, 2)).tolist())
    (folder / "edges.csv").write_text("source,target\n" + "\n".join(lines) + "\n")
    ingest(table_source([folder / "edges.csv"]), folder / "named").close()


def named_like(folder, name):
    """The one file of a kind: keys in names differ from graph to graph."""
    return next(iter(sorted((folder / "prepared").glob(name))))


class Reading:
    """A digest of arrays and values."""

    def __init__(self):
        self._digest = hashlib.sha256()

    def add(self, *values):
        for value in values:
            if isinstance(value, torch.Tensor):
                value = value.numpy()  # noqa: PLW2901
            data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            self._digest.update(data)

    def result(self):
        return self._digest.hexdigest()


def read_graph(folder):
    found = Reading()
    with Dataset.open(folder / "graph") as dataset:
        mapped = dataset.topology(mapped=True)
        for topology in (mapped, dataset.topology()):
            sampler = NeighborSampler(topology, [4, 4], threads=1)
            batch = sampler.sample(dataset.train[:30], epoch=0, batch=0)
            found.add(batch.node_ids, batch.sources, topology.indptr, topology.indices)
        found.add(dataset.labels, dataset.train, dataset.valid, dataset.test)
        found.add(dataset.features.read("x"), dataset.num_classes, dataset.num_nodes, dataset.dim)
    return found.result()


def read_prepared(folder):
    found = Reading()
    with (
        Dataset.open(folder / "graph") as dataset,
        SampleFile.open(named_like(folder, "samples-*.fvf")) as samples,
        PackedStore.open(
            named_like(folder, "store-*"), features=dataset.features, samples=samples
        ) as store,
        DiskLoader(store, labels=dataset.labels, threads=1, backend="threads") as loader,
    ):
        found.add(samples.num_epochs, samples.counts, samples.train_ids, store.train_ids)
        for number in range(samples.num_batches):
            found.add(samples.batch(number).sources, samples.node_ids(number))
        for epoch in range(3):
            loader.set_epoch(epoch)
            for batch in loader:
                found.add(batch.x, batch.y, batch.edge_index, batch.n_id)
        plan = Plan.open(folder / "prepared" / "plan.fvf")
        arguments = (dataset.features, samples, plan, store.folder)
        with pack(*arguments, memory_bytes=10**7) as again:
            found.add(again.plan.fingerprint, plan.to_json())
    return found.result()


def read_run(folder):
    found = Reading()
    result = infer_run(folder / "run")
    with Container.open(result.outputs.path, verify="full") as outputs:
        found.add(outputs.read("x"), sorted(result.accuracy.items()), result.step)
    return found.result()


def read_typed(folder):
    found = Reading()
    with HeteroDataset.open(folder / "typed") as dataset:
        found.add(dataset.name, dataset.node_types, dataset.edge_types, dataset.num_nodes)
        sampler = HeteroNeighborSampler(dataset.topology(mapped=True), [4])
        batch = sampler.sample({"paper": [0, 3, 4]}, epoch=0, batch=0)
        found.add(*batch.node_ids.values(), *batch.sources.values())
        found.add(dataset.labels("paper"), dataset.features("paper").read("x"))
    return found.result()


def read_named(folder):
    with Dataset.open(folder / "named") as dataset:
        verify(dataset)
        found = Reading()
        found.add(dataset.topology().indices, (folder / "named" / "names.parquet").read_bytes())
    source = table_source([folder / "edges.csv"])
    with ingest(source, folder / "named", rules=EdgeRules()) as dataset:
        found.add(dataset.num_nodes, source.num_nodes)
    return found.result()


READERS = {
    "graph": (read_graph,),
    "prepared": (read_prepared,),
    "run": (read_run,),
    "typed": (read_typed,),
    "named": (read_named,),
}


def files_of(folder) -> Iterator[Path]:
    for part in READERS:
        for path in sorted((folder / part).rglob("*")):
            if path.is_file() and path.name not in NOT_READ_BACK:
                yield path


def twin_of(path, folder, other):
    """The file of the same kind of the other graph, whose keys in names are others."""
    parts = path.relative_to(folder).parts
    place = other
    for part in parts:
        stem = part.split("-")[0]
        hashed = stem in {"samples", "store"}
        place = next(place.glob(f"{stem}-*{Path(part).suffix}")) if hashed else place / part
    return place


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two graphs with everything that is made of them, and what is read of the first."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("loading.prepare", "training._inference"):
            patch.setattr(f"fivefold.gnn.{module}.probe_disk", lambda *_, **__: Disk())
        one, other = (tmp_path_factory.mktemp(name) for name in ("one", "other"))
        make_everything(one, 1)
        make_everything(other, 2)
        paths = list(files_of(one))
        sound = {part: [read(one) for read in readers] for part, readers in READERS.items()}
        yield one, other, paths, sound


def change(path, kind, share, folder, other):
    """Damage a file; where and how follows from a number between 0 and 1."""
    data = path.read_bytes()
    place = min(int(share * len(data)), len(data) - 1)
    if kind == "flip":
        changed = bytearray(data)
        changed[place] ^= 1 << int(share * 8191) % 8
        path.write_bytes(changed)
    elif kind == "cut":
        path.write_bytes(data[:place])
    elif kind == "longer":
        path.write_bytes(data + data[: place + 1])
    elif kind == "zeros":
        path.write_bytes(data[:place] + bytes(min(64, len(data) - place)) + data[place + 64 :])
    else:
        shutil.copyfile(twin_of(path, folder, other), path)
    return data


def check(prepared, path, kind, share):
    one, other, _, sound = prepared
    data = change(path, kind, share, one, other)
    part = path.relative_to(one).parts[0]
    try:
        # What belongs to others is read by them, too.
        for name in (part, "prepared", "run") if part == "graph" else (part,):
            for read, expected in zip(READERS[name], sound[name], strict=True):
                try:
                    assert read(one) == expected, f"{kind} of {path.name} at {share} was not seen"
                except FivefoldError as error:
                    assert error.message  # noqa: PT017
    finally:
        path.write_bytes(data)


KINDS = ("flip", "flip", "cut", "swap", "longer", "zeros")


@by_day(30)
@given(data=st.data())
def test_no_change_of_any_file_gives_something_else(data, prepared):
    path = data.draw(st.sampled_from(prepared[2]), label="file")
    share = data.draw(st.floats(0, 1, exclude_max=True), label="place")
    check(prepared, path, data.draw(st.sampled_from(KINDS), label="change"), share)


def test_each_kind_of_file_of_the_other_graph_is_refused(prepared):
    names = set()
    for path in prepared[2]:
        names.add(path.suffix)
        check(prepared, path, "swap", 0.5)
        check(prepared, path, "cut", 0.5)
    assert names >= {".fvf", ".json", ".toml", ".parquet"}
