"""Tests that need a GPU; one is enough, several ranks share it over gloo.

Skipped where there is none. ``FIVEFOLD_GPU_TESTS_ON=cpu`` runs them on the processor instead, as a
rehearsal: the tests' own code runs, and what they say of a GPU is not tested. A test's process
never touches CUDA, so that its children may be forked: all work is in children. Run them apart from
tests/moe, whose tests on a GPU do touch it.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from fivefold.testing import run_processes


@pytest.fixture(scope="package", autouse=True)
def _driver_is_asked_in_children_only():
    """Torch asks the driver where one would not look for it, and after that no child may."""
    answers = {"_cuda_getDeviceCount": 0, "_show_config": ""}
    asked = {name: getattr(torch._C, name) for name in answers if hasattr(torch._C, name)}

    def restore():
        for name, function in asked.items():
            setattr(torch._C, name, function)

    os.register_at_fork(after_in_child=restore)
    for name in asked:
        setattr(torch._C, name, partial(lambda answer: answer, answers[name]))
    yield
    restore()


@pytest.fixture(scope="session")
def device():
    """Return "cuda"; "cpu" in a rehearsal."""
    wished = os.environ.get("FIVEFOLD_GPU_TESTS_ON", "cuda")
    if wished == "cuda" and not any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("needs an NVIDIA GPU (FIVEFOLD_GPU_TESTS_ON=cpu: a rehearsal on the processor)")
    return wished


@pytest.fixture
def in_child():
    """Call a function in a process of its own, and return what it returns."""

    def call(work, *, timeout_s=240.0):
        (found,) = run_processes(1, lambda _: work(), timeout_s=timeout_s)
        return found

    return call
