"""The event loop against exact fractions on random tasks, and against closed forms."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.network.simulation import Compute, Flow, simulate
from fivefold.network.topology import Link, Node, Topology
from oracles.exact_fluid import exact_times

NODES = 3


@st.composite
def networks(draw):
    """Links between all pairs of three nodes, some twice."""
    nodes = [Node(f"n{number}", "gpu") for number in range(NODES)]
    pairs = [(a, b) for a in range(NODES) for b in range(NODES) if a != b]
    links = [
        Link(
            f"n{a}",
            f"n{b}",
            bandwidth_bytes_per_s=float(draw(st.sampled_from([1, 2, 3, 8]))),
            latency_s=float(draw(st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(2)]))),
        )
        for a, b in [*pairs, *draw(st.lists(st.sampled_from(pairs), max_size=2))]
    ]
    return Topology("random", nodes, links)


@st.composite
def cases(draw):
    topology = draw(networks())
    tasks = []
    for number in range(draw(st.integers(1, 8))):
        common = {
            "release_s": float(draw(st.sampled_from([0, 0, 0, Fraction(1, 2), 3]))),
            "depends_on": draw(
                st.lists(st.sampled_from(range(number)), unique=True, max_size=2)
                if number
                else st.just([])
            ),
            "priority": draw(st.integers(0, 1)),
        }
        if draw(st.integers(0, 3)) == 0:
            processor = draw(st.sampled_from([None, "p"]))
            seconds = float(draw(st.sampled_from([0, 1, Fraction(5, 4)])))
            tasks.append(Compute(number, seconds, processor=processor, **common))
        else:
            tasks.append(draw_flow(draw, topology, number, common))
    return topology, tasks


def draw_flow(draw, topology, number, common):
    here = source = draw(st.integers(0, NODES - 1))
    route = []
    for _ in range(draw(st.integers(0, 3))):
        link = draw(st.sampled_from(topology.out_links(here).tolist()))
        route.append(link)
        here = int(topology.link_targets[link])
    group = draw(st.sampled_from([None, None, "g"]))
    if group:
        common["priority"] = 0
    return Flow(
        number,
        f"n{source}",
        f"n{here}",
        float(draw(st.sampled_from([0, 1, 4, 7]))),
        route,
        group=group,
        weight=draw(st.sampled_from([1.0, 2.0])),
        rate_cap_bytes_per_s=draw(st.sampled_from([None, None, 0.5])),
        **common,
    )


@given(cases())
def test_times_are_those_of_the_exact_simulator(case):
    topology, tasks = case
    result = simulate(topology, tasks)
    exact = exact_times(tasks, topology.capacities_bytes_per_s, topology.latencies_s)
    for number, (start, sent, finish) in exact.items():
        found = result.start_of(number), result.sent_s[number], result.finish_of(number)
        np.testing.assert_allclose(found, [float(start), float(sent), float(finish)], rtol=1e-10)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_byte_is_counted_and_no_link_is_overloaded(case):
    topology, tasks = case
    result = simulate(topology, tasks, record_rates=True)
    carried = np.zeros(topology.num_links)
    for task in tasks:
        if isinstance(task, Flow):
            np.add.at(carried, list(task.route), task.size_bytes)
    np.testing.assert_allclose(result.link_bytes, carried, rtol=1e-12)
    assert np.all(result.over_capacity_s <= result.link_busy_s + 1e-9)
    for link in range(topology.num_links):
        times, rates = result.link_rates(link)
        assert np.all(rates <= topology.capacities_bytes_per_s[link] * (1 + 1e-9))
        # The integral of the rate is what was carried.
        moved = np.sum(np.diff(times) * rates[:-1]) if times.size else 0.0
        assert moved == pytest.approx(carried[link], rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(cases(), st.floats(0.0, 12.0))
def test_a_simulation_that_is_stopped_is_the_beginning_of_the_whole_one(case, until_s):
    topology, tasks = case
    whole, part = simulate(topology, tasks), simulate(topology, tasks, until_s=until_s)
    early = whole.finish_s <= until_s
    np.testing.assert_allclose(part.finish_s[early], whole.finish_s[early], rtol=1e-12)
    assert np.all(np.isnan(part.finish_s[~early]))
    assert part.stopped == bool((~early).any())
    assert np.all(part.moved_bytes <= whole.moved_bytes * (1 + 1e-9))
    assert np.all(part.link_bytes <= whole.link_bytes * (1 + 1e-9) + 1e-9)
