"""Schedules inverted, composed, cut finer, written, read and drawn."""

import dataclasses
import json
import pickle

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
    all_to_allv,
    broadcast,
    custom_collective,
    draw_schedule,
    evaluate,
    named_collective,
    reduce_scatter,
    scatter,
    verify_schedule,
)
from fivefold.collectives.schedules._drawing import busy_shares
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.collectives.schedules.schedule import compose_all_reduce
from fivefold.collectives.schedules.timing import with_times
from fivefold.errors import ConfigurationError, DataError
from fivefold.network.topology import named_topology, ring, switch
from oracles.schedule_data import verify_with_data


@st.composite
def schedules(draw, names=COLLECTIVES):
    n = draw(st.integers(1, 6))
    name = draw(st.sampled_from(names))
    collective = named_collective(name, n, chunks=draw(st.integers(1, 3)), root=n - 1)
    known = [key for key in available_algorithms(collective) if key != "hierarchical"]
    schedule = build_algorithm(draw(st.sampled_from(known)), collective)
    form = draw(st.sampled_from(["steps", "listed", "times", "routes"]))
    one_step = schedule.num_steps == schedule.has_steps and name == "all_reduce"
    if form == "listed" and schedule.name not in ("recursive_doubling", "one_shot"):
        return schedule if one_step else schedule.replaced(steps=None)
    network = switch(n, bandwidth="1 GB/s", latency="1 us")
    if form == "times":
        return with_times(schedule, evaluate(schedule, network, size_bytes=1e6))
    if form == "routes":
        moves = [
            dataclasses.replace(move, route=tuple(network.shortest_route(move.source, move.target)))
            for move in schedule
        ]
        return Schedule.from_transfers(moves, collective=collective, topology=network)
    return schedule


@given(schedule=schedules())
def test_backwards_it_does_the_inverse(schedule):
    if schedule.collective.name == "all_reduce" and schedule.collective.num_ranks > 1:
        with pytest.raises(ConfigurationError, match="has no inverse"):
            schedule.inverted()
        return
    inverse = schedule.inverted()
    assert inverse.collective == schedule.collective.inverted()
    verify_schedule(inverse)
    verify_with_data(inverse, seed=1)
    again = inverse.inverted()
    if schedule.has_times:
        assert again.starts_s == pytest.approx(schedule.starts_s, abs=1e-12)
        again = again.replaced(starts_s=schedule.starts_s, ends_s=schedule.ends_s)
    assert again == schedule


@given(schedule=schedules(), pieces=st.integers(1, 3))
def test_finer_chunks_are_still_right(schedule, pieces):
    fine = schedule.replicated(pieces)
    assert fine.num_transfers == pieces * schedule.num_transfers
    assert verify_schedule(fine).num_redundant == 0
    assert fine.collective == schedule.collective.replicated(pieces)


@given(schedule=schedules(names=("all_gather", "broadcast")))
def test_sums_then_copies_make_an_all_reduce(schedule):
    # Backwards it is for the network backwards, which has its links in another order.
    back = schedule.inverted().replaced(topology=schedule.topology)
    whole = compose_all_reduce(back, schedule)
    n, chunks = schedule.collective.num_ranks, schedule.collective.num_chunks
    assert whole.collective == all_reduce(n, chunks)
    verify_schedule(whole.replaced(topology=None))
    verify_with_data(whole)
    assert whole.num_steps == 2 * schedule.num_steps
    assert (whole.route_offsets is None) == (schedule.route_offsets is None)


def test_what_does_not_fit_together_is_not_joined():
    gathering = build_algorithm("ring", all_gather(4))
    with pytest.raises(ConfigurationError, match="does not begin with what"):
        compose_all_reduce(gathering, gathering.inverted().inverted())
    with pytest.raises(ConfigurationError, match="does not begin"):
        compose_all_reduce(gathering.inverted(), build_algorithm("ring", all_gather(5)))
    spread = build_algorithm("direct", scatter(3))
    with pytest.raises(ConfigurationError, match="make no all-reduce"):
        compose_all_reduce(spread, build_algorithm("ring", all_gather(3)))
    first = build_algorithm("ring", reduce_scatter(4), ring(4))
    second = build_algorithm("ring", all_gather(4), ring(4, bandwidth="3 GB/s"))
    routed = first.replaced(route_offsets=np.zeros(13, np.int64), route_links=np.zeros(0, np.int32))
    with pytest.raises(ConfigurationError, match="only one of the two schedules has routes"):
        compose_all_reduce(routed, build_algorithm("ring", all_gather(4)))
    with pytest.raises(ConfigurationError, match="different topologies"):
        compose_all_reduce(first, second)


