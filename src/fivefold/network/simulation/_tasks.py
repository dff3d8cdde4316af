"""What can be simulated: flows, computation, and sums made inside the network.

Plain checked values for people; large sets are given as arrays (``FlowTable``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fivefold.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class _Released:
    """When a task may start, and whose it is."""

    release_s: float = 0.0
    depends_on: Sequence[Hashable] = ()
    priority: int = 0
    job: Hashable | None = None

    def _check_release(self, name: str) -> None:
        check_number(f"{name}: release_s", self.release_s, low=0.0)
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
        name = f"flow {self.flow_id!r}"
        self._check_release(name)
        check_number(f"{name}: size_bytes", self.size_bytes, low=0.0)
        check_positive(f"{name}: weight", self.weight)
        if self.rate_cap_bytes_per_s is not None:
            check_positive(f"{name}: rate_cap_bytes_per_s", self.rate_cap_bytes_per_s)


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
        name = f"task {self.task_id!r}"
        self._check_release(name)
        check_number(f"{name}: duration_s", self.duration_s, low=0.0)


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
        self._check_release(name)
        check_number(f"{name}: size_bytes", self.size_bytes, low=0.0)
        if isinstance(self.slots, bool) or not isinstance(self.slots, int) or self.slots < 1:
            raise ConfigurationError(
                f"{name}: slots must be a whole number from 1; got {self.slots!r}"
            )
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
        for leaf in self.leaves:
            if leaf not in self.tree:
                raise ConfigurationError(
                    f"{name}: leaf {leaf!r} has no parent", hint="add it to the tree"
                )
            self._check_path(name, leaf)

    def _check_path(self, name: str, leaf: str) -> None:
        node, steps = leaf, 0
        while node in self.tree:
            node, steps = self.tree[node], steps + 1
            if steps > len(self.tree):
                raise ConfigurationError(f"{name}: the tree has a circle above {leaf!r}")

    @property
    def root(self) -> str:
        """The node without a parent."""
        return next(iter(set(self.tree.values()) - set(self.tree)))

    @property
    def summing(self) -> tuple[str, ...]:
        """The nodes that add, in order of name: the root, and where two or more streams meet.

        A node with one child that contributes nothing itself only forwards.
        """
        streams = Counter([*self.tree.values(), *self.leaves])
        parents = set(self.tree.values())
        adding = {node for node in parents if streams[node] > 1 or node == self.root}
        return tuple(sorted(adding))


Task = Flow | Compute | AggregationRequest


def check_number(name: str, value: Any, *, low: float) -> None:
    """Refuse what is not a finite number from ``low`` up.

    Raises:
        ConfigurationError: It is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    number = number or type(value).__module__ == "numpy"
    if not number or not math.isfinite(value) or value < low:
        raise ConfigurationError(
            f"{name} must be a number from {low:g} up; got {value!r}", hint="use plain numbers"
        )


def check_positive(name: str, value: Any) -> None:
    """Refuse what is not a finite number above zero.

    Raises:
        ConfigurationError: It is not.
    """
    check_number(name, value, low=0.0)
    if value <= 0:
        raise ConfigurationError(f"{name} must be more than zero; got {value!r}")
