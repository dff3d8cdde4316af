"""All-reduces that are no reduce-scatter and all-gather: they trade bytes for fewer steps."""

from __future__ import annotations

import numpy as np

from fivefold.collectives.algorithms._moves import Ints, Moves, moves_of, one_after_another
from fivefold.collectives.algorithms._spread import core_ranks


def one_shot_sums(n: int, num_chunks: int) -> tuple[Moves, int]:
    """Everyone sends all it has to everyone, in one step; (moves, sums among them)."""
    offsets = np.arange(1, n, dtype=np.int32)[:, None, None]
    ranks = np.arange(n, dtype=np.int32)[None, :, None]
    chunks = np.arange(num_chunks, dtype=np.int32)[None, None, :]
    moves = moves_of(chunks, ranks, (ranks + offsets) % np.int32(n), 0)
    return moves, moves.chunks.size


def doubling_sums(n: int, num_chunks: int) -> tuple[Moves, int]:
    """In step s everyone swaps and adds its whole sum with the rank that differs in bit s."""
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
