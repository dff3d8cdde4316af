"""Max-min fair rates of flows by progressive filling, of all or only of what a change reaches.

A bundle's level is fair when it has a bottleneck: its own cap, or a full link on which no bundle of
its priority is above it. Where all have one, the allocation is the max-min fair one, and there is
only one such allocation. That test is local, and so is the repair: bundles whose bottleneck was
touched are filled anew while all others stand still; whoever then lacks one joins them.

References:
    D. Bertsekas, R. Gallager, Data Networks, section 6.5.2 (progressive filling and the test).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.network.simulation._bundles import Bundles, Incidence, form_bundles, make_loads
from fivefold.network.simulation._state import (
    CAPPED,
    DIRTY,
    FILLING,
    PASS,
    REGION,
    SOLVES,
    TOUCHED,
    Loads,
    pop_pair,
    push_pair,
)
from fivefold.network.topology.arrays import offsets_of
from fivefold.network.topology.routes import Routes

FloatArray = npt.NDArray[np.float64]
RoutesLike = Incidence | Routes | tuple[npt.NDArray[Any], ...] | Sequence[Sequence[int]]

_NOTHING = 1e-12  # of a capacity: what rounding leaves of a link that is full
_CANCELLED = 1e-4  # of a sum: what is left is then summed anew
_IN, _NEW = 1, 2  # inside: filled in this round, or to be filled in the next


@njit
def _move_entry(loads: Loads, entry: int, place: int) -> None:
    """Exchange an entry with the one at another place of its link."""
    old, other = loads.entries[entry].place, loads.link_entries[place]
    loads.link_entries[old], loads.link_entries[place] = other, entry
    loads.entries[other].place = old
    loads.entries[entry].place = place


@njit
def _mark_dirty(loads: Loads, link: int) -> None:
    if not loads.links[link].is_dirty:
        loads.links[link].is_dirty = 1
        loads.lists[DIRTY, loads.counts[DIRTY]] = link
        loads.counts[DIRTY] += 1


@njit
def join_entry(loads: Loads, entry: int, usage: float) -> None:
    """Count one more member of the entry's bundle on the entry's link."""
    link = loads.entries[entry].link
    if loads.entries[entry].count == 0:
        _move_entry(loads, entry, loads.links[link].first_entry + loads.links[link].active)
        loads.links[link].active += 1
    loads.entries[entry].count += 1
    loads.entries[entry].usage += usage
    _mark_dirty(loads, link)


@njit
def leave_entry(loads: Loads, entry: int, usage: float) -> None:
    """Count one member less."""
    link = loads.entries[entry].link
    loads.entries[entry].count -= 1
    loads.entries[entry].usage -= usage
    if loads.entries[entry].count == 0:
        loads.entries[entry].usage = 0.0  # exactly: sums of differences leave crumbs
        loads.links[link].active -= 1
        _move_entry(loads, entry, loads.links[link].first_entry + loads.links[link].active)
    _mark_dirty(loads, link)


@njit
def change_bundle(loads: Loads, bundle: int, mark: int) -> None:
    """Have the bundle's level found anew."""
    if not loads.bundles[bundle].inside:
        loads.bundles[bundle].inside = mark
        loads.bundles[bundle].before = loads.bundles[bundle].level
        loads.lists[REGION, loads.counts[REGION]] = bundle
        loads.counts[REGION] += 1


@njit
def resolve(loads: Loads) -> None:
    """Make all levels fair again after members came and went.

    The list REGION then holds the bundles that were filled anew, ``before`` their earlier levels;
    the caller reads them and then sets ``inside`` of each and the length of the list back to zero.
    """
    for at in range(loads.counts[DIRTY]):
        link = loads.lists[DIRTY, at]
        loads.links[link].is_dirty = 0
        first = loads.links[link].first_entry
        for place in range(first, first + loads.links[link].active):
            bundle = loads.entries[loads.link_entries[place]].bundle
            if loads.bundles[bundle].bottleneck == link:
                change_bundle(loads, bundle, _IN)
    loads.counts[DIRTY] = 0
    loads.counts[SOLVES] += 1
    grown = loads.counts[REGION] > 0
    while grown:
        loads.counts[TOUCHED] = 0
        loads.counts[PASS] += 1
        round_mark = loads.counts[PASS]
        for at in range(loads.counts[REGION]):
            loads.bundles[loads.lists[REGION, at]].inside = _IN
        for priority in range(loads.classes.size):
            size = _open_class(loads, priority, round_mark)
            _fill_class(loads, priority, size)
        grown = _grow(loads)


