"""Removing switches: what went through a switch becomes direct arcs between its neighbours.

Splitting arcs u->w and w->t of a switch w moves capacity to an arc u->t, only as far as every set
of nodes with a rank in it still lets in all trees that begin outside. Sets that hold w but neither
u nor t lose capacity, and sets that hold u and t but not w; max-flows find the smallest of each.
References: ForestColl, arXiv 2402.06787; Bang-Jensen, Frank and Jackson, 1995.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules.arrays import Longs
from fivefold.collectives.schedules.throughput import FlowSolver, whole_capacities
from fivefold.collectives.synthesis._solver import check_time
from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology

INFINITE = 1 << 58  # more than any sum of capacities; sums of a few of it still fit 64 bits
_MANY_PAIRS = 512  # pairs of neighbours of one switch up to which ``auto`` joins all of them
_LIVE_ARCS = 4096  # about how many helper arcs trees that grow together may need: they cost time
_DEAD_ARCS = 8192  # helper arcs of finished trees the solver carries before it is built anew

Path = tuple[int, ...]


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


def integer_network(topology: Topology) -> Network:
    """Return the topology with its capacities as the smallest whole numbers of one common unit."""
    capacities, unit, _ = whole_capacities(topology)
    return Network(
        num_nodes=topology.num_nodes,
        terminals=topology.rank_nodes.astype(np.int64),
        tails=topology.link_sources.astype(np.int64),
        heads=topology.link_targets.astype(np.int64),
        capacities=capacities,
        latencies_s=np.asarray(topology.latencies_s),
        unit=unit,
    )


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
    """Test for a U that every rank can be reached by all trees of all roots."""
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


@dataclass
class Bundle:
    """Paths side by side between the same two nodes, each with a capacity."""

    paths: list[tuple[Path, int]] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Capacity of all paths together."""
        return sum(amount for _, amount in self.paths)

    def take(self, amount: int) -> list[tuple[Path, int]]:
        """Remove capacity from the first paths; gives what was removed."""
        taken = []
        while amount > 0:
            path, available = self.paths[0]
            part = min(available, amount)
            taken.append((path, part))
            amount -= part
            if part == available:
                self.paths.pop(0)
            else:
                self.paths[0] = (path, available - part)
        return taken


SplitNetwork = dict[tuple[int, int], Bundle]


def remove_switches(network: Network, roots: Sequence[int], *, spread: str) -> SplitNetwork:
    """Return direct arcs between compute nodes for as many trees as the network with switches."""
    arcs: SplitNetwork = defaultdict(Bundle)
    for link in range(len(network.tails)):
        if amount := int(network.capacities[link]):
            pair = (int(network.tails[link]), int(network.heads[link]))
            arcs[pair].paths.append(((link,), amount))
    # Few neighbours first: their splits are few, and they make the rest smaller.
    switches = set(range(network.num_nodes)) - set(network.terminals.tolist())
    for node in sorted(switches, key=lambda one: (sum(one in pair for pair in arcs), one)):
        _Splitter(network, roots, arcs, node).run(spread)
    return {pair: bundle for pair, bundle in arcs.items() if bundle.paths}


