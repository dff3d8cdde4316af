"""The rules line by line: all workers in one process, float64, nothing in place, nothing clever.

This is the specification that the engine is tested against. Anchors of all rounds are kept, so
that the staleness gap is computed from the anchors themselves and not from a shortcut; the mean
over the workers is taken of their parameters, not of pseudo-gradients.

Symbols as in the paper: x_{t,k} parameters after k local steps of round t, xbar the mean over the
workers, m the outer momentum, L the staleness gap, tau, alpha, beta, phi.

References:
    CO2, arXiv 2401.16265, Algorithm 1 (our reading of it; Eq. 3 unconfirmed). SlowMo,
    arXiv 1910.00643, Algorithm 1. Local SGD, arXiv 1805.09767. DiLoCo, arXiv 2311.08105,
    Algorithm 1. Delay-corrected merge, arXiv 1906.12043 and 2605.20866.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fivefold.optim._rules import OuterRule
from fivefold.optim._staleness import ConstantPenalty, GapPenalty

__all__ = ["ReferenceRun", "reference_run"]

LocalStep = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(worker, step number from 0, parameters [N]) -> parameters [N] after one inner step."""


@dataclass(kw_only=True)
class ReferenceRun:
    """What a reference run went through.

    Attributes:
        anchors: x_{t,0} for t = 0, 1, ...; [N] each.
        workers: Every worker's parameters at the same moments; equal to the anchor but for
            rules that keep local work.
        gaps: L of each outer step, scalar or [N].
        clipped: Elements clipped in each outer step.
        final: Parameters after the drain, [N].
    """

    anchors: list[torch.Tensor]
    workers: list[list[torch.Tensor]] = field(default_factory=list)
    gaps: list[torch.Tensor] = field(default_factory=list)
    clipped: list[int] = field(default_factory=list)
    final: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def reference_run(
    start: torch.Tensor,
    local_step: LocalStep,
    *,
    rule: OuterRule,
    world_size: int,
    steps: int,
    inner_lr: Callable[[int], float] = lambda _: 1.0,
) -> ReferenceRun:
    """Train ``world_size`` workers for ``steps`` local steps each, then drain.

    Args:
        start: x_{0,0}, float64, [N].
        local_step: One inner step of one worker.
        rule: The outer rule.
        world_size: Number of workers.
        steps: Local steps per worker; need not be a multiple of tau.
        inner_lr: Inner learning rate after so many local steps, for ``units="lr"``.

    Returns:
        The anchors, gaps and clip counts of every outer step, and the drained parameters.
    """
    if rule.keeps_local:
        return _corrected_run(start, local_step, rule=rule, world_size=world_size, steps=steps)
    outer = _OuterWorld(rule, start)
    outer.run.workers.append([start] * world_size)
    workers = [start.clone() for _ in range(world_size)]
    arriving: _Sent | None = None
    for number in range(1, steps + 1):
        workers = [local_step(worker, number - 1, x) for worker, x in enumerate(workers)]
        if number % rule.tau != 0:
            continue
        lr = inner_lr(number)
        sent = outer.send(workers, lr)
        first_synchronous = rule.bootstrap == "sync" and number == rule.tau
        if not rule.delayed or first_synchronous:
            outer.apply(sent, lr)
        else:
            if arriving is None:
                outer.stay()
            else:
                outer.apply(arriving, lr)
            arriving = sent
        workers = [outer.anchor.clone() for _ in range(world_size)]
        outer.run.workers.append(workers)
    partial = outer.send(workers, inner_lr(steps)) if steps % rule.tau else None
    for sent_round in (arriving, partial):
        if sent_round is not None:
            outer.apply(sent_round, inner_lr(steps))
    return outer.finish()