@njit
def _open_class(loads: Loads, priority: int, round_mark: int) -> int:
    """Gather the links of the region's bundles of one class; returns the size of the heap."""
    loads.counts[PASS] += 1
    loads.counts[FILLING] = 0
    size = 0
    num_links = loads.links.size - 1
    for at in range(loads.counts[REGION]):
        bundle = loads.lists[REGION, at]
        if loads.bundles[bundle].priority != priority:
            continue
        loads.bundles[bundle].level = 0.0
        if loads.bundles[bundle].members == 0:
            continue
        _open_bundle(loads, bundle, round_mark)
        if loads.bundles[bundle].cap < np.inf:
            push_pair(loads.heaps, 0, size, (loads.bundles[bundle].cap, num_links + bundle))
            size += 1
    for at in range(loads.counts[FILLING]):
        link = loads.lists[FILLING, at]
        level = loads.links[link].residual / loads.links[link].unfrozen
        push_pair(loads.heaps, 0, size, (level, link))
        size += 1
    return size


@njit
def _open_bundle(loads: Loads, bundle: int, round_mark: int) -> None:
    mark, priority = loads.counts[PASS], loads.bundles[bundle].priority
    for at in range(loads.bundles[bundle].first_entry, loads.bundles[bundle + 1].first_entry):
        entry = loads.entries[at]
        if entry.count == 0:
            continue
        link = loads.links[entry.link]
        if link.touched != round_mark:
            link.touched = round_mark
            loads.lists[TOUCHED, loads.counts[TOUCHED]] = entry.link
            loads.counts[TOUCHED] += 1
        if link.filling != mark:
            link.filling = mark
            loads.lists[FILLING, loads.counts[FILLING]] = entry.link
            loads.counts[FILLING] += 1
            link.residual = _residual(loads, entry.link, priority)
            link.unfrozen = 0.0
            link.open = 0
        link.unfrozen += entry.usage
        link.unfrozen_start = link.unfrozen
        link.open += 1


@njit
def _residual(loads: Loads, link: int, priority: int) -> float:
    """Return what higher classes, and bundles of this one that stand still, leave of a link."""
    used = 0.0
    first, capacity = loads.links[link].first_entry, loads.links[link].capacity
    for place in range(first, first + loads.links[link].active):
        entry = loads.entries[loads.link_entries[place]]
        other = loads.bundles[entry.bundle]
        if other.priority < priority or (other.priority == priority and not other.inside):
            used += entry.usage * other.level
    left = capacity - used
    if left == np.inf:  # adders at line rate
        return np.inf
    return float(left) if left > _NOTHING * capacity else 0.0


@njit
def _fill_class(loads: Loads, priority: int, size: int) -> None:
    """Raise all levels together; whatever fills up first stops its bundles."""
    num_links = loads.links.size - 1
    while size > 0:
        key, found = loads.heaps[0].key, loads.heaps[0].id
        pop_pair(loads.heaps, 0, size)
        size -= 1
        if found >= num_links:
            bundle = found - num_links
            if loads.bundles[bundle].frozen != loads.counts[PASS]:
                _freeze(loads, bundle, key, CAPPED)
        elif loads.links[found].open > 0:
            level = _level_of(loads, found, priority)
            if level > key:  # others froze since, and left more for those still open
                push_pair(loads.heaps, 0, size, (level, found))
                size += 1
            else:
                _freeze_link(loads, found, key, priority)


@njit
def _is_open(loads: Loads, bundle: int, priority: int) -> bool:
    return bool(
        loads.bundles[bundle].inside
        and loads.bundles[bundle].priority == priority
        and loads.bundles[bundle].frozen != loads.counts[PASS]
    )


@njit
def _level_of(loads: Loads, link: int, priority: int) -> float:
    if loads.links[link].unfrozen < _CANCELLED * loads.links[link].unfrozen_start:
        total = 0.0
        first = loads.links[link].first_entry
        for place in range(first, first + loads.links[link].active):
            entry = loads.link_entries[place]
            if _is_open(loads, loads.entries[entry].bundle, priority):
                total += loads.entries[entry].usage
        loads.links[link].unfrozen = total
        loads.links[link].unfrozen_start = total
    return float(loads.links[link].residual / loads.links[link].unfrozen)


@njit
def _freeze_link(loads: Loads, link: int, level: float, priority: int) -> None:
    first = loads.links[link].first_entry
    for place in range(first, first + loads.links[link].active):
        bundle = loads.entries[loads.link_entries[place]].bundle
        if _is_open(loads, bundle, priority):
            _freeze(loads, bundle, level, link)


