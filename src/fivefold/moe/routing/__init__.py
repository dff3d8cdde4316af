"""Which experts a token goes to, with what weight, and who is dropped beyond a capacity."""

from fivefold.moe.routing.capacity import capacity_for, drop_beyond_capacity
from fivefold.moe.routing.router import (
    Router,
    Routing,
    load_balancing_loss,
    route,
    router_z_loss,
    updated_selection_bias,
)

__all__ = [
    "Router",
    "Routing",
    "capacity_for",
    "drop_beyond_capacity",
    "load_balancing_loss",
    "route",
    "router_z_loss",
    "updated_selection_bias",
]
