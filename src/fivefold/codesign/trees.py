"""Where a job's gradients are aggregated: the root of each of its trees, and their slots.

A job has a tree per group and place in the host. Trees of one job get roots apart from one another
where that spreads their load (as PANAMA's several trees per job), and slots are counted at every
switch of a tree, so that what one job takes is not promised to another (as SHARP's and NetPack's
allocation; who is refused all the same falls back to a ring, as in ATP).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.codesign.steps import job_groups
from fivefold.collectives.pricing.phases import (
    Tree,
    aggregation_tree,
    host_groups,
    tree_links,
    tree_switches,
)
from fivefold.network.topology import Topology

_MOST_ROOTS = 4
_MOST_WEIGHED = 16  # roots that are weighed for each tree
_MOST_SAMPLED = 8  # ranks whose distance to a switch is looked at


@dataclass(frozen=True, kw_only=True)
class TreeChoice:
    """Roots of all trees of a job, and slots of each tree at each of its switches."""

    roots: tuple[str, ...]
    slots: int

    @property
    def name(self) -> str:
        """In a few words."""
        different = sorted(set(self.roots))
        return ", ".join(different[:4]) + (", ..." if len(different) > 4 else "")

    def changes(self) -> dict[str, object]:
        """Return what it changes in a job's plan."""
        return {
            "algorithm": "in_network",
            "root": self.roots[0],
            "roots": self.roots,
            "slots": self.slots,
            "paths": {},
        }


