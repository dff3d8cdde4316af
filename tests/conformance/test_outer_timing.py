"""``tau="auto"`` and late all-reduces end to end on a virtual clock: exact, as fast as it gets."""

import copy
import dataclasses
import logging

import pytest
import torch

from fivefold.optim import (
    CO2,
    AutoTau,
    DelayCorrected,
    EagerDiLoCo,
    LocalSGD,
    OverlapLocalSGD,
    StreamingDiLoCo,
    _boundary_clock,
)
from fivefold.testing import run_world
from helpers.outer_world import Clock, Timed, Worker, all_equal

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
STEP_S = 0.125  # sums of such numbers are exact
AUTO = AutoTau(initial=4, patience=3)
HIDES = {
    "co2": CO2(tau=AUTO),
    "delay-corrected": DelayCorrected(tau=AUTO),
    "overlap": OverlapLocalSGD(tau=AUTO, outer_momentum=0.2),
    "eager": EagerDiLoCo(tau=AUTO),
}


@pytest.fixture
def clock(monkeypatch):
    """Seconds of the engine are those that the test lets pass."""
    virtual = Clock()
    monkeypatch.setattr(_boundary_clock, "time", virtual)
    return virtual


def run_rounds(worker, clock, rounds, *, step_s, seen):
    """Train until so many more rounds have been launched; notes tau of each."""
    until = worker.sync.statistics().rounds + rounds
    while worker.sync.statistics().rounds < until:
        step = worker.sync.statistics().steps
        worker.local_step(step)
        clock.advance(step_s)
        before = worker.sync.statistics().rounds
        worker.sync.step(64.0)
        if worker.sync.statistics().rounds > before:
            seen.append(worker.sync.statistics().tau)


@pytest.mark.slow
@pytest.mark.parametrize("rule", HIDES.values(), ids=HIDES)
def test_tau_follows_the_link_on_all_ranks_alike_and_is_logged(rule, clock, caplog):
    def all_reduce_s(number):
        return 1.125 if number < 10 else 2.625 if number < 30 else 0.4375

    def work(transport):
        worker = Worker(Timed(transport, clock, all_reduce_s), rule)
        seen = []
        run_rounds(worker, clock, 60, step_s=STEP_S, seen=seen)
        worker.sync.finalize()
        return seen, worker.sync.tau_decisions(), worker.flat()

    with caplog.at_level(logging.INFO, logger="fivefold.optim"):
        results = run_world(3, work)
    seen, decisions, _ = results[0]
    assert all(other == seen for other, _, _ in results)
    assert all(made == decisions for _, made, _ in results)
    assert all_equal([flat for _, _, flat in results])
    # The smallest tau with tau * 0.125 s >= 1.1 * all-reduce, which is 9, 21 and 3.5 steps long.
    assert (seen[9], seen[29], seen[59]) == (10, 24, 4)
    assert [d.tau for d in decisions] == [t for i, t in enumerate(seen[1:]) if t != seen[i]]
    assert str(decisions[0]) in caplog.text


