"""A job's collectives as flows: what is alike is one array, and replicas are simulated once.

Before a simulation, flows and links that nothing tells apart are found by refining colours: a link
by the flows on it, a flow by its links, until nothing changes. Links of one colour then carry as
much of each colour of flows, so filling gives all flows of a colour one rate at every moment, and
one of each stands for the rest.

References:
    M. Grohe, K. Kersting, M. Mladenov, E. Selman, Dimension Reduction via Colour Refinement, 2014.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import JobPlan
from fivefold.codesign.synthesized import KINDS, may_synthesize, synthesized_phases
from fivefold.collectives.pricing.phases import (
    Algorithm,
    Phase,
    Tree,
    collective_phases,
    host_groups,
    phases_time_s,
)
from fivefold.flows.paths import equal_cost_paths
from fivefold.network.topology import Topology

_AGGREGATED_AXES = {"", "data"}  # the empty one stands for all ranks of a job
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Edges:
    """Who sends to whom in phases of one shape; the same object wherever it is the same."""

    ranks: IntArray  # source and target, int64 [phases, edges, 2]
    places: IntArray  # order of the phases among those of their step, int64 [phases]


@dataclass(frozen=True)
class PhaseGroup:
    """Phases alike that run side by side: those of several process groups or hosts.

    Attributes:
        edges: Who sends to whom.
        edge_bytes: Bytes over each edge.
        steps: Times that each edge's latency is paid.
        coupled: Whether the edges of a phase share one rate.
        tree: Links of a phase that switches aggregate; the edges are its leaves.
        wait_s: Seconds before they begin.
    """

    edges: Edges
    edge_bytes: float
    steps: int
    coupled: bool = True
    tree: Tree | None = None
    wait_s: float = 0.0

    def phases(self) -> list[Phase]:
        """Write the phases out one by one."""
        return [
            Phase(
                tuple(map(tuple, own)), self.edge_bytes, self.steps, self.tree, self.coupled,
                self.wait_s,
            )
            for own in self.edges.ranks.tolist()
        ]  # fmt: skip


def steps_of(
    topology: Topology, job: JobSpec, plan: JobPlan, *, kind: str, size_bytes: float
) -> list[list[PhaseGroup]]:
    """Return the phases of one collective: what is in one entry runs side by side.

    ``kind`` is that of the collective, of a split job followed by ``" over "`` and the axis.
    """
    if size_bytes == 0:
        return []
    chosen = job.split_as(plan.split)
    how = (plan.order, plan.algorithm, plan.root, plan.roots)
    return _steps(topology, chosen, how, kind, size_bytes)


@functools.lru_cache(maxsize=512)  # plans that differ in paths, classes or times only ask the same
def _steps(
    topology: Topology, job: JobSpec, how: tuple[Any, ...], kind: str, size_bytes: float
) -> list[list[PhaseGroup]]:
    order, algorithm, root, roots = how
    plan = JobPlan(order=order, algorithm=algorithm, root=root, roots=roots, slots=1)
    collective, _, axis = kind.partition(" over ")
    if collective in {"send", "return"}:
        edges = _sent(job, axis, back=collective == "return")
        sent = [PhaseGroup(edges, size_bytes, steps=1, coupled=False)] if edges else []
        return [[_at_reached_rate(topology, job, one, exchange=True) for one in sent]] * bool(sent)
    if algorithm == "in_network" and axis not in _AGGREGATED_AXES:
        algorithm = "hierarchical"
    trees = 0
    steps: list[list[PhaseGroup]] = []
    separate = algorithm in {"in_network", "synthesized"}
    for alike in _equivalent_groups(topology, job, order, axis, separate=separate):
        local = len((host_groups(topology, alike.first) or [()])[0])
        chosen: tuple[str, ...] = ()
        if algorithm == "in_network" and len(alike.first) > 1:
            chosen = tuple(plan.root_of(trees + place) for place in range(local))
            trees += local
        found = _phases(
            topology, alike.first, collective, size_bytes, algorithm=algorithm, roots=chosen,
            every_port=job.mesh is not None,
        )  # fmt: skip
        steps += [[] for _ in range(len(found) - len(steps))]
        for joint, phases in zip(steps, found, strict=False):
            joint += [
                _at_reached_rate(topology, job, one, exchange=collective == "all_to_all")
                for one in alike.stacked(topology, phases)
            ]
    return steps


def _phases(
    topology: Topology, group: tuple[int, ...], kind: str, size_bytes: float, *,
    algorithm: Algorithm, **how: Any,
) -> list[list[Phase]]:  # fmt: skip
    if algorithm == "synthesized":
        found = None
        if kind in KINDS and may_synthesize(topology, group):
            found = synthesized_phases(topology, group, kind, size_bytes)
        if found is not None:
            return found
        algorithm = "ring_or_tree"
    return collective_phases(topology, group, kind, size_bytes, algorithm=algorithm, **how)


def _at_reached_rate(
    topology: Topology, job: JobSpec, group: PhaseGroup, *, exchange: bool
) -> PhaseGroup:
    """Return the phases, their bytes divided by the share of the links' rate that is reached."""
    if job.mesh is None:
        return group
    inside, across = (reached[exchange] for reached in job.mesh.reached)
    far = group.tree is not None or _is_far(topology, group.edges.ranks)
    reached = across if far else inside
    if reached == 1.0:
        return group
    size = group.edge_bytes / reached
    return replace(group, edge_bytes=size)


