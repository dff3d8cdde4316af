"""Layer 4: which path, priority, rate and time offset each flow gets, over all jobs.

Jobs say what they send in an iteration; this room decides where each flow goes (hashed, least
loaded, by intensity), which of the few priority classes of a switch each job has, by how much each
job's iterations are shifted against the others', and at which rates flows of one operation end
together. It knows topologies, but neither collectives nor models.
"""

from fivefold.flows._coflow import Coflow, coflow_order, ideal_finish_times, together_rates
from fivefold.flows._guard import Guarded, never_worse
from fivefold.flows._paths import equal_cost_paths
from fivefold.flows._priority import PriorityClasses, priority_classes
from fivefold.flows._routing import RoutePolicy, Routing, route_flows
from fivefold.flows._shifts import Shifts, time_shifts
from fivefold.flows._traffic import FlowDemand, JobTraffic

__all__ = [
    "Coflow",
    "FlowDemand",
    "Guarded",
    "JobTraffic",
    "PriorityClasses",
    "RoutePolicy",
    "Routing",
    "Shifts",
    "coflow_order",
    "equal_cost_paths",
    "ideal_finish_times",
    "never_worse",
    "priority_classes",
    "route_flows",
    "time_shifts",
    "together_rates",
]
