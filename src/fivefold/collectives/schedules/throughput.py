"""The exact throughput optimum of all-gather, broadcast and scatter, by Dinkelbach on cuts.

For a set S of nodes that leaves out a rank, everything that starts in S must cross from S to the
rest, so the time is at least bytes(S) / capacity(S). The largest such ratio is reached by some
schedule as sizes grow (Edmonds' branchings), so it is the optimum. Dinkelbach's method finds it
with max-flows: with the present ratio as speed, a rank that receives too little shows a cut of a
worse ratio, which is the next speed. Ratios are fractions of integers, so there is no tolerance,
and each step is strict, so it ends.

References: ForestColl, arXiv 2402.06787, section 4 (the cut formula); Dinkelbach, Management
Science 13(7), 1967; Edmonds, Edge-disjoint branchings, 1973.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from fivefold.collectives.schedules.arrays import Array, Longs
from fivefold.errors import ConfigurationError, optional_module, require_one_of
from fivefold.network.topology import Topology

_FINEST = 2**31  # capacities that are no integers become multiples of the largest / this


@dataclass(frozen=True, kw_only=True)
class ThroughputOptimum:
    """The best rate at which an all-gather can run, and the cut that forbids any better."""

    inverse_rate: Fraction
    total_weight: Fraction
    cut: tuple[int, ...] = field(repr=False)
    exact: bool = True

    @property
    def algorithm_bandwidth_bytes_per_s(self) -> Fraction | float:
        """Gathered bytes over time; infinite where nothing has to move."""
        if self.inverse_rate == 0:
            return math.inf
        return self.total_weight / self.inverse_rate


def throughput_optimum(
    topology: Topology,
    weights: Sequence[int] | None = None,
    *,
    collective: str = "all_gather",
    root: int = 0,
    uncut: Array | None = None,
) -> ThroughputOptimum:
    """Find the exact throughput optimum of a collective that copies or sums.

    Args:
        topology: The network; its capacities should be whole bytes per second.
        weights: Share of each rank, integers >= 0; None for one each. For a broadcast the weight
            of the root counts alone.
        collective: ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"reduce"``,
            ``"scatter"`` or ``"gather"``; an all-reduce made of reduce-scatter and all-gather
            takes the sum of both.
        root: The root of the last four.
        uncut: Links that count as wide enough for anything, bool [num_links]; None for none.

    Returns:
        The optimum with its cut, of rate 0 where no cut is left. For the sums, the cut is given on
        the reversed network, whose links it also names.

    Raises:
        ConfigurationError: A weight is negative or too fine, or there is no such collective.
        InfeasibleError: The topology is not connected.
        UnsupportedError: OR-Tools is not installed.

    References:
        ForestColl, arXiv 2402.06787, section 4.

    Examples:
        >>> from fivefold.network.topology import named_topology
        >>> throughput_optimum(named_topology("dgx_a100", boxes=2)).inverse_rate * 10**9
        Fraction(3, 65)
    """
    backwards = {"reduce_scatter": "all_gather", "reduce": "broadcast", "gather": "scatter"}
    message = f"{collective!r} has no throughput optimum by cuts"
    require_one_of(collective, [*backwards, *backwards.values()], message)
    if collective in backwards:
        collective, topology = backwards[collective], topology.reversed()
    topology.require_connected()
    shares = _checked_weights(weights, topology.num_ranks)
    common = int(np.gcd.reduce(shares)) or 1
    shares = shares // common
    ranks = topology.rank_nodes
    capacities, unit, exact = whole_capacities(topology)
    wide = np.zeros(topology.num_links, np.bool_) if uncut is None else uncut
    total = Fraction(int(shares.sum()))  # in units of the common divisor, as the ratio is
    if collective == "scatter":
        ratio, cut = _scatter_ratio(topology, (capacities, wide), shares, root=root)
    else:
        if collective == "broadcast":
            shares = np.where(np.arange(shares.size) == root, shares, 0)
            total = Fraction(int(shares.sum()))
        finder = _CutFinder(topology, (capacities, wide), list(zip(ranks, shares, strict=True)))
        sinks = [int(node) for rank, node in enumerate(ranks) if shares.sum() > shares[rank]]
        ratio, cut = finder.worst_ratio(sinks, start=_ingress_cut(topology, capacities, shares))
    return ThroughputOptimum(
        inverse_rate=common * ratio / unit, total_weight=common * total, cut=cut, exact=exact
    )


def _checked_weights(weights: Sequence[int] | None, num_ranks: int) -> Longs:
    shares = np.ones(num_ranks, dtype=np.int64) if weights is None else np.asarray(weights)
    whole = shares.shape == (num_ranks,) and np.array_equal(shares, shares.astype(np.int64))
    if not whole or (shares < 0).any():
        raise ConfigurationError(
            f"weights are {weights!r}", hint=f"give {num_ranks} integers of at least 0"
        )
    return shares.astype(np.int64)


def whole_capacities(topology: Topology, most: int = _FINEST) -> tuple[Longs, Fraction, bool]:
    """Return capacities as multiples of a unit, the unit in bytes/s, and whether that is exact.

    The unit is their largest common divisor, or where one of them would exceed ``most``, the
    largest capacity over ``most``; capacities are then rounded down.
    """
    values, which = np.unique(topology.capacities_bytes_per_s, return_inverse=True)
    if not values.size:
        return np.zeros(0, np.int64), Fraction(1), True
    rates = [Fraction(rate) for rate in values.tolist()]
    divisor = math.gcd(*(rate.numerator for rate in rates))
    unit = Fraction(divisor, math.lcm(*(rate.denominator for rate in rates)))
    exact = max(rates) <= unit * most
    unit = unit if exact else max(rates) / most
    multiples = np.array([max(int(rate / unit), 1) for rate in rates], np.int64)
    return multiples[which], unit, exact


class FlowSolver:
    """Maximum flows on arcs that stay while their capacities change."""

    def __init__(self) -> None:
        use = "the max-flow of exact cuts and trees"
        module = optional_module("ortools.graph.python.max_flow", extra="collectives", use=use)
        self._solver: Any = module.SimpleMaxFlow()
        self.num_arcs = 0

    def add(
        self, tails: Iterable[int], heads: Iterable[int], capacities: Iterable[int]
    ) -> Sequence[int]:
        """Add arcs; gives their numbers."""
        first = self.num_arcs
        self._solver.add_arcs_with_capacity(
            np.fromiter(tails, np.int32),
            np.fromiter(heads, np.int32),
            np.fromiter(capacities, np.int64),
        )
        self.num_arcs = self._solver.num_arcs()
        return range(first, self.num_arcs)

    def set(self, arc: int, capacity: int) -> None:
        """Change the capacity of one arc."""
        self._solver.set_arc_capacity(arc, capacity)

    def set_all(self, capacities: Longs) -> None:
        """Change the capacities of all arcs."""
        self._solver.set_arcs_capacity(np.arange(self.num_arcs), capacities)

    def flow(self, source: int, target: int) -> int:
        """Return the maximum flow from one node to another."""
        if self._solver.solve(source, target) != self._solver.OPTIMAL:
            message = f"the max-flow to node {target} overflows"
            raise ConfigurationError(message, hint="give capacities with a large common divisor")
        return int(self._solver.optimal_flow())

    def source_side(self) -> Array:
        """Return the nodes on the source's side of a minimum cut of the last flow."""
        return np.asarray(self._solver.get_source_side_min_cut())