def _is_far(topology: Topology, ranks: IntArray) -> bool:
    """Return whether an edge leaves its host."""
    hosts = _host_numbers(topology)[ranks]
    return bool((hosts[..., 0] != hosts[..., 1]).any())


@functools.lru_cache(maxsize=8)
def _host_numbers(topology: Topology) -> IntArray:
    """Return the number of each rank's host; a rank without one is a host of its own."""
    names: dict[Hashable, int] = {}
    hosts = ((topology.host_of(rank), rank) for rank in range(topology.num_ranks))
    return np.array(
        [
            names.setdefault((None, rank) if host is None else host, len(names))
            for host, rank in hosts
        ],
        np.int64,
    )


class _EquivalentGroups:
    """Groups whose ranks lie on hosts in the same way, so that their phases have one shape."""

    def __init__(self, numbers: Sequence[int], groups: Sequence[tuple[int, ...]]) -> None:
        self.first = groups[0]
        self._numbers = np.array(numbers, np.int64)
        self._ranks = np.array(groups, np.int64)
        self._position = {rank: place for place, rank in enumerate(self.first)}
        self._known: dict[Hashable, Edges] = {}

    def stacked(self, topology: Topology, phases: Sequence[Phase]) -> list[PhaseGroup]:
        """Return the phases of the first group as those of all of them, by shape."""
        shapes: dict[Hashable, list[int]] = {}
        for place, phase in enumerate(phases):
            far = phase.tree is None and _is_far(topology, np.array(phase.edges))
            shape = (*replace(phase, edges=(), tree=None).__dict__.values(), len(phase.edges), far)
            shapes.setdefault((shape, place) if phase.tree else shape, []).append(place)
        found = []
        for places in shapes.values():
            one = phases[places[0]]
            edges = self._edges(tuple(phases[i].edges for i in places), tuple(places), len(phases))
            found.append(
                PhaseGroup(edges, one.edge_bytes, one.steps, one.coupled, one.tree, one.wait_s)
            )
        return found

    def _edges(
        self, edges: tuple[tuple[tuple[int, int], ...], ...], places: tuple[int, ...], count: int
    ) -> Edges:
        key = edges, places, count
        if key not in self._known:
            flat = itertools.chain.from_iterable(itertools.chain.from_iterable(edges))
            positions = np.fromiter((self._position[rank] for rank in flat), np.int64)
            positions = positions.reshape(len(edges), -1, 2)
            ranks = self._ranks[:, positions].reshape(-1, *positions.shape[1:])
            self._known[key] = Edges(
                ranks, (self._numbers[:, None] * count + np.array(places)).ravel()
            )
        return self._known[key]


@functools.lru_cache(maxsize=128)
def _equivalent_groups(
    topology: Topology, job: JobSpec, order: tuple[int, ...], axis: str, *, separate: bool
) -> list[_EquivalentGroups]:
    """Return the groups of an axis, by how they lie on hosts or each by itself."""
    hosts = _host_numbers(topology).tolist()
    found: dict[Hashable, tuple[list[int], list[tuple[int, ...]]]] = {}
    for number, group in enumerate(job_groups(job, JobPlan(order=order), axis)):
        seen: dict[int, int] = {}
        form = tuple([seen.setdefault(hosts[rank], len(seen)) for rank in group])
        numbers, groups = found.setdefault((number, form) if separate else form, ([], []))
        numbers.append(number)
        groups.append(group)
    return [_EquivalentGroups(*of_form) for of_form in found.values()]


