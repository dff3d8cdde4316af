"""Layer 2: when each communication runs against compute.

A task graph says what an iteration computes and sends; an ordering says what goes first where
several tasks wait for one resource; the schedule says when everything happens and how much
communication is left exposed. Durations come from below (``collectives`` and ``network`` quote
them): nothing here knows topologies or algorithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.tasks.graph import CommunicationTask, ComputeTask, TaskGraph
from fivefold.tasks.iteration import LayerCost, iteration_graph
from fivefold.tasks.schedule import schedule_tasks

if TYPE_CHECKING:
    from fivefold.tasks._hook import ScheduledReduction

__all__ = [
    "CommunicationTask",
    "ComputeTask",
    "LayerCost",
    "ScheduledReduction",
    "TaskGraph",
    "iteration_graph",
    "schedule_tasks",
]


def __getattr__(name: str) -> Any:
    if name == "ScheduledReduction":
        from fivefold.tasks._hook import ScheduledReduction  # noqa: PLC0415 - it loads torch

        return ScheduledReduction
    raise AttributeError(f"module 'fivefold.tasks' has no attribute {name!r}")
