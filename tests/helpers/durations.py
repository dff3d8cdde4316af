"""What each test costs in processor time, and which cases are therefore for the night.

``tools/measure_tests.py`` measures and writes ``tests/durations.json``; nothing in it is written by
hand. A case takes at most ``DAY_S`` by day: of a parametrized test those that take longer run at
night, and those after the first that stays take at most ``FURTHER_S``. A test marked ``slow`` is a
named exception: its first case, or those that the marker names, runs by day and takes at most
``SLOW_S``. A test that would leave the day whole says ``nightly`` itself, so that none leaves it
unseen (``test_house.py`` looks). What fixtures prepare for many cases is counted by itself, and
takes at most ``SHARED_S``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
DAY_S = 1.0
FURTHER_S = 0.5
SLOW_S = 5.0
SHARED_S = 10.0
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # all of a session, whatever it chooses then
TOLD_S = 0.25  # cheaper cases stand in the file only as a sum


def known_files() -> dict[str, dict]:
    """Return of each test file the number of its ``cases``, their seconds and the long ones."""
    return json.loads(FILE.read_text())["files"] if FILE.exists() else {}


def known_cases() -> dict[str, float]:
    """Return processor seconds by the name of each case that takes a while."""
    return {
        f"{path}::{case}": seconds
        for path, file in known_files().items()
        for case, seconds in file["long"].items()
    }


def leave_to_the_night(items: list[pytest.Item]) -> None:
    """Mark ``nightly`` what takes too long for every change."""
    known = known_cases()
    staying = set()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        exception = item.get_closest_marker("slow")
        if exception is None:
            limit_s = FURTHER_S if name in staying else DAY_S
            is_long = case and known.get(item.nodeid, 0.0) > limit_s
        else:
            is_long = case[:-1] not in exception.args if exception.args else name in staying
        if is_long:
            item.add_marker("nightly")
        else:
            staying.add(name)


def processor_s() -> float:
    """Return processor seconds of this process and of its children that have ended."""
    times = os.times()
    return sum(times[:4])


class Meter:
    """A pytest plugin that appends what each case took to a file, a line of JSON each."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._shared_s = 0.0
        self._is_preparing = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        # Set-up, call and teardown, without what fixtures prepare for more than this case.
        self._shared_s = 0.0
        before_s = processor_s()
        yield
        self._add(item.nodeid, processor_s() - before_s - self._shared_s)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function" or self._is_preparing:
            yield
            return
        before_s = processor_s()
        self._is_preparing = True
        yield
        self._is_preparing = False
        took_s = processor_s() - before_s
        self._shared_s += took_s
        case = f"fixture {fixturedef.argname}"
        self._add(f"{request.node.nodeid.partition('::')[0] or 'tests'}::{case}", took_s)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item, nextitem):
        # What many cases have shared, such as the process that forked their programs, ends with the
        # last one of the file.
        before_s = processor_s()
        yield
        if nextitem is None or nextitem.path != item.path:
            took_s = processor_s() - before_s
            self._shared_s += took_s
            self._add(f"{item.nodeid.partition('::')[0]}::fixture at the end", took_s)

    def _add(self, case: str, seconds: float) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"case": case, "processor_s": round(seconds, 3)}) + "\n")
