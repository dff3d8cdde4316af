"""How much of its communication a rank hid, measured from what it recorded.

While at least one message is in flight, the training thread computes, waits for messages or does
something else. The share of that time in which it does not wait is the overlap fraction. Nothing
here comes from a formula for the time that communication or a step should take: only the ends of
recorded spans count. This module knows spans, not runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fivefold.report._records import RankTrace, Span

LANE_CATEGORIES = {
    "compute": "compute",
    "wait": "exposed_communication",
    "boundary": "boundary",
    "data": "data",
    "validation": "validation",
    "checkpoint": "checkpoint",
}
_Interval = tuple[float, float]


class RankOverlap(BaseModel):
    """What one rank's training thread did while messages were in flight.

    Attributes:
        rank: The rank.
        in_flight_s: Seconds in which at least one message was in flight.
        seconds: Those seconds by what the training thread did, with "other" for the rest.
        most_in_flight: Most messages in flight at one moment.

    Examples:
        >>> seconds = {"compute": 0.75, "exposed_communication": 0.25}
        >>> RankOverlap(rank=0, in_flight_s=1.0, seconds=seconds, most_in_flight=1).hidden_s
        0.75
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    in_flight_s: float
    seconds: dict[str, float]
    most_in_flight: int

    @property
    def hidden_s(self) -> float:
        """Seconds in flight that were not waited for."""
        return max(0.0, self.in_flight_s - self.seconds["exposed_communication"])

    @property
    def fraction(self) -> float:
        """The overlap fraction: hidden seconds over seconds in flight."""
        return self.hidden_s / self.in_flight_s


def measure_overlap(trace: RankTrace) -> RankOverlap | None:
    """Measure one rank's overlap; None where it recorded nothing in flight.

    Args:
        trace: The rank's spans.

    Examples:
        >>> from fivefold.report._records import RankTrace, Span
        >>> spans = (Span("flight", "a", 0.0, 4.0), Span("compute", "b", 0.0, 3.0),
        ...          Span("wait", "c", 3.0, 4.0))
        >>> measure_overlap(RankTrace(0, spans)).fraction
        0.75
    """
    flights = [span for span in trace.spans if span.lane == "flight" and span.end_s > span.start_s]
    if not flights:
        return None
    flown = _union(flights)
    in_flight_s = sum(end_s - start_s for start_s, end_s in flown)
    seconds = {
        category: _common_s(flown, _union(span for span in trace.spans if span.lane == lane))
        for lane, category in LANE_CATEGORIES.items()
    }
    seconds["other"] = max(0.0, in_flight_s - sum(seconds.values()))
    return RankOverlap(
        rank=trace.rank,
        in_flight_s=in_flight_s,
        seconds=seconds,
        most_in_flight=_most_at_once(flights),
    )


def overlap_of_ranks(ranks: Sequence[RankOverlap]) -> float | None:
    """The overlap fraction of several ranks together; None without any.

    Examples:
        >>> overlap_of_ranks([])
    """
    in_flight_s = sum(rank.in_flight_s for rank in ranks)
    return sum(rank.hidden_s for rank in ranks) / in_flight_s if in_flight_s > 0 else None


def _union(spans: Iterable[Span]) -> list[_Interval]:
    """Merge spans into intervals that are apart, in order."""
    merged: list[_Interval] = []
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def _common_s(first: Sequence[_Interval], second: Sequence[_Interval]) -> float:
    """Seconds that two lists of separate intervals have in common."""
    total_s = 0.0
    i = j = 0
    while i < len(first) and j < len(second):
        start_s = max(first[i][0], second[j][0])
        end_s = min(first[i][1], second[j][1])
        total_s += max(0.0, end_s - start_s)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total_s


def _most_at_once(spans: Iterable[Span]) -> int:
    ends = [(span.end_s, -1) for span in spans]
    moments = sorted([*((span.start_s, 1) for span in spans), *ends])
    most = now = 0
    for _, change in moments:  # an end sorts before a start of the same moment
        now += change
        most = max(most, now)
    return most
