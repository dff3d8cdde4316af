"""Frames between clients and a switch: a header of fixed size, then a payload.

Numbers are in network byte order in headers; payloads are the elements as they lie in memory.
Whatever a peer sends is checked before memory is set aside for it.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.network.aggregation.elements import DTYPES

_HEADER = struct.Struct("!4sBBHIQQI")  # magic, kind, dtype, zero, chunk, sequence, total, length
_MAGIC = b"5agg"
_MOST_BUFFERS = 64  # of one call of sendmsg
_MOST_TEXT_BYTES = 1 << 16
_CLOSED = "the peer closed the connection"


class Kind(enum.IntEnum):
    """Kinds of frames."""

    JOIN = 1
    WELCOME = 2
    REJECTED = 3
    DATA = 4
    RESULT = 5
    REFUSED = 6
    GONE = 7
    STATE = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    payload: Any = b""
    dtype: str = DTYPES[0]
    chunk: int = 0
    sequence: int = 0
    total: int = 0

    @classmethod
    def of_text(cls, kind: Kind, content: Any, **fields: Any) -> Frame:
        """Make a frame whose payload is JSON."""
        return cls(kind, json.dumps(content).encode(), **fields)

    def content(self) -> Any:
        """Return the JSON that the payload holds."""
        try:
            return json.loads(bytes(self.payload))
        except (ValueError, RecursionError) as error:
            raise CommunicationError(f"a {self.kind.name} frame holds no JSON") from error


class FrameWriter:
    """Frames on their way into a socket that does not block."""

    def __init__(self) -> None:
        self._buffers: deque[memoryview] = deque()
        self.waiting_bytes = 0

    def put(self, frame: Frame) -> None:
        """Add a frame to those that wait; its payload is not copied."""
        payload = memoryview(frame.payload).cast("B")
        header = _HEADER.pack(
            _MAGIC,
            frame.kind,
            DTYPES.index(frame.dtype),
            0,
            frame.chunk,
            frame.sequence,
            frame.total,
            len(payload),
        )
        for buffer in (memoryview(header), payload):
            if len(buffer):
                self._buffers.append(buffer)
                self.waiting_bytes += len(buffer)

    def flush(self, connection: socket.socket) -> None:
        """Send what the socket takes now."""
        while self._buffers:
            some = [self._buffers[at] for at in range(min(len(self._buffers), _MOST_BUFFERS))]
            try:
                sent = connection.sendmsg(some)
            except BlockingIOError:
                return
            self.waiting_bytes -= sent
            while sent:
                first = self._buffers[0]
                if sent < len(first):
                    self._buffers[0] = first[sent:]
                    return
                sent -= len(first)
                self._buffers.popleft()


class FrameReader:
    """Frames out of a socket that does not block."""

    def __init__(
        self, most_bytes: int, place: Callable[[Frame, int], memoryview | None] | None = None
    ) -> None:
        self.most_bytes = most_bytes
        self._place = place
        self._header = bytearray(_HEADER.size)
        self._frame: Frame | None = None
        self._target = memoryview(self._header)
        self._filled = 0

    def read(self, connection: socket.socket) -> Frame | None:
        """Return the next frame, or None where it is not all here yet."""
        while True:
            while self._filled < len(self._target):
                try:
                    got = connection.recv_into(self._target[self._filled :])
                except BlockingIOError:
                    return None
                if got == 0:
                    raise ConnectionResetError(_CLOSED)
                self._filled += got
            if self._frame is None:
                self._begin()
                continue
            frame, payload = self._frame, self._target
            self._frame, self._target, self._filled = None, memoryview(self._header), 0
            return Frame(frame.kind, payload, frame.dtype, frame.chunk, frame.sequence, frame.total)

    def _begin(self) -> None:
        magic, kind, dtype, zero, chunk, sequence, total, length = _HEADER.unpack(self._header)
        most = self.most_bytes if kind in (Kind.DATA, Kind.RESULT) else _MOST_TEXT_BYTES
        known = kind in Kind.__members__.values() and dtype < len(DTYPES)
        if magic != _MAGIC or zero or not known or length > most:
            raise CommunicationError(
                f"what came is no frame: {bytes(self._header).hex()}",
                hint="something else uses this port, or the two sides differ in slot_bytes",
            )
        self._frame = Frame(Kind(kind), b"", DTYPES[dtype], chunk, sequence, total)
        place = None if self._place is None else self._place(self._frame, length)
        self._target = memoryview(bytearray(length)) if place is None else place
        self._filled = 0


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of a switch's address.

    Args:
        text: ``"host:port"``.

    Raises:
        ConfigurationError: It is no such text.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"{text!r} is no address", hint="write it as host:port")
    return host.strip("[]"), int(port)
