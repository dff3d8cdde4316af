"""The lighthouse: torchft's server that elastic workers vote at."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.optim._elastic_gate import HostGate, is_loopback
from fivefold.optim._elastic_services import require_torchft

_TICK_MS = 50


class Lighthouse:
    """A running lighthouse; made by :func:`start_lighthouse`.

    Args:
        server: torchft's server.
        gate: What stands before it, where it is reached from other machines.
    """

    def __init__(self, server: Any, *, gate: HostGate | None = None) -> None:
        self._server = server
        self._gate = gate

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return _port_of(self._server) if self._gate is None else self._gate.port

    def close(self) -> None:
        """Stop it; workers then wait for another at the same address."""
        if self._gate is not None:
            self._gate.close()
        self._server.shutdown()


def start_lighthouse(
    bind: str = "127.0.0.1:29510",
    *,
    allow: Sequence[str] = (),
    min_workers: int = 2,
    join_timeout_s: float = 60.0,
    heartbeat_timeout_s: float = 5.0,
) -> Lighthouse:
    """Start the meeting place of an elastic job in this process; one per job.

    Args:
        bind: Address and port to listen on; port 0 takes a free one. By default only this machine
            reaches it; ``0.0.0.0`` is all interfaces.
        allow: Who may connect where other machines can: host names, addresses, or networks such as
            ``10.0.0.0/24``. A lighthouse has no password: whoever reaches it takes part.
        min_workers: Fewer workers than this wait instead of training.
        join_timeout_s: How long a vote waits for a worker that is alive but slow, in seconds.
        heartbeat_timeout_s: A worker that is silent for this long counts as dead.

    Returns:
        The lighthouse, which runs in threads of its own until it is closed.

    Raises:
        ConfigurationError: An argument is not allowed.
        UnsupportedError: torchft is not installed.
        CommunicationError: The address cannot be listened on.

    Examples:
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
    host, number = _require_free(bind)
    gated = not is_loopback(host)
    if gated and not allow:
        message = f"{bind} can be reached from other machines, and no host is allowed to connect"
        hint = "name the workers' hosts: --allow 10.0.0.0/24 (0.0.0.0/0 for all)"
        raise ConfigurationError(message, hint=hint)
    require_torchft()
    from torchft.coordination import LighthouseServer  # noqa: PLC0415 - optional, slow

    server = LighthouseServer(
        bind="127.0.0.1:0" if gated else bind,
        min_replicas=min_workers,
        join_timeout_ms=round(1000 * join_timeout_s),
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=round(1000 * heartbeat_timeout_s),
    )
    if not gated:
        return Lighthouse(server)
    gate = HostGate(host, number, server_port=_port_of(server), allow=allow)
    return Lighthouse(server, gate=gate)


def _port_of(server: Any) -> int:
    return int(server.address().rpartition(":")[2])


def _require_free(bind: str) -> tuple[str, int]:
    """Look before torchft does: its own failure ends in a native thread, unseen."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit():
        message = f"the address to listen on must be host:port; got {bind!r}"
        raise ConfigurationError(message, hint="such as 127.0.0.1:29510")
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
    return host, int(port)
