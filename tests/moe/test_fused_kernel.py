"""The single kernel against one token and one expert at a time, in Triton's CPU interpreter."""

from pathlib import Path

import pytest

from fivefold.errors import UnsupportedError
from fivefold.moe import ACTIVATIONS, backends, fused_moe
from helpers.night import by_night
from oracles.children import check_case, lines_of_cases

pytestmark = pytest.mark.timeout(1200)  # interpreted, in one child: minutes beside other work
HERE = Path(__file__).parent
LIMITS = {
    "bfloat16": 5e-3,
    "float16": 1e-3,
    "tf32": 7e-4,
    "a wait without end is an error": "gave up waiting for a task with a lower ticket",
    "a workspace too small": "Workspace.allocate the largest num_tokens",
    "double precision": "it takes torch.bfloat16, torch.float16, torch.float32; got torch.float64",
}
CASES = [
    "one token",
    "every expert",
    "more experts than used",
    "several tiles per expert",
    "odd sizes without descriptors",
    "all sizes one",
    "expert of exactly one tile",
    *ACTIVATIONS,
    *LIMITS,
    "split",
    "rounding to tf32 bit by bit",
    "one expert for all",
    "dropped and foreign ids",
    "weights on the input",
    "strided operands and other types",
    "bad values stay where they are",
    "all dropped",
    "no tokens",
    "a weight on the input multiplies what was not rounded",
    "same bits for all grids launches and memory",
    "as the operator with gradients",
]

FOR_THE_NIGHT = ["same bits for all grids launches and memory", "as the operator with gradients"]


@pytest.fixture(scope="module")
def interpreted(request):
    pytest.importorskip("triton")
    return lines_of_cases(HERE / "interpreted_cases.py", request)


@pytest.mark.parametrize("name", by_night(CASES, FOR_THE_NIGHT))
def test_equals_one_by_one_and_holds_what_it_says(interpreted, name):
    check_case(interpreted[name], LIMITS)


def test_every_case_is_looked_at(interpreted):
    assert set(interpreted["all"]["names"]) == set(CASES)


def test_says_why_it_is_missing(monkeypatch):
    from fivefold.moe.kernels import launch as _fused

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_fused, "_triton_problem", lambda: None)
    assert "needs a CUDA device" in backends("cpu")["fused"]
    assert "got meta" in backends("meta")["split"]
    monkeypatch.setattr(_fused.torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in backends("cuda")["fused"]
    monkeypatch.setattr(_fused.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_fused.torch.cuda, "get_device_capability", lambda _device: (8, 0))
    assert "capability 9.0 or more; cuda has 8.0" in backends("cuda")["fused"]
    monkeypatch.setattr(_fused.torch.cuda, "get_device_capability", lambda _device: (9, 0))
    found = backends("cuda")
    assert {found[name] for name in ("fused", "split", "reference")} == {None}
    monkeypatch.setattr(_fused, "_triton_problem", lambda: "triton is not installed")
    assert backends("cuda")["fused"] == "triton is not installed"


def test_cannot_be_had_by_name_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 4)
    with pytest.raises(UnsupportedError, match="'fused' cannot work here"):
        fused_moe(
            x,
            torch.zeros(1, 4, 4),
            torch.zeros(1, 4, 2),
            torch.zeros(1, 1, dtype=torch.int64),
            torch.ones(1, 1),
            backend="fused",
        )
