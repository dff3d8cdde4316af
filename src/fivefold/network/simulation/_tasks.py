"""What can be simulated: flows, computation and in-network aggregation, one by one or as arrays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, require_number, require_one_of, require_whole
from fivefold.network.simulation._bundles import Incidence
from fivefold.network.simulation.rates import (
    RoutesLike,
    positive_array,
    routes_of,
    rows_of,
    sized_array,
    whole_array,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Released:
    """When a task may start, and whose it is."""

    release_s: float = 0.0
    depends_on: Sequence[Hashable] = ()
    priority: int = 0
    job: Hashable | None = None

    def _check(self, name: str, *numbers: str) -> None:
        """Check what all tasks have, and further numbers that are not negative."""
        for key in ("release_s", *numbers):
            require_number(f"{name}: {key}", getattr(self, key))
        if isinstance(self.depends_on, str):
            raise ConfigurationError(
                f"{name}: depends_on must be a list of ids; got {self.depends_on!r}",
                hint="write ('a',) for one",
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ConfigurationError(
                f"{name}: priority must be a whole number; got {self.priority!r}",
                hint="0 comes first, then 1",
            )


@dataclass(frozen=True)
class Flow(_Released):
    """Bytes over a fixed path.

    Args:
        flow_id: Unique among all tasks.
        source: Name of the node where the path starts.
        target: Name of the node where it ends.
        size_bytes: How much is sent; 0 is delivered after the path's latency.
        route: Link indices from source to target; empty where both are the same node.
        release_s: Earliest start.
        depends_on: Ids of tasks that must end first.
        priority: Lower numbers come first, strictly.
        job: Whose flow it is; for reports, and for repeated iterations.
        group: Coupled flows name the same group: their rates stay in proportion to their weights,
            whichever link limits the group. None is a flow of its own.
        weight: Its share of a full link against others.
        rate_cap_bytes_per_s: Highest rate; None is no cap.

    Raises:
        ConfigurationError: A value is out of range.

    Examples:
        >>> Flow("a", "gpu0", "gpu1", size_bytes=1e6, route=(0,)).weight
        1.0
    """

    flow_id: Hashable
    source: str
    target: str
    size_bytes: float
    route: Sequence[int]
    group: Hashable | None = field(default=None, kw_only=True)
    weight: float = field(default=1.0, kw_only=True)
    rate_cap_bytes_per_s: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if (  # of millions of flows nearly all are plain, and their names take longest
            type(self.release_s) is type(self.size_bytes) is type(self.weight) is float
            and 0 <= self.release_s < math.inf
            and 0 <= self.size_bytes < math.inf
            and 0 < self.weight < math.inf
            and self.rate_cap_bytes_per_s is None
            and type(self.priority) is int
            and type(self.depends_on) is tuple
        ):
            return
        name = f"flow {self.flow_id!r}"
        self._check(name, "size_bytes")
        require_number(f"{name}: weight", self.weight, positive=True)
        if self.rate_cap_bytes_per_s is not None:
            cap = self.rate_cap_bytes_per_s
            require_number(f"{name}: rate_cap_bytes_per_s", cap, positive=True)


@dataclass(frozen=True)
class CoupledFlows(_Released):
    """Flows that begin together, have one rate and end together, as one task: edges of a ring.

    Args:
        flows_id: Unique among all tasks.
        size_bytes: Bytes of each flow.
        links: Links of all flows; one that several of them use is listed as often.
        latency_s: From the last byte sent to the last received.
        release_s: Earliest start.
        depends_on: Ids of tasks that must end first.
        priority: Lower numbers come first, strictly.
        job: Whose flows they are.
        group: Tasks that share one rate as well name the same group. None is a rate of its own.

    Raises:
        ConfigurationError: A value is out of range.

    Examples:
        >>> CoupledFlows("ring", size_bytes=1e6, links=(0, 1, 1)).latency_s
        0.0
    """

    flows_id: Hashable
    size_bytes: float
    links: Sequence[int]
    latency_s: float = 0.0
    group: Hashable | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check(f"flows {self.flows_id!r}", "size_bytes", "latency_s")


@dataclass(frozen=True)
class Compute(_Released):
    """Work that takes a time and no link.

    Args:
        task_id: Unique among all tasks.
        duration_s: How long it takes.
        release_s: Earliest start.
        depends_on: Ids of tasks that must end first.
        priority: Order in the queue of the processor.
        job: Whose it is.
        processor: Tasks on the same processor run one at a time, by priority, then in the order in
            which they became ready. None runs at once.

    Raises:
        ConfigurationError: A value is out of range.

    Examples:
        >>> Compute("forward", duration_s=0.1, processor="gpu0").priority
        0
    """

    task_id: Hashable
    duration_s: float
    processor: Hashable | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check(f"task {self.task_id!r}", "duration_s")


@dataclass(frozen=True)
class AggregationRequest(_Released):
    """A sum over leaves made by switches on the way, and sent back to all of them.

    Each tree link carries the bytes once up and, for an all-reduce, once down; all of them move
    at one rate. The rate is at most what the links leave, each switch's adders, and the pool of
    slots over the round trip to the leaf furthest away. Every switch in which streams meet lends
    ``slots`` slots from start to end. Where they are not free the request waits its turn, or its
    ``fallback`` runs instead.

    Args:
        request_id: Unique among all tasks.
        tree: Parent of each node of the tree, by name; links join every child and its parent.
        leaves: Names of the nodes that contribute.
        size_bytes: Bytes that each leaf contributes.
        slots: Slots that it takes at each switch.
        release_s: Earliest start.
        depends_on: Ids of tasks that must end first.
        priority: Lower numbers come first, strictly.
        job: Whose it is.
        broadcast: Whether the sum goes back down to all leaves (all-reduce), or ends at the root.
        dtype: Element type, where switches state which they can add.
        fallback: Flows that run where slots are short; None waits. The request ends with the last.

    Raises:
        ConfigurationError: The tree is no tree over the leaves, or a value is out of range.

    References:
        SwitchML, arXiv 1903.06701; ATP, NSDI 2021 (best effort with fallback to hosts).

    Examples:
        >>> AggregationRequest("sum", {"a": "tor", "b": "tor"}, ["a", "b"], 1e6, slots=64).root
        'tor'
    """

    request_id: Hashable
    tree: Mapping[str, str]
    leaves: Sequence[str]
    size_bytes: float
    slots: int = field(kw_only=True)
    broadcast: bool = field(default=True, kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    fallback: Sequence[Flow] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = f"request {self.request_id!r}"
        self._check(name, "size_bytes")
        require_whole(f"{name}: slots", self.slots)
        if len(set(self.leaves)) != len(self.leaves) or not self.leaves:
            raise ConfigurationError(
                f"{name}: leaves must be one or more different nodes; got {list(self.leaves)!r}"
            )
        self._check_tree(name)

    def _check_tree(self, name: str) -> None:
        parents = set(self.tree.values())
        roots = parents - set(self.tree)
        if len(roots) != 1:
            raise ConfigurationError(
                f"{name}: the tree has {len(roots)} roots {sorted(roots)}",
                hint="exactly one node must have no parent",
            )
        ends = set(self.tree) - parents
        if not ends <= set(self.leaves):
            raise ConfigurationError(
                f"{name}: nothing comes from {sorted(ends - set(self.leaves))}",
                hint="nodes without children must be leaves",
            )
        rooted = roots  # nodes that are known to lead to the root: each is passed once
        for leaf in self.leaves:
            if leaf not in self.tree:
                raise ConfigurationError(
                    f"{name}: leaf {leaf!r} has no parent", hint="add it to the tree"
                )
            above, passed = leaf, set[str]()
            while above not in rooted:
                if above in passed:
                    raise ConfigurationError(f"{name}: the tree has a circle above {leaf!r}")
                passed.add(above)
                above = self.tree[above]
            rooted |= passed

    @property
    def root(self) -> str:
        """Return the node without a parent."""
        return next(iter(set(self.tree.values()) - set(self.tree)))

    @property
    def aggregators(self) -> tuple[str, ...]:
        """The nodes that add, in order of name: the root, and where two or more streams meet.

        A node with one child that contributes nothing itself only forwards.
        """
        streams = Counter([*self.tree.values(), *self.leaves])
        parents = set(self.tree.values())
        adding = {node for node in parents if streams[node] > 1 or node == self.root}
        return tuple(sorted(adding))


Task = Flow | CoupledFlows | Compute | AggregationRequest


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowTable:
    """Tasks by position, one array a property. Build it with :meth:`build`.

    Attributes:
        sizes: Bytes of a flow, seconds of a computation; float64 [tasks].
        is_compute: Whether each is a computation; bool [tasks].
        routes: Links of each flow; computations have none.
        latencies_s: From the last byte sent to the last received; NaN is the sum over the route.
        weights: Share of a full link; float64 [tasks].
        rate_caps_bytes_per_s: Highest rate, ``inf`` for none; float64 [tasks].
        priorities: Lower comes first; int64 [tasks].
        groups: Coupled flows have the same number; -1 is none; int64 [tasks].
        jobs: Number of the job; -1 is none; int64 [tasks].
        releases_s: Earliest start; float64 [tasks].
        processors: Number of the processor of a computation; -1 is none; int64 [tasks].
        dependency_offsets: Slice of ``dependencies`` of each task; int64 [tasks + 1].
        dependencies: Tasks that must end first; int64.
        names: Ids of the tasks; None is their positions.

    Examples:
        >>> table = FlowTable.build(sizes=[100.0, 50.0], routes=[[0], [0]], dependencies=[[], [0]])
        >>> len(table), table.dependencies.tolist()
        (2, [0])
    """

    sizes: FloatArray
    is_compute: npt.NDArray[np.bool_]
    routes: Incidence
    latencies_s: FloatArray
    weights: FloatArray
    rate_caps_bytes_per_s: FloatArray
    priorities: IntArray
    groups: IntArray
    jobs: IntArray
    releases_s: FloatArray
    processors: IntArray
    dependency_offsets: IntArray
    dependencies: IntArray
    names: tuple[Hashable, ...] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def name_of(self, task: int) -> Hashable:
        """Return the id of a task by position."""
        return task if self.names is None else self.names[task]

    @property
    def waiting(self) -> IntArray:
        """Return the task that each of the dependencies belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.dependency_offsets))

    @classmethod
    def build(
        cls,
        *,
        sizes: npt.ArrayLike,
        routes: RoutesLike,
        dependencies: Any = None,
        names: tuple[Hashable, ...] | None = None,
        **columns: npt.ArrayLike,
    ) -> FlowTable:
        """Check and complete the arrays.

        Args:
            sizes: Bytes of each flow, seconds of each computation.
            routes: Links of each task, in any form that :func:`max_min_rates` takes.
            dependencies: A pair of arrays (offsets, tasks), or one list for each task; None is
                no dependency.
            names: Ids of the tasks.
            **columns: Any other attribute of this class, one value for each task or one for all;
                what is left out takes its neutral value.

        Raises:
            ConfigurationError: A column is unknown, has the wrong length or a value out of range,
                or the dependencies form a circle.
        """
        size = _at_least_zero("sizes", sizes, None)
        for column in columns:
            require_one_of(column, _COLUMNS, f"a flow table has no column {column!r}")
        count = len(size)
        offsets, needed = _dependency_arrays(dependencies, count)
        table = routes_of(routes)
        if table.offsets.size - 1 != count:
            raise ConfigurationError(f"there are {count} sizes and {table.offsets.size - 1} routes")
        given = {
            name: read(name, columns.get(name, neutral), count)
            for name, (read, neutral) in _COLUMNS.items()
        }
        given["is_compute"] = given["is_compute"].astype(np.bool_)
        return cls(
            sizes=size,
            routes=table,
            dependency_offsets=offsets,
            dependencies=needed,
            names=names,
            **given,
        )


