"""Switches of the lab that sum, in their own namespaces, and routes that a plan chose."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.lab import LabSpec, run_lab
from fivefold.lab._plan import lab_facts, plan_topology, rank_environment
from fivefold.network.topology import parse_topology, ring, switch

_CLUSTER = "leaf_spine:4,leaves=2,spines=2,bandwidth=25MB/s"


def _walk(topology, steps, source, address):
    """Where a packet goes, by the routes and rules that the steps write; a slow reference."""
    names, others = [], 0
    for node in range(topology.num_nodes):
        rank = int(topology.rank_of_node[node])
        names.append(f"host{rank}" if rank >= 0 else f"node{others}")
        others += rank < 0
    cables, here = {}, {}
    for step in steps:
        words = step.argv
        if words[:3] == ("ip", "addr", "add"):
            here[words[3].partition("/")[0]] = step.namespace
            if words[3].endswith("/30"):
                cables.setdefault(words[5], set()).add(step.namespace)
    at, own, way = f"host{source}", f"10.77.0.{source + 1}", []
    while here[address] != at:
        tables = [
            step.argv[8]
            for step in steps
            if step.namespace == at
            and step.argv[:3] == ("ip", "rule", "add")
            and step.argv[4] == f"{own}/32"
            and step.argv[6] == f"{address}/32"
        ]
        (device,) = (
            step.argv[7]
            for step in steps
            if step.namespace == at
            and step.argv[:4] == ("ip", "route", "add", f"{address}/32")
            and list(step.argv[step.argv.index("table") + 1 :] if "table" in step.argv else [])
            == tables
        )
        way.append(names.index(at))
        (at,) = cables[device] - {at}
        assert len(way) <= topology.num_nodes, "it goes round in circles"
    return [*way, names.index(at)]


def _nodes_of(topology, links):
    return [int(topology.link_sources[links[0]]), *(int(topology.link_targets[n]) for n in links)]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_packets_take_the_routes_that_were_asked_for(data):
    topology = parse_topology(_CLUSTER)
    spines = [topology.index(f"spine{n}") for n in range(2)]
    routes = {}
    for source, target in ((0, 2), (2, 0), (1, 3), (3, 0), (1, 2)):
        ends = topology.node_of_rank(source), topology.node_of_rank(target)
        leaf = [topology.index(f"leaf{rank // 2}") for rank in (source, target)]
        nodes = [ends[0], leaf[0], data.draw(st.sampled_from(spines)), leaf[1], ends[1]]
        routes[source, target] = tuple(
            next(
                link
                for link in range(topology.num_links)
                if (topology.link_sources[link], topology.link_targets[link]) == pair
            )
            for pair in itertools.pairwise(nodes)
        )
    spec = LabSpec.of_topology(topology, routes=routes)
    _, steps = plan_topology(spec)
    for source in range(4):
        for target in set(range(4)) - {source}:
            links = routes.get((source, target), topology.shortest_route(source, target))
            way = _walk(topology, steps, source, f"10.77.0.{target + 1}")
            assert way == _nodes_of(topology, links)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({(0, 9): (0,)}, "host 0 to host 9 does not exist"),
        ({(1, 1): (0,)}, "host 1 to host 1 does not exist"),
        ({(0, 2): (99,)}, "does not go on with link 99"),
        ({(0, 2): ()}, "ends at gpu0"),
        ({(0, 2): 3}, "a route is 3 for"),
        ({5: (0,)}, "for 5; write"),
    ],
)
def test_routes_that_lead_nowhere(routes, message):
    with pytest.raises(ConfigurationError, match=message):
        LabSpec.of_topology(ring(4, bandwidth=1e6), routes=routes)
    with pytest.raises(ConfigurationError, match="which was not given"):
        LabSpec(hosts=4, rate=1e6, routes=routes)


@pytest.mark.parametrize("node", ["leaf0", "leaf1", "spine1"])
def test_all_hosts_reach_a_switch_that_sums_by_the_fewest_links(node):
    topology = parse_topology(_CLUSTER)
    _, steps = plan_topology(LabSpec.of_topology(topology, aggregators={node: {}}))
    for host in range(4):
        way = _walk(topology, steps, host, "10.79.0.1")
        near = node.startswith("spine") or f"leaf{host // 2}" == node
        hops = 2 if node.startswith("spine") else 1 if near else 3
        assert len(way) == hops + 1
        assert way[-1] == topology.index(node)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregators": {"gpu0": {}}}, "no switch 'gpu0' that could aggregate"),
        ({"aggregators": {"switch0": {"slot": 3}}}, "has no option 'slot'"),
    ],
)
def test_who_cannot_sum(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        LabSpec.of_topology(switch(2, bandwidth=1e6), **fields)
    with pytest.raises(ConfigurationError, match="joined directly"):
        LabSpec.of_topology(ring(3, bandwidth=1e6), aggregators={"gpu0": {}})


def test_ranks_are_told_where_sums_are_made():
    def told(aggregators, **base):
        spec = LabSpec.of_topology(parse_topology(_CLUSTER), aggregators=aggregators)
        env = rank_environment(0, spec, lab_facts(spec, "tbf"), base=base)
        return json.loads(env["FIVEFOLD_LAB"])["aggregation"], env.get("FIVEFOLD_AGGREGATION")

    assert told({}) == ({}, None)
    assert told({"leaf1": {}}) == ({"leaf1": "10.79.0.1:5900"}, "10.79.0.1:5900")
    assert told({"leaf1": {}}, FIVEFOLD_AGGREGATION="other:1")[1] == "other:1"
    both = {"leaf0": "10.79.0.1:5900", "leaf1": "10.79.0.2:5900"}
    assert told({"leaf1": {}, "leaf0": {}}) == (both, None)


_SUM = """
import json, os, pathlib, signal, socket, sys, time
import numpy as np
from fivefold.network.aggregation import AggregationClient, AggregationOptions
from fivefold.network.aggregation.wire import ordered_sum
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

