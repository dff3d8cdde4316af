"""PyTorch's own tests of a distributed backend: what passes on gloo passes here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SUITE = Path(__file__).with_name("torch_suite.py")
SOME = [
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
    "test_monitored_barrier_gloo",
    "test_reduce_sum_twice",
    "test_send_recv_with_tag",
]


def outcomes(backend, names, limit_s):
    """What became of each test."""
    ended = subprocess.run(
        [sys.executable, str(SUITE), backend, *names],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_some_of_torchs_tests_pass():
    assert outcomes("fivefold", SOME, 120) == dict.fromkeys(SOME, "passed")


@pytest.mark.nightly
@pytest.mark.timeout(2500)  # each half has 1,200 s of its own
def test_all_that_passes_on_gloo_passes():
    on_gloo = outcomes("gloo", [], 1200)
    passed = [name for name, outcome in on_gloo.items() if outcome == "passed"]
    assert len(passed) >= 90, "torch's suite was not found, or does not run here"
    assert outcomes("fivefold", passed, 1200) == dict.fromkeys(passed, "passed")
