"""Figures of the cases from the answers of their ranks: pure, so that tests can check them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.optim._peers._case import Case
from fivefold.report.summary import time_to_value

__all__ = ["Curve", "Timing", "curve_of", "error_of", "seconds_to_target", "timing_of"]

Answer = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One window of one case, over all ranks.

    Attributes:
        step_s: Wall seconds per step of the slowest rank.
        sent_bytes: Bytes that a host's link sent per step, headers included; mean of the hosts.
        busiest_bytes: The most that any host sent or received per step.
        formula_bytes: What a rank sends per step by the engine's count; None for peers.
        wait_s: Seconds per step that the engine waited, of the slowest rank; None for peers.
        all_reduce_s: Seconds of one round's communication; None for peers.
        overruns: Share of the steps whose real work was longer than the padded time.
        peak_bytes: Peak memory since before the model was made, of the largest rank.
        drain_s: Seconds of ending the method.
        allreduce_s: Seconds of a bare all-reduce of the model; only without communication.
        round_steps: Steps per round that were seen; None for peers.
        chosen: The engine's tau, fragments, delay_steps and codec at the end; None for peers.
    """

    step_s: float
    sent_bytes: float
    busiest_bytes: float
    formula_bytes: float | None
    wait_s: float | None
    all_reduce_s: float | None
    overruns: float
    peak_bytes: float
    drain_s: float
    allreduce_s: float | None
    round_steps: float | None
    chosen: Mapping[str, Any] | None

    @property
    def hidden(self) -> float | None:
        """Share of the communication's time in which the rank went on computing."""
        if self.all_reduce_s is None or self.wait_s is None or self.round_steps is None:
            return None
        return max(0.0, 1.0 - self.wait_s * self.round_steps / self.all_reduce_s)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Validation of one run.

    Attributes:
        seed: Its seed.
        points: (steps, bits per byte) pairs; the last one is after the drain.
    """

    seed: int
    points: tuple[tuple[int, float], ...]

    @property
    def final(self) -> float:
        """Bits per byte at the end."""
        return self.points[-1][1]


def error_of(answers: Sequence[Answer]) -> str | None:
    """The first error of a job's ranks; None where all of them answered."""
    return next((str(answer["error"]) for answer in answers if "error" in answer), None)


def timing_of(answers: Sequence[Answer]) -> Timing:
    """Put the ranks' windows together.

    Args:
        answers: One per rank, without errors.
    """
    steps = answers[0]["steps"]

    def per_step(key: str) -> list[float]:
        return [answer[key] / steps for answer in answers if key in answer]

    sent, received = per_step("link_sent_bytes"), per_step("link_received_bytes")
    waits, formula = per_step("exposed_wait_s"), per_step("sent_bytes")
    rounds = [answer["rounds"] for answer in answers if answer.get("rounds")]
    all_reduces = [
        answer["in_flight_s"] / answer["rounds"] for answer in answers if "rounds" in answer
    ]
    bare = [answer["allreduce_s"] for answer in answers if "allreduce_s" in answer]
    return Timing(
        step_s=max(per_step("wall_s")),
        sent_bytes=statistics.fmean(sent),
        busiest_bytes=max(*sent, *received),
        formula_bytes=statistics.fmean(formula) if formula else None,
        wait_s=max(waits) if waits else None,
        all_reduce_s=max(all_reduces) if all_reduces else None,
        overruns=statistics.fmean(per_step("overruns")),
        peak_bytes=max(answer["peak_bytes"] for answer in answers),
        drain_s=max(answer["drain_s"] for answer in answers),
        allreduce_s=max(bare) if bare else None,
        round_steps=steps / rounds[0] if rounds else None,
        chosen=answers[0].get("chosen") or None,
    )


def curve_of(answers: Sequence[Answer]) -> Curve:
    """Put the points that the ranks judged in order.

    Args:
        answers: One per rank, without errors.
    """
    points = sorted(
        (int(steps), float(bits)) for answer in answers for steps, bits in answer["curve"]
    )
    return Curve(seed=answers[0]["problem"]["seed"], points=tuple(points))


def seconds_to_target(
    curve: Curve, target: float, *, case: Case, step_s: float, ddp_step_s: float, drain_s: float
) -> float | None:
    """When a run reaches a loss, by its steps and the measured time of a step.

    A loss depends on the step and not on the link, so one curve serves all rates. The first
    ``case.ddp_steps`` steps take DDP's time. Reaching the target between two points is found by
    linear interpolation; the method's drain is added, because what it judges is its result.

    Args:
        curve: The run.
        target: Bits per byte to reach.
        case: Whose run it is.
        step_s: Measured seconds per step.
        ddp_step_s: DDP's.
        drain_s: Measured seconds of the drain.

    Returns:
        None where it never reaches it.
    """

    def elapsed_s(steps: int) -> float:
        as_ddp = min(steps, case.ddp_steps)
        return as_ddp * ddp_step_s + (steps - as_ddp) * step_s

    timed = [(elapsed_s(steps), bits) for steps, bits in curve.points]
    reached_s = time_to_value(timed, target)
    return None if reached_s is None else reached_s + drain_s
