"""Rates for a given number of trees: the least U such that whole trees fit whole capacities.

With k trees per root and U seconds per tree, a link of capacity b is in at most floor(U * b)
trees. U is least when the floors just suffice for every cut, which one maximum flow for each
rank tells. Only multiples of 1 / b change a floor, so the search ends at an exact fraction.

References: ForestColl, arXiv 2402.06787 (the fixed-k variant).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fivefold.collectives.synthesis._trees_network import FlowSolver, Longs, Network


@dataclass(frozen=True)
class FixedRate:
    """A number of trees per root and the time of one tree's unit.

    Args:
        k: Trees per root.
        u: Seconds per unit in the network's unit of capacity: trees on a link <= u * capacity.
    """

    k: int
    u: Fraction

    def capacities(self, network: Network) -> Longs:
        """How many trees each arc may be in."""
        numerator, denominator = self.u.numerator, self.u.denominator
        counts = [value * numerator // denominator for value in network.capacities.tolist()]
        return np.array(counts, np.int64)


def least_rate(network: Network, roots: Sequence[int], *, k: int, bound: Fraction) -> FixedRate:
    """The least U for k trees at each root.

    Args:
        network: The network.
        roots: 1 where a rank is a root, else 0.
        k: Trees per root.
        bound: Time per unit of shard that cannot be undercut.

    Returns:
        The rate.
    """
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
    """A rate about 3 % slower, or 25 %: the next change of a floor from there on."""
    slower = Fraction(33, 32) if fine else Fraction(5, 4)
    return FixedRate(rate.k, _smallest_change(network, rate.u * slower))


def _largest_change(network: Network, u: Fraction) -> Fraction:
    """The largest multiple of some 1 / capacity that is at most u."""
    distinct = np.unique(network.capacities).tolist()
    return max(Fraction(math.floor(u * value), value) for value in distinct)


def _smallest_change(network: Network, u: Fraction) -> Fraction:
    """The smallest multiple of some 1 / capacity that exceeds u."""
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
