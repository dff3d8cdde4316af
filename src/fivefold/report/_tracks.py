"""Spreads flights that overlap over tracks, so that each can be drawn as a box of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fivefold.report._records import Span


def separate_fragments(flights: Iterable[Span]) -> dict[int, list[Span]]:
    """Sort flights by the fragment of the model that they carried, 0 where none is recorded.

    Examples:
        >>> from fivefold.report._records import Span
        >>> spans = [Span("flight", "a", 0, 1, fragment=1), Span("flight", "b", 1, 2, fragment=0)]
        >>> {fragment: len(found) for fragment, found in separate_fragments(spans).items()}
        {0: 1, 1: 1}
    """
    flights = list(flights)
    numbers = sorted({flight.fragment or 0 for flight in flights})
    return {n: [flight for flight in flights if (flight.fragment or 0) == n] for n in numbers}


def separate_tracks(spans: Sequence[Span], *, touching_s: float = 0.0) -> list[list[Span]]:
    """Spread spans over the fewest tracks on which no two overlap.

    Args:
        spans: The spans, in any order.
        touching_s: Overlaps shorter than this count as none.

    Returns:
        The tracks, each in the order of time.

    Examples:
        >>> from fivefold.report._records import Span
        >>> times = {"a": (0, 2), "b": (1, 3), "c": (2, 4)}
        >>> spans = [Span("flight", name, *time) for name, time in times.items()]
        >>> [[span.name for span in track] for track in separate_tracks(spans)]
        [['a', 'c'], ['b']]
    """
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        free = (track for track in tracks if track[-1].end_s <= span.start_s + touching_s)
        track = next(free, None)
        if track is None:
            tracks.append([span])
        else:
            track.append(span)
    return tracks
