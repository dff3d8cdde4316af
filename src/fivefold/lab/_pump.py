"""Carries what the ranks write: to one file per rank and stream, and on to the terminal.

One thread reads all pipes, so that a terminal that does not take its lines slows the ranks down,
as a pipe would, but never the supervision of time limits and signals. Knows nothing of hosts
beyond the prefix it puts before a line.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16


@dataclass(kw_only=True)
class Stream:
    """One pipe and where its contents go.

    Args:
        source: Read end of the pipe, unbuffered; the pump closes it.
        path: File that gets every byte.
        sink_fd: Descriptor that gets the lines as well; None for the file only.
        prefix: Put before each line at the sink; empty passes bytes on unchanged.
    """

    source: IO[bytes]
    path: Path
    sink_fd: int | None
    prefix: bytes = b""
    _pending: bytes = field(default=b"", init=False)

    def show(self, data: bytes) -> None:
        """Pass data on to the sink; whole lines only where there is a prefix."""
        if self.sink_fd is None:
            return
        if not self.prefix:
            self._write(data)
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        self._write(b"".join(self.prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        """Pass on a last line that has no end."""
        if self._pending:
            self.show(b"\n")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self.sink_fd is not None:
            try:
                view = view[os.write(self.sink_fd, view) :]
            except BlockingIOError:  # someone made the terminal non-blocking
                select.select((), [self.sink_fd], ())
            except OSError:  # the reader has gone: the file still gets everything
                self.sink_fd = None


class Pump:
    """A thread that empties streams until all have ended."""

    def __init__(self, streams: list[Stream]) -> None:
        self._selector = selectors.DefaultSelector()
        for stream in streams:
            file_fd = os.open(stream.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._selector.register(stream.source, selectors.EVENT_READ, (stream, file_fd))
        self._thread = threading.Thread(target=self._run, name="log pump", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until every pipe has ended, at most so long; return whether they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                stream, file_fd = key.data
                data = os.read(stream.source.fileno(), _CHUNK_BYTES)
                if data:
                    with suppress(OSError):  # a full disk must not stop the ranks
                        os.write(file_fd, data)
                    stream.show(data)
                else:
                    stream.end()
                    self._selector.unregister(stream.source)
                    stream.source.close()
                    os.close(file_fd)
