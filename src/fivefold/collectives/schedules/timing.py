"""What a schedule costs on a topology, under the alpha-beta models of the field.

``serial``, ``slotted``, ``synchronous`` and ``fluid``: see `evaluate`. In all of them a rank on a
transfer's route receives the whole of it before it sends it on.
References: TACCL, arXiv 2111.04867; TE-CCL, arXiv 2305.13479; SCCL, arXiv 2008.08708.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules.arrays import (
    Floats,
    Longs,
    of_one_kind,
    offsets_of,
    rows_of,
)
from fivefold.collectives.schedules.messages import messages_of
from fivefold.collectives.schedules.routes import RouteTable, require_topology, route_table
from fivefold.collectives.schedules.schedule import BY_STEPS, BY_TIMES, Schedule, ScheduleError
from fivefold.errors import ConfigurationError, require_one_of
from fivefold.network import simulation
from fivefold.network.topology import Topology

CostModel = Literal["serial", "slotted", "synchronous", "fluid"]
MODELS: tuple[CostModel, ...] = ("serial", "slotted", "synchronous", "fluid")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When each transfer runs, and what that makes of the links.

    Args:
        total_s: When the last transfer has arrived.
        starts_s: Start of each transfer, float64 [T].
        ends_s: Arrival of each transfer, float64 [T].
        link_busy_s: How long each link is busy, float64 [links].
        link_bytes: Bytes that each link carries, float64 [links].
        size_bytes: Size of the collective.
        model: The cost model.
    """

    total_s: float
    starts_s: Floats = field(repr=False)
    ends_s: Floats = field(repr=False)
    link_busy_s: Floats = field(repr=False)
    link_bytes: Floats = field(repr=False)
    size_bytes: float
    model: CostModel

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Algorithm bandwidth: the collective's size over its time; infinite for no time."""
        return self.size_bytes / self.total_s if self.total_s > 0 else float("inf")

    @property
    def busiest_link(self) -> int | None:
        """Return the link that is busy longest; None where there are no links."""
        return int(np.argmax(self.link_busy_s)) if self.link_busy_s.size else None


def evaluate(
    schedule: Schedule,
    topology: Topology | None = None,
    *,
    size_bytes: float,
    model: CostModel = "serial",
) -> Timing:
    """Return when each transfer of a schedule runs on a topology.

    ``serial``: a message keeps every link of its route busy for the route's latency and its bytes
    over the link's capacity (TACCL, TACOS). ``slotted``: only the bytes keep a link busy (TE-CCL).
    In both, messages are taken in the schedule's order; each starts as soon as its source holds its
    chunks and every link of its route is free, and never overtakes one listed before it on a link.
    ``synchronous``: a step costs its largest latency and the time of its fullest link (SCCL).
    ``fluid``: messages share links max-min fairly (`fivefold.network.simulation`).

    Args:
        schedule: A schedule that `verify_schedule` accepts. Its order is the priority; where it
            has times but no steps, their starts are. What travels as one message, `Schedule` says.
        topology: The network; None for the one the schedule was made for.
        size_bytes: Size of the collective, as `Collective.buffer_weight` counts it.
        model: One of `MODELS`.

    Raises:
        ConfigurationError: There is no topology, no such model, or the model needs steps.
        ScheduleError: A transfer sends what its source never holds, or its route is no path.
        InfeasibleError: Two ranks that a transfer joins have no route.

    Examples:
        >>> from fivefold.collectives.schedules import Transfer, broadcast
        >>> from fivefold.network.topology import line
        >>> moves = [Transfer(chunk=0, source=0, target=1), Transfer(chunk=0, source=1, target=2)]
        >>> schedule = Schedule.from_transfers(moves, collective=broadcast(3))
        >>> evaluate(schedule, line(3, bandwidth="1 GB/s", latency="1 s"), size_bytes=1e9).total_s
        4.0
    """
    require_one_of(model, MODELS, f"there is no cost model {model!r}")
    network = require_topology(schedule, topology)
    routes = route_table(schedule, network)
    chunk_bytes = np.ascontiguousarray(schedule.collective.chunk_bytes(size_bytes))
    if model == "synchronous":
        times = _synchronous(schedule, network, routes, chunk_bytes)
    elif model == "fluid":
        times = _fluid(schedule, network, routes, chunk_bytes)
    else:
        times = _listed(schedule, network, routes, chunk_bytes, serial=model == "serial")
    starts_s, ends_s, busy_s = times
    return Timing(
        total_s=float(ends_s.max(initial=0.0)),
        starts_s=starts_s,
        ends_s=ends_s,
        link_busy_s=busy_s,
        link_bytes=routes.loads(chunk_bytes[schedule.chunks], network.num_links),
        size_bytes=float(size_bytes),
        model=model,
    )


