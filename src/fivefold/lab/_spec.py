"""What the emulated cluster looks like: hosts, links and processes per host.

Hosts hang on one switch, each by a link of its own, or they are the ranks of a topology whose
links are all made. It is validated once, here, and knows nothing of how links are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.files import parse_toml
from fivefold.units import (
    format_bytes_per_s,
    format_duration_s,
    parse_bytes_per_s,
    parse_duration_s,
)

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

MAX_CLASSES = 8  # what the three bits of a class selector tell apart, and htb's priorities
_SELECTOR_SHIFT = 5
_MAX_HOSTS = 253  # addresses 10.77.0.1 to 10.77.0.253 of one /24 network
_MIN_RATE_BYTES_PER_S = 1000.0  # one full frame then takes 1.5 s; below that TCP only times out
_MIN_MTU = 576  # every IPv4 host must take this size (RFC 791)
_MAX_MTU = 65000
_AGGREGATOR_OPTIONS = ("slots", "slot_bytes", "sharing", "expire")
_LONGEST_LATENCY_S = 1e-4  # about what veth and gloo add themselves


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """N hosts on one switch; each host's link has the same rate up and down.

    Quantities are kept as they were written; the properties give them in seconds and bytes per
    second. A transfer between two hosts passes the sender's uplink, then the receiver's downlink,
    and is delayed once.

    Args:
        hosts: Number of hosts, 1 to 253.
        rate: Rate of each link in each direction, such as ``"200Mbit/s"``; a number is bytes per
            second. None leaves the links as fast as the machine.
        delay: One-way delay between any two hosts, such as ``"5ms"``; a number is seconds.
        jitter: Each packet's delay is uniform in ``delay - jitter`` to ``delay + jitter``; at most
            ``delay``.
        loss: Probability in [0, 1) that a packet is lost on its way.
        queue: Longest time that a packet may wait at a link before packets are dropped.
        nproc_per_host: Processes (ranks) that each host runs; they talk over loopback, unshaped.
        mtu: Largest packet in bytes; None chooses (see the guide).
        seed: Seed of jitter and loss, where the relay makes them.
        host_rates: Rates of single hosts by index, in place of ``rate``: a host with a slow link.
        topology: A topology as TOML text, in place of one switch: its ranks are the hosts, every
            link is made with its own rate, and nodes pass on what goes farther. See
            :meth:`of_topology`.
        classes: Priority classes of every link that has a rate, 1 to 8. Class 0 goes first;
            the others get what it leaves, and a hundredth of the rate for themselves.
        host_classes: Class of all that a host sends; what comes from other hosts and is not
            marked (``class_tos``) goes last.
        aggregators: Switches that aggregate for their hosts, by the topology's node (``"switch"``
            without one), with options of ``python -m fivefold.network.aggregation``: ``slots``,
            ``slot_bytes``, ``sharing``, ``expire``.
        routes: Links of the topology that packets from one host to another take, by the two hosts;
            others take the topology's shortest route.

    Raises:
        ConfigurationError: A value is not allowed.

    Examples:
        >>> spec = LabSpec(hosts=2, rate="200Mbit/s", delay="5ms")
        >>> spec.rate_bytes_per_s, spec.delay_s, spec.world_size
        (25000000.0, 0.005, 2)
    """

    hosts: int = 2
    rate: str | float | None = None
    delay: str | float = 0.0
    jitter: str | float = 0.0
    loss: float = 0.0
    queue: str | float = 0.05
    nproc_per_host: int = 1
    mtu: int | None = None
    seed: int = 0
    host_rates: Mapping[int, str | float] = field(default_factory=dict)
    topology: str | None = None
    classes: int = 1
    host_classes: Mapping[int, int] = field(default_factory=dict)
    aggregators: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)
    routes: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("hosts", self.hosts, least=1, most=_MAX_HOSTS)
        for name in ("host_rates", "host_classes", "aggregators", "routes"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigurationError(
                    f"{name} must be a mapping; got {getattr(self, name)!r:.60}",
                    hint=f"leave {name} out for none",
                )
            # Plain ones: a run's supervisor gets the specification pickled.
            object.__setattr__(self, name, dict(getattr(self, name)))
        if self.topology is not None and not isinstance(self.topology, str):
            raise ConfigurationError(
                f"topology must be the text of a topology file; got {self.topology!r:.60}",
                hint="use LabSpec.of_topology",
            )
        require_whole("nproc_per_host", self.nproc_per_host, least=1, most=1024)
        require_whole("seed", self.seed, least=0, most=2**63)
        if self.mtu is not None:
            require_whole("mtu", self.mtu, least=_MIN_MTU, most=_MAX_MTU)
        self._check_hosts()
        self._check_classes()
        self._check_path()
        if self.topology is not None:
            self._check_topology()
        elif self.routes:
            message = "routes need a topology, which was not given"
            raise ConfigurationError(message, hint="use LabSpec.of_topology")
        self._check_aggregators()

    def _check_hosts(self) -> None:
        for host in range(self.hosts):
            rate = self.rate_of(host)
            if rate is not None and rate < _MIN_RATE_BYTES_PER_S:
                raise ConfigurationError(
                    f"rate must be at least 8 kbit/s; got {format_bytes_per_s(rate)}",
                    hint="write a rate such as '200Mbit/s', or leave it out for unlimited links",
                )
        for name, hosts in (("host_rates", self.host_rates), ("host_classes", self.host_classes)):
            for host in hosts:
                if host not in range(self.hosts):
                    raise ConfigurationError(
                        f"{name} names host {host}, but there are {self.hosts} hosts",
                        hint=f"number hosts from 0 to {self.hosts - 1}",
                    )

    def _check_classes(self) -> None:
        require_whole("classes", self.classes, least=1, most=MAX_CLASSES)
        for host, own in self.host_classes.items():
            require_whole(f"the class of host {host}", own, least=0, most=self.classes - 1)
        unlimited = [host for host in range(self.hosts) if self.rate_of(host) is None]
        if self.classes > 1 and self.topology is None and unlimited:
            raise ConfigurationError(
                f"a link without a rate has no queue to serve by class; host {unlimited[0]}'s has "
                f"none, and classes is {self.classes}",
                hint="give all links a rate",
            )

    def _check_aggregators(self) -> None:
        if not self.aggregators:
            return
        able = ["switch"]
        if self.topology is not None:
            from fivefold.network.topology import read_topology  # noqa: PLC0415 - it needs numpy

            able = [node.name for node in read_topology(self.topology).nodes if not node.is_rank]
        for node, options in self.aggregators.items():
            if node not in able:
                raise ConfigurationError(
                    f"there is no switch {node!r} that could aggregate",
                    hint=f"the switches are {', '.join(able) or 'none: hosts are joined directly'}",
                )
            if not isinstance(options, Mapping):
                raise ConfigurationError(
                    f"the options of {node!r} must be a mapping; got {options!r:.60}",
                    hint="write {} for the usual ones",
                )
            for name in options:
                message = f"an aggregating switch has no option {name!r}"
                require_one_of(name, _AGGREGATOR_OPTIONS, message)
        plain = {node: dict(options) for node, options in self.aggregators.items()}
        object.__setattr__(self, "aggregators", plain)

    def _check_path(self) -> None:
        if not isinstance(self.loss, int | float) or not 0.0 <= self.loss < 1.0:
            raise ConfigurationError(
                f"loss must be a probability in [0, 1); got {self.loss!r:.60}",
                hint="one packet in a hundred is 0.01",
            )
        if self.jitter_s > self.delay_s:
            raise ConfigurationError(
                f"jitter must be at most the delay; got jitter={self.jitter}, delay={self.delay}",
                hint="a packet cannot arrive before it was sent: raise the delay",
            )
        if self.queue_s <= 0:
            raise ConfigurationError(
                f"queue must be more than zero; got {self.queue}", hint="the default is '50ms'"
            )

    def _check_topology(self) -> None:
        from fivefold.network.topology import read_topology  # noqa: PLC0415 - it needs numpy

        if self.rate is not None or self.host_rates or self.delays_or_loses:
            raise ConfigurationError(
                f"a topology brings its own links; got rate={self.rate}, delay={self.delay}, "
                f"loss={self.loss:g} and {len(self.host_rates)} host_rates besides",
                hint="write the rates into the topology",
            )
        topology = read_topology(str(self.topology))
        if topology.num_ranks != self.hosts:
            raise ConfigurationError(
                f"the topology {topology.name} has {topology.num_ranks} ranks, but hosts is "
                f"{self.hosts}",
                hint="use LabSpec.of_topology",
            )
        if any(topology.latencies_s > _LONGEST_LATENCY_S):
            raise ConfigurationError(
                f"the topology has latencies up to {max(topology.latencies_s):g} s, which the lab "
                "does not emulate on topologies",
                hint="set them to zero: the machine's own latency is what runs will have",
            )
        both_ways = {(link.source, link.target) for link in topology.links}
        for source, target in sorted(both_ways):
            if (target, source) not in both_ways:
                raise ConfigurationError(
                    f"the link from {source} to {target} has none back",
                    hint="TCP needs both directions: add the link back",
                )
        topology.require_connected()
        for pair, links in self.routes.items():
            if not all(isinstance(part, tuple | list) for part in (pair, links)) or len(pair) != 2:
                raise ConfigurationError(
                    f"a route is {links!r:.60} for {pair!r:.60}",
                    hint="write {(source, target): (link, ...)}",
                )
            _check_route(topology, pair, links)

    @classmethod
    def of_topology(cls, topology: Any, **fields: Any) -> LabSpec:
        """Describe a cluster by a topology, one host for each rank.

        Args:
            topology: A :class:`fivefold.network.topology.Topology`.
            **fields: Other fields, such as ``mtu`` and ``nproc_per_host``.

        Examples:
            >>> from fivefold.network.topology import ring
            >>> LabSpec.of_topology(ring(4, bandwidth="100 Mbit/s")).describe()
            '4 hosts on ring:4'
        """
        return cls(hosts=topology.num_ranks, topology=topology.to_toml(), **fields)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Return the rate of links without their own, in bytes per second; None is unlimited."""
        return None if self.rate is None else parse_bytes_per_s(self.rate)

    @property
    def delay_s(self) -> float:
        """Return the one-way delay in seconds."""
        return parse_duration_s(self.delay)

    @property
    def jitter_s(self) -> float:
        """Return half the width of the delay's distribution in seconds."""
        return parse_duration_s(self.jitter)

    @property
    def queue_s(self) -> float:
        """Return the longest wait in a link's queue in seconds."""
        return parse_duration_s(self.queue)

    @property
    def world_size(self) -> int:
        """Return the number of ranks over all hosts."""
        return self.hosts * self.nproc_per_host

    @property
    def delays_or_loses(self) -> bool:
        """Return whether the path needs more than a rate: netem or the relay."""
        return self.delay_s > 0 or self.loss > 0

    @property
    def shapes(self) -> bool:
        """Return whether anything at all is asked of the links."""
        if self.topology is not None or self.delays_or_loses:
            return True
        return any(self.rate_of(host) is not None for host in range(self.hosts))

    def rate_of(self, host: int) -> float | None:
        """Return the rate of one host's link in bytes per second; None is unlimited."""
        if host in self.host_rates:
            return parse_bytes_per_s(self.host_rates[host])
        return self.rate_bytes_per_s

    def describe(self) -> str:
        """Describe the cluster in one line.

        Examples:
            >>> LabSpec(hosts=2, rate="200Mbit/s", delay="5ms", loss=0.01).describe()
            '2 hosts, 200 Mbit/s, 5 ms one way, 1 % loss'
        """
        rate = self.rate_bytes_per_s
        parts = [f"{self.hosts} host{'s' if self.hosts > 1 else ''}"]
        if self.topology is not None:
            named = parse_toml(self.topology, where="the topology's text")
            parts = [f"{parts[0]} on {named.get('name', 'a topology')}"]
        if self.nproc_per_host > 1:
            parts.append(f"{self.nproc_per_host} processes each")
        if self.topology is None:
            parts.append("no rate limit" if rate is None else format_bytes_per_s(rate))
        parts += [
            f"host{host} {format_bytes_per_s(parse_bytes_per_s(own))}"
            for host, own in sorted(self.host_rates.items())
        ]
        if self.delay_s > 0:
            jitter = f" ± {format_duration_s(self.jitter_s)}" if self.jitter_s > 0 else ""
            parts.append(f"{format_duration_s(self.delay_s)}{jitter} one way")
        if self.loss > 0:
            parts.append(f"{self.loss * 100:g} % loss")
        if self.classes > 1:
            parts.append(f"{self.classes} classes")
        if self.aggregators:
            parts.append(f"aggregation in {', '.join(sorted(self.aggregators))}")
        return ", ".join(parts)


