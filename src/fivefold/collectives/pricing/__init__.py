"""How long a collective takes for a group of ranks: one question, three fidelities (`price_s`).

On tiers it is a closed form, arrays in and arrays out, so that a search can ask for millions of
prices; on a graph it is a schedule that is walked, or phases of flows, which a simulator runs.
"""

from fivefold.collectives.pricing._closed_form import chain_time_s, collective_time_s
from fivefold.collectives.pricing._fabric import FabricSpec, Group, Groups, Quote, Tier
from fivefold.collectives.pricing._from_topology import fabric_from_topology
from fivefold.collectives.pricing._phases import (
    Algorithm,
    Phase,
    Tree,
    aggregation_tree,
    collective_phases,
    first_path,
    host_groups,
    phases_time_s,
    route_latency_s,
    tree_links,
)
from fivefold.collectives.pricing._price import Fidelity, price_s

__all__ = [
    "Algorithm",
    "FabricSpec",
    "Fidelity",
    "Group",
    "Groups",
    "Phase",
    "Quote",
    "Tier",
    "Tree",
    "aggregation_tree",
    "chain_time_s",
    "collective_phases",
    "collective_time_s",
    "fabric_from_topology",
    "first_path",
    "host_groups",
    "phases_time_s",
    "price_s",
    "route_latency_s",
    "tree_links",
]
