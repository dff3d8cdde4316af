"""``DiskLoader.from_dataset``: from a graph to PyG's batches in one call, prepared once."""

import logging
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import array_source, ingest
from fivefold.gnn.loading import DiskLoader, OnlineLoader
from fivefold.gnn.planning import Budgets
from helpers.night import number_of

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import Data

NODES, EDGES = 400, 3000


@pytest.fixture(autouse=True)
def known_disk(monkeypatch, request):
    disk = request.getfixturevalue("disk_of_round_numbers")
    monkeypatch.setattr("fivefold.gnn.loading.prepare.probe_disk", lambda *_, **__: disk)
    torch.set_num_threads(1)


def make_graph(seed=0, nodes=NODES):
    random = np.random.default_rng(seed)
    edges = random.integers(0, nodes, (2, EDGES))
    return Data(
        x=torch.from_numpy(random.random((nodes, 5)).astype(np.float32)),
        edge_index=torch.from_numpy(edges),
        edge_attr=torch.from_numpy(random.random((EDGES, 3)).astype(np.float32)),
        y=torch.from_numpy(random.random((nodes, 2))),  # of no classes
        train_mask=torch.from_numpy(random.random(nodes) < 0.2),
    )


def check(batch, graph):
    """Every part of a batch is the part of the graph that its ids say."""
    torch.testing.assert_close(batch.x, graph.x[batch.n_id])
    torch.testing.assert_close(batch.edge_attr, graph.edge_attr[batch.e_id])
    torch.testing.assert_close(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_batches_of_a_data_are_its_parts(tmp_path, policy):
    graph = make_graph()
    seeds = graph.train_mask.nonzero().flatten()
    with DiskLoader.from_dataset(
        graph, [4, 3], 16, input_nodes=graph.train_mask, cache=tmp_path, policy=policy
    ) as loader:
        batches = list(loader)
    for batch in batches:
        assert isinstance(batch, Data)
        check(batch, graph)
        torch.testing.assert_close(batch.y, graph.y[batch.n_id])
        torch.testing.assert_close(batch.train_mask, graph.train_mask[batch.n_id])
        torch.testing.assert_close(seeds[batch.input_id], batch.n_id[: batch.batch_size])
    found = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    assert sorted(found.tolist()) == seeds.tolist()


def dataset_with_edge_rows(folder, graph):
    source = array_source(
        graph.edge_index,
        features=graph.x,
        labels=torch.arange(NODES) % 5,
        edge_features=graph.edge_attr,
        splits={"train": graph.train_mask},
    )
    return ingest(source, folder)


@pytest.mark.parametrize("budgets", [None, Budgets(host_bytes=34_000, disk_bytes=10**9)])
def test_rows_of_edges_are_packed_and_come_with_their_edges(tmp_path, budgets):
    graph = make_graph()
    with (
        dataset_with_edge_rows(tmp_path / "graph", graph) as dataset,
        DiskLoader.from_dataset(dataset, [4, 3], 16, budgets=budgets) as loader,
    ):
        batches = list(loader)
        statistics = loader.statistics()
    assert sum(batch.batch_size for batch in batches) == int(graph.train_mask.sum())
    for batch in batches:
        check(batch, graph)
        assert batch.y.tolist() == (batch.n_id % 5).tolist()
    if budgets is not None:  # too small to hold all rows in memory
        assert statistics.edge_bytes + statistics.bytes_read > 0


def test_blocks_have_the_first_rows_of_edges(tmp_path):
    graph = make_graph()
    with (
        dataset_with_edge_rows(tmp_path / "graph", graph) as dataset,
        DiskLoader.from_dataset(dataset, [4, 3], 16, form="blocks") as loader,
    ):
        for batch in loader:
            assert len(batch.edge_attr) == batch.num_edges
            for block in batch.blocks:
                edges = graph.edge_index[:, batch.e_id[: block.edge_index.shape[1]]]
                assert edges.shape == block.edge_index.shape


def count_work(monkeypatch):
    done = []
    for name in ("sample_epochs", "make_plan", "pack"):
        real = getattr(sys.modules["fivefold.gnn.loading.prepare"], name)
        monkeypatch.setattr(
            f"fivefold.gnn.loading.prepare.{name}",
            lambda *a, real=real, name=name, **k: (done.append(name), real(*a, **k))[1],
        )
    return done


def test_it_is_prepared_once_and_again_when_data_or_options_change(tmp_path, monkeypatch, caplog):
    done = count_work(monkeypatch)

    def load(graph, fanouts=(4, 3), **options):
        done.clear()
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            DiskLoader.from_dataset(graph, fanouts, 16, cache=tmp_path, **options) as loader,
        ):
            for batch in loader:
                check(batch, graph)
        return done.copy()

    graph = make_graph()
    assert load(graph) == ["sample_epochs", "make_plan", "pack"]
    assert load(graph) == []
    assert load(make_graph()) == []  # the same contents
    assert load(graph, (2, 2)) == ["sample_epochs", "make_plan", "pack"]
    assert "fanouts ((4, 3) -> (2, 2))" in caplog.text.replace("[4, 3]", "(4, 3)")
    assert load(graph, budgets="900 MB") == ["make_plan", "pack"] or done[0] == "sample_epochs"
    assert "host_bytes (1000000000 -> 900000000)" in caplog.text
    changed = make_graph()
    changed.x[7, 0] += 1
    assert load(changed) == ["sample_epochs", "make_plan", "pack"]
    assert "the data set" in caplog.text
    assert load(graph) == []


