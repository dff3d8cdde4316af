"""What the runs of a report amount to: pure functions from runs to numbers.

Rates leave out validation and checkpoints (their cadence is a matter of configuration and has
nothing to do with how gradients travel), so that methods are compared on the training step alone.
Every ratio compares with one reference run per run: the DDP run, or the run with communication
switched off, that shares most of its settings. What cannot be computed is None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from fivefold.report._records import RankTrace, Record, Run, RunResult, Span, Status
from fivefold.report._spans import LANE_CATEGORIES, RankOverlap, measure_overlap, overlap_of_ranks
from fivefold.report.format import CATEGORY_NAMES, format_count, format_percent, format_ratio
from fivefold.units import format_duration_s

_NOT_TRAINING = ("validation", "checkpoint")
_LAST_WAIT = "last all-reduce"  # the trainer's name of waits after the last step


class RunSummary(BaseModel):
    """The figures of one run, in seconds, bytes and tokens of all ranks; None where not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    label: str  # the method for people, ``method`` for programs
    method: str
    is_plain_ddp: bool = False  # in its own order: what the others are compared with
    status: Status
    steps: int = 0  # of each rank, so far
    tokens: int = 0
    wall_s: float = 0.0
    tokens_per_s: float | None = None  # of training: without validation and checkpoints
    fraction_of_compute_only: float | None = None  # of the rate without communication
    # That fraction where other work disturbed one of the two runs, so that it says nothing.
    disturbed_fraction: float | None = None
    waited_for_cpu: float | None = None  # share of the time, ready and without a processor
    ddp: str | None = None  # name of the DDP run that this one is compared with
    speed_ratio_to_ddp: float | None = None
    seconds: dict[str, float] | None = None  # rank 0's wall time by category
    waits: dict[str, float] | None = None  # rank 0's by cause, the longest first
    in_flight_s: float | None = None  # in which a collective was under way
    # In which training stood still for one; ``seconds`` also counts waits for other messages.
    exposed_wait_s: float | None = None
    # Share of the time in flight that was not waited for, of all ranks that recorded a timeline;
    # rank 0's own sums where none did.
    overlap_fraction: float | None = None
    overlap: tuple[RankOverlap, ...] = ()  # the same rank by rank, measured from the timeline
    payload_bytes_per_step: float | None = None  # that one rank handed to all-reduce
    message_bytes_per_step: float | None = None  # that rank 0 sent for it, after any codec
    # What any all-reduce of that payload must send per rank without a codec; None where ranks
    # share a link.
    least_link_bytes_per_step: float | None = None
    sent_bytes_per_step: float | None = None  # that left rank 0's interface
    received_bytes_per_step: float | None = None
    bits_per_byte: float | None = None  # of the final validation
    # Of validation when the first of the runs that communicate ended.
    bits_per_byte_at_equal_time: float | None = None
    # Until validation was as good as the DDP run's final one; infinity where it never was.
    time_to_ddp_s: float | None = None
    time_to_ddp_ratio: float | None = None  # how many times sooner than the DDP run that was
    notes: tuple[str, ...] = ()

    @property
    def after_last_step_s(self) -> float:
        """Seconds of waiting after the last step, for all replicas to become equal."""
        return (self.waits or {}).get(_LAST_WAIT, 0.0)

    @property
    def step_seconds(self) -> dict[str, float] | None:
        """Return the mean seconds of a step by category; None where nothing is recorded."""
        if self.seconds is None or not self.steps:
            return None
        once = {"exposed_communication": self.after_last_step_s}
        return {k: (v - once.get(k, 0.0)) / self.steps for k, v in self.seconds.items()}

    @property
    def exposed_fraction(self) -> float | None:
        """Return the share of the wall time in which training stood still, for whatever message."""
        waited_s = self.exposed_wait_s
        if self.seconds is not None:
            waited_s = self.seconds["exposed_communication"]
        return waited_s / self.wall_s if waited_s is not None and self.wall_s > 0 else None


