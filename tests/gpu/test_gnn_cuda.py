"""Graph loaders and the trainer on a GPU: every tensor is that of the CPU, whatever way it took."""

import json
import warnings

import numpy as np
import pytest
import torch

from fivefold.gnn.data import Dataset, HeteroSource, array_source, ingest
from fivefold.gnn.loading import DiskLoader, LinkLoader, OnlineLoader
from fivefold.gnn.planning import Budgets
from fivefold.gnn.training import GnnConfig, train_graph

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    import torch_geometric.data  # noqa: F401 - loaded before the forks

pytestmark = pytest.mark.distributed

FANOUTS, BATCH = [4, 3], 32


class Disk:
    """A cost model with round numbers, so that plans do not depend on the machine."""

    sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9

    def seconds(self, requests, size_bytes):
        return requests * 1e-4 + size_bytes / 1e9


@pytest.fixture(autouse=True)
def known_disk(monkeypatch):
    for module in ("loading.prepare", "training._inference"):
        monkeypatch.setattr(f"fivefold.gnn.{module}.probe_disk", lambda *_, **__: Disk())


def skewed(rng, nodes, edges):
    return np.stack([(nodes * rng.random(edges) ** 3).astype(np.int64),
                     rng.integers(0, nodes, edges)])  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A graph of one type, with features of edges and labels that its rows tell."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 3000)
    features = rng.normal(size=(3000, 100)).astype(np.float32)
    features[:, :4] += 5 * np.eye(4, dtype=np.float32)[labels]
    source = array_source(
        skewed(rng, 3000, 30_000),
        features=features,
        labels=labels,
        splits={"train": range(600), "valid": range(600, 800), "test": range(800, 1000)},
        edge_features=rng.normal(size=(30_000, 3)).astype(np.float32),
    )
    path = tmp_path_factory.mktemp("graph") / "one"
    ingest(source, path).close()
    return path


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    rng = np.random.default_rng(1)
    cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    papers = array_source(
        None,
        features=rng.normal(size=(3000, 60)).astype(np.float16),
        labels=rng.integers(0, 3, 3000),
        splits={"train": range(300), "valid": range(300, 400), "test": range(400, 500)},
    )
    authors = array_source(None, features=rng.normal(size=(900, 25)).astype(np.float32))
    ends = {cites: skewed(rng, 3000, 30_000)}
    ends[writes] = np.stack([rng.integers(0, count, 9000) for count in (900, 3000)])
    edges = {kind: array_source(pairs, num_nodes=3000).edges() for kind, pairs in ends.items()}
    nodes = {"paper": papers, "author": authors}
    path = tmp_path_factory.mktemp("graph") / "typed"
    ingest(HeteroSource(name="typed", nodes=nodes, edges=edges), path).close()
    return path


def tensors_of(batch):
    """Return the tensors of a batch of ours or of PyG's by name."""
    if hasattr(batch, "to_dict"):
        return dict(flat(batch.to_dict()))
    return {str(number): tensor for number, tensor in enumerate(batch.tensors())}


