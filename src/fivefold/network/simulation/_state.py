"""The state of a simulation: a handful of record arrays, for each more costs compiling time.

A *bundle* is what shares one level: flows over the same links, or a coupled group. Its members run
at weight times level; an *entry* is a pair of a bundle and a link that it loads. Names that begin
with ``first_`` are offsets: what belongs to record i lies from ``first_x`` of i to that of i + 1.

The event queue is an indexed heap: each slot (a task or a bundle) has at most one pending event,
which can be moved or taken out. The pair heap keeps (key, id) in a slice of a shared array, so that
thousands of small heaps need no memory of their own. Both break ties by the smaller id, which makes
every run repeatable.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fivefold._compiler import njit

CAPPED = -2  # a bundle's bottleneck is its own cap
BLANK = -1  # none
# Loads.tolerance of exact rates. Too small a value costs time, never the result: a bundle that is
# filled again for nothing gets the level that it had.
ROUNDING = 1e-11

# Rows of Loads.lists, and their lengths in Loads.counts.
REGION, DIRTY, TOUCHED, FILLING, LINE, ASKED = range(6)
LISTS = 6
# Further counters: requests in line share the place of their list.
IN_LINE = LINE
PASS, SOLVES, EVENTS, TICKETS, SCANS, WAITS, REFUSALS, LOGGED, PENDING, JOINS = range(6, 16)
COUNTERS = 16

BUNDLE = np.dtype(
    [
        ("first_entry", "i8"),
        ("first_member", "i8"),  # slice of Loads.heaps: (virtual end, task)
        ("members", "i8"),  # under way
        ("priority", "i8"),  # 0 first
        ("bottleneck", "i8"),  # the link that limits it, CAPPED or BLANK
        ("inside", "i8"),  # whether it is in the region that is solved
        ("frozen", "i8"),  # the pass in which its level was set
        ("caps_differ", "i8"),
        ("cap", "f8"),  # highest level
        ("level", "f8"),
        ("before", "f8"),  # level before the region was solved
        ("virtual", "f8"),  # integral of the level since it was last empty
        ("updated_s", "f8"),  # when that was brought up to date
    ]
)
ENTRY = np.dtype(
    [
        ("link", "i4"),
        ("bundle", "i4"),
        ("place", "i8"),  # where it is in Loads.link_entries
        ("count", "i8"),  # members that use the link now
        ("usage", "f8"),  # load per level
    ]
)
LINK = np.dtype(
    [
        ("first_entry", "i8"),  # slice of Loads.link_entries, entries in use first
        ("active", "i8"),  # entries in use
        ("is_dirty", "i8"),
        ("touched", "i8"),  # marks: the pass that set them
        ("filling", "i8"),
        ("open", "i8"),  # bundles whose level is open
        ("capacity", "f8"),
        ("residual", "f8"),  # capacity left for those
        ("unfrozen", "f8"),  # their load per level
        ("unfrozen_start", "f8"),
    ]
)
LEVEL_CLASS = np.dtype([("load", "f8"), ("highest", "f8"), ("lowest", "f8")])
PAIR = np.dtype([("key", "f8"), ("id", "i8")])
TASK = np.dtype(
    [
        ("size", "f8"),  # bytes or seconds
        ("latency_s", "f8"),
        ("weight", "f8"),
        ("cap_level", "f8"),  # rate cap over weight
        ("alone", "f8"),  # rate that it would have alone
        ("release_s", "f8"),
        ("start_s", "f8"),
        ("sent_s", "f8"),
        ("finish_s", "f8"),
        ("first_use", "i8"),  # all links of its route, in World.uses
        ("first_row", "i8"),  # entries that it loads, in World.rows
        ("first_dependent", "i8"),  # in World.others
        ("first_fallback", "i8"),  # in World.others
        ("first_slot", "i8"),  # in World.slots
        ("needs", "i4"),  # dependencies
        ("pending", "i4"),  # dependencies still open
        ("bundle", "i4"),
        ("job", "i4"),
        ("processor", "i4"),
        ("priority", "i4"),
        ("fallback_of", "i4"),
        ("fallback_left", "i4"),
        ("state", "i4"),
        ("held", "i2"),  # whether it holds its slots
        ("is_compute", "i2"),
    ]
)
ROW = np.dtype([("entry", "i8"), ("usage", "f8")])
LINK_USE = np.dtype([("link", "i8"), ("amount", "f8")])
SLOT_NEED = np.dtype([("switch", "i8"), ("slots", "i8")])
EVENT = np.dtype([("time_s", "f8"), ("place", "i8"), ("order", "i8")])
JOB = np.dtype(
    [
        ("first_task", "i8"),  # in World.others
        ("first_iteration", "i8"),  # in World.iteration_finish_s
        ("iterations", "i8"),
        ("done", "i8"),
        ("left", "i8"),  # tasks of this iteration still open
        ("first_use", "i8"),  # in World.shares: what its tasks use
        ("refusals", "i8"),  # of this iteration
        ("waits", "i8"),
        ("isolated_since_s", "f8"),  # start of this iteration, if nobody shares a thing; else -1
    ]
)
# What a job uses: a link, a processor or a switch, and what its book said at the iteration's start.
SHARE = np.dtype([("resource", "i8"), ("busy_s", "f8"), ("over_s", "f8"), ("carried", "f8")])
PROCESSOR = np.dtype(
    [("first_place", "i8"), ("waiting", "i8"), ("is_busy", "i8"), ("is_asked", "i8")]
)
SWITCH = np.dtype([("free", "i8"), ("blocked", "i8")])
LOG = np.dtype([("time_s", "f8"), ("level", "f8"), ("bundle", "i8")])


class Loads(NamedTuple):
    """State that the solver of rates reads and writes."""

    bundles: Any  # BUNDLE [bundles + 1]
    entries: Any  # ENTRY [entries]
    links: Any  # LINK [links + 1]
    link_entries: Any  # entries by link; int64 [entries]
    # bundles in the region, dirty links, touched links, links being filled, requests in line,
    # processors to serve; int64 [LISTS, longest]
    lists: Any
    # PAIR: first the solver's own heap of links and caps, then the members of each bundle, then
    # the queues of processors
    heaps: Any
    classes: Any  # LEVEL_CLASS [priorities]
    counts: Any  # int64 [COUNTERS]
    tolerance: float  # levels and loads that differ by less than this share count as equal


class World(NamedTuple):
    """The whole state."""

    loads: Loads  # what the solver needs
    tasks: Any  # TASK [tasks + 1]
    uses: Any  # LINK_USE of all routes
    rows: Any  # ROW of all flows
    others: Any  # dependents and fallbacks of tasks, tasks of jobs; int32
    slots: Any  # SLOT_NEED of all requests
    events: Any  # EVENT [tasks + bundles]
    jobs: Any  # JOB [jobs + 1]
    iteration_finish_s: Any  # float64
    processors: Any  # PROCESSOR [processors + 1]
    switches: Any  # SWITCH [switches]
    # what each link carried: flows under way, since when, busy time, demand, since when it is
    # above capacity, time above, bytes; float64 [links, 7]
    book: Any
    log: Any  # LOG [room]; no room records nothing
    shares: Any  # SHARE of all jobs
    sharers: Any  # unfinished jobs that use each link, processor and switch; int64
    horizon_s: Any  # iterations that repeat are counted instead of run up to here; float64 [1]


def empty_queue(slots: int) -> Any:
    """Make a queue for the events of so many slots; EVENT [slots]."""
    events = np.zeros(slots, EVENT)
    events["place"] = BLANK
    return events


@njit
def _is_before(events: Any, left: int, right: int) -> bool:
    if events[left].time_s != events[right].time_s:
        return bool(events[left].time_s < events[right].time_s)
    return left < right


@njit
def _rise(events: Any, place: int) -> None:
    slot = events[place].order
    while place > 0:
        parent = (place - 1) >> 1
        other = events[parent].order
        if not _is_before(events, slot, other):
            break
        events[place].order = other
        events[other].place = place
        place = parent
    events[place].order = slot
    events[slot].place = place


@njit
def _sink(events: Any, place: int, size: int) -> None:
    slot = events[place].order
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _is_before(events, events[child + 1].order, events[child].order):
            child += 1
        other = events[child].order
        if not _is_before(events, other, slot):
            break
        events[place].order = other
        events[other].place = place
        place = child
    events[place].order = slot
    events[slot].place = place


@njit
def schedule_event(events: Any, counts: Any, slot: int, time_s: float) -> None:
    """Set or move the event of a slot."""
    events[slot].time_s = time_s
    if events[slot].place < 0:
        place = counts[PENDING]
        counts[PENDING] += 1
        events[place].order = slot
        events[slot].place = place
    _rise(events, events[slot].place)
    _sink(events, events[slot].place, counts[PENDING])


@njit
def remove_event(events: Any, counts: Any, slot: int) -> None:
    """Take the event of a slot out, if it has one."""
    place = events[slot].place
    if place < 0:
        return
    counts[PENDING] -= 1
    size = counts[PENDING]
    events[slot].place = BLANK
    last = events[size].order
    if last != slot:
        events[place].order = last
        events[last].place = place
        _rise(events, place)
        _sink(events, events[last].place, size)


@njit
def push_pair(pairs: Any, start: int, size: int, pair: tuple[float, int]) -> None:
    """Add (key, id) to the heap of ``size`` pairs that begins at ``start``."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        key, other = pairs[start + parent].key, pairs[start + parent].id
        if key < pair[0] or (key == pair[0] and other < pair[1]):
            break
        pairs[start + place].key = key
        pairs[start + place].id = other
        place = parent
    pairs[start + place].key = pair[0]
    pairs[start + place].id = pair[1]


@njit
def pop_pair(pairs: Any, start: int, size: int) -> None:
    """Take the least pair from the front of the heap; the caller has read it there."""
    last_key, last_id = pairs[start + size - 1].key, pairs[start + size - 1].id
    size -= 1
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        at = start + child
        if child + 1 < size and (
            pairs[at + 1].key < pairs[at].key
            or (pairs[at + 1].key == pairs[at].key and pairs[at + 1].id < pairs[at].id)
        ):
            child += 1
            at += 1
        if last_key < pairs[at].key or (last_key == pairs[at].key and last_id < pairs[at].id):
            break
        pairs[start + place].key = pairs[at].key
        pairs[start + place].id = pairs[at].id
        place = child
    pairs[start + place].key = last_key
    pairs[start + place].id = last_id
