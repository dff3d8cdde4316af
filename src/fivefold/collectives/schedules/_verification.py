"""The verifier: does a schedule really do its collective? Independent of whatever made it.

It replays the schedule on sets of contributors. With a topology every transfer needs a path; with
``check_times`` the times must respect latency, capacity and the links' order.
Reference: collectives as pre- and postconditions, SCCL, arXiv 2008.08708.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules.arrays import (
    Array,
    Floats,
    Ints,
    Longs,
    group_by_key,
    of_one_kind,
    pop_event,
    push_event,
    rows_of,
)
from fivefold.collectives.schedules.messages import messages_of
from fivefold.collectives.schedules.routes import RouteTable, require_topology, route_table
from fivefold.collectives.schedules.schedule import BY_TIMES, Schedule, ScheduleError
from fivefold.collectives.schedules.timing import order_events
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology

_SLACK = 1e-6  # of a message's own time: solvers round more than sums of floats do


def _check_times_against_order(schedule: Schedule) -> None:
    """Refuse a transfer that starts before what it sends has arrived; times that order agree."""
    if schedule.starts_s is None or schedule.ends_s is None or schedule.order_mode == BY_TIMES:
        return
    at = _first_hurried(
        schedule.slots(),
        schedule.starts_s,
        schedule.ends_s,
        np.ascontiguousarray(schedule.steps),
        (schedule.collective.reducing, 1e-9 * schedule.total_s),
    )
    if at >= 0:
        move = schedule.transfer(at)
        raise ScheduleError(
            f"transfer {at} of chunk {move.chunk} starts at {move.start_s:.6g} s, before all that "
            f"rank {move.source} has to send has arrived",
            hint="a transfer starts when those of earlier steps that it needs have ended",
            transfer=at,
        )


def _check_times_against_links(
    schedule: Schedule, topology: Topology, routes: RouteTable, size_bytes: float | None
) -> None:
    """Refuse times that no network of these latencies and capacities can keep."""
    if schedule.starts_s is None or schedule.ends_s is None:
        message = "the schedule has no times to check"
        raise ConfigurationError(message, hint="evaluate() gives some")
    size = schedule.attributes.get("size_bytes") if size_bytes is None else size_bytes
    if size is None:
        message = "the schedule does not say for which size it was made"
        raise ConfigurationError(message, hint="pass size_bytes")
    transfer_bytes = schedule.collective.chunk_bytes(size)[schedule.chunks]
    leaders = messages_of(schedule)
    message_bytes = np.bincount(leaders, transfer_bytes, leaders.size)
    legs, first_legs = routes.legs()
    each_s = 1.0 / legs.capacities_bytes_per_s(topology.capacities_bytes_per_s)
    latency_s, latency_before_s = _sums(legs.latencies_s(topology.latencies_s), first_legs)
    byte_s, byte_before_s = _sums(each_s, first_legs)
    least_s = latency_s[routes.rows] + message_bytes * byte_s[routes.rows]
    lasts_s = schedule.ends_s - schedule.starts_s
    leading = leaders == np.arange(leaders.size)
    fast = leading & (lasts_s < least_s * (1 - _SLACK) - 1e-12 * schedule.total_s)
    if fast.any():
        at = int(np.argmax(fast))
        raise ScheduleError(
            f"transfer {at} takes {lasts_s[at]:.6g} s, but its route needs {least_s[at]:.6g} s",
            hint="a message needs its route's latency, and its bytes over the least capacity; a "
            "rank on its way receives all of it before it sends it on",
            transfer=at,
        )
    # The messages of every link must fit one after another between their times: after the legs
    # before, and early enough for their own latency and the legs behind.
    offsets, places = rows_of(routes.offsets, routes.rows[leading])
    owner = np.repeat(np.flatnonzero(leading), np.diff(offsets))
    links = routes.links[places]
    leg, row = np.repeat(legs.rows, np.diff(legs.offsets))[places], routes.rows[owner]
    needs_s = message_bytes[owner] / topology.capacities_bytes_per_s[links]
    before_s = latency_before_s[leg] + message_bytes[owner] * byte_before_s[leg]
    behind_s = latency_s[row] - latency_before_s[leg]
    behind_s += message_bytes[owner] * (byte_s[row] - byte_before_s[leg] - each_s[leg])
    starts_s = schedule.starts_s[owner] + before_s
    ends_s = np.maximum(schedule.ends_s[owner] - behind_s, starts_s)  # the last byte left by then
    slack_s = _SLACK * needs_s + 1e-12 * schedule.ends_s[owner]  # what rounding leaves of an end
    order = np.lexsort((starts_s, links))
    late, late_s = _first_overload(
        links[order], starts_s[order], ends_s[order], needs_s[order], slack_s[order]
    )
    if late >= 0:
        at, link = int(owner[order[late]]), int(links[order[late]])
        name = f"{topology.links[link].source} -> {topology.links[link].target}"
        raise ScheduleError(
            f"link {link}, {name}, cannot carry all that is on it by the end of transfer {at}: "
            f"{late_s:.6g} s more are needed",
            hint="start the transfer later, or take another link",
            transfer=at,
        )


def _sums(values: Floats, first: Longs) -> tuple[Floats, Floats]:
    """Return the sum of each row's values and, for each value, of those before it in its row."""
    place = np.arange(values.size) - np.repeat(first[:-1], np.diff(first))
    before = np.zeros(values.size)  # differences of sums over all rows would lose what is small
    for hop in range(1, int(place.max(initial=0)) + 1):
        on = np.flatnonzero(place == hop)
        before[on] = before[on - 1] + values[on - 1]
    return before[first[1:] - 1] + values[first[1:] - 1], before


