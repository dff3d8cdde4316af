"""Sketches: files in and out, what they leave of a topology, how they are derived."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.collectives.schedules import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    verify_schedule,
)
from fivefold.collectives.synthesis import (
    Sketch,
    SwitchSketch,
    derive_sketch,
    published_sketch,
    taccl,
)
from fivefold.collectives.synthesis._sketched import rotation, sketched
from fivefold.errors import ConfigurationError, DataError, InfeasibleError
from fivefold.network.topology import (
    TacclProfile,
    fully_connected,
    hypercube,
    line,
    mesh,
    named_topology,
    ring,
    switch,
    torus,
)

RELAY = {
    "nnodes": 2,
    "intranode_sketch": {
        "strategy": "switch",
        "switches": [[0, 1, 2, 3]],
        "switch_hyperedge_strategy": ["uc-min"],
    },
    "internode_sketch": {
        "strategy": "relay",
        "internode_conn": {"1": [0], "3": [2]},
        "gpus_to_sender_rev_map": {"1": [0, 1], "3": [2, 3]},
        "enforce_ordering": True,
    },
    "symmetry_offsets": [[2, 4], [4, 8]],
    "hyperparameters": {"input_chunkup": 2},
}


def test_taccl_files_are_read():
    sketch = Sketch.from_taccl(json.dumps(RELAY), name="relay")
    assert sketch == Sketch(
        name="relay",
        boxes=2,
        chunks=2,
        switches=(SwitchSketch(ranks=(0, 1, 2, 3), policy="uc-min"),),
        connections={1: (0,), 3: (2,)},
        senders={1: (0, 1), 3: (2, 3)},
        own_chunks_first=True,
        symmetry=((2, 4), (4, 8)),
    )
    assert sketch.connects(3, 2)
    assert not sketch.connects(3, 0)


def test_files_are_read_from_paths(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(RELAY))
    sketch = Sketch.from_taccl(tmp_path / "a.json")
    assert Sketch.from_taccl(str(tmp_path / "a.json")) == sketch
    (tmp_path / "a.toml").write_text(sketch.to_toml())
    assert Sketch.from_toml(tmp_path / "a.toml") == sketch
    assert Sketch.from_toml(str(tmp_path / "a.toml")) == sketch


ranks = st.integers(0, 7)
sketches = st.builds(
    Sketch,
    name=st.text('abc "\\é\x7f😀', min_size=1, max_size=6),
    boxes=st.integers(1, 4),
    chunks=st.integers(1, 9),
    switches=st.lists(
        st.builds(
            SwitchSketch,
            ranks=st.lists(ranks, min_size=2, max_size=4, unique=True).map(tuple),
            policy=st.sampled_from(["uc-min", "uc-max", "any"]),
        ),
        max_size=2,
    ).map(tuple),
    balance=st.sampled_from(["none", "minmax", "maxmin"]),
    connections=st.one_of(
        st.sampled_from(["all", "direct-map", "fully-connected"]),
        st.dictionaries(ranks, st.lists(ranks, max_size=3).map(tuple), max_size=3),
    ),
    senders=st.one_of(st.none(), st.just({0: (0, 1), 2: (2,)})),
    own_chunks_first=st.booleans(),
    symmetry=st.lists(st.sampled_from([(1, 2), (2, 8), (8, 8)]), max_size=2).map(tuple),
)


@given(sketches)
def test_toml_keeps_everything(sketch):
    assert Sketch.from_toml(sketch.to_toml()) == sketch


def test_reversing_twice_gives_the_same_connections():
    sketch = Sketch.from_taccl(RELAY)
    turned = sketch.reversed()
    assert turned.connections == {0: (1,), 2: (3,)}
    assert turned.senders == {0: (0, 1), 2: (2, 3)}
    assert turned.reversed().connections == sketch.connections
    assert Sketch(connections="direct-map").reversed().connections == "direct-map"


def test_published_sketches_fit_the_published_profiles():
    for name in (
        *("sk-dgx2-n1", "sk1-dgx2-n1", "sk1-dgx2-n2", "sk2-dgx2-n2", "sk-ndv2-n1-cUp6"),
        *("sk1-ndv2-n1", "sk1-ndv2-n2", "sk1-ndv2-n4", "sk2-ndv2-n2", "sk2-ndv2-n4"),
        "sk3-ndv2-n2",
    ):
        sketch = published_sketch(name)
        profile = TacclProfile.load("dgx2_1KB" if "dgx2" in name else "ndv2_1MB")
        connections = sketch.connections if sketch.connections != "all" else "relay"
        topology = profile.to_topology(boxes=sketch.boxes, connections=connections)
        found = sketched(all_gather(topology.num_ranks), topology, sketch)
        assert len(found.symmetries) == len(sketch.symmetry)


def test_relays_leave_only_their_links_between_boxes():
    topology = named_topology("ndv2", boxes=2)
    found = sketched(all_gather(16), topology, published_sketch("sk1-ndv2-n2"))
    instance, crosses = found.logical, found.logical.crosses
    pairs = list(zip(instance.sources[crosses], instance.targets[crosses], strict=True))
    assert pairs == [(0, 9), (8, 1)]


def test_chunks_leave_a_box_only_through_their_sender():
    topology = TacclProfile.load("dgx2_1KB").to_topology(boxes=2, connections="direct-map")
    found = sketched(all_gather(32), topology, published_sketch("sk2-dgx2-n2"))
    instance = found.logical
    for chunk in range(32):
        leaves = found.logical.crosses & (instance.sources // 16 == chunk // 16)
        allowed = np.flatnonzero(found.allowed[chunk] & leaves)
        assert instance.sources[allowed].tolist() == [chunk]


@pytest.mark.parametrize("policy", ["uc-min", "uc-max", "any"])
def test_a_switch_of_direct_links_takes_the_links_that_there_are(policy):
    """The policy counts connections; what links share is for the topology to say."""
    topology = fully_connected(4, bandwidth=1e9)
    plan = Sketch(switches=(SwitchSketch(ranks=(0, 1, 2, 3), policy=policy),))
    result = taccl(all_gather(4), topology, plan, size_bytes=4e9, time_limit_s=0.5)
    verify_schedule(result.schedule, topology=topology, check_times=True)
    assert result.time_s == pytest.approx(1.0)
    assert result.routing_bound_s <= 1.0 + 1e-9


@st.composite
def drawn_topologies(draw):
    count = draw(st.integers(1, 6))
    rates, latencies = st.sampled_from([1e9, 3e9]), st.sampled_from([0.0, 1e-6])
    make = draw(st.sampled_from([ring, fully_connected, line, switch]))
    return make(count, bandwidth=draw(rates), latency=draw(latencies))


@settings(deadline=None)
@given(
    drawn_topologies(),
    sketches,
    st.sampled_from([all_gather, all_reduce, all_to_all, broadcast, reduce_scatter]),
)
def test_a_sketch_gives_a_schedule_of_the_topology_or_is_refused(topology, sketch, make):
    try:
        result = taccl(
            make(topology.num_ranks), topology, sketch, size_bytes=1e6, time_limit_s=0.03
        )
    except (ConfigurationError, InfeasibleError):
        return
    verify_schedule(result.schedule, topology=topology, check_times=True)
    assert result.routing_bound_s <= result.time_s * (1 + 1e-3)  # solvers count in whole units


def test_rotations():
    assert rotation(1, 4, num_ranks=8).tolist() == [1, 2, 3, 0, 5, 6, 7, 4]
    with pytest.raises(ConfigurationError, match="does not divide"):
        rotation(1, 3, num_ranks=8)


@pytest.mark.parametrize(
    ("topology", "symmetry"),
    [
        (ring(8), ((1, 8),)),
        (torus((4, 4)), ((4, 16), (1, 4))),
        (hypercube(3), ((4, 8), (2, 4), (1, 2))),
        (mesh((3, 3)), ()),
        (named_topology("dgx1"), ((4, 8), (2, 4))),
        (named_topology("ndv2", boxes=2), ((8, 16),)),
        (named_topology("dgx2", boxes=2), ((16, 32), (2, 16))),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_derived_symmetries_are_automorphisms(topology, symmetry):
    collective = all_gather(topology.num_ranks)
    sketch = derive_sketch(topology, collective)
    assert sketch.symmetry == symmetry
    found = sketched(collective, topology, sketch)  # raises where a link has no image
    for permutation in found.symmetries:
        assert sorted(permutation.tolist()) == list(range(topology.num_ranks))


def test_derived_sketches_follow_the_collective_and_the_size():
    topology = named_topology("dgx2", boxes=2)
    assert derive_sketch(topology, broadcast(32)).symmetry == ()
    assert derive_sketch(topology, all_reduce(32)).symmetry == ((16, 32), (2, 16))
    small = derive_sketch(topology, all_gather(32), size_bytes=1e3)
    large = derive_sketch(topology, all_gather(32), size_bytes=1e10)
    assert [s.switches[0].policy for s in (small, large)] == ["uc-max", "uc-min"]
    rails = named_topology("dgx_a100", boxes=2)
    assert derive_sketch(rails, all_gather(16)).connections == "direct-map"
    assert derive_sketch(rails, all_to_all(16)).connections == "all"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"boxes": 0}, "whole number from 1"),
        ({"chunks": 1.5}, "whole number from 1"),
        ({"balance": "even"}, "balance"),
        ({"connections": "ring"}, "unknown"),
        ({"connections": {"a": [0]}}, "maps ranks"),
        ({"connections": {-1: [0]}}, "rank -1"),
        ({"senders": {0: [1], 1: [1]}}, "several senders"),
        ({"symmetry": [[3, 2]]}, "0 < offset"),
        ({"symmetry": [[3]]}, "0 < offset"),
    ],
)
def test_bad_sketches_are_refused(change, match):
    with pytest.raises(ConfigurationError, match=match):
        Sketch(**change)


@pytest.mark.parametrize("bad", [{"ranks": (0,)}, {"ranks": (0, 0)}, {"ranks": (-1, 2)}])
def test_bad_switches_are_refused(bad):
    with pytest.raises(ConfigurationError, match="different ranks"):
        SwitchSketch(**bad)
    with pytest.raises(ConfigurationError, match="policy"):
        SwitchSketch(ranks=(0, 1), policy="most")


def test_bad_files_are_refused():
    with pytest.raises(ConfigurationError, match="did you mean 'boxes'"):
        Sketch.from_toml("boxs = 2\n")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        Sketch.from_toml("boxes = \n")
    with pytest.raises(ConfigurationError, match="ranks and policy"):
        Sketch.from_toml("[[switches]]\nrank = [0, 1]\n")
    with pytest.raises(DataError, match="is not JSON"):
        Sketch.from_taccl("{")
    with pytest.raises(DataError, match="list"):
        Sketch.from_taccl("[]")
    with pytest.raises(ConfigurationError, match="no key 'nnodes'"):
        Sketch.from_taccl({"intranode_sketch": {"strategy": "none"}, "hyperparameters": {}})
    for key, value in (("intranode_sketch", "magic"), ("internode_sketch", "ring")):
        table = {**RELAY, key: {**RELAY[key], "strategy": value}}
        with pytest.raises(ConfigurationError, match=value):
            Sketch.from_taccl(table)
    table = {**RELAY, "intranode_sketch": {**RELAY["intranode_sketch"], "switches": []}}
    with pytest.raises(ConfigurationError, match="one policy"):
        Sketch.from_taccl(table)


@pytest.mark.parametrize(
    "text",
    [
        "connections = 5",
        "senders = 5",
        "senders = {0 = 3}",
        "switches = 3",
        "switches = [3]",
        "[[switches]]\nranks = 3",
        '[[switches]]\nranks = ["a", "b"]',
        "symmetry = 3",
        "symmetry = [3]",
        'symmetry = [["a", 2]]',
        "symmetry = [[1.5, 2]]",
        'boxes = "2"',
        "balance = 3",
        "connections = {0 = [-1]}",
        "connections = {0 = [1.9]}",
        'senders = {0 = "01"}',
        'own_chunks_first = "no"',
        "name = 3",
    ],
)
def test_values_of_the_wrong_kind_are_refused_with_what_to_write(text):
    with pytest.raises(ConfigurationError) as caught:
        Sketch.from_toml(text + "\n")
    assert caught.value.hint


def test_sketches_that_do_not_fit_are_refused():
    topology = named_topology("ndv2", boxes=2)
    with pytest.raises(ConfigurationError, match=r"3 boxes.*may be 1, 2, 4, 8, 16"):
        sketched(all_gather(16), topology, Sketch(boxes=3))
    with pytest.raises(ConfigurationError, match="rank 9"):
        sketched(all_gather(16), topology, Sketch(boxes=2, connections={9: (0,)}))
    with pytest.raises(ConfigurationError, match="no such link"):
        sketched(all_gather(16), topology, Sketch(boxes=2, symmetry=((1, 8),)))
    with pytest.raises(ConfigurationError, match="does not exist"):
        sketched(broadcast(16), topology, Sketch(boxes=2, symmetry=((8, 16),)))


def test_a_sketch_that_forbids_the_collective_names_the_chunk():
    topology = named_topology("ndv2", boxes=2)
    with pytest.raises(InfeasibleError, match=r"no way for chunk 0 from rank .* to rank 8"):
        sketched(all_gather(16), topology, Sketch(boxes=2, connections={3: (4,)}))
    senders = {1: (0, 1, 2, 3, 4, 5, 6, 7)}  # only rank 0 has a link to the other box
    with pytest.raises(InfeasibleError, match="allow more"):
        sketched(all_gather(16), topology, Sketch(boxes=2, senders=senders))