def killed_at_each_stage(graph, cache):
    """Prepare in child processes, each killed when it comes to a stage that none has reached."""
    codes = []
    while not codes or codes[-1] == signal.SIGKILL:
        child = os.fork()
        if not child:
            try:
                prepare_or_die(graph, cache)
            finally:
                os._exit(1)
        codes.append(os.waitpid(child, 0)[1])
        assert len(codes) < 9
    return codes


def prepare_or_die(graph, cache):
    def progress(stage, _done, _total):
        mark = cache / f"seen-{stage}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    DiskLoader.from_dataset(graph, [4, 3], 16, cache=cache, progress=progress).close()
    os._exit(0)


def test_a_killed_preparation_goes_on(tmp_path, monkeypatch):
    graph, cache = make_graph(), tmp_path / "cache"
    cache.mkdir()
    codes = killed_at_each_stage(graph, cache)
    assert codes[-1] == 0
    assert len(codes) > 3, codes
    found = {}
    for name in ("cache", "other"):
        done = count_work(monkeypatch)
        with DiskLoader.from_dataset(
            graph, [4, 3], 16, cache=tmp_path / name, shuffle=False
        ) as loader:
            found[name] = [(batch.n_id.tolist(), batch.x.tolist()) for batch in loader]
        assert bool(done) == (name == "other")
    assert found["cache"] == found["other"]


def test_of_several_ranks_one_writes_the_graph(tmp_path, monkeypatch):
    """A ``Data`` is written once; the ranks that come meanwhile wait, as for the packed rows."""
    graph, inside, begun = make_graph(), [], threading.Barrier(2)

    def watched(source, folder):
        inside.append(folder)
        time.sleep(0.2)
        assert len(inside) == 1, "two ranks write at a time"
        made = ingest(source, folder)
        inside.pop()
        return made

    def rank_of(rank):
        begun.wait()
        with DiskLoader.from_dataset(
            graph, [3], 16, cache=tmp_path, rank=rank, world_size=2
        ) as own:
            return [batch.n_id[: batch.batch_size].tolist() for batch in own]

    monkeypatch.setattr("fivefold.gnn.loading._pyg_batches.ingest", watched)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank_of, range(2))
    seeds = [node for batch in first + second for node in batch]
    assert len(seeds) == len(set(seeds)) == NODES - NODES % 16 - 16 * (NODES // 16 % 2)


def test_what_it_refuses(tmp_path):
    graph = make_graph()
    with pytest.raises(ConfigurationError, match="form"):
        DiskLoader.from_dataset(graph, [2], 16, cache=tmp_path, form="blocks")
    with pytest.raises(ConfigurationError, match="list"):
        DiskLoader.from_dataset([1], [2], 16, cache=tmp_path)
    with pytest.raises(DataError, match="no x"):
        DiskLoader.from_dataset(Data(edge_index=graph.edge_index), [2], 16, cache=tmp_path)
    with pytest.raises(ConfigurationError, match="fanouts"):
        DiskLoader.from_dataset(graph, [-2], 16, cache=tmp_path)
    with pytest.raises(ConfigurationError, match="budgets is 4000"):
        DiskLoader.from_dataset(graph, [2], 16, cache=tmp_path, budgets=4000)


def test_counts_may_be_those_of_numpy(tmp_path):
    graph = make_graph()
    fanouts, batch_size = np.array([3, 2]), np.int64(16)
    with DiskLoader.from_dataset(graph, fanouts, batch_size, cache=tmp_path) as loader:
        check(next(iter(loader)), graph)


def test_wide_rows_of_edges_leave_narrow_ones_of_nodes_their_pages(tmp_path):
    """A budget many times what both take is enough, however unlike their rows are."""
    graph = make_graph(nodes=60)
    graph.x = graph.x[:, :1].half()
    graph.edge_attr = torch.rand(EDGES, 40)
    budgets = Budgets(host_bytes=3_000_000, disk_bytes=8_000_000)
    source = array_source(graph.edge_index, features=graph.x, edge_features=graph.edge_attr)
    with (
        ingest(source, tmp_path / "graph") as dataset,
        DiskLoader.from_dataset(
            dataset, [0, 2, 1], 3, input_nodes=range(45), budgets=budgets, policy="belady"
        ) as loader,
    ):
        for batch in loader:
            check(batch, graph)


def check_hops(batch, graph, fanouts):
    """What a hop met is expanded in the next one, by all it may have, and nothing else is."""
    into = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes).tolist()
    ids, hops, heard = batch.n_id.tolist(), dict.fromkeys(range(batch.batch_size), 0), {}
    for source, target in batch.edge_index.T.tolist():
        heard.setdefault(target, []).append(source)
    for hop, fanout in enumerate(fanouts):
        for node in [node for node, met in hops.items() if met == hop]:
            found, degree = heard.pop(node, []), into[ids[node]]
            assert len(found) == (degree if fanout < 0 else min(fanout, degree))
            for source in found:
                hops.setdefault(source, hop + 1)
    assert not heard
    assert sorted(hops) == list(range(len(ids)))
    assert len(set(ids)) == len(ids)
    assert len(batch.e_id.unique()) == len(batch.e_id)


