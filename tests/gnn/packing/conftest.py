"""A small world for packing: graph, features, samples and a disk whose prices are known."""

import numpy as np
import pytest

from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.sampling import Adjacency, NeighborSampler, sample_epochs
from fivefold.gnn.storage import ContainerWriter


class Disk:
    """A disk with fixed prices, so that plans do not depend on the machine."""

    sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9

    def seconds(self, requests, size_bytes):
        return requests * 1e-5 + size_bytes / 1e9


class World:
    """Graph, features, samples of one folder; plans and stores on request."""

    def __init__(  # noqa: PLR0913 - one keyword per setting
        self, folder, *, nodes, dim, dtype, batch_size, seeds, fanouts, epochs, seed
    ):
        rng = np.random.default_rng(seed)
        self.folder = folder
        degrees = rng.poisson(4, nodes)
        indptr = np.concatenate([[0], np.cumsum(degrees)])
        # Squares of uniform numbers: some nodes are neighbours of many others.
        indices = (rng.random(int(indptr[-1])) ** 2 * nodes).astype(np.int32)
        self.topology = Adjacency(indptr, indices)
        self.values = rng.integers(0, 250, (nodes, dim)).astype(dtype)
        with ContainerWriter(
            folder / "features.fvf",
            kind="features",
            sections={"x": (np.dtype(dtype), (nodes, dim))},
            attributes={},
        ) as writer:
            writer.write("x", 0, self.values)
            self.features = writer.commit()
        sampler = NeighborSampler(self.topology, fanouts, seed=seed)
        ids = rng.permutation(nodes)[:seeds]
        self.samples = sample_epochs(
            sampler, ids, folder / "samples.fvf", batch_size=batch_size, epochs=epochs, seed=seed
        )

    @property
    def row_bytes(self):
        return self.values.shape[1] * self.values.dtype.itemsize

    def plan(self, *, device=20, host=60, disk_bytes=10**9, **kwargs):
        budgets = Budgets(
            host_bytes=host * self.row_bytes,
            disk_bytes=disk_bytes,
            device_bytes=device * self.row_bytes,
        )
        return make_plan(self.samples, self.features, budgets, Disk(), buffer_batches=0, **kwargs)

    def close(self):
        self.features.close()
        self.samples.close()


@pytest.fixture
def make_world(tmp_path):
    worlds = []

    def make(**kwargs):
        settings = {
            "nodes": 400,
            "dim": 24,
            "dtype": np.float32,
            "batch_size": 16,
            "seeds": 120,
            "fanouts": [4, 3],
            "epochs": 1,
            "seed": 1,
        }
        folder = tmp_path / f"world{len(worlds)}"
        folder.mkdir()
        worlds.append(World(folder, **{**settings, **kwargs}))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
