"""In-network aggregation: a software switch that really sums, and the ranks' half of it."""

from fivefold.network.aggregation._switch import AggregationSwitch
from fivefold.network.aggregation.client import (
    AggregationClient,
    AggregationOptions,
    read_switch_state,
)

__all__ = ["AggregationClient", "AggregationOptions", "AggregationSwitch", "read_switch_state"]
