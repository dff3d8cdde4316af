"""A schedule in the fluid simulator: transfers as flows that share links max-min fairly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fivefold.collectives.schedules._arrays import Floats, Longs
from fivefold.collectives.schedules._routes import RouteTable
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.collectives.schedules._slots import dependencies, slots_of

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


def flow_dependencies(schedule: Schedule) -> tuple[Longs, Longs]:
    """What each transfer waits for as a flow: (offsets, transfers).

    Beside what it sends on, the transfer before it between the same two ranks: a connection is a
    queue, and its messages do not compete with one another.
    """
    found = dependencies(schedule)
    order = slots_of(schedule)[3]
    count = schedule.num_transfers
    pairs = schedule.sources.astype(np.int64) * schedule.collective.num_ranks + schedule.targets
    grouped = order[np.argsort(pairs[order], kind="stable")]
    before = np.full(count, -1, dtype=np.int64)
    same = pairs[grouped[1:]] == pairs[grouped[:-1]]
    before[grouped[1:][same]] = grouped[:-1][same]
    lengths = np.diff(found.offsets) + (before >= 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    waits = np.empty(offsets[-1], dtype=np.int64)
    first = np.zeros(waits.size, dtype=np.bool_)
    first[offsets[:-1][before >= 0]] = True
    waits[first] = before[before >= 0]
    waits[~first] = found.transfers
    return offsets, waits


def fluid_times(
    schedule: Schedule, topology: Topology, routes: RouteTable, chunk_bytes: Floats
) -> tuple[Floats, Floats, Floats]:
    """Starts, ends and busy seconds of the links, from `fivefold.network.simulation`."""
    from fivefold.network import simulation  # noqa: PLC0415 - only this model needs it

    # A flow for each leg. It waits for the leg before it, the first one for what its transfer does.
    legs, first_legs = routes.legs()
    counts = np.diff(first_legs)[routes.rows]
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    owner = np.repeat(np.arange(counts.size), counts)
    number = np.arange(owner.size) - begins[owner]
    rows = first_legs[routes.rows[owner]] + number
    lengths = np.diff(legs.offsets)[rows]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    links = legs.links[np.repeat(legs.offsets[:-1][rows], lengths) + within]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    wait_offsets, waits = flow_dependencies(schedule)
    num_waits = np.where(number == 0, np.diff(wait_offsets)[owner], 1)
    of_first = np.repeat(number == 0, num_waits)
    leg_waits = np.empty(of_first.size, dtype=np.int64)
    leg_waits[of_first] = begins[1:][waits] - 1
    leg_waits[~of_first] = np.flatnonzero(number > 0) - 1
    table = simulation.FlowTable.build(
        sizes=chunk_bytes[schedule.chunks[owner]],
        routes=simulation.Routes(offsets, links.astype(np.int64)),
        dependencies=(np.concatenate([[0], np.cumsum(num_waits)]).astype(np.int64), leg_waits),
        latencies_s=legs.latencies_s(topology.latencies_s)[rows],
    )
    result = simulation.simulate(topology, table)
    starts_s, ends_s = result.start_s[begins[:-1]], result.finish_s[begins[1:] - 1]
    return starts_s, ends_s, np.asarray(result.link_busy_s)
