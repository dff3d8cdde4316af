"""What the engine measured: a frozen record for users, and the meter that fills it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fivefold.optim._round_choice import (
    CODECS_TO_CHOOSE,
    LEAST_FRAGMENT_BYTES,
    MessageTimes,
    RoundChoice,
    choose_round,
)
from fivefold.optim._rules.base import OuterRule, rule_named
from fivefold.optim._update import Number
from fivefold.optim.codecs import CODEC_NAMES, named_codec
from fivefold.units import format_bytes, format_duration_s

_KEPT_RECORDS = 4096
_KEPT_TIMES = 64
_RUNNING_GAP_DECAY = 0.8
_SHARE_WORTH_HIDING = 0.1  # below, waiting learns better than hiding
_SHARE_OF_STALLS = 0.02


@dataclass(frozen=True, kw_only=True)
class AllReduceRecord:
    """One all-reduce, in ``time.perf_counter()`` seconds of this rank."""

    round: int  # round whose work it carried
    payload_bytes: int  # bytes summed, per rank
    launched_at_s: float  # when it was launched
    completed_at_s: float  # when the backend finished it
    wait_started_at_s: float  # when the training thread began to wait for it
    wait_ended_at_s: float  # when the training thread went on
    fragment: int = 0  # part of the model that it carried
    sent_bytes: int = 0  # bytes that this rank sent for it
    lost: bool = False  # whether it was lost; its work went out again with the next


@dataclass(frozen=True, kw_only=True)
class SyncStatistics:
    """Totals since the engine was made, on this rank.

    Attributes:
        steps: Local steps.
        rounds: Rounds that were ended.
        merged_rounds: Rounds whose all-reduce was merged.
        payload_bytes: Bytes of the pseudo-gradients that were summed, before any codec.
        sent_bytes: Bytes that this rank sent for them, as counted by the transport.
        in_flight_s: Seconds in which an all-reduce was under way.
        exposed_wait_s: Seconds in which the training thread waited for one.
        overlap_fraction: 1 - exposed_wait_s / in_flight_s; None before the first merge.
        boundary_s: Seconds of outer updates and copies, without the waits.
        staleness_gap: Mean L_t over the merged rounds; None before the first merge.
        last_staleness_gap: L_t of the last merged round; None before the first merge.
        clipped_fraction: Share of momentum elements that the clip changed.
        tau: Local steps of the present round.
        tau_changes: How often the automatic tau was changed.
        lost_all_reduces: All-reduces that were lost and sent again.
        left_out_payloads: Payloads, of any rank, that were left out of a sum because they were not
            finite or outlying.
        rule: Name of the rule.
        fragments: Parts of the model with moments of their own.
        delay_steps: Local steps behind which an all-reduce is hidden; 0 where it is waited for.
        codec: How payloads travel.
        most_fragments: Parts in which this model may be sent.
        step_s: Seconds of one local step, the median of the last rounds; None before the first.
        all_reduce_s: Seconds that the network needs for what is sent at one moment (a fragment, or
            those that share a turn), without waits for slower ranks; the median of the last ones.
        automatic: What is decided while training: "tau", or "tau" and "codec".
    """

    steps: int
    rounds: int
    merged_rounds: int
    payload_bytes: int
    sent_bytes: int
    in_flight_s: float
    exposed_wait_s: float
    overlap_fraction: float | None
    boundary_s: float
    staleness_gap: float | None
    last_staleness_gap: float | None
    clipped_fraction: float
    tau: int
    tau_changes: int
    lost_all_reduces: int
    left_out_payloads: int
    rule: str = ""
    fragments: int = 1
    delay_steps: int = 0
    codec: str = "fp32"
    most_fragments: int = 1
    step_s: float | None = None
    all_reduce_s: float | None = None
    automatic: tuple[str, ...] = ()

    def advice(self) -> list[str]:
        """Return what the measured times say should be changed, most urgent first."""
        found = list(_about_time(self))
        if self.left_out_payloads:
            found.append(
                f"{self.left_out_payloads} payloads were left out; the log names ranks and "
                "parameters"
            )
        if self.lost_all_reduces:
            found.append(f"{self.lost_all_reduces} all-reduces were lost and sent again")
        return found

    def __str__(self) -> str:
        parts = f", {self.fragments} fragments" if self.fragments > 1 else ""
        late = "waits" if not self.delay_steps else f"merged {self.delay_steps} steps late"
        sent_per_step = self.sent_bytes / max(self.steps, 1)
        waited = format_duration_s(self.exposed_wait_s)
        lines = [
            f"{self.rule}: tau {self.tau}{parts}, {late}, {self.codec}",
            f"  {self.steps} steps, {self.rounds} rounds, {self.merged_rounds} merged",
            f"  step {_duration(self.step_s)}, all-reduce {_duration(self.all_reduce_s)}",
            f"  sent {format_bytes(self.sent_bytes)}, {format_bytes(sent_per_step)} per step",
            f"  waited {waited}, {_exposed_share(self):.1%} of the time",
        ]
        lines += [f"  -> {line}" for line in self.advice() or ["nothing to change"]]
        return "\n".join(lines)


def _about_time(record: SyncStatistics) -> Iterator[str]:
    if not record.step_s or not record.all_reduce_s:
        return
    needed = record.all_reduce_s / record.step_s
    waiting = _exposed_share(record)
    choice = _choice(record)
    if not record.delay_steps:
        if waiting > _SHARE_WORTH_HIDING:
            codec = "" if choice.codec == record.codec else f' with codec="{choice.codec}"'
            yield f"{waiting:.0%} of the time is waiting: {choice.rule}{codec} hides it"
        return
    part = "" if record.fragments == 1 else f" of one of {record.fragments} fragments"
    takes = f"an all-reduce{part} takes {needed:.1f} steps"
    if needed > record.delay_steps:
        yield f"{takes} and has {record.delay_steps} to hide behind: {_use(record, choice)}"
    elif waiting > _SHARE_OF_STALLS and not record.automatic:
        how = "fewer fragments" if record.fragments > 1 else "a larger tau"
        yield f"{takes}, but {waiting:.0%} of the time is waiting: it stalls at times; use {how}"
    elif not record.automatic and 2 * choice.delay <= record.delay_steps and choice.hides:
        settings = ", ".join(_changes(record, choice))
        yield f"{takes}: {settings} would hide it too, and what is less late learns better"


def _choice(record: SyncStatistics) -> RoundChoice:
    """Return the round that ``tau="auto"`` would take on a link of these times."""
    assert record.step_s, "callers looked"
    assert record.all_reduce_s, "callers looked"
    rule = rule_named(record.rule)
    in_parts = rule.takes_turns or not record.delay_steps
    most = record.most_fragments if in_parts else 1
    # From the times of one codec; of few bytes all of it is latency.
    now = _wire_share(record.codec)
    codecs = [record.codec, *(codec for codec in CODECS_TO_CHOOSE if _wire_share(codec) < now)]
    small = record.payload_bytes < LEAST_FRAGMENT_BYTES * record.merged_rounds
    whole_s = 0.0 if small else record.all_reduce_s * record.fragments
    times = MessageTimes(
        fixed_s=dict.fromkeys(codecs, record.all_reduce_s if small else 0.0),
        whole_s={codec: whole_s * (_wire_share(codec) / now if now else 1.0) for codec in codecs},
    )
    return choose_round(
        times,
        step_s=record.step_s,
        shares={parts: 1 / parts for parts in range(1, most + 1)},
        minimum=min(rule.least_tau, record.tau),
    )


def _use(record: SyncStatistics, choice: RoundChoice) -> str:
    """Return what hides the all-reduce, or what is done about it already."""
    if not choice.hides:
        return f"no round of up to {choice.tau} steps hides it"
    if "codec" in record.automatic:
        return "tau follows"
    if record.automatic:
        return "tau follows" if choice.codec == record.codec else 'use codec="auto"'
    return f"use {', '.join(_changes(record, choice))}"


def _changes(record: SyncStatistics, choice: RoundChoice) -> Iterator[str]:
    if rule_named(record.rule).sends_gradients:
        if choice.delay > 1:
            yield f"gradients accumulated over {choice.delay} batches"
    else:
        if choice.tau != record.tau:
            yield f"tau={choice.tau}"
        if choice.fragments != record.fragments:
            yield f"fragments={choice.fragments}"
        elif choice.tau == record.tau:
            yield f"delay_steps={choice.delay}"
    if choice.codec != record.codec:
        yield f'codec="{choice.codec}"'


def _wire_share(codec: str) -> float:
    """Return the bytes of a codec over those of fp32; 0, so that none is smaller, of a user's."""
    elements = 1 << 16
    if codec not in CODEC_NAMES:
        return 0.0
    return named_codec(codec).encoded_bytes(elements) / (4 * elements)


