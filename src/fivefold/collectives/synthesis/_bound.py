"""The lower bound of a collective, also where the topology is connected one way only."""

from __future__ import annotations

from fivefold.collectives.schedules import Bound, Collective, lower_bound
from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology


def bound_of(collective: Collective, topology: Topology, size_bytes: float) -> Bound:
    """The best bound, or none where some ranks cannot reach others but nobody asks them to.

    Args:
        collective: The collective.
        topology: Where.
        size_bytes: Size of the collective.

    Raises:
        InfeasibleError: A rank wants a chunk that cannot reach it.
    """
    try:
        return lower_bound(collective, topology, size_bytes)
    except InfeasibleError:
        for chunk in range(collective.num_chunks):
            for holder in collective.holders(chunk).tolist():
                for receiver in collective.receivers(chunk).tolist():
                    if holder != receiver and (collective.reducing or collective.single_source):
                        topology.shortest_route(holder, receiver)
        reason = "the topology is not connected both ways, and the bounds need that"
        return Bound(seconds=0.0, kind="none", reason=reason)
