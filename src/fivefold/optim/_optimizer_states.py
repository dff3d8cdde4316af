"""Averaging of the inner optimizer's states, at periods of their own, as parameters are averaged.

References:
    DES-LOC, arXiv 2505.22549 (each state at a period of its own, waited for).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fivefold.errors import ConfigurationError, require_whole
from fivefold.optim._flat import FlatGroup, Piece, flat_groups
from fivefold.optim._fragment import Fragment
from fivefold.optim._schedule import RoundSchedule
from fivefold.optim._shards import RowShare, local_tensor
from fivefold.optim._state import EngineContext, InAllReduce
from fivefold.optim._update import (
    OuterCoefficients,
    PieceStatistics,
    accumulate_momentum_,
    move_anchor_,
)

_FURTHEST = 10.0  # how far beyond what Adam can have beside its second moment a momentum may be
_NOT_NEGATIVE = {"exp_avg_sq", "square_avg"}
_KNOWN = {
    "exp_avg": "Adam's momentum",
    "exp_avg_sq": "Adam's second moment",
    "momentum_buffer": "the momentum of SGD, Muon and RMSprop",
    "square_avg": "RMSprop's second moment",
}


def _decay(name: str, group: Mapping[str, Any]) -> float | None:
    """Return the factor of a state per step; None where this group's optimizer has no such."""
    if name in {"exp_avg", "exp_avg_sq"}:
        betas = group.get("betas")
        return None if betas is None else float(betas[name == "exp_avg_sq"])
    if name == "square_avg":
        return float(group["alpha"]) if "alpha" in group and "centered" in group else None
    return float(group.get("momentum", 0.0)) or None


