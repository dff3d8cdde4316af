"""Moves: the arrays that every algorithm makes, before they become a schedule.

An algorithm that spreads chunks from their owners to everyone is written once and serves five
collectives: forwards it is an all-gather or a broadcast, backwards a reduce-scatter or a reduce,
and backwards then forwards an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from fivefold.collectives.schedules.arrays import Ints


class Moves(NamedTuple):
    """Transfers as arrays of one length: chunk, source, target, step."""

    chunks: Ints
    sources: Ints
    targets: Ints
    steps: Ints

    @property
    def num_steps(self) -> int:
        """Steps, counted to the last one used."""
        return int(self.steps.max(initial=-1)) + 1

    def renamed(self, ranks: Ints) -> Moves:
        """Return the same moves among other ranks: rank i becomes ``ranks[i]``."""
        return Moves(self.chunks, ranks[self.sources], ranks[self.targets], self.steps)

    def later(self, steps: int) -> Moves:
        """Return the same moves that many steps later."""
        return self._replace(steps=self.steps + np.int32(steps))


def moves_of(chunks: Any, sources: Any, targets: Any, steps: Any) -> Moves:
    """Return the moves from arrays that broadcast to one shape, sorted by step."""
    arrays = np.broadcast_arrays(chunks, sources, targets, steps)
    flat = [np.asarray(array, dtype=np.int32).reshape(-1) for array in arrays]
    if flat[3].size and (flat[3][1:] < flat[3][:-1]).any():
        order = np.argsort(flat[3], kind="stable")
        flat = [array[order] for array in flat]
    return Moves(*flat)


def no_moves() -> Moves:
    """Return an empty list of moves."""
    return moves_of([], [], [], [])


def joined(parts: Iterable[Moves]) -> Moves:
    """Return the moves of several parts side by side, sorted by step."""
    listed = [part for part in parts if part.chunks.size]
    if not listed:
        return no_moves()
    return moves_of(*(np.concatenate(arrays) for arrays in zip(*listed, strict=True)))


def one_after_another(parts: Iterable[Moves]) -> Moves:
    """Return the moves of several parts, each part's steps after those of the parts before it."""
    listed, begin = [], 0
    for part in parts:
        listed.append(part.later(begin))
        begin += part.num_steps
    return joined(listed)


def places_of(groups: list[Ints]) -> tuple[Ints, Ints]:
    """Return the group of each rank, and its place among the group's members."""
    count = sum(group.size for group in groups)
    group_of, place_of = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    for number, group in enumerate(groups):
        group_of[group] = number
        place_of[group] = np.arange(group.size, dtype=np.int32)
    return group_of, place_of


def backwards(moves: Moves) -> Moves:
    """Return the moves in reverse, each from its target to its source."""
    steps = np.int32(moves.num_steps - 1) - moves.steps[::-1]
    return Moves(moves.chunks[::-1], moves.targets[::-1], moves.sources[::-1], steps)