def with_times(schedule: Schedule, timing: Timing) -> Schedule:
    """Return the schedule with the times of an evaluation, and the size and model they hold for."""
    known = {**schedule.attributes, "size_bytes": timing.size_bytes, "model": timing.model}
    return schedule.replaced(starts_s=timing.starts_s, ends_s=timing.ends_s, attributes=known)


Times = tuple[Floats, Floats, Floats]


def _listed(
    schedule: Schedule, topology: Topology, routes: RouteTable, chunk_bytes: Floats, *, serial: bool
) -> Times:
    read, written, filled, order = schedule.slots()
    capacities = topology.capacities_bytes_per_s
    legs, first_legs = routes.legs()
    starts_s, ends_s, busy_s, broken = _list_schedule(
        _messages_in_order(schedule, order),
        (read, written, filled),
        of_one_kind(routes.rows, first_legs, legs.offsets, legs.links),
        of_one_kind(
            legs.latencies_s(topology.latencies_s),
            legs.capacities_bytes_per_s(capacities),
            capacities,
        ),
        of_one_kind(schedule.chunks, schedule.steps, chunk_bytes),
        (int(schedule.collective.reducing), int(serial)),
    )
    if broken >= 0:
        move = schedule.transfer(broken)
        raise ScheduleError(
            f"transfer {broken} sends chunk {move.chunk} from rank {move.source}, which does not "
            "hold it by then",
            hint="verify_schedule() the schedule first",
            transfer=int(broken),
        )
    return starts_s, ends_s, busy_s


def _messages_in_order(schedule: Schedule, order: Longs) -> tuple[Longs, Longs]:
    """Return the offsets and members of the messages, each at the place of its last transfer."""
    count = schedule.num_transfers
    plain = np.arange(count + 1, dtype=np.int64), order
    if schedule.messages is not None:  # stable orders keep together what is listed together
        first = np.flatnonzero(np.diff(schedule.messages[order], prepend=-1))
        return np.append(first, count).astype(np.int64), order
    if schedule.has_steps or not schedule.has_times:
        return plain
    leaders = messages_of(schedule)
    if (leaders == np.arange(count)).all():
        return plain
    # The last may carry on what came at the same instant, in no time.
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    last = np.zeros(count, dtype=np.int64)
    np.maximum.at(last, leaders, place)
    members = np.lexsort((place, last[leaders]))
    first = np.flatnonzero(leaders[members] == members)
    return np.append(first, count).astype(np.int64), members


