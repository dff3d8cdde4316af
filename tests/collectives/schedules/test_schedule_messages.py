"""Messages of several chunks: one latency, all of it or nothing; and what cannot be one message."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.lowering import lower
from fivefold.collectives.schedules import (
    Schedule,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    evaluate,
    named_collective,
    verify_schedule,
)
from fivefold.collectives.schedules.messages import messages_of
from fivefold.collectives.schedules.timing import with_times
from fivefold.errors import ConfigurationError, DataError
from fivefold.network.topology import fully_connected, line, switch

TWO = line(2, bandwidth="1 GB/s", latency="1 s")


def moves(*messages, **fields):
    return [
        Transfer(chunk=chunk, source=0, target=1, message=message, **fields)
        for chunk, message in enumerate(messages)
    ]


@pytest.mark.parametrize("model", ["serial", "slotted", "fluid"])
@pytest.mark.parametrize(
    ("messages", "seconds"),
    # Four chunks of a second each: a message pays one second more, which only `serial` keeps
    # the link busy for; a connection's flows follow one another, latency and all.
    [((0, 0, 0, 0), (5, 5, 5)), ((0, 0, 1, 1), (6, 5, 6)), ((None,) * 4, (8, 5, 8))],
)
def test_a_message_pays_its_latency_once(model, messages, seconds):
    schedule = Schedule.from_transfers(moves(*messages), collective=broadcast(2, 4))
    timing = evaluate(schedule, TWO, size_bytes=4e9, model=model)
    assert timing.total_s == pytest.approx(seconds[["serial", "slotted", "fluid"].index(model)])
    timed = with_times(schedule, timing).replaced(topology=TWO)
    if model != "fluid":
        verify_schedule(timed, check_times=True)
    if messages[0] is not None:
        assert timing.ends_s[0] == timing.ends_s[1]  # nobody has the first chunk sooner


@pytest.mark.parametrize(
    ("model", "log_steps_s", "ring_s"),
    [("serial", 6 * 2 * 5, 126 * 5), ("fluid", 6 * 2 * 5, 126 * 5), ("synchronous", 60, 630)],
)
def test_log_step_algorithms_take_log_steps(model, log_steps_s, ring_s):
    """The closed form of Thakur et al.: 2 log2 N latencies against 2 (N - 1) of a ring."""
    network = switch(64, bandwidth=25e9, latency=2.5e-6)
    sent_s = 2 * 63 / 64 * 64e3 / 25e9
    for name, steps_us in (("recursive_halving_doubling", log_steps_s), ("ring", ring_s)):
        schedule = build_algorithm(name, all_reduce(64, 64), network)
        found_s = evaluate(schedule, size_bytes=64e3, model=model).total_s
        assert found_s == pytest.approx(steps_us * 1e-6 + sent_s, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [0, 0, 1]},
        {"messages": [1, 1]},
        {"messages": [0, 2]},
        {"messages": [0, 0], "targets": [1, 2]},
        {"messages": [0, 0], "sources": [0, 2]},
        {"messages": [0, 0], "steps": [0, 1]},
        {"messages": [0, 0], "reduces": [False, True]},
        {"messages": [0, 0], "starts_s": [0.0, 1.0], "ends_s": [2.0, 2.0]},
        {"messages": [0, 0], "route_offsets": [0, 1, 2], "route_links": [0, 1]},
        {"messages": [0, 0], "route_offsets": [0, 1, 3], "route_links": [0, 0, 1]},
    ],
)
def test_transfers_that_cannot_be_one_message_are_refused(changes):
    plain = {"chunks": [0, 1], "sources": [0, 0], "targets": [1, 1]}
    with pytest.raises(ConfigurationError, match="message"):
        Schedule(collective=broadcast(3, 2), **plain | changes)


def test_messages_of_some_transfers_only_are_refused():
    with pytest.raises(ConfigurationError, match="has no message"):
        Schedule.from_transfers(moves(0, None), collective=broadcast(2, 2))


@given(data=st.data(), size=st.integers(2, 9), chunks=st.integers(1, 3))
def test_joined_schedules_do_what_they_did(data, size, chunks):
    """Messages are a step's chunks between two ranks, no more and no less, in every form of it."""
    name = data.draw(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]))
    collective = named_collective(name, size, chunks=chunks)
    known = set(available_algorithms(collective)) - {"hierarchical"}
    schedule = build_algorithm(data.draw(st.sampled_from(sorted(known))), collective)
    verify_schedule(schedule)
    groups = {(move.step, move.source, move.target, move.reduces) for move in schedule}
    assert schedule.num_messages == len(groups)
    network = fully_connected(size, bandwidth=1.0, latency=1.0)
    apart = schedule.replaced(messages=None)
    assert apart.joined().num_messages == len(groups)
    kinds = [evaluate(one, network, size_bytes=1.0).link_bytes for one in (schedule, apart)]
    assert np.allclose(*kinds)
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule
    assert Schedule.from_transfers(schedule, collective=collective) == schedule
    if name != "all_reduce":
        back = schedule.inverted()
        verify_schedule(back)
        assert back.num_messages == schedule.num_messages
        assert back.inverted() == schedule
    finer = schedule.replicated(2)
    verify_schedule(finer)
    assert finer.messages is None or finer.num_messages == schedule.num_messages


def test_a_file_with_messages_that_are_not_numbered_as_listed_is_refused():
    text = build_algorithm("bruck", all_gather(8)).to_json()
    with pytest.raises(DataError, match="messages"):
        Schedule.from_json(text.replace('"messages": [0', '"messages": [7'))


def test_a_message_becomes_operations_of_several_slots():
    schedule = build_algorithm("recursive_doubling", all_reduce(4, 8))
    program = lower(schedule, queue_slots=None)
    counts = [op.count for _, _, block in program.blocks() for op in block.operations]
    assert max(counts) == 8


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_apart_pass_on_what_has_come(pieces):
    """A bruck exchange down a line: its long messages are passed on piece by piece."""
    whole = build_algorithm("bruck", all_to_all(6), line(6, bandwidth="1 GB/s", latency="0 s"))
    together = whole.replicated(pieces)
    apart = whole.replicated(pieces, apart=True)
    verify_schedule(apart)
    assert together.num_messages == whole.num_messages
    assert apart.num_messages == pieces * whole.num_messages
    times_s = [evaluate(one, size_bytes=6e6, model="fluid").total_s for one in (together, apart)]
    assert times_s[0] == pytest.approx(evaluate(whole, size_bytes=6e6, model="fluid").total_s)
    assert times_s[1] <= times_s[0] * (1 + 1e-9)
    assert pieces == 1 or times_s[1] < 0.95 * times_s[0]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_a_program_has_the_messages_that_are_priced(name, joined):
    schedule = build_algorithm(name, all_gather(4, 3))
    schedule = schedule if joined else schedule.replaced(messages=None)
    program = lower(schedule, queue_slots=None, fuse=False)
    sends = sum(step.kind.sends for _, _, block in program.blocks() for step in block.operations)
    assert sends == np.unique(messages_of(schedule)).size == (12 if joined else 36)
