"""How many local steps a round needs to hide its communication, decided while training.

With a delayed rule one round takes ``max(tau * T_step, T_allreduce)``, so the smallest tau that
hides everything is the smallest integer with ``tau * T_step >= margin * T_allreduce``. Where they
are left open, fragments and codec are chosen too. There is no clock, tensor or socket here.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fivefold.errors import ConfigurationError, require_whole
from fivefold.optim._round_choice import MARGIN, MessageTimes, RoundChoice, choose_round

# Patience after each try that proved wrong, and how often it grows.
_PATIENCE_GROWTH = 4
_MOST_GROWTHS = 3
_KEPT_DECISIONS = 64
_ROUNDING = 1e-9
_JITTER_ROUNDS = 64  # whose needs are remembered
_FEWEST_FOR_JITTER = 10  # in fewer of them one stall would be a tenth
_JITTER_SHARE = 0.9  # of the rounds whose messages must fit
_NEW_LINK = 2.0  # times the usual need, at which what is remembered is of another link
_ROUNDS_TO_TRAVEL = 3  # until measurements of a change of fragments or codec are back
_MOST_DELAY = 1 << 20
_SLACK_STEPS = 0.75  # counts of local steps stay while no rank's mean share is off by more


@dataclass(frozen=True, kw_only=True)
class AutoTau:
    """Settings of ``tau="auto"``: keep the smallest tau that hides the communication.

    What a changing tau means for the outer step: a pseudo-gradient is the movement of a whole
    round, so it grows with tau. ``outer_lr`` is relative to it and needs no rescaling, but a
    longer round contracts more directions fully, so the stability limit of a delayed rule,
    outer_lr < (1 - outer_momentum) * L, must hold as it stands and not only for short rounds.
    The gap penalty's reference is a moving average over past rounds: for about ten rounds after
    tau went up it damps too much, and after tau went down too little. ``clip`` is in units of
    parameters and binds more often in longer rounds. Change of tau is therefore rare by design;
    for runs that must be comparable, read ``TauController.tau`` once and fix it.

    Going down takes ``patience`` rounds of the larger tau, so it is slower in steps than going up.

    Args:
        initial: tau until ``window`` rounds have been measured.
        minimum: Smallest tau.
        maximum: Largest tau. A network that makes no progress while this machine computes cannot
            be hidden by any tau; then tau ends here.
        margin: The round must last this many times the communication: 1.1 leaves 10 % to spare.
            More where the measured times scatter: nine of ten messages are to fit.
        window: Rounds whose median counts; a link that hangs for less than half of it changes
            nothing, a link that stays slow changes tau within it.
        patience: Rounds in a row that must agree before tau goes down, or up although nothing is
            exposed yet.
        balance: Whether a slow rank takes fewer local steps per round, so that all reach the
            boundary together. tau then counts the fastest rank's steps. Weight the ranks by
            their tokens.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        CO2, arXiv 2401.16265 (tau was tuned by hand there; reviewers asked for a rule).
    """

    initial: int = 8
    minimum: int = 1
    maximum: int = 1024
    margin: float = MARGIN
    window: int = 3
    patience: int = 12
    balance: bool = False

    def __post_init__(self) -> None:
        for name in ("initial", "minimum", "maximum", "window", "patience"):
            require_whole(f"AutoTau {name}", getattr(self, name))
        if not self.minimum <= self.initial <= self.maximum:
            message = (
                "AutoTau needs minimum <= initial <= maximum; got "
                f"minimum={self.minimum}, initial={self.initial}, maximum={self.maximum}"
            )
            raise ConfigurationError(message, hint="set initial between the two")
        number = isinstance(self.margin, (int, float)) and not isinstance(self.margin, bool)
        if not (number and math.isfinite(self.margin) and self.margin >= 1):
            message = f"AutoTau margin must be a number of at least 1; got {self.margin!r}"
            raise ConfigurationError(message, hint="1.1 leaves 10 % of the round to spare")
        if not isinstance(self.balance, bool):
            raise ConfigurationError(f"AutoTau balance must be True or False; got {self.balance!r}")


def named_auto_tau(tau: str | AutoTau) -> AutoTau:
    """Return the settings that a name stands for; settings are returned as they are."""
    if isinstance(tau, AutoTau):
        return tau
    if tau != "auto":
        message = f"tau {tau!r} is not known"
        raise ConfigurationError(message, hint='use a positive integer, "auto" or AutoTau(...)')
    return AutoTau()


@dataclass(frozen=True, kw_only=True)
class _Need:
    """Choice from the last rounds; ``bare`` steps of delay are too few for this round as it is."""

    choice: RoundChoice
    bare: float
    step_s: float
    all_reduce_s: float


@dataclass(kw_only=True)
class _Memory:
    """All that a controller goes on from; lists have one length at all times."""

    delay: int
    fragments: int
    codec: int
    times: list[float]  # what messages take, as ``MessageTimes.numbers``
    shares: list[float]
    all_reduces: list[float]  # of the last rounds; 0 stands for no measurement
    step_windows: list[float]  # of the last rounds, each with a number per rank
    loads: list[float]
    paces: list[float]
    local_steps: list[int]  # of each rank
    share_sums: list[float]
    share_rounds: int = 0
    above: _Agreement
    below: _Agreement
    changes: int = 0
    skip: int = 0  # measurements that are of messages before the last change
    growths: int = 0
    last_was_down: bool = False


class TauController:
    """Turns measured step and all-reduce times, equal on all ranks, into tau.

    ``shares`` are the numbers of fragments that it may choose from, each with the largest one's
    share of the bytes. Of ``times`` the ratios count; None where fragments and codec stay.
    """

    def __init__(
        self,
        settings: AutoTau,
        world_size: int,
        *,
        shares: Mapping[int, float] | None = None,
        times: MessageTimes | None = None,
    ) -> None:
        self.settings = settings
        self.world_size = world_size
        self._shares = dict(shares or {1: 1.0})
        self._chooses = times is not None
        # Unknown times are those of messages that all take one unit.
        self._times = times or MessageTimes(fixed_s={"": 1.0}, whole_s={"": 0.0})
        most = max(self._shares)
        delay = max(1, settings.initial // most)
        self._memory = _Memory(
            delay=delay,
            fragments=most,
            codec=0,
            times=self._times.numbers(),
            shares=list(self._shares.values()),
            all_reduces=[0.0] * settings.window,
            step_windows=[0.0] * settings.window * world_size,
            loads=[0.0] * _JITTER_ROUNDS,
            paces=[0.0] * _JITTER_ROUNDS,
            local_steps=[delay * most] * world_size,
            share_sums=[0.0] * world_size,
            above=_Agreement(),
            below=_Agreement(),
        )
        self._decisions: deque[TauDecision] = deque(maxlen=_KEPT_DECISIONS)

    @property
    def _now(self) -> RoundChoice:
        memory = self._memory
        return self._choice(memory.delay, memory.fragments, memory.codec)

    @property
    def tau(self) -> int:
        """Local steps of the coming round; with ``balance`` those of the fastest rank."""
        return self._now.tau

    @property
    def fragments(self) -> int:
        """Parts in which the model is sent."""
        return self._memory.fragments

    @property
    def codec(self) -> str | None:
        """How payloads travel; None where that is not decided here."""
        return self._now.codec if len(self._times.codecs) > 1 else None

    @property
    def changes(self) -> int:
        """How often the round was changed."""
        return self._memory.changes

    @property
    def delay_steps(self) -> int | None:
        """Local steps between launch and merge of a fragment; None for a whole round."""
        return self._now.delay if self.fragments > 1 else None

    @property
    def decisions(self) -> tuple[TauDecision, ...]:
        """Return the last 64 decisions since the start or the last ``restore``, oldest first."""
        return tuple(self._decisions)

    @property
    def patience_rounds(self) -> int:
        """Rounds that must agree before tau goes down: more after each try that proved wrong."""
        return int(self.settings.patience * _PATIENCE_GROWTH**self._memory.growths)

    def local_tau(self, rank: int) -> int:
        """Return this rank's local steps in the coming round; ``tau`` unless ``balance`` is on."""
        return self._memory.local_steps[rank] if self.settings.balance else self.tau

    def begin_at(self, state: dict[str, Any]) -> None:
        """Take over the round of ``state()``, and nothing that was measured."""
        memory = self._memory
        memory.delay, memory.fragments, memory.codec = (
            state[name] for name in ("delay", "fragments", "codec")
        )
        memory.local_steps = [self.tau] * self.world_size

    def observe(
        self, step_s: Sequence[float], all_reduce_s: Sequence[float], *, round_number: int
    ) -> TauDecision | None:
        """Take in one boundary's measurements; call it once per boundary, with equal numbers."""
        memory = self._memory
        if memory.skip:
            memory.skip -= 1
            return None
        step_s = _known(step_s)
        # A rank that launches early waits for the others: the network's time is the least. The
        # compute to hide behind is that of the slowest rank, each rank's time being its median
        # first, so that hiccups which hit another rank each round do not look like slow compute.
        flown = [time_s for time_s in _known(all_reduce_s) if time_s > 0]
        if flown:
            _push(memory.all_reduces, min(flown) / self._unit_s)
        if any(step_s):
            _push(memory.step_windows, *step_s)
        times = [
            _median(memory.step_windows[rank :: self.world_size]) for rank in range(len(step_s))
        ]
        if flown and any(step_s):
            self._remember([time_s for time_s in step_s if time_s > 0], times)
        need = self._need(times)
        if need is None:
            return None
        before = self._now
        reason = self._move(need)
        if self.settings.balance and self._balance(times, at_once=reason is not None):
            reason = reason or "balance"
        if reason is None:
            return None
        decision = TauDecision(
            round=round_number, previous=before.tau, tau=self.tau, step_s=need.step_s,
            all_reduce_s=need.all_reduce_s, reason=reason, fragments=self.fragments,
            codec=self.codec,
        )  # fmt: skip
        self._decisions.append(decision)
        memory.changes += self._now != before
        return decision

    def state(self) -> dict[str, Any]:
        """Return plain numbers, from which a resumed run goes on deciding bit for bit alike."""
        return asdict(self._memory)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state()`` of a controller with the same settings and world size."""
        fresh = self.state()
        for name in ("all_reduces", "step_windows", "local_steps", "times", "shares"):
            if len(state[name]) != len(fresh[name]):
                message = f"the saved {name} has {len(state[name])} entries, not {len(fresh[name])}"
                hint = "use the same world size and window, or start again with initial=<saved tau>"
                raise ConfigurationError(message, hint=hint)
        kept = copy.deepcopy(state)
        agreements = {name: _Agreement(**kept[name]) for name in ("above", "below")}
        self._memory = _Memory(**kept | agreements)
        self._times = self._times.with_numbers(self._memory.times)
        self._shares = dict(zip(self._shares, self._memory.shares, strict=True))

    # -- tau --------------------------------------------------------------------------------------

    @property
    def _unit_s(self) -> float:
        """Seconds of the present messages as the link's times have them."""
        return self._times.message_s(self._now.codec, self._shares[self.fragments])

    def _choice(self, delay: int, fragments: int, codec: int) -> RoundChoice:
        return RoundChoice(delay=delay, fragments=fragments, codec=self._times.codecs[codec])

    def _remember(self, present: Sequence[float], usual: Sequence[float]) -> None:
        """Keep how far this round's message, and its steps, are from what is usual."""
        memory = self._memory
        load, size = memory.all_reduces[-1], self.settings.window
        recent = memory.loads[1 - size :] if size > 1 else []
        before, now = _median(memory.loads), _median([*recent, load])
        if before and max(before, now) > _NEW_LINK * min(before, now):  # of another link
            memory.loads = [0.0] * (_JITTER_ROUNDS - len(recent)) + recent
        _push(memory.loads, load)
        pace = min if self.settings.balance else max
        known = [time_s for time_s in usual if time_s > 0]
        _push(memory.paces, pace(present) / pace(known))

    def _stretch(self) -> float:
        """Return how long a message may take, in units of the link's times."""
        # The message that nine of ten did not exceed, behind the steps that nine of ten were not
        # faster than, and ``margin`` times the median at the least.
        known = [load for load in self._memory.loads if load > 0]
        longest = 0.0
        if len(known) >= _FEWEST_FOR_JITTER:
            paces = [-pace for pace in self._memory.paces if pace > 0]
            longest = _high(known) / -_high(paces)
        return max(self.settings.margin * _median(self._memory.all_reduces), longest)

    def _need(self, times: Sequence[float]) -> _Need | None:
        """Return what the windows ask for; None until they are full."""
        present = [time_s for time_s in times if time_s > 0]
        if not present or not all(self._memory.all_reduces):
            return None
        load, slowest_s, fastest_s = _median(self._memory.all_reduces), max(present), min(present)
        balance = self.settings.balance
        step_s = fastest_s if balance else slowest_s
        round_s = slowest_s if balance else 0.0  # the slowest rank must get at least one step in
        choice = choose_round(
            self._times,
            step_s=step_s,
            shares=self._shares,
            stretch=self._stretch(),
            minimum=self.settings.minimum,
            maximum=self.settings.maximum,
            round_s=round_s,
        )
        all_reduce_s = load * self._unit_s
        bare = max(all_reduce_s, round_s) / step_s
        return _Need(choice=choice, bare=bare, step_s=step_s, all_reduce_s=all_reduce_s)

    def _score(self, choice: RoundChoice) -> int:
        """Return the order of choices: rounds, then codecs, then delays, as one number."""
        codecs = self._times.codecs
        codec = choice.tau * len(codecs) + codecs.index(choice.codec)
        return codec * _MOST_DELAY + choice.delay

    def _move(self, need: _Need) -> TauReason | None:
        """Change the round where the rounds so far ask for it."""
        # Up at once when it is too short for the communication; by the margin, or down, only when
        # rounds in a row agree. So tau rests where measurements scatter, and is exact where they do
        # not. While a second of all-reduce costs less than a second of compute that shares its
        # cores, it climbs to the fixed point without overshoot; from above it may stop early.
        memory = self._memory
        now, asked = self._score(self._now), self._score(need.choice)
        memory.above.count(asked, self._plain(need.choice), now=now, when=asked > now)
        memory.below.count(asked, self._plain(need.choice), now=now, when=asked < now)
        exposed = need.bare * (1 - _ROUNDING) > memory.delay
        if exposed and asked != now and (asked > now or self._chooses):
            return self._set(need.choice, "exposed")
        if memory.above.rounds >= self.settings.patience:
            return self._set(self._choice(*memory.above.wished), "margin")
        first = self._chooses and not memory.changes  # what it began with is nobody's choice
        if memory.below.rounds >= (1 if first else self.patience_rounds):
            return self._set(self._choice(*memory.below.wished), "slack")
        return None

    def _set(self, choice: RoundChoice, reason: TauReason) -> TauReason:
        memory, tau, before = self._memory, choice.tau, self.tau
        down = self._score(choice) < self._score(self._now)
        if max(tau, before) > 2 * min(tau, before) + 1:
            memory.growths = 0  # the link changed; what was learnt of its noise is void
        elif memory.last_was_down and not down:
            memory.growths = min(memory.growths + 1, _MOST_GROWTHS)
        if (choice.fragments, choice.codec) != (self.fragments, self._now.codec):
            memory.skip = _ROUNDS_TO_TRAVEL
        memory.last_was_down = down
        memory.delay, memory.fragments, memory.codec = self._plain(choice)
        memory.above, memory.below = _Agreement(), _Agreement()
        return reason

    def _plain(self, choice: RoundChoice) -> list[int]:
        """Return a choice as ``_choice`` takes it."""
        return [choice.delay, choice.fragments, self._times.codecs.index(choice.codec)]

    def _balance(self, step_s: Sequence[float], *, at_once: bool) -> bool:
        """Count one round towards the ranks' local steps; return whether a rank's steps changed."""
        memory, before = self._memory, self._memory.local_steps
        fastest_s = min(time_s for time_s in step_s if time_s > 0)
        shares = [self.tau * fastest_s / (time_s or fastest_s) for time_s in step_s]
        # Off by more than a step and more than a quarter of its steps.
        pairs = zip(shares, before, strict=True)
        far_off = any(abs(share - steps) > max(1.0, steps / 4) for share, steps in pairs)
        if not (at_once or far_off):
            memory.share_sums = [a + b for a, b in zip(memory.share_sums, shares, strict=True)]
            memory.share_rounds += 1
            if memory.share_rounds < self.settings.patience:
                return False
            shares = [total / memory.share_rounds for total in memory.share_sums]
        memory.share_sums, memory.share_rounds = [0.0] * self.world_size, 0
        pairs = zip(shares, before, strict=True)
        if at_once or far_off or any(abs(mean - steps) > _SLACK_STEPS for mean, steps in pairs):
            memory.local_steps = [max(1, math.floor(share + 0.5)) for share in shares]
        return memory.local_steps != before


