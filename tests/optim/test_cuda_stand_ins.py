"""What the engine asks of CUDA, with stand-ins for its streams and events.

They show which calls are made, on which thread and in which order. That a GPU then does what is
expected is only shown by ``tests/gpu``.
"""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from fivefold.errors import CommunicationError
from fivefold.optim import transport
from fivefold.optim._boundary_clock import BoundaryClock
from fivefold.optim._comm_thread import CommunicationThread, Handover
from fivefold.train._step import StepRunner


class StandIn:
    """Of a job with CUDA tensors."""

    def __init__(self):
        self.calls = []
        self.ended = threading.Event()

    @contextlib.contextmanager
    def entered(self):
        self.calls.append("entered")
        yield
        self.calls.append("left")

    def hold_current_streams(self):
        self.calls.append("held")

    def synchronize(self):
        assert self.ended.wait(20)


@pytest.mark.parametrize("at_once", [True, False], ids=["nccl", "gloo"])
def test_with_nccl_the_training_thread_issues_all_collectives(monkeypatch, at_once):
    """One launch order beside FSDP's collectives, and the host does not wait for the work."""
    handover, seen = StandIn(), []
    monkeypatch.setattr(Handover, "of", lambda *_: handover)
    thread = CommunicationThread(rank=0, issues_at_once=at_once)
    job = thread.submit(lambda: seen.append(threading.current_thread()), tensors=(), what="a sum")
    job.wait()
    assert (seen[0] is threading.current_thread()) == at_once
    assert handover.calls == ["entered", "left", "held"]
    assert job.completed_at_s is None  # the work is still under way
    handover.ended.set()
    done = threading.Event()
    monkeypatch.setattr(Handover, "of", lambda *_: None)
    thread.submit(done.set, tensors=(), what="the next").wait()
    assert done.is_set()
    assert job.completed_at_s is not None


def test_a_failed_job_that_was_issued_at_once_breaks_the_next(monkeypatch):
    def fail():
        message = "peer closed"
        raise RuntimeError(message)

    handover = StandIn()
    handover.ended.set()
    monkeypatch.setattr(Handover, "of", lambda *_: handover)
    thread = CommunicationThread(rank=2, issues_at_once=True)
    with pytest.raises(CommunicationError, match="rank 2: a sum failed: peer closed"):
        thread.submit(fail, tensors=(), what="a sum").wait()
    with pytest.raises(CommunicationError, match="the next was not started: a sum had failed"):
        thread.submit(lambda: None, tensors=(), what="the next").wait()


