"""In-network aggregation: a software switch that really sums, and the ranks' half of it."""

from fivefold.network.aggregation._client import (
    AggregationClient,
    AggregationOptions,
    AggregationOutcome,
    HostGroup,
)
from fivefold.network.aggregation._connection import read_switch_state
from fivefold.network.aggregation._elements import ordered_sum
from fivefold.network.aggregation._pool import SwitchState
from fivefold.network.aggregation._switch import AggregationSwitch
from fivefold.network.aggregation._wire import parse_address

__all__ = [
    "AggregationClient",
    "AggregationOptions",
    "AggregationOutcome",
    "AggregationSwitch",
    "HostGroup",
    "SwitchState",
    "ordered_sum",
    "parse_address",
    "read_switch_state",
]
