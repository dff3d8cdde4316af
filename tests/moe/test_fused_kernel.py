"""The single kernel against one token and one expert at a time, in Triton's CPU interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.errors import UnsupportedError
from fivefold.moe import (
    backends,
    fused_moe,
)
from fivefold.moe.operator import ACTIVATIONS

HERE = Path(__file__).parent
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
ACCURATE = [
    "one token",
    "every expert",
    "more experts than used",
    "several tiles per expert",
    "odd sizes without descriptors",
    "all sizes one",
    "expert of exactly one tile",
    *ACTIVATIONS,
    "bfloat16",
    "float16",
    "split",
    "one expert for all",
    "dropped and foreign ids",
    "weights on the input",
    "strided operands and other types",
    "bad values stay where they are",
]
HOLDING = [
    "all dropped",
    "no tokens",
    "a weight on the input multiplies what was not rounded",
    "same bits for all grids launches and memory",
    "as the operator with gradients",
]
REFUSED = {
    "a wait without end is an error": "gave up waiting for a task with a lower ticket",
    "a workspace too small": "Workspace.allocate the largest num_tokens",
    "double precision": "it takes torch.bfloat16, torch.float16, torch.float32; got torch.float64",
}
without_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def interpreted():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted_cases.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@without_triton
@pytest.mark.parametrize("name", ACCURATE)
def test_equals_one_by_one(interpreted, name):
    found = interpreted[name]
    assert "failed" not in found, found["failed"]
    assert found["error"] < TOLERANCE.get(name, 2e-6)


@without_triton
@pytest.mark.parametrize("name", HOLDING)
def test_holds(interpreted, name):
    found = interpreted[name]
    assert "failed" not in found, found["failed"]
    assert found["holds"]


@without_triton
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_a_reason(interpreted, name):
    found = interpreted[name]
    assert "failed" not in found, found["failed"]
    assert REFUSED[name] in found["refused"]
    assert found.get("holds", True)


@without_triton
def test_every_case_is_looked_at(interpreted):
    assert set(interpreted) == {*ACCURATE, *HOLDING, *REFUSED}


def test_says_why_it_is_missing(monkeypatch):
    from fivefold.moe.kernels import launch as _fused

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_fused, "_triton_problem", lambda: None)
    assert "needs a CUDA device" in backends("cpu")["fused"]
    assert "meta is none" in backends("meta")["split"]
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
