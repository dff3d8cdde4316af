"""The account of a reader: every name stands in exactly one list, and none is lost in its forms."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.reading import Reading

NAMES = st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=30)


@given(NAMES, st.data())
def test_each_name_has_exactly_one_place(names, data):
    reading = Reading("input")
    placed = {"read": [], "assumed": [], "left_out": [], "harmless": []}
    for name in names:
        where = data.draw(st.sampled_from(sorted(placed)))
        placed[where].append(name)
        if where == "read":
            reading.take(name)
        elif where == "assumed":
            reading.assume(name, 1, "not said")
        elif where == "left_out":
            reading.leave_out(name, "not known")
        else:
            reading.ignore(name, "changes nothing")
    assert reading.missing([*names, *names, "one more" * 2]) == ["one more" * 2]
    plain = json.loads(json.dumps(reading.to_json()))
    assert {key: [note["name"] for note in plain[key]] for key in placed} == placed
    assert all(name in reading.text() for name in names)


def test_a_name_is_not_given_two_places():
    reading = Reading("input")
    reading.take("src")
    with pytest.raises(AssertionError, match="has its place already"):
        reading.ignore("src", "changes nothing")


def test_a_verdict_waits_for_what_is_decisive():
    reading = Reading("recipe.sh")
    reading.take("--num-layers", "32 layers")
    assert reading.decisive() == []
    reading.assume("GPUs", 8, "the recipe does not say", decisive=True)
    reading.leave_out("--use-megatron-fsdp", "not priced", decisive=True)
    assert [note.name for note in reading.decisive()] == ["GPUs", "--use-megatron-fsdp"]
    assert "left out --use-megatron-fsdp" in reading.line()
    assert reading.to_json()["assumed"] == [
        {"name": "GPUs", "why": "the recipe does not say", "value": 8, "decisive": True}
    ]
