"""Spreading in two levels: across groups among ranks of the same place, then inside each group.

Backwards this is the usual hierarchical reduction: inside first, then across.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fivefold.collectives.algorithms._moves import Ints, Moves, joined, one_after_another

Spread = Callable[[int, Ints], Moves]


def hierarchical_moves(owners: Ints, groups: list[Ints], *, intra: Spread, inter: Spread) -> Moves:
    """Spread every chunk to all ranks in two levels."""
    count = sum(group.size for group in groups)
    group_of, place_of = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    for number, group in enumerate(groups):
        group_of[group] = number
        place_of[group] = np.arange(group.size, dtype=np.int32)
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
    """Chunks whose owners have one place, to the rank of that place in every group."""
    home = group_of[owners[chunks]]
    place = int(np.flatnonzero(groups[int(home[0])] == owners[chunks[0]])[0])
    members = np.array([group[place % group.size] for group in groups], dtype=np.int32)
    moves = inter(len(groups), home.astype(np.int32)).renamed(members)
    return moves._replace(chunks=chunks.astype(np.int32)[moves.chunks])
