"""The rounds of a run as they were: one entry per message launched, from one rank's spans.

How many local steps a round had is counted, not read from the configuration: steps that began
between two launches of the same fragment. So it is right also where tau was chosen while
training, where ranks took uneven numbers of steps, and for the partial round at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.report._records import RankTrace, Span


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """One message of one rank.

    Attributes:
        round: Round whose work it carried; None where none was recorded (DDP's buckets).
        launched_s: When it was launched, in the spans' own time.
        step: Steps that had begun by then.
        local_steps: Steps since the last launch of this fragment, or since the start.
        flight_s: Seconds in flight.
        waited_s: Seconds in which training stood still for it.
        fragment: Which part of the model it was; 0 where the model is sent whole.
        sent_bytes: Bytes that the rank sent for it; None where they were not recorded.
    """

    round: int | None
    launched_s: float
    step: int
    local_steps: int
    flight_s: float
    waited_s: float
    fragment: int
    sent_bytes: int | None


def round_points(trace: RankTrace) -> list[RoundPoint]:
    """List a rank's messages in the order in which they were launched.

    Args:
        trace: The rank's spans.

    Examples:
        >>> from fivefold.report._records import RankTrace, Span
        >>> spans = [Span("compute", f"step {n}", n, n + 0.9) for n in range(4)]
        >>> spans += [Span("flight", "a", 1.95, 2.5), Span("flight", "b", 3.95, 4.5)]
        >>> [point.local_steps for point in round_points(RankTrace(0, tuple(spans)))]
        [2, 2]
    """
    starts = _step_starts(trace.spans)
    flights = sorted((s for s in trace.spans if s.lane == "flight"), key=lambda s: s.start_s)
    waited = _waited_s(flights, trace.spans)
    seen: dict[int, int] = {}  # fragment -> steps that had begun at its last launch
    points = []
    for span, waited_s in zip(flights, waited, strict=True):
        fragment = span.fragment or 0
        begun = bisect_left(starts, span.start_s)
        points.append(
            RoundPoint(
                round=span.round,
                launched_s=span.start_s,
                step=begun,
                local_steps=begun - seen.get(fragment, 0),
                flight_s=span.end_s - span.start_s,
                waited_s=waited_s,
                fragment=fragment,
                sent_bytes=span.sent_bytes,
            )
        )
        seen[fragment] = begun
    return points


def _step_starts(spans: Sequence[Span]) -> list[float]:
    """When each step began. A step may be in pieces; a resumed run may do one twice."""
    starts = []
    name = None
    for span in spans:
        if span.lane == "compute" and span.name != name:
            name = span.name
            starts.append(span.start_s)
    return sorted(starts)


def _waited_s(flights: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Seconds waited for each flight: a wait has its flight's name and ends after its launch."""
    last: dict[str, int] = {}  # name -> number of the last flight of that name launched by now
    waited = [0.0] * len(flights)
    waits = [span for span in spans if span.lane == "wait"]
    events = [(flight.start_s, 0, n) for n, flight in enumerate(flights)]
    events += [(wait.end_s, 1, n) for n, wait in enumerate(waits)]
    for _, is_wait, number in sorted(events):
        if not is_wait:
            last[flights[number].name] = number
        elif waits[number].name in last:
            wait = waits[number]
            waited[last[wait.name]] += wait.end_s - wait.start_s
    return waited
