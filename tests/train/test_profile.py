"""What a profile finds of the trainer's step beside an all-reduce."""

import time

import pytest
import torch

from fivefold.runs.ranks import Ranks, close_ranks, open_ranks
from fivefold.train import profile

MESSAGE_S = 0.01


def spin(seconds):
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


@pytest.fixture
def slowdown_beside(profiled, monkeypatch):
    """The slowdown of a step beside all-reduces that spend their time in one way."""

    def measure(spend, config, folder):
        all_reduce = torch.distributed.all_reduce

        def slow(*arguments, **options):
            spend(MESSAGE_S)
            return all_reduce(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(profile, "_MEASURED_S", 1.0)
            patched.setattr(profile, "_MOST_STEPS", 600)
            patched.setattr(torch.distributed, "all_reduce", slow)
            return profiled(config, folder, "overlap_slowdown")

    return measure


@pytest.mark.alone
@pytest.mark.distributed
def test_messages_that_take_the_processor_slow_a_step_and_others_do_not(
    make_config, slowdown_beside, tmp_path
):
    config, found = make_config("ddp"), []
    for attempt in range(3):  # a neighbour on the machine slows a step as well
        waits, works = (
            slowdown_beside(spend, config, tmp_path / f"{spend.__name__}-{attempt}")
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


def test_the_rates_of_a_processor_are_of_this_world():
    rates = profile.measure_device(Ranks())
    assert 1e8 < rates.product_flops < 1e14
    assert 1e7 < rates.copy_bytes_per_s < 1e13
