"""``DiskLoader.from_dataset`` of graphs of several types, judged by the graph itself."""

import os
import re
import signal
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import CheckpointError, ConfigurationError, DataError, InfeasibleError
from fivefold.gnn.data import HeteroSource, array_source, ingest
from fivefold.gnn.loading import DiskLoader
from fivefold.gnn.planning import Budgets

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import HeteroData
    from torch_geometric.utils import k_hop_subgraph

CITES, WRITES, AT = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "at", "v")
BY = ("paper", "by", "author")
SIZES = {"paper": 300, "author": 120, "v": 9}
FANOUTS = {CITES: [3, 2], WRITES: [-1, 1], AT: [1, 0], BY: [0, 2]}


@pytest.fixture(autouse=True)
def known_disk(monkeypatch, request):
    disk = request.getfixturevalue("disk_of_round_numbers")
    monkeypatch.setattr("fivefold.gnn.loading.prepare.probe_disk", lambda *_, **__: disk)
    torch.set_num_threads(1)


def make_graph(seed=0):
    rng = np.random.default_rng(seed)
    data = HeteroData()
    data["paper"].x = torch.from_numpy(rng.standard_normal((300, 6)).astype(np.float32))
    data["paper"].y = torch.from_numpy(rng.integers(0, 3, 300))
    data["author"].x = torch.from_numpy(rng.standard_normal((120, 3)).astype(np.float16))
    data["author"].age = torch.arange(120)
    data["v"].num_nodes = 9  # no features
    for kind, count in {CITES: 1500, WRITES: 500, AT: 300, BY: 500}.items():
        ends = [rng.integers(0, SIZES[kind[i]], count) for i in (0, 2)]
        data[kind].edge_index = torch.from_numpy(np.stack(ends))
        if kind != AT:
            data[kind].edge_attr = torch.from_numpy(rng.random((count, 2)).astype(np.float32))
    return data


def folder_of(graph, folder):
    """The same graph as a data set on disk."""
    nodes = {
        "paper": array_source(
            None,
            features=graph["paper"].x,
            labels=graph["paper"].y,
            splits={"train": np.arange(0, 300, 4)},
        ),
        "author": array_source(None, features=graph["author"].x),
        "v": array_source(None, num_nodes=9),
    }
    parts = {
        kind: array_source(
            graph[kind].edge_index, num_nodes=300, edge_features=graph[kind].get("edge_attr")
        )
        for kind in graph.edge_types
    }
    source = HeteroSource(
        name="typed",
        nodes=nodes,
        edges={kind: part.edges() for kind, part in parts.items()},
        edge_features={
            kind: part.edge_features() for kind, part in parts.items() if part.edge_features()
        },
    )
    return ingest(source, folder)


def check(batch, graph, fanouts):
    """Compare every part of a batch with the graph: rows, edges, fan-outs."""
    for name in graph.node_types:
        ids = batch[name].n_id
        assert len(set(ids.tolist())) == len(ids) == batch[name].num_nodes
        if "x" in graph[name]:
            torch.testing.assert_close(batch[name].x, graph[name].x[ids], rtol=0, atol=0)
    for kind in graph.edge_types:
        edges, ids = batch[kind].edge_index, batch[kind].e_id
        sources, targets = batch[kind[0]].n_id[edges[0]], batch[kind[2]].n_id[edges[1]]
        torch.testing.assert_close(torch.stack([sources, targets]), graph[kind].edge_index[:, ids])
        assert len(set(ids.tolist())) == len(ids)
        if "edge_attr" in graph[kind]:
            torch.testing.assert_close(batch[kind].edge_attr, graph[kind].edge_attr[ids])
        into = torch.bincount(graph[kind].edge_index[1], minlength=SIZES[kind[2]])
        allowed = [len(graph[kind].edge_index[0]) if n < 0 else n for n in fanouts[kind]]
        nodes, drawn = targets.unique(return_counts=True)
        for node, count in zip(nodes.tolist(), drawn.tolist(), strict=True):
            assert count in {min(n, int(into[node])) for n in allowed}, kind
    seeds = batch["paper"].n_id[: batch["paper"].batch_size]
    for kind in graph.edge_types:  # seeds are expanded in the first hop
        if kind[2] != "paper":
            continue
        into = torch.bincount(graph[kind].edge_index[1], minlength=300)[seeds]
        most = len(graph[kind].edge_index[0]) if fanouts[kind][0] < 0 else fanouts[kind][0]
        found = torch.bincount(batch[kind].edge_index[1], minlength=len(seeds))[: len(seeds)]
        assert found.tolist() == into.clamp(max=most).tolist()


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_batches_of_a_hetero_data_are_its_parts(tmp_path, policy):
    graph, mask = make_graph(), torch.arange(300) % 5 == 0
    with DiskLoader.from_dataset(
        graph,
        FANOUTS,
        16,
        input_nodes=("paper", mask),
        cache=tmp_path,
        policy=policy,
        sampled_epochs=2,
        budgets=Budgets(host_bytes=16_000, disk_bytes=10**9),
    ) as loader:
        for _ in range(2):
            batches = list(loader)
            for batch in batches:
                assert isinstance(batch, HeteroData)
                check(batch, graph, FANOUTS)
                assert torch.equal(batch["author"].age, batch["author"].n_id)
                assert torch.equal(batch["paper"].y, graph["paper"].y[batch["paper"].n_id])
                own = batch["paper"]
                assert torch.equal(mask.nonzero()[own.input_id, 0], own.n_id[: own.batch_size])
            seeds = torch.cat([b["paper"].n_id[: b["paper"].batch_size] for b in batches])
            assert sorted(seeds.tolist()) == mask.nonzero().flatten().tolist()
        statistics = loader.statistics()
    assert statistics.rows["host"] > 0
    assert statistics.rows["shared"] + statistics.rows["private"] > 0


