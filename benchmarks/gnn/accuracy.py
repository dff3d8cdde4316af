"""Measures the accuracy of fixed offline samples against resampling and against MariusGNN.

GraphSAGE is trained from the same seeds of initialisation on the Debian package graph, on WordNet
and on a generated graph, each with a tenth of its nodes for training, in four ways: batches
sampled once, packed and replayed in a new order each epoch (ours); sampled anew each epoch, all in
memory; MariusGNN-like, where a buffer of a fifth of the nodes is all that sampling sees, with
either policy. Reported is the test accuracy at the epoch of the best validation. Validation and
test sample from the whole graph for all.

    python -m benchmarks.gnn.accuracy [--debian FOLDER] [--wordnet FOLDER] [--quick]

Folders are data sets of ``real_graphs.py``; without one it is made from apt's lists, or from
the dictionary of the package wordnet-base, and left out with a word where those are not there.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gnn.real_graphs import debian_source, wordnet_source, write_graph
from benchmarks.gnn.systems import MariusSystem, SystemBatch, Workload
from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.errors import FivefoldError
from fivefold.gnn.data import Dataset, generate_graph
from fivefold.gnn.loading import Block, DiskLoader, OnlineLoader
from fivefold.gnn.packing import pack
from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.sampling import NeighborSampler, SampleFile, sample_epochs
from fivefold.gnn.storage import DiskProfile, probe_disk
from fivefold.gnn.training import GraphSAGE

RESULTS = Path(__file__).parents[1] / "results" / "gnn" / "accuracy.json"
MEMORY_SHARE = 0.1
PACKING_BYTES = 64 << 20
PUBLISHED_NOISE = 0.002  # fixed samples against resampling, in the published figures
Batch = tuple[torch.Tensor, tuple[Block, ...], torch.Tensor]
Epochs = Callable[[int], Iterable[Batch]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One graph and how it is learnt."""

    name: str
    dataset: Dataset
    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]
    fanouts: tuple[int, ...]
    batch_size: int
    epochs: int
    hidden: int
    lr: float
    partitions: int
    buffer_share: float
    profile: DiskProfile


# -- four ways to get batches ---------------------------------------------------------------------


def offline(task: Task, folder: Path, seed: int, stack: ExitStack) -> Epochs:
    """Ours: sampled once, packed with a tenth of the rows in memory, replayed in new orders."""
    samples = sample_file(task, folder, seed, stack)
    features = task.dataset.features
    plan = make_plan(
        samples,
        features,
        Budgets(
            host_bytes=int(MEMORY_SHARE * task.dataset.num_nodes) * task.dataset.row_bytes,
            disk_bytes=10**11,
        ),
        task.profile,
        buffer_batches=0,
    )
    store = pack(features, samples, plan, folder / "store", memory_bytes=PACKING_BYTES)
    stack.enter_context(store)
    loader = stack.enter_context(
        DiskLoader(store, labels=task.dataset.labels, seed=seed, form="blocks")
    )
    return epochs_of(loader)


def resampled(task: Task, folder: Path, seed: int, stack: ExitStack) -> Epochs:
    """All in memory, other neighbours in every epoch."""
    del folder
    return epochs_of(online(task, task.train, stack, seed=seed, shuffle=True, resample=True))


def online(task: Task, ids: NDArray[np.int64], stack: ExitStack, **how: Any) -> OnlineLoader:
    """Batches of some nodes, with all rows in memory."""
    return stack.enter_context(
        OnlineLoader(
            task.dataset,
            ids,
            fanouts=task.fanouts,
            batch_size=how.pop("batch_size", task.batch_size),
            features="memory",
            form="blocks",
            **how,
        )
    )


def epochs_of(loader: DiskLoader | OnlineLoader) -> Epochs:
    """The batches of an epoch."""

    def batches(epoch: int) -> Iterator[Batch]:
        loader.set_epoch(epoch)
        for batch in loader:
            assert batch.blocks is not None, "the form has blocks"
            assert batch.y is not None, "there are labels"
            yield batch.x, batch.blocks, batch.y

    return batches


