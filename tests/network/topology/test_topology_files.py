"""TOML in and out, and topologies from one line of text."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.network.topology import (
    Aggregation,
    Link,
    Node,
    SwitchAbility,
    Topology,
    mesh,
    named_topology,
    parse_topology,
    read_topology,
    ring,
    switch,
)
from fivefold.network.topology.text import catalogue

GOOD = """
name = "pair"
nodes = [
  { name = "a", kind = "gpu", host = "h" },
  { name = "b", kind = "cpu" },
  { name = "s", kind = "tor" },
]
links = [
  { source = "a", target = "s", bandwidth = "25 GB/s", latency = "0.7 us", count = 2 },
  { source = "s", target = "b", bandwidth = "200 Gbit/s", both_ways = true },
]

[[switches]]
node = "s"
multicast = true
aggregation = { slots = 128, slot_size = "256 B", rate = "10 GB/s", dtypes = ["int32"] }
"""

positive = st.floats(1e-3, 1e18, allow_nan=False)
times = st.one_of(st.just(0.0), st.floats(1e-15, 1e9))
names = st.text(min_size=1, max_size=8).filter(lambda text: text.strip())


def test_a_file_by_hand(tmp_path):
    path = tmp_path / "pair.toml"
    path.write_text(GOOD)
    found = read_topology(path)
    assert found == read_topology(str(path)) == read_topology(GOOD)
    assert found.links == (
        Link("a", "s", bandwidth_bytes_per_s=25e9, latency_s=0.7e-6, count=2),
        Link("s", "b", bandwidth_bytes_per_s=25e9),
        Link("b", "s", bandwidth_bytes_per_s=25e9),
    )
    unit = Aggregation(slots=128, slot_bytes=256, rate_bytes_per_s=10e9, dtypes=("int32",))
    assert found.ability_of("s") == SwitchAbility("s", multicast=True, aggregation=unit)
    assert found.host_of(0) == "h"


def test_a_file_without_a_name_has_that_of_its_file(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(GOOD.replace('name = "pair"', ""))
    assert read_topology(path).name == "lab"


@given(st.lists(st.tuples(positive, times, st.integers(1, 10**6)), max_size=5), names, names)
def test_what_is_written_is_read_back_to_the_last_bit(values, name, host):
    nodes = [Node("a", "gpu", host), Node(name + "b", "switch")]
    links = [
        Link("a", name + "b", bandwidth_bytes_per_s=rate, latency_s=latency, count=count)
        for rate, latency, count in values
    ]
    unit = Aggregation(slots=3, slot_bytes=7, rate_bytes_per_s=values[0][0] if values else None)
    switches = [SwitchAbility(name + "b", aggregation=unit)]
    written = Topology(name, nodes, links, switches=switches, source=host)
    found = read_topology(written.to_toml())
    assert found == written
    assert (found.name, found.source) == (name, host)


@pytest.mark.parametrize("text", [*catalogue().machines, "dgx_h100:3", "dgx1:2", "ndv2:3"])
def test_machines_survive_their_files(text):
    written = parse_topology(text).to_toml()
    assert read_topology(written) == parse_topology(text)
    assert tomllib.loads(written)["name"] == text


def test_files_read_well():
    written = mesh((1, 2), bandwidth="12.5 GB/s", latency="1.3 us").to_toml()
    assert 'bandwidth = "12.5 GB/s", latency = "1.3 us" }' in written
    assert 'bandwidth = "25 GB/s" }' in ring(2).to_toml()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "pair"', "nam = 1", r"unknown key 'nam'; did you mean 'name'"),
        (
            'host = "h"',
            'hosts = "h"',
            r"nodes\[0\] has the unknown key 'hosts'; did you mean 'host'",
        ),
        ('bandwidth = "25', 'bandwith = "25', r"links\[0\].*did you mean 'bandwidth'"),
        ('"25 GB/s"', "25e9", r"links\[0\]: bandwidth must have a unit; got 25000000000.0"),
        ('"25 GB/s"', '"25"', r"must have a unit; got '25'"),
        ('"25 GB/s"', '"25 GB"', "'25 GB' is not a rate"),
        ('"25 GB/s"', '"0 GB/s"', "bandwidth of .* got 0"),
        ('"0.7 us"', "0.7", "latency must have a unit"),
        ('"0.7 us"', '"0.7 parsec"', "not a duration"),
        ("count = 2", "count = 0", "count of .* got 0"),
        ("count = 2", 'count = "2"', "count of .* got '2'"),
        ('source = "a", ', "", r"links\[0\] has no source"),
        ('source = "a"', "source = 3", "source must be text"),
        ('target = "b"', 'target = "c"', "ends at 'c'"),
        ('kind = "tor"', 'kind = "leaf"', "unknown kind 'leaf'"),
        ("both_ways = true", 'both_ways = "yes"', "both_ways must be true or false"),
        ("multicast = true", "multicast = 1", "multicast must be true or false"),
        ("slots = 128, ", "", r"switches\[0\].aggregation has no slots"),
        ("aggregation = {", "aggregation = 3 # {", "aggregation must be a table; got 3"),
        ("slots = 128", "slot = 128", "unknown key 'slot'; did you mean 'slots'"),
        ("slots = 128", "slots = 1.5", "slots of an .* got 1.5"),
        ('slot_size = "256 B"', "slot_size = 256", "slot_size must have a unit"),
        ('node = "s"', 'node = "a"', "a compute node"),
        ("nodes = [", "nodes = 3\nx = [", "unknown key|must be a list"),
        ("links = [", "links = [[", "not TOML"),
    ],
)
def test_errors_name_the_place_and_the_remedy(old, new, words):
    assert old in GOOD
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_topology(GOOD.replace(old, new, 1))
    assert caught.value.message.startswith("the topology's text")


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.toml does not exist"):
        read_topology(tmp_path / "none.toml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_topology(tmp_path)
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"bad\.toml is not TOML"):
        read_topology(path)
    path.write_text("nodes = [1, 2]")
    with pytest.raises(ConfigurationError, match=r"bad\.toml: nodes must be a list of tables"):
        read_topology(path)


@pytest.mark.parametrize("name", catalogue().generators)
def test_every_generator_can_be_spelled(name):
    example, summary = catalogue().generators[name]
    assert example.startswith(f"{name}:")
    assert summary.endswith(".")
    if name != "clos":  # thousands of nodes
        found = parse_topology(example)
        assert found.is_connected()
        assert read_topology(found.to_toml()) == found


def test_the_clos_of_the_command_line():
    found = parse_topology("clos:2x2x2,aggs=1,cores=1,gpus=2,nics=1,bandwidth=10GB/s,latency=1us")
    assert found.num_ranks == 16
    assert found.eccentricity_s[0] == pytest.approx(6e-6)


@pytest.mark.parametrize("name", catalogue().profiles)
def test_profiles_by_name(name):
    assert (
        parse_topology(f"taccl:{name}:2").num_ranks == 2 * parse_topology(f"taccl:{name}").num_ranks
    )


def test_spellings(tmp_path):
    assert parse_topology("torus:4x4") == parse_topology("torus:shape=4x4")
    assert parse_topology("mesh:4").num_ranks == 4
    assert parse_topology("dgx_a100:2") == named_topology("dgx_a100", boxes=2)
    rated = parse_topology("ring:4", bandwidth="10 GB/s", latency=1e-6)
    assert rated == ring(4, bandwidth=10e9, latency="1 us")
    assert parse_topology("ring:4,bandwidth=10 GB/s,latency=1us") == rated
    path = tmp_path / "a.toml"
    path.write_text(ring(3).to_toml())
    assert parse_topology(str(path)) == ring(3)
    table = tmp_path / "topo.csv"
    table.write_text("ip,DSW,PSW,ASW\na,G6,P8,S1\n")
    assert parse_topology(f"lingjun:{table}").num_ranks == 8
    rails = parse_topology("rail_only:2,nics=2")
    assert rails.num_ranks == 16  # 8 GPUs are a rail fabric's own default
    assert math.prod(rails.hosts["host1"][:1]) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no topology"),
        ("toru:4", "did you mean 'torus'"),
        ("dgx_a10:2", "did you mean 'dgx_a100'"),
        ("dgx_a100:two", "no number of boxes"),
        ("dgx_a100:0", "boxes must be a whole number from 1"),
        ("ring", "needs its num_ranks; write ring:8"),
        ("ring:8,9", "'9' in ring:8,9 has no key"),
        ("ring:eight", "got 'eight'"),
        ("ring:4,num_ranks=5", "says its num_ranks twice"),
        ("ring:4,latency=1us,latency = 2us", "says its latency twice"),
        ("ring:8,bandwith=1GB/s", "did you mean 'bandwidth'"),
        ("ring:8,bandwidth=1 parsec", "not a rate"),
        ("fat_tree:4,gpu=8", "did you mean 'gpus'"),
        ("fat_tree:4,gpus=0", "gpus of a host"),
        ("fat_tree:4,gpus=1.5", "gpus of a host"),
        ("leaf_spine:8,leaves=2", "leaf_spine also needs spines"),
        ("clos:4x4,aggs=1,cores=1", r"pods x racks x hosts; .* \(4, 8, 16\), or clos:4x8x16"),
        ("clos:4,aggs=1,cores=1", "pods x racks x hosts"),
        ("torus:4xy", "dimension"),
        ("none.toml", "does not exist"),
        ("taccl:none", "no published TACCL profile"),
        ("taccl:ndv2_1MB:x", "no number of boxes"),
    ],
)
def test_spellings_that_mean_nothing(text, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_topology(text)


def test_only_generators_take_rates():
    with pytest.raises(ConfigurationError, match="only generators"):
        parse_topology("dgx1", bandwidth="1 GB/s")


def test_a_file_may_begin_with_a_generator():
    text = """
    generate = "ring:4,bandwidth=10GB/s"
    nodes = [{ name = "spare", kind = "gpu" }]
    links = [{ source = "spare", target = "gpu0", bandwidth = "5 GB/s", both_ways = true }]
    changes = [
      { source = "gpu0", target = "gpu1", bandwidth = "1 GB/s" },
      { source = "gpu2", target = "gpu1", latency = "5 us", count = 2, both_ways = false },
      { source = "gpu3", target = "gpu0", remove = true },
    ]
    """
    found = read_topology(text)
    assert (found.num_ranks, found.num_links) == (5, 2 * 3 + 2)
    assert found.capacities_bytes_per_s[found.direct_links(1, 0)].tolist() == [1e9]
    changed = found.links[found.direct_links(2, 1)[0]]
    assert changed.latency_s == pytest.approx(5e-6)
    assert (changed.count, changed.bandwidth_bytes_per_s) == (2, 10e9)
    assert found.links[found.direct_links(1, 2)[0]].latency_s == 0.0
    assert found.direct_links(3, 0).size == found.direct_links(0, 3).size == 0
    assert read_topology(found.to_toml()) == found


def test_a_generated_switch_may_be_made_to_sum():
    text = """
    generate = "leaf_spine:4,leaves=2,spines=1"
    switches = [{ node = "spine0", aggregation = { slots = 8, slot_size = "1 KiB" } }]
    """
    unit = read_topology(text).ability_of("spine0").aggregation
    assert (unit.slots, unit.slot_bytes) == (8, 1024)
    h100 = 'generate = "dgx_h100"\nswitches = [{ node = "nvswitch0" }]'
    assert read_topology(h100).ability_of("nvswitch0").aggregation is None
    assert "H100" in read_topology(h100).source


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('generate = "own.toml"', "names the file 'own.toml'"),
        ("generate = 4", "generate must be text"),
        ('generate = "rng:4"', "did you mean 'ring'"),
        ('source = "gpu0", target = "gpu2", count = 2', "no link 'gpu0' -> 'gpu2' to change"),
        (
            'source = "gpu0", target = "gpu2", remove = true',
            "no link 'gpu0' -> 'gpu2' to remove; from 'gpu0' links lead to gpu1",
        ),
        (
            'source = "gpu9", target = "gpu1", remove = true',
            r"changes\[0\]: there is no link 'gpu9' -> 'gpu1' to remove; there is no node 'gpu9'",
        ),
        ('source = "gpu0", target = "gpu9", count = 2', "'gpu9' is no node"),
        ('source = "gpu0", target = "gpu1"', "either change something or remove"),
        ('source = "gpu0", target = "gpu1", count = 1, remove = true', "either change"),
        ('source = "gpu0", target = "gpu1", bandwidth = 3', "must have a unit"),
        ('source = "gpu0", target = "gpu1", count = 0', "count of .* got 0"),
        ('source = "gpu0", target = "gpu1", remove = 1', "remove must be true or false"),
        ('source = "gpu0", bandwidth = "1 GB/s"', "no target"),
    ],
)
def test_wrong_beginnings_and_changes(line, words):
    whole = (
        line if line.startswith("generate") else f'generate = "ring:4"\nchanges = [{{ {line} }}]'
    )
    with pytest.raises(ConfigurationError, match=words):
        read_topology(whole + "\n")


def test_the_guide_says_what_works():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "topology.md").read_text()
    for table in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL):
        assert read_topology(table).is_connected()
    spellings = re.findall(r"`([a-z_0-9]+:\d[^`]*)`", guide)
    assert len(spellings) > 15
    for text in spellings:
        assert parse_topology(text).num_ranks > 1


def test_the_room_is_light():
    code = (
        "import sys, fivefold.network.topology as t; t.torus((4, 4)).to_toml(); "
        "print(sorted({'torch', 'numba', 'scipy', 'matplotlib', 'networkx'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text", ["ring:4,bandwidth=25", "switch:4,latency=5", "fat_tree:4,gpus=2,nvlink=450e9"]
)
def test_a_quantity_in_one_line_names_its_unit(text):
    with pytest.raises(ConfigurationError, match="has no unit") as caught:
        parse_topology(text)
    assert text.rpartition("=")[2] in caught.value.hint


def test_rates_are_written_in_large_units():
    text = switch(2, bandwidth="30.864195 GB/s", latency="1.2345678901 us").to_toml()
    assert 'bandwidth = "30.864195 GB/s"' in text
    assert read_topology(text) == switch(2, bandwidth="30.864195 GB/s", latency="1.2345678901 us")
