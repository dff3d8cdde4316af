"""Collectives, schedules, the verifier, the cost of a schedule and the bounds no one can beat."""

from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._drawing import draw_schedule
from fivefold.collectives.schedules._verification import verify_schedule
from fivefold.collectives.schedules.bounds import lower_bound
from fivefold.collectives.schedules.constructors import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_allv,
    broadcast,
    custom_collective,
    gather,
    named_collective,
    reduce,
    reduce_scatter,
    scatter,
)
from fivefold.collectives.schedules.schedule import Schedule, ScheduleError, Transfer
from fivefold.collectives.schedules.throughput import throughput_optimum
from fivefold.collectives.schedules.timing import Timing, evaluate

__all__ = [
    "Collective",
    "Schedule",
    "ScheduleError",
    "Timing",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_allv",
    "broadcast",
    "custom_collective",
    "draw_schedule",
    "evaluate",
    "gather",
    "lower_bound",
    "named_collective",
    "reduce",
    "reduce_scatter",
    "scatter",
    "throughput_optimum",
    "verify_schedule",
]
