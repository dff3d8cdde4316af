"""The public simulator: checks, builds the state, runs the loop, reads the result."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError, InfeasibleError, require_number, require_whole
from fivefold.network.simulation._bundles import Bundles, form_bundles, grouped, make_loads
from fivefold.network.simulation._compile import Requests, compile_tasks, requests_of
from fivefold.network.simulation._events import (
    BOOK_COLUMNS,
    BUSY_S,
    CARRIED_BYTES,
    LOG_FULL,
    OVER_S,
    OVER_SINCE_S,
    SKIPPED,
    STOPPED,
    close_books,
    release_roots,
    run,
)
from fivefold.network.simulation._state import (
    EVENTS,
    JOB,
    LINK_USE,
    LOG,
    LOGGED,
    PROCESSOR,
    REFUSALS,
    ROUNDING,
    ROW,
    SHARE,
    SLOT_NEED,
    SOLVES,
    SWITCH,
    TASK,
    WAITS,
    World,
    empty_queue,
)
from fivefold.network.simulation._tasks import FlowTable, Task
from fivefold.network.simulation.rates import check_links

FloatArray = npt.NDArray[np.float64]


class Span(NamedTuple):
    """One task on the timeline."""

    name: Hashable
    kind: str
    job: int
    start_s: float
    sent_s: float
    finish_s: float


class RateRecord(NamedTuple):
    """Every change of a bundle's level, in order of time."""

    changes: Any  # LOG
    of_task: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulationResult:
    """Times in seconds from the start; NaN is what did not happen.

    Attributes:
        table: The tasks.
        start_s: When each task began; float64 [tasks].
        sent_s: When its last byte had been sent, or its work was done; float64 [tasks].
        finish_s: When its last byte had arrived; float64 [tasks].
        moved_bytes: What each flow has sent; float64 [tasks].
        skipped: Whether a task was a fallback that was not needed; bool [tasks].
        total_s: End of the last task, or the time at which the simulation was stopped.
        stopped: Whether tasks were left when it ended.
        link_bytes: What each link carried; float64 [links].
        link_busy_s: How long at least one flow was under way on it; float64 [links].
        over_capacity_s: How long the flows on it would, each alone, have asked for more than it
            has: what queues and congestion marks would show; float64 [links].
        iteration_finish_s: End of every iteration, by job.
        waits: In-network aggregations that had to wait for slots.
        refusals: In-network aggregations whose fallback ran.
        events: Number of events that were processed; iterations that repeat exactly are counted
            without being run, and have none.
        solves: Number of times that rates were solved.
        rates: Changes of rate, where they were recorded.
    """

    table: FlowTable
    start_s: FloatArray
    sent_s: FloatArray
    finish_s: FloatArray
    moved_bytes: FloatArray
    skipped: npt.NDArray[np.bool_]
    total_s: float
    stopped: bool
    link_bytes: FloatArray
    link_busy_s: FloatArray
    over_capacity_s: FloatArray
    iteration_finish_s: Mapping[Hashable, FloatArray] = field(default_factory=dict)
    waits: int = 0
    refusals: int = 0
    events: int = 0
    solves: int = 0
    rates: RateRecord | None = None

    @cached_property
    def _positions(self) -> dict[Hashable, int]:
        return {self.table.name_of(task): task for task in range(len(self.table))}

    def position_of(self, name: Hashable) -> int:
        """Return the position of a task by its id.

        Raises:
            ConfigurationError: There is no such task.
        """
        if name not in self._positions:
            raise ConfigurationError(f"there is no task {name!r}", hint="use the id it was given")
        return self._positions[name]

    def start_of(self, name: Hashable) -> float:
        """Return when a task began."""
        return float(self.start_s[self.position_of(name)])

    def finish_of(self, name: Hashable) -> float:
        """Return when a task ended."""
        return float(self.finish_s[self.position_of(name)])

    def job_finish_s(self, job: Hashable) -> float:
        """Return when the last iteration of a job ended.

        Raises:
            ConfigurationError: There is no such job.
        """
        if job not in self.iteration_finish_s:
            raise ConfigurationError(
                f"there is no job {job!r}", hint=f"jobs are {list(self.iteration_finish_s)}"
            )
        return float(self.iteration_finish_s[job][-1])

    def timeline(self) -> Iterator[Span]:
        """Yield every task that began, in order of its start."""
        for task in np.argsort(self.start_s, kind="stable").tolist():
            if np.isnan(self.start_s[task]):
                return
            yield Span(
                name=self.table.name_of(task),
                kind="compute" if self.table.is_compute[task] else "flow",
                job=int(self.table.jobs[task]),
                start_s=float(self.start_s[task]),
                sent_s=float(self.sent_s[task]),
                finish_s=float(self.finish_s[task]),
            )

    def rates_of(self, name: Hashable) -> tuple[FloatArray, FloatArray]:
        """Return a flow's rate over time.

        Returns:
            Times in seconds, and the rate in bytes per second from each time to the next.

        Raises:
            ConfigurationError: Rates were not recorded.
        """
        return self._rates_at(self.position_of(name))

    def link_rates(self, link: int) -> tuple[FloatArray, FloatArray]:
        """Return the load of a link over time, as `load_of` gives that of its flows."""
        routes = self.table.routes
        owners = np.searchsorted(routes.offsets, np.flatnonzero(routes.links == link), "right") - 1
        return self.load_of(owners.tolist())

    def load_of(self, tasks: Iterable[int]) -> tuple[FloatArray, FloatArray]:
        """Return the sum of some flows' rates over time.

        Returns:
            Times in seconds, and bytes per second from each time to the next.

        Raises:
            ConfigurationError: Rates were not recorded.
        """
        times, steps = [np.zeros(0)], [np.zeros(0)]
        for task in tasks:
            at_s, rate = self._rates_at(task)
            times.append(at_s)
            steps.append(np.diff(rate, prepend=0.0))
        moments, places = np.unique(np.concatenate(times), return_inverse=True)
        load = np.cumsum(np.bincount(places, np.concatenate(steps), len(moments)))
        return moments, np.maximum(load, 0.0)

    def _rates_at(self, task: int) -> tuple[FloatArray, FloatArray]:
        record = self.rates
        if record is None:
            msg = "rates were not recorded"
            raise ConfigurationError(msg, hint="pass record_rates=True")
        start, end = self.start_s[task], self.sent_s[task]
        if np.isnan(start) or record.of_task[task] < 0:
            return np.zeros(0), np.zeros(0)
        end = self.total_s if np.isnan(end) else end
        own = record.changes[record.changes["bundle"] == record.of_task[task]]
        times, levels = own["time_s"], own["level"]
        # From the last change up to the start, to the last before the end.
        first = max(0, int(np.searchsorted(times, start, side="right")) - 1)
        last = int(np.searchsorted(times, end, side="left"))
        moments = np.maximum(times[first:last], start)
        rates = levels[first:last] * self.table.weights[task]
        return np.append(moments, end), np.append(rates, 0.0)


