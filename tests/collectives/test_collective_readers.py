# ruff: noqa: S311 - random damage, not secrets
"""Damaged programs, plans, files and conditions: a clear error, or something that still works."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.lowering import (
    Program,
    check_program,
    from_msccl_xml,
    lower,
    to_msccl_xml,
)
from fivefold.collectives.lowering.program import Operation, OpKind, RankProgram, ThreadBlock
from fivefold.collectives.schedules import (
    Schedule,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_allv,
    broadcast,
    custom_collective,
    gather,
    named_collective,
    reduce,
    reduce_scatter,
    scatter,
    verify_schedule,
)
from fivefold.errors import ConfigurationError, DataError, FivefoldError

SCHEDULE = build_algorithm("ring", all_reduce(3, 3))
PROGRAM = lower(SCHEDULE)
ODD = [None, True, -1, 0, 1, 7, 10**12, 2**31, 2**63, 10**400, 1.5, float("nan"), "", "x", "o9"]
ODD += ["1" * 4400, [], {}, [[]], [10**12] * 3, {"a": 1}]


def places(data, path=()):
    """Every place in nested lists and dictionaries."""
    yield path
    if isinstance(data, dict):
        for key, part in data.items():
            yield from places(part, (*path, key))
    if isinstance(data, list):
        for number, part in enumerate(data):
            yield from places(part, (*path, number))


@given(seed=st.integers(0, 2**32))
def test_one_odd_value_is_refused_or_harmless(seed):
    numbers = random.Random(seed)
    data = json.loads(SCHEDULE.to_json())
    *path, last = numbers.choice([path for path in places(data) if path])
    part = data
    for key in path:
        part = part[key]
    if numbers.random() < 0.1:
        del part[last]
    else:
        part[last] = numbers.choice(ODD)
    with suppress(FivefoldError):  # every other error fails
        verify_schedule(Schedule.from_json(json.dumps(data)))


@pytest.mark.parametrize(
    "text",
    ["{" + "[" * 100_000, '{"format":' * 50_000, '{"gpus":' + "9" * 5000 + "}", "{", '{"a":\x00}'],
    ids=["brackets", "braces", "digits", "short", "control"],
)
def test_what_no_one_wrote_is_no_traceback(text):
    with pytest.raises(DataError):
        Schedule.from_json(text)


def test_a_program_is_in_place_or_not():
    with pytest.raises(ConfigurationError, match="in_place is 'no'"):
        replace(PROGRAM, in_place="no")


def test_deep_json_is_said_to_be_too_deep():
    deep = '{"format":' + "[" * 100_000
    with pytest.raises(DataError, match="nested too deeply"):
        Schedule.from_json(deep)


@pytest.mark.parametrize("value", ["", "-1", "999999999999", "1" * 4400, "x", "nop"])
def test_odd_attributes_of_xml(value):
    text = to_msccl_xml(PROGRAM)
    for name in ("cnt", "srcoff", "depid", "deps", "ngpus", "send", "chan", "o_chunks", "type"):
        start = text.index(f' {name}="') + len(name) + 3
        damaged = text[:start] + value + text[text.index('"', start) :]
        try:
            check_program(from_msccl_xml(damaged))
        except FivefoldError:
            continue
        assert (name, value) in {("type", "nop"), ("deps", "-1"), ("depid", "-1"), ("send", "-1")}


MAKERS = (all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, reduce, scatter, gather)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "sizes",
    [(10**12,), (2, 10**12), (10**5, 10**5), (2**31,), (10**400,), ("x",), (2.5,), (2, "x")],
    ids=["ranks", "chunks", "both", "int32", "digits", "text", "half", "text_chunks"],
)
def test_sizes_that_no_memory_holds_are_refused_at_once(make, sizes):
    with pytest.raises(ConfigurationError):
        make(*sizes)


@pytest.mark.parametrize(
    ("pre", "post"),
    [
        (3, 4),
        ([(0, 10**12)], []),
        ([(10**12, 0)], []),
        ([(10**9, 0)], []),
        (["x"], []),
        ([(0,)], []),
        ([(0.5, 0)], []),
        ([(0, 0)], [(0, "a")]),
        ([(-1, 0)], []),
    ],
    ids=["numbers", "rank", "chunk", "many", "text", "single", "half", "letter", "negative"],
)
def test_conditions_that_are_no_pairs_are_refused(pre, post):
    with pytest.raises(ConfigurationError):
        custom_collective(2, pre, post=post)


def test_weights_sizes_and_names_of_a_wrong_kind():
    with pytest.raises(ConfigurationError, match="no numbers"):
        custom_collective(2, [(0, 0)], post=[(0, 1)], chunk_weights=["x"])
    for sizes in ("x", [[1, "a"]], {}, [[10**400]]):
        with pytest.raises(ConfigurationError):
            all_to_allv(sizes)
    for name in (3, None, b"x", ["all_gather"]):
        with pytest.raises(ConfigurationError, match="there is no collective"):
            named_collective(name, 2)


@pytest.mark.parametrize(
    "block",
    [
        ThreadBlock((), send_peer="1"),
        ThreadBlock((), receive_peer=None),
        ThreadBlock((), channel=1.5),
        ThreadBlock((Operation("s"),), send_peer=1),
        ThreadBlock((Operation(OpKind.SEND, "i"),), send_peer=1),
        ThreadBlock((Operation(OpKind.SEND, count="2"),), send_peer=1),
        ThreadBlock((Operation(OpKind.SEND, source_offset=10**400),), send_peer=1),
        ThreadBlock((Operation(OpKind.SEND, wait_block=None),), send_peer=1),
    ],
    ids=["peer", "none", "channel", "kind", "buffer", "count", "digits", "wait"],
)
def test_programs_of_wrong_types_are_refused(block):
    with pytest.raises(ConfigurationError):
        Program(all_gather(2), (RankProgram((block,), 1, 2), RankProgram((), 1, 2)))


def test_slots_that_no_memory_holds_are_refused():
    with pytest.raises(ConfigurationError, match="scratch slots is 1000000000000"):
        Program(all_gather(1), (RankProgram((), 1, 1, 10**12),))
