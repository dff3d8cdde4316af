"""What all tests take for granted."""

import os
import signal

import pytest
from hypothesis import settings

# The same examples in every run, so that a change is judged by what it changes. For new ones run
# pytest --hypothesis-profile=explore, and give what is found a test of its own.
settings.register_profile("repeat", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeat")

# One thread per operation: with several, a loaded machine may split a sum otherwise from one call
# to the next, and tests that compare bits would say so. Set before torch is loaded; children
# inherit it.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


def pytest_configure():
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of
    # interruptions need the ordinary answer to it wherever they run.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items):
    for item in items:
        if any(item.get_closest_marker(name) for name in ("distributed", "lab")):
            item.add_marker("alone")