class SwitchState:
    """Knowledge of the switches: trees that they serve, so load of links and slots left."""

    def __init__(
        self, topology: Topology, loads: Mapping[int, float] | None = None,
        free: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._topology = topology
        self.loads = dict(loads or {})
        self.free = dict(_pools(topology) if free is None else free)

    def serving_nobody(self, names: Sequence[str]) -> bool:
        """Return whether all slots of some switches are free."""
        return all(self.free[name] == _pools(self._topology)[name] for name in names)

    def admit(self, job: JobSpec, plan: JobPlan) -> None:
        """Count the trees of a job, if it has any."""
        if plan.algorithm == "in_network":
            trees = job_trees(self._topology, job, plan)
            for tree in trees:
                self.add(tree, _tree_rate(job.split_as(plan.split), len(trees)), plan.slots)

    def add(self, tree: Tree, rate: float, slots: int) -> None:
        """Count one tree."""
        for link in tree_links(self._topology, tree):
            self.loads[link] = self.loads.get(link, 0.0) + rate
        for name in tree_switches(tree):
            self.free[name] = max(0, self.free[name] - slots)


def _tree_rate(job: JobSpec, trees: int) -> float:
    """Return the bytes that a tree carries per second of compute."""
    return job.gradient_bytes / max(job.compute_s, 1e-9) / trees


def aggregated_columns(
    topology: Topology, job: JobSpec, plan: JobPlan
) -> list[tuple[int, ...]] | None:
    """Return the ranks that switches would aggregate, tree by tree; None where hosts differ.

    Inside a host ranks reduce first, so a tree has one rank per host.
    """
    chosen = job.split_as(plan.split)
    axis = "data" if chosen.mesh is not None else ""
    if chosen.mesh is not None and not any(
        m.axis == "data" and m.kind == "all_reduce" for m in chosen.mesh.demand.messages
    ):
        return None
    found: list[tuple[int, ...]] = []
    for group in job_groups(chosen, plan, axis):
        hosts = host_groups(topology, group)
        if hosts is None or len(hosts) == 1:
            return None
        found += [tuple(own[place] for own in hosts) for place in range(len(hosts[0]))]
    return found


def nearest_roots(topology: Topology, job: JobSpec, plan: JobPlan) -> list[TreeChoice]:
    """Choose one root for all trees among the nearest switches that can serve every one."""
    columns = aggregated_columns(topology, job, plan)
    if not columns:
        return []
    found = []
    for node in sorted({node for column in columns for node in _nearby(topology, column)}):
        trees = [aggregation_tree(topology, column, node) for column in columns]
        whole = [tree for tree in trees if tree is not None]
        if len(whole) == len(columns):
            found.append((max(len(tree) for tree in whole), node, whole))
    chosen = []
    for _, node, whole in sorted(found, key=lambda entry: entry[:2])[:_MOST_ROOTS]:
        slots = _slots(topology, whole, _pools(topology))
        if slots:
            chosen.append(TreeChoice(roots=(node,) * len(columns), slots=slots))
    return chosen


def spread_trees(
    topology: Topology,
    job: JobSpec,
    plan: JobPlan,
    *,
    loads: Mapping[int, float] | None = None,
    free: Mapping[str, int] | None = None,
) -> TreeChoice | None:
    """Choose roots tree by tree, each where the busiest link of its tree has least to carry."""
    columns = aggregated_columns(topology, job, plan)
    if not columns:
        return None
    state = SwitchState(topology, loads, free)
    before = dict(state.free)
    rate = _tree_rate(job.split_as(plan.split), len(columns))
    roots, trees = [], []
    for column in columns:
        options = [
            (_busiest(topology, tree, state.loads, rate), len(tree), node, tree)
            for node, tree in _trees(topology, column)
            if all(state.free.get(name, 0) > 0 for name in tree_switches(tree))
        ]
        if not options:
            return None
        _, _, node, tree = min(options)
        state.add(tree, rate, slots=1)
        roots.append(node)
        trees.append(tree)
    slots = _slots(topology, trees, before)
    return TreeChoice(roots=tuple(roots), slots=slots) if slots else None


def free_slots(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, *, without: str
) -> dict[str, int]:
    """Return the slots of each switch that other jobs leave."""
    others = SwitchState(topology)
    for job in jobs:
        if job.job_id != without:
            others.admit(job, plan.jobs[job.job_id])
    return others.free


def job_trees(topology: Topology, job: JobSpec, plan: JobPlan) -> list[Tree]:
    """Return the trees of a job that aggregates in the network."""
    columns = aggregated_columns(topology, job, plan) or []
    trees = [aggregation_tree(topology, c, plan.root_of(i)) for i, c in enumerate(columns)]
    return [tree for tree in trees if tree is not None]


def slots_for(topology: Topology, tree: Tree) -> int:
    """Return the slots for what a tree's fastest link carries in a round trip to the root."""
    above = dict(tree)
    links = dict(zip((child for child, _ in tree), tree_links(topology, tree)[::2], strict=True))
    delays_s, wanted = [], 0.0
    for child, parent in tree:
        node, delay_s = child, 0.0
        while node in above:
            delay_s += 2 * float(topology.latencies_s[links[node]])
            node = above[node]
        delays_s.append(delay_s)
        rate = float(topology.capacities_bytes_per_s[links[child]])
        pool = topology.ability_of(parent).aggregation
        if pool is not None:  # others only pass on
            wanted = max(wanted, rate / pool.slot_bytes)
    return max(1, math.ceil(wanted * max(delays_s)))


def _slots(topology: Topology, trees: Sequence[Tree], pools: Mapping[str, int]) -> int:
    """Return the slots per tree such that all of them fit; 0 where not even one does."""
    through = Counter(name for tree in trees for name in tree_switches(tree))
    most = min((pools.get(name, 0) // count for name, count in through.items()), default=0)
    return min(most, max(slots_for(topology, tree) for tree in trees))


def _busiest(topology: Topology, tree: Tree, busy: Mapping[int, float], rate: float) -> float:
    return max(
        (busy.get(link, 0.0) + rate) / float(topology.capacities_bytes_per_s[link])
        for link in tree_links(topology, tree)
    )


@functools.lru_cache(maxsize=4096)
def _trees(topology: Topology, column: tuple[int, ...]) -> tuple[tuple[str, Tree], ...]:
    """Return roots that can aggregate a column, the nearest first, with their trees."""
    found = []
    for node in _nearby(topology, column):
        tree = aggregation_tree(topology, column, node)
        if tree is not None:
            found.append((len(tree), node, tree))
    return tuple((node, tree) for _, node, tree in sorted(found))


@functools.lru_cache(maxsize=4096)
def _nearby(topology: Topology, column: tuple[int, ...]) -> tuple[str, ...]:
    """Order aggregation switches by the links on the fastest way to the furthest of some ranks."""
    far = np.zeros(topology.num_nodes)
    for rank in column[:: max(1, len(column) // _MOST_SAMPLED)]:
        _, links = topology.router.distances(rank, through_ranks=False)
        far = np.maximum(far, np.where(links < 0, topology.num_nodes, links))
    names = sorted(_pools(topology), key=lambda name: (far[topology.index(name)], name))
    return tuple(names[:_MOST_WEIGHED])


@functools.lru_cache(maxsize=64)
def _pools(topology: Topology) -> Mapping[str, int]:
    return {
        ability.node: ability.aggregation.slots
        for ability in topology.switches
        if ability.aggregation is not None
    }
