"""From tasks by name to arrays: ids become positions, every reference is checked, trees planned."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.simulation._tasks import (
    AggregationRequest,
    Compute,
    CoupledFlows,
    Flow,
    FlowTable,
    Task,
)
from fivefold.network.topology.arrays import LongArray, offsets_of

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


class Tree(NamedTuple):
    """A request in terms of links and switches."""

    # every link of the tree, up and (for an all-reduce) down, then the adders as links behind
    # the real ones
    route: tuple[int, ...]
    latency_s: float  # from the last byte sent to the last received
    # what the slots allow: pool over round trip; ``inf`` without latency
    pool_rate_bytes_per_s: float
    switches: tuple[int, ...]  # abilities of the switches that aggregate
    slots: int  # of each of them


def plan_tree(topology: Topology, request: AggregationRequest) -> Tree:
    """Find a request's links, latency, rate and slots."""
    up = {edge[0]: _link(topology, request, edge) for edge in request.tree.items()}
    down = {edge[0]: _link(topology, request, edge[::-1]) for edge in request.tree.items()}
    links = [*up.values(), *(down.values() if request.broadcast else ())]
    numbers = {ability.node: number for number, ability in enumerate(topology.switches)}
    impossible = _why_impossible(topology, request, numbers)
    if impossible is not None:
        if request.fallback is None:
            raise InfeasibleError(
                f"request {request.request_id!r} can never run: {impossible}",
                hint="give it a fallback, fewer slots or another tree",
            )
        # One slot of a switch that has none: the fallback always runs.
        return Tree(tuple(links), 0.0, math.inf, (len(topology.switches),), 1)
    switches = tuple(numbers[node] for node in request.aggregators)
    pools = [
        pool for number in switches if (pool := topology.switches[number].aggregation) is not None
    ]
    rise_s, fall_s = (
        max(_path_s(topology, request, way, leaf) for leaf in request.leaves) for way in (up, down)
    )
    pool_bytes = request.slots * min(pool.slot_bytes for pool in pools)
    return Tree(
        # Adders at line rate limit nothing.
        route=(
            *links,
            *(
                topology.num_links + number
                for number, pool in zip(switches, pools, strict=True)
                if pool.rate_bytes_per_s is not None
            ),
        ),
        latency_s=rise_s + fall_s if request.broadcast else rise_s,
        pool_rate_bytes_per_s=pool_bytes / (rise_s + fall_s) if rise_s + fall_s else math.inf,
        switches=switches,
        slots=request.slots,
    )


def _link(topology: Topology, request: AggregationRequest, ends: tuple[str, str]) -> int:
    source, target = topology.index(ends[0]), topology.index(ends[1])
    leaving = topology.out_links(source)
    found = leaving[topology.link_targets[leaving] == target]
    if not found.size:
        raise ConfigurationError(
            f"request {request.request_id!r}: there is no link {ends[0]!r} -> {ends[1]!r}",
            hint="a tree's edges are links of the topology, both ways",
        )
    return int(found[np.argmax(topology.capacities_bytes_per_s[found])])


def _path_s(
    topology: Topology, request: AggregationRequest, links: Mapping[str, int], node: str
) -> float:
    """Return the latency between a node and the root."""
    total_s = 0.0
    while node in request.tree:
        total_s += float(topology.latencies_s[links[node]])
        node = request.tree[node]
    return total_s


def _why_impossible(
    topology: Topology, request: AggregationRequest, numbers: dict[str, int]
) -> str | None:
    for node in request.aggregators:
        pool = topology.switches[numbers[node]].aggregation if node in numbers else None
        if pool is None:
            return f"{node!r} does not aggregate"
        if request.slots > pool.slots:
            return f"{node!r} has {pool.slots} slots, not {request.slots}"
        if request.dtype is not None and pool.dtypes and request.dtype not in pool.dtypes:
            return f"{node!r} cannot add {request.dtype}"
    return None


@dataclass(frozen=True, eq=False)
class Requests:
    """Slots and fallbacks of in-network aggregations, beside a table."""

    slot_offsets: LongArray  # slice of what follows of each task
    slot_switches: LongArray
    slots: LongArray
    fallback_offsets: LongArray
    fallbacks: LongArray
    fallback_of: LongArray
    free_slots: LongArray
    adder_rates_bytes_per_s: npt.NDArray[np.float64]


