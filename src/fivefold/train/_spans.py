"""Where each second of a rank goes: spans on lanes, their sums, and the rank's own file.

Seconds are of ``time.perf_counter``; the first line of the file ties them to the wall clock, so
that a reader can put all ranks on one time axis. Lanes that the training thread occupies exclude
one another, so their sums and the rest ("other") make up the wall time. The ``in_flight`` lane runs
beside them. This module knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.runs.folder import cannot_write

# Lane in the rank's file -> category in result.json; the order is that of the report.
CATEGORIES = {
    "compute": "compute",
    "wait": "exposed_communication",
    "boundary": "boundary",
    "data": "data",
    "checkpoint": "checkpoint",
    "validation": "validation",
}
# A file of 200,000 spans is about 25 MB; a viewer shows no more, and a long run must not fill
# the disk with them. The sums stay exact.
_MAX_SPANS_IN_FILE = 200_000


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of time on one lane."""

    lane: str  # "compute", "wait", "boundary", "data", "checkpoint", "validation" or "in_flight"
    name: str  # what happened
    start_s: float  # begin, in seconds of ``time.perf_counter``
    end_s: float  # end, on the same clock
    # More numbers for the file, such as an all-reduce's round and bytes.
    details: Mapping[str, int] = field(default_factory=dict)


def subtract(start_s: float, end_s: float, *, holes: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the parts of an interval that no hole covers, in order."""
    pieces = []
    at_s = start_s
    for hole in sorted(holes, key=lambda span: span.start_s):
        if hole.start_s > at_s:
            pieces.append((at_s, min(hole.start_s, end_s)))
        at_s = max(at_s, hole.end_s)
    if at_s < end_s:
        pieces.append((at_s, end_s))
    return pieces


def union_s(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total_s, until_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        total_s += max(0.0, span.end_s - max(span.start_s, until_s))
        until_s = max(until_s, span.end_s)
    return total_s


class SpanRecorder:
    """Collects the spans of one rank, keeps their sums and writes them as JSON lines."""

    def __init__(
        self,
        path: Path,
        *,
        seconds: dict[str, float] | None = None,
        waits: dict[str, float] | None = None,
        resumed: bool = False,
    ) -> None:
        self._path = path
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if resumed else "w", encoding="utf-8")
        self._written = 0
        self._dropped = 0
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.seconds.update(seconds or {})
        self.waits = dict(waits or {})
        self._line({"event": "clock", "unix_s": time.time(), "perf_s": time.perf_counter()})

    @contextlib.contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Time a block; it is recorded also when the block raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.add([Span(lane=lane, name=name, start_s=start_s, end_s=end_s)])

    def add(self, spans: Iterable[Span]) -> None:
        """Record spans that were timed elsewhere."""
        for span in spans:
            if span.lane in self.seconds:
                self.seconds[span.lane] += span.end_s - span.start_s
            if span.lane == "wait":
                cause = span.name.partition(" round ")[0]
                self.waits[cause] = self.waits.get(cause, 0.0) + span.end_s - span.start_s
            if self._written >= _MAX_SPANS_IN_FILE:
                self._dropped += 1
                continue
            self._written += 1
            line = {"event": "span", "lane": span.lane, "name": span.name}
            self._line(line | {"start_s": span.start_s, "end_s": span.end_s, **span.details})

    def categories(self, wall_s: float) -> dict[str, float]:
        """Return the seconds per category; with ``other`` they sum to the wall time."""
        named = {category: self.seconds[lane] for lane, category in CATEGORIES.items()}
        return named | {"other": wall_s - sum(named.values())}

    def flush(self) -> None:
        """Hand buffered lines to the operating system; nothing to do after ``close()``."""
        if not self._file.closed:
            with self._writing():
                self._file.flush()

    def close(self, **last: Any) -> None:
        """Write the closing line and close the file."""
        if self._dropped:
            last["spans_dropped"] = self._dropped
        self._line({"event": "rank_end", **last})
        with self._writing():
            self._file.close()

    def _line(self, record: dict[str, Any]) -> None:
        with self._writing():
            self._file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self._path, error) from error
