"""Packing: what the store delivers is what an in-memory gather delivers."""

import numpy as np
import pytest

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.storage import RowReader

STRATEGIES = ["resident", "passes", "spill"]


def deliver(store, reader, record, host):
    """Rows of one batch through the levels, as training puts them together."""
    x = np.zeros((len(record.node_ids), store.dim), store.dtype)
    x.view(np.uint8)[:] = 0xEE
    device = store.rows.read("device")
    x[record.device_destinations] = device[record.device_slots]
    x[record.host_destinations] = host[record.host_slots]
    reader.read_runs(record.run_starts, record.run_counts, record.run_destinations, x)
    host[record.admitted_slots] = x[record.admitted_rows]
    return x


def check_store(world, store):
    host = np.zeros((store.plan.num_host_slots, store.dim), store.dtype)
    initial = store.rows.read("host")
    host[: len(initial)] = initial
    with RowReader(store.rows, "rows") as reader:
        for number in range(store.num_batches):
            record = store.record(number)
            x = deliver(store, reader, record, host)
            assert x.tobytes() == world.values[record.node_ids].tobytes(), number
            sampled = world.samples.batch(number)
            assert np.array_equal(record.node_ids[: record.batch_size], sampled.seeds)
            ours, theirs = record.edge_index(), sampled.edge_index()
            assert np.array_equal(record.node_ids[ours], sampled.node_ids[theirs])


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_of_every_batch_arrives(make_world, tmp_path, strategy, policy):
    world = make_world()
    plan = world.plan(policy=policy, segment_batches=3)
    with pack(
        world.features,
        world.samples,
        plan,
        tmp_path / "store",
        memory_bytes=2 << 20,
        strategy=strategy,
    ) as store:
        assert store.num_batches == 8
        check_store(world, store)
    with PackedStore.open(tmp_path / "store", features=world.features) as store:
        check_store(world, store)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(1, np.uint8), (3, np.float32), (100, np.float32), (768, np.float16), (1025, np.float32)],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_any_size_arrive(make_world, tmp_path, strategy, dim, dtype):
    world = make_world(dim=dim, dtype=dtype, nodes=300)
    plan = world.plan(segment_batches=4, device=7, host=30)
    settings = {"memory_bytes": 3 << 20, "strategy": strategy}
    with pack(world.features, world.samples, plan, tmp_path / "store", **settings) as store:
        assert (store.dim, store.dtype) == (dim, dtype)
        check_store(world, store)
        store.rows.verify()
        store.records.verify()


@pytest.mark.parametrize("strategy", ["spill", "passes"])
def test_a_row_may_be_larger_than_a_page_and_a_block(make_world, tmp_path, strategy):
    world = make_world(dim=25_001, dtype=np.uint16, nodes=90, seeds=30, fanouts=[2])
    plan = world.plan(segment_batches=2, device=2, host=5)
    settings = {"memory_bytes": 1_300_000, "strategy": strategy}
    with pack(world.features, world.samples, plan, tmp_path / "store", **settings) as store:
        check_store(world, store)


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize(("device", "host"), [(0, 0), (0, 400), (400, 0), (3, 1)])
def test_no_cache_and_caches_of_everything(make_world, tmp_path, policy, device, host):
    world = make_world(epochs=2)
    plan = world.plan(policy=policy, device=device, host=host, segment_batches=5)
    settings = {"memory_bytes": 1 << 20, "strategy": "passes"}
    with pack(world.features, world.samples, plan, tmp_path / "store", **settings) as store:
        check_store(world, store)
        assert store.num_epochs == 2
        assert np.array_equal(store.train_ids, world.samples.train_ids)
        assert [*store.epoch_batches(0), *store.epoch_batches(3)] == list(range(store.num_batches))
        sizes = [len(store.record(number).node_ids) for number in range(store.num_batches)]
        assert store.max_nodes == max(sizes)


@pytest.mark.parametrize(
    "shape",
    [
        {"nodes": 1, "seeds": 1, "fanouts": [3]},
        {"nodes": 40, "seeds": 40, "fanouts": [1], "batch_size": 7},
        {"nodes": 50, "seeds": 9, "fanouts": [-1, -1], "batch_size": 100},
        {"nodes": 30, "seeds": 30, "fanouts": [2], "batch_size": 1},
    ],
)
def test_graphs_and_batches_of_odd_shapes(make_world, tmp_path, shape):
    world = make_world(**shape)
    plan = world.plan(device=1, host=2)
    with pack(
        world.features, world.samples, plan, tmp_path / "store", memory_bytes=2 << 20
    ) as store:
        check_store(world, store)
        with pytest.raises(ConfigurationError, match="there is no batch"):
            store.record(store.num_batches)


def test_the_least_disk_that_a_plan_names_is_enough_to_pack(make_world, tmp_path):
    world = make_world()
    with pytest.raises(InfeasibleError) as caught:
        world.plan(disk_bytes=0)
    least = int(caught.value.hint.split("disk_bytes=")[1].split()[0])
    plan = world.plan(disk_bytes=least)
    with pack(
        world.features, world.samples, plan, tmp_path / "store", memory_bytes=2 << 20
    ) as store:
        check_store(world, store)
        assert store.nbytes <= least


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_what_is_read_is_what_the_plan_said(make_world, tmp_path, policy):
    world = make_world(nodes=2000, seeds=400, batch_size=64, dim=50)
    plan = world.plan(policy=policy, segment_batches=4, max_gap_bytes=0)
    with (
        pack(
            world.features, world.samples, plan, tmp_path / "store", memory_bytes=2 << 20
        ) as store,
        RowReader(store.rows, "rows", max_gap_bytes=plan.max_gap_bytes) as reader,
    ):
        private = 0
        for number in range(store.num_batches):
            record = store.record(number)
            x = np.zeros((len(record.node_ids), store.dim), store.dtype)
            runs = (record.run_starts, record.run_counts, record.run_destinations)
            cost = reader.read_runs(*runs, x)
            assert cost.bytes_read == plan.batch_bytes[number]
            assert cost.requests == plan.batch_requests[number]
            cold = plan.cold_ids(number, world.samples.node_ids(number))
            assert np.array_equal(np.sort(record.node_ids[record.cold_destinations]), cold)
            private += record.num_private
        assert store.rows.sections["rows"].shape[0] == plan.predicted.packed_rows
        assert 0 < private < plan.predicted.packed_rows
