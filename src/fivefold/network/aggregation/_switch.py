"""The software switch: an event loop over TCP connections around a pool of slots.

One thread, one connection for each rank of each job. It sums what comes and sends each sum to all
ranks of the job. A client that breaks the protocol, or does not take its sums, loses its
connection and harms no one but its own job. There is no authentication: it belongs on a network
that is trusted, as the training job itself does.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from fivefold.errors import CommunicationError, FivefoldError, require_whole
from fivefold.network.aggregation.pool import Reply, Sharing, SlotPool, SwitchState
from fivefold.network.aggregation.wire import Frame, FrameReader, FrameWriter, Kind

_log = logging.getLogger(__name__)
_TICK_S = 0.25
_MOST_PORTS = (1 << 16) - 1
_MOST_WAITING_SLOTS = 4  # a client may leave so many times the pool unread
_LONGEST_NAME = 256
_MOST_RANKS = 1 << 16  # the switch keeps a list of a job's ranks
_LARGEST = {"rank": _MOST_RANKS, "size": _MOST_RANKS, "window": 1 << 31, "sequence": 1 << 62}


@dataclass(eq=False)
class _Peer:
    socket: socket.socket
    reader: FrameReader
    writer: FrameWriter = field(default_factory=FrameWriter)
    member: tuple[str, int] | None = None
    ends: bool = False


class AggregationSwitch:
    """A switch that sums chunks of several ranks and several jobs.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        slots: Chunks that can be in work at a time; 0 refuses all.
        slot_bytes: Longest chunk, a multiple of 8.
        sharing: ``"dynamic"``: jobs share the slots, first come first served; ``"reserved"``:
            a job gets its slots when it joins, or is refused.
        expire_s: Longest time that a chunk waits for the parts of all ranks.

    Raises:
        CommunicationError: The address cannot be listened on.
        ConfigurationError: A value is out of range.

    References:
        SwitchML, arXiv 1903.06701 (slots, windows); ATP, NSDI 2021 (best effort, fallback).

    Examples:
        >>> with AggregationSwitch(slots=16) as switch:
        ...     switch.start()
        ...     switch.state().slots_free
        16
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        slots: int = 128,
        slot_bytes: int = 1 << 16,
        sharing: Sharing = "dynamic",
        expire_s: float = 30.0,
    ) -> None:
        self._pool = SlotPool(
            slots=slots, slot_bytes=slot_bytes, sharing=sharing, expire_s=expire_s
        )
        require_whole("port", port, least=0, most=_MOST_PORTS)
        self._most_waiting = _MOST_WAITING_SLOTS * max(slots, 1) * slot_bytes
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise CommunicationError(
                f"the switch cannot listen on {host}:{port}: {error.strerror}",
                hint="is another one running there?",
            ) from error
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._members: dict[tuple[str, int], _Peer] = {}
        self._peers: set[_Peer] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ticked_s = time.monotonic()

    @property
    def address(self) -> str:
        """Return where it listens, as ``host:port``."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def state(self) -> SwitchState:
        """Return slots, jobs, hits and misses."""
        return self._pool.state()

    def start(self) -> None:
        """Serve in a thread of this process."""
        self._thread = threading.Thread(target=self.serve, name="aggregation switch", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Serve until `stop` is called."""
        while not self._stop.is_set():
            for key, events in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._handle(key.data, events)
            now_s = time.monotonic()
            if now_s - self._ticked_s >= _TICK_S:
                self._ticked_s = now_s
                self._send(self._pool.expire(now_s))

    def stop(self) -> None:
        """Let `serve` return soon; may be called from a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and close all connections."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for peer in self._peers:
            peer.socket.close()
        self._peers.clear()
        self._listener.close()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections ---------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it went away again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(connection, FrameReader(self._pool.slot_bytes))
            self._peers.add(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _handle(self, peer: _Peer, events: int) -> None:
        if peer not in self._peers:  # dropped while this batch of events was handled
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ and peer in self._peers:
                # One pass over the slots at most, or a fast peer would starve the others.
                for _ in range(8):
                    frame = peer.reader.read(peer.socket)
                    if frame is None or not self._take(peer, frame):
                        break
        except Exception as error:  # noqa: BLE001 - whatever its bytes do, the other jobs go on
            self._drop(peer, str(error) or type(error).__name__)

    def _drop(self, peer: _Peer, why: str) -> None:
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.member is not None and self._members.get(peer.member) is peer:
            del self._members[peer.member]
            _log.info("rank %d of job %s is gone: %s", peer.member[1], peer.member[0], why)
            self._send(self._pool.leave(*peer.member))

    def _send(self, replies: list[Reply]) -> None:
        for job, ranks, frame in replies:
            for rank in ranks:
                peer = self._members.get((job, rank))
                if peer is not None:
                    self._put(peer, frame)

    def _put(self, peer: _Peer, frame: Frame) -> None:
        peer.writer.put(frame)
        if peer.writer.waiting_bytes > self._most_waiting:
            self._drop(peer, "it does not take its sums")
            return
        try:
            self._flush(peer)
        except OSError as error:
            self._drop(peer, str(error))

    def _flush(self, peer: _Peer) -> None:
        peer.writer.flush(peer.socket)
        if peer.ends and not peer.writer.waiting_bytes:
            self._drop(peer, "it was refused")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.writer.waiting_bytes else 0)
        if self._selector.get_key(peer.socket).events != wanted:
            self._selector.modify(peer.socket, wanted, peer)

    # -- frames --------------------------------------------------------------------------------

    def _take(self, peer: _Peer, frame: Frame) -> bool:
        """Act on a frame; whether the peer is still there."""
        if frame.kind is Kind.DATA and peer.member is not None:
            job, rank = peer.member
            self._send(self._pool.contribute(job, rank, frame, now_s=time.monotonic()))
        elif frame.kind is Kind.JOIN and peer.member is None:
            self._join(peer, frame.content())
        elif frame.kind is Kind.STATE:
            self._put(peer, Frame.of_text(Kind.STATE, asdict(self._pool.state())))
        else:
            raise CommunicationError(f"it sent {frame.kind.name} out of turn")
        return peer in self._peers

    def _join(self, peer: _Peer, said: Any) -> None:
        job, numbers = _read_join(said)
        rank = numbers.pop("rank")
        older = self._members.get((job, rank))
        if older is not None:
            self._drop(older, "it joined again")
        try:
            granted = self._pool.join(job, rank, **numbers)
        except FivefoldError as error:
            peer.ends = True
            self._put(peer, Frame.of_text(Kind.REJECTED, str(error)))
            return
        peer.member = job, rank
        self._members[peer.member] = peer
        _log.info("rank %d of job %s joined with %d slots", rank, job, granted)
        welcome = {"granted": granted, "slot_bytes": self._pool.slot_bytes}
        self._put(peer, Frame.of_text(Kind.WELCOME, welcome))


def _read_join(said: Any) -> tuple[str, dict[str, int]]:
    """Return the job and numbers of a JOIN, as large as they can be meant."""
    said = said if isinstance(said, dict) else {}
    job = said.get("job")
    if not isinstance(job, str) or len(job) > _LONGEST_NAME:
        raise CommunicationError(f"its JOIN names no job of up to {_LONGEST_NAME} characters")
    numbers = {name: said.get(name) for name in ("rank", "size", "window", "sequence")}
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value <= _LARGEST[name]:
            raise CommunicationError(
                f"its JOIN gives {name} as {str(value)[:40]}, not a whole number up to "
                f"{_LARGEST[name]}"
            )
    return job, numbers