class _Splitter:
    """All splits of one switch."""

    def __init__(
        self, network: Network, roots: Sequence[int], arcs: SplitNetwork, switch: int
    ) -> None:
        self.arcs, self.switch = arcs, switch
        self.ends = (network.tails, network.heads)
        self.terminals = network.terminals.tolist()
        self.needed = sum(roots)
        self.sources = sorted({u for u, t in arcs if t == switch and arcs[u, t].paths})
        self.targets = sorted({t for u, t in arcs if u == switch and arcs[u, t].paths})
        self.super_source, self.gate = network.num_nodes, network.num_nodes + 1
        self._build(roots)

    def _build(self, roots: Sequence[int]) -> None:
        self.solver = FlowSolver()
        pairs = set(self.arcs) | {(u, t) for u in self.sources for t in self.targets if u != t}
        ordered = sorted(pairs)
        self.number = dict(
            zip(ordered, self._add(ordered, [self.arcs[pair].capacity for pair in ordered]),
                strict=True)
        )  # fmt: skip
        self._add([(self.super_source, node) for node in self.terminals], roots)
        # Helpers, closed until a flow needs them: from a neighbour or the switch to the super
        # source, from a compute node to the gate, from the gate to the switch or a neighbour.
        near = [*self.sources, self.switch]
        self.to_source = self._helpers([(node, self.super_source) for node in near])
        self.to_gate = self._helpers([(node, self.gate) for node in self.terminals])
        self.from_gate = self._helpers([(self.gate, node) for node in {*self.targets, self.switch}])

    def _add(self, pairs: Iterable[tuple[int, int]], capacities: Iterable[int]) -> Sequence[int]:
        pairs = list(pairs)
        return self.solver.add((u for u, _ in pairs), (t for _, t in pairs), capacities)

    def _helpers(self, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
        return dict(zip(pairs, self._add(pairs, [0] * len(pairs)), strict=True))

    def run(self, spread: str) -> None:
        """Split until nothing is left to move, then drop the switch."""
        if spread == "auto":
            pairs = len(self.sources) * len(self.targets)
            spread = "many" if pairs <= _MANY_PAIRS else "few"
        for shared in (True, False) if spread == "many" else (False,):
            quota = self._shares() if shared else {}
            for t in self.targets:
                for u in self.sources:
                    check_time()
                    if u != t:
                        self._split(u, t, quota.get((u, t), INFINITE))
        for pair in [pair for pair in self.arcs if self.switch in pair]:
            del self.arcs[pair]

    def _shares(self) -> dict[tuple[int, int], int]:
        """Return each pair's part if all sources spread over all targets: this keeps trees flat."""
        entering = {u: self.arcs[u, self.switch].capacity for u in self.sources}
        leaving = {t: self.arcs[self.switch, t].capacity for t in self.targets}
        total = sum(leaving.values())
        return {
            (u, t): max(1, entering[u] * leaving[t] // max(1, total - leaving.get(u, 0)))
            for u in self.sources
            for t in self.targets
        }

    def _split(self, u: int, t: int, most: int) -> None:
        """Move as much to the direct arc as all sets can lose, ``most`` at most."""
        room = min(self.arcs[u, self.switch].capacity, self.arcs[self.switch, t].capacity, most)
        if room <= 0:
            return
        # Sets that hold u and t but not the switch.
        opened = [self.to_source[self.switch, self.super_source]]
        gates: list[list[int]] = [[]]
        if u not in self.terminals and t not in self.terminals:
            opened.append(self.from_gate[self.gate, t])
            gates = [[self.to_gate[v, self.gate]] for v in self.terminals]
        flows = (self._flow(self.switch, t, [*opened, *gate], (u, t)) for gate in gates)
        room = min(room, min(flows) - self.needed)
        # Sets that hold the switch but neither u nor t.
        opened = [self.to_source[u, self.super_source], self.from_gate[self.gate, self.switch]]
        for v in list(self.terminals):
            if room <= 0:
                return
            if v not in {u, t}:
                gate = self.to_gate[v, self.gate]
                slack = self._flow(u, self.switch, [*opened, gate], (u, t)) - self.needed
                if slack < room:
                    room = slack
                    # The same cut is often the tight one for the next pair as well.
                    self.terminals.remove(v)
                    self.terminals.insert(0, v)
        if room > 0:
            self._move(u, t, room)

    def _flow(self, source: int, target: int, opened: list[int], pair: tuple[int, int]) -> int:
        for arc in [*opened, self.number[pair]]:
            self.solver.set(arc, INFINITE)
        found = self.solver.flow(source, target)
        for arc in opened:
            self.solver.set(arc, 0)
        self._set_pair(pair)
        return found

    def _set_pair(self, pair: tuple[int, int]) -> None:
        self.solver.set(self.number[pair], self.arcs[pair].capacity)

    def _move(self, u: int, t: int, amount: int) -> None:
        arcs, switch = self.arcs, self.switch
        first, second = arcs[u, switch].take(amount), arcs[switch, t].take(amount)
        for path, part in _joined(first, second):
            arcs[u, t].paths.append((_without_loops(path, self.ends), part))
        for pair in ((u, switch), (switch, t), (u, t)):
            self._set_pair(pair)


def _joined(
    first: list[tuple[Path, int]], second: list[tuple[Path, int]]
) -> list[tuple[Path, int]]:
    """Join paths end to end, matched in order."""
    joined = []
    left, right = Bundle(first), Bundle(second)
    while left.paths:
        part = min(left.paths[0][1], right.paths[0][1])
        ((before, _),), ((after, _),) = left.take(part), right.take(part)
        joined.append((before + after, part))
    return joined


def _without_loops(path: Path, ends: tuple[Longs, Longs]) -> Path:
    """Return the path without what lies between two visits to one node."""
    tails, heads = ends
    kept: list[int] = []
    for link in path:
        kept.append(link)
        for place in range(len(kept)):
            if tails[kept[place]] == heads[link]:
                del kept[place:]
                break
    return tuple(kept)


@dataclass
class PackedTree:
    """A tree and how many times it is used."""

    root: int
    multiplicity: int
    arcs: list[int] = field(default_factory=list)
    reached_s: dict[int, tuple[float, int]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


class Packer:
    """Packs spanning out-trees that use each arc at most as often as its capacity says."""

    def __init__(
        self,
        num_nodes: int,
        ends: tuple[list[int], list[int]],
        capacities: list[int],
        latencies_s: list[float],
        roots: list[int],
    ) -> None:
        self.num_nodes, self.fresh = num_nodes, roots
        self.tails, self.heads = ends
        self.residual, self.latencies_s = capacities, latencies_s
        self.leaving: list[list[int]] = [[] for _ in range(num_nodes)]
        for arc, tail in enumerate(self.tails):
            self.leaving[tail].append(arc)
        self.waiting = sum(roots)
        self.live: dict[int, PackedTree] = {}
        self.offers: list[tuple[float, int, int, int]] = []
        self.started = 0
        self._build()

    def _build(self) -> None:
        """Build the solver: the arcs, a hub that the tail feeds, and what the hub feeds in turn."""
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
        """Add a node that the hub feeds with the tree's multiplicity, joined to all it covers."""
        tree, node = self.live[number], self.next_node
        self.next_node += 1
        self.helper_of[number] = node
        self.feed_of[number] = self.solver.add([self.hub], [node], [tree.multiplicity])[0]
        covered = list(tree.reached_s)
        self.solver.add([node] * len(covered), covered, [INFINITE] * len(covered))

    def run(self) -> list[PackedTree]:
        """Return all trees."""
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
            rest = deepcopy(tree)
            rest.multiplicity -= amount
            self._add(rest)
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
        """Return how many of the tree can use the arc without harm to the unfinished trees."""
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
