"""How long a collective takes, in closed form: groups of ranks on a fabric of tiers.

Arrays in, arrays out, one entry per group, so that a search can ask for millions of prices.
"""

from fivefold.collectives.pricing._closed_form import chain_time_s, collective_time_s
from fivefold.collectives.pricing._fabric import FabricSpec, Group, Groups, Quote, Tier
from fivefold.collectives.pricing._from_topology import fabric_from_topology

__all__ = [
    "FabricSpec",
    "Group",
    "Groups",
    "Quote",
    "Tier",
    "chain_time_s",
    "collective_time_s",
    "fabric_from_topology",
]
