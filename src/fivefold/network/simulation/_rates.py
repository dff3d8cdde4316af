"""Max-min fair rates of flows over fixed paths, solved once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError
from fivefold.network.simulation._bundles import Bundles, Incidence, form_bundles, make_loads
from fivefold.network.simulation._filling import change_bundle, join_entry, resolve
from fivefold.network.simulation._state import Loads
from fivefold.network.topology import Routes as RankRoutes

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FlowRoutes:
    """The links of many flows, one after the other.

    Args:
        offsets: Flow i uses entries ``offsets[i]`` to ``offsets[i + 1]``; int64 [flows + 1].
        links: Link index of each entry; int32 [entries].
        amounts: How much of the flow's rate the link carries; None is 1 everywhere. A link that is
            listed twice carries both.

    Raises:
        ConfigurationError: The arrays do not fit together.

    Examples:
        >>> routes = FlowRoutes.of([[0, 1], [], [2]])
        >>> routes.offsets.tolist(), routes.links.tolist(), len(routes)
        ([0, 2, 2, 3], [0, 1, 2], 3)
    """

    offsets: npt.NDArray[np.int64]
    links: npt.NDArray[np.int32]
    amounts: FloatArray | None = None

    def __post_init__(self) -> None:
        # Copies: an array that is read-only has another type for the compiler.
        offsets = np.array(self.offsets, np.int64, order="C")
        links = np.array(self.links, np.int32, order="C")
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "links", links)
        fits = offsets.ndim == 1 and offsets.size > 0 and offsets[0] == 0
        if not fits or offsets[-1] != links.size or np.any(np.diff(offsets) < 0):
            msg = "the offsets of routes must rise from 0 to the number of entries"
            raise ConfigurationError(
                msg,
                hint="build them with FlowRoutes.of([[0, 1], [2]])",
            )
        if self.amounts is not None:
            amounts = np.array(self.amounts, np.float64, order="C")
            object.__setattr__(self, "amounts", amounts)
            if amounts.shape != links.shape or not _all_positive(amounts):
                msg = "amounts of routes must be positive and as many as links"
                raise ConfigurationError(
                    msg,
                    hint="leave a link out that carries nothing",
                )

    def __len__(self) -> int:
        return self.offsets.size - 1

    @classmethod
    def of(cls, routes: Sequence[Sequence[int]]) -> FlowRoutes:
        """Make routes from one list of links for each flow."""
        offsets = np.concatenate([[0], np.cumsum([len(route) for route in routes], dtype=np.int64)])
        links = np.fromiter((link for route in routes for link in route), np.int32)
        return cls(offsets.astype(np.int64), links)

    @classmethod
    def from_any(cls, routes: FlowRoutes | RankRoutes | Sequence[Sequence[int]]) -> FlowRoutes:
        """Make routes from themselves, from ``topology.routes()``, or from lists."""
        if isinstance(routes, FlowRoutes):
            return routes
        if isinstance(routes, RankRoutes):
            return cls(routes.offsets, routes.links)
        return cls.of(routes)

    def check(self, num_links: int) -> None:
        """Refuse link indices that do not exist.

        Raises:
            ConfigurationError: One is out of range; names its flow.
        """
        wrong = np.flatnonzero((self.links < 0) | (self.links >= num_links))
        if wrong.size:
            flow = int(np.searchsorted(self.offsets, wrong[0], side="right")) - 1
            raise ConfigurationError(
                f"flow {flow} uses link {self.links[wrong[0]]}, but there are {num_links} links",
                hint=f"links are numbered from 0 to {num_links - 1}",
            )

    @property
    def incidence(self) -> Incidence:
        """Return the same as the solver reads it."""
        amounts = np.ones(self.links.size) if self.amounts is None else self.amounts
        return Incidence(self.offsets, self.links, amounts)


def max_min_rates(
    routes: FlowRoutes | RankRoutes | Sequence[Sequence[int]],
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
        routes: Links of each flow: as lists, as arrays, or what ``topology.routes()`` returns.
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
    table = FlowRoutes.from_any(routes)
    capacities = positive_array("capacities_bytes_per_s", capacities_bytes_per_s, None)
    table.check(len(capacities))
    count = len(table)
    weight = positive_array("weights", 1.0 if weights is None else weights, count)
    cap = positive_array(
        "caps_bytes_per_s", np.inf if caps_bytes_per_s is None else caps_bytes_per_s, count
    )
    priority = whole_array("priorities", 0 if priorities is None else priorities, count)
    group = whole_array("groups", -1 if groups is None else groups, count)
    bundles, classes = bundle_flows(
        table.incidence, capacities, weights=weight, caps=cap, priorities=priority, groups=group
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
    if not _all_positive(array):
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
    if size is not None and array.ndim == 0:
        return np.full(size, array)
    if array.ndim != 1 or (size is not None and array.size != size):
        wanted = "a list" if size is None else f"{size} values, one for each flow"
        raise ConfigurationError(f"{name} must be {wanted}; got shape {array.shape}")
    return array


def _all_positive(array: FloatArray) -> bool:
    return bool(np.all(array > 0))  # False for NaN as well


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
