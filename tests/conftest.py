"""What all tests take for granted."""

import gc
import os
import re
import signal

import pytest
from hypothesis import settings

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


def pytest_configure():
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


APART = {
    "alone": re.compile(r"\bmark\.(alone|lab)\b"),
    "in_pairs": re.compile(r"\bmark\.in_pairs\b"),
}


def pytest_ignore_collect(collection_path, config):
    # What runs apart stands in a tenth of the files; to import the others takes most of a minute.
    wanted = APART.get(config.option.markexpr.partition(" ")[0])
    if wanted is not None and collection_path.match("test_*.py"):
        return True if not wanted.search(collection_path.read_text()) else None
    return None


# Each sets up for a minute or more: begun last, they would keep one worker when others are done.
LONG = {"test_moe_offline.py", "test_moe_exchange.py", "test_backward_kernel.py"}


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items):
    bad = [item.nodeid for item in items if not (item.name.isprintable() and len(item.name) < 120)]
    if bad:
        message = f"{len(bad)} names of tests are not printable or have 120 characters or more"
        raise pytest.UsageError(f"{message}, {bad[0]!a} among them: give the parameters ids=")
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if item.get_closest_marker("lab"):
            item.add_marker("alone")
        for name, says in APART.items():
            if item.get_closest_marker(name) and not says.search(item.path.read_text()):
                raise pytest.UsageError(f"{item.nodeid} runs {name}, and its file does not say so")
