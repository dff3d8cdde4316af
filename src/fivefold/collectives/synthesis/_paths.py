"""Trees for small messages: few latencies, and all that goes the same way in one message.

Ranks are split into groups with a root each: all ranks in one, hosts, or the two sides of a thin
cut. Chunks go up to the roots, roots exchange them, and they go down again. The trees are those of
shortest paths, or grown edge by edge, whoever can be reached first (which behind a switch, where a
root sends to one after the other, is the tree of the postal model). References: Bar-Noy and Kipnis,
SPAA 1992 (postal model); Karp, Sahay, Santos and Schauser, SPAA 1993 (optimal trees under LogP).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.schedules import Collective, Schedule, named_collective
from fivefold.collectives.schedules.arrays import Array, Floats, Ints
from fivefold.collectives.synthesis._solver import check_time
from fivefold.network.topology import Topology

_CUTS = 2  # thinnest cuts whose sides are tried as groups
_GROWN = 3  # roots from which trees are grown
_MUST_BE_THIN = 0.5  # a cut carries at most this share of what its smaller side's ranks send
_BETWEEN = {
    "all_reduce": ("recursive_doubling", "recursive_halving_doubling", "ring", "one_shot"),
    "all_gather": ("recursive_doubling", "bruck", "ring", "direct"),
    "all_to_all": ("direct", "bruck", "pairwise"),
}
_LOOKED_AT = 16  # cuts whose sides are compared
_MOST_PAIRS = 4000  # neighbours in a network whose thin cuts are looked for
_HOPELESS = 4.0  # times the best: a pipeline that begins like this will not win

Cut = Callable[[int], Collective]
Ports = tuple[Floats, Floats]  # bytes/s into and out of each rank


class Ways:
    """Distances between ranks and the trees along them, for messages of a size."""

    def __init__(self, topology: Topology, message_bytes: float) -> None:
        graph = topology.rank_graph
        self.topology, self.count = topology, topology.num_ranks
        self._sources, self._targets = graph.sources, graph.targets
        self._lasts_s = graph.latencies_s + message_bytes / graph.capacities_bytes_per_s
        lengths = np.diff(graph.offsets)
        # The links of each edge in a row; a link that is always free fills it up.
        self._links = np.full((lengths.size, int(lengths.max(initial=1))), topology.num_links)
        place = np.arange(graph.links.size) - np.repeat(graph.offsets[:-1], lengths)
        self._links[np.repeat(np.arange(lengths.size), lengths), place] = graph.links
        self._latencies_s = graph.latencies_s
        self._sends_s = np.append(message_bytes / topology.capacities_bytes_per_s, 0.0)

    def nearest(self, groups: Array | None = None) -> tuple[Floats, Ints]:
        """Return distances, and the rank before each on the way from each, within groups."""
        from scipy import sparse  # noqa: PLC0415 - heavy
        from scipy.sparse.csgraph import dijkstra  # noqa: PLC0415 - heavy

        inside = np.ones(self._sources.size, dtype=np.bool_)
        if groups is not None:
            inside = groups[self._sources] == groups[self._targets]
        # The quickest of parallel edges; an edge of no length would count as none.
        keys = self._sources[inside].astype(np.int64) * self.count + self._targets[inside]
        order = np.lexsort((self._lasts_s[inside], keys))
        first = order[np.unique(keys[order], return_index=True)[1]]
        lengths = np.maximum(self._lasts_s[inside][first], np.finfo(float).tiny)
        ends = (keys[first] // self.count, keys[first] % self.count)
        matrix = sparse.csr_matrix((lengths, ends), shape=(self.count, self.count))
        away_s, before = dijkstra(matrix, return_predecessors=True)
        return away_s, before.astype(np.int32)

    def grown(self, roots: Ints, groups: Array) -> tuple[Ints, Floats]:
        """Return the parent of each rank, and when it is reached, where the first reached is next.

        Each root's tree grows in its own group; links are busy as the serial model has it.
        """
        parents = np.full(self.count, -1, dtype=np.int32)
        reached_s = np.full(self.count, np.inf)
        reached_s[roots] = 0.0
        free_s = np.zeros(self._sends_s.size)
        inside = groups[self._sources] == groups[self._targets]
        edges = np.flatnonzero(inside)
        for _ in range(self.count - roots.size):
            edges = edges[np.isinf(reached_s[self._targets[edges]])]
            begins_s = np.maximum(
                reached_s[self._sources[edges]], free_s[self._links[edges]].max(axis=1)
            )
            ends_s = begins_s + self._lasts_s[edges]
            if not edges.size or np.isinf(ends_s.min()):
                return parents, reached_s
            best = int(np.argmin(ends_s))
            edge = edges[best]
            parents[self._targets[edge]] = self._sources[edge]
            reached_s[self._targets[edge]] = ends_s[best]
            links = self._links[edge]
            free_s[links] = begins_s[best] + self._latencies_s[edge] + self._sends_s[links]
            free_s[-1] = 0.0
        return parents, reached_s


@dataclass(frozen=True, eq=False)
class Forest:
    """A tree in each group: parent of each rank, -1 for roots, and in which order they come."""

    parents: Ints
    order_s: Floats

    @cached_property
    def depths(self) -> Ints:
        """Edges from the root to each rank."""
        depths, above = np.zeros(self.parents.size, np.int32), self.parents.copy()
        while (on := above >= 0).any():
            depths[on] += 1
            above[on] = self.parents[above[on]]
        return depths

    @cached_property
    def height(self) -> int:
        """Edges on the longest path."""
        return int(self.depths.max(initial=0))

    @cached_property
    def on_way(self) -> NDArray[np.bool_]:
        """Whether a rank (second index) lies on the way from its root to another, ends included."""
        count = self.parents.size
        on_way, above = np.eye(count, dtype=np.bool_), self.parents.copy()
        while (on := above >= 0).any():
            ranks = np.flatnonzero(on)
            on_way[ranks, above[on]] = True
            above[on] = self.parents[above[on]]
        return on_way

    @cached_property
    def members(self) -> Ints:
        """Ranks that have a parent, those reached first at the front."""
        below = np.flatnonzero(self.parents >= 0)
        return below[np.lexsort((self.order_s[below], self.depths[below]))].astype(np.int32)


@dataclass
class _Moves:
    """Transfers by steps, phase after phase."""

    parts: list[tuple[Array, ...]] = field(default_factory=list)

    def add(
        self,
        chunks: ArrayLike,
        sources: ArrayLike,
        targets: ArrayLike,
        steps: ArrayLike,
        *,
        adds: ArrayLike = False,
    ) -> None:
        arrays = np.broadcast_arrays(chunks, sources, targets, steps, adds)
        self.parts.append(tuple(array.reshape(-1) for array in arrays))

    def schedule(self, collective: Collective, topology: Topology, name: str) -> Schedule:
        chunks, sources, targets, steps, adds = (
            np.concatenate(arrays) for arrays in zip(*self.parts, strict=True)
        )
        order = np.argsort(steps, kind="stable")
        return Schedule(
            collective=collective,
            chunks=chunks[order].astype(np.int32),
            sources=sources[order].astype(np.int32),
            targets=targets[order].astype(np.int32),
            reduces=adds[order].astype(np.bool_),
            steps=steps[order].astype(np.int32),
            topology=topology,
            name=name,
            solver="fivefold",
        ).joined()


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups with a root each: how chunks get up to it, and down from it."""

    groups: Ints
    roots: Ints
    up: Forest
    down: Forest
    name: str

    def least_s(self, collective: Collective, chunk_bytes: Floats, port: Ports) -> float:
        """Return a time that the layout takes at least: its longest ways, and a root's ports."""
        into = self.up.order_s[collective.pre_ranks].max(initial=0.0)
        out_of = self.down.order_s[collective.post_ranks].max(initial=0.0)
        if self.roots.size > 1 or collective.reducing:
            return float(into + out_of)
        root = int(self.roots[0])  # what others own enters it; what others ask for leaves it once
        own = np.zeros(collective.num_chunks, dtype=np.bool_)
        own[collective.pre_chunks[collective.pre_ranks == root]] = True
        asked = np.zeros_like(own)
        asked[collective.post_chunks[collective.post_ranks != root]] = True
        through_s = (
            chunk_bytes[~own].sum() / port[0][root],
            chunk_bytes[asked].sum() / port[1][root],
        )
        return float(max(into + out_of, *through_s))

    def schedule(
        self, collective: Collective, topology: Topology, between: str, *, stagger: bool = False
    ) -> Schedule:
        """Do the collective: all-reduces sum on the way up, others copy.

        Args:
            collective: What to do.
            topology: The network that the layout was made for.
            between: Algorithm of the roots among themselves.
            stagger: Whether each chunk goes one step behind the one before it, a pipeline, or all
                that goes one way at once.
        """
        if collective.reducing:
            return self._summed(collective, topology, between, stagger=stagger)
        return self._spread(collective, topology, between, stagger=stagger)

    def _summed(
        self, collective: Collective, topology: Topology, between: str, *, stagger: bool
    ) -> Schedule:
        """Sum up to the roots, among them, and spread; chunk by chunk where they are staggered."""
        moves, number = _Moves(), np.arange(collective.num_chunks)
        later = number * int(stagger)
        below = self.up.members[::-1]  # backwards: the last to be reached sends first
        steps = (self.up.height - self.up.depths[below])[:, None] + later
        moves.add(number, below[:, None], self.up.parents[below][:, None], steps, adds=True)
        first = self.up.height
        if self.roots.size > 1:
            inner = build_algorithm(
                between, named_collective("all_reduce", self.roots.size, chunks=number.size)
            )
            ends = self.roots[inner.sources], self.roots[inner.targets]
            steps = first + inner.steps + later[inner.chunks]
            moves.add(inner.chunks, *ends, steps, adds=inner.reduces)
            first += inner.num_steps
        below = self.down.members
        steps = (first + self.down.depths[below] - 1)[:, None] + later
        moves.add(number, self.down.parents[below][:, None], below[:, None], steps)
        return moves.schedule(collective, topology, self.name)

    def _spread(
        self, collective: Collective, topology: Topology, between: str, *, stagger: bool
    ) -> Schedule:
        """Bring chunks up from their owners, to other roots, and down, as far as they are asked."""
        owners, moves = collective.pre_ranks, _Moves()
        later = np.arange(collective.num_chunks) * int(stagger)
        wanted = _wanted(collective)
        number = np.arange(self.roots.size)
        needs = wanted @ (self.groups[:, None] == number)  # by which groups
        homes = self.groups[owners]
        mine, on_way = wanted & (self.groups == homes[:, None]), self.up.on_way[owners]
        # Up to the root for others and for ranks off the way, else to the highest who asks.
        goes_up = (needs & (homes[:, None] != number)).any(axis=1) | (mine & ~on_way).any(axis=1)
        highest = np.where(mine & on_way, self.up.depths, self.up.height).min(axis=1)
        highest = np.where(goes_up, 0, highest)
        chunks, ranks = np.nonzero(on_way & (self.up.depths > highest[:, None]))
        held = np.zeros_like(wanted)
        held[np.arange(owners.size), owners] = True
        held[chunks, self.up.parents[ranks]] = True
        steps = self.up.height - self.up.depths[ranks] + later[chunks]
        moves.add(chunks, ranks, self.up.parents[ranks], steps)
        first = self._between(collective, moves, between, needs, later)
        # Down to whoever asks or lies before one who does, and has not seen it.
        falling = _or_product(wanted, self.down.on_way) & ~held & (self.down.parents >= 0)
        falling &= goes_up[:, None] | (self.groups != homes[:, None])
        chunks, ranks = np.nonzero(falling)
        order = np.lexsort((self.down.order_s[ranks], later[chunks]))
        chunks, ranks = chunks[order], ranks[order]
        steps = first + self.down.depths[ranks] - 1 + later[chunks]
        moves.add(chunks, self.down.parents[ranks], ranks, steps)
        return moves.schedule(collective, topology, self.name)

    def _between(
        self, collective: Collective, moves: _Moves, between: str, needs: Array, later: Array
    ) -> int:
        """Let the roots exchange what other groups need; return the first step after it."""
        first, size = self.up.height, self.roots.size
        if size < 2:
            return first
        homes = self.groups[collective.pre_ranks]
        if needs.all():
            inner = build_algorithm(between, named_collective("all_gather", size))
            blocks = [np.flatnonzero(homes == group) for group in range(size)]
        else:
            inner = build_algorithm(between, named_collective("all_to_all", size))
            blocks = [
                np.flatnonzero((homes == source) & needs[:, target])
                for source in range(size)
                for target in range(size)
            ]
        lengths = np.array([block.size for block in blocks])[inner.chunks]
        rows = np.repeat(np.arange(inner.num_transfers), lengths)
        listed = [blocks[chunk] for chunk in inner.chunks.tolist()]
        chunks = np.concatenate([*listed, np.zeros(0, np.int64)])
        ends = self.roots[inner.sources[rows]], self.roots[inner.targets[rows]]
        moves.add(chunks, *ends, first + inner.steps[rows] + later[chunks])
        return first + inner.num_steps


