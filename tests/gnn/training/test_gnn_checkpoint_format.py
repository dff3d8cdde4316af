"""Checkpoints hold any nested state bit for bit, and say so where they do not."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.errors import CheckpointError
from fivefold.gnn.training._checkpoint import (
    checkpoint_files,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from fivefold.gnn.training._state import flatten_state, restore_state

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5)
numbers = st.floats(allow_nan=False)
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    shapes,
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
states = st.recursive(
    plain | numbers | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def equal(first, second):
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        return same and torch.equal(first, second)
    if isinstance(first, dict):
        pairs = zip(first.items(), second.items(), strict=True)
        return all(a == b and type(a) is type(b) and equal(x, y) for (a, x), (b, y) in pairs)
    if isinstance(first, list | tuple):
        same = type(first) is type(second) and len(first) == len(second)
        return same and all(equal(a, b) for a, b in zip(first, second, strict=True))
    return type(first) is type(second) and first == second


@given(state=st.dictionaries(st.text(max_size=4), states, max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_state_comes_back_equal(state):
    data, record = flatten_state(state)
    assert equal(restore_state(data, json.loads(json.dumps(record))), state)


def test_a_file_comes_back_and_old_ones_go(tmp_path):
    for step in (1, 2, 10):
        state = {"step": step, "w": torch.full((3,), step / 7), "nothing": torch.empty(0, 4)}
        write_checkpoint(tmp_path, state, step=step, description={"a": {"b": step}}, keep=2)
    assert [path.name for path in checkpoint_files(tmp_path)] == [
        "step-00000010.fvf",
        "step-00000002.fvf",
    ]
    path, found, description = newest_checkpoint(tmp_path)
    assert path.name == "step-00000010.fvf"
    assert torch.equal(found["w"], torch.full((3,), 10 / 7))
    assert found["nothing"].shape == (0, 4)
    assert description == {"a": {"b": 10}}
    assert newest_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("change", ["flip", "cut", "empty", "foreign"])
def test_damage_is_seen(change, tmp_path):
    path = write_checkpoint(tmp_path, {"w": torch.arange(3000.0)}, step=1, description={}, keep=1)
    data = bytearray(path.read_bytes())
    data[6000] ^= 4
    bad = {"flip": data, "cut": data[:7000], "empty": b"", "foreign": b"x" * 9000}[change]
    path.write_bytes(bad)
    with pytest.raises(CheckpointError, match=r"step-00000001\.fvf is not whole"):
        read_checkpoint(path)


def test_what_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match=r"state\.a\[1\] is a set"):
        flatten_state({"a": [1, {2}]})
    data, record = flatten_state({"x": math.inf})
    assert restore_state(data, record) == {"x": math.inf}