@given(schedule=schedules())
def test_json_keeps_all(schedule):
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule
    assert (again.name, again.solver) == (schedule.name, schedule.solver)
    assert again.attributes == schedule.attributes
    assert pickle.loads(pickle.dumps(schedule)) == schedule  # noqa: S301 - our own bytes


def test_json_keeps_custom_and_uneven_collectives():
    for collective in (
        all_to_allv([[0, 2], [3, 0]]),
        custom_collective(3, [(0, 0), (0, 1)], post=[(0, 2)], chunk_weights=np.array([2.5])),
    ):
        schedule = build_algorithm("direct", collective)
        assert Schedule.from_json(schedule.to_json()) == schedule


def broken_json(**changes):
    data = json.loads(build_algorithm("ring", all_gather(3)).to_json())
    for key, value in changes.items():
        if value is KeyError:
            del data[key]
        else:
            data[key] = value
    return json.dumps(data)


UNEVEN = {"name": "custom", "num_ranks": 3, "num_chunks": 3, "reducing": False, "root": None}
UNEVEN |= {"pre": [[0, 0], [1, 1], [2, 2]], "post": [[0, 1]], "weights": None}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1 column 1"),
        ("[1, 2", "line 1"),
        ("[]", "schema is None"),
        ('{"schema": "fivefold.schedule.9"}', "fivefold.schedule.9"),
        (broken_json(chunks=KeyError), "no entry 'chunks'"),
        (broken_json(collective=KeyError), "no entry 'collective'"),
        (broken_json(chunks=["a"]), "wrong entry"),
        (broken_json(chunks=[[0]]), "no list of numbers"),
        (broken_json(chunks=[10**30]), "chunks.0. must be a number of 64 bits"),
        (broken_json(sources=[99] * 6), "wrong entry.*99 in sources"),
        (broken_json(targets=[0]), "wrong entry"),
        (broken_json(steps=None), "wrong entry"),
        (broken_json(chunks=[0.9] * 6), "wrong entry.*0.9"),
        (broken_json(sources=[2**32] * 6), "wrong entry.*4294967296"),
        (broken_json(steps=True), "wrong entry.*True"),
        (broken_json(reduces="no"), "wrong entry.*no"),
        (broken_json(collective=UNEVEN | {"reducing": {}}), "wrong entry.*reducing is {}"),
        (broken_json(collective=UNEVEN | {"pre": [[1.5, 0]]}), "wrong entry.*1.5"),
        (broken_json(collective={"name": "x", "num_ranks": 2, "chunks": 1, "root": 0}), "wrong"),
        (broken_json(collective=[]), "wrong entry|no entry"),
        (broken_json(topology="nonsense = ["), "nonsense|TOML|line|Invalid"),
        (broken_json(extra=1), "unknown entry 'extra'"),
    ],
)
def test_damaged_json_is_refused_with_a_reason(text, words):
    with pytest.raises((DataError, ConfigurationError), match=words):
        Schedule.from_json(text)


