"""Layer 4: which path, priority, rate and time offset each flow gets, over all jobs.

Jobs say what they send in an iteration; this package decides where each flow goes (hashed, least
loaded, by intensity), which of the few priority classes of a switch each job has, and by how much
each job's iterations are shifted against the others'. It knows topologies, but neither collectives
nor models.
"""

from fivefold.flows._priority import priority_classes
from fivefold.flows._shifts import time_shifts
from fivefold.flows.paths import equal_cost_paths
from fivefold.flows.routing import FlowDemand, JobTraffic, route_flows

__all__ = [
    "FlowDemand",
    "JobTraffic",
    "equal_cost_paths",
    "priority_classes",
    "route_flows",
    "time_shifts",
]
