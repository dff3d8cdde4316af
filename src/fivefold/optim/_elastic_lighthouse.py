"""The lighthouse: torchft's server that elastic workers vote at."""

from __future__ import annotations

import socket
from typing import Any

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.optim._elastic_services import require_torchft

__all__ = ["Lighthouse", "start_lighthouse"]

_TICK_MS = 50


class Lighthouse:
    """A running lighthouse; made by :func:`start_lighthouse`.

    Args:
        server: torchft's server.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.address().rpartition(":")[2])

    def close(self) -> None:
        """Stop it; workers then wait for another at the same address."""
        self._server.shutdown()


def start_lighthouse(
    bind: str = "0.0.0.0:29510",
    *,
    min_workers: int = 2,
    join_timeout_s: float = 60.0,
    heartbeat_timeout_s: float = 5.0,
) -> Lighthouse:
    """Start the meeting place of an elastic job in this process; one per job.

    Args:
        bind: Address and port to listen on; port 0 takes a free one.
        min_workers: Fewer workers than this wait instead of training.
        join_timeout_s: How long a vote waits for a worker that is alive but slow, in seconds.
        heartbeat_timeout_s: A worker that is silent for this long counts as dead.

    Returns:
        The lighthouse, which runs in threads of its own until it is closed.

    Raises:
        ConfigurationError: An argument is not allowed.
        UnsupportedError: torchft is not installed.
        CommunicationError: The address cannot be listened on.

    Example:
        >>> start_lighthouse(min_workers=0)
        Traceback (most recent call last):
            ...
        fivefold.errors.ConfigurationError: min_workers must be at least 1; got 0
    """
    if min_workers < 1:
        raise ConfigurationError(f"min_workers must be at least 1; got {min_workers}")
    if join_timeout_s <= 0 or heartbeat_timeout_s <= 0:
        message = f"timeouts must be positive; got {join_timeout_s} and {heartbeat_timeout_s}"
        raise ConfigurationError(message)
    _require_free(bind)
    require_torchft()
    from torchft.coordination import LighthouseServer  # noqa: PLC0415 - optional, slow

    server = LighthouseServer(
        bind=bind,
        min_replicas=min_workers,
        join_timeout_ms=round(1000 * join_timeout_s),
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=round(1000 * heartbeat_timeout_s),
    )
    return Lighthouse(server)


def _require_free(bind: str) -> None:
    """Look before torchft does: its own failure ends in a native thread, unseen."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit():
        message = f"the address to listen on must be host:port; got {bind!r}"
        raise ConfigurationError(message, hint="such as 0.0.0.0:29510")
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        message = f"cannot listen on {bind}: {error.strerror or error}"
        raise CommunicationError(message, hint="choose another port with --bind") from error
