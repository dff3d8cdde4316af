"""Ranks as threads over a network that is as unkind as gloo may be: late, and in any order.

What is sent is read as late as possible, at the moment when it is delivered, and what is received
is written at any moment after both sides have posted it: a plan that lets memory be reused too
early gives wrong sums here.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch

from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.execution._calls import FivefoldWork, WorkQueue
from fivefold.collectives.execution._plan import plan_rank
from fivefold.collectives.execution._run import (
    CollectiveError,
    ReadyTasks,
    ReceiveThreads,
    RunContext,
    Runner,
)
from fivefold.collectives.lowering import lower
from fivefold.collectives.lowering.program import OpKind
from fivefold.collectives.schedules import (
    Schedule,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
)
from fivefold.collectives.synthesis import spanning_trees
from fivefold.network.topology import ring

LIMIT = timedelta(seconds=20)


class Work:
    def __init__(self, tensor):
        self.tensor, self.over = tensor, threading.Event()

    def wait(self, timeout):
        if not self.over.wait(timeout.total_seconds()):
            message = "timed out"
            raise RuntimeError(message)


class Network:
    """Matches sends and receives of equal ends and tag in order, and delivers them some time."""

    def __init__(self, seed, late_s=None):
        self._random, self._late_s = np.random.default_rng(seed), late_s or {}
        self._lock = threading.Lock()
        self.delivered = []
        self._waiting = defaultdict(lambda: (deque(), deque()))

    def post(self, key, work, *, is_send):
        with self._lock:
            own, other = self._waiting[key][is_send], self._waiting[key][not is_send]
            if not other:
                own.append(work)
                return work
            pair = (work, other.popleft())
            delay_s = self._random.uniform(0, 2e-3) + self._late_s.get(key[:2], 0.0)
        sent, received = pair if is_send else pair[::-1]
        threading.Timer(delay_s, self._deliver, (key[:2], sent, received)).start()
        return work

    def _deliver(self, ends, sent, received):
        self.delivered.append(ends)
        received.tensor.copy_(sent.tensor)
        sent.over.set()
        received.over.set()

    def group(self, rank):
        network = self

        class Group:
            def send(self, tensors, peer, tag):
                return network.post((rank, peer, tag), Work(tensors[0]), is_send=True)

            def recv(self, tensors, peer, tag):
                return network.post((peer, rank, tag), Work(tensors[0]), is_send=False)

        return Group()


def everywhere(program, inputs, network, *, in_threads=True, timeout=LIMIT):
    """Run a program on all ranks at once; what each of them then has."""

    def work(rank):
        collective = program.collective
        data = inputs[rank].clone()
        out = data
        if collective.name != "all_reduce":
            out = data.new_zeros(data.numel() * (len(inputs) if "gather" in collective.name else 1))
        threads = ReceiveThreads(f"rank {rank}") if in_threads else None
        unit = data.numel() // (len(inputs) if collective.name == "all_to_all" else 1)
        context = RunContext(
            inner=network.group(rank), inputs=data, outputs=out, unit=unit, combine=torch.add,
            timeout=timeout, what="test", tag=0, threads=threads,
        )  # fmt: skip
        try:
            Runner(plan_rank(program, rank=rank), context).run()
        finally:
            if threads is not None:
                threads.close()
        return out

    with ThreadPoolExecutor(len(inputs)) as pool:
        return [
            found.result() for found in [pool.submit(work, rank) for rank in range(len(inputs))]
        ]


def schedules(count):
    yield "rooted trees", build_algorithm("binary_tree", all_reduce(count)).replicated(3)
    yield "halving", build_algorithm("recursive_halving_doubling", all_reduce(count)).replicated(2)
    yield "direct", build_algorithm("direct", all_reduce(count))
    packing = spanning_trees(ring(count, bandwidth=1.0))
    yield "trees", packing.to_schedule("all_reduce", chunks=packing.k).replicated(2)


@pytest.mark.parametrize("in_threads", [True, False])
@pytest.mark.parametrize("count", [3, 4])
def test_sums_are_the_same_bits_whatever_arrives_first(count, in_threads):
    torch.manual_seed(count)
    # Enough that threads are worth it; values whose sum depends on the order of additions.
    inputs = [torch.randn(70_001) * 10.0 ** (rank % 3) for rank in range(count)]
    for name, schedule in schedules(count):
        program = lower(schedule, in_place=True)
        first = None
        for seed in range(4):
            found = everywhere(program, inputs, Network(seed), in_threads=in_threads)
            assert all(torch.equal(found[0], other) for other in found[1:]), name
            assert torch.allclose(found[0], sum(inputs), rtol=1e-4, atol=1e-3), name
            first = found[0] if first is None else first
            assert torch.equal(first, found[0]), name


def test_copies_arrive_where_they_belong():
    count = 4
    inputs = [torch.arange(40_000.0) + 1e6 * rank for rank in range(count)]
    gathered = lower(build_algorithm("bruck", all_gather(count)).replicated(2))
    for found in everywhere(gathered, inputs, Network(1)):
        assert torch.equal(found, torch.cat(inputs))
    swapped = lower(build_algorithm("pairwise", all_to_all(count)))
    parts = [torch.chunk(data, count) for data in inputs]
    for rank, found in enumerate(everywhere(swapped, inputs, Network(2))):
        assert torch.equal(found, torch.cat([part[rank] for part in parts]))


def star_and_chain():
    """Chunk 0 is summed on rank 0; chunk 1 on rank 3, with rank 2's share going over rank 0."""
    moves = [(0, 1, 0), (0, 2, 0), (0, 3, 0), (1, 2, 0), (1, 0, 3), (1, 1, 3)]
    sums = [Transfer(chunk=c, source=a, target=b, reduces=True) for c, a, b in moves]
    spread = [(0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 3, 0), (1, 3, 1), (1, 3, 2)]
    copies = [Transfer(chunk=c, source=a, target=b) for c, a, b in spread]
    return Schedule.from_transfers([*sums, *copies], collective=all_reduce(4, chunks=2))