def partition_buffer(policy: Literal["sequential", "dispersed"]) -> Callable[..., Epochs]:
    """MariusGNN-like: neighbours outside the buffer do not exist."""

    def prepare(task: Task, folder: Path, seed: int, stack: ExitStack) -> Epochs:
        samples = sample_file(task, folder, seed, stack)  # of which it takes the settings alone
        # A staged partition is part of a dispersed buffer's budget; the buffer itself is equal.
        staged = 1 if policy == "dispersed" else 0
        rows = -(-task.dataset.num_nodes // task.partitions)
        kept = round(task.buffer_share * task.partitions) + staged
        work = Workload(
            features=task.dataset.features,
            samples=samples,
            cache_bytes=kept * rows * task.dataset.row_bytes,
            folder=folder,
        )
        system = MariusSystem(
            work, task.dataset.topology(), policy=policy, num_partitions=task.partitions, seed=seed
        )
        stack.callback(system.close)
        system.prepare()
        labels = torch.from_numpy(task.dataset.labels)

        def batches(epoch: int) -> Iterator[Batch]:
            for batch in system.epoch(epoch):
                seeds = torch.from_numpy(batch.node_ids[: batch.batch_size])
                yield torch.from_numpy(batch.x), blocks_of(batch), labels[seeds]

        return batches

    return prepare


def sample_file(task: Task, folder: Path, seed: int, stack: ExitStack) -> SampleFile:
    """One epoch, sampled offline."""
    sampler = NeighborSampler(task.dataset.topology(), task.fanouts, seed=seed)
    path = folder / "samples.fvf"
    return stack.enter_context(
        sample_epochs(sampler, task.train, path, batch_size=task.batch_size, seed=seed)
    )


def blocks_of(batch: SystemBatch) -> tuple[Block, ...]:
    """One block per layer, outermost first; nodes and edges stand by hop, so all are prefixes."""
    assert batch.sample is not None, "MariusGNN hands its samples on"
    nodes = np.cumsum(batch.sample.nodes_per_hop).tolist()
    edges = np.cumsum(batch.sample.edges_per_hop).tolist()
    edge_index = torch.from_numpy(batch.edge_index())
    return tuple(
        Block(
            edge_index=edge_index[:, : edges[hop]],
            num_sources=nodes[hop + 1],
            num_targets=nodes[hop],
            target_rows=torch.arange(nodes[hop]),
            targets_first=True,
        )
        for hop in reversed(range(len(edges)))
    )


WAYS: dict[str, Callable[[Task, Path, int, ExitStack], Epochs]] = {
    "offline samples": offline,
    "in memory, resampled": resampled,
    "MariusGNN sequential": partition_buffer("sequential"),
    "MariusGNN dispersed": partition_buffer("dispersed"),
}


# -- training -------------------------------------------------------------------------------------


def train(task: Task, epochs: Epochs, *, seed: int, stack: ExitStack) -> float:
    """Test accuracy at the epoch of the best validation."""
    torch.manual_seed(seed)
    model = GraphSAGE(
        task.dataset.dim, task.hidden, task.dataset.num_classes, num_layers=len(task.fanouts),
        dropout=0.2,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=task.lr)
    judged = {
        name: online(task, ids, stack, seed=99, resample=False, batch_size=2048)
        for name, ids in (("valid", task.valid), ("test", task.test))
    }
    best, state = -1.0, model.state_dict()
    for epoch in range(task.epochs):
        model.train()
        for x, blocks, y in epochs(epoch):
            loss = torch.nn.functional.cross_entropy(model(x, blocks), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found = accuracy(model, judged["valid"])
        if found > best:
            best, state = found, copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    return accuracy(model, judged["test"])


@torch.no_grad()
def accuracy(model: GraphSAGE, loader: OnlineLoader) -> float:
    """Share of nodes whose label is found, with neighbours from the whole graph."""
    model.eval()
    right = total = 0
    for x, blocks, y in epochs_of(loader)(0):
        right += int((model(x, blocks).argmax(1) == y).sum())
        total += len(y)
    return right / max(1, total)


# -- graphs ---------------------------------------------------------------------------------------


def graphs(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Dataset]]:
    """The data sets that are there or can be made."""
    nodes = 20_000 if arguments.quick else arguments.nodes
    makers: dict[str, Callable[[], Dataset]] = {
        "Debian": lambda: (
            Dataset.open(arguments.debian)
            if arguments.debian
            else write_graph(debian_source(), folder / "debian")
        ),
        "WordNet": lambda: (
            Dataset.open(arguments.wordnet)
            if arguments.wordnet
            else write_graph(wordnet_source(), folder / "wordnet")
        ),
        f"generated, {nodes} nodes": lambda: generate_graph(
            folder / f"generated-{nodes}", nodes=nodes, dim=64, seed=5
        ),
    }
    for name, make in makers.items():
        if arguments.only and not any(word in name for word in arguments.only.split(",")):
            continue
        try:
            yield name, make()
        except FivefoldError as error:
            print(f"left out: {name}: {error}", flush=True)


def task_of(
    name: str, dataset: Dataset, arguments: argparse.Namespace, profile: DiskProfile
) -> Task:
    """A tenth of the nodes to train with, and enough others to judge by."""
    draw = np.random.default_rng(7)
    count = min(len(dataset.train), dataset.num_nodes // 10)
    some = {
        part: np.sort(draw.permutation(ids)[:most])
        for part, ids, most in (
            ("train", dataset.train, count),
            ("valid", dataset.valid, arguments.judged),
            ("test", dataset.test, 2 * arguments.judged),
        )
    }
    generated = name.startswith("generated")
    return Task(
        name=name,
        dataset=dataset,
        **some,
        fanouts=(10, 10, 10) if generated else (10, 10),
        batch_size=arguments.batch_size,
        epochs=2 if arguments.quick else arguments.epochs,
        hidden=arguments.hidden,
        lr=arguments.lr,
        partitions=50,
        buffer_share=arguments.buffer,
        profile=profile,
    )


# -- results --------------------------------------------------------------------------------------


def standard_error(these: list[float], those: list[float]) -> float:
    """Of the difference of two means over seeds."""
    if min(len(these), len(those)) < 2:
        return 0.0
    parts = [statistics.variance(values) / len(values) for values in (these, those)]
    return float(sum(parts) ** 0.5)


def rows_of(task: Task, found: dict[str, list[float]]) -> list[BenchmarkRow]:
    """Accuracies, and their differences seed by seed."""
    case = (
        f"{task.name}, {len(task.train)} training nodes, fan-out "
        f"{','.join(map(str, task.fanouts))}, {task.epochs} epochs, {len(found['offline samples'])}"
        f" seeds, buffer {100 * task.buffer_share:g} %"
    )
    ours, spread = median_and_spread(found["offline samples"])
    peers = {name: statistics.median(values) for name, values in found.items()}
    reference = found["in memory, resampled"]
    noise = max(PUBLISHED_NOISE, 2.0 * standard_error(found["offline samples"], reference))
    rows = [
        BenchmarkRow(
            case=case, metric="test accuracy at best validation", unit="share", ours=ours,
            spread=spread, peers={k: v for k, v in peers.items() if k != "offline samples"},
        ),
        BenchmarkRow(
            case=case, metric="noise: two standard errors of the difference, or 0.2 points",
            unit="share", ours=noise,
        ),
    ]  # fmt: skip
    for name in [name for name in found if name != "offline samples"]:
        pairs = zip(found["offline samples"], found[name], strict=True)
        median, spread = median_and_spread([a - b for a, b in pairs])
        equal = name == "in memory, resampled"
        rows.append(
            BenchmarkRow(
                case=case, metric=f"offline samples less {name}", unit="share", ours=median,
                spread=spread, target=-noise if equal else None,
                met=median >= -noise if equal else None,
            )
        )  # fmt: skip
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--debian", type=Path, help="data set of Debian's packages")
    parser.add_argument("--wordnet", type=Path, help="data set of WordNet")
    parser.add_argument("--nodes", type=int, default=100_000, help="of the generated graph")
    parser.add_argument("--only", help="words in the names of graphs, comma-separated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--buffer", type=float, default=0.2, help="share of the nodes")
    parser.add_argument("--judged", type=int, default=3000, help="validation nodes; twice as test")
    parser.add_argument("--keep", type=Path, help="use and keep graphs in this folder")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="one seed, no results file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.judged = 1, 1000
    return arguments


def main() -> None:
    """Train, judge, print, write."""
    arguments = parse()
    rows: list[BenchmarkRow] = []
    with ExitStack() as outer:
        temporary = Path(outer.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-gnn-")))
        folder = arguments.keep or temporary
        folder.mkdir(parents=True, exist_ok=True)
        profile = probe_disk(temporary, seconds=1.0)
        for name, dataset in graphs(arguments, folder):
            task = task_of(name, dataset, arguments, profile)
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for seed, way in itertools.product(range(arguments.seeds), WAYS):
                started_s = time.perf_counter()
                with ExitStack() as stack:
                    work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=temporary)))
                    epochs = WAYS[way](task, work, seed, stack)
                    found[way].append(train(task, epochs, seed=seed, stack=stack))
                seconds = time.perf_counter() - started_s
                print(f"{name}, seed {seed}, {way}: {found[way][-1]:.4f} ({seconds:.0f} s)",
                      flush=True)  # fmt: skip
            rows += rows_of(task, found)
            dataset.close()
    for row in rows:
        met = "" if row.met is None else (" met" if row.met else " NOT MET")
        peers = ", ".join(f"{name} {value:.4f}" for name, value in row.peers.items())
        print(f"{row.case} | {row.metric}: {row.ours:.4f}{met} [{peers}]", flush=True)
    if not arguments.quick and rows:
        write_results(arguments.output, topic="gnn/accuracy", rows=rows)


if __name__ == "__main__":
    main()
