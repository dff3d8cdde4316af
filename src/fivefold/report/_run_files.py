"""Reads the files of a run's folder into checked records.

A file that is not there is None, a torn last line of a log is a note; any other damage is an
error, because a report over silently dropped lines would be wrong. This module does not know
which files a run has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from fivefold import files
from fivefold.errors import DataError
from fivefold.report._records import SCHEMA_VERSION

if TYPE_CHECKING:
    from pathlib import Path

_RecordT = TypeVar("_RecordT", bound=BaseModel)


def read_versioned(path: Path, model: type[_RecordT]) -> _RecordT | None:
    """Read a JSON file that names its schema; None where there is none.

    Raises:
        DataError: It is damaged, or of another schema.
    """
    text = read_text(path)
    if text is None:
        return None
    values = files.parse_json(text, where=str(path), finite=False)  # runs diverge
    version = values.get("schema") if isinstance(values, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema {version}; this fivefold reads schema {SCHEMA_VERSION}",
            hint="use the fivefold that wrote the run, or a newer one",
        )
    return validated(values, model, where=str(path))


def read_text(path: Path) -> str | None:
    """Read a text file; None where there is none.

    Raises:
        DataError: It cannot be read.
    """
    return files.read_text(path) if path.exists() else None


def damaged(path: Path | str, problem: str) -> DataError:
    """The error for a file that is not what it should be."""
    return DataError(
        f"{path} {problem}", hint="the file is damaged: copy the run again, or leave it out"
    )


def validated(values: object, model: type[_RecordT], *, where: str) -> _RecordT:
    """Check values against a record.

    Raises:
        DataError: They do not fit.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise damaged(where, f"does not fit: {key}: {first['msg']}") from error


def read_lines(path: Path, notes: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read a JSON-lines file as (place, object) pairs; a torn last line becomes a note.

    Raises:
        DataError: A line in the middle is damaged, or one is no event.
    """
    if not path.exists():
        return []
    lines = files.read_bytes(path).split(b"\n")
    records: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = files.parse_json(line, where=f"{path} line {number}", finite=False)
        except DataError as error:
            if number == len(lines):  # no newline after it: the writer was killed in the middle
                notes.append(f"{path.name}: the last line is torn and was left out")
                break
            raise damaged(path, f"line {number} is not JSON") from error
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            raise damaged(path, f"line {number} is not an event")
        records.append((f"{path} line {number}", record))
    return records
