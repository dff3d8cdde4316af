"""A disk that fills up during a checkpoint: says so, says what to do, and loses nothing."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from fivefold.errors import CheckpointError
from fivefold.runs import checkpoints as checkpoint_module
from fivefold.runs.checkpoints import checkpoint_folders, verify_checkpoint
from fivefold.runs.launch import OUTCOME_VARIABLE
from fivefold.testing import free_port
from fivefold.train import config_to_toml, train


def limited_to(size, config):
    """Train while no file may grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        train(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.97], ids=["early", "middle", "late"])
def test_the_reason_is_the_disks_own_and_the_run_can_go_on(make_config, share):
    config = make_config("none", steps=4, checkpoint_every_steps=2, validate_every_steps=0)
    wide = config.model.model_copy(update={"width": 128})
    config = config.model_copy(update={"model": wide})
    expected = train(config).parameters_sha256
    folder = config.run.output / "checkpoints"
    size = (folder / "step-00000002" / "__0_0.distcp").stat().st_size
    shutil.rmtree(folder / "step-00000004")
    with pytest.raises(CheckpointError) as caught:
        limited_to(int(share * size), config)
    assert f"rank 0 cannot write a checkpoint to {folder}" in caught.value.message
    assert "File too large" in caught.value.message
    assert "a rank's part takes about" in caught.value.message
    assert "free space" in caught.value.hint
    assert "earlier checkpoints are untouched" in caught.value.hint
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert train(config).parameters_sha256 == expected


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


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "where", [("data", 1), ("data", 0), ("_checksum", 1), ("write_atomically", 0), ("_prepare", 0)]
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


@pytest.mark.nightly
@pytest.mark.distributed
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
    (kept,) = checkpoint_folders(rescued)
    verify_checkpoint(kept)
    assert not list(rescued.rglob("*.tmp"))
    # Nothing is lost: on a larger disk the run goes on from there.
    resumed = whole.model_copy(update={"run": whole.run.model_copy(update={"output": rescued})})
    run_ranks(resumed)
    assert final_digest(resumed) == final_digest(whole)
    shutil.rmtree(rescued)
