"""Cost models against a slow list scheduler and closed forms; times against the links."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import (
    Schedule,
    ScheduleError,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    custom_collective,
    evaluate,
    lower_bound,
    named_collective,
    verify_schedule,
)
from fivefold.collectives.schedules.bounds import discrete_ingress_bound
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.collectives.schedules.timing import dependencies, with_times
from fivefold.errors import ConfigurationError
from fivefold.network.topology import (
    Link,
    Node,
    Topology,
    fully_connected,
    line,
    ring,
    switch,
)


@st.composite
def networks(draw):
    """Connected, asymmetric, with parallel links, and sometimes a switch."""
    n = draw(st.integers(2, 5))
    nodes = [Node(f"r{i}", "gpu") for i in range(n)]
    rates, delays = st.sampled_from([1e9, 2e9, 3e9]), st.sampled_from([0.0, 0.25, 1.0])

    def link(a, b):
        return Link(
            a,
            b,
            bandwidth_bytes_per_s=draw(rates),
            latency_s=draw(delays),
            count=draw(st.integers(1, 2)),
        )

    links = [link(f"r{i}", f"r{(i + 1) % n}") for i in range(n)]
    for _ in range(draw(st.integers(0, 4))):
        a, b = draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1))
        if a != b:
            links.append(link(f"r{a}", f"r{b}"))
    if draw(st.booleans()):
        nodes.append(Node("s", "switch"))
        links += [one for i in range(n) for one in (link(f"r{i}", "s"), link("s", f"r{i}"))]
    return Topology("drawn", nodes, links)


def slow_ready(move, collective, held, seen):
    """When a chunk is there to be sent, and what it overwrites has been read."""
    arrivals, read_at = seen
    known = [e for s, e in arrivals.get((move.chunk, move.source), []) if s < move.step]
    if not collective.reducing:
        return 0.0 if (move.chunk, move.source) in held else min(known)
    if (move.chunk, move.source) not in held:
        known = [max(known)]
    return max([0.0, *known, read_at.get((move.chunk, move.target), 0.0)])


def slow_times(schedule, topology, size_bytes, serial):
    """One message after the other in the schedule's order, with dictionaries."""
    collective = schedule.collective
    sizes = collective.chunk_bytes(size_bytes)
    held = set(zip(collective.pre_chunks.tolist(), collective.pre_ranks.tolist(), strict=True))
    arrivals, free, read_at, times = {}, {}, {}, []
    numbered = [(k if m.message is None else m.message, m) for k, m in enumerate(schedule)]
    numbered.sort(key=lambda pair: pair[1].step)
    for _, group in groupby(numbered, key=lambda pair: pair[0]):
        moves = [move for _, move in group]
        move, size = moves[0], sum(sizes[one.chunk] for one in moves)
        direct = topology.direct_links(move.source, move.target)
        widths = topology.capacities_bytes_per_s
        route = [max(direct, key=lambda link: (widths[link], -link))] if direct.size else None
        if route is None:
            route = topology.shortest_route(move.source, move.target)
        ready = max(slow_ready(one, collective, held, (arrivals, read_at)) for one in moves)
        legs, end, start = [[]], ready, None
        for link in route:  # a rank on the way has to have all of it before it sends it on
            legs[-1].append(link)
            if topology.is_rank[topology.link_targets[link]]:
                legs.append([])
        for leg in legs[:-1]:
            end = max([end, *(free.get(link, 0.0) for link in leg)])
            start = end if start is None else start
            delay = sum(topology.latencies_s[link] for link in leg)
            for link in leg:
                free[link] = end + (delay if serial else 0) + size / widths[link]
            end += delay + size / min(widths[link] for link in leg)
        for one in moves:
            arrivals.setdefault((one.chunk, one.target), []).append((one.step, end))
            place = (one.chunk, one.source)
            read_at[place] = max(read_at.get(place, 0.0), start)
            times.append((start, end))
    return times


