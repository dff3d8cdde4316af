"""The relay: one process that carries every packet between the hosts' TUN devices.

For machines whose kernel has no ``netem``. Started by the supervisor inside the private namespaces
as ``python -m fivefold.lab._relay JOB``; ends with SIGTERM, which makes it write its counts.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import json
import os
import pickle
import random
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from fivefold.lab._linux import VNET_HEADER_BYTES
from fivefold.lab._plan import (
    BURST_S,
    FRAME_OVERHEAD_BYTES,
    UNLIMITED_BYTES_PER_S,
    queue_bytes,
    relay_mtu,
)
from fivefold.lab._spec import LabSpec

_READ_BYTES = 65_536 + VNET_HEADER_BYTES
_PACKETS_PER_TURN = 32
_IDLE_S = 1.0
_IPV4 = 4
_LAST_ADDRESS_BYTE = VNET_HEADER_BYTES + 19  # the destination's last byte in an IPv4 header
_PRIORITY = -10


@dataclass
class FabricCounts:
    delivered: int = 0
    delivered_bytes: int = 0
    dropped_at_queue: int = 0
    lost: int = 0


class Link:
    """One direction of one host's link: a first-in first-out queue of a fixed rate.

    ``rate_bytes_per_s`` of None is unlimited; the queue drops beyond ``queue_bytes``.
    """

    def __init__(self, rate_bytes_per_s: float | None, *, queue_bytes: int) -> None:
        self._s_per_byte = 0.0 if rate_bytes_per_s is None else 1.0 / rate_bytes_per_s
        self._queue_s = queue_bytes * self._s_per_byte
        self._free_at_s = float("-inf")

    def serialisation_s(self, size_bytes: int) -> float:
        """Return the time that a packet of this size occupies the link."""
        return size_bytes * self._s_per_byte

    def admit(self, at_s: float, size_bytes: int, *, burst_s: float) -> float | None:
        """Queue a packet whose first byte is there at ``at_s``; return when it is through."""
        start_s = max(self._free_at_s, at_s - burst_s)
        if start_s - at_s > self._queue_s:
            return None
        self._free_at_s = start_s + size_bytes * self._s_per_byte
        return max(self._free_at_s, at_s)


class Packet(NamedTuple):
    source: int
    destination: int
    packet: bytes
    size_bytes: int


class Fabric:
    """All links and all packets under way between the hosts, in virtual time: the caller's.

    A packet waits in its sender's uplink queue, is serialised at the uplink's rate, then waits for
    and passes the receiver's downlink (cut-through: an idle downlink of the same rate adds
    nothing), and is then on its way for the one-way delay, more or less by up to the jitter. Queues
    are drop-tail. Packets between two hosts never overtake one another. ``burst_s`` is unused link
    time that a link may make up for, as a token bucket does; it covers the time by which the
    caller's clock runs late.
    """

    def __init__(
        self,
        uplinks: list[Link],
        downlinks: list[Link],
        *,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        burst_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.counts = FabricCounts()
        self._uplinks, self._downlinks = uplinks, downlinks
        self._delay_s, self._jitter_s = delay_s, jitter_s
        self._loss, self._burst_s = loss, burst_s
        # Seeded noise, nothing secret.
        self._random = random.Random(seed)  # noqa: S311 - not for cryptography
        # Time, number, whether it reaches the switch then (or else its host), packet.
        self._events: list[tuple[float, int, bool, Packet]] = []
        self._numbers = itertools.count()
        self._last_arrival_s: dict[tuple[int, int], float] = {}

    def send(
        self, now_s: float, *, source: int, destination: int, packet: bytes, size_bytes: int
    ) -> None:
        """Take a packet from a host at time ``now_s``; times must not go back."""
        finished_s = self._uplinks[source].admit(now_s, size_bytes, burst_s=self._burst_s)
        if finished_s is None:
            self.counts.dropped_at_queue += 1
            return
        sent = Packet(source, destination, packet, size_bytes)
        heapq.heappush(self._events, (finished_s, next(self._numbers), True, sent))

    def next_event_s(self) -> float | None:
        """Return when :meth:`advance` has something to do; None while nothing is under way."""
        return self._events[0][0] if self._events else None

    def advance(self, now_s: float) -> list[Packet]:
        """Let time pass up to ``now_s``; return what has arrived."""
        arrived: list[Packet] = []
        while self._events and self._events[0][0] <= now_s:
            at_s, _, at_switch, packet = heapq.heappop(self._events)
            if at_switch:
                self._leave_switch(at_s, packet)
            else:
                arrived.append(packet)
                self.counts.delivered += 1
                self.counts.delivered_bytes += packet.size_bytes
        return arrived

    def _leave_switch(self, at_s: float, packet: Packet) -> None:
        size_bytes = packet.size_bytes
        if self._loss > 0 and self._random.random() < self._loss:
            self.counts.lost += 1
            return
        # The packet's first byte reached the switch one uplink serialisation before its last.
        first_byte_s = at_s - self._uplinks[packet.source].serialisation_s(size_bytes)
        finished_s = self._downlinks[packet.destination].admit(
            first_byte_s, size_bytes, burst_s=self._burst_s
        )
        if finished_s is None:
            self.counts.dropped_at_queue += 1
            return
        delay_s = self._delay_s
        if self._jitter_s > 0:
            delay_s += self._random.uniform(-self._jitter_s, self._jitter_s)
        path = packet.source, packet.destination
        earliest_s = self._last_arrival_s.get(path, float("-inf"))
        arrival_s = max(max(finished_s, at_s) + delay_s, earliest_s)
        self._last_arrival_s[path] = arrival_s
        heapq.heappush(self._events, (arrival_s, next(self._numbers), False, packet))


def build_fabric(spec: LabSpec) -> Fabric:
    mtu, up, down = relay_mtu(spec), [], []
    for host in range(spec.hosts):
        rate = spec.rate_of(host)
        held = queue_bytes(spec, rate or UNLIMITED_BYTES_PER_S, mtu=mtu)
        up.append(Link(rate, queue_bytes=held))
        down.append(Link(rate, queue_bytes=held))
    return Fabric(
        up,
        down,
        delay_s=spec.delay_s,
        jitter_s=spec.jitter_s,
        loss=spec.loss,
        burst_s=BURST_S,
        seed=spec.seed,
    )


def main(arguments: list[str]) -> None:
    spec, tun_fds, counts_path = pickle.loads(base64.b64decode(arguments[0]))  # noqa: S301 - ours
    with suppress(OSError):  # only root may; without it, busy ranks make the relay a little late
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    fabric = build_fabric(spec)

    def end(*_: object) -> None:
        counts_path.write_text(json.dumps(asdict(fabric.counts)) + "\n", encoding="utf-8")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        _turn(fabric, tun_fds)


def _turn(fabric: Fabric, tun_fds: list[int]) -> None:
    next_s = fabric.next_event_s()
    wait_s = _IDLE_S if next_s is None else max(next_s - time.monotonic(), 0.0)
    # select() waits in microseconds, poll and epoll only in milliseconds.
    ready, _, _ = select.select(tun_fds, (), (), min(wait_s, _IDLE_S))
    for fd in ready:
        _take_packets(fabric, fd, tun_fds)
    for delivery in fabric.advance(time.monotonic()):
        # A device that is down or full drops what it cannot take, as a network card would.
        with suppress(OSError):
            os.write(tun_fds[delivery.destination], delivery.packet)


def _take_packets(fabric: Fabric, fd: int, tun_fds: list[int]) -> None:
    source = tun_fds.index(fd)
    for _ in range(_PACKETS_PER_TURN):
        try:
            packet = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if len(packet) <= _LAST_ADDRESS_BYTE or packet[VNET_HEADER_BYTES] >> 4 != _IPV4:
            continue
        destination = packet[_LAST_ADDRESS_BYTE] - 1
        if 0 <= destination < len(tun_fds):
            size_bytes = len(packet) - VNET_HEADER_BYTES + FRAME_OVERHEAD_BYTES
            fabric.send(
                time.monotonic(),
                source=source,
                destination=destination,
                packet=packet,
                size_bytes=size_bytes,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