@njit
def _freeze(loads: Loads, bundle: int, level: float, bottleneck: int) -> None:
    loads.bundles[bundle].level = level
    loads.bundles[bundle].bottleneck = bottleneck
    loads.bundles[bundle].frozen = loads.counts[PASS]
    for at in range(loads.bundles[bundle].first_entry, loads.bundles[bundle + 1].first_entry):
        entry = loads.entries[at]
        if entry.count > 0:
            link = loads.links[entry.link]
            link.residual = max(0.0, link.residual - entry.usage * level)
            link.unfrozen -= entry.usage
            link.open -= 1


@njit
def _grow(loads: Loads) -> bool:
    """Take in every bundle that lost its bottleneck; returns whether there was one."""
    size = loads.counts[REGION]
    for at in range(loads.counts[TOUCHED]):
        link = loads.lists[TOUCHED, at]
        _survey(loads, link)
        _take_in(loads, link)
    return bool(loads.counts[REGION] > size)


@njit
def _survey(loads: Loads, link: int) -> None:
    """Sum up a link per class: load up to it, highest level, lowest level that the link limits."""
    for priority in range(loads.classes.size):
        loads.classes[priority].load = 0.0
        loads.classes[priority].highest = 0.0
        loads.classes[priority].lowest = np.inf
    first = loads.links[link].first_entry
    for place in range(first, first + loads.links[link].active):
        entry = loads.entries[loads.link_entries[place]]
        bundle = loads.bundles[entry.bundle]
        found = loads.classes[bundle.priority]
        found.load += entry.usage * bundle.level
        found.highest = max(found.highest, bundle.level)
        if bundle.inside == _IN and bundle.bottleneck == link:
            found.lowest = min(found.lowest, bundle.level)
    for priority in range(1, loads.classes.size):
        loads.classes[priority].load += loads.classes[priority - 1].load


@njit
def _take_in(loads: Loads, link: int) -> None:
    capacity, first = loads.links[link].capacity, loads.links[link].first_entry
    less, more = 1.0 - loads.tolerance, 1.0 + loads.tolerance
    for place in range(first, first + loads.links[link].active):
        number = loads.entries[loads.link_entries[place]].bundle
        bundle = loads.bundles[number]
        if bundle.inside:
            continue
        found = loads.classes[bundle.priority]
        lost = bundle.bottleneck == link and (
            found.load < capacity * less or found.highest > bundle.level * more
        )
        too_much = bundle.level > 0.0 and found.load > capacity * more
        above = bundle.level > found.lowest * more
        if lost or too_much or above:
            change_bundle(loads, number, _NEW)


def routes_of(routes: RoutesLike) -> Incidence:
    """Return the links of flows as the solver reads them."""
    given: Any = (routes.offsets, routes.links) if isinstance(routes, Routes) else routes
    offsets, links = rows_of("routes", given, np.int32)
    whole = isinstance(given, tuple) and len(given) == 3 and isinstance(given[0], np.ndarray)
    amounts = np.array(given[2] if whole else np.ones(links.size), np.float64, order="C")
    if amounts.shape != links.shape or not np.all(amounts > 0):
        msg = "amounts of routes must be positive and as many as links"
        raise ConfigurationError(msg, hint="leave a link out that carries nothing")
    return Incidence(offsets, links, amounts)


def rows_of(what: str, given: Any, dtype: Any) -> tuple[Any, Any]:
    """Read one list of whole numbers for each row, or arrays (offsets, numbers): as the latter."""
    try:
        if isinstance(given, tuple) and given and isinstance(given[0], np.ndarray):
            # Copies: an array that is read-only has another type for the compiler.
            offsets = np.array(given[0], np.int64, order="C")
            flat = np.array(given[1], dtype, order="C")
        else:
            offsets = offsets_of([len(row) for row in given])
            flat = np.fromiter(itertools.chain.from_iterable(given), dtype)
    except (TypeError, ValueError):
        message = f"{what} must be one list of whole numbers for each task; got {given!r:.60}"
        raise ConfigurationError(message) from None
    fits = offsets.ndim == 1 and offsets.size > 0 and offsets[0] == 0
    if not fits or offsets[-1] != flat.size or np.any(np.diff(offsets) < 0):
        msg = f"the offsets of {what} must rise from 0 to how many numbers there are"
        raise ConfigurationError(msg, hint="or give one list for each task")
    return offsets, flat


def check_links(routes: Incidence, num_links: int) -> None:
    """Refuse link indices that do not exist."""
    wrong = np.flatnonzero((routes.links < 0) | (routes.links >= num_links))
    if wrong.size:
        flow = int(np.searchsorted(routes.offsets, wrong[0], side="right")) - 1
        raise ConfigurationError(
            f"flow {flow} uses link {routes.links[wrong[0]]}, but there are {num_links} links",
            hint=f"links are numbered from 0 to {num_links - 1}",
        )