def job_groups(job: JobSpec, plan: JobPlan, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of an axis (empty: all ranks), each in the order of the plan's ring."""
    if not axis or job.mesh is None:
        return (plan.order,)
    place = {rank: number for number, rank in enumerate(plan.order)}
    groups = job.mesh.groups(axis)
    return tuple(tuple(sorted(group, key=place.__getitem__)) for group in groups)


@functools.lru_cache(maxsize=64)
def _sent(job: JobSpec, axis: str, *, back: bool) -> Edges | None:
    """Return what every stage sends to the next one, or to the one before."""
    chains = np.array(job.mesh.groups(axis) if job.mesh is not None else (), np.int64)
    if chains.size == 0 or chains.shape[1] < 2:
        return None
    pairs = np.stack([chains[:, :-1], chains[:, 1:]], axis=-1).reshape(1, -1, 2)
    return Edges(pairs[..., ::-1] if back else pairs, np.zeros(1, np.int64))


class EdgeRoutes(NamedTuple):
    """The links of every edge of some phases, phase by phase."""

    offsets: IntArray  # slice of links of each edge, int64 [edges + 1]
    links: IntArray
    latencies_s: FloatArray  # [edges]
    slowest_bytes_per_s: FloatArray  # rate of the slowest link of each edge [edges]


def edge_route(topology: Topology, plan: JobPlan, edge: tuple[int, int]) -> tuple[int, ...]:
    """Return the links of an edge: as planned, else the first of the shortest paths."""
    planned = plan.paths.get(edge)
    if planned is not None:
        return planned
    first: tuple[int, ...] = equal_cost_paths(topology, *edge, relay=True)[0]
    return first


class PlannedRoutes:
    """The links of a plan's edges, each looked up once."""

    def __init__(self, topology: Topology, plan: JobPlan) -> None:
        self.topology, self._plan = topology, plan
        self._known: dict[Edges, EdgeRoutes] = {}

    def route(self, edge: tuple[int, int]) -> tuple[int, ...]:
        """Return the links of one edge."""
        return edge_route(self.topology, self._plan, edge)

    def of(self, edges: Edges) -> EdgeRoutes:
        """Return the links of every edge of some phases."""
        if not self._plan.paths:
            return _shortest(self.topology, edges)
        if edges not in self._known:
            self._known[edges] = _edge_routes(self.topology, self._plan, edges)
        return self._known[edges]

    def step_time_s(self, groups: Sequence[PhaseGroup], *, slots: int) -> float:
        """Return the seconds of phases side by side, with the network to themselves."""
        topology = self.topology
        if any(group.tree is not None for group in groups):
            phases = [phase for group in groups for phase in group.phases()]
            return phases_time_s(topology, phases, route=self.route, slots=slots)
        loads, latency_s = np.zeros(topology.num_links), 0.0
        for group in groups:
            routes = self.of(group.edges)
            delay_s = group.wait_s + group.steps * float(routes.latencies_s.max(initial=0.0))
            latency_s = max(latency_s, delay_s)
            np.add.at(loads, routes.links, group.edge_bytes)
        return float((loads / topology.capacities_bytes_per_s).max(initial=0.0)) + latency_s


@functools.lru_cache(maxsize=256)
def _shortest(topology: Topology, edges: Edges) -> EdgeRoutes:
    return _edge_routes(topology, JobPlan(order=()), edges)


def _edge_routes(topology: Topology, plan: JobPlan, edges: Edges) -> EdgeRoutes:
    pairs = edges.ranks.reshape(-1, 2).tolist()
    routes = [edge_route(topology, plan, (source, target)) for source, target in pairs]
    lengths = np.fromiter(map(len, routes), np.int64, len(routes))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    links = np.fromiter(itertools.chain.from_iterable(routes), np.int64, int(offsets[-1]))
    latencies_s, slowest = np.zeros(len(routes)), np.full(len(routes), np.inf)
    for length in np.unique(lengths[lengths > 0]).tolist():
        rows = np.flatnonzero(lengths == length)
        own = links[offsets[rows][:, None] + np.arange(length)]
        latencies_s[rows] = topology.latencies_s[own].sum(axis=1)
        slowest[rows] = topology.capacities_bytes_per_s[own].min(axis=1)
    return EdgeRoutes(offsets, links, latencies_s, slowest)


class Row(NamedTuple):
    """Flows that are one task of the simulator: they have one rate and end together."""

    phase: int  # rows of one phase share its rate
    links: tuple[int, ...]  # of all flows; one that several use is listed as often
    latency_s: float


Part = tuple[Hashable, Edges, bool]
"""A job, edges of one of its phases, and whether the edges of a phase share one rate."""


def merged_rows(
    parts: Mapping[Part, EdgeRoutes],
    capacities_bytes_per_s: FloatArray,
    *,
    single: Iterable[Sequence[int]] | None = None,
) -> tuple[dict[Part, list[Row]], IntArray]:
    """Merge what colour refinement cannot tell apart into one task, and links into one of them.

    ``single`` are the links of everything else that is simulated, each unlike all others; with None
    every flow and every link stands for itself. Also return each link's representative, [links].
    """
    entries, colours = _entries(parts, () if single is None else tuple(single))
    representatives = np.arange(len(capacities_bytes_per_s))
    rows = np.arange(len(colours))
    if single is not None and entries:
        every = _Entries(*(np.concatenate(column) for column in zip(*entries, strict=True)))
        rows, links = _refined(every, colours, capacities_bytes_per_s)
        first = np.full(len(representatives), len(representatives))
        np.minimum.at(first, links, representatives)
        representatives = first[links]
    found = {
        part: _rows(own, rows, representatives) for part, own in zip(parts, entries, strict=False)
    }
    return found, representatives


class _Entries(NamedTuple):
    """Links that rows load; a row is a phase whose edges share one rate, or an edge."""

    owners: IntArray  # row of each entry
    links: IntArray
    tags: IntArray  # entries of one row with different tags are told apart
    latencies_s: FloatArray


def _entries(
    parts: Mapping[Part, EdgeRoutes], single: Sequence[Sequence[int]]
) -> tuple[list[_Entries], IntArray]:
    """Return the entries of each part and of each other flow, and first colours of rows, [rows]."""
    rates = np.unique(np.concatenate([[0.0], *(one.slowest_bytes_per_s for one in parts.values())]))
    found: list[_Entries] = []
    colours: list[int] = []
    for number, ((_, edges, coupled), routes) in enumerate(parts.items()):
        phases, each, _ = edges.ranks.shape
        rows = np.repeat(np.arange(phases), each) if coupled else np.arange(phases * each)
        lengths = np.diff(routes.offsets)
        tags = np.searchsorted(rates, routes.slowest_bytes_per_s)
        found.append(
            _Entries(
                owners=np.repeat(len(colours) + rows, lengths), links=routes.links,
                tags=np.repeat(tags, lengths), latencies_s=np.repeat(routes.latencies_s, lengths),
            )
        )  # fmt: skip
        colours += [number] * (int(rows[-1]) + 1)
    for own in single:
        none = np.zeros(len(own), np.int64)
        links = np.array(own, np.int64)
        found.append(
            _Entries(none + len(colours), links, tags=none, latencies_s=np.zeros(len(own)))
        )
        colours.append(len(found))
    return found, np.array(colours, np.int64)


def _rows(entries: _Entries, colours: IntArray, representatives: IntArray) -> list[Row]:
    """Return the flows of each colour, on the links that stand for all."""
    names = colours[entries.owners]
    order = np.lexsort((entries.tags, names))
    names, tags = names[order], entries.tags[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(names) != 0) | (np.diff(tags) != 0)][: len(names)])
    latencies = np.maximum.reduceat(entries.latencies_s[order], starts) if len(starts) else starts
    # Of a colour's links each has as many entries; the others are of links with another
    # representative.
    links, kept = entries.links[order], (representatives[entries.links] == entries.links)[order]
    return [
        Row(int(names[start]), tuple(links[start:end][kept[start:end]].tolist()), float(latency_s))
        for (start, end), latency_s in zip(
            itertools.pairwise([*starts.tolist(), len(names)]), latencies, strict=False
        )
    ]


