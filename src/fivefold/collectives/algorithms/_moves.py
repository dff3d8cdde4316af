"""Moves: the arrays that every algorithm makes, before they become a schedule.

An algorithm that spreads chunks from their owners to everyone is written once and serves five
collectives: forwards it is an all-gather or a broadcast, backwards a reduce-scatter or a reduce,
and backwards then forwards an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


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
    """Nothing to do."""
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