@st.composite
def cases(draw):
    network = draw(networks())
    name = draw(st.sampled_from(COLLECTIVES))
    collective = named_collective(name, network.num_ranks, chunks=draw(st.integers(1, 3)), root=0)
    known = [key for key in available_algorithms(collective) if key != "hierarchical"]
    schedule = build_algorithm(draw(st.sampled_from(known)), collective, network)
    if draw(st.booleans()):  # each chunk by itself
        schedule = schedule.replaced(messages=None)
    return schedule, draw(st.sampled_from([0.0, 1e9, 7e9]))


@given(case=cases(), model=st.sampled_from(["serial", "slotted"]))
def test_list_scheduling_is_what_the_slow_one_says(case, model):
    schedule, size = case
    timing = evaluate(schedule, size_bytes=size, model=model)
    expected = slow_times(schedule, schedule.topology, size, model == "serial")
    order = np.argsort(schedule.steps, kind="stable")
    got = np.stack([timing.starts_s[order], timing.ends_s[order]], axis=1)
    assert got == pytest.approx(np.array(expected, dtype=np.float64).reshape(-1, 2))
    assert timing.total_s == pytest.approx(max([0.0, *(end for _, end in expected)]))


@given(case=cases(), model=st.sampled_from(["serial", "slotted", "synchronous", "fluid"]))
def test_times_keep_to_the_links_and_to_the_bounds(case, model):
    schedule, size = case
    timing = evaluate(schedule, size_bytes=size, model=model)
    timed = with_times(schedule, timing)
    assert verify_schedule(timed, check_times=True).timed
    bound = lower_bound(schedule.collective, schedule.topology, size)
    assert timing.total_s >= bound.seconds * (1 - 1e-9)
    assert (timing.link_busy_s <= timing.total_s * (1 + 1e-9)).all()


@given(case=cases())
def test_whole_chunks_bound_the_serial_model(case):
    schedule, size = case[0].replaced(messages=None), case[1]
    timing = evaluate(schedule, size_bytes=size)
    bound = discrete_ingress_bound(schedule.collective, schedule.topology, size)
    pruned = schedule.pruned()
    assert pruned.num_transfers == schedule.num_transfers
    assert timing.total_s >= bound.seconds * (1 - 1e-9)


@given(case=cases())
def test_dependencies_are_the_arrivals_that_a_transfer_sends_on(case):
    schedule, _ = case
    waits = dependencies(schedule)
    collective = schedule.collective
    moves = list(schedule)
    for index, move in enumerate(moves):
        earlier = [
            k
            for k, other in enumerate(moves)
            if (other.chunk, other.target) == (move.chunk, move.source) and other.step < move.step
        ]
        earlier.sort(key=lambda k: moves[k].step)
        if not collective.reducing:
            held = move.source in collective.holders(move.chunk)
            earlier = [] if held else earlier[:1]
        copies = [place for place, k in enumerate(earlier) if not moves[k].reduces]
        if collective.reducing and copies:
            earlier = earlier[copies[-1] :]
        assert sorted(waits.of(index).tolist()) == sorted(earlier)


@pytest.mark.parametrize("model", ["serial", "slotted", "synchronous", "fluid"])
@pytest.mark.parametrize("reduces", [False, True])
def test_a_rank_on_the_way_receives_all_before_it_sends_it_on(model, reduces):
    # Three links of 1 GB/s and 1 s each, through two ranks: 3 (1 + 1) s, not 3 + 1.
    network = line(4, bandwidth="1 GB/s", latency="1 s")
    collective = custom_collective(
        4, [(0, 0), (0, 3)] if reduces else [(0, 0)], post=[(0, 3)], reducing=reduces
    )
    move = Transfer(chunk=0, source=0, target=3, reduces=reduces, step=0)
    schedule = Schedule.from_transfers([move], collective=collective, topology=network)
    timing = evaluate(schedule, size_bytes=collective.buffer_weight * 1e9, model=model)
    assert timing.total_s == pytest.approx(6.0)
    assert timing.link_bytes.sum() == pytest.approx(3e9)
    timed = with_times(schedule, timing)
    verify_schedule(timed, check_times=True)
    with pytest.raises(ScheduleError, match="its route needs 6 s"):
        verify_schedule(timed.replaced(ends_s=timed.ends_s * 0.99), check_times=True)


