"""Packing out-trees into capacities: as many spanning trees at each root as are asked for.

Trees grow arc by arc, several roots side by side so that all of them stay low. A tree grows by an
arc x->y into a node that it does not cover yet, as often as the other unfinished trees can spare
the arc: a set of nodes with y but without x must keep an entrance for every unfinished tree that
lies outside it, and one maximum flow from x to y finds the tightest such set. What the arc cannot
carry is split off as a copy of the tree, which grows on its own. Some arc always works as long as
the capacities suffice (Edmonds).

References: Edmonds, "Edge-disjoint branchings", 1973; Berczi and Frank, "Packing arborescences",
2010; ForestColl, arXiv 2402.06787.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._deadline import check_time
from fivefold.collectives.synthesis._trees_network import INFINITE, FlowSolver
from fivefold.errors import InfeasibleError

_LIVE_ARCS = 4096
"""About how many helper arcs the trees that grow together may need: more cost time per flow."""

_DEAD_ARCS = 8192
"""How many helper arcs of finished trees the solver carries before it is built anew."""


@dataclass
class PackedTree:
    """A tree and how many times it is used.

    Args:
        root: Node it begins at.
        multiplicity: How many equal trees it stands for.
        arcs: Its arcs in the order they were added: parents come before children.
        reached_s: For each covered node the latency from the root, and the number of arcs.
        refused: Arcs that the other trees cannot spare, now or later.
    """

    root: int
    multiplicity: int
    arcs: list[int] = field(default_factory=list)
    reached_s: dict[int, tuple[float, int]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def copy(self, multiplicity: int) -> PackedTree:
        """The same tree as it is now, with another multiplicity."""
        return PackedTree(
            self.root, multiplicity, list(self.arcs), dict(self.reached_s), set(self.refused)
        )


def pack_trees(
    num_nodes: int,
    ends: tuple[Sequence[int], Sequence[int]],
    *,
    capacities: Sequence[int],
    latencies_s: NDArray[np.float64],
    roots: Sequence[int],
) -> list[PackedTree]:
    """Spanning out-trees that use each arc at most as often as its capacity says.

    Args:
        num_nodes: Nodes 0, 1, ..., all of them to be covered by every tree.
        ends: Tails and heads of the arcs.
        capacities: How many trees may use each arc.
        latencies_s: Of each arc; trees take near nodes first.
        roots: How many trees begin at each node.

    Returns:
        The trees; the multiplicities of those of a root add up to its number.

    Raises:
        InfeasibleError: The capacities do not suffice, or the time is over.
    """
    return _Packer(num_nodes, ends, list(capacities), latencies_s, list(roots)).run()


class _Packer:
    def __init__(
        self,
        num_nodes: int,
        ends: tuple[Sequence[int], Sequence[int]],
        capacities: list[int],
        latencies_s: NDArray[np.float64],
        roots: list[int],
    ) -> None:
        self.num_nodes, self.fresh = num_nodes, roots
        self.tails, self.heads = list(ends[0]), list(ends[1])
        self.residual = capacities
        self.latencies_s = latencies_s.tolist()
        self.leaving: list[list[int]] = [[] for _ in range(num_nodes)]
        for arc, tail in enumerate(self.tails):
            self.leaving[tail].append(arc)
        self.waiting = sum(roots)
        self.live: dict[int, PackedTree] = {}
        self.offers: list[tuple[float, int, int, int]] = []
        self.started = 0
        self._build()

    def _build(self) -> None:
        """The solver: the arcs, a hub that the tail feeds, and what the hub feeds in turn."""
        count, self.hub = self.num_nodes, self.num_nodes
        self.solver = FlowSolver()
        self.solver.add(self.tails, self.heads, self.residual)
        self.to_hub = self.solver.add(range(count), [self.hub] * count, [0] * count)
        self.to_root = self.solver.add([self.hub] * count, range(count), self.fresh)
        self.helper_of: dict[int, int] = {}
        self.feed_of: dict[int, int] = {}
        self.next_node = self.hub + 1
        for number in self.live:
            self._add_helper(number)

    def _add_helper(self, number: int) -> None:
        """A node that the hub feeds with the tree's multiplicity, joined to all it covers."""
        tree, node = self.live[number], self.next_node
        self.next_node += 1
        self.helper_of[number] = node
        self.feed_of[number] = self.solver.add([self.hub], [node], [tree.multiplicity])[0]
        covered = list(tree.reached_s)
        self.solver.add([node] * len(covered), covered, [INFINITE] * len(covered))

    def run(self) -> list[PackedTree]:
        """All trees.

        Raises:
            InfeasibleError: Nothing can grow any more, or the time is over.
        """
        done = []
        together = max(1, _LIVE_ARCS // self.num_nodes)
        while self._start(together):
            while self.live:
                if not self.offers:
                    roots = sorted({tree.root for tree in self.live.values()})
                    raise InfeasibleError(
                        f"the capacities do not suffice for the trees of nodes {roots}",
                        hint="ask for fewer trees",
                    )
                check_time()
                latency_s, hops, number, arc = heapq.heappop(self.offers)
                if number in self.live and self._grow(number, arc, (latency_s, hops)):
                    done.append(self._finish(number))
        return done

    def _start(self, together: int) -> bool:
        """Take the next roots in hand; false where none is left."""
        roots = [node for node, count in enumerate(self.fresh) if count][:together]
        for root in roots:
            tree = PackedTree(root, self.fresh[root], reached_s={root: (0.0, 0)})
            self.fresh[root] = 0
            self.solver.set(self.to_root[root], 0)
            self._add(tree)
        return bool(roots)

    def _add(self, tree: PackedTree) -> None:
        number = self.started
        self.started += 1
        self.live[number] = tree
        self._add_helper(number)
        for node in tree.reached_s:
            self._offer(number, node)

    def _finish(self, number: int) -> PackedTree:
        tree = self.live.pop(number)
        self.waiting -= tree.multiplicity
        self.solver.set(self.feed_of[number], 0)
        live = sum(len(one.reached_s) for one in self.live.values())
        if self.solver.num_arcs > len(self.tails) + 2 * live + _DEAD_ARCS:
            self._build()
        return tree

    def _grow(self, number: int, arc: int, reached: tuple[float, int]) -> bool:
        """Add the arc to the tree if it can be spared; whether the tree is whole then."""
        tree, head = self.live[number], self.heads[arc]
        if head in tree.reached_s or arc in tree.refused:
            return False
        amount = self._spare(number, arc)
        if not amount:
            # What is refused now is refused later: the tight set that forbids it stays tight.
            tree.refused.add(arc)
            return False
        if amount < tree.multiplicity:
            self._add(tree.copy(tree.multiplicity - amount))
            tree.multiplicity = amount
            self.solver.set(self.feed_of[number], amount)
        self.residual[arc] -= amount
        self.solver.set(arc, self.residual[arc])
        tree.arcs.append(arc)
        tree.reached_s[head] = reached
        self.solver.add([self.helper_of[number]], [head], [INFINITE])
        self._offer(number, head)
        return len(tree.reached_s) == self.num_nodes

    def _offer(self, number: int, node: int) -> None:
        tree = self.live[number]
        latency_s, hops = tree.reached_s[node]
        for arc in self.leaving[node]:
            if self.heads[arc] not in tree.reached_s and arc not in tree.refused:
                reach_s = latency_s + self.latencies_s[arc]
                heapq.heappush(self.offers, (reach_s, hops + 1, number, arc))

    def _spare(self, number: int, arc: int) -> int:
        """How many of the tree can use the arc without harm to the unfinished trees."""
        tree = self.live[number]
        room = min(self.residual[arc], tree.multiplicity)
        others = self.waiting - tree.multiplicity
        if room <= 0 or not others:
            return room
        opened, feed = self.to_hub[self.tails[arc]], self.feed_of[number]
        self.solver.set(opened, INFINITE)
        self.solver.set(feed, 0)
        found = self.solver.flow(self.tails[arc], self.heads[arc])
        self.solver.set(opened, 0)
        self.solver.set(feed, tree.multiplicity)
        return max(0, min(room, found - others))
