"""Columns of a result, each declared once: text, HTML, CSV and JSON are all made from them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.report.page import DataTable


@dataclass(frozen=True)
class Column:
    """One figure of a result: its key, its label, where it comes from and how it is written.

    The key is the same in JSON and CSV. A value of None does not apply: records leave it out.
    """

    key: str
    label: str
    write: Callable[[Any], str] = str
    value: Callable[..., Any] | None = None  # of a row; None: the row's attribute of that name
    help: str = ""
    words: bool = False  # text that may wrap, not a figure
    detail: bool = False  # left out of a table with a row for each result
    short: str = ""  # its label in a terminal
    unit_key: str = ""  # of the column that holds its unit, such as the currency of a cost

    def of(self, *row: Any) -> Any:
        """Return the value that a row has."""
        return getattr(row[0], self.key) if self.value is None else self.value(*row)

    def cell(self, record: Mapping[str, Any], blank: str = "") -> str:
        """Write the value of a record, or ``blank`` where it does not apply."""
        if self.key not in record:
            return blank
        unit = f" {record[self.unit_key]}" if self.unit_key in record else ""
        return f"{self.write(record[self.key])}{unit}"


def record_of(columns: Iterable[Column], *row: Any) -> dict[str, Any]:
    """Return the values of a row by their keys, as JSON and CSV have them."""
    values = {column.key: column.of(*row) for column in columns}
    return {key: value for key, value in values.items() if value is not None}


def row_table(
    columns: Iterable[Column],
    records: Iterable[Mapping[str, Any]],
    *,
    short: bool = False,
    blank: str = "",
    **looks: Any,
) -> DataTable:
    """Return a table with a row for each record.

    Args:
        columns: Of which those that are no detail are shown.
        records: Values by key.
        short: Whether columns have their short labels.
        blank: What stands where a value does not apply.
        looks: Other fields of the table.
    """
    shown = [column for column in columns if not column.detail]
    rows = [tuple(column.cell(record, blank) for column in shown) for record in records]
    words = tuple(place for place, column in enumerate(shown) if place and column.words)
    heads = tuple(((short and column.short) or column.label, column.help) for column in shown)
    return DataTable(columns=heads, rows=tuple(rows), text_columns=words, **looks)


def column_table(
    columns: Iterable[Column], records: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> DataTable:
    """Return a table with a named column for each record; what none has is left out."""
    rows = [
        (column.label, *(column.cell(record) for record in records))
        for column in columns
        if any(column.key in record for record in records)
    ]
    return DataTable.of(("", *names), rows)


def csv_of(records: Iterable[Mapping[str, Any]]) -> str:
    """Return records as CSV, a line each below a line of keys; nested values are left out."""
    flat = [
        {key: value for key, value in record.items() if not isinstance(value, dict)}
        for record in records
    ]
    text = io.StringIO()
    keys = dict.fromkeys(key for record in flat for key in record)
    writer = csv.DictWriter(text, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