def test_schedules_are_immutable_and_comparable():
    schedule = build_algorithm("ring", all_gather(4))
    with pytest.raises(ValueError, match="read-only"):
        schedule.chunks[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.name = "other"
    chunks = np.zeros(1, dtype=np.int32)
    Schedule(collective=all_gather(2), chunks=chunks, sources=[0], targets=[1])
    chunks[0] = 1  # the caller's own array stays its own
    assert schedule != build_algorithm("direct", all_gather(4))
    assert schedule != "ring"
    error = pickle.loads(pickle.dumps(ScheduleError("no", hint="yes", transfer=3)))  # noqa: S301
    assert (error.message, error.hint, error.transfer) == ("no", "yes", 3)
    assert isinstance(error, ScheduleError)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_made(tmp_path, suffix):
    network = named_topology("dgx1")
    schedule = build_algorithm("ring", all_reduce(8), network)
    path = tmp_path / f"schedule{suffix}"
    figure = draw_schedule(schedule, evaluate(schedule, size_bytes=64e6), path)
    assert path.stat().st_size > 10_000
    axes = figure.axes[0]
    assert len(axes.get_yticks()) == 8  # the links of the ring
    assert "all-reduce of 64 MB among 8 ranks by ring" in axes.get_title(loc="left")
    assert len(axes.patches) == schedule.num_transfers


def test_large_pictures_show_the_busiest_links():
    network = switch(40, bandwidth="1 GB/s")
    schedule = build_algorithm("direct", all_gather(40), network)
    figure = draw_schedule(schedule, evaluate(schedule, size_bytes=1e6), most_rows=10)
    assert len(figure.axes[0].get_yticks()) == 10
    assert "the 10 busiest of 80 links" in [text.get_text() for text in figure.axes[0].texts]


def test_busy_shares_are_exact():
    starts, ends = np.array([0.0, 1.25, 0.5]), np.array([1.0, 3.5, 0.75])
    shares = busy_shares(starts, ends, np.array([0, 0, 1]), num_rows=2, bins=4)
    assert np.allclose(shares, [[1, 0.75, 1, 0.5], [0.25, 0, 0, 0]])
    assert busy_shares(starts[:0], ends[:0], np.zeros(0, int), num_rows=1, bins=2).tolist() == [
        [0, 0]
    ]


def test_pictures_of_thousands_of_transfers_show_all_links():
    network = ring(64, bandwidth="1 GB/s", latency="1 us")
    schedule = build_algorithm("bidirectional_ring", all_reduce(64), network)
    assert schedule.num_transfers > 6000
    axes = draw_schedule(schedule, evaluate(schedule, size_bytes=1e6)).axes[0]
    assert not axes.patches
    (image,) = axes.images
    pixels = np.asarray(image.get_array())
    assert pixels.shape[0] == 128
    busy = np.abs(pixels - pixels.max(axis=(0, 1))).sum(axis=2) > 0.1
    assert busy.mean() > 0.95  # every link works nearly all the time
    first, last = pixels[:, 10].mean(axis=0), pixels[:, -10].mean(axis=0)
    assert first[0] > first[2]  # sums, in brown, come first
    assert last[0] < last[2]  # then copies, in blue


def test_of_equally_busy_links_some_from_everywhere_are_shown():
    network = ring(40, bandwidth="1 GB/s")
    schedule = build_algorithm("ring", all_gather(40), network)
    axes = draw_schedule(schedule, evaluate(schedule, size_bytes=1e6), most_rows=5).axes[0]
    sources = [
        int(text.get_text().split()[0].removeprefix("gpu")) for text in axes.get_yticklabels()
    ]
    assert max(sources) - min(sources) > 30


def test_a_picture_needs_the_schedules_own_times():
    network = ring(4)
    timing = evaluate(build_algorithm("ring", all_gather(4)), network, size_bytes=1)
    other = build_algorithm("ring", broadcast(4), network)
    with pytest.raises(ConfigurationError, match="the timing has 12 transfers"):
        draw_schedule(other, timing)
    empty = Schedule.from_transfers([], collective=all_gather(1), topology=switch(1))
    draw_schedule(empty, evaluate(empty, size_bytes=1))


def test_transfers_may_come_without_attributes_but_with_no_other_field():
    moves = [Transfer(chunk=0, source=0, target=1)]
    made = Schedule.from_transfers(moves, collective=broadcast(2), attributes=None)
    assert made.attributes == {}
    with pytest.raises(TypeError, match=r"from_transfers\(\).* 'sender'"):
        Schedule.from_transfers(moves, collective=broadcast(2), sender="me")


def test_transfers_come_back_as_they_went_in():
    network = ring(3)
    link = int(network.direct_links(0, 1)[0])
    move = Transfer(
        chunk=0, source=0, target=1, reduces=False, step=2, start_s=0.5, end_s=1.5, route=(link,)
    )
    one_way = custom_collective(3, [(0, 0)], post=[(0, 1)])
    schedule = Schedule.from_transfers([move], collective=one_way, topology=network)
    assert list(schedule) == [move]
    assert len(schedule) == 1
