"""In-network aggregation: its models, and a software switch that really sums."""

from fivefold.network.aggregation._client import (
    AggregationClient,
    AggregationOptions,
    AggregationOutcome,
    HostGroup,
)
from fivefold.network.aggregation._connection import read_switch_state
from fivefold.network.aggregation._elements import ordered_sum
from fivefold.network.aggregation._models import (
    admit_jobs,
    aggregation_rate_bytes_per_s,
    aggregation_time_s,
    best_effort_bytes,
    best_effort_time_s,
    several_trees_time_s,
    slots_for_line_rate,
)
from fivefold.network.aggregation._pool import SwitchState
from fivefold.network.aggregation._process import SwitchProcess
from fivefold.network.aggregation._switch import AggregationSwitch
from fivefold.network.aggregation._wire import parse_address

__all__ = [
    "AggregationClient",
    "AggregationOptions",
    "AggregationOutcome",
    "AggregationSwitch",
    "HostGroup",
    "SwitchProcess",
    "SwitchState",
    "admit_jobs",
    "aggregation_rate_bytes_per_s",
    "aggregation_time_s",
    "best_effort_bytes",
    "best_effort_time_s",
    "ordered_sum",
    "parse_address",
    "read_switch_state",
    "several_trees_time_s",
    "slots_for_line_rate",
]
