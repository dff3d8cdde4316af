"""Layer 2: when each communication runs against compute.

A task graph says what an iteration computes and sends; an ordering says what goes first where
several tasks wait for one resource; the schedule says when everything happens and how much
communication is left exposed. Durations come from below (``collectives`` and ``network`` quote
them); this room knows neither topologies nor algorithms.
"""

from fivefold.tasks._exact import exact_schedule
from fivefold.tasks._graph import CommunicationTask, ComputeTask, TaskGraph
from fivefold.tasks._iteration import LayerCost, iteration_graph
from fivefold.tasks._ordering import Ordering
from fivefold.tasks._partition import PartitionChoice, best_partition
from fivefold.tasks._schedule import TaskSchedule, TaskSpan
from fivefold.tasks._scheduler import schedule_tasks

__all__ = [
    "CommunicationTask",
    "ComputeTask",
    "LayerCost",
    "Ordering",
    "PartitionChoice",
    "TaskGraph",
    "TaskSchedule",
    "TaskSpan",
    "best_partition",
    "exact_schedule",
    "iteration_graph",
    "schedule_tasks",
]