def test_a_slow_peer_does_not_hold_up_what_others_sent():
    network = Network(0, late_s={(1, 0): 0.4})
    inputs = [torch.full((80_000,), float(2**rank)) for rank in range(4)]
    program = lower(star_and_chain(), in_place=True)
    for found in everywhere(program, inputs, network):
        assert torch.equal(found, torch.full((80_000,), 15.0))
    # In the program rank 0 takes rank 1's data first; what it passes on to rank 3 needs it not.
    assert network.delivered.index((0, 3)) < network.delivered.index((1, 0))


def test_tasks_that_touch_the_same_memory_keep_their_order():
    tasks = plan_rank(lower(star_and_chain(), in_place=True), rank=0).tasks
    ready, order = ReadyTasks(tasks), []
    for at in reversed(range(len(tasks))):  # everything arrives in the opposite order
        if tasks[at].receive_peer >= 0:
            ready.arrived(at)
    while (at := ready.next()) is not None:
        order.append(at)
        ready.done(at)
    assert ready.is_done
    places = {at: place for place, at in enumerate(order)}
    for at, task in enumerate(tasks):
        for earlier, other in enumerate(tasks[:at]):
            if _overlap(task.write, other.write) or _overlap(task.read, other.write):
                assert places[earlier] < places[at]


def test_what_is_passed_on_in_turn_is_asked_for_at_once():
    """Asked for one after the other, each chunk of a queue would cost a round trip."""
    schedule = build_algorithm("binary_tree", all_reduce(7)).replicated(4)
    tasks = plan_rank(lower(schedule, in_place=True), rank=1).tasks
    passing = [at for at, task in enumerate(tasks) if task.kind is OpKind.RECEIVE_COPY_SEND]
    assert any(tasks[at].sends_after in passing for at in passing)
    ready = ReadyTasks(tasks)
    summed = [at for at, task in enumerate(tasks) if task.kind.reduces]
    for at in summed:
        ready.arrived(at)
    for at in summed:
        assert ready.next() is not None
        ready.done(at)
    assert all(ready.may_be_written(at) for at in passing)
    assert ready.next() is None


def _overlap(one, other):
    if one is None or other is None or one.buffer is not other.buffer:
        return False
    return one.first < other.last and other.first < one.last


def test_a_peer_that_never_sends_is_named():
    program = lower(build_algorithm("direct", all_reduce(3)), in_place=True)
    network = Network(0, late_s={(2, 0): 6.0, (2, 1): 6.0})
    inputs = [torch.ones(90_000) for _ in range(3)]
    with pytest.raises(CollectiveError, match=r"for data from rank 2|to take data"):
        everywhere(program, inputs, network, timeout=timedelta(seconds=1.5))


def test_a_future_resolves_whatever_ended_the_call():
    error = KeyboardInterrupt()
    for late in (False, True):
        work = FivefoldWork([], what="all_reduce of 8 bytes")
        future = work.get_future() if late else None
        work.finish(error)
        future = future or work.get_future()
        assert future.done()
        with pytest.raises(RuntimeError, match=r"all_reduce of 8 bytes was ended by Keyboard"):
            future.wait()


def test_a_closed_queue_is_not_busy():
    jobs, work = WorkQueue(name="jobs"), FivefoldWork([], what="job")
    jobs.submit(lambda: None, work, in_thread=True)
    assert work.wait()
    jobs.close()
    assert not jobs.is_busy
