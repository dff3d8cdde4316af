"""What a reader of other people's input did with it: read, assumed, left out, harmless.

Every reader of a file, table, recipe, configuration or topology that somebody else wrote returns a
:class:`Reading` beside its value. Whatever the input names (a column, key, flag, file) stands in
exactly one of the four lists, so that nothing is lost without a word. A value that the input does
not say is *assumed*, with the reason. What could turn a verdict over is marked ``decisive``: while
there is such a thing, the verdict is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Note", "Reading"]

_LOG = logging.getLogger(__name__)
_NAMES_IN_A_LINE = 6


@dataclass(frozen=True)
class Note:
    """One name of an input, or one value that it does not say.

    Attributes:
        name: The column, key, flag or file, as the input writes it.
        why: The reason; for what was read, what it became, or an empty text.
        value: The value, where one was assumed.
        decisive: Whether another answer could turn the verdict over.
    """

    name: str
    why: str = ""
    value: Any = None
    decisive: bool = False

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {self.value}"
        return f"{self.name}{value}" + (f": {self.why}" if self.why else "")


@dataclass
class Reading:
    """The account of one input, filled by its reader.

    Args:
        source: The input: a path, or what a person would call it.

    Examples:
        >>> reading = Reading("edges.csv")
        >>> reading.take("src")
        >>> reading.assume("type", "number", "all 3 rows are numbers")
        >>> reading.leave_out("comment", "no column of edges has this name")
        >>> reading.line()
        'edges.csv: read src; assumed type = number; left out comment'
    """

    source: str
    read: list[Note] = field(default_factory=list)
    assumed: list[Note] = field(default_factory=list)
    left_out: list[Note] = field(default_factory=list)
    harmless: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._placed = {note.name for note in self._notes()}

    def take(self, name: str, why: str = "") -> None:
        """Note a name whose value was read; ``why`` may say what it became."""
        self._add(self.read, Note(name, why))

    def assume(self, name: str, value: Any, why: str, *, decisive: bool = False) -> None:
        """Note a value that the input does not say, and the reason for it."""
        self._add(self.assumed, Note(name, why, value, decisive))

    def leave_out(self, name: str, why: str, *, decisive: bool = False) -> None:
        """Note a name that was not read although it may mean something."""
        self._add(self.left_out, Note(name, why, decisive=decisive))

    def ignore(self, name: str, why: str) -> None:
        """Note a name that changes nothing here, and the reason."""
        self._add(self.harmless, Note(name, why))

    def _add(self, notes: list[Note], note: Note) -> None:
        assert note.name not in self._placed, f"{self.source}: {note.name} has its place already"
        self._placed.add(note.name)
        notes.append(note)

    def names(self) -> set[str]:
        """Return all names that have their place."""
        return {note.name for note in self._notes()}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of an input's names that have no place yet, in order."""
        known = self.names()
        return [name for name in dict.fromkeys(names) if name not in known]

    def decisive(self) -> list[Note]:
        """Return what could turn a verdict over: while there is any, the verdict is unknown."""
        return [note for note in self._notes() if note.decisive]

    def _notes(self) -> list[Note]:
        return [*self.read, *self.assumed, *self.left_out, *self.harmless]

    def line(self) -> str:
        """Return the account in one line: names only, long lists cut."""
        parts = [f"{word} {_names(notes)}" for word, notes in self._lists() if notes]
        return f"{self.source}: " + ("; ".join(parts) or "nothing in it")

    def text(self) -> str:
        """Return the whole account, a line for each name."""
        lines = [self.source]
        for word, notes in self._lists():
            lines += [f"  {word}:", *(f"    {note}" for note in notes)] if notes else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the account as plain values, for ``--json``."""
        return {"source": self.source} | {
            word.replace(" ", "_"): [_plain(note) for note in notes]
            for word, notes in self._lists()
        }

    def log(self) -> None:
        """Log the account in one line."""
        _LOG.info("%s", self.line())

    def _lists(self) -> list[tuple[str, list[Note]]]:
        return [
            ("read", self.read),
            ("assumed", self.assumed),
            ("left out", self.left_out),
            ("harmless", self.harmless),
        ]


def _names(notes: list[Note]) -> str:
    shown = [
        note.name if note.value is None else f"{note.name} = {note.value}"
        for note in notes[:_NAMES_IN_A_LINE]
    ]
    more = len(notes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _plain(note: Note) -> dict[str, Any]:
    kept: dict[str, Any] = {"name": note.name}
    if note.why:
        kept["why"] = note.why
    if note.value is not None:
        plain = isinstance(note.value, bool | int | float | str | list | dict)
        kept["value"] = note.value if plain else str(note.value)
    if note.decisive:
        kept["decisive"] = True
    return kept
