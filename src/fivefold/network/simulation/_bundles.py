"""From flows and their routes to bundles: what needs a level of its own, on which links.

Two reductions keep the problem small, and neither changes a rate. A link is left out where every
flow on it also passes a link that is at least as tight for each of them: it can never fill up
first. Flows that then load the same links in the same way share one bundle. So a thousand senders
to one receiver, or a thousand chunks over one path, are one unknown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.network.simulation._state import (
    BLANK,
    BUNDLE,
    COUNTERS,
    ENTRY,
    LEVEL_CLASS,
    LINK,
    LISTS,
    PAIR,
    ROUNDING,
    Loads,
)
from fivefold.network.topology.arrays import FloatArray, LongArray, offsets_of

_LONG_ROW = 64  # links; a ring over thousands of ranks is not compared link by link


class Incidence(NamedTuple):
    """Links that each row loads: a sparse matrix by rows."""

    offsets: Any  # int64 [rows + 1]
    links: Any  # int32 [entries]
    amounts: Any  # load of the link per unit of the row's rate; float64 [entries]


class Bundles(NamedTuple):
    """The bundle of each flow, and where its loads go."""

    of_row: Any  # bundle of each flow, -1 where nothing limits it; int64 [flows]
    entries: Incidence  # links of each bundle; amounts are unused
    row_offsets: Any  # slice of ``row_entries`` of each flow; int64 [flows + 1]
    row_entries: Any  # entries that each flow loads; int64
    row_usages: Any  # load per level: weight times amount; float64
    priorities: Any  # class of each bundle, from 0; int64 [bundles]
    member_offsets: Any  # slice of ``members`` of each bundle; int64 [bundles + 1]
    members: Any  # flows by bundle; int64


def form_bundles(
    routes: Incidence,
    capacities: FloatArray,
    *,
    weights: FloatArray,
    caps: FloatArray,
    priorities: LongArray,
    groups: LongArray,
    flows: npt.NDArray[np.bool_] | None = None,
) -> Bundles:
    """Bundle flows; where ``flows`` is given, only those that it marks."""
    ranks = np.unique(priorities, return_inverse=True)[1]
    _check_groups(groups, ranks)
    groups = np.where(groups < 0, -1, np.unique(np.maximum(groups, -1), return_inverse=True)[1])
    cap_levels, cap_keys = np.unique(caps / weights, return_inverse=True)
    limited = (np.diff(routes.offsets) > 0) | np.isfinite(caps)
    limited = limited if flows is None else limited & flows
    keys = np.where(limited, ranks * len(cap_levels) + cap_keys, -1)
    merged = _merged(routes, len(capacities))
    by_link = _transposed(merged, len(capacities))
    alike = _tightest_alike(capacities, _signatures(by_link))
    stays = _undominated(merged, capacities, by_link, alike)[merged.links]
    reduced = Incidence(
        offsets_of(stays)[merged.offsets], merged.links[stays], merged.amounts[stays]
    )
    table = np.empty(1 << max(4, (2 * len(keys)).bit_length()), np.int64)
    of_row, first_rows = _classes(reduced, keys, groups, table)
    member_offsets, members = grouped(of_row, len(first_rows))
    offsets, links, row_entries = _entries(reduced, member_offsets, members, len(capacities))
    return Bundles(
        of_row=of_row,
        entries=Incidence(offsets, links, np.empty(0)),
        row_offsets=reduced.offsets,
        row_entries=row_entries,
        row_usages=reduced.amounts * np.repeat(weights, np.diff(reduced.offsets)),
        priorities=ranks[first_rows],
        member_offsets=member_offsets,
        members=members,
    )


def _check_groups(groups: LongArray, ranks: LongArray) -> None:
    coupled = np.flatnonzero(groups >= 0)
    numbers, firsts = np.unique(groups[coupled], return_index=True)
    own = ranks[coupled]
    wrong = own != own[firsts][np.searchsorted(numbers, groups[coupled])]
    if wrong.any():
        raise ConfigurationError(
            f"flows of group {groups[coupled][wrong][0]} have different priorities",
            hint="coupled flows share one rate, so they need one priority",
        )


def grouped(keys: Any, count: int) -> tuple[LongArray, LongArray]:
    """Return offsets by key, and positions in order of their keys; negative keys are left out."""
    order = np.argsort(keys, kind="stable")
    order = order[np.searchsorted(keys[order], 0) :]
    return offsets_of(np.bincount(keys[order], minlength=count)), order


def make_loads(bundles: Bundles, capacities: FloatArray, *, queue_room: int = 0) -> Loads:
    """Make the solver's arrays, with no member under way."""
    num_links, num_bundles = len(capacities), len(bundles.priorities)
    entry_links = bundles.entries.links
    records = np.zeros(num_bundles + 1, BUNDLE)
    records["first_entry"] = bundles.entries.offsets
    records["first_member"] = num_links + num_bundles + bundles.member_offsets
    records["priority"][:-1] = bundles.priorities
    records["bottleneck"] = BLANK
    records["cap"] = np.inf
    links = np.zeros(num_links + 1, LINK)
    links["capacity"][:-1] = capacities
    links["first_entry"][1:] = np.cumsum(np.bincount(entry_links, minlength=num_links))
    link_entries = np.argsort(entry_links, kind="stable").astype(np.int64)
    entries = np.zeros(len(entry_links), ENTRY)
    entries["link"] = entry_links
    entries["bundle"] = np.repeat(np.arange(num_bundles), np.diff(bundles.entries.offsets))
    entries["place"][link_entries] = np.arange(len(entry_links))
    room = num_links + num_bundles + len(bundles.members) + queue_room
    return Loads(
        bundles=records,
        entries=entries,
        links=links,
        link_entries=link_entries,
        # Bundles are no more than flows; as many requests may stand in line.
        lists=np.zeros((LISTS, max(num_links, len(bundles.of_row), 1)), np.int64),
        heaps=np.zeros(room, PAIR),
        classes=np.zeros(int(np.max(bundles.priorities, initial=0)) + 1, LEVEL_CLASS),
        counts=np.zeros(COUNTERS, np.int64),
        tolerance=ROUNDING,
    )