def _at_least_zero(name: str, values: npt.ArrayLike, size: int | None) -> FloatArray:
    array: FloatArray = sized_array(name, values, size, np.float64)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ConfigurationError(
            f"{name} of task {wrong[0]} is {array[wrong[0]]}", hint="use finite numbers from 0 up"
        )
    return array


def _latencies(name: str, values: npt.ArrayLike, count: int) -> FloatArray:
    array: FloatArray = sized_array(name, values, count, np.float64)
    _at_least_zero(name, np.where(np.isnan(array), 0.0, array), count)
    return array


# How each column that may be left out is read, and what it then is.
_COLUMNS: dict[str, tuple[Callable[[str, Any, int], Any], float]] = {
    "is_compute": (whole_array, 0),
    "latencies_s": (_latencies, np.nan),
    "weights": (positive_array, 1.0),
    "rate_caps_bytes_per_s": (positive_array, np.inf),
    "priorities": (whole_array, 0),
    "groups": (whole_array, -1),
    "jobs": (whole_array, -1),
    "releases_s": (_at_least_zero, 0.0),
    "processors": (whole_array, -1),
}


def _dependency_arrays(given: Any, count: int) -> tuple[IntArray, IntArray]:
    if given is None:
        return np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    if isinstance(given, tuple) and len(given) != 2:  # not (offsets, tasks), but an array a task
        given = list(given)
    offsets, needed = rows_of("dependencies", given, np.int64)
    if offsets.size != count + 1:
        raise ConfigurationError(
            f"dependencies must have one list for each of the {count} tasks",
            hint="an empty list is a task that waits for none",
        )
    wrong = np.flatnonzero((needed < 0) | (needed >= count))
    if wrong.size:
        task = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        raise ConfigurationError(
            f"task {task} waits for task {needed[wrong[0]]}, but there are {count} tasks"
        )
    return offsets, needed