def test_the_communication_thread_uses_this_ranks_device(monkeypatch):
    """``all_gather_object`` takes the thread's current device, which would be cuda:0."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    thread = CommunicationThread(rank=0)
    thread.submit(lambda: chosen.append("run"), tensors=(), what="a comparison").wait()
    assert chosen == [3, "run"]


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_sums_of_nccl_leave_the_multiprocessors_to_the_steps(monkeypatch, backends):
    """What travels behind a whole round is not to hold more of the GPU than it needs."""
    made = []
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=None), is_high_priority_stream=True)
    nccl = SimpleNamespace(Options=lambda: options)
    for name, value in {
        "is_initialized": lambda: True,
        "is_nccl_available": lambda: True,
        "get_backend_config": lambda *_: backends,
        "ProcessGroupNCCL": nccl,
        "get_process_group_ranks": lambda _: [0, 1],
        "get_rank": lambda *_: 0,
        "new_group": lambda *_, **how: made.append(how),
    }.items():
        monkeypatch.setattr(torch.distributed, name, value, raising=False)
    monkeypatch.setattr(transport, "as_group", lambda group, **_: group)
    transport.ProcessGroupTransport(None, timeout_s=7.0)
    if "nccl" not in backends:
        assert made[0]["pg_options"] is None
        return
    assert made[0]["pg_options"] is options
    assert options.config.max_ctas == 8
    assert not options.is_high_priority_stream
    assert options._timeout == made[0]["timeout"]  # or torch would warn, and take its own


class Device:
    """A compute stream and a side stream with a clock in milliseconds; events end when it says."""

    def __init__(self, monkeypatch, *, lands_ms=0.0, asked_at_ms=0.0):
        self.calls, self.now_ms, self.lands_ms = [], 0.0, lands_ms
        self.asked_at_ms = asked_at_ms
        self.compute = SimpleNamespace(
            wait_stream=lambda _: self.calls.append("compute goes on"), queued_ms=0.0
        )
        self.side = SimpleNamespace(device="cuda:0", queued_ms=0.0)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.compute)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))

    def clock(self):
        clock = BoundaryClock(torch.device("cpu"))
        clock._side = self.side
        return clock

    def wait(self):
        self.calls.append("sum")
        self.side.queued_ms = self.lands_ms
        return True


class Event:
    def __init__(self, device):
        self.device = device

    def record(self, stream):
        self.at_ms = max(stream.queued_ms, self.device.now_ms)

    def query(self):
        self.device.now_ms = max(self.device.now_ms, self.device.asked_at_ms)
        return self.device.now_ms >= self.at_ms

    def synchronize(self):
        assert self.query(), "the host waits for steps that it has only queued"

    def elapsed_time(self, later):
        assert self.query()
        assert later.query()
        return later.at_ms - self.at_ms


def wait_for(clock, device, **settings):
    return clock.wait(
        SimpleNamespace(wait=device.wait),
        fetch=lambda: device.calls.append("fetch"),
        what="the sum",
        rank=3,
        **{"timeout_s": 5.0} | settings,
    )


def test_an_all_reduce_that_never_lands_is_an_error_with_a_name(monkeypatch):
    """NCCL's wait only orders streams, and a stream that waits for a dead peer has no end."""
    device = Device(monkeypatch, lands_ms=1.0)
    with pytest.raises(CommunicationError, match="rank 3: the sum did not end in time"):
        wait_for(device.clock(), device, timeout_s=0.05)


def test_what_ranks_wrote_is_fetched_behind_the_sum_and_before_the_host_reads_it(monkeypatch):
    device = Device(monkeypatch)
    assert wait_for(device.clock(), device)[0]
    assert device.calls == ["sum", "fetch", "compute goes on"]


@pytest.mark.parametrize(
    ("steps_end_ms", "lands_ms", "exposed_ms"),
    [(30.0, 80.0, 50.0), (80.0, 30.0, 0.0), (300.0, 80.0, 0.0)],
)
def test_waits_and_steps_are_the_devices_though_the_host_runs_ahead(
    steps_end_ms, lands_ms, exposed_ms, monkeypatch
):
    device = Device(monkeypatch, lands_ms=lands_ms, asked_at_ms=100.0)
    clock = device.clock()
    device.compute.queued_ms = 10.0
    clock.launch()  # behind what is queued
    device.compute.queued_ms = steps_end_ms
    clock.begin()
    _, started_s, ended_s = wait_for(clock, device)
    assert ended_s - started_s == pytest.approx(exposed_ms / 1000, abs=1e-9)
    device.now_ms = 400.0  # what is sent has been looked at
    assert clock.since_launch_s() == pytest.approx((steps_end_ms - 10.0) / 1000)


def test_a_step_waits_for_its_own_stream_and_not_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append("device"))
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    runner = StepRunner.__new__(StepRunner)
    optim = SimpleNamespace(grad_clip=1.0, lr=0.1, warmup_steps=0, min_lr_fraction=0.1)
    runner._config = SimpleNamespace(optim=optim, run=SimpleNamespace(steps=10))
    runner._ranks = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    method = SimpleNamespace(clip_gradients=lambda _: 1.0, update=lambda _: None)
    runner._parts = SimpleNamespace(method=method, optimizer=SimpleNamespace(param_groups=[{}]))
    runner._forward_backward = lambda _: torch.zeros(())
    runner._update([], 1)
    assert waited == ["stream"]
