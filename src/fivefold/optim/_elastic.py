"""``ElasticTransport``: a transport whose workers may leave and join while training goes on.

When an all-reduce has landed, or failed, each worker votes; the quorum that the lighthouse then
gives to all says whether it counts and who takes part in the next one. A sum is applied by all or
by none, and work of a lost all-reduce is sent again. A newcomer gets a member's state at a launch,
and takes part in it with weight 0: from then on it stands where the others stand, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fivefold.errors import (
    CommunicationError,
    ConfigurationError,
    FivefoldError,
    require_number,
    require_whole,
)
from fivefold.optim._comm_thread import Handover
from fivefold.optim._compressed import ring_bytes
from fivefold.optim._elastic_quorum import Ballot, Decision, Member
from fivefold.optim._elastic_services import ElasticGroup, ElasticServices
from fivefold.optim._sync import OuterSync

_LOG = logging.getLogger(__name__)
_SLACK_S = 60.0
_PAUSE_S = 0.2


class LeftBehindError(CommunicationError):
    """The other workers went on without this one, which was silent for too long.

    What it had not yet handed in is gone, as if it had ended; ``ElasticTransport.join`` brings it
    back with the state of a peer.
    """


def elastic_transport(
    *,
    lighthouse: str,
    max_workers: int = 16,
    timeout_s: float = 120.0,
    quorum_timeout_s: float = 600.0,
    host: str | None = None,
) -> ElasticTransport:
    """Make the transport of one worker of an elastic job.

    Pass it to ``OuterSync(..., transport=...)``, then call ``transport.join(sync)``. How many
    workers there must be at least is a setting of the lighthouse
    (``fivefold elastic lighthouse --min-workers 2``), the one place that decides it.

    Args:
        lighthouse: host:port of the lighthouse.
        max_workers: Number of slots; equal on all workers.
        timeout_s: Longest all-reduce, and longest wait for a slow worker in one, in seconds. After
            five all-reduces it is less: eight times the longest of the last 32, and 10 s at least;
            after one that was given up twice as long.
        quorum_timeout_s: Longest wait for enough workers, and for a peer's state, in seconds.
        host: Address under which the others reach this worker; None for the one from which this
            machine reaches the lighthouse.

    Raises:
        UnsupportedError: torchft is not installed.
        ConfigurationError: An argument is not allowed.
        CommunicationError: The lighthouse does not answer.
    """
    require_whole("max_workers", max_workers, least=2)
    require_number("timeout_s", timeout_s, positive=True)
    require_number("quorum_timeout_s", quorum_timeout_s, positive=True)
    services = ElasticServices(
        lighthouse, host=host, timeout_s=timeout_s, quorum_timeout_s=quorum_timeout_s
    )
    return ElasticTransport(services, max_workers=max_workers)


class ElasticTransport:
    """A ``Transport`` over the workers that are alive; made by :func:`elastic_transport`.

    Args:
        services: This worker's access to the lighthouse and its peers.
        max_workers: Number of slots.
    """

    may_lose = True  # the engine keeps its own part of an all-reduce until the all-reduce counts

    def __init__(self, services: ElasticServices, *, max_workers: int) -> None:
        self._services = services
        self._capacity = max_workers
        self._group = ElasticGroup(services.worker, timeout_s=services.timeout_s)
        self._settings = ""
        self._holder: OuterSync | None = None
        self._decision: Decision | None = None
        self._slot = 0
        self._all_reduce: ElasticAllReduce | None = None
        self._close = weakref.finalize(self, _close, services, self._group)

    @property
    def rank(self) -> int:
        """This worker's slot; 0 before it has joined."""
        return self._slot

    @property
    def world_size(self) -> int:
        """Return the number of slots, whether taken or not."""
        return self._capacity

    @property
    def worker(self) -> str:
        """This worker's unique name, as messages and the lighthouse's page show it."""
        return self._services.worker

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of the workers of the next all-reduce; empty before this worker has joined."""
        return () if self._decision is None else tuple(m.slot for m in self._decision.members)

    def join(self, holder: OuterSync, *, steps: int = 0) -> None:
        """Take part: start the job together with others, or enter it with a peer's state.

        Blocks until there is a quorum and, in a job under way, until its next launch. Call it
        after the model, the optimizer and ``OuterSync`` are there and a checkpoint, if any, is
        loaded; and again after a :class:`LeftBehindError`.

        Args:
            holder: The ``OuterSync`` of this transport.
            steps: Local steps behind a loaded checkpoint; at the start of a job the worker with
                the most gives its state to the others.

        Raises:
            ConfigurationError: The job has other settings or no free slot, or an all-reduce is
                under way.
            CommunicationError: No quorum or no state in time.
        """
        if self._all_reduce is not None:
            message = f"worker {self.worker}: join while an all-reduce is under way"
            raise ConfigurationError(message, hint="join before training or after LeftBehindError")
        self._holder = holder
        self._leave()
        what = "joining"
        deadline_s = time.monotonic() + self._services.quorum_timeout_s
        while True:
            ballot = self._ballot(history=uuid.uuid4().hex, steps=steps)
            decision = self._services.vote(ballot, what=what)
            if self.worker in decision.refused:
                message = f"worker {self.worker} cannot join: {decision.refused[self.worker]}"
                raise ConfigurationError(message, hint="start all workers with the same settings")
            if not decision.silent and self._enter(decision):
                return
            silent = ", ".join(decision.silent)
            if time.monotonic() > deadline_s:
                message = f"worker {self.worker} could not join in time; silent: {silent or '-'}"
                hint = "end the silent workers if they hang, or raise quorum_timeout_s"
                raise CommunicationError(message, hint=hint)
            if silent:
                _LOG.info("waiting for %s, which may have the job's state", silent)
                time.sleep(_PAUSE_S)
            what = "joining again"

    def prepare(
        self, payloads: Sequence[torch.Tensor], *, fragment: int, num_exact: int = 0
    ) -> None:
        """Refuse rules whose parts travel apart: a newcomer enters at one launch, of the whole.

        Raises:
            ConfigurationError: There is more than one fragment.
        """
        del payloads, num_exact  # nothing is kept between all-reduces, and all are exact
        if fragment > 0:
            message = f"elastic training takes rules with one fragment; got fragment {fragment}"
            hint = "use fragments=1, with a delay_steps of its own if the link allows"
            raise ConfigurationError(message, hint=hint)

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> ElasticAllReduce:
        """Start summing over the workers of the last quorum; see ``Transport.launch``.

        Raises:
            ConfigurationError: Not joined, or another all-reduce is under way.
        """
        decision = self._decision
        if decision is None or self._holder is None:
            message = "launch before join"
            raise ConfigurationError(message, hint="call transport.join(sync) before training")
        if self._all_reduce is not None:
            message = f"{what} would be a second all-reduce at a time (fragment {fragment})"
            raise ConfigurationError(message, hint="wait for the all-reduce before the next launch")
        turn = decision.turn + 1
        copiers = decision.copiers_from(self.worker)
        if copiers and decision.turn >= 0:  # at the start of a job they got it in join()
            self._services.states.serve(self._holder.peer_state(), turn=turn, copiers=copiers)
        names = tuple(member.worker for member in decision.members)
        ballot = self._ballot(turn=turn, history=decision.history, slot=self._slot, members=names)
        self._all_reduce = ElasticAllReduce(
            [*payloads, metadata],
            services=self._services,
            group=self._group,
            members=decision.members,
            ballot=ballot,
            adopt=functools.partial(self._adopt, what=what),
            what=what,
        )
        return self._all_reduce

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a worker that starts again joins again, membership is never resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; ``state_dict()`` is empty."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: ``join`` brings the state, parameters among it."""

    def gather_objects(self, value: object) -> list[Any]:
        """Return this worker's value alone, and keep its digest: ``join`` compares them."""
        self._settings = hashlib.sha256(repr(value).encode()).hexdigest()[:16]
        return [value]

    def close(self) -> None:
        """Leave the job; the others notice when the heartbeat stops."""
        self._close()

    def _adopt(self, decision: Decision, *, what: str) -> bool:
        """Make a decision this worker's own; returns whether the all-reduce counts."""
        self._all_reduce = None
        self._services.states.retire()  # whoever joined has it
        if self.worker in decision.left_behind:
            self._leave()
            message = f"worker {self.worker} (slot {self._slot}): the others went on after {what}"
            hint = "call transport.join(sync) to come back with a peer's state, or start it again"
            raise LeftBehindError(message, hint=hint)
        self._note_change(decision)
        self._decision = decision
        if not decision.committed:
            # Some pair of connections is broken, and not every worker may have noticed.
            self._group.abort()
        return decision.committed

    # -- membership -------------------------------------------------------------------------------

    def _enter(self, decision: Decision) -> bool:
        """Take the seat that the decision gives, with a peer's state; False to try again."""
        self._decision = decision
        self._slot = next(m.slot for m in decision.members if m.worker == self.worker)
        turn = decision.turn + 1
        holder = self._holder
        assert holder is not None, "join() set it"
        copiers = decision.copiers_from(self.worker)
        if copiers:  # the start of a job
            self._services.states.serve(holder.peer_state(), turn=turn, copiers=copiers)
        source = decision.sources.get(self.worker)
        if source is None:
            return True
        name, address = source
        try:
            # At the start of a job the source answers at once, later at its next launch.
            patience_s = self._services.quorum_timeout_s if turn else self._services.timeout_s
            state = self._services.states.fetch(
                address, turn=turn, what=f"worker {name}", patience_s=patience_s
            )
        except CommunicationError as error:
            _LOG.warning("%s", error)
            self._leave()
            return False
        holder.load_peer_state(state)
        _LOG.info("worker %s joined in slot %d before all-reduce %d", self.worker, self._slot, turn)
        return True

    def _leave(self) -> None:
        self._decision = None
        self._all_reduce = None
        self._group.abort()

    def _ballot(self, **fields: Any) -> Ballot:
        return Ballot(
            worker=self.worker,
            capacity=self._capacity,
            settings=self._settings,
            store=self._services.store_address,
            state=self._services.states.address,
            **fields,
        )

    def _note_change(self, decision: Decision) -> None:
        before = set() if self._decision is None else {m.worker for m in self._decision.members}
        after = {m.worker for m in decision.members}
        if before != after:
            gone, come = sorted(before - after), sorted(after - before)
            count = len(after)
            _LOG.warning("%d workers go on; left: %s; joined: %s", count, gone or "-", come or "-")


