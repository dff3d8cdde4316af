"""Prices name the communication library that they are of, and follow its published latencies."""

import json

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.collectives.pricing.software import SOFTWARE, software_of
from fivefold.errors import ConfigurationError
from fivefold.network.topology import named_topology, parse_topology, switch

US = 1e-6


def test_nccl_needs_what_its_own_tuner_says():
    """Ring of NCCL's tuning.cc: base + steps of 14 hops inside a node, and the ring's bytes."""
    box, nccl = named_topology("dgx_h100"), SOFTWARE["nccl"]
    small_s = nccl.default_s(box, "all_gather", size_bytes=64e3)
    assert small_s == pytest.approx((6.6 + 7 * 0.6) * US, rel=0.05)  # LL
    large_s = nccl.default_s(box, "all_gather", size_bytes=1e9)
    assert large_s == pytest.approx((8.4 + 7 * 3.4) * US + 7 / 8 * 1e9 / (450e9 * 0.8), rel=1e-6)
    both = nccl.default_s(named_topology("dgx_h100", boxes=2), "all_gather", size_bytes=64e3)
    assert both == pytest.approx((6.6 + 14 * 0.6 + 2.7) * US, rel=0.1)


def test_only_nvlinks_lose_what_nccl_takes_off_them():
    """NCCL's topo.h: 20 of 25 GB/s of an NVLink; net->bw is what the adapter says."""
    nccl, size_bytes = SOFTWARE["nccl"], 4e9
    flat = switch(8, bandwidth="25 GB/s", latency="0 s")
    # A tree of eight: half the data down and up each way, of 0.92 of the rate; a ring is faster.
    found_s = nccl.default_s(flat, "all_gather", size_bytes=size_bytes)
    assert found_s == pytest.approx(7 / 8 * size_bytes / 25e9, rel=2e-3)
    seen = nccl.protocols[-1].on(named_topology("dgx_h100", boxes=2))
    rates = {
        (link.source, link.target): link.capacity_bytes_per_s
        for link in named_topology("dgx_h100", boxes=2).links
    }
    for link in seen.links:
        ratio = link.capacity_bytes_per_s / rates[link.source, link.target]
        inside = {"nvswitch"} & {
            seen.nodes[seen.index(end)].kind for end in (link.source, link.target)
        }
        assert ratio == pytest.approx(0.8 if inside else 1.0)


def test_a_step_across_hosts_costs_the_networks_latency():
    box, protocol = named_topology("dgx_h100", boxes=2), SOFTWARE["nccl"].protocols[0]
    seen = protocol.on(box)
    inside, across = (
        sum(seen.latencies_s[link] for link in seen.shortest_route(0, other)) for other in (1, 8)
    )
    assert inside == pytest.approx(0.6 * US)
    assert across == pytest.approx(2.7 * US)


def test_each_machine_has_its_library():
    assert software_of(named_topology("dgx_a100")).key == "nccl"
    assert software_of(named_topology("mi250", boxes=2)).key == "rccl"
    assert software_of(parse_topology("fat_tree:2,kind=cpu")).key == "gloo"
    assert software_of(switch(4), "gloo").key == "gloo"
    with pytest.raises(ConfigurationError, match=r"no communication library 'ncc'.*'nccl'"):
        software_of(switch(4), "ncc")
    assert all(one.source and one.name for one in SOFTWARE.values())


def test_bench_names_the_library_and_prices_by_it():
    words = ["collectives", "bench", "all_gather", "switch:4,bandwidth=300GB/s", "--sizes", "16MB"]
    rows = {
        key: json.loads(CliRunner().invoke(app, [*words, "--json", "--software", key]).stdout)[0]
        for key in SOFTWARE
    }
    assert [rows[key]["software"] for key in SOFTWARE] == [one.name for one in SOFTWARE.values()]
    # Three steps of 60 us each, or of a few: the links take 40 us.
    assert rows["gloo"]["inner_s"] > 180 * US
    assert 40 * US < rows["nccl"]["inner_s"] < 100 * US
    assert rows["nccl"]["inner_s"] < rows["rccl"]["inner_s"] < rows["gloo"]["inner_s"]
