"""A client's connection to a switch, and one collective's exchange of chunks over it.

At most a window of chunks is under way, and each sum that comes back lets the next chunk go: the
switch never holds more than a window for the job, however far its ranks drift apart.
"""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fivefold.errors import CommunicationError, FivefoldError
from fivefold.network.aggregation.pool import SwitchState
from fivefold.network.aggregation.wire import (
    Frame,
    FrameReader,
    FrameWriter,
    Kind,
    parse_address,
)

_MOST_SLOT_BYTES = 1 << 26
_OPEN, _SUMMED, _REFUSED = 0, 1, 2


@dataclass
class Exchange:
    """One collective: what goes out, what comes back."""

    own: memoryview
    results: memoryview
    chunk_bytes: int
    dtype: str
    sequence: int
    reasons: list[dict[str, Any]] = field(default_factory=list)
    lost: str | None = None

    def __post_init__(self) -> None:
        self.chunks = -(-len(self.own) // self.chunk_bytes)
        self._states = np.zeros(self.chunks, np.uint8)
        self._sent = np.zeros(self.chunks, np.bool_)
        self._next = 0
        self.left = self.chunks
        self.under_way = 0

    @property
    def summed(self) -> Any:
        """1 for each chunk whose sum is here, else 0."""
        return (self._states == _SUMMED).astype(np.uint8)

    def next_frame(self) -> Frame | None:
        """Return the next chunk to send; None after the last."""
        while self._next < self.chunks and self._states[self._next] != _OPEN:
            self._next += 1
        if self._next == self.chunks:
            return None
        chunk = self._next
        self._next += 1
        self._sent[chunk] = True
        self.under_way += 1
        part = self._part(self.own, chunk)
        return Frame(Kind.DATA, part, self.dtype, chunk, self.sequence, len(self.own))

    def place(self, frame: Frame, length: int) -> memoryview | None:
        """Return memory for a frame that comes: sums go where they belong."""
        if frame.kind is not Kind.RESULT or frame.sequence != self.sequence:
            return None
        if frame.chunk >= self.chunks or len(self._part(self.own, frame.chunk)) != length:
            raise CommunicationError(f"the switch sent chunk {frame.chunk} of {length} bytes")
        return self._part(self.results, frame.chunk)

    def take(self, frame: Frame) -> None:
        """Note what came."""
        if frame.sequence < self.sequence:
            return  # of a collective that all ranks have left
        if frame.kind is Kind.GONE:
            self.lost = f"rank {frame.chunk} lost its connection to the switch"
        elif frame.kind is Kind.RESULT:
            self._end(frame.chunk, _SUMMED)
        elif frame.kind is Kind.REFUSED and frame.chunk < self.chunks:
            self._end(frame.chunk, _REFUSED)
            self.reasons.append(frame.content())
        else:
            raise CommunicationError(f"the switch sent {frame.kind.name} out of turn")

    def _end(self, chunk: int, state: int) -> None:
        if self._states[chunk] == _OPEN:
            self._states[chunk] = state
            self.left -= 1
            self.under_way -= int(self._sent[chunk])

    def _part(self, whole: memoryview, chunk: int) -> memoryview:
        return whole[chunk * self.chunk_bytes : (chunk + 1) * self.chunk_bytes]


class Connection:
    """A joined connection."""

    def __init__(self, address: str, said: dict[str, Any], *, timeout_s: float) -> None:
        self._socket = _connected(address, timeout_s)
        try:
            answer = _asked(self._socket, Frame.of_text(Kind.JOIN, said), timeout_s)
            self.window, self.slot_bytes = _granted(answer)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._writer = FrameWriter()
        self._exchange: Exchange | None = None
        self._reader = FrameReader(self.slot_bytes, self._place)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def _place(self, frame: Frame, length: int) -> memoryview | None:
        return None if self._exchange is None else self._exchange.place(frame, length)

    def run(self, exchange: Exchange, *, timeout_s: float) -> bool:
        """Exchange all chunks, or as many as the switch sums."""
        self._exchange = exchange
        heard_s = time.monotonic()
        try:
            while exchange.lost is None and (exchange.left or self._writer.waiting_bytes):
                self._send(exchange)
                if not exchange.left and not self._writer.waiting_bytes:
                    break
                if self._wait(timeout_s):
                    heard_s = time.monotonic()
                    self._receive(exchange)
                elif time.monotonic() - heard_s >= timeout_s:
                    exchange.lost = f"the switch was silent for {timeout_s:g} s"
        except (OSError, ValueError, FivefoldError) as error:
            exchange.lost = f"the connection to the switch failed: {error}"
        finally:
            self._exchange = None
        return exchange.lost is None

    def _send(self, exchange: Exchange) -> None:
        while exchange.under_way < self.window:
            frame = exchange.next_frame()
            if frame is None:
                break
            self._writer.put(frame)
        self._writer.flush(self._socket)

    def _wait(self, timeout_s: float) -> bool:
        wanted = selectors.EVENT_READ
        if self._writer.waiting_bytes:
            wanted |= selectors.EVENT_WRITE
        if self._selector.get_key(self._socket).events != wanted:
            self._selector.modify(self._socket, wanted)
        return bool(self._selector.select(timeout_s))

    def _receive(self, exchange: Exchange) -> None:
        while exchange.lost is None:
            frame = self._reader.read(self._socket)
            if frame is None:
                return
            exchange.take(frame)

    def close(self) -> None:
        """End it; the switch tells the other ranks."""
        self._selector.close()
        self._socket.close()


def read_switch_state(address: str, *, timeout_s: float = 5.0) -> SwitchState:
    """Ask a switch for its slots, jobs, hits and misses.

    Args:
        address: The switch's ``host:port``.
        timeout_s: Longest wait.

    Returns:
        Its state.

    Raises:
        CommunicationError: It does not answer.

    Examples:
        >>> from fivefold.network.aggregation import AggregationSwitch
        >>> with AggregationSwitch(slots=4) as switch:
        ...     switch.start()
        ...     read_switch_state(switch.address).slots_total
        4
    """
    with _connected(address, timeout_s) as connection:
        answer = _asked(connection, Frame(Kind.STATE), timeout_s)
    try:
        return SwitchState(**answer.content())
    except TypeError as error:
        raise CommunicationError(f"{address} is no switch of this version: {error}") from error


def _granted(answer: Frame) -> tuple[int, int]:
    if answer.kind is not Kind.WELCOME:
        raise CommunicationError(f"the switch refused: {answer.content()}")
    welcome = answer.content()
    try:
        window, slot_bytes = int(welcome["granted"]), int(welcome["slot_bytes"])
    except (KeyError, TypeError, ValueError):
        window = slot_bytes = 0
    if window < 1 or not 8 <= slot_bytes <= _MOST_SLOT_BYTES or slot_bytes % 8:
        raise CommunicationError(f"the switch answered {welcome}")
    return window, slot_bytes


def _connected(address: str, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection(parse_address(address), timeout=timeout_s)
    except OSError as error:
        if isinstance(error, FivefoldError):
            raise
        raise CommunicationError(
            f"there is no switch at {address}: {error}", hint="is it running, and reachable?"
        ) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _asked(connection: socket.socket, frame: Frame, timeout_s: float) -> Frame:
    """Send one frame and wait for the answer."""
    writer, reader = FrameWriter(), FrameReader(0)
    writer.put(frame)
    try:
        writer.flush(connection)
        connection.settimeout(timeout_s)
        answer = reader.read(connection)
    except TimeoutError as error:
        raise CommunicationError(f"the switch did not answer within {timeout_s:g} s") from error
    except OSError as error:
        if isinstance(error, FivefoldError):
            raise
        raise CommunicationError(f"the connection to the switch failed: {error}") from error
    assert answer is not None, "a blocking socket gives a frame or raises"
    return answer
