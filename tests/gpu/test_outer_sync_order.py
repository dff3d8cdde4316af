"""On a GPU nothing is read before it is there: slow streams change no bit, a missing wait does.

Each delay holds back one thing that another stream, or the host, must wait for. With it alone the
run has the bits of a CPU. With the wait taken out as well the run must go wrong: then the delay is
long enough to show that the wait is what orders the two.
"""

import contextlib

import pytest
import torch

from fivefold import optim
from fivefold.errors import FivefoldError
from fivefold.optim._comm_thread import Handover
from fivefold.optim._metadata import Metadata
from fivefold.optim.codecs import named_codec
from fivefold.testing import run_processes

pytestmark = pytest.mark.distributed

WIDTH, STEPS, TAU = 1500, 9, 3
CYCLES = 50_000_000  # some 30 ms of a GPU
RULE = optim.CO2(tau=TAU, staleness="none")


def after_a_pause(method):
    """Return the method, whose work on the current stream begins late."""

    def paused(*args, **options):
        torch.cuda._sleep(CYCLES)
        return method(*args, **options)

    return paused


@contextlib.contextmanager
def entered_without_a_wait(self):
    with contextlib.ExitStack() as stack:
        for side in self._streams:
            stack.enter_context(torch.cuda.stream(side))
        yield
        self._ended = [side.record_event() for side in self._streams]


INT8 = type(named_codec("int8"))
DELAYS = {
    "none": None,
    "what is sent is written late": (Metadata, "write"),
    "the sum is written late": (INT8, "decode_"),
    "the host's copy is written late": (Metadata, "fetch"),
}
FAULTS = {
    "what is sent is written late": (Handover, "entered", entered_without_a_wait),
    "the sum is written late": (Handover, "hold_current_streams", lambda _: None),
    "the host's copy is written late": (torch.cuda.Event, "query", lambda _: True),
}


def train(rank, *, device, pause_steps=False, **options):
    model = torch.nn.Linear(WIDTH, WIDTH, device=device)
    start = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=start))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    sync = optim.OuterSync(model, optimizer, rule=RULE, timeout_s=20, **options)
    noise = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=noise).to(device)
        if pause_steps:
            torch.cuda._sleep(CYCLES)
        optimizer.step()
        sync.step()
    sync.finalize()
    return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])


def outcome(rank, delay, fault, *, device):
    """Return the end of a run with the delay, and with the fault where there is one."""
    with pytest.MonkeyPatch.context() as patch:
        if delay is not None:
            owner, name = delay
            patch.setattr(owner, name, after_a_pause(getattr(owner, name)))
        if fault is not None:
            patch.setattr(*fault)
        try:
            return train(rank, device=device, codec="int8")
        except FivefoldError as error:
            return f"{type(error).__name__}: {error}"


@pytest.fixture
def gpu(device):
    if device != "cuda":
        pytest.skip("a processor has no streams that could be late")
    return device


@pytest.mark.parametrize("name", DELAYS)
def test_a_late_stream_changes_no_bit(gpu, name):
    def work(rank):
        return outcome(rank, DELAYS[name], None, device=gpu)

    late = run_processes(2, work, timeout_s=200.0)
    plain = run_processes(2, lambda r: outcome(r, None, None, device=gpu), timeout_s=200.0)
    assert all(isinstance(end, torch.Tensor) for end in late), late
    assert all(torch.equal(*pair) for pair in zip(late, plain, strict=True))
    assert torch.equal(*plain)


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_wait_the_same_delay_is_noticed(gpu, name):
    def work(rank):
        return outcome(rank, DELAYS[name], FAULTS[name], device=gpu)

    plain = run_processes(2, lambda r: outcome(r, None, None, device=gpu), timeout_s=200.0)
    try:
        found = run_processes(2, work, timeout_s=200.0)
    except RuntimeError as error:  # a rank went down
        print(error)  # noqa: T201 - shown by -s
        return
    wrong = [not isinstance(e, torch.Tensor) or not torch.equal(e, plain[0]) for e in found]
    assert any(wrong), "the wait was taken out and nothing changed: the delay is too short"


@pytest.mark.parametrize("outer_device", ["same", "cpu"])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_steps_that_are_only_queued_are_waited_for(gpu, outer_device, codec):
    options = {"codec": codec, "outer_device": outer_device}

    def work(rank):
        slow = train(rank, device=gpu, pause_steps=True, **options)
        return torch.equal(slow, train(rank, device="cpu", **options))

    both = "cpu:gloo,cuda:gloo"
    assert run_processes(2, work, timeout_s=200.0, backend=both) == [True, True]
