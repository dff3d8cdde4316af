"""The verifier with data: run a schedule on random numbers and compare with the true result.

It shares nothing with the symbolic verifier but the order of transfers: values are 64-bit integers
that wrap around, and a wrong schedule passes with a chance of about 2^-64 for each chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Array, Longs
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._errors import ScheduleError
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.collectives.schedules._slots import order_of, slots_of


def verify_with_data(schedule: Schedule, seed: int = 0) -> None:
    """Run the schedule on random integers and compare every result.

    Args:
        schedule: The schedule.
        seed: Seed of the integers.

    Raises:
        ScheduleError: A rank does not end with what the collective promises it; names chunk and
            rank.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_reduce
        >>> verify_with_data(build_algorithm("double_binary_tree", all_reduce(5, 4)))
    """
    collective = schedule.collective
    keys, values, expected = run_on_data(schedule, seed)
    wanted = collective.post_chunks.astype(np.int64) * collective.num_ranks + collective.post_ranks
    place = np.minimum(np.searchsorted(keys, wanted), max(keys.size - 1, 0))
    moved = keys[place] == wanted if keys.size else np.zeros(wanted.size, dtype=np.bool_)
    got = np.zeros(wanted.size, dtype=np.uint64)
    got[moved] = values[place[moved]]
    still = np.flatnonzero(~moved)  # nothing came or went: what the rank had is what it has
    got[still] = _initial(
        collective, collective.post_chunks[still], collective.post_ranks[still], seed
    )
    wrong = got != expected[collective.post_chunks]
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ScheduleError(
            f"rank {collective.post_ranks[at]} ends with a wrong value of chunk "
            f"{collective.post_chunks[at]}",
            hint="verify() names the transfer that is wrong",
        )


def run_on_data(schedule: Schedule, seed: int) -> tuple[Longs, Array, Array]:
    """Run the schedule on random integers.

    Args:
        schedule: The schedule.
        seed: Seed of the integers.

    Returns:
        Sorted keys (chunk * ranks + rank) of all that was read or written, their values at last,
        and the value that each chunk should have, uint64.
    """
    collective = schedule.collective
    read, written, filled, order = slots_of(schedule)
    keys = np.zeros(filled.size, dtype=np.int64)
    base = schedule.chunks.astype(np.int64) * collective.num_ranks
    keys[read] = base + schedule.sources
    keys[written] = base + schedule.targets
    chunks, ranks = keys // collective.num_ranks, keys % collective.num_ranks
    values = _initial(collective, chunks, ranks, seed)
    _run(values, (read, written, schedule.reduces), *_phases(schedule, order))
    shares = _hashed(collective.pre_chunks, collective.pre_ranks, seed)
    expected = _hashed(np.arange(collective.num_chunks), np.zeros(1), seed)
    if collective.reducing:
        expected = np.zeros(collective.num_chunks, dtype=np.uint64)
        np.add.at(expected, collective.pre_chunks, shares)
    sorting = np.argsort(keys)
    return keys[sorting], values[sorting], expected


def _hashed(chunks: Array, ranks: Array, seed: int) -> Array:
    """Well mixed 64-bit numbers of (seed, chunk, rank): the finalizer of SplitMix64."""
    mixed = chunks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = mixed + ranks.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = mixed + np.uint64((seed * 0x2545F4914F6CDD1D + 1) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _initial(collective: Collective, chunks: Array, ranks: Array, seed: int) -> Array:
    """What each rank has of each chunk at first; 0 where it has nothing."""
    keys = collective.pre_chunks.astype(np.int64) * collective.num_ranks + collective.pre_ranks
    wanted = chunks.astype(np.int64) * collective.num_ranks + ranks
    place = np.minimum(np.searchsorted(keys, wanted), max(keys.size - 1, 0))
    has = keys[place] == wanted if keys.size else np.zeros(wanted.size, dtype=np.bool_)
    own = ranks if collective.reducing else np.zeros_like(ranks)
    return np.where(has, _hashed(chunks, own, seed), np.uint64(0))


def _phases(schedule: Schedule, order: Longs) -> tuple[Array, Array]:
    """Events in order, 2 t for the read and 2 t + 1 for the write of transfer t."""
    mode, count = order_of(schedule), schedule.num_transfers
    transfers = np.arange(count, dtype=np.int64)
    if mode == 0:
        return np.arange(2 * count, dtype=np.int64), np.zeros(count, dtype=np.uint64)
    if mode == 1:
        reads, writes = schedule.steps[order] * 2, schedule.steps[order] * 2 + 1
        instants = np.concatenate([reads, writes]).astype(np.float64)
        events = np.concatenate([2 * order, 2 * order + 1])
    else:
        assert schedule.starts_s is not None, "order_of says there are times"
        assert schedule.ends_s is not None, "order_of says there are times"
        slack_s = 1e-9 * float(schedule.ends_s.max(initial=0.0))
        instants = np.empty(2 * count)
        instants[0::2] = schedule.starts_s + slack_s
        instants[1::2] = np.maximum(schedule.ends_s, instants[0::2])
        events = np.stack([2 * transfers, 2 * transfers + 1], axis=1).reshape(-1)
    return events[np.argsort(instants, kind="stable")], np.zeros(count, dtype=np.uint64)


@njit
def _run(values: Any, transfers: tuple[Any, Any, Any], events: Any, carried: Any) -> None:
    read, written, reduces = transfers
    for event in events:
        index = event >> 1
        if event & 1 == 0:
            carried[index] = values[read[index]]
        elif reduces[index]:
            values[written[index]] += carried[index]
        else:
            values[written[index]] = carried[index]