def _refined(
    entries: _Entries, colours: IntArray, capacities_bytes_per_s: FloatArray
) -> tuple[IntArray, IntArray]:
    """Split colours of rows by their links and of links by their rows, until none is split."""
    rows, before = colours, -1
    links: IntArray = np.unique(capacities_bytes_per_s, return_inverse=True)[1]
    while True:
        links = _split(links, entries.links, _mixed(rows[entries.owners], entries.tags))
        rows = _split(rows, entries.owners, _mixed(links[entries.links], entries.tags))
        found = int(rows.max(initial=0)) + int(links.max(initial=0))
        if found == before:
            return rows, links
        before = found


def _split(colours: IntArray, owners: IntArray, marks: npt.NDArray[np.uint64]) -> IntArray:
    """Give things of one colour different ones where the marks of their entries differ.

    Marks are hashes of 64 bits and are added up. Different sums collide with probability 2^-64, so
    among 1e5 links two collide with a probability below 3e-10.
    """
    sums = np.zeros(len(colours), np.uint64)
    np.add.at(sums, owners, marks)
    found: IntArray = np.unique(_mixed(colours, sums), return_inverse=True)[1]
    return found


def _mixed(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return 64 bits that look random, of two numbers (SplitMix64)."""
    bits = one.astype(np.uint64)
    for add in (np.uint64(0x9E3779B97F4A7C15), other.astype(np.uint64)):
        bits = bits + add
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits
