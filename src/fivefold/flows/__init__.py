"""Layer 4: which path, priority, rate and time offset each flow gets, over all jobs.

Jobs say what they send in an iteration; this package decides where each flow goes (hashed, least
loaded, by intensity), which of the few priority classes of a switch each job has, and by how much
each job's iterations are shifted against the others'. It knows topologies, but neither collectives
nor models.
"""

from fivefold.flows._guard import Guarded, never_worse
from fivefold.flows._paths import default_paths, equal_cost_paths
from fivefold.flows._priority import PriorityClasses, priority_classes
from fivefold.flows._routing import FlowDemand, JobTraffic, RoutePolicy, Routing, route_flows
from fivefold.flows._shifts import Shifts, time_shifts

__all__ = [
    "FlowDemand",
    "Guarded",
    "JobTraffic",
    "PriorityClasses",
    "RoutePolicy",
    "Routing",
    "Shifts",
    "default_paths",
    "equal_cost_paths",
    "never_worse",
    "priority_classes",
    "route_flows",
    "time_shifts",
]
