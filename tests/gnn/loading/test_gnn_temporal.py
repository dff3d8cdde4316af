"""Temporal batches against every rule checked one edge at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import CheckpointError, ConfigurationError
from fivefold.gnn.data import array_source, ingest
from fivefold.gnn.loading import LinkLoader, OnlineLoader
from helpers.night import number_of


def make_dataset(folder, *, nodes=60, edges=600, seed=0, features=None):
    random = np.random.default_rng(seed)
    pairs = random.integers(0, nodes, (2, edges))
    rows = (
        np.arange(nodes * 3, dtype=np.float32).reshape(nodes, 3) if features is None else features
    )
    marks = np.arange(edges, dtype=np.float32)[:, None]  # each edge carries its own number
    labels = random.integers(0, 5, nodes)
    return ingest(array_source(pairs, features=rows, labels=labels, edge_features=marks), folder)


def edges_of(dataset):
    """Source, target of every edge by its id."""
    topology = dataset.topology()
    targets = np.repeat(np.arange(topology.num_nodes), np.diff(topology.indptr))
    ids = np.arange(topology.num_edges) if topology.edge_ids is None else topology.edge_ids
    ends = np.empty((2, topology.num_edges), np.int64)
    ends[:, ids] = topology.indices, targets
    return ends


def check_trees(batch, ends, edge_when, fanouts, *, last):
    """Every tree by itself: what is taken exists, is early enough, as many as there may be."""
    n_id, e_id = batch.n_id.numpy(), batch.e_id.numpy()
    tree, limits = batch.links["batch"].numpy(), batch.links["seed_time"].numpy()
    source, target = batch.edge_index.numpy()
    assert tree[: len(limits)].tolist() == list(range(len(limits)))
    assert len({*zip(tree.tolist(), n_id.tolist(), strict=True)}) == len(n_id)
    assert (tree[source] == tree[target]).all()
    assert (ends[0, e_id] == n_id[source]).all()
    assert (ends[1, e_id] == n_id[target]).all()
    assert (edge_when[e_id] <= limits[tree[target]]).all()
    begins = np.concatenate([[0], np.cumsum(batch.num_sampled_nodes)])
    for hop, fanout in enumerate(fanouts):
        for row in range(begins[hop], begins[hop + 1]):
            into = np.flatnonzero(ends[1] == n_id[row])
            early = into[edge_when[into] <= limits[tree[row]]]
            got = e_id[target == row]
            assert len(set(got.tolist())) == len(got)
            assert len(got) == (len(early) if fanout < 0 else min(fanout, len(early)))
            if last and len(got):
                left = np.setdiff1d(early, got)
                assert not len(left) or edge_when[left].max() <= edge_when[got].min()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    with make_dataset(tmp_path_factory.mktemp("temporal")) as made:
        yield made


@settings(max_examples=number_of(7, 1000), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    fanouts=st.lists(st.integers(-1, 4), min_size=1, max_size=3),
    last=st.booleans(),
    of_nodes=st.booleans(),
    whole=st.booleans(),
)
def test_a_seed_sees_what_was_there_and_nothing_later(
    dataset, seed, fanouts, last, of_nodes, whole
):
    random = np.random.default_rng(seed)
    ends = edges_of(dataset)
    count = dataset.num_nodes if of_nodes else ends.shape[1]
    times = random.integers(0, 20, count) if whole else random.random(count) * 20
    seeds = random.integers(0, dataset.num_nodes, 17)  # the same node at several times
    limits = random.integers(-1, 22, 17)
    with OnlineLoader(
        dataset,
        seeds,
        fanouts=fanouts,
        batch_size=5,
        input_time=limits,
        temporal_strategy="last" if last else "uniform",
        shuffle=True,
        seed=seed,
        **{"node_time" if of_nodes else "edge_time": times},
    ) as loader:
        batches = list(loader)
    places = torch.cat([batch.input_id for batch in batches]).numpy()
    assert sorted(places.tolist()) == list(range(17))
    edge_when = times[ends[0]] if of_nodes else times
    for batch in batches:
        own = batch.input_id.numpy()
        assert (batch.n_id.numpy()[: len(own)] == seeds[own]).all()
        assert (batch.links["seed_time"].numpy() == limits[own]).all()
        assert (batch.y.numpy() == dataset.labels[seeds[own]]).all()
        assert (batch.x.numpy()[:, 0] == 3 * batch.n_id.numpy()).all()
        assert (batch.edge_attr.numpy()[:, 0] == batch.e_id.numpy()).all()
        check_trees(batch, ends, edge_when, fanouts, last=last)


def test_uniform_takes_each_early_neighbour_equally_often(tmp_path):
    into_zero = np.stack([np.arange(1, 11), np.zeros(10, np.int64)])
    features = np.zeros((11, 1), np.float32)
    with ingest(array_source(into_zero, features=features), tmp_path / "star") as star:
        when = np.arange(11)  # node k came at k; the seed sees 1 to 6
        with OnlineLoader(
            star, np.zeros(6000, np.int64), fanouts=[2], batch_size=500, node_time=when,
            input_time=np.full(6000, 6),
        ) as loader:  # fmt: skip
            found = torch.cat([batch.n_id[batch.batch_size :] for batch in loader])
    counts = np.bincount(found.numpy(), minlength=11)
    assert counts[7:].sum() == 0
    # 12,000 draws over six: 2,000 each, standard deviation 37 (two distinct of six).
    assert np.abs(counts[1:7] - 2000).max() < 5 * 37


def test_links_and_their_random_pairs_see_the_time_of_the_link(dataset):
    ends = edges_of(dataset)
    when = np.random.default_rng(1).integers(0, 50, ends.shape[1])
    for negatives, drawn in (("binary", 4), ("triplet", 2), (None, 0)):
        with LinkLoader(
            dataset, ends[:, :30], fanouts=[3, 2], batch_size=10, edge_time=when,
            edge_label_time=when[:30] - 1, negatives=negatives, negatives_per_link=2,
        ) as loader:  # fmt: skip
            for batch in loader:
                chosen = batch.input_id.numpy()
                own = when[chosen] - 1
                parts = [own, own, *[np.repeat(own, 2)] * (drawn // 2)]
                assert (batch.links["seed_time"].numpy() == np.concatenate(parts)).all()
                check_trees(batch, ends, when, [3, 2], last=False)
                n_id = batch.n_id.numpy()
                if negatives == "triplet":
                    pairs = torch.stack([batch.links["src_index"], batch.links["dst_pos_index"]])
                    later = n_id[batch.links["dst_neg_index"].numpy()]
                    assert later.shape == (len(chosen), 2)
                else:
                    pairs = batch.links["edge_label_index"][:, : len(chosen)]
                assert (n_id[pairs.numpy()] == ends[:, chosen]).all()


def test_a_temporal_loader_resumes_where_it_stopped_and_with_nothing_else(dataset):
    when = np.arange(dataset.num_nodes)
    options = {"fanouts": [2, 2], "batch_size": 4, "node_time": when, "shuffle": True}
    with OnlineLoader(dataset, np.arange(20), **options) as loader:
        whole = [batch.n_id.tolist() for batch in loader]
    with OnlineLoader(dataset, np.arange(20), **options) as loader:
        turn = iter(loader)
        [next(turn) for _ in range(2)]
        state = loader.state_dict()
    with OnlineLoader(dataset, np.arange(20), **options) as loader:
        loader.load_state_dict(state)
        assert [batch.n_id.tolist() for batch in loader] == whole[2:]
    other = {**options, "input_time": np.zeros(20)}
    with (
        OnlineLoader(dataset, np.arange(20), **other) as loader,
        pytest.raises(CheckpointError, match="links"),
    ):
        loader.load_state_dict(state)


def test_batches_of_pyg_have_batch_and_seed_time(dataset):
    pytest.importorskip("torch_geometric")
    when = np.arange(dataset.num_nodes)
    with OnlineLoader(
        dataset, [9, 40, 9], fanouts=[2], batch_size=3, node_time=when, input_time=[9, 40, 3],
        form="data",
    ) as loader:  # fmt: skip
        data = next(iter(loader))
    assert data.seed_time.tolist() == [9, 40, 3]
    assert data.batch[:3].tolist() == [0, 1, 2]
    assert (torch.as_tensor(when)[data.n_id[3:]] <= data.seed_time[data.batch[3:]]).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input_time": [1, 2]}, "need times of nodes or edges"),
        ({"temporal_strategy": "last"}, "need times of nodes or edges"),
        ({"node_time": [1, 2]}, r"node_time has shape \[2\]"),
        ({"edge_time": [1, 2]}, "edge_time has shape"),
        ({"node_time": "fit", "edge_time": "fit"}, "only one of them"),
        ({"node_time": "fit", "input_time": [1.0, float("nan")]}, "not finite"),
        ({"node_time": "fit", "input_time": [1]}, "input_time has shape"),
        ({"node_time": "fit", "temporal_strategy": "first"}, "temporal_strategy is 'first'"),
        ({"edge_time": "fit"}, "input_time is None"),
        ({"node_time": "fit", "input_time": np.array([1, 2**63], np.uint64)}, "int64 does not"),
    ],
)
def test_times_that_do_not_fit_are_refused(dataset, options, said):
    counts = {"node_time": dataset.num_nodes, "edge_time": dataset.num_edges}
    given = {
        name: np.zeros(counts[name]) if isinstance(value, str) and value == "fit" else value
        for name, value in options.items()
    }
    with pytest.raises(ConfigurationError, match=said):
        OnlineLoader(dataset, [0, 1], fanouts=[2], batch_size=2, **given)


@pytest.mark.parametrize(("late", "found"), [(1e300, 2), (-1e300, 0), (2.5, 2), (1.5, 1)])
def test_real_limits_of_whole_times(tmp_path, late, found):
    source = array_source([[1, 2], [0, 0]], features=np.zeros((3, 1), np.float32))
    with ingest(source, tmp_path / "g") as made:
        loader = OnlineLoader(
            made, [0], fanouts=[-1], batch_size=1, node_time=[0, 1, 2], input_time=[late]
        )
        with loader:
            assert next(iter(loader)).edge_index.shape[1] == found


def test_times_of_links_that_do_not_fit_are_refused(dataset):
    when = np.zeros(dataset.num_nodes)
    for options, said in [
        ({"node_time": when}, "edge_label_time is None"),
        ({"edge_label_time": [1]}, "needs times of nodes or edges"),
        ({"node_time": when, "edge_label_time": [1, 2]}, r"edge_label_time has shape \[2\]"),
        ({"node_time": when, "input_time": [1]}, "edge_label_time in place of input_time"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            LinkLoader(dataset, [[0], [1]], fanouts=[2], batch_size=1, **options)


@pytest.mark.parametrize("of_nodes", [False, True])
def test_weights_are_of_what_is_early_enough(tmp_path, of_nodes):
    """One of five edges, in proportion to its weight among those in time; 0 is never drawn."""
    ends = np.array([[1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    weights, when, count = np.array([1, 3, 0, 4, 9.0]), np.array([1, 2, 3, 4, 9]), 4000
    times = {"node_time": np.array([0, *when])} if of_nodes else {"edge_time": when}
    source = array_source(ends, features=np.zeros((6, 1), np.float32), weights=weights)
    with ingest(source, tmp_path / "d") as dataset:
        options = {"batch_size": count, "input_time": np.full(count, 5), **times}
        with OnlineLoader(dataset, np.zeros(count, int), fanouts=[1], **options) as loader:
            batch = next(iter(loader))
        found = np.bincount(batch.n_id[batch.edge_index[0]].numpy(), minlength=6)[1:]
        expected = count * np.where(when <= 5, weights, 0) / 8
        deviation = np.sqrt(expected * (1 - expected / count))
        assert (np.abs(found - expected) <= 4 * deviation).all()
        everything = {"fanouts": [-1], "temporal_strategy": "last", **options}
        with OnlineLoader(dataset, np.zeros(count, int), **everything) as loader:
            batch = next(iter(loader))
        assert set(batch.n_id[batch.edge_index[0]].tolist()) == {1, 2, 4}
