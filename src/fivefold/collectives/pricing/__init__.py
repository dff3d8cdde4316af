"""How long a collective takes for a group of ranks: one question, three fidelities (`price_s`).

On tiers it is a closed form, arrays in and arrays out, so that a search can ask for millions of
prices; on a graph it is a schedule that is walked, or phases of flows, which a simulator runs.
"""

from fivefold.collectives.pricing._price import price_s
from fivefold.collectives.pricing.closed_form import collective_time_s
from fivefold.collectives.pricing.fabric import FabricSpec, Group, Tier, fabric_from_topology

__all__ = ["FabricSpec", "Group", "Tier", "collective_time_s", "fabric_from_topology", "price_s"]
