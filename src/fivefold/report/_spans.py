"""What a rank's recorded spans say: the overlap of its messages, its rounds.

Nothing here comes from a formula for the time that communication or a step should take, nor from
the configuration: only the ends of recorded spans count. So it is right also where tau was chosen
while training, where ranks took uneven numbers of steps, and for the partial round at the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pydantic import BaseModel, ConfigDict

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
    """Time of one rank's training thread while at least one message was in flight.

    Its ``seconds`` are by what the training thread did, with "other" for the rest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    in_flight_s: float
    seconds: dict[str, float]
    most_in_flight: int

    @property
    def hidden_s(self) -> float:
        """Return seconds in flight that were not waited for."""
        return max(0.0, self.in_flight_s - self.seconds["exposed_communication"])

    @property
    def fraction(self) -> float:
        """Return the overlap fraction: hidden seconds over seconds in flight."""
        return self.hidden_s / self.in_flight_s


def measure_overlap(trace: RankTrace) -> RankOverlap | None:
    """Measure one rank's overlap; None where it recorded nothing in flight."""
    messages = [
        span for span in trace.spans if span.lane == "in_flight" and span.end_s > span.start_s
    ]
    if not messages:
        return None
    flown = _union(messages)
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
        most_in_flight=max(number for _, number in at_once(messages)),
    )


def overlap_of_ranks(ranks: Sequence[RankOverlap]) -> float | None:
    """Return the overlap fraction of several ranks together; None without any."""
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
    """Return seconds that two lists of separate intervals have in common."""
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


def at_once(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """Return from when on how many spans are open; an end comes before a start of its moment."""
    changes = sorted([(one.end_s, -1) for one in spans] + [(one.start_s, 1) for one in spans])
    numbers = accumulate(change for _, change in changes)
    return [(at_s, number) for (at_s, _), number in zip(changes, numbers, strict=True)]


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """One message of one rank."""

    round: int | None  # whose work it carried; None where none was recorded (DDP's buckets)
    launched_s: float
    step: int  # that had begun by then
    local_steps: int  # since the last launch of this fragment, or since the start
    in_flight_s: float
    waited_s: float  # in which training stood still for it
    fragment: int  # of the model; 0 where it is sent whole
    sent_bytes: int | None


def round_points(trace: RankTrace) -> list[RoundPoint]:
    """List a rank's messages in the order in which they were launched."""
    starts = _step_starts(trace.spans)
    messages = sorted((s for s in trace.spans if s.lane == "in_flight"), key=lambda s: s.start_s)
    waited = _waited_s(messages, trace.spans)
    seen: dict[int, int] = {}  # fragment -> steps that had begun at its last launch
    points = []
    for span, waited_s in zip(messages, waited, strict=True):
        fragment = span.fragment or 0
        begun = bisect_left(starts, span.start_s)
        points.append(
            RoundPoint(
                round=span.round,
                launched_s=span.start_s,
                step=begun,
                local_steps=begun - seen.get(fragment, 0),
                in_flight_s=span.end_s - span.start_s,
                waited_s=waited_s,
                fragment=fragment,
                sent_bytes=span.sent_bytes,
            )
        )
        seen[fragment] = begun
    return points


def _step_starts(spans: Sequence[Span]) -> list[float]:
    """Return when each step began. A step may be in pieces; a resumed run may do one twice."""
    starts = []
    name = None
    for span in spans:
        if span.lane == "compute" and span.name != name:
            name = span.name
            starts.append(span.start_s)
    return sorted(starts)


def _waited_s(messages: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Return the seconds waited for each message: a wait has its message's name and ends later."""
    last: dict[str, int] = {}  # name -> number of the last message of that name launched by now
    waited = [0.0] * len(messages)
    waits = [span for span in spans if span.lane == "wait"]
    events = [(message.start_s, 0, n) for n, message in enumerate(messages)]
    events += [(wait.end_s, 1, n) for n, wait in enumerate(waits)]
    for _, is_wait, number in sorted(events):
        if not is_wait:
            last[messages[number].name] = number
        elif waits[number].name in last:
            wait = waits[number]
            waited[last[wait.name]] += wait.end_s - wait.start_s
    return waited


def separate_fragments(messages: Iterable[Span]) -> dict[int, list[Span]]:
    """Sort messages by the fragment of the model that they carried, 0 where none is recorded."""
    found: dict[int, list[Span]] = {}
    for message in messages:
        found.setdefault(message.fragment or 0, []).append(message)
    return dict(sorted(found.items()))
