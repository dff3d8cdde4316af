"""DiskGNN's order of packed rows: the published key, the chunks, and the reads of a plan."""

import numpy as np
import pytest
from benchmarks.gnn.systems._minhash import by_minhash, minhash_layout, permutations
from hypothesis import given
from hypothesis import strategies as st

from fivefold.gnn.data import generate_graph
from fivefold.gnn.packing import pack
from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.sampling import NeighborSampler, sample_epochs
from fivefold.gnn.storage import RowReader
from helpers.gnn_planning import Disk


@st.composite
def segments(draw):
    num_nodes = draw(st.integers(1, 40))
    members = st.lists(st.integers(0, num_nodes - 1), unique=True).map(sorted)
    lists = draw(st.lists(members, min_size=0, max_size=9))
    return [np.array(ids, np.int64) for ids in lists]


@given(segments())
def test_shared_rows_go_by_the_minima_and_private_ones_by_batch(batches):
    users = {}
    for number, ids in enumerate(batches):
        for node in ids.tolist():
            users.setdefault(node, []).append(number)
    hashes = permutations(len(batches)).tolist()

    def key(node):
        return [min(function[i] for i in users[node]) for function in hashes], node

    shared = sorted((node for node in users if len(users[node]) > 1), key=key)
    private = [v for i, _ in enumerate(batches) for v in sorted(users) if users[v] == [i]]
    laid_out = minhash_layout(batches)
    assert laid_out.order.tolist() == shared + private
    for number, ids in enumerate(batches):
        assert (np.diff(laid_out.rows[number]) > 0).all()
        assert np.array_equal(np.sort(laid_out.node_ids(number)), ids)


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_a_store_by_minhash_is_read_as_its_plan_says(tmp_path, policy):
    with generate_graph(tmp_path / "data", nodes=2000, dim=130, seed=1, threads=1) as data:
        sampler = NeighborSampler(data.topology(), [4, 3], seed=0, threads=1)
        samples = sample_epochs(
            sampler, np.arange(400), tmp_path / "samples.fvf", batch_size=24, seed=4
        )
        budgets = Budgets(host_bytes=90 * data.row_bytes, disk_bytes=10**9)
        gray = make_plan(
            samples, data.features, budgets, Disk(), policy=policy, segment_batches=5,
            buffer_batches=0, max_gap_bytes=0,
        )  # fmt: skip
        plan = by_minhash(gray, samples)
        assert plan.predicted.read_bytes_per_epoch > gray.predicted.read_bytes_per_epoch
        values = data.features.read("x")
        with (
            pack(data.features, samples, plan, tmp_path / "store", memory_bytes=2 << 20) as store,
            RowReader(store.rows, "rows", max_gap_bytes=0) as reader,
        ):
            for first, stop in plan.segments:
                records = [store.record(number) for number in range(first, stop)]
                rows, uses = np.unique(
                    np.concatenate([record.cold_rows for record in records]), return_counts=True
                )
                shared = rows[uses > 1]  # the short last segment may have none
                assert len(shared) or stop == store.num_batches
                assert shared.max(initial=-1) < rows[uses == 1].min()
                for number, record in enumerate(records, start=first):
                    x = np.zeros((len(record.node_ids), store.dim), store.dtype)
                    cost = reader.read_runs(
                        record.run_starts, record.run_counts, record.run_destinations, x
                    )
                    assert cost.bytes_read == plan.batch_bytes[number]
                    assert cost.requests == plan.batch_requests[number]
                    cold = record.cold_destinations
                    assert np.array_equal(x[cold], values[record.node_ids[cold]])
                    own = np.setdiff1d(record.cold_rows, shared)
                    assert own.max() - own.min() + 1 == len(own) == record.num_private
        samples.close()