def prepare_or_die(folder):
    """Prepare, and end with a signal at a step that no process before has reached."""
    seen = []

    def progress(stage, _done, _total):
        mark = folder.parent / f"seen-{len(seen)} {stage}"
        seen.append(stage)
        if not mark.exists() and stage not in seen[:-1]:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    DiskLoader.from_dataset(folder, FANOUTS, 32, input_nodes="paper", progress=progress)
    os._exit(0)


def killed_at_each_stage(folder):
    codes = []
    while not codes or codes[-1] == signal.SIGKILL:
        child = os.fork()
        if not child:
            try:
                prepare_or_die(folder)
            finally:
                os._exit(1)
        codes.append(os.waitpid(child, 0)[1])
    return codes


@pytest.mark.slow
def test_a_folder_is_packed_once_through_kills_and_strangers_are_refused(tmp_path):
    graph = make_graph()
    folder_of(graph, tmp_path / "g").close()
    codes = killed_at_each_stage(tmp_path / "g")
    assert codes[-1] == 0
    assert len(codes) > 5, codes
    found = {}
    for cache in (None, tmp_path / "whole"):
        with DiskLoader.from_dataset(
            tmp_path / "g", FANOUTS, 32, input_nodes="paper", cache=cache, seed=0
        ) as loader:
            batches = list(loader)
            for batch in batches:
                check(batch, graph, FANOUTS)
                assert torch.equal(batch["paper"].y, graph["paper"].y[batch["paper"].n_id])
            found[cache] = [{n: b[n].n_id.tolist() for n in SIZES} for b in batches]
            loader.set_epoch(0)
            running = iter(loader)
            next(running)
            state = loader.state_dict()
    assert found[None] == found[tmp_path / "whole"]
    options = {"input_nodes": "paper", "form": "edge_index"}
    with DiskLoader.from_dataset(tmp_path / "g", FANOUTS, 32, **options) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
        assert [b.n_id_dict["v"].tolist() for b in rest] == [ids["v"] for ids in found[None][1:]]
        for batch in rest:
            assert (
                batch.y.tolist()
                == graph["paper"].y[batch.n_id_dict["paper"]][: batch.batch_size].tolist()
            )
        with pytest.raises(CheckpointError, match="store"):
            loader.load_state_dict(state | {"store": "another"})
    stores = sorted((tmp_path / "g" / "prepared").glob("store*/rows.fvf"))
    assert len(stores) == 2
    stores[0].write_bytes(stores[1].read_bytes())
    with pytest.raises(DataError, match="do not belong"):
        DiskLoader.from_dataset(tmp_path / "g", FANOUTS, 32, input_nodes="paper")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigurationError, "names no node type"),
        ({"input_nodes": "reader"}, ConfigurationError, "author, paper, v"),
        ({"input_nodes": ("paper", [300])}, ConfigurationError, "ids go from 300"),
        ({"input_nodes": "paper", "form": "blocks"}, ConfigurationError, "several node types"),
        ({"input_nodes": "paper", "budgets": "9 kB"}, InfeasibleError, "in all|in flight"),
    ],
)
def test_what_it_refuses(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        DiskLoader.from_dataset(make_graph(), [2, 2], 16, cache=tmp_path, **options)


def test_graphs_that_cannot_be_packed_are_refused(tmp_path):
    graph = make_graph()
    with pytest.raises(ConfigurationError, match="edge types differ"):
        DiskLoader.from_dataset(graph, {CITES: [1]}, 16, input_nodes="paper", cache=tmp_path)
    del graph["paper"].x, graph["author"].x
    graph["paper"].num_nodes, graph["author"].num_nodes = 300, 120
    with pytest.raises(DataError, match="no node type has x"):
        DiskLoader.from_dataset(graph, [2], 16, input_nodes="paper", cache=tmp_path)


def test_with_all_neighbours_a_batch_is_what_pyg_finds_in_two_hops(tmp_path):
    graph = make_graph()
    whole = graph.to_homogeneous(node_attrs=[], edge_attrs=[])
    starts = {name: int((whole.node_type < i).sum()) for i, name in enumerate(graph.node_types)}
    with DiskLoader.from_dataset(
        graph, [-1, -1], 5, input_nodes=("author", range(0, 120, 9)), cache=tmp_path
    ) as loader:
        for batch in loader:
            seeds = batch["author"].n_id[: batch["author"].batch_size] + starts["author"]
            expected, *_ = k_hop_subgraph(seeds, 2, whole.edge_index)
            found = [batch[name].n_id + first for name, first in starts.items()]
            assert torch.cat(found).sort().values.tolist() == expected.tolist()


def test_the_guide_trains_as_printed(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[3] / "docs/guides/gnn.md").read_text()
    section = guide[guide.index("### Several types of nodes and edges") :]
    monkeypatch.chdir(tmp_path)
    ran = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], ran)  # noqa: S102
    assert ran["loss"].isfinite()
    assert list(tmp_path.glob("typed/store*/store.json"))


