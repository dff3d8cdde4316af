"""What a profile finds of the trainer's step beside an all-reduce."""

import time

import pytest
import torch

from fivefold.runs.ranks import close_ranks, open_ranks
from fivefold.train import profile
from helpers.forked_ranks import ForkedRanks

MESSAGE_S = 0.01


def spin(seconds):
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def slowdown_beside(spend, config, folder, monkeypatch):
    """Slowdown of a step beside all-reduces that spend their time in one way, on two ranks."""
    all_reduce = torch.distributed.all_reduce
    file = folder / "found"

    def slow(*arguments, **options):
        spend(MESSAGE_S)
        return all_reduce(*arguments, **options)

    def work():
        ranks = open_ranks(device="cpu", timeout_s=30.0)
        times = profile.measure_steps(config, ranks)
        if ranks.is_main:
            file.write_text(repr(times.overlap_slowdown))
        close_ranks(ranks)
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(profile, "_MEASURED_S", 1.0)
        patched.setattr(profile, "_MOST_STEPS", 600)
        patched.setattr(torch.distributed, "all_reduce", slow)
        world = ForkedRanks(folder, work, world_size=2)
        assert set(world.wait().values()) == {0}, world.logs()
    return float(file.read_text())


@pytest.mark.alone
@pytest.mark.distributed
def test_messages_that_take_the_processor_slow_a_step_and_others_do_not(
    make_config, tmp_path, monkeypatch
):
    config, found = make_config("ddp"), []
    for attempt in range(3):  # a neighbour on the machine slows a step as well
        waits, works = (
            slowdown_beside(spend, config, tmp_path / f"{spend.__name__}-{attempt}", monkeypatch)
            for spend in (time.sleep, spin)
        )
        found.append((waits, works))
        if waits < 0.25 and works > waits + 0.25:
            return
    pytest.fail(f"slowdowns beside messages that wait, and that work: {found}")


@pytest.mark.distributed
def test_a_rank_alone_has_no_message_to_be_slowed_by(make_config, monkeypatch):
    monkeypatch.setattr(profile, "_MEASURED_S", 0.01)
    ranks = open_ranks(device="cpu", timeout_s=30.0)
    times = profile.measure_steps(make_config("none"), ranks)
    close_ranks(ranks)
    assert times.overlap_slowdown is None
    assert times.model_s > 0
