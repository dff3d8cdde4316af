"""Trees of in-network aggregation: switches sum what comes from below, copy what comes from above.

Such an all-reduce is no schedule of transfers between ranks, for the sums are made on the way. It
is a tree of nodes, priced by its closed form and run by the simulator or, in the lab, by software
switches.

References: SHARP (Graham et al., COMHPC 2016); SwitchML, arXiv 1903.06701; ATP, NSDI 2021.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.simulation import AggregationRequest
from fivefold.network.topology import Aggregation, Topology


@dataclass(frozen=True, kw_only=True)
class InNetworkTree:
    """A tree of switches over ranks that sums upwards and copies downwards.

    Args:
        topology: The network.
        root: Node index of the root switch.
        parents: Parent node of each node of the tree, by node index.
        leaves: Node indices of the ranks that take part.
        up_links: Link from each node to its parent, by node index.
        down_links: Link from each node's parent to it, by node index.
        slots: Slots that it may use at each switch.

    Examples:
        >>> from fivefold.network.topology import Aggregation, SwitchAbility, Topology, switch
        >>> plain = switch(4, bandwidth="1 GB/s", latency="1 us")
        >>> hub = next(node.name for node in plain.nodes if not node.is_rank)
        >>> able = SwitchAbility(hub, aggregation=Aggregation(slots=1024, slot_bytes=1024))
        >>> network = Topology("star", plain.nodes, plain.links, switches=[able])
        >>> tree = in_network_tree(network)
        >>> tree.depth, round(tree.time_s(1e6) * 1e6, 3)
        (1, 1002.0)
    """

    topology: Topology = field(repr=False)
    root: int
    parents: dict[int, int] = field(repr=False)
    leaves: tuple[int, ...] = field(repr=False)
    up_links: dict[int, int] = field(repr=False)
    down_links: dict[int, int] = field(repr=False)
    slots: int

    @property
    def depth(self) -> int:
        """Links from the farthest rank up to the root."""
        return max(len(self._path(leaf)) for leaf in self.leaves)

    @cached_property
    def switches(self) -> tuple[int, ...]:
        """Node indices of the aggregating switches: all inner nodes with several children."""
        parents, counts = np.unique(list(self.parents.values()), return_counts=True)
        return tuple(int(node) for node in parents[counts > 1])

    def _path(self, leaf: int) -> list[int]:
        path, node = [], leaf
        while node in self.parents:
            path.append(node)
            node = self.parents[node]
        return path

    @cached_property
    def round_trip_s(self) -> float:
        """Latency from the farthest rank to the root and from the root to the farthest rank."""
        latencies = self.topology.latencies_s
        sides = (self.up_links, self.down_links)
        return sum(
            max(
                sum(float(latencies[links[node]]) for node in self._path(leaf))
                for leaf in self.leaves
            )
            for links in sides
        )

    @cached_property
    def rate_bytes_per_s(self) -> float:
        """Bytes of result a second: the least of links, adders, and slots over the round trip."""
        capacities = self.topology.capacities_bytes_per_s
        links = [*self.up_links.values(), *self.down_links.values()]
        rate = float(capacities[links].min())
        pools = {ability.node: ability.aggregation for ability in self.topology.switches}
        for node in self.switches:
            pool = pools[self.topology.nodes[node].name]
            assert pool is not None, "in_network_tree takes only aggregating switches"
            rate = min(rate, pool.rate_bytes_per_s or rate)
            if self.round_trip_s > 0:
                rate = min(rate, self.slots * pool.slot_bytes / self.round_trip_s)
        return rate

    def time_s(self, size_bytes: float) -> float:
        """Return the time of an all-reduce: the round trip, and the bytes at the tree's rate.

        Args:
            size_bytes: Buffer of each rank.

        Raises:
            ConfigurationError: The size is negative.
        """
        if size_bytes < 0:
            raise ConfigurationError(f"size_bytes is {size_bytes}", hint="sizes are at least 0")
        return self.round_trip_s + size_bytes / self.rate_bytes_per_s

    def link_bytes(self, size_bytes: float) -> Any:
        """Return bytes on each link of the topology: the buffer once up and once down the tree."""
        loads = np.zeros(self.topology.num_links)
        loads[[*self.up_links.values(), *self.down_links.values()]] = size_bytes
        return loads

    def request(self, request_id: str, size_bytes: float, **options: Any) -> AggregationRequest:
        """Return the same all-reduce as an `AggregationRequest` of `fivefold.network.simulation`.

        Args:
            request_id: Its name among the simulator's tasks.
            size_bytes: Buffer of each rank.
            **options: More of its arguments, such as ``release_s``, ``job`` or ``fallback``.
        """
        names = [node.name for node in self.topology.nodes]
        tree = {names[child]: names[parent] for child, parent in self.parents.items()}
        leaves = [names[leaf] for leaf in self.leaves]
        return AggregationRequest(request_id, tree, leaves, size_bytes, slots=self.slots, **options)


def in_network_tree(
    topology: Topology, ranks: Sequence[int] | None = None, *, slots: int | None = None
) -> InNetworkTree:
    """Find the best tree of aggregating switches over some ranks.

    Each aggregating switch is tried as the root: its tree is that of fewest links (then least
    latency) over which every rank reaches it, both ways. Nodes with several children must
    aggregate. The tree of highest rate wins, then the one of least latency.

    Args:
        topology: The network, with `SwitchAbility` entries that have an ``aggregation``.
        ranks: Ranks that take part; None for all.
        slots: Slots to use at each switch; None for as many as every switch of the tree has.

    Returns:
        The tree.

    Raises:
        ConfigurationError: A rank is out of range or twice, or ``slots`` is not positive.
        InfeasibleError: No tree of aggregating switches joins the ranks; says why.

    Examples:
        >>> from fivefold.network.topology import star
        >>> in_network_tree(star(3))
        Traceback (most recent call last):
        fivefold.errors.InfeasibleError: no switch of topology 'star:3' aggregates; ...
    """
    members = list(range(topology.num_ranks)) if ranks is None else [int(rank) for rank in ranks]
    if not members or len(set(members)) != len(members) or (slots is not None and slots < 1):
        raise ConfigurationError(
            f"ranks are {members!r:.60}, slots {slots}", hint="name each rank once; slots from 1"
        )
    leaves = tuple(topology.node_of_rank(rank) for rank in members)
    able = [topology.index(s.node) for s in topology.switches if s.aggregation is not None]
    if not able:
        raise InfeasibleError(
            f"no switch of topology {topology.name!r} aggregates",
            hint="give one a SwitchAbility with an Aggregation, or use another algorithm",
        )
    both = _two_way_links(topology)
    pools = {topology.index(s.node): s.aggregation for s in topology.switches}
    trees = (_tree(topology, root, (leaves, slots), (both, pools)) for root in able)
    found = [tree for tree in trees if tree is not None]
    if not found:
        raise InfeasibleError(
            f"no tree of the {len(able)} aggregating switches of {topology.name!r} joins the ranks",
            hint="where branches meet, the switch must aggregate and have the slots asked for",
        )
    return max(found, key=lambda tree: (tree.rate_bytes_per_s, -tree.round_trip_s, -tree.root))


Neighbours = dict[int, dict[int, tuple[int, int, float]]]
Pools = dict[int, Aggregation | None]


def _branches(topology: Topology, root: int, both: Neighbours) -> dict[int, int]:
    """Return the parent of every node that reaches the root through forwarding nodes."""
    above = {root: -1}
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        if topology.is_rank[node]:  # a rank ends a branch: it does not forward for others
            continue
        for below in sorted(both.get(node, {}), key=lambda other: both[node][other][2]):
            if below not in above:
                above[below] = node
                waiting.append(below)
    return above


def _tree(
    topology: Topology,
    root: int,
    wanted: tuple[tuple[int, ...], int | None],
    network: tuple[Neighbours, Pools],
) -> InNetworkTree | None:
    """Return the tree of fewest links to one root, or None where it does not do."""
    leaves, slots = wanted
    both, pools = network
    above = _branches(topology, root, both)
    parents: dict[int, int] = {}
    for leaf in leaves:
        node = leaf
        while node != root and node not in parents:
            if node not in above:
                return None
            parents[node] = above[node]
            node = above[node]
    inner, counts = np.unique(list(parents.values()), return_counts=True)
    adding = [pools.get(int(node)) for node in inner[counts > 1]]
    if any(pool is None or pool.slots < (slots or 1) for pool in adding):
        return None
    most = min((pool.slots for pool in adding if pool is not None), default=slots or 1)
    return InNetworkTree(
        topology=topology,
        root=root,
        parents=parents,
        leaves=leaves,
        up_links={node: both[above][node][0] for node, above in parents.items()},
        down_links={node: both[above][node][1] for node, above in parents.items()},
        slots=slots or most,
    )


def _two_way_links(topology: Topology) -> Neighbours:
    """Find each node's neighbours both ways: widest link from it, to it, latency."""
    widest: dict[tuple[int, int], int] = {}
    capacities = topology.capacities_bytes_per_s
    for link in range(topology.num_links):
        ends = int(topology.link_sources[link]), int(topology.link_targets[link])
        if ends not in widest or capacities[link] > capacities[widest[ends]]:
            widest[ends] = link
    found: Neighbours = {}
    for (source, target), down in widest.items():
        up = widest.get((target, source))
        if up is not None:
            latency = float(topology.latencies_s[up] + topology.latencies_s[down])
            found.setdefault(source, {})[target] = (up, down, latency)
    return found
