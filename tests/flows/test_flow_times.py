"""Shifts and the guard against closed forms and brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.flows import FlowDemand, JobTraffic, route_flows, time_shifts
from fivefold.network.topology import Link, Node, Topology, switch
from helpers.night import number_of


def job(name, compute_s, seconds, source=0, target=1):
    return JobTraffic(
        job_id=name, compute_s=compute_s, flows=(FlowDemand(source, target, seconds * 1e9),)
    )


def on_one_link(*jobs):
    return route_flows(switch(2, bandwidth="1 GB/s"), jobs)


def score(routing, shifts, samples=20_000):
    """1 - demand above capacity over demand, from samples of continuous time on shared links."""
    periods = {j.job_id: j.compute_s + routing.communication_s(j.job_id) for j in routing.traffic}
    span_s = math.prod(round(p * 8) for p in periods.values()) / 8
    times = (np.arange(samples) + 0.5) * span_s / samples
    excess = demand = 0.0
    for link in range(routing.topology.num_links):
        users = [j for j in routing.traffic if routing.link_bytes(j.job_id)[link] > 0]
        if len(users) < 2:
            continue
        total = np.zeros(samples)
        for j in users:
            at = (times - shifts[j.job_id]) % periods[j.job_id]
            busy_s = routing.link_bytes(j.job_id)[link] / 1e9
            rate = busy_s / routing.communication_s(j.job_id)
            total += np.where(at >= j.compute_s, rate, 0.0)
        excess += np.maximum(total - 1, 0).mean()
        demand += total.mean()
    return 1 - excess / demand if demand else 1.0


@pytest.mark.parametrize(("compute_s", "send_s"), [(1.0, 1.0), (3.0, 1.0), (2.0, 2.0)])
def test_two_equal_jobs_fit_beside_each_other(compute_s, send_s):
    found = time_shifts(on_one_link(job("a", compute_s, send_s), job("b", compute_s, send_s)))
    assert found.score == pytest.approx(1.0, abs=1e-9)
    assert found.score_before == pytest.approx(0.5)
    apart = (found.shift_s["b"] - found.shift_s["a"]) % (compute_s + send_s)
    assert send_s - 1e-9 <= apart <= compute_s + 1e-9


def test_jobs_that_send_most_of_the_time_overlap_as_little_as_they_can():
    """1 s of compute and 3 s of sending each: 2 of every 4 s must collide."""
    found = time_shifts(on_one_link(job("a", 1.0, 3.0), job("b", 1.0, 3.0)))
    assert found.score == pytest.approx(1 - 2 / 6)
    assert found.score_before == pytest.approx(1 - 3 / 6)


def test_a_period_and_its_double_share_a_circle():
    """a sends 1 of 4 s, b 1 of 2: b's first second of each 2 is free for a."""
    routing = on_one_link(job("a", 3.0, 1.0), job("b", 1.0, 1.0))
    found = time_shifts(routing)
    assert found.score == pytest.approx(1.0)
    assert score(routing, found.shift_s) == pytest.approx(1.0, abs=2e-3)


@settings(max_examples=number_of(7, 1000), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=2, max_size=3))
def test_the_score_is_that_of_continuous_time(kinds):
    jobs = [job(f"j{n}", c / 4, m / 4) for n, (c, m) in enumerate(kinds)]
    routing = on_one_link(*jobs)
    found = time_shifts(routing, slots_per_period=96, period_tolerance=0.0)
    if found.left_out:
        return
    assert score(routing, found.shift_s) == pytest.approx(found.score, abs=0.02)
    assert score(routing, dict.fromkeys(found.shift_s, 0.0)) == pytest.approx(
        found.score_before, abs=0.02
    )
    assert found.score >= found.score_before - 1e-12
    if len(jobs) == 2:  # no other shift is better
        period = found.period_s["j1"]
        others = [score(routing, {"j0": 0.0, "j1": k * period / 12}) for k in range(12)]
        assert found.score >= max(others) - 0.02


def test_many_jobs_are_searched_one_by_one():
    """Six jobs that send 1 of 6 s each fit on one link, one after the other."""
    routing = on_one_link(*(job(f"j{n}", 5.0, 1.0) for n in range(6)))
    found = time_shifts(routing, slots_per_period=12)
    assert found.score == pytest.approx(1.0)
    assert score(routing, found.shift_s) == pytest.approx(1.0, abs=2e-3)
    assert found.score_before < 0.2


def test_a_job_on_two_links_turns_on_both():
    """b shares one link with a and one with c: a chain, so all fit."""
    routing = route_flows(
        switch(4, bandwidth="1 GB/s"),
        [job("a", 1.0, 1.0, 0, 1), job("b", 1.0, 1.0, 0, 2), job("c", 1.0, 1.0, 3, 2)],
    )
    found = time_shifts(routing)
    assert found.score == 1.0
    assert found.shift_s["a"] == found.shift_s["c"] != found.shift_s["b"]


