"""Algorithms for chunks that each go from one rank to one other: all-to-all, scatter, gather.

References: Bruck et al., IEEE TPDS 8(11), 1997 (all-to-all in log n steps); Thakur, Rabenseifner
and Gropp, 2005 (pairwise exchange).
"""

from __future__ import annotations

import numpy as np

from fivefold.collectives.algorithms._moves import Ints, Moves, joined, moves_of, places_of


def _travelling(chunks: Ints, sources: Ints, targets: Ints) -> tuple[Ints, Ints, Ints]:
    """Without those that stay where they are."""
    away = sources != targets
    return chunks[away], sources[away], targets[away]


def direct_exchange_moves(n: int, chunks: Ints, sources: Ints, targets: Ints) -> Moves:
    """Return all chunks in one step; each rank's list begins with its next neighbour."""
    chunks, sources, targets = _travelling(chunks, sources, targets)
    order = np.argsort((targets - sources) % np.int32(n), kind="stable")
    return moves_of(chunks[order], sources[order], targets[order], 0)


def pairwise_exchange_moves(n: int, chunks: Ints, sources: Ints, targets: Ints) -> Moves:
    """In step k rank r sends to r xor k, or to r + k where n is no power of two."""
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
    """First inside the group to the member with the target's place, then across groups.

    A rank so sends to few others outside its group, and what it sends them is larger.
    """
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
