"""Mini-batches of several types: the rows of the ids, edges of the graph, PyG's shape."""

import warnings

import numpy as np
import pytest
import torch

from fivefold.errors import CheckpointError, ConfigurationError
from fivefold.gnn.data import ingest, pyg_source
from fivefold.gnn.loading import OnlineLoader

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import HeteroData
    from torch_geometric.nn import HeteroConv, SAGEConv

CITES, WRITES, AT = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "at", "v")


@pytest.fixture(scope="module")
def graph():
    rng = np.random.default_rng(2)
    data = HeteroData()
    data["paper"].x = torch.from_numpy(rng.standard_normal((60, 6)).astype(np.float32))
    data["paper"].y = torch.from_numpy(rng.integers(0, 3, 60))
    data["paper"].train_mask = torch.arange(60) % 3 == 0
    data["author"].x = torch.from_numpy(rng.standard_normal((25, 3)).astype(np.float16))
    data["v"].num_nodes = 4  # no features, and nothing comes from there
    for kind, sizes in {CITES: (60, 60, 240), WRITES: (25, 60, 90), AT: (60, 4, 60)}.items():
        ends = [rng.integers(0, sizes[0], sizes[2]), rng.integers(0, sizes[1], sizes[2])]
        data[kind].edge_index = torch.from_numpy(np.stack(ends))
    return data


@pytest.fixture(scope="module")
def dataset(graph, tmp_path_factory):
    with ingest(pyg_source(graph), tmp_path_factory.mktemp("hetero") / "g") as made:
        yield made


@pytest.mark.parametrize("fanouts", [[-1, -1], [2, 2], {CITES: [3, 1], WRITES: [0, 2], AT: [1, 0]}])
def test_rows_edges_and_labels_are_those_of_the_graph(dataset, graph, fanouts):
    seen = []
    with OnlineLoader(
        dataset, "paper", fanouts=fanouts, batch_size=7, shuffle=True, backend="threads"
    ) as loader:
        for batch in loader:
            ids = batch.n_id_dict
            assert set(batch.x_dict) == {"paper", "author"}
            for name, x in batch.x_dict.items():
                assert torch.equal(x, graph[name].x[ids[name]])
            for (source, relation, target), edges in batch.edge_index_dict.items():
                pairs = set(map(tuple, graph[source, relation, target].edge_index.T.tolist()))
                ends = ids[source][edges[0]].tolist(), ids[target][edges[1]].tolist()
                assert set(zip(*ends, strict=True)) <= pairs
            seeds = ids["paper"][: batch.batch_size]
            assert torch.equal(batch.y, graph["paper"].y[seeds])
            seen += seeds.tolist()
            if fanouts == [-1, -1]:  # every edge into a seed is there
                into = torch.isin(graph[CITES].edge_index[1], seeds).sum()
                assert (batch.edge_index_dict[CITES][1] < batch.batch_size).sum() == into
    assert sorted(seen) == list(range(0, 60, 3))


def test_a_model_of_pyg_trains_on_the_batches(dataset):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv = HeteroConv({CITES: SAGEConv((6, 6), 3), WRITES: SAGEConv((3, 6), 3)}, aggr="sum")
    with OnlineLoader(dataset, "paper", fanouts=[4], batch_size=20) as loader:
        data = next(iter(loader)).to_data()
    x = {name: rows.float() for name, rows in data.x_dict.items()}
    edges = {kind: data.edge_index_dict[kind] for kind in (CITES, WRITES)}
    out = conv(x, edges)["paper"][: data["paper"].batch_size]
    torch.nn.functional.cross_entropy(out, data["paper"].y).backward()
    assert all(parameter.grad.isfinite().all() for parameter in conv.parameters())
    assert data.num_sampled_nodes_dict["paper"][0] == 20
    assert data["v"].num_nodes == 0


def test_edges_have_their_rows_in_the_class_of_pyg(graph, tmp_path):
    """Of a type without labels all nodes are seeds."""
    graph = graph.clone()
    graph[CITES].edge_attr = torch.arange(480.0).reshape(240, 2)
    with ingest(pyg_source(graph), tmp_path / "g") as dataset:
        how = {"fanouts": [-1], "batch_size": 20, "features": "memory"}
        with OnlineLoader(dataset, ("paper", range(60)), form="data", **how) as loader:
            for data in loader:
                assert torch.equal(data["paper"].y, graph["paper"].y[data["paper"].n_id])
                edges = data[CITES]
                assert torch.equal(edges.edge_attr, graph[CITES].edge_attr[edges.e_id])
                ends = [data["paper"].n_id[ends] for ends in edges.edge_index]
                assert torch.equal(torch.stack(ends), graph[CITES].edge_index[:, edges.e_id])
        with OnlineLoader(dataset, "author", edge_ids=False, **how) as loader:
            batches = list(loader)
        assert sum(batch.batch_size for batch in batches) == 25
        assert not any(batch.edge_attr_dict or batch.e_id_dict for batch in batches)


def test_positions_ranks_and_repetition(dataset):
    def ids_of(loader):
        return [batch.n_id_dict["paper"].tolist() for batch in loader]

    options = {"fanouts": [2, 2], "batch_size": 4, "shuffle": True, "seed": 3}
    with OnlineLoader(dataset, "paper", **options) as loader:
        whole = ids_of(loader)
        assert ids_of(loader) != whole  # another epoch, another order
        loader.set_epoch(0)
        running = iter(loader)
        next(running)
        next(running)
        state = loader.state_dict()
    with OnlineLoader(dataset, "paper", **options) as loader:
        loader.load_state_dict(state)
        assert ids_of(loader) == whole[2:]
        with pytest.raises(CheckpointError, match="seed"):
            loader.load_state_dict(state | {"seed": 4})
    with OnlineLoader(dataset, ("paper", [0, 1, 2, 3, 4]), **options) as loader:
        state = loader.state_dict()
    with (  # as many, one of them another
        OnlineLoader(dataset, ("paper", [0, 1, 2, 3, 5]), **options) as loader,
        pytest.raises(CheckpointError, match="ids"),
    ):
        loader.load_state_dict(state)
    shares = []
    for rank in (0, 1):
        with OnlineLoader(dataset, "paper", rank=rank, world_size=2, **options) as loader:
            shares.append(ids_of(loader))
    assert shares == [whole[0:4:2], whole[1:4:2]]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("reader",), {}, ConfigurationError, "'reader', which names no node type"),
        ((("paper", [60]),), {}, ConfigurationError, "ids go from 60"),
        (("paper",), {"form": "blocks"}, ConfigurationError, "for graphs of one type"),
        (("paper",), {"cache_bytes": 9000}, ConfigurationError, "for graphs of one type"),
        (("paper",), {"node_time": [1.0] * 60}, ConfigurationError, "for graphs of one type"),
        (("paper",), {"features": np.zeros((60, 6))}, ConfigurationError, "graphs of one type"),
        (("paper",), {"fanouts": {CITES: [2]}}, ConfigurationError, "edge types differ"),
        (
            ("paper",),
            {"batch_size": 0},
            ConfigurationError,
            "batch_size must be a whole",
        ),
        (("paper",), {"rank": 3}, ConfigurationError, "rank must be in"),
    ],
)
def test_misuse_is_refused(dataset, arguments, options, error, message):
    with pytest.raises(error, match=message):
        OnlineLoader(dataset, *arguments, **{"fanouts": [2], "batch_size": 4} | options)
