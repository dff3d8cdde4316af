"""Cuts of a network and the bounds they give: single ranks, hosts, sweeps, and the worst of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from fivefold.collectives.schedules._arrays import Array, Floats, Longs
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._throughput import throughput_optimum
from fivefold.collectives.schedules._traffic import group_traffic, sweep_traffic
from fivefold.units import format_bytes

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

BoundKind = Literal["none", "latency", "cut", "messages", "chunks"]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A time that no schedule of a collective can beat.

    Args:
        seconds: The time.
        kind: ``"latency"``, ``"cut"``, ``"messages"`` (of an all-reduce among groups), ``"chunks"``
            (whole ones over the links of a rank), or ``"none"`` where nothing has to move.
        certificate: Node indices on the sending side of a cut; for a latency the two nodes; for
            messages nothing; for chunks the node.
        reason: The argument in one sentence.
        optimal_cut: Whether no cut gives a higher bound.

    Examples:
        >>> Bound(seconds=1e-6, kind="latency", certificate=(0, 1), reason="far apart").seconds
        1e-06
    """

    seconds: float
    kind: BoundKind
    certificate: tuple[int, ...] = field(default=(), repr=False)
    reason: str = ""
    optimal_cut: bool = False


NO_BOUND = Bound(seconds=0.0, kind="none", reason="nothing has to move")


def _cut_bound(
    topology: Topology, inside: Array, crossing_bytes: float, *, optimal: bool = False
) -> Bound:
    """The bound of one set of nodes, given what must leave it."""
    links = inside[topology.link_sources] & ~inside[topology.link_targets]
    capacity = float(topology.capacities_bytes_per_s[links].sum())
    if crossing_bytes <= 0 or capacity <= 0:
        return NO_BOUND
    seconds = crossing_bytes / capacity + float(topology.latencies_s[links].min())
    few, side = (inside, "out of") if 2 * inside.sum() <= inside.size else (~inside, "into")
    names = [topology.nodes[node].name for node in np.flatnonzero(few & topology.is_rank)[:3]]
    more = int((few & topology.is_rank).sum()) - len(names)
    return Bound(
        seconds=seconds,
        kind="cut",
        certificate=tuple(int(node) for node in np.flatnonzero(inside)),
        reason=(
            f"{format_bytes(crossing_bytes)} must go {side} {', '.join(names)}"
            f"{f' and {more} more' if more else ''} at {format_bytes(capacity)}/s"
        ),
        optimal_cut=optimal,
    )


def groupings(topology: Topology) -> Iterator[tuple[Array, int, Array]]:
    """Groups of ranks and the nodes of each group: single ranks, then hosts."""
    nodes = np.full(topology.num_nodes, -1, dtype=np.int64)
    nodes[topology.rank_nodes] = np.arange(topology.num_ranks)
    yield np.arange(topology.num_ranks), topology.num_ranks, nodes
    hosts = [node.host or "" for node in topology.nodes]
    numbers = {host: index for index, host in enumerate(topology.hosts)}
    groups = np.array([numbers.get(hosts[node], -1) for node in topology.rank_nodes])
    if 1 < len(numbers) < topology.num_ranks and (groups >= 0).all():
        with_switches = np.array([numbers.get(host, -1) for host in hosts])
        yield groups, len(numbers), with_switches
        yield groups, len(numbers), np.where(topology.is_rank, with_switches, -1)


def group_capacities(topology: Topology, nodes: Array, count: int) -> tuple[Floats, Floats]:
    """Capacity of the links into and out of each group of nodes; -1 is no group."""
    first, last = nodes[topology.link_sources], nodes[topology.link_targets]
    crossing, capacities = first != last, topology.capacities_bytes_per_s
    entering, leaving = crossing & (last >= 0), crossing & (first >= 0)
    into = np.bincount(last[entering], capacities[entering], count)
    out_of = np.bincount(first[leaving], capacities[leaving], count)
    return into.astype(np.float64), out_of.astype(np.float64)


def group_cuts(collective: Collective, topology: Topology, chunk_bytes: Floats) -> Iterator[Bound]:
    for groups, count, nodes in groupings(topology):
        if count < 2:
            continue
        traffic = group_traffic(collective, chunk_bytes, groups, num_groups=count)
        capacities = group_capacities(topology, nodes, count)
        for carried, capacity, incoming in zip(traffic[:2], capacities, (True, False), strict=True):
            seconds = np.divide(carried, capacity, out=np.zeros(count), where=capacity > 0)
            worst = int(np.argmax(seconds))
            members = nodes == worst
            yield _cut_bound(topology, ~members if incoming else members, float(carried[worst]))


