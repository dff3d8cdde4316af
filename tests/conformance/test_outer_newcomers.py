"""A worker that joins under way: it takes a peer's state from within a launch, with weight 0."""

import dataclasses
import queue

import pytest
import torch

from fivefold.optim import CO2, AutoTau, OuterSync
from fivefold.testing import run_world
from helpers.outer_world import (
    SURVIVES_LOSSES,
    Counter,
    Lossy,
    Tapped,
    Worker,
    Wrapped,
    all_equal,
)

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
ONE_FLIGHT = {n: r for n, r in SURVIVES_LOSSES.items() if r.num_fragments == 1}
JOINS_AT = 2  # number of the all-reduce, from 0
LATE = 2  # rank


class Doorway(Wrapped):
    """Two ranks fly with an empty third slot, until the third takes a seat at a launch.

    The empty slot takes part in every sum with zeros, as if nobody were there.
    """

    may_lose = True

    def __init__(self, inner, door):
        super().__init__(inner)
        self.door = door
        self.all_reduces = 0
        self.sync = None

    def launch(self, payloads, *, metadata, fragment, what):
        if self.inner.rank == 0 and self.all_reduces == JOINS_AT:
            self.door.put(torch_copy(self.sync.peer_state()))
        self.all_reduces += 1
        return self.inner.launch(payloads, metadata=metadata, fragment=fragment, what=what)


def torch_copy(state):
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: torch_copy(value) for key, value in state.items()}
    return [torch_copy(v) for v in state] if isinstance(state, list) else state


def stand_in(transport, sync):
    """Fly the empty slot's zeros until the newcomer's all-reduce comes."""
    fragment = sync._fragments[0]
    for _ in range(JOINS_AT):
        zeros = [torch.zeros_like(p) for p in fragment._payloads()]
        metadata = torch.zeros_like(fragment._metadata.tensor)
        transport.launch(zeros, metadata=metadata, fragment=0, what="nobody").wait()


def join_and_train(transport, door, *, make, work, rounds, tau, lossy=False):
    """The life of one rank; the late one knocks at the door first."""
    doorway = Doorway(transport, door)
    outside = Tapped(Lossy(doorway, seed=4, share=0.3) if lossy else doorway)
    subject, sync = make(outside)
    doorway.sync = sync
    if transport.rank != LATE:
        for step in range(rounds * tau):
            work(subject, sync, step)
    else:
        stand_in(doorway, sync)
        for group in sync._optimizers[0].param_groups:
            group["lr"] *= 7.0  # a schedule that stands elsewhere until the state is there
        sync.load_peer_state(door.get(timeout=30))
        for group in sync._optimizers[0].param_groups:
            group["lr"] /= 7.0
        for step in range((JOINS_AT + 1) * tau, rounds * tau):
            work(subject, sync, step)
    sync.finalize()
    return subject, sync, outside.arrived


@pytest.mark.parametrize("rule", ONE_FLIGHT.values(), ids=ONE_FLIGHT)
def test_newcomer_ends_where_the_others_end(rule):
    rule = dataclasses.replace(rule, tau=2)

    def make(transport):
        worker = Worker(transport, rule, seed=transport.rank, check_every_rounds=1)
        return worker, worker.sync

    def work(worker, sync, step):
        worker.local_step(step)
        sync.step()

    door = queue.Queue()
    results = run_world(3, lambda t: join_and_train(t, door, make=make, work=work, rounds=7, tau=2))
    assert all_equal([worker.flat() for worker, _, _ in results])
    assert all_equal([worker.anchors() for worker, _, _ in results])
    assert len({sync.statistics().steps for _, sync, _ in results}) == 1


@pytest.mark.parametrize("lossy", [False, True], ids=["", "lossy"])
@pytest.mark.parametrize("name", [n for n, r in ONE_FLIGHT.items() if r.merge != "pull"])
def test_newcomers_bring_nothing_and_miss_nothing(name, lossy):
    """Sum of what arrived = sum of the work; before the third joins, the mean is over two."""
    rule, rounds = dataclasses.replace(SURVIVES_LOSSES[name], tau=2), 7

    def make(transport):
        model = Counter(2 * rounds)
        sync = OuterSync(model, torch.optim.SGD(model.parameters()), rule=rule, transport=transport)
        return model, sync

    def work(model, sync, step):
        model.work(step, 1.0)
        sync.step()

    if lossy and (not rule.delayed or rule.bootstrap == "sync"):
        return  # what is lost and waited for goes out again at once: the stand-in does not see it
    door = queue.Queue()
    results = run_world(
        3,
        lambda t: join_and_train(t, door, make=make, work=work, rounds=rounds, tau=2, lossy=lossy),
    )
    arrived = results[0][2]
    sums = torch.cat([value for (_, index), value in sorted(arrived.items()) if index == 0])
    if not lossy:  # what two ranks send again is a mean over three
        expected = torch.full((2 * rounds,), 1.0, dtype=torch.float64)
        torch.testing.assert_close(sums, torch.cat([-expected, expected]), rtol=0, atol=1e-9)
    assert all_equal([torch.cat([m.p, m.q, m.seen]).detach() for m, _, _ in results])


def test_newcomer_at_the_start_of_a_job_gets_the_all_reduce_that_a_checkpoint_holds():
    rule = CO2(tau=2)

    def first(transport):
        worker = Worker(transport, rule)
        worker.train(range(5))
        return worker.state()

    states = run_world(2, first)
    given = queue.Queue()

    def second(transport):
        worker = Worker(transport, rule, seed=8, check_every_rounds=1)
        if transport.rank == 0:
            transport.may_lose = True  # as where workers come and go: it loads without the others
            worker.load(states[0])
            transport.may_lose = False
            state = torch_copy(worker.sync.peer_state())
            for _ in range(2):
                given.put(state)
        else:
            worker.sync.load_peer_state(given.get(timeout=30))
        worker.train(range(5, 12))
        worker.sync.finalize()
        return worker.flat(), worker.sync.statistics()

    results = run_world(3, second)
    assert all_equal([flat for flat, _ in results])
    assert {record.steps for _, record in results} == {12}


def test_newcomer_takes_over_the_automatic_tau():
    rule = CO2(tau=AutoTau(initial=2))

    def work(transport):
        worker = Worker(transport, rule)
        if transport.rank == 0:
            worker.sync._tau.begin_at(worker.sync._tau.state() | {"delay": 6})
            return worker.sync.peer_state()
        return worker.sync

    state, sync = run_world(2, work)
    sync.load_peer_state(state)
    assert sync.statistics().tau == sync._tau.tau == 6
