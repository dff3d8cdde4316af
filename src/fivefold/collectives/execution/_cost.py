"""Predicts how long a program takes on a topology, message by message.

A message starts when its sender has what it sends and every link of its route is free; it keeps
each link busy for its bytes over that link's capacity and arrives after the slowest link and the
latencies, plus a fixed software cost. The same clock gives the order in which a rank expects its
messages, so what is predicted is what is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fivefold.collectives.lowering import Program, run_order
from fivefold.network.topology import Topology

__all__ = ["LinkClock", "predict_s"]


@dataclass
class LinkClock:
    """When messages arrive, given those sent before; an ``arrival_s`` of :func:`run_order`.

    Args:
        topology: The network; its ranks are the program's.
        chunk_bytes: Bytes of one chunk slot.
        message_s: Software cost of one message.

    Example:
        >>> from fivefold.network.topology import switch
        >>> clock = LinkClock(switch(2, bandwidth="1 kB/s"), chunk_bytes=500.0, message_s=0.0)
        >>> clock(0.0, 0, 1, 2), clock(0.0, 0, 1, 2)
        (1.0, 2.0)
    """

    topology: Topology
    chunk_bytes: float
    message_s: float
    _free_s: dict[int, float] = field(default_factory=dict)
    _routes: dict[tuple[int, int], tuple[tuple[int, ...], float]] = field(default_factory=dict)

    def __call__(self, sent_s: float, source: int, target: int, count: int) -> float:
        """Arrival of a message; see :func:`run_order`."""
        route, latency_s = self._route(source, target)
        size_bytes = count * self.chunk_bytes
        start_s = max([sent_s, *(self._free_s.get(link, 0.0) for link in route)])
        end_s = start_s
        for link in route:
            busy_s = size_bytes / float(self.topology.capacities_bytes_per_s[link])
            self._free_s[link] = start_s + busy_s
            end_s = max(end_s, start_s + busy_s)
        return end_s + latency_s + self.message_s

    def _route(self, source: int, target: int) -> tuple[tuple[int, ...], float]:
        key = (source, target)
        if key not in self._routes:
            links = tuple(int(link) for link in self.topology.shortest_route(source, target))
            latency_s = float(sum(self.topology.latencies_s[link] for link in links))
            self._routes[key] = (links, latency_s)
        return self._routes[key]


def predict_s(
    program: Program, topology: Topology, *, size_bytes: float, message_s: float = 0.0
) -> float:
    """Time that a program takes for a message size.

    Args:
        program: The program.
        topology: The network.
        size_bytes: Size of the collective, as :meth:`Collective.chunk_bytes` counts it.
        message_s: Software cost of one message.

    Returns:
        Seconds.

    Example:
        >>> from fivefold.collectives.algorithms import ring
        >>> from fivefold.collectives.lowering import lower
        >>> from fivefold.collectives.schedules import all_reduce
        >>> from fivefold.network.topology import switch
        >>> program = lower(ring(all_reduce(4)))
        >>> predict_s(program, switch(4, bandwidth="1 MB/s"), size_bytes=1e6)
        1.5
    """
    if program.collective.num_chunks == 0:
        return 0.0
    chunk_bytes = float(program.collective.chunk_bytes(size_bytes).max())
    clock = LinkClock(topology, chunk_bytes, message_s)
    return max((step.end_s for step in run_order(program, arrival_s=clock)), default=0.0)
