"""How long a collective takes for a group of ranks: one question, three fidelities (`price_s`).

The closed form takes arrays, one entry per group, so that a search can ask for millions of prices.
"""

from fivefold.collectives.pricing._closed_form import chain_time_s, collective_time_s
from fivefold.collectives.pricing._fabric import FabricSpec, Group, Groups, Quote, Tier
from fivefold.collectives.pricing._from_topology import fabric_from_topology
from fivefold.collectives.pricing._price import Fidelity, price_s

__all__ = [
    "FabricSpec",
    "Fidelity",
    "Group",
    "Groups",
    "Quote",
    "Tier",
    "chain_time_s",
    "collective_time_s",
    "fabric_from_topology",
    "price_s",
]
