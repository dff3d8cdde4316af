"""The fluid simulator: max-min fair rates of flows over paths, event by event."""

from fivefold.network.simulation._rates import FlowRoutes, max_min_rates
from fivefold.network.simulation._result import RateRecord, SimulationResult, Span
from fivefold.network.simulation._simulate import simulate
from fivefold.network.simulation._tasks import AggregationRequest, Compute, Flow, FlowTable

__all__ = [
    "AggregationRequest",
    "Compute",
    "Flow",
    "FlowRoutes",
    "FlowTable",
    "RateRecord",
    "SimulationResult",
    "Span",
    "max_min_rates",
    "simulate",
]
