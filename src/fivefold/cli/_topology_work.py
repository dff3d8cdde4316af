"""The work of ``fivefold topology``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology


def _cut_off(topology: Topology) -> str | None:
    """Return which ranks cannot be reached, or cannot reach; None where all is well."""
    try:
        topology.require_connected()
    except InfeasibleError as error:
        return f"NO: {error.message.partition(': ')[2]}"
    return None


def facts_of(topology: Topology) -> dict[str, Any]:
    kinds = Counter(node.kind for node in topology.nodes)
    ends = zip(topology.links, topology.link_sources, topology.link_targets, strict=True)
    classes = Counter(
        (
            topology.nodes[source].kind, topology.nodes[target].kind,
            link.bandwidth_bytes_per_s, link.latency_s, link.count,
        )
        for link, source, target in ends
    )  # fmt: skip
    names = ("from", "to", "bandwidth_bytes_per_s", "latency_s", "count", "links")
    out = np.bincount(
        topology.link_sources, topology.capacities_bytes_per_s, minlength=topology.num_nodes
    )
    cut_off = _cut_off(topology)
    connected = cut_off is None
    small = topology.num_ranks <= 2048 and topology.num_ranks > 1
    return {
        "name": topology.name,
        "source": topology.source,
        "ranks": topology.num_ranks,
        "hosts": len(topology.hosts),
        "nodes": kinds,
        "links": [
            dict(zip(names, (*key, number), strict=True)) for key, number in sorted(classes.items())
        ],
        "connected": connected,
        "cut_off": cut_off,
        "farthest_latency_s": float(topology.eccentricity_s.max()) if connected and small else None,
        "fewest_out_bytes_per_s": float(out[topology.rank_nodes].min()),
        "switches": [
            {"node": ability.node, "multicast": ability.multicast}
            | ({"slots": ability.aggregation.slots} if ability.aggregation else {})
            for ability in topology.switches
        ],
        "fingerprint": topology.fingerprint,
    }