def requests_of(
    topology: Topology,
    count: int,
    trees: Mapping[int, Tree] | None = None,
    fallbacks: Mapping[int, Sequence[int]] | None = None,
) -> Requests:
    """Return what tasks ask of switches: trees and fallbacks by position, in ascending order."""
    trees, fallbacks = trees or {}, fallbacks or {}
    slot_counts, fallback_counts = np.zeros(count, np.int64), np.zeros(count, np.int64)
    fallback_of = np.full(count, -1, np.int64)
    for position, tree in trees.items():
        slot_counts[position] = len(tree.switches)
    for position, chosen in fallbacks.items():
        fallback_counts[position] = len(chosen)
        fallback_of[list(chosen)] = position
    pools = [ability.aggregation for ability in topology.switches]
    return Requests(
        slot_offsets=offsets_of(slot_counts),
        slot_switches=np.array([one for tree in trees.values() for one in tree.switches], np.int64),
        slots=np.array([tree.slots for tree in trees.values() for _ in tree.switches], np.int64),
        fallback_offsets=offsets_of(fallback_counts),
        fallbacks=np.array([one for chosen in fallbacks.values() for one in chosen], np.int64),
        fallback_of=fallback_of,
        # The last is the switch of requests that can never run: it has none.
        free_slots=np.array([*(pool.slots if pool else 0 for pool in pools), 0], np.int64),
        adder_rates_bytes_per_s=np.array(
            [pool.rate_bytes_per_s or np.inf if pool else np.inf for pool in pools], np.float64
        ),
    )


def compile_tasks(
    topology: Topology, tasks: Iterable[Task]
) -> tuple[FlowTable, Requests, tuple[Hashable, ...]]:
    """Check tasks against a topology and turn them into arrays."""
    listed = list(tasks)
    for task in listed:
        if not isinstance(task, Task):
            raise ConfigurationError(
                "a task must be a Flow, CoupledFlows, a Compute or an AggregationRequest; got "
                f"{task!r}"
            )
    requests = [task for task in listed if isinstance(task, AggregationRequest)]
    fallbacks = {
        request.request_id: [replace(flow, job=request.job) for flow in request.fallback or ()]
        for request in requests
    }
    every: list[Any] = [*listed, *(flow for flows in fallbacks.values() for flow in flows)]
    positions: dict[Hashable, int] = {}
    for position, task in enumerate(every):
        if positions.setdefault(_id_of(task), position) != position:
            raise ConfigurationError(
                f"two tasks have the id {_id_of(task)!r}", hint="give each task its own id"
            )
    _check_dependencies(every, fallbacks, positions)
    trees = {request.request_id: plan_tree(topology, request) for request in requests}
    jobs = _numbers(task.job for task in every)
    table = _table(topology, every, positions, trees, jobs)
    found = requests_of(
        topology,
        len(every),
        {positions[name]: tree for name, tree in trees.items()},
        {
            positions[name]: [positions[flow.flow_id] for flow in flows]
            for name, flows in fallbacks.items()
        },
    )
    return table, found, tuple(jobs)


def _id_of(task: Task) -> Hashable:
    if isinstance(task, Flow):
        return task.flow_id
    if isinstance(task, CoupledFlows):
        return task.flows_id
    return task.task_id if isinstance(task, Compute) else task.request_id


def _check_dependencies(
    every: Iterable[Any],
    fallbacks: Mapping[Hashable, Sequence[Flow]],
    positions: Mapping[Hashable, int],
) -> None:
    owner = {flow.flow_id: name for name, flows in fallbacks.items() for flow in flows}
    for task in every:
        mine = owner.get(_id_of(task))
        for needed in task.depends_on:
            if needed not in positions:
                raise ConfigurationError(
                    f"task {_id_of(task)!r} waits for {needed!r}, which is no task",
                    hint="depends_on takes ids of tasks of the same simulation",
                )
            if owner.get(needed) != mine:
                raise ConfigurationError(
                    f"task {_id_of(task)!r} waits for {needed!r} across a fallback",
                    hint="wait for the request itself; fallback flows wait for one another only",
                )


