"""From a table of tasks to the state that the event loop runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.network.simulation._book import BOOK_COLUMNS
from fivefold.network.simulation._bundles import Bundles, make_loads
from fivefold.network.simulation._compile import Requests
from fivefold.network.simulation._heap import empty_queue
from fivefold.network.simulation._rates import bundle_flows
from fivefold.network.simulation._records import (
    JOB,
    LINK_USE,
    LOG,
    PROCESSOR,
    ROW,
    SLOT_NEED,
    SWITCH,
    TASK,
    World,
)
from fivefold.network.simulation._table import FlowTable

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

IntArray = npt.NDArray[np.int64]
_NAMED_IN_ERRORS = 5
_OVER_SINCE_S = 4


def build_world(
    topology: Topology, table: FlowTable, requests: Requests, *, iterations: IntArray
) -> World:
    """Make the state, with nothing released yet.

    Args:
        topology: Links and switches.
        table: The tasks.
        requests: Slots and fallbacks among them.
        iterations: How often each job repeats.

    Returns:
        The state.

    Raises:
        ConfigurationError: Dependencies form a circle.
    """
    adders = requests.adder_rates_bytes_per_s
    capacities = np.concatenate([topology.capacities_bytes_per_s, adders])
    latencies = np.concatenate([topology.latencies_s, np.zeros(len(adders))])
    bundles, classes = bundle_flows(
        table.routes.incidence,
        capacities,
        weights=table.weights,
        caps=table.rate_caps_bytes_per_s,
        priorities=table.priorities,
        groups=table.groups,
        flows=~table.is_compute,
    )
    queues, _ = _grouped(table.processors, int(table.processors.max(initial=-1)) + 1)
    loads = make_loads(bundles, capacities, priorities=classes, queue_room=int(queues[-1]))
    _mark_caps(loads.bundles, bundles, table)
    others, offsets = _others(table, requests, len(iterations))
    tasks = _tasks(table, requests, (bundles, capacities, latencies, offsets))
    _require_no_circle(tasks, others, table)
    first_queue = len(loads.heaps) - int(queues[-1])
    processors = np.zeros(len(queues), PROCESSOR)
    processors["first_place"] = first_queue + queues
    switches = np.zeros(len(requests.free_slots), SWITCH)
    switches["free"] = requests.free_slots
    book = np.zeros((len(capacities), BOOK_COLUMNS))
    book[:, _OVER_SINCE_S] = -1.0
    return World(
        loads=loads,
        tasks=tasks,
        uses=_records(LINK_USE, link=table.routes.links, amount=table.routes.incidence.amounts),
        rows=_records(ROW, entry=bundles.row_entries, usage=bundles.row_usages),
        others=others,
        slots=_records(SLOT_NEED, switch=requests.slots.links, slots=requests.slots.amounts),
        events=empty_queue(len(table) + len(bundles.first_rows)),
        jobs=_jobs(iterations, offsets[2]),
        iteration_finish_s=np.full(int(iterations.sum()), np.nan),
        processors=processors,
        switches=switches,
        book=book,
        log=np.zeros(0, LOG),
    )


def _records(kind: Any, **columns: Any) -> Any:
    size = len(next(iter(columns.values())))
    made = np.zeros(size, kind)
    for name, values in columns.items():
        made[name] = values
    return made


def _grouped(keys: Any, count: int) -> tuple[IntArray, IntArray]:
    """Offsets by key, and positions in order of their keys; keys below zero are left out."""
    order = np.argsort(keys, kind="stable")
    order = order[np.searchsorted(keys[order], 0) :]
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(keys[order], minlength=count), out=offsets[1:])
    return offsets, order


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
    """Dependents, then fallbacks, then tasks of jobs, in one array; and where each begins."""
    waiting = np.repeat(np.arange(len(table)), np.diff(table.dependency_offsets))
    dependents, order = _grouped(table.dependencies, len(table))
    jobs, members = _grouped(table.jobs, num_jobs)
    fallbacks = dependents[-1] + requests.fallbacks.offsets
    parts = [waiting[order], requests.fallbacks.links, members]
    others = np.concatenate(parts).astype(np.int32)
    return others, (dependents, fallbacks, jobs + fallbacks[-1])


def _tasks(table: FlowTable, requests: Requests, made: tuple[Any, ...]) -> Any:
    bundles, capacities, latencies, (dependents, fallbacks, _) = made
    count, routes = len(table), table.routes.incidence
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
    tasks["first_slot"] = requests.slots.offsets
    return tasks


def _jobs(iterations: IntArray, offsets: IntArray) -> Any:
    jobs = np.zeros(len(iterations) + 1, JOB)
    jobs["first_task"] = offsets
    jobs["first_iteration"][1:] = np.cumsum(iterations)
    jobs["iterations"][:-1] = iterations
    jobs["left"][:-1] = np.diff(offsets)
    return jobs


@njit
def _open_tasks(tasks: Any, others: Any) -> Any:
    """Open dependencies of each task after all that can ever start has ended."""
    pending = tasks["needs"][:-1].copy()
    stack = np.empty(pending.size, np.int64)
    size = 0
    for task in range(pending.size):
        if pending[task] == 0:
            stack[size] = task
            size += 1
    while size > 0:
        size -= 1
        task = stack[size]
        for which in range(2):
            first, end = tasks[task].first_dependent, tasks[task + 1].first_dependent
            if which == 1:
                first, end = tasks[task].first_fallback, tasks[task + 1].first_fallback
            for at in range(first, end):
                pending[others[at]] -= 1
                if pending[others[at]] == 0:
                    stack[size] = others[at]
                    size += 1
    return pending


def _require_no_circle(tasks: Any, others: Any, table: FlowTable) -> None:
    stuck = _open_tasks(tasks, others) > 0
    if not stuck.any():
        return
    # Every stuck task waits for a stuck one, so going back comes round. A fallback that only
    # waits for its request has none: begin where there is one.
    waiting = np.repeat(np.arange(len(table)), np.diff(table.dependency_offsets))
    held = stuck[waiting] & stuck[table.dependencies]
    before = dict(zip(waiting[held].tolist(), table.dependencies[held].tolist(), strict=True))
    task = next(iter(before))
    path: dict[int, int] = {}
    while task in before and task not in path:
        path[task] = len(path)
        task = before[task]
    circle = [table.name_of(found) for found in list(path)[path.get(task, 0) :]]
    shown = ", ".join(repr(name) for name in circle[:_NAMED_IN_ERRORS])
    more = f" and {len(circle) - _NAMED_IN_ERRORS} more" if len(circle) > _NAMED_IN_ERRORS else ""
    raise ConfigurationError(
        f"tasks wait for one another in a circle: {shown}{more}",
        hint="take one of these dependencies away",
    )
