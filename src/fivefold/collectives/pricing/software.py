"""What a communication library costs besides the links: its latencies, by protocol, with sources.

The same links carry a collective in tens of microseconds under NCCL and in milliseconds under gloo,
so that a price names the library that it is of. Each is declared once, here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fivefold.collectives.pricing.closed_form import collective_time_s
from fivefold.collectives.pricing.fabric import FabricSpec, Group, Tier, fabric_from_topology
from fivefold.errors import require_one_of
from fivefold.network.topology import Node, Topology


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way in which a library moves bytes.

    Args:
        name: As the library calls it.
        share: What it reaches of the rate of a link that leaves a host, or of PCIe.
        inside_share: What it reaches of NVLinks and their like.
        base_s: Fixed time of a collective.
        inside_s: Time of a step between ranks of one host.
        across_s: Time of a step between hosts.
    """

    name: str
    share: float
    inside_share: float
    base_s: float
    inside_s: float
    across_s: float

    def on(self, topology: Topology) -> Topology:
        """Return the topology as a message of this protocol sees it, each step's time on the way.

        A library's time of a step has that of usual links in it, so that of the topology's own is
        not paid twice: only what is missing to the library's is added, on the link that leaves the
        rank, and the rest where it leaves the host.
        """
        nodes = {node.name: node for node in topology.nodes}
        inside_s, across_s = _routes_s(topology)
        inside_s = max(self.inside_s - inside_s, 0.0)
        across_s = max(self.across_s - across_s - inside_s, 0.0)
        links = []
        for link in topology.links:
            here, there = nodes[link.source], nodes[link.target]
            apart = here.is_rank and there.is_rank and here.host != there.host
            leaves = here.host is not None and there.host is None
            extra_s = inside_s if here.is_rank else 0.0
            if apart or leaves or (here.is_rank and here.host is None):
                extra_s += across_s
            share = self.inside_share if _is_nvlink(here, there) else self.share
            rate = link.bandwidth_bytes_per_s * share
            links.append(
                replace(link, bandwidth_bytes_per_s=rate, latency_s=link.latency_s + extra_s)
            )
        return topology.with_links(links)


def _is_nvlink(here: Node, there: Node) -> bool:
    """Return whether a link is one of a host, and neither of PCIe nor to an adapter."""
    within = here.host is not None and here.host == there.host
    return within and not {"pcie", "nic"} & {here.kind, there.kind}


def _routes_s(topology: Topology) -> tuple[float, float]:
    """Return the latency between two ranks of one host and of two; 0 where there are none."""
    hosts = [node.host for node in topology.nodes if node.is_rank]
    found = []
    for alike in (True, False):
        other = next((n for n in range(1, len(hosts)) if (hosts[n] == hosts[0]) == alike), None)
        route = () if other is None else topology.shortest_route(0, other)
        found.append(float(sum(topology.latencies_s[link] for link in route)))
    return found[0], found[1]


@dataclass(frozen=True, kw_only=True)
class Software:
    """A communication library.

    Args:
        key: To choose it by.
        name: For people, with the release that the numbers are of.
        protocols: Of which the fastest is taken, as the library's own tuner does.
        work_s: Processor time of one message, at both ends together.
        shared_link_share: What a link carries where several connections meet on it.
        source: Where the numbers come from.
        ranks: How names of ranks may begin on the machines that it is for; none: in any way.
        kind: Kind of those ranks.
    """

    key: str
    name: str
    protocols: tuple[Protocol, ...]
    work_s: float = 0.0
    shared_link_share: float = 1.0
    source: str
    ranks: tuple[str, ...] = ("",)
    kind: str = "gpu"

    def default_s(self, topology: Topology, kind: str, *, size_bytes: float) -> float:
        """Return the time of a collective by the library's own choice of ring, tree and protocol.

        Raises:
            ConfigurationError: Hosts differ in their number of ranks, or there is no such kind.
        """
        group = Group(size=topology.num_ranks)
        return min(
            collective_time_s(fabric, kind, size_bytes=size_bytes, group=group)
            for fabric in fabrics_reached(topology, self.protocols)
        )


