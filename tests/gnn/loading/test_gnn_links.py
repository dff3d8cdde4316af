"""``LinkLoader``: links as seeds, random pairs beside them, numbered as rows of the batch."""

import numpy as np
import pytest

from fivefold.errors import CheckpointError, ConfigurationError
from fivefold.gnn.loading import LinkLoader


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, dataset_of):
    with dataset_of(tmp_path_factory.mktemp("links"), nodes=300, edges=900, dim=4) as made:
        yield made


def edges_of(dataset):
    """Source, target of every edge, in the order of the source."""
    topology = dataset.topology()
    targets = np.repeat(np.arange(dataset.num_nodes), np.diff(topology.indptr))
    ids = topology.edge_ids
    order = np.arange(topology.num_edges) if ids is None else np.argsort(ids)
    return np.stack([topology.indices, targets])[:, order]


@pytest.mark.parametrize("form", ["edge_index", "blocks"])
@pytest.mark.parametrize("ratio", [1, 3])
def test_links_and_random_pairs_of_an_epoch(dataset, form, ratio):
    edges, x = edges_of(dataset), dataset.features.read("x")
    drawn, seen = [], []
    with LinkLoader(
        dataset, fanouts=[3, 2], batch_size=64, shuffle=True, seed=2, form=form,
        negatives_per_link=ratio, cache_bytes=6000,
    ) as loader:  # fmt: skip
        for batch in loader:
            n_id, count = batch.n_id.numpy(), len(batch.input_id)
            np.testing.assert_array_equal(batch.x.numpy(), x[n_id])
            pairs = batch.links["edge_label_index"].numpy()
            labels = batch.links["edge_label"].numpy()
            assert pairs.shape[1] == len(labels) == count * (1 + ratio)
            assert labels[:count].all()
            assert not labels[count:].any()
            assert pairs.max() < batch.batch_size  # ends are seeds, whose output a model gives
            np.testing.assert_array_equal(n_id[pairs[:, :count]], edges[:, batch.input_id.numpy()])
            drawn.append(n_id[pairs[:, count:]])
            seen.append(batch.input_id.numpy())
        again = [batch.links["edge_label_index"].tolist() for batch in loader]  # epoch 1
        loader.set_epoch(0)
        first = [batch.links["edge_label_index"].tolist() for batch in loader]
    assert sorted(np.concatenate(seen).tolist()) == list(range(edges.shape[1]))
    assert first != again
    found = np.concatenate(drawn, axis=1)
    mean = found.mean()  # uniform over 300 nodes: deviation 86.6 / sqrt(draws)
    assert abs(mean - 149.5) < 5 * 86.6 / np.sqrt(found.size)


def test_triplets_and_labels(dataset):
    edges = edges_of(dataset)
    with LinkLoader(
        dataset, edges[:, :50], fanouts=[2], batch_size=20, negatives="triplet", seed=1
    ) as loader:
        for batch in loader:
            ends = [batch.links[name] for name in ("src_index", "dst_pos_index")]
            found = np.stack([batch.n_id[end].numpy() for end in ends])
            np.testing.assert_array_equal(found, edges[:, batch.input_id.numpy()])
            assert batch.links["dst_neg_index"].shape == batch.links["src_index"].shape
    labels = np.arange(50) % 3
    for negatives, expected in (("binary", labels + 1), (None, labels)):
        with LinkLoader(
            dataset, edges[:, :50], edge_label=labels, fanouts=[2], batch_size=50,
            negatives=negatives,
        ) as loader:  # fmt: skip
            batch = next(iter(loader))
        assert batch.links["edge_label"][:50].tolist() == expected.tolist()


def test_a_position_holds_for_the_same_links_and_pairs_alone(dataset):
    edges = edges_of(dataset)[:, :20]
    options = {"fanouts": [2], "batch_size": 5, "negatives": "binary", "negatives_per_link": 1}
    with LinkLoader(dataset, edges, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    for links, change in ((edges[::-1], {}), (edges, {"negatives_per_link": 2})):
        with (
            LinkLoader(dataset, links, **options | change) as other,
            pytest.raises(CheckpointError, match="links="),
        ):
            other.load_state_dict(state)


def test_ranks_share_the_links(dataset):
    found = []
    for rank in range(2):
        with LinkLoader(dataset, fanouts=[2], batch_size=100, rank=rank, world_size=2) as loader:
            found.append(np.concatenate([batch.input_id.numpy() for batch in loader]))
    assert not np.intersect1d(*found).size
    assert len(found[0]) == len(found[1]) == 400  # 9 batches: the last is left out


@pytest.mark.parametrize(
    ("links", "options", "match"),
    [
        ([[0], [300]], {}, "300 nodes"),
        ([[0, 1]], {}, "edge_label_index"),
        ([[0], [1]], {"negatives": "some"}, "negatives"),
        ([[0], [1]], {"edge_label": [1, 2]}, "for 1 links"),
        ([[0], [1]], {"edge_label": [1], "negatives": "triplet"}, "triplets"),
        ([[0], [1]], {"edge_label": 1}, "edge_label has shape"),
        ([[0], [1]], {"edge_label": ["a"]}, "dtype <U1"),
        ([[0], [1]], {"negatives_per_link": 0}, "negatives_per_link"),
        ([[0], [1]], {"negatives_per_link": 1.5}, "negatives_per_link"),
    ],
)
def test_what_it_refuses(dataset, links, options, match):
    with pytest.raises(ConfigurationError, match=match):
        LinkLoader(dataset, links, fanouts=[2], batch_size=4, **options)
