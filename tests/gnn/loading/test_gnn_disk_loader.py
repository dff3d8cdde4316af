"""Bit identity: for any dtype, policy, back end and order, x is features[n_id]."""

import numpy as np
import pytest
import torch

from fivefold.errors import CheckpointError, ConfigurationError, InfeasibleError
from fivefold.gnn.loading import DiskLoader
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.sampling import NeighborSampler


def check(batch, features, dataset):
    ids = batch.n_id.numpy()
    assert batch.x.numpy().dtype == features.dtype
    assert np.array_equal(
        batch.x.numpy().reshape(len(ids), -1).view(np.uint8), features[ids].view(np.uint8)
    )
    assert np.array_equal(batch.y.numpy(), dataset.labels[ids[: batch.batch_size]])
    # T assert np.array_equal(dataset.train[batch.input_id.numpy()], ids[: batch.batch_size])


def epoch_of(loader, features, dataset):
    numbers = []
    for batch in loader:
        check(batch, features, dataset)
        numbers.append(batch.number)
    return numbers


ROWS = [
    (1, np.float32),
    (3, np.float32),
    (100, np.float32),
    (128, np.float32),
    (768, np.float16),
    (1024, np.float32),
    (1025, np.float32),
]


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize(("dim", "dtype"), ROWS)
def test_every_row_is_that_of_an_in_memory_gather(stores, dim, dtype, policy):
    dataset, features, store = stores(dim=dim, dtype=dtype, policy=policy)
    with DiskLoader(store, labels=dataset.labels, seed=4) as loader:
        first, second = (epoch_of(loader, features, dataset) for _ in range(2))
        counts = loader.statistics()
    assert sorted(first) == sorted(second) == list(range(store.num_batches))
    assert (first == second) == (policy == "belady")
    assert sum(counts.rows.values()) == 2 * sum(
        len(store.record(i).node_ids) for i in range(store.num_batches)
    )


@pytest.mark.parametrize("backend", ["threads", "io_uring"])
@pytest.mark.parametrize(("dim", "dtype"), [(3, np.float32), (768, np.float16), (1025, np.float32)])
def test_all_back_ends_agree(stores, dim, dtype, backend):
    for policy in ("static", "belady"):
        dataset, features, store = stores(dim=dim, dtype=dtype, policy=policy)
        with DiskLoader(store, labels=dataset.labels, backend=backend, threads=1) as loader:
            for _ in range(2):
                assert len(epoch_of(loader, features, dataset)) == len(loader)


def test_rows_of_disk_are_those_counted(stores):
    dataset, features, store = stores(dim=100)
    with DiskLoader(store, labels=dataset.labels) as loader:
        epoch_of(loader, features, dataset)
        counts = loader.statistics()
    cold = counts.rows["shared"] + counts.rows["private"]
    assert counts.cold_bytes == cold * store.row_bytes


@pytest.mark.parametrize(("device_rows", "host_rows"), [(0, 0), (0, 500), (500, 0), (30, 470)])
@pytest.mark.parametrize("policy", ["static", "belady"])
def test_no_cache_and_a_cache_of_everything(stores, policy, device_rows, host_rows):
    dataset, features, store = stores(
        dim=3, policy=policy, device_rows=device_rows, host_rows=host_rows
    )
    with DiskLoader(store, labels=dataset.labels) as loader:
        for _ in range(2):
            epoch_of(loader, features, dataset)
        counts = loader.statistics()
    if device_rows + host_rows == 0:
        assert counts.hit_rates["device"] == counts.hit_rates["host"] == 0
    elif policy == "static":
        assert counts.bytes_read == counts.requests == 0