def _wanted(collective: Collective) -> NDArray[np.bool_]:
    wanted = np.zeros((collective.num_chunks, collective.num_ranks), dtype=np.bool_)
    wanted[collective.post_chunks, collective.post_ranks] = True
    return wanted


def _or_product(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (one.astype(np.float32) @ other.astype(np.float32)) > 0
    return found


def _every_tree(collective: Collective, topology: Topology, ways: Ways) -> Schedule:
    """Send each chunk over the shortest paths from its owner, what goes the same way together."""
    away_s, before = ways.nearest()
    moves, ranks, wanted = _Moves(), np.arange(collective.num_ranks), _wanted(collective)
    for owner in np.unique(collective.pre_ranks).tolist():
        chunks = collective.pre_chunks[collective.pre_ranks == owner]
        tree = _forest(before[owner], away_s[owner], np.array([owner]))
        number, below = np.nonzero(_or_product(wanted[chunks], tree.on_way) & (ranks != owner))
        # Whoever has the longest way before it is served first.
        left_s = np.where(tree.on_way.T, away_s[owner], 0.0).max(axis=1) - away_s[owner]
        order = np.argsort(-left_s[below], kind="stable")
        number, below = number[order], below[order]
        moves.add(chunks[number], tree.parents[below], below, tree.depths[below] - 1)
    return moves.schedule(collective, topology, "shortest paths")


def _forest(before: Ints, order_s: Floats, roots: Array) -> Forest:
    parents = before.astype(np.int32)  # a copy
    parents[roots] = -1
    return Forest(parents, order_s)


def _ports(topology: Topology) -> Ports:
    ends = topology.link_targets, topology.link_sources
    counted = (
        np.bincount(end, topology.capacities_bytes_per_s, topology.num_nodes) for end in ends
    )
    into, out_of = (np.maximum(rates[topology.rank_nodes], 1e-200) for rates in counted)
    return into, out_of


def layouts(
    ways: Ways, back: Ways, *, root: int | None = None, every: bool = True
) -> Iterator[Layout]:
    """Yield groups with roots: all ranks, the most central root first, then thin cuts and hosts.

    Args:
        ways: Distances in the network.
        back: Those in the reversed network.
        root: The only root of all ranks that is of use, and a root of its group; None for any.
        every: Whether each rank is tried as the root of all, or only the most central.
    """
    (away_s, before), (up_s, up_before) = ways.nearest(), back.nearest()
    one = np.zeros(ways.count, dtype=np.int32)
    reach_s = away_s.max(axis=1) + up_s.max(axis=1)
    central = np.argsort(reach_s, kind="stable").tolist() if root is None else [root]
    central = central if every else central[:_GROWN]
    for place, middle in enumerate(central):
        check_time()
        roots = np.array([middle], dtype=np.int32)
        up, down = (
            _forest(rows[middle], lengths_s[middle], roots)
            for rows, lengths_s in ((up_before, up_s), (before, away_s))
        )
        yield Layout(one, roots, up, down, "shortest-path trees")
        if place < _GROWN:
            up, down = (Forest(*one_way.grown(roots, one)) for one_way in (back, ways))
            yield Layout(one, roots, up, down, "grown trees")
    ranks = np.arange(ways.count)
    for groups in _partitions(ways.topology):
        check_time()
        (down_s, inside), (up_s, up_inside) = ways.nearest(groups), back.nearest(groups)
        alike = groups[:, None] == groups
        ecc_s = np.where(alike, down_s, 0.0).max(axis=1) + np.where(alike, up_s, 0.0).max(axis=1)
        roots = _roots(groups, ecc_s, away_s)
        if root is not None:
            roots[groups[root]] = root
        if not np.isfinite(ecc_s[roots]).all():
            continue
        home = roots[groups]
        up = _forest(up_inside[home, ranks], up_s[home, ranks], roots)
        down = _forest(inside[home, ranks], down_s[home, ranks], roots)
        yield Layout(groups, roots, up, down, "shortest-path trees to roots")
        up, down = (Forest(*one_way.grown(roots, groups)) for one_way in (back, ways))
        yield Layout(groups, roots, up, down, "grown trees to roots")


def _roots(groups: Ints, ecc_s: Floats, away_s: Floats) -> Ints:
    """Return for each group the rank that is near its own and near the other groups."""
    number = np.arange(int(groups.max()) + 1)
    member = groups == number[:, None]
    to_group_s = np.stack([away_s[:, inside].min(axis=1) for inside in member], axis=1)
    score_s = ecc_s + to_group_s.max(axis=1)
    return np.array(
        [ranks[np.argmin(score_s[ranks])] for ranks in map(np.flatnonzero, member)], dtype=np.int32
    )


def _partitions(topology: Topology) -> Iterator[Ints]:
    """Yield group numbers of the ranks: the sides of thin cuts, then hosts."""
    seen = set()
    hosts = {host: number for number, host in enumerate(topology.hosts)}
    of_hosts = [hosts.get(topology.host_of(rank) or "", -1) for rank in range(topology.num_ranks)]
    whole = 1 < len(hosts) < topology.num_ranks and min(of_hosts) >= 0
    for groups in [*_thin_cuts(topology), *([np.array(of_hosts, np.int32)] if whole else [])]:
        key = (groups == groups[0]).tobytes(), int(groups.max())
        if key not in seen:
            seen.add(key)
            yield groups


def _thin_cuts(topology: Topology) -> list[Ints]:
    """Return the sides of the cuts, around links, that carry least or take longest."""
    from scipy import sparse  # noqa: PLC0415 - heavy
    from scipy.sparse.csgraph import shortest_path  # noqa: PLC0415 - heavy

    first, last = topology.link_sources, topology.link_targets
    count, ranks = topology.num_nodes, topology.rank_nodes
    pairs = np.unique(np.sort(np.stack([first, last], axis=1), axis=1), axis=0)
    if len(pairs) > _MOST_PAIRS:
        return []
    graph = sparse.coo_matrix((np.ones(first.size), (first, last)), shape=(count, count)).tocsr()
    away = shortest_path(graph, directed=False, unweighted=True)
    nearer = away[pairs[:, 0]] < away[pairs[:, 1]]
    out = nearer[:, first] & ~nearer[:, last]
    into = ~nearer[:, first] & nearer[:, last]
    rates, delays_s = topology.capacities_bytes_per_s, topology.latencies_s
    carries = np.minimum(out @ rates, into @ rates)
    takes_s = np.where(out | into, delays_s, np.inf).min(axis=1)
    inside = nearer[:, ranks].sum(axis=1)
    smaller = np.minimum(inside, topology.num_ranks - inside)
    port = np.median(np.bincount(first, rates, count)[ranks])
    thin = carries / np.maximum(smaller * port, np.finfo(float).tiny)
    slow = takes_s > 2 * float(np.median(delays_s))
    fine = np.flatnonzero((smaller > 1) & ((thin <= _MUST_BE_THIN) | slow))
    best = fine[np.argsort(thin[fine], kind="stable")]
    sides = {nearer[cut, ranks].tobytes(): nearer[cut, ranks] for cut in best[:_LOOKED_AT].tolist()}
    return [side.astype(np.int32) for side in [*sides.values()][:_CUTS]]


def path_schedules(
    cut: Cut, counts: Sequence[int], topology: Topology, size_bytes: float, best_s: float
) -> Generator[Schedule, float, None]:
    """Yield schedules along trees; the answer to each is how long it takes.

    Args:
        cut: Gives the collective in so many chunks (or chunks for each rank).
        counts: Numbers of chunks that may be tried, the least first.
        topology: Where.
        size_bytes: Its size.
        best_s: What is known to be possible: trees that must take longer are left out.
    """
    plain, turned = cut(counts[0]), topology.reversed()
    if plain.num_ranks < 2:
        return
    if plain.reducing and plain.name != "all_reduce":
        yield from _backwards(
            path_schedules(lambda n: cut(n).inverted(), counts, turned, size_bytes, best_s),
            topology,
        )
        return
    whole = plain.name in ("all_reduce", "broadcast")
    message_bytes = float(np.max(plain.chunk_bytes(size_bytes), initial=0.0))
    message_bytes = float(size_bytes) if whole else message_bytes
    ways, back = Ways(topology, message_bytes), Ways(turned, message_bytes)
    if plain.name != "all_reduce":
        for along in (ways, Ways(topology, 0.0)):
            best_s = min((yield _every_tree(plain, topology, along)), best_s)
    ports, sizes = _ports(topology), plain.chunk_bytes(size_bytes)
    for place, layout in enumerate(layouts(ways, back, root=plain.root, every=whole)):
        names = _BETWEEN[_form(plain)] if layout.roots.size > 1 else ("",)
        for between in names:
            if layout.least_s(plain, sizes, ports) < best_s:
                found_s = yield layout.schedule(plain, topology, between)
                best_s = min(best_s, found_s)
        if whole and (layout.roots.size > 1 or place < 2 * _GROWN):
            pieces = (layout.schedule(cut(n), topology, names[0], stagger=True) for n in counts)
            best_s = yield from _while_better(pieces, best_s)


def _form(collective: Collective) -> str:
    if collective.name in ("all_reduce", "all_gather"):
        return collective.name
    return "all_gather" if collective.name == "broadcast" else "all_to_all"


def _while_better(pieces: Iterable[Schedule], best_s: float) -> Generator[Schedule, float, float]:
    """Yield finer and finer schedules until one is no better; return the best time."""
    last_s = _HOPELESS * best_s
    for schedule in pieces:
        found_s = yield schedule
        if found_s >= last_s:
            break
        last_s = found_s
        best_s = min(best_s, found_s)
    return best_s


def _backwards(
    inner: Generator[Schedule, float, None], topology: Topology
) -> Generator[Schedule, float, None]:
    """Yield the schedules of the inverse collective on the reversed network, run backwards."""
    with suppress(StopIteration):
        found = next(inner)
        while True:
            back = found.inverted()
            found = inner.send((yield back.replaced(topology=topology)))
