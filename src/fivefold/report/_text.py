"""The report as text: tables and bars in a terminal, plain aligned lines elsewhere.

In a terminal the bars are coloured blocks; where there is none each category is a letter, so that
a log file or a mail shows the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.report._format import (
    CATEGORY_NAMES,
    format_bits,
    format_bytes_or_dash,
    format_count,
    format_lab,
    format_percent,
    format_ratio,
    format_seconds,
    format_time_to_ddp,
    format_waits,
)
from fivefold.report._gnn_text import print_graph_runs
from fivefold.report._mixture_summary import summarise_mixtures
from fivefold.report._mixture_view import MIXTURE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from fivefold.report._report import Report
    from fivefold.report._summary import RunSummary

_STYLES = {
    "compute": "blue",
    "exposed_communication": "red",
    "boundary": "magenta",
    "data": "green",
    "validation": "bright_black",
    "checkpoint": "yellow",
    "other": "white",
}
_LETTERS = {
    "compute": "C",
    "exposed_communication": "w",
    "boundary": "b",
    "data": "d",
    "validation": "v",
    "checkpoint": "k",
    "other": ".",
}
_BAR_WIDTH = 60
_MOST_RANKS = 8
_PLAIN_WIDTH = 160  # a file has no width; wrapping would break the columns


def print_report(report: Report, *, file: TextIO | None = None) -> None:
    """Write the report as text.

    Args:
        report: What to show.
        file: Where to write; None means standard output. Colours and boxes appear only where it
            is a terminal.

    Examples:
        >>> from fivefold.report import Report
        >>> print_report(Report(runs=(), summaries=(), headline="Nothing yet.", caveats=()))
        Nothing yet.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_PLAIN_WIDTH, no_color=True)
    console.print(Text(report.headline, style="bold"))
    for caveat in report.caveats:
        console.print(Text(f"! {caveat}", style="yellow"))
    if report.graph_runs:
        print_graph_runs(console, report.graph_runs, report.graph_summaries)
    if not report.summaries:
        return
    console.print()
    console.print(_comparison(report.summaries, boxed=console.is_terminal))
    _print_seconds(console, report.summaries)
    _print_waits(console, report.summaries)
    _print_overlap(console, report.summaries)
    _print_mixtures(console, report)
    _print_setting(console, report)


def _comparison(summaries: Sequence[RunSummary], *, boxed: bool) -> Table:
    table = _table(boxed=boxed)
    table.add_column("run", justify="left")
    columns = (
        "tokens/s",
        "vs DDP",
        "of compute-only",
        "waiting",
        "hidden",
        "sent/step",
        "bits/byte",
        "to DDP's loss",
        "wall time",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for run in summaries:
        status = "" if run.status == "finished" else f" ({run.status})"
        table.add_row(
            Text(run.label + status),
            format_count(run.tokens_per_s),
            format_ratio(run.speed_ratio_to_ddp),
            format_percent(run.fraction_of_compute_only),
            format_percent(run.exposed_fraction),
            format_percent(run.overlap_fraction),
            format_bytes_or_dash(run.sent_bytes_per_step),
            format_bits(run.bits_per_byte),
            format_time_to_ddp(run),
            format_seconds(run.wall_s),
        )
    return table


def _print_seconds(console: Console, summaries: Sequence[RunSummary]) -> None:
    recorded = [(run, run.seconds) for run in summaries if run.seconds is not None]
    longest = max((sum(seconds.values()) for _, seconds in recorded), default=0.0)
    if longest <= 0:
        return
    console.print("\nWhere each second of rank 0 went")
    table = _table(boxed=False)
    table.show_header = False
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify)
    for run, seconds in recorded:
        bar = _bar(seconds, longest, letters=not console.is_terminal)
        table.add_row(Text(run.label), bar, format_seconds(sum(seconds.values())))
    console.print(table)
    legend = Text("  ")
    for kind, name in CATEGORY_NAMES.items():
        if any(seconds[kind] > 0 for _, seconds in recorded):
            mark = "█" if console.is_terminal else _LETTERS[kind]
            legend.append(f"{mark} ", style=_STYLES[kind]).append(f"{name}   ")
    legend.rstrip()
    console.print(legend)


def _print_waits(console: Console, summaries: Sequence[RunSummary]) -> None:
    waited = [run for run in summaries if run.waits]
    if not waited:
        return
    console.print("\nWhat rank 0 waited for")
    table = _table(boxed=False)
    table.show_header = False
    for run in waited:
        table.add_row(Text(run.label), format_waits(run.waits))
    console.print(table)


def _print_overlap(console: Console, summaries: Sequence[RunSummary]) -> None:
    measured = [run for run in summaries if run.overlap]
    if not measured:
        return
    console.print("\nHidden of the time in flight, measured on each rank")
    table = _table(boxed=False)
    table.show_header = False
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    for run in measured:
        ranks = run.overlap[:_MOST_RANKS]
        shares = ", ".join(format_percent(rank.fraction) for rank in ranks)
        more = f", {len(run.overlap) - len(ranks)} more ranks" if run.overlap[_MOST_RANKS:] else ""
        longest_s = max(rank.in_flight_s for rank in run.overlap)
        table.add_row(Text(run.label), f"{shares}{more}", f"of up to {format_seconds(longest_s)}")
    console.print(table)


def _print_mixtures(console: Console, report: Report) -> None:
    summaries = summarise_mixtures(report.runs)
    if not summaries:
        return
    console.print("\nMixtures of experts")
    table = _table(boxed=console.is_terminal)
    table.add_column("run", justify="left")
    for name, _, _ in MIXTURE_COLUMNS:
        table.add_column(name, justify="right")
    for run in summaries:
        table.add_row(Text(run.label), *(write(run) for _, _, write in MIXTURE_COLUMNS))
    console.print(table)


def _bar(seconds: dict[str, float], longest: float, *, letters: bool) -> Text:
    """One bar; cumulative rounding keeps its length right whatever the parts are."""
    bar = Text(no_wrap=True)
    done_s, drawn = 0.0, 0
    for kind, value in seconds.items():
        done_s += value
        end = round(_BAR_WIDTH * done_s / longest)
        bar.append((_LETTERS[kind] if letters else "█") * max(0, end - drawn), style=_STYLES[kind])
        drawn = max(drawn, end)
    return bar


def _print_setting(console: Console, report: Report) -> None:
    labs = {format_lab(run.manifest.lab) for run in report.runs}
    machines = {run.manifest.machine.cpu for run in report.runs if run.manifest.machine.cpu}
    console.print()
    console.print(Text(f"emulated cluster: {'; '.join(sorted(labs))}"))
    if machines:
        console.print(Text(f"machine: {'; '.join(sorted(machines))}"))
    for run in report.summaries:
        for note in run.notes:
            console.print(Text(f"note: {run.label}: {note}"))


def _table(*, boxed: bool) -> Table:
    return Table(box=box.SIMPLE_HEAD if boxed else None, pad_edge=False, padding=(0, 2, 0, 0))
