"""The closed forms against the simulator, against sums by hand, and at their edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.network.aggregation import (
    admit_jobs,
    aggregation_rate_bytes_per_s,
    aggregation_time_s,
    best_effort_bytes,
    best_effort_time_s,
    several_trees_time_s,
    slots_for_line_rate,
)
from fivefold.network.simulation import AggregationRequest, Flow, simulate
from fivefold.network.topology import Aggregation, SwitchAbility, Topology, switch


def star(workers, rate, latency_s, pool):
    plain = switch(workers, bandwidth=rate, latency=latency_s)
    hub = next(node.name for node in plain.nodes if not node.is_rank)
    able = SwitchAbility(hub, aggregation=pool)
    return Topology("star", plain.nodes, plain.links, switches=[able]), hub


@pytest.mark.parametrize("slots", [1, 4, 64])
@pytest.mark.parametrize("reduce_rate", [None, 2e8, 5e9])
@pytest.mark.parametrize("latency_s", [0.0, 5e-6, 1e-3])
def test_the_closed_form_is_what_the_simulator_finds(slots, reduce_rate, latency_s):
    pool = Aggregation(slots=64, slot_bytes=4096, rate_bytes_per_s=reduce_rate)
    network, hub = star(5, 1e9, latency_s, pool)
    leaves = [network.nodes[network.node_of_rank(rank)].name for rank in range(5)]
    request = AggregationRequest("sum", dict.fromkeys(leaves, hub), leaves, 3e6, slots=slots)
    found = simulate(network, [request])
    # Up and down, one link each.
    round_trip_s = 2 * float(network.latencies_s[0])
    expected = aggregation_time_s(
        3e6,
        line_rate_bytes_per_s=1e9,
        slots=slots,
        payload_bytes=4096,
        round_trip_s=round_trip_s,
        reduce_rate_bytes_per_s=reduce_rate,
    )
    assert float(found.finish_s[0]) == pytest.approx(expected, rel=1e-9)


def test_best_effort_bytes_are_what_the_servers_link_carries_in_the_simulator():
    """Chunks that find no slot pass the switch once for each worker."""
    workers, chunks, hits, chunk = 4, 20, 15, 1e5
    network, hub = star(workers + 1, 1e9, 0.0, Aggregation(slots=8, slot_bytes=1024))
    names = [network.nodes[network.node_of_rank(rank)].name for rank in range(workers + 1)]
    server, leaves = names[-1], names[:-1]
    tasks = []
    for number in range(chunks):
        if number < hits:
            tasks.append(Flow(f"sum {number}", hub, server, chunk, _route(network, hub, server)))
        else:
            tasks += [
                Flow(
                    f"{number} from {leaf}",
                    leaf,
                    server,
                    chunk,
                    (*_route(network, leaf, hub), *_route(network, hub, server)),
                )
                for leaf in leaves
            ]
    found = simulate(network, tasks)
    (down,) = _route(network, hub, server)
    size = chunks * chunk
    expected = best_effort_bytes(size, workers=workers, hit_share=hits / chunks)
    assert float(found.link_bytes[down]) == pytest.approx(expected)
    predicted_s = best_effort_time_s(
        size,
        workers=workers,
        hit_share=hits / chunks,
        line_rate_bytes_per_s=1e9,
        server_rate_bytes_per_s=1e9,
    )
    assert max(float(end) for end in found.finish_s) == pytest.approx(predicted_s)


def _route(network, source, target):
    leaving = network.out_links(network.index(source))
    ends = network.link_targets[leaving]
    return tuple(int(link) for link in leaving[ends == network.index(target)])


def test_published_pools_fill_their_lines_for_round_trips_of_a_rack():
    """SwitchML's pools: 128 slots at 10 Gbit/s and 512 at 100, of 256 bytes."""
    for slots, line in ((128, 1.25e9), (512, 12.5e9)):
        longest_s = slots * 256 / line
        needed = slots_for_line_rate(
            line_rate_bytes_per_s=line, payload_bytes=256, round_trip_s=longest_s * 0.999
        )
        assert needed <= slots
        common = {"line_rate_bytes_per_s": line, "slots": slots, "payload_bytes": 256}
        assert aggregation_rate_bytes_per_s(**common, round_trip_s=longest_s * 0.999) == line
        assert aggregation_rate_bytes_per_s(**common, round_trip_s=2 * longest_s) == line / 2


