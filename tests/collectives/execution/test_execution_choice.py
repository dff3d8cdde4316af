"""Which algorithm is chosen, and what is predicted: by hand where that is possible."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.execution import Settings, configure, current_settings, register_algorithm
from fivefold.collectives.execution._settings import lab_topology
from fivefold.collectives.execution.choose import (
    Choice,
    LinkClock,
    candidate_schedules,
    choose,
    library_names,
)
from fivefold.collectives.lowering import check_program, lower
from fivefold.collectives.schedules import all_reduce, named_collective
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Link, Node, Topology, switch

FREE = {"message_s": 0.0, "inner_message_s": 0.0, "message_work_s": 0.0}


def slow_ring(count, fast=100e6, slow=20e6):
    nodes = [Node(f"gpu{i}", "gpu") for i in range(count)]
    links = [
        Link(f"gpu{a}", f"gpu{b}", bandwidth_bytes_per_s=slow if i == count - 1 else fast)
        for i in range(count)
        for a, b in ((i, (i + 1) % count), ((i + 1) % count, i))
    ]
    return Topology("slow edge", nodes, links)


def test_equal_links_are_left_to_the_inner_backend():
    found = choose(
        "all_reduce",
        topology=switch(4, bandwidth=100e6),
        settings=Settings(**FREE),
        size_bytes=1 << 24,
    )
    assert found.label == "inner"
    # A ring: 2 (N - 1) / N of the buffer over each link.
    assert found.inner_s == pytest.approx(1.5 * 2**24 / 100e6, rel=1e-6)


def test_a_slow_edge_is_gone_around():
    found = choose(
        "all_reduce", topology=slow_ring(4), settings=Settings(**FREE), size_bytes=1 << 24
    )
    assert found.program is not None
    check_program(found.program)
    assert found.inner_s == pytest.approx(1.5 * 2**24 / 20e6, rel=1e-6)
    # Without the slow edge it is a line: every link carries the buffer once each way.
    assert found.predicted_s < 1.4 * 2**24 / 100e6


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
)
def test_every_choice_computes_its_collective(name):
    found = choose(
        name, topology=slow_ring(5), settings=Settings(**FREE, margin=0.0), size_bytes=1 << 20
    )
    assert found.predicted_s <= found.inner_s * (1 + 1e-9)
    if found.program is not None:
        check_program(found.program)
        assert found.program.collective.name == name
    assert Choice.from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_reduce", {"ring", "trees", "rooted_trees"}),
        ("broadcast", {"binomial_tree", "trees"}),
        ("all_to_all", {"pairwise"}),
    ],
)
def test_what_is_tried_are_the_algorithms_that_may_be_asked_for(name, expected):
    collective, network = named_collective(name, 4), slow_ring(4)
    found = dict(candidate_schedules(collective, network, "auto"))
    assert expected <= set(found) <= set(library_names(collective))
    for one in expected:
        asked = list(candidate_schedules(collective, network, one))
        assert {label for label, _ in asked} == {one}
        assert all(schedule.collective.name == name for _, schedule in asked)


def test_the_same_choice_every_time():
    arguments = {"topology": slow_ring(4), "settings": Settings(), "size_bytes": 1 << 22}
    first = choose("all_reduce", **arguments)
    assert choose("all_reduce", **arguments) == first


def test_small_messages_avoid_the_overhead():
    found = choose(
        "all_reduce", topology=switch(2, bandwidth=1e9), settings=Settings(), size_bytes=64
    )
    assert found.label == "inner"


def test_work_is_that_of_messages_however_many_chunks_they_carry():
    settings = Settings(message_s=0.0)
    found = choose(
        "all_reduce", topology=switch(4, bandwidth=1e9), settings=settings, size_bytes=64
    )
    # To and from each of three others: half the work of a message at either end.
    assert found.others["one_shot"] == pytest.approx(6 * settings.message_work_s / 2)


def test_the_clock_shares_links_between_pairs():
    for name, algorithm, count, expected in (
        ("broadcast", "direct", 3, pytest.approx(2.0, rel=0.5)),
        ("all_reduce", "ring", 4, pytest.approx(1.5)),
    ):
        asked = Settings(algorithms={name: algorithm}, **FREE)
        found = choose(
            name, topology=switch(count, bandwidth=1e6), settings=asked, size_bytes=10**6
        )
        assert found.predicted_s == expected


def test_latency_and_message_cost_are_added():
    clock = LinkClock(switch(2, bandwidth=1e6, latency=0.25), chunk_bytes=1e6, message_s=0.5)
    assert clock(1.0, 0, 1, 1) == pytest.approx(1.0 + 1.0 + 0.5 + 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": "mpi"}, "inner must be"),
        ({"algorithms": {"gather": "ring"}}, "algorithms names 'gather'"),
        ({"max_pieces": 0}, "max_pieces must be a whole number from 1"),
        ({"max_pieces": 1.5}, "max_pieces must be a whole number from 1; got 1.5"),
        ({"shared_cores": 0.5}, "shared_cores must be a whole number from 0; got 0.5"),
        ({"margin": 2.0}, "margin must be"),
        ({"max_pieces": "4"}, "max_pieces must be a whole number from 1; got '4'"),
        ({"message_s": float("nan")}, "message_s must be a number, finite and at least 0; got nan"),
        ({"margin": None}, "margin must be"),
        ({"shared_link_share": 1.5}, r"shared_link_share must be in \(0, 1\]; got 1.5"),
        ({"algorithms": "ring"}, "algorithms must be a mapping"),
        ({"topolgy": None}, "there is no setting 'topolgy'"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        configure(**changes)


def test_settings_may_be_numpys_numbers_or_fractions():
    chosen = Settings(
        max_pieces=np.int64(4),
        min_piece_bytes=np.uint32(1 << 16),
        message_s=Fraction(1, 2048),
        margin=np.float32(0.25),
    )
    found = choose("all_reduce", topology=slow_ring(4), settings=chosen, size_bytes=1 << 24)
    plain = Settings(max_pieces=4, min_piece_bytes=1 << 16, message_s=2**-11, margin=0.25)
    assert found == choose("all_reduce", topology=slow_ring(4), settings=plain, size_bytes=1 << 24)


def test_what_is_said_does_not_grow_with_the_programs_use():
    program = lower(build_algorithm("ring", all_reduce(4)))
    choice = Choice("ring", program, 1.0, 2.0, 1 << 20)
    said = choice.to_bytes()
    assert program.slots
    assert choice.to_bytes() == said
    assert Choice.from_bytes(said) == choice


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("FIVEFOLD_TOPOLOGY", "ring:4")
    monkeypatch.setenv("FIVEFOLD_ALGORITHMS", "all_reduce=ring, all_gather=inner")
    found = current_settings()
    assert found.topology.num_ranks == 4
    assert found.algorithm_of("all_reduce") == "ring"
    assert found.algorithm_of("all_gather") == "inner"
    monkeypatch.setenv("FIVEFOLD_ALGORITHMS", "all_reduce")
    with pytest.raises(ConfigurationError, match="FIVEFOLD_ALGORITHMS holds 'all_reduce'"):
        current_settings()


def test_the_lab_says_what_its_links_are():
    facts = {
        "hosts": 3,
        "nproc_per_host": 1,
        "rate_bytes_per_s": 1e6,
        "host_rates_bytes_per_s": {"2": 5e5},
        "delay_s": 0.002,
        "shaped": True,
        "mtu": 1500,
        "topology": None,
    }
    found = lab_topology(json.dumps(facts), 3)
    rates = sorted(set(found.capacities_bytes_per_s.tolist()))
    share = (1500 - 52) / (1500 + 14)
    assert rates == pytest.approx([5e5 * share, 1e6 * share])
    assert sum(found.latencies_s[link] for link in found.shortest_route(0, 1)) == 0.002
    assert lab_topology(json.dumps(facts), 4) is None
    assert lab_topology(json.dumps({**facts, "shaped": False}), 3) is None


def test_what_may_be_registered():
    with pytest.raises(ConfigurationError, match="has a meaning already"):
        register_algorithm("auto", build_algorithm("ring", all_reduce(2)))
    with pytest.raises(ConfigurationError, match="computes gather"):
        register_algorithm("g", build_algorithm("direct", named_collective("gather", 2)))
