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
from fivefold.optim._comm_thread import CommunicationThread
from fivefold.optim._fragment import Fragment
from fivefold.train._step import StepRunner


class Handover:
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
    handover, seen = Handover(), []
    monkeypatch.setattr(CommunicationThread, "_handover", lambda *_: handover)
    thread = CommunicationThread(rank=0, issues_at_once=at_once)
    job = thread.submit(lambda: seen.append(threading.current_thread()), tensors=(), what="a sum")
    job.wait()
    assert (seen[0] is threading.current_thread()) == at_once
    assert handover.calls == ["entered", "left", "held"]
    assert job.completed_at_s is None  # the work is still under way
    handover.ended.set()
    done = threading.Event()
    monkeypatch.setattr(CommunicationThread, "_handover", lambda *_: None)
    thread.submit(done.set, tensors=(), what="the next").wait()
    assert done.is_set()
    assert job.completed_at_s is not None


def test_a_failed_job_that_was_issued_at_once_breaks_the_next(monkeypatch):
    def fail():
        message = "peer closed"
        raise RuntimeError(message)

    handover = Handover()
    handover.ended.set()
    monkeypatch.setattr(CommunicationThread, "_handover", lambda *_: handover)
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


def test_an_all_reduce_that_never_lands_is_an_error_with_a_name(monkeypatch):
    """NCCL's wait only orders streams, and a stream that waits for a dead peer has no end."""
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    fragment = Fragment.__new__(Fragment)
    fragment._side = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False))
    fragment._metadata = SimpleNamespace(fetch=lambda: None)
    fragment._shared = SimpleNamespace(timeout_s=0.05, transport=SimpleNamespace(rank=3))
    with pytest.raises(CommunicationError, match="rank 3: the sum did not end in time"):
        fragment._wait(SimpleNamespace(wait=lambda: True), what="the sum")


def test_what_ranks_wrote_is_fetched_behind_the_sum_and_before_the_host_reads_it(monkeypatch):
    calls = []

    def done(name, value=None):
        calls.append(name)
        return value

    compute = SimpleNamespace(wait_stream=lambda _: done("compute goes on"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    landed = SimpleNamespace(query=lambda: done("landed", value=True))
    fragment = Fragment.__new__(Fragment)
    fragment._side = SimpleNamespace(record_event=lambda: done("event", landed), device="cuda:0")
    fragment._metadata = SimpleNamespace(fetch=lambda: done("fetch"))
    fragment._shared = SimpleNamespace(timeout_s=5.0, transport=SimpleNamespace(rank=0))
    assert fragment._wait(SimpleNamespace(wait=lambda: done("sum", value=True)), what="the sum")
    assert calls == ["sum", "fetch", "event", "landed", "compute goes on"]


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
