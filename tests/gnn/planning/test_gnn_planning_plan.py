"""Whole plans: budgets kept, predictions that hold, errors that help, plans that survive a file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError, InfeasibleError
from fivefold.gnn.planning import (
    Budgets,
    Plan,
    make_plan,
)
from fivefold.gnn.planning._caches import hottest_rows
from fivefold.gnn.storage import ContainerWriter
from helpers.gnn_planning import Batches, features_of

ROW_BYTES = 512
PLENTY = 10**9
NODES = 1500


def plan_of(samples, disk, *, cache_rows=0, device_rows=0, row_bytes=ROW_BYTES, **options):
    budgets = Budgets(
        host_bytes=cache_rows * row_bytes,
        device_bytes=device_rows * row_bytes,
        disk_bytes=options.pop("disk_bytes", PLENTY),
    )
    options = {"buffer_batches": 0} | options
    return make_plan(samples, features_of(samples.num_nodes, row_bytes), budgets, disk, **options)


@pytest.fixture
def samples(make_batches):
    return make_batches(9, num_nodes=1500, num_batches=17, share=0.6, skew=3.0)


def test_planning_says_how_far_it_is(samples, disk):
    told = {}
    plan = plan_of(
        samples, disk, cache_rows=200,
        progress=lambda stage, done, total: told.setdefault(stage, []).append((done, total)),
    )  # fmt: skip
    assert told["cold rows"] == [(batch, 17) for batch in range(1, 18)]
    passes = sum(done == total == 17 for done, total in told["segments"])
    # One pass estimates many sizes, and each that was counted took one.
    assert passes == 1 + sum(choice.exact for choice in plan.choices)


def layout_of(plan, segment, samples):
    batches = range(*plan.segments[segment])
    return plan.lay_out([plan.cold_ids(b, samples.node_ids(b)) for b in batches])


@pytest.fixture
def check_reads(extents_of):
    """Recompute every batch's pages from the layout; compare with the plan's numbers."""

    def check(plan, samples):
        rows_before = 0
        for number, (first, stop) in enumerate(plan.segments):
            laid_out = layout_of(plan, number, samples)
            assert plan.segment_rows[number] == rows_before
            for batch in range(first, stop):
                cold = plan.cold_ids(batch, samples.node_ids(batch))
                assert np.array_equal(np.sort(laid_out.node_ids(batch - first)), cold)
                starts, counts = laid_out.runs(batch - first)
                begin, end = extents_of(
                    starts + rows_before,
                    counts,
                    row_bytes=plan.row_bytes,
                    max_gap_bytes=plan.max_gap_bytes,
                )
                assert plan.batch_bytes[batch] == 4096 * (end - begin).sum()
                assert plan.batch_requests[batch] == sum(-(-(end - begin) // 256))
            rows_before += len(laid_out.order)
        assert plan.segment_rows[-1] == rows_before == plan.predicted.packed_rows
        assert plan.predicted.read_bytes_per_epoch == plan.batch_bytes.sum()

    return check


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize("row_bytes", [512, 1100])
def test_predicted_reads_are_those_of_the_layouts(check_reads, samples, disk, policy, row_bytes):
    plan = plan_of(
        samples, disk, cache_rows=100, device_rows=40, policy=policy,
        row_bytes=row_bytes, segment_batches=5,
    )  # fmt: skip
    check_reads(plan, samples)


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_a_searched_plan_keeps_every_budget(check_reads, samples, disk, policy):
    largest = max(len(samples.node_ids(i)) for i in range(samples.num_batches))
    buffers = 3 * largest * ROW_BYTES
    budgets = Budgets(
        host_bytes=buffers + 60_000, device_bytes=buffers + 30_000, disk_bytes=1_600_000
    )
    plan = make_plan(
        samples, features_of(samples.num_nodes, ROW_BYTES), budgets, disk, policy=policy
    )
    predicted = plan.predicted
    assert predicted.buffer_bytes == buffers
    for slots, budget in (
        (plan.num_host_slots, budgets.host_bytes),
        (plan.num_device_slots, budgets.device_bytes),
    ):
        assert 0 < slots * ROW_BYTES <= budget - predicted.buffer_bytes
    assert predicted.disk_bytes <= budgets.disk_bytes
    check_reads(plan, samples)


def test_hit_rates_and_cold_rows_are_counted(samples, disk):
    plan = plan_of(samples, disk, cache_rows=100, device_rows=40)
    accesses = int(samples.counts.sum())
    device, host = (int(samples.counts[rows].sum()) for rows in (plan.device_rows, plan.host_rows))
    rates = plan.predicted.hit_rates
    assert (rates["device"], rates["host"]) == (device / accesses, host / accesses)
    assert plan.predicted.cold_rows == accesses - device - host
    assert plan.predicted.accesses == accesses
    used = plan.predicted.cold_rows * ROW_BYTES
    assert plan.predicted.amplification == plan.predicted.read_bytes_per_epoch / used
    assert plan.predicted.blow_up == plan.predicted.packed_rows / samples.num_nodes
    assert set(plan.device_rows.tolist()).isdisjoint(plan.host_rows.tolist())


def test_belady_reads_less_than_static(samples, disk):
    static = plan_of(samples, disk, cache_rows=150, segment_batches=4)
    optimal = plan_of(samples, disk, cache_rows=150, segment_batches=4, policy="belady")
    assert optimal.predicted.cold_rows < static.predicted.cold_rows
    assert optimal.cache_schedule is not None
    assert optimal.num_host_slots == 150


@given(st.lists(st.integers(0, 6), max_size=25), st.integers(0, 30))
def test_the_hottest_rows_go_by_count_then_by_id(counts, num_rows):
    used = [node for node, count in enumerate(counts) if count]
    expected = sorted(sorted(used, key=lambda node: (-counts[node], node))[:num_rows])
    rows = hottest_rows(np.array(counts, np.uint32), num_rows)
    assert rows.tolist() == expected


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize(
    "batches",
    [
        [],
        [[3, 1]],
        [[0], [1, 2, 3, 4], []],
        [[], []],
        [[5, 4, 3, 2, 1, 0]] * 4,
    ],
)
@pytest.mark.parametrize("cache_rows", [0, 1, 100])
def test_tiny_cases(check_reads, disk, policy, batches, cache_rows):
    samples = Batches([np.array(ids, np.int64) for ids in batches], num_nodes=6)
    plan = plan_of(samples, disk, cache_rows=cache_rows, policy=policy)
    check_reads(plan, samples)
    if cache_rows == 100 and policy == "static":
        assert plan.predicted.cold_rows == plan.predicted.packed_rows == 0
        assert plan.predicted.amplification == 1.0


def test_a_host_budget_below_one_row_caches_nothing(samples, disk):
    budgets = Budgets(host_bytes=ROW_BYTES - 1, disk_bytes=PLENTY)
    plan = make_plan(
        samples, features_of(samples.num_nodes, ROW_BYTES), budgets, disk, buffer_batches=0
    )
    assert plan.num_host_slots == 0
    assert plan.predicted.hit_rates == {"device": 0.0, "host": 0.0, "disk": 1.0}


def test_short_memory_and_disk_name_what_would_do(samples, disk):
    with pytest.raises(InfeasibleError, match="host memory") as caught:
        plan_of(samples, disk, cache_rows=10, buffer_batches=2)
    least = int(caught.value.hint.split("host_bytes=")[1].split()[0])
    budgets = Budgets(host_bytes=least, disk_bytes=PLENTY)
    make_plan(samples, features_of(NODES, ROW_BYTES), budgets, disk, buffer_batches=2)
    with pytest.raises(InfeasibleError, match="disk budget") as caught:
        plan_of(samples, disk, disk_bytes=10_000)
    least = int(caught.value.hint.split("disk_bytes=")[1].split()[0])
    plan_of(samples, disk, disk_bytes=least)
    with pytest.raises(InfeasibleError):
        plan_of(samples, disk, disk_bytes=least - 1)


def test_a_smaller_disk_leads_to_larger_segments(samples, disk):
    sizes = [
        plan_of(samples, disk, cache_rows=150, disk_bytes=disk_bytes).segment_batches
        for disk_bytes in (PLENTY, 960_000, 560_000)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_plans_are_deterministic_and_told_apart(samples, disk):
    first, second = (plan_of(samples, disk, cache_rows=50) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    other = plan_of(samples, disk, cache_rows=51)
    assert first.fingerprint != other.fingerprint


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_a_plan_survives_its_file(samples, disk, policy, tmp_path):
    plan = plan_of(samples, disk, cache_rows=60, device_rows=20, policy=policy)
    plan.write(tmp_path / "plan.fvf")
    again = Plan.open(tmp_path / "plan.fvf")
    assert again.explain() == plan.explain()
    assert again.fingerprint == plan.fingerprint
    assert again.predicted == plan.predicted
    assert again.segments == plan.segments
    for batch in range(samples.num_batches):
        ids = samples.node_ids(batch)
        assert np.array_equal(again.cold_ids(batch, ids), plan.cold_ids(batch, ids))


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"version": 3}', '{"version": 2}'])
def test_foreign_plans_are_refused(tmp_path, text):
    path = tmp_path / "plan.fvf"
    sections = {"host_rows": (np.int64, (0,))}
    with ContainerWriter(path, kind="plan", sections=sections, attributes={"plan": text}) as made:
        made.commit().close()
    with pytest.raises(DataError, match="version 2" if text == '{"version": 2}' else "no plan"):
        Plan.open(path)


def test_wrong_arguments_are_refused(samples, disk):
    for options in (
        {"policy": "random"},
        {"segment_batches": 0},
        {"max_gap_bytes": -1},
        {"buffer_batches": -1},
    ):
        with pytest.raises(ConfigurationError):
            plan_of(samples, disk, **options)
    budgets = Budgets(host_bytes=0, disk_bytes=0)
    with pytest.raises(DataError, match="1501"):
        make_plan(samples, features_of(1501, ROW_BYTES), budgets, disk)
    for value in (-1, 0.5, True, "2 GB"):
        with pytest.raises(ConfigurationError, match="host_bytes"):
            Budgets(host_bytes=value, disk_bytes=0)


def test_the_explanation_names_what_matters(samples, disk):
    plan = plan_of(samples, disk, cache_rows=100, device_rows=40, disk_bytes=1_500_000)
    text = plan.explain()
    assert "static policy" in text
    assert f"> {plan.segment_batches} " in text
    assert f"{plan.predicted.blow_up:.2f} x the features" in text
    assert "paid for itself" in text
    assert "1.5 MB" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_epochs_of_samples_are_averaged(samples, disk):
    class TwoEpochs(Batches):
        num_epochs = 2

    batches = [samples.node_ids(i) for i in range(samples.num_batches)]
    one = plan_of(samples, disk, cache_rows=50, segment_batches=4).predicted
    two = plan_of(
        TwoEpochs(batches, num_nodes=1500), disk, cache_rows=50, segment_batches=4
    ).predicted
    assert two.read_bytes_per_epoch == round(one.read_bytes_per_epoch / 2)
    assert two.read_seconds == one.read_seconds / 2
    assert two.packed_rows == one.packed_rows


def test_ids_beyond_32_bits_are_planned_without_arrays_of_all_nodes(check_reads, disk):
    num_nodes = 2**40
    far = num_nodes - 1
    samples = Batches([np.array([far, 7]), np.array([2**33, far])], num_nodes=num_nodes)
    plan = plan_of(samples, disk, disk_bytes=10**15, segment_batches=2)
    check_reads(plan, samples)
    assert layout_of(plan, 0, samples).order.tolist() == [2**33, far, 7]


def test_a_device_budget_that_batches_use_up_is_told(samples, disk, caplog):
    largest = max(len(samples.node_ids(i)) for i in range(samples.num_batches))
    rows = 2 * largest
    plan = plan_of(samples, disk, cache_rows=rows, device_rows=rows, buffer_batches=2)
    assert plan.num_device_slots == 0
    assert "no rows are cached on the device" in caplog.text


def test_one_batch_in_flight_is_refused(samples, disk):
    """A loader needs two buffers: such a plan would be refused after it was packed."""
    with pytest.raises(ConfigurationError, match=r"buffer_batches is 1.*use 2 or more"):
        plan_of(samples, disk, buffer_batches=1)


def test_packing_that_never_pays_is_said_so(samples):
    class Memory:
        sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9

        def seconds(self, requests, size_bytes):
            return 0.0 * (requests + size_bytes)

    plan = plan_of(samples, Memory(), segment_batches=2)
    assert plan.predicted.break_even_epochs == float("inf")
    assert "does not pay" in plan.explain()


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_batches_with_an_id_twice_are_refused(disk, policy):
    samples = Batches([np.array([1, 2]), np.array([0, 3, 0])], num_nodes=4)
    with pytest.raises(DataError, match="batch 1 has"):
        plan_of(samples, disk, policy=policy)