@njit
def _first_overload(
    links: Array, starts_s: Array, ends_s: Array, needs_s: Array, slack_s: Array
) -> Any:
    """Return the first message that cannot be done by its end, link by link, earliest end first.

    On one machine that is optimal with interruption: if it fails, no sharing keeps the times.
    """
    count = links.size
    heap = (np.empty(count), np.empty(count, np.int64))
    left_s = needs_s.copy()
    first = 0
    while first < count:
        last = first
        while last < count and links[last] == links[first]:
            last += 1
        size, following, now_s = 0, first, 0.0
        while size > 0 or following < last:
            if size == 0:
                now_s = max(now_s, starts_s[following])
            while following < last and starts_s[following] <= now_s:
                size = push_event(heap, size, ends_s[following], following)
                following += 1
            top = heap[1][0]
            until_s = now_s + left_s[top]
            if following < last and starts_s[following] < until_s:
                left_s[top] -= starts_s[following] - now_s
                now_s = starts_s[following]
                continue
            now_s = until_s
            late_s = now_s - ends_s[top]
            if late_s > slack_s[top]:
                return top, late_s
            size = pop_event(heap, size)
        first = last
    return -1, 0.0


@njit
def _first_hurried(
    slots: tuple[Any, Any, Any, Any],
    starts_s: Floats,
    ends_s: Floats,
    steps: Ints,
    shape: tuple[int, float],
) -> int:
    """Find the first transfer that starts before what it reads has arrived; -1 for none.

    A copy is there from its first arrival; a sum when all that earlier steps added has arrived.
    """
    read, written, filled, order = slots
    reducing, slack_s = shape
    ready_s = np.where(filled, 0.0, np.inf)
    first = 0
    while first < order.size:
        last = first + 1
        if steps[order[first]] >= 0:
            while last < order.size and steps[order[last]] == steps[order[first]]:
                last += 1
        for place in range(first, last):
            index = order[place]
            if starts_s[index] + slack_s < ready_s[read[index]]:
                return int(index)
        for place in range(first, last):
            index = order[place]
            slot = written[index]
            if reducing and np.isfinite(ready_s[slot]):
                ready_s[slot] = max(ready_s[slot], ends_s[index])
            else:
                ready_s[slot] = min(ready_s[slot], ends_s[index])
        first = last
    return -1


SLACK = 1e-9  # of the whole duration: what sums of floats may be off by


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """Findings of the verifier about a schedule that is right."""

    num_transfers: int
    num_redundant: int
    order: str
    routed: bool
    timed: bool


