"""The three prices of a collective hold together, and the world's own properties hold for each."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.pricing import (
    FabricSpec,
    Group,
    Tier,
    collective_time_s,
    fabric_from_topology,
    price_s,
)
from fivefold.collectives.schedules import evaluate, named_collective
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Aggregation, Link, Node, SwitchAbility, Topology, switch
from helpers.networks import looped_networks
from helpers.night import number_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FIDELITIES = ("closed_form", "schedule", "simulation")


def hosts(count, ranks, inner, outer, slow=1.0):
    """Hosts of ranks on a switch, which leave by one link; that of the first host is slower."""
    nodes = [Node(f"gpu{h}.{i}", "gpu", host=f"h{h}") for h in range(count) for i in range(ranks)]
    nodes += [Node(f"inner{h}", "switch", host=f"h{h}") for h in range(count)]
    rates = {(f"gpu{h}.{i}", f"inner{h}"): inner for h in range(count) for i in range(ranks)}
    rates |= {(f"inner{h}", "core"): outer * (1.0 if h else slow) for h in range(count)}
    links = [
        Link(*ends, bandwidth_bytes_per_s=rate)
        for pair, rate in rates.items()
        for ends in (pair, pair[::-1])
    ]
    return Topology("hosts", [*nodes, Node("core", "switch")], links)


@st.composite
def cases(draw):
    count, ranks = draw(st.integers(2, 4)), draw(st.sampled_from([1, 2, 4]))
    size = draw(st.integers(2, count * ranks))
    strides = [s for s in (1, 2, ranks) if size * s <= count * ranks]
    group = Group(size=size, stride=draw(st.sampled_from(strides)), ranks=count * ranks)
    return count, ranks, group


def is_astride(ranks, group):
    block = group.size * group.stride
    aligned = ranks % group.stride == 0 and (block % ranks == 0 or ranks % block == 0)
    return group.stride < ranks and not aligned


@given(case=cases(), kind=st.sampled_from(KINDS), ratio=st.sampled_from([1, 2, 4, 16]))
def test_the_three_prices_hold_together(case, kind, ratio):
    count, ranks, group = case
    network = hosts(count, ranks, 8e9, 8e9 * ranks / ratio)
    formula, walked, simulated = (
        price_s(network, kind, size_bytes=1e9, group=group, fidelity=fidelity)
        for fidelity in FIDELITIES
    )
    near = 1 + 1e-6
    assert simulated / near <= walked <= 2 * simulated
    most = 2 if kind == "all_reduce" else near  # a tree may send half of what the ring does
    least = ranks if is_astride(ranks, group) else near
    assert formula / least <= simulated <= formula * most


def railed(count, ranks, inner, outer, *, rails, slow=1.0):
    """Hosts of ranks on an NVSwitch with an adapter each; that of the first rank is slower."""
    gpus = [(h, i) for h in range(count) for i in range(ranks)]
    nodes = [Node(f"gpu{h}.{i}", "gpu", host=f"h{h}") for h, i in gpus]
    nodes += [Node(f"inner{h}", "nvswitch", host=f"h{h}") for h in range(count)]
    nodes += [Node(f"tor{i}", "tor") for i in range(ranks if rails else 1)]
    rates = {(f"gpu{h}.{i}", f"inner{h}"): inner for h, i in gpus}
    rates |= {(f"gpu{h}.{i}", f"tor{i * rails}"): outer for h, i in gpus}
    rates["gpu0.0", "tor0"] *= slow
    links = [
        Link(*ends, bandwidth_bytes_per_s=rate)
        for pair, rate in rates.items()
        for ends in (pair, pair[::-1])
    ]
    return Topology("railed", nodes, links)


@settings(max_examples=number_of(25, 400))
@given(
    count=st.integers(2, 3),
    ranks=st.sampled_from([2, 4]),
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from([2, 4, 9, 16]),
    rails=st.booleans(),
    whole=st.booleans(),
)
def test_the_three_prices_hold_together_where_every_rank_has_an_adapter(
    count, ranks, kind, ratio, rails, whole
):
    """One ring over one of four adapters took four times as long as the closed form said."""
    network = railed(count, ranks, 8e9 * ratio, 8e9, rails=rails)
    group = Group(size=count * ranks) if whole else Group(size=count, stride=ranks)
    formula, walked, simulated = (
        price_s(network, kind, size_bytes=1e9, group=group, fidelity=fidelity)
        for fidelity in FIDELITIES
    )
    most = 2.0 if kind == "all_reduce" else 1.6
    assert 0.7 * formula <= simulated <= most * formula
    assert 0.7 * formula <= walked <= 2.2 * formula


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_slower_adapter_never_makes_it_faster(kind, fidelity):
    times_s = [
        price_s(
            railed(2, 4, 64e9, 8e9, rails=True, slow=slow), kind, size_bytes=1e9, fidelity=fidelity
        )
        for slow in (1.0, 0.5, 0.1)
    ]
    assert times_s == sorted(times_s)
    if fidelity != "closed_form":
        assert times_s[2] > times_s[0]


@settings(max_examples=30, deadline=None)
@given(
    case=cases(),
    kind=st.sampled_from(KINDS),
    fidelity=st.sampled_from(FIDELITIES),
    slow=st.floats(0.05, 1.0),
)
def test_a_slower_link_never_makes_it_faster(case, kind, fidelity, slow):
    count, ranks, group = case
    fast = price_s(hosts(count, ranks, 8e9, 4e9), kind, size_bytes=1e9, group=group)
    prices = [
        price_s(network, kind, size_bytes=1e9, group=group, fidelity=fidelity)
        for network in (hosts(count, ranks, 8e9, 4e9), hosts(count, ranks, 8e9, 4e9, slow))
    ]
    assert prices[1] >= prices[0] * (1 - 1e-3)
    assert 0 < fast < math.inf


@given(
    network=looped_networks(most_ranks=8, rates=(1e9, 2e9, 5e9, 25e9), latencies_s=(1e-6,)),
    place=st.integers(0, 99),
    factor=st.sampled_from((0.05, 0.3, 0.7)),
    kind=st.sampled_from(("all_reduce", "all_gather", "reduce_scatter")),
    fidelity=st.sampled_from(FIDELITIES),
    size_bytes=st.sampled_from((1e4, 1e8)),
)
def test_a_slower_link_of_any_network_never_makes_it_faster(
    network, place, factor, kind, fidelity, size_bytes
):
    links = list(network.links)
    place %= len(links)
    rate = links[place].bandwidth_bytes_per_s * factor
    links[place] = replace(links[place], bandwidth_bytes_per_s=rate)
    before_s, after_s = (
        price_s(one, kind, size_bytes=size_bytes, fidelity=fidelity)
        for one in (network, network.with_links(links))
    )
    assert after_s >= before_s * (1 - 1e-6)


@pytest.mark.parametrize("fidelity", FIDELITIES[1:])
def test_of_equally_wide_links_the_nearest_is_taken(fidelity):
    """A slower one beside it made a message a fifth faster: it was no longer the first of two."""
    there = [Link("a", "b", bandwidth_bytes_per_s=1e9, latency_s=late) for late in (5e-6, 1e-6)]
    pair = Topology(
        "pair", [Node("a", "gpu"), Node("b", "gpu")],
        [*there, Link("b", "a", bandwidth_bytes_per_s=1e9, latency_s=1e-6)],
    )  # fmt: skip
    time_s = price_s(pair, "all_gather", size_bytes=2e3, fidelity=fidelity)
    assert time_s == pytest.approx(1e-6 + 1e3 / 1e9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_link_of_a_byte_a_second_hurts_whoever_crosses_it(kind, fidelity):
    network = hosts(2, 2, 8e9, 4e9, slow=1 / 4e9)
    assert price_s(network, kind, size_bytes=1e6, fidelity=fidelity) > 1e2
    inside = Group(size=2, ranks=4)
    assert price_s(network, kind, size_bytes=1e6, group=inside, fidelity=fidelity) < 1e-3


def test_what_has_no_price_is_refused():
    network = switch(4)
    assert price_s(network, "all_reduce", size_bytes=1e6, group=Group(size=1)) == 0
    for change in ({"kind": "gossip"}, {"fidelity": "guess"}):
        with pytest.raises(ConfigurationError, match="no price"):
            price_s(network, **{"kind": "all_gather", "size_bytes": 1.0} | change)
    for fidelity in ("closed_form", "schedule", "simulation"):
        for algorithm, said in (("nosuch", "no algorithm"), ("pairwise", "pairwise does not do")):
            wrong = {"fidelity": fidelity, "algorithm": algorithm}
            with pytest.raises(ConfigurationError, match=f"{said}.*bruck"):
                price_s(network, "all_gather", size_bytes=1.0, **wrong)
        for group in (Group(size=8), Group(size=2, stride=4), Group(size=4, ranks=3)):
            with pytest.raises(ConfigurationError, match="does not fit into 4 ranks"):
                price_s(network, "all_gather", size_bytes=1.0, group=group, fidelity=fidelity)
        for size_bytes in (-1.0, float("nan"), float("inf"), "1 MB"):
            with pytest.raises(ConfigurationError, match="size_bytes must be a number"):
                price_s(network, "all_gather", size_bytes=size_bytes, fidelity=fidelity)
    fabric = fabric_from_topology(network)
    with pytest.raises(ConfigurationError, match="size_bytes must be a number"):
        collective_time_s(fabric, "all_gather", size_bytes=float("nan"), group=Group(size=2))


@pytest.mark.parametrize("wrong", [0, -1, "2", float("nan")])
@pytest.mark.parametrize(
    "name", ["gpus", "bandwidth_bytes_per_s", "exchange_efficiency", "all_reduce_gain"]
)
def test_a_tier_of_nothing_is_refused(name, wrong):
    fields = {"name": "node", "gpus": 8, "bandwidth_bytes_per_s": 1e9}
    with pytest.raises(ConfigurationError, match=f"{name} of tier 'node' must be"):
        Tier(**fields | {name: wrong})


@pytest.mark.parametrize("name", ["base_s", "hop_s", "fill_s"])
def test_times_of_a_tier_are_numbers(name):
    for wrong in (-1e-6, "1", float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match=f"{name} of tier 'x' must be a number"):
            Tier(name="x", gpus=8, bandwidth_bytes_per_s=1e9, **{name: wrong})
        if name != "fill_s":
            with pytest.raises(ConfigurationError, match=f"{name}.* must be a number"):
                fabric_from_topology(switch(4), **{name: wrong})


@pytest.mark.parametrize("wrong", [0, 2.0, "2", True])
def test_a_group_has_whole_numbers(wrong):
    for name in ("size", "stride", "ranks"):
        with pytest.raises(ConfigurationError, match=f"{name} of a group must be a whole number"):
            Group(**{"size": 2, name: wrong})


def two_tiers(able=("tor0", "tor1", "core"), *, core_rate=2e9, **pool):
    """Two racks of two ranks at 1 GB/s and 1 us a link."""
    pool = Aggregation(**{"slots": 512, "slot_bytes": 1024} | pool)
    nodes = [Node(f"gpu{i}", "gpu") for i in range(4)]
    nodes += [Node(name, "switch") for name in ("tor0", "tor1", "core")]
    ends = [(f"gpu{i}", f"tor{i // 2}", 1e9) for i in range(4)]
    ends += [("tor0", "core", core_rate), ("tor1", "core", core_rate)]
    links = [
        Link(*pair, bandwidth_bytes_per_s=rate, latency_s=1e-6)
        for a, b, rate in ends
        for pair in ((a, b), (b, a))
    ]
    switches = [SwitchAbility(name, aggregation=pool) for name in able]
    return Topology("tiers", nodes, links, switches=switches)


@pytest.mark.parametrize(
    ("change", "rate"),
    [
        ({}, 1e9),
        ({"core_rate": 5e8}, 5e8),
        ({"slots": 2, "slot_bytes": 1000}, 2 * 1000 / 4e-6),  # slots over the round trip
        ({"rate_bytes_per_s": 1e8}, 1e8),
    ],
)
def test_switches_aggregate_in_a_round_trip_and_the_bytes_at_the_least_rate(change, rate):
    network = two_tiers(**change)
    formula, simulated = (
        price_s(network, "all_reduce", size_bytes=1e6, fidelity=fidelity, algorithm="in_network")
        for fidelity in ("closed_form", "simulation")
    )
    assert formula == pytest.approx(4e-6 + 1e6 / rate)  # 2 h a + S / B
    assert simulated == pytest.approx(formula, rel=1e-6)


def test_what_switches_cannot_aggregate_is_refused():
    for network in (switch(4), two_tiers(("tor0",))):
        with pytest.raises(InfeasibleError, match="no tree of the"):
            price_s(network, "all_reduce", size_bytes=1.0, algorithm="in_network")
    for kind, fidelity in (("all_gather", "closed_form"), ("all_reduce", "schedule")):
        with pytest.raises(ConfigurationError, match="switches do not aggregate"):
            price_s(switch(4), kind, size_bytes=1.0, fidelity=fidelity, algorithm="in_network")


def test_the_closed_form_takes_every_algorithm_that_there_is():
    plain = price_s(switch(4), "all_reduce", size_bytes=1e6)
    for name in available_algorithms(named_collective("all_reduce", 4)):
        for algorithm in (name, name.replace("_", "-").upper()):
            found = price_s(switch(4), "all_reduce", size_bytes=1e6, algorithm=algorithm)
            assert found == plain


NODE_S, NET_S, NODE_BASE_S, NET_BASE_S = 3e-6, 50e-6, 1e-3, 7e-3


@pytest.mark.parametrize(
    ("kind", "group", "expected_s"),
    [
        # NCCL: a ring takes a step per member, the tree of nodes is a chain inside each of them.
        ("all_gather", Group(size=16), NET_BASE_S + 12 * NODE_S + 3 * NET_S),
        ("reduce_scatter", Group(size=4), NODE_BASE_S + 3 * NODE_S),
        ("broadcast", Group(size=4, stride=4), NET_BASE_S + 3 * NET_S),
        ("all_reduce_by_ring", Group(size=16), NET_BASE_S + 2 * (12 * NODE_S + 3 * NET_S)),
        ("all_reduce_by_tree", Group(size=16), NET_BASE_S + 2 * (3 * NODE_S + 2 * NET_S)),
        ("all_reduce_by_tree", Group(size=4), NODE_BASE_S + 2 * 2 * NODE_S),
        ("all_reduce", Group(size=16), NET_BASE_S + 2 * (3 * NODE_S + 2 * NET_S)),
        ("all_reduce_of_ends", Group(size=16), NET_BASE_S + 2 * NET_S),
        # One message to each of the others at once: as many steps as a tree of them is deep.
        ("all_to_all", Group(size=4), NODE_BASE_S + 2 * NODE_S),
        ("all_to_all", Group(size=16), NET_BASE_S + 4 * NET_S),
        ("all_to_all", Group(size=4, stride=4), NET_BASE_S + 2 * NET_S),
        ("point_to_point", Group(size=4), NODE_BASE_S + NODE_S),
        ("point_to_point", Group(size=2, stride=4), NET_BASE_S + NET_S),
    ],
)
def test_a_byte_takes_the_steps_of_its_collective(kind, group, expected_s):
    node = Tier(name="node", gpus=4, bandwidth_bytes_per_s=1e18, base_s=NODE_BASE_S, hop_s=NODE_S)
    net = Tier(name="net", gpus=16, bandwidth_bytes_per_s=1e18, base_s=NET_BASE_S, hop_s=NET_S)
    fabric = FabricSpec(name="slow to begin", tiers=(node, net))
    found_s = collective_time_s(fabric, kind, size_bytes=1.0, group=group)
    assert found_s == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_several_chunks_pays_its_latency_once(kind):
    """On a switch nothing shares a link: the price of one group is the schedule's own time."""
    network = switch(16, bandwidth=25e9, latency=5e-6)
    for algorithm in available_algorithms(named_collective(kind, 16)):
        if algorithm in {"hierarchical", "in_network_tree"}:
            continue
        schedule = build_algorithm(algorithm, named_collective(kind, 16), network)
        own_s = evaluate(schedule, network, size_bytes=65536, model="fluid").total_s
        found_s = price_s(
            network, kind, size_bytes=65536, group=Group(size=16), fidelity="simulation",
            algorithm=algorithm,
        )  # fmt: skip
        assert found_s == pytest.approx(own_s, rel=1e-6), algorithm
