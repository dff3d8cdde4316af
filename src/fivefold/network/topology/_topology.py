"""The one graph of a cluster, from GPU to core switch: immutable, checked, in arrays and by name.

Compute nodes in their order are the ranks. Arrays and names number the same things: link i is
``links[i]`` and row i of every link array.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, require_number
from fivefold.network.topology._graph import (
    Aggregation,
    Link,
    LinkGraph,
    Node,
    SwitchAbility,
    listed,
    nearest_node,
)
from fivefold.network.topology.arrays import FloatArray, frozen, group_by, reachable
from fivefold.network.topology.routes import RankGraph, Router, Routes, build_rank_graph
from fivefold.units import parse_bytes_per_s, parse_duration_s

_Element = TypeVar("_Element")
_RATES = {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _check_topology(
    name: str, nodes: Sequence[Node], links: Sequence[Link], switches: Sequence[SwitchAbility]
) -> None:
    """Check names, links' ends and switch abilities."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a topology needs a name; got {name!r}")
    known = {node.name: node for node in nodes}
    _check_unique((node.name for node in nodes), f"topology {name!r} has several nodes named")
    if not any(node.is_rank for node in nodes):
        raise ConfigurationError(
            f"topology {name!r} has no compute node",
            hint="at least one node must be of kind gpu or cpu",
        )
    for link in links:
        for end in (link.source, link.target):
            if end not in known:
                raise ConfigurationError(
                    f"link {link.source!r} -> {link.target!r} ends at {end!r}, "
                    f"which is no node of topology {name!r}",
                    hint=nearest_node(end, known),
                )
    for ability in switches:
        node = known.get(ability.node)
        if node is None or node.is_rank:
            what = "no node of the topology" if node is None else "a compute node"
            raise ConfigurationError(
                f"switches names {ability.node!r}, which is {what}",
                hint="only nodes that forward can be switches"
                if node
                else nearest_node(ability.node, known),
            )
    _check_unique((ability.node for ability in switches), "switches says several times")