def fabrics_reached(topology: Topology, protocols: Iterable[Protocol]) -> list[FabricSpec]:
    """Return the tiers of a topology as each protocol reaches them.

    Raises:
        ConfigurationError: Hosts differ in their number of ranks.
    """
    fabric = fabric_from_topology(topology, efficiency=1.0, base_s=0.0, hop_s=0.0)
    nodes = {node.name: node for node in topology.nodes}
    nvlinks = any(_is_nvlink(nodes[one.source], nodes[one.target]) for one in topology.links)

    def as_reached(tier: Tier, protocol: Protocol) -> Tier:
        inside = tier.name == "node"
        step_s = protocol.inside_s if inside else protocol.across_s
        share = protocol.inside_share if inside and nvlinks else protocol.share
        # The library's time of a step has that of usual links in it.
        step_s = max(tier.hop_s, step_s)
        return replace(tier, hop_s=step_s, efficiency=share, base_s=protocol.base_s)

    return [
        replace(fabric, tiers=tuple(as_reached(tier, protocol) for tier in fabric.tiers))
        for protocol in protocols
    ]


def protocols_of(
    *rows: tuple[str, float, float, float, float], inside_share: float
) -> tuple[Protocol, ...]:
    """Return protocols from rows of name, share, and microseconds: base, inside, across."""
    return tuple(
        Protocol(
            name=name, share=share, inside_share=share * inside_share, base_s=base * 1e-6,
            inside_s=inside * 1e-6, across_s=across * 1e-6,
        )
        for name, share, base, inside, across in rows
    )  # fmt: skip


# NCCL counts 20 of the 25 GB/s of an NVLink (topo.h), and all that a network adapter says.
NVLINK_SHARE = 0.8
_ALL = (
    Software(
        key="nccl",
        name="NCCL 2.28",
        protocols=protocols_of(
            ("LL", 0.5, 6.6, 0.6, 2.7),
            ("LL128", 0.92, 14.0, 1.9, 4.0),
            ("Simple", 1.0, 8.4, 3.4, 14.0),
            inside_share=NVLINK_SHARE,
        ),
        source="NVIDIA/nccl, src/graph/tuning.cc: baseLatencies, hwLatencies of rings on NVLink "
        "and network; topo.h: 20 of 25 GB/s of an NVLink",
        ranks=("gpu",),
    ),
    Software(
        key="rccl",
        name="RCCL of ROCm 6",
        protocols=protocols_of(
            ("LL", 0.5, 12.0, 0.8, 9.5),
            ("Simple", 1.0, 17.0, 2.1, 25.0),
            inside_share=NVLINK_SHARE,
        ),
        source="ROCm/rccl, src/graph/tuning.cc: baseLat, and hwLat of tuning_model_5 (rings on "
        "xGMI, and on the network LL's ring and Simple's tree); the share inside is NCCL's",
        ranks=("gcd", "amdgpu"),
    ),
    Software(
        key="gloo",
        name="gloo of PyTorch 2.13",
        protocols=protocols_of(("TCP", 1.0, 0.0, 60.0, 60.0), inside_share=1.0),
        work_s=1.4e-4,
        shared_link_share=0.93,
        source="measured in the lab, by fivefold collectives bench",
        kind="cpu",
    ),
)
SOFTWARE: Mapping[str, Software] = {one.key: one for one in _ALL}
ENGINE_MESSAGE_S = 4e-4  # of fivefold's own backend over gloo, measured there as well


def software_of(topology: Topology, key: str | None = None) -> Software:
    """Return the library that a key names, or the one that runs on a topology's ranks.

    Raises:
        ConfigurationError: There is no such library.

    Examples:
        >>> from fivefold.network.topology import parse_topology
        >>> [software_of(parse_topology(one)).key for one in ("mi250", "fat_tree:2,kind=cpu")]
        ['rccl', 'gloo']
    """
    if key is not None:
        require_one_of(key, SOFTWARE, f"there is no communication library {key!r}")
        return SOFTWARE[key]
    ranks = [node for node in topology.nodes if node.is_rank]
    return next((one for one in _ALL if _fits(one, ranks)), SOFTWARE["nccl"])


def _fits(one: Software, ranks: Iterable[Node]) -> bool:
    return all(
        node.kind == one.kind and node.name.rpartition("/")[2].startswith(one.ranks)
        for node in ranks
    )