if TYPE_CHECKING:
    from fivefold.network.topology import Topology

IntArray = npt.NDArray[np.int64]
_NAMED_IN_ERRORS = 5
_LOG_ROOM = 65_536


def simulate(
    topology: Topology,
    flows: FlowTable | Sequence[Task],
    *,
    until_s: float | None = None,
    iterations: int | Mapping[Hashable, int] = 1,
    record_rates: bool = False,
    tolerance: float = 0.0,
) -> SimulationResult:
    """Run flows, computations and in-network aggregations, and say when each ends.

    At every moment rates are max-min fair within a priority class, and a class gets only what
    higher ones leave. A flow ends when its last byte has been sent, plus the sum of its route's
    latencies; a task that depends on it starts then.

    Args:
        topology: Links and switches.
        flows: Tasks, by name or as arrays.
        until_s: When to stop; None runs to the end.
        iterations: How often each job repeats its tasks, by job or for all. The next iteration
            starts when the last task of this one has ended; release times only hold back the
            first. Times of tasks are then those of the last iteration. A job that shares no link,
            processor or switch with another unfinished one repeats itself exactly: its second
            iteration stands for all that follow (not with ``record_rates`` or ``tolerance``).
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
    endless = until_s is None or (isinstance(until_s, float) and until_s == np.inf)
    end_s = np.inf if endless else require_number("until_s", until_s)
    if require_number("tolerance", tolerance) >= 0.5:
        raise ConfigurationError(
            f"tolerance must be a share below 0.5; got {tolerance!r}",
            hint="0 is exact; 1e-3 lets a rate stay a thousandth away",
        )
    if not isinstance(flows, FlowTable):
        table, requests, jobs = compile_tasks(topology, flows)
    else:
        check_links(flows.routes, topology.num_links)
        table, requests = flows, requests_of(topology, len(flows))
        jobs = tuple(range(int(flows.jobs.max(initial=-1)) + 1))
    repeats = _iterations(iterations, jobs)
    _check_jobs(table, repeats)
    _require_no_circle(table)
    world = _build_world(topology, table, requests, iterations=repeats)
    world = world._replace(loads=world.loads._replace(tolerance=max(float(tolerance), ROUNDING)))
    release_roots(world)
    if tolerance == 0.0 and not record_rates:
        world.horizon_s[0] = end_s
    stopped, records = _run(world, end_s, record_rates=record_rates)
    if not stopped:
        _require_all_ended(world, table)
    stopped_s = end_s if stopped else None
    return _result(
        world, table, jobs, num_links=topology.num_links, stopped_s=stopped_s, records=records
    )


def _iterations(iterations: int | Mapping[Hashable, int], jobs: tuple[Hashable, ...]) -> IntArray:
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
    return np.array([require_whole("iterations", count) for count in counts], np.int64)


def _check_jobs(table: FlowTable, repeats: IntArray) -> None:
    """Refuse to wait for a repeated task of another job: it has no single end."""
    waiting = table.waiting
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
    record = RateRecord(np.concatenate(chunks), world.tasks["bundle"][:-1].copy())
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
        rates=records,
    )


def _build_world(
    topology: Topology, table: FlowTable, requests: Requests, *, iterations: IntArray
) -> World:
    """Make the state, with nothing released yet."""
    adders = requests.adder_rates_bytes_per_s
    capacities = np.concatenate([topology.capacities_bytes_per_s, adders])
    latencies = np.concatenate([topology.latencies_s, np.zeros(len(adders))])
    bundles = form_bundles(
        table.routes,
        capacities,
        weights=table.weights,
        caps=table.rate_caps_bytes_per_s,
        priorities=table.priorities,
        groups=table.groups,
        flows=~table.is_compute,
    )
    queues, _ = grouped(table.processors, int(table.processors.max(initial=-1)) + 1)
    loads = make_loads(bundles, capacities, queue_room=int(queues[-1]))
    _mark_caps(loads.bundles, bundles, table)
    others, offsets = _others(table, requests, len(iterations))
    tasks = _tasks(table, requests, (bundles, capacities, latencies, offsets))
    first_queue = len(loads.heaps) - int(queues[-1])
    processors = np.zeros(len(queues), PROCESSOR)
    processors["first_place"] = first_queue + queues
    switches = np.zeros(len(requests.free_slots), SWITCH)
    switches["free"] = requests.free_slots
    book = np.zeros((len(capacities), BOOK_COLUMNS))
    book[:, OVER_SINCE_S] = -1.0
    shares, first_uses, sharers = _shares(table, requests, len(iterations), len(capacities))
    return World(
        loads=loads,
        tasks=tasks,
        uses=_records(LINK_USE, link=table.routes.links, amount=table.routes.amounts),
        rows=_records(ROW, entry=bundles.row_entries, usage=bundles.row_usages),
        others=others,
        slots=_records(SLOT_NEED, switch=requests.slot_switches, slots=requests.slots),
        events=empty_queue(len(table) + len(bundles.priorities)),
        jobs=_jobs(iterations, offsets[2], first_uses),
        iteration_finish_s=np.full(int(iterations.sum()), np.nan),
        processors=processors,
        switches=switches,
        book=book,
        log=np.zeros(0, LOG),
        shares=shares,
        sharers=sharers,
        horizon_s=np.full(1, -np.inf),
    )


def _shares(
    table: FlowTable, requests: Requests, num_jobs: int, num_links: int
) -> tuple[Any, IntArray, IntArray]:
    """Return what each job uses, where each job's part begins, and how many jobs use a thing."""
    count, processors = len(table), int(table.processors.max(initial=-1)) + 1
    tasks = np.arange(count)
    users = np.concatenate([
        np.repeat(tasks, np.diff(table.routes.offsets)),
        np.flatnonzero(table.processors >= 0),
        np.repeat(tasks, np.diff(requests.slot_offsets)),
    ])  # fmt: skip
    things = np.concatenate([
        table.routes.links.astype(np.int64),
        num_links + table.processors[table.processors >= 0],
        num_links + processors + requests.slot_switches,
    ])  # fmt: skip
    total = num_links + processors + len(requests.free_slots)
    pairs = np.unique((table.jobs[users] + 1) * total + things)
    jobs, used = np.divmod(pairs, total)
    sharers = np.bincount(used, minlength=total)
    # Tasks of no job, at the front, are never finished.
    first = np.searchsorted(jobs, np.arange(1, num_jobs + 2))
    shares = np.zeros(first[-1], SHARE)
    shares["resource"] = used
    return shares, first, sharers