def _synchronous(
    schedule: Schedule, topology: Topology, routes: RouteTable, chunk_bytes: Floats
) -> Times:
    if schedule.num_transfers and not schedule.has_steps:
        message = "the synchronous model needs a step for each transfer"
        raise ConfigurationError(
            message, hint="choose the serial, slotted or fluid model, or give the schedule steps"
        )
    starts_s, ends_s = np.zeros(schedule.num_transfers), np.zeros(schedule.num_transfers)
    busy_s = np.zeros(topology.num_links)
    legs, first_legs = routes.legs()
    latencies_s = legs.latencies_s(topology.latencies_s)
    order = np.argsort(schedule.steps, kind="stable")
    bounds = np.searchsorted(schedule.steps[order], np.arange(schedule.num_steps + 1))
    now_s = 0.0
    for first, last in pairwise(bounds):
        members = order[first:last]
        starts_s[members] = now_s
        rows = routes.rows[members]
        for hop in range(int((first_legs[rows + 1] - first_legs[rows]).max(initial=0))):
            on = first_legs[rows] + hop < first_legs[rows + 1]
            hops = replace(legs, rows=(first_legs[rows[on]] + hop).astype(np.int32))
            loads = hops.loads(chunk_bytes[schedule.chunks[members[on]]], topology.num_links)
            transmit_s = loads / topology.capacities_bytes_per_s
            now_s += float(transmit_s.max(initial=0.0))
            now_s += float(latencies_s[hops.rows].max(initial=0.0))
            busy_s += transmit_s
        ends_s[members] = now_s
    return starts_s, ends_s, busy_s


@njit
def _fold(slot: Any, step: Any, ready_s: Any, pending: tuple[Any, Any], reducing: int) -> float:
    """Return when the slot's value was whole, counting only what steps before this one wrote."""
    arrived_s, written_in = pending
    if written_in[slot] >= 0 and (step < 0 or written_in[slot] < step):
        if reducing and np.isfinite(ready_s[slot]):
            ready_s[slot] = max(ready_s[slot], arrived_s[slot])
        else:
            ready_s[slot] = min(ready_s[slot], arrived_s[slot])
        written_in[slot] = -1
    return float(ready_s[slot])


@njit
def _deliver(
    slot: Any, step: Any, end_s: float, ready_s: Any, pending: tuple[Any, Any], reducing: int
) -> None:
    arrived_s, written_in = pending
    _fold(slot, step, ready_s, pending, reducing)
    if written_in[slot] < 0:
        arrived_s[slot] = end_s
        written_in[slot] = max(step, 0)
    elif reducing:
        arrived_s[slot] = max(arrived_s[slot], end_s)
    else:
        arrived_s[slot] = min(arrived_s[slot], end_s)


@njit
def _occupy(
    route: Any, start_s: float, held_s: float, size: float, links: tuple[Any, Any, Any]
) -> None:
    free_s, busy_s, capacities = links
    for link in route:
        lasts_s = held_s + size / capacities[link]
        free_s[link] = start_s + lasts_s
        busy_s[link] += lasts_s


@njit
def _list_schedule(
    messages: tuple[Any, Any],
    slots: tuple[Any, Any, Any],
    routes: tuple[Any, Any, Any, Any],
    costs: tuple[Any, Any, Any],
    transfers: tuple[Any, Any, Any],
    shape: tuple[int, int],
) -> tuple[Any, Any, Any, int]:
    """Return the times of all transfers, in the order of the messages."""
    offsets, members = messages
    read, written, filled = slots
    rows, first_legs, leg_offsets, leg_links = routes
    latencies_s, narrowest, capacities = costs
    chunks, steps, chunk_bytes = transfers
    reducing, serial = shape
    starts_s, ends_s = np.zeros(rows.size), np.zeros(rows.size)
    ready_s = np.where(filled, 0.0, np.inf)
    pending = (np.zeros(filled.size), np.full(filled.size, -1, np.int32))
    last_read_s = np.zeros(filled.size if reducing else 0)
    links = (np.zeros(capacities.size), np.zeros(capacities.size), capacities)
    for message in range(offsets.size - 1):
        first, last = offsets[message], offsets[message + 1]
        row = rows[members[first]]
        start_s, size = 0.0, 0.0
        for place in range(first, last):
            index = members[place]
            start_s = max(start_s, _fold(read[index], steps[index], ready_s, pending, reducing))
            size += chunk_bytes[chunks[index]]
            if reducing:  # what is read must not be overwritten before
                start_s = max(start_s, last_read_s[written[index]])
        if not np.isfinite(start_s):
            return starts_s, ends_s, links[1], members[first]
        end_s = start_s
        for leg in range(first_legs[row], first_legs[row + 1]):
            route = leg_links[leg_offsets[leg] : leg_offsets[leg + 1]]
            for link in route:
                end_s = max(end_s, links[0][link])
            if leg == first_legs[row]:
                start_s = end_s
            _occupy(route, end_s, latencies_s[leg] if serial else 0.0, size, links)
            end_s += latencies_s[leg] + size / narrowest[leg]
        for place in range(first, last):
            index = members[place]
            starts_s[index], ends_s[index] = start_s, end_s
            _deliver(written[index], steps[index], end_s, ready_s, pending, reducing)
            if reducing:
                last_read_s[read[index]] = max(last_read_s[read[index]], start_s)
    return starts_s, ends_s, links[1], -1


