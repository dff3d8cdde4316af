"""How figures, tables, bars and curves of runs look in a report; a dash for what is not known.

Colours are of middle lightness, so that they hold on a light and on a dark page; the shape of the
marker tells curves apart without colour.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from fivefold.optim import outer_rules
from fivefold.report._records import Lab, Run
from fivefold.report.columns import Column, record_of, row_table
from fivefold.report.page import BarRow, DataTable, Folded, PagePart, TextBlock
from fivefold.units import format_bytes, format_bytes_per_s, format_duration_s

COLOURS = ("#1f83c8", "#109668", "#b45fa0", "#a3791b", "#6f78dd", "#5aa9a3", "#c2577a", "#8a7a5c")
ORANGE, GREY = "#d55e00", "#7d858f"
MARKERS = ("circle", "diamond", "square", "triangle")
_SPARE = ("#cf4a6b", "#2f9494", GREY)
_MOST_POINTS = 600  # of a curve: more do not show, and make the page heavy

_PointT = TypeVar("_PointT")


def method_colours() -> dict[str, str]:
    """Return the colour of each method that has one, in the order in which runs are listed."""
    rules = outer_rules().items()
    own = {key: rule.colour for key, rule in rules if rule.colour}
    return {"none": GREY, "ddp": ORANGE} | own


def run_colours(runs: Sequence[Run]) -> list[str]:
    """Return a colour per run: its method's own, a spare one from the second of a method on."""
    colours: list[str] = []
    spare, known = 0, method_colours()
    for run in runs:
        colour = known.get(run.manifest.method)
        if colour is None or colour in colours:
            colour = _SPARE[spare % len(_SPARE)]
            spare += 1
        colours.append(colour)
    return colours


def thinned(points: Sequence[_PointT]) -> Sequence[_PointT]:
    """Return as many points as a curve shows, evenly from the first on."""
    return points[:: max(1, math.ceil(len(points) / _MOST_POINTS))]


Writer = Callable[[Any], Any]
"""Writes one figure or property of a run or of its summary."""

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


def _or_dash(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """Return a writer of figures that may be unknown or not finite."""
    return lambda value: UNKNOWN if value is None or not math.isfinite(value) else write(value)


format_count = _or_dash("{:,.0f}".format)  # with thousands separated
format_bits = _or_dash("{:.3f}".format)  # per byte
format_seconds = _or_dash(format_duration_s)
format_bytes_or_dash = _or_dash(format_bytes)
format_ratio = _or_dash(lambda ratio: f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x")


@_or_dash
def format_percent(fraction: float) -> str:
    """Write a share; close to 0 and to 1 with a decimal, so that it does not claim too much."""
    percent = 100 * fraction
    whole = percent in (0, 100) or 10 <= percent < 95
    return f"{percent:.0f} %" if whole else f"{percent:.1f} %"


def format_waits(waits: dict[str, float] | None) -> str:
    """Write the causes of waiting with their times."""
    if not waits:
        return UNKNOWN
    return ", ".join(f"{cause} {format_duration_s(seconds)}" for cause, seconds in waits.items())


def format_lab(lab: Lab | None) -> str:
    """Describe an emulated cluster in a few words."""
    if lab is None:
        return "none: the ranks talked over the machine's own network"
    parts = [
        f"{lab.hosts} hosts",
        format_bytes_per_s(lab.rate_bytes_per_s) if lab.rate_bytes_per_s else "",
        f"{format_duration_s(lab.delay_s)} delay" if lab.delay_s else "",
        f"{format_duration_s(lab.jitter_s)} jitter" if lab.jitter_s else "",
        f"{100 * lab.loss:g} % loss" if lab.loss else "",
    ]
    means = f" (shaped by {lab.means})" if lab.means else ""
    return ", ".join(filter(None, parts)) + (
        means if lab.shaped else f": NOT SHAPED ({lab.reason or 'unknown'})"
    )


def typed_command(words: Sequence[str]) -> str:
    """Write a command as one would type it: a module's file is no command."""
    command = list(words)
    if command and command[0].endswith("fivefold/__main__.py"):
        command[:1] = ["python", "-m", "fivefold"]
    elif command and command[0].endswith("/fivefold"):
        command[0] = "fivefold"
    return shlex.join(command) or "not recorded"


def figure_table(
    summaries: Sequence[Any], columns: Sequence[Column], *, short: bool = False
) -> DataTable:
    """Return a row of figures per run."""
    shown = (Column("label", "run"), *columns)
    records = [record_of(shown, run) for run in summaries]
    states = enumerate(getattr(run, "status", "finished") for run in summaries)
    badges = tuple((number, status) for number, status in states if status != "finished")
    return row_table(shown, records, short=short, blank=UNKNOWN, badges=badges, explained=True)


def fact_table(runs: Sequence[Any], writers: Sequence[tuple[str, Writer]]) -> DataTable:
    """Return properties of runs: a value per run, or one for all where they are equal."""
    rows = []
    for name, write in (*writers, *_MANIFEST_FACTS):
        values = [UNKNOWN if (value := write(run)) is None else str(value) for run in runs]
        rows.append((name, *(values[:1] if len(set(values)) == 1 else values)))
    return run_table("property", runs, rows)


def run_table(name: str, runs: Sequence[Any], rows: Sequence[tuple[str, ...]]) -> DataTable:
    """Return a table with a column of words per run."""
    words = tuple(range(1, len(runs) + 1))
    return DataTable.of((name, *(run.label for run in runs)), rows, text_columns=words)


def seconds_bar(
    label: str,
    seconds: Mapping[str, float],
    names: Mapping[str, str],
    *,
    more: str = "",
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> BarRow:
    """Return seconds by what they went into as one stacked bar; ``kinds`` are other colours."""
    return BarRow(
        label=label,
        total=format_seconds(sum(seconds.values())) + more,
        segments=tuple(
            (kinds.get(kind, kind), value, f"{names[kind]}: {format_seconds(value)}")
            for kind, value in seconds.items()
            if value > 0
        ),
    )


def config_texts(runs: Sequence[Any]) -> list[PagePart]:
    """Return the runs' configurations, folded."""
    texts = [(run.label, TextBlock(run.config_text, verbatim=True)) for run in runs]
    return [Folded(title=f"config.toml of {name}", part=one) for name, one in texts if one.text]


def command_texts(runs: Sequence[Any]) -> list[PagePart]:
    """Return the commands that started the runs."""
    return [
        TextBlock(typed_command(run.manifest.command), heading=run.label, verbatim=True)
        for run in runs
    ]


def run_notes(runs: Sequence[Any]) -> list[str]:
    """Return what a reader must know about single runs."""
    return [f"{run.label}: {note}" for run in runs for note in run.notes]


_MANIFEST_FACTS: tuple[tuple[str, Writer], ...] = (
    ("model parameters", lambda run: format_count(run.manifest.num_parameters)),
    ("ranks", lambda run: run.manifest.world_size),
    ("seed", lambda run: run.manifest.seed),
    ("processor", lambda run: run.manifest.machine.cpu),
    ("cores", lambda run: run.manifest.machine.cores),
    ("memory", lambda run: format_bytes_or_dash(run.manifest.machine.memory_bytes)),
    ("kernel", lambda run: run.manifest.machine.kernel),
    ("fivefold", lambda run: run.manifest.fivefold),
    ("torch", lambda run: run.manifest.torch),
    ("python", lambda run: run.manifest.python),
    ("started", lambda run: run.manifest.started_at),
)
