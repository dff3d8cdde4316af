"""A door in front of a server that has none: only listed hosts come in."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Sequence

from fivefold.errors import CommunicationError, ConfigurationError

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 16

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address.

    Raises:
        CommunicationError: The name cannot be resolved.
    """
    return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))


def listen_at(host: str, port: int) -> socket.socket:
    """Listen on one address, not on all interfaces.

    Raises:
        CommunicationError: The address cannot be listened on.
    """
    address = _addresses(host)[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise CommunicationError(message, hint="choose another address or port") from error


class HostGate:
    """Hands connections of listed hosts on to a server on this machine, and closes others.

    Args:
        host: Where others come in.
        port: The port there; 0 for a free one.
        server_port: The server's port on 127.0.0.1.
        allow: Host names, addresses, or networks such as ``10.0.0.0/24``.

    Raises:
        ConfigurationError: An entry of ``allow`` is none of these.
        CommunicationError: The address cannot be listened on, or a name is not known.
    """

    def __init__(self, host: str, port: int, *, server_port: int, allow: Sequence[str]) -> None:
        self._networks = [network for entry in allow for network in _networks(entry)]
        self._listener, self._port = listen_at(host, port), server_port
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._serve, name="elastic-gate", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that others come in at."""
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
