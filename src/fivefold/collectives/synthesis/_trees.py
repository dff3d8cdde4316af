"""Spanning-tree packing: collectives at the throughput optimum of a topology, in polynomial time.

The optimum of the cuts fixes a number of trees ``k`` for each root, and ``U``, so that no link is
in more than ``U`` times its capacity; switches are removed, trees packed (both ``_packing``), and
paths through switches put back. References: ForestColl, arXiv 2402.06787; Edmonds, 1973.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from fivefold.collectives.schedules import (
    Collective,
    Schedule,
    named_collective,
    throughput_optimum,
)
from fivefold.collectives.schedules.arrays import Longs, rows_of
from fivefold.collectives.schedules.schedule import compose_all_reduce, require_match
from fivefold.collectives.synthesis._dispatch import dispatch
from fivefold.collectives.synthesis._packing import (
    Bundle,
    FixedRate,
    Network,
    PackedTree,
    Packer,
    integer_network,
    least_rate,
    next_rate,
    remove_switches,
)
from fivefold.collectives.synthesis._solver import OutOfTime
from fivefold.errors import ConfigurationError, InfeasibleError, require_one_of, require_whole
from fivefold.network.topology import Topology

Connections = Literal["auto", "many", "few"]

_LARGEST_EXACT = 4096  # trees per root up to which the exact number is used unasked
_FINE_ATTEMPTS, _COARSE_ATTEMPTS = 16, 48  # rates to try where the first is too fast
_FIXED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_EVERY_RANK = ("all_gather", "reduce_scatter", "all_reduce")
_ONE_ROOT = ("broadcast", "reduce")
_SUMS = ("reduce_scatter", "reduce")
_MOST_TRANSFERS = 1_000_000
_MOST_DOUBLINGS = 10
_MOST_WORSE = 3
_FINE_ENOUGH = 0.0025  # what the last doubling of the chunks gained: all further ones gain as much


@dataclass(frozen=True, kw_only=True)
class SpanningTree:
    """One out-tree; edges are listed parents first."""

    root: int
    multiplicity: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the number of edges from the root to the end of each edge."""
        depth = {self.root: 0}
        for source, target in zip(self.sources, self.targets, strict=True):
            depth[target] = depth[source] + 1
        return tuple(depth[target] for target in self.targets)

    @property
    def height(self) -> int:
        """Edges on the longest path from the root; 0 for a single rank."""
        return max(self.depths, default=0)


@dataclass(frozen=True, kw_only=True)
class TreePacking:
    """Trees that share the links of a topology without exceeding its rate."""

    topology: Topology
    trees: tuple[SpanningTree, ...]
    root: int | None
    k: int
    u_s: Fraction
    optimum_s_per_byte: Fraction

    @property
    def inverse_rate_s_per_byte(self) -> Fraction:
        """Return seconds per byte of one root's shard, ``U / k``."""
        return self.u_s / self.k

    @property
    def algorithm_bandwidth_bytes_per_s(self) -> float:
        """Size over time of large messages: the gathered output, or the buffer of the one root."""
        roots = 1 if self.root is not None else self.topology.num_ranks
        rate = self.inverse_rate_s_per_byte
        return float(roots / rate) if rate else math.inf

    @property
    def is_optimal(self) -> bool:
        """Return whether no algorithm at all can be faster on large messages."""
        return self.inverse_rate_s_per_byte == self.optimum_s_per_byte

    @property
    def height(self) -> int:
        """Edges on the longest path of all trees."""
        return max((tree.height for tree in self.trees), default=0)

    @cached_property
    def backwards(self) -> TreePacking:
        """Trees of the reversed topology, which reductions run backwards."""
        return spanning_trees(
            self.topology.reversed(), k=None if self.is_optimal else self.k, root=self.root
        )

    def check(self) -> None:
        """Do nothing where all trees span, every root has ``k``, and no link has too many."""
        ranks, loads = self.topology.num_ranks, Counter[int]()
        found = Counter[int]()
        for number, tree in enumerate(self.trees):
            found[tree.root] += tree.multiplicity
            covered = {tree.root}
            for source, target in zip(tree.sources, tree.targets, strict=True):
                if source not in covered or target in covered:
                    raise InfeasibleError(f"tree {number} has no use for {source} -> {target}")
                covered.add(target)
            if len(covered) != ranks:
                raise InfeasibleError(f"tree {number} covers {len(covered)} of {ranks} ranks")
            for route in tree.routes:
                for link in route:
                    loads[link] += tree.multiplicity
        roots = range(ranks) if self.root is None else (self.root,)
        if any(found[root] != self.k for root in roots) and ranks > 1:
            raise InfeasibleError(f"the roots have {dict(found)} trees instead of {self.k}")
        for link, load in loads.items():
            if load > self.u_s * Fraction(float(self.topology.capacities_bytes_per_s[link])):
                raise InfeasibleError(f"link {link} is in {load} trees, too many for its capacity")

    def to_schedule(
        self,
        collective: Collective | str,
        *,
        chunks: int | None = None,
        size_bytes: float | None = None,
    ) -> Schedule:
        """Send the chunks of each root down its trees, one after another.

        Reductions run the trees of the reversed topology backwards; an all-reduce is a
        reduce-scatter, then an all-gather.
        """
        name = (collective if isinstance(collective, str) else collective.name).replace("-", "_")
        require_one_of(name, (*_EVERY_RANK, *_ONE_ROOT), f"spanning trees do no {name}")
        if (name in _ONE_ROOT) != (self.root is not None):
            wanted = "one root" if name in _ONE_ROOT else "a root at every rank"
            raise ConfigurationError(
                f"{name} needs trees with {wanted}",
                hint="pass root= to spanning_trees for broadcast and reduce, and only for them",
            )
        if isinstance(collective, Collective):
            chunks = _per_root(self, collective)
            return self._made(name, chunks, size_bytes).replaced(collective=collective)
        if chunks is not None:
            require_whole("chunks", chunks)
        return self._made(name, chunks, size_bytes)

    def _made(self, name: str, chunks: int | None, size_bytes: float | None) -> Schedule:
        if name in _SUMS:
            copied = _best(self.backwards, chunks, size_bytes)
            return copied.inverted().replaced(topology=self.topology)
        spread = _best(self, chunks, size_bytes)
        if name != "all_reduce":
            return spread
        same = spread.collective.num_chunks // self.topology.num_ranks
        return compose_all_reduce(self._made("reduce_scatter", same, size_bytes), spread)


