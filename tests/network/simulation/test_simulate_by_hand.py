"""Cases solved by hand: closed forms, iterations, in-network sums, bad input."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.simulation import (
    AggregationRequest,
    Compute,
    CoupledFlows,
    Flow,
    FlowTable,
    simulate,
)
from fivefold.network.topology import (
    Aggregation,
    Link,
    Node,
    SwitchAbility,
    Topology,
    line,
    ring,
)

MB = 1e6


def one_switch(hosts=4, *, slots=64, rate=None, latency_s=0.0, bandwidth=100.0):
    """Hosts on one switch that can add."""
    nodes = [Node(f"h{number}", "cpu") for number in range(hosts)] + [Node("tor", "tor")]
    links = [
        Link(*ends, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
        for number in range(hosts)
        for ends in ((f"h{number}", "tor"), ("tor", f"h{number}"))
    ]
    pool = Aggregation(slots=slots, slot_bytes=10, rate_bytes_per_s=rate)
    return Topology("star", nodes, links, switches=[SwitchAbility("tor", aggregation=pool)])


def flow_of(topology, name, source, target, size, **options):
    route = topology.shortest_route(source, target)
    ends = topology.ranks[source], topology.ranks[target]
    return Flow(name, *ends, size, route, **options)


def request_of(hosts, name="sum", size=1000.0, slots=64, **options):
    tree = dict.fromkeys(hosts, "tor")
    return AggregationRequest(name, tree, hosts, size, slots=slots, **options)


@pytest.mark.parametrize(("n", "latency_s"), [(2, 0.0), (5, 0.0), (8, 1e-3)])
def test_a_ring_all_reduce_takes_the_closed_form(n, latency_s):
    topology = ring(n, bandwidth=1e6, latency=latency_s)
    chunk, tasks = 3e6 / n, []
    for step in range(2 * (n - 1)):
        for rank in range(n):
            waits = [(step - 1, (rank - 1) % n)] if step else []
            tasks.append(
                flow_of(topology, (step, rank), rank, (rank + 1) % n, chunk, depends_on=waits)
            )
    wanted = 2 * (n - 1) * (latency_s + chunk / 1e6)
    assert simulate(topology, tasks).total_s == pytest.approx(wanted, rel=1e-9)


def test_two_equal_jobs_share_a_link_and_shifted_ones_do_not():
    # Compute c, then communicate m at full rate: in phase c + 2m, shifted c + m (m <= c).
    topology, c, m = line(2, bandwidth=100.0), 2.0, 1.0
    for shift, period in ((0.0, c + 2 * m), (1.5, c + m)):
        tasks = []
        for job, start_s in (("a", 0.0), ("b", shift)):
            tasks.append(Compute((job, "c"), c, job=job, release_s=start_s))
            flow = flow_of(topology, (job, "m"), 0, 1, 100 * m, depends_on=[(job, "c")], job=job)
            tasks.append(flow)
        result = simulate(topology, tasks, iterations={"a": 50, "b": 50})
        gaps = np.diff(result.iteration_finish_s["a"])[:-2]
        np.testing.assert_allclose(gaps, period, rtol=1e-9)
        assert result.link_bytes.sum() == pytest.approx(2 * 50 * 100 * m)


def test_repeated_iterations_equal_the_tasks_written_out():
    topology = ring(3, bandwidth=7.0, latency=0.1)

    def tasks(job, before):
        first = Compute((job, "c"), 1.0 + 0.25 * job, depends_on=before, job=job)
        flow = flow_of(topology, (job, "f"), job, (job + 1) % 3, 9.0, depends_on=[(job, "c")])
        return first, flow

    once = []
    for job in range(3):
        first, flow = tasks(job, [])
        once += [first, Flow(flow.flow_id, flow.source, flow.target, 9.0, flow.route,
                             depends_on=flow.depends_on, job=job)]  # fmt: skip
    repeated = simulate(topology, once, iterations=20)
    written = []
    for job in range(3):
        for turn in range(20):
            key, before = (job, turn), [(job, turn - 1, "f")] if turn else []
            written.append(Compute((*key, "c"), 1.0 + 0.25 * job, depends_on=before))
            written.append(
                flow_of(topology, (*key, "f"), job, (job + 1) % 3, 9.0, depends_on=[(*key, "c")])
            )
    long = simulate(topology, written)
    for job in range(3):
        ends = [long.finish_of((job, turn, "f")) for turn in range(20)]
        np.testing.assert_allclose(repeated.iteration_finish_s[job], ends, rtol=1e-12)
        assert repeated.job_finish_s(job) == pytest.approx(ends[-1])


def test_priorities_preempt_and_then_let_the_others_go_on():
    topology = line(2, bandwidth=100.0)
    low = flow_of(topology, "low", 0, 1, 300.0, priority=5)
    high = flow_of(topology, "high", 0, 1, 100.0, priority=1, release_s=1.0)
    result = simulate(topology, [low, high], record_rates=True)
    assert result.finish_of("high") == pytest.approx(2.0)
    assert result.finish_of("low") == pytest.approx(4.0)
    times, rates = result.rates_of("low")
    np.testing.assert_allclose(times, [0.0, 1.0, 2.0, 4.0])
    np.testing.assert_allclose(rates, [100.0, 0.0, 100.0, 0.0])


def test_time_above_capacity_is_when_two_want_the_whole_link():
    topology = line(2, bandwidth=100.0)
    flows = [
        flow_of(topology, "a", 0, 1, 100.0),
        flow_of(topology, "b", 0, 1, 100.0, release_s=0.5),
    ]
    result = simulate(topology, flows)
    link = flows[0].route[0]
    assert result.over_capacity_s[link] == pytest.approx(1.0)  # from 0.5 to the end of a, 1.5
    assert result.link_busy_s[link] == pytest.approx(2.0)


def test_a_sum_in_the_switch_moves_the_bytes_once_up_and_once_down():
    topology = one_switch(latency_s=0.0)
    hosts = topology.ranks
    result = simulate(topology, [request_of(hosts)])
    assert result.total_s == pytest.approx(1000.0 / 100.0)
    np.testing.assert_allclose(result.link_bytes, 1000.0)
    one_way = simulate(topology, [request_of(hosts, broadcast=False)])
    np.testing.assert_allclose(one_way.link_bytes, [1000.0, 0.0] * 4)


def test_slots_over_the_round_trip_limit_the_rate():
    topology = one_switch(latency_s=0.5)  # round trip 1 s, 4 slots of 10 bytes: 40 bytes/s
    result = simulate(topology, [request_of(topology.ranks, slots=4)])
    assert result.total_s == pytest.approx(1000.0 / 40.0 + 1.0)


def test_adders_limit_the_sum_of_all_requests():
    topology = one_switch(rate=50.0)
    pairs = [topology.ranks[:2], topology.ranks[2:]]
    requests = [request_of(pair, name, slots=8) for name, pair in enumerate(pairs)]
    assert simulate(topology, requests).total_s == pytest.approx(2 * 1000.0 / 50.0)


def test_three_sums_at_once_through_a_switch_at_line_rate():
    topology = one_switch(6)
    pairs = [topology.ranks[2 * number : 2 * number + 2] for number in range(3)]
    requests = [request_of(pair, name, slots=8) for name, pair in enumerate(pairs)]
    result = simulate(topology, requests)
    np.testing.assert_allclose(result.finish_s, 10.0)


def test_a_request_without_slots_waits_in_line():
    topology = one_switch(slots=10)
    requests = [
        request_of(topology.ranks[:2], "a", slots=6),
        request_of(topology.ranks[2:], "big", slots=10, release_s=1.0),
        request_of(topology.ranks[2:], "small", slots=4, release_s=2.0),  # may not overtake
    ]
    result = simulate(topology, requests)
    assert result.finish_of("a") == pytest.approx(10.0)
    assert result.start_of("big") == pytest.approx(10.0)
    assert result.start_of("small") == pytest.approx(20.0)
    assert result.waits == 2
    assert result.refusals == 0


def test_a_request_without_slots_falls_back_to_its_flows():
    topology = one_switch(slots=10)

    def ring_of(name, ranks):
        a, b = ranks
        return [
            flow_of(topology, (name, 0), a, b, 500.0),
            flow_of(topology, (name, 1), b, a, 500.0, depends_on=[(name, 0)]),
        ]

    requests = [
        request_of(topology.ranks[:2], "a", slots=6, fallback=ring_of("ra", (0, 1))),
        request_of(topology.ranks[2:], "b", slots=6, fallback=ring_of("rb", (2, 3))),
    ]
    after = Compute("after", 1.0, depends_on=["b"])
    result = simulate(topology, [*requests, after])
    assert result.refusals == 1
    assert result.skipped[result.position_of(("ra", 1))]
    assert result.finish_of("a") == pytest.approx(10.0)
    assert result.finish_of("b") == pytest.approx(10.0)  # 5 s and 5 s, one after the other
    assert result.finish_of("after") == pytest.approx(11.0)
    assert np.isnan(result.finish_of(("ra", 0)))


def test_repeated_jobs_take_turns_for_the_slots():
    topology = one_switch(slots=6)
    requests = []
    for job, ranks in (("a", topology.ranks[:2]), ("b", topology.ranks[2:])):
        requests.append(request_of(ranks, job, slots=6, job=job))
    result = simulate(topology, requests, iterations=3)
    np.testing.assert_allclose(result.iteration_finish_s["a"], [10.0, 30.0, 50.0])
    np.testing.assert_allclose(result.iteration_finish_s["b"], [20.0, 40.0, 60.0])


def test_a_switch_that_cannot_add_is_named_or_falls_back():
    topology = one_switch(slots=4)
    with pytest.raises(InfeasibleError, match="'tor' has 4 slots, not 64"):
        simulate(topology, [request_of(topology.ranks)])
    stand_in = [flow_of(topology, "f", 0, 1, 100.0)]
    result = simulate(topology, [request_of(topology.ranks[:2], fallback=stand_in)])
    assert result.refusals == 1
    assert result.total_s == pytest.approx(1.0)


def test_nodes_that_only_pass_on_need_no_adder():
    nodes = [Node("a", "cpu"), Node("b", "cpu"), Node("nic", "nic"), Node("tor", "tor")]
    ends = [("a", "nic"), ("nic", "tor"), ("b", "tor")]
    both_ways = [*ends, *(pair[::-1] for pair in ends)]
    links = [Link(*pair, bandwidth_bytes_per_s=10.0) for pair in both_ways]
    pool = Aggregation(slots=4, slot_bytes=1)
    topology = Topology("t", nodes, links, switches=[SwitchAbility("tor", aggregation=pool)])
    request = AggregationRequest(
        "s", {"a": "nic", "nic": "tor", "b": "tor"}, ["a", "b"], 100.0, slots=4
    )
    assert request.aggregators == ("tor",)
    assert simulate(topology, [request]).total_s == pytest.approx(10.0)


def test_tables_and_tasks_by_name_are_the_same():
    topology = ring(4, bandwidth=3.0, latency=0.5)
    tasks = [flow_of(topology, rank, rank, (rank + 2) % 4, 5.0 + rank) for rank in range(4)]
    table = FlowTable.build(
        sizes=[task.size_bytes for task in tasks],
        routes=[task.route for task in tasks],
    )
    by_name, by_table = simulate(topology, tasks), simulate(topology, table)
    np.testing.assert_array_equal(by_name.finish_s, by_table.finish_s)


def test_runs_are_repeatable_to_the_last_bit():
    topology, random = ring(6, bandwidth=3.0), np.random.default_rng(3)
    tasks = []
    for number in range(60):
        a, b = random.choice(6, 2, replace=False).tolist()
        tasks.append(flow_of(topology, number, a, b, float(random.uniform(1, 9))))
    first, second = simulate(topology, tasks), simulate(topology, tasks)
    np.testing.assert_array_equal(first.finish_s, second.finish_s)


def test_a_tolerance_keeps_close_to_the_exact_times():
    topology, random = ring(6, bandwidth=3.0), np.random.default_rng(5)
    tasks = []
    for number in range(200):
        a, b = random.choice(6, 2, replace=False).tolist()
        tasks.append(flow_of(topology, number, a, b, float(random.uniform(1, 9))))
    exact = simulate(topology, tasks)
    loose = simulate(topology, tasks, tolerance=0.01)
    np.testing.assert_allclose(loose.finish_s, exact.finish_s, rtol=0.02)
    assert loose.solves < exact.solves


def test_a_hundred_thousand_equal_flows_are_one_event_each_way():
    topology = line(2, bandwidth=1e9)
    count = 100_000
    routes = np.arange(count + 1), np.zeros(count, np.int32)
    result = simulate(topology, FlowTable.build(sizes=np.full(count, 1e4), routes=routes))
    assert result.total_s == pytest.approx(1.0, rel=1e-9)
    assert result.solves == 2


def test_empty_flows_and_empty_simulations():
    topology = line(2, bandwidth=1.0, latency=0.25)
    assert simulate(topology, []).total_s == 0.0
    assert simulate(topology, [flow_of(topology, 0, 0, 1, 0.0)]).total_s == pytest.approx(0.25)
    alone = Flow("self", topology.ranks[0], topology.ranks[0], 1e9, ())
    assert simulate(topology, [alone]).total_s == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: [Compute("a", 1), Compute("a", 1)], "two tasks have the id 'a'"),
        (lambda _: [Compute("a", 1, depends_on=["b"])], "waits for 'b', which is no task"),
        (
            lambda _: [
                Compute("a", 1, depends_on=["c"]),
                Compute("b", 1, depends_on=["a"]),
                Compute("c", 1, depends_on=["b"]),
            ],
            "wait for one another in a circle: 'a', 'c', 'b'",
        ),
        (lambda t: [Flow("f", *t.ranks, 1.0, ())], "ends at .*, not at"),
        (lambda t: [Flow("f", *t.ranks, 1.0, (9,))], "uses link 9"),
        (lambda t: [Flow("f", *t.ranks, 1.0, ("a",))], "uses link 'a'"),
        (lambda _: [CoupledFlows("f", 1.0, ("a",))], "uses link 'a'"),
        (lambda t: [Flow("f", *t.ranks[::-1], 1.0, t.shortest_route(0, 1))], "its next link"),
        (
            lambda t: [Flow("f", *t.ranks, -1.0, (0,))],
            "size_bytes must be a number, finite and at least 0; got -1.0",
        ),
        (
            lambda t: [Flow("f", *t.ranks, 1.0, (0,), weight=0)],
            "weight must be a number, finite and above 0; got 0",
        ),
        (lambda _: [Compute("a", 1, priority=0.5)], "priority must be a whole number"),
        (lambda _: [Compute("a", 1, depends_on="b")], "must be a list of ids"),
        (lambda _: [Compute("a", "1")], "duration_s must be a number, finite and at least 0"),
        (lambda _: [Compute("a", 1, depends_on=["a"])], "in a circle: 'a'"),
        (lambda _: ["a"], "must be a Flow"),
    ],
)
def test_bad_tasks_are_named(make, message):
    topology = line(2, bandwidth=1.0)
    with pytest.raises(ConfigurationError, match=message):
        simulate(topology, make(topology))


def test_bad_requests_are_named():
    topology = line(2, bandwidth=1.0)
    tasks = [Compute("a", 1.0, job="x"), Compute("b", 1.0, depends_on=["a"])]
    with pytest.raises(ConfigurationError, match="one of them repeats"):
        simulate(topology, tasks, iterations=2)
    with pytest.raises(ConfigurationError, match="which has no task"):
        simulate(topology, tasks, iterations={"y": 2})
    for wrong in (
        {"tolerance": 0.7},
        {"tolerance": "0"},
        {"until_s": "1"},
        {"until_s": -1.0},
        {"until_s": [1.0]},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            simulate(topology, tasks, **wrong)
    with pytest.raises(ConfigurationError, match="has no column 'rates'"):
        FlowTable.build(sizes=[1.0], routes=[[0]], rates=[1.0])
    for columns in (
        {"priorities": ["a"]},
        {"weights": ["a"]},
        {"sizes": ["a"]},
        {"latencies_s": [-1.0]},
        {"latencies_s": [np.inf]},
        {"routes": [["a"]]},
        {"dependencies": [["a"]]},
        {"dependencies": 5},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(columns))):
            FlowTable.build(**{"sizes": [1.0], "routes": [[0]], **columns})
    with pytest.raises(ConfigurationError, match="2 roots"):
        AggregationRequest("s", {"a": "x", "b": "y"}, ["a", "b"], 1.0, slots=1)
    star = one_switch()
    request = request_of(star.ranks, fallback=[flow_of(star, "f", 0, 1, 1.0)])
    with pytest.raises(ConfigurationError, match="across a fallback"):
        simulate(star, [request, Compute("c", 1.0, depends_on=["f"])])
    lost = dataclasses.replace(flow_of(star, "f", 0, 1, 1.0), depends_on=("nobody",))
    with pytest.raises(ConfigurationError, match="'f' waits for 'nobody', which is no task"):
        simulate(star, [request_of(star.ranks, fallback=[lost])])


def test_sums_are_made_where_streams_meet_and_at_the_root():
    """``on`` only passes on what ``meet`` added; ``own`` adds a leaf to what it has itself."""
    tree = {"a": "meet", "b": "meet", "meet": "on", "on": "top", "c": "own", "own": "top"}
    request = AggregationRequest("s", tree, ["a", "b", "c", "own"], 1.0, slots=1)
    assert request.aggregators == ("meet", "own", "top")
    chain = AggregationRequest("s", {"a": "top"}, ["a"], 1.0, slots=1)
    assert chain.aggregators == ("top",)


def test_routes_of_a_topology_are_taken_as_they_are():
    topology = ring(5, bandwidth=4.0)
    found = topology.routes([0, 1, 2], [2, 3, 4])
    table = FlowTable.build(sizes=[8.0, 8.0, 8.0], routes=found)
    tasks = [flow_of(topology, rank, rank, rank + 2, 8.0) for rank in range(3)]
    np.testing.assert_array_equal(
        simulate(topology, table).finish_s, simulate(topology, tasks).finish_s
    )


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_tasks_wait_for_may_be_an_array_each(kind):
    waits = kind([np.array([], np.int64), np.array([0]), np.array([0, 1])])
    table = FlowTable.build(sizes=[1.0, 2.0, 3.0], routes=[[]] * 3, dependencies=waits)
    assert table.dependency_offsets.tolist() == [0, 0, 1, 3]
    assert table.dependencies.tolist() == [0, 0, 1]


@pytest.mark.parametrize("link", [-1, 2, True, 0.0, "0", [0]])
def test_coupled_flows_name_the_link_that_is_wrong(link):
    topology = line(2, bandwidth=1.0)
    for links in ([link], [0, 1, link]):
        with pytest.raises(ConfigurationError, match=re.escape(f"uses link {link!r}")):
            simulate(topology, [CoupledFlows("c", 1.0, links=links)])
    for links in ([], [0, 1], np.array([0, 1, 1])):
        assert simulate(topology, [CoupledFlows("c", 0.0, links=links)]).total_s == 0.0


class Counted(dict):
    """A tree that counts how often a parent is looked up."""

    looks = 0

    def get(self, *key):
        self.looks += 1
        return super().get(*key)

    def __getitem__(self, key):
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("deep", [False, True])
def test_a_tree_is_checked_in_a_pass_over_it(deep):
    tree = Counted({str(n): str(n + 1) if deep else "top" for n in range(500)})
    AggregationRequest("s", tree, [str(n) for n in range(500)], 1.0, slots=1)
    assert tree.looks <= 500
    tree[str(499)] = "0" if deep else "499"
    with pytest.raises(ConfigurationError, match=r"roots|circle"):
        AggregationRequest("s", tree, [str(n) for n in range(500)], 1.0, slots=1)


def test_the_simulator_is_imported_without_scipy():
    code = "import sys, fivefold.network.simulation; print('scipy.sparse' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
