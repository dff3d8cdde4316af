"""The rules line by line: all workers in one process, float64, nothing in place, nothing clever.

This is the specification that the engine is tested against. Anchors of all rounds are kept, so
that the staleness gap is computed from the anchors themselves and not from a shortcut; the mean
over the workers is taken of their parameters, not of pseudo-gradients.

Symbols as in the paper: x_{t,k} parameters after k local steps of round t, xbar the mean over the
workers, m the outer momentum, L the staleness gap, tau, alpha, beta, phi.

Where the engine keeps a sum of parts (the eager merge), the reference keeps each worker's whole.

References:
    CO2, arXiv 2401.16265, Algorithm 1 (our reading of it; Eq. 3 unconfirmed). SlowMo,
    arXiv 1910.00643, Algorithm 1. Local SGD, arXiv 1805.09767. DiLoCo, arXiv 2311.08105,
    Algorithm 1. Delay-corrected merge, arXiv 1906.12043 and 2605.20866. Overlap-Local-SGD,
    arXiv 2002.09539. Streaming DiLoCo, arXiv 2501.18512, Algorithm 2. Eager updates,
    arXiv 2502.12996.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fivefold.optim import OuterOptimizer, OuterRule
from fivefold.optim.penalties import ConstantPenalty, GapPenalty

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
    elements: int = 0  # of all outer steps; 0 where each is of the whole model
    final: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def count_plain_step(self) -> None:
        """Count an outer step without penalty and clip."""
        self.gaps.append(torch.ones((), dtype=torch.float64))
        self.clipped.append(0)


def reference_run(
    start: torch.Tensor,
    local_step: LocalStep,
    *,
    rule: OuterRule,
    world_size: int,
    steps: int,
    inner_lr: Callable[[int], float] = lambda _: 1.0,
    parts: Sequence[int] | None = None,
) -> ReferenceRun:
    """Train ``world_size`` workers for ``steps`` local steps each, then drain.

    Args:
        start: x_{0,0}, float64, [N].
        local_step: One inner step of one worker.
        rule: The outer rule.
        world_size: Number of workers.
        steps: Local steps per worker; need not be a multiple of tau.
        inner_lr: Inner learning rate after so many local steps, for ``units="lr"``.
        parts: Elements of each fragment, in order; None for one fragment.

    Returns:
        The anchors, gaps and clip counts of every outer step, and the drained parameters.
    """
    world = _World(start, local_step, world_size=world_size, steps=steps)
    if rule.merge in {"correct", "pull"}:
        return _run_in_parts(world, rule, parts=list(parts or [start.numel()]))
    if rule.merge == "eager":
        return _eager_run(world, rule)
    if rule.merge == "replace" and (rule.delay_steps or rule.num_fragments > 1):
        return _late_run(world, rule, inner_lr, parts=list(parts or [start.numel()]))
    outer = _OuterWorld(rule, start)
    outer.run.workers.append([start] * world_size)
    workers = [start.clone() for _ in range(world_size)]
    arriving: _Sent | None = None
    for number in range(1, steps + 1):
        workers = [local_step(worker, number - 1, x) for worker, x in enumerate(workers)]
        if number % rule.first_tau != 0:
            continue
        lr = inner_lr(number)
        sent = outer.send(workers, lr)
        first_synchronous = rule.bootstrap == "sync" and number == rule.first_tau
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
    partial = outer.send(workers, inner_lr(steps)) if steps % rule.first_tau else None
    for sent_round in (arriving, partial):
        if sent_round is not None:
            outer.apply(sent_round, inner_lr(steps))
    return outer.finish()


class _World:
    """Where all workers start, and how each of them steps."""

    def __init__(
        self, start: torch.Tensor, local_step: LocalStep, *, world_size: int, steps: int
    ) -> None:
        self.start = start
        self.world_size = world_size
        self.numbers = range(1, steps + 1)
        self._local_step = local_step

    def stepped(self, workers: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        return [self._local_step(worker, number - 1, z) for worker, z in enumerate(workers)]

    def all_at(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clone() for _ in range(self.world_size)]


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).mean(dim=0)


class _Part:
    """One fragment: rounds of its own, and workers that keep some of their own."""

    def __init__(self, rule: OuterRule, start: torch.Tensor, *, first_boundary: int) -> None:
        self.rule = rule
        self.anchor = start.clone()
        self.momentum = torch.zeros_like(start)
        self.next_boundary = first_boundary
        self.launched: torch.Tensor | None = None
        self.sent: list[torch.Tensor] = []
        self.launched_at = 0
        self.launches = 0

    def after(self, number: int, workers: list[torch.Tensor], run: ReferenceRun) -> None:
        delay = self.rule.delay_steps or self.rule.first_tau
        if self.launched is not None and number == self.launched_at + delay:
            self.arrive(workers, run)
        if number == self.next_boundary:
            self.launched, self.launched_at = self.anchor - _mean(workers), number
            self.sent = [z.clone() for z in workers]
            self.next_boundary += self.rule.first_tau

    def arrive(self, workers: list[torch.Tensor], run: ReferenceRun) -> None:
        assert self.launched is not None, "callers looked"
        self.outer_step(self.launched, run)
        self.launched = None
        share = self.rule.local_share
        for index, (z, y) in enumerate(zip(workers, self.sent, strict=True)):
            if self.rule.merge == "correct":
                workers[index] = z + (self.anchor - y)
            else:
                workers[index] = share * z + (1 - share) * self.anchor

    def outer_step(self, pseudo_gradient: torch.Tensor, run: ReferenceRun) -> None:
        beta, alpha = self.rule.outer_momentum, self.rule.outer_lr
        self.momentum = beta * self.momentum + pseudo_gradient
        nesterov = beta * self.momentum + pseudo_gradient
        self.anchor = self.anchor - alpha * (nesterov if self.rule.nesterov else self.momentum)
        run.count_plain_step()

    def drain(self, number: int, workers: list[torch.Tensor], run: ReferenceRun) -> None:
        open_steps = number - (self.next_boundary - self.rule.first_tau)
        if self.launched is None and open_steps == 0:
            return
        if self.launched is not None:
            self.arrive(workers, run)
        self.outer_step(self.anchor - _mean(workers), run)


def _run_in_parts(world: _World, rule: OuterRule, *, parts: list[int]) -> ReferenceRun:
    """Workers are pulled to the mean that arrives, or corrected by it; each fragment in turn."""
    run = ReferenceRun(anchors=[world.start.clone()], workers=[world.all_at(world.start)])
    workers = world.all_at(world.start)
    fragments = [
        _Part(rule, x, first_boundary=max(rule.first_tau * (index + 1) // len(parts), 1))
        for index, x in enumerate(torch.split(world.start, parts))
    ]
    for number in world.numbers:
        pieces = [list(torch.split(z, parts)) for z in world.stepped(workers, number)]
        for index, fragment in enumerate(fragments):
            column = [mine[index] for mine in pieces]
            fragment.after(number, column, run)
            for mine, value in zip(pieces, column, strict=True):
                mine[index] = value
        workers = [torch.cat(mine) for mine in pieces]
        if number % rule.first_tau == 0:
            run.workers.append(list(workers))
            run.anchors.append(torch.cat([fragment.anchor for fragment in fragments]))
    for index, fragment in enumerate(fragments):
        column = [torch.split(z, parts)[index] for z in workers]
        fragment.drain(len(world.numbers), column, run)
    run.final = torch.cat([fragment.anchor for fragment in fragments])
    return run


class _LatePart:
    """One fragment of CO2 that arrives in the middle of its next round.

    Every worker is where its round began plus the steps of this round, and a merge moves where the
    round began. The gap is how far, in the mean over a round's steps, the anchor is at the merge
    from where it was at the step.
    """

    def __init__(self, rule: OuterRule, start: torch.Tensor, *, world_size: int, first: int):
        self.rule, self.first = rule, first
        self.outer = _OuterWorld(rule, start)
        self.own = [torch.zeros_like(start) for _ in range(world_size)]  # of this round
        self.places: list[torch.Tensor] = []  # the anchor at each of its steps
        self.launched: _Sent | None = None
        self.launched_at = 0

    def begin(self) -> list[torch.Tensor]:
        return [self.outer.anchor + own for own in self.own]

    def stepped(self, workers: list[torch.Tensor]) -> None:
        self.own = [z - self.outer.anchor for z in workers]
        self.places.append(self.outer.anchor.clone())

    def launch(self, number: int, lr: float) -> None:
        place = _mean(self.places)
        self.launched = _Sent(-_mean(self.own), place, lr)
        self.launched_at = number
        self.own = [torch.zeros_like(own) for own in self.own]
        self.places = []

    def arrive(self, lr: float) -> None:
        assert self.launched is not None, "callers looked"
        self.outer.apply(self.launched, lr)
        self.launched = None

    def after(self, number: int, lr: float) -> None:
        rule, tau = self.rule, self.rule.first_tau
        if self.launched is not None and number == self.launched_at + (rule.delay_steps or tau):
            self.arrive(lr)
        if number >= self.first and (number - self.first) % tau == 0:
            self.launch(number, lr)
            if rule.bootstrap == "sync" and number == self.first:
                self.arrive(lr)

    def drain(self, number: int, lr: float) -> None:
        if self.launched is not None:
            self.arrive(lr)
        if self.places:
            self.launch(number, lr)
            self.arrive(lr)


def _late_run(
    world: _World, rule: OuterRule, inner_lr: Callable[[int], float], *, parts: list[int]
) -> ReferenceRun:
    tau, count = rule.first_tau, world.world_size
    run = ReferenceRun(anchors=[world.start.clone()], workers=[world.all_at(world.start)])
    fragments = [
        _LatePart(rule, x, world_size=count, first=max(tau * (index + 1) // len(parts), 1))
        for index, x in enumerate(torch.split(world.start, parts))
    ]
    for number in world.numbers:
        columns = [fragment.begin() for fragment in fragments]
        workers = [torch.cat(row) for row in zip(*columns, strict=True)]
        pieces = [torch.split(z, parts) for z in world.stepped(workers, number)]
        for fragment, column in zip(fragments, zip(*pieces, strict=True), strict=True):
            fragment.stepped(list(column))
            fragment.after(number, inner_lr(number))
        if number % tau == 0:
            columns = [fragment.begin() for fragment in fragments]
            run.workers.append([torch.cat(row) for row in zip(*columns, strict=True)])
    for fragment in fragments:
        fragment.drain(len(world.numbers), inner_lr(len(world.numbers)))
        run.gaps += fragment.outer.run.gaps
        run.clipped += fragment.outer.run.clipped
        run.elements += fragment.outer.anchor.numel() * len(fragment.outer.run.clipped)
    run.final = torch.cat([fragment.outer.anchor for fragment in fragments])
    return run


def _eager_run(world: _World, rule: OuterRule) -> ReferenceRun:
    """Each worker has an anchor and momentum of its own, moved by its eager pseudo-gradient."""
    alpha, beta, tau = rule.outer_lr, rule.outer_momentum, rule.first_tau
    run = ReferenceRun(anchors=[world.start.clone()], workers=[world.all_at(world.start)])
    own_anchors, workers = world.all_at(world.start), world.all_at(world.start)
    own_momenta = [torch.zeros_like(world.start) for _ in workers]
    before = [torch.zeros_like(world.start) for _ in workers]  # pseudo-gradients one round ago
    history: list[torch.Tensor] = []  # mean pseudo-gradient of each round
    for number in world.numbers:
        workers = world.stepped(workers, number)
        if number % tau != 0:
            continue
        fresh = [x - z for x, z in zip(own_anchors, workers, strict=True)]
        stale = _mean(before)
        for i in range(world.world_size):
            eager = stale + (fresh[i] - before[i]) / world.world_size
            own_momenta[i] = beta * own_momenta[i] + eager
            own_anchors[i] = own_anchors[i] - alpha * (beta * own_momenta[i] + eager)
        before = fresh
        history.append(_mean(fresh))
        workers = [x.clone() for x in own_anchors]
        run.workers.append(workers)
    open_part = [x - z for x, z in zip(own_anchors, workers, strict=True)]
    if len(world.numbers) % tau:
        history.append(_mean(open_part))
    x, momentum = world.start, torch.zeros_like(world.start)
    for pseudo_gradient in history:
        momentum = beta * momentum + pseudo_gradient
        x = x - alpha * (beta * momentum + pseudo_gradient)
        run.count_plain_step()
    run.final = x
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
        self._weight = torch.nn.Parameter(start.clone())
        self._optimizer: torch.optim.Optimizer | None = None
        if isinstance(rule, OuterOptimizer):
            self._optimizer = rule.optimizer([self._weight], **rule.options)

    def send(self, workers: list[torch.Tensor], lr: float) -> _Sent:
        mean = torch.stack(workers).mean(dim=0)
        return _Sent(self.anchor - mean, self.anchor.clone(), lr)

    def apply(self, sent: _Sent, lr: float) -> None:
        rule = self.rule
        if self._optimizer is not None:
            self._weight.grad = sent.pseudo_gradient.clone()
            self._optimizer.step()
            self.anchor = self._weight.detach().clone()
            self.run.count_plain_step()
            self.run.anchors.append(self.anchor)
            return
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