def spanning_trees(
    topology: Topology,
    *,
    k: int | None = None,
    root: int | None = None,
    connections: Connections = "auto",
) -> TreePacking:
    """Pack spanning trees: at the throughput optimum, or with a given number per root.

    Args:
        topology: The network; every rank must reach every other.
        k: Trees of each root; None for the number that reaches the optimum exactly, or, where
            that exceeds 4,096, for the best of some small numbers.
        root: The only root, as a broadcast needs; None makes every rank one.
        connections: ``"many"`` spreads what goes through a switch over all its neighbours, which
            keeps trees flat; ``"few"`` keeps the number of peers small; ``"auto"`` is many for
            switches of up to 22 neighbours.

    Returns:
        The trees. ``is_optimal`` is false where ``k`` does not allow the optimum, and where a
        switch can send more than it receives, for then copies must be made in the switch.

    Raises:
        InfeasibleError: Some rank cannot be reached.
        ConfigurationError: An argument is out of range.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> packing = spanning_trees(switch(4, bandwidth=3.0))
        >>> packing.inverse_rate_s_per_byte, packing.height
        (Fraction(1, 1), 1)
    """
    if k is not None:
        require_whole("k", k)
    if root is not None:
        require_whole("root", root, least=0, most=topology.num_ranks - 1)
    require_one_of(connections, get_args(Connections), f"connections is {connections!r}")
    if topology.num_ranks == 1:
        return TreePacking(
            topology=topology, trees=(), root=root, k=k or 1, u_s=Fraction(0),
            optimum_s_per_byte=Fraction(0),
        )  # fmt: skip
    topology.require_connected()
    network = integer_network(topology)
    kind = "all_gather" if root is None else "broadcast"
    least = throughput_optimum(topology, collective=kind, root=root or 0)
    optimum = least.inverse_rate * network.unit
    roots = [int(root is None or rank == root) for rank in range(topology.num_ranks)]
    rate, trees = _search(network, roots, _plan(network, roots, optimum, k), connections)
    return TreePacking(
        topology=topology,
        trees=tuple(trees),
        root=root,
        k=rate.k,
        u_s=rate.u / network.unit,
        optimum_s_per_byte=optimum / network.unit,
    )