@settings(max_examples=100, deadline=None)
@given(
    line=st.floats(1e3, 1e12),
    payload=st.floats(1, 1e6),
    round_trip_s=st.floats(0, 1),
)
def test_the_pool_size_is_the_fewest_slots_at_line_rate(line, payload, round_trip_s):
    slots = slots_for_line_rate(
        line_rate_bytes_per_s=line, payload_bytes=payload, round_trip_s=round_trip_s
    )
    common = {
        "line_rate_bytes_per_s": line,
        "payload_bytes": payload,
        "round_trip_s": round_trip_s,
    }
    assert aggregation_rate_bytes_per_s(slots=slots, **common) == pytest.approx(line)
    if slots > 1:
        fewer = aggregation_rate_bytes_per_s(slots=slots - 1, **common)
        assert fewer < line * (1 + 1e-12)


def test_best_effort_lies_between_a_switch_and_a_parameter_server():
    assert best_effort_bytes(7.0, workers=6, hit_share=1) == 7.0
    assert best_effort_bytes(7.0, workers=6, hit_share=0) == 42.0
    assert best_effort_bytes(7.0, workers=1, hit_share=0) == 7.0


def test_several_trees_add_up_to_the_line():
    trees = [1e9, 1e9, 0.0]
    slow = several_trees_time_s(4e9, tree_rates_bytes_per_s=trees, line_rate_bytes_per_s=9e9)
    fast = several_trees_time_s(4e9, tree_rates_bytes_per_s=trees, line_rate_bytes_per_s=1e9)
    assert (slow, fast) == (2.0, 4.0)
    assert several_trees_time_s(1, tree_rates_bytes_per_s=[], line_rate_bytes_per_s=1) == math.inf
    assert several_trees_time_s(0, tree_rates_bytes_per_s=[], line_rate_bytes_per_s=1) == 0.0


def test_trees_go_to_those_who_gain_most():
    gains = {"b": 1.0, "a": 1.0, "c": 3.0, "d": 0.0}
    assert admit_jobs(gains, trees=2) == ("c", "a")
    assert admit_jobs(gains, trees=9) == ("c", "a", "b")
    assert admit_jobs(gains, trees=0) == ()


GOOD = {
    "line_rate_bytes_per_s": 1.0,
    "slots": 1,
    "payload_bytes": 1.0,
    "round_trip_s": 0.0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("line_rate_bytes_per_s", 0.0),
        ("line_rate_bytes_per_s", math.inf),
        ("slots", 0),
        ("payload_bytes", -1.0),
        ("round_trip_s", -1.0),
        ("round_trip_s", math.nan),
        ("reduce_rate_bytes_per_s", 0.0),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ConfigurationError, match=name):
        aggregation_time_s(1.0, **{**GOOD, name: value})


def test_other_bad_values():
    with pytest.raises(ConfigurationError, match="size_bytes"):
        aggregation_time_s(-1.0, **GOOD)
    with pytest.raises(ConfigurationError, match="hit_share"):
        best_effort_bytes(1.0, workers=2, hit_share=1.5)
    with pytest.raises(ConfigurationError, match="no number"):
        admit_jobs({"a": math.nan}, trees=1)
    with pytest.raises(ConfigurationError, match="trees"):
        admit_jobs({}, trees=-1)
    assert aggregation_time_s(0.0, **{**GOOD, "round_trip_s": 5.0}) == 0.0
