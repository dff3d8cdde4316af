"""A topology in whole numbers, as the tree algorithms need it, and one max-flow solver for all.

Capacities are floats in a topology and become exact integers here, so that every quotient of the
tree algorithms is a fraction without rounding. The solver keeps its arcs and changes capacities
only, for building a graph costs more than solving one. This module knows no trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UnsupportedError
from fivefold.network.topology import Topology

try:
    from ortools.graph.python import max_flow
except ImportError as error:  # pragma: no cover - the development environment has it
    message = "ortools is not installed, and spanning trees are found with its max-flow solver"
    raise UnsupportedError(message, hint="pip install 'fivefold[collectives]'") from error

Longs = NDArray[np.int64]

INFINITE = 1 << 58
"""More than every sum of capacities that is let in; sums of a few of it still fit 64 bits."""

_LARGEST_CAPACITY = 1 << 36
"""Capacities of more digits than this are rounded down to it, a change of 2e-11 at most."""


@dataclass(frozen=True)
class Network:
    """Nodes and capacitated arcs; arc i is link i of the topology it was made from."""

    num_nodes: int
    terminals: Longs
    tails: Longs
    heads: Longs
    capacities: Longs
    latencies_s: NDArray[np.float64]
    unit: Fraction

    @property
    def num_terminals(self) -> int:
        """Return the number of ranks."""
        return len(self.terminals)

    @cached_property
    def switches(self) -> list[int]:
        """Nodes that only forward."""
        ranks = set(self.terminals.tolist())
        return [node for node in range(self.num_nodes) if node not in ranks]

    def with_capacities(self, capacities: Longs) -> Network:
        """The same arcs with other capacities; the unit is 1 then, for it has no meaning more."""
        return replace(self, capacities=np.asarray(capacities, np.int64), unit=Fraction(1))

    def excess(self, node: int) -> int:
        """Capacity into a node less the capacity out of it."""
        entering = int(self.capacities[self.heads == node].sum())
        return entering - int(self.capacities[self.tails == node].sum())


def integer_network(topology: Topology) -> Network:
    """Return the topology with its capacities as the smallest whole numbers of one common unit."""
    rates = [Fraction(rate) for rate in topology.capacities_bytes_per_s.tolist()]
    unit = Fraction(1)
    if rates:
        numerator = math.gcd(*(rate.numerator for rate in rates))
        unit = Fraction(numerator, math.lcm(*(rate.denominator for rate in rates)))
        # No common unit of use: floats that were computed have one of 2**-k.
        unit = max(unit, max(rates) / _LARGEST_CAPACITY)
    units = [int(rate / unit) for rate in rates]
    common = math.gcd(*units) if units else 1
    return Network(
        num_nodes=topology.num_nodes,
        terminals=topology.rank_nodes.astype(np.int64),
        tails=topology.link_sources.astype(np.int64),
        heads=topology.link_targets.astype(np.int64),
        capacities=np.array([value // common for value in units], np.int64),
        latencies_s=np.asarray(topology.latencies_s),
        unit=unit * common,
    )


class FlowSolver:
    """Maximum flows on arcs that stay while their capacities change."""

    def __init__(self) -> None:
        self._solver = max_flow.SimpleMaxFlow()
        self.flows = 0
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

    def flow(self, source: int, target: int) -> int:
        """Return the maximum flow from one node to another."""
        self.flows += 1
        status = self._solver.solve(source, target)
        assert status == self._solver.OPTIMAL, f"max-flow ended with {status}"
        return int(self._solver.optimal_flow())


@dataclass(frozen=True)
class FixedRate:
    """A number of trees per root and the time of one tree's unit."""

    k: int
    u: Fraction

    def capacities(self, network: Network) -> Longs:
        """Return how many trees each arc may be in."""
        numerator, denominator = self.u.numerator, self.u.denominator
        counts = [value * numerator // denominator for value in network.capacities.tolist()]
        return np.array(counts, np.int64)


def least_rate(network: Network, roots: Sequence[int], *, k: int, bound: Fraction) -> FixedRate:
    """Return the least U for k trees at each root."""
    suffices = _sufficiency(network, [k * root for root in roots])
    low, high = Fraction(0), k * bound
    while not suffices(high):
        low, high = high, 2 * high
    high = _largest_change(network, high)
    while True:
        middle = (low + high) / 2
        change = _largest_change(network, middle)
        if change > low and suffices(change):
            high = change
        elif change > low or _smallest_change(network, middle) < high:
            low = middle
        else:  # nothing changes between the two
            return FixedRate(k, high)


def next_rate(network: Network, rate: FixedRate, *, fine: bool) -> FixedRate:
    """Return a rate about 3 % slower, or 25 %: the next change of a floor from there on."""
    slower = Fraction(33, 32) if fine else Fraction(5, 4)
    return FixedRate(rate.k, _smallest_change(network, rate.u * slower))


def _largest_change(network: Network, u: Fraction) -> Fraction:
    """Return the largest multiple of some 1 / capacity that is at most u."""
    distinct = np.unique(network.capacities).tolist()
    return max(Fraction(math.floor(u * value), value) for value in distinct)


def _smallest_change(network: Network, u: Fraction) -> Fraction:
    """Return the smallest multiple of some 1 / capacity that exceeds u."""
    distinct = np.unique(network.capacities).tolist()
    return min(Fraction(math.floor(u * value) + 1, value) for value in distinct)


def _sufficiency(network: Network, roots: list[int]) -> Callable[[Fraction], bool]:
    """Tells of a U whether every rank can be reached by all trees of all roots."""
    solver = FlowSolver()
    arcs = solver.add(network.tails.tolist(), network.heads.tolist(), network.capacities.tolist())
    source, terminals = network.num_nodes, network.terminals.tolist()
    solver.add([source] * len(terminals), terminals, roots)
    needed = sum(roots)

    def suffices(u: Fraction) -> bool:
        for arc, count in zip(arcs, FixedRate(1, u).capacities(network).tolist(), strict=True):
            solver.set(arc, count)
        for place, node in enumerate(terminals):
            if solver.flow(source, node) < needed:
                terminals.insert(0, terminals.pop(place))  # it will fail first the next time too
                return False
        return True

    return suffices
