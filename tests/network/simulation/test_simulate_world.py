"""What holds of any network and any flows: names mean nothing, scales cancel, bytes are kept."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fivefold.network.simulation import Flow, simulate
from fivefold.network.topology import Link, Node, Topology

NODES = 4
RATES = [1.0, 2.0, 3.0, 8.0]


@st.composite
def worlds(draw):
    """Four nodes with links between all pairs, and flows over one or two of them."""
    nodes = [Node(f"n{number}", "gpu") for number in range(NODES)]
    links = [
        Link(f"n{a}", f"n{b}", bandwidth_bytes_per_s=draw(st.sampled_from(RATES)))
        for a in range(NODES)
        for b in range(NODES)
        if a != b
    ]
    topology = Topology("random", nodes, links)
    flows = []
    for number in range(draw(st.integers(1, 7))):
        source, *stops = draw(st.permutations(range(NODES)))[: draw(st.integers(2, 3))]
        route, here = [], source
        for stop in stops:
            ends = (topology.link_sources == here) & (topology.link_targets == stop)
            route.append(int(np.flatnonzero(ends)[0]))
            here = stop
        flows.append(
            Flow(
                number,
                f"n{source}",
                f"n{here}",
                draw(st.sampled_from([0.0, 1.0, 4.0, 7.0])),
                route,
                release_s=draw(st.sampled_from([0.0, 0.5, 3.0])),
                weight=draw(st.sampled_from([1.0, 2.0])),
                priority=draw(st.integers(0, 1)),
            )
        )
    return topology, flows


def ends(topology, flows):
    return simulate(topology, flows).finish_s


@given(worlds())
def test_names_of_nodes_mean_nothing(world):
    topology, flows = world
    new = {f"n{number}": f"other {NODES - number}" for number in range(NODES)}
    renamed = Topology(
        "renamed",
        [dataclasses.replace(node, name=new[node.name]) for node in topology.nodes],
        [
            dataclasses.replace(link, source=new[link.source], target=new[link.target])
            for link in topology.links
        ],
    )
    moved = [
        dataclasses.replace(flow, source=new[flow.source], target=new[flow.target])
        for flow in flows
    ]
    assert ends(renamed, moved).tolist() == ends(topology, flows).tolist()


@given(worlds(), st.sampled_from([0.5, 2.0, 1024.0]))
def test_twice_the_bytes_at_twice_the_rates_take_as_long(world, scale):
    topology, flows = world
    larger = [dataclasses.replace(flow, size_bytes=scale * flow.size_bytes) for flow in flows]
    np.testing.assert_allclose(
        ends(topology.scaled(bandwidth=scale), larger), ends(topology, flows), rtol=1e-12
    )


@given(worlds())
def test_every_link_carries_the_bytes_of_the_flows_over_it(world):
    topology, flows = world
    expected = np.zeros(topology.num_links)
    for flow in flows:
        expected[list(flow.route)] += flow.size_bytes
    found = simulate(topology, flows)
    np.testing.assert_allclose(found.link_bytes, expected, rtol=1e-9, atol=1e-9)


@given(worlds())
def test_no_link_carries_more_than_its_rate_allows(world):
    topology, flows = world
    found = simulate(topology, flows)
    most = topology.capacities_bytes_per_s * ends(topology, flows).max()
    assert (np.asarray(found.link_bytes) <= most * (1 + 1e-9) + 1e-9).all()


@given(worlds(), st.data())
def test_a_slower_link_delays_flows_that_share_nothing_else(world, data):
    # With several links a slower one may help others (it holds back a flow that they compete
    # with); where all flows take one link, in one class and at once, nobody ends earlier.
    topology, flows = world
    link = flows[0].route[0]
    source, target = topology.links[link].source, topology.links[link].target
    alone = [
        dataclasses.replace(flow, source=source, target=target, route=[link], priority=0)
        for flow in flows
    ]
    share = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    slower = Topology(
        "slower",
        topology.nodes,
        [
            dataclasses.replace(
                one, bandwidth_bytes_per_s=one.bandwidth_bytes_per_s * (share if i == link else 1)
            )
            for i, one in enumerate(topology.links)
        ],
    )
    before, after = ends(topology, alone), ends(slower, alone)
    assert (after >= before * (1 - 1e-12)).all()