def _exposed_share(record: SyncStatistics) -> float:
    """Return the share of training time in which the training thread waited."""
    computing_s = record.steps * (record.step_s or 0.0)
    total_s = computing_s + record.exposed_wait_s
    return record.exposed_wait_s / total_s if computing_s else 0.0


def _duration(seconds: float | None) -> str:
    return "not measured yet" if seconds is None else format_duration_s(seconds)


_TOTALS = (
    *("merged_rounds", "payload_bytes", "sent_bytes", "in_flight_s", "exposed_wait_s"),
    *("boundary_s", "lost_all_reduces", "left_out_payloads"),
)


@dataclass(kw_only=True)
class StatisticsMeter:
    """Running sums; the counters that a resume should keep are in ``state()``."""

    merged_rounds: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    lost_all_reduces: int = 0
    left_out_payloads: int = 0
    in_flight_s: float = 0.0
    exposed_wait_s: float = 0.0
    boundary_s: float = 0.0
    gap_sum: float = 0.0
    last_gap: float | None = None
    running_gap: float | None = None
    clipped: Number = 0
    elements: int = 0
    all_reduces: deque[AllReduceRecord] = field(default_factory=lambda: deque(maxlen=_KEPT_RECORDS))
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    all_reduce_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    _turn: int = -1

    def add_all_reduce(self, all_reduce: AllReduceRecord) -> None:
        """Count one waited-for all-reduce."""
        self.all_reduces.append(all_reduce)
        self.payload_bytes += all_reduce.payload_bytes
        self.sent_bytes += all_reduce.sent_bytes
        self.lost_all_reduces += all_reduce.lost
        self.in_flight_s += all_reduce.completed_at_s - all_reduce.launched_at_s
        self.exposed_wait_s += all_reduce.wait_ended_at_s - all_reduce.wait_started_at_s

    def add_link_time(self, seconds: float, *, turn: int) -> None:
        """Count what the network needed; of all-reduces of one turn the longest counts."""
        if turn == self._turn and self.all_reduce_times_s:
            self.all_reduce_times_s[-1] = max(self.all_reduce_times_s[-1], seconds)
        else:
            self.all_reduce_times_s.append(seconds)
        self._turn = turn

    def add_merge(self, *, gap: float, clipped: Number, elements: int) -> None:
        """Count one outer step."""
        self.merged_rounds += 1
        self.gap_sum += gap
        self.last_gap = gap
        previous = gap if self.running_gap is None else self.running_gap
        self.running_gap = _RUNNING_GAP_DECAY * previous + (1 - _RUNNING_GAP_DECAY) * gap
        self.clipped = self.clipped + clipped
        self.elements += elements

    def take_all_reduces(self) -> list[AllReduceRecord]:
        """Return and forget the all-reduces since the last call."""
        taken = list(self.all_reduces)
        self.all_reduces.clear()
        return taken

    def snapshot(
        self, *, steps: int, rounds: int, tau: int, tau_changes: int = 0, **setting: Any
    ) -> SyncStatistics:
        """Return the totals as a frozen record; ``setting`` is rule, fragments, delay and codec."""
        merged, flown_s = self.merged_rounds, self.in_flight_s
        self.clipped = int(self.clipped)
        return SyncStatistics(
            steps=steps,
            rounds=rounds,
            overlap_fraction=max(0.0, 1 - self.exposed_wait_s / flown_s) if flown_s > 0 else None,
            staleness_gap=self.gap_sum / merged if merged else None,
            last_staleness_gap=self.last_gap,
            clipped_fraction=self.clipped / self.elements if self.elements else 0.0,
            tau=tau,
            tau_changes=tau_changes,
            **{name: getattr(self, name) for name in _TOTALS},
            step_s=median(self.step_times_s) if self.step_times_s else None,
            all_reduce_s=median(self.all_reduce_times_s) if self.all_reduce_times_s else None,
            **setting,
        )

    def state(self) -> dict[str, float | int | None]:
        """Return the numbers that a resumed run continues from."""
        self.clipped = int(self.clipped)
        kept = {name: v for name, v in vars(self).items() if not name.startswith("_")}
        return {name: value for name, value in kept.items() if not isinstance(value, deque)}

    def restore(self, state: dict[str, float | int | None]) -> None:
        """Set the numbers from ``state()``."""
        for name, value in state.items():
            setattr(self, name, value)