def test_jobs_around_a_loop_are_shifted_well():
    """Three jobs, each pair on a link of its own: half their time each, so one pair collides."""
    pairs = {"a": [(0, 1), (2, 3)], "b": [(0, 1), (4, 5)], "c": [(2, 3), (4, 5)]}
    links = [Link(f"n{i}", f"n{i + 1}", bandwidth_bytes_per_s=1e9) for i in (0, 2, 4)]
    topology = Topology("pairs", [Node(f"n{i}", "gpu") for i in range(6)], links)
    jobs = [
        JobTraffic(job_id=n, compute_s=1.0, flows=tuple(FlowDemand(*p, 1e9) for p in ps))
        for n, ps in pairs.items()
    ]
    found = time_shifts(route_flows(topology, jobs))
    # 1 s of demand per job and link; whatever the shifts, collisions sum to a second of six.
    assert found.score == pytest.approx(1 - 0.5 / 3, abs=0.01)


def test_periods_without_a_common_multiple_are_left_out():
    routing = on_one_link(job("a", 1.0, 1.0), job("b", 1.0, 1.0171717))
    found = time_shifts(routing, period_tolerance=0.0, slots_per_period=911)
    assert found.left_out == (("a", "b"),)
    assert set(found.shift_s.values()) == {0.0}
    near = time_shifts(routing, period_tolerance=0.02)
    assert not near.left_out
    assert near.score > 0.95


def test_jobs_that_only_compute_or_do_nothing_need_no_shift():
    idle = JobTraffic(job_id="idle", compute_s=0.0, flows=())
    busy = JobTraffic(job_id="busy", compute_s=1.0, flows=())
    found = time_shifts(on_one_link(idle, busy))
    assert found.shift_s == {"idle": 0.0, "busy": 0.0}
    assert time_shifts(on_one_link(idle)).score == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"slots_per_period": 1},
        {"slots_per_period": "9"},
        {"period_tolerance": 1.0},
        {"period_tolerance": "0"},
    ],
)
def test_bad_settings_of_shifts_are_refused(change):
    with pytest.raises(ConfigurationError):
        time_shifts(on_one_link(job("a", 1.0, 1.0)), **change)


def test_a_period_is_made_like_the_nearest_of_those_within_the_tolerance():
    """c's period is 302 slots, twice b's 151 and nearly 3 times a's 100: b and c share a circle."""
    routing = route_flows(
        switch(4, bandwidth="1 GB/s"),
        [job("a", 0.5, 0.5, 2, 3), job("b", 1.01, 0.5), job("c", 2.52, 0.5)],
    )
    found = time_shifts(routing, slots_per_period=100, period_tolerance=0.02)
    assert found.left_out == ()
    assert found.score == pytest.approx(1.0)


@pytest.mark.parametrize(("tolerance", "alike"), [(0.01, True), (0.0, False), (0.003, False)])
def test_nearly_equal_periods_share_a_circle_within_the_tolerance(tolerance, alike):
    """Periods of 2 and 2.016 seconds on a fine grid: a common circle only where they are alike."""
    routing = on_one_link(job("a", 1.0, 1.0), job("b", 1.016, 1.0))
    found = time_shifts(routing, slots_per_period=1000, period_tolerance=tolerance)
    assert (found.left_out == ()) is alike
    assert (found.shift_s["b"] != found.shift_s["a"]) is alike


def test_jobs_on_other_links_change_no_shift():
    network = switch(4, bandwidth="1 GB/s")
    pair = [JobTraffic(job_id=name, compute_s=1.0, flows=(FlowDemand(0, 1, 1e9),)) for name in "ab"]
    quick = JobTraffic(job_id="c", compute_s=1e-3, flows=(FlowDemand(2, 3, 1e6),))
    alone = time_shifts(route_flows(network, pair))
    beside = time_shifts(route_flows(network, [quick, *pair]))
    assert (beside.score_before, beside.score, beside.left_out) == (0.5, 1.0, ())
    assert dict(beside.shift_s) == {**alone.shift_s, "c": 0.0}


@pytest.mark.parametrize("count", [3, 5], ids=["whole grid", "one by one"])
def test_shifts_are_those_of_the_jobs_whatever_their_names(count):
    def shifts(names):
        jobs = [job(name, 1.0 + k, 1.0, source=k, target=8) for k, name in enumerate(names)]
        jobs = sorted(jobs, key=lambda one: one.job_id)
        found = time_shifts(route_flows(switch(9, bandwidth="1 GB/s"), jobs), slots_per_period=20)
        return [found.shift_s[name] for name in names]

    expected = shifts("abcde"[:count])
    assert any(expected)
    for names in itertools.islice(itertools.permutations("abcde"[:count]), 1, None, 7):
        assert shifts(names) == expected
