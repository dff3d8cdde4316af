"""The fluid simulator: max-min fair rates of flows over paths, event by event."""

from fivefold.network.simulation._simulate import SimulationResult, simulate
from fivefold.network.simulation._tasks import (
    AggregationRequest,
    Compute,
    CoupledFlows,
    Flow,
    FlowTable,
)
from fivefold.network.simulation.rates import max_min_rates

__all__ = [
    "AggregationRequest",
    "Compute",
    "CoupledFlows",
    "Flow",
    "FlowTable",
    "SimulationResult",
    "max_min_rates",
    "simulate",
]