# An average that arrives d steps after it was sent is decayed as the state itself was meanwhile: a
# state that follows s <- b s + (what the gradient adds) becomes s <- s + b^d (mean(y) - y), with y
# what this worker sent, which is the state that it would have, had the mean been there at once.
# Adam divides m by sqrt(v), and its sums obey m^2 <= v (1 - b1)^2 b2 / ((1 - b2) (b2 - b1^2)). A
# mean of m that comes without that of v need not: rows of an embedding that this worker has not
# seen have v = 0. So it is cut at ten times that size.
class StateFragment(Fragment):
    """One kind of state of all trainable parameters that have it."""

    _rounds_averaged = True

    def __init__(
        self,
        index: int,
        name: str,
        *,
        optimizers: Iterable[torch.optim.Optimizer],
        schedule: RoundSchedule,
        context: EngineContext,
    ) -> None:
        self._name = name
        self._owners: list[tuple[torch.optim.Optimizer, int, list[torch.Tensor]]] = []
        averaged: list[FlatGroup] = []
        for optimizer in optimizers:
            for number, group in enumerate(optimizer.param_groups):
                members = [p for p in group["params"] if p.requires_grad]
                if _decay(name, group) is None or not members:
                    continue
                # One flat group per device and data type.
                kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
                for parameter in members:
                    kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
                for parameters in kinds.values():
                    live = [self._live(optimizer, parameter) for parameter in parameters]
                    averaged += flat_groups(
                        live, extras=("sent",), share=RowShare(), device=context.outer_device
                    )
                    self._owners.append((optimizer, number, parameters))
        if not averaged:
            message = f"no optimizer has the state {name!r} that average_states names"
            raise ConfigurationError(message, hint=_hint())
        super().__init__(index, [], averaged=averaged, schedule=schedule, context=context)
        self._sent_at_step = 0

    def names(self) -> list[str]:
        """Return the names of the states that are averaged."""
        known = self._shared.names()
        parameters = [p for _, _, members in self._owners for p in members]
        return [
            f"{known.get(id(parameter), number)}.{self._name}"  # it need not be the model's
            for number, parameter in enumerate(parameters)
        ]

    def write_anchor(self) -> None:
        """Put the averages into the optimizers."""
        self._look()
        super().write_anchor()
        if self._name in _NOT_NEGATIVE:  # what a codec made of a zero may be below it
            for tensor in self.tensors():
                local_tensor(tensor).abs_()
        self._cut_to_second_moments()

    def _look(self) -> None:
        """Follow the optimizers' state, which is made by the first step and replaced by a load."""
        for group, (optimizer, _, parameters) in zip(self.averaged, self._owners, strict=True):
            group.tensors = [self._live(optimizer, parameter) for parameter in parameters]

    def _live(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
        entries = optimizer.state.get(parameter, {})
        if not entries:
            return torch.zeros_like(parameter, requires_grad=False)
        found = entries.get(self._name)
        if not isinstance(found, torch.Tensor) or found.shape != parameter.shape:
            kind = type(optimizer).__name__
            what = "nothing" if found is None else f"something of another shape in {self._name!r}"
            message = f"average_states names {self._name!r}, but {kind} keeps {what}"
            raise ConfigurationError(message, hint=_hint())
        return found

    def _merge(
        self, landed: InAllReduce | None, *, send: bool, settles: bool, waits: bool = False
    ) -> None:
        del waits
        mean = self._mean(landed)
        elapsed = self.schedule.total_steps - self._sent_at_step
        measured = PieceStatistics()
        with torch.no_grad():
            for group, (optimizer, number, _) in zip(self.averaged, self._owners, strict=True):
                decay = _decay(self._name, optimizer.param_groups[number])
                assert decay is not None, "groups without this state were left out"
                for piece in group.pieces():
                    if mean is not None:
                        self._take(piece, mean, decay=decay**elapsed, settles=settles)
                    if send:
                        assert piece.sent is not None, "the state keeps what it sent"
                        torch.sub(piece.anchor, piece.local, out=piece.sent)
                        torch.mul(piece.sent, self._weight(), out=piece.payload)
                        measured.look_at(piece.payload)
        if mean is not None:
            self._cut_to_second_moments()
        if send:
            self._sent_at_step = self.schedule.total_steps
        self._finite = self._clock.all_finite(measured)

    def _take(self, piece: Piece, mean: OuterCoefficients, *, decay: float, settles: bool) -> None:
        """Let the average arrive in the anchor and in this worker's own state."""
        sent, share = piece.sent, self._state.own_share
        assert sent is not None, "the state keeps what it sent"
        own = piece.anchor - sent
        accumulate_momentum_(None, piece.payload, coefficients=mean, statistics=PieceStatistics())
        move_anchor_(piece.anchor, piece.payload, piece.payload, coefficients=mean)
        arrived = piece.anchor
        if self._name in _NOT_NEGATIVE:
            # Such a mean is at least this worker's share of its own; what a codec rounds further
            # down would make Adam divide by nothing.
            arrived = torch.maximum(arrived, own * share)
        if settles:
            piece.local.copy_(arrived)
        else:
            piece.local.add_(torch.sub(arrived, own).mul_(decay))

    @torch.no_grad()
    def _cut_to_second_moments(self) -> None:
        if self._name != "exp_avg":
            return
        for group, (optimizer, number, parameters) in zip(self.averaged, self._owners, strict=True):
            first, second = map(float, optimizer.param_groups[number]["betas"])
            apart = second - first * first
            most = torch.finfo(parameters[0].dtype).max
            if apart > 0:
                most = _FURTHEST * (1 - first) * math.sqrt(second / ((1 - second) * apart))
            for parameter, momentum in zip(parameters, group.tensors, strict=True):
                moment = optimizer.state.get(parameter, {}).get("exp_avg_sq")
                if moment is not None:
                    bound = local_tensor(moment).sqrt().mul_(most)
                    local_tensor(momentum).clamp_(-bound, bound)

    def _numbers(self) -> dict[str, Any]:
        return super()._numbers() | {"sent_at_step": self._sent_at_step}

    def _load_numbers(self, state: Mapping[str, Any]) -> None:
        super()._load_numbers(state)
        self._sent_at_step = state["sent_at_step"]
        self._look()


def state_fragments(
    periods: Mapping[str, int] | None,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    context: EngineContext,
    may_lose: bool,
    leaves_out: bool,
) -> list[StateFragment]:
    """Make the fragments of the optimizers' states, numbered from -1 downwards."""
    if periods is None or periods == {}:
        return []
    if not isinstance(periods, Mapping):
        message = f"average_states must be a table of names and rounds; got {periods!r}"
        raise ConfigurationError(message, hint=_hint())
    rule, worker = context.rule, context.worker
    unfit = {
        'tau="auto"': rule.auto_tau is not None,
        "DelayedGradients, whose optimizer states are equal": rule.sends_gradients,
        "a transport that may lose a round": may_lose,
        "ignore, whose states would be averaged too": leaves_out,
        "shard_group": worker is not None and worker.splits,
    }
    for why in (why for why, found in unfit.items() if found):
        message = f"average_states cannot be used with {why}"
        raise ConfigurationError(message, hint="leave average_states out")
    for name, period in periods.items():
        if name not in _KNOWN:
            raise ConfigurationError(f"average_states has no {name!r}", hint=_hint())
        hint = "it is the number of rounds between two means"
        require_whole(f"average_states[{name!r}]", period, hint=hint)
    several = list(optimizers)
    return [
        StateFragment(
            -1 - number,
            name,
            optimizers=several,
            schedule=_schedule(rule.first_tau, periods[name], context=context),
            context=context,
        )
        for number, name in reversed([*enumerate(sorted(periods))])  # second moments come first
    ]


def _schedule(tau: int, period: int, *, context: EngineContext) -> RoundSchedule:
    rule = context.rule
    delay_steps = rule.delay_steps
    if delay_steps is None and period > 1:
        delay_steps = tau  # the same time on the network as the parameters have
    return RoundSchedule(
        tau=tau * period, delayed=rule.delayed, delay_steps=delay_steps, always_sends=True
    )


def _hint() -> str:
    known = ", ".join(f"{name} ({what})" for name, what in _KNOWN.items())
    return f"states that can be averaged: {known}"
