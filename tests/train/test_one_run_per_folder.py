import json
import signal
import time

import pytest

from fivefold.errors import ConfigurationError
from fivefold.runs import FolderLock
from fivefold.train import train


def wait_for_checkpoint(world, config):
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if list(config.run.output.glob("checkpoints/step-*[0-9]")):
            return
        time.sleep(0.02)
    pytest.fail(f"no checkpoint was written: {world.logs()}")


def without_text(config):
    """The same run with an empty folder of data, an error as well if that is read first."""
    folder = config.run.output.parent / "empty"
    folder.mkdir()
    data = config.data.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"data": data})


@pytest.mark.slow("ddp")
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["ddp", "co2"])
def test_a_second_run_ends_on_all_ranks_and_the_first_goes_on(make_config, start_ranks, method):
    config = make_config(method, steps=100_000, checkpoint_every_steps=2, validate_every_steps=0)
    first = start_ranks(config)
    wait_for_checkpoint(first, config)
    second = start_ranks(without_text(config))
    assert second.wait() == {0: 1, 1: 1}, second.logs()
    for rank in range(2):
        error = second.error(rank)
        assert error["kind"] == "ConfigurationError"
        assert f"run.output {config.run.output} is in use by process" in error["message"]
        assert str(first.pids[0]) in error["message"]
        assert "another run.output" in error["hint"]
    first.kill(0, number=signal.SIGTERM)
    assert first.wait() == {0: 0, 1: 0}, first.logs()
    last = json.loads((config.run.output / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("end", "stopped")


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_run_goes_on_right_after_a_kill(make_config, start_ranks, run_ranks):
    config = make_config("co2", steps=60, checkpoint_every_steps=2, timeout_s=6.0)
    world = start_ranks(config)
    wait_for_checkpoint(world, config)
    for rank in range(2):
        world.kill(rank)
    run_ranks(config)
    assert json.loads((config.run.output / "result.json").read_text())["steps"] == 60


def test_one_rank_holds_its_folder_before_it_reads_data(make_config):
    config = make_config("none")
    with (
        FolderLock(config.run.output, "run.output"),
        pytest.raises(ConfigurationError, match="is in use by process"),
    ):
        train(without_text(config))
    train(config)
    train(config)  # the lock was given back