def verify_schedule(
    schedule: Schedule,
    *,
    topology: Topology | None = None,
    check_times: bool = False,
    size_bytes: float | None = None,
) -> VerificationReport:
    """Prove that a schedule does its collective, or name the first transfer that is wrong.

    The order in which transfers take effect is that of their steps, else that of their times, else
    the listed one, as `Schedule` has it.

    Args:
        schedule: The schedule.
        topology: Network whose links it must keep to; None for the schedule's own, if any.
        check_times: Whether the times must agree with latency and capacity of the links: no
            transfer may be faster than its route allows, and two that overlap on a link must leave
            each other room. What counts as one message, `Schedule` says.
        size_bytes: Size of the collective for which the times were made, for ``check_times``;
            None to take ``schedule.attributes["size_bytes"]``.

    Raises:
        ScheduleError: The schedule is wrong.
        InfeasibleError: Two ranks that a transfer joins have no route in the topology.
        ConfigurationError: Times are to be checked, but there are none, or no topology or size.

    Examples:
        >>> from fivefold.collectives.schedules import Transfer, broadcast
        >>> moves = [Transfer(chunk=0, source=1, target=2)]
        >>> verify_schedule(Schedule.from_transfers(moves, collective=broadcast(3)))
        Traceback (most recent call last):
        fivefold.collectives.schedules.schedule.ScheduleError: transfer 0 sends chunk 0 from ...
    """
    mode = schedule.order_mode
    redundant = _replayed(schedule, mode=mode)
    network = topology if topology is not None else schedule.topology
    if network is not None or check_times:
        network = require_topology(schedule, topology)
        routes = route_table(schedule, network)
        if check_times:
            _check_times_against_order(schedule)
            _check_times_against_links(schedule, network, routes, size_bytes)
    return VerificationReport(
        num_transfers=schedule.num_transfers,
        num_redundant=redundant,
        order=("listed", "steps", "times")[mode],
        routed=network is not None,
        timed=check_times,
    )


def _replayed(schedule: Schedule, *, mode: int) -> int:
    """Replay the schedule; returns the number of redundant copies."""
    collective = schedule.collective
    none = np.zeros(0)
    starts_s = none if schedule.starts_s is None else schedule.starts_s
    ends_s = none if schedule.ends_s is None else schedule.ends_s
    wrong = ~(np.isfinite(starts_s) & np.isfinite(ends_s)) | (starts_s < 0) | (ends_s < starts_s)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ScheduleError(
            f"transfer {at} starts at {starts_s[at]} s and ends at {ends_s[at]} s",
            hint="starts are at least 0 and ends at least starts",
            transfer=at,
        )
    contributors = int(np.diff(collective.pre_offsets).max(initial=1))
    words = max(1, -(-contributors // 64)) if collective.reducing else 1
    code, index, chunk, rank, redundant = replay(
        group_by_key(*of_one_kind(schedule.chunks), collective.num_chunks),
        of_one_kind(schedule.sources, schedule.targets, schedule.reduces),
        of_one_kind(schedule.steps, starts_s, ends_s),
        of_one_kind(collective.pre_offsets, collective.pre_ranks),
        of_one_kind(collective.post_offsets, collective.post_ranks),
        (
            collective.num_ranks,
            words,
            mode,
            collective.reducing,
            SLACK * float(ends_s.max(initial=0.0)),
        ),
    )
    if code != FINE:
        _refuse(schedule, int(code), int(index), chunk=int(chunk), rank=int(rank))
    return int(redundant)


def _refuse(schedule: Schedule, code: int, index: int, *, chunk: int, rank: int) -> None:
    if index < 0:
        raise ScheduleError(
            f"chunk {chunk} never arrives whole at rank {rank}",
            hint=f"the postcondition of {schedule.collective.name} asks for it there",
        )
    move = schedule.transfer(index)
    doing = "adds" if move.reduces else "sends"
    what = f"transfer {index} {doing} chunk {chunk} from rank {move.source} to rank {move.target}"
    reasons = {
        NOT_HELD: (
            f"rank {move.source} does not hold it by then",
            "a rank sends what it held at first or has received before",
        ),
        DOUBLE_ADD: (
            "a contribution in it is in the target's sum already",
            "every contribution may be added once",
        ),
        LOST: (
            f"that overwrites contributions which rank {rank} then lacks at last",
            "add where sums are under way, copy only whole sums",
        ),
        SELF_TRANSFER: ("that is the same rank", "leave out what stays where it is"),
    }
    reason, hint = reasons[code]
    raise ScheduleError(f"{what}, but {reason}", hint=hint, transfer=index)


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
    """Return the first rank that does not hold the sum of all contributors, or -1."""
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
    """Return code, transfer or -1, chunk, rank or -1, redundant writes of the replay of all chunks.

    Of all chunks the broken transfer that is listed first is named.
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
