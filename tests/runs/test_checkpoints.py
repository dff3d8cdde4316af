"""Checkpoints hold any nested state bit for bit, are whole or not at all, and say what is wrong."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.errors import CheckpointError
from fivefold.runs.checkpoints import (
    choose_checkpoint,
    flatten_state,
    newest_checkpoint,
    read_checkpoint,
    restore_state,
    verify_checkpoint,
    write_checkpoint,
)
from fivefold.runs.ranks import Ranks
from helpers.night import number_of

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


@pytest.fixture
def alone():
    return Ranks(timeout_s=5.0)


def names(output):
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def state_of(value):
    return {
        "weights": torch.full((3, 2), value),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "bits": torch.tensor([1, 0], dtype=torch.uint8),
        "half": torch.tensor([value], dtype=torch.bfloat16),
        "by_index": {0: {"exp_avg": torch.tensor([value])}, 1: {}},
        "plain": [1, 0.1 + 0.2, True, None, "text", float("inf")],
        "pair": (0.9, 0.95),
        "empty": [],
    }


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
@settings(
    max_examples=number_of(25, 1000), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_any_state_comes_back_equal(state):
    assert equal(restore_state(flatten_state(state, prefix="rank7"), prefix="rank7"), state)


def test_keys_that_look_like_paths_do_not_meet():
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "structure": torch.ones(2)}
    assert equal(restore_state(flatten_state(state, prefix="rank0"), prefix="rank0"), state)


def test_a_state_that_cannot_be_held_is_refused_by_name():
    with pytest.raises(TypeError, match=r"rank0/inner/hook is a builtin_function_or_method"):
        flatten_state({"inner": {"hook": print}}, prefix="rank0")


def test_written_and_read_by_one_process(alone, tmp_path):
    state = state_of(0.1)
    record = write_checkpoint(tmp_path, state, step=7, description={"a": 1}, ranks=alone, keep=1)
    assert record.path.name == "step-00000007"
    on_disk = [path for path in record.path.iterdir() if path.name != "manifest.json"]
    assert record.num_bytes == sum(path.stat().st_size for path in on_disk)
    manifest = verify_checkpoint(record.path)
    assert (manifest["step"], manifest["world_size"]) == (7, 1)
    assert equal(read_checkpoint(record.path, rank=0), state)


def test_torch_itself_can_read_it(alone, tmp_path):
    record = write_checkpoint(tmp_path, state_of(0.5), step=1, description={}, ranks=alone, keep=1)
    found = {"rank0/weights": torch.zeros(3, 2)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=record.path, no_dist=True)
    assert torch.equal(found["rank0/weights"], torch.full((3, 2), 0.5))


def test_only_the_newest_are_kept_and_leftovers_go(alone, tmp_path):
    leftover = tmp_path / "checkpoints" / "step-00000099.tmp"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("x")
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, state_of(1.0), step=step, description={}, ranks=alone, keep=2)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(alone, tmp_path):
    record = write_checkpoint(tmp_path, state_of(1.0), step=5, description={}, ranks=alone, keep=2)
    (record.path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000005 is not whole: manifest.json is miss"):
        verify_checkpoint(record.path)
    write_checkpoint(tmp_path, state_of(2.0), step=5, description={}, ranks=alone, keep=2)
    verify_checkpoint(record.path)
    assert read_checkpoint(record.path, rank=0)["scalar"] == 2.0
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("folder", ["", "checkpoints"])
def test_a_runs_folder_is_no_checkpoint_and_not_called_damaged(alone, tmp_path, folder):
    record = write_checkpoint(tmp_path, state_of(1.0), step=5, description={}, ranks=alone, keep=2)
    with pytest.raises(CheckpointError, match=f"name one of them, such as {record.path}"):
        choose_checkpoint(tmp_path / "other", str(tmp_path / folder), description={}, ranks=alone)


def test_a_rank_that_is_not_in_it_is_an_error(alone, tmp_path):
    record = write_checkpoint(tmp_path, state_of(1.0), step=5, description={}, ranks=alone, keep=2)
    with pytest.raises(CheckpointError, match="rank 3 cannot read the checkpoint"):
        read_checkpoint(record.path, rank=3)


@pytest.mark.parametrize("leftover", ["step-00000012.tmp", "step-00000012-replaced.tmp"])
def test_what_a_killed_run_left_is_gone_after_a_resume_that_has_nothing_to_save(
    alone, tmp_path, leftover
):
    write_checkpoint(tmp_path, state_of(1.0), step=18, description={}, ranks=alone, keep=1)
    doomed = tmp_path / "checkpoints" / leftover
    doomed.mkdir()
    (doomed / "__0_0.distcp").write_text("x")
    (tmp_path / ".metrics.jsonl.0badcafe.tmp").write_text("x")
    path, manifest = choose_checkpoint(tmp_path, "auto", description={}, ranks=alone)
    assert (path.name, manifest["step"]) == ("step-00000018", 18)
    assert not list(tmp_path.rglob("*.tmp"))


def test_there_may_be_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None
