"""What all tests take for granted."""

import gc
import os
import re
import signal

import pytest
from hypothesis import settings

from helpers.durations import COLLECTED, Meter, leave_to_the_night

# The same examples in every run, so that a change is judged by what it changes. For new ones run
# make test-nightly (or pytest --hypothesis-profile=nightly), and give what is found a test of its
# own. A property takes its number of examples from the profile.
settings.register_profile("repeat", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("nightly", derandomize=False, max_examples=1000, deadline=None)
settings.load_profile("repeat")

# One thread per operation: with several, a loaded machine may split a sum otherwise from one call
# to the next, and tests that compare bits would say so. Set before torch is loaded; children
# inherit it.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


def pytest_configure(config):
    if rows := os.environ.get("FIVEFOLD_MEASURE_TESTS"):
        config.pluginmanager.register(Meter(rows))
    # Or each fork would walk through, and so copy, all that pytest has loaded.
    os.register_at_fork(after_in_child=gc.freeze)
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of
    # interruptions need the ordinary answer to it wherever they run.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(config, val, argname):  # noqa: ARG001 - pytest's signature
    # A test's name must be the same in every process that collects it: values that are data
    # (files' bytes, whole messages) would carry times, addresses and control characters into it.
    if isinstance(val, bytes) or (
        isinstance(val, str) and not re.fullmatch(r"[\w.,:=+*/@ -]{0,40}", val, re.ASCII)
    ):
        return argname  # pytest numbers those that are alike
    return None


# Each sets up for longer than others take: begun last, they would keep one worker when others are
# done.
LONG = {"test_moe_offline.py", "test_moe_exchange.py", "test_backward_kernel.py"}


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config, items):
    bad = [item.nodeid for item in items if not (item.name.isprintable() and len(item.name) < 120)]
    if bad:
        message = f"{len(bad)} names of tests are not printable or have 120 characters or more"
        raise pytest.UsageError(f"{message}, {bad[0]!a} among them: give the parameters ids=")
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker("nightly")
    leave_to_the_night(items)
    config.stash[COLLECTED] = list(items)
