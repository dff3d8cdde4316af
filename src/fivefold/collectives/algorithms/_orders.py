"""The order of a ring: a way round all ranks whose hops are fast links of the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.collectives.schedules import all_gather  # noqa: F401 - placeholder

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

__all__ = ["ring_order"]


def ring_order(topology: Topology) -> list[int]:
    """Ranks in their own order."""
    return list(range(topology.num_ranks))
