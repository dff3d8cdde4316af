"""The one graph of a cluster, from GPU to core switch: immutable, checked, in arrays and by name.

Nodes and links are kept as they were given; solvers and simulators read the arrays. Compute nodes
in their order are the ranks. Both views number the same things: link i is ``links[i]`` and row i
of every link array. This module knows neither files nor pictures nor routes' algorithms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology._changes import (
    changed_links,
    joined_names,
    renamed_links,
    scaled_links,
)
from fivefold.network.topology._checks import all_of, check_topology, listed
from fivefold.network.topology._elements import Aggregation, Link, Node, SwitchAbility
from fivefold.network.topology._graph import reachable
from fivefold.network.topology._views import FloatArray, TopologyViews, frozen
from fivefold.units import parse_bytes_per_s, parse_duration_s

if TYPE_CHECKING:
    from fivefold.network.topology._rank_graph import RankGraph
    from fivefold.network.topology._routes import Router, Routes


@dataclass(frozen=True, eq=False, repr=False)
class Topology(TopologyViews):
    """Nodes joined by directed links.

    Two topologies are equal when their nodes, links and switch abilities are; the name and the
    source are labels.

    Args:
        name: What to call it.
        nodes: Devices; compute nodes in this order are ranks 0, 1, ...
        links: Directed links; several with the same ends stay several.
        switches: What forwarding nodes can do besides forwarding.
        source: Where the figures come from.

    Raises:
        ConfigurationError: Names repeat, a link's end is no node, or no node computes.

    Examples:
        >>> nodes = [Node("a", "gpu"), Node("b", "gpu")]
        >>> there = Link("a", "b", bandwidth_bytes_per_s=1e9)
        >>> back = Link("b", "a", bandwidth_bytes_per_s=2e9)
        >>> pair = Topology("pair", nodes, [there, back])
        >>> pair.ranks, pair.capacities_bytes_per_s.tolist(), pair.is_connected()
        (('a', 'b'), [1000000000.0, 2000000000.0], True)
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    switches: tuple[SwitchAbility, ...] = ()
    source: str = ""

    def __init__(
        self,
        name: str,
        nodes: Iterable[Node],
        links: Iterable[Link],
        *,
        switches: Iterable[SwitchAbility] = (),
        source: str = "",
    ) -> None:
        fields = {
            "name": name,
            "nodes": all_of(Node, nodes, "nodes"),
            "links": all_of(Link, links, "links"),
            "switches": all_of(SwitchAbility, switches, "switches"),
            "source": source,
        }
        for key, value in fields.items():
            object.__setattr__(self, key, value)
        check_topology(self.name, self.nodes, self.links, self.switches)

    # Cached views are made anew in another process: arrays would come back writable.
    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.name, self.nodes, self.links, self.switches, self.source)
        return _rebuild, arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Topology({self.name!r}, {self.num_nodes} nodes, {self.num_links} links, "
            f"{self.num_ranks} ranks)"
        )

    # Counts and names

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of nodes, links and switch abilities, without name and source."""
        digest = hashlib.sha256()
        nodes = [[node.name, node.kind, node.host] for node in self.nodes]
        digest.update(json.dumps(nodes).encode())
        for array in (self.link_sources, self.link_targets, self.link_counts):
            digest.update(array.astype("<i8").tobytes())
        for numbers in (self._bandwidths_bytes_per_s, self.latencies_s):
            digest.update(numbers.astype("<f8").tobytes())
        digest.update(repr(sorted(self.switches, key=lambda ability: ability.node)).encode())
        return digest.hexdigest()

    def host_of(self, rank: int) -> str | None:
        """Machine of a rank; None where its node names none."""
        return self.nodes[self.node_of_rank(rank)].host

    @cached_property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each machine that has ranks, in order of its first rank."""
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.rank_nodes.tolist()):
            host = self.nodes[node].host
            if host is not None:
                found.setdefault(host, []).append(rank)
        return {host: tuple(ranks) for host, ranks in found.items()}

    def ability_of(self, node: int | str) -> SwitchAbility:
        """What a forwarding node can do; the plain ability where none is stated."""
        name = self.nodes[node].name if isinstance(node, int | np.integer) else node
        return next((a for a in self.switches if a.node == name), SwitchAbility(name))

    # Reachability and routes

    def is_connected(self) -> bool:
        """Whether every rank can reach every other."""
        forward, backward = self._reach_of_first_rank()
        return bool(forward.all() and backward.all())

    def require_connected(self) -> None:
        """Do nothing where every rank can reach every other.

        Raises:
            InfeasibleError: Some cannot; names them.
        """
        for seen, verb in zip(
            self._reach_of_first_rank(), ("cannot be reached from", "cannot reach"), strict=True
        ):
            lost = [self.ranks[rank] for rank in np.flatnonzero(~seen).tolist()]
            if lost:
                raise InfeasibleError(
                    f"topology {self.name!r} is disconnected: {len(lost)} of {self.num_ranks} "
                    f"ranks {verb} {self.ranks[0]!r}: {listed(lost)}",
                    hint="add the links that are missing, or plan for a subset of the ranks",
                )

    def _reach_of_first_rank(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        first = self.rank_nodes[:1].tolist()
        forward = reachable(self.outgoing, self.link_targets, start=first)
        backward = reachable(self.incoming, self.link_sources, start=first)
        return forward[self.rank_nodes], backward[self.rank_nodes]

    @cached_property
    def router(self) -> Router:
        """Finds shortest routes, and keeps what it learnt."""
        from fivefold.network.topology._routes import Router  # noqa: PLC0415 - brings numba

        return Router(self)

    def shortest_route(
        self, rank_a: int, rank_b: int, *, through_ranks: bool = True
    ) -> tuple[int, ...]:
        """Links from one rank to another: least latency, then fewest links.

        Among equals the destination decides, so that different destinations use different ones
        of equal switches and links; between ranks without switches a hash of the pair does.

        Args:
            rank_a: Where it begins.
            rank_b: Where it ends; the same rank gives the empty route.
            through_ranks: Whether other ranks may forward.

        Returns:
            Link indices in order.

        Raises:
            InfeasibleError: There is no route.
        """
        a, b = self._checked_rank(rank_a), self._checked_rank(rank_b)
        return self.router.route(a, b, through_ranks=through_ranks)

    def routes(
        self,
        sources: npt.ArrayLike | None = None,
        targets: npt.ArrayLike | None = None,
        *,
        through_ranks: bool = True,
    ) -> Routes:
        """Shortest routes of many pairs of ranks at once, as arrays.

        Args:
            sources: Ranks, one per route; None for all ordered pairs of different ranks.
            targets: Ranks, one per route.
            through_ranks: Whether other ranks may forward.

        Returns:
            The routes, in the order asked for.

        Raises:
            InfeasibleError: A pair has no route.
        """
        return self.router.routes(sources, targets, through_ranks=through_ranks)

    @cached_property
    def eccentricity_s(self) -> FloatArray:
        """Latency of the farthest rank from each rank, relays allowed; inf where one is cut off."""
        return frozen(self.router.eccentricities_s())

    @cached_property
    def _rank_graph(self) -> RankGraph:
        from fivefold.network.topology._rank_graph import build_rank_graph  # noqa: PLC0415 - numba

        return build_rank_graph(self)

    def rank_graph(self) -> RankGraph:
        """The links there are between ranks: direct ones, and routes through switches only."""
        return self._rank_graph

    # Other topologies from this one

    def reversed(self) -> Topology:
        """Every link turned round; link indices stay."""
        turned = [replace(link, source=link.target, target=link.source) for link in self.links]
        return self._changed(f"{self.name} reversed", links=turned)

    def with_links(self, links: Iterable[Link]) -> Topology:
        """The same nodes with other links."""
        return self._changed(self.name, links=links)

    def without_links(self, indices: Collection[int]) -> Topology:
        """Without some links, such as those that failed; the others move up."""
        gone = {range(self.num_links)[index] for index in indices}
        kept = [link for index, link in enumerate(self.links) if index not in gone]
        return self._changed(self.name, links=kept)

    def with_changed_link(
        self,
        source: str,
        target: str,
        *,
        bandwidth: str | float | None = None,
        latency: str | float | None = None,
        count: int | None = None,
        both_ways: bool = True,
    ) -> Topology:
        """The link between two nodes with another bandwidth, latency or count: a slow edge.

        Args:
            source: Name of the node it leaves.
            target: Name of the node it enters.
            bandwidth: Such as ``"1 GB/s"`` or bytes per second; None keeps it.
            latency: Such as ``"5 us"`` or seconds; None keeps it.
            count: Number of physical links; None keeps it.
            both_ways: Whether the link back is changed as well.

        Returns:
            The other topology; parallel links of the two nodes are all changed.

        Raises:
            ConfigurationError: There is no such link, or a value is not allowed.
        """
        values = {
            "bandwidth_bytes_per_s": None if bandwidth is None else parse_bytes_per_s(bandwidth),
            "latency_s": None if latency is None else parse_duration_s(latency),
            "count": count,
        }
        ends = self.nodes[self.index(source)].name, self.nodes[self.index(target)].name
        changed = changed_links(self.links, ends, both_ways=both_ways, values=values)
        return self._changed(self.name, links=changed)

    def with_switches(self, switches: Iterable[SwitchAbility]) -> Topology:
        """The same graph with other switch abilities, in place of all it had."""
        return Topology(self.name, self.nodes, self.links, switches=switches, source=self.source)

    def with_aggregation(
        self, aggregation: Aggregation, *, kinds: Collection[str] = ("tor",), multicast: bool = True
    ) -> Topology:
        """Every switch of some kinds able to sum (and to copy); others stay as they are.

        Raises:
            ConfigurationError: No switch is of these kinds.
        """
        able = [node.name for node in self.nodes if node.kind in kinds and not node.is_rank]
        if not able:
            raise ConfigurationError(
                f"topology {self.name!r} has no switch of kind {', '.join(kinds)}",
                hint=f"it has {', '.join(sorted({node.kind for node in self.nodes}))}",
            )
        others = [ability for ability in self.switches if ability.node not in set(able)]
        new = [SwitchAbility(x, multicast=multicast, aggregation=aggregation) for x in able]
        return self.with_switches([*others, *new])

    def renamed(
        self, name: str | None = None, *, nodes: Mapping[str, str] | None = None
    ) -> Topology:
        """Another name, and other names for nodes, given as old to new.

        Raises:
            ConfigurationError: An old name is no node, or new names collide.
        """
        names = {old: new for old, new in (nodes or {}).items() if self.index(old) >= 0}
        return Topology(
            name or self.name,
            [replace(node, name=names.get(node.name, node.name)) for node in self.nodes],
            renamed_links(self.links, names),
            switches=[replace(one, node=names.get(one.node, one.node)) for one in self.switches],
            source=self.source,
        )

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0) -> Topology:
        """All bandwidths and all latencies times a factor each."""
        links = scaled_links(self.links, bandwidth=bandwidth, latency=latency)
        return self._changed(self.name, links=links)

    def subset(self, ranks: Iterable[int]) -> Topology:
        """Only some ranks, numbered in the order given, and the switches that still join them.

        Other ranks are gone, also as relays; the result may be disconnected.

        Args:
            ranks: Ranks to keep, each once.

        Returns:
            The smaller topology.

        Raises:
            ConfigurationError: A rank does not exist or is named twice, or none is named.
        """
        wanted = [self.node_of_rank(rank) for rank in ranks]
        if len(set(wanted)) != len(wanted):
            raise ConfigurationError(f"subset names a rank twice: {[*map(int, ranks)]}")
        keep = ~self.is_rank
        keep[wanted] = True
        inside = keep[self.link_sources] & keep[self.link_targets]
        links = [self.links[index] for index in np.flatnonzero(inside).tolist()]
        first = [self.nodes[index] for index in wanted]
        joined = joined_names(first, links)
        switches = [node for node in self.nodes if not node.is_rank and node.name in joined]
        kept = {node.name for node in [*first, *switches]}
        return Topology(
            f"{self.name} ({len(first)} of {self.num_ranks} ranks)",
            [*first, *switches],
            [link for link in links if link.source in kept and link.target in kept],
            switches=[ability for ability in self.switches if ability.node in kept],
            source=self.source,
        )

    def _changed(self, name: str, *, links: Iterable[Link]) -> Topology:
        return Topology(name, self.nodes, links, switches=self.switches, source=self.source)

    # Files

    @classmethod
    def from_toml(cls, source: str | Path) -> Topology:
        """Read a topology from a file, or from text in the same form.

        Args:
            source: A path, or TOML text (text with a line break or ``=`` is taken for TOML).

        Returns:
            The topology.

        Raises:
            ConfigurationError: The file is missing, is not TOML, or describes no topology.
        """
        from fivefold.network.topology._toml import read_topology  # noqa: PLC0415 - a cycle

        return read_topology(source)

    def to_toml(self) -> str:
        """The topology as TOML text; :meth:`from_toml` reads it back, equal to the last bit."""
        from fivefold.network.topology._toml import format_topology  # noqa: PLC0415 - a cycle

        return format_topology(self)


def _rebuild(
    name: str,
    nodes: tuple[Node, ...],
    links: tuple[Link, ...],
    switches: tuple[SwitchAbility, ...],
    source: str,
) -> Topology:
    return Topology(name, nodes, links, switches=switches, source=source)