def _fluid(
    schedule: Schedule, topology: Topology, routes: RouteTable, chunk_bytes: Floats
) -> Times:
    """Simulate a flow for each leg of each message; it waits for the leg before it."""
    every, own = np.arange(schedule.num_transfers), schedule.messages
    messages = every if own is None else own
    leaders = every if own is None else np.flatnonzero(np.diff(own, prepend=-1))
    transfer_bytes, way = chunk_bytes[schedule.chunks], routes.rows[leaders]
    legs, first_legs = routes.legs()
    counts = np.diff(first_legs)[way]
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    owner = np.repeat(np.arange(counts.size), counts)
    number = np.arange(owner.size) - begins[owner]
    rows = first_legs[way[owner]] + number
    offsets, places = rows_of(legs.offsets, rows)
    # The first leg waits for what its message sends on, and for the message before it between the
    # same two ranks: a connection is a queue, and its messages do not compete with one another.
    order = schedule.slots()[3]
    order = messages[order[leaders[messages[order]] == order]]
    pairs = schedule.sources.astype(np.int64) * schedule.collective.num_ranks + schedule.targets
    pairs = pairs[leaders]
    queue = order[np.argsort(pairs[order], kind="stable")]
    queued = np.flatnonzero(pairs[queue[1:]] == pairs[queue[:-1]])
    sent = dependencies(schedule)
    sender = np.repeat(messages, np.diff(sent.offsets))
    first = np.concatenate([queue[queued + 1], sender])
    last = np.concatenate([queue[queued], messages[sent.transfers]])
    later = np.flatnonzero(number > 0)
    waits = np.concatenate([begins[first], later])
    for_legs = np.concatenate([begins[last + 1] - 1, later - 1])
    order = np.argsort(waits, kind="stable")
    table = simulation.FlowTable.build(
        sizes=np.bincount(messages, transfer_bytes, counts.size)[owner],
        routes=(offsets, legs.links[places]),
        dependencies=(offsets_of(waits[order], owner.size), for_legs[order]),
        latencies_s=legs.latencies_s(topology.latencies_s)[rows],
    )
    result = simulation.simulate(topology, table)
    starts_s, ends_s = result.start_s[begins[:-1]], result.finish_s[begins[1:] - 1]
    return starts_s[messages], ends_s[messages], np.asarray(result.link_busy_s)