@st.composite
def typed_graphs(draw):
    """Graphs with empty types, types nobody reaches, and edge types without edges."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    data, sizes = HeteroData(), {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        sizes[name] = draw(st.sampled_from([1, 2, 7, 40]))
        if name == "a" or draw(st.booleans()):
            wide = draw(st.sampled_from([1, 5, 700]))
            data[name].x = torch.from_numpy(rng.integers(0, 99, (sizes[name], wide)).astype("i2"))
        data[name].num_nodes = sizes[name]
    kinds = [(source, "to", target) for source in sizes for target in sizes]
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, unique=True)):
        count = draw(st.sampled_from([0, 1, 60]))
        ends = [rng.integers(0, sizes[kind[i]], count) for i in (0, 2)]
        data[kind].edge_index = torch.from_numpy(np.stack(ends))
        data[kind].edge_attr = torch.arange(count)
    return data, draw(st.sampled_from(sorted(sizes)))


@pytest.mark.nightly
@given(
    typed_graphs(),
    st.lists(st.sampled_from([-1, 0, 1, 3]), min_size=1, max_size=3),
    st.sampled_from([1, 3, 50]),
    st.sampled_from(["static", "belady"]),
)
def test_random_typed_graphs(case, fanouts, batch_size, policy):
    graph, kind = case
    with (
        tempfile.TemporaryDirectory() as cache,
        DiskLoader.from_dataset(
            graph, fanouts, batch_size, input_nodes=kind, cache=cache, policy=policy
        ) as loader,
    ):
        seeds = []
        for batch in loader:
            seeds += batch[kind].n_id[: batch[kind].batch_size].tolist()
            for name in graph.node_types:
                ids = batch[name].n_id
                assert len(ids.unique()) == len(ids) == batch[name].num_nodes
                if "x" in graph[name]:
                    assert torch.equal(batch[name].x, graph[name].x[ids])
            for edge_type in graph.edge_types:
                edges, ids = batch[edge_type].edge_index, batch[edge_type].e_id
                ends = [batch[edge_type[i]].n_id[edges[i // 2]] for i in (0, 2)]
                assert torch.equal(torch.stack(ends), graph[edge_type].edge_index[:, ids])
                assert torch.equal(batch[edge_type].edge_attr, ids)
        assert sorted(seeds) == list(range(graph[kind].num_nodes))