def _ingress_cut(topology: Topology, capacities: Longs, shares: Longs) -> Array:
    """Return everything but the rank whose links take longest to bring it the others' shares."""
    ingress = np.bincount(topology.link_targets, capacities, topology.num_nodes)
    entering = np.maximum(ingress[topology.rank_nodes], 1)  # a rank alone has no links
    worst = int(np.argmax((shares.sum() - shares) / entering))
    inside = np.ones(topology.num_nodes, dtype=np.bool_)
    inside[topology.rank_nodes[worst]] = False
    return inside


class _CutFinder:
    """Max-flows from weighted sources to one sink after the other, on one graph."""

    def __init__(
        self, topology: Topology, links: tuple[Longs, Array], supplies: Iterable[tuple[int, int]]
    ) -> None:
        self._topology, (self._capacities, self._wide) = topology, links
        supplied = [(int(node), int(weight)) for node, weight in supplies if weight > 0]
        self._nodes = np.array([node for node, _ in supplied], dtype=np.int64)
        self._weights = np.array([weight for _, weight in supplied], dtype=np.int64)
        self._solver = FlowSolver()
        self._source = topology.num_nodes
        sources = np.concatenate([topology.link_sources, np.full(self._nodes.size, self._source)])
        targets = np.concatenate([topology.link_targets, self._nodes])
        limits = np.concatenate([self._capacities, self._weights])
        self._solver.add(sources.tolist(), targets.tolist(), limits.tolist())

    def ratio(self, inside: Array) -> Fraction:
        """Return the weight that starts in the set over the capacity that leaves it."""
        topology = self._topology
        crossing = inside[topology.link_sources] & ~inside[topology.link_targets]
        if (crossing & self._wide).any():
            return Fraction(0)
        capacity = int(self._capacities[crossing].sum())
        return Fraction(int(self._weights[inside[self._nodes]].sum()), capacity)

    def worst_ratio(
        self, sinks: Sequence[int], *, start: Array
    ) -> tuple[Fraction, tuple[int, ...]]:
        """Return largest weight over capacity among sets that leave out a sink, and such a set."""
        if not sinks or not self._nodes.size:
            return Fraction(0), ()
        worst, inside = self.ratio(start), start
        waiting = list(sinks)
        done: list[int] = []  # sinks that get enough at the present rate
        while waiting:
            self._set_rate(worst)
            unchanged = True
            for place, sink in enumerate(waiting):
                cut = self._deficient_cut(sink, worst)
                if cut is not None:
                    worst, inside, unchanged = self.ratio(cut), cut, False
                    # The others passed at a higher rate than this one, so they still pass.
                    waiting = waiting[place:]
                    break
                done.append(sink)
            if unchanged:
                waiting = []
        return worst, tuple(int(node) for node in np.flatnonzero(inside))

    def _set_rate(self, inverse_rate: Fraction) -> None:
        """Let weights flow at 1 / inverse_rate: capacities and supplies become integers again."""
        p, q = inverse_rate.denominator, inverse_rate.numerator
        largest = q * int(self._capacities.sum()) + p * int(self._weights.sum())
        if largest >= 2**63:
            raise ConfigurationError(
                f"weights and capacities are too fine: their products reach {largest:.3g}",
                hint="give weights with a large common divisor, such as multiples of a kilobyte",
            )
        links = np.where(self._wide, p * int(self._weights.sum()), self._capacities * q)
        limits = np.concatenate([links, self._weights * p])
        self._solver.set_all(limits)

    def _deficient_cut(self, sink: int, inverse_rate: Fraction) -> Array | None:
        """Return the source side of a minimum cut, if the sink does not get everything."""
        found = self._solver.flow(self._source, sink)
        wanted = int(self._weights.sum()) * inverse_rate.denominator
        if found >= wanted:
            return None
        inside = np.zeros(self._topology.num_nodes + 1, dtype=np.bool_)
        inside[self._solver.source_side()] = True
        return inside[:-1]


def _scatter_ratio(
    topology: Topology, links: tuple[Longs, Array], shares: Longs, *, root: int
) -> tuple[Fraction, tuple[int, ...]]:
    """Return the worst ratio of a scatter and its cut: those of its reverse's gather."""
    away = np.where(np.arange(shares.size) == root, 0, shares)
    reverse = topology.reversed()
    finder = _CutFinder(reverse, links, list(zip(topology.rank_nodes, away, strict=True)))
    sink = int(topology.rank_nodes[root])
    start = np.ones(topology.num_nodes, dtype=np.bool_)
    start[sink] = False
    ratio, cut = finder.worst_ratio([sink] if away.any() else [], start=start)
    outside = np.ones(topology.num_nodes, dtype=np.bool_)
    outside[list(cut)] = False
    return ratio, tuple(int(node) for node in np.flatnonzero(outside)) if cut else ()
