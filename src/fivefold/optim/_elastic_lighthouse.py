"""The lighthouse: torchft's server that elastic workers vote at."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from fivefold.errors import (
    CommunicationError,
    ConfigurationError,
    optional_module,
    require_number,
    require_whole,
)

_LOG = logging.getLogger(__name__)
_TICK_MS = 50
_CHUNK_BYTES = 1 << 16
_LAST_PORT = 65_535


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
        """Return the port that it listens on."""
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
    """
    require_whole("min_workers", min_workers)
    require_number("join_timeout_s", join_timeout_s, positive=True)
    require_number("heartbeat_timeout_s", heartbeat_timeout_s, positive=True)
    host, number = host_and_port(bind, "the address to listen on")
    listen_at(host, number).close()  # torchft's own failure would end in a native thread, unseen
    gated = not all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))
    if gated and not allow:
        message = f"{bind} can be reached from other machines, and no host is allowed to connect"
        hint = "name the workers' hosts: --allow 10.0.0.0/24 (0.0.0.0/0 for all)"
        raise ConfigurationError(message, hint=hint)
    require_torchft()
    from torchft.coordination import LighthouseServer  # noqa: PLC0415 - optional, slow

    server = LighthouseServer(
        bind="127.0.0.1:0" if gated else f"{host}:{number}",
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


def host_and_port(address: str, what: str) -> tuple[str, int]:
    """Return the two parts of ``host:port``, which may be written as a URL."""
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        message = f"{what} must be host:port, with a port up to {_LAST_PORT}; got {address!r}"
        raise ConfigurationError(message, hint="such as 10.0.0.1:29510")
    return host, int(port)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def listen_at(host: str, port: int) -> socket.socket:
    """Listen on one address, not on all interfaces."""
    address = _addresses(host)[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # its own text names it again
        message = f"cannot listen on {host}:{port}: {reason}"
        hint = "choose another port with --bind" if port else "give an address of this machine"
        raise CommunicationError(message, hint=hint) from error


class HostGate:
    """Hands connections of listed hosts on to a server on this machine, and closes others."""

    def __init__(self, host: str, port: int, *, server_port: int, allow: Sequence[str]) -> None:
        self._networks = [network for entry in allow for network in _networks(entry)]
        self._listener, self._port = listen_at(host, port), server_port
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._serve, name="elastic-gate", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port that others come in at."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close the door and all connections."""
        _shut(self._listener)
        self._thread.join()
        self._listener.close()
        for side in list(self._open):
            _shut(side)

    def _serve(self) -> None:
        while True:
            try:
                theirs, (address, *_) = self._listener.accept()
            except OSError:  # the door was closed
                return
            peer = ipaddress.ip_address(address.partition("%")[0])
            peer = getattr(peer, "ipv4_mapped", None) or peer
            if any(peer in network for network in self._networks):
                threading.Thread(target=self._admit, args=(theirs,), daemon=True).start()
            else:
                _LOG.warning("refused a connection from %s: not among the allowed hosts", peer)
                theirs.close()

    def _admit(self, theirs: socket.socket) -> None:
        here = ("127.0.0.1", self._port)
        with theirs, contextlib.suppress(OSError), socket.create_connection(here) as ours:
            self._open |= {theirs, ours}
            back = threading.Thread(target=_pump, args=(ours, theirs), daemon=True)
            back.start()
            _pump(theirs, ours)
            back.join()
            self._open -= {theirs, ours}


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Hand on until one side ends; then the other side's end is that of this direction."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
        return
    _shut(source)
    _shut(target)


def _shut(side: socket.socket) -> None:
    """End what other threads wait for on a socket."""
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        message = f"the host {host} is not known: {error.strerror or error}"
        raise CommunicationError(message, hint="give its address") from error
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def _networks(entry: str) -> list[Network]:
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_network(entry)]
    if "/" in entry or not entry:
        message = f"allow takes host names, addresses and networks; got {entry!r}"
        raise ConfigurationError(message, hint="such as node7, 10.0.0.7 or 10.0.0.0/24")
    return [ipaddress.ip_network(address) for address in _addresses(entry)]


def require_torchft() -> None:
    """Make torchft ready, with its native log kept to errors unless RUST_LOG says otherwise."""
    os.environ.setdefault("RUST_LOG", "error")  # read once, when torchft is loaded
    optional_module("torchft.coordination", extra="elastic", use="elastic training")
