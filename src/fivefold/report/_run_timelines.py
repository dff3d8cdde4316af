"""The zoomed timelines of runs: which stretch of each to show, and what lies in it.

All runs are drawn to one time scale, so that widths compare. The stretch is long enough for a few
rounds of the slowest cycle, lies near the middle of the run, and avoids validation and
checkpoints.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from fivefold.report._records import RankTrace, Run, Span
from fivefold.report._spans import separate_fragments
from fivefold.report.format import CATEGORY_NAMES
from fivefold.report.page import LaneSpan, PageSection, Timeline, TimelineLane
from fivefold.units import format_bytes, format_duration_s

_MOST_RANKS = 4
_MOST_RANKS_OF_MANY_RUNS = 2
_MANY_RUNS = 4
_CYCLES = 2.5
_MOST_CANDIDATES = 200
_ROWS = (("training", None), ("in flight", "in_flight"), ("waiting", "wait"))
_TRAINING_LANES = ("compute", "data", "boundary", "validation", "checkpoint")
_KINDS = {"wait": "exposed_communication"}
_TOUCHING_S = 1e-4  # spans of one thread may seem to overlap by the rounding of two clocks
_HOW = (
    " from the middle of each run, all to the same time scale. For each rank the upper lane is "
    "what its training thread did, the middle lane which messages were in flight on the network, "
    "and the lower lane when training stood still for them. Communication is hidden where a light "
    "blue box lies under blue computation with nothing orange beneath. The whole run is in the "
    "file timeline.json of each run's folder: open it in Perfetto (ui.perfetto.dev) or in "
    "chrome://tracing."
)


def timeline_section(runs: Sequence[Run]) -> PageSection | None:
    """Return a timeline per run that recorded one, all to one time scale; None without any."""
    drawn = [run for run in runs if any(rank.spans for rank in run.ranks)]
    cycles = [cycle for run in drawn if (cycle := _cycle_s(run)) is not None]
    if not cycles:
        return None
    window_s = _CYCLES * max(cycles)
    most_ranks = _MOST_RANKS if len(drawn) < _MANY_RUNS else _MOST_RANKS_OF_MANY_RUNS
    return PageSection(
        key="timeline",
        heading="Timeline of some rounds",
        how=format_duration_s(window_s) + _HOW,
        parts=tuple(
            _timeline(run, window_s, most_ranks=most_ranks, first=run is drawn[0]) for run in drawn
        ),
    )


def _cycle_s(run: Run) -> float | None:
    """Return seconds between two rounds; between two steps where the method has no rounds."""
    starts = _cycle_starts(run)
    gaps = [after - before for before, after in pairwise(starts) if after > before]
    return statistics.median(gaps) if gaps else None


def _cycle_starts(run: Run) -> list[float]:
    spans = next((rank.spans for rank in run.ranks if rank.spans), ())
    if run.manifest.method not in ("none", "ddp"):
        messages = separate_fragments(span for span in spans if span.lane == "in_flight")
        launches = [sorted(span.start_s for span in found) for found in messages.values()]
        if launches and len(launches[0]) > 1:
            return launches[0]
    first: dict[str, float] = {}
    for span in spans:
        if span.lane == "compute":
            first.setdefault(span.name, span.start_s)
    return sorted(first.values())


def _window_start(run: Run, window_s: float) -> float:
    """A start of a cycle near the middle whose window holds least validation and checkpoint."""
    starts = _cycle_starts(run)
    spans = next(rank.spans for rank in run.ranks if rank.spans)
    if not starts:
        return min(span.start_s for span in spans)
    last_s = max(span.end_s for span in spans)
    whole = [start for start in starts if start + window_s <= last_s] or starts[:1]
    middle_s = (starts[0] + last_s - window_s) / 2
    near = sorted(whole, key=lambda start: abs(start - middle_s))[:_MOST_CANDIDATES]
    pauses = [span for span in spans if span.lane in ("validation", "checkpoint")]

    def badness(start: float) -> tuple[float, float]:
        paused = sum(_overlap_s(span, start, start + window_s) for span in pauses)
        return (round(paused, 6), abs(start - middle_s))

    return min(near, key=badness)


def _overlap_s(span: Span, start_s: float, end_s: float) -> float:
    return max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))


def _timeline(run: Run, window_s: float, *, most_ranks: int, first: bool) -> Timeline:
    start_s = _window_start(run, window_s)
    ranks = [rank for rank in run.ranks if rank.spans]
    lanes = [
        _lane(rank, text, lane, start_s, start_s + window_s)
        for rank in ranks[:most_ranks]
        for text, lane in _ROWS
    ]
    hidden = len(ranks) - most_ranks
    kinds = [(kind, name) for kind, name in CATEGORY_NAMES.items() if kind != "other"]
    return Timeline(
        lanes=tuple(lanes),
        start_s=start_s,
        end_s=start_s + window_s,
        kinds=(*kinds, ("in_flight", "in flight")) if first else (),
        heading=run.label,
        caption=f"{hidden} more ranks are not drawn." if hidden > 0 else "",
        touching_s=_TOUCHING_S,
    )


def _lane(
    rank: RankTrace, text: str, lane: str | None, start_s: float, end_s: float
) -> TimelineLane:
    lanes = (lane,) if lane else _TRAINING_LANES
    spans = [
        LaneSpan(
            start_s=span.start_s,
            end_s=span.end_s,
            kind=_KINDS.get(span.lane, span.lane),
            title=_title(span),
            label=span.name.removeprefix("all-reduce ") if lane == "in_flight" else "",
            group=(span.fragment or 0) if lane == "in_flight" else 0,
        )
        for span in rank.spans
        if span.lane in lanes and _overlap_s(span, start_s, end_s) > 0
    ]
    group = "" if lane else f"rank {rank.rank}"
    return TimelineLane(name=text, group=group, spans=tuple(spans))


def _title(span: Span) -> str:
    sent = "" if span.sent_bytes is None else f", {format_bytes(span.sent_bytes)} sent"
    return f"{span.name}: {span.lane}{sent}"
