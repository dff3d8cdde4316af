"""The ladder's rows in the form of all benchmarks' results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results

__all__ = ["convert"]


def convert(source: Path, target: Path | None) -> int:
    """Write a results file of rows; nothing else is measured by it.

    Args:
        source: Lines of JSON that the ladder wrote.
        target: The results file, ending in .json.

    Returns:
        The exit code.
    """
    if target is None:
        sys.stderr.write("error: --convert needs --out\nhint: benchmarks/results/moe/gpu.json\n")
        return 1
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line]
    rows, versions = {}, {}
    for line in lines:
        if line["event"] == "machine":
            versions = line["versions"]
        elif line["event"] == "step":
            rows[line["step"], "status"] = BenchmarkRow(
                case=line["step"], metric=f"status: {line['status']}", unit="s",
                ours=line.get("seconds", 0.0),
            )  # fmt: skip
        elif line["event"] == "row":
            most = line.get("limit", line.get("target"))
            met = line.get("met", line.get("target_met"))
            raw = line.get("raw")
            rows[line["step"], line["metric"]] = BenchmarkRow(
                case=line["step"], metric=line["metric"], unit=line["unit"], ours=line["value"],
                spread=None if raw is None else (min(raw), max(raw)), limit=line.get("floor"),
                target=most, met=met if most is not None else None,
            )  # fmt: skip
    command = f"python -m benchmarks.moe.gpu --rows {source.name}"
    write_results(
        target, topic="moe/gpu", rows=list(rows.values()), versions=versions, command=command
    )
    return 0