FRAGMENTED = {
    "delay-corrected": DelayCorrected(tau=AUTO, fragments=3),
    "streaming": StreamingDiLoCo(tau=AUTO, fragments=2, outer_momentum=0.2),
    "co2": CO2(tau=AUTO, fragments=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", FRAGMENTED.values(), ids=FRAGMENTED)
def test_with_fragments_the_delay_follows_the_slowest_of_them(rule, clock):
    """Every second message is slow; tau is the delay that hides it, times the fragments."""
    fragments = rule.fragments

    def all_reduce_s(number):
        slow = 0.5625 if number < 120 else 0.1875
        return slow if number % fragments == 1 else 0.125

    def work(transport):
        worker = Worker(Timed(transport, clock, all_reduce_s), rule, check_every_rounds=1)
        seen = []
        run_rounds(worker, clock, 120, step_s=STEP_S, seen=seen)
        slow, before = seen[-1], worker.sync.statistics().exposed_wait_s
        run_rounds(worker, clock, 150, step_s=STEP_S, seen=seen)
        record = worker.sync.statistics()
        assert record.exposed_wait_s == before  # nothing is waited for once the delay is known
        assert record.delay_steps * fragments == record.tau
        worker.sync.finalize()
        return slow, seen[-1], worker.sync.tau_decisions(), worker.flat()

    results = run_world(3, work)
    # 1.1 times 0.5625 s are 4.95 steps of 0.125 s, 1.1 times 0.1875 s are 1.65.
    assert [(slow, fast) for slow, fast, _, _ in results] == [(5 * fragments, 2 * fragments)] * 3
    assert all(made == results[0][2] for _, _, made, _ in results)
    assert all_equal([flat for _, _, _, flat in results])


class Copies(Timed):
    """Launches that take the training thread a quarter of a second each."""

    def launch(self, *args, **settings):
        self.clock.advance(0.25)
        return super().launch(*args, **settings)


@pytest.mark.parametrize("rule", [CO2(tau=2), DelayCorrected(tau=4, fragments=2), LocalSGD(tau=2)])
def test_seconds_at_boundaries_are_those_without_the_waits(rule, clock):
    def work(transport):
        worker = Worker(Copies(transport, clock, lambda _: 1.0), rule)
        for step in range(12):
            worker.local_step(step)
            clock.advance(STEP_S)
            worker.sync.step()
        return worker.sync.statistics()

    for record in run_world(2, work):
        assert record.exposed_wait_s > 1.0
        assert record.boundary_s == pytest.approx(0.25 * record.rounds, abs=1e-9)


def test_a_resumed_run_decides_as_the_run_that_goes_on(clock):
    def all_reduce_s(number):
        return 1.125 if number < 8 else 0.5

    def first(transport):
        worker = Worker(Timed(transport, clock, all_reduce_s), CO2(tau=AUTO))
        run_rounds(worker, clock, 9, step_s=STEP_S, seen=[])
        saved = copy.deepcopy(worker.state())
        before = len(worker.sync.tau_decisions())
        # A resumed round has no measured start, so the run that goes on forgets its own as well.
        worker.sync._fragments[0]._round_began_s = None
        seen = []
        run_rounds(worker, clock, 14, step_s=STEP_S, seen=seen)
        worker.sync.finalize()
        return saved, seen, worker.sync.tau_decisions()[before:], worker.flat()

    results = run_world(2, first)

    def second(transport):
        saved, seen, decisions, flat = results[transport.rank]
        worker = Worker(
            Timed(transport, clock, lambda number: all_reduce_s(number + 9)), CO2(tau=AUTO)
        )
        worker.load(saved)
        again = []
        run_rounds(worker, clock, 14, step_s=STEP_S, seen=again)
        worker.sync.finalize()
        assert again == seen
        assert worker.sync.tau_decisions() == decisions
        assert torch.equal(worker.flat(), flat)
        return seen

    seen = run_world(2, second)[0]
    assert len(set(seen)) > 1


def test_balance_gives_slow_ranks_fewer_steps_and_drains_whatever_is_open(clock):
    rule = CO2(tau=dataclasses.replace(AUTO, balance=True))

    def work(transport):
        worker = Worker(Timed(transport, clock, lambda _: 1.875), rule)
        step_s = STEP_S * (3 if transport.rank == 1 else 1)
        run_rounds(worker, clock, 30, step_s=step_s, seen=[])
        exposed_s = worker.sync.statistics().exposed_wait_s
        run_rounds(worker, clock, 10, step_s=step_s, seen=[])
        record = worker.sync.statistics()
        if transport.rank == 0:  # a partial round on one rank and none on the other
            worker.train([10_000], weight=64.0)
        worker.sync.finalize()
        return record.tau, record.exposed_wait_s - exposed_s, worker.anchors()

    (fast, fast_wait_s, first), (slow, slow_wait_s, second) = run_world(2, work)
    assert fast in {17, 18}  # 1.1 * 15 steps, and room for the slow rank's whole steps
    assert slow == pytest.approx(fast / 3, abs=0.5)
    # Ten rounds; nothing of the all-reduces is exposed but what one slow step is too long.
    assert fast_wait_s + slow_wait_s < 10 * 3 * STEP_S
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "rule",
    [
        CO2(tau=4),
        DelayCorrected(tau=4, fragments=1),
        EagerDiLoCo(tau=4),
        CO2(tau=4, fragments=2),
        StreamingDiLoCo(tau=4, fragments=2, delay_steps=2, outer_lr=0.5, outer_momentum=0.2),
    ],
    ids=lambda rule: rule.name,
)
def test_an_all_reduce_that_stalls_is_waited_for_and_counted_and_never_skipped(rule, clock):
    def final(transport, all_reduce_s):
        worker = Worker(Timed(transport, clock, all_reduce_s), rule)
        for step in range(25):
            worker.local_step(step)
            clock.advance(STEP_S)
            worker.sync.step()
        all_reduces = worker.sync.all_reduces()
        record = worker.sync.statistics()
        worker.sync.finalize()
        return worker.flat(), record, all_reduces

    quick = run_world(2, lambda t: final(t, lambda _: 0.1875))[0]
    stalled = run_world(2, lambda t: final(t, lambda number: 100.0 if number == 3 else 0.1875))[0]
    assert torch.equal(quick[0], stalled[0])
    assert quick[1].exposed_wait_s == pytest.approx(0.0, abs=1e-9)
    hidden_s = STEP_S * (rule.delay_steps or 4)
    assert stalled[1].exposed_wait_s == pytest.approx(100.0 - hidden_s)
    assert stalled[1].merged_rounds == quick[1].merged_rounds
    longest = max(stalled[2], key=lambda f: f.wait_ended_at_s - f.wait_started_at_s)
    assert longest.completed_at_s - longest.launched_at_s == pytest.approx(100.0)
