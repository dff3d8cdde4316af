"""The k-synchronous search: the published points, a brute-force reference, bad input."""

import itertools

import numpy as np
import pytest
from benchmarks.collectives.k_synchronous import k_synchronous, pareto_synthesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.collectives import schedules
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import (
    Link,
    Node,
    Topology,
    fully_connected,
    hypercube,
    line,
    mesh,
    named_topology,
    ring,
    switch,
    torus,
)

DGX1 = named_topology("dgx1").scaled(latency=0.0)
AMD4 = Topology(
    "amd4",
    [Node(f"gpu{i}", "gpu") for i in range(4)],
    [
        Link(f"gpu{a}", f"gpu{b}", bandwidth_bytes_per_s=1.0)
        for pair in ((0, 1), (1, 3), (3, 2), (2, 0))
        for a, b in (pair, pair[::-1])
    ],
)

# Collective, points (C, S, R) that exist, points that do not; C as its constructor counts it.
# The all-reduce rows count chunks of the whole buffer. Costly rows are in the benchmark.
DGX1_ROWS = [
    (
        schedules.all_gather,
        [(1, 2, 2), (2, 2, 3), (3, 3, 4), (4, 3, 5), (6, 3, 7), (6, 7, 7)],
        True,
    ),
    (schedules.all_gather, [(1, 1, 1), (3, 2, 4), (6, 2, 7)], False),
    (
        schedules.reduce_scatter,
        [(1, 2, 2), (2, 2, 3), (3, 3, 4), (4, 3, 5), (6, 3, 7), (6, 7, 7)],
        True,
    ),
    (schedules.reduce_scatter, [(1, 1, 1), (3, 2, 4), (6, 2, 7)], False),
    (schedules.all_reduce, [(8, 4, 4), (16, 4, 6), (24, 6, 8), (32, 6, 10), (48, 6, 14)], True),
    (schedules.all_reduce, [(48, 14, 14)], True),
    (schedules.broadcast, [(2, 2, 2), (6, 3, 3), (7, 3, 3), (12, 4, 4)], True),
    (schedules.broadcast, [(3, 2, 2), (8, 3, 3)], False),
    (schedules.reduce, [(2, 2, 2), (6, 3, 3), (7, 3, 3), (12, 4, 4)], True),
    (schedules.reduce, [(3, 2, 2), (8, 3, 3)], False),
    (schedules.gather, [(1, 2, 2), (2, 2, 3), (3, 2, 4), (4, 2, 5), (6, 3, 7)], True),
    (schedules.scatter, [(1, 2, 2), (6, 3, 7)], True),
    (schedules.all_to_all, [(1, 2, 3), (1, 3, 3), (3, 2, 8), (3, 3, 8)], True),
    (schedules.all_to_all, [(1, 2, 2), (2, 2, 5), (3, 2, 7)], False),
]
OTHER_ROWS = [
    (ring(8), schedules.all_gather, [(1, 4, 4), (2, 4, 7), (2, 7, 7), (4, 4, 14)], True),
    (ring(8), schedules.all_gather, [(3, 4, 10)], False),
    (ring(8), schedules.broadcast, [(2, 4, 4)], True),
    (ring(8), schedules.gather, [(2, 4, 7)], True),
    (ring(8), schedules.scatter, [(2, 4, 7)], True),
    (ring(8), schedules.all_to_all, [(1, 4, 8)], True),
    (ring(8), schedules.all_to_all, [(1, 4, 7)], False),
    (AMD4, schedules.all_gather, [(2, 2, 3)], True),
    (torus((4, 4)), schedules.all_gather, [(1, 4, 4), (4, 4, 15)], True),
    (torus((3, 3, 3)), schedules.all_gather, [(1, 5, 5)], True),
    (hypercube(3), schedules.all_gather, [(1, 3, 3), (3, 3, 7)], True),
    (hypercube(4), schedules.all_gather, [(1, 4, 4)], True),
    (mesh((4, 4)), schedules.all_gather, [(1, 7, 8), (1, 8, 8)], True),
    (mesh((5, 5)), schedules.all_gather, [(1, 12, 12)], True),
]
ROWS = [(DGX1, *row) for row in DGX1_ROWS] + OTHER_ROWS
LONG = {  # seconds each: by night, where other points of the same row or machine remain
    "dgx1-all_gather-(6, 7, 7)",
    "dgx1-reduce_scatter-(6, 7, 7)",
    "dgx1-all_reduce-(48, 14, 14)",
    "mesh:5x5-all_gather-(1, 12, 12)",
    "torus:4x4-all_gather-(4, 4, 15)",
    "torus:3x3x3-all_gather-(1, 5, 5)",
}
NAMED = {
    f"{topology.name}-{make.__name__}-{point}": (topology, make, point, exists)
    for topology, make, points, exists in ROWS
    for point in points
}
assert set(NAMED) >= LONG, "a point that is none would be left out unseen"
POINTS = [
    pytest.param(*row, id=name, marks=[pytest.mark.nightly] if name in LONG else [])
    for name, row in NAMED.items()
]


