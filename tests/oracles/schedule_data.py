"""Schedules on data: random 64-bit integers that wrap around, compared with the true result.

It shares nothing with `verify` but the order of events; a wrong schedule passes with a chance of
about 2^-64 for each chunk.
"""

from __future__ import annotations

import numpy as np

from fivefold.collectives.schedules import Schedule, ScheduleError
from fivefold.collectives.schedules.timing import event_order


def verify_with_data(schedule: Schedule, seed: int = 0) -> None:
    """Run a schedule on random integers and refuse a result that is not its collective's."""
    collective, wrap = schedule.collective, 2**64
    draw = np.random.default_rng(seed).integers(0, wrap, collective.num_ranks, dtype=np.uint64)
    base = np.random.default_rng(seed + 1).integers(
        0, wrap, max(collective.num_chunks, 1), dtype=np.uint64
    )
    held: dict[tuple[int, int], int] = {}
    wanted = [0] * collective.num_chunks
    for chunk, rank in zip(
        collective.pre_chunks.tolist(), collective.pre_ranks.tolist(), strict=True
    ):
        share = int(base[chunk]) * (2 * int(draw[rank]) + 1 if collective.reducing else 1) % wrap
        held[chunk, rank] = share
        wanted[chunk] = (wanted[chunk] + share) % wrap if collective.reducing else share
    carried: dict[int, int] = {}
    for event in event_order(schedule).tolist():
        move = schedule.transfer(event >> 1)
        if event & 1 == 0:
            carried[event >> 1] = held.get((move.chunk, move.source), 0)
            continue
        before = held.get((move.chunk, move.target), 0) if move.reduces else 0
        held[move.chunk, move.target] = (before + carried.pop(event >> 1)) % wrap
    for chunk, rank in zip(
        collective.post_chunks.tolist(), collective.post_ranks.tolist(), strict=True
    ):
        if held.get((chunk, rank), 0) != wanted[chunk]:
            raise ScheduleError(f"rank {rank} ends with a wrong value of chunk {chunk}")
