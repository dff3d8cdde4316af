"""What is given per edge goes by the order of the source, whatever became of the edges since."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import EdgeRules, array_source, ingest
from fivefold.gnn.loading import DiskLoader, LinkLoader, OnlineLoader
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.storage import Container, ContainerWriter

RULES = st.builds(
    EdgeRules, add_reverse=st.booleans(), drop_self_loops=st.booleans(),
    drop_duplicates=st.booleans(),
)  # fmt: skip


def stored(ends, rules):
    """(source, target, place in the source) of each edge that the rules leave, one by one."""
    found, known = [], set()
    for number, (source, target) in enumerate(ends.T.tolist()):
        if rules.drop_self_loops and source == target:
            continue
        both = [(source, target), *([(target, source)] if rules.add_reverse else [])]
        for pair in both:
            if not (rules.drop_duplicates and pair in known):
                found.append((*pair, number))
            known.add(pair)
    return found


def few(number):
    """A graph of few nodes, so that it has duplicates, reversals and loops."""
    random = np.random.default_rng(number)
    return random.integers(0, 6, (2, random.integers(1, 40)))


def made(folder, ends, rules, *, weighted=False):
    marks = np.arange(float(ends.shape[1]), dtype=np.float32)[:, None]
    weights = marks[:, 0] + 1 if weighted else None
    source = array_source(
        ends, features=np.eye(6, dtype=np.float32), edge_features=marks, weights=weights
    )
    return ingest(source, folder, rules=rules)


def sampled(batch):
    return sorted(
        zip(
            batch.n_id[batch.edge_index[0]].tolist(),
            batch.n_id[batch.edge_index[1]].tolist(),
            batch.e_id.tolist(),
            strict=True,
        )
    )


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(number=st.integers(0, 10_000), rules=RULES)
def test_of_random_graphs(tmp_path_factory, number, rules):
    ends = few(number)
    random = np.random.default_rng(number + 1)
    when, label = random.integers(0, 9, (2, ends.shape[1]))
    expected = stored(ends, rules)
    with made(tmp_path_factory.mktemp("d"), ends, rules) as dataset:
        options = {"fanouts": [-1], "batch_size": 6}
        with OnlineLoader(dataset, np.arange(6), **options) as loader:
            (batch,) = loader
        assert sampled(batch) == sorted(expected)
        assert batch.edge_attr[:, 0].tolist() == batch.e_id.tolist()
        limits = random.integers(0, 9, 6)
        with OnlineLoader(
            dataset, np.arange(6), edge_time=when, input_time=limits, **options
        ) as loader:
            (batch,) = loader
        early = [edge for edge in expected if when[edge[2]] <= limits[edge[1]]]
        assert sampled(batch) == sorted(early)
        with LinkLoader(dataset, edge_label=label, negatives=None, **options) as loader:
            found = [
                (*batch.n_id[pair].tolist(), place, mark)
                for batch in loader
                for pair, place, mark in zip(
                    batch.links["edge_label_index"].T,
                    batch.input_id.tolist(),
                    batch.links["edge_label"].tolist(),
                    strict=True,
                )
            ]
        assert sorted(found) == sorted((*edge, label[edge[2]]) for edge in expected)
        assert [edge[2] for edge in found] == sorted(edge[2] for edge in found)


@pytest.mark.parametrize("rules", [EdgeRules(), EdgeRules(add_reverse=True, drop_duplicates=True)])
@pytest.mark.parametrize("form", ["edge_index", "data"])
def test_of_weighted_batches_packed_or_not(tmp_path, rules, form):
    ends = few(3)
    with made(tmp_path / "d", ends, rules, weighted=True) as dataset:
        options = {"batch_size": 6, "fanouts": [-1], "form": form}
        loaders = [
            OnlineLoader(dataset, np.arange(6), **options),
            DiskLoader.from_dataset(dataset, input_nodes=range(6), **options),
        ]
        for loader in loaders:
            with loader:
                (batch,) = loader
            assert sampled(batch) == sorted(stored(ends, rules))
            assert batch.edge_attr[:, 0].tolist() == batch.e_id.tolist()
            assert (batch.edge_weight - 1).tolist() == batch.e_id.tolist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    number=st.integers(0, 10_000),
    by_node=st.booleans(),
    kind=st.sampled_from(["binary", "triplet"]),
)
def test_random_pairs_exist_at_the_time_of_their_link(tmp_path_factory, number, by_node, kind):
    ends, random = few(number), np.random.default_rng(number)
    when = random.integers(0, 9, ends.shape[1])
    born = random.integers(0, 9, 6)
    if by_node:
        when = born[ends].max(axis=0)
        times = {"node_time": born}
    else:
        born = np.full(6, 99)
        np.minimum.at(born, ends, np.stack([when, when]))
        times = {"edge_time": when}
    with (
        made(tmp_path_factory.mktemp("d"), ends, EdgeRules()) as dataset,
        LinkLoader(
            dataset, edge_label_time=when, fanouts=[2], batch_size=8, negatives=kind,
            negatives_per_link=3, **times,
        ) as loader,
    ):  # fmt: skip
        for batch in loader:
            limits = batch.links["seed_time"][batch.links["batch"]].numpy()
            assert (born[batch.n_id.numpy()] <= limits).all()


def test_no_node_to_draw_is_said(tmp_path):
    times = {"node_time": [5, 5, 5, 5, 5, 5], "edge_label_time": [4], "fanouts": [1]}
    with (
        made(tmp_path / "d", np.array([[0], [1]]), EdgeRules()) as dataset,
        pytest.raises(ConfigurationError, match="no node exists at 4"),
    ):
        LinkLoader(dataset, [[0], [1]], batch_size=1, **times)


def test_a_graph_of_an_earlier_version_refuses(tmp_path):
    """It had no numbers of edges: what is given per edge would be taken for another one's."""
    sections = {"indptr": (np.int64, (3,)), "indices": (np.int32, (1,))}
    about = {"name": "old", "num_nodes": 2, "files": {}, "recipe": {"source": "arrays"}}
    path = tmp_path / "graph.fvf"
    with ContainerWriter(path, kind="graph", sections=sections, attributes=about) as writer:
        writer.write("indptr", 0, np.array([0, 1, 1]))
        writer.write("indices", 0, np.array([1], np.int32))
        writer.commit().close()
    with Container.open(path) as container:
        topology = Adjacency.open(container)
    assert topology.neighbors(0).tolist() == [1]
    with pytest.raises(DataError, match="in which order its edges came"):
        _ = topology.edge_ids
