"""In-network aggregation in the simulator against the closed forms of its systems."""

import math

import pytest

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
    # SwitchML: the least of line rate, slots x payload / round trip, and the adders' rate.
    pool_rate = slots * 4096 / round_trip_s if round_trip_s else math.inf
    expected = round_trip_s + 3e6 / min(1e9, pool_rate, reduce_rate or math.inf)
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
    # ATP: the server receives (f + (1 - f) n) S, and its link is the fullest.
    hit_share = hits / chunks
    expected = (hit_share + (1 - hit_share) * workers) * chunks * chunk
    assert float(found.link_bytes[down]) == pytest.approx(expected)
    assert max(float(end) for end in found.finish_s) == pytest.approx(expected / 1e9)


def _route(network, source, target):
    leaving = network.out_links(network.index(source))
    ends = network.link_targets[leaving]
    return tuple(int(link) for link in leaving[ends == network.index(target)])
