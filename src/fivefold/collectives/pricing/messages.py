"""What a schedule's messages take over links that they share, with the software's own cost.

Prices are those of `price_s` in the fidelity ``"simulation"``, and every message has a software
cost besides, and processors have work. `LinkClock` is a simpler clock of the same idea, which sees
messages one after the other: it gives the order in which a rank prefers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import Schedule, evaluate
from fivefold.flows.paths import default_paths
from fivefold.network.topology import Topology

Floats = NDArray[np.float64]


@dataclass
class LinkClock:
    """When messages arrive, given those sent before; an ``arrival_s`` of :func:`run_order`.

    Those between the same two ranks follow one another; on a link that several pairs use at that
    moment each gets an equal share.
    """

    topology: Topology  # its ranks are the program's
    chunk_bytes: float  # of one chunk slot
    message_s: float  # software cost of one message
    _free_s: dict[tuple[int, int], float] = field(default_factory=dict)
    _users: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    _routes: dict[tuple[int, int], tuple[list[int], float]] = field(default_factory=dict)

    def __call__(self, sent_s: float, source: int, target: int, count: int) -> float:
        """Return the arrival of a message; see :func:`run_order`."""
        pair = (source, target)
        if pair not in self._routes:
            links = [int(link) for link in self.topology.shortest_route(*pair)]
            self._routes[pair] = (
                links,
                float(sum(self.topology.latencies_s[link] for link in links)),
            )
        route, latency_s = self._routes[pair]
        start_s = max(sent_s, self._free_s.get(pair, 0.0))
        size_bytes = count * self.chunk_bytes
        longest_s = 0.0
        for link in route:
            users = self._users.setdefault(link, set())
            users.add(pair)
            busy = {other for other in users if other == pair or self._free_s[other] > sent_s}
            self._users[link] = busy
            rate = float(self.topology.capacities_bytes_per_s[link]) / len(busy)
            longest_s = max(longest_s, size_bytes / rate)
        self._free_s[pair] = start_s + longest_s
        return start_s + longest_s + latency_s + self.message_s


def with_work_s(
    time_s: float, handled: Sequence[int], *, message_work_s: float, shared_cores: int
) -> float:
    """Return the time of a collective with the processors' work for its messages.

    Processors of their own work while the links carry, so they count only where they need longer;
    cores that all ranks share, as in the lab, hold up what the links wait for.
    """
    if shared_cores:
        return time_s + sum(handled) * message_work_s / 2 / shared_cores
    return max(time_s, max(handled, default=0) * message_work_s / 2)


def load_bound_s(schedule: Schedule, topology: Topology, size_bytes: float) -> float:
    """Return the time of a schedule's fullest link: no order and no pipeline makes it faster."""
    sizes = np.asarray(schedule.collective.chunk_bytes(size_bytes))[schedule.chunks]
    loads_s = _on_links(schedule, topology, sizes) / topology.capacities_bytes_per_s
    return float(loads_s.max(initial=0.0))


def _on_links(schedule: Schedule, topology: Topology, sizes: Floats | None) -> Floats:
    """Return the bytes on each link, or for None the pairs of ranks that use it."""
    count = topology.num_ranks
    keys = schedule.sources.astype(np.int64) * count + schedule.targets
    pairs, number = np.unique(keys, return_inverse=True)
    sent = np.ones(pairs.size) if sizes is None else np.bincount(number, sizes, pairs.size)
    paths = default_paths(topology, pairs // count, pairs % count)
    found = np.bincount(paths.links, np.repeat(sent, np.diff(paths.offsets)), topology.num_links)
    return found.astype(np.float64)


def schedule_s(
    schedule: Schedule,
    topology: Topology,
    *,
    size_bytes: float,
    message_s: float = 0.0,
    shared_link_share: float = 1.0,
) -> float:
    """Return the time of a schedule in the fluid model."""
    bare = schedule.replaced(topology=None, route_offsets=None, route_links=None)
    ranks = {node.name for node in topology.nodes if node.is_rank}
    if message_s:  # on every link that leaves a rank
        topology = topology.with_links(
            replace(link, latency_s=link.latency_s + message_s) if link.source in ranks else link
            for link in topology.links
        )
    if shared_link_share < 1:  # where several connections meet
        shared = _on_links(bare, topology, None) > 1
        topology = topology.with_links(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * shared_link_share)
            if shared[number]
            else link
            for number, link in enumerate(topology.links)
        )
    return float(evaluate(bare, topology, size_bytes=size_bytes, model="fluid").total_s)
