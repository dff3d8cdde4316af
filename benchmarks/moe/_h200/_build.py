"""Compile every kernel before anything is measured: several processes, into triton's cache.

Sizes and data types are constants of a kernel, so the cases need some hundred of them, and one
process would take longer to compile these than to measure. Tokens are none: a few are enough here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.moe._h200._cases import Case, checked_cases, timed_cases
from benchmarks.moe._h200._operands import Operands, operands_of
from benchmarks.moe._h200._variants import LIGER, OUR_BACKENDS, Variant, variants_of

__all__ = ["build", "build_share", "pieces"]

_FEW_TOKENS = 16
_LEAST_TIMED_HIDDEN = 1024  # smaller ones are checked only
_MOST_PROCESSES = 16  # each holds a context and some operands on the GPU


def pieces(*, times: bool) -> list[Case]:
    """Every combination of constants once, those with a backward first.

    Args:
        times: Whether the timed cases take part too.

    Returns:
        Cases of a few tokens.
    """
    found: dict[Case, bool] = {}
    checked = [replace(case, backward=True) for case in checked_cases()]
    for case in [*checked, *(timed_cases() if times else [])]:
        few = replace(
            case,
            name="build",
            tokens=_FEW_TOKENS,
            routing="balanced",
            backward=False,
            compiled=False,
            target_s=None,
            target_flops_per_s=None,
        )
        found[few] = found.get(few, False) or case.backward
    whole = [replace(case, backward=backward) for case, backward in found.items()]
    return sorted(whole, key=lambda case: not case.backward)


def build_share(share: str, device: torch.device, *, times: bool) -> None:
    """Call what one process has to compile.

    Args:
        share: "2/8": every eighth piece, from the third on.
        device: Where.
        times: As in ``pieces``.
    """
    first, step = map(int, share.split("/"))
    for case in pieces(times=times)[first::step]:
        given = operands_of(case, device)
        for name, run in variants_of(case, device, compiler=None).items():
            if name in OUR_BACKENDS:
                _call(run, given, backward=case.backward)
            elif name == LIGER and case.hidden >= _LEAST_TIMED_HIDDEN:
                # It tries many tiles for each size: most of that time is compiling, too.
                with contextlib.suppress(Exception):  # said where it is timed
                    _call(run, given, backward=case.backward)


def _call(run: Variant, given: Operands, *, backward: bool) -> None:
    with torch.no_grad():
        run(given)
    if backward:
        torch.autograd.backward(run(given.leaves()).sum())


def build(script: Sequence[str], arguments: argparse.Namespace, *, limit_s: float) -> list[str]:
    """Compile all in children; what fails here fails again, and is named, where it is measured.

    Args:
        script: Python's arguments that start it; it has an option ``--build``.
        arguments: Of the command line.
        limit_s: Children are ended then.

    Returns:
        What to tell people.
    """
    count = min(_MOST_PROCESSES, os.cpu_count() or 1, len(pieces(times=not arguments.check_only)))
    options = ["--check-only"] if arguments.check_only else []
    deadline_s = time.monotonic() + limit_s
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(number) for number in range(count)]
        children = []
        for number, log in enumerate(logs):
            command = [sys.executable, *script, "--build", f"{number}/{count}", *options]
            with log.open("w") as file:
                children.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True)
                )
        for child, log in zip(children, logs, strict=True):
            try:
                code = child.wait(timeout=max(deadline_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                problems.append(f"compiling did not end in {limit_s:.0f} s; the rest comes later")
                continue
            if code:
                last = " ".join(log.read_text().split())[-300:]
                problems.append(f"compiling ended with exit code {code}: {last}")
    return list(dict.fromkeys(problems))
