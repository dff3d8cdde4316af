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
from fivefold.gnn.training._checkpoint import checkpoint_files, newest_checkpoint, write_checkpoint


def digest(config):
    """Parameters, optimizer, generators and places of all ranks in the newest checkpoint."""
    _, state, _ = newest_checkpoint(config.run.output / "checkpoints")
    parts = [state["model"], state["optimizer"]["state"], state["ranks"], state["step"]]
    return json.dumps(parts, default=lambda t: [str(t.dtype), t.tolist()], sort_keys=True)


def steps_of(config):
    found = checkpoint_files(config.run.output / "checkpoints")
    return [int(path.name[5:13]) for path in found]


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
    deadline_s = time.monotonic() + 30
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert time.monotonic() < deadline_s, world.logs()
        time.sleep(0.01)
    world.kill(signal.SIGTERM)
    assert world.wait() == {0: 0}
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("end", "stopped")
    assert steps_of(config) == [last["step"]]
    assert not (config.run.output / "result.json").exists()


def test_a_full_disk_loses_nothing(make_config, monkeypatch):
    whole = make_config(output="whole", mode="memory", checkpoint_every_steps=4)
    train_graph(whole)
    config = make_config(mode="memory", checkpoint_every_steps=4)
    from fivefold.gnn.training import _checkpoint

    class Full(_checkpoint.ContainerWriter):
        def write(self, name, start_row, array):
            if self.attributes["step"] >= 12:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(name, start_row, array)

    monkeypatch.setattr(_checkpoint, "ContainerWriter", Full)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        train_graph(config)
    assert steps_of(config) == [8, 4]
    assert sorted(p.name for p in (config.run.output / "checkpoints").iterdir()) == [
        "step-00000004.fvf",
        "step-00000008.fvf",
    ]
    monkeypatch.undo()
    train_graph(config)
    assert digest(config) == digest(whole)


def test_a_damaged_checkpoint_is_skipped_and_said(make_config, caplog):
    config = make_config(mode="memory", checkpoint_every_steps=4, epochs=1)
    train_graph(config)
    newest = checkpoint_files(config.run.output / "checkpoints")[0]
    data = bytearray(newest.read_bytes())
    data[5000] ^= 1
    newest.write_bytes(data)
    longer = make_config(mode="memory", checkpoint_every_steps=4, epochs=2)
    train_graph(longer)
    assert "is not whole" in caplog.text
    whole = make_config(output="whole", mode="memory", checkpoint_every_steps=4, epochs=2)
    train_graph(whole)
    assert digest(longer) == digest(whole)
    for path in checkpoint_files(config.run.output / "checkpoints"):
        path.write_bytes(path.read_bytes()[:5000])
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
    _, state, description = newest_checkpoint(config.run.output / "checkpoints")
    assert description["ranks"] == {"number": 2}
    assert state["step"] == 3 * 4  # nine batches, four per rank and epoch
    assert len(state["ranks"]) == 2
    assert not torch.equal(state["ranks"][0]["rng"], state["ranks"][1]["rng"])


@pytest.mark.distributed
def test_two_ranks_killed_together_resume_bit_for_bit(make_config, start_ranks):
    whole = make_config(output="whole", checkpoint_every_steps=3, epochs=4)
    assert start_ranks(whole, world_size=2).wait() == {0: 0, 1: 0}
    config = make_config(output="killed", checkpoint_every_steps=3, epochs=4)
    for _ in range(2):
        world = start_ranks(config, world_size=2)
        before = steps_of(config)
        deadline_s = time.monotonic() + 30
        while steps_of(config) == before and time.monotonic() < deadline_s:
            time.sleep(0.005)
        world.kill(ranks=[1])  # rank 0 must notice and end with an error
        codes = world.wait()
        assert codes[1] != 0 or codes[0] == 0
    assert start_ranks(config, world_size=2).wait() == {0: 0, 1: 0}
    assert digest(config) == digest(whole)


@pytest.mark.distributed
def test_another_number_of_ranks_is_refused(make_config, start_ranks):
    config = make_config(mode="memory", epochs=1)
    assert start_ranks(config, world_size=2).wait() == {0: 0, 1: 0}
    with pytest.raises(CheckpointError, match=r"ranks\.number = 2; now it is 1"):
        train_graph(config)


@pytest.mark.distributed
def test_sigterm_while_preparing_ends_at_once_and_what_is_done_stays(make_config, start_ranks):
    config = make_config(epochs=1)
    config = config.model_copy(
        update={"sampling": config.sampling.model_copy(update={"epochs": 400})}
    )
    world = start_ranks(config)
    partial = Path(config.data.store)
    deadline_s = time.monotonic() + 30
    while not list(partial.glob("samples-*.partial")):
        assert time.monotonic() < deadline_s, world.logs()
        time.sleep(0.005)
    world.kill(signal.SIGTERM)
    assert world.wait(20) == {0: 1}
    assert "KeyboardInterrupt" in world.logs()["rank0.log"]
    assert {path.name for path in config.run.output.glob("*")} <= {".lock"}
