"""Hidden averaging that keeps local work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.optim._rules.fragments import InFragments


@dataclass(frozen=True, kw_only=True)
class DelayCorrected(InFragments):
    """Hidden averaging that keeps local work: when a mean arrives, add what it changes.

    Every tau steps each worker i sends its parameters y_i; when their mean arrives, ``delay_steps``
    later, the worker adds the difference to what it has by then:

        z_i <- z_i + (mean_j(y_j) - y_i)

    Work done during the all-reduce is kept at once instead of being replaced; the mean of the
    workers moves as in Local SGD whose workers see each other a little late. Replicas differ at
    all times until ``finalize``; the anchor is the last mean that arrived.

    The delay is what costs quality. With ``fragments`` F the model is cut into F parts of about
    equal bytes, part f is sent at step (f + 1) tau / F of each round and merged tau // F steps
    later: the same bytes over the same time, and parameters that are F times fresher. The price is
    F times the number of messages, and an all-reduce must fit behind tau // F steps, each time.

    Args:
        tau: Local steps per round: between two launches of one fragment.
        fragments: Number of parts, at most tau; 1 sends the whole model at once. None for up to 8,
            as many as leave little of a round in which nothing is on its way (tau=12: 6 parts,
            2 steps late each), and 1 where workers come and go; with tau="auto", which measures
            the link, each at least 1 MiB.
        delay_steps: Local steps between launch and merge, 1 to tau; None for tau // fragments.

    Raises:
        ConfigurationError: A value is outside its range, or another setting is given.

    References:
        CoCoD-SGD, arXiv 1906.12043; LOSCAR-SGD, arXiv 2605.20866. Fragments in turn: Streaming
        DiLoCo, arXiv 2501.18512.

    Examples:
        >>> DelayCorrected(tau=8, fragments=4).delay_steps
        2
    """

    key: ClassVar[str] = "delay_corrected"
    name: ClassVar[str] = "delay-corrected"
    colour: ClassVar[str] = "#a3791b"
    listed: ClassVar[int] = 50
    merge: ClassVar[str] = "correct"
    hides_rounds: ClassVar[bool] = True
    keeps_local: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ()

    def buffers(self, *, may_lose: bool = False) -> tuple[str, ...]:
        """Return what was sent, against which the mean is compared."""
        return (*super().buffers(may_lose=may_lose), "sent")
