"""One worker's services from torchft: heartbeat and vote, key-value store, state server, groups.

torchft's own ``Manager`` is not used: its vote ends at one worker's border (two workers may
decide differently about one all-reduce), and it hands a newcomer's state over one step late for
rules whose sums are applied one round later.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
import urllib.error
import urllib.request
import uuid
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from http.server import ThreadingHTTPServer
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch hides it from mypy
from torch.utils._pytree import tree_map

from fivefold.errors import CommunicationError
from fivefold.optim._elastic_lighthouse import host_and_port, listen_at, require_torchft
from fivefold.optim._elastic_quorum import Ballot, Decision, Member, decide

_LOG = logging.getLogger(__name__)
_POLL_S = 0.05
_CONNECT_S = 10.0
_HEARTBEAT_S = 0.25
_RETURN_S = 10.0  # how long a new lighthouse's workers wait for those that it does not know
_REMEMBERED_ARRIVALS = 32
_FEWEST_ARRIVALS = 5  # before which nothing is usual
_TIMES_THE_LONGEST = 8.0
_SHORTEST_DEADLINE_S = 10.0  # a pause of a worker, for a checkpoint, costs nobody a sum
# One line of the lighthouse's page for each live worker; a dead one's has the class "old" too.
_HEARD = re.compile(r'class="heartbeat[^"]*"\s*>\s*(\S+): seen ')
_LIVE = re.compile(r'class="heartbeat\s*"\s*>\s*(\S+): seen ')


class ElasticServices:
    """Client of the lighthouse, address and state server of one worker."""

    def __init__(
        self, lighthouse: str, *, host: str | None, timeout_s: float, quorum_timeout_s: float
    ) -> None:
        require_torchft()
        there, port = host_and_port(lighthouse, "the lighthouse's address")
        self._url = f"http://{there}:{port}"
        self.timeout_s = timeout_s
        self.quorum_timeout_s = quorum_timeout_s
        self._connect_timeout = timedelta(seconds=min(_CONNECT_S, quorum_timeout_s))
        self._client = self._connect()
        host = host or _own_address(there, port)
        self.worker = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        listener = listen_at(host, 0)  # by itself it would listen on all interfaces
        self._store = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        self.store_address = f"{host}:{self._store.port}"
        self.states = StateServer(host, worker=self.worker, timeout_s=timeout_s)
        self._host = host
        self._heart: Any = None

    def vote(self, ballot: Ballot, *, what: str) -> Decision:
        """Give the lighthouse this worker's ballot and read the quorum's."""
        # While members are missing that the lighthouse does not know to have ended (it was started
        # again and has not heard of them yet), all vote again, for ``_RETURN_S`` at most.
        deadline_s = time.monotonic() + self.quorum_timeout_s
        patience_s = math.inf
        self._beat()
        while True:
            left_s = max(deadline_s - time.monotonic(), _POLL_S)
            try:
                if ballot.joining:  # all read the same answer: that of each voter, in its ballot
                    ballot = replace(ballot, alive=_LIVE.findall(self._page()))
                quorum = self._client.quorum(
                    replica_id=self.worker,
                    timeout=timedelta(seconds=left_s),
                    address=self._heart.address(),
                    store_address=self.store_address,
                    step=max(ballot.turn, 0),
                    world_size=1,
                    shrink_only=False,
                    data=asdict(ballot),
                )
                decision = decide([Ballot(**member.data) for member in quorum.participants])
                if not decision.missing:
                    return decision
                patience_s = min(patience_s, time.monotonic() + _RETURN_S)
                waited = time.monotonic() >= patience_s
                gone = set(decision.missing) if waited else self._ended()
                ballot = replace(ballot, gone=sorted(gone.intersection(ballot.members)))
                time.sleep(_POLL_S)
            except (TimeoutError, RuntimeError, CommunicationError) as error:
                if time.monotonic() >= deadline_s - _POLL_S:
                    raise self._no_quorum(what) from error
                _LOG.warning("the lighthouse does not answer (%s); trying again", error)
                time.sleep(10 * _POLL_S)

    def _no_quorum(self, what: str) -> CommunicationError:
        message = f"worker {self.worker}: no quorum for {what} in {self.quorum_timeout_s} s"
        hint = (
            f"too few workers are alive, or one is silent; {self._url} shows who is there; start "
            "the others again, or raise quorum_timeout_s"
        )
        return CommunicationError(message, hint=hint)

    def _ended(self) -> set[str]:
        """Return workers that the lighthouse has not heard for longer than its timeout."""
        page = self._page()
        return set(_HEARD.findall(page)) - set(_LIVE.findall(page))

    def _page(self) -> str:
        url = f"{self._url}/status"
        try:
            timeout_s = self._connect_timeout.total_seconds()
            with urllib.request.urlopen(url, timeout=timeout_s) as page:  # noqa: S310 - http only
                text: str = page.read().decode()
        except OSError as error:
            message = f"worker {self.worker}: the lighthouse's page cannot be read: {error}"
            raise CommunicationError(message, hint=f"look at {url}") from error
        return text

    def close(self) -> None:
        """Stop the heartbeat and the servers."""
        if self._heart is not None:
            self._heart.shutdown()
        self.states.close()

    def _beat(self) -> None:
        """Send heartbeats from now on, in a native thread: a long step never looks like a death."""
        if self._heart is not None:
            return
        from torchft.coordination import ManagerServer  # noqa: PLC0415 - optional, slow

        self._heart = ManagerServer(
            replica_id=self.worker,
            lighthouse_addr=self._url,
            hostname=self._host,
            bind=f"{self._host}:0",
            store_addr=self.store_address,
            world_size=1,
            heartbeat_interval=timedelta(seconds=_HEARTBEAT_S),
            connect_timeout=self._connect_timeout,
            quorum_retries=0,
        )

    def _connect(self) -> Any:
        from torchft.coordination import LighthouseClient  # noqa: PLC0415 - optional, slow

        try:
            return LighthouseClient(self._url, self._connect_timeout)
        except (RuntimeError, TimeoutError) as error:
            message = f"no lighthouse answers at {self._url}: {error}"
            hint = "start it with: fivefold elastic lighthouse --min-workers 2"
            raise CommunicationError(message, hint=hint) from error


class ArrivalDeadline:
    """Longest wait for a sum, from how long the last ones took; ``longest_s`` until five arrived.

    A deadline that was missed is doubled for the next try, so a link that has become slow is waited
    for. Workers need not agree: where one gives up, the sum is lost on all.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._arrivals_s: deque[float] = deque(maxlen=_REMEMBERED_ARRIVALS)
        self._patience = 1

    @property
    def seconds(self) -> float:
        """Return how long the next sum is waited for."""
        if len(self._arrivals_s) < _FEWEST_ARRIVALS:
            return self._longest_s
        usual_s = max(_TIMES_THE_LONGEST * max(self._arrivals_s), _SHORTEST_DEADLINE_S)
        return min(self._patience * usual_s, self._longest_s)

    def arrived(self, seconds: float) -> None:
        """Count a sum that arrived after so many seconds."""
        self._arrivals_s.append(seconds)
        self._patience = 1

    def missed(self) -> None:
        """Count a sum that did not."""
        self._patience *= 2


