"""A page as text: tables and bars in a terminal, plain aligned lines elsewhere.

In a terminal the bars are coloured blocks; where there is none each kind is a letter, so that a
log file or a mail shows the same. Drawings are left to the HTML form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.report.page import BarChart, DataTable, Page, TextBlock, has_content

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
_LEAST_BAR = 10
_LEAST_TEXT = 24  # characters of a column of words that wraps
_GAP = 2  # between columns
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
            part
            for part in section.parts
            if isinstance(part, TextBlock)
            or (isinstance(part, DataTable | BarChart) and has_content(part))
        ]
        if not parts:
            continue
        console.print(f"\n{section.heading}" if section.heading else "", markup=False)
        for part in parts:
            if isinstance(part, DataTable):
                for table in _tables(part, boxed=console.is_terminal, width=console.width):
                    console.print(table)
            elif isinstance(part, BarChart):
                _print_bars(console, part)
            else:
                console.print(Text(part.text))


def _tables(data: DataTable, *, boxed: bool, width: int) -> Iterator[Table]:
    """Yield one table, or where that is too wide several with the first column in each."""
    badges = dict(data.badges)
    rows = [
        (f"{name} ({badges[number]})" if number in badges else name, *cells)
        for number, (name, *cells) in enumerate(data.rows)
    ]
    names = [name for name, _ in data.columns]
    wordy = {0, *data.text_columns}
    least = [
        _least_width(names[number], [row[number] for row in rows], wraps=number in wordy - {0})
        for number in range(len(names))
    ]
    for columns in _side_by_side(least, width):
        table = _grid(boxed=boxed and any(names), named=any(names))
        for number in columns:
            table.add_column(
                names[number],
                justify="left" if number in wordy else "right",
                no_wrap=any(names) and number == 0,
                min_width=min(least[number], width) if number else None,
            )
        for row in rows:
            table.add_row(*(Text(row[number]) for number in columns))
        yield table


def _least_width(name: str, cells: list[str], *, wraps: bool) -> int:
    words = max(map(len, " ".join((name, *cells)).split()), default=0)
    whole = max(map(len, cells), default=0)
    return max(words, min(whole, _LEAST_TEXT) if wraps else whole)


def _side_by_side(widths: list[int], width: int) -> Iterator[list[int]]:
    columns, used = [0], widths[0] + _GAP
    for number, own in enumerate(widths[1:], start=1):
        if len(columns) > 1 and used + own + _GAP > width:
            yield columns
            columns, used = [0], widths[0] + _GAP
        columns.append(number)
        used += own + _GAP
    yield columns


def _print_bars(console: Console, chart: BarChart) -> None:
    letters = not console.is_terminal
    unknown = [kind for kind, _ in chart.kinds if kind not in _LOOKS]
    looks = _LOOKS | dict(zip(unknown, _OTHER_LOOKS, strict=False))
    longest = max((row.length for row in chart.rows), default=0.0)
    beside = sum(
        max((len(text) for text in texts), default=0) + _GAP
        for texts in ([row.label for row in chart.rows], [row.total for row in chart.rows])
    )
    width = max(min(_BAR_WIDTH, console.width - beside - _GAP), _LEAST_BAR)
    table = _grid(boxed=False, named=False)
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify)
    for row in chart.rows:
        bar = Text(no_wrap=True)
        done, drawn = 0.0, 0
        for kind, length, _ in row.segments:
            done += length
            end = round(width * done / longest)  # cumulative: the bar's length stays right
            letter, style = looks.get(kind, ("?", "white"))
            bar.append((letter if letters else "█") * max(0, end - drawn), style=style)
            drawn = max(drawn, end)
        table.add_row(Text(row.label), bar, Text(row.total))
    console.print(table)
    used = {kind for row in chart.rows for kind, length, _ in row.segments if length > 0}
    legend = Text(" ")
    for kind, name in chart.kinds:
        if kind in used:
            letter, style = looks.get(kind, ("?", "white"))
            own = Text(f" {letter if letters else '█'} ", style=style).append(f"{name} ", "default")
            if legend.cell_len + own.cell_len > console.width:
                legend.rstrip()
                console.print(legend)
                legend = Text(" ")
            legend.append_text(own).append(" ")
    legend.rstrip()
    console.print(legend)


def _grid(*, boxed: bool, named: bool) -> Table:
    simple = box.SIMPLE_HEAD if boxed else None
    return Table(box=simple, pad_edge=False, padding=(0, 2, 0, 0), show_header=named)