def test_a_switch_on_the_way_passes_bits_on_as_they_come():
    network = switch(3, bandwidth="1 GB/s", latency="1 s")
    move = Transfer(chunk=0, source=0, target=1)
    collective = custom_collective(3, [(0, 0)], post=[(0, 1)])
    schedule = Schedule.from_transfers([move], collective=collective, topology=network)
    latency_s = network.latencies_s[list(network.shortest_route(0, 1))].sum()
    timing = evaluate(schedule, size_bytes=1e9)
    assert timing.total_s == pytest.approx(1.0 + latency_s)


A, B = 3e-6, 10e9  # latency and capacity of the closed forms


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_closed_forms_on_links_between_all(n):
    network = fully_connected(n, bandwidth=B, latency=A)
    size = 4e6

    def total(name, collective, model="serial"):
        schedule = build_algorithm(name, collective)
        return evaluate(schedule, network, size_bytes=size, model=model).total_s

    share = size * (n - 1) / n
    assert total("ring", all_reduce(n)) == pytest.approx(2 * (n - 1) * A + 2 * share / B)
    assert total("ring", all_gather(n)) == pytest.approx((n - 1) * A + share / B)
    steps = (n - 1).bit_length()
    tree = total("binomial_tree", broadcast(n), model="synchronous")
    assert tree == pytest.approx(steps * (A + size / B))
    if n & (n - 1) == 0:
        halving = total("recursive_halving_doubling", all_reduce(n), model="synchronous")
        assert halving == pytest.approx(2 * A * steps + 2 * share / B)
        doubling = total("recursive_doubling", all_reduce(n, 1), model="synchronous")
        assert doubling == pytest.approx(steps * (A + size / B))


@pytest.mark.parametrize("n", [2, 5, 8])
def test_closed_forms_on_one_switch(n):
    network, size = switch(n, bandwidth=B, latency=A / 2), 8e6
    share = size * (n - 1) / n
    exchange = evaluate(build_algorithm("pairwise", all_to_all(n)), network, size_bytes=size)
    assert exchange.total_s == pytest.approx((n - 1) * A + share / B)
    direct = build_algorithm("direct", all_to_all(n))
    shared = evaluate(direct, network, size_bytes=size, model="synchronous")
    assert shared.total_s == pytest.approx(A + share / B)
    fluid = evaluate(direct, network, size_bytes=size, model="fluid")
    assert fluid.total_s == pytest.approx(A + share / B)


def test_pipelined_chunks_overlap_on_a_line():
    n, chunks, size = 5, 8, 8e6
    network = line(n, bandwidth=B, latency=A)
    schedule = build_algorithm("ring", broadcast(n, chunks), order=range(n))
    timing = evaluate(schedule, network, size_bytes=size)
    assert timing.total_s == pytest.approx((n - 1 + chunks - 1) * (A + size / chunks / B))
    assert timing.bandwidth_bytes_per_s == pytest.approx(size / timing.total_s)


def test_an_all_reduce_by_a_tree_overlaps_up_and_down():
    n, chunks, size = 3, 16, 1.6e7
    network = fully_connected(n, bandwidth=B, latency=0.0)
    schedule = build_algorithm("binary_tree", all_reduce(n, chunks))
    timing = evaluate(schedule, network, size_bytes=size)
    assert timing.total_s == pytest.approx((chunks + 1) * size / chunks / B)


def message(chunk, start, end, route=None):
    return Transfer(chunk=chunk, source=0, target=1, start_s=start, end_s=end, route=route)


