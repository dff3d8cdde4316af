"""What was measured is made a model at once: no reader of a noisy profile fails later."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.collectives.pricing import Group, collective_time_s, fabric_from_topology
from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.planning.geometry import PackingTask
from fivefold.gnn.storage import DiskProfile
from fivefold.gnn.training import GraphSAGE, infer_layers
from fivefold.measured import NOISE, consistent_times_s
from fivefold.network.profiling import Profile
from fivefold.network.profiling.profile import Contention
from fivefold.network.topology import read_topology
from fivefold.optim._round_choice import MessageTimes
from fivefold.optim.advise import JobTimes, options_for
from fivefold.optim.auto_tau import AutoTau, TauController
from fivefold.strategy import ParallelPlan, evaluate_plan, load_cluster, load_model
from fivefold.strategy.calibrate import calibrated_device, calibrated_fabric
from fivefold.tasks.schedule import BucketCost, plan_send_order
from helpers.gnn_planning import Batches, features_of
from helpers.training_graphs import make_dataset

# Of a clock on a machine that does other things too: each time for itself, over ten decades.
seconds = st.floats(-9.0, 1.0).map(lambda power: 10.0**power)
sizes_in_order = st.lists(st.integers(1, 1 << 26), min_size=1, max_size=7, unique=True).map(sorted)
PAGE = 4096


@given(sizes_in_order, st.data(), st.sampled_from([0.0, NOISE]))
def test_times_never_fall_and_halves_never_take_less_than_the_whole(sizes, data, least_rise):
    times = data.draw(st.lists(seconds, min_size=len(sizes), max_size=len(sizes)))
    found = consistent_times_s(sizes, times, least_rise=least_rise)
    assert found[-1] == times[-1]
    for (size, time_s), (larger, longer_s) in pairwise(zip(sizes, found, strict=True)):
        most_rise = 1 - size / larger
        assert time_s <= longer_s * (1 - min(least_rise, most_rise)) * (1 + 1e-12)
        assert time_s / size >= longer_s / larger * (1 - 1e-12)
    assert consistent_times_s(sizes, found, least_rise=least_rise) == pytest.approx(found)


@given(sizes_in_order, st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_times_of_a_real_link_stay_as_they_are(sizes, fixed_s, s_per_byte):
    times = [fixed_s + s_per_byte * size for size in sizes]
    assert consistent_times_s(sizes, times) == pytest.approx(times, rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "times", "said"),
    [
        ([1, 2], [1.0, math.nan], "2 bytes took nan s"),
        ([1, 2], [0.0, 1.0], "1 bytes took 0 s"),
        ([1, 2], [1.0, math.inf], "2 bytes took inf s"),
        ([1, 2], [-1.0, 1.0], "1 bytes took -1 s"),
        ([2, 1], [1.0, 1.0], "sizes above 0 that ascend"),
        ([0, 1], [1.0, 1.0], "sizes above 0 that ascend"),
        ([1, 2], [1.0], "a time for each size"),
        ([], [], "a time for each size"),
    ],
)
def test_what_no_clock_measures_is_refused(sizes, times, said):
    with pytest.raises(DataError, match=said):
        consistent_times_s(sizes, times)


# -- the disk -----------------------------------------------------------------------------------


@st.composite
def disks(draw):
    """A disk whose every number was measured while something else was going on."""
    requests = draw(st.lists(st.sampled_from([1, 4, 16, 33, 64, 256]), unique=True, max_size=6))
    speeds = st.floats(3.0, 12.0).map(lambda power: 10.0**power)
    return DiskProfile(
        sequential_read_bytes_per_s=draw(speeds),
        sequential_write_bytes_per_s=draw(speeds),
        random_read_iops=draw(speeds) / PAGE,
        request_latency_s=draw(seconds),
        bytes_per_s_by_request_bytes={PAGE * pages: draw(speeds) for pages in requests},
        backend="threads",
        direct=True,
    )


@given(disks(), st.floats(0, 1e8), st.floats(0, 1e8))
def test_a_request_costs_no_less_than_a_smaller_one_and_no_more_than_its_halves(disk, a, b):
    whole_s, a_s, b_s = (disk.request_seconds(size) for size in (a + b, a, b))
    assert max(a_s, b_s) <= whole_s * (1 + 1e-9)
    assert whole_s <= (a_s + b_s) * (1 + 1e-9)


BATCHES = Batches([np.arange(n, n + 40) % 90 for n in range(0, 120, 7)], num_nodes=90)


@settings(max_examples=10)
@given(disks(), st.sampled_from([64, 600, 5000]), st.integers(2_000_000, 1 << 40))
def test_a_noisy_disk_gives_a_plan_that_fits(disk, row_bytes, disk_bytes):
    budgets = Budgets(host_bytes=60_000, disk_bytes=disk_bytes)
    plan = make_plan(BATCHES, features_of(90, row_bytes), budgets, disk, buffer_batches=0)
    assert plan.predicted.read_seconds >= 0
    assert plan.predicted.packed_rows * row_bytes <= disk_bytes
    task = PackingTask(
        num_nodes=90,
        row_bytes=row_bytes,
        sections={"rows": 90},
        read_bytes_per_s=disk.sequential_read_bytes_per_s,
        write_bytes_per_s=disk.sequential_write_bytes_per_s,
    )
    assert task.choose(1 << 24).seconds > 0


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    with make_dataset(tmp_path_factory.mktemp("noisy"), nodes=60, edges=150) as dataset:
        yield dataset


@settings(max_examples=5)
@given(disks())
def test_a_noisy_disk_infers_the_same(graph, tmp_path_factory, disk):
    model, place = GraphSAGE(graph.dim, 4, 2, num_layers=1), tmp_path_factory.mktemp("out")
    result = infer_layers(model, graph, place, memory_bytes=400_000, profile=disk)
    assert result.layers[0].bytes_read > 0


def test_a_disk_that_seems_to_read_two_pages_slower_than_twice_one_has_no_gap(graph, tmp_path):
    speeds = {PAGE: 400e6, 16384: 100e6, 1 << 20: 1e9}  # 8 KiB seem to take 6 times of 4 KiB
    disk = DiskProfile(
        sequential_read_bytes_per_s=1e9, sequential_write_bytes_per_s=1e9, random_read_iops=1e5,
        request_latency_s=1e-4, bytes_per_s_by_request_bytes=speeds, backend="threads", direct=True,
    )  # fmt: skip
    model = GraphSAGE(graph.dim, 4, 2, num_layers=1)
    infer_layers(model, graph, tmp_path / "out", memory_bytes=400_000, profile=disk)
    assert disk.seconds(1, 2 * PAGE) <= disk.seconds(2, 2 * PAGE)


@pytest.mark.parametrize("speed", [1e-9, 1e200])
def test_a_disk_of_no_world_is_refused_by_name(speed):
    with pytest.raises(ConfigurationError, match=r"speed at 4096 bytes .* which no disk has"):
        DiskProfile(
            sequential_read_bytes_per_s=1e9, sequential_write_bytes_per_s=1e9,
            random_read_iops=1e5, request_latency_s=1e-4, backend="threads", direct=True,
            bytes_per_s_by_request_bytes={PAGE: speed},
        )  # fmt: skip


# -- links ----------------------------------------------------------------------------------------

HOSTS = [("a", "b"), ("a", "b", "c"), ("a", "a", "b", "b"), ("a",) * 3]


@st.composite
def link_profiles(draw):
    hosts = draw(st.sampled_from(HOSTS))
    ranks, sizes = (
        len(hosts),
        draw(st.sampled_from([(64, 4 << 20), (64, 1 << 10, 1 << 20), (1, 2)])),
    )
    times = draw(st.lists(seconds, min_size=ranks**2 * len(sizes), max_size=ranks**2 * len(sizes)))
    rates = st.lists(st.floats(1.0, 1e12), min_size=ranks, max_size=ranks)
    contention = Contention(
        out_bytes_per_s=np.array(draw(rates)),
        in_bytes_per_s=np.array(draw(rates)),
        all_bytes_per_s=draw(st.floats(1.0, 1e12)),
        host_out_bytes_per_s=dict.fromkeys(hosts, draw(st.floats(1.0, 1e12))),
    )
    return Profile(
        hosts=hosts, backend="gloo", sizes_bytes=sizes,
        times_s=np.reshape(times, (ranks, ranks, len(sizes))),
        contention=draw(st.sampled_from([None, contention])),
    )  # fmt: skip


@given(link_profiles())
def test_noisy_links_give_a_topology_whose_collectives_have_a_price(profile):
    topology = profile.to_topology()
    assert read_topology(topology.to_toml()).num_ranks == profile.num_ranks
    fabric = fabric_from_topology(topology)
    prices = [
        collective_time_s(
            fabric, "all_reduce", size_bytes=size, group=Group(size=profile.num_ranks)
        )
        for size in (64.0, 1e6, 1e9)
    ]
    assert 0 < prices[0] <= prices[1] <= prices[2] < math.inf
    apart = ~np.eye(profile.num_ranks, dtype=bool)
    assert (np.isfinite(profile.usable_rates_bytes_per_s) | ~apart).all()


def test_a_rise_that_rounding_makes_is_no_rate():
    times = np.full((2, 2, 2), 1e-3)
    times[..., 1] = np.nextafter(1e-3, 1)  # would be 2e22 bytes/s
    profile = Profile(hosts=("a", "b"), backend="gloo", sizes_bytes=(64, 1 << 22), times_s=times)
    bound = (1 << 22) / 1e-3
    np.testing.assert_allclose(profile.to_topology().capacities_bytes_per_s, bound)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_under_contention_that_are_none_are_refused(rate):
    with pytest.raises(DataError, match="in_bytes_per_s"):
        Contention(
            out_bytes_per_s=np.ones(2), in_bytes_per_s=np.array([1.0, rate]), all_bytes_per_s=1.0,
            host_out_bytes_per_s={},
        )  # fmt: skip


# -- steps and messages ---------------------------------------------------------------------------


@given(
    st.tuples(seconds, st.none() | seconds, st.lists(seconds, min_size=4, max_size=4)),
    st.integers(1, 10**10),
    st.integers(1, 300),
)
def test_a_noisy_job_is_advised(found, elements, tensors):
    step_s, compute_s, all_reduce_s = found
    sizes = tuple(4 * count for count in (elements, 3 * elements, 8 * elements, 64 * elements))
    times = JobTimes(
        ranks=2, step_s=step_s, compute_s=compute_s, elements=elements, tensors=tensors,
        sizes_bytes=sizes, all_reduce_s=tuple(all_reduce_s),
    )  # fmt: skip
    options = options_for(times)
    assert sum(one.recommended for one in options) == 1
    for one in options:
        assert 0 < one.step_s < math.inf
        assert 0 <= one.wait_s <= one.step_s


readings = st.lists(st.none() | seconds | st.just(math.inf), min_size=2, max_size=2)
three = st.lists(seconds, min_size=3, max_size=3)


@given(st.lists(st.tuples(readings, readings), max_size=40), st.booleans(), three, three)
def test_tau_stays_within_its_limits_whatever_was_measured(rounds, balance, fixed_s, whole_s):
    codecs = ("fp32", "int8", "int4")
    controller = TauController(
        AutoTau(balance=balance, maximum=64, patience=2),
        world_size=2,
        shares={1: 1.0, 2: 0.6, 5: 0.3},
        times=MessageTimes(
            fixed_s=dict(zip(codecs, fixed_s, strict=True)),
            whole_s=dict(zip(codecs, whole_s, strict=True)),
        ),
    )
    for number, (step_s, all_reduce_s) in enumerate(rounds):
        found = [[time_s or 0.0 for time_s in times] for times in (step_s, all_reduce_s)]
        controller.observe(*found, round_number=number)
        assert 1 <= controller.tau <= 64
        assert controller.codec in codecs
        assert all(1 <= controller.local_tau(rank) <= 64 for rank in range(2))


@given(
    st.lists(st.tuples(st.integers(0, 10**9), seconds, seconds), min_size=1, max_size=6), seconds
)
def test_buckets_seen_on_a_busy_machine_have_an_order(found, s_per_byte):
    ready = sorted(ready_s for _, ready_s, _ in found)
    buckets = [
        BucketCost(size_bytes=size, ready_s=ready_s, forward_s=forward_s)
        for ready_s, (size, _, forward_s) in zip(ready, found, strict=True)
    ]
    order = plan_send_order(buckets, cost_s_per_byte=s_per_byte)
    assert sorted(bucket for bucket, _ in order.chunks) == list(range(len(buckets)))
    assert ready[-1] <= order.predicted_s < math.inf


# -- calibration ----------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.lists(seconds, min_size=2, max_size=4), st.tuples(seconds, seconds, seconds))
def test_a_noisy_step_calibrates_a_cluster_that_prices_its_job(all_reduces_s, step):
    cluster, model = load_cluster("cpu-lab"), load_model("gpt3-1.3b")
    plan = ParallelPlan(global_batch=8)
    sizes = [4 << 20 << number for number in range(len(all_reduces_s))]
    times = consistent_times_s(sizes, all_reduces_s, least_rise=NOISE)
    fabric = calibrated_fabric(cluster, ranks=4, sizes_bytes=sizes, times_s=times)
    model_s, optimizer_s, rest_s = step
    device = calibrated_device(
        cluster, model, plan, model_s=model_s, optimizer_s=optimizer_s, rest_s=rest_s
    )
    group = Group(size=4, ranks=4)
    prices = [
        collective_time_s(fabric, "all_reduce", size_bytes=size, group=group) for size in sizes
    ]
    assert all(0 < before <= after < math.inf for before, after in pairwise(prices))
    assert prices[-1] >= all_reduces_s[-1] * 0.98  # more where its steps' latencies alone are
    predicted = evaluate_plan(model, device, fabric, plan=plan)
    assert predicted.time_s == pytest.approx(sum(step), rel=1e-6)
