"""Max-min fair rates of flows over fixed paths, solved once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.network.simulation._bundles import Bundles, Incidence, form_bundles, make_loads
from fivefold.network.simulation._filling import change_bundle, join_entry, resolve
from fivefold.network.simulation._state import Loads
from fivefold.network.topology.routes import Routes

FloatArray = npt.NDArray[np.float64]


RoutesLike = Incidence | Routes | tuple[npt.NDArray[Any], ...] | Sequence[Sequence[int]]


def routes_of(routes: RoutesLike) -> Incidence:
    """Return the links of flows as the solver reads them."""
    offsets: Any
    links: Any
    amounts: Any = None
    if isinstance(routes, Routes):
        offsets, links = routes.offsets, routes.links
    elif isinstance(routes, tuple) and routes and isinstance(routes[0], np.ndarray):
        offsets, links, amounts = (*routes, None)[:3]
    else:
        lists: Any = routes
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        links = np.fromiter((link for route in lists for link in route), np.int32)
    # Copies: an array that is read-only has another type for the compiler.
    offsets, links = np.array(offsets, np.int64, order="C"), np.array(links, np.int32, order="C")
    fits = offsets.ndim == 1 and offsets.size > 0 and offsets[0] == 0
    if not fits or offsets[-1] != links.size or np.any(np.diff(offsets) < 0):
        msg = "the offsets of routes must rise from 0 to the number of links"
        raise ConfigurationError(msg, hint="or give one list of links for each flow")
    amounts = np.array(np.ones(links.size) if amounts is None else amounts, np.float64, order="C")
    if amounts.shape != links.shape or not np.all(amounts > 0):
        msg = "amounts of routes must be positive and as many as links"
        raise ConfigurationError(msg, hint="leave a link out that carries nothing")
    return Incidence(offsets, links, amounts)


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
    stops its flows, and the rest goes on. Exact up to rounding.

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
    bundles, classes = bundle_flows(
        table, capacities, weights=weight, caps=cap, priorities=priority, groups=group
    )
    loads = make_loads(bundles, capacities, priorities=classes, queue_room=0)
    _join_all(bundles, loads, cap / weight)
    resolve(loads)
    levels = np.append(loads.bundles["level"][:-1], np.inf)
    rates = weight * levels[bundles.of_row]
    return np.asarray(rates, np.float64)


def bundle_flows(
    routes: Incidence,
    capacities: FloatArray,
    *,
    weights: FloatArray,
    caps: FloatArray,
    priorities: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    flows: npt.NDArray[np.bool_] | None = None,
) -> tuple[Bundles, npt.NDArray[np.int64]]:
    """Form the bundles of flows and their priority classes."""
    ranks = np.unique(priorities, return_inverse=True)[1]
    _check_groups(groups, ranks)
    groups = np.where(groups < 0, -1, np.unique(np.maximum(groups, -1), return_inverse=True)[1])
    cap_levels, cap_keys = np.unique(caps / weights, return_inverse=True)
    keys = ranks * len(cap_levels) + cap_keys
    limited = (np.diff(routes.offsets) > 0) | np.isfinite(caps)
    limited = limited if flows is None else limited & flows
    bundles = form_bundles(
        routes, capacities, keys=np.where(limited, keys, -1), groups=groups, weights=weights
    )
    return bundles, ranks[bundles.first_rows]


def positive_array(name: str, values: npt.ArrayLike, size: int | None) -> FloatArray:
    """Return float64 values, checked to be more than zero."""
    array = sized_array(name, np.asarray(values, np.float64), size)
    if not np.all(array > 0):  # False for NaN as well
        raise ConfigurationError(
            f"{name} must all be more than zero", hint="leave out what carries nothing"
        )
    return np.array(array, np.float64, order="C")


def whole_array(name: str, values: npt.ArrayLike, size: int) -> npt.NDArray[np.int64]:
    """Return int64 values, checked to be whole."""
    array = sized_array(name, np.asarray(values), size)
    if array.dtype.kind not in "iu" and not (array.size == 0 or np.all(array == np.rint(array))):
        raise ConfigurationError(f"{name} must be whole numbers")
    return np.array(array, np.int64, order="C")


def sized_array(name: str, array: Any, size: int | None) -> Any:
    """Return one value for each of ``size`` flows, checked; None takes a list of any length."""
    if size is not None and array.ndim == 0:
        return np.full(size, array)
    if array.ndim != 1 or (size is not None and array.size != size):
        wanted = "a list" if size is None else f"{size} values, one for each flow"
        raise ConfigurationError(f"{name} must be {wanted}; got shape {array.shape}")
    return array


def _check_groups(groups: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64]) -> None:
    coupled = np.flatnonzero(groups >= 0)
    numbers, firsts = np.unique(groups[coupled], return_index=True)
    own = ranks[coupled]
    wrong = own != own[firsts][np.searchsorted(numbers, groups[coupled])]
    if wrong.any():
        raise ConfigurationError(
            f"flows of group {groups[coupled][wrong][0]} have different priorities",
            hint="coupled flows share one rate, so they need one priority",
        )


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