@dataclass
class _Agreement:
    """Rounds in a row that asked for the same direction, and the range of what they asked for."""

    rounds: int = 0
    most: int = 0
    least: int = 0
    # Delay, fragments and codec of the most.
    wished: list[int] = field(default_factory=lambda: [0, 0, 0])

    def count(self, asked: int, wished: list[int], *, now: int, when: bool) -> None:
        """Count one round; begin anew where it asks for something else, or too differently."""
        if not when:
            self.rounds = self.most = self.least = 0
            return
        most, least = max(self.most, asked), min(self.least or asked, asked)
        # While they differ by less than what following them would gain.
        agrees = min(abs(now - most), abs(now - least)) > most - least
        self.rounds = self.rounds + 1 if agrees else 1
        if asked == most or not agrees:
            self.wished = wished
        self.most, self.least = (most, least) if agrees else (asked, asked)


def _high(values: Sequence[float]) -> float:
    """Return what nine of ten do not exceed."""
    return sorted(values)[math.ceil(_JITTER_SHARE * len(values)) - 1]


def _known(times_s: Sequence[float]) -> list[float]:
    """Return the times, 0 for those that no clock can have measured."""
    return [time_s if 0 < time_s < math.inf else 0.0 for time_s in times_s]


def _push(values: list[float], *newest: float) -> None:
    """Add values at the end and forget as many at the beginning."""
    values[:] = [*values[len(newest) :], *newest]