def _corrected_run(
    start: torch.Tensor, local_step: LocalStep, *, rule: OuterRule, world_size: int, steps: int
) -> ReferenceRun:
    """Rules that keep local work: z <- z + (mean(y) - y) for the y sent one round ago."""
    workers = [start.clone() for _ in range(world_size)]
    run = ReferenceRun(anchors=[start.clone()], workers=[list(workers)])
    sent: list[torch.Tensor] | None = None
    for number in range(1, steps + 1):
        workers = [local_step(worker, number - 1, z) for worker, z in enumerate(workers)]
        if number % rule.tau != 0:
            continue
        anchor = run.anchors[-1]
        if sent is not None:
            anchor = torch.stack(sent).mean(dim=0)
            workers = [z + (anchor - y) for z, y in zip(workers, sent, strict=True)]
            run.gaps.append(torch.ones((), dtype=torch.float64))
            run.clipped.append(0)
        sent = [z.clone() for z in workers]
        run.anchors.append(anchor)
        run.workers.append(list(workers))
    if sent is not None:
        arrived = torch.stack(sent).mean(dim=0)
        workers = [z + (arrived - y) for z, y in zip(workers, sent, strict=True)]
        run.gaps.append(torch.ones((), dtype=torch.float64))
        run.clipped.append(0)
    run.gaps.append(torch.ones((), dtype=torch.float64))  # the last, waited-for average
    run.clipped.append(0)
    run.final = torch.stack(workers).mean(dim=0)
    return run


@dataclass(frozen=True)
class _Sent:
    """A round's mean pseudo-gradient, where it was computed, and the inner learning rate then."""

    pseudo_gradient: torch.Tensor
    computed_at: torch.Tensor
    lr: float


class _OuterWorld:
    def __init__(self, rule: OuterRule, start: torch.Tensor) -> None:
        self.rule = rule
        self.anchor = start.clone()
        self.momentum = torch.zeros_like(start)
        self.run = ReferenceRun(anchors=[start.clone()])
        self.received: list[float] = []  # norm of each applied mean pseudo-gradient

    def send(self, workers: list[torch.Tensor], lr: float) -> _Sent:
        mean = torch.stack(workers).mean(dim=0)
        return _Sent(self.anchor - mean, self.anchor.clone(), lr)

    def apply(self, sent: _Sent, lr: float) -> None:
        rule = self.rule
        in_lr_units = rule.units == "lr"
        gap = self._staleness_gap(sent)
        pseudo_gradient = sent.pseudo_gradient / (sent.lr if in_lr_units else 1.0)
        momentum = rule.outer_momentum * self.momentum + pseudo_gradient / gap
        bound = float("inf") if rule.clip is None else rule.clip
        self.momentum = torch.clamp(momentum, -bound, bound)
        direction = self.momentum
        if rule.nesterov:
            direction = rule.outer_momentum * self.momentum + pseudo_gradient / gap
        self.anchor = self.anchor - rule.outer_lr * (lr if in_lr_units else 1.0) * direction
        self.run.gaps.append(gap)
        self.run.clipped.append(int((momentum.abs() > bound).sum()))
        self.run.anchors.append(self.anchor.clone())
        self.received.append(self._norm(sent.pseudo_gradient))

    def stay(self) -> None:
        self.run.anchors.append(self.anchor.clone())

    def finish(self) -> ReferenceRun:
        self.run.final = self.anchor.clone()
        return self.run

    def _staleness_gap(self, sent: _Sent) -> torch.Tensor:
        penalty = self.rule.penalty
        one = torch.ones((), dtype=torch.float64)
        if isinstance(penalty, ConstantPenalty):
            return one * penalty.value
        if not isinstance(penalty, GapPenalty):
            return one
        moved = self.anchor - sent.computed_at
        reference = self._reference_distance(penalty)
        if reference is None:
            return one
        if penalty.norm == "element":
            return 1.0 + moved.abs() / reference
        return one + self._norm(moved) / reference

    def _reference_distance(self, penalty: GapPenalty) -> float | None:
        if penalty.reference != "ema":
            return float(penalty.reference)
        if not self.received:
            return None
        average = self.received[0]
        for norm in self.received[1:]:
            average = penalty.decay * average + (1 - penalty.decay) * norm
        return average

    def _norm(self, values: torch.Tensor) -> float:
        penalty = self.rule.penalty
        norm = float(values.pow(2).sum().sqrt())
        l2 = not isinstance(penalty, GapPenalty) or penalty.norm == "l2"
        return norm if l2 else norm / values.numel() ** 0.5