def _plan(network: Network, roots: list[int], optimum: Fraction, k: int | None) -> FixedRate:
    """Return the k and U to try first."""
    if k is not None:
        return least_rate(network, roots, k=k, bound=optimum)
    common = math.gcd(*network.capacities.tolist(), optimum.denominator)
    exact = FixedRate(optimum.denominator // common, Fraction(optimum.numerator, common))
    if exact.k <= _LARGEST_EXACT:
        return exact
    plans = [least_rate(network, roots, k=count, bound=optimum) for count in _FIXED]
    return min(plans, key=lambda plan: (plan.u / plan.k, plan.k))


def _search(
    network: Network, roots: list[int], rate: FixedRate, connections: str
) -> tuple[FixedRate, list[SpanningTree]]:
    """Search trees at this rate, or at slower and slower ones where switches copy too little."""
    for attempt in range(_FINE_ATTEMPTS + _COARSE_ATTEMPTS):
        counts = [rate.k * number for number in roots]
        try:
            return rate, _pack(network, counts, rate, connections)
        except OutOfTime:
            raise
        except InfeasibleError:
            rate = next_rate(network, rate, fine=attempt < _FINE_ATTEMPTS)
    message = "no trees were found at any rate that was tried"
    raise InfeasibleError(message, hint="give switches as much capacity in as out")


def _pack(
    network: Network, roots: list[int], rate: FixedRate, connections: str
) -> list[SpanningTree]:
    # Capacities are numbers of trees from here on, so their unit is one tree.
    scaled = replace(network, capacities=rate.capacities(network), unit=Fraction(1))
    joined = remove_switches(scaled, roots, spread=connections)
    ranks = {node: rank for rank, node in enumerate(network.terminals.tolist())}
    pairs = list(joined)
    latencies_s = [
        float(max(network.latencies_s[list(path)].sum() for path, _ in joined[pair].paths))
        for pair in pairs
    ]
    ends = ([ranks[u] for u, _ in pairs], [ranks[t] for _, t in pairs])
    bundles = [joined[pair] for pair in pairs]
    capacities = [bundle.capacity for bundle in bundles]
    packed = Packer(len(network.terminals), ends, capacities, latencies_s, roots).run()
    found = [part for tree in packed for part in _with_routes(tree, ends, bundles)]
    return sorted(found, key=lambda tree: tree.root)


def _with_routes(
    tree: PackedTree, ends: tuple[list[int], list[int]], bundles: list[Bundle]
) -> list[SpanningTree]:
    """Cut a tree into parts whose every edge takes one path only."""
    edges = [Bundle(bundles[arc].take(tree.multiplicity)) for arc in tree.arcs]
    parts = []
    left = tree.multiplicity
    while left:
        amount = min((edge.paths[0][1] for edge in edges), default=left)
        parts.append(
            SpanningTree(
                root=tree.root,
                multiplicity=amount,
                sources=tuple(ends[0][arc] for arc in tree.arcs),
                targets=tuple(ends[1][arc] for arc in tree.arcs),
                routes=tuple(edge.paths[0][0] for edge in edges),
            )
        )
        for edge in edges:
            edge.take(amount)
        left -= amount
    return parts


def _best(packing: TreePacking, chunks: int | None, size_bytes: float | None) -> Schedule:
    """Return the schedule by steps, or with a size the one with times that takes least."""
    if size_bytes is None:
        return _forward(packing, chunks or packing.k)
    best, worse = None, 0
    for count in [chunks] if chunks is not None else _counts(packing):
        found = dispatch(_forward(packing, count), size_bytes=size_bytes)
        if best is None or found.total_s < best.total_s:
            # Finer chunks fill the trees sooner: half of the time to fill is left at each doubling.
            gained = math.inf if best is None else 1 - found.total_s / best.total_s
            best, worse = found, 0
            if count > packing.k and gained < _FINE_ENOUGH:
                break
        else:
            worse += 1
            if worse > _MOST_WORSE:  # finer chunks only add latency from here on
                break
    assert best is not None, "there is always a count to try"
    return best


def _counts(packing: TreePacking) -> list[int]:
    """Return chunks per root worth trying: powers of two below k, then k times powers of two."""
    ranks = packing.topology.num_ranks
    roots = 1 if packing.root is not None else ranks
    most = max(1, _MOST_TRANSFERS // (roots * max(1, ranks - 1)))
    few = [1 << power for power in range(packing.k.bit_length()) if 1 << power < packing.k]
    many = [packing.k << power for power in range(_MOST_DOUBLINGS)]
    return [count for count in [*few, *many] if count <= most] or [1]


def _per_root(packing: TreePacking, collective: Collective) -> int:
    """Return the chunks of each root; refuse a collective that these trees do not make."""
    require_match(collective, packing.topology)
    if collective.root is not None and collective.root != packing.root:
        raise ConfigurationError(
            f"the collective has root {collective.root}, the trees have root {packing.root}",
            hint="pack the trees with the collective's root",
        )
    roots = 1 if packing.root is not None else collective.num_ranks
    if collective.num_chunks % roots or not collective.num_chunks:
        raise ConfigurationError(
            f"{collective.num_chunks} chunks do not divide among {roots} roots",
            hint=f"use a positive multiple of {roots} chunks",
        )
    each = collective.num_chunks // roots
    chunks = collective.num_chunks if collective.name == "all_reduce" else each
    plain = named_collective(
        collective.name, collective.num_ranks, chunks=chunks, root=packing.root or 0
    )
    if not collective.has_equal_chunks or collective.replaced(chunk_weights=None) != plain:
        message = f"the chunks of this {collective.name} have different sizes or other owners"
        raise ConfigurationError(message, hint="trees need the chunks of the plain collective")
    return each


def _forward(packing: TreePacking, chunks: int) -> Schedule:
    """Send the chunks of each root down its trees, step by step."""
    ranks = packing.topology.num_ranks
    name = "all_gather" if packing.root is None else "broadcast"
    sources = np.array([s for tree in packing.trees for s in tree.sources], np.int32)
    targets = np.array([t for tree in packing.trees for t in tree.targets], np.int32)
    routes = [route for tree in packing.trees for route in tree.routes]
    links = np.array([link for route in routes for link in route], np.int32)
    numbers, edges, steps = _rows(packing, chunks)
    # Within a step each rank sends to the next rank first, so that they do not all meet at one.
    ahead = (targets - sources)[edges] % ranks
    order = np.lexsort((ahead, steps))
    edges = edges[order]
    offsets, places = rows_of(np.cumsum([0, *map(len, routes)], dtype=np.int64), edges)
    return Schedule(
        collective=named_collective(name, ranks, chunks=chunks, root=packing.root or 0),
        chunks=numbers[order],
        sources=sources[edges],
        targets=targets[edges],
        steps=steps[order].astype(np.int32),
        route_offsets=offsets,
        route_links=links[places],
        topology=packing.topology,
        name="spanning trees",
        solver="ForestColl",
        attributes={"model": "synchronous", "k": packing.k, "height": packing.height},
    )


def _rows(packing: TreePacking, chunks: int) -> Longs:
    """Return the chunk, edge and step of each transfer, int64 [3, transfers]."""
    parts, first = [np.zeros((3, 0), np.int64)], 0
    for tree, numbers in zip(packing.trees, _shares(packing, chunks), strict=True):
        edges = np.arange(first, first + len(tree.sources))
        first += len(edges)
        rounds = np.arange(len(numbers)) // tree.multiplicity
        steps = rounds[:, None] + np.array(tree.depths, np.int64) - 1
        rows = (np.repeat(numbers, len(edges)), np.tile(edges, len(numbers)), steps.ravel())
        parts.append(np.stack(rows))
    return np.concatenate(parts, axis=1)


def _shares(packing: TreePacking, chunks: int) -> list[Longs]:
    """Deal chunks to trees: whole rounds by multiplicity, the rest where links are idle."""
    trees = packing.trees
    rounds, rest = divmod(chunks, packing.k)
    counts = [rounds * tree.multiplicity for tree in trees]
    if rest:
        _spread_rest(packing, counts, rest)
    shares, used = [], dict[int, int]()
    for tree, count in zip(trees, counts, strict=True):
        base = 0 if packing.root is not None else tree.root * chunks
        start = used.get(tree.root, 0)
        shares.append(base + start + np.arange(count, dtype=np.int64))
        used[tree.root] = start + count
    return shares


def _spread_rest(packing: TreePacking, counts: list[int], rest: int) -> None:
    """Give each root ``rest`` more chunks, each on the tree whose fullest link stays emptiest."""
    per_byte = 1.0 / packing.topology.capacities_bytes_per_s
    loads = np.zeros(packing.topology.num_links)
    links = [np.array([e for route in tree.routes for e in route]) for tree in packing.trees]
    of_root: dict[int, list[int]] = {}
    for place, tree in enumerate(packing.trees):
        of_root.setdefault(tree.root, []).append(place)

    def fullest(place: int) -> tuple[float, int]:
        load = loads[links[place]] + per_byte[links[place]]
        return float(load.max()), packing.trees[place].height

    for _ in range(rest):
        for places in of_root.values():
            best = min(places, key=fullest)
            np.add.at(loads, links[best], per_byte[links[best]])
            counts[best] += 1