def timed(*moves):
    network = line(2, bandwidth=1.0, latency=1.0)
    collective = custom_collective(2, [(0, 0), (1, 0)], post=[(0, 1), (1, 1)])
    return Schedule.from_transfers(
        moves, collective=collective, topology=network, attributes={"size_bytes": 2.0}
    )


def test_chunks_with_one_start_and_end_are_one_message():
    together = timed(message(0, 0.0, 3.0), message(1, 0.0, 3.0))
    assert verify_schedule(together, check_times=True).timed
    assert evaluate(together, size_bytes=2.0).total_s == 3.0  # one latency, two bytes
    apart = timed(message(0, 0.0, 2.0), message(1, 2.0, 4.0))
    assert evaluate(apart, size_bytes=2.0).total_s == 4.0
    assert evaluate(apart, size_bytes=2.0, model="slotted").total_s == 3.0


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        ([message(0, 0.0, 1.9), message(1, 3.0, 5.0)], "transfer 0 takes 1.9 s"),
        ([message(0, 0.0, 2.9), message(1, 0.0, 2.9)], "transfer 0 takes 2.9 s"),
        ([message(0, 0.0, 2.0), message(1, 0.5, 2.5)], "link 0, .* cannot carry"),
        ([message(0, 0.0, 2.5), message(1, 0.1, 2.6)], "link 0, .* cannot carry"),
    ],
)
def test_times_that_no_link_can_keep_are_refused(moves, words):
    with pytest.raises(ScheduleError, match=words):
        verify_schedule(timed(*moves), check_times=True)


def test_parallel_links_carry_messages_side_by_side():
    ends = [Node("a", "gpu"), Node("b", "gpu")]
    wire = Link("a", "b", bandwidth_bytes_per_s=1.0, latency_s=1.0)
    back = Link("b", "a", bandwidth_bytes_per_s=1.0)
    network = Topology("two wires", ends, [wire, wire, back])
    collective = custom_collective(2, [(0, 0), (1, 0)], post=[(0, 1), (1, 1)])
    moves = [message(0, 0.0, 2.0, (0,)), message(1, 0.0, 2.0, (1,))]
    schedule = Schedule.from_transfers(moves, collective=collective, topology=network)
    assert verify_schedule(schedule, check_times=True, size_bytes=2.0).timed
    assert evaluate(schedule, size_bytes=2.0).total_s == 2.0


def test_sharing_a_link_is_fine_if_there_is_room():
    verify_schedule(timed(message(0, 0.0, 3.0), message(1, 0.5, 3.5)), check_times=True)


def test_a_step_schedule_with_times_may_not_run_ahead_of_its_data():
    network = line(3, bandwidth=1.0, latency=0.0)
    moves = [
        Transfer(chunk=0, source=0, target=1, step=0, start_s=0.0, end_s=1.0),
        Transfer(chunk=0, source=1, target=2, step=1, start_s=0.5, end_s=1.5),
    ]
    schedule = Schedule.from_transfers(moves, collective=broadcast(3), topology=network)
    with pytest.raises(ScheduleError, match=r"transfer 1 .* starts at 0.5"):
        verify_schedule(schedule, check_times=True, size_bytes=1.0)