def _records(kind: Any, **columns: Any) -> Any:
    size = len(next(iter(columns.values())))
    made = np.zeros(size, kind)
    for name, values in columns.items():
        made[name] = values
    return made


def _mark_caps(records: Any, bundles: Bundles, table: FlowTable) -> None:
    levels = table.rate_caps_bytes_per_s / table.weights
    lowest, highest = np.full(len(records), np.inf), np.zeros(len(records))
    members = bundles.of_row >= 0
    np.minimum.at(lowest, bundles.of_row[members], levels[members])
    np.maximum.at(highest, bundles.of_row[members], levels[members])
    records["caps_differ"] = lowest < highest


def _others(
    table: FlowTable, requests: Requests, num_jobs: int
) -> tuple[npt.NDArray[np.int32], tuple[IntArray, IntArray, IntArray]]:
    """Return dependents, fallbacks, then tasks of jobs, in one array; and where each begins."""
    waiting = table.waiting
    dependents, order = grouped(table.dependencies, len(table))
    jobs, members = grouped(table.jobs, num_jobs)
    fallbacks = dependents[-1] + requests.fallback_offsets
    parts = [waiting[order], requests.fallbacks, members]
    others = np.concatenate(parts).astype(np.int32)
    return others, (dependents, fallbacks, jobs + fallbacks[-1])


