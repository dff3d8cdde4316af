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


@pytest.mark.alone
@pytest.mark.distributed
def test_messages_that_take_the_processor_slow_a_step_and_others_do_not(
    make_config, tmp_path, monkeypatch
):
    config = make_config("ddp")
    all_reduce, found = torch.distributed.all_reduce, {}
    monkeypatch.setattr(profile, "_MEASURED_S", 1.0)
    monkeypatch.setattr(profile, "_MOST_STEPS", 600)
    for name, spend in (("waits", time.sleep), ("works", spin)):

        def slow(*arguments, _spend=spend, **options):
            _spend(MESSAGE_S)
            return all_reduce(*arguments, **options)

        monkeypatch.setattr(torch.distributed, "all_reduce", slow)
        file = tmp_path / name

        def work(file=file):
            ranks = open_ranks(device="cpu", timeout_s=30.0)
            times = profile.measure_steps(config, ranks)
            if ranks.is_main:
                file.write_text(repr(times.overlap_slowdown))
            close_ranks(ranks)
            return 0

        world = ForkedRanks(tmp_path / f"world-{name}", work, world_size=2)
        assert set(world.wait().values()) == {0}, world.logs()
        found[name] = float(file.read_text())
    assert found["waits"] < 0.25
    assert found["works"] > found["waits"] + 0.25


@pytest.mark.distributed
def test_a_rank_alone_has_no_message_to_be_slowed_by(make_config, monkeypatch):
    monkeypatch.setattr(profile, "_MEASURED_S", 0.01)
    ranks = open_ranks(device="cpu", timeout_s=30.0)
    times = profile.measure_steps(make_config("none"), ranks)
    close_ranks(ranks)
    assert times.overlap_slowdown is None
    assert times.model_s > 0
