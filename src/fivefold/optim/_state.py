"""What of the engine a checkpoint holds, and how it is put back.

The structure of a state depends on the rule, the model and the number of ranks only, never on the
moment, so that loaders which fill a prepared structure (``torch.distributed.checkpoint``) can be
used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import FlatGroup, Piece
from fivefold.optim._metadata import Metadata, MetadataReading
from fivefold.optim._outer_optimizer import OuterOptimizer, OuterOptimizerStep
from fivefold.optim._rules import OuterRule
from fivefold.optim._schedule import RoundSchedule
from fivefold.optim._shards import WorkerGroup
from fivefold.optim._update import Number
from fivefold.optim.statistics import StatisticsMeter
from fivefold.optim.transport import PendingAllReduce, Transport

_NORM_MEMORY = 16  # rounds over which norms are averaged
_ROUNDS_BEFORE_JUDGING = 8


_FORMAT = 9

SHARED_BUFFERS = ("anchor", "momentum")
"""Buffers that are equal on all workers between boundaries."""


@dataclass(kw_only=True)
class InAllReduce:
    """A launched round."""

    round: int  # its number
    unit: float  # inner learning rate when it was launched
    weight: float  # weight of this rank's payload
    # The transport's all-reduce; None once it has landed (the sum is in the payload).
    handle: PendingAllReduce | None
    arrived: bool = True  # whether it landed whole; False where it was lost
    reading: MetadataReading | None = None  # what its metadata brought, once it has landed
    non_finite: int = 0  # what its metadata says of this rank's payload; see ``MetadataReading``


@dataclass(kw_only=True)
class OuterState:
    """Scalars that outlive a boundary; equal on all ranks up to the last bits of the norms."""

    gap_reference: float | None = None  # C of the gap penalty; None before the first applied round
    gap: float = 1.0  # L of the last outer step
    # Factor from the momentum to the anchor's movement at the last boundary; 0 where it did not
    # move.
    last_step: float = 0.0
    last_move: Number = 0.0  # norm of that movement
    steps_before_move: int = 0  # local steps of the round at that moment
    # Norm of the mean pseudo-gradient applied last, until it has been sent.
    last_delta: Number = 0.0
    last_all_reduce_s: float = 0.0  # seconds of the last all-reduce
    own_share: float = 0.0  # this rank's share of the weights of the last all-reduce
    # Weight of the local steps since the last launch; None where none was given.
    weight: float | None = None
    usual_norm: float = 0.0  # moving average of the norms of all ranks' payloads
    norm_rounds: int = 0  # rounds that are in it
    link_s: float = 0.0  # shortest of the ranks' seconds for the last all-reduce that is known

    def follow_norms(self, norms: Sequence[float], *, most_times: float) -> None:
        """Take in what all ranks sent; an outlying norm counts as the largest that is not.

        So an honest change of scale is followed after some rounds, and a wild payload is not.
        """
        found = [norm for norm in norms if norm > 0]
        if not found:
            return
        if self.norm_rounds:
            bound = most_times * self.usual_norm
            found = [min(norm, bound) for norm in found]
        mean = math.fsum(found) / len(found)
        kept = min(self.norm_rounds, _NORM_MEMORY) / (min(self.norm_rounds, _NORM_MEMORY) + 1)
        self.usual_norm = kept * self.usual_norm + (1 - kept) * mean
        self.norm_rounds += 1

    def times_the_usual(self, norm: float) -> float:
        """Return norm over the usual one; 0 while too few rounds are known."""
        known = self.norm_rounds >= _ROUNDS_BEFORE_JUDGING and self.usual_norm > 0
        return norm / self.usual_norm if known else 0.0

    def numbers(self) -> dict[str, Any]:
        """Return plain numbers, for a checkpoint."""
        plain = dict(vars(self))
        return plain | {name: float(plain[name]) for name in ("last_move", "last_delta")}


def settings(rule: OuterRule, *, fragments: int, codec: str) -> dict[str, Any]:
    """Return what a state and the engine that loads it must agree on."""
    return {
        "format": _FORMAT,
        "rule": rule.name,
        "rule_settings": repr(sorted(asdict(rule).items(), key=lambda item: item[0])),
        "fragments": fragments,
        "codec": codec,
    }


def require_same(state: object, current: dict[str, Any]) -> None:
    """Check that a saved state belongs to this engine."""
    saved = state.get("settings") if isinstance(state, Mapping) else None
    if saved is None:
        message = "this is no state of an OuterSync"
        raise ConfigurationError(message, hint="load what its state_dict() returned")
    for key in current | saved:
        if saved.get(key) != current.get(key):
            message = (
                f"the saved outer state has {key}={saved.get(key)!r}, this run has "
                f"{current.get(key)!r}"
            )
            hint = "resume with the same rule, or load the model alone into a new OuterSync"
            raise ConfigurationError(message, hint=hint)


def groups_state(
    groups: Sequence[FlatGroup], *, only: Sequence[str] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the live buffers by group and name."""
    return {str(index): _buffers(group, only) for index, group in enumerate(groups)}