def _numbers(keys: Iterable[Hashable | None]) -> dict[Hashable, int]:
    found: dict[Hashable, int] = {}
    for key in keys:
        if key is not None:
            found.setdefault(key, len(found))
    return found


def _table(
    topology: Topology,
    every: Sequence[Any],
    positions: Mapping[Hashable, int],
    trees: Mapping[Hashable, Tree],
    jobs: Mapping[Hashable, int],
) -> FlowTable:
    groups = _numbers(getattr(task, "group", None) for task in every)
    processors = _numbers(getattr(task, "processor", None) for task in every)
    checked: dict[Any, Sequence[int]] = {}  # a job's collectives go the same ways again and again
    rows = [_row(topology, task, trees, checked) for task in every]
    sizes, routes, latencies_s, caps = zip(*rows, strict=True) if rows else ((), (), (), ())
    return FlowTable.build(
        sizes=sizes,
        routes=list(routes),
        names=tuple(positions),
        dependencies=[[positions[name] for name in task.depends_on] for task in every],
        is_compute=[isinstance(task, Compute) for task in every],
        latencies_s=latencies_s,
        weights=[getattr(task, "weight", 1.0) for task in every],
        rate_caps_bytes_per_s=caps,
        priorities=[task.priority for task in every],
        groups=[groups.get(getattr(task, "group", None), -1) for task in every],
        jobs=[jobs.get(task.job, -1) for task in every],
        releases_s=[task.release_s for task in every],
        processors=[processors.get(getattr(task, "processor", None), -1) for task in every],
    )


def _row(
    topology: Topology, task: Any, trees: Mapping[Hashable, Tree], checked: dict[Any, Sequence[int]]
) -> tuple[float, Sequence[int], float, float]:
    """Return a task's size, links, latency (NaN: that of its route) and highest rate."""
    if isinstance(task, Compute):
        return task.duration_s, (), 0.0, math.inf
    if isinstance(task, AggregationRequest):
        tree = trees[task.request_id]
        return task.size_bytes, tree.route, tree.latency_s, tree.pool_rate_bytes_per_s
    if isinstance(task, CoupledFlows):
        _check_links(topology, task)
        return task.size_bytes, task.links, task.latency_s, math.inf
    cap = math.inf if task.rate_cap_bytes_per_s is None else task.rate_cap_bytes_per_s
    return task.size_bytes, _checked_route(topology, task, checked), math.nan, cap


def _checked_route(
    topology: Topology, task: Flow, checked: dict[Any, Sequence[int]]
) -> Sequence[int]:
    route = tuple(task.route)
    key = task.source, task.target, route
    if key in checked and bool not in map(type, route):  # True is a key like 1
        return checked[key]
    here, target = topology.index(task.source), topology.index(task.target)
    for link in route:
        _check_link(topology, task.flow_id, link)
        if topology.link_sources[link] != here:
            raise ConfigurationError(
                f"the route of flow {task.flow_id!r} is at {topology.nodes[here].name!r}, but its "
                f"next link {link} starts at {topology.links[link].source!r}",
                hint="list the links in order from source to target",
            )
        here = int(topology.link_targets[link])
    if here != target:
        raise ConfigurationError(
            f"the route of flow {task.flow_id!r} ends at {topology.nodes[here].name!r}, not at "
            f"{task.target!r}",
            hint="topology.shortest_route(rank_a, rank_b) gives a whole route",
        )
    checked[key] = route
    return route


def _check_links(topology: Topology, task: CoupledFlows) -> None:
    """Check all links at once; one by one where some may be wrong, to name the first."""
    kinds = set(map(type, task.links))
    whole = all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)
    if whole and kinds and min(task.links) >= 0 and max(task.links) < topology.num_links:
        return
    for link in task.links:
        _check_link(topology, task.flows_id, link)


def _check_link(topology: Topology, flow: Hashable, link: object) -> None:
    whole = isinstance(link, int | np.integer) and not isinstance(link, bool)
    if not whole or not 0 <= link < topology.num_links:  # type: ignore[operator]
        raise ConfigurationError(
            f"flow {flow!r} uses link {link!r}, but {topology.name!r} has {topology.num_links} "
            "links",
            hint=f"links are numbered from 0 to {topology.num_links - 1}",
        )
