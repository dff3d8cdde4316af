"""``tau="auto"`` in an engine: what the ranks measured goes in, rounds of fragments come out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fivefold.optim._fragment import Fragment
from fivefold.optim._metadata import MetadataReading
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._state import EngineContext
from fivefold.optim.auto_tau import TauController

_LOG = logging.getLogger(__name__)


class AutomaticRound(TauController):
    """A controller whose decisions the fragments and the transport of an engine follow."""

    def __init__(
        self, fragments: Sequence[Fragment], context: EngineContext, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._engine, self._context = fragments, context
        self._turns = self._parts = context.rule.num_fragments  # in which they are sent at present

    def read(self, reading: MetadataReading, round_number: int) -> None:
        """Look at what all ranks measured; the coming round is as is decided."""
        if not reading.fits(self._context.transport.world_size):
            return
        step_s, all_reduce_s = reading.step_s, reading.all_reduce_s
        if len(self._engine) > 1:  # each must fit behind the delay
            slowest_s = max(fragment.link_s for fragment in self._engine)
            all_reduce_s = [slowest_s] * len(all_reduce_s)
        if self._context.worker is not None:  # its ranks see other readings, and must decide alike
            seen = self._context.worker.gather([*step_s, *all_reduce_s])
            slowest = [max(column) for column in zip(*seen, strict=True)]
            step_s, all_reduce_s = slowest[: len(step_s)], slowest[len(step_s) :]
        decision = self.observe(step_s, all_reduce_s, round_number=round_number)
        if decision is not None:
            _LOG.info("%s", decision)
            self._follow()

    def begin_at(self, state: dict[str, Any]) -> None:
        """Take over the round of ``state()``, and nothing that was measured."""
        super().begin_at(state)
        self._turns = self.fragments
        self._follow()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state()``; the fragments stand in the round of that state, or will."""
        super().restore(state)
        self._turns = self.fragments
        self._follow()

    def _follow(self) -> None:
        if self.codec is not None:
            self._context.transport.use_codec(self.codec)  # type: ignore[attr-defined]  # measured
        tau, turns = self.local_tau(self._context.transport.rank), self.fragments
        schedules = [fragment.schedule for fragment in self._engine]
        if turns != self._turns:
            self._turns = turns
            for index, schedule in enumerate(schedules):
                turn = _turn_of(index, parts=self._parts, turns=turns)
                schedule.take_turn(turn, delay_steps=tau // turns, turns=turns)
        for schedule in schedules:
            if schedule.tau != tau:
                schedule.retune(tau, delay_steps=self.delay_steps)


def _turn_of(index: int, *, parts: int, turns: int) -> int:
    """Return which of ``turns`` launches of a round a fragment is part of; the first for others."""
    return index * turns // parts if index < parts else 0


def automatic_round(
    given: OuterRule, fragments: Sequence[Fragment], *, context: EngineContext
) -> AutomaticRound | None:
    """Make what decides the round of ``tau="auto"``; None for a given tau. A collective call.

    Fragments that are left open are the smallest that there may be; several may take one turn.
    """
    rule, transport, parts = context.rule, context.transport, len(fragments)
    if rule.auto_tau is None:
        return None
    sizes = [float(sum(group.payload.nbytes for group in each.groups)) for each in fragments]
    open_ = getattr(given, "fragments", parts) is None
    measure: Any = getattr(transport, "measure_link", None)
    turns = range(1, parts + 1) if open_ and measure is not None else range(parts, parts + 1)
    loads = [[0.0] * number for number in turns]
    for load in loads:
        for index, size in enumerate(sizes):
            load[_turn_of(index, parts=parts, turns=len(load))] += size
    shares = [max(load) / sum(sizes) for load in loads]
    times = None
    if measure is not None and (len(turns) > 1 or getattr(transport, "chooses_codec", False)):
        times = measure(round(sum(sizes)), device=fragments[0].groups[0].payload.device)
        if context.worker is not None:  # the worst that its ranks see, so that they decide alike
            seen = context.worker.gather([*shares, *times.numbers()])
            worst = [max(column) for column in zip(*seen, strict=True)]
            shares, times = worst[: len(shares)], times.with_numbers(worst[len(shares) :])
    return AutomaticRound(
        fragments,
        context,
        settings=rule.auto_tau,
        world_size=transport.world_size,
        shares=dict(zip(turns, shares, strict=True)),
        times=times,
    )
