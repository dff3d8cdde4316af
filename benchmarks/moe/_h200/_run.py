"""The run of the GPU benchmark: checks, ceilings, times, sanitizer, results."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.moe._h200._build import build, build_share
from benchmarks.moe._h200._cases import Case, checked_cases, timed_cases, tiny_cases
from benchmarks.moe._h200._checks import check, wrong_rows
from benchmarks.moe._h200._clock import Ceilings, Clock, ceilings_of
from benchmarks.moe._h200._sanitizer import run_small_calls, sanitize
from benchmarks.moe._h200._timing import Plan, time_case
from benchmarks.moe._h200._variants import missing_variants, versions_of_peers
from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.errors import FivefoldError, UnsupportedError
from fivefold.moe import backends

__all__ = ["run"]

RESULTS = Path(__file__).parents[2] / "results" / "moe" / "h200.json"
_SANITIZER_S = 60.0
_BUILD_SHARE = 0.45  # of the budget, at most, for compiling
_LATE_S = 120.0  # beyond the budget: then something hangs


def say(text: str) -> None:
    """To people, not into a pipe of results."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _device_for(arguments: argparse.Namespace) -> torch.device:
    """The GPU, or the CPU for a dry run.

    Raises:
        UnsupportedError: There is no fitting GPU.
    """
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    reason = backends(device)["fused"]
    if reason is not None:
        raise UnsupportedError(
            f"the kernel cannot run here: {reason}",
            hint="run this on a Hopper GPU, or try the script with --dry-run --out FILE",
        )
    return device


def _chosen(cases: list[Case], arguments: argparse.Namespace, *, few: int) -> list[Case]:
    """All cases, or likenesses of a few in a dry run: each data type, then other loads."""
    if not arguments.dry_run:
        return cases
    first: dict[object, Case] = {}
    for case in tiny_cases(cases):
        first.setdefault((case.dtype, case.precision), case)
    for case in tiny_cases(cases):
        first.setdefault(case.tokens, case)
    found = list(dict.fromkeys(first.values()))
    return [*found[: few - 1], found[-1]]


def _all_checks(device: torch.device, arguments: argparse.Namespace) -> list[BenchmarkRow]:
    """Every check."""
    cases = _chosen(checked_cases(), arguments, few=2)
    repetitions = 1 if arguments.dry_run else 20
    rows = [row for case in cases for row in check(case, device, repetitions=repetitions, say=say)]
    for row in rows:
        if row.met is False:
            say(f"not met: {row.case}: {row.metric}: {row.ours:.2e}, at most {row.target:.0e}")
    say(f"{sum(row.met is True for row in rows)} of {len(rows)} checks met")
    return rows


def _ceiling_rows(ceilings: Ceilings) -> list[BenchmarkRow]:
    """What the machine can do."""
    case = "the machine"
    rows = [
        BenchmarkRow(case=case, metric=f"products in {kind}", unit="FLOP/s", ours=value)
        for kind, value in ceilings.flops_per_s.items()
    ]
    copy = BenchmarkRow(case=case, metric="copy", unit="bytes/s", ours=ceilings.bytes_per_s)
    return [*rows, copy]


def _all_times(
    device: torch.device,
    arguments: argparse.Namespace,
    checked: list[BenchmarkRow],
    *,
    deadline_s: float,
) -> list[BenchmarkRow]:
    """Every case that there is time for, after the rows of the checks."""
    clock = Clock(device)
    plan = Plan(
        clock=clock,
        ceilings=ceilings_of(clock),
        repetitions=1 if arguments.dry_run else 15,
        compiler="eager" if arguments.dry_run else "inductor",
        say=say,
    )
    rows = checked + _ceiling_rows(plan.ceilings)
    cases = [case for case in timed_cases() if arguments.only.lower() in str(case).lower()]
    for case in _chosen(cases, arguments, few=2):
        if time.monotonic() > deadline_s:
            say(f"left out, no time: {case}")
            continue
        rows += time_case(case, plan)
        _write(rows, device, arguments, whole=False)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _measure(arguments: argparse.Namespace, script: Sequence[str]) -> None:
    """Check, time, write.

    Raises:
        FivefoldError: A result is wrong.
        UnsupportedError: There is no GPU.
    """
    began_s = time.monotonic()
    device = _device_for(arguments)
    if arguments.small_calls:
        run_small_calls(device)
        return
    if arguments.build:
        build_share(arguments.build, device, times=not arguments.check_only)
        return
    if not arguments.dry_run:  # a kernel that hangs is to end, and to say where
        faulthandler.dump_traceback_later(arguments.budget_s + _LATE_S, exit=True)
    for name, reason in missing_variants(device).items():
        say(f"not here: {name}: {reason}")
    _build_all(script, arguments)
    rows = _all_checks(device, arguments)
    _write(rows, device, arguments, whole=False)
    wrong_rows(rows)
    if not arguments.check_only:
        deadline_s = began_s + arguments.budget_s - _SANITIZER_S
        rows = _all_times(device, arguments, rows, deadline_s=deadline_s)
        if arguments.dry_run:
            run_small_calls(device)
        else:
            left_s = began_s + arguments.budget_s - time.monotonic()
            found, problems = sanitize(script, left_s=max(left_s, _SANITIZER_S / 2))
            rows += found
            for problem in problems:
                say(problem)
    _write(rows, device, arguments, whole=True)
    faulthandler.cancel_dump_traceback_later()


def _build_all(script: Sequence[str], arguments: argparse.Namespace) -> None:
    if arguments.dry_run:
        return
    began_s = time.monotonic()
    for problem in build(script, arguments, limit_s=_BUILD_SHARE * arguments.budget_s):
        say(problem)
    say(f"compiled in {time.monotonic() - began_s:.0f} s")


def _write(
    rows: list[BenchmarkRow], device: torch.device, arguments: argparse.Namespace, *, whole: bool
) -> None:
    """The results file: the public one only after a whole run on a GPU; before, a draft of it."""
    partial = arguments.check_only or arguments.dry_run or arguments.only
    path = arguments.out or (None if partial else RESULTS)
    if path is None:
        return
    draft = path.with_name(f"{path.stem}.partial.json")
    if whole:
        draft.unlink(missing_ok=True)
    else:
        path = draft
    versions = versions_of_peers()
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        versions |= {
            "GPU": torch.cuda.get_device_name(device),
            "compute capability": f"{major}.{minor}",
            "CUDA": str(torch.version.cuda),
        }
    topic = "moe/h200, dry run in the interpreter" if arguments.dry_run else "moe/h200"
    write_results(path, topic=topic, rows=rows, versions=versions)
    if whole:
        say(f"wrote {path}")


def run(arguments: argparse.Namespace, script: Sequence[str]) -> int:
    """Measure; errors become two lines and an exit code.

    Args:
        arguments: Of the command line.
        script: Python's arguments that start it again.

    Returns:
        The exit code.
    """
    try:
        _measure(arguments, script)
    except FivefoldError as error:
        say(f"error: {error.message}\nhint: {error.hint}")
        return 2 if isinstance(error, UnsupportedError) else 3
    return 0