def _median(times: Sequence[float]) -> float:
    """Return the median of the measurements there are (of two, the lower); 0.0 without any."""
    measured = [time_s for time_s in times if time_s > 0]
    return statistics.median_low(measured) if measured else 0.0


TauReason = Literal["exposed", "margin", "slack", "balance"]


@dataclass(frozen=True, kw_only=True)
class TauDecision:
    """One change of tau, or of the ranks' local steps ("balance"), for logs and timelines.

    Examples:
        >>> print(TauDecision(round=5, previous=8, tau=18, step_s=0.1, all_reduce_s=1.6,
        ...                   reason="exposed"))
        round 5: tau 8 -> 18 (exposed: communication 1.6 s, step 0.1 s)
    """

    # Round whose message brought the measurements; the round that begins when it has arrived is
    # the first with the new tau.
    round: int
    previous: int  # tau before
    tau: int  # tau from now on
    # Compute seconds of one step of tau: of the slowest rank, or with ``balance`` of the fastest.
    step_s: float
    # Seconds that the network needs for one round's communication; with fragments for the largest
    # of them, which has tau / fragments steps to hide behind.
    all_reduce_s: float
    # "exposed": the communication took longer than the round. "margin": it fitted, but without
    # the margin. "slack": fewer steps hide it too. "balance": only the local steps of some ranks
    # changed.
    reason: TauReason
    fragments: int = 1  # parts in which the model is sent from now on
    codec: str | None = None  # how payloads travel from now on; None where nothing chooses it

    def __str__(self) -> str:
        times = f"communication {self.all_reduce_s:.3g} s, step {self.step_s:.3g} s"
        parts = "" if self.fragments == 1 else f", {self.fragments} fragments"
        codec = "" if self.codec is None else f", {self.codec}"
        moved = f"tau {self.previous} -> {self.tau}{parts}{codec}"
        return f"round {self.round}: {moved} ({self.reason}: {times})"
