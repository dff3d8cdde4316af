"""A topology in the lab: every link with its own rate, nodes that pass on, routes that hold."""

from __future__ import annotations

import sys
import textwrap

import pytest

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.lab import LabSpec, run_lab
from fivefold.lab._plan import plan_topology
from fivefold.network.topology import Link, Node, Topology, fully_connected, ring, switch


def _line(rates):
    nodes = [Node(f"gpu{i}", "gpu") for i in range(len(rates) + 1)]
    links = []
    for i, rate in enumerate(rates):
        ends = f"gpu{i}", f"gpu{i + 1}"
        links += [
            Link(*ends, bandwidth_bytes_per_s=rate),
            Link(*reversed(ends), bandwidth_bytes_per_s=rate / 2),
        ]
    return Topology("line", nodes, links)


def test_a_link_is_shaped_where_it_leaves_each_node():
    _, steps = plan_topology(LabSpec.of_topology(_line([4e6])))
    shaped = {s.namespace: s.argv for s in steps if s.argv[0] == "tc"}
    assert shaped["host0"][7:9] == ("rate", "32000000bit")
    assert shaped["host1"][7:9] == ("rate", "16000000bit")


def test_every_node_knows_the_way_to_every_host():
    count, steps = plan_topology(LabSpec.of_topology(switch(3, bandwidth=1e6)))
    routes = {(s.namespace, s.argv[3]) for s in steps if s.argv[:3] == ("ip", "route", "add")}
    assert count == 1
    hosts = [f"10.77.0.{i}/32" for i in (1, 2, 3)]
    assert routes == {
        *((f"host{i}", other) for i in range(3) for k, other in enumerate(hosts) if k != i),
        *(("node0", host) for host in hosts),
    }


def test_parallel_links_are_one_cable_of_their_common_rate():
    nodes = [Node("a", "gpu"), Node("b", "gpu")]
    twice = [Link("a", "b", bandwidth_bytes_per_s=1e6)] * 2
    back = Link("b", "a", bandwidth_bytes_per_s=1e6, count=3)
    _, steps = plan_topology(LabSpec.of_topology(Topology("t", nodes, [*twice, back])))
    assert [s.argv[8] for s in steps if s.argv[0] == "tc"] == ["16000000bit", "24000000bit"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": "1Mbit/s"}, "a topology brings its own links"),
        ({"delay": "1ms"}, "a topology brings its own links"),
        ({"hosts": 3}, "has 4 ranks, but hosts is 3"),
    ],
)
def test_what_does_not_go_with_a_topology(fields, message):
    text = ring(4, bandwidth=1e6).to_toml()
    with pytest.raises(ConfigurationError, match=message):
        LabSpec(**{"hosts": 4, "topology": text, **fields})


def test_latency_and_one_way_links_are_refused():
    with pytest.raises(ConfigurationError, match="latencies up to 0"):
        LabSpec.of_topology(ring(3, bandwidth=1e6, latency="5 ms"))
    nodes = [Node("a", "gpu"), Node("b", "gpu")]
    with pytest.raises(ConfigurationError, match="from a to b has none back"):
        LabSpec.of_topology(Topology("t", nodes, [Link("a", "b", bandwidth_bytes_per_s=1e6)]))


def test_a_topology_in_two_parts_is_refused():
    nodes = [Node(name, "gpu") for name in "abcd"]
    links = [
        Link(one, other, bandwidth_bytes_per_s=1e6)
        for pair in ("ab", "cd")
        for one, other in (pair, pair[::-1])
    ]
    with pytest.raises(InfeasibleError):
        LabSpec.of_topology(Topology("t", nodes, links))


def test_a_topology_is_a_cluster():
    spec = LabSpec.of_topology(fully_connected(3, bandwidth=1e6), mtu=9000)
    assert spec.shapes
    assert spec.world_size == 3


_TRANSFER = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), 600_000
if rank == 2:
    with socket.create_server(("0.0.0.0", 5000)) as server:
        for _ in range(2):
            with server.accept()[0] as peer:
                left = size
                while left:
                    left -= len(peer.recv(1 << 16))
                peer.sendall(b"x")
else:
    for turn in (0, 1):
        if rank != turn:
            continue
        time.sleep(turn * 1.5)
        while True:
            try:
                peer = socket.create_connection(("host2", 5000))
                break
            except OSError:
                time.sleep(0.02)
        with peer:
            start = time.perf_counter()
            peer.sendall(bytes(size))
            peer.recv(1)
            print(size / (time.perf_counter() - start))
"""


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.usefixtures("bridge_works")
def test_the_slowest_link_on_the_way_is_what_one_gets(tmp_path):
    # host0 - 1 MB/s - host1 - 4 MB/s - host2: host1 passes on what host0 sends to host2.
    spec = LabSpec.of_topology(_line([1e6, 4e6]))
    script = textwrap.dedent(_TRANSFER)
    result = run_lab(
        spec, [sys.executable, "-c", script], timeout_s=60, stream=False, log_folder=tmp_path / "l"
    ).check()
    through, direct = (float(result.ranks[rank].stdout()) for rank in (0, 1))
    assert 0.6e6 < through < 1.1e6
    assert 2.4e6 < direct < 4.6e6
