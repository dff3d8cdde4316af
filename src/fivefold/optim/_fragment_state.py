"""What a fragment holds, and how it is saved and put back.

The structure of a state depends on rule, model and number of ranks only; see ``_state``. Nothing
here waits, merges or sends: that is ``_fragment``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.optim._flat import FlatGroup, Piece
from fivefold.optim._lane import LaneReading
from fivefold.optim._outer_optimizer import OuterOptimizer, OuterOptimizerStep
from fivefold.optim._rule import OuterRule
from fivefold.optim._schedule import RoundSchedule
from fivefold.optim._shards import WorkerGroup
from fivefold.optim._state import (
    SHARED_BUFFERS,
    InFlight,
    OuterState,
    groups_state,
    restore_groups,
)
from fivefold.optim._statistics import StatisticsMeter
from fivefold.optim._transport import Transport


@dataclass(kw_only=True)
class Surroundings:
    """What all fragments of one engine share.

    Attributes:
        rule: The outer rule.
        transport: What moves the sums.
        meter: Where flights and merges are counted.
        inner_lr: Reads the inner learning rate.
        check_every_rounds: Replica checks; 0 for none.
        timeout_s: Longest wait for a flight on CUDA, where the backend reports no failure.
        worker: The ranks that act as one worker; None where that is one rank.
        pending: What this rank would adopt, for the lane; see ``_late_parameters``.
        outer_device: Where the outer state lives; None for beside the parameters.
        name_of: The name of a tensor of the model.
        on_non_finite: Told that this worker's own numbers are not finite.
        on_reading: Told each lane of the first fragment that arrived, with its round.
    """

    rule: OuterRule
    transport: Transport
    meter: StatisticsMeter
    inner_lr: Callable[[], float]
    check_every_rounds: int
    timeout_s: float
    worker: WorkerGroup | None
    pending: Callable[[], float]
    name_of: Callable[[torch.Tensor], str]
    on_non_finite: Callable[[], None]
    on_reading: Callable[[LaneReading, int], None]
    outer_device: torch.device | None = None


class FragmentState:
    """Flat state, rounds and numbers of one part of the model.

    Args:
        index: Its number.
        groups: Flat state of its parameters.
        averaged: Flat state of what is only averaged: the model's floating-point buffers.
        schedule: Its rounds.
        surroundings: What it shares with the others.

    Attributes:
        launching: Round that is being launched at this moment; None otherwise.
    """

    def __init__(
        self,
        index: int,
        groups: list[FlatGroup],
        *,
        averaged: list[FlatGroup],
        schedule: RoundSchedule,
        surroundings: Surroundings,
    ) -> None:
        self.index = index
        self.groups = groups
        self.averaged = averaged
        self.schedule = schedule
        self.launching: int | None = None
        self._shared = surroundings
        self._state = OuterState(own_share=1.0 / surroundings.transport.world_size)
        self._in_flight: InFlight | None = None
        self._round_began_s: float | None = None
        self._optimizer: OuterOptimizerStep | None = None
        if isinstance(surroundings.rule, OuterOptimizer):
            self._optimizer = OuterOptimizerStep(surroundings.rule, self._outer_parameters())

    def write_anchor(self) -> None:
        """Put the anchor into the model."""
        for piece in self._pieces():
            piece.local.copy_(piece.anchor)
        self._share_rows()

    @property
    def anchors(self) -> list[torch.Tensor]:
        """Flat anchors, of the parameters and of what is only averaged."""
        return [group.anchor for group in [*self.groups, *self.averaged]]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the live tensors."""
        for group in [*self.groups, *self.averaged]:
            yield from group.tensors

    def _outer_parameters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for group in self.groups:
            gradients = group.shaped(group.extras["gradient"])
            yield from zip(group.shaped(group.anchor), gradients, strict=True)

    def _payloads(self) -> list[torch.Tensor]:
        return [group.payload for group in [*self.groups, *self.averaged]]

    def _pieces(self, of: list[FlatGroup] | None = None) -> Iterator[Piece]:
        groups = [*self.groups, *self.averaged] if of is None else of
        return (piece for group in groups for piece in group.pieces())

    def _share_rows(self) -> None:
        worker = self._shared.worker
        if worker is not None and worker.splits:
            worker.share_rows(self.tensors())

    def state_dict(self) -> dict[str, Any]:
        """Return buffers and numbers; a flight must have been landed."""
        flight = self._in_flight
        empty = LaneReading.empty(self._shared.transport.world_size)
        reading = empty if flight is None or flight.reading is None else flight.reading
        return self._numbers() | {
            "arrived": True if flight is None else flight.arrived,
            "reading": reading.numbers(),
            "groups": groups_state(self.groups),
            "averaged": groups_state(self.averaged),
            "outer_optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
        }

    def shared_state(self) -> dict[str, Any]:
        """Return what all workers have in common at this moment.

        Called from within a launch, it is without that flight, in which a newcomer takes part;
        otherwise it is with the flight, which must have been landed.
        """
        names = SHARED_BUFFERS if self.launching is not None else (*SHARED_BUFFERS, "payload")
        state = self.state_dict() | {
            "groups": groups_state(self.groups, only=names),
            "averaged": groups_state(self.averaged, only=names),
        }
        if self.launching is not None:
            del state["reading"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()`` of this rank."""
        restore_groups(self.groups, state["groups"])
        restore_groups(self.averaged, state["averaged"])
        self._load_numbers(state)

    def load_shared(self, state: dict[str, Any]) -> None:
        """Stand where the workers stand in their round, at the anchor, with nothing of its own.

        Args:
            state: ``shared_state()``, or ``state_dict()`` of any worker.
        """
        names = (*SHARED_BUFFERS, "payload") if "reading" in state else SHARED_BUFFERS
        restore_groups(self.groups, state["groups"], only=names)
        restore_groups(self.averaged, state["averaged"], only=names)
        for group in [*self.groups, *self.averaged]:
            group.forget_own_part()
        self._load_numbers(state)
        self._state.weight = None
        self._state.own_share = 1.0 / self._shared.transport.world_size
        with torch.no_grad():
            self.write_anchor()

    def _numbers(self) -> dict[str, Any]:
        return {
            "schedule": dict(self.schedule.state()),
            "scalars": self._state.numbers(),
            "flight_unit": 0.0 if self._in_flight is None else self._in_flight.unit,
            "flight_weight": 0.0 if self._in_flight is None else self._in_flight.weight,
        }

    def _load_numbers(self, state: dict[str, Any]) -> None:
        self.schedule.restore(state["schedule"])
        self._state = OuterState(**state["scalars"])
        self._round_began_s = None
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["outer_optimizer"])
        self._in_flight = None
        if self.schedule.in_flight_round is not None and "reading" in state:
            self._in_flight = InFlight(
                round=self.schedule.in_flight_round,
                unit=state["flight_unit"],
                weight=state["flight_weight"],
                handle=None,
                arrived=bool(state["arrived"]),
                reading=LaneReading(**state["reading"]),
            )