def _tuple_of(kind: type[_Element], values: Iterable[Any], what: str) -> tuple[_Element, ...]:
    """Return the values as a tuple of one class."""
    found = tuple(values) if isinstance(values, Iterable) else (values,)
    wrong = next((value for value in found if not isinstance(value, kind)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"{what} of a topology must be {kind.__name__} objects; got {wrong!r}",
            hint=f"write {kind.__name__}(...)",
        )
    return found


def _check_unique(names: Iterable[str], complaint: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigurationError(f"{complaint} {listed(twice)}", hint="name each of them once")


@dataclass(frozen=True, eq=False, repr=False)
class Topology(LinkGraph):
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
        given = {
            "name": name,
            "nodes": _tuple_of(Node, nodes, "nodes"),
            "links": _tuple_of(Link, links, "links"),
            "switches": _tuple_of(SwitchAbility, switches, "switches"),
            "source": source,
        }
        for key, value in given.items():
            object.__setattr__(self, key, value)
        _check_topology(self.name, self.nodes, self.links, self.switches)

    # Cached views are made anew in another process: arrays would come back writable.
    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Topology({self.name!r}, {self.num_nodes} nodes, {self.num_links} links, "
            f"{self.num_ranks} ranks)"
        )

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
        """Return the machine of a rank; None where its node names none."""
        return self._host_of_rank[self._checked_rank(rank)]

    @cached_property
    def _host_of_rank(self) -> tuple[str | None, ...]:
        return tuple(self.nodes[node].host for node in self.rank_nodes)

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
        """Return what a forwarding node can do; the plain ability where none is stated."""
        name = self.nodes[node].name if isinstance(node, int | np.integer) else node
        return next((a for a in self.switches if a.node == name), SwitchAbility(name))

    # Routes

    @cached_property
    def router(self) -> Router:
        """Finds shortest routes, and keeps what it learnt."""
        return Router(self)

    def shortest_route(
        self, rank_a: int, rank_b: int, *, through_ranks: bool = True
    ) -> tuple[int, ...]:
        """Return the links from one rank to another: least latency, then fewest links.

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
        return tuple(self.router.routes([a], [b], through_ranks=through_ranks).links.tolist())

    def routes(
        self,
        sources: npt.ArrayLike | None = None,
        targets: npt.ArrayLike | None = None,
        *,
        through_ranks: bool = True,
    ) -> Routes:
        """Find shortest routes of many pairs of ranks at once, as arrays.

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
    def rank_graph(self) -> RankGraph:
        """Links between ranks: direct ones, and routes through switches only."""
        return build_rank_graph(self)

    # Other topologies from this one

    def reversed(self) -> Topology:
        """Turn every link round; link indices stay."""
        turned = [replace(link, source=link.target, target=link.source) for link in self.links]
        return self._with(name=f"{self.name} reversed", links=turned)

    def with_links(self, links: Iterable[Link]) -> Topology:
        """Return the same nodes with other links."""
        return self._with(links=links)

    def without_links(self, indices: Collection[int]) -> Topology:
        """Leave out some links, such as those that failed; the others move up.

        Raises:
            ConfigurationError: There is no such link.
        """
        gone = set(indices)
        for index in gone:
            if not isinstance(index, int | np.integer) or not 0 <= index < self.num_links:
                raise ConfigurationError(
                    f"topology {self.name!r} has no link {index!r}",
                    hint=f"links are numbered from 0 to {self.num_links - 1}",
                )
        return self._with(
            links=[link for index, link in enumerate(self.links) if index not in gone]
        )

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
        """Give the link between two nodes another bandwidth, latency or count: a slow edge.

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
        new = {key: value for key, value in values.items() if value is not None}
        ends = self.nodes[self.index(source)].name, self.nodes[self.index(target)].name
        wanted = {ends, ends[::-1]} if both_ways else {ends}
        matches = [(link.source, link.target) in wanted for link in self.links]
        if not any(matches):
            raise ConfigurationError(
                f"there is no link {ends[0]!r} -> {ends[1]!r} to change",
                hint="name two nodes that a link joins",
            )
        changed = [
            replace(link, **new) if match else link  # type: ignore[arg-type]
            for link, match in zip(self.links, matches, strict=True)
        ]
        return self._with(links=changed)

    def with_switches(self, switches: Iterable[SwitchAbility]) -> Topology:
        """Return the same graph with other switch abilities, in place of all it had."""
        return self._with(switches=switches)

    def with_aggregation(
        self, aggregation: Aggregation, *, kinds: Collection[str] = ("tor",), multicast: bool = True
    ) -> Topology:
        """Make every switch of some kinds able to sum (and to copy); others stay as they are.

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
        """Give another name, and other names to nodes, given as old to new.

        Raises:
            ConfigurationError: An old name is no node, or new names collide.
        """
        names = {old: new for old, new in (nodes or {}).items() if self.index(old) >= 0}
        links = [
            replace(
                link,
                source=names.get(link.source, link.source),
                target=names.get(link.target, link.target),
            )
            for link in self.links
        ]
        return self._with(
            name=name or self.name,
            nodes=[replace(node, name=names.get(node.name, node.name)) for node in self.nodes],
            links=links,
            switches=[replace(one, node=names.get(one.node, one.node)) for one in self.switches],
        )

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0) -> Topology:
        """Multiply all bandwidths and all latencies by a factor each."""
        bandwidth = require_number("bandwidth of scaled()", bandwidth, positive=True)
        latency = require_number("latency of scaled()", latency)
        links = [
            replace(
                link,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth,
                latency_s=link.latency_s * latency,
            )
            for link in self.links
        ]
        return self._with(links=links)

    def subset(self, ranks: Iterable[int]) -> Topology:
        """Keep only some ranks, numbered in the order given, and the switches that still join them.

        Other ranks are gone, also as relays; the result may be disconnected.

        Args:
            ranks: Ranks to keep, each once.

        Raises:
            ConfigurationError: A rank does not exist or is named twice, or none is named.
        """
        wanted = [self.node_of_rank(rank) for rank in ranks]
        if len(set(wanted)) != len(wanted):
            raise ConfigurationError(f"subset names a rank twice: {[*map(int, ranks)]}")
        keep = ~self.is_rank
        keep[wanted] = True
        inside = np.flatnonzero(keep[self.link_sources] & keep[self.link_targets])
        for ends in (
            (self.link_sources[inside], self.link_targets[inside]),
            (self.link_targets[inside], self.link_sources[inside]),
        ):
            onward = group_by(ends[0], num_groups=self.num_nodes)
            keep &= reachable(onward, ends[1], start=wanted)
        first = [self.nodes[index] for index in wanted]
        switches = [self.nodes[index] for index in np.flatnonzero(keep & ~self.is_rank).tolist()]
        kept = {node.name for node in [*first, *switches]}
        return self._with(
            name=f"{self.name} ({len(first)} of {self.num_ranks} ranks)",
            nodes=[*first, *switches],
            links=[link for link in self.links if link.source in kept and link.target in kept],
            switches=[ability for ability in self.switches if ability.node in kept],
        )

    def _with(self, **changes: Any) -> Topology:
        return replace(self, **changes)

    def to_toml(self) -> str:
        """Write TOML text; :func:`read_topology` reads it back, equal to the last bit."""
        nodes = [_keys(name=node.name, kind=node.kind, host=node.host) for node in self.nodes]
        links = [
            _keys(
                source=link.source,
                target=link.target,
                bandwidth=_rate(link.bandwidth_bytes_per_s),
                latency=_time(link.latency_s) if link.latency_s > 0 else None,
                count=link.count if link.count > 1 else None,
            )
            for link in self.links
        ]
        lines = _keys(name=self.name, source=self.source or None)
        for name, entries in (("nodes", nodes), ("links", links)):
            lines += ["", f"{name} = [", *(f"  {{ {', '.join(keys)} }}," for keys in entries), "]"]
        for ability in self.switches:
            lines += ["", "[[switches]]"]
            lines += _keys(node=ability.node, multicast=ability.multicast)
            if (unit := ability.aggregation) is not None:
                rate = unit.rate_bytes_per_s
                lines += ["[switches.aggregation]"]
                lines += _keys(
                    slots=unit.slots,
                    slot_size=f"{unit.slot_bytes} B",
                    rate=None if rate is None else _rate(rate),
                    dtypes=unit.dtypes or None,
                )
        return "\n".join(lines) + "\n"


def _keys(**values: Any) -> list[str]:
    """Write keys of a TOML table; None leaves one out."""
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped as well.
    return [
        f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
        for key, value in values.items()
        if value is not None
    ]


def _rate(bytes_per_s: float) -> str:
    return _written(bytes_per_s, _RATES, parse_bytes_per_s, exact="B/s")


def _time(seconds: float) -> str:
    return _written(seconds, _TIMES, parse_duration_s, exact="s", longest=12)


def _written(
    value: float,
    units: Mapping[str, float],
    parse: Callable[[str], float],
    *,
    exact: str,
    longest: float = math.inf,
) -> str:
    """Write a quantity in the largest unit in which it is short and is read back the same."""
    for unit, scale in units.items():
        for number in (_shortest(value / scale), f"{value / scale:.6g}"):
            text = f"{number} {unit}"
            if value >= scale and len(text) < longest and parse(text) == value:
                return text
    return f"{_shortest(value)} {exact}"


def _shortest(number: float) -> str:
    return repr(float(number)).removesuffix(".0")
