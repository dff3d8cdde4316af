"""Which of several waiting communications goes first.

Each ordering is a pure function from a graph to one key per communication; the smaller key goes
first, ties by when the task became ready, then by the program's order.

References:
    P3, arXiv 1905.03960; ByteScheduler, SOSP 2019; Lina, arXiv 2210.17223.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from fivefold.errors import ConfigurationError
from fivefold.tasks._graph import CommunicationTask, ComputeTask, TaskGraph

Ordering = Literal["fifo", "priority", "all_to_all_first", "critical_path"]
"""``"fifo"``: as they become ready. ``"priority"``: what the program needs first (P3,
ByteScheduler). ``"all_to_all_first"``: all-to-all before anything else (Lina).
``"critical_path"``: what the longest chain of work waits for."""


def communication_keys(graph: TaskGraph, ordering: Ordering) -> dict[str, float]:
    """Return the key of each communication; the smallest goes first."""
    if not is_ordering(ordering):
        known = ", ".join(get_args(Ordering))
        raise ConfigurationError(f"there is no ordering {ordering!r}", hint=f"there are {known}")
    rule: dict[str, Callable[[TaskGraph], dict[str, float]]] = {
        "fifo": _as_ready,
        "priority": _by_need,
        "all_to_all_first": _by_kind,
        "critical_path": _by_tail,
    }
    return rule[ordering](graph)


def is_ordering(name: str) -> bool:
    """Return whether an ordering of that name exists."""
    return name in get_args(Ordering)


def _as_ready(graph: TaskGraph) -> dict[str, float]:
    return {task.task_id: 0.0 for task in graph.communication}


def _by_kind(graph: TaskGraph) -> dict[str, float]:
    return {task.task_id: float(task.kind != "all_to_all") for task in graph.communication}


def _by_tail(graph: TaskGraph) -> dict[str, float]:
    return {task.task_id: -graph.tails_s[task.task_id] for task in graph.communication}


def _by_need(graph: TaskGraph) -> dict[str, float]:
    """The place in the program of the first compute task that waits, directly or through others."""
    place = {task.task_id: number for number, task in enumerate(graph.tasks)}
    needed: dict[str, float] = {}
    for name in reversed(graph.order):
        below = [
            place[follower] if isinstance(graph.by_id[follower], ComputeTask) else needed[follower]
            for follower in graph.followers[name]
        ]
        needed[name] = min(below, default=math.inf)  # what nobody waits for goes last
    return {
        task.task_id: needed[task.task_id] if task.priority is None else float(task.priority)
        for task in graph.communication
        if isinstance(task, CommunicationTask)
    }