def class_tos(priority: int, classes: int) -> int:
    """Return the value of ``IP_TOS`` with which a socket puts its packets into a class.

    The last class has the value of packets that nobody marked: 0.

    Args:
        priority: The class, 0 the most urgent.
        classes: How many there are.

    Raises:
        ConfigurationError: There is no such class.

    Examples:
        >>> [class_tos(priority, 3) for priority in range(3)]
        [64, 32, 0]
    """
    if not 1 <= classes <= MAX_CLASSES or not 0 <= priority < classes:
        raise ConfigurationError(
            f"there is no class {priority} among {classes}",
            hint=f"links have 1 to {MAX_CLASSES} classes, numbered from 0",
        )
    return classes - 1 - priority << _SELECTOR_SHIFT


def _check_route(topology: Topology, pair: tuple[int, int], links: Sequence[int]) -> None:
    source, target = pair
    known = range(topology.num_ranks)
    wrong = f"the route from host {source} to host {target}"
    if source not in known or target not in known or source == target:
        raise ConfigurationError(
            f"{wrong} does not exist", hint=f"name two of the hosts 0 to {topology.num_ranks - 1}"
        )
    node = int(topology.node_of_rank(source))
    for link in links:
        if link not in range(topology.num_links) or int(topology.link_sources[link]) != node:
            raise ConfigurationError(
                f"{wrong} does not go on with link {link}",
                hint="give the topology's links in the order in which packets take them",
            )
        node = int(topology.link_targets[link])
    if node != int(topology.node_of_rank(target)):
        raise ConfigurationError(
            f"{wrong} ends at {topology.nodes[node].name}", hint="give the links up to the end"
        )