def sweep_cuts(collective: Collective, topology: Topology, chunk_bytes: Floats) -> Iterator[Bound]:
    """Prefixes of orders of all nodes, both ways round."""
    for order in _orders(topology):
        for nodes in (order, order[::-1]):
            place = np.empty(topology.num_nodes, dtype=np.int64)
            place[nodes] = np.arange(topology.num_nodes)
            ranks_before = np.concatenate([[0], np.cumsum(topology.is_rank[nodes])])
            rank_place = ranks_before[place[topology.rank_nodes]]
            carried = sweep_traffic(collective, chunk_bytes, rank_place)[ranks_before]
            capacity = _prefix_capacities(topology, place)
            fine = (capacity > 0) & (carried > 0)
            if not fine.any():
                continue
            seconds = np.where(fine, carried / np.where(fine, capacity, 1.0), 0.0)
            cut = int(np.argmax(seconds))
            yield _cut_bound(topology, place < cut, float(carried[cut]))


def _prefix_capacities(topology: Topology, place: Longs) -> Floats:
    """Capacity from the first k nodes to the others, for k = 0..nodes."""
    first, last = place[topology.link_sources], place[topology.link_targets]
    change = np.zeros(topology.num_nodes + 2)
    forward = last > first
    np.add.at(change, first[forward] + 1, topology.capacities_bytes_per_s[forward])
    np.add.at(change, last[forward] + 1, -topology.capacities_bytes_per_s[forward])
    summed = np.cumsum(change)[:-1]
    summed[np.abs(summed) < 1e-9 * np.abs(summed).max(initial=0.0)] = 0.0
    return summed


def _orders(topology: Topology) -> Iterator[Longs]:
    """Orders of the nodes whose prefixes are promising cuts."""
    yield np.arange(topology.num_nodes)
    if topology.num_nodes > 3:
        yield _spectral_order(topology)


def _spectral_order(topology: Topology) -> Longs:
    """Nodes along the slowest mode of the network, whose prefixes cut few links.

    One inverse-iteration solve of the capacity graph's Laplacian for each of a few rounds.
    """
    from scipy import sparse  # noqa: PLC0415 - heavy
    from scipy.sparse.linalg import splu  # noqa: PLC0415 - heavy

    count = topology.num_nodes
    weights = topology.capacities_bytes_per_s / topology.capacities_bytes_per_s.max(initial=1.0)
    ends = (topology.link_sources, topology.link_targets)
    graph = sparse.coo_matrix((weights, ends), shape=(count, count)).tocsr()
    graph = graph + graph.T
    degrees = np.asarray(graph.sum(axis=1)).ravel()
    grounded = sparse.diags(degrees + 1e-6 * degrees.max(initial=1.0)) - graph
    solve = splu(grounded.tocsc()).solve
    mode = np.cos(np.arange(count) * np.pi / count) + 1e-3 * np.sin(np.arange(count))
    for _ in range(12):
        mode = solve(mode - mode.mean())
        mode -= mode.mean()
        mode /= max(float(np.abs(mode).max()), 1e-300)
    return np.argsort(mode, kind="stable")


def exact_cuts(collective: Collective, topology: Topology, chunk_bytes: Floats) -> Iterator[Bound]:
    """The worst cut of all, where the collective's optimum is one and its shares are equal."""
    name = collective.name
    if name not in ("all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "gather"):
        return
    if collective.num_ranks < 2 or not collective.has_equal_chunks:
        return
    optimum = throughput_optimum(
        topology,
        collective=name,
        root=collective.root or 0,
    )
    inside = np.zeros(topology.num_nodes, dtype=np.bool_)
    inside[list(optimum.cut)] = True
    if name in ("reduce_scatter", "reduce", "gather"):
        inside = ~inside  # found on the reversed network
    share = float(chunk_bytes.sum())
    if name not in ("broadcast", "reduce"):
        share /= collective.num_ranks
    links = inside[topology.link_sources] & ~inside[topology.link_targets]
    capacity = float(topology.capacities_bytes_per_s[links].sum())
    # Whole shares cross; the optimum may be that of capacities rounded to a grid, a bound may not.
    crossing = round(float(optimum.inverse_rate) * capacity)
    yield _cut_bound(topology, inside, crossing * share, optimal=True)