def _tasks(table: FlowTable, requests: Requests, made: tuple[Any, ...]) -> Any:
    bundles, capacities, latencies, (dependents, fallbacks, _) = made
    count, routes = len(table), table.routes
    flows = np.repeat(np.arange(count), np.diff(routes.offsets))
    summed = np.bincount(flows, latencies[routes.links], count)
    own = np.where(np.isnan(table.latencies_s), summed, table.latencies_s)
    alone = table.rate_caps_bytes_per_s.copy()
    np.minimum.at(alone, flows, capacities[routes.links] / routes.amounts)
    tasks = np.zeros(count + 1, TASK)
    one = tasks[:count]
    one["size"], one["weight"] = table.sizes, table.weights
    one["latency_s"] = np.where(table.is_compute, 0.0, own)
    one["cap_level"], one["alone"] = table.rate_caps_bytes_per_s / table.weights, alone
    one["release_s"], one["is_compute"] = table.releases_s, table.is_compute
    for name in ("start_s", "sent_s", "finish_s"):
        one[name] = np.nan
    one["needs"] = np.diff(table.dependency_offsets) + (requests.fallback_of >= 0)
    one["pending"] = one["needs"]
    one["bundle"], one["job"] = bundles.of_row, table.jobs
    one["processor"], one["fallback_of"] = table.processors, requests.fallback_of
    one["priority"] = np.unique(table.priorities, return_inverse=True)[1]
    tasks["first_use"], tasks["first_row"] = routes.offsets, bundles.row_offsets
    tasks["first_dependent"], tasks["first_fallback"] = dependents, fallbacks
    tasks["first_slot"] = requests.slot_offsets
    return tasks


def _jobs(iterations: IntArray, offsets: IntArray, first_uses: IntArray) -> Any:
    jobs = np.zeros(len(iterations) + 1, JOB)
    jobs["first_task"], jobs["first_use"], jobs["isolated_since_s"] = offsets, first_uses, -1.0
    jobs["first_iteration"][1:] = np.cumsum(iterations)
    jobs["iterations"][:-1] = iterations
    jobs["left"][:-1] = np.diff(offsets)
    return jobs


@njit
def _open_tasks(offsets: Any, dependents: Any, pending: Any) -> Any:
    """Return the open dependencies of each task after all that can ever start has ended."""
    stack = np.empty(pending.size, np.int64)
    size = 0
    for task in range(pending.size):
        if pending[task] == 0:
            stack[size] = task
            size += 1
    while size > 0:
        size -= 1
        task = stack[size]
        for at in range(offsets[task], offsets[task + 1]):
            pending[dependents[at]] -= 1
            if pending[dependents[at]] == 0:
                stack[size] = dependents[at]
                size += 1
    return pending


def _require_no_circle(table: FlowTable) -> None:
    waiting, needed = table.waiting, table.dependencies
    offsets, order = grouped(needed, len(table))
    stuck = _open_tasks(offsets, waiting[order], np.diff(table.dependency_offsets)) > 0
    if not stuck.any():
        return
    # Every stuck task waits for a stuck one, so going back comes round.
    held = stuck[waiting] & stuck[needed]
    before = dict(zip(waiting[held].tolist(), needed[held].tolist(), strict=True))
    task = next(iter(before))
    path: dict[int, int] = {}
    while task not in path:
        path[task] = len(path)
        task = before[task]
    circle = [table.name_of(found) for found in list(path)[path[task] :]]
    shown = ", ".join(repr(name) for name in circle[:_NAMED_IN_ERRORS])
    more = f" and {len(circle) - _NAMED_IN_ERRORS} more" if len(circle) > _NAMED_IN_ERRORS else ""
    raise ConfigurationError(
        f"tasks wait for one another in a circle: {shown}{more}",
        hint="take one of these dependencies away",
    )