def summarise(runs: Sequence[Run]) -> list[RunSummary]:
    """Compute the figures of each run and compare it with its baselines."""
    pairs = [(run, _summarise_one(run)) for run in runs]
    return [_compare(run, summary, pairs) for run, summary in pairs]


def validation_curve(run: Run) -> list[tuple[float, float]]:
    """Return wall seconds and bits per byte of each finite validation, the final one included."""
    points = [(point.wall_s, point.bits_per_byte) for point in run.metrics.validation]
    last_step = run.metrics.validation[-1].step if run.metrics.validation else -1
    result = run.result
    if result is not None and result.bits_per_byte is not None and result.steps > last_step:
        points.append((result.wall_s, result.bits_per_byte))
    return sorted(point for point in points if all(map(math.isfinite, point)))


def final_bits_per_byte(run: Run) -> float | None:
    """Return the run's final validation: of the result, else the last one there is."""
    if run.result is not None and run.result.bits_per_byte is not None:
        return run.result.bits_per_byte
    return run.metrics.validation[-1].bits_per_byte if run.metrics.validation else None


def time_to_value(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when a falling curve first reaches a value, by linear interpolation."""
    if points and points[0][1] <= target:
        return points[0][0]
    for (start_s, high), (end_s, low) in pairwise(points):
        if low <= target:
            return start_s + (end_s - start_s) * (high - target) / (high - low)
    return None


def value_at_time(points: Sequence[tuple[float, float]], at_s: float) -> float | None:
    """Return a curve's value at a time, by linear interpolation; None outside of it.

    Examples:
        >>> value_at_time([(0.0, 4.0), (10.0, 2.0)], 5.0)
        3.0
    """
    for (start_s, high), (end_s, low) in pairwise(points):
        if start_s <= at_s <= end_s:
            share = (at_s - start_s) / (end_s - start_s) if end_s > start_s else 1.0
            return high + share * (low - high)
    return points[0][1] if points and points[0][0] == at_s else None


def _summarise_one(run: Run) -> RunSummary:
    steps, tokens, wall_s = _progress(run)
    result = run.result
    rank0 = run.ranks[0] if run.ranks and run.ranks[0].rank == 0 else RankTrace(0)
    lanes = _seconds_by((span.lane, span) for span in rank0.spans)
    seconds = _seconds(result, lanes)
    communication = None if result is None else result.communication
    in_flight_s, exposed_s = lanes.get("in_flight", 0.0), lanes.get("wait", 0.0)
    if communication is not None:
        in_flight_s, exposed_s = communication.in_flight_s, communication.exposed_wait_s
    communicated = in_flight_s or (communication is not None and communication.collectives)
    overlap = tuple(found for rank in run.ranks if (found := measure_overlap(rank)) is not None)
    overlap_fraction = overlap_of_ranks(overlap)
    if overlap_fraction is None and communication is not None:
        overlap_fraction = communication.overlap_fraction
    training_s = wall_s - sum((seconds or {}).get(name, 0.0) for name in _NOT_TRAINING)
    link = rank0.link_bytes if result is None or result.link_bytes is None else result.link_bytes
    process = (result.process if result is not None else None) or {}

    def per_step(of: Record | None, name: str) -> float | None:
        size_bytes = None if of is None else getattr(of, name)
        return size_bytes / steps if size_bytes is not None and steps else None

    payload = per_step(communication, "payload_bytes")
    ranks, hosts = run.manifest.world_size, run.manifest.hosts
    least = 2 * (ranks - 1) / ranks * payload if payload is not None and hosts == ranks else None
    return RunSummary(
        name=run.name,
        label=run.label,
        method=run.manifest.method,
        is_plain_ddp=run.is_plain_ddp,
        status=run.status,
        steps=steps,
        tokens=tokens,
        wall_s=wall_s,
        tokens_per_s=tokens / training_s if tokens and training_s > 0 else None,
        seconds=seconds,
        waits=_waits(result, rank0),
        waited_for_cpu=process.get("waited_for_cpu"),
        in_flight_s=in_flight_s if communicated else None,
        exposed_wait_s=exposed_s if communicated else None,
        overlap_fraction=overlap_fraction if in_flight_s else None,
        overlap=overlap,
        payload_bytes_per_step=payload,
        message_bytes_per_step=per_step(communication, "sent_bytes"),
        least_link_bytes_per_step=least,
        sent_bytes_per_step=per_step(link, "sent"),
        received_bytes_per_step=per_step(link, "received"),
        bits_per_byte=final_bits_per_byte(run),
        notes=run.notes,
    )


def _progress(run: Run) -> tuple[int, int, float]:
    """Return steps, tokens and wall seconds: of the result, else of the furthest line."""
    if run.result is not None:
        return run.result.steps, run.result.tokens, run.result.wall_s
    metrics = run.metrics
    points = (*metrics.train, *metrics.validation, *([metrics.end] if metrics.end else []))
    return max(((one.step, one.tokens, one.wall_s) for one in points), default=(0, 0, 0.0))


def _seconds_by(spans: Iterable[tuple[str, Span]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, span in spans:
        found[key] = found.get(key, 0.0) + (span.end_s - span.start_s)
    return found


def _seconds(result: RunResult | None, lanes: dict[str, float]) -> dict[str, float] | None:
    """Return rank 0's seconds by category: of the result, else of its spans."""
    found = {category: lanes.get(lane, 0.0) for lane, category in LANE_CATEGORIES.items()}
    if result is not None and result.seconds:
        found = result.seconds
    elif not lanes:
        return None
    return {category: found.get(category, 0.0) for category in CATEGORY_NAMES}


def _waits(result: RunResult | None, rank0: RankTrace) -> dict[str, float] | None:
    """Return rank 0's seconds of waiting by cause: of the result, else of its spans."""
    if result is not None and result.waits:
        waits = result.waits
    elif rank0.spans:
        spans = (span for span in rank0.spans if span.lane == "wait")
        waits = _seconds_by((span.name.partition(" round ")[0], span) for span in spans)
    else:
        return None
    return dict(sorted(waits.items(), key=lambda item: -item[1]))


_Pair = tuple[Run, RunSummary]


def _compare(run: Run, summary: RunSummary, pairs: Sequence[_Pair]) -> RunSummary:
    found: dict[str, float | str | None] = {}
    # Ranks that never communicate train replicas of their own: no curve to compare.
    learns = summary.method != "none"
    ended_s = [
        one.wall_s
        for _, one in pairs
        if one.method != "none" and one.status == "finished" and one.bits_per_byte is not None
    ]
    if len(ended_s) > 1 and learns:
        found["bits_per_byte_at_equal_time"] = value_at_time(validation_curve(run), min(ended_s))
    silent = _nearest(run, [pair for pair in pairs if pair[1].method == "none"])
    if silent is not None:
        share = _ratio(summary.tokens_per_s, silent[1].tokens_per_s)
        odd = share is not None and share > 1 + _FASTER_BY_CHANCE
        disturbed = odd or _differently_busy(summary, silent[1])
        found["disturbed_fraction" if disturbed else "fraction_of_compute_only"] = share
    plain = _nearest(run, [pair for pair in pairs if pair[1].is_plain_ddp])
    if plain is not None:
        found["ddp"] = plain[1].name
        found["speed_ratio_to_ddp"] = _ratio(summary.tokens_per_s, plain[1].tokens_per_s)
        target = plain[1].bits_per_byte
        if target is not None and math.isfinite(target) and learns:
            reached_s = time_to_value(validation_curve(run), target)
            if reached_s is not None:
                ddp_s = time_to_value(validation_curve(plain[0]), target)
                found["time_to_ddp_ratio"] = _ratio(ddp_s, reached_s)
            elif summary.bits_per_byte is not None:
                reached_s = math.inf
            found["time_to_ddp_s"] = reached_s
    return summary.model_copy(update=found)


def _differently_busy(run: RunSummary, other: RunSummary) -> bool:
    """Return whether other work took much more of one run's time than of the other's."""
    if run.waited_for_cpu is None or other.waited_for_cpu is None:
        return False
    return abs(run.waited_for_cpu - other.waited_for_cpu) > _BUSIER


def _nearest(run: Run, among: Sequence[_Pair]) -> _Pair | None:
    """Return which of some runs shares most with the given one, the first where several do."""

    def shared(pair: _Pair) -> int:
        keys = ("world_size", "num_parameters", "lab", "seed")
        return sum(getattr(run.manifest, key) == getattr(pair[0].manifest, key) for key in keys)

    return max(
        (pair for pair in among if pair[1].tokens_per_s is not None), key=shared, default=None
    )


def _ratio(mine: float | None, reference: float | None) -> float | None:
    return mine / reference if mine is not None and reference else None


_BASELINES = ("none", "ddp")
_SAME = 0.02
_FASTER_BY_CHANCE = 0.05  # nothing is faster for communicating
_BUSIER = 0.15
_MUCH_MISSED = 0.01  # of the bytes of data.path
_KEYS_THAT_MUST_AGREE = ("world_size", "num_parameters", "lab", "machine", "torch")


def headline(summaries: Sequence[RunSummary]) -> str:
    """Say in one or two sentences what the runs show.

    The subject is the fastest CO2 run, else the fastest run of another local-update method, else
    the first run that trained.
    """
    subject = _subject(summaries)
    if subject is None:
        return "There is nothing to report yet."
    ddp = next((run for run in summaries if run.name == subject.ddp), None)
    if ddp is None or ddp is subject or subject.speed_ratio_to_ddp is None:
        return _alone(subject)
    sentence = f"{subject.label} {_speed(subject.speed_ratio_to_ddp)}, {_rates(subject, ddp)}"
    return f"{sentence}{_hidden(subject)}. {_learning(subject, ddp)}".strip()


def caveats(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> list[str]:
    """Say what limits the comparison: unfinished runs, unequal conditions, an unshaped link."""
    found = []
    unshaped = [lab for run in runs if (lab := run.manifest.lab) is not None and not lab.shaped]
    if unshaped:
        known = "; ".join(sorted({lab.reason or "no reason recorded" for lab in unshaped}))
        found.append(
            f"Unshaped: {known}. The ranks talked over this machine's own network, so the figures "
            "say nothing about a slow link."
        )
    unfinished = [run.label for run in summaries if run.status != "finished"]
    if unfinished:
        found.append(f"Not finished: {', '.join(unfinished)}. Figures are of what there is so far.")
    found += _disturbances(summaries)
    for run in runs:
        data = run.manifest.data
        if data is not None and data.missed_share > _MUCH_MISSED:
            share = format_percent(data.missed_share)
            found.append(f"{run.label} did not read {share} of its data: {data.said}.")
    differing = [key for key in _KEYS_THAT_MUST_AGREE if _differs(runs, key)]
    if differing:
        names = ", ".join(key.replace("_", " ") for key in differing)
        found.append(f"The runs differ in {names}: compare them with care.")
    tokens = {run.tokens for run in summaries if run.method != "none" and run.status == "finished"}
    if len(tokens) > 1:
        found.append("The runs did not train on the same number of tokens.")
    return found


def _disturbances(summaries: Sequence[RunSummary]) -> list[str]:
    """Say which ratios are of runs that other work slowed down unequally."""
    found = []
    for run in summaries:
        if run.disturbed_fraction is not None:
            found.append(
                f"Disturbed: {run.label} came to {format_percent(run.disturbed_fraction)} of the "
                f"speed without communication{_busy([run, *_named(summaries, 'none')])}. Other "
                "work on the machine slowed one of the two runs: repeat them on an idle one."
            )
        ddp = next((other for other in summaries if other.name == run.ddp), None)
        if run.speed_ratio_to_ddp is not None and ddp is not None and _differently_busy(run, ddp):
            found.append(
                f"Disturbed: other work slowed {run.label} and {ddp.label} unequally"
                f"{_busy([run, ddp])}; their ratio says little."
            )
    return found


def _named(summaries: Sequence[RunSummary], method: str) -> list[RunSummary]:
    return [run for run in summaries if run.method == method][:1]


def _busy(runs: Sequence[RunSummary]) -> str:
    told = [
        f"{run.label} {format_percent(run.waited_for_cpu)}"
        for run in runs
        if run.waited_for_cpu is not None
    ]
    return f" (ready and without a processor: {', '.join(told)} of the time)" if told else ""


def _differs(runs: Sequence[Run], key: str) -> bool:
    values = [getattr(run.manifest, key) for run in runs]
    if key == "lab":  # counted hosts, rate, delay: whether it was shaped is said on its own
        values = [
            value and (value.hosts, value.rate_bytes_per_s, value.delay_s) for value in values
        ]
    return any(value != values[0] for value in values[1:])


def _subject(summaries: Sequence[RunSummary]) -> RunSummary | None:
    trained = [run for run in summaries if run.tokens_per_s]
    tried = [run for run in trained if run.method != "none" and not run.is_plain_ddp]
    if tried:
        return max(tried, key=importance)
    return next((run for run in trained if run.is_plain_ddp), trained[0] if trained else None)


def importance(run: RunSummary) -> tuple[bool, bool, float]:
    """Return what a run is chosen by where a page speaks of one: CO2, local updates, its rate."""
    return run.method == "co2", run.method not in _BASELINES, run.tokens_per_s or 0.0


def _speed(ratio: float) -> str:
    if ratio > 1 + _SAME:
        return f"trained {format_ratio(ratio)} as fast as DDP"
    if ratio < 1 - _SAME:
        return f"was slower than DDP, at {format_ratio(ratio)} its speed"
    return "was as fast as DDP"


def _rates(subject: RunSummary, ddp: RunSummary) -> str:
    rates = (
        f"{format_count(subject.tokens_per_s)} against {format_count(ddp.tokens_per_s)} tokens/s"
    )
    if subject.disturbed_fraction is not None:
        return f"{rates} (the speed without communication was disturbed)"
    if subject.fraction_of_compute_only is None:
        return rates
    share = format_percent(subject.fraction_of_compute_only)
    return f"{rates} ({share} of the speed without any communication)"


def _hidden(run: RunSummary) -> str:
    if run.overlap_fraction is None:
        return ""
    hidden = format_percent(run.overlap_fraction)
    return f", and hid {hidden} of its communication behind computation"


def _learning(subject: RunSummary, ddp: RunSummary) -> str:
    if subject.bits_per_byte is None or ddp.bits_per_byte is None:
        return ""
    if "unfinished" in (subject.status, ddp.status):
        so_far = f"{subject.bits_per_byte:.3f} bits per byte, DDP at {ddp.bits_per_byte:.3f}"
        return f"So far it is at {so_far}."
    ends = f"it ended at {subject.bits_per_byte:.3f} bits per byte, DDP at {ddp.bits_per_byte:.3f}"
    if subject.time_to_ddp_s is None:  # DDP's own is no number
        return f"{ends[0].upper()}{ends[1:]}."
    if subject.time_to_ddp_s == math.inf:
        return f"It did not reach DDP's final loss: {ends}."
    reached = f"It reached DDP's final loss after {format_duration_s(subject.time_to_ddp_s)}"
    ratio = subject.time_to_ddp_ratio
    if ratio is None:
        return f"{reached}; {ends}."
    pace = f"{ratio:.2f} times sooner" if ratio >= 1 else f"{1 / ratio:.2f} times later"
    return f"{reached}, {pace} than DDP itself; {ends}."


def _alone(run: RunSummary) -> str:
    sentence = f"{run.label} trained at {format_count(run.tokens_per_s)} tokens/s"
    if run.fraction_of_compute_only is not None and run.method != "none":
        share = format_percent(run.fraction_of_compute_only)
        sentence += f", {share} of the speed without any communication"
    sentence += f"{_hidden(run)}."
    if run.bits_per_byte is not None:
        ended = "So far it is" if run.status == "unfinished" else "It ended"
        sentence += f" {ended} at {run.bits_per_byte:.3f} bits per byte."
    missing = "" if run.is_plain_ddp else " There is no DDP run here to compare with."
    return sentence + missing