def test_batches_of_random_graphs_by_brute_force(tmp_path):
    """Loops, double edges, nodes without edges; memory that holds few rows beside the batches."""
    wanted, checked, graphs = number_of(60, 5000), 0, 0
    while checked < wanted:
        random = np.random.default_rng(graphs)
        nodes, edges = int(random.integers(1, 80)), int(random.choice([0, 1, 40, 400]))
        graph = Data(
            x=torch.from_numpy(random.integers(0, 99, (nodes, random.choice([1, 5, 700])))).short(),
            edge_index=torch.from_numpy(random.integers(0, nodes, (2, edges))),
            edge_attr=torch.arange(edges),
        )
        fanouts = random.choice([-1, 0, 1, 3], random.integers(1, 4)).tolist()
        seeds = np.flatnonzero(random.random(nodes) < 0.6)
        seeds = seeds if len(seeds) else np.zeros(1, np.int64)
        with DiskLoader.from_dataset(
            graph,
            fanouts,
            int(random.choice([1, 4, 30])),
            input_nodes=seeds,
            cache=tmp_path / "cache",
            policy=str(random.choice(["static", "belady"])),
            sampled_epochs=int(random.choice([1, 2])),
            budgets=Budgets(host_bytes=3 * graph.x.numel() * 2 + 4096, disk_bytes=10**9),
        ) as loader:
            met = []
            for batch in loader:
                met += batch.n_id[: batch.batch_size].tolist()
                assert torch.equal(batch.x, graph.x[batch.n_id])
                assert torch.equal(batch.edge_attr, batch.e_id)
                ends = batch.n_id[batch.edge_index]
                assert torch.equal(ends, graph.edge_index[:, batch.e_id])
                check_hops(batch, graph, fanouts)
                checked += 1
            assert sorted(met) == seeds.tolist()
        shutil.rmtree(tmp_path / "cache")
        graphs += 1


def test_batches_sampled_online_have_the_rows_of_their_edges(tmp_path):
    graph = make_graph()
    with (
        dataset_with_edge_rows(tmp_path / "graph", graph) as dataset,
        OnlineLoader(
            dataset, dataset.train, fanouts=[4, 3], batch_size=16, form="data", cache_bytes=5000
        ) as loader,
    ):
        for batch in loader:
            assert isinstance(batch, Data)
            check(batch, graph)
        row_bytes = dataset.edge_features.section("x").row_bytes
        assert loader.statistics().edge_bytes >= row_bytes * batch.num_edges


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("names", ["a", "b", "c", "d"], "'names' is a list with an entry for each node"),
        ("y", torch.zeros(3), "'y' has 3 entries for 4 nodes"),
        ("train_mask", torch.ones(5, dtype=torch.bool), "'train_mask' has 5 entries for 4 nodes"),
        ("edge_attr", torch.zeros(2, 3), "'edge_attr' has 2 entries for 5 edges"),
        ("edge_time", torch.zeros(6), "'edge_time' has 6 entries for 5 edges"),
    ],
)
def test_attributes_without_a_part_for_the_batch(tmp_path, name, value, message):
    """PyG would hand them out as a whole, or fail in the first batch."""
    data = Data(x=torch.rand(4, 2), edge_index=torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))
    data[name] = value
    with pytest.raises(DataError, match=message):
        DiskLoader.from_dataset(data, [2], 2, cache=tmp_path)
    assert not list(tmp_path.iterdir())
