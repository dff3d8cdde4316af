"""``OuterSync``: outer synchronisation of local training, behind compute.

It ties the pure parts together: ``_schedule`` says when, ``_transport`` moves, ``_update``
computes. Live parameters are touched on the training thread only, at boundaries: what is in
flight is always the payload buffer. Nothing here knows a model's architecture or a trainer.

References:
    CO2, arXiv 2401.16265, figure 1 and Algorithm 1.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import flat_groups
from fivefold.optim._merge import merge_pieces
from fivefold.optim._replica_hash import replica_hash, require_equal
from fivefold.optim._rules import OuterRule
from fivefold.optim._schedule import Boundary, RoundSchedule
from fivefold.optim._stability import StabilityWatch
from fivefold.optim._staleness import ConstantPenalty, GapPenalty
from fivefold.optim._state import (
    InFlight,
    OuterState,
    groups_state,
    require_same,
    restore_groups,
    settings,
)
from fivefold.optim._statistics import FlightRecord, StatisticsMeter, SyncStatistics
from fivefold.optim._transport import ProcessGroupTransport, Transport
from fivefold.optim._update import ElementGap, OuterCoefficients, PieceStatistics

__all__ = ["OuterSync"]

# Lane entries that travel with each payload; replica hashes follow them on checked rounds.
_LANE_MOVE, _LANE_DELTA, _LANE_FIXED = 0, 1, 2


class OuterSync:
    """Keep replicas of a model together with one all-reduce per round of local steps.

    Every rank trains on its own with any ``torch.optim`` optimizer. Call ``step()`` once after
    each optimizer step (with gradient accumulation: once per optimizer step; with a gradient
    scaler: also when it skipped). At the end of a round the rule's outer step sets all
    replicas to the same parameters. With ``CO2`` the all-reduce runs behind the next round.

    Making one is a collective call: rank 0's parameters and buffers are broadcast, and settings
    are compared. Buffers (BatchNorm statistics) are not synchronised after that.

    Args:
        model: The bare module (not wrapped in DistributedDataParallel); all its trainable
            parameters are synchronised.
        optimizer: The inner optimizer; only its first group's learning rate is read, by rules
            with ``units="lr"``.
        rule: ``CO2(...)``, ``DelayCorrected(...)``, ``SlowMo(...)``, ``DiLoCo(...)`` or
            ``LocalSGD(...)``.
        process_group: Ranks that take part; None for all. A group of the same ranks is made for
            the engine alone.
        timeout_s: Longest wait for a peer, in seconds.
        check_every_rounds: Every so many rounds a hash of the anchor travels with the payload
            and all ranks compare; 0 for never.
        transport: What moves the sums; None for ``torch.distributed``. For tests and other
            backends.

    Raises:
        ConfigurationError: torch.distributed is not initialised, the world has one rank, the
            ranks' models or rules differ, or the model cannot be synchronised.
        CommunicationError: A peer ended or the network failed.

    References:
        Sun et al., ICLR 2024, arXiv 2401.16265.

    Example:
        >>> from fivefold.optim import CO2
        >>> from fivefold.testing import run_world
        >>> def train(transport):
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     sync = OuterSync(model, optimizer, rule=CO2(tau=2), transport=transport)
        ...     for _ in range(8):
        ...         model(torch.randn(4, 2)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         sync.step()
        ...     sync.finalize()
        ...     return sync.statistics().merged_rounds
        >>> run_world(2, train)
        [4, 4]
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rule: OuterRule,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        check_every_rounds: int = 16,
        transport: Transport | None = None,
    ) -> None:
        _require_usable(model, optimizer, timeout_s, check_every_rounds)
        self._rule = rule
        self._optimizer = optimizer
        self._check_every_rounds = check_every_rounds
        self._transport = transport or ProcessGroupTransport(process_group, timeout_s=timeout_s)
        self._schedule = RoundSchedule(
            tau=rule.tau,
            delayed=rule.delayed,
            first_round_synchronous=rule.bootstrap == "sync",
            keeps_local=rule.keeps_local,
        )
        self._groups = flat_groups(
            model.parameters(),
            with_momentum=_needs_momentum(rule),
            with_sent=rule.keeps_local,
        )
        self._state = OuterState()
        self._in_flight: InFlight | None = None
        lane_size = _LANE_FIXED + self._transport.world_size
        self._lane = torch.zeros(
            lane_size, dtype=torch.float64, device=self._groups[0].anchor.device
        )
        self._meter = StatisticsMeter(world_size=self._transport.world_size)
        self._stability = StabilityWatch(rule)
        self._start_equal(model)

    def step(self) -> None:
        """Count one local step; at the end of a round wait, merge and launch as the rule says.

        Raises:
            CommunicationError: The all-reduce failed or timed out; names rank, round and step.
            ReplicaMismatchError: The replicas' anchors differ; names the ranks.
        """
        boundary = self._schedule.step()
        if boundary is not None:
            self._run(boundary)

    def finalize(self) -> None:
        """Drain: apply all work that was done anywhere, and leave all replicas equal.

        First the all-reduce in flight is merged, then the local steps since the last boundary
        (a partial round) are sent, waited for and merged, both with the rule's own outer step.
        A second call does nothing. Training may go on afterwards; the pipeline then fills again
        as at the start.

        Raises:
            CommunicationError: The all-reduce failed or timed out.
            ReplicaMismatchError: The replicas' anchors differ.
        """
        boundary = self._schedule.drain()
        if boundary is not None:
            self._run(boundary)

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the anchor, which is equal on all ranks, into the model for the duration.

        Use it to evaluate between boundaries. The local parameters come back afterwards.
        """
        saved = [p.detach().clone() for group in self._groups for p in group.parameters]
        with torch.no_grad():
            self._write_anchor()
        try:
            yield
        finally:
            parameters = [p for group in self._groups for p in group.parameters]
            with torch.no_grad():
                for parameter, value in zip(parameters, saved, strict=True):
                    parameter.copy_(value)

    def statistics(self) -> SyncStatistics:
        """Return the totals since the start (over resumes too) as a frozen record."""
        return self._meter.snapshot(steps=self._schedule.total_steps, rounds=self._schedule.round)

    def flights(self) -> list[FlightRecord]:
        """Return and forget the flights that were waited for since the last call."""
        return self._meter.take_flights()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as tensors and plain values.

        A flight is waited for, so that its sum can be saved, and stays in flight in the
        schedule's sense: the run that goes on, and one that resumes here, merge it at the same
        boundary and reach the same parameters bit for bit. Tensors are the live buffers; copy
        or write them before the next ``step()``.

        Raises:
            CommunicationError: The flight failed or timed out.
        """
        flight = self._in_flight
        if flight is not None:
            self._land(flight)
        return {
            "settings": self._settings(),
            "schedule": dict(self._schedule.state()),
            "scalars": vars(self._state).copy(),
            "meter": self._meter.state(),
            "flight_unit": 0.0 if flight is None else flight.unit,
            "lane": self._lane,
            "groups": groups_state(self._groups),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()`` of the same rank, model and rule.

        The model's and the inner optimizer's own states are loaded by the caller.

        Args:
            state: What ``state_dict()`` returned.

        Raises:
            ConfigurationError: The state is of another rule, world size or model.
        """
        require_same(state["settings"], self._settings())
        restore_groups(self._groups, state["groups"])
        self._schedule.restore(state["schedule"])
        self._state = OuterState(**state["scalars"])
        self._meter.restore(state["meter"])
        self._lane.copy_(state["lane"])
        in_flight = self._schedule.in_flight_round
        self._in_flight = (
            None
            if in_flight is None
            else InFlight(round=in_flight, unit=state["flight_unit"], handle=None)
        )

    # -- boundaries -----------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self, boundary: Boundary) -> None:
        started_s = time.perf_counter()
        waited_before_s = self._meter.exposed_wait_s
        coefficients = self._arrive() if boundary.arriving_round is not None else None
        hash_now = self._hash_if_due(boundary)
        measured = self._merge(coefficients, send=boundary.launched_round is not None)
        self._account(measured, coefficients)
        if boundary.launched_round is not None:
            self._launch(boundary.launched_round, hash_now)
        if boundary.wait_for_launched:
            coefficients = self._arrive()
            measured = self._merge(coefficients, send=False)
            self._account(measured, coefficients)
        waited_s = self._meter.exposed_wait_s - waited_before_s
        self._meter.boundary_s += time.perf_counter() - started_s - waited_s

    def _arrive(self) -> OuterCoefficients:
        """Wait for the flight and turn its lane into the scalars of this outer step."""
        flight = self._in_flight
        assert flight is not None, "the schedule merges only what was launched"
        self._land(flight)
        self._in_flight = None
        world = self._transport.world_size
        lane = self._lane.tolist()
        require_equal([int(h) for h in lane[_LANE_FIXED:]], round_number=flight.round)
        return self._coefficients(
            move=lane[_LANE_MOVE] / world, received=lane[_LANE_DELTA] / world, flight=flight
        )

    def _land(self, flight: InFlight) -> None:
        if flight.handle is None:  # already landed, by a checkpoint or before a resume
            return
        wait_started_s = time.perf_counter()
        flight.handle.wait()
        wait_ended_s = time.perf_counter()
        completed_s = flight.handle.completed_at_s
        record = FlightRecord(
            round=flight.round,
            payload_bytes=self._payload_bytes(),
            launched_at_s=flight.handle.launched_at_s,
            completed_at_s=wait_ended_s if completed_s is None else min(completed_s, wait_ended_s),
            wait_started_at_s=wait_started_s,
            wait_ended_at_s=wait_ended_s,
        )
        flight.handle = None
        self._meter.add_flight(record)

    def _coefficients(self, *, move: float, received: float, flight: InFlight) -> OuterCoefficients:
        rule, penalty, state = self._rule, self._rule.penalty, self._state
        in_lr_units = rule.units == "lr"
        send_unit = flight.unit if in_lr_units else 1.0
        step_unit = self._inner_lr() if in_lr_units else 1.0
        gap, element_gap = 1.0, None
        if isinstance(penalty, ConstantPenalty):
            gap = penalty.value
        elif isinstance(penalty, GapPenalty):
            state.gap_reference = penalty.next_reference(state.gap_reference, received)
            reference = state.gap_reference
            if penalty.norm == "element" and reference is not None:
                element_gap = ElementGap(move_scale=state.last_step, reference=reference)
            elif penalty.norm != "element":
                gap = penalty.gap(move=move, reference=reference)
        state.gap = gap
        return OuterCoefficients(
            momentum=rule.outer_momentum,
            delta_scale=1.0 / (self._transport.world_size * gap * send_unit),
            step=rule.outer_lr * step_unit,
            clip=rule.clip,
            element_gap=element_gap,
            with_norms=isinstance(penalty, GapPenalty),
            nesterov=rule.nesterov,
        )

    def _merge(self, coefficients: OuterCoefficients | None, *, send: bool) -> PieceStatistics:
        pieces = (piece for group in self._groups for piece in group.pieces())
        return merge_pieces(pieces, coefficients, send=send, keeps_local=self._rule.keeps_local)

    def _account(self, measured: PieceStatistics, coefficients: OuterCoefficients | None) -> None:
        state = self._state
        if coefficients is None:  # nothing arrived: the anchor stayed where it was
            state.last_step = state.last_move = 0.0
            return
        gap = state.gap
        if coefficients.element_gap is not None:
            gap = measured.gap_sum / max(measured.elements, 1)
        state.last_step = coefficients.step
        state.last_move = coefficients.step * measured.momentum_square**0.5
        state.last_delta = measured.delta_square**0.5 / self._transport.world_size
        penalty = self._rule.penalty
        if isinstance(penalty, GapPenalty) and penalty.norm != "l2":
            root = max(measured.elements, 1) ** 0.5
            state.last_move /= root
            state.last_delta /= root
        self._meter.add_merge(gap=gap, clipped=measured.clipped, elements=measured.elements)
        self._stability.watch(self._meter)

    def _launch(self, round_number: int, anchor_hash: int) -> None:
        transport = self._transport
        self._lane.zero_()
        self._lane[_LANE_MOVE] = self._state.last_move
        self._lane[_LANE_DELTA] = self._state.last_delta
        self._state.last_delta = 0.0  # each norm travels once
        self._lane[_LANE_FIXED + transport.rank] = anchor_hash
        payloads = [group.payload for group in self._groups]
        step = self._schedule.total_steps
        what = f"the all-reduce of round {round_number} (launched after step {step})"
        handle = transport.launch(payloads, lane=self._lane, fragment=0, what=what)
        self._in_flight = InFlight(round=round_number, unit=self._inner_lr(), handle=handle)

    def _hash_if_due(self, boundary: Boundary) -> int:
        every = self._check_every_rounds
        if boundary.launched_round is None or not every or boundary.launched_round % every:
            return 0  # the same on all ranks, so it compares equal
        return replica_hash([group.anchor for group in self._groups])

    # -- small helpers --------------------------------------------------------------------------

    @torch.no_grad()
    def _start_equal(self, model: torch.nn.Module) -> None:
        transport = self._transport
        if transport.world_size < 2:
            message = "outer synchronisation needs at least two ranks; got world_size=1"
            hint = "start more ranks (fivefold train --nproc 2, torchrun --nproc-per-node 2)"
            raise ConfigurationError(message, hint=hint)
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        settings = {"rule": self._rule, "parameters": shapes, "check": self._check_every_rounds}
        for rank, other in enumerate(transport.gather_objects(settings)):
            for key, value in settings.items():
                if other[key] != value:
                    message = f"rank {rank} has another {key} than rank {transport.rank}"
                    hint = "all ranks must use the same model and the same rule"
                    raise ConfigurationError(message, hint=hint)
        anchors = [group.anchor for group in self._groups]
        rest = [p.detach() for p in model.parameters() if not p.requires_grad]
        transport.broadcast([*anchors, *rest, *model.buffers()])
        self._write_anchor()

    def _write_anchor(self) -> None:
        for piece in (piece for group in self._groups for piece in group.pieces()):
            piece.local.copy_(piece.anchor)

    def _settings(self) -> dict[str, Any]:
        return settings(self._rule, world_size=self._transport.world_size)

    def _payload_bytes(self) -> int:
        return sum(group.payload.nbytes for group in self._groups)

    def _inner_lr(self) -> float:
        lr = float(self._optimizer.param_groups[0]["lr"])
        if self._rule.units == "lr" and lr <= 0:
            message = f'units="lr" needs a positive inner learning rate at a boundary; got {lr}'
            raise ConfigurationError(message, hint='use units="delta", or a schedule above zero')
        return lr


def _needs_momentum(rule: OuterRule) -> bool:
    penalty = rule.penalty
    by_element = isinstance(penalty, GapPenalty) and penalty.norm == "element"
    return rule.outer_momentum > 0 or by_element


def _require_usable(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, timeout_s: float, every: int
) -> None:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        message = "the model is wrapped in DistributedDataParallel, which communicates every step"
        raise ConfigurationError(message, hint="pass the bare module: OuterSync(model.module, ...)")
    if not isinstance(optimizer, torch.optim.Optimizer):
        message = f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}"
        raise ConfigurationError(message)
    if timeout_s <= 0:
        raise ConfigurationError(f"timeout_s must be positive; got {timeout_s}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        message = f"check_every_rounds must be an integer of at least 0; got {every!r}"
        raise ConfigurationError(message, hint="0 switches the replica check off")
