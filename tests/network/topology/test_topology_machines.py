"""Named machines and TACCL's profiles against published tables."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from fivefold.errors import ConfigurationError, DataError
from fivefold.network.topology import TacclProfile, named_topology, parse_topology
from fivefold.network.topology.text import catalogue


def least_flow(topology, unit_bytes_per_s, rate, *, scale):
    """Least flow that any rank receives when each rank injects ``rate`` units of capacity."""
    num_nodes, source = topology.num_nodes, topology.num_nodes
    capacity = np.zeros((num_nodes + 1, num_nodes + 1), np.int64)
    np.add.at(
        capacity,
        (topology.link_sources, topology.link_targets),
        np.rint(topology.capacities_bytes_per_s / unit_bytes_per_s * scale).astype(np.int64),
    )
    capacity[source, topology.rank_nodes] = round(rate * scale)
    graph = csr_matrix(capacity.astype(np.int32))
    return min(maximum_flow(graph, source, int(node)).flow_value for node in topology.rank_nodes)


# Published throughput optima of all-gather (ForestColl's table and closed forms): seconds per GB of
# a rank's shard, or link times per chunk for unit links.
OPTIMA = [
    ("dgx_a100:1", 1e9, Fraction(7, 300)),
    ("dgx_a100:2", 1e9, Fraction(3, 65)),
    ("dgx_a100:4", 1e9, Fraction(3, 25)),
    ("mi250:1", 1e9, Fraction(7, 150)),
    ("mi250:2", 1e9, Fraction(15, 166)),
    ("dgx1:1", 25e9, Fraction(7, 6)),
    ("dgx2:1", 1e9, Fraction(3, 25)),
    ("dgx2:2", 5e8, Fraction(31, 250)),
    ("torus:4x4", 25e9, Fraction(15, 4)),
    ("torus:3x3x3", 25e9, Fraction(13, 3)),
    ("torus:3x4x5", 25e9, Fraction(59, 6)),
    ("hypercube:5", 25e9, Fraction(31, 5)),
    ("mesh:4x4", 25e9, Fraction(15, 2)),
    ("mesh:5x5", 25e9, Fraction(24, 2)),
    ("mesh:4x2x3", 25e9, Fraction(23, 3)),
]


@pytest.mark.parametrize(("text", "unit", "inverse"), OPTIMA, ids=[case[0] for case in OPTIMA])
def test_published_throughput_optimum(text, unit, inverse):
    """The published rate reaches every rank, and no rank gets more than a hair above it."""
    topology = parse_topology(text)
    number = topology.num_ranks
    scale = inverse.numerator * 1000
    rate = 1 / inverse
    assert least_flow(topology, unit, rate, scale=scale) == number * rate * scale
    above = rate * Fraction(1001, 1000)
    assert least_flow(topology, unit, above, scale=scale) < number * above * scale


@pytest.mark.parametrize(
    ("name", "ranks", "out_bytes_per_s"),
    [
        ("dgx1", 8, 6 * 25e9),
        ("ndv2", 8, 6 * 25e9),
        ("dgx2", 16, 125e9),
        ("dgx_a100", 8, 300e9),
        ("dgx_h100", 8, 450e9),
        ("mi250", 16, 7 * 50e9),
    ],
)
def test_every_device_of_a_box_has_its_links(name, ranks, out_bytes_per_s):
    box = named_topology(name)
    assert box.num_ranks == ranks
    out = np.bincount(box.link_sources, box.capacities_bytes_per_s)[box.rank_nodes]
    into = np.bincount(box.link_targets, box.capacities_bytes_per_s)[box.rank_nodes]
    assert set(out.tolist()) == set(into.tolist()) == {out_bytes_per_s}


@pytest.mark.parametrize(
    ("name", "boxes", "per_box_bytes_per_s"),
    [
        ("dgx1", 3, 4 * 12.5e9),
        ("ndv2", 2, 12.5e9),
        ("ndv2", 4, 12.5e9),
        ("dgx2", 2, 8 * 12.5e9),
        ("dgx2", 5, 8 * 12.5e9),
        ("dgx_a100", 4, 8 * 25e9),
        ("dgx_h100", 4, 8 * 50e9),
        ("mi250", 3, 16 * 16e9),
    ],
)
def test_boxes_are_joined_by_their_nics(name, boxes, per_box_bytes_per_s):
    machine = named_topology(name, boxes=boxes)
    machine.require_connected()
    assert len(machine.hosts) == boxes
    hosts = [node.host for node in machine.nodes]
    for box in range(boxes):
        leaving = [
            link.capacity_bytes_per_s
            for link, a, b in zip(
                machine.links, machine.link_sources, machine.link_targets, strict=True
            )
            if hosts[a] == f"box{box}" and hosts[b] != f"box{box}"
        ]
        assert sum(leaving) == per_box_bytes_per_s


def test_ndv2_sends_from_gpu_0_to_gpu_1():
    machine = named_topology("ndv2", boxes=2)
    between = [link for link in machine.links if link.source[:4] != link.target[:4]]
    assert [(link.source, link.target) for link in between] == [
        ("box0/gpu0", "box1/gpu1"),
        ("box1/gpu0", "box0/gpu1"),
    ]
    assert {link.latency_s for link in between} == {1.3e-6}


def test_a_nic_has_the_same_latency_among_many_boxes():
    for boxes in (2, 3):
        machine = named_topology("dgx2", boxes=boxes)
        route = list(machine.shortest_route(1, 16))
        assert machine.latencies_s[route].sum() == pytest.approx(2.6e-6)


def test_every_machine_says_where_it_is_from():
    for name, source in catalogue().machines.items():
        assert len(source) > 40
        assert named_topology(name).source == source
    with pytest.raises(ConfigurationError, match="did you mean 'dgx_a100'"):
        named_topology("dgx-a100")
    with pytest.raises(ConfigurationError, match="boxes"):
        named_topology("dgx1", boxes=0)


SMALL = {
    "gpus_per_node": 2, "alpha": 0.3, "remote_alpha": 2.6, "remote_beta": 105,
    "remote_invbw": 107, "links": [[0, 1], [1, 0]], "betas": [[0, 8], [8, 0]],
    "invbws": [[0, 9], [9, 0]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "pair", "step_us"),
    [
        # Times of one chunk, multiplied as the authors did it.
        ("ndv2_1MB", (0, 1), 0.3 + 23),
        ("ndv2_1MB", (0, 2), 0.3 + 46),
        ("ndv2_32KB", (3, 2), (3 + 7.18) / 10),
        ("ndv2_1KB", (7, 4), (30 + 4.5) / 100),
        ("dgx2_1MB", (5, 9), 0.3 + 8),
        ("dgx2_1KB", (0, 15), (30 + 1) / 100),
    ],
)
def test_a_profile_gives_its_authors_times(name, pair, step_us):
    profile = TacclProfile.load(name)
    machine = TacclProfile.load(name).to_topology()
    route = list(machine.shortest_route(*pair))
    slowest = machine.capacities_bytes_per_s[route].min()
    time_s = machine.latencies_s[route].sum() + profile.chunk_bytes / slowest
    assert time_s * 1e6 == pytest.approx(step_us, rel=1e-12)


def test_latencies_as_the_solver_of_taccl_sees_them():
    machine = TacclProfile.load("ndv2_1MB").to_topology(boxes=2, as_solved=True)
    assert sorted(set(np.round(machine.latencies_s * 1e6, 9).tolist())) == [0.0, 2.0]


def test_nics_are_divided_among_connections():
    relay = TacclProfile.load("ndv2_1MB").to_topology(boxes=2)
    direct = TacclProfile.load("ndv2_1MB").to_topology(boxes=2, connections="direct-map")
    rates = [x.bandwidth_bytes_per_s for x in direct.links if x.source[:4] != x.target[:4]]
    assert len(rates) == 16
    assert min(relay.capacities_bytes_per_s) == pytest.approx(8 * rates[0])
    own = TacclProfile.load("dgx2_1MB").to_topology(boxes=3, connections={0: [1, 2]})
    between = [(x.source, x.target) for x in own.links if x.source[:4] != x.target[:4]]
    assert len(between) == 3 * 2 * 2


@pytest.mark.parametrize("links_are_bool", [False, True])
def test_a_profile_from_a_file(tmp_path, links_are_bool):
    table = {
        "name": "pair",
        "gpus_per_node": 2,
        "alpha": 1,
        "links": [[0, 1], [1, 0]],
        "betas": [[0, 10], [20, 0]],
        "invbws": [[0, 11], [21, 0]],
        "remote_alpha": 5,
        "remote_beta": 100,
        "remote_invbw": 105,
    }
    table["links"] = [[False, True], [True, False]] if links_are_bool else table["links"]
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(table))
    found = TacclProfile.load(path, chunk_bytes="1 MB").to_topology()
    # Matrices are [target][source].
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in found.links}
    assert rates == {("gpu1", "gpu0"): pytest.approx(1e11), ("gpu0", "gpu1"): pytest.approx(5e10)}
    assert TacclProfile.load(table, chunk_bytes="1 MB").to_topology() == found
    with pytest.raises(ConfigurationError, match="what size"):
        TacclProfile.load(path).to_topology()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha": None}, "no number alpha"),
        ({"node_betas_list": [1, 2, 3]}, "node_betas_list"),
        ({"node_invbws_list": "x"}, "node_invbws_list"),
        ({"links": [[0]], "betas": [[0, 1]]}, "betas"),
        ({"gpus_per_node": 2, "links": [[0, 1], [1, 0]], "betas": [[False, True]] * 2}, "betas of"),
        ({"gpus_per_node": 4}, "NDv2 box; got 4"),
    ],
)
def test_damaged_profiles(change, words):
    table = {
        "gpus_per_node": 8,
        "alpha": 0.3,
        "node_betas_list": [23, 46],
        "node_invbws_list": [23, 46],
        "remote_alpha": 2.6,
        "remote_beta": 105,
        "remote_invbw": 107,
    }
    with pytest.raises(DataError, match=words):
        TacclProfile.load({**table, **change}, chunk_bytes="1 MiB").to_topology()


def test_wrong_names_of_profiles(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no published TACCL profile 'ndv3'.*ndv2_1MB"):
        TacclProfile.load("ndv3").to_topology()
    with pytest.raises(ConfigurationError, match="connections is 'ring'"):
        TacclProfile.load("ndv2_1MB").to_topology(boxes=2, connections="ring")
    with pytest.raises(ConfigurationError, match="GPU 8"):
        TacclProfile.load("ndv2_1MB").to_topology(boxes=2, connections={8: [0]})
    for wrong, words in (
        ({"chunk_bytes": "0.2 B"}, "chunk_bytes of a TACCL profile .* got 0"),
        ({"time_scale": 0, "chunk_bytes": 1}, "time_scale of a TACCL profile"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            TacclProfile.load(SMALL, **wrong)
    with pytest.raises(ConfigurationError, match="time_scale of a TACCL profile"):
        TacclProfile.load("ndv2_1MB", time_scale=float("nan"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="no table"):
        TacclProfile.load(tmp_path / "list.json", chunk_bytes=1024).to_topology()
    with pytest.raises(DataError, match="does not exist"):
        TacclProfile.load(tmp_path / "none.json", chunk_bytes=1024).to_topology()
    assert len(catalogue().profiles) == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"remote_beta": 0}, "remote_beta of the TACCL profile is 0"),
        ({"betas": [[0, 0], [8, 0]]}, "betas of the TACCL profile are 0 where there are links"),
    ],
)
def test_a_link_that_takes_no_time_is_refused(changes, said):
    assert TacclProfile.load(SMALL, chunk_bytes="1 MB").to_topology(boxes=2).num_ranks == 4
    with pytest.raises(DataError, match=said):
        TacclProfile.load(SMALL | changes, chunk_bytes="1 MB")
