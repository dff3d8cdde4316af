"""The ladder's rows in the form of all benchmarks' results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, write_results

__all__ = ["convert", "rows_of"]

_CALLED = {"split": "ours in five launches"}
_TIMED = {"timing", "training", "sweep", "sweep backward", "tuned", "timeline"}
_NOT_CHECKED = _TIMED | {"machine", ""}


def convert(source: Path, target: Path | None) -> int:
    """Write a results file of rows; nothing else is measured by it.

    Args:
        source: Lines of JSON that the ladder wrote; of several runs, one behind the other.
        target: The results file, ending in .json.

    Returns:
        The exit code.
    """
    if target is None:
        sys.stderr.write("error: --convert needs --out\nhint: benchmarks/results/moe/gpu.json\n")
        return 1
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line]
    versions, machine = {}, None
    for line in lines:
        if line["event"] == "machine":
            versions, machine = line["versions"], line["machine"]
    rows = rows_of(lines)
    command = f"python -m benchmarks.moe.gpu --rows {source.name}"
    write_results(
        target, topic="moe/gpu", rows=rows, versions=versions, command=command, machine=machine
    )
    return 0


def rows_of(lines: Sequence[dict[str, Any]]) -> list[BenchmarkRow]:
    """Return the rows of a results file.

    Args:
        lines: All that the ladder said.
    """
    made = (_checks, _ceilings, _times, _timelines, _swept)
    return [row for make in made for row in make(lines)]


def _checks(lines: Sequence[dict[str, Any]]) -> Iterator[BenchmarkRow]:
    """Yield how many steps of each rung and kind were right, and the largest share of a limit."""
    steps: dict[tuple[str, str], list[str]] = {}
    shares: dict[tuple[str, str], float] = {}
    for line in lines:
        rung, *others = line.get("step", "").split(" / ")
        if rung in _NOT_CHECKED:
            continue
        place = rung, others[0]
        if line["event"] == "step":
            steps.setdefault(place, []).append(line["status"])
        elif line.get("limit") and line["unit"] == "ratio":
            shares[place] = max(shares.get(place, 0.0), line["value"] / line["limit"])
    for place, found in steps.items():
        case = ", ".join(place)
        right = found.count("good")
        yield BenchmarkRow(
            case=case, metric="steps that were right", unit="steps", ours=right,
            target=len(found), met=right == len(found),
        )  # fmt: skip
        if place in shares:
            yield BenchmarkRow(
                case=case, metric="largest error over its limit", unit="ratio",
                ours=shares[place], target=1.0, met=shares[place] <= 1,
            )  # fmt: skip


def _ceilings(lines: Sequence[dict[str, Any]]) -> Iterator[BenchmarkRow]:
    for line in lines:
        if line["event"] == "row" and line["step"] == "timing / ceilings":
            yield BenchmarkRow(
                case="ceilings", metric=line["metric"], unit=line["unit"], ours=line["value"]
            )


def _times(lines: Sequence[dict[str, Any]]) -> Iterator[BenchmarkRow]:
    """Yield a row per case: the single kernel beside everyone, five launches of ours included."""
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        rung, _, case = line.get("step", "").partition(" / ")
        if line["event"] == "row" and rung in {"timing", "training", "tuned"} and "raw" in line:
            name, _, what = line["metric"].partition(": ")
            cases.setdefault((case, what), {})[name] = line
    for (case, what), named in cases.items():
        ours = named.pop("fused", None)
        if ours is None:
            continue
        yield BenchmarkRow(
            case=case, metric=what, unit="ms", ours=1e3 * ours["value"],
            spread=(1e3 * min(ours["raw"]), 1e3 * max(ours["raw"])),
            peers={_CALLED.get(name, name): 1e3 * line["value"] for name, line in named.items()},
            limit=1e3 * ours["floor"] if "floor" in ours else None,
            target=1e3 * ours["target"] if "target" in ours else None,
            met=ours.get("target_met"),
        )  # fmt: skip
        if "host_s" in ours:
            yield BenchmarkRow(
                case=case, metric=f"{what}, the host's time", unit="ms", ours=1e3 * ours["host_s"],
                peers={_CALLED.get(n, n): 1e3 * line["host_s"] for n, line in named.items()},
            )  # fmt: skip


def _timelines(lines: Sequence[dict[str, Any]]) -> Iterator[BenchmarkRow]:
    for line in lines:
        rung, _, case = line.get("step", "").partition(" / ")
        if line["event"] == "row" and rung == "timeline" and "found" in line:
            yield BenchmarkRow(
                case=case, metric=line["metric"], unit=line["unit"], ours=line["value"]
            )


def _swept(lines: Sequence[dict[str, Any]]) -> Iterator[BenchmarkRow]:
    for line in lines:
        rung, _, case = line.get("step", "").partition(" / ")
        if line["event"] == "row" and rung in {"sweep", "sweep backward"} and "raw" in line:
            metric = "forward of other tiles" if rung == "sweep" else "backward of other tiles"
            yield BenchmarkRow(
                case=case, metric=metric, unit="ms", ours=1e3 * line["value"],
                spread=(1e3 * min(line["raw"]), 1e3 * max(line["raw"])),
            )  # fmt: skip