def test_predicted_bytes_and_requests_are_the_measured_ones(stores):
    for policy in ("static", "belady"):
        dataset, features, store = stores(dim=100, policy=policy)
        with DiskLoader(store, labels=dataset.labels) as loader:
            epoch_of(loader, features, dataset)
            first = loader.statistics()
            epoch_of(loader, features, dataset)
            second = loader.statistics() - first
        for counts in (first, second):
            assert counts.bytes_read == store.plan.predicted.read_bytes_per_epoch
            assert counts.requests == store.plan.predicted.requests_per_epoch
            assert 0 < counts.record_bytes <= store.records.nbytes
        predicted = store.plan.predicted
        assert first.amplification == pytest.approx(predicted.amplification)
        assert second.batches == store.num_batches


def test_edges_and_hops_are_those_of_the_sample(stores):
    dataset, _, store = stores(dim=4)
    sampler = NeighborSampler(dataset.topology(), (4, 3), seed=1)
    with (
        DiskLoader(store, shuffle=False) as loader,
        DiskLoader(store, shuffle=False, form="blocks") as layered,
    ):
        for batch, other in zip(loader, layered, strict=True):
            ids = batch.n_id.numpy()
            sample = sampler.sample(ids[: batch.batch_size], epoch=0, batch=batch.number)
            assert sorted(sample.node_ids) == sorted(ids)
            edges = sample.node_ids[sample.edge_index()]
            assert np.array_equal(ids[batch.edge_index.numpy()], edges)
            assert batch.num_sampled_nodes == tuple(sample.nodes_per_hop)
            h, g = batch.x.double(), other.x.double()
            for block in other.blocks:
                h = h + torch.zeros_like(h).index_add_(
                    0, batch.edge_index[1], h[batch.edge_index[0]]
                )
                g = block.targets(g).index_add(0, block.edge_index[1], g[block.edge_index[0]])
            assert torch.equal(g, h[: batch.batch_size])


def test_k_sampled_epochs_take_turns(stores):
    for policy in ("static", "belady"):
        dataset, features, store = stores(dim=3, policy=policy, epochs=3)
        per_epoch = store.num_batches // 3
        with DiskLoader(store, labels=dataset.labels) as loader:
            for epoch in (0, 1, 2, 3, 4):
                numbers = epoch_of(loader, features, dataset)
                first = epoch % 3 * per_epoch
                assert sorted(numbers) == list(range(first, first + per_epoch))
            loader.set_epoch(1)  # a schedule is replayed from the records
            assert min(epoch_of(loader, features, dataset)) == per_epoch
            loader.set_epoch(5)
            assert min(epoch_of(loader, features, dataset)) == 2 * per_epoch


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_resuming_goes_on_with_the_very_next_batch(stores, policy):
    dataset, features, store = stores(dim=5, policy=policy, epochs=2)
    make = lambda: DiskLoader(store, labels=dataset.labels, seed=9)  # noqa: E731
    with make() as loader:
        whole = [[b.number for b in loader] for _ in range(3)]
    for epoch, stop in [(0, 0), (0, 1), (1, 3), (2, len(whole[2]) - 1), (1, len(whole[1]))]:
        with make() as loader:
            loader.set_epoch(epoch)
            iterator = iter(loader)
            seen = [next(iterator).number for _ in range(stop)]
            state = loader.state_dict()
        assert seen == whole[epoch][:stop]
        with make() as loader:
            loader.load_state_dict(state)
            loader.set_epoch(epoch)  # as training loops do; it keeps the loaded position
            rest = epoch_of(loader, features, dataset)
            assert rest == whole[epoch][stop:]
            if epoch < 2:
                assert epoch_of(loader, features, dataset) == whole[epoch + 1]