class ElasticGroup:
    """The process group of the current members, formed again when they change."""

    def __init__(self, worker: str, *, timeout_s: float) -> None:
        self._worker = worker
        self._timeout_s = timeout_s
        self._deadline = ArrivalDeadline(timeout_s)
        self.streams: dict[torch.device, torch.cuda.Stream] = {}  # that sums run on
        self._members: tuple[Member, ...] = ()
        self._group: Any = None

    def form(self, members: tuple[Member, ...], *, turn: int) -> None:
        """Connect the members; nothing happens while they stay the same."""
        if members == self._members:
            return
        self.abort()
        if len(members) > 1:
            from torchft.process_group import ProcessGroupGloo  # noqa: PLC0415 - optional, slow

            self._group = ProcessGroupGloo(timeout=timedelta(seconds=self._timeout_s))
            rank = [member.worker for member in members].index(self._worker)
            store = f"{members[0].store}/fivefold/{turn}"
            self._group.configure(store, self._worker, rank, len(members))
        self._members = members

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum the tensors in place over the members; blocks, up to the deadline."""
        if self._group is None:  # alone
            return
        began_s, deadline_s = time.monotonic(), self._deadline.seconds
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=deadline_s)  # of wait() alone would leave it under way
        works = [self._group.allreduce([tensor], options) for tensor in tensors]
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            if time.monotonic() - began_s >= deadline_s:
                self._deadline.missed()
            raise
        self._deadline.arrived(time.monotonic() - began_s)

    def abort(self) -> None:
        """Cut all connections, so that the others' collectives fail now and not at the timeout."""
        group, self._group, self._members = self._group, None, ()
        if group is not None:
            group.abort(errored=False)