@pytest.mark.parametrize(("topology", "make", "point", "exists"), POINTS)
def test_published_points(topology, make, point, exists):
    chunks, steps, rounds = point
    collective = make(topology.num_ranks, chunks)
    result = k_synchronous(collective, topology, steps=steps, rounds=rounds)
    assert result.status == ("found" if exists else "infeasible")
    if exists:
        check(result.schedule, topology, steps, rounds)


def check(schedule, topology, steps, rounds):
    """Steps, rounds and loads are what was asked; the verifier and the cost model agree."""
    schedules.verify_schedule(schedule, topology=topology)
    per_step = schedule.attributes["rounds"]
    assert len(per_step) == steps
    assert sum(per_step) == rounds
    assert schedule.num_steps <= steps
    assert min(per_step, default=1) >= 1
    unit = schedule.attributes["unit_bytes_per_s"]
    free = topology.scaled(latency=0.0)
    size_bytes = unit * schedule.collective.buffer_weight  # then a round takes a second
    timing = schedules.evaluate(schedule, free, size_bytes=size_bytes, model="synchronous")
    assert timing.total_s <= rounds * (1 + 1e-9)


def brute_force(links, holders, wanted, steps, rounds):
    """Whether a point exists: all maximal sets of sends, step after step."""
    start = frozenset((c, r) for c, ranks in enumerate(holders) for r in ranks)
    goal = {(c, r) for c, ranks in enumerate(wanted) for r in ranks}
    splits = [
        split
        for split in itertools.product(range(1, rounds - steps + 2), repeat=steps)
        if sum(split) == rounds
    ]
    for split in splits:
        states = {start}
        for count in split:
            states = {after for state in states for after in moves(state, links, count)}
        if any(goal <= state for state in states):
            return True
    return not steps and goal <= start


def moves(state, links, rounds):
    choices = []
    for (source, target), capacity in links.items():
        useful = [c for c, r in state if r == source and (c, target) not in state]
        room = min(capacity * rounds, len(useful))
        choices.append(
            [[(c, target) for c in some] for some in itertools.combinations(useful, room)]
        )
    for choice in itertools.product(*choices):
        yield state.union(*choice)


@st.composite
def small_instances(draw):
    ranks = draw(st.integers(2, 3))
    pairs = list(itertools.permutations(range(ranks), 2))
    links = {pair: draw(st.integers(0, 2)) for pair in pairs}
    links = {pair: count for pair, count in links.items() if count}
    chunks = draw(st.integers(1, 3))
    holders = [{draw(st.integers(0, ranks - 1))} for _ in range(chunks)]
    wanted = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(chunks)]
    steps = draw(st.integers(1, 2))
    return ranks, links, holders, wanted, steps, draw(st.integers(steps, 3))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_instances())