def restore_groups(
    groups: Sequence[FlatGroup],
    state: dict[str, dict[str, torch.Tensor]],
    *,
    only: Sequence[str] | None = None,
) -> None:
    """Copy saved buffers into the live ones."""
    for index, group in enumerate(groups):
        saved = state.get(str(index), {})
        for name, buffer in _buffers(group, only).items():
            if name not in saved or saved[name].shape != buffer.shape:
                found = tuple(saved[name].shape) if name in saved else "nothing"
                message = (
                    f"the saved outer state has {found} for {name} of group {index}, the model "
                    f"has {tuple(buffer.shape)}"
                )
                raise ConfigurationError(message, hint="resume with the model that was saved")
            buffer.copy_(saved[name])


def _buffers(group: FlatGroup, only: Sequence[str] | None) -> dict[str, torch.Tensor]:
    buffers = group.buffers()
    return buffers if only is None else {n: b for n, b in buffers.items() if n in only}


@dataclass(kw_only=True)
class EngineContext:
    """Rule, transport and settings that all fragments of one engine share."""

    rule: OuterRule  # the outer rule
    transport: Transport  # what moves the sums
    meter: StatisticsMeter  # where all-reduces and merges are counted
    inner_lr: Callable[[], float]  # reads the inner learning rate
    check_every_rounds: int  # replica checks; 0 for none
    timeout_s: float  # longest wait for an all-reduce on CUDA, where the backend reports no failure
    worker: WorkerGroup | None  # the ranks that act as one worker; None where that is one rank
    # What this rank would adopt, for the metadata; see ``LateParameters``.
    pending: Callable[[], float]
    name_of: Callable[[torch.Tensor], str]  # the name of a tensor of the model
    on_non_finite: Callable[[], None]  # told that this worker's own numbers are not finite
    # Told each metadata of the first fragment that arrived, with its round.
    on_reading: Callable[[MetadataReading, int], None]
    # Where the outer state lives; None for beside the parameters.
    outer_device: torch.device | None = None
    # Payloads of more than so many times the usual norm are left out; None for no such check.
    outlier_factor: float | None = None


class FragmentState:
    """Flat state, rounds and numbers of one part of the model."""

    def __init__(
        self,
        index: int,
        groups: list[FlatGroup],
        *,
        averaged: list[FlatGroup],
        schedule: RoundSchedule,
        context: EngineContext,
    ) -> None:
        self.index = index
        self.groups = groups
        self.averaged = averaged
        self.schedule = schedule
        self.launching: int | None = None
        self._shared = context
        self._state = OuterState(own_share=1.0 / context.transport.world_size)
        self._in_flight: InAllReduce | None = None
        self._round_began_s: float | None = None
        self._waited_before_s = 0.0
        device = [*groups, *averaged][0].anchor.device
        self._metadata = Metadata(context.transport.world_size, device=device)
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        self._weighted = False
        self._finite = True
        self._exact = False  # whether the boundary takes the plain mean
        self._untold = 0  # of a lost all-reduce: others still have to be told
        self._others_lr: float | None = None
        self._optimizer: OuterOptimizerStep | None = None
        if isinstance(context.rule, OuterOptimizer) and groups:
            self._optimizer = OuterOptimizerStep(context.rule, self._outer_parameters())
        context.transport.prepare(self._payloads(), fragment=index)

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

    def tensor_names(self) -> dict[int, str]:
        """Return the names of the live tensors, by their identity."""
        return {id(tensor): self._shared.name_of(tensor) for tensor in self.tensors()}

    def _outer_parameters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for group in self.groups:
            gradients = group.shaped(group.extras["gradient"])
            yield from zip(group.shaped(group.anchor), gradients, strict=True)

    def _payloads(self) -> list[torch.Tensor]:
        return [group.payload for group in [*self.groups, *self.averaged]]

    def _pieces(self, of: list[FlatGroup] | None = None) -> Iterator[Piece]:
        groups = [*self.groups, *self.averaged] if of is None else of
        return (piece for group in groups for piece in group.pieces())

    def _share_rows(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        worker = self._shared.worker
        if worker is not None and worker.splits:
            worker.share_rows(self.tensors() if tensors is None else tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return buffers and numbers; an all-reduce must have been landed."""
        all_reduce = self._in_flight
        empty = MetadataReading.empty(self._shared.transport.world_size)
        reading = empty if all_reduce is None or all_reduce.reading is None else all_reduce.reading
        return self._numbers() | {
            "arrived": True if all_reduce is None else all_reduce.arrived,
            "reading": reading.numbers(),
            "groups": groups_state(self.groups),
            "averaged": groups_state(self.averaged),
            "outer_optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
        }

    def shared_state(self) -> dict[str, Any]:
        """Return what all workers have in common at this moment.

        Called from within a launch, it is without that all-reduce, in which a newcomer takes part;
        otherwise it is with the all-reduce, which must have been landed.
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
        """Stand where the workers stand in their round, at the anchor, with nothing of its own."""
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
            "all_reduce_unit": 0.0 if self._in_flight is None else self._in_flight.unit,
            "all_reduce_weight": 0.0 if self._in_flight is None else self._in_flight.weight,
        }

    def _load_numbers(self, state: dict[str, Any]) -> None:
        self.schedule.restore(state["schedule"])
        self._state = OuterState(**state["scalars"])
        self._round_began_s = None
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["outer_optimizer"])
        self._in_flight = None
        if self.schedule.in_flight_round is not None and "reading" in state:
            self._in_flight = InAllReduce(
                round=self.schedule.in_flight_round,
                unit=state["all_reduce_unit"],
                weight=state["all_reduce_weight"],
                handle=None,
                arrived=bool(state["arrived"]),
                reading=MetadataReading(**state["reading"]),
            )