def event_order(schedule: Schedule) -> Longs:
    """Return the order in which a schedule's transfers read and write, as the verifier has it."""
    times = (np.zeros(0), np.zeros(0))
    if schedule.starts_s is not None and schedule.ends_s is not None:
        # Times of one moment are sums formed in different ways. Made equal here, they keep the
        # listed order; the kernel's slack, a thousand times wider, decides as in `verify_schedule`.
        unit = max(schedule.total_s, 1e-300)
        times = (np.round(schedule.starts_s / unit, 12), np.round(schedule.ends_s / unit, 12))
    events: Longs = order_events(
        np.arange(schedule.num_transfers, dtype=np.int64),
        *of_one_kind(schedule.steps),
        of_one_kind(*times),
        schedule.order_mode,
        1e-9,
    )
    return events


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Transfers that must have arrived before each one may start."""

    offsets: Longs
    transfers: Longs

    def of(self, transfer: int) -> Longs:
        """Return the transfers that this one waits for."""
        return self.transfers[self.offsets[transfer] : self.offsets[transfer + 1]]


def dependencies(schedule: Schedule) -> Dependencies:
    """Find what each transfer waits for at its source, if the source does not hold it at first.

    A copied chunk waits for its first arrival, a sum for all that was added since the last copy.
    """
    offsets, transfers = _find_dependencies(
        event_order(schedule),
        schedule.slots()[:3],
        *of_one_kind(schedule.reduces),
        int(schedule.collective.reducing),
    )
    return Dependencies(offsets=offsets, transfers=transfers)


@njit
def _find_dependencies(events: Any, slots: Any, reduces: Any, reducing: int) -> tuple[Any, Any]:
    """Chain the writes of each slot; a read waits for the last of them and those it adds to."""
    read, written, filled = slots
    newest = np.full(filled.size, -1, np.int64)  # last write of each slot
    length = np.zeros(filled.size, np.int64)  # writes that count; -1: held at first
    if not reducing:
        length[filled] = -1
    before = np.full(read.size, -1, np.int64)  # the write before each write of the same slot
    last = np.full(read.size, -1, np.int64)
    found = np.zeros(read.size + 1, np.int64)
    for event in events:
        index = event >> 1
        if event & 1 == 0:
            found[index + 1] = max(length[read[index]], 0)
            last[index] = newest[read[index]]
            continue
        slot = written[index]
        if length[slot] < 0 or (not reducing and length[slot] > 0):
            continue  # a copy of what is there already
        if not reduces[index]:
            length[slot] = 0
        before[index] = newest[slot]
        newest[slot] = index
        length[slot] += 1
    found = np.cumsum(found)
    listed = np.empty(found[-1], np.int64)
    for index in range(read.size):
        writer = last[index]
        for place in range(found[index + 1] - 1, found[index] - 1, -1):
            listed[place] = writer
            writer = before[writer]
    return found, listed


@njit
def _by_steps(members: Any, steps: Any, events: Any) -> None:
    """Order reads of a step before its writes: events 2 * m + (0 reads, 1 writes) of member m."""
    count = members.size
    sorted_already = True
    for m in range(1, count):
        if steps[members[m]] < steps[members[m - 1]]:
            sorted_already = False
    order = np.arange(count)
    if not sorted_already:
        keys = np.empty(count, np.int64)
        for m in range(count):
            keys[m] = np.int64(steps[members[m]]) * count + m
        order = np.argsort(keys)
    first, place = 0, 0
    while first < count:
        last = first
        while last < count and steps[members[order[last]]] == steps[members[order[first]]]:
            last += 1
        for half in range(2):
            for m in range(first, last):
                events[place] = 2 * order[m] + half
                place += 1
        first = last


@njit
def _by_times(members: Any, times: tuple[Any, Any], slack_s: float, events: Any) -> None:
    """Order by time; a write counts before a read that starts within the slack after it."""
    starts_s, ends_s = times
    count = members.size
    instants = np.empty(2 * count, np.float64)
    for m in range(count):
        instants[2 * m] = starts_s[members[m]] + slack_s
        instants[2 * m + 1] = ends_s[members[m]]
        # Too short to tell: both at one instant, where the stable sort keeps the listed order.
        instants[2 * m + 1] = max(instants[2 * m + 1], instants[2 * m])
    order = np.argsort(instants, kind="mergesort")
    for place in range(2 * count):
        events[place] = order[place]


@njit
def order_events(
    members: Any, steps: Any, times: tuple[Any, Any], mode: int, slack_s: float
) -> Any:
    """Return reads (2 * m) and writes (2 * m + 1) of members m as they take effect."""
    events = np.empty(2 * members.size, np.int64)
    if mode == BY_STEPS:
        _by_steps(members, steps, events)
    elif mode == BY_TIMES:
        _by_times(members, times, slack_s, events)
    else:
        for place in range(2 * members.size):
            events[place] = place
    return events
