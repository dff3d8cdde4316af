"""The shortest schedule of a small graph, proved: the yardstick of the orderings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fivefold.errors import InfeasibleError, UnsupportedError
from fivefold.tasks._graph import CommunicationTask, TaskGraph
from fivefold.tasks._schedule import TaskSchedule, TaskSpan
from fivefold.tasks._scheduler import schedule_tasks

_TICKS = 1_000_000  # of the horizon: the solver knows integers only


def exact_schedule(
    graph: TaskGraph, *, chunk_bytes: int | None = None, time_limit_s: float = 10.0
) -> TaskSchedule:
    """The schedule that ends soonest, by constraint programming (CP-SAT).

    Args:
        graph: The tasks; a few hundred chunks at most.
        chunk_bytes: Largest chunk of a communication; None sends each in one piece.
        time_limit_s: Seconds to search; then the best one found is returned, with its bound.

    Returns:
        The schedule; ``optimal`` says whether the proof was completed. Times are exact to a
        millionth of the horizon, as is the bound.

    Raises:
        UnsupportedError: OR-Tools is not installed.
        InfeasibleError: Nothing was found within the time limit.

    Examples:
        >>> from fivefold.tasks import ComputeTask
        >>> graph = TaskGraph((
        ...     ComputeTask(task_id="a", duration_s=1.0),
        ...     ComputeTask(task_id="b", duration_s=2.0),
        ... ))
        >>> schedule = exact_schedule(graph)
        >>> round(schedule.end_s, 3), schedule.optimal
        (3.0, True)
    """
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an optional extra
    except ImportError as error:  # pragma: no cover - the development environment has it
        message = "exact schedules need OR-Tools, which is not installed"
        raise UnsupportedError(message, hint="pip install 'fivefold[collectives]'") from error
    if not graph.tasks:
        return TaskSchedule(graph, (), "exact", optimal=True, bound_s=0.0)
    first = schedule_tasks(graph, ordering="critical_path", chunk_bytes=chunk_bytes)
    tick_s = max(first.end_s, 1e-12) / _TICKS
    model = cp_model.CpModel()
    parts = _variables(model, graph, chunk_bytes, tick_s)
    end = _constrain(model, graph, parts)
    for span in first.spans:
        model.add_hint(parts[span.task_id][span.chunk][0], round(span.start_s / tick_s))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 2
    # Its own handler of Ctrl-C would not give Python its own back: the next one would kill us.
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model)
    if status not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        raise InfeasibleError(
            f"no schedule was found within {time_limit_s:g} s",
            hint="raise time_limit_s, or use schedule_tasks",
        )
    starts = {name: [solver.value(start) for start, _ in pieces] for name, pieces in parts.items()}
    return TaskSchedule(
        graph,
        _spans(graph, starts, chunk_bytes),
        "exact",
        optimal=status == cp_model.OPTIMAL,
        bound_s=solver.best_objective_bound * tick_s if end is not None else 0.0,
    )


Parts = dict[str, list[tuple[Any, Any]]]  # of each task: start and interval of its chunks


def _variables(model: Any, graph: TaskGraph, chunk_bytes: int | None, tick_s: float) -> Parts:
    horizon = 2 * _TICKS
    parts: Parts = {}
    for task in graph.tasks:
        release = round(task.release_s / tick_s)
        pieces = []
        for seconds in _durations(task, chunk_bytes):
            start = model.new_int_var(min(release, horizon), horizon, "")
            size = round(seconds / tick_s)
            pieces.append((start, model.new_fixed_size_interval_var(start, size, "")))
        parts[task.task_id] = pieces
    return parts


def _constrain(model: Any, graph: TaskGraph, parts: Parts) -> Any:
    by_resource: dict[str, list[Any]] = {}
    end = model.new_int_var(0, 4 * _TICKS, "")
    for task in graph.tasks:
        pieces = parts[task.task_id]
        by_resource.setdefault(task.resource, []).extend(interval for _, interval in pieces)
        for (start, _), (after, _) in pairwise(pieces):
            model.add(start <= after)  # chunks of a task are alike
        for name in task.depends_on:
            for _, interval in parts[name]:
                for start, _ in pieces:
                    model.add(start >= interval.end_expr())
        for _, interval in pieces:
            model.add(end >= interval.end_expr())
    for intervals in by_resource.values():
        model.add_no_overlap(intervals)
    model.minimize(end)
    return end


def _durations(task: Any, chunk_bytes: int | None) -> list[float]:
    if isinstance(task, CommunicationTask):
        return [task.time_s(size) for size in task.chunks(chunk_bytes)]
    return [task.duration_s]


def _spans(
    graph: TaskGraph, starts: dict[str, list[int]], chunk_bytes: int | None
) -> tuple[TaskSpan, ...]:
    """Exact seconds from the solver's order: each piece as early as the order allows."""
    pieces = sorted(
        (ticks, number, task.task_id, chunk)
        for number, task in enumerate(graph.tasks)
        for chunk, ticks in enumerate(starts[task.task_id])
    )
    place = {name: number for number, name in enumerate(graph.order)}
    pieces.sort(key=lambda piece: (piece[0], place[piece[2]], piece[3]))
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    spans = []
    for _, _, name, chunk in pieces:
        task = graph.by_id[name]
        ready_s = max((ends[other] for other in task.depends_on), default=0.0)
        start_s = max(task.release_s, ready_s, free.get(task.resource, 0.0))
        end_s = start_s + _durations(task, chunk_bytes)[chunk]
        free[task.resource] = end_s
        ends[name] = max(end_s, ends.get(name, 0.0))
        spans.append(TaskSpan(name, task.resource, start_s, end_s, chunk))
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s)))
