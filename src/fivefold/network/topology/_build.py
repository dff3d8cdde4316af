"""Nodes by name, links in both directions at once, and hosts: what the generators build with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.network.topology._graph import COMPUTE_KINDS, Link, Node, NodeKind, SwitchAbility
from fivefold.network.topology._topology import Topology
from fivefold.units import parse_bytes_per_s, parse_duration_s

# Those of any cluster that exists, and few enough to be built in seconds.
_MOST_NODES = 500_000
_MOST_LINKS = 1_000_000


@dataclass(frozen=True)
class Wire:
    """Kind of link: bandwidth and latency as text with units or as numbers, and count."""

    bandwidth: str | float
    latency: str | float = 0.0
    count: int = 1

    @cached_property
    def values(self) -> dict[str, Any]:
        """Return what every link of this kind has."""
        return {
            "bandwidth_bytes_per_s": parse_bytes_per_s(self.bandwidth),
            "latency_s": parse_duration_s(self.latency),
            "count": self.count,
        }


@dataclass
class Builder:
    """Nodes and links so far; the order of calls is their order."""

    nodes: list[Node] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    switches: list[SwitchAbility] = field(default_factory=list)

    def node(self, name: str, kind: NodeKind, *, host: str | None = None) -> str:
        """Add a node and give its name back."""
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
        """Add a link in one direction."""
        if len(self.links) >= _MOST_LINKS:
            raise ConfigurationError(
                f"the topology has more than {_MOST_LINKS:,} links", hint="describe a smaller one"
            )
        self.links.append(Link(source, target, **wire.values))

    def join(self, first: str, second: str, wire: Wire) -> None:
        """Add a link in each direction."""
        self.send(first, second, wire)
        self.send(second, first, wire)

    def done(self, name: str, *, source: str = "") -> Topology:
        """Return the topology of all that was added."""
        return Topology(name, self.nodes, self.links, switches=self.switches, source=source)


def check_count(what: str, value: object, *, low: int = 1, hint: str | None = None) -> None:
    """Refuse what is not a whole number from ``low`` on."""
    require_whole(what, value, least=low, most=_MOST_NODES, hint=hint)


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """A host: GPUs on one NVSwitch plane, and its ports to the network.

    Without ``nics`` each GPU is itself a port: its link to the fabric starts at the GPU, as where a
    NIC of the same rate lies in series. With ``nics`` the GPUs and NICs are dealt out in order to
    PCIe switches, one switch for each NIC (or GPU, where there are fewer), and a GPU reaches the
    NICs of its own switch only; others it reaches through NVLink and another GPU.

    Args:
        gpus: GPUs in the host.
        nvlink: Rate of each GPU's link to the NVSwitch plane; None where GPUs have none.
        nvlink_latency: Latency of each of those links.
        nics: NICs in the host; None for one port per GPU without a NIC of its own.
        pcie: Rate of the links between GPU, PCIe switch and NIC.
        pcie_latency: Latency of each of those links.
        kind: Kind of the compute nodes, ``gpu`` or ``cpu``.

    Raises:
        ConfigurationError: A count is below one, or the kind is no compute node.
    """

    gpus: int = 1
    nvlink: str | float | None = "300 GB/s"
    nvlink_latency: str | float = 0.0
    nics: int | None = None
    pcie: str | float = "32 GB/s"
    pcie_latency: str | float = 0.0
    kind: NodeKind = "gpu"

    def __post_init__(self) -> None:
        check_count("gpus of a host", self.gpus)
        if self.nics is not None:
            check_count("nics of a host", self.nics)
        message = f"the compute nodes of a host are of kind {self.kind!r}"
        require_one_of(self.kind, COMPUTE_KINDS, message)

    @property
    def ports(self) -> int:
        """Links to the network."""
        return self.gpus if self.nics is None else self.nics


def add_host(builder: Builder, name: str, spec: HostSpec) -> list[str]:
    """Add a host's nodes and inner links."""
    if spec.gpus == 1 and spec.nics is None:
        return [builder.node(name, spec.kind, host=name)]
    gpus = builder.row(f"{name}/{spec.kind}", spec.gpus, kind=spec.kind, host=name)
    if spec.gpus > 1 and spec.nvlink is not None:
        plane = builder.node(f"{name}/nvswitch", "nvswitch", host=name)
        for gpu in gpus:
            builder.join(gpu, plane, Wire(spec.nvlink, spec.nvlink_latency))
    if spec.nics is None:
        return gpus
    groups = min(spec.gpus, spec.nics)
    wire = Wire(spec.pcie, spec.pcie_latency)
    roots = builder.row(f"{name}/pcie", groups, kind="pcie", host=name)
    nics = builder.row(f"{name}/nic", spec.nics, kind="nic", host=name)
    for devices in (gpus, nics):
        for index, device in enumerate(devices):
            builder.join(device, roots[index * groups // len(devices)], wire)
    return nics
