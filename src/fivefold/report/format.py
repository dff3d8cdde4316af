"""How figures are written in a report: one function per kind, a dash for what is not known."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

from fivefold.report._records import Lab
from fivefold.units import format_bytes, format_bytes_per_s, format_duration_s

_RunT = TypeVar("_RunT")

UNKNOWN = "–"  # noqa: RUF001 - an en dash is what a table shows for "does not apply"

CATEGORY_NAMES = {
    "compute": "compute",
    "exposed_communication": "waiting for communication",
    "boundary": "round boundary",
    "data": "data",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "other": "other",
}


def format_count(value: float | None) -> str:
    """Write a count with thousands separated."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.0f}"


def format_percent(fraction: float | None) -> str:
    """Write a share; close to 0 and to 1 with a decimal, so that it does not claim too much."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    percent = 100 * fraction
    if percent in (0, 100):
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent < 10 or percent >= 95 else f"{percent:.0f} %"


def format_ratio(ratio: float | None) -> str:
    """Write a ratio as a factor."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def format_bits(value: float | None) -> str:
    """Write bits per byte with the digits that matter."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.3f}"


def format_seconds(value: float | None) -> str:
    """Write a duration."""
    return UNKNOWN if value is None or not math.isfinite(value) else format_duration_s(value)


def format_waits(waits: dict[str, float] | None) -> str:
    """Write the causes of waiting with their times."""
    if not waits:
        return UNKNOWN
    return ", ".join(f"{cause} {format_duration_s(seconds)}" for cause, seconds in waits.items())


def format_bytes_or_dash(value: float | None) -> str:
    """Write a size."""
    return UNKNOWN if value is None else format_bytes(value)


def format_lab(lab: Lab | None) -> str:
    """Describe an emulated cluster in a few words."""
    if lab is None:
        return "none: the ranks talked over the machine's own network"
    parts = [f"{lab.hosts} hosts"]
    if lab.rate_bytes_per_s:
        parts.append(format_bytes_per_s(lab.rate_bytes_per_s))
    if lab.delay_s:
        parts.append(f"{format_duration_s(lab.delay_s)} delay")
    if lab.jitter_s:
        parts.append(f"{format_duration_s(lab.jitter_s)} jitter")
    if lab.loss:
        parts.append(f"{100 * lab.loss:g} % loss")
    means = f" (shaped by {lab.means})" if lab.means else ""
    return ", ".join(parts) + (means if lab.shaped else f": NOT SHAPED ({lab.reason or 'unknown'})")


def typed_command(words: Sequence[str]) -> str:
    """Write a command as one would type it: a module's file is no command."""
    command = list(words)
    if command and command[0].endswith("fivefold/__main__.py"):
        command[:1] = ["python", "-m", "fivefold"]
    elif command and command[0].endswith("/fivefold"):
        command[0] = "fivefold"
    return shlex.join(command) or "not recorded"


def fact_rows(
    runs: Sequence[_RunT], writers: Sequence[tuple[str, Callable[[_RunT], object]]]
) -> tuple[tuple[str, ...], ...]:
    """Write properties of runs: a value per run, or one for all where they are equal."""
    rows = []
    for name, write in writers:
        values = [UNKNOWN if (value := write(run)) is None else str(value) for run in runs]
        rows.append((name, *(values[:1] if len(set(values)) == 1 else values)))
    return tuple(rows)
