"""Packing: what the store delivers is what an in-memory gather delivers."""

import numpy as np
import pytest

from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.storage import RowReader

STRATEGIES = ["resident", "passes", "spill"]
LAYOUTS = ["gray", "folded", "minhash", "popularity", "packed"]


def deliver(store, reader, record, host):
    """Rows of one batch through the levels, as training puts them together."""
    x = np.zeros((len(record.node_ids), store.dim), store.dtype)
    x.view(np.uint8)[:] = 0xEE
    device = store.hot.read("device")
    x[record.device_destinations] = device[record.device_slots]
    x[record.host_destinations] = host[record.host_slots]
    reader.read_runs(record.run_starts, record.run_counts, record.run_destinations, x)
    host[record.admitted_slots] = x[record.admitted_rows]
    return x


def check_store(world, store):
    host = np.zeros((store.plan.num_host_slots, store.dim), store.dtype)
    initial = store.hot.read("host")
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
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_of_every_batch_arrives(make_world, tmp_path, strategy, layout, policy):
    world = make_world()
    plan = world.plan(layout=layout, policy=policy, segment_batches=3)
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
