"""Tests that need a GPU; one is enough, several ranks share it over gloo.

Skipped where there is none. ``FIVEFOLD_GPU_TESTS_ON=cpu`` runs them on the processor instead, as a
rehearsal: the tests' own code runs, and what they say of a GPU is not tested. A test's process
never touches CUDA, so that its children may be forked: all work is in children.
"""

import os
from pathlib import Path

import pytest

from fivefold.testing import run_processes


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
