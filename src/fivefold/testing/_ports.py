"""Ports for servers that are started a moment later."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_LOWEST = 10_000  # below it, services have ports of their own
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_turns = itertools.count()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on or is likely to take before its user.

    The kernel hands the ports of its own range to everyone who asks for any port, and to every
    connection, so one of those may be gone by the time that a server starts. This one is from
    below that range, and processes that ask at the same time begin at different places.

    Returns:
        The number of the port.

    Raises:
        OSError: Every port below the kernel's range is in use.
    """
    span = max(_end() - _LOWEST, 1)
    for _ in range(span):
        # Neighbours in process numbers are neighbours in time: a prime keeps them far apart.
        port = _LOWEST + (os.getpid() * 1009 + next(_turns)) % span
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    message = f"all ports from {_LOWEST} to {_LOWEST + span - 1} of 127.0.0.1 are in use"
    raise OSError(message)


def _end() -> int:
    """Return where the kernel's own range begins; Linux's default where it cannot be asked."""
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except OSError:
        return 32_768
