"""Graph runs as text: a table, stage bars, levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from fivefold.report._format import format_percent, format_seconds
from fivefold.report._gnn_html import GRAPH_COLUMNS
from fivefold.report._gnn_summary import LEVEL_NAMES, STAGE_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from fivefold.report._gnn_records import GraphRun
    from fivefold.report._gnn_summary import GraphSummary

_WIDTH = 60
_STYLES = {
    "compute": "blue",
    "data": "red",
    "validation": "bright_black",
    "checkpoint": "yellow",
    "other": "white",
    "device": "magenta",
    "host": "blue",
    "shared": "green",
    "private": "yellow",
    "memory": "cyan",
    "file": "red",
}
_LETTERS = {
    "compute": "C",
    "data": "w",
    "validation": "v",
    "checkpoint": "k",
    "other": ".",
    "device": "D",
    "host": "H",
    "shared": "s",
    "private": "p",
    "memory": "M",
    "file": "f",
}


def print_graph_runs(
    console: Console, runs: Sequence[GraphRun], summaries: Sequence[GraphSummary]
) -> None:
    """Write the graph runs' part of the report."""
    console.print()
    console.print(_comparison(summaries, boxed=console.is_terminal))
    stages = {run.label: run.stages for run in summaries if sum(run.stages.values()) > 0}
    _print_bars(console, "Where each second of rank 0 went", stages, STAGE_NAMES, seconds=True)
    levels = {run.label: run.hit_rates for run in summaries if run.hit_rates}
    _print_bars(console, "Where the feature rows came from", levels, LEVEL_NAMES, seconds=False)
    for run in runs:
        for note in run.notes:
            console.print(Text(f"note: {run.label}: {note}"))


def _comparison(summaries: Sequence[GraphSummary], *, boxed: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if boxed else None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", justify="left", no_wrap=True)
    for name, _, _ in GRAPH_COLUMNS:
        table.add_column(name, justify="right")
    for run in summaries:
        status = "" if run.status == "finished" else f" ({run.status})"
        table.add_row(Text(run.label + status), *(write(run) for _, _, write in GRAPH_COLUMNS))
    return table


def _print_bars(
    console: Console,
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    names: Mapping[str, str],
    *,
    seconds: bool,
) -> None:
    if not bars:
        return
    longest = max(sum(parts.values()) for parts in bars.values())
    console.print(f"\n{title}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for label, parts in bars.items():
        total = sum(parts.values())
        shown = format_seconds(total) if seconds else _shares(parts)
        bar = _bar(parts, longest, letters=not console.is_terminal)
        table.add_row(Text(label), bar, shown)
    console.print(table)
    legend = Text("  ")
    for kind, name in names.items():
        if any(parts.get(kind, 0) > 0 for parts in bars.values()):
            mark = "█" if console.is_terminal else _LETTERS[kind]
            legend.append(f"{mark} ", style=_STYLES[kind]).append(f"{name}   ")
    legend.rstrip()
    console.print(legend)


def _shares(parts: Mapping[str, float]) -> str:
    return " / ".join(format_percent(share) for share in parts.values() if share > 0)


def _bar(parts: Mapping[str, float], longest: float, *, letters: bool) -> Text:
    """One bar; cumulative rounding keeps its length right whatever the parts are."""
    bar = Text(no_wrap=True)
    done, drawn = 0.0, 0
    for kind, value in parts.items():
        done += value
        end = round(_WIDTH * done / longest)
        mark = _LETTERS.get(kind, "?") if letters else "█"
        bar.append(mark * max(0, end - drawn), style=_STYLES.get(kind, "white"))
        drawn = max(drawn, end)
    return bar
