"""Which round, in how many fragments and in which codec, hides a link of known times.

A pure function of numbers that all ranks have, so all ranks choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

CODECS_TO_CHOOSE = ("fp32", "int8", "int4")
"""What is chosen from, each with smaller messages than the one before."""
MARGIN = 1.1  # times a message that its delay must last: a tenth to spare
MOST_FRAGMENTS = 8
LEAST_FRAGMENT_BYTES = 1 << 20  # of smaller messages the latency counts more than the rate

MOST_BUSY = 0.05  # share of the steps' time that encoding may take; less than any codec saves
_MOST_LATENCY = 0.1  # share of a message's time that may pass before its first byte
_LEAST_SAVING = 0.1  # of a message's time, for which a codec is worth what it rounds
# A quotient that is an integer but for rounding (0.6 / 0.2) must not cost one more step.
_ROUNDING = 1e-9
_MOST_STEPS = 2.0**53  # behind which a message may hide; more than any largest tau


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Times of messages; for a share s of the model, ``fixed + s * whole``."""

    fixed_s: Mapping[str, float]  # of a message of nothing, by codec; that which loses least first
    whole_s: Mapping[str, float]  # what all bytes of the model take beside that
    # What a rank computes to encode and decode the whole model once, beside its steps; else 0.
    busy_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def codecs(self) -> tuple[str, ...]:
        """Return the codecs, the one that loses least first."""
        return tuple(self.fixed_s)

    def message_s(self, codec: str, share: float) -> float:
        """Return the seconds of one message that holds this share of the model."""
        return self.fixed_s[codec] + share * self.whole_s[codec]

    def numbers(self) -> list[float]:
        """Return all times, for a checkpoint."""
        busy = (self.busy_s.get(codec, 0.0) for codec in self.codecs)
        return [*self.fixed_s.values(), *self.whole_s.values(), *busy]

    def with_numbers(self, numbers: Sequence[float]) -> MessageTimes:
        """Return other times of the same codecs, from ``numbers()``."""
        size = len(self.codecs)
        kinds = (numbers[first : first + size] for first in range(0, 3 * size, size))
        fixed_s, whole_s, busy_s = (dict(zip(self.codecs, k, strict=True)) for k in kinds)
        return MessageTimes(fixed_s=fixed_s, whole_s=whole_s, busy_s=busy_s)

    def only(self, codec: str) -> MessageTimes:
        """Return the times of one codec."""
        return MessageTimes(
            fixed_s={codec: self.fixed_s[codec]},
            whole_s={codec: self.whole_s[codec]},
            busy_s={codec: self.busy_s.get(codec, 0.0)},
        )

    def worthwhile(self) -> list[str]:
        """Return the codecs that shorten a message by a tenth or more, and the first."""
        first, *more = self.codecs
        kept = [first]
        for codec in more:
            least_s = (1 - _LEAST_SAVING) * self.message_s(kept[-1], 1.0)
            if self.message_s(codec, 1.0) <= least_s:
                kept.append(codec)
        return kept


@dataclass(frozen=True, kw_only=True)
class RoundChoice:
    """One way to send a model: every ``tau`` steps, in ``fragments``, each hidden by a delay."""

    delay: int  # local steps between the launch and the merge of a fragment
    fragments: int
    codec: str
    hides: bool = True  # whether every message fits; not where the largest tau is too small

    @property
    def tau(self) -> int:
        """Return the local steps of a round."""
        return self.delay * self.fragments

    @property
    def rule(self) -> str:
        """Return the rule as it is written in Python; the codec is said apart."""
        return f"DelayCorrected(tau={self.tau}, fragments={self.fragments})"