def max_min_rates(
    routes: RoutesLike,
    capacities_bytes_per_s: npt.ArrayLike,
    *,
    caps_bytes_per_s: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    priorities: npt.ArrayLike | None = None,
    groups: npt.ArrayLike | None = None,
) -> FloatArray:
    """Return the rates at which no flow can gain without taking from one that has no more.

    Water is filled into all flows together, in proportion to their weights; a link that fills up
    stops its flows, and the rest goes on. Strict priorities are filled top down. Exact up to
    rounding.

    Args:
        routes: Links of each flow: one list each; what ``topology.routes()`` returns; or arrays
            ``(offsets, links)`` or ``(offsets, links, amounts)``, where flow i uses entries
            ``offsets[i]`` to ``offsets[i + 1]`` and the link carries ``amount`` times its rate.
            A link that is listed twice carries both.
        capacities_bytes_per_s: Capacity of each link.
        caps_bytes_per_s: Highest rate of each flow; None is no cap.
        weights: Rates share a link in proportion to these; None is 1 for all.
        priorities: Lower numbers come first, strictly: others get what is left. None is one class.
        groups: Flows with the same number from 0 up are coupled: their rates stay in proportion to
            their weights. -1 is a flow of its own, None is that for all.

    Returns:
        Bytes per second of each flow; ``inf`` for one that has neither a link nor a cap, whatever
        its group.

    Raises:
        ConfigurationError: An array has the wrong length or a value is out of range.

    References:
        D. Bertsekas, R. Gallager, Data Networks, section 6.5.2.

    Examples:
        >>> max_min_rates([[0], [0, 1], [1]], [10.0, 4.0]).tolist()
        [8.0, 2.0, 2.0]
        >>> max_min_rates([[0], [0]], [10.0], priorities=[0, 1], caps_bytes_per_s=[7, 9]).tolist()
        [7.0, 3.0]
    """
    table = routes_of(routes)
    capacities = positive_array("capacities_bytes_per_s", capacities_bytes_per_s, None)
    check_links(table, len(capacities))
    count = table.offsets.size - 1
    weight = positive_array("weights", 1.0 if weights is None else weights, count)
    cap = positive_array(
        "caps_bytes_per_s", np.inf if caps_bytes_per_s is None else caps_bytes_per_s, count
    )
    priority = whole_array("priorities", 0 if priorities is None else priorities, count)
    group = whole_array("groups", -1 if groups is None else groups, count)
    bundles = form_bundles(
        table, capacities, weights=weight, caps=cap, priorities=priority, groups=group
    )
    loads = make_loads(bundles, capacities)
    _join_all(bundles, loads, cap / weight)
    resolve(loads)
    levels = np.append(loads.bundles["level"][:-1], np.inf)
    rates = weight * levels[bundles.of_row]
    return np.asarray(rates, np.float64)


def positive_array(name: str, values: npt.ArrayLike, size: int | None) -> FloatArray:
    """Return float64 values, checked to be more than zero."""
    array: FloatArray = sized_array(name, values, size, np.float64)
    if not np.all(array > 0):  # False for NaN as well
        raise ConfigurationError(
            f"{name} must all be more than zero", hint="leave out what carries nothing"
        )
    return array


def whole_array(name: str, values: npt.ArrayLike, size: int) -> npt.NDArray[np.int64]:
    """Return int64 values, checked to be whole."""
    array = sized_array(name, values, size)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and np.any(array % 1)):
        raise ConfigurationError(f"{name} must be whole numbers")
    return array.astype(np.int64)  # type: ignore[no-any-return]


def sized_array(name: str, values: Any, size: int | None, dtype: Any = None) -> Any:
    """Return a copy, one value for each of ``size`` flows; None takes a list of any length."""
    try:
        array = np.array(values, dtype, order="C")
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name} must be numbers; got {values!r:.60}") from None
    if size is not None and array.ndim == 0:
        return np.full(size, array)
    if array.ndim != 1 or (size is not None and array.size != size):
        wanted = "a list" if size is None else f"{size} values, one for each flow"
        raise ConfigurationError(f"{name} must be {wanted}; got shape {array.shape}")
    return array


@njit
def _join_all(bundles: Bundles, loads: Loads, caps: Any) -> None:
    for row in range(bundles.of_row.size):
        bundle = bundles.of_row[row]
        if bundle < 0:
            continue
        loads.bundles[bundle].members += 1
        loads.bundles[bundle].cap = min(loads.bundles[bundle].cap, caps[row])
        for at in range(bundles.row_offsets[row], bundles.row_offsets[row + 1]):
            join_entry(loads, bundles.row_entries[at], bundles.row_usages[at])
        change_bundle(loads, bundle, 1)
