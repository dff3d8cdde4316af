"""What a stage of the run on a GPU is, declared once, and what its steps say.

From the declaration come the table of ``--plan``, the steps, the check of every row, and the
results file. The standard library only: what a stage runs is imported when it runs.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.ladder import Rung, say, serve

if TYPE_CHECKING:
    from benchmarks.results_file import BenchmarkRow

__all__ = ["Line", "Metric", "Part", "Report", "Stage", "missing_of"]

Line = dict[str, Any]
_Run = Callable[["Report", Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure that a stage may say.

    Attributes:
        name: Of the figure.
        unit: Its unit.
        right: Lowest and highest value of a program that is right; a step with another is wrong.
        target: What is aimed at; missing it is no fault.
        at_least: Whether the target is the least that is wished, or the most.
    """

    name: str
    unit: str
    right: tuple[float, float] | None = None
    target: float | None = None
    at_least: bool = True


@dataclass(frozen=True, kw_only=True)
class Part:
    """One step of a stage.

    Attributes:
        name: Of the step; unique in its stage.
        limit_s: Longest time.
        sizes: What the stage's function is given.
        packages: What must be installed besides the stage's own, as for ``missing_of``.
    """

    name: str
    limit_s: float
    sizes: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()


def missing_of(packages: Sequence[str]) -> str:
    """Return why a part cannot be done: which of the packages are not installed; or "".

    Args:
        packages: Names for ``import``; "a or b" where one of both will do.
    """
    there = importlib.util.find_spec
    missing = [name for name in packages if not any(map(there, name.split(" or ")))]
    return f"not installed: {', '.join(missing)}" if missing else ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A question that a GPU answers.

    Attributes:
        key: Its name on the command line.
        minutes: Expected on a GPU, and its share of the time at first.
        decides: What is known afterwards.
        topic: Of its results file.
        run: Does one part on a report and the part's sizes.
        real: Parts on a GPU, the most valuable first.
        tiny: Parts on a processor, that show that the stage runs.
        metrics: All figures that it may say.
        packages: What must be installed besides torch.
        alone: Whether each part has a process of its own.
        convert: Makes the rows of its results file; None: medians of what was said.
    """

    key: str
    minutes: float
    decides: str
    topic: str
    run: _Run
    real: Sequence[Part]
    tiny: Sequence[Part]
    metrics: Sequence[Metric]
    packages: Sequence[str] = ()
    alone: bool = False
    convert: Callable[[Sequence[Line]], Sequence[BenchmarkRow]] | None = None

    def parts(self, *, tiny: bool) -> Sequence[Part]:
        """Return the parts of that size."""
        return self.tiny if tiny else self.real

    def rungs(self, *, tiny: bool) -> Sequence[Rung]:
        """Return the steps, in order; parent and child make the same."""
        return [
            Rung(
                rung=self.key, name=part.name, limit_s=part.limit_s, alone=self.alone,
                absent=missing_of(part.packages),
            )
            for part in self.parts(tiny=tiny)
        ]  # fmt: skip

    def order(self, rungs: Sequence[Rung], *, tiny: bool) -> Sequence[int]:
        """Return the numbers of the steps that are run, in their order."""
        del tiny
        return range(len(rungs))

    def command(self, *, tiny: bool) -> list[str]:
        """Return what starts a child that does the steps."""
        words = [sys.executable, "-m", "benchmarks.gpu", "--work", self.key]
        return words + ["--tiny"] * tiny

    def work(self, *, tiny: bool) -> int:
        """Be the child: do the parts that come in; return the exit code."""
        parts = {part.name: part for part in self.parts(tiny=tiny)}

        def attempt(rung: Rung, order: Mapping[str, Any]) -> bool:
            return self._do(parts[rung.name], order["fault"])

        return serve(self.rungs(tiny=tiny), attempt, poisonous=not tiny)

    def _do(self, part: Part, fault: str) -> bool:
        report = Report(self.metrics, step=part.name, fault=fault)
        self.run(report, part.sizes)
        if report.rows == 0:
            message = f"{self.key}: {part.name} said nothing"
            raise ValueError(message)
        return report.good

    def rows(self, lines: Sequence[Line]) -> Iterator[BenchmarkRow]:
        """Yield the rows of the results file: how many steps were right, and the figures."""
        from benchmarks.results_file import BenchmarkRow  # noqa: PLC0415 - needs pydantic

        status = {line["step"]: line["status"] for line in lines if line["event"] == "step"}
        done = [word for word in status.values() if word != "left out"]
        right = done.count("good")
        yield BenchmarkRow(
            case=self.key, metric="steps that were right", unit="steps", ours=right,
            target=len(done), met=right == len(done),
        )  # fmt: skip
        yield from (self.convert or self._medians)(lines)

    def _medians(self, lines: Sequence[Line]) -> list[BenchmarkRow]:
        from benchmarks.results_file import BenchmarkRow, median_and_spread  # noqa: PLC0415

        said: dict[tuple[str, str], list[Line]] = {}
        for line in lines:
            if line["event"] == "row" and line["value"] is not None:
                said.setdefault((line["case"], line["metric"]), []).append(line)
        known = {metric.name: metric for metric in self.metrics}
        rows = []
        for (case, name), found in said.items():
            # Rows may be older than the declaration.
            metric = known.get(name) or Metric(name=name, unit=found[0]["unit"])
            ours, spread = median_and_spread([line["value"] for line in found])
            met = None
            if metric.target is not None:
                met = ours >= metric.target if metric.at_least else ours <= metric.target
            rows.append(
                BenchmarkRow(
                    case=case, metric=name, unit=metric.unit, ours=ours, spread=spread,
                    peers=found[-1].get("peers", {}), target=metric.target, met=met,
                )
            )  # fmt: skip
        return rows


class Report:
    """What one step says; it knows by itself what is wrong.

    Args:
        metrics: What may be said.
        step: The step's name.
        fault: "wrong", "hang" or "crash", planted in the first row that can show it, or "".

    Attributes:
        good: Whether all figures so far were right.
        rows: How many.
        step: The step's name.
    """

    def __init__(self, metrics: Sequence[Metric], *, step: str, fault: str = "") -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self.step, self._fault = step, fault
        self.good, self.rows = True, 0

    def row(self, metric: str, value: float, *, case: str = "", **more: Any) -> None:
        """Say a figure.

        Args:
            metric: The name of one that the stage declares.
            value: In the metric's unit.
            case: Circumstances; the step's name where they are not given.
            more: Whatever else a reader of the raw rows needs.

        Raises:
            ValueError: The stage declares no such metric.
        """
        if metric not in self._metrics:
            message = f"no metric {metric!r} is declared; there are {', '.join(self._metrics)}"
            raise ValueError(message)
        right = self._metrics[metric].right
        if self._fault == "wrong" and right is not None:
            self._fault = ""
            value = right[1] + 1 if math.isfinite(right[1]) else right[0] - 1
        finite = math.isfinite(value)
        is_right = finite and (right is None or right[0] <= value <= right[1])
        self.good &= is_right
        self.rows += 1
        line: Line = {
            "case": case or self.step,
            "metric": metric,
            "unit": self._metrics[metric].unit,
        }
        line |= {"value": value if finite else None, "right": is_right}
        if not is_right:
            line["wrong"] = f"{value:.6g} is not within {right}"
        say(event="row", step=self.step, **(more | line))
        if self._fault == "crash":
            os.abort()
        while self._fault == "hang":
            time.sleep(1.0)