class StateServer:
    """torchft's state transfer over HTTP, at an address that the others can reach, and silent.

    What it sends is pickled: peers trust one another, as they do in ``torch.distributed``.
    """

    def __init__(self, host: str, *, worker: str, timeout_s: float) -> None:
        from torchft.checkpointing import http_transport  # noqa: PLC0415 - optional, slow

        class Server(ThreadingHTTPServer):
            """torchft's own listens on all interfaces."""

            def __init__(self, _: object, handler: Any) -> None:
                listener = listen_at(host, 0)
                super().__init__(listener.getsockname(), handler, bind_and_activate=False)
                self.socket.close()
                self.socket = listener

            def serve_forever(self, poll_interval: float = _POLL_S) -> None:
                """As of the base, whose usual interval closing would wait out: half a second."""
                super().serve_forever(poll_interval)

        self._worker = worker
        self._timeout = timedelta(seconds=timeout_s)
        with mock.patch.object(http_transport, "_IPv6HTTPServer", Server):
            self._transport: Any = http_transport.HTTPTransport(timeout=self._timeout, num_chunks=0)
        server = self._transport._server  # noqa: SLF001 - it has no public way to do these two
        # It would write a line to standard error for every request.
        server.RequestHandlerClass.log_message = lambda *_: None
        # Its own address is the host's name, which peers may not be able to resolve.
        self.address = f"http://{host}:{server.socket.getsockname()[1]}/checkpoint/"

    def serve(self, state: object, *, turn: int, copiers: Sequence[str]) -> None:
        """Offer a copy of the state as of this all-reduce to workers that join."""
        _LOG.info("handing the state to %s before all-reduce %d", ", ".join(copiers), turn)
        copy = tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, state)
        self._transport.send_checkpoint([], turn, copy, self._timeout)

    def retire(self) -> None:
        """Drop the copy; a transfer under way holds a reference of its own."""
        self._transport._state_dict = None  # noqa: SLF001 - as above
        self._transport._chunks = None  # noqa: SLF001 - as above
        self._transport._step = -1  # noqa: SLF001 - as above

    def fetch(self, address: str, *, turn: int, what: str, patience_s: float) -> Any:
        """Get a peer's state as of an all-reduce; waits until the peer reaches it."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                with warnings.catch_warnings():
                    # torch's streamed load warns that what it gives must not be written to.
                    warnings.filterwarnings("ignore", message="The given buffer is not writable")
                    return self._transport.recv_checkpoint(0, address, turn, self._timeout)
            except urllib.error.HTTPError as error:  # it is not there yet
                reason: Exception = error
                error.close()
            except TimeoutError as error:  # its door is shut until it serves
                reason = error
            except (OSError, EOFError, RuntimeError) as error:
                message = f"worker {self._worker}: {what} ended while sending its state: {error}"
                raise CommunicationError(message, hint="another peer is asked") from error
            if time.monotonic() > deadline_s:
                message = f"worker {self._worker}: {what} gave no state in {patience_s:g} s"
                raise CommunicationError(message, hint="raise quorum_timeout_s") from reason
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the server and free its port."""
        self._transport.shutdown(wait=True)
        self._transport._server.server_close()  # noqa: SLF001 - as above


def _own_address(host: str, port: int) -> str:
    """Return the address from which this machine reaches the lighthouse."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing: only picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        message = f"no route to the lighthouse at {host}:{port}: {error}"
        raise CommunicationError(message, hint="check its address and the network") from error
