"""OnlineLoader and the forms of a batch, against slow references."""

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.gnn.data import Dataset
from fivefold.gnn.loading import OnlineLoader
from fivefold.gnn.loading.batch import expand_edges


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, dataset_of):
    with dataset_of(tmp_path_factory.mktemp("g"), dim=5) as made:
        yield made


@pytest.fixture(scope="module")
def features(dataset):
    return dataset.features.read("x")


def in_neighbours(dataset):
    topology = dataset.topology()
    return topology.indptr, topology.indices


@pytest.mark.parametrize("source", ["disk", "memory", "array"])
def test_rows_are_those_of_an_in_memory_gather(dataset, features, source):
    given = features if source == "array" else source
    with OnlineLoader(
        dataset, dataset.train, fanouts=[4, 3, 2], batch_size=7, features=given
    ) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                ids = batch.n_id.numpy()
                assert len(set(ids.tolist())) == len(ids)
                assert np.array_equal(batch.x.numpy(), features[ids])
                assert np.array_equal(batch.y.numpy(), dataset.labels[ids[: batch.batch_size]])
                assert np.array_equal(
                    dataset.train[batch.input_id.numpy()], ids[: batch.batch_size]
                )
                seen += ids[: batch.batch_size].tolist()
            assert seen == dataset.train.tolist()
            assert len(loader) == -(-len(dataset.train) // 7)


def test_edges_are_edges_of_the_graph(dataset):
    indptr, indices = in_neighbours(dataset)
    with OnlineLoader(dataset, dataset.train[:20], fanouts=[-1, 2], batch_size=6) as loader:
        for batch in loader:
            ids, (sources, targets) = batch.n_id.numpy(), batch.edge_index.numpy()
            for source, target in zip(ids[sources], ids[targets], strict=True):
                assert source in indices[indptr[target] : indptr[target + 1]]
            for seed in range(batch.batch_size):
                degree = indptr[ids[seed] + 1] - indptr[ids[seed]]
                assert (targets == seed).sum() == degree


def test_blocks_compute_what_the_whole_subgraph_computes(dataset):
    """Sums over neighbours, layer by layer, give the seeds the same values in both forms."""
    options = {"fanouts": [3, 3, 2], "batch_size": 9}
    with (
        OnlineLoader(dataset, dataset.train[:30], **options) as whole,
        OnlineLoader(dataset, dataset.train[:30], form="blocks", **options) as layered,
    ):
        for full, batch in zip(whole, layered, strict=True):
            assert batch.edge_index is None
            assert len(batch.blocks) == 3
            assert batch.num_edges == full.num_edges
            h = full.x.double()
            for _ in range(3):
                h = h + torch.zeros_like(h).index_add_(0, full.edge_index[1], h[full.edge_index[0]])
            g = batch.x.double()
            for block in batch.blocks:
                assert block.size == (len(g), block.num_targets)
                assert torch.equal(block.targets(g), g[block.target_rows])
                out = block.targets(g).clone()
                g = out.index_add_(0, block.edge_index[1], g[block.edge_index[0]])
            assert torch.equal(g, h[: full.batch_size])


def test_epochs_differ_and_are_reproduced(dataset):
    with OnlineLoader(
        dataset, dataset.train, fanouts=[3], batch_size=8, shuffle=True, seed=5
    ) as loader:
        first = [batch.n_id.tolist() for batch in loader]
        second = [batch.n_id.tolist() for batch in loader]
        loader.set_epoch(0)
        again = [batch.n_id.tolist() for batch in loader]
        loader.set_epoch(0)
        assert first == again
        assert first != second
        iterator = iter(loader)
        head = [next(iterator).n_id.tolist() for _ in range(2)]
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert first == again == head + [batch.n_id.tolist() for batch in loader]


def test_labels_are_optional(tmp_path, dataset_of):
    dataset_of(tmp_path / "d", labelled=False).close()
    with (
        Dataset.open(tmp_path / "d") as dataset,
        OnlineLoader(dataset, np.arange(5), fanouts=[2], batch_size=2) as loader,
    ):
        assert [batch.y for batch in loader] == [None] * 3


def test_wrong_arguments_are_named(dataset):
    with pytest.raises(ConfigurationError, match="batch_size"):
        OnlineLoader(dataset, dataset.train, fanouts=[2], batch_size=0)
    with pytest.raises(ConfigurationError, match="form"):
        OnlineLoader(dataset, dataset.train, fanouts=[2], batch_size=1, form="csr")


def test_expand_edges_agrees_with_repeat():
    random = np.random.default_rng(0)
    degrees = random.integers(0, 5, 40).astype(np.int32)
    sources = random.integers(0, 90, degrees.sum()).astype(np.int32)
    targets = random.permutation(90)[:40].astype(np.int32)
    for given in (None, targets):
        ours = expand_edges(sources, degrees, targets=given)
        numbers = np.arange(40) if given is None else given
        assert np.array_equal(ours, np.stack([sources, np.repeat(numbers, degrees)]))
    none = np.empty(0, np.int32)
    assert expand_edges(none, none).shape == (2, 0)


def test_ranks_share_the_batches_and_statistics_count(dataset):
    options = {"fanouts": [3], "batch_size": 9, "world_size": 2, "remainder": "repeat"}
    numbers = []
    for rank in range(2):
        with OnlineLoader(dataset, dataset.train, rank=rank, **options) as loader:
            batches = list(loader)
            assert len(batches) == len(loader)
            numbers += [batch.number for batch in batches]
            counts = loader.statistics()
            assert counts.rows == {"file": sum(batch.num_nodes for batch in batches)}
            assert counts.cold_bytes == counts.rows["file"] * dataset.row_bytes
            assert set(counts.stage_s) == {"sample", "read rows", "build tensors"}
    assert len(numbers) == 8
    assert set(numbers) == set(range(7))
    with pytest.raises(ConfigurationError, match="rank"):
        OnlineLoader(dataset, dataset.train, rank=2, **options)


@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_a_cache_changes_what_is_read_and_nothing_else(dataset_of, tmp_path, policy):
    with dataset_of(tmp_path / "data", nodes=500, edges=4000, dim=64) as dataset:
        run = {"fanouts": [4, 3], "batch_size": 9, "seed": 3}
        found = {}
        for cache_bytes in (0, 40_000, 400_000):
            with OnlineLoader(
                dataset, dataset.train, cache_bytes=cache_bytes, cache_policy=policy, **run
            ) as loader:
                rows = [batch.x.numpy().copy() for _ in range(3) for batch in loader]
                statistics = loader.statistics()
            found[cache_bytes] = rows, statistics
            assert sum(statistics.rows.values()) == sum(map(len, rows))
        for rows, _ in found.values():
            for one, other in zip(rows, found[0][0], strict=True):
                np.testing.assert_array_equal(one, other)
        read = [statistics.rows["file"] for _, statistics in found.values()]
        assert read[0] > read[1] > read[2]
        assert read[2] <= 500  # all fits: each row once
        with pytest.raises(ConfigurationError, match="cache_bytes"):
            OnlineLoader(dataset, dataset.train, cache_bytes=2100, **run)
