"""All-reduce as an overlapping reduce and broadcast, against closed forms and the phased form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.collectives.schedules import (
    all_reduce,
    evaluate,
    lower_bound,
    verify_schedule,
)
from fivefold.collectives.synthesis import synthesize
from fivefold.collectives.synthesis._synthesize import pipelined_all_reduce, roots_of
from fivefold.errors import InfeasibleError
from fivefold.network.topology import Link, Node, Topology, line


def uneven_star(rates):
    nodes = [Node(f"h{i}", "cpu") for i in range(len(rates))] + [Node("s", "switch")]
    links = [
        Link(*ends, bandwidth_bytes_per_s=rate)
        for i, rate in enumerate(rates)
        for ends in ((f"h{i}", "s"), ("s", f"h{i}"))
    ]
    return Topology("star", nodes, links)


def test_two_ranks_overlap_chunk_by_chunk():
    """n chunks of one second each way: the last sum is there after n, and back after n + 1."""
    pair = line(2, bandwidth=1e9, latency=0)
    for chunks in (1, 4, 16):
        schedule = pipelined_all_reduce(
            all_reduce(2, chunks), pair, root=0, size_bytes=chunks * 1e9
        )
        timing = evaluate(schedule, pair, size_bytes=chunks * 1e9)
        assert timing.total_s == pytest.approx(chunks + 1)


def test_a_slow_host_is_used_once_each_way():
    """Phased, the slow link carries 2 (N - 1) / N buffers in one direction; here one."""
    topology = uneven_star([12.5e6, 12.5e6, 12.5e6, 2.5e6])
    schedule = pipelined_all_reduce(all_reduce(4, 64), topology, root=3, size_bytes=16e6)
    verify_schedule(schedule, topology=topology)
    pipelined_s = evaluate(schedule, topology, size_bytes=16e6).total_s
    phased_s = 2 * 3 / 4 * 16e6 / 2.5e6
    assert 16e6 / 2.5e6 <= pipelined_s < 0.8 * phased_s
    found = synthesize("all_reduce", topology, size_bytes=16e6, method="trees", time_limit_s=10)
    assert found.time_s <= pipelined_s * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([1e9, 3e9, 2.5e8]), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(0, 4),
)
def test_every_star_and_root_is_right(rates, chunks, root):
    topology = uneven_star(rates)
    collective = all_reduce(len(rates), chunks)
    place = root % len(rates)
    schedule = pipelined_all_reduce(collective, topology, root=place, size_bytes=1e6)
    assert schedule.collective == collective
    verify_schedule(schedule, topology=topology)
    time_s = evaluate(schedule, topology, size_bytes=1e6).total_s
    assert time_s >= lower_bound(collective, topology, 1e6).seconds * (1 - 1e-9)


def test_roots_are_the_widest_ranks():
    assert roots_of(uneven_star([1.0, 3.0, 2.0])) == [1, 2, 0]
    many = roots_of(uneven_star([1.0] * 9 + [5.0]))
    assert len(many) == 3
    assert many[0] == 9


def test_a_network_that_leads_one_way_is_refused():
    nodes = [Node("a", "gpu"), Node("b", "gpu")]
    one_way = Topology("one-way", nodes, [Link("a", "b", bandwidth_bytes_per_s=1e9)])
    with pytest.raises(InfeasibleError):
        pipelined_all_reduce(all_reduce(2), one_way, root=0, size_bytes=8)