def _close(services: ElasticServices, group: ElasticGroup) -> None:
    group.abort()
    services.close()


class ElasticAllReduce:
    """A sum over the members under way, and the vote on it, in a thread of its own."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        services: ElasticServices,
        group: ElasticGroup,
        members: tuple[Member, ...],
        ballot: Ballot,
        adopt: Callable[[Decision], bool],
        what: str,
    ) -> None:
        self.launched_at_s = time.perf_counter()
        self.completed_at_s: float | None = None
        self.sent_bytes = ring_bytes(sum(t.nbytes for t in tensors), world_size=len(members))
        self._services, self._group, self._adopt = services, group, adopt
        self._tensors = tensors
        self._members = members
        self._ballot = ballot
        self._what = what
        self._outcome: bool | None = None
        self._decision: Decision | None = None
        self._error: BaseException | None = None
        # On a stream of its own: on the training's the sum would wait for steps that are queued
        # after the launch, and the steps for the sum.
        self._handover = Handover.of(tensors, group.streams)
        # A daemon: a process that ends must not wait for a quorum.
        self._thread = threading.Thread(target=self._run, name="elastic-all-reduce", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Block until the quorum has decided on the all-reduce; see ``PendingAllReduce.wait``."""
        if self._outcome is None:
            # To form the group, to sum, to vote; with some slack.
            services = self._services
            self._thread.join(2 * services.timeout_s + services.quorum_timeout_s + _SLACK_S)
            if self._thread.is_alive():  # every step of it has a timeout, so this is a defect
                message = f"worker {self._ballot.worker}: {self._what} did not end in any timeout"
                raise CommunicationError(message, hint="start this worker again")
            if self._error is not None:
                raise self._error
            assert self._decision is not None, "no error and no decision"
            self._outcome = self._adopt(self._decision)
            self._tensors = ()
        if self._handover is not None:
            self._handover.hold_current_streams()
        return self._outcome

    def _run(self) -> None:
        try:
            arrived = self._sum()
            self.completed_at_s = time.perf_counter()
            self._decision = self._services.vote(
                replace(self._ballot, arrived=arrived), what=self._what
            )
        except BaseException as error:  # noqa: BLE001 - handed to the caller of wait()
            self._error = error

    def _sum(self) -> bool:
        try:
            with contextlib.nullcontext() if self._handover is None else self._handover.entered():
                self._group.form(self._members, turn=self._ballot.turn)
                self._group.sum_(self._tensors)
            if self._handover is not None:  # whoever votes that it arrived has it
                self._handover.synchronize()
        except RuntimeError as error:
            self._group.abort()
            if isinstance(error, FivefoldError):
                raise
            reason = str(error).strip().partition("\n")[0].partition(". This is")[0]
            _LOG.warning("worker %s: %s was lost: %s", self._ballot.worker, self._what, reason)
            return False
        return True
