"""How generators put a topology together: nodes by name, links in both directions at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from fivefold.errors import ConfigurationError
from fivefold.network.topology._elements import Link, Node, NodeKind, SwitchAbility
from fivefold.network.topology._topology import Topology
from fivefold.units import parse_bytes_per_s, parse_duration_s

# Those of any cluster that exists, and few enough to be built in seconds.
_MOST_NODES = 500_000
_MOST_LINKS = 1_000_000


@dataclass(frozen=True)
class Wire:
    """What a link is like: bandwidth and latency as text with units or as numbers, and count."""

    bandwidth: str | float
    latency: str | float = 0.0
    count: int = 1

    @cached_property
    def _bandwidth_bytes_per_s(self) -> float:
        return parse_bytes_per_s(self.bandwidth)

    @cached_property
    def _latency_s(self) -> float:
        return parse_duration_s(self.latency)

    def link(self, source: str, target: str) -> Link:
        """The link of this kind between two nodes."""
        return Link(
            source,
            target,
            bandwidth_bytes_per_s=self._bandwidth_bytes_per_s,
            latency_s=self._latency_s,
            count=self.count,
        )


@dataclass
class Builder:
    """Nodes and links so far; the order of calls is their order."""

    nodes: list[Node] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    switches: list[SwitchAbility] = field(default_factory=list)

    def node(self, name: str, kind: NodeKind, *, host: str | None = None) -> str:
        """Add a node and give its name back.

        Raises:
            ConfigurationError: There are too many.
        """
        if len(self.nodes) >= _MOST_NODES:
            raise ConfigurationError(
                f"the topology has more than {_MOST_NODES:,} nodes", hint="describe a smaller one"
            )
        self.nodes.append(Node(name, kind, host))
        return name

    def row(
        self, prefix: str, number: int, *, kind: NodeKind = "gpu", host: str | None = None
    ) -> list[str]:
        """Add nodes named prefix0, prefix1, ..."""
        return [self.node(f"{prefix}{index}", kind, host=host) for index in range(number)]

    def send(self, source: str, target: str, wire: Wire) -> None:
        """Add a link in one direction.

        Raises:
            ConfigurationError: There are too many.
        """
        if len(self.links) >= _MOST_LINKS:
            raise ConfigurationError(
                f"the topology has more than {_MOST_LINKS:,} links", hint="describe a smaller one"
            )
        self.links.append(wire.link(source, target))

    def join(self, first: str, second: str, wire: Wire) -> None:
        """Add a link in each direction."""
        self.send(first, second, wire)
        self.send(second, first, wire)

    def done(self, name: str, *, source: str = "") -> Topology:
        """The topology of all that was added."""
        return Topology(name, self.nodes, self.links, switches=self.switches, source=source)


def check_count(what: str, value: object, *, low: int = 1, hint: str | None = None) -> None:
    """Refuse what is not a whole number from ``low`` on.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MOST_NODES:
        allowed = f"a whole number from {low}" + (
            f" to {_MOST_NODES:,}" if isinstance(value, int) and value > 0 else ""
        )
        raise ConfigurationError(f"{what} must be {allowed}; got {value!r:.40}", hint=hint)