def test_what_cannot_be_priced_is_refused():
    schedule = build_algorithm("ring", all_gather(4))
    with pytest.raises(ConfigurationError, match="made for no topology"):
        evaluate(schedule, size_bytes=1)
    with pytest.raises(ConfigurationError, match="4 ranks, the topology 5"):
        evaluate(schedule, ring(5), size_bytes=1)
    with pytest.raises(ConfigurationError, match="no cost model 'exact'"):
        evaluate(schedule, ring(4), size_bytes=1, model="exact")
    listed = schedule.replaced(steps=None)
    with pytest.raises(ConfigurationError, match="needs a step"):
        evaluate(listed, ring(4), size_bytes=1, model="synchronous")
    with pytest.raises(ConfigurationError, match="no times to check"):
        verify_schedule(schedule, topology=ring(4), check_times=True, size_bytes=1)
    timing = evaluate(schedule, ring(4), size_bytes=1)
    sizeless = with_times(schedule, timing).replaced(attributes={})
    with pytest.raises(ConfigurationError, match="for which size"):
        verify_schedule(sizeless, topology=ring(4), check_times=True)
    moves = [Transfer(chunk=0, source=1, target=2)]
    broken = Schedule.from_transfers(moves, collective=broadcast(4))
    with pytest.raises(ScheduleError, match="transfer 0 sends chunk 0 from rank 1"):
        evaluate(broken, ring(4), size_bytes=1)


def test_the_busiest_link_is_the_one_that_sends_longest():
    network = ring(3)
    for link, ends in enumerate(zip(network.link_sources, network.link_targets, strict=True)):
        move = Transfer(chunk=0, source=int(ends[0]), target=int(ends[1]))
        only = Schedule.from_transfers(
            [move], collective=custom_collective(3, [(0, move.source)], post=[])
        )
        assert evaluate(only, network, size_bytes=8).busiest_link == link


def test_nothing_takes_no_time():
    empty = Schedule.from_transfers([], collective=all_gather(1))
    network = ring(3)
    timing = evaluate(build_algorithm("ring", all_gather(3)), network, size_bytes=0)
    assert timing.total_s == pytest.approx(2 * network.latencies_s[0])
    alone = Topology("alone", [Node("a", "gpu")], [])
    for model in ("serial", "slotted", "synchronous", "fluid"):
        assert evaluate(empty, alone, size_bytes=8, model=model).total_s == 0
    assert evaluate(empty, alone, size_bytes=8).busiest_link is None
    assert evaluate(empty, alone, size_bytes=8).bandwidth_bytes_per_s == float("inf")


def test_messages_of_no_duration_stay_apart():
    network = ring(4, bandwidth=1.0, latency=0.0)
    schedule = build_algorithm("ring", all_gather(4), network)
    timed_schedule = with_times(schedule, evaluate(schedule, size_bytes=0.0)).replaced(steps=None)
    verify_schedule(timed_schedule, check_times=True)
    assert evaluate(timed_schedule, size_bytes=0.0).total_s == 0.0


def test_a_message_waits_for_what_came_at_the_same_instant():
    nodes = [Node(name, "gpu") for name in "abc"]
    links = [
        Link("a", "b", bandwidth_bytes_per_s=1.0),
        Link("b", "c", bandwidth_bytes_per_s=1.0, latency_s=1.0),
        Link("c", "a", bandwidth_bytes_per_s=1.0),
    ]
    moves = [
        Transfer(chunk=1, source=1, target=2, start_s=0.0, end_s=1.0),
        Transfer(chunk=0, source=0, target=1, start_s=0.0, end_s=0.0),
        Transfer(chunk=0, source=1, target=2, start_s=0.0, end_s=1.0),
    ]
    collective = custom_collective(3, [(0, 0), (1, 1)], post=[(0, 2), (1, 2)])
    schedule = Schedule.from_transfers(
        moves, collective=collective, topology=Topology("chain", nodes, links)
    )
    verify_schedule(schedule, check_times=True, size_bytes=0.0)
    assert evaluate(schedule, size_bytes=0.0).total_s == 1.0


def test_times_over_very_unequal_links_are_not_taken_for_too_short():
    network = line(4, bandwidth="1 TB/s", latency=0.0)
    network = network.with_changed_link("gpu0", "gpu1", bandwidth=3.0)
    for model in ("serial", "slotted"):
        schedule = build_algorithm("direct", all_to_all(4), network)
        timing = evaluate(schedule, size_bytes=7.0, model=model)
        verify_schedule(with_times(schedule, timing), check_times=True)