class Hosts:
    # A star around rank 0: everybody's array there, the answer back.
    def __init__(self):
        if rank == 0:
            with socket.create_server(("0.0.0.0", 5000)) as server:
                self.peers = [server.accept()[0] for _ in range(size - 1)]
            self.peers = dict(sorted((peer.recv(1)[0], peer) for peer in self.peers))
        else:
            while True:
                try:
                    self.peers = {0: socket.create_connection(("host0", 5000))}
                    break
                except OSError:
                    time.sleep(0.02)
            self.peers[0].sendall(bytes([rank]))

    def _all(self, mine, fold):
        if rank:
            self.peers[0].sendall(mine.tobytes())
            return self._read(0, mine)
        found = fold([mine, *(self._read(other, mine) for other in self.peers)])
        for peer in self.peers.values():
            peer.sendall(found.tobytes())
        return found

    def _read(self, other, like):
        data = bytearray()
        while len(data) < like.nbytes:
            data += self.peers[other].recv(like.nbytes - len(data))
        return np.frombuffer(bytes(data), like.dtype)

    def minimum(self, flags):
        return self._all(flags, lambda parts: np.minimum.reduce(parts))

    def sum(self, values, dtype):
        return self._all(values.copy(), lambda parts: ordered_sum(parts, dtype))

parts = [np.random.default_rng(n).normal(size=100_000).astype(np.float32) for n in range(size)]
client = AggregationClient(
    os.environ["FIVEFOLD_AGGREGATION"], job="a", rank=rank, size=size, fallback=Hosts(),
    options=AggregationOptions(window=8, connect_timeout_s=10.0),
)
told = []
for turn in range(2):
    if turn == 1 and sys.argv[1] == "kill" and rank == 0:
        for place in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            if b"-m\\0fivefold.network.aggregation" in place.read_bytes():
                os.kill(int(place.parent.name), signal.SIGKILL)
    mine = parts[rank].copy()
    outcome = client.all_reduce(mine)
    assert mine.tobytes() == ordered_sum(parts, "float32").tobytes()
    told.append([outcome.chunks, outcome.summed])
print(json.dumps(told))
"""


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.usefixtures("bridge_works")
@pytest.mark.parametrize("how", ["stay", "kill"])
def test_the_switch_itself_sums_and_where_it_dies_the_hosts_do(tmp_path, how):
    spec = LabSpec.of_topology(
        parse_topology(_CLUSTER), mtu=9000, aggregators={"leaf1": {"slots": 16}}
    )
    command = [sys.executable, "-c", textwrap.dedent(_SUM), how]
    result = run_lab(spec, command, timeout_s=60, stream=False, log_folder=tmp_path / "l").check()
    told = [json.loads(rank.stdout()) for rank in result.ranks]
    assert all(own == told[0] for own in told)
    assert told[0][0] == [7, 7]
    if how == "stay":
        assert told[0][1] == [7, 7]
        assert result.aggregation["leaf1"]["hits"] == 14
        assert result.aggregation["leaf1"]["slots_free"] == 16
    else:
        assert told[0][1][1] == 0
        assert result.aggregation == {}


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.usefixtures("bridge_works")
def test_a_bridge_sums_too_and_bad_options_end_the_run(tmp_path):
    spec = LabSpec(hosts=2, rate="80Mbit/s", aggregators={"switch": {"slot_bytes": "7B"}})
    with pytest.raises(
        UnsupportedError, match="the aggregating switch switch did not start: error:"
    ):
        run_lab(spec, ["true"], stream=False, log_folder=tmp_path / "bad")
    spec = LabSpec(hosts=2, rate="80Mbit/s", aggregators={"switch": {}})
    command = [sys.executable, "-c", textwrap.dedent(_SUM), "stay"]
    result = run_lab(spec, command, timeout_s=60, stream=False, log_folder=tmp_path / "l").check()
    assert result.aggregation["switch"]["hits"] == 14


def test_the_relay_has_no_switch_that_sums(monkeypatch):
    from fivefold.lab._run import choose_means
    from fivefold.lab.capabilities import Capabilities, Capability

    works = [
        Capability(n, n, works=n != "netem")
        for n in ("namespaces", "bridge", "veth", "tbf", "netem", "tun")
    ]
    monkeypatch.setattr(
        "fivefold.lab._run.probe_capabilities", lambda: Capabilities("root", tuple(works))
    )
    spec = LabSpec(delay="1ms", aggregators={"switch": {}})
    with pytest.raises(UnsupportedError, match="no aggregating switch"):
        choose_means(spec, allow_unshaped=True)
