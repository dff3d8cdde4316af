"""The verifier's hot loops: one chunk at a time, its events in order, its values as bit sets.

The state of a schedule falls apart by chunk: what happens to one chunk never touches another. So
the kernel replays each chunk alone on one small table, a set of contributors for each rank, and
an all-gather of 4,096 ranks fits in a few megabytes. A value is a row of 64-bit words; bit i is
the i-th rank that contributes to the chunk. A chunk that is copied, not summed, has the one bit 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._order_kernels import order_events

FINE, NOT_HELD, DOUBLE_ADD, NOT_MET, LOST, SELF_TRANSFER = 0, 1, 2, 3, 4, 5


@njit
def _write(state: Any, value: Any, target: int, adds: int) -> int:
    """Write a value at the target; 0 fine, 1 a contribution is there already, 2 some are lost."""
    clash, lost = False, False
    for word in range(value.size):
        if state[target, word] & value[word]:
            clash = True
        if state[target, word] & ~value[word]:
            lost = True
    if adds and clash:
        return 1
    for word in range(value.size):
        state[target, word] = (state[target, word] | value[word]) if adds else value[word]
    return 0 if adds or not lost else 2


@njit
def _replay_chunk(
    members: Any, events: Any, transfers: tuple[Any, Any, Any], state: Any, held: Any
) -> tuple[int, int, int, int]:
    """Play one chunk's events: (code, transfer, first lossy overwrite or -1, redundant writes)."""
    sources, targets, reduces = transfers
    words = state.shape[1]
    values = np.empty((members.size, words), np.uint64)
    redundant, lossy = 0, -1
    for event in events:
        m = event >> 1
        index = members[m]
        source, target = sources[index], targets[index]
        if event & 1 == 0:
            if source == target:
                return SELF_TRANSFER, index, lossy, redundant
            if not held[source]:
                return NOT_HELD, index, lossy, redundant
            values[m] = state[source]
            continue
        if not reduces[index] and held[target]:
            same = True
            for word in range(words):
                same = same and state[target, word] == values[m, word]
            redundant += same
        outcome = _write(state, values[m], target, reduces[index])
        held[target] = True
        if outcome == 1:
            return DOUBLE_ADD, index, lossy, redundant
        if outcome == 2 and lossy < 0:
            lossy = index
    return FINE, -1, lossy, redundant


@njit
def _set_start(ranks: Any, state: Any, held: Any, reducing: int) -> None:
    for position in range(ranks.size):
        rank = ranks[position]
        held[rank] = True
        bit = position if reducing else 0
        state[rank, bit >> 6] = np.uint64(1) << np.uint64(bit & 63)


@njit
def _clear(ranks: Any, state: Any, held: Any) -> None:
    for rank in ranks:
        held[rank] = False
        state[rank, :] = np.uint64(0)


@njit
def _unmet(ranks: Any, state: Any, held: Any, contributors: int) -> int:
    """First rank that does not hold the sum of all contributors, or -1."""
    for rank in ranks:
        if not held[rank]:
            return int(rank)
        for word in range(state.shape[1]):
            left = contributors - 64 * word
            full = ~np.uint64(0)
            if left < 64:
                full = (np.uint64(1) << np.uint64(max(left, 0))) - np.uint64(1)
            if state[rank, word] != full:
                return int(rank)
    return -1


@njit
def replay(
    grouped: tuple[Any, Any],
    transfers: tuple[Any, Any, Any],
    timing: tuple[Any, Any, Any],
    pre: tuple[Any, Any],
    post: tuple[Any, Any],
    shape: tuple[int, int, int, bool, float],
) -> tuple[int, int, int, int, int]:
    """Replay every chunk and compare with the postcondition.

    Args:
        grouped: Offsets by chunk and transfers grouped by chunk.
        transfers: Sources, targets and reduces.
        timing: Steps, starts and ends.
        pre: Offsets by chunk and ranks of the precondition.
        post: Offsets by chunk and ranks of the postcondition.
        shape: Ranks, words of a value, mode of `order_events`, whether chunks are summed, slack.

    Returns:
        Code, transfer or -1, chunk, rank or -1, redundant writes. Of all chunks the broken
        transfer that is listed first is named.
    """
    num_ranks, words, mode, reducing, slack_s = shape
    offsets, positions = grouped
    steps, starts_s, ends_s = timing
    state = np.zeros((num_ranks, words), np.uint64)
    held = np.zeros(num_ranks, np.bool_)
    redundant = 0
    worst: Any = (FINE, np.int64(-1), np.int64(-1), np.int64(-1))
    for chunk in range(offsets.size - 1):
        members = positions[offsets[chunk] : offsets[chunk + 1]]
        holders = pre[1][pre[0][chunk] : pre[0][chunk + 1]]
        wanted = post[1][post[0][chunk] : post[0][chunk + 1]]
        _set_start(holders, state, held, reducing)
        events = order_events(members, steps, (starts_s, ends_s), mode, slack_s)
        code, index, lossy, more = _replay_chunk(members, events, transfers, state, held)
        redundant += more
        rank = -1
        if code == FINE:
            rank = _unmet(wanted, state, held, holders.size if reducing else 1)
            if rank >= 0:
                code, index = (NOT_MET, -1) if lossy < 0 else (LOST, lossy)
        if code != FINE and (
            worst[0] == FINE or (index >= 0 and (worst[1] < 0 or index < worst[1]))
        ):
            worst = (code, np.int64(index), np.int64(chunk), np.int64(rank))
        _clear(holders, state, held)
        for m in members:
            _clear(transfers[1][m : m + 1], state, held)
    return worst[0], worst[1], worst[2], worst[3], redundant
