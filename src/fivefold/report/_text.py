"""A page as text: tables and bars in a terminal, plain aligned lines elsewhere.

In a terminal the bars are coloured blocks; where there is none each kind is a letter, so that a
log file or a mail shows the same. Drawings are left to the HTML form.
"""

from __future__ import annotations

from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.report.page import BarChart, DataTable, Page, TextBlock

_LOOKS = {  # letter and colour of each kind
    "compute": ("C", "blue"),
    "exposed_communication": ("w", "red"),
    "boundary": ("b", "magenta"),
    "data": ("d", "green"),
    "validation": ("v", "bright_black"),
    "checkpoint": ("k", "yellow"),
    "other": (".", "white"),
    "device": ("D", "magenta"),
    "host": ("H", "blue"),
    "shared": ("s", "green"),
    "private": ("p", "yellow"),
    "memory": ("M", "cyan"),
    "file": ("f", "red"),
}
# Of kinds that are colours and no more, in their order.
_OTHER_LOOKS = tuple(
    zip("123456789", ("cyan", "green", "magenta", "yellow", "red", "blue") * 2, strict=False)
)
_BAR_WIDTH = 60
_PLAIN_WIDTH = 160  # a file has no width; wrapping would break the columns


def print_page(page: Page, *, file: TextIO | None = None) -> None:
    """Write a page as text.

    Args:
        page: What to show.
        file: Where to write; None means standard output. Colours and boxes appear only where it
            is a terminal.

    Examples:
        >>> from fivefold.report.page import Page
        >>> print_page(Page(title="runs", finding="Nothing yet."))
        Nothing yet.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_PLAIN_WIDTH, no_color=True)
    console.print(Text(page.finding, style="bold"))
    for caveat in page.caveats:
        console.print(Text(f"! {caveat}", style="yellow"))
    for section in page.sections:
        parts = [
            part for part in section.parts if isinstance(part, DataTable | BarChart | TextBlock)
        ]
        if not parts:
            continue
        console.print(f"\n{section.heading}" if section.heading else "", markup=False)
        for part in parts:
            if isinstance(part, DataTable):
                console.print(_table(part, boxed=console.is_terminal))
            elif isinstance(part, BarChart):
                _print_bars(console, part)
            else:
                console.print(Text(part.text))


def _table(data: DataTable, *, boxed: bool) -> Table:
    named = any(name for name, _ in data.columns)
    table = _grid(boxed=boxed and named, named=named)
    for number, (name, _) in enumerate(data.columns):
        words = number == 0 or number in data.text_columns
        table.add_column(name, justify="left" if words else "right", no_wrap=named and number == 0)
    badges = dict(data.badges)
    for number, (name, *cells) in enumerate(data.rows):
        badge = f" ({badges[number]})" if number in badges else ""
        table.add_row(Text(name + badge), *map(Text, cells))
    return table


def _print_bars(console: Console, chart: BarChart) -> None:
    letters = not console.is_terminal
    unknown = [kind for kind, _ in chart.kinds if kind not in _LOOKS]
    looks = _LOOKS | dict(zip(unknown, _OTHER_LOOKS, strict=False))
    longest = max((row.length for row in chart.rows), default=0.0)
    table = _grid(boxed=False, named=False)
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify)
    for row in chart.rows:
        bar = Text(no_wrap=True)
        done, drawn = 0.0, 0
        for kind, length, _ in row.segments:
            done += length
            end = round(_BAR_WIDTH * done / longest)  # cumulative: the bar's length stays right
            letter, style = looks.get(kind, ("?", "white"))
            bar.append((letter if letters else "█") * max(0, end - drawn), style=style)
            drawn = max(drawn, end)
        table.add_row(Text(row.label), bar, Text(row.total))
    console.print(table)
    legend = Text("  ")
    used = {kind for row in chart.rows for kind, length, _ in row.segments if length > 0}
    for kind, name in chart.kinds:
        if kind in used:
            letter, style = looks.get(kind, ("?", "white"))
            legend.append(f"{letter if letters else '█'} ", style=style).append(f"{name}   ")
    legend.rstrip()
    console.print(legend)


def _grid(*, boxed: bool, named: bool) -> Table:
    simple = box.SIMPLE_HEAD if boxed else None
    return Table(box=simple, pad_edge=False, padding=(0, 2, 0, 0), show_header=named)