@njit
def _merged(routes: Incidence, num_links: int) -> Incidence:
    """Merge what a row lists twice: each link once, ascending, its amounts added."""
    offsets = np.zeros_like(routes.offsets)
    links = np.empty_like(routes.links)
    amounts = np.empty_like(routes.amounts)
    sums = np.zeros(num_links)
    marks = np.full(num_links, -1, np.int64)
    size = 0
    for row in range(routes.offsets.size - 1):
        start = size
        for at in range(routes.offsets[row], routes.offsets[row + 1]):
            link = routes.links[at]
            if marks[link] != row:
                marks[link] = row
                sums[link] = 0.0
                links[size] = link
                size += 1
            sums[link] += routes.amounts[at]
        links[start:size] = np.sort(links[start:size])
        for at in range(start, size):
            amounts[at] = sums[links[at]]
        offsets[row + 1] = size
    return Incidence(offsets, links[:size].copy(), amounts[:size].copy())


@njit
def _transposed(routes: Incidence, num_links: int) -> Incidence:
    """Return the rows of each link; the field ``links`` holds rows here."""
    offsets = np.zeros(num_links + 1, np.int64)
    for link in routes.links:
        offsets[link + 1] += 1
    offsets = np.cumsum(offsets)
    filled = offsets[:-1].copy()
    rows = np.empty(routes.links.size, np.int32)
    amounts = np.empty(routes.links.size, np.float64)
    for row in range(routes.offsets.size - 1):
        for at in range(routes.offsets[row], routes.offsets[row + 1]):
            place = filled[routes.links[at]]
            rows[place] = row
            amounts[place] = routes.amounts[at]
            filled[routes.links[at]] += 1
    return Incidence(offsets, rows, amounts)


@njit
def _signatures(by_link: Incidence) -> Any:
    """Return a number for each link that is the same for links with the same rows."""
    found = np.zeros(by_link.offsets.size - 1, np.uint64)
    for link in range(found.size):
        mixed = np.uint64(0)
        for at in range(by_link.offsets[link], by_link.offsets[link + 1]):
            mixed ^= np.uint64(by_link.links[at] + 1)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= mixed >> np.uint64(29)
        found[link] = mixed
    return found


def _tightest_alike(capacities: Any, signatures: Any) -> Any:
    """Return for each link the one with the same rows that has least capacity."""
    order = np.lexsort((capacities, signatures))
    begins = np.append(True, np.diff(signatures[order]) != 0)[: len(order)]  # no links at all
    alike = np.empty(len(order), np.int64)
    alike[order] = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return alike


