"""The library by name: which algorithm serves which collective, and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fivefold.collectives.algorithms._moves import (
    Moves,
    Spread,
    backwards,
    bidirectional_ring_moves,
    binary_tree_moves,
    binomial_exchange_moves,
    binomial_moves,
    bruck_exchange_moves,
    bruck_moves,
    core_ranks,
    direct_exchange_moves,
    direct_moves,
    double_tree_moves,
    doubling_sums,
    grouped_exchange_moves,
    hierarchical_moves,
    moves_of,
    pairwise_exchange_moves,
    pat_moves,
    recursive_doubling_moves,
    ring_moves,
)
from fivefold.collectives.schedules import Collective, Schedule
from fivefold.collectives.schedules.arrays import Ints
from fivefold.collectives.schedules.schedule import require_match
from fivefold.errors import ConfigurationError, require_one_of
from fivefold.network.topology import Topology

_MOST_RANKS_SWITCHED = 512  # every pair is joined through switches: too many to search
_MOST_WIDTHS = 8
_WORK = 60  # steps of the search for each rank

Neighbours = list[dict[int, float]]


def ring_order(topology: Topology) -> list[int]:
    """Order the ranks so that neighbours, the last and the first among them, are near."""
    topology.require_connected()
    count = topology.num_ranks
    by_host = _by_host(topology)
    if count < 4 or (topology.num_nodes > count > _MOST_RANKS_SWITCHED):
        return by_host
    near, hosts = _neighbours(topology), [topology.host_of(rank) for rank in range(count)]
    widths = sorted({width for ways in near for width in ways.values()}, reverse=True)
    widest = min(max(ways.values(), default=0.0) for ways in near)
    for width in [value for value in widths if value <= widest][:_MOST_WIDTHS]:
        orders = [list(range(count)), by_host, _search(near, width, hosts, closed=True)]
        rings = [one for one in orders if one and min(_hop_widths(one, near)) >= width]
        if rings:  # the least sum of the hops' times for one byte
            return min(rings, key=lambda one: sum(1.0 / wide for wide in _hop_widths(one, near)))
    # No cycle: a path, whose ends the network joins as it can.
    return _search(near, 0.0, hosts, closed=False) or by_host


def _by_host(topology: Topology) -> list[int]:
    placed = [rank for ranks in topology.hosts.values() for rank in ranks]
    return [*placed, *sorted(set(range(topology.num_ranks)) - set(placed))]


def _neighbours(topology: Topology) -> Neighbours:
    graph = topology.rank_graph
    near: Neighbours = [{} for _ in range(topology.num_ranks)]
    triples = zip(graph.sources, graph.targets, graph.capacities_bytes_per_s, strict=True)
    for source, target, width in triples:
        known = near[int(source)].get(int(target), 0.0)
        near[int(source)][int(target)] = max(known, float(width))
    return near


def _hop_widths(order: list[int], near: Neighbours) -> list[float]:
    return [near[a].get(b, 0.0) for a, b in zip(order, [*order[1:], order[0]], strict=True)]


def _search(
    near: Neighbours, width: float, hosts: list[str | None], *, closed: bool
) -> list[int] | None:
    """Find a cycle (or path) along links of at least this width; None if none in time."""
    count = len(near)
    ways = [[to for to, wide in near[rank].items() if wide >= width] for rank in range(count)]
    entering = [0] * count
    for targets in ways:
        for to in targets:
            entering[to] += 1
    if min(entering) == 0 or not all(ways) or _reached(ways) < count:
        return None
    path, used = [0], np.zeros(count, dtype=np.bool_)
    used[0] = True
    options = [_ranked(0, ways, near, used, hosts)]
    for _ in range(_WORK * count):
        if len(path) == count and (not closed or path[0] in ways[path[-1]]):
            return path
        if options[-1] and len(path) < count:
            step = options[-1].pop()
            path.append(step)
            used[step] = True
            options.append(_ranked(step, ways, near, used, hosts))
            continue
        options.pop()
        used[path.pop()] = False
        if not path:
            return None
    return None


def _reached(ways: list[list[int]]) -> int:
    seen, waiting = {0}, [0]
    while waiting:
        for to in ways[waiting.pop()]:
            if to not in seen:
                seen.add(to)
                waiting.append(to)
    return len(seen)


def _ranked(
    rank: int,
    ways: list[list[int]],
    near: Neighbours,
    used: np.ndarray[tuple[int], np.dtype[np.bool_]],
    hosts: list[str | None],
) -> list[int]:
    """Return the next ranks, the best last: same host, widest, fewest ways on, lowest number."""

    def worth(to: int) -> tuple[bool, float, int, int]:
        onward = sum(not used[further] for further in ways[to])
        return (hosts[to] == hosts[rank], near[rank][to], -onward, -to)

    return sorted((to for to in ways[rank] if not used[to]), key=worth)


Exchange = Callable[[int, Ints, Ints, Ints], Moves]

_SPREADS: Mapping[str, Spread] = {
    "ring": ring_moves,
    "bidirectional_ring": bidirectional_ring_moves,
    "binary_tree": binary_tree_moves,
    "double_binary_tree": double_tree_moves,
    "binomial_tree": binomial_moves,
    "recursive_doubling": recursive_doubling_moves,
    "recursive_halving_doubling": recursive_doubling_moves,
    "bruck": bruck_moves,
    "pat": pat_moves,
    "direct": direct_moves,
}
_EXCHANGES: Mapping[str, Exchange] = {
    "direct": direct_exchange_moves,
    "pairwise": pairwise_exchange_moves,
    "bruck": bruck_exchange_moves,
    "binomial_tree": binomial_exchange_moves,
}
_ROOTED_SPREADS = ("binary_tree", "double_binary_tree")  # these need one owner of all chunks
_FROM_ALL = ("all_gather", "reduce_scatter")
_FROM_ROOT = ("broadcast", "reduce")
_TO_ONE = ("scatter", "gather")
_TO_EACH = ("all_to_all", "all_to_allv")
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ring": ("order",),
    "bidirectional_ring": ("order",),
    "bruck": ("radix",),
    "pat": ("most_chunks",),
    "hierarchical": ("groups", "intra", "inter"),
}
_NAMES = {*_SPREADS, *_EXCHANGES, "one_shot", "hierarchical"}


def available_algorithms(collective: Collective) -> tuple[str, ...]:
    """Return the names of the library's algorithms that do this collective.

    Returns:
        Names for `build_algorithm`; for a custom collective only ``"direct"``, and nothing where
        it sums.

    Examples:
        >>> from fivefold.collectives.schedules import all_to_all, broadcast
        >>> available_algorithms(all_to_all(4))
        ('direct', 'pairwise', 'bruck', 'hierarchical')
        >>> "double_binary_tree" in available_algorithms(broadcast(4))
        True
    """
    name = collective.name
    if name in _FROM_ALL:
        return (*(key for key in _SPREADS if key not in _ROOTED_SPREADS), "hierarchical")
    if name in _FROM_ROOT:
        return (*_SPREADS, "hierarchical")
    if name == "all_reduce":
        return (*_SPREADS, "hierarchical", "one_shot")
    if name in _TO_ONE:
        return ("direct", "binomial_tree")
    if name in _TO_EACH:
        return ("direct", "pairwise", "bruck", "hierarchical")
    return () if collective.reducing else ("direct",)


def algorithm_named(name: str, collective: Collective) -> str:
    """Return an algorithm's name as the library spells it.

    Raises:
        ConfigurationError: There is no such algorithm, or it does not do this collective.
    """
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    known = available_algorithms(collective)
    hint = f"for {collective.name} there are: {', '.join(known) or 'none'}"
    if plain not in _NAMES:
        raise ConfigurationError(f"there is no algorithm {name!r}", hint=hint)
    if plain not in known:
        raise ConfigurationError(f"{plain} does not do {collective.name}", hint=hint)
    return plain


def build_algorithm(
    name: str, collective: Collective, topology: Topology | None = None, **options: Any
) -> Schedule:
    """Return the schedule of an algorithm of the library.

    * ``ring``, ``bidirectional_ring`` (``order=``): chunks go round a ring of the ranks, once in
      one direction or half way in each; n - 1 or n / 2 steps, an all-reduce twice as many.
    * ``binary_tree``, ``double_binary_tree``: chunks go down a complete binary tree one behind the
      other, or half of them down a second tree whose inner ranks are the first one's leaves.
    * ``binomial_tree``: from every owner of chunks, far ranks first; ceil(log2 n) steps.
    * ``recursive_doubling``: pairs at distance 1, 2, 4, ... exchange all they have; an all-reduce
      swaps whole sums. ``recursive_halving_doubling`` halves sums, then doubles back.
    * ``bruck`` (``radix=``): blocks travel by the digits of the distance, for any n.
    * ``pat`` (``most_chunks=``): parallel aggregated trees; a message carries at most so many
      blocks.
    * ``direct``: straight from where it is to where it must be, in one step. ``one_shot``: an
      all-reduce in which everyone sends everything to everyone.
    * ``pairwise``: an all-to-all in n - 1 steps, each with one partner.
    * ``hierarchical`` (``groups=``, ``intra=``, ``inter=``): inside groups of ranks and across
      groups; None takes the topology's hosts as groups and rings at both levels.

    Where n is no power of two, doubling lets the ranks too many act through a partner. What a step
    sends from one rank to another is one message; ``replaced(messages=None)`` sends each chunk by
    itself, so that large ones can be passed on before the last of a step has come.

    Args:
        name: One of `available_algorithms`; hyphens count as underscores.
        collective: What it is to do.
        topology: Network to keep with the schedule; rings and hierarchies also follow it.
        **options: Those named above.

    Raises:
        ConfigurationError: There is no such algorithm or option, it does not do this collective,
            or an option does not fit.

    References:
        Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19(1), 2005; Bruck et
        al., IEEE TPDS 8(11), 1997; Jeaugey, arXiv 2506.20252 (PAT); Sanders, Speck and Traeff,
        Parallel Computing 35(12), 2009 (two trees).

    Examples:
        >>> from fivefold.collectives.schedules import all_reduce, verify_schedule
        >>> verify_schedule(build_algorithm("recursive-halving-doubling", all_reduce(6))).order
        'steps'
        >>> build_algorithm("hierarchical", all_reduce(8), groups=[range(4), range(4, 8)]).num_steps
        8
    """
    plain = algorithm_named(name, collective)
    if topology is not None:
        require_match(collective, topology)
    unknown = sorted(set(options) - set(_OPTIONS.get(plain, ())))
    if unknown:
        raise ConfigurationError(
            f"{plain} has no such option: {unknown[0]!r}",
            hint=f"its options are: {', '.join(_OPTIONS.get(plain, ())) or 'none'}",
        )
    moves, sums = _moves(plain, collective, topology, options)
    return Schedule(
        collective=collective,
        chunks=moves.chunks,
        sources=moves.sources,
        targets=moves.targets,
        reduces=sums,  # one flag for all takes no memory
        steps=moves.steps,
        topology=topology,
        name=plain,
        solver="library",
    ).joined()


def _moves(
    name: str, collective: Collective, topology: Topology | None, options: Mapping[str, Any]
) -> tuple[Moves, Any]:
    """Return the moves of an algorithm, and which of them add."""
    if collective.name == "custom":
        return _from_nearest_holder(collective), False
    if name == "one_shot":
        # Every rank sends its part of every chunk to everyone.
        everyone = np.arange(collective.num_ranks, dtype=np.int32)
        moves = direct_moves(everyone.size, np.repeat(everyone, collective.num_chunks))
        return moves._replace(chunks=moves.chunks % np.int32(collective.num_chunks)), True
    if name == "recursive_doubling" and collective.name == "all_reduce":
        moves, sums = doubling_sums(collective.num_ranks, collective.num_chunks)
        return moves, np.arange(moves.chunks.size) < sums
    spread, exchange = _forms(name, collective, topology, options)
    if collective.name in (*_TO_ONE, *_TO_EACH):
        # One source and one target each, so both lists are in the order of the chunks.
        assert exchange is not None, "available_algorithms says that it exchanges"
        chunks, sources = collective.pre_chunks, collective.pre_ranks
        return exchange(collective.num_ranks, chunks, sources, collective.post_ranks), False
    assert spread is not None, "available_algorithms says that it spreads"
    order: Any = options.get("order")
    if order is None and topology is not None and "order" in _OPTIONS.get(name, ()):
        order = ring_order(topology)
    return _spread_out(name, collective, spread, order)


def _forms(
    name: str, collective: Collective, topology: Topology | None, options: Mapping[str, Any]
) -> tuple[Spread | None, Exchange | None]:
    """Return how an algorithm brings chunks from owners to all, and from one rank to one."""
    spread, exchange = _SPREADS.get(name), _EXCHANGES.get(name)
    if name == "bruck" and (radix := options.get("radix", 2)) != 2:
        if radix < 2:
            raise ConfigurationError(f"radix is {radix}", hint="digits need a base of at least 2")
        exchange = partial(bruck_exchange_moves, radix=radix)
    if name == "pat" and (most := options.get("most_chunks")) is not None:
        if most < 1:
            raise ConfigurationError(
                f"most_chunks is {most}", hint="a message carries at least 1 block"
            )
        spread = partial(pat_moves, most_chunks=most)
    if name == "hierarchical":
        members = _checked_groups(collective, topology, options.get("groups"))
        names = options.get("intra", "ring"), options.get("inter", "ring")
        for level in names:
            allowed = [key for key in _SPREADS if key not in _ROOTED_SPREADS]
            require_one_of(level, allowed, f"{level!r} cannot be one level of a hierarchy")
        intra, inter = _SPREADS[names[0]], _SPREADS[names[1]]

        def spread(_: int, owners: Ints) -> Moves:
            return hierarchical_moves(owners, members, intra=intra, inter=inter)

        def exchange(_: int, chunks: Ints, sources: Ints, targets: Ints) -> Moves:
            return grouped_exchange_moves(chunks, sources, targets, members)

    return spread, exchange


def _checked_groups(
    collective: Collective, topology: Topology | None, groups: Iterable[Sequence[int]] | None
) -> list[Ints]:
    if groups is None:
        if topology is None or not topology.hosts:
            message = "hierarchical needs groups of ranks"
            raise ConfigurationError(
                message, hint="pass groups, or a topology whose nodes name their hosts"
            )
        groups = topology.hosts.values()
    members = [np.asarray(list(group), dtype=np.int32) for group in groups]
    listed = np.concatenate(members) if members else np.zeros(0, dtype=np.int32)
    whole = np.array_equal(np.sort(listed), np.arange(collective.num_ranks))
    if not whole or any(group.size == 0 for group in members):
        raise ConfigurationError(
            f"the groups {[group.tolist() for group in members]!r:.80} do not hold each of "
            f"{collective.num_ranks} ranks once",
            hint="put each rank into one group; no group may be empty",
        )
    return members


def _from_nearest_holder(collective: Collective) -> Moves:
    """Send each chunk to each receiver that lacks it, from the holder of nearest rank."""
    found: list[tuple[int, int, int]] = []
    for chunk in range(collective.num_chunks):
        holders = collective.holders(chunk)
        for target in np.setdiff1d(collective.receivers(chunk), holders):
            source = holders[int(np.argmin(np.abs(holders - target)))]
            found.append((chunk, int(source), int(target)))
    table: Ints = np.array(found, dtype=np.int32).reshape(-1, 3)
    return moves_of(table[:, 0], table[:, 1], table[:, 2], 0)


def _owners(name: str, collective: Collective) -> Ints:
    """Return who spreads each chunk: its owner, the root, or for an all-reduce whoever suits."""
    n, count = collective.num_ranks, collective.num_chunks
    if collective.name in ("all_gather", "broadcast"):
        return collective.pre_ranks
    if collective.name in ("reduce_scatter", "reduce"):
        return collective.post_ranks
    if name in _ROOTED_SPREADS or name == "binomial_tree":
        return np.zeros(count, dtype=np.int32)
    chunks = np.arange(count, dtype=np.int64)
    if name == "recursive_halving_doubling":
        core = core_ranks(n)[0]
        return core[chunks * core.size // count]
    return (chunks * n // max(count, 1)).astype(np.int32)


def _spread_out(
    name: str, collective: Collective, spread: Spread, ranks: Sequence[int] | None
) -> tuple[Moves, Any]:
    """Run a spreading algorithm forwards, backwards or both; return which moves add, too."""
    n, owners = collective.num_ranks, _owners(name, collective)
    order = np.arange(n) if ranks is None else np.asarray(ranks)
    if not np.array_equal(np.sort(order), np.arange(n)):
        raise ConfigurationError(
            f"order is {list(order)!r:.80}", hint="name each rank once, in the order of the ring"
        )

    def run(along: Ints) -> Moves:
        return spread(n, np.argsort(along).astype(np.int32)[owners]).renamed(along)

    forward = order.astype(np.int32)
    if not collective.reducing:
        return run(forward), False
    # Sums run backwards: on a ring the other way round, so that they take the same links.
    up = backwards(run(forward[::-1] if name == "ring" else forward))
    if collective.name != "all_reduce":
        return up, True
    return _there_and_back(up, run(forward), owners)


def _there_and_back(up: Moves, moves: Moves, owners: Ints) -> tuple[Moves, Any]:
    """Sum, then spread; each chunk's spreading starts as early as its sum allows."""
    count = owners.size
    if count and (owners == owners[0]).all():
        # Backwards the last chunk comes first: number them so that sums end in the order in
        # which they are spread, and both halves overlap.
        up = up._replace(chunks=np.int32(count - 1) - up.chunks)
    ends = np.zeros(count, dtype=np.int64)
    begins = np.full(count, moves.num_steps, dtype=np.int64)
    np.maximum.at(ends, up.chunks, up.steps + 1)
    np.minimum.at(begins, moves.chunks, moves.steps)
    wait = max(int((ends - begins).max(initial=0)), 0)
    down = moves.later(wait)
    steps = np.concatenate([up.steps, down.steps])
    order = np.argsort(steps, kind="stable")
    both = Moves(
        np.concatenate([up.chunks, down.chunks])[order],
        np.concatenate([up.sources, down.sources])[order],
        np.concatenate([up.targets, down.targets])[order],
        steps[order],
    )
    return both, order < up.chunks.size
