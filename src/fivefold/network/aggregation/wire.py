"""Frames between clients and a switch, and sums of the elements in them.

A frame is a header of fixed size, in network byte order, then the elements as they lie in memory.
Floating-point sums depend on their order, so it is fixed: rank 0, then 1, and so on. Half precision
is added in single precision and rounded once at the end; bfloat16 travels as ``uint16``.
"""

from __future__ import annotations

import enum
import itertools
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.errors import CommunicationError, ConfigurationError, UnsupportedError

_HEADER = struct.Struct("!4sBBHIQQI")  # magic, kind, dtype, zero, chunk, sequence, total, length
_MAGIC = b"5agg"
_MOST_BUFFERS = 64  # of one call of sendmsg
_MOST_TEXT_BYTES = 1 << 16
_CLOSED = "the peer closed the connection"
# Name: how elements are stored, how they are added. The order is the wire's numbering.
_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "float16": (np.float16, np.float32),
    "bfloat16": (np.uint16, np.float32),
    "int32": (np.int32, np.int32),
    "int64": (np.int64, np.int64),
}
DTYPES = tuple(_KINDS)
_BFLOAT16_NAN = 0x7FC0


def stored_as(dtype: str) -> Any:
    """Return the numpy type in which elements of a type are stored."""
    if dtype not in _KINDS:
        raise UnsupportedError(f"{dtype} cannot be summed", hint=f"use one of {', '.join(DTYPES)}")
    return np.dtype(_KINDS[dtype][0])


def dtype_name(array: np.ndarray, dtype: str | None) -> str:
    """Return the name of an array's element type, checked."""
    name = dtype or array.dtype.name
    if array.dtype != stored_as(name):
        raise ConfigurationError(
            f"an array of {array.dtype} cannot hold {name}", hint=f"use {stored_as(name)}"
        )
    return name


class OrderedSum:
    """A sum whose parts come in any order and are added in the order of ranks."""

    def __init__(self, dtype: str, parts: int) -> None:
        self._dtype = dtype
        self._parts = parts
        self._total: np.ndarray | None = None
        self._next = 0
        self._early: dict[int, np.ndarray] = {}  # parts that came before their turn

    @property
    def missing(self) -> list[int]:
        """Ranks whose part has not come."""
        return [rank for rank in range(self._next, self._parts) if rank not in self._early]

    def add(self, rank: int, values: np.ndarray) -> bool:
        """Take a rank's part."""
        self._early[rank] = values
        while self._next in self._early:
            part = _widened(self._early.pop(self._next), self._dtype)
            if self._total is None:
                self._total = part.copy()
            else:
                with np.errstate(all="ignore"):  # inf - inf is the caller's affair
                    np.add(self._total, part, out=self._total)
            self._next += 1
        return self._next == self._parts

    def result(self) -> np.ndarray:
        """Return the sum, in the type in which it is stored."""
        assert self._total is not None, "there are parts"
        return _narrowed(self._total, self._dtype)


def ordered_sum(parts: Sequence[np.ndarray], dtype: str | None = None) -> np.ndarray:
    """Sum arrays by rank as the switch does; ``dtype`` is ``"bfloat16"`` where ``uint16`` holds it.

    Examples:
        >>> ordered_sum([np.array([1e8], np.float32), np.float32([1.0]), np.float32([-1e8])])
        array([0.], dtype=float32)
    """
    if not parts:
        msg = "there is nothing to sum"
        raise ConfigurationError(msg, hint="give one array for each rank")
    total = OrderedSum(dtype_name(parts[0], dtype), len(parts))
    for rank, part in enumerate(parts):
        total.add(rank, part)
    return total.result()


def _widened(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(_KINDS[dtype][1], copy=False)


def _narrowed(total: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return total.astype(_KINDS[dtype][0], copy=False)
    bits = total.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return np.where(np.isnan(total), _BFLOAT16_NAN, rounded).astype(np.uint16)


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
        dtype, rest = DTYPES.index(frame.dtype), (frame.chunk, frame.sequence, frame.total)
        header = _HEADER.pack(_MAGIC, frame.kind, dtype, 0, *rest, len(payload))
        for buffer in (memoryview(header), payload):
            if len(buffer):
                self._buffers.append(buffer)
                self.waiting_bytes += len(buffer)

    def flush(self, connection: socket.socket) -> None:
        """Send what the socket takes now."""
        while self._buffers:
            try:
                sent = connection.sendmsg(itertools.islice(self._buffers, _MOST_BUFFERS))
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
    """Return the host and port of a switch's address, ``"host:port"``."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"{text!r} is no address", hint="write it as host:port")
    return host.strip("[]"), int(port)
