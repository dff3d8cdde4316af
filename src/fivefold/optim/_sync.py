"""``OuterSync``: outer synchronisation of local training, behind compute.

It sets the parts up and drives them: ``_fragment`` holds state and rounds, ``transport`` moves,
``_update`` computes. Nothing here knows a model's architecture or a trainer.

References:
    CO2, arXiv 2401.16265, figure 1 and Algorithm 1.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.errors import ConfigurationError
from fivefold.optim._automatic_round import automatic_round
from fivefold.optim._communicating import CommunicationWatch, require_local
from fivefold.optim._delayed_gradients import GradientHooks
from fivefold.optim._fixed import FixedWatch
from fivefold.optim._fragment import Fragment
from fivefold.optim._inner_optimizers import (
    WeightWatch,
    as_optimizers,
    begin_optimizers_again,
    group_of,
    require_moved,
)
from fivefold.optim._kept_apart import kept_names, names_of, plain_name
from fivefold.optim._layout import (
    LateParameters,
    at_the_anchor,
    find_worker,
    fixed_tensors,
    late_fragment,
    make_fragments,
    may_lose,
    most_parts,
    require_codec_for,
    require_same_names,
    require_usable,
    rule_for,
    state_extras,
)
from fivefold.optim._metadata import MetadataReading, require_weight
from fivefold.optim._optimizer_states import state_fragments
from fivefold.optim._resume import (
    agree_to_load,
    begin_other_rounds,
    change_rule,
    require_fit,
    restore,
)
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._rules.delayed_gradients import DelayedGradients
from fivefold.optim._sharded_state import StateForm
from fivefold.optim._shards import WorkerGroup, reshard
from fivefold.optim._start import require_equal_at_the_end, start_equal
from fivefold.optim._state import EngineContext, changed_settings, require_same, settings
from fivefold.optim.auto_tau import TauDecision
from fivefold.optim.codecs import Codec
from fivefold.optim.statistics import (
    AllReduceRecord,
    StabilityWatch,
    StatisticsMeter,
    SyncStatistics,
)
from fivefold.optim.transport import ProcessGroupTransport, Transport

_LOG = logging.getLogger(__name__)


class OuterSync:
    """Keep replicas of a model together with one all-reduce per round of local steps.

    Every rank trains on its own with any ``torch.optim`` optimizer. Call ``step()`` once after
    each optimizer step (with gradient accumulation: once per optimizer step; with a gradient
    scaler: also when it skipped). At the end of a round the rule's outer step sets all
    replicas to the same parameters. With ``CO2`` the all-reduce runs behind the next round.

    Making one is a collective call: rank 0's parameters and buffers are broadcast, and settings
    are compared. Floating-point buffers of the state dict (BatchNorm statistics) are averaged with
    each round, in float64 whatever the codec; integer ones are not touched.

    A rank whose payload holds a not-a-number or an infinity counts with weight 0 in that round: a
    warning of the logger names rank, round and parameter on all ranks, and the rank goes on from
    the anchor, with its optimizer's state as before the first step. Where no rank is left whose
    payload counts, ``step()`` raises on all of them.

    Several ranks may act as one worker. Parameters that are DTensors over the worker's ranks
    (``fully_shard`` over the "shard" dimension of a mesh) need ``process_group=mesh["replicate"]``,
    the ranks that hold the same shard of the other workers. Parameters that are replicated inside
    the worker (DistributedDataParallel, ``ZeroRedundancyOptimizer``) need ``shard_group`` beside
    it. Either way a rank keeps and sends 1 / S of the outer state.

    Args:
        model: The bare module (not wrapped in DistributedDataParallel); all its trainable
            parameters are synchronised.
        optimizer: The inner optimizer, or several of them (step them all before ``step()``). Only
            the learning rate of the first one's first group is read, by rules with ``units="lr"``.
        rule: When and how workers are brought together; see "Which rule when" in the guides.
        process_group: Ranks that take part, as a group or a one-dimensional ``DeviceMesh``; None
            for all. A group of the same ranks is made for the engine alone.
        shard_group: Ranks that act as one worker and hold the same parameters; None where a worker
            is one rank, or where the parameters say it themselves.
        codec: How payloads travel: "fp32" (as they are), "bf16", "fp16", "int8", "int4", "topk",
            or a codec object; what a codec loses is sent with the next round (error feedback).
            "auto" lets ``tau="auto"`` choose among fp32, int8 and int4, with the round.
        outer_device: "same" keeps the outer state beside the parameters, "cpu" in the host's memory
            (pinned), from where it is also sent: with parameters on a GPU the process group then
            needs a backend for CPU tensors, such as ``init_process_group("cpu:gloo,cuda:nccl")``.
        average_states: States of the inner optimizer that are averaged too, each with the number
            of rounds between two means, for example ``{"exp_avg": 3, "exp_avg_sq": 6,
            "momentum_buffer": 3}``; None for none. They travel as the parameters do.
        timeout_s: Longest wait for a peer, in seconds.
        check_every_rounds: Every so many rounds a hash of the anchor travels with the payload
            and all ranks compare; 0 for never.
        outlier_factor: A payload whose norm is more than this many times the moving average over
            all ranks and the last rounds is left out of its round as one that is not finite is; a
            warning names rank and round on all ranks. None for no such check (the default); it
            begins after 8 rounds, and 10 is a cautious value.
        ignore: Names of parameters and buffers that each rank keeps for itself, beside those of the
            model's list for DistributedDataParallel (``_ddp_params_and_buffers_to_ignore``; experts
            that are shared out are brought together all the same): neither sent at the start nor
            brought together.
        transport: What moves the sums; None for ``torch.distributed``. For tests and other
            backends.

    Raises:
        ConfigurationError: torch.distributed is not initialised, the world has one rank, the
            ranks' models or rules differ, or the model cannot be synchronised.
        CommunicationError: A peer ended or the network failed.

    References:
        Sun et al., ICLR 2024, arXiv 2401.16265. Averaged states: DES-LOC, arXiv 2505.22549.

    Examples:
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

    def __init__(  # noqa: PLR0913 - independent options, each with a default
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        rule: OuterRule,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        shard_group: dist.ProcessGroup | DeviceMesh | None = None,
        codec: str | Codec = "fp32",
        outer_device: Literal["same", "cpu"] = "same",
        average_states: Mapping[str, int] | None = None,
        timeout_s: float = 600.0,
        check_every_rounds: int = 16,
        outlier_factor: float | None = None,
        ignore: Sequence[str] = (),
        transport: Transport | None = None,
    ) -> None:
        self._apart = kept_names(model, ignore)
        self._optimizers = as_optimizers(optimizer)
        self._make_states_late = [not any(each.state.values()) for each in self._optimizers]
        require_usable(
            model,
            rule,
            apart=self._apart,
            timeout_s=timeout_s,
            every=check_every_rounds,
            outer_device=outer_device,
            outlier_factor=outlier_factor,
        )
        reshard(model)
        require_moved(self._optimizers, model, apart=self._apart)
        self._weights = WeightWatch(self._optimizers)
        self._weights.look()
        self._model = model
        self._closed = False
        self._made_transport = transport is None
        self._transport = transport or ProcessGroupTransport(
            process_group, timeout_s=timeout_s, codec=codec
        )
        self._worker: WorkerGroup | None = None
        self._gradients: GradientHooks | None = None
        # What is refused here leaves its group open: a peer may still be connecting to it.
        require_codec_for(rule, codec, transport)
        self._set_up(
            rule,
            shard_group,
            codec=codec,
            average_states=average_states,
            timeout_s=timeout_s,
            check_every_rounds=check_every_rounds,
            outer_device=torch.device("cpu") if outer_device == "cpu" else None,
            outlier_factor=outlier_factor,
        )

    def _set_up(
        self,
        rule: OuterRule,
        shard_group: dist.ProcessGroup | DeviceMesh | None,
        *,
        codec: str | Codec,
        average_states: Mapping[str, int] | None,
        check_every_rounds: int,
        **options: Any,
    ) -> None:
        model = self._model
        self._rule = rule_for(rule, model, self._transport, apart=self._apart)
        self._codec = str(codec) if self._made_transport else "fp32"
        self._meter = StatisticsMeter()
        self._stability = StabilityWatch(self._rule)
        self._steps = 0
        self._weighted: bool | None = None
        self._late = LateParameters(model, apart=self._apart, never=may_lose(self._transport))
        self._fixed = FixedWatch(
            model, list(self._fixed_tensors()), every_rounds=check_every_rounds
        )
        self._adopting = False
        options["check_every_rounds"] = check_every_rounds
        self._context = self._make_context(shard_group, **options)
        self._fragments = make_fragments(model, self._context)
        if isinstance(self._rule, DelayedGradients):
            self._gradients = GradientHooks(
                self._rule, self._optimizers, self._fragments, look=self._late.look
            )
        self._states = state_fragments(
            average_states,
            self._optimizers,
            context=self._context,
            may_lose=may_lose(self._transport),
            leaves_out=any(plain_name(n) in self._apart for n, _ in model.named_parameters()),
        )
        self._averaged_states = dict(sorted((average_states or {}).items()))
        start_equal(
            model,
            self._context,
            self._all_fragments(),
            optimizers=self._optimizers,
            fixed=self._fixed_tensors(),
            averaged_states=self._averaged_states,
        )
        self._tau = automatic_round(rule, self._fragments, context=self._context)

    def _make_context(
        self,
        shard_group: dist.ProcessGroup | DeviceMesh | None,
        *,
        timeout_s: float,
        **options: Any,
    ) -> EngineContext:
        require_local(self._model, self._optimizers, others=self._others)
        self._watch = CommunicationWatch(self._optimizers, others=self._others)
        self._worker = find_worker(
            self._model,
            shard_group,
            rule=self._rule,
            transport=self._transport,
            timeout_s=timeout_s,
            apart=self._apart,
        )
        return EngineContext(
            rule=self._rule,
            transport=self._transport,
            meter=self._meter,
            inner_lr=self._inner_lr,
            extras=state_extras(self._rule, may_lose=may_lose(self._transport)),
            timeout_s=timeout_s,
            worker=self._worker,
            pending=lambda: self._late.announced,
            apart=self._apart,
            names=lambda: names_of(self._model),
            group_of=functools.partial(group_of, self._optimizers),
            fixed=self._fixed,
            communicates=self._watch.announced,
            on_non_finite=self._begin_again,
            on_reading=self._read,
            **options,
        )

    def step(self, weight: float | None = None) -> None:
        """Count one local step; wait, merge and launch where the rule says so.

        Args:
            weight: What this step counts in the mean over the workers, usually its number of
                tokens; None for equal weights. Give it at every step on every rank, or nowhere.

        Raises:
            ConfigurationError: The weight is negative or not finite, or only some steps or ranks
                have one.
            CommunicationError: The all-reduce failed or timed out; names rank, round and step.
            ReplicaMismatchError: The replicas' anchors differ; names the ranks.
            NonFiniteError: No rank had a finite payload; names ranks, round and parameters.
        """
        self._require_open()
        require_weight(weight, before=self._weighted)
        self._weighted = weight is not None
        self._steps += 1
        if self._gradients is not None:
            self._gradients.complete()
        counted = [(fragment, fragment.count(weight)) for fragment in self._all_fragments()]
        due = [(fragment, boundary) for fragment, boundary in counted if boundary is not None]
        if due or self._steps == 1:
            self._weights.look()
        if due:
            self._look_for_late()
        for fragment, boundary in due:
            fragment.run(boundary)
            first = self._fragments[0].schedule
            self._stability.watch(self._meter, late=first.delay_steps / first.tau)
        if self._adopting:
            self.adopt_parameters()

    def finalize(self) -> None:
        """Drain: apply all work that was done anywhere, and leave all replicas equal.

        First the all-reduce in flight is merged, then the local steps since the last boundary
        (a partial round) are sent, waited for and merged, both with the rule's own outer step.
        A second call does nothing. Training may go on afterwards; the pipeline then fills again
        as at the start.

        Raises:
            CommunicationError: The all-reduce failed or timed out.
            ReplicaMismatchError: The replicas' anchors differ.
            NonFiniteError: No rank had a finite payload.
        """
        self._require_open()
        self._look_for_late()  # and follow replaced tensors
        if self._gradients is not None:
            self._gradients.drain()
        for fragment in self._all_fragments():
            boundary = fragment.schedule.drain()
            if boundary is not None:
                fragment.run(boundary)
        if not may_lose(self._transport):
            self.adopt_parameters()  # what nobody knows yet would stay different
            require_equal_at_the_end(self._context, self._fragments)

    def adopt_parameters(self) -> tuple[str, ...]:
        """Take in parameters and buffers that the engine does not know; a collective call.

        Without this call it happens by itself: at a boundary all ranks announce what became
        trainable or was registered, and when the announcements of all have arrived (with the
        all-reduce of that round) they are adopted. Either way they start from the mean over the
        workers, which is waited for, with no momentum, and have rounds of their own that end with
        the others'. Before ``load_state_dict`` of a state with adopted parameters, make them
        trainable and call this.

        Returns:
            Their names.

        Raises:
            ConfigurationError: The ranks would adopt different parameters.
            CommunicationError: The average failed or timed out.
        """
        self._adopting = False
        found = self._look_for_late()
        require_same_names(self._transport.gather_objects(sorted(found)))
        if found:
            self._late.know(found)
            fragment = late_fragment(
                found.values(),
                self._context,
                index=len(self._fragments),
                first=self._fragments[0].schedule,
            )
            fragment.begin_at_mean()
            self._fragments.append(fragment)
            _LOG.info("%s joined the outer synchronisation", ", ".join(found))
        return tuple(found)

    def take_weights(self) -> None:
        """Go on from weights that something else has put into the model; a collective call.

        For averages of weights that a callback writes at the end of training, and for weights that
        are loaded in the middle: all replicas get their mean over the ranks. ``finalize()`` comes
        before they are put in. Momenta stay. Where no rank has other weights, nothing is done.

        Raises:
            ConfigurationError: Something is under way.
            CommunicationError: The average failed or timed out.
        """
        self._require_open()
        self._look_for_late()  # and follow replaced tensors
        schedules = [fragment.schedule for fragment in self._fragments]
        underway = any(each.in_flight_round is not None or each.open_steps for each in schedules)
        if underway or may_lose(self._transport):
            message = "take_weights() with workers that come and go, or with local steps under way"
            raise ConfigurationError(message, hint="call finalize() before the weights are put in")
        if any(self._transport.gather_objects(any(f.has_moved() for f in self._fragments))):
            for fragment in self._fragments:
                fragment.begin_at_mean()

    def set_rule(self, rule: OuterRule) -> None:
        """Go on with another tau, delay or outer learning rate, as after a resume with that rule.

        For schedules of them: all ranks call it after the same step, or the next round raises. What
        is in flight and the momenta stay, and rounds become longer or shorter in proportion.

        Args:
            rule: The same kind of rule, with as many fragments; what it leaves open stays.

        Raises:
            ConfigurationError: It differs in what may not change.
        """
        self._require_open()
        self._rule = change_rule(
            self._context, self._all_fragments(), rule, codec=self._codec, since=self._steps
        )
        self._stability.follow(self._rule)

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the anchor, equal on all ranks, into the model, to evaluate between boundaries."""
        self._look_for_late()  # and follow replaced tensors
        with at_the_anchor(self._model, self._fragments):
            yield

    def statistics(self) -> SyncStatistics:
        """Return the totals since the start (over resumes too) as a frozen record.

        Printed it is a short table, which says what to change.
        """
        schedule = self._fragments[0].schedule
        codec = None if self._tau is None else self._tau.codec  # that the automatic tau chose
        decided = {"tau": self._tau, "codec": codec}
        return self._meter.snapshot(
            steps=self._steps,
            rounds=sum(fragment.schedule.round for fragment in self._fragments),
            tau=schedule.tau,
            tau_changes=0 if self._tau is None else self._tau.changes,
            rule=self._rule.name,
            fragments=self._rule.num_fragments if self._tau is None else self._tau.fragments,
            delay_steps=schedule.delay_steps,
            codec=codec or self._codec,
            automatic=tuple(name for name, by in decided.items() if by is not None),
            most_fragments=most_parts(self._fragments, self._transport),
        )

    def all_reduces(self) -> list[AllReduceRecord]:
        """Return and forget the all-reduces that were waited for since the last call."""
        return self._meter.take_all_reduces()

    def tau_decisions(self) -> tuple[TauDecision, ...]:
        """Return the last decisions of the automatic tau, oldest first."""
        return () if self._tau is None else self._tau.decisions

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as tensors and plain values.

        An all-reduce is waited for, so that its sum can be saved, and stays in flight in the
        schedule's sense: the run that goes on, and one that resumes here, merge it at the same
        boundary and reach the same parameters bit for bit. Tensors are the live buffers; copy
        or write them before the next ``step()``.

        Raises:
            CommunicationError: The all-reduce failed or timed out.
        """
        if self._gradients is not None:
            self._gradients.require_between_steps()
        self._look_for_late()  # and follow replaced parameters
        for fragment in self._all_fragments():
            fragment.land()
        return {
            "settings": self._settings(),
            "world_size": self._transport.world_size,
            "rank": self._transport.rank,
            "place": self._place,
            "steps": self._steps,
            "meter": self._meter.state(),
            "tau": None if self._tau is None else self._tau.state(),
            "fragments": {str(f.index): f.state_dict() for f in self._all_fragments()},
            "transport": self._transport.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; a collective call.

        On the same number of workers each rank loads its own state and goes on bit for bit; the
        model's and the inner optimizer's states are loaded by the caller, before this call. On
        another number of workers any rank's state will do, the same for all: every worker then
        goes on from the anchor. So it is, with a warning, where some rank loads another's. The
        all-reduce that was in the air is merged as if nothing had happened; the local steps since
        the last launch are lost, and so are a codec's residuals and what the automatic tau has
        measured (its tau stays).

        Args:
            state: What ``state_dict()`` returned.

        Raises:
            ConfigurationError: The state is of another rule or model.
        """
        changed, stranger = agree_to_load(
            state,
            self._settings(),
            place=self._place,
            transport=self._transport,
            fit=functools.partial(self._require_fit, state),
        )
        for fragment in self._all_fragments():
            fragment.land()  # nothing may write into what is restored
        self._steps, self._weighted = state["steps"], None
        self._meter.restore(state["meter"])
        if "fragments" in changed:
            begin_other_rounds(state, self._fragments, self._rule, inner_lr=self._inner_lr())
        elif stranger:
            for fragment in self._all_fragments():
                fragment.load_shared(state["fragments"][str(fragment.index)])
            if self._tau is not None:
                self._tau.begin_at(state["tau"])
        else:
            if self._tau is not None:
                self._tau.restore(state["tau"])
            restore(state, self._all_fragments(), self._rule, changed=changed)
            if "codec" not in changed:  # what another codec has kept is lost
                self._transport.load_state_dict(state["transport"])

    def _require_fit(self, state: dict[str, Any], changed: set[str], stranger: bool) -> None:  # noqa: FBT001
        self._look_for_late()  # and follow parameters that the model's loader replaced
        whole = bool(self._states) or self._context.worker is not None
        require_fit(state, self._all_fragments(), changed=changed, stranger=stranger, whole=whole)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the state by parameter, for ``torch.distributed.checkpoint``; collective.

        Unlike ``state_dict()`` it can be saved by all ranks under one name, what is equal on all
        workers is written once, and it can be loaded on another number of ranks per worker: to
        load, make it, let ``torch.distributed.checkpoint.load`` fill it, and hand it to
        ``load_sharded_state_dict``. Tensors are views of the live buffers.

        Raises:
            CommunicationError: The all-reduce failed or timed out.
        """
        return self._form().spread(self.state_dict())

    def load_sharded_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``sharded_state_dict()``; the model's parameters are loaded before.

        On the same layout training goes on bit for bit. On another number of ranks per worker
        anchors, momenta and the sum in flight are the same bit for bit, and residuals of a codec
        are kept as they are here. On another number of workers it is as in ``load_state_dict``.

        Args:
            state: What ``sharded_state_dict()`` gave, filled by a loader. Where the layout is
                another one, load with ``DefaultLoadPlanner(allow_partial_load=True)``: the parts
                that belong to single workers and ranks are not found then.

        Raises:
            ConfigurationError: The state is of another rule or model.
        """
        changed_settings(state.get("shared", {}).get("state"), self._settings(), sharded=True)
        self.load_state_dict(self._form().collect(state, self.state_dict()))

    def _form(self) -> StateForm:
        return StateForm(self._all_fragments(), self._worker, self._transport)

    def peer_state(self) -> dict[str, Any]:
        """Return what a newcomer needs to stand where this worker stands, without local parts.

        For transports whose membership changes; called from within a launch, or before the first.
        """
        frozen = [t.detach() for t in self._fixed_tensors().values()]
        launching = [f.launching for f in self._fragments if f.launching is not None]
        if not launching:
            for fragment in self._fragments:
                fragment.land()
        return {
            "settings": self._settings(),
            "steps": self._steps,
            "launching": launching[0] if launching else -1,
            "unit": self._inner_lr(),
            "rule_since": self._context.rule_since,
            "tau": None if self._tau is None else self._tau.state(),
            "fragments": {str(f.index): f.shared_state() for f in self._fragments},
            "fixed": frozen,
        }

    def load_peer_state(self, state: dict[str, Any]) -> None:
        """Begin a round where a peer stands, and take part in its launch with weight 0.

        Args:
            state: What ``peer_state()`` returned.

        Raises:
            ConfigurationError: The state is of another rule or model.
        """
        require_same(state, self._settings())
        self._steps, self._weighted = state["steps"], None
        self._context.begin_rule(self._rule, since=state["rule_since"])
        with torch.no_grad():
            fixed = self._fixed_tensors().values()
            for mine, theirs in zip(fixed, state["fixed"], strict=True):
                mine.copy_(theirs)
        self._fixed.begin()
        for fragment in self._fragments:
            fragment.load_shared(state["fragments"][str(fragment.index)])
        if self._tau is not None:
            self._tau.restore(state["tau"])
        if state["launching"] >= 0:
            self._fragments[0].take_part(state["launching"], unit=state["unit"])

    def close(self) -> None:
        """End the engine's thread and process groups; training goes on without it.

        What is under way is waited for and not merged: call ``finalize()`` before. A transport that
        was given to the engine is left to whoever made it. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._gradients is not None:
            self._gradients.close()
        self._watch.close()
        if isinstance(self._transport, ProcessGroupTransport) and self._made_transport:
            self._transport.close()
        if self._worker is not None:
            self._worker.close()

    # -- small helpers ----------------------------------------------------------------------------

    @property
    def _others(self) -> list[int]:
        """The ranks of the process group beside this one."""
        ranks: Sequence[int] = getattr(self._transport, "global_ranks", ())
        return [rank for place, rank in enumerate(ranks) if place != self._transport.rank]

    @property
    def _place(self) -> int:
        """This rank's place within its worker."""
        return 0 if self._worker is None else self._worker.place

    def _fixed_tensors(self) -> dict[str, torch.Tensor]:
        return fixed_tensors(self._model, apart=self._apart)

    def _require_open(self) -> None:
        if self._closed:
            message = "this OuterSync has been closed"
            raise ConfigurationError(message, hint="call close() after the last step")

    def _all_fragments(self) -> list[Fragment]:
        """Return the parameters' fragments and then the optimizer states'."""
        return [*self._fragments, *self._states]

    def _look_for_late(self) -> dict[str, torch.Tensor]:
        """Return trainable parameters and averaged buffers that are not known yet."""
        return self._late.look(g for fragment in self._fragments for g in fragment.all_groups)

    @torch.no_grad()
    def _begin_again(self) -> None:
        """Go on from the anchor, without what the steps that are left out did to the optimizers.

        What they were before is not known, so they begin again, all moments together.
        """
        begin_optimizers_again(
            self._optimizers,
            makes_state_late=self._make_states_late,
            took_no_steps=self._gradients is not None,
            keeps_count=bool(self._averaged_states),
        )
        for fragment in self._all_fragments():
            fragment.begin()

    def _read(self, reading: MetadataReading, round_number: int) -> None:
        """Act on what all ranks wrote into the metadata of a round."""
        self._watch.require_none(reading.communicates)
        if self._tau is not None:
            self._tau.read(reading, round_number)
        if self._late.all_announced(reading.pending):
            self._adopting = True

    def _settings(self) -> dict[str, Any]:
        found = settings(self._rule, fragments=len(self._fragments), codec=self._codec)
        return found | ({"average_states": self._averaged_states} if self._states else {})

    def _inner_lr(self) -> float:
        lr = float(self._optimizers[0].param_groups[0]["lr"])
        if self._rule.units == "lr" and lr <= 0:
            message = f'units="lr" needs a positive inner learning rate at a boundary; got {lr}'
            raise ConfigurationError(message, hint='use units="delta", or a schedule above zero')
        return lr
