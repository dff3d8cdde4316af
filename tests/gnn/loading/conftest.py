"""Small data sets and packed stores for the tests of loading, with random graphs of any dtype."""

import numpy as np
import pytest

from fivefold.gnn.data import Dataset
from fivefold.gnn.packing import pack
from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.sampling import NeighborSampler, sample_epochs
from fivefold.gnn.storage import ContainerWriter


class Disk:
    """A cost model with round numbers, so that plans do not depend on the machine."""

    sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9

    def seconds(self, requests, size_bytes):
        return requests * 1e-4 + size_bytes / 1e9


def write(path, kind, arrays, **attributes):
    sections = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with ContainerWriter(path, kind=kind, sections=sections, attributes=attributes) as writer:
        for name, array in arrays.items():
            writer.write(name, 0, array)
        with writer.commit() as container:
            return container.fingerprint


def skewed_graph(nodes, edges, random):
    """Few nodes are the sources of most edges; some nodes have no edge at all."""
    targets = np.sort(random.integers(0, max(1, nodes - nodes // 10), edges))
    sources = (nodes * random.random(edges) ** 3).astype(np.int32)
    indptr = np.searchsorted(targets, np.arange(nodes + 1)).astype(np.int64)
    return indptr, sources


def make_dataset(  # noqa: PLR0913 - settings of one graph, all by name
    folder, *, nodes=500, edges=4000, dim=4, dtype=np.float32, train=60, seed=0, labelled=True
):
    random = np.random.default_rng(seed)
    indptr, indices = skewed_graph(nodes, edges, random)
    x = random.integers(0, 2**16, (nodes, dim)).astype(np.uint16)
    x = x.view(np.float16) if dtype == np.float16 else (x.astype(np.float64) - 2**15).astype(dtype)
    ids = random.permutation(nodes)[: 3 * train].astype(np.int64)
    labels = {"y": random.integers(0, 5, nodes)}
    labels |= {name: ids[i::3] for i, name in enumerate(("train", "valid", "test"))}
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "features.fvf": write(folder / "features.fvf", "features", {"x": x}),
    }
    if labelled:
        files["labels.fvf"] = write(folder / "labels.fvf", "labels", labels, num_classes=5)
    write(
        folder / "graph.fvf",
        "graph",
        {"indptr": indptr, "indices": indices},
        name="random",
        num_nodes=nodes,
        files=files,
    )
    return Dataset.open(folder)


def make_store(folder, dataset, *, policy="static", epochs=1, **options):
    """Sample, plan and pack; budgets are given in rows."""
    fanouts, batch_size = options.get("fanouts", (4, 3)), options.get("batch_size", 9)
    topology = dataset.topology()
    samples = sample_epochs(
        NeighborSampler(topology, fanouts, seed=1),
        dataset.train,
        folder / "samples.fvf",
        batch_size=batch_size,
        epochs=epochs,
        seed=1,
    )
    budgets = Budgets(
        device_bytes=options.get("device_rows", 20) * dataset.row_bytes,
        host_bytes=options.get("host_rows", 60) * dataset.row_bytes,
        disk_bytes=10**9,
    )
    plan = make_plan(
        samples,
        dataset.features,
        budgets,
        Disk(),
        policy=policy,
        segment_batches=options.get("segment_batches", 3),
        buffer_batches=0,
    )
    return pack(dataset.features, samples, plan, folder / "store", memory_bytes=32 << 20)


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    """``stores(dim=3, policy="belady")`` -> (dataset, features, store); each is made once."""
    made, data = {}, {}

    def get(*, dim=4, dtype=np.float32, **options):
        key = (dim, np.dtype(dtype).str, *sorted(options.items()))
        if key not in made:
            if key[:2] not in data:
                dataset = make_dataset(tmp_path_factory.mktemp("data"), dim=dim, dtype=dtype)
                data[key[:2]] = dataset, dataset.features.read("x")
            dataset, features = data[key[:2]]
            store = make_store(tmp_path_factory.mktemp("store"), dataset, **options)
            made[key] = dataset, features, store
        return made[key]

    yield get
    for _, _, store in made.values():
        store.close()
    for dataset, _ in data.values():
        dataset.close()


@pytest.fixture(scope="session")
def dataset_of():
    return make_dataset


@pytest.fixture(scope="session")
def store_of():
    return make_store


@pytest.fixture(scope="session")
def disk_of_round_numbers():
    return Disk()
