"""The Gluon backend where it cannot run: it is off, says why, and refuses what it cannot do."""

import sys
from pathlib import Path

import pytest
import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe import _gluon, backends, fused_moe
from fivefold.moe._activations import activation_named
from fivefold.moe._backends import backend_for

sys.path.insert(0, str(Path(__file__).parent))

from moe_oracle import operands

NAMES = ("x", "w13", "w2", "topk_ids", "topk_weights")
SILU = activation_named("swiglu")


def call(given, **options):
    return _gluon.forward_gluon(*(given[name] for name in NAMES), activation=SILU, **options)


def bfloat16(shape):
    return operands(shape, dtype=torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch):
    """A machine of which only the questions are asked that come before a launch."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_gluon, "_problem_of_triton", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    return monkeypatch


def test_says_what_it_is_and_why_it_is_missing(hopper):
    assert backends("cuda")["gluon"] is None
    status = "experimental, not measured on a Hopper GPU, needs sm_90: "
    assert backends("cpu")["gluon"] == f"{status}it needs a CUDA device; cpu is none"
    hopper.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    assert backends("cuda")["gluon"] == f"{status}cuda has compute capability 10.0"
    hopper.setattr(torch.cuda, "is_available", lambda: False)
    assert backends("cuda")["gluon"] == f"{status}torch finds no CUDA device"
    hopper.setenv("TRITON_INTERPRET", "1")
    assert "Gluon has no interpreter" in backends("cuda")["gluon"]


@pytest.mark.parametrize("found", ["3.6.0", "3.10.1", "4.0.0"])
def test_asks_for_the_triton_it_is_written_for(monkeypatch, found):
    monkeypatch.setattr(_gluon.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(_gluon.importlib.metadata, "version", lambda _name: found)
    problem = _gluon._problem_of_triton.__wrapped__()
    assert problem.endswith(f"written for triton 3.9, found {found}")


def test_is_never_chosen_unasked(hopper):
    del hopper
    assert backend_for("auto", torch.zeros(1, 64)).name == "reference"


def test_cannot_be_had_by_name_without_a_gpu():
    given = bfloat16((3, 64, 64, 4, 2))
    with pytest.raises(UnsupportedError, match="'gluon' cannot work here: experimental"):
        fused_moe(**given, backend="gluon")
    with pytest.raises(UnsupportedError, match=r"it takes torch\.bfloat16, torch\.float16"):
        fused_moe(**operands((3, 64, 64, 4, 2), dtype=torch.float32), backend="gluon")


def test_refuses_other_sizes_and_what_it_cannot_keep():
    with pytest.raises(UnsupportedError, match=r"multiples of 64; got \{'intermediate': 96\}"):
        call(bfloat16((3, 64, 96, 4, 2)))
    given = bfloat16((3, 64, 64, 4, 2))
    with pytest.raises(UnsupportedError, match="cannot keep the first product"):
        call(given, hidden=torch.empty(6, 128))
    given["x"] = torch.zeros(3 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 64)
    with pytest.raises(ConfigurationError, match="multiple of 16 bytes"):
        call(given)


def test_no_tokens():
    given = bfloat16((3, 64, 64, 4, 2))
    given |= {name: given[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    assert call(given).shape == (0, 64)
