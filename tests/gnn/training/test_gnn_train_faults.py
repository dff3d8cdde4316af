"""Runs that are killed, stopped, starved of disk or fed damage: nothing is lost, all resume."""

import errno
import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from fivefold.errors import CheckpointError, DataError
from fivefold.gnn.training import train_graph
from fivefold.runs import checkpoints
from fivefold.runs.checkpoints import (
    checkpoint_folders,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)


def digest(config):
    """Parameters, optimizer, generators and places of all ranks in the newest checkpoint."""
    path, manifest = newest_checkpoint(config.run.output)
    states = [read_checkpoint(path, rank=rank) for rank in range(manifest["world_size"])]
    parts = [states[0]["model"], states[0]["optimizer"]["state"], states[0]["step"]]
    parts += [[state["loader"], state["rng"], state["tally"]] for state in states]
    return json.dumps(parts, default=lambda t: [str(t.dtype), t.tolist()], sort_keys=True)


def steps_of(config):
    return [int(path.name[5:]) for path in checkpoint_folders(config.run.output)]


@pytest.mark.parametrize("mode", ["disk", "memory"])
def test_resumes_in_the_middle_of_an_epoch_bit_for_bit(mode, make_config, monkeypatch):
    whole = make_config(output="whole", mode=mode, checkpoint_every_steps=4)
    train_graph(whole)
    for stop_step in (4, 12, 20):
        part = make_config(output=f"part{stop_step}", mode=mode, checkpoint_every_steps=4)
        real = write_checkpoint

        def dies(folder, state, *, step, real=real, stop_step=stop_step, **options):
            real(folder, state, step=step, **options)
            if step == stop_step:
                raise KeyboardInterrupt

        monkeypatch.setattr("fivefold.gnn.training._loop.write_checkpoint", dies)
        with pytest.raises(KeyboardInterrupt):
            train_graph(part)
        monkeypatch.undo()
        result = train_graph(part)
        assert result.steps == 27
        assert digest(part) == digest(whole)
        text = (part.run.output / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        trained = [line["step"] for line in lines if line["event"] == "train"]
        assert trained == sorted(set(trained))
        assert [line["epoch"] for line in lines if line["event"] == "epoch"] == [1, 2, 3]


@pytest.mark.nightly
@pytest.mark.distributed
def test_killed_at_random_moments_ends_as_the_undisturbed_run(make_config, start_ranks):
    whole = make_config(output="whole", store="whole-store", checkpoint_every_steps=2, epochs=4)
    train_graph(whole)
    config = make_config(output="killed", checkpoint_every_steps=2, epochs=4)
    rng = random.Random(5)  # noqa: S311 - moments, not secrets
    for _ in range(12):
        world = start_ranks(config)
        time.sleep(rng.uniform(0.02, 0.7))
        world.kill()
        if world.wait()[0] == 0:
            break
    assert start_ranks(config).wait() == {0: 0}
    assert digest(config) == digest(whole)


@pytest.mark.distributed
def test_sigterm_ends_well_with_a_checkpoint_at_once(make_config, start_ranks):
    config = make_config(epochs=500, checkpoint_every_steps=10**6, validate_every_epochs=0)
    world = start_ranks(config)
    metrics = config.run.output / "metrics.jsonl"
    deadline_s = time.monotonic() + 120
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert time.monotonic() < deadline_s, world.logs()
        time.sleep(0.01)
    world.kill(number=signal.SIGTERM)
    assert world.wait() == {0: 0}
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("end", "stopped")
    assert steps_of(config) == [last["step"]]
    assert not (config.run.output / "result.json").exists()


def test_a_full_disk_loses_nothing(make_config, monkeypatch):
    whole = make_config(output="whole", mode="memory", checkpoint_every_steps=4)
    train_graph(whole)
    config = make_config(mode="memory", checkpoint_every_steps=4)

    class Full(checkpoints.FileSystemWriter):
        def write_data(self, *args):
            if "step-00000012" in str(self.path):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write_data(*args)

    monkeypatch.setattr(checkpoints, "FileSystemWriter", Full)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write a checkpoint.*No space left"):
        train_graph(config)
    assert steps_of(config) == [8, 4]
    assert sorted(p.name for p in (config.run.output / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
    ]
    monkeypatch.undo()
    train_graph(config)
    assert digest(config) == digest(whole)


def test_a_damaged_checkpoint_is_skipped_and_said(make_config, caplog):
    config = make_config(mode="memory", checkpoint_every_steps=4, epochs=1)
    train_graph(config)
    newest = checkpoint_folders(config.run.output)[0] / "__0_0.distcp"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    longer = make_config(mode="memory", checkpoint_every_steps=4, epochs=2)
    train_graph(longer)
    assert "is not whole" in caplog.text
    whole = make_config(output="whole", mode="memory", checkpoint_every_steps=4, epochs=2)
    train_graph(whole)
    assert digest(longer) == digest(whole)
    for path in checkpoint_folders(config.run.output):
        (path / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        train_graph(longer)


def test_damage_in_the_packed_rows_is_an_error_not_a_wrong_row(make_config, tmp_path):
    config = make_config(epochs=1)
    train_graph(config)
    (rows,) = (tmp_path / "store").glob("store-*/rows.fvf")
    data = bytearray(rows.read_bytes())
    data[4096 + 50] ^= 1
    rows.write_bytes(data)
    with pytest.raises(DataError, match=r"rows\.fvf"):
        train_graph(make_config(output="again", epochs=1))


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["disk", "memory"])
def test_two_ranks_share_a_store_and_agree(mode, make_config, start_ranks):
    config = make_config(mode=mode, checkpoint_every_steps=3)
    world = start_ranks(config, world_size=2)
    assert world.wait() == {0: 0, 1: 0}, world.logs()
    path, manifest = newest_checkpoint(config.run.output)
    assert manifest["world_size"] == 2
    states = [read_checkpoint(path, rank=rank) for rank in range(2)]
    assert states[0]["step"] == 3 * 4  # nine batches, four per rank and epoch
    assert "model" not in states[1]  # equal on all ranks, and written once
    assert not torch.equal(states[0]["rng"]["cpu"], states[1]["rng"]["cpu"])


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_killed_together_resume_bit_for_bit(make_config, start_ranks):
    whole = make_config(output="whole", checkpoint_every_steps=3, epochs=4)
    assert start_ranks(whole, world_size=2).wait() == {0: 0, 1: 0}
    config = make_config(output="killed", checkpoint_every_steps=3, epochs=4)
    for _ in range(2):
        world = start_ranks(config, world_size=2)
        before = steps_of(config)
        deadline_s = time.monotonic() + 120
        while steps_of(config) == before and time.monotonic() < deadline_s:
            time.sleep(0.005)
        world.kill(1)  # rank 0 must notice and end with an error
        codes = world.wait()
        assert codes[1] != 0 or codes[0] == 0
    assert start_ranks(config, world_size=2).wait() == {0: 0, 1: 0}
    assert digest(config) == digest(whole)


@pytest.mark.distributed
def test_another_number_of_ranks_is_refused(make_config, start_ranks):
    config = make_config(mode="memory", epochs=1)
    assert start_ranks(config, world_size=2).wait() == {0: 0, 1: 0}
    with pytest.raises(CheckpointError, match="written by 2 ranks, but this run has 1"):
        train_graph(config)


@pytest.mark.distributed
def test_sigterm_while_preparing_ends_at_once_and_what_is_done_stays(make_config, start_ranks):
    config = make_config(epochs=1)
    config = config.model_copy(
        update={"sampling": config.sampling.model_copy(update={"epochs": 400})}
    )
    world = start_ranks(config)
    partial = Path(config.data.store)
    deadline_s = time.monotonic() + 120
    while not list(partial.glob("samples-*.partial")):
        assert time.monotonic() < deadline_s, world.logs()
        time.sleep(0.005)
    world.kill(number=signal.SIGTERM)
    assert world.wait(20) == {0: 1}
    assert "KeyboardInterrupt" in world.logs()["rank0.log"]
    assert {path.name for path in config.run.output.glob("*")} <= {".lock"}
