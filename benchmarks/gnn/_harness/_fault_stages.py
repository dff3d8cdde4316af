"""The stages into which faults are injected, each to be run in a process of its own.

Small, but of the awkward kind: 400-byte rows, which divide no page, and several segments. A stage
returns a digest of what it made, so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.gnn.data import Dataset, array_source, generate_graph, ingest
from fivefold.gnn.loading import DiskLoader
from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.sampling import NeighborSampler, SampleFile, sample_epochs
from fivefold.gnn.storage import DiskProfile
from fivefold.gnn.training import GnnConfig, train_graph
from fivefold.gnn.training.config import BudgetsConfig, DataConfig, RunConfig, SamplingConfig

__all__ = ["STAGES", "digest_of", "load", "prepare_inputs"]

NODES, DIM, BATCH_SIZE, FANOUTS = 30_000, 100, 128, (6, 6)
MEMORY_BYTES = 16 << 20
PROFILE = DiskProfile(
    sequential_read_bytes_per_s=1e9,
    sequential_write_bytes_per_s=1e9,
    random_read_iops=50_000.0,
    request_latency_s=1e-4,
    bytes_per_s_by_request_bytes={4096: 2e8, 1 << 20: 1e9},
    backend="threads",
    direct=True,
)
Tell = Callable[..., None]


def prepare_inputs(folder: Path) -> None:
    """What the stages read: arrays to ingest, and a whole chain of files as it should be."""
    draw = np.random.default_rng(0)
    np.save(folder / "edges.npy", draw.integers(0, NODES, (2, 8 * NODES)))
    np.save(folder / "x.npy", draw.standard_normal((NODES, DIM)).astype(np.float32))
    np.save(folder / "y.npy", draw.integers(0, 7, NODES))
    np.save(folder / "train.npy", np.arange(0, NODES, 10))
    whole = folder / "whole"
    whole.mkdir()
    for name in ("generate", "sample", "pack"):
        STAGES[name](folder, whole, _nothing)
    # A second one, which looks the same and is another: for files that are swapped.
    other = folder / "other"
    other.mkdir()
    with generate_graph(other / "graph", nodes=NODES, dim=DIM, seed=2):
        pass
    for name in ("sample", "pack"):
        STAGES[name](folder, other, _nothing)


def _nothing(*_progress: Any) -> None:
    pass


def generate(inputs: Path, folder: Path, tell: Tell) -> str:
    """Generate a graph."""
    del inputs
    place = folder / "graph"
    with generate_graph(
        place, nodes=NODES, dim=DIM, seed=1, memory_bytes=MEMORY_BYTES, progress=tell
    ):
        return digest_of(place)


def ingest_arrays(inputs: Path, folder: Path, tell: Tell) -> str:
    """Ingest ``.npy`` files."""
    train = np.load(inputs / "train.npy")
    source = array_source(
        inputs / "edges.npy",
        features=inputs / "x.npy",
        labels=inputs / "y.npy",
        splits={"train": train, "valid": train + 1, "test": train + 2},
    )
    with ingest(source, folder / "graph", memory_bytes=MEMORY_BYTES, progress=tell):
        return digest_of(folder / "graph")


def graph_of(inputs: Path, folder: Path) -> Path:
    """The folder's own graph, or the one that is whole."""
    own = folder / "graph"
    return own if own.exists() else inputs / "whole" / "graph"


def sample(inputs: Path, folder: Path, tell: Tell) -> str:
    """Sample an epoch offline."""
    path = folder / "samples.fvf"
    with Dataset.open(graph_of(inputs, folder)) as dataset:
        sampler = NeighborSampler(dataset.topology(), FANOUTS, seed=3)
        with sample_epochs(
            sampler, dataset.train, path, batch_size=BATCH_SIZE, seed=4, progress=tell
        ):
            return digest_of(path)


def pack_rows(inputs: Path, folder: Path, tell: Tell) -> str:
    """Plan and pack."""
    samples_path = folder / "samples.fvf"
    if not samples_path.exists():
        samples_path = inputs / "whole" / "samples.fvf"
    with (
        Dataset.open(graph_of(inputs, folder)) as dataset,
        SampleFile.open(samples_path) as samples,
    ):
        budgets = Budgets(host_bytes=NODES // 20 * dataset.row_bytes, disk_bytes=10**10)
        plan = make_plan(
            samples, dataset.features, budgets, PROFILE, segment_batches=6, buffer_batches=0
        )
        with pack(
            dataset.features,
            samples,
            plan,
            folder / "store",
            memory_bytes=MEMORY_BYTES,
            progress=tell,
            profile=PROFILE,
        ):
            return digest_of(folder / "store")


def train(inputs: Path, folder: Path, tell: Tell) -> str:
    """Train two epochs with a checkpoint every few steps."""
    del tell
    config = GnnConfig(
        run=RunConfig(
            output=folder / "run", epochs=2, checkpoint_every_steps=3, device="cpu",
            validate_every_epochs=2,
        ),
        data=DataConfig(path=graph_of(inputs, folder), store=str(folder / "train-store")),
        sampling=SamplingConfig(fanouts=FANOUTS, batch_size=256),
        budgets=BudgetsConfig(host=20_000_000),
    )  # fmt: skip
    return train_graph(config).parameters_sha256


STAGES: dict[str, Callable[[Path, Path, Tell], str]] = {
    "generate": generate,
    "ingest": ingest_arrays,
    "sample": sample,
    "pack": pack_rows,
    "train": train,
}


def load(inputs: Path, folder: Path, *, backend: Any = "auto") -> dict[str, int]:
    """Open a store, read an epoch of it, and compare rows, nodes and edges with the originals.

    Returns:
        Batches handed out, and rows that were wrong among them; a batch with other nodes or edges
        counts with all its rows.
    """
    with Dataset.open(inputs / "whole" / "graph") as dataset:
        truth = dataset.features.read("x")
    sampled = SampleFile.open(inputs / "whole" / "samples.fvf")
    wrong = batches = 0
    with Dataset.open(folder / "graph") as dataset, SampleFile.open(folder / "samples.fvf") as s:
        store = PackedStore.open(folder / "store", features=dataset.features, samples=s)
        with store, DiskLoader(store, backend=backend, timeout_s=20.0) as loader:
            for batch in loader:
                rows = batch.x.numpy()
                same = rows.view(np.uint8) == truth[batch.n_id.numpy()].view(np.uint8)
                wrong += int(np.count_nonzero(~same.all(axis=1)))
                wrong += 0 if _same_graph(batch, sampled) else len(rows)
                batches += 1
    sampled.close()
    return {"batches": batches, "wrong_rows": wrong}


def _same_graph(batch: Any, sampled: SampleFile) -> bool:
    """Whether a batch has the nodes and the edges that were sampled, in whatever order."""
    expected = sampled.batch(batch.number)
    found = [batch.n_id.numpy(), expected.node_ids]
    if not np.array_equal(np.sort(found[0]), np.sort(found[1])):
        return False
    graphs = zip(found, (batch.edge_index.numpy(), expected.edge_index()), strict=True)
    edges = [np.sort(ids[graph[0]] * NODES + ids[graph[1]]) for ids, graph in graphs]
    return np.array_equal(edges[0], edges[1])


def copy_whole(inputs: Path, folder: Path) -> None:
    """A copy of the whole chain, to be damaged."""
    shutil.copytree(inputs / "whole", folder, dirs_exist_ok=True)


def digest_of(path: Path) -> str:
    """Hash of a file, or of all finished files below a folder."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        digest.update(str(file.relative_to(path)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
