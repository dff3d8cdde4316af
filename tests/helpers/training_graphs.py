"""Small data sets on disk with what is awkward: hubs, isolated nodes, self-loops, odd rows."""

import numpy as np

from fivefold.gnn.data import Dataset
from fivefold.gnn.storage import Container, ContainerWriter


class Disk:
    """A disk with a fixed cost of a request and of a byte."""

    def __init__(self, request_s=1e-4, byte_s=1e-9):
        self.request_s, self.byte_s = request_s, byte_s

    def seconds(self, requests, num_bytes):
        return requests * self.request_s + num_bytes * self.byte_s


def write(path, kind, arrays, attributes):
    sections = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with ContainerWriter(path, kind=kind, sections=sections, attributes=attributes) as writer:
        for name, array in arrays.items():
            writer.write(name, 0, array)
        with writer.commit() as container:
            return container.fingerprint


def awkward_edges(rng, *, nodes, edges):
    """Sources and targets: node 3 is a hub both ways, the last third has no in-edges."""
    targets = rng.integers(0, max(1, 2 * nodes // 3), edges)
    sources = rng.integers(0, nodes, edges)
    targets[: edges // 3] = min(3, nodes - 1)
    sources[-edges // 4 :] = min(3, nodes - 1)
    sources[:5] = targets[:5]
    return sources, targets


def make_dataset(folder, *, nodes=300, edges=2000, dim=5, dtype=np.float32, classes=4, seed=0):
    """A data set whose labels follow from the features, so that training gets somewhere."""
    rng = np.random.default_rng(seed)
    sources, targets = awkward_edges(rng, nodes=nodes, edges=edges)
    order = np.argsort(targets, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=nodes))])
    y = rng.integers(0, classes, nodes)
    centres = rng.normal(size=(classes, dim))
    x = (centres[y] + 0.3 * rng.normal(size=(nodes, dim))).astype(dtype)
    ids = rng.permutation(nodes)
    first, second = nodes * 6 // 10, nodes * 8 // 10
    folder.mkdir(parents=True, exist_ok=True)
    about = {"name": "awkward", "num_nodes": nodes}
    graph = {"indptr": indptr.astype(np.int64), "indices": sources[order].astype(np.int32)}
    labels = {"y": y.astype(np.int64), "train": np.sort(ids[:first])}
    labels |= {"valid": np.sort(ids[first:second]), "test": np.sort(ids[second:])}
    files = {
        "features.fvf": write(folder / "features.fvf", "features", {"x": x}, about),
        "labels.fvf": write(
            folder / "labels.fvf", "labels", labels, about | {"num_classes": classes}
        ),
    }
    write(folder / "graph.fvf", "graph", graph, about | {"files": files})
    return Dataset.open(folder)


def relabel(folder, labels, attributes):
    """Put other labels in the place of a data set's."""
    with Container.open(folder / "graph.fvf") as old:
        graph, about = {name: old.read(name) for name in old.sections}, old.attributes
    found = write(folder / "labels.fvf", "labels", labels, attributes)
    about = about | {"files": about["files"] | {"labels.fvf": found}}
    write(folder / "graph.fvf", "graph", graph, about)


def edge_index(dataset):
    """All edges as one array, sources over targets."""
    topology = dataset.topology()
    targets = np.repeat(np.arange(dataset.num_nodes), np.diff(topology.indptr))
    return np.stack([topology.indices.astype(np.int64), targets])
