"""Collectives, schedules, the verifier, the cost of a schedule and the bounds no one can beat."""

from fivefold.collectives.schedules._bounds import (
    Bound,
    bandwidth_bound,
    discrete_ingress_bound,
    gap,
    latency_bound,
    lower_bound,
)
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._compose import compose_all_reduce, concatenate
from fivefold.collectives.schedules._constructors import (
    COLLECTIVES,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_allv,
    broadcast,
    custom,
    gather,
    named_collective,
    reduce,
    reduce_scatter,
    scatter,
)
from fivefold.collectives.schedules._dependencies import Dependencies, dependencies, event_order
from fivefold.collectives.schedules._draw import draw_schedule
from fivefold.collectives.schedules._evaluate import (
    MODELS,
    CostModel,
    Timing,
    evaluate,
    with_times,
)
from fivefold.collectives.schedules._routes import relays_of
from fivefold.collectives.schedules._schedule import Schedule, ScheduleError, Transfer
from fivefold.collectives.schedules._throughput import ThroughputOptimum, throughput_optimum
from fivefold.collectives.schedules._verify import VerificationReport, verify

__all__ = [
    "COLLECTIVES",
    "MODELS",
    "Bound",
    "Collective",
    "CostModel",
    "Dependencies",
    "Schedule",
    "ScheduleError",
    "ThroughputOptimum",
    "Timing",
    "Transfer",
    "VerificationReport",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_allv",
    "bandwidth_bound",
    "broadcast",
    "compose_all_reduce",
    "concatenate",
    "custom",
    "dependencies",
    "discrete_ingress_bound",
    "draw_schedule",
    "evaluate",
    "event_order",
    "gap",
    "gather",
    "latency_bound",
    "lower_bound",
    "named_collective",
    "reduce",
    "reduce_scatter",
    "relays_of",
    "scatter",
    "throughput_optimum",
    "verify",
    "with_times",
]
