import json
import signal
import time

import pytest

from fivefold.runs import StopRequest
from fivefold.runs import ranks as ranks_module
from fivefold.runs.ranks import Ranks, StopAgreement, open_ranks
from fivefold.testing import run_processes
from helpers.forked_ranks import wait_for_step


@pytest.fixture
def frequent_agreements(monkeypatch):
    """Every 50 ms instead of 500, so that a short run is long enough."""
    monkeypatch.setattr(ranks_module, "_PERIOD_S", 0.05)


def _slow_every_step(seconds):
    """Make the steps of this process take longer: ranks are forked, the test's own stay as fast."""
    poll = StopAgreement.poll

    def slow(self, step):
        time.sleep(seconds)
        return poll(self, step)

    StopAgreement.poll = slow


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("frequent_agreements")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("ddp", signal.SIGTERM, [0, 1]), marks=pytest.mark.nightly),
        ("co2", signal.SIGTERM, [1]),
        ("co2", signal.SIGINT, [0, 1]),
        pytest.param(("none", signal.SIGTERM, [0]), marks=pytest.mark.nightly),
    ],
)
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_exactly(
    make_config, start_ranks, run_ranks, final_digest, case
):
    method, number, ranks = case
    steps = 400
    whole = make_config(method, output="whole", steps=steps, validate_every_steps=0)
    run_ranks(whole)
    config = make_config(method, steps=steps, validate_every_steps=0)
    # 370 steps of a few milliseconds may pass before the signal of a busy machine arrives.
    world = start_ranks(config, before=lambda _rank: _slow_every_step(0.05))
    wait_for_step(world, config.run.output, 30)
    for rank in ranks:
        world.kill(rank, number=number)
    assert world.wait() == {0: 0, 1: 0}, world.logs()
    events = [
        json.loads(line) for line in (config.run.output / "metrics.jsonl").read_text().splitlines()
    ]
    assert events[-1]["event"] == "end"
    assert events[-1]["reason"] == "stopped"
    stopped_at = events[-1]["step"]
    assert 30 <= stopped_at < steps, "the run ended before the signal: make it longer"
    assert (config.run.output / "checkpoints" / f"step-{stopped_at:08d}").is_dir()
    assert not (config.run.output / "result.json").exists()
    run_ranks(config)
    assert final_digest(config) == final_digest(whole)
    assert json.loads((config.run.output / "result.json").read_text())["reason"] == "finished"


@pytest.mark.distributed
def test_all_ranks_stop_at_the_same_step_whoever_is_asked():
    def work(rank):
        world = open_ranks(device="cpu", timeout_s=20.0)
        stop = StopRequest()
        agreement = StopAgreement(world, stop)
        agreement.start(0)
        for step in range(1, 10_000):
            time.sleep(0.001 * (1 + rank))  # ranks of different speed
            if rank == 1 and step == 37:
                stop.requested = True
            if agreement.poll(step):
                return step
        return None

    steps = run_processes(3, work)
    assert len(set(steps)) == 1
    assert steps[0] >= 37


@pytest.mark.alone
@pytest.mark.distributed
def test_the_agreement_is_not_waited_for_in_every_step():
    def work(_rank):
        world = open_ranks(device="cpu", timeout_s=20.0)
        agreement = StopAgreement(world, StopRequest())
        agreement.start(0)
        for step in range(1, 1201):
            time.sleep(0.001)
            agreement.poll(step)
        agreement.drain()
        return len(agreement.take_waits())

    counts = run_processes(2, work)
    # About one message per half second; the first ones come sooner, until the period is known.
    assert counts[0] == counts[1]
    assert counts[0] < 60


def test_one_rank_decides_alone_and_at_once():
    stop = StopRequest()
    world = Ranks(timeout_s=1.0)
    agreement = StopAgreement(world, stop)
    agreement.start(0)
    assert not agreement.poll(1)
    stop.requested = True
    assert agreement.poll(2)


@pytest.mark.alone
@pytest.mark.distributed
def test_ranks_that_are_fast_in_turn_do_not_wait_for_the_agreement(monkeypatch):
    """Within a round of local steps each rank is slow once; only the round's end is common."""
    monkeypatch.setattr(ranks_module, "_PERIOD_S", 0.01)  # a step
    rounds, slow_s = 25, 0.08

    def work(rank):
        world = open_ranks(device="cpu", timeout_s=20.0)
        agreement = StopAgreement(world, StopRequest())
        agreement.start(0)
        for step in range(1, 4 * rounds + 1):
            time.sleep(slow_s if step % 4 == 1 + rank else 0.01)
            agreement.poll(step)
            if step % 4 == 0:
                world.gather(None, what="the end of a round")
        agreement.drain()
        return sum(end_s - start_s for start_s, end_s in agreement.take_waits())

    # Agreed on at every step, each round would wait once on each rank.
    assert max(run_processes(2, work)) < 0.3 * rounds * slow_s
