"""Collectives, schedules, the verifier, the cost of a schedule and the bounds no one can beat."""

from fivefold.collectives.schedules._bounds import (
    bandwidth_bound,
    discrete_ingress_bound,
    gap,
    latency_bound,
    lower_bound,
)
from fivefold.collectives.schedules._collective import Collective
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
from fivefold.collectives.schedules._cuts import Bound
from fivefold.collectives.schedules._data import verify_with_data
from fivefold.collectives.schedules._draw import draw_schedule
from fivefold.collectives.schedules._errors import ScheduleError
from fivefold.collectives.schedules._evaluate import (
    MODELS,
    CostModel,
    Timing,
    evaluate,
    with_times,
)
from fivefold.collectives.schedules._json import read_schedule
from fivefold.collectives.schedules._schedule import Schedule, Transfer
from fivefold.collectives.schedules._slots import Dependencies, dependencies, event_order
from fivefold.collectives.schedules._throughput import ThroughputOptimum, throughput_optimum
from fivefold.collectives.schedules._transform import compose_all_reduce, concatenate
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
    "read_schedule",
    "reduce",
    "reduce_scatter",
    "scatter",
    "throughput_optimum",
    "verify",
    "verify_with_data",
    "with_times",
]