_ROUNDS_BEFORE_WARNING = 8
_FRAMES_TO_THE_CALLER_OF_STEP = 3


class StabilityWarning(UserWarning):
    """The outer learning rate is at or above the stability limit of a delayed rule."""


class StabilityWatch:
    """Warn once when the running staleness gap says that the outer learning rate is too high."""

    # On a noise-free quadratic mode of which the steps before a merge contract the error by a and
    # those after it by b, the anchors of a delayed rule that replaces local work follow
    # z^2 - (1 + beta - k b) z + (beta + k (1 - b) a) with k = alpha / L: by the Jury test stable if
    # and only if k (1 - b) a < 1 - beta and k (b - (1 - b) a) < 2 (1 + beta). With a merge at the
    # share r of a round, a mode of equal steps has 1 - a = u^r and 1 - b = u^(1 - r); over all u
    # the first is hardest at u^r = 1 - r, the second at u = 0.

    def __init__(self, rule: OuterRule) -> None:
        self._warned_of_lr = 0.0
        self.follow(rule)

    def follow(self, rule: OuterRule) -> None:
        """Watch another rule from now on; only a larger learning rate is worth another word."""
        self._rule = rule
        self._limited = rule.delayed and rule.merge == "replace"

    def watch(self, meter: StatisticsMeter, *, late: float) -> None:
        """Look at the meter after an outer step, of means that arrive ``late`` rounds late."""
        gap = meter.running_gap
        if not self._limited or gap is None or meter.merged_rounds < _ROUNDS_BEFORE_WARNING:
            return
        outer_lr, momentum = self._rule.outer_lr, self._rule.outer_momentum
        worst = late * (1 - late) ** ((1 - late) / late)
        limit = min((1 - momentum) / worst, 2 * (1 + momentum)) * gap
        if outer_lr < limit or outer_lr <= self._warned_of_lr:
            return
        self._warned_of_lr = outer_lr  # once is enough
        message = (
            f"outer_lr={outer_lr} is at or above the stability limit {limit:.3g} of "
            f"outer_momentum={momentum} and staleness gap {gap:.3g}, {late:.3g} rounds late: "
            f"directions that converge within a round may diverge; use outer_lr below {limit:.3g}, "
            "a smaller outer_momentum or a penalty"
        )
        warnings.warn(message, StabilityWarning, stacklevel=_FRAMES_TO_THE_CALLER_OF_STEP)
