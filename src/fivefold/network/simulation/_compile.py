"""From tasks by name to arrays: ids become positions, every reference is checked, trees planned."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.simulation._bundles import Incidence
from fivefold.network.simulation._tasks import (
    AggregationRequest,
    Compute,
    CoupledFlows,
    Flow,
    FlowTable,
    Task,
)

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


@dataclass(frozen=True)
class Tree:
    """A request in terms of links and switches."""

    # every link of the tree, up and (for an all-reduce) down, then the adders as links behind
    # the real ones
    route: tuple[int, ...]
    latency_s: float  # from the last byte sent to the last received
    # what the slots allow: pool over round trip; ``inf`` without latency
    pool_rate_bytes_per_s: float
    slots: tuple[tuple[int, float], ...]  # (switch ability, slots) of each aggregating switch


def plan_tree(topology: Topology, request: AggregationRequest) -> Tree:
    """Find a request's links, latency, rate and slots."""
    edges = request.tree.items()
    up = {child: _link(topology, request, (child, parent)) for child, parent in edges}
    down = {child: _link(topology, request, (parent, child)) for child, parent in edges}
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
        return Tree(tuple(links), 0.0, np.inf, ((len(topology.switches), 1.0),))
    # Adders at line rate limit nothing.
    adders = [
        topology.num_links + numbers[node] for node in request.aggregators if _adds(topology, node)
    ]
    rise = max(_path_s(topology, request, (up, leaf)) for leaf in request.leaves)
    fall = max(_path_s(topology, request, (down, leaf)) for leaf in request.leaves)
    return Tree(
        route=(*links, *adders),
        latency_s=rise + fall if request.broadcast else rise,
        pool_rate_bytes_per_s=_pool_rate(topology, request, rise + fall),
        slots=tuple((numbers[node], float(request.slots)) for node in request.aggregators),
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


def _adds(topology: Topology, node: str) -> bool:
    pool = topology.ability_of(node).aggregation
    return pool is not None and pool.rate_bytes_per_s is not None


def _path_s(
    topology: Topology, request: AggregationRequest, path: tuple[dict[str, int], str]
) -> float:
    links, node = path
    total = 0.0
    while node in request.tree:
        total += float(topology.latencies_s[links[node]])
        node = request.tree[node]
    return total


def _pool_rate(topology: Topology, request: AggregationRequest, round_trip_s: float) -> float:
    if round_trip_s == 0.0:
        return float("inf")
    sizes = [
        pool.slot_bytes
        for node in request.aggregators
        if (pool := topology.ability_of(node).aggregation) is not None
    ]
    return request.slots * min(sizes) / round_trip_s


@dataclass(frozen=True, eq=False)
class Requests:
    """Slots and fallbacks of in-network aggregations, beside a table."""

    slots: Incidence
    fallbacks: Incidence
    fallback_of: npt.NDArray[np.int64]
    free_slots: npt.NDArray[np.int64]
    adder_rates_bytes_per_s: npt.NDArray[np.float64]

    @classmethod
    def none(cls, tasks: int) -> Requests:
        """Return the slots and fallbacks of tasks of which none asks for a sum."""
        empty = _incidence([], tasks)
        nothing = np.zeros(0, np.int64)
        return cls(empty, empty, np.full(tasks, -1, np.int64), nothing, np.zeros(0))


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
    stand_ins = [
        replace(flow, job=request.job) for request in requests for flow in request.fallback or ()
    ]
    every: list[Any] = [*listed, *stand_ins]
    names = tuple(_id_of(task) for task in every)
    positions = _positions(names)
    _check_fallbacks(listed, requests, positions)
    trees = {request.request_id: plan_tree(topology, request) for request in requests}
    jobs = _numbers(task.job for task in every)
    table = _table(topology, every, (names, positions, trees, jobs))
    return table, _requests(topology, every, trees, positions), tuple(jobs)


def _id_of(task: Task) -> Hashable:
    if isinstance(task, Flow):
        return task.flow_id
    if isinstance(task, CoupledFlows):
        return task.flows_id
    return task.task_id if isinstance(task, Compute) else task.request_id


def _positions(names: tuple[Hashable, ...]) -> dict[Hashable, int]:
    positions: dict[Hashable, int] = {}
    for position, name in enumerate(names):
        if positions.setdefault(name, position) != position:
            raise ConfigurationError(
                f"two tasks have the id {name!r}", hint="give each task its own id"
            )
    return positions


def _check_fallbacks(
    listed: list[Any], requests: list[AggregationRequest], positions: dict[Hashable, int]
) -> None:
    owner = {
        flow.flow_id: request.request_id for request in requests for flow in request.fallback or ()
    }
    for task in [*listed, *(flow for request in requests for flow in request.fallback or ())]:
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


def _table(topology: Topology, every: list[Any], known: tuple[Any, ...]) -> FlowTable:
    names, positions, trees, jobs = known
    groups = _numbers(getattr(task, "group", None) for task in every)
    processors = _numbers(getattr(task, "processor", None) for task in every)
    checked: dict[Any, Sequence[int]] = {}  # a job's collectives go the same ways again and again
    routes = [_route_of(topology, task, trees, checked) for task in every]

    def column(read: Callable[[Any], Any]) -> list[Any]:
        return [read(task) for task in every]

    return FlowTable.build(
        sizes=column(_size_of),
        routes=routes,
        names=names,
        dependencies=column(lambda task: [positions[name] for name in task.depends_on]),
        is_compute=column(lambda task: isinstance(task, Compute)),
        latencies_s=column(lambda task: _latency_of(task, trees)),
        weights=column(lambda task: getattr(task, "weight", 1.0)),
        rate_caps_bytes_per_s=column(lambda task: _cap_of(task, trees)),
        priorities=column(lambda task: task.priority),
        groups=column(lambda task: groups.get(getattr(task, "group", None), -1)),
        jobs=column(lambda task: jobs.get(task.job, -1)),
        releases_s=column(lambda task: task.release_s),
        processors=column(lambda task: processors.get(getattr(task, "processor", None), -1)),
    )


def _size_of(task: Any) -> float:
    return float(task.duration_s if isinstance(task, Compute) else task.size_bytes)


def _latency_of(task: Any, trees: Mapping[Hashable, Tree]) -> float:
    if isinstance(task, AggregationRequest):
        return trees[task.request_id].latency_s
    if isinstance(task, CoupledFlows):
        return float(task.latency_s)
    return 0.0 if isinstance(task, Compute) else float("nan")


def _cap_of(task: Any, trees: Mapping[Hashable, Tree]) -> float:
    if isinstance(task, AggregationRequest):
        return trees[task.request_id].pool_rate_bytes_per_s
    cap = getattr(task, "rate_cap_bytes_per_s", None)
    return float("inf") if cap is None else float(cap)


def _route_of(
    topology: Topology, task: Any, trees: Mapping[Hashable, Tree], checked: dict[Any, Sequence[int]]
) -> Sequence[int]:
    if isinstance(task, AggregationRequest):
        return trees[task.request_id].route
    if isinstance(task, Compute):
        return ()
    if isinstance(task, CoupledFlows):
        for link in task.links:
            if not 0 <= link < topology.num_links:
                raise _unknown_link(topology, task.flows_id, link)
        return task.links
    return _checked_route(topology, task, checked)


def _checked_route(
    topology: Topology, task: Flow, checked: dict[Any, Sequence[int]]
) -> Sequence[int]:
    route = tuple(task.route)
    key = task.source, task.target, route
    if key in checked and bool not in map(type, route):  # True is a key like 1
        return checked[key]
    here, target = topology.index(task.source), topology.index(task.target)
    for link in route:
        if isinstance(link, bool) or not 0 <= link < topology.num_links:
            raise _unknown_link(topology, task.flow_id, link)
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


def _unknown_link(topology: Topology, flow: Hashable, link: int) -> ConfigurationError:
    return ConfigurationError(
        f"flow {flow!r} uses link {link!r}, but {topology.name!r} has {topology.num_links} links",
        hint=f"links are numbered from 0 to {topology.num_links - 1}",
    )


def _requests(
    topology: Topology,
    every: list[Any],
    trees: Mapping[Hashable, Tree],
    positions: Mapping[Hashable, int],
) -> Requests:
    slots: list[Sequence[tuple[int, float]]] = [()] * len(every)
    fallbacks: list[Sequence[tuple[int, float]]] = [()] * len(every)
    fallback_of = np.full(len(every), -1, np.int64)
    for request_id, tree in trees.items():
        position = positions[request_id]
        slots[position] = tree.slots
        chosen = [positions[flow.flow_id] for flow in every[position].fallback or ()]
        fallbacks[position] = [(flow, 1.0) for flow in chosen]
        fallback_of[chosen] = position
    pools = [ability.aggregation for ability in topology.switches]
    rates = [
        np.inf if pool is None or pool.rate_bytes_per_s is None else pool.rate_bytes_per_s
        for pool in pools
    ]
    return Requests(
        slots=_incidence(slots, len(every)),
        fallbacks=_incidence(fallbacks, len(every)),
        fallback_of=fallback_of,
        # The last is the switch of requests that can never run: it has none.
        free_slots=np.array([*(0 if pool is None else pool.slots for pool in pools), 0], np.int64),
        adder_rates_bytes_per_s=np.array(rates, np.float64),
    )


def _incidence(rows: Sequence[Sequence[tuple[int, float]]], count: int) -> Incidence:
    lengths = [len(row) for row in rows] or [0] * count
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    flat = [pair for row in rows for pair in row]
    links = np.array([link for link, _ in flat], np.int32)
    return Incidence(offsets, links, np.array([amount for _, amount in flat], np.float64))
