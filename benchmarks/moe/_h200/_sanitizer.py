"""The kernels under compute-sanitizer, one child process per tool, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks.moe._h200._cases import Case
from benchmarks.moe._h200._operands import operands_of
from benchmarks.moe._h200._variants import OUR_BACKENDS, variants_of
from benchmarks.results_file import BenchmarkRow

__all__ = ["errors_in", "run_small_calls", "sanitize"]

TOOLS = ("memcheck", "racecheck", "synccheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def run_small_calls(device: torch.device) -> None:
    """What is looked at: forward and backward at sizes that a sanitizer can bear."""
    case = Case(
        name="sanitizer", tokens=200, hidden=256, inner=128, experts=8, top_k=2, routing="Zipf"
    )
    if device.type != "cuda":
        case = Case(name="dry", tokens=5, hidden=16, inner=16, experts=2, top_k=1)
    given = operands_of(case, device)
    for name, run in variants_of(case, device, compiler=None).items():
        if name in OUR_BACKENDS:
            leaves = given.leaves()
            torch.autograd.backward(run(leaves).square().sum())
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def errors_in(output: str) -> int | None:
    """Errors that a tool's last line names; None where it did not get so far."""
    found = _SUMMARY.findall(output)
    return int(found[-1]) if found else None


def sanitize(script: Sequence[str], *, left_s: float) -> tuple[list[BenchmarkRow], list[str]]:
    """Run the script's small calls under each tool, as time allows.

    Args:
        script: Python's arguments that start it; it has an option ``--small-calls``.
        left_s: Seconds for all tools.

    Returns:
        A row for each tool that came to its end, and what to tell people of the others.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        return [], ["compute-sanitizer is not installed: the kernels were not looked at with it"]
    rows, problems = [], []
    for place, tool in enumerate(TOOLS):
        share_s = left_s / (len(TOOLS) - place)
        command = [program, "--tool", tool, sys.executable, *script, "--small-calls"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(share_s, 1.0), check=False
            )
        except subprocess.TimeoutExpired:
            problems.append(f"{tool} did not end in {share_s:.0f} s")
            continue
        errors = errors_in(done.stdout + done.stderr)
        if errors is None:
            problems.append(f"{tool} did not work: {(done.stderr or done.stdout)[-300:]}")
            continue
        rows.append(
            BenchmarkRow(
                case="compute-sanitizer, small forward and backward",
                metric=tool,
                unit="errors",
                ours=float(errors),
                target=0.0,
                met=errors == 0,
            )
        )
    return rows, problems
