"""One elastic flight: flown and voted on in a thread of its own, behind the local steps."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from fivefold.errors import CommunicationError, FivefoldError
from fivefold.optim._elastic_quorum import Ballot, Decision, Member

_LOG = logging.getLogger(__name__)


class Carrier(Protocol):
    """What a flight needs of its transport."""

    @property
    def patience_s(self) -> float:
        """Longest that a flight can take, in seconds."""
        ...

    def fly(
        self, tensors: Sequence[torch.Tensor], *, members: tuple[Member, ...], turn: int
    ) -> None:
        """Sum the tensors in place over the members; called in the flight's thread."""
        ...

    def vote(self, ballot: Ballot, *, what: str) -> Decision:
        """Vote on the flight; called in the flight's thread."""
        ...

    def adopt(self, decision: Decision, *, what: str) -> bool:
        """Make the decision the worker's own; returns whether the flight counts."""
        ...


class ElasticFlight:
    """A sum over the members under way.

    Args:
        transport: Whose flight it is.
        tensors: Payloads and lane; summed in place.
        members: The workers that take part.
        ballot: This worker's vote, but for the result.
        what: What is sent, for messages.
    """

    def __init__(
        self,
        transport: Carrier,
        tensors: Sequence[torch.Tensor],
        *,
        members: tuple[Member, ...],
        ballot: Ballot,
        what: str,
    ) -> None:
        self.launched_at_s = time.perf_counter()
        self.completed_at_s: float | None = None
        # A ring: each member sends every part of the sum twice, but for its own share.
        count, total_bytes = len(members), sum(t.nbytes for t in tensors)
        self.sent_bytes = round(2 * (count - 1) * total_bytes / count)
        self._transport = transport
        self._tensors = tensors
        self._members = members
        self._ballot = ballot
        self._what = what
        self._outcome: bool | None = None
        self._decision: Decision | None = None
        self._error: BaseException | None = None
        on_device = [t.device for t in tensors if t.device.type == "cuda"]
        self._stream = torch.cuda.current_stream(on_device[0]) if on_device else None
        # A daemon: a process that ends must not wait for a quorum.
        self._thread = threading.Thread(target=self._run, name="elastic-flight", daemon=True)

    def start(self) -> None:
        """Take off."""
        self._thread.start()

    def wait(self) -> bool:
        """Block until the quorum has decided on the flight; see ``Flight.wait``.

        Raises:
            LeftBehindError: The others went on without this worker.
            CommunicationError: No quorum came together in time.
        """
        if self._outcome is None:
            self._thread.join(self._transport.patience_s)
            if self._thread.is_alive():  # every step of it has a timeout, so this is a defect
                message = f"worker {self._ballot.worker}: {self._what} did not end in any timeout"
                raise CommunicationError(message, hint="start this worker again")
            if self._error is not None:
                raise self._error
            assert self._decision is not None, "no error and no decision"
            self._outcome = self._transport.adopt(self._decision, what=self._what)
            self._tensors = ()
        return self._outcome

    def _run(self) -> None:
        try:
            arrived = self._fly()
            self.completed_at_s = time.perf_counter()
            ballot = Ballot(**{**self._ballot.to_data(), "arrived": arrived})
            self._decision = self._transport.vote(ballot, what=self._what)
        except BaseException as error:  # noqa: BLE001 - handed to the caller of wait()
            self._error = error

    def _fly(self) -> bool:
        stream = self._stream
        context = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        try:
            with context:
                self._transport.fly(self._tensors, members=self._members, turn=self._ballot.turn)
        except RuntimeError as error:
            if isinstance(error, FivefoldError):
                raise
            reason = str(error).strip().partition("\n")[0].partition(". This is")[0]
            _LOG.warning("worker %s: %s was lost: %s", self._ballot.worker, self._what, reason)
            return False
        return True
