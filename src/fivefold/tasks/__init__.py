"""Layer 2: when each communication runs against compute.

A task graph says what an iteration computes and sends; an ordering says what goes first where
several tasks wait for one resource; the schedule says when everything happens and how much
communication is left exposed. Durations come from below (``collectives`` and ``network`` quote
them); this room knows neither topologies nor algorithms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fivefold.tasks._exposure import exposed_s
from fivefold.tasks._graph import CommunicationTask, ComputeTask, TaskGraph
from fivefold.tasks._iteration import LayerCost, iteration_graph, rotated_iteration
from fivefold.tasks._mesh import IterationDemand, Message, mesh_iteration
from fivefold.tasks._order import BucketCost, SendOrder, plan_send_order
from fivefold.tasks._ordering import Ordering
from fivefold.tasks._schedule import TaskSchedule, TaskSpan
from fivefold.tasks._scheduler import schedule_tasks

if TYPE_CHECKING:
    from fivefold.tasks._hook import ScheduledReduction
    from fivefold.tasks._sender import SentChunk

__all__ = [
    "BucketCost",
    "CommunicationTask",
    "ComputeTask",
    "IterationDemand",
    "LayerCost",
    "Message",
    "Ordering",
    "ScheduledReduction",
    "SendOrder",
    "SentChunk",
    "TaskGraph",
    "TaskSchedule",
    "TaskSpan",
    "exposed_s",
    "iteration_graph",
    "mesh_iteration",
    "plan_send_order",
    "rotated_iteration",
    "schedule_tasks",
]

_RUNNING = {"ScheduledReduction": "_hook", "SentChunk": "_sender"}  # those load torch


def __getattr__(name: str) -> Any:
    if name in _RUNNING:
        module = importlib.import_module(f"fivefold.tasks.{_RUNNING[name]}")
        return getattr(module, name)
    message = f"module 'fivefold.tasks' has no attribute {name!r}"
    raise AttributeError(message)