def test_answers_equal_brute_force(instance):
    ranks, links, holders, wanted, steps, rounds = instance
    topology = Topology(
        "small",
        [Node(f"r{i}", "gpu") for i in range(ranks)],
        [
            Link(f"r{a}", f"r{b}", bandwidth_bytes_per_s=1.0, count=count)
            for (a, b), count in links.items()
        ],
    )
    pairs = [
        [(chunk, rank) for chunk, ranks_of in enumerate(side) for rank in ranks_of]
        for side in (holders, wanted)
    ]
    collective = schedules.custom_collective(ranks, pairs[0], post=pairs[1])
    # Where all links are double, the unit of capacity is a double link.
    unit = np.gcd.reduce(list(links.values())) if links else 1
    shared = {pair: count // unit for pair, count in links.items()}
    expected = brute_force(shared, holders, wanted, steps, rounds)
    try:
        result = k_synchronous(collective, topology, steps=steps, rounds=rounds)
    except InfeasibleError:
        assert not expected  # not reachable at all
        return
    assert (result.status == "found") == expected
    if result.found:
        check(result.schedule, topology, steps, rounds)


def test_a_switch_is_shared_by_all_routes_through_it():
    """Each rank gets one chunk per round from the switch, so N - 1 rounds are needed."""
    star = switch(4)
    assert k_synchronous(schedules.all_gather(4), star, steps=1, rounds=3).status == "found"
    assert k_synchronous(schedules.all_gather(4), star, steps=1, rounds=2).status == "infeasible"


def test_feasibility_is_not_monotone():
    """(3, 4, 10) does not exist on the ring of 8, though (2, 4, 7) and (4, 4, 14) do."""
    points = {(3, 4, 10): "infeasible", (4, 4, 14): "found", (2, 4, 7): "found"}
    for (chunks, steps, rounds), status in points.items():
        assert (
            k_synchronous(
                schedules.all_gather(8, chunks), ring(8), steps=steps, rounds=rounds
            ).status
            == status
        )


def test_fronts_of_dgx1_meet_the_bound():
    front = pareto_synthesis(lambda chunks: schedules.all_gather(8, chunks), DGX1, max_chunks=6)
    assert [(p.chunks, p.steps, p.rounds) for p in front.points] == [(2, 2, 3), (6, 3, 7)]
    assert front.points[-1].rounds_per_chunk == front.bound
    assert not front.undecided
    exchange = pareto_synthesis(lambda chunks: schedules.all_to_all(8, chunks), DGX1, max_chunks=3)
    assert [(p.chunks, p.steps, p.rounds) for p in exchange.points] == [(3, 2, 8)]


def test_a_front_out_of_time_names_what_it_left_open():
    front = pareto_synthesis(
        lambda chunks: schedules.all_gather(8, chunks), DGX1, max_chunks=6, time_limit_s=0.0
    )
    assert front.points == ()
    assert front.undecided


def test_one_rank_needs_nothing():
    for collective in (
        schedules.all_gather(1),
        schedules.all_reduce(1),
        schedules.all_to_all(1),
        schedules.broadcast(1, 3),
    ):
        result = k_synchronous(collective, fully_connected(1), steps=0, rounds=0)
        assert result.schedule.num_transfers == 0


def test_out_of_time_is_not_infeasible():
    result = k_synchronous(schedules.all_gather(8, 6), DGX1, steps=3, rounds=7, time_limit_s=0.0)
    assert result.status == "unknown"
    with pytest.raises(InfeasibleError, match="not decided"):
        result.require()


def test_one_way_links_reverse_for_sums():
    """A line of one-way links can reduce towards its end only."""
    nodes = [Node(f"r{i}", "gpu") for i in range(3)]
    links = [Link(f"r{i}", f"r{i + 1}", bandwidth_bytes_per_s=1.0) for i in range(2)]
    chain = Topology("chain", nodes, links)
    result = k_synchronous(schedules.reduce(3, root=2), chain, steps=2, rounds=2)
    assert result.schedule.reduces.all()
    with pytest.raises(InfeasibleError, match="cannot reach"):
        k_synchronous(schedules.reduce(3, root=0), chain, steps=2, rounds=2)


@pytest.mark.parametrize(("steps", "rounds"), [(2, 1), (-1, 2)])
def test_impossible_points_are_refused(steps, rounds):
    with pytest.raises(ConfigurationError, match="no point"):
        k_synchronous(schedules.all_gather(8), DGX1, steps=steps, rounds=rounds)


def test_bad_input_says_what_to_do():
    with pytest.raises(ConfigurationError, match="both even"):
        k_synchronous(schedules.all_reduce(8), DGX1, steps=3, rounds=4)
    with pytest.raises(ConfigurationError, match="equal chunks"):
        k_synchronous(schedules.all_to_allv([[0, 1], [2, 0]]), line(2), steps=1, rounds=1)
    with pytest.raises(ConfigurationError, match="the collective has 4 ranks"):
        k_synchronous(schedules.all_gather(4), DGX1, steps=2, rounds=2)
    names, rates = ring(3).ranks, (3.14159265e9, 1e9, 2e9)
    wires = [
        Link(names[i], names[(i + 1) % 3], bandwidth_bytes_per_s=rate)
        for i, rate in enumerate(rates)
    ]
    odd = ring(3).with_links(wires)
    with pytest.raises(ConfigurationError, match="common measure"):
        k_synchronous(schedules.all_gather(3), odd, steps=1, rounds=1)
    with pytest.raises(ConfigurationError, match="too many"):
        k_synchronous(schedules.all_to_all(64), fully_connected(64), steps=2, rounds=2)
    with pytest.raises(ConfigurationError, match="max_chunks"):
        pareto_synthesis(lambda chunks: schedules.all_gather(8, chunks), DGX1, max_chunks=0)
