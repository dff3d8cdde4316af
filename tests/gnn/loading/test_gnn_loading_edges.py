"""Odd shapes, the path to a device, several processes, and pure functions of the order."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.gnn.loading import DiskLoader, OnlineLoader
from fivefold.gnn.loading._base import LoaderSettings, batch_order
from fivefold.gnn.loading._disk_loader import DeviceTransfer
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.loading.batch import SeedTable

SHAPES = {
    "one node": {"nodes": 1, "edges": 0, "train": 1},
    "no edges": {"nodes": 40, "edges": 0, "train": 9},
    "one batch": {"nodes": 60, "edges": 200, "train": 4},
    "rows of more than a block": {"nodes": 12, "edges": 40, "train": 3, "dim": 270_001},
}


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize("shape", SHAPES, ids=list(SHAPES))
def test_odd_shapes(tmp_path, dataset_of, store_of, shape, policy):
    dataset = dataset_of(tmp_path / "data", **SHAPES[shape])
    features = dataset.features.read("x")
    store = store_of(tmp_path, dataset, policy=policy, device_rows=1, host_rows=2)
    with DiskLoader(store, labels=dataset.labels) as loader:
        for form in range(2):
            batches = list(loader)
            assert len(batches) == store.num_batches
            for batch in batches:
                assert np.array_equal(batch.x.numpy(), features[batch.n_id.numpy()]), form
        assert loader.epoch == 2
    store.close()
    dataset.close()


@pytest.mark.parametrize("fanouts", [(3,), (2, 2, 2, 2), (-1, -1)])
def test_any_number_of_hops(tmp_path, dataset_of, store_of, fanouts):
    with dataset_of(tmp_path / "data", nodes=80, edges=300, train=12) as dataset:
        features = dataset.features.read("x")
        with OnlineLoader(
            dataset, dataset.train, fanouts=fanouts, batch_size=5, form="blocks"
        ) as online:
            assert {len(batch.blocks) for batch in online} == {len(fanouts)}
        store = store_of(tmp_path, dataset, fanouts=fanouts)
        for form in ("edge_index", "blocks"):
            with DiskLoader(store, form=form) as loader:
                for batch in loader:
                    assert np.array_equal(batch.x.numpy(), features[batch.n_id.numpy()])
                    assert len(batch.num_sampled_edges) == len(fanouts)
        store.close()


def test_no_ids_make_no_batches(stores):
    dataset, _, _ = stores(dim=4)
    none = np.empty(0, np.int64)
    with OnlineLoader(dataset, none, fanouts=[2], batch_size=5) as loader:
        assert len(loader) == len(list(loader)) == 0


def test_labels_must_fit(stores):
    _, _, store = stores(dim=4)
    with pytest.raises(ConfigurationError, match="3 labels and 500 nodes"):
        DiskLoader(store, labels=np.zeros(3))
    with DiskLoader(store, labels=torch.arange(500)) as loader:
        batch = next(iter(loader))
        assert torch.equal(batch.y, batch.n_id[: batch.batch_size])


def test_seed_table_finds_places_and_labels():
    ids = np.array([40, 7, 19])
    table = SeedTable(ids, np.arange(50) * 2)
    assert table.places(np.array([19, 40])).tolist() == [2, 0]
    assert table.labels(np.array([7])).tolist() == [14]


def test_the_copy_to_a_device_takes_cached_rows_from_there(stores):
    """The device's path with the CPU as device: rows of its cache are never in host memory."""
    _, features, store = stores(dim=4, device_rows=120)
    levels = FeatureStore(store)
    levels.start(0)
    before = levels.filling.bytes_used
    levels._fill_device(torch.device("cpu"))
    cost = levels.filling.bytes_used - before
    assert cost == levels._on_device.nbytes == levels._device_rows.nbytes
    levels._on_device[:] = np.nan
    transfer = DeviceTransfer({None: levels}, torch.device("cpu"))
    with DiskLoader(store, shuffle=False) as loader:
        for batch in loader:
            record = levels.record(batch.number)
            assert len(record.device_slots)
            staged = np.full(batch.x.shape, np.nan, np.float32)
            levels.read_cold(record, staged)
            levels.gather_cached(record, staged)
            assert np.isnan(staged).any()
            object.__setattr__(batch, "x", torch.from_numpy(staged))
            there = transfer.handed_over(transfer.copy({None: record}, batch))
            assert np.array_equal(there.x.numpy(), features[batch.n_id.numpy()])
    levels.close()


RANK = """
import json, sys
from fivefold.gnn.loading import DiskLoader
from fivefold.gnn.packing import PackedStore
with PackedStore.open(sys.argv[1]) as store:
    with DiskLoader(store, rank=int(sys.argv[2]), world_size=2, seed=3) as loader:
        print(json.dumps([(b.number, b.n_id.tolist(), b.x.sum().item()) for b in loader]))
"""


@pytest.mark.nightly
@pytest.mark.distributed
def test_processes_share_a_store(stores):
    _, features, store = stores(dim=4)
    commands = [[sys.executable, "-c", RANK, str(store.folder), str(rank)] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    seen = [item for rank in ranks for item in json.loads(rank.communicate(timeout=90)[0])]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(seen) == len({number for number, _, _ in seen}) == store.num_batches // 2 * 2
    for _, ids, total in seen:
        assert total == pytest.approx(float(features[ids].sum(dtype=np.float64)), rel=1e-3, abs=64)


def test_loaders_in_several_threads_do_not_disturb_one_another(stores):
    dataset, features, store = stores(dim=100)
    wrong = []

    def work(seed):
        with DiskLoader(store, labels=dataset.labels, seed=seed) as loader:
            for _ in range(3):
                wrong.extend(
                    batch.number
                    for batch in loader
                    if not np.array_equal(batch.x.numpy(), features[batch.n_id.numpy()])
                )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@given(st.integers(0, 200), st.integers(0, 5), st.integers(0, 5))
def test_orders_are_permutations(count, seed, epoch):
    order = batch_order(count, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, batch_order(count, seed=seed, epoch=epoch))


@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from(["drop", "repeat"]))
def test_shares_are_equal_and_cover_the_order(count, world_size, remainder):
    order = batch_order(count, seed=0, epoch=0)
    ranks = [
        LoaderSettings(
            device=torch.device("cpu"),
            shuffle=True,
            seed=0,
            prefetch=None,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            timeout_s=1.0,
        )
        for rank in range(world_size)
    ]
    if count < world_size:
        with pytest.raises(ConfigurationError, match="ranks"):
            ranks[0].share(order)
        return
    shares = [rank.share(order).tolist() for rank in ranks]
    assert len({len(share) for share in shares}) == 1
    flat = [n for share in shares for n in share]
    if remainder == "drop":
        assert len(set(flat)) == len(flat) == count // world_size * world_size
    else:
        assert set(flat) == set(order.tolist())
        assert len(flat) < count + world_size


def test_different_epochs_and_seeds_have_different_orders():
    orders = {
        tuple(batch_order(50, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25
