"""Runs stages one after another, whatever happens in them, and goes on where a run ended."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu._rows import RowFiles, read_rows
from benchmarks.gpu._stage import Line, Stage, missing_of
from benchmarks.ladder import Limits, Rung, climb
from benchmarks.machine import describe_machine

__all__ = ["Run", "plan_table"]

_OVER = {"good", "wrong", "hung", "crashed", "skipped"}  # statuses that are not tried again
_MOST_BEGINNINGS = 2
_VERSIONS = ("torch", "triton", "numpy", "pydantic", "numba", "torch-geometric", "transformers")


class Run:
    """One call of the command.

    Args:
        stages: In the order of their value per minute.
        folder: Of the rows, also those of earlier calls, whose steps are not run again.
        minutes: All the time that there is.
        step_s: Longest time of a step; None: each step's own.
        tiny: On a processor.
        plant: The fault to plant in a step of a stage, or "".
        show: Takes lines for people.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        folder: Path,
        *,
        minutes: float,
        step_s: float | None = None,
        tiny: bool = False,
        plant: Callable[[str, str], str] = lambda _stage, _step: "",
        show: Callable[[str], None] = print,
    ) -> None:
        self._stages, self._tiny, self._plant, self._show = stages, tiny, plant, show
        self._step_s = step_s
        self._began_s = time.monotonic()
        self._end_s = self._began_s + 60 * minutes
        self._state = _state_of(read_rows(folder))
        self._files = RowFiles(folder)
        self._broken: set[str] = set()

    def all(self) -> bool:
        """Run what is missing: each stage for its minutes, then all for what is left of the time.

        Returns:
            Whether every step of every stage is done and was right, now or before.
        """
        self._files.write({"event": "machine", "tiny": self._tiny} | _machine())
        try:
            for stage in self._stages:
                self._climb(stage, 60 * stage.minutes)
            for stage in self._stages:
                self._climb(stage, float("inf"))
        finally:
            self._files.close()
        return self._sum_up()

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _rungs(self, stage: Stage) -> Sequence[Rung]:
        """Return a stage's steps; none where it cannot be started, which is said once."""
        if stage.key in self._broken:
            return []
        reason = missing_of(stage.packages)
        if not reason:
            try:
                return stage.rungs(tiny=self._tiny)
            except Exception as error:  # noqa: BLE001 - the other stages are worth their time
                reason = f"{type(error).__name__}: {error}"
        self._broken.add(stage.key)
        self._files.write({"event": "stage", "stage": stage.key, "reason": reason})
        self._show(f"{stage.key}: left out, {reason}")
        return []

    def _climb(self, stage: Stage, budget_s: float) -> None:
        rungs = self._rungs(stage)
        order = stage.order(rungs, tiny=self._tiny)
        before = self._state.setdefault(stage.key, {})
        if all(rungs[number].name in before for number in order) or self._left_s() <= 0:
            return

        def say(line: Line) -> None:
            self._files.write({"stage": stage.key} | line)
            if line["event"] == "step":
                self._note(stage, line)

        climb(
            rungs,
            stage.command(tiny=self._tiny),
            limits=Limits(
                budget_s=min(budget_s, self._left_s()), step_s=self._step_s, hard_s=self._left_s()
            ),
            say=say,
            plant=lambda rung: self._plant(stage.key, rung.name),
            before=dict(before),
            order=order,
        )

    def _note(self, stage: Stage, line: Line) -> None:
        if line["status"] in _OVER | {"left out"}:  # the latter may be installed for another call
            self._state[stage.key][line["step"]] = line["status"]
        if line["status"] != "no time":
            minutes = (time.monotonic() - self._began_s) / 60
            why = f": {line['reason']}" if "reason" in line else ""
            self._show(f"{minutes:5.1f} min  {stage.key} / {line['step']}: {line['status']}{why}")

    def _sum_up(self) -> bool:
        good = True
        for stage in self._stages:
            rungs = self._rungs(stage)
            steps = [rungs[number].name for number in stage.order(rungs, tiny=self._tiny)]
            found = self._state.get(stage.key, {})
            counts = Counter(found.get(step, "not yet") for step in steps)
            good &= "good" in counts and set(counts) <= {"good", "left out"}
            words = [f"{count} {status}" for status, count in counts.items()]
            self._show(f"{stage.key}: {', '.join(words) or 'left out'}")
        return good


def _state_of(lines: Sequence[Line]) -> dict[str, dict[str, str]]:
    """Return what became of the steps of each stage; what ended whole runs counts as hung."""
    found: dict[str, dict[str, str]] = {}
    begun: Counter[tuple[str, str]] = Counter()
    for line in lines:
        place = line.get("stage", ""), line.get("step", "")
        if line["event"] == "begin":
            begun[place] += 1
        if line["event"] == "step":
            begun[place] = 0
            if line["status"] in _OVER:
                found.setdefault(place[0], {})[place[1]] = line["status"]
    for (stage, step), count in begun.items():
        if count >= _MOST_BEGINNINGS:
            found.setdefault(stage, {})[step] = "hung"
    return found


def _machine() -> Line:
    """What there is, as far as it can be known without touching the GPU."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        versions["GPU"] = done.stdout.strip()
    except (OSError, subprocess.SubprocessError) as reason:
        versions["GPU"] = f"none ({type(reason).__name__})"
    return {"machine": describe_machine(), "versions": versions}


def plan_table(stages: Sequence[Stage]) -> list[dict[str, object]]:
    """Return a record per stage, in order: what ``--plan`` shows."""
    return [
        {
            "stage": stage.key,
            "minutes": stage.minutes,
            "decides": stage.decides,
            "results": f"benchmarks/results/{stage.topic}.json",
            "needs": list(stage.packages),
        }
        for stage in stages
    ]