def flat(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{name}.{key}")


def epochs(loader, device):
    """Return the tensors of three epochs, with the loop's own work between them."""
    found = []
    size = 4000 if device == "cuda" else 10  # of work that a copy could overtake
    with loader:
        for _ in range(3):
            kept = []
            for batch in loader:
                tensors = tensors_of(batch)
                assert {tensor.device.type for tensor in tensors.values()} == {device}
                busy = torch.ones(size, size, device=device)
                for _ in range(5):
                    busy = busy @ busy / size
                kept.append({name: tensor.clone() for name, tensor in tensors.items()})
                del batch, tensors  # the buffers are used again
            found += [{name: t.cpu() for name, t in tensors.items()} for tensors in kept]
        statistics = loader.statistics()
    return found, statistics


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for here, there in zip(ours, theirs, strict=True):
        assert here.keys() == there.keys()
        for name in here:
            assert torch.equal(here[name], there[name]), name


@pytest.fixture
def case(folder, typed, request):
    """Return the folder of a graph, its seeds, bytes of both caches and the form of its batches."""
    kind, form = request.param
    return (
        (folder, None, 600_000, 700_000, form)
        if kind == "one"
        else (typed, ("paper", np.arange(0, 500, 2)), 230_000, 230_000, form)
    )


FORMS = [("one", form) for form in ("data", "edge_index", "blocks")]
FORMS += [("typed", form) for form in ("data", "edge_index")]


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize("case", FORMS, indirect=True, ids=" ".join)
def test_batches_from_disk(device, in_child, tmp_path, policy, case):
    graph, seeds, device_bytes, host_bytes, form = case
    budgets = Budgets(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=10**9)

    def batches(where, name):
        torch.set_num_threads(1)
        loader = DiskLoader.from_dataset(
            graph,
            FANOUTS,
            BATCH,
            input_nodes=seeds,
            budgets=budgets,
            cache=tmp_path / name,
            form=form,
            policy=policy,
            device=where,
        )
        return epochs(loader, where)

    (here, _), (there, statistics) = in_child(lambda: [batches("cpu", "a"), batches(device, "a")])
    assert_equal(here, there)
    assert statistics.rows["device"] > 0  # the cache on the device served some
    assert statistics.rows["host"] > 0
    assert statistics.rows["private"] + statistics.rows["shared"] > 0
    assert ("copy to the device" in statistics.stage_s) == (device != "cpu")


@pytest.mark.parametrize("loader", [OnlineLoader, LinkLoader])
def test_batches_sampled_on_the_way(device, in_child, folder, loader):
    def batches(where):
        torch.set_num_threads(1)
        options = {"fanouts": FANOUTS, "batch_size": BATCH, "seed": 1, "cache_bytes": 40_000}
        with Dataset.open(folder) as dataset:
            if loader is OnlineLoader:
                made = OnlineLoader(dataset, dataset.train, device=where, **options)
            else:
                edges = torch.randint(0, 3000, (2, 300), generator=torch.Generator().manual_seed(0))
                made = LinkLoader(dataset, edges.numpy(), device=where, **options)
            return epochs(made, where)

    (here, _), (there, _) = in_child(lambda: [batches("cpu"), batches(device)])
    assert_equal(here, there)


def config_of(folder, output, device, **run):
    return GnnConfig(
        run={"output": output, "device": device, "epochs": 4, "log_every_steps": 1, **run},
        data={"path": folder, "store": str(output.parent / "store")},
        sampling={"fanouts": tuple(FANOUTS), "batch_size": 60},
        budgets={"device": 900_000, "host": 1_000_000, "disk": 10**9},
        model={"hidden_dim": 32, "dropout": 0.0},
        validation={"batch_size": 200},
    )


def losses(output):
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {e["step"]: e["loss"] for e in events if e["event"] == "train"}


@pytest.mark.parametrize("mode", ["disk", "memory", "online"])
def test_training_learns_as_on_a_cpu(device, in_child, folder, tmp_path, mode):
    def work():
        torch.set_num_threads(1)
        return [
            train_graph(config_of(folder, tmp_path / name, where, mode=mode))
            for name, where in (("cpu", "cpu"), ("gpu", device))
        ]

    _, there = in_child(work)
    assert there.test_accuracy > 0.8
    here, found = losses(tmp_path / "cpu"), losses(tmp_path / "gpu")
    assert here.keys() == found.keys()
    assert max(abs(here[step] - found[step]) for step in here) < 5e-3


def test_a_run_changes_devices_at_its_checkpoints(device, in_child, folder, tmp_path):
    def work():
        torch.set_num_threads(1)
        train_graph(config_of(folder, tmp_path / "whole", "cpu"))
        for epochs_done, where in ((1, device), (2, "cpu"), (3, device), (4, "cpu")):
            train_graph(config_of(folder, tmp_path / "parts", where, epochs=epochs_done))

    in_child(work)
    here, found = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert here.keys() == found.keys()
    assert max(abs(here[step] - found[step]) for step in here) < 5e-3