def _travelling(chunks: Ints, sources: Ints, targets: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the chunks that do not stay where they are."""
    away = sources != targets
    return chunks[away], sources[away], targets[away]


def direct_exchange_moves(n: int, chunks: Ints, sources: Ints, targets: Ints) -> Moves:
    """Return all chunks in one step; each rank's list begins with its next neighbour."""
    chunks, sources, targets = _travelling(chunks, sources, targets)
    order = np.argsort((targets - sources) % np.int32(n), kind="stable")
    return moves_of(chunks[order], sources[order], targets[order], 0)


def pairwise_exchange_moves(n: int, chunks: Ints, sources: Ints, targets: Ints) -> Moves:
    """Send from rank r to r xor k in step k, or to r + k where n is no power of two."""
    chunks, sources, targets = _travelling(chunks, sources, targets)
    power = n & (n - 1) == 0
    steps = (sources ^ targets) if power else (targets - sources) % np.int32(n)
    return moves_of(chunks, sources, targets, steps - 1)


def bruck_exchange_moves(
    n: int, chunks: Ints, sources: Ints, targets: Ints, *, radix: int = 2
) -> Moves:
    """Send a chunk digit by digit of the distance it has to go, written to a radix."""
    chunks, sources, targets = _travelling(chunks, sources, targets)
    distance = (targets - sources) % np.int32(n)
    here = sources.copy()
    parts = []
    weight, first_step = 1, 0
    while weight < n:
        digit = distance // np.int32(weight) % np.int32(radix)
        moving = np.flatnonzero(digit > 0)
        there = (here[moving] + digit[moving] * np.int32(weight)) % np.int32(n)
        steps = first_step + digit[moving] - 1
        parts.append(moves_of(chunks[moving], here[moving], there, steps))
        here[moving] = there
        weight, first_step = weight * radix, first_step + radix - 1
    return joined(parts)


def grouped_exchange_moves(chunks: Ints, sources: Ints, targets: Ints, groups: list[Ints]) -> Moves:
    """Send inside the group to the member with the target's place, then across: fewer, larger."""
    chunks, sources, targets = _travelling(chunks, sources, targets)
    group_of, place_of = places_of(groups)
    widest = max(group.size for group in groups)
    members = np.empty((len(groups), widest), dtype=np.int32)
    for number, group in enumerate(groups):
        members[number] = group[np.arange(widest) % group.size]
    relays = members[group_of[sources], place_of[targets]]
    relays = np.where(group_of[sources] == group_of[targets], targets, relays)
    first, second = relays != sources, relays != targets
    return joined(
        [
            moves_of(chunks[first], sources[first], relays[first], 0),
            moves_of(chunks[second], relays[second], targets[second], 1),
        ]
    )


def binomial_exchange_moves(n: int, chunks: Ints, sources: Ints, targets: Ints) -> Moves:
    """Return a scatter or gather over a binomial tree: the farthest half leaves the root first."""
    chunks, sources, targets = _travelling(chunks, sources, targets)
    if not chunks.size:
        return moves_of([], [], [], [])
    scatters = bool((sources == sources[0]).all())
    root = sources if scatters else targets
    offset = (targets - sources) % np.int32(n) if scatters else (sources - targets) % np.int32(n)
    bits = (n - 1).bit_length()
    parts = []
    for bit in range(bits):
        moving = np.flatnonzero(offset >> bit & 1)
        # Below the root hang offsets whose lower bits are clear; a chunk passes all of them.
        far = offset[moving] >> bit << bit
        near = far - np.int32(1 << bit)
        ends = [(root[moving] + near) % np.int32(n), (root[moving] + far) % np.int32(n)]
        here, there = ends if scatters else ends[::-1]
        step = bits - 1 - bit if scatters else bit
        parts.append(moves_of(chunks[moving], here, there, step))
    return joined(parts)


def _stagger(owners: Ints) -> Ints:
    """Return steps by which each chunk starts later: its number where one rank owns all, else 0."""
    chunks = np.arange(owners.size, dtype=np.int32)
    alone = owners.size > 0 and bool((owners == owners[0]).all())
    return chunks if alone else np.zeros_like(chunks)


def _along(chunks: Ints, owners: Ints, *, reach: int, sign: int, n: int) -> Moves:
    """Move the chunks over the first ``reach`` hops from their owners, one hop a step."""
    offsets = np.arange(1, reach + 1, dtype=np.int32)[:, None]
    mine = owners[chunks][None, :]
    here = (mine + np.int32(sign) * (offsets - np.int32(1))) % np.int32(n)
    there = (mine + np.int32(sign) * offsets) % np.int32(n)
    return moves_of(chunks[None, :], here, there, offsets - 1 + _stagger(owners)[chunks][None, :])


def ring_moves(n: int, owners: Ints) -> Moves:
    """Send every chunk once round the ring 0, 1, ..., n - 1."""
    return _along(np.arange(owners.size, dtype=np.int32), owners, reach=n - 1, sign=1, n=n)


def bidirectional_ring_moves(n: int, owners: Ints) -> Moves:
    """Send every chunk half way round in each direction."""
    order = np.argsort(owners, kind="stable").astype(np.int32)
    begins = np.searchsorted(owners[order], owners[order])
    odd = (np.arange(owners.size) - begins) % 2 == 1  # the second, fourth, ... of its owner
    parts = []
    # With n even one direction is one hop longer; it changes from chunk to chunk of a rank.
    for members, far_sign in ((order[~odd], 1), (order[odd], -1)):
        for sign in (1, -1):
            reach = n // 2 if sign == far_sign else (n - 1) // 2
            parts.append(_along(members, owners, reach=reach, sign=sign, n=n))
    return joined(parts)


def core_ranks(n: int) -> tuple[Ints, Ints]:
    """Return the largest power of two of ranks, and the place of each rank's partner in it."""
    size = 1 << (n.bit_length() - 1)
    extra = n - size  # of the first 2 * extra ranks the even ones go to the odd ones after them
    core = np.concatenate([2 * np.arange(extra) + 1, np.arange(2 * extra, n)]).astype(np.int32)
    places = np.arange(n, dtype=np.int32) - np.int32(extra)
    places[: 2 * extra] = np.arange(2 * extra, dtype=np.int32) // 2
    return core, places


def recursive_doubling_moves(n: int, owners: Ints) -> Moves:
    """Exchange in step s all that each rank has with the rank that differs in bit s.

    Ranks beyond a power of two give theirs to a partner first, and get everything from it at last.
    """
    core, places = core_ranks(n)
    folded = core[places[owners]]
    chunks = np.arange(owners.size, dtype=np.int32)
    own = np.flatnonzero(folded != owners).astype(np.int32)
    parts = [moves_of(own, owners[own], folded[own], 0)]
    inner = []
    place = places[owners]
    for step in range(core.size.bit_length() - 1):
        others = np.arange(1 << step, dtype=np.int32)[:, None] ^ place[None, :]
        inner.append(moves_of(chunks[None, :], core[others], core[others ^ (1 << step)], step))
    parts.append(joined(inner))
    outside = np.flatnonzero(core[places] != np.arange(n)).astype(np.int32)
    pairs = np.broadcast_to(chunks[None, :], (outside.size, chunks.size))
    missing = owners[None, :] != outside[:, None]
    givers = np.broadcast_to(core[places[outside]][:, None], pairs.shape)
    takers = np.broadcast_to(outside[:, None], pairs.shape)
    parts.append(moves_of(pairs[missing], givers[missing], takers[missing], 0))
    return one_after_another(parts)


def bruck_moves(n: int, owners: Ints) -> Moves:
    """Send in step s the first 2^s blocks that each rank has to the rank 2^s before it."""
    chunks = np.arange(owners.size, dtype=np.int32)
    parts = []
    step, distance = 0, 1
    while distance < n:
        held = np.arange(min(distance, n - distance), dtype=np.int32)[:, None]
        here = (owners[None, :] - held) % np.int32(n)
        there = (owners[None, :] - held - np.int32(distance)) % np.int32(n)
        parts.append(moves_of(chunks[None, :], here, there, step))
        step, distance = step + 1, 2 * distance
    return joined(parts)


def pat_moves(n: int, owners: Ints, *, most_chunks: int | None = None) -> Moves:
    """Return a binomial tree for each owner, far ranks first, so that long ways carry few chunks.

    Where a message carries at most ``most_chunks``, subtrees go one edge at a time.
    """
    bits = max(n - 1, 0).bit_length()
    top = bits
    if most_chunks is not None and most_chunks < 1 << max(bits - 1, 0):
        top = most_chunks.bit_length() - 1
    offsets = np.arange(1, n, dtype=np.int32)
    lowest = offsets & -offsets
    below = 1 << (bits - top)
    # Edges among multiples of `below` are one step for each bit, from the highest down; an edge
    # within a subtree is a step of its own, the same in all subtrees.
    high = np.int32(bits) - np.ceil(np.log2(lowest + 1)).astype(np.int32)
    steps = np.where(lowest >= below, high, np.int32(top) + offsets % np.int32(below) - 1)
    here = (owners[None, :] + (offsets - lowest)[:, None]) % np.int32(n)
    there = (owners[None, :] + offsets[:, None]) % np.int32(n)
    chunks = np.arange(owners.size, dtype=np.int32)
    return moves_of(chunks[None, :], here, there, steps[:, None])


def binomial_moves(n: int, owners: Ints) -> Moves:
    """Return a binomial tree from each owner; chunks of one owner are pipelined."""
    plain = pat_moves(n, owners)
    return moves_of(
        plain.chunks, plain.sources, plain.targets, plain.steps + _stagger(owners)[plain.chunks]
    )


def direct_moves(n: int, owners: Ints) -> Moves:
    """Let every owner send to every other rank in one step, nearest rank number first."""
    offsets = np.arange(1, n, dtype=np.int32)[:, None]
    chunks = np.arange(owners.size, dtype=np.int32)
    return moves_of(chunks[None, :], owners[None, :], (owners[None, :] + offsets) % np.int32(n), 0)


def _down_a_tree(parents: Ints, chunks: Ints) -> Moves:
    """Send chunks from the root down to all, one step later for each chunk."""
    depths = np.full(parents.size, -1, dtype=np.int32)
    depths[parents < 0] = 0
    while (depths < 0).any():
        known = (depths < 0) & (parents >= 0)
        known &= depths[parents] >= 0
        assert known.any(), "the parents form a tree"
        depths[known] = depths[parents[known]] + 1
    children = np.flatnonzero(parents >= 0).astype(np.int32)
    order = np.arange(chunks.size, dtype=np.int32)
    return moves_of(
        chunks[None, :],
        parents[children][:, None],
        children[:, None],
        (depths[children] - 1)[:, None] + order[None, :],
    )


def binary_tree_moves(n: int, owners: Ints) -> Moves:
    """Send chunks down a complete binary tree whose root owns them all."""
    if n < 2 or not owners.size:
        return no_moves()
    places = np.arange(n, dtype=np.int32)
    parents = np.where(places > 0, (places - 1) // 2, -1).astype(np.int32)
    moves = _down_a_tree(parents, np.arange(owners.size, dtype=np.int32))
    return moves.renamed((places + owners[0]) % np.int32(n))


def _in_order_parents(n: int) -> Ints:
    """Return a binary tree whose leaves are odd places: parent by the lowest bit set."""
    parents = np.full(n, -1, dtype=np.int32)
    for place in range(1, n):
        bit = place & -place
        above = (place ^ bit) | (bit << 1)
        parents[place] = above if above < n else place ^ bit
    return parents


def double_tree_moves(n: int, owners: Ints) -> Moves:
    """Send even and odd chunks of one owner down two trees; a leaf of one forwards in the other."""
    if n < 2 or not owners.size:
        return no_moves()
    root = int(owners[0])
    others = np.delete(np.arange(n, dtype=np.int32), root)
    chunks = np.arange(owners.size, dtype=np.int32)
    # Leaves become inner places: mirrored, or where their number is odd shifted.
    second = others[::-1] if others.size % 2 == 0 else np.roll(others, 1)
    trees = (_fed_tree(root, others, chunks[0::2]), _fed_tree(root, second, chunks[1::2]).later(1))
    return joined(trees)


def _fed_tree(root: int, places: Ints, chunks: Ints) -> Moves:
    order = 2 * np.arange(chunks.size, dtype=np.int32)
    feed = moves_of(chunks, root, places[0], order)
    down = _down_a_tree(_in_order_parents(places.size), chunks).renamed(places)
    within = np.searchsorted(chunks, down.chunks).astype(np.int32)
    # Each tree takes every other step, so that two chunks never leave the root at once.
    later = moves_of(down.chunks, down.sources, down.targets, down.steps + within + 1)
    return joined([feed, later])


Spread = Callable[[int, Ints], Moves]


def hierarchical_moves(owners: Ints, groups: list[Ints], *, intra: Spread, inter: Spread) -> Moves:
    """Spread every chunk to all ranks in two levels."""
    group_of, place_of = places_of(groups)
    places = place_of[owners]
    across = [
        _across(owners, np.flatnonzero(places == place).astype(np.int32), groups, group_of, inter)
        for place in np.unique(places)
    ]
    inside = []
    for number, group in enumerate(groups):
        entry = np.where(group_of[owners] == number, places, places % np.int32(group.size))
        inside.append(intra(group.size, entry.astype(np.int32)).renamed(group))
    return one_after_another([joined(across), joined(inside)])


def _across(owners: Ints, chunks: Ints, groups: list[Ints], group_of: Ints, inter: Spread) -> Moves:
    """Send chunks whose owners have one place to the rank of that place in every group."""
    home = group_of[owners[chunks]]
    place = int(np.flatnonzero(groups[int(home[0])] == owners[chunks[0]])[0])
    members = np.array([group[place % group.size] for group in groups], dtype=np.int32)
    moves = inter(len(groups), home.astype(np.int32)).renamed(members)
    return moves._replace(chunks=chunks.astype(np.int32)[moves.chunks])


def doubling_sums(n: int, num_chunks: int) -> tuple[Moves, int]:
    """Swap and add in step s the sums of ranks that differ in bit s; how many moves add, too."""
    core, places = core_ranks(n)
    chunks: Ints = np.arange(num_chunks, dtype=np.int32)[None, :]
    outside = np.flatnonzero(core[places] != np.arange(n)).astype(np.int32)[:, None]
    partners = core[places[outside]]
    place = np.arange(core.size, dtype=np.int32)[:, None]
    parts = [moves_of(chunks, outside, partners, 0)]
    parts += [
        moves_of(chunks, core[place], core[place ^ np.int32(1 << bit)], 0)
        for bit in range(core.size.bit_length() - 1)
    ]
    sums = sum(part.chunks.size for part in parts)
    return one_after_another([*parts, moves_of(chunks, partners, outside, 0)]), sums