@njit
def _undominated(routes: Incidence, capacities: Any, by_link: Incidence, alike: Any) -> Any:
    """Return whether each link can be the first to fill up, as far as a short look tells."""
    kept = np.ones(capacities.size, np.bool_)
    for link in range(capacities.size):
        start, end = by_link.offsets[link], by_link.offsets[link + 1]
        if start == end:
            continue
        if _covers(routes, capacities, by_link, (link, alike[link])):
            kept[link] = False
            continue
        shortest = by_link.links[start]
        for at in range(start, min(end, start + 8)):
            row = by_link.links[at]
            length = routes.offsets[row + 1] - routes.offsets[row]
            if length < routes.offsets[shortest + 1] - routes.offsets[shortest]:
                shortest = row
        first, after = routes.offsets[shortest], routes.offsets[shortest + 1]
        if after - first > _LONG_ROW:
            continue
        for at in range(first, after):
            other = routes.links[at]
            if _covers(routes, capacities, by_link, (link, other)):
                kept[link] = False
                break
    return kept


@njit
def _covers(routes: Incidence, capacities: Any, by_link: Incidence, pair: tuple[int, int]) -> bool:
    """Return whether the second link fills up no later than the first, whatever the flows do."""
    link, other = pair
    mine = by_link.offsets[link + 1] - by_link.offsets[link]
    others = by_link.offsets[other + 1] - by_link.offsets[other]
    if link == other or capacities[other] > capacities[link] or others < mine:
        return False
    equal = capacities[other] == capacities[link] and others == mine
    for at in range(by_link.offsets[link], by_link.offsets[link + 1]):
        row = by_link.links[at]
        low, high = routes.offsets[row], routes.offsets[row + 1]
        place = low + np.searchsorted(routes.links[low:high], other)
        if place >= high or routes.links[place] != other:
            return False
        if routes.amounts[place] < by_link.amounts[at]:
            return False
        equal = equal and routes.amounts[place] == by_link.amounts[at]
    # Of two that are the same for everyone the first stays.
    return not equal or other < link


@njit
def _same_row(routes: Incidence, left: int, right: int) -> bool:
    shift = routes.offsets[right] - routes.offsets[left]
    if routes.offsets[right + 1] - routes.offsets[left + 1] != shift:
        return False
    for at in range(routes.offsets[left], routes.offsets[left + 1]):
        same = routes.links[at] == routes.links[at + shift]
        if not same or routes.amounts[at] != routes.amounts[at + shift]:
            return False
    return True


@njit
def _hash_row(routes: Incidence, row: int, key: int) -> Any:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    for at in range(routes.offsets[row], routes.offsets[row + 1]):
        mixed ^= np.uint64(routes.links[at] + 1)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@njit
def _classes(routes: Incidence, keys: Any, groups: Any, table: Any) -> Any:
    """Number the bundles: by group, or by equal key and route, through an open hash table."""
    of_row = np.full(keys.size, -1, np.int64)
    firsts = np.empty(keys.size, np.int64)
    of_group = np.full(max(0, groups.max()) + 1 if groups.size else 1, -1, np.int64)
    table[:] = -1
    mask = np.uint64(table.size - 1)
    count = 0
    for row in range(keys.size):
        if keys[row] < 0:
            continue
        group = groups[row]
        if group >= 0:
            if of_group[group] < 0:
                of_group[group] = count
                firsts[count] = row
                count += 1
            of_row[row] = of_group[group]
            continue
        place = _hash_row(routes, row, keys[row]) & mask
        while table[place] >= 0:
            first = firsts[table[place]]
            if keys[first] == keys[row] and _same_row(routes, first, row):
                break
            place = (place + np.uint64(1)) & mask
        if table[place] < 0:
            table[place] = count
            firsts[count] = row
            count += 1
        of_row[row] = table[place]
    return of_row, firsts[:count].copy()


@njit
def _entries(routes: Incidence, member_offsets: Any, members: Any, num_links: int) -> Any:
    """Return the links of each bundle, and for each flow which of these entries it loads."""
    row_entries = np.empty(routes.links.size, np.int64)
    links = np.empty(routes.links.size, np.int32)
    offsets = np.zeros(member_offsets.size, np.int64)
    marks = np.full(num_links, -1, np.int64)
    places = np.empty(num_links, np.int64)
    size = 0
    for bundle in range(member_offsets.size - 1):
        for member in range(member_offsets[bundle], member_offsets[bundle + 1]):
            row = members[member]
            for at in range(routes.offsets[row], routes.offsets[row + 1]):
                link = routes.links[at]
                if marks[link] != bundle:
                    marks[link] = bundle
                    places[link] = size
                    links[size] = link
                    size += 1
                row_entries[at] = places[link]
        offsets[bundle + 1] = size
    return offsets, links[:size].copy(), row_entries
