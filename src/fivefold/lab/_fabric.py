"""The relay's model of the network: rate, queue, delay, jitter and loss in virtual time. Pure.

A packet waits in its sender's uplink queue, is serialised at the uplink's rate, then waits for and
passes the receiver's downlink (cut-through: an idle downlink of the same rate adds nothing), and is
then on its way for the one-way delay. Queues are drop-tail. Packets between two hosts never
overtake one another, whatever the jitter. The clock is the caller's; nothing here reads one.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What every path has in common.

    Args:
        delay_s: One-way delay.
        jitter_s: Half the width of the delay's uniform distribution.
        loss: Probability of losing a packet.
        burst_s: How much unused link time a link may make up for, as a token bucket does; covers
            the time by which the caller's clock runs late.
        seed: Seed of jitter and loss.

    Examples:
        >>> Conditions(delay_s=0.005).loss
        0.0
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    burst_s: float = 0.0
    seed: int = 0


@dataclass
class FabricCounts:
    """What happened to the packets.

    Examples:
        >>> FabricCounts().delivered
        0
    """

    delivered: int = 0
    delivered_bytes: int = 0
    dropped_at_queue: int = 0
    lost: int = 0


class Link:
    """One direction of one host's link: a first-in first-out queue of a fixed rate.

    Args:
        rate_bytes_per_s: The rate; None is unlimited.
        queue_bytes: What the queue holds before it drops.

    Examples:
        >>> link = Link(1000.0, queue_bytes=500)
        >>> link.admit(0.0, 100), link.admit(0.0, 100)
        (0.1, 0.2)
    """

    def __init__(self, rate_bytes_per_s: float | None, *, queue_bytes: int) -> None:
        self._s_per_byte = 0.0 if rate_bytes_per_s is None else 1.0 / rate_bytes_per_s
        self._queue_s = queue_bytes * self._s_per_byte
        self._free_at_s = float("-inf")

    def serialisation_s(self, size_bytes: int) -> float:
        """Time that a packet of this size occupies the link."""
        return size_bytes * self._s_per_byte

    def admit(self, at_s: float, size_bytes: int, *, burst_s: float = 0.0) -> float | None:
        """Queue a packet whose first byte is there at ``at_s``.

        Args:
            at_s: When the packet can start.
            size_bytes: Its size.
            burst_s: How far before ``at_s`` an idle link may place the start, which leaves more
                of its time to later packets; no packet leaves before ``at_s``.

        Returns:
            When its last byte leaves the link, or None where the queue is full.
        """
        start_s = max(self._free_at_s, at_s - burst_s)
        if start_s - at_s > self._queue_s:
            return None
        self._free_at_s = start_s + size_bytes * self._s_per_byte
        return max(self._free_at_s, at_s)


@dataclass(frozen=True)
class Delivery:
    """A packet that has arrived.

    Examples:
        >>> Delivery(1, b"x").destination
        1
    """

    destination: int
    packet: bytes


@dataclass(order=True)
class _Event:
    at_s: float
    number: int
    source: int = field(compare=False)
    destination: int = field(compare=False)
    size_bytes: int = field(compare=False)
    packet: bytes = field(compare=False)
    at_switch: bool = field(compare=False)


class Fabric:
    """All links and all packets under way between the hosts.

    Args:
        uplinks: One link per host, towards the switch.
        downlinks: One link per host, from the switch.
        conditions: Delay, jitter and loss.

    Examples:
        >>> links = [Link(1000.0, queue_bytes=500) for _ in range(4)]
        >>> fabric = Fabric(links[:2], links[2:], conditions=Conditions(delay_s=1.0))
        >>> fabric.send(0.0, source=0, destination=1, packet=b"hi", size_bytes=100)
        >>> fabric.advance(1.0), fabric.advance(1.1)
        ([], [Delivery(destination=1, packet=b'hi')])
    """

    def __init__(
        self, uplinks: list[Link], downlinks: list[Link], *, conditions: Conditions
    ) -> None:
        self.counts = FabricCounts()
        self._uplinks = uplinks
        self._downlinks = downlinks
        self._conditions = conditions
        # Seeded noise, nothing secret.
        self._random = random.Random(conditions.seed)  # noqa: S311 - not for cryptography
        self._events: list[_Event] = []
        self._number = 0
        self._last_arrival_s: dict[tuple[int, int], float] = {}

    def send(
        self, now_s: float, *, source: int, destination: int, packet: bytes, size_bytes: int
    ) -> None:
        """Take a packet from a host at time ``now_s``; times must not go back."""
        link, burst_s = self._uplinks[source], self._conditions.burst_s
        finished_s = link.admit(now_s, size_bytes, burst_s=burst_s)
        if finished_s is None:
            self.counts.dropped_at_queue += 1
            return
        self._push(_Event(finished_s, 0, source, destination, size_bytes, packet, at_switch=True))

    def next_event_s(self) -> float | None:
        """When :meth:`advance` has something to do; None while nothing is under way."""
        return self._events[0].at_s if self._events else None

    def advance(self, now_s: float) -> list[Delivery]:
        """Let time pass up to ``now_s``.

        Returns:
            The packets that have arrived, in order of arrival.
        """
        arrived: list[Delivery] = []
        events = self._events
        while events and events[0].at_s <= now_s:
            event = heapq.heappop(events)
            if event.at_switch:
                self._leave_switch(event)
            else:
                arrived.append(Delivery(event.destination, event.packet))
                self.counts.delivered += 1
                self.counts.delivered_bytes += event.size_bytes
        return arrived

    def _leave_switch(self, event: _Event) -> None:
        conditions = self._conditions
        if conditions.loss > 0 and self._random.random() < conditions.loss:
            self.counts.lost += 1
            return
        # The packet's first byte reached the switch one uplink serialisation before its last.
        first_byte_s = event.at_s - self._uplinks[event.source].serialisation_s(event.size_bytes)
        finished_s = self._downlinks[event.destination].admit(
            first_byte_s, event.size_bytes, burst_s=conditions.burst_s
        )
        if finished_s is None:
            self.counts.dropped_at_queue += 1
            return
        delay_s = conditions.delay_s
        if conditions.jitter_s > 0:
            delay_s += self._random.uniform(-conditions.jitter_s, conditions.jitter_s)
        path = (event.source, event.destination)
        arrival_s = max(
            max(finished_s, event.at_s) + delay_s, self._last_arrival_s.get(path, float("-inf"))
        )
        self._last_arrival_s[path] = arrival_s
        event.at_s, event.at_switch = arrival_s, False
        self._push(event)

    def _push(self, event: _Event) -> None:
        self._number += 1
        event.number = self._number
        heapq.heappush(self._events, event)
