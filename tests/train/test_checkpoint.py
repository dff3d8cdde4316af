import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fivefold.errors import CheckpointError
from fivefold.testing import free_port
from fivefold.train import _checkpoint as checkpoint_module
from fivefold.train import config_to_toml
from fivefold.train._checkpoint import (
    checkpoint_folders,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from fivefold.train._launch import OUTCOME_VARIABLE
from fivefold.train._state import flatten_state, restore_state
from fivefold.train._world import RankIdentity, World


@pytest.fixture
def alone():
    return World(identity=RankIdentity(), device=torch.device("cpu"), timeout_s=5.0)


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


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        same = type(left) is type(right) and len(left) == len(right)
        return same and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and left == right


def test_a_state_comes_back_bit_for_bit_and_type_for_type():
    state = state_of(1 / 3)
    assert equal(restore_state(flatten_state(state, prefix="rank7"), prefix="rank7"), state)


def test_a_state_that_cannot_be_held_is_refused_by_name():
    with pytest.raises(TypeError, match=r"rank0/inner/hook is a builtin_function_or_method"):
        flatten_state({"inner": {"hook": print}}, prefix="rank0")


def test_written_and_read_by_one_process(alone, tmp_path):
    state = state_of(0.1)
    record = write_checkpoint(tmp_path, state, step=7, description={"a": 1}, world=alone, keep=1)
    assert record.path.name == "step-00000007"
    on_disk = [path for path in record.path.iterdir() if path.name != "manifest.json"]
    assert record.num_bytes == sum(path.stat().st_size for path in on_disk)
    manifest = verify_checkpoint(record.path)
    assert (manifest["step"], manifest["world_size"]) == (7, 1)
    assert equal(read_checkpoint(record.path, rank=0), state)


def test_torch_itself_can_read_it(alone, tmp_path):
    record = write_checkpoint(tmp_path, state_of(0.5), step=1, description={}, world=alone, keep=1)
    found = {"rank0/weights": torch.zeros(3, 2)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=record.path, no_dist=True)
    assert torch.equal(found["rank0/weights"], torch.full((3, 2), 0.5))


def test_only_the_newest_are_kept_and_leftovers_go(alone, tmp_path):
    leftover = tmp_path / "step-00000099.tmp"
    leftover.mkdir()
    (leftover / "half").write_text("x")
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, state_of(1.0), step=step, description={}, world=alone, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(alone, tmp_path):
    record = write_checkpoint(tmp_path, state_of(1.0), step=5, description={}, world=alone, keep=2)
    (record.path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000005 is not whole: manifest.json is miss"):
        verify_checkpoint(record.path)
    write_checkpoint(tmp_path, state_of(2.0), step=5, description={}, world=alone, keep=2)
    verify_checkpoint(record.path)
    assert read_checkpoint(record.path, rank=0)["scalar"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_rank_that_is_not_in_it_is_an_error(alone, tmp_path):
    record = write_checkpoint(tmp_path, state_of(1.0), step=5, description={}, world=alone, keep=2)
    with pytest.raises(CheckpointError, match="rank 3 cannot read the checkpoint"):
        read_checkpoint(record.path, rank=3)


def no_space(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(where, from_step):
    """What a forked rank does before training: its disk is full from some step on."""

    def before(rank):
        real = checkpoint_module.write_checkpoint

        def write(*args, step, **kwargs):
            if step >= from_step and rank == where[1]:
                if where[0] == "data":
                    checkpoint_module.FileSystemWriter.write_data = no_space
                else:
                    setattr(checkpoint_module, where[0], no_space)
            return real(*args, step=step, **kwargs)

        from fivefold.train import _loop

        _loop.write_checkpoint = write

    return before


@pytest.mark.distributed
@pytest.mark.parametrize(
    "where", [("data", 1), ("data", 0), ("_checksum", 1), ("_sync_folder", 0), ("_prepare", 0)]
)
def test_no_space_on_one_rank_is_a_clear_error_on_all(
    make_config, start_ranks, run_ranks, final_digest, where
):
    config = make_config("co2", checkpoint_every_steps=6)
    world = start_ranks(config, before=fill_disk(where, from_step=12))
    assert world.wait() == {0: 1, 1: 1}, world.logs()
    folder = config.run.output / "checkpoints"
    for rank in range(2):
        error = world.error(rank)
        assert error["kind"] == "CheckpointError"
        assert f"rank {where[1]} cannot write a checkpoint to {folder}" in error["message"]
        assert "No space left on device" in error["message"]
        assert "free space" in error["hint"]
        assert "earlier checkpoints are untouched" in error["hint"]
    assert [path.name for path in folder.iterdir()] == ["step-00000006"]
    run_ranks(config)  # there is space again: the run goes on from step 6
    whole = make_config("co2", output="whole")
    run_ranks(whole)
    assert final_digest(config) == final_digest(whole)


def can_mount():
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs user and mount namespaces for a small tmpfs")
def test_a_disk_that_is_really_full(make_config, run_ranks, final_digest, tmp_path):
    whole = make_config("ddp", output="whole", checkpoint_every_steps=6)
    run_ranks(whole)
    events = [
        json.loads(line) for line in (whole.run.output / "metrics.jsonl").read_text().splitlines()
    ]
    size = next(line["bytes"] for line in events if line["event"] == "checkpoint")
    small, rescued, outcomes = tmp_path / "small", tmp_path / "rescued", tmp_path / "outcomes"
    small.mkdir()
    outcomes.mkdir()
    run = whole.run.model_copy(update={"output": small / "run"})
    config = whole.model_copy(update={"run": run})
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    port = free_port()
    # One checkpoint and half of another fit, beside the logs.
    script = f"""
        mount -t tmpfs -o size={int(1.6 * size) + 60_000} tmpfs {small}
        RANK=0 {sys.executable} -m fivefold.train._worker {tmp_path}/config.toml & first=$!
        RANK=1 {sys.executable} -m fivefold.train._worker {tmp_path}/config.toml & second=$!
        wait $first; echo code $?; wait $second; echo code $?
        cp -r {small}/run {rescued}
    """
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"GLOO_SOCKET_IFNAME": "lo", OUTCOME_VARIABLE: str(outcomes)}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["code", "1", "code", "1"], done.stderr
    for rank in range(2):
        error = json.loads((outcomes / f"rank{rank}.json").read_text())["error"]
        assert error["kind"] == "CheckpointError"
        assert str(small / "run" / "checkpoints") in error["message"]
        assert "No space left on device" in error["message"]
        assert "free space" in error["hint"]
    (kept,) = checkpoint_folders(rescued / "checkpoints")
    verify_checkpoint(kept)
    assert not list(rescued.rglob("*.tmp"))
    # Nothing is lost: on a larger disk the run goes on from there.
    resumed = whole.model_copy(update={"run": whole.run.model_copy(update={"output": rescued})})
    run_ranks(resumed)
    assert final_digest(resumed) == final_digest(whole)
    shutil.rmtree(rescued)
