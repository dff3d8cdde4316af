"""The exact throughput optimum of all-gather, broadcast and gather, by Dinkelbach on cuts.

All that starts in a set of nodes and is asked for outside must leave it; the largest ratio of bytes
to capacity is reached as sizes grow (Edmonds), so it is the optimum. With the present ratio as
speed, a rank that receives too little in a max-flow shows a cut of a worse ratio, the next speed.
References: ForestColl, arXiv 2402.06787, section 4; Dinkelbach, Management Science 13(7), 1967.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from fivefold.collectives.schedules.arrays import Array, Longs
from fivefold.errors import ConfigurationError, optional_module, require_one_of, require_whole
from fivefold.network.topology import Topology

_FINEST = 2**31  # capacities that are no integers become multiples of the largest / this


@dataclass(frozen=True, kw_only=True)
class ThroughputOptimum:
    """The best rate at which an all-gather can run, and the cut that forbids any better."""

    inverse_rate: Fraction
    cut: tuple[int, ...] = field(repr=False)
    exact: bool = True


def throughput_optimum(
    topology: Topology,
    *,
    collective: str = "all_gather",
    root: int = 0,
    uncut: Array | None = None,
) -> ThroughputOptimum:
    """Find the exact throughput optimum of a collective that copies or sums.

    Args:
        topology: The network; its capacities should be whole bytes per second.
        collective: ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, ``"reduce"``,
            ``"scatter"`` or ``"gather"``; an all-reduce made of reduce-scatter and all-gather
            takes the sum of both.
        root: The root of the last four.
        uncut: Links that count as wide enough for anything, bool [num_links]; None for none.

    Returns:
        The optimum for a share of 1 for each rank, with the nodes on the sending side of its cut;
        of rate 0 where no cut is left.

    Raises:
        ConfigurationError: There is no such collective or root, or capacities are too fine.
        InfeasibleError: The topology is not connected.
        UnsupportedError: OR-Tools is not installed.

    References:
        ForestColl, arXiv 2402.06787, section 4.

    Examples:
        >>> from fivefold.network.topology import named_topology
        >>> throughput_optimum(named_topology("dgx_a100", boxes=2)).inverse_rate * 10**9
        Fraction(3, 65)
    """
    backwards = {"reduce_scatter": "all_gather", "reduce": "broadcast", "scatter": "gather"}
    message = f"{collective!r} has no throughput optimum by cuts"
    require_one_of(collective, [*backwards, *backwards.values()], message)
    require_whole("root", root, least=0, most=topology.num_ranks - 1)
    kind = backwards.get(collective, collective)
    network = topology.reversed() if collective in backwards else topology
    network.require_connected()
    capacities, unit, exact = whole_capacities(network)
    wide = np.zeros(network.num_links, np.bool_) if uncut is None else uncut
    at_root = np.arange(network.num_ranks) == root
    supplies = {"all_gather": np.ones_like(at_root), "broadcast": at_root, "gather": ~at_root}[kind]
    sinks = np.flatnonzero(at_root if kind == "gather" else supplies.sum() > supplies)
    ratio, inside = Fraction(0), np.zeros(network.num_nodes, np.bool_)
    if sinks.size and supplies.any():
        ratio, inside = _worst_cut(network, (capacities, wide), supplies.astype(np.int64), sinks)
        inside = ~inside if network is not topology else inside
    return ThroughputOptimum(
        inverse_rate=ratio / unit,
        cut=tuple(np.flatnonzero(inside).tolist()),
        exact=exact,
    )


def whole_capacities(topology: Topology, most: int = _FINEST) -> tuple[Longs, Fraction, bool]:
    """Return capacities as multiples of a unit, the unit in bytes/s, and whether that is exact.

    Where their divisor is below the largest / ``most``, that is the unit; all are rounded down.
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


def _worst_cut(
    topology: Topology, links: tuple[Longs, Array], supplies: Longs, sinks: Longs
) -> tuple[Fraction, Array]:
    """Return the largest supply over capacity of sets that leave out a sink, and such a set."""
    capacities, wide = links
    ranks, total = topology.rank_nodes, int(supplies.sum())
    fed, source = np.flatnonzero(supplies), topology.num_nodes
    solver = FlowSolver()
    solver.add(
        np.append(topology.link_sources, np.full(fed.size, source)),
        np.append(topology.link_targets, ranks[fed]),
        np.append(capacities, supplies[fed]),
    )

    def ratio(inside: Array) -> Fraction:
        crossing = inside[topology.link_sources] & ~inside[topology.link_targets]
        if (crossing & wide).any():
            return Fraction(0)
        return Fraction(int(supplies[inside[ranks]].sum()), int(capacities[crossing].sum()))

    # First all but the sink whose links take longest to bring it the others' shares.
    entering = np.bincount(topology.link_targets, capacities, topology.num_nodes)[ranks[sinks]]
    first = int(np.argmax((total - supplies[sinks]) / np.maximum(entering, 1)))
    inside = np.ones(topology.num_nodes, dtype=np.bool_)
    inside[ranks[sinks[first]]] = False
    worst, waiting = ratio(inside), ranks[sinks].tolist()
    # Ratios are fractions, so nothing is rounded and each cut's is strictly worse: it ends.
    while True:
        # Supplies flow at 1 / worst: all become whole numbers again.
        p, q = worst.denominator, worst.numerator
        largest = q * int(capacities.sum()) + p * total
        if largest >= 2**63:
            raise ConfigurationError(
                f"the capacities are too fine: their products reach {largest:.3g}",
                hint="give capacities with a large common divisor, such as whole GB/s",
            )
        solver.set_all(np.append(np.where(wide, p * total, capacities * q), supplies[fed] * p))
        short = (at for at, sink in enumerate(waiting) if solver.flow(source, sink) < total * p)
        if (place := next(short, None)) is None:
            return worst, inside
        inside = np.zeros(topology.num_nodes + 1, dtype=np.bool_)
        inside[solver.source_side()] = True
        inside = inside[:-1]
        worst = ratio(inside)
        waiting = waiting[place:]  # the others passed at a higher rate, so they still pass
