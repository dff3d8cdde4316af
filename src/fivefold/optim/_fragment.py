"""One fragment: a part of the model with an outer state and rounds of its own.

Most rules have one fragment, the whole model. A fragment knows when it launches and merges
(``_schedule``), holds its flat buffers (``_flat``) and turns what arrived into the scalars of an
outer step. Live parameters are touched on the training thread only, at boundaries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from fivefold.errors import CommunicationError
from fivefold.optim._boundary_clock import BoundaryClock
from fivefold.optim._flat import FlatGroup, Piece
from fivefold.optim._frozen import FrozenTensors
from fivefold.optim._merge import (
    MERGES,
    MergeTask,
    merge_of,
    merge_pieces,
    outer_coefficients,
)
from fivefold.optim._metadata import (
    Metadata,
    MetadataReading,
    names_apart,
    payload_hash,
    replica_hash,
    require_equal,
    require_equal_inside,
)
from fivefold.optim._outer_optimizer import OuterOptimizerStep
from fivefold.optim._rules.outer_optimizer import OuterOptimizer
from fivefold.optim._schedule import Boundary, RoundSchedule
from fivefold.optim._shards import local_tensor
from fivefold.optim._state import (
    OF_OPTIMIZER,
    EngineContext,
    InAllReduce,
    OuterState,
    is_handed_over,
    matching_buffers,
)
from fivefold.optim._update import OuterCoefficients, PieceStatistics, read_numbers
from fivefold.optim.statistics import AllReduceRecord

# An all-reduce that is waited for and gets lost goes out again, but not for ever.
_MOST_ATTEMPTS = 16


class Fragment:
    """Outer state and rounds of one part of the model."""

    _rounds_averaged = False  # whether a codec may round what is averaged

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
        self._frozen, self._shared = FrozenTensors(groups), context
        self._state = OuterState(own_share=1.0 / context.transport.world_size)
        self._in_flight: InAllReduce | None = None
        self._waited_before_s = 0.0
        device = self.all_groups[0].anchor.device
        self._metadata = Metadata(context.transport.world_size, device=device)
        self._clock = BoundaryClock(device)
        self._weighted = False
        self._finite = True
        self._exact = False  # whether the boundary takes the plain mean
        self._untold = 0  # of a lost all-reduce: others still have to be told
        self._others_lr: float | None = None
        self._optimizer: OuterOptimizerStep | None = None
        if isinstance(context.rule, OuterOptimizer) and groups:
            anchors = [view for group in groups for view in group.shaped(group.anchor)]
            gradients = [v for group in groups for v in group.shaped(group.extras["gradient"])]
            self._optimizer = OuterOptimizerStep(context.rule, zip(anchors, gradients, strict=True))
        exact = {"num_exact": len(averaged)} if averaged and not self._rounds_averaged else {}
        context.transport.prepare(self._payloads(), fragment=index, **exact)

    @property
    def all_groups(self) -> list[FlatGroup]:
        """The parameters' flat groups, and those of what is only averaged."""
        return [*self.groups, *self.averaged]

    @property
    def anchors(self) -> list[torch.Tensor]:
        """Flat anchors."""
        return [group.anchor for group in self.all_groups]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the live tensors."""
        return (tensor for group in self.all_groups for tensor in group.tensors)

    def names(self) -> list[str]:
        """Return the names of the live tensors, all different."""
        known, gone = self._shared.names(), f"no longer in the model: {self.index}"
        return [known.get(id(t), f"{gone}.{number}") for number, t in enumerate(self.tensors())]

    def write_anchor(self) -> None:
        """Put the anchor into the model."""
        for piece in self._pieces():
            piece.local.copy_(piece.anchor)
        self._share_rows()

    def _payloads(self) -> list[torch.Tensor]:
        return [group.payload for group in self.all_groups]

    def _pieces(self, of: list[FlatGroup] | None = None) -> Iterator[Piece]:
        groups = self.all_groups if of is None else of
        return (piece for group in groups for piece in group.pieces())

    def _share_rows(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        worker = self._shared.worker
        if worker is not None and worker.splits:
            worker.share_rows(self.tensors() if tensors is None else tensors)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, and live buffers by tensor; an all-reduce must have been landed."""
        flown = self._in_flight or InAllReduce(round=-1)
        reading = flown.reading or MetadataReading.empty(self._shared.transport.world_size)
        tensors = self._buffers()
        if self._optimizer is not None:
            entries = self._optimizer.entries()
            for name, own in zip(self.names(), entries, strict=False):  # not of what is averaged
                tensors[name] |= {f"{OF_OPTIMIZER}{key}": value for key, value in own.items()}
        return self._numbers() | {
            "in_flight": {
                "unit": flown.unit,
                "weight": flown.weight,
                "arrived": flown.arrived,
                "reading": asdict(reading),
            },
            "tensors": tensors,
        }

    def shared_state(self) -> dict[str, Any]:
        """Return what all workers have in common at this moment, with a landed all-reduce.

        Called from within a launch it is without that one, in which a newcomer takes part.
        """
        state = self.state_dict()
        if self.launching is not None:
            del state["in_flight"]
        state["tensors"] = {
            name: {key: value for key, value in entries.items() if is_handed_over(key, state)}
            for name, entries in state["tensors"].items()
        }
        return state

    def matching(
        self, state: Mapping[str, Any], *, shared: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the live buffers with what a state, or what others share of it, has for them.

        Raises:
            ConfigurationError: The state is of other tensors.
        """
        mine = self._buffers()
        if shared:
            mine = {
                name: {key: buffer for key, buffer in entries.items() if is_handed_over(key, state)}
                for name, entries in mine.items()
            }
        dtypes = {n: t.dtype for n, t in zip(self.names(), self.tensors(), strict=True)}
        return matching_buffers(mine, state["tensors"], written_as=dtypes)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()`` of this rank."""
        _write(self.matching(state))
        self._load_numbers(state)

    def begin_with(
        self, tensors: dict[str, dict[str, Any]], *, total_steps: int, weight: float | None
    ) -> None:
        """Begin rounds of another shape with saved buffers, of which nothing is in flight."""
        _write(self.matching({"tensors": {name: tensors.get(name, {}) for name in self.names()}}))
        self.schedule.total_steps, self._state.weight = total_steps, weight

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Stand where the workers stand in their round, at the anchor, with nothing of its own."""
        _write(self.matching(state, shared=True))
        self._load_numbers(state)
        self._state.weight = None
        self._state.own_share = 1.0 / self._shared.transport.world_size
        self.begin()

    def _buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return views of the flat buffers, by tensor and then by what they are."""
        views = [
            dict(zip(group.buffers(), parts, strict=True))
            for group in self.all_groups
            for parts in zip(*map(group.shaped, group.buffers().values()), strict=True)
        ]
        return dict(zip(self.names(), views, strict=True))

    def _numbers(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.state(),
            "scalars": self._state.numbers(),
            "outer_steps": 0 if self._optimizer is None else self._optimizer.steps,
        }

    def _load_numbers(self, state: Mapping[str, Any]) -> None:
        self.schedule.restore(state["schedule"])
        self._state = OuterState(**state["scalars"])
        self._clock.forget()
        self._frozen.announced()
        if self._optimizer is not None:
            entries = [
                {
                    key.removeprefix(OF_OPTIMIZER): value
                    for key, value in state["tensors"][name].items()
                    if key.startswith(OF_OPTIMIZER)
                }
                for name in self.names()
            ]
            self._optimizer.load(state["outer_steps"], entries)
        self._in_flight = None
        if self.schedule.in_flight_round is not None and "in_flight" in state:
            flown = dict(state["in_flight"])
            self._in_flight = InAllReduce(
                round=self.schedule.in_flight_round,
                reading=MetadataReading(**flown.pop("reading")),
                **flown,
            )

    # -- what the engine calls --------------------------------------------------------------------

    def count(self, weight: float | None) -> Boundary | None:
        """Count one local step of this weight; return what is to be done after it."""
        self._weighted = weight is not None
        if weight is not None:
            self._state.weight = (self._state.weight or 0.0) + weight
        return self.schedule.step()

    def run(self, boundary: Boundary) -> None:
        """Wait, merge and launch as the boundary says."""
        self._exact = boundary.exact
        self._look()
        self._clock.begin()
        waited_before_s = (meter := self._shared.meter).exposed_wait_s
        landed = self._arrive() if boundary.arriving_round is not None else None
        launched, waits = boundary.launched_round, boundary.wait_for_launched
        if boundary.drains and launched is None and landed is not None and not landed.arrived:
            launched, waits = landed.round, True  # nothing may stay open: it goes out again now
        if launched is not None:
            self._agree_inside()
        if launched is not None and landed is not None:
            has_steps = boundary.launched_round is not None and self.schedule.ended_steps > 0
            self._state.weight = self._weight_after(landed, has_steps=has_steps)
        anchor_hash = self._hash_if_due(launched)
        settles = boundary.drains and launched is None
        self._merge(landed, send=launched is not None, settles=settles, waits=waits)
        if launched is not None:
            step_s = self._step_s(waited_before_s)
            if step_s > 0:
                meter.step_times_s.append(step_s)
            self._launch(launched, anchor_hash=anchor_hash, step_s=step_s)
        if waits:
            self._settle()
        if launched is not None:
            self._clock.launch()
            self._waited_before_s = meter.exposed_wait_s
        meter.boundary_s += self._clock.own_s()

    def _look(self) -> None:
        """Follow what the tensors are now, before a boundary."""

    def _settle(self) -> None:
        """Wait for what was launched and merge it; while it gets lost, send it again."""
        for _ in range(_MOST_ATTEMPTS):
            landed = self._arrive()
            lost = not landed.arrived
            self._state.weight = landed.weight if lost else None
            self._merge(landed, send=lost, settles=not lost)
            if not lost:
                return
            self._launch(landed.round, anchor_hash=0, step_s=0.0)
        hint = "look at the network between the workers; start again from the last checkpoint"
        message = f"round {landed.round} was lost {_MOST_ATTEMPTS} times in a row"
        raise CommunicationError(message, hint=hint)

    def _weight_after(self, landed: InAllReduce, *, has_steps: bool) -> float | None:
        """Return the weight of what is sent next: of new steps, or else of what is sent again."""
        # Without new steps there is only what the all-reduce did not bring home: all of it where it
        # was lost, and what merges that keep local work left with this rank.
        lost = not landed.arrived
        if has_steps:
            return landed.weight if lost and self._state.weight == 0 else self._state.weight
        return landed.weight if lost or self._shared.rule.keeps_local else 0.0

    def begin(self) -> None:
        """Start from the anchor, which is equal on all ranks now."""
        self._frozen.forget()
        for group in self.all_groups:
            group.forget_own_part()
        self.write_anchor()
        for piece in self._pieces(of=[g for g in self.all_groups if "rest" in g.extras]):
            piece.write(piece.anchor)

    @torch.no_grad()
    def begin_at_mean(self) -> None:
        """Start from the mean of what the ranks have, which is waited for."""
        transport, measured = self._shared.transport, PieceStatistics()
        self._agree_inside()
        transport.broadcast(self.anchors)
        for piece in self._pieces():
            torch.sub(piece.anchor, piece.local, out=piece.payload)
            measured.look_at(piece.payload)
        self._finite = self._clock.all_finite(measured)
        non_finite = self._first_non_finite()
        if non_finite:
            self._clear_payloads()
        self._metadata.write(transport.rank, weight=float(not non_finite), non_finite=non_finite)
        what = f"the mean of the new parameters of fragment {self.index}"
        launch = getattr(transport, "launch_exactly", transport.launch)
        handle = launch(
            self._payloads(), metadata=self._metadata.tensor, fragment=self.index, what=what
        )
        self._wait(handle, what=what)
        reading = self._metadata.read()
        self._tell_left_out(reading, round_number=self.schedule.round)
        for group in self.all_groups:
            group.anchor.sub_(group.payload.div_(reading.total_weight))
        self.begin()

    def has_moved(self, *, parameters_alone: bool = False) -> bool:
        """Return whether parameters or buffers are no longer what the last step left."""
        pieces = self._pieces(of=self.groups if parameters_alone else None)
        return any(not torch.equal(p.local, p.anchor.to(p.local.dtype)) for p in pieces)

    def land(self) -> None:
        """Wait for what is in flight; it stays in flight in the schedule's sense."""
        if self._in_flight is not None:
            self._land(self._in_flight)

    def take_part(self, round_number: int, *, unit: float) -> None:
        """Take part in a launch with weight 0: a newcomer has no work of its own yet."""
        self._clear_payloads()
        self._others_lr = unit  # this worker's own schedule may stand elsewhere
        self._send(round_number, weight=0.0, anchor_hash=0, step_s=0.0)
        if self.schedule.in_flight_round is None:  # the others wait for it at once
            self._settle()
        self._others_lr = None

    @property
    def link_s(self) -> float:
        """Seconds that the network needs for this fragment, as all ranks know; 0 for not yet."""
        return self._state.link_s

    # -- arrival ----------------------------------------------------------------------------------

    def _arrive(self) -> InAllReduce:
        all_reduce = self._in_flight
        assert all_reduce is not None, "the schedule merges only what was launched"
        self._land(all_reduce)
        self._in_flight = None
        reading = all_reduce.reading
        assert reading is not None, "landing reads the lane"
        if all_reduce.arrived:
            self._read(reading, all_reduce.round)
        else:
            self._untold = all_reduce.non_finite
        return all_reduce

    def _read(self, reading: MetadataReading, round_number: int) -> None:
        """Take in what all ranks wrote; raise or warn where it tells of trouble."""
        state, rank = self._state, self._shared.transport.rank
        self._tell_left_out(reading, round_number=round_number)
        if rank == 0 and round_number == 0 and not self._shared.told_same_work:
            self._shared.told_same_work = reading.tell_same_work()
        reading.require_weights_alike()
        reading.require_rules_alike()
        # Those whose payload was left out too; empty slots and newcomers have neither.
        there = enumerate(zip(reading.hash, reading.weight, strict=True))
        hashes = {slot: int(h) for slot, (h, weight) in there if h or weight}
        apart = functools.partial(names_apart, self.names, self.groups, self._shared.transport)
        alone = self._shared.rule.sends_gradients
        require_equal(hashes, round_number=round_number, apart=apart, of_gradients=alone)
        if reading.total_weight:
            own = reading.weight[rank] if reading.fits(self._shared.transport.world_size) else 0.0
            state.own_share = own / reading.total_weight
        if flown := [time_s for time_s in reading.all_reduce_s if time_s > 0]:
            state.link_s = min(flown)
            self._shared.meter.add_link_time(state.link_s, turn=self.schedule.total_steps)
        self._shared.fixed.compare(reading.fixed, reading.weight)
        if self.index == 0:
            self._shared.on_reading(reading, round_number)

    def _tell_left_out(self, reading: MetadataReading, *, round_number: int) -> None:
        """Say whose payloads were left out; all ranks read the same metadata, so all do alike."""
        found = reading.tell_non_finite(self.names, round_number=round_number)
        factor = self._shared.outlier_factor
        if factor is not None:
            self._state.follow_norms(reading.norm, most_times=factor)
            what = f"of fragment {self.index} " if self.index else ""
            found += reading.tell_outlying(what, round_number=round_number)
        self._shared.meter.left_out_payloads += found

    def _work_hashes(self, round_number: int) -> dict[str, float]:
        """Return hashes of the first payload by the optimizers' groups; 0 where it is all zeros."""
        parts: dict[str, list[torch.Tensor]] = {}
        for group in self.groups if round_number == 0 else ():
            for tensor, view in zip(group.tensors, group.shaped(group.payload), strict=True):
                parts.setdefault(f"work_{self._shared.group_of(tensor) % 4}", []).append(view)
        return {name: float(payload_hash(views)) for name, views in parts.items()}

    def _norm(self, weight: float) -> float:
        """Return the norm of this worker's payload per weight."""
        norms = [torch.linalg.vector_norm(group.payload).double() for group in self.groups]
        pairs = zip(read_numbers(norms), self.groups, strict=True)
        squares = math.fsum(norm * norm / group.copies for norm, group in pairs)
        if self._shared.worker is not None:
            (squares,) = self._shared.worker.sum([squares])
        return math.sqrt(squares) / weight if weight else 0.0

    def _land(self, all_reduce: InAllReduce) -> None:
        handle = all_reduce.handle
        if handle is None:  # already landed, by a checkpoint or before a resume
            return
        what = f"the all-reduce of round {all_reduce.round}, waited for after step "
        waited = self._wait(handle, what=f"{what}{self.schedule.total_steps}")
        all_reduce.arrived, wait_started_s, wait_ended_s = waited
        completed_s = handle.completed_at_s
        landed_s = wait_ended_s if completed_s is None else min(completed_s, wait_ended_s)
        all_reduce.reading = self._metadata.read()
        all_reduce.handle = None
        flown_s = landed_s - handle.launched_at_s
        self._state.last_all_reduce_s = flown_s if all_reduce.arrived else 0.0
        record = AllReduceRecord(
            round=all_reduce.round,
            payload_bytes=sum(payload.nbytes for payload in self._payloads()),
            launched_at_s=handle.launched_at_s,
            completed_at_s=landed_s,
            wait_started_at_s=wait_started_s,
            wait_ended_at_s=wait_ended_s,
            fragment=self.index,
            sent_bytes=handle.sent_bytes,
            lost=not all_reduce.arrived,
        )
        self._shared.meter.add_all_reduce(record)

    def _wait(self, handle: Any, *, what: str) -> tuple[bool, float, float]:
        return self._clock.wait(
            handle,
            fetch=self._metadata.fetch,
            what=what,
            rank=self._shared.transport.rank,
            timeout_s=self._shared.timeout_s,
        )

    def _mean(self, landed: InAllReduce | None) -> OuterCoefficients | None:
        """Return the scalars of a step by the mean of what arrived; None where nothing did."""
        reading = None if landed is None or not landed.arrived else landed.reading
        if reading is None or reading.total_weight == 0:
            return None
        scale = 1.0 / reading.total_weight
        return OuterCoefficients(momentum=0.0, delta_scale=scale, step=1.0, clip=None)

    def _coefficients(self, all_reduce: InAllReduce) -> OuterCoefficients | None:
        """Turn what the metadata brought into the scalars of this outer step."""
        mean, reading, shared = self._mean(all_reduce), all_reduce.reading, self._shared
        if mean is None or reading is None:
            return None
        if self._exact:
            self._state.gap = 1.0
            return mean
        by_lr = shared.rule.units == "lr"
        return outer_coefficients(
            shared.rule,
            self._state,
            reading=reading,
            send_unit=all_reduce.unit if by_lr else 1.0,
            step_unit=self._inner_lr() if by_lr else 1.0,
            elements=sum(group.anchor.numel() / group.copies for group in self.groups),
            shard_sum=list if shared.worker is None else shared.worker.sum,
        )

    # -- merge and launch -------------------------------------------------------------------------

    @torch.no_grad()
    def _merge(
        self, landed: InAllReduce | None, *, send: bool, settles: bool, waits: bool = False
    ) -> None:
        self._frozen.look()
        coefficients = None if landed is None else self._coefficients(landed)
        rule = self._shared.rule
        task = MergeTask(
            rule=rule,
            coefficients=coefficients,
            send=send,
            settles=settles,
            waits=waits,
            weight=self._weight() if send else 1.0,
            resend=landed is not None and not landed.arrived,
            own_share=self._state.own_share,
        )
        merge = MERGES["exact"] if self._exact else merge_of(rule)
        measured = PieceStatistics()
        for group in self.groups:
            part = merge_pieces(self._pieces(of=[group]), task, merge=merge)
            measured.include(part, copies=group.copies)
        if self._optimizer is not None and not self._exact:
            if coefficients is not None:
                self._optimizer.step()
            for piece in self._pieces(of=self.groups):
                piece.local.copy_(piece.anchor)
        reading = None if landed is None or not landed.arrived else landed.reading
        self._frozen.hold(reading, send=send)
        averaged = self._average(task, landed)
        self._share_rows()
        self._account(measured, coefficients, arrived=landed is not None)
        self._finite = self._clock.all_finite(measured, averaged)

    def _average(self, task: MergeTask, landed: InAllReduce | None) -> PieceStatistics:
        """Average the buffers, whatever the rule is."""
        mean = self._mean(landed)
        reading = None if landed is None else landed.reading
        total = 0.0 if reading is None else reading.total_weight
        task = replace(task, coefficients=mean, total_weight=total)
        return merge_pieces(self._pieces(of=self.averaged), task, merge=MERGES["average"])

    def _account(
        self, measured: PieceStatistics, coefficients: OuterCoefficients | None, *, arrived: bool
    ) -> None:
        state, schedule = self._state, self.schedule
        if coefficients is None:
            # How far, in the mean over the steps that are sent now, the anchor has moved since.
            share = 0.0 if arrived else state.steps_before_move / max(schedule.ended_steps, 1)
            state.last_step *= share
            state.last_move *= share
            return
        state.steps_before_move = schedule.open_steps
        gap = state.gap
        if coefficients.gap_slope is not None:
            gap = float(measured.gap_sum) / max(measured.elements, 1)
        state.last_step = coefficients.step
        state.last_move = coefficients.step * measured.momentum_square**0.5
        state.last_delta = measured.delta_square**0.5 * coefficients.mean_scale
        self._shared.meter.add_merge(gap=gap, clipped=measured.clipped, elements=measured.elements)

    def _launch(self, round_number: int, *, anchor_hash: int, step_s: float) -> None:
        weight = self._weight()
        self._state.weight = None
        non_finite = self._first_non_finite()
        if non_finite:  # as if this worker had done nothing
            weight = 0.0
            self._leave_out()
        non_finite = non_finite or self._untold
        self._untold = 0
        norm = outlying = 0.0
        if self._shared.outlier_factor is not None:
            norm = self._norm(weight)
            times = self._state.times_the_usual(norm)
            if times > self._shared.outlier_factor:
                outlying, weight = times, 0.0
                self._leave_out()
        self._send(
            round_number,
            weight=weight,
            norm=norm,
            outlying=outlying,
            anchor_hash=anchor_hash,
            step_s=step_s,
            non_finite=non_finite,
            **(self._work_hashes(round_number) if weight else {}),
        )

    def _first_non_finite(self) -> int:
        """Return the number, from 1, of the first tensor with a non-finite payload; 0 for none."""
        found = 0
        if not self._finite:
            views = [view for g in self.all_groups for view in g.shaped(g.payload)]
            finite = (bool(view.isfinite().all()) for view in views)
            found = next(number for number, fine in enumerate(finite, start=1) if not fine)
        worker = self._shared.worker
        if worker is not None:  # all of its ranks leave the mean, or none does
            numbers = [int(number) for (number,) in worker.gather([float(found)]) if number]
            found = min(numbers, default=0)
        return found

    def _leave_out(self) -> None:
        self._clear_payloads()
        self._shared.on_non_finite()

    def _clear_payloads(self) -> None:
        for payload in self._payloads():
            payload.zero_()

    def _send(
        self,
        round_number: int,
        *,
        weight: float,
        anchor_hash: int,
        step_s: float,
        non_finite: int = 0,
        **seen: float,
    ) -> None:
        shared, state = self._shared, self._state
        self._metadata.write(
            shared.transport.rank,
            weight=weight,
            weighted=float(self._weighted),
            hash=float(anchor_hash),
            move=state.last_move,
            delta=state.last_delta,
            step_s=step_s,
            all_reduce_s=state.last_all_reduce_s,
            pending=shared.pending() if self.index == 0 else 0.0,
            fixed=shared.fixed.digest(round_number) if self.index == 0 else 0.0,
            non_finite=float(non_finite),
            frozen=self._frozen.announced(),
            rule=shared.rule_digest,
            communicates=shared.communicates() if self.index == 0 else 0.0,
            **seen,
        )
        state.last_delta = 0.0  # each norm travels once
        part = "" if self.index == 0 else f" of fragment {self.index}"
        step = f"launched after step {self.schedule.total_steps}"
        what = f"the all-reduce of round {round_number}{part} ({step})"
        unit = self._inner_lr()
        self.launching = round_number
        try:
            handle = shared.transport.launch(
                self._payloads(), metadata=self._metadata.tensor, fragment=self.index, what=what
            )
        finally:
            self.launching = None
        self._in_flight = InAllReduce(
            round=round_number, unit=unit, handle=handle, weight=weight, non_finite=non_finite
        )

    # -- small helpers ----------------------------------------------------------------------------

    def _weight(self) -> float:
        return 1.0 if self._state.weight is None else self._state.weight

    def _inner_lr(self) -> float:
        return self._shared.inner_lr() if self._others_lr is None else self._others_lr

    def _step_s(self, waited_s: float) -> float:
        """Return seconds per local step, without waits, since the last launch; 0 for not known."""
        steps, passed_s = self.schedule.ended_steps, self._clock.since_launch_s()
        if passed_s is None or steps == 0:
            return 0.0
        return (passed_s - (waited_s - self._waited_before_s)) / steps

    def _hash_if_due(self, launched_round: int | None) -> int:
        every = self._shared.check_every_rounds
        if launched_round is None or not every or launched_round % every:
            return 0  # the same on all ranks, so it compares equal
        worker = self._shared.worker
        if worker is not None and worker.splits:
            live = [local_tensor(t).contiguous() for group in self.groups for t in group.tensors]
            found = worker.gather([float(replica_hash(live))])
            places = {place: int(value) for place, (value,) in enumerate(found)}
            require_equal_inside(places, round_number=launched_round)
        return replica_hash(self.anchors)

    def _agree_inside(self) -> None:
        """Bring together what the ranks of one worker have apart before a launch."""
        worker = self._shared.worker
        if worker is None:
            return
        if self._state.weight is not None:
            (self._state.weight,) = worker.sum([self._state.weight])
        if not self._rounds_averaged:  # an optimizer's states are sharded as their parameters are
            worker.average([tensor for group in self.averaged for tensor in group.tensors])


def _write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in pairs:
        buffer.copy_(value)