def most_fragments(*, tensors: int, num_bytes: float | None) -> int:
    """Return the parts in which a model is sent at the most: up to 8, none smaller than 1 MiB.

    Without a number of bytes no link was measured, and nothing says that small messages are slow.
    """
    most = min(MOST_FRAGMENTS, tensors)
    return max(1, most if num_bytes is None else min(most, int(num_bytes // LEAST_FRAGMENT_BYTES)))


def filling_fragments(tau: int, *, most: int = MOST_FRAGMENTS) -> int:
    """Return the most parts whose delays, of whole steps, fill a round but for a seventh."""
    # Six parts of a round of 8 steps have a step each, and two steps hide nothing.
    counts = range(min(most, tau), 0, -1)
    return next(count for count in counts if 7 * count * (tau // count) >= 6 * tau)


def choose_round(
    times: MessageTimes,
    *,
    step_s: float,
    shares: Mapping[int, float],
    stretch: float = MARGIN,
    minimum: int = 1,
    maximum: int = 1024,
    round_s: float = 0.0,
) -> RoundChoice:
    """Choose the round that hides its messages and loses least; all that choose one ask here.

    A codec before a longer round, since that is what loses less: the first with which the shortest
    round there can be is long enough, or else the one of the smallest messages; but another where
    that one's round must be longer than the other's for the processors' sake, since to encode the
    model may take a small share of the steps' time. Then the least delay, in the fewest fragments
    that have it. A slower link never has a shorter round.
    """
    need = _Need(times, step_s, shares, stretch, minimum, maximum, round_s)
    floor = need.with_codec(None)
    choices = [need.with_codec(codec) for codec in times.worthwhile()]
    found = next((one for one in choices if one.hides and one.tau <= floor.tau), None)
    if found is not None:
        return found
    *others, best = choices
    idle = replace(need, times=replace(times, busy_s={}))
    for other in reversed(others):
        longer = other.hides and other.tau < best.tau
        if longer and idle.with_codec(best.codec).tau <= other.tau:
            best = other
    return best


@dataclass(frozen=True)
class _Need:
    times: MessageTimes
    step_s: float  # of a local step
    shares: Mapping[int, float]  # of the bytes, of the largest of so many fragments
    stretch: float  # how much longer than ``times`` a message may take, with jitter and margin
    minimum: int  # tau
    maximum: int
    round_s: float  # that a round must last, whatever is sent

    def with_codec(self, codec: str | None) -> RoundChoice:
        """Return the best round of one codec; of None, where messages take no time."""
        numbers = self._useful(codec)
        most = min(numbers, key=lambda number: (self.shares[number], number))
        delay = self._delay(codec, most)
        # Below that a slightly slower link could have a shorter round in fewer, later fragments.
        enough = [n for n in sorted(numbers) if n * delay >= most * (delay - 1)]
        number = next(n for n in enough if self._delay(codec, n) == delay)
        least = self._least(codec)
        if number * delay < least:
            delays = {n: -(-least // n) for n in numbers}
            longer = [n for n, steps in delays.items() if self._delay(codec, n) <= steps]
            number = min(longer, key=lambda n: (n * delays[n], delays[n]))
            delay = delays[number]
        hides = number * delay <= max(self.maximum, number)
        if not hides:  # as near to the largest tau as there is
            number = max(numbers, key=lambda n: (n * (self.maximum // n), n))
            delay = max(1, self.maximum // number)
        chosen = codec or self.times.codecs[0]
        return RoundChoice(delay=delay, fragments=number, codec=chosen, hides=hides)

    def _least(self, codec: str | None) -> int:
        """Return the fewest steps of a round, whatever the link."""
        if codec is None:
            return self.minimum
        busy_steps = self.times.busy_s.get(codec, 0.0) / (MOST_BUSY * self.step_s)
        return max(self.minimum, math.ceil(min(busy_steps * (1 - _ROUNDING), self.maximum)))

    def _useful(self, codec: str | None) -> list[int]:
        """Return the numbers of fragments whose messages still use the link well."""
        fewest = min(self.shares)
        if codec is None:
            return [fewest]
        fixed_s = self.times.fixed_s[codec]
        return [
            number
            for number, share in self.shares.items()
            if number == fewest
            or (
                number <= self.maximum
                and fixed_s <= _MOST_LATENCY * self.times.message_s(codec, share)
            )
        ]

    def _delay(self, codec: str | None, number: int) -> int:
        message_s = 0.0
        if codec is not None:
            message_s = self.stretch * self.times.message_s(codec, self.shares[number])
        needed_s = max(message_s, self.round_s)
        steps = min(needed_s / self.step_s, _MOST_STEPS)
        return max(1, math.ceil(steps * (1 - _ROUNDING)))
