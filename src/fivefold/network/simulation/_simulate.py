"""The public simulator: checks, builds the state, runs the loop, reads the result."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.simulation._book import BUSY_S, CARRIED_BYTES, OVER_S, close_books
from fivefold.network.simulation._build import build_world
from fivefold.network.simulation._compile import Requests, compile_tasks
from fivefold.network.simulation._events import LOG_FULL, SKIPPED, STOPPED, release_roots, run
from fivefold.network.simulation._records import (
    EVENTS,
    FILLED,
    LOG,
    LOGGED,
    REFUSALS,
    ROUNDING,
    SOLVES,
    WAITS,
    World,
)
from fivefold.network.simulation._result import RateRecord, SimulationResult
from fivefold.network.simulation._table import FlowTable
from fivefold.network.simulation._tasks import AggregationRequest, Task

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

_NAMED_IN_ERRORS = 5
_LOG_ROOM = 65_536


def simulate(
    topology: Topology,
    flows: FlowTable | Sequence[Task],
    *,
    until_s: float | None = None,
    aggregation: Sequence[AggregationRequest] = (),
    iterations: int | Mapping[Hashable, int] = 1,
    record_rates: bool = False,
    tolerance: float = 0.0,
) -> SimulationResult:
    """Run flows, computations and in-network sums, and say when each ends.

    At every moment rates are max-min fair within a priority class, and a class gets only what
    higher ones leave. A flow ends when its last byte has been sent, plus the sum of its route's
    latencies; a task that depends on it starts then.

    Args:
        topology: Links and switches.
        flows: Tasks, by name or as arrays.
        until_s: When to stop; None runs to the end.
        aggregation: In-network sums, for a call whose flows are all flows.
        iterations: How often each job repeats its tasks, by job or for all. The next iteration
            starts when the last task of this one has ended; release times only hold back the
            first. Times of tasks are then those of the last iteration.
        record_rates: Keep every change of rate, for pictures.
        tolerance: A rate may stay this share away from the fair one where that saves work: in a
            crowded network one end moves thousands of rates a little. 0 is exact.

    Returns:
        Start and end of each task, and what each link carried.

    Raises:
        ConfigurationError: A task is not allowed, or dependencies form a circle; names them.
        InfeasibleError: A sum can never be made and has no fallback.

    References:
        D. Bertsekas, R. Gallager, Data Networks, section 6.5.2 (max-min fairness).

    Examples:
        >>> from fivefold.network.simulation import Flow
        >>> from fivefold.network.topology import line
        >>> pair = line(2, bandwidth="1 GB/s", latency="1 us")
        >>> route = pair.shortest_route(0, 1)
        >>> flows = [Flow(name, *pair.ranks, 1e6, route) for name in "ab"]
        >>> result = simulate(pair, flows)
        >>> round(result.finish_of("a"), 6)
        0.002001
    """
    if not isinstance(flows, FlowTable):
        table, requests, jobs = compile_tasks(topology, [*flows, *aggregation])
    else:
        if aggregation:
            table_hint = "give all tasks as a list, or flows as a table without in-network sums"
            msg = "aggregation needs tasks by name"
            raise ConfigurationError(msg, hint=table_hint)
        flows.routes.check(topology.num_links)
        table, requests = flows, Requests.none(len(flows))
        jobs = tuple(range(int(flows.jobs.max(initial=-1)) + 1))
    repeats = _iterations(iterations, jobs)
    _check_jobs(table, repeats)
    world = build_world(topology, table, requests, iterations=repeats)
    world = world._replace(loads=world.loads._replace(tolerance=_checked_tolerance(tolerance)))
    release_roots(world)
    end_s = np.inf if until_s is None else float(until_s)
    stopped, records = _run(world, end_s, record_rates=record_rates)
    if not stopped:
        _require_all_ended(world, table)
    stopped_s = end_s if stopped else None
    return _result(
        world,
        table,
        jobs,
        num_links=topology.num_links,
        stopped_s=stopped_s,
        records=records,
    )


def _iterations(
    iterations: int | Mapping[Hashable, int], jobs: tuple[Hashable, ...]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(iterations, Mapping):
        unknown = [job for job in iterations if job not in jobs]
        if unknown:
            raise ConfigurationError(
                f"iterations names job {unknown[0]!r}, which has no task",
                hint=f"jobs are {list(jobs)}",
            )
        counts = [iterations.get(job, 1) for job in jobs]
    else:
        counts = [iterations] * len(jobs)
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ConfigurationError(f"iterations must be whole numbers from 1; got {count!r}")
    return np.array(counts, np.int64)


def _checked_tolerance(tolerance: float) -> float:
    if not 0.0 <= tolerance < 0.5:
        raise ConfigurationError(
            f"tolerance must be a share from 0 to below 0.5; got {tolerance!r}",
            hint="0 is exact; 1e-3 lets a rate stay a thousandth away",
        )
    return max(float(tolerance), ROUNDING)


def _check_jobs(table: FlowTable, repeats: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """A repeated task has no single end that another job could wait for."""
    waiting = np.repeat(np.arange(len(table)), np.diff(table.dependency_offsets))
    own, other = table.jobs[waiting], table.jobs[table.dependencies]
    often = np.append(repeats, 1)  # the last is for tasks without a job
    wrong = np.flatnonzero((own != other) & ((often[own] > 1) | (often[other] > 1)))
    if wrong.size:
        first, second = waiting[wrong[0]], table.dependencies[wrong[0]]
        raise ConfigurationError(
            f"task {table.name_of(first)!r} waits for {table.name_of(second)!r} of another job, "
            "and one of them repeats",
            hint="let jobs with several iterations depend on their own tasks only",
        )


def _run(world: World, end_s: float, *, record_rates: bool) -> tuple[bool, RateRecord | None]:
    if not record_rates:
        return run(world, end_s) == STOPPED, None
    chunks = []
    status = LOG_FULL
    while status == LOG_FULL:
        log = np.zeros(_LOG_ROOM + 2 * len(world.loads.bundles), LOG)
        world.loads.counts[LOGGED] = 0
        status = run(world._replace(log=log), end_s)
        chunks.append(log[: world.loads.counts[LOGGED]])
    found = np.concatenate(chunks)
    of_task = world.tasks["bundle"][:-1].astype(np.int64)
    record = RateRecord(
        found["time_s"].copy(), found["bundle"].copy(), found["level"].copy(), of_task
    )
    return status == STOPPED, record


def _require_all_ended(world: World, table: FlowTable) -> None:
    tasks = world.tasks[:-1]
    left = np.flatnonzero(np.isnan(tasks["finish_s"]) & (tasks["state"] != SKIPPED))
    if left.size:
        shown = ", ".join(repr(table.name_of(task)) for task in left[:_NAMED_IN_ERRORS].tolist())
        raise InfeasibleError(
            f"{left.size} of {len(table)} tasks can never end: {shown}",
            hint="their rate stays at zero, or they wait for slots that never come free",
        )


def _result(
    world: World,
    table: FlowTable,
    jobs: tuple[Hashable, ...],
    *,
    num_links: int,
    stopped_s: float | None,
    records: RateRecord | None,
) -> SimulationResult:
    tasks, counts = world.tasks[:-1], world.loads.counts
    moved = np.where(np.isnan(tasks["sent_s"]) | table.is_compute, 0.0, table.sizes)
    moved[tasks["state"] == SKIPPED] = 0.0
    if stopped_s is not None:
        close_books(world, stopped_s, moved)
    finish_s = tasks["finish_s"].copy()
    ends = finish_s[~np.isnan(finish_s)]
    offsets = world.jobs["first_iteration"]
    return SimulationResult(
        table=table,
        start_s=tasks["start_s"].copy(),
        sent_s=tasks["sent_s"].copy(),
        finish_s=finish_s,
        moved_bytes=moved,
        skipped=tasks["state"] == SKIPPED,
        total_s=float(ends.max(initial=0.0)) if stopped_s is None else stopped_s,
        stopped=stopped_s is not None,
        link_bytes=world.book[:num_links, CARRIED_BYTES].copy(),
        link_busy_s=world.book[:num_links, BUSY_S].copy(),
        over_capacity_s=world.book[:num_links, OVER_S].copy(),
        iteration_finish_s={
            job: world.iteration_finish_s[offsets[number] : offsets[number + 1]]
            for number, job in enumerate(jobs)
        },
        waits=int(counts[WAITS]),
        refusals=int(counts[REFUSALS]),
        events=int(counts[EVENTS]),
        solves=int(counts[SOLVES]),
        filled=int(counts[FILLED]),
        rates=records,
    )
