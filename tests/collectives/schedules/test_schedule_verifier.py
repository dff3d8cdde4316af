"""The verifier against a slow one of sets and dictionaries, on right and on broken schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import (
    Schedule,
    ScheduleError,
    Transfer,
    all_gather,
    all_reduce,
    broadcast,
    custom_collective,
    named_collective,
    reduce,
    reduce_scatter,
    verify_schedule,
)
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Link, Node, Topology, line, ring
from oracles.schedule_data import verify_with_data

PLAIN = ("ring", "bidirectional_ring", "binomial_tree", "bruck", "direct", "recursive_doubling")


def slow_verdict(schedule):
    """Whether a schedule is right, by the definition: values are sets of (chunk, contributor)."""
    collective = schedule.collective
    values = {}
    for chunk, rank in zip(collective.pre_chunks, collective.pre_ranks, strict=True):
        part = int(rank) if collective.reducing else -1
        values[int(chunk), int(rank)] = frozenset([part])
    full = {}
    for (chunk, _), value in values.items():
        full[chunk] = full.get(chunk, frozenset()) | value
    moves = list(schedule)
    if schedule.has_steps:
        phases = [[m for m in moves if m.step == s] for s in range(schedule.num_steps)]
    else:
        phases = [[m] for m in moves]
    for phase in phases:
        carried = []
        for move in phase:
            if move.source == move.target or (move.chunk, move.source) not in values:
                return False
            carried.append(values[move.chunk, move.source])
        for move, value in zip(phase, carried, strict=True):
            place = (move.chunk, move.target)
            if move.reduces:
                held = values.get(place, frozenset())
                if held & value:
                    return False
                values[place] = held | value
            else:
                values[place] = value
    wanted = zip(collective.post_chunks.tolist(), collective.post_ranks.tolist(), strict=True)
    return all(values.get(place) == full[place[0]] for place in wanted)


def accepted(schedule):
    try:
        verify_schedule(schedule)
    except ScheduleError:
        return False
    return True


def accepted_with_data(schedule):
    try:
        verify_with_data(schedule, seed=3)
    except ScheduleError:
        return False
    return True


@st.composite
def mutated(draw):
    """A library schedule with a few changes that may or may not break it."""
    n = draw(st.integers(2, 5))
    name = draw(st.sampled_from(COLLECTIVES))
    collective = named_collective(name, n, chunks=draw(st.integers(1, 2)), root=0)
    known = [key for key in available_algorithms(collective) if key in PLAIN]
    schedule = build_algorithm(draw(st.sampled_from(known)), collective)
    moves = list(schedule.replaced(messages=None))
    if draw(st.booleans()):  # without steps the listed order counts
        moves = [Transfer(**{**vars(move), "step": -1}) for move in moves]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(moves) - 1))
        kind = draw(st.sampled_from(["drop", "twice", "chunk", "target", "flag", "swap", "step"]))
        move = vars(moves[at])
        if kind == "drop" and len(moves) > 1:
            del moves[at]
        elif kind == "twice":
            moves.append(moves[at])
        elif kind == "chunk":
            chunk = draw(st.integers(0, collective.num_chunks - 1))
            moves[at] = Transfer(**{**move, "chunk": chunk})
        elif kind == "target":
            moves[at] = Transfer(**{**move, "target": draw(st.integers(0, n - 1))})
        elif kind == "flag":
            moves[at] = Transfer(**{**move, "reduces": not move["reduces"]})
        elif kind == "swap":
            other = draw(st.integers(0, len(moves) - 1))
            moves[at], moves[other] = moves[other], moves[at]
        elif kind == "step" and move["step"] >= 0:
            moves[at] = Transfer(**{**move, "step": draw(st.integers(0, 4))})
    return Schedule.from_transfers(moves, collective=collective)


@given(schedule=mutated())
def test_the_verifier_says_what_the_definition_says(schedule):
    assert accepted(schedule) == slow_verdict(schedule)


@given(schedule=mutated())
def test_what_the_symbols_accept_gives_the_right_data(schedule):
    # Not the other way round: zeros that a rank sends without holding anything harm no sum.
    if accepted(schedule):
        assert accepted_with_data(schedule)


def moved(*triples, collective, reduces=False, **more):
    moves = [
        Transfer(chunk=chunk, source=source, target=target, reduces=reduces)
        for chunk, source, target in triples
    ]
    return Schedule.from_transfers(moves, collective=collective, **more)


def test_the_first_broken_transfer_is_named():
    early = moved((0, 0, 1), (0, 2, 3), (0, 1, 2), (0, 2, 3), collective=broadcast(4))
    with pytest.raises(
        ScheduleError, match=r"transfer 1 sends chunk 0 from rank 2 .* not hold"
    ) as e:
        verify_schedule(early)
    assert e.value.transfer == 1
    twice = moved((0, 1, 0), (0, 2, 0), (0, 1, 0), collective=reduce(3), reduces=True)
    with pytest.raises(ScheduleError, match=r"transfer 2 adds chunk 0 .* already"):
        verify_schedule(twice)
    lost = Schedule.from_transfers(
        [
            Transfer(chunk=0, source=1, target=0),
            Transfer(chunk=0, source=2, target=0, reduces=True),
        ],
        collective=reduce(3),
    )
    with pytest.raises(ScheduleError, match=r"transfer 0 sends chunk 0 .* overwrites"):
        verify_schedule(lost)
    with pytest.raises(ScheduleError, match="chunk 0 never arrives whole at rank 2") as e:
        verify_schedule(moved((0, 0, 1), collective=broadcast(3)))
    assert e.value.transfer is None
    with pytest.raises(ScheduleError, match="same rank"):
        verify_schedule(moved((0, 0, 0), collective=broadcast(1)))


def test_a_step_reads_what_was_there_when_it_began():
    swap = [
        Transfer(chunk=0, source=0, target=1, reduces=True, step=0),
        Transfer(chunk=0, source=1, target=0, reduces=True, step=0),
    ]
    verify_schedule(Schedule.from_transfers(swap, collective=all_reduce(2, 1)))
    listed = [Transfer(**{**vars(move), "step": -1}) for move in swap]
    with pytest.raises(ScheduleError, match="already"):
        verify_schedule(Schedule.from_transfers(listed, collective=all_reduce(2, 1)))
    chain = [
        Transfer(chunk=0, source=0, target=1, step=0),
        Transfer(chunk=0, source=1, target=2, step=0),
    ]
    with pytest.raises(ScheduleError, match="transfer 1"):
        verify_schedule(Schedule.from_transfers(chain, collective=broadcast(3)))


def test_times_order_transfers_whatever_the_list_says():
    moves = [
        Transfer(chunk=0, source=1, target=2, start_s=1.0, end_s=2.0),
        Transfer(chunk=0, source=0, target=1, start_s=0.0, end_s=1.0),
    ]
    report = verify_schedule(Schedule.from_transfers(moves, collective=broadcast(3)))
    assert report.order == "times"
    hurried = [Transfer(**{**vars(moves[0]), "start_s": 0.9}), moves[1]]
    with pytest.raises(ScheduleError, match="transfer 0"):
        verify_schedule(Schedule.from_transfers(hurried, collective=broadcast(3)))
    backward = [Transfer(chunk=0, source=0, target=1, start_s=2.0, end_s=1.0)]
    with pytest.raises(ScheduleError, match="starts at 2"):
        verify_schedule(Schedule.from_transfers(backward, collective=broadcast(2)))


def test_transfers_of_no_duration_follow_the_list():
    at_once = [
        Transfer(chunk=0, source=rank, target=rank + 1, start_s=0.0, end_s=0.0) for rank in range(4)
    ]
    verify_schedule(Schedule.from_transfers(at_once, collective=broadcast(5)))
    circle = [at_once[1], at_once[0], *at_once[2:]]
    with pytest.raises(ScheduleError, match="transfer 0"):
        verify_schedule(Schedule.from_transfers(circle, collective=broadcast(5)))


def test_redundant_copies_are_counted_and_pruned():
    wasteful = moved(
        (0, 0, 1),
        (0, 0, 1),
        (0, 0, 2),
        (0, 1, 2),
        collective=custom_collective(4, [(0, 0)], post=[(0, 2)]),
    )
    assert verify_schedule(wasteful).num_redundant == 2
    lean = wasteful.pruned()
    assert [(move.source, move.target) for move in lean] == [(0, 2)]
    assert verify_schedule(lean).num_redundant == 0
    double = moved((0, 0, 1), (0, 0, 2), (0, 1, 2), collective=broadcast(3))
    verify_schedule(double.inverted())


def test_one_rank_and_nothing_to_do():
    for name in COLLECTIVES:
        collective = named_collective(name, 1)
        empty = Schedule.from_transfers([], collective=collective)
        assert verify_schedule(empty).num_transfers == 0
        verify_with_data(empty)
    with pytest.raises(ScheduleError, match="never arrives"):
        verify_schedule(Schedule.from_transfers([], collective=all_gather(2)))
    with pytest.raises(ScheduleError, match="wrong value"):
        verify_with_data(Schedule.from_transfers([], collective=all_gather(2)))


def test_routes_must_be_paths():
    network = ring(4)
    good = build_algorithm("ring", broadcast(4), network)
    assert verify_schedule(good).routed
    link = int(network.direct_links(0, 1)[0])
    back = int(network.direct_links(1, 0)[0])
    far = int(network.direct_links(2, 3)[0])
    for route, words in (
        ((back,), "does not lead"),
        ((), "does not lead"),
        ((link, far), "does not lead"),
        ((99,), "takes link 99"),
    ):
        moves = [Transfer(chunk=0, source=0, target=1, route=route)]
        schedule = Schedule.from_transfers(
            moves, collective=custom_collective(4, [(0, 0)], post=[(0, 1)]), topology=network
        )
        with pytest.raises(ScheduleError, match=words):
            verify_schedule(schedule)
    moves = [Transfer(chunk=0, source=0, target=1, route=(link,))]
    verify_schedule(
        Schedule.from_transfers(
            moves, collective=custom_collective(4, [(0, 0)], post=[(0, 1)]), topology=network
        )
    )


def test_a_disconnected_network_has_no_routes():
    nodes = [Node("a", "gpu"), Node("b", "gpu")]
    apart = Topology("apart", nodes, [Link("a", "b", bandwidth_bytes_per_s=1e9)])
    schedule = build_algorithm("direct", all_gather(2))
    with pytest.raises(InfeasibleError, match="no route"):
        verify_schedule(schedule, topology=apart)
    with pytest.raises(ConfigurationError, match="2 ranks, the topology 3"):
        verify_schedule(schedule, topology=line(3))


@pytest.mark.parametrize("n", [65, 130])
def test_sums_of_more_than_64_contributors(n):
    schedule = build_algorithm("binomial_tree", reduce(n))
    assert verify_schedule(schedule).num_transfers == n - 1
    broken = Schedule.from_transfers(list(schedule)[1:], collective=reduce(n))
    with pytest.raises(ScheduleError, match="never arrives whole"):
        verify_schedule(broken)
    twice = Schedule.from_transfers([*schedule, next(iter(schedule))], collective=reduce(n))
    with pytest.raises(ScheduleError, match=r"already|whole"):
        verify_schedule(twice)


def test_a_million_transfers_take_no_objects():
    n = 1024
    schedule = build_algorithm("ring", reduce_scatter(n))
    assert verify_schedule(schedule).num_transfers == n * (n - 1)
    wrong = schedule.chunks.copy()
    wrong[700_000] = (wrong[700_000] + 1) % n
    with pytest.raises(ScheduleError):
        verify_schedule(schedule.replaced(chunks=wrong))


def test_schedules_refuse_what_they_cannot_hold():
    collective = all_gather(2)
    arrays = {"chunks": [0], "sources": [0], "targets": [1]}
    for changes, words in (
        ({"chunks": [2]}, "transfer 0 has 2 in chunks"),
        ({"targets": [2]}, "transfer 0 has 2 in targets"),
        ({"sources": [0, 1]}, "sources has the shape"),
        ({"steps": [-2]}, "below -1"),
        ({"starts_s": [0.0]}, "but not both"),
        ({"route_offsets": [0, 1]}, "but not both"),
        ({"route_offsets": [0, 2], "route_links": [0]}, "route_offsets"),
        ({"topology": line(3)}, "the topology 3"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            Schedule(collective=collective, **{**arrays, **changes})
    half = [
        Transfer(chunk=0, source=0, target=1, start_s=0.0, end_s=1.0),
        Transfer(chunk=1, source=1, target=0),
    ]
    with pytest.raises(ConfigurationError, match="transfer 1 has no times"):
        Schedule.from_transfers(half, collective=collective)
    assert np.array_equal(Schedule(collective=collective, **arrays).reduces, [False])