def test_a_state_of_another_run_is_refused(stores):
    _, _, store = stores(dim=5)
    _, _, other = stores(dim=3)
    with DiskLoader(store, seed=1) as loader:
        state = loader.state_dict()
    with DiskLoader(store, seed=2) as loader:
        with pytest.raises(CheckpointError, match="seed"):
            loader.load_state_dict(state)
        with pytest.raises(CheckpointError, match="version"):
            loader.load_state_dict(state | {"version": 0})
    with DiskLoader(other, seed=1) as loader, pytest.raises(CheckpointError, match="store"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("remainder", ["drop", "repeat"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_the_epoch(stores, world_size, remainder):
    dataset, features, store = stores(dim=3)
    for epoch in range(2):
        shares = []
        for rank in range(world_size):
            with DiskLoader(
                store,
                labels=dataset.labels,
                rank=rank,
                world_size=world_size,
                remainder=remainder,
                seed=2,
            ) as loader:
                loader.set_epoch(epoch)
                shares.append(epoch_of(loader, features, dataset))
                assert len(shares[-1]) == len(shares[0])
        numbers = [n for share in shares for n in share]
        if remainder == "drop":
            assert len(set(numbers)) == len(numbers)
            assert len(numbers) == store.num_batches // world_size * world_size
        else:
            assert set(numbers) == set(range(store.num_batches))
            assert len(numbers) < store.num_batches + world_size


def test_batches_may_be_kept(stores):
    """A buffer is not used again while a tensor, a view or an array of it is alive."""
    dataset, features, store = stores(dim=100)
    with DiskLoader(store, labels=dataset.labels, prefetch=1) as loader:
        kept = [(batch.n_id, batch.x[1:, :2], batch.x.numpy()[0]) for batch in loader]
        batches = list(loader)
    for ids, view, row in kept:
        assert np.array_equal(view.numpy(), features[ids.numpy()][1:, :2])
        assert np.array_equal(row, features[ids[0]])
    for batch in batches:
        check(batch, features, dataset)


def test_a_budget_bounds_the_buffers(stores):
    _, _, store = stores(dim=128)
    one = store.max_nodes * store.row_bytes
    for count in (2, 3):
        with DiskLoader(store, memory_bytes=count * one + one // 2) as loader:
            for _ in loader:
                pass
            assert loader.statistics().buffer_bytes == count * one
    with pytest.raises(InfeasibleError, match="memory_bytes"):
        DiskLoader(store, memory_bytes=one)
    with pytest.raises(InfeasibleError, match="prefetch"):
        DiskLoader(store, memory_bytes=3 * one, prefetch=5)


@pytest.mark.slow
def test_what_a_plan_does_not_allow_is_refused(stores):
    _, _, store = stores(dim=3, policy="belady")
    with pytest.raises(ConfigurationError, match="planned order"):
        DiskLoader(store, shuffle=True)
    with pytest.raises(ConfigurationError, match="ranks"):
        DiskLoader(store, world_size=2)
    for wrong in (
        {"prefetch": 0},
        {"rank": 1},
        {"timeout_s": 0},
        {"seed": -1},
        {"shuffle": "some"},
        {"remainder": "pad"},
        {"form": "csr"},
    ):
        with pytest.raises(ConfigurationError):
            DiskLoader(store, **wrong)


def test_a_closed_loader_and_an_old_iterator_say_so(stores):
    _, _, store = stores(dim=3)
    loader = DiskLoader(store)
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(ConfigurationError, match="newer"):
        next(old)
    next(new)
    with pytest.raises(ConfigurationError, match="negative"):
        loader.set_epoch(-1)
    loader.close()
    loader.close()
    with pytest.raises(ConfigurationError, match="closed"):
        next(new)
    with pytest.raises(ConfigurationError, match="closed"):
        iter(loader)


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_each_row_is_served_exactly_once(stores, policy):
    _, features, store = stores(dim=4, policy=policy)
    levels = FeatureStore(store)
    levels.start(0)
    for number in range(store.num_batches):
        record = store.record(number)
        places = np.concatenate(
            [record.device_destinations, record.host_destinations, record.cold_destinations]
        )
        assert sorted(places) == list(range(len(record.node_ids)))
        out = np.full((len(places), 4), np.nan, np.float32)
        levels.read_cold(record, out)
        levels.gather_cached(record, out)
        assert np.array_equal(out, features[record.node_ids])
    if policy == "belady":
        with pytest.raises(ConfigurationError, match="ready for batch"):
            levels.gather_cached(store.record(0), out)
    levels.close()
