"""Which links each transfer takes, as one table: its own route, the direct link, or the shortest.

Switches pass bits on as they come; a rank has to receive a message before it can send it on, so a
route that passes other ranks falls into legs. Transfers without routes of their own between the
same two ranks share a row, so that the table stays small at millions of transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fivefold.collectives.schedules.arrays import Array, Floats, Ints, Longs
from fivefold.collectives.schedules.schedule import Schedule, ScheduleError, require_match
from fivefold.errors import ConfigurationError
from fivefold.flows.paths import default_paths
from fivefold.network.topology import Topology


@dataclass(frozen=True, kw_only=True)
class RouteTable:
    """Routes of a schedule's transfers; row ``rows[t]`` is that of transfer t."""

    rows: Ints  # row of each transfer, int32 [T]
    offsets: Longs  # where each row begins in ``links``, int64 [rows + 1]
    links: Ints  # link indices in order, int32
    stops: Array  # whether each of ``links`` ends at a rank, bool

    def legs(self) -> tuple[RouteTable, Longs]:
        """Return the parts of the rows from rank to rank, and where those of each row begin."""
        inner = self.stops.copy()
        inner[self.offsets[1:][np.diff(self.offsets) > 0] - 1] = False  # the end of its row
        begins = np.concatenate([self.offsets[:-1], np.flatnonzero(inner) + 1])
        order = np.argsort(begins, kind="stable")
        first = np.flatnonzero(order < self.offsets.size - 1)
        offsets = np.append(begins[order], self.links.size).astype(np.int64)
        rows = np.arange(begins.size, dtype=np.int32)
        table = RouteTable(rows=rows, offsets=offsets, links=self.links, stops=self.stops)
        return table, np.append(first, begins.size).astype(np.int64)

    def latencies_s(self, link_latencies_s: Floats) -> Floats:
        """Return the sum of the latencies along each row, float64 [rows]."""
        return self._along(np.add, link_latencies_s, 0.0)

    def capacities_bytes_per_s(self, link_capacities_bytes_per_s: Floats) -> Floats:
        """Return smallest capacity along each row, float64 [rows]; infinite for an empty row."""
        return self._along(np.minimum, link_capacities_bytes_per_s, np.inf)

    def _along(self, combine: np.ufunc, of_links: Floats, empty: float) -> Floats:
        filled = np.diff(self.offsets) > 0
        found = np.full(filled.size, empty)
        if self.links.size:  # sums of segments: exact where differences of running sums are not
            found[filled] = combine.reduceat(of_links[self.links], self.offsets[:-1][filled])
        return found

    def loads(self, transfer_bytes: Floats, num_links: int) -> Floats:
        """Return bytes on each link when each transfer carries its bytes, float64 [num_links]."""
        per_row = np.bincount(self.rows, transfer_bytes, self.offsets.size - 1)
        carried = np.repeat(per_row, np.diff(self.offsets))
        return np.bincount(self.links, carried, num_links).astype(np.float64)


def require_topology(schedule: Schedule, topology: Topology | None) -> Topology:
    """Return the topology given, or else the one the schedule was made for."""
    found = topology if topology is not None else schedule.topology
    if found is None:
        message = "the schedule was made for no topology"
        raise ConfigurationError(message, hint="pass the topology it is to run on")
    require_match(schedule.collective, found)
    return found


def route_table(schedule: Schedule, topology: Topology) -> RouteTable:
    """Return the routes of all transfers: their own, else the widest direct link or the nearest."""
    if schedule.route_offsets is not None and schedule.route_links is not None:
        rows = np.arange(schedule.num_transfers, dtype=np.int32)
        stops = np.zeros(schedule.route_links.size, dtype=np.bool_)
        table = RouteTable(
            rows=rows, offsets=schedule.route_offsets, links=schedule.route_links, stops=stops
        )
        _check_paths(schedule, topology, table)
        return replace(table, stops=topology.is_rank[topology.link_targets[table.links]])
    count = np.int64(topology.num_ranks)
    used = np.zeros(int(count * count), dtype=np.bool_)
    keys = schedule.sources.astype(np.int64) * count + schedule.targets
    used[keys] = True
    pairs = np.flatnonzero(used)
    row_of_pair = np.zeros(used.size, dtype=np.int32)
    row_of_pair[pairs] = np.arange(pairs.size, dtype=np.int32)
    paths = default_paths(topology, pairs // count, pairs % count)
    stops = topology.is_rank[topology.link_targets[paths.links]]
    return RouteTable(rows=row_of_pair[keys], offsets=paths.offsets, links=paths.links, stops=stops)


def relays_of(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the ranks that each transfer passes on its way through the schedule's topology."""
    if schedule.topology is None:
        return [()] * schedule.num_transfers
    table = route_table(schedule, schedule.topology)
    ranks = schedule.topology.rank_of_node[schedule.topology.link_targets[table.links]]
    rows = [
        tuple(int(rank) for rank in ranks[first : max(last - 1, first)] if rank >= 0)
        for first, last in pairwise(table.offsets.tolist())
    ]
    return [rows[row] for row in table.rows.tolist()]


def _check_paths(schedule: Schedule, topology: Topology, table: RouteTable) -> None:
    """Require that every route is a path of links that exist, from its source to its target."""
    links, offsets = table.links, table.offsets
    if links.size and (links.min() < 0 or links.max() >= topology.num_links):
        at = int(np.argmax((links < 0) | (links >= topology.num_links)))
        owner = int(np.searchsorted(offsets, at, side="right")) - 1
        raise ScheduleError(
            f"transfer {owner} takes link {links[at]}, but the topology has {topology.num_links}",
            hint="routes are indices into topology.links",
            transfer=owner,
        )
    nodes = topology.rank_nodes
    wrong = np.diff(offsets) == 0
    filled = np.flatnonzero(~wrong)
    first, last = links[offsets[:-1][filled]], links[offsets[1:][filled] - 1]
    wrong[filled] |= topology.link_sources[first] != nodes[schedule.sources[filled]]
    wrong[filled] |= topology.link_targets[last] != nodes[schedule.targets[filled]]
    broken = np.flatnonzero(topology.link_targets[links[:-1]] != topology.link_sources[links[1:]])
    inner = broken[~np.isin(broken + 1, offsets)]
    wrong[np.searchsorted(offsets, inner, side="right") - 1] = True
    if wrong.any():
        owner = int(np.argmax(wrong))
        move = schedule.transfer(owner)
        raise ScheduleError(
            f"the route of transfer {owner}, links {list(move.route or ())}, does not lead from "
            f"rank {move.source} to rank {move.target}",
            hint="a route lists links, each beginning where the last one ends",
            transfer=owner,
        )
