"""Predicted times of a synthesized algorithm and of the library's, by message size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import Schedule, evaluate, lower_bound, named_collective
from fivefold.collectives.schedules.timing import CostModel
from fivefold.errors import FivefoldError
from fivefold.network.topology import Topology
from fivefold.units import format_bytes

_LEAST_BYTES, _MOST_BYTES = 1e3, 1e9
_POINTS, _FEW_POINTS = 25, 9
_HALVINGS = 12
_MANY = 300_000  # transfers of all algorithms together beyond which there are few points
_TOO_MANY = 3_000_000  # transfers of all algorithms together; no more are compared
_EQUAL = 1e-6  # relative: closer than that is a draw


@dataclass(frozen=True)
class Price:
    """Times of one algorithm, and how to ask for more of them."""

    name: str
    kind: str
    times_s: tuple[float, ...]
    at: Callable[[float], float]


@dataclass(frozen=True)
class Prices:
    """Times by message size; the synthesized algorithm and the bound come last."""

    sizes_bytes: tuple[float, ...]
    curves: tuple[Price, ...]


def price_sizes(
    found: Schedule, network: Topology, size_bytes: float, *, model: CostModel = "serial"
) -> Prices:
    """Times of the found schedule, the library's and the lower bound, over six decades."""
    rivals = _rivals(found, network)
    work = found.num_transfers + sum(schedule.num_transfers for schedule in rivals.values())
    sizes = _sizes(size_bytes, _POINTS if work <= _MANY else _FEW_POINTS)
    named = {name.replace("_", " "): schedule for name, schedule in rivals.items()}
    curves = [
        _price(name, "library", _timer(schedule, network, model), sizes)
        for name, schedule in named.items()
    ]
    label = f"{found.name.replace('_', ' ')}, chosen for {format_bytes(size_bytes)}"
    curves.append(_price(label, "synthesized", _timer(found, network, model), sizes))
    bound = _bound_timer(found, network)
    if bound is not None:
        curves.append(_price("lower bound", "bound", bound, sizes))
    return Prices(sizes, tuple(curves))


def fastest_ranges(prices: Prices, *kinds: str) -> tuple[tuple[str, str], ...]:
    """Which algorithm is fastest from which size on; the limits are where two curves cross."""
    rivals = [price for price in prices.curves if price.kind in kinds]
    rivals.sort(key=lambda price: price.kind != "synthesized")  # a draw is the synthesized one's
    if not rivals:
        return ()
    winners = [_fastest(rivals, place) for place in range(len(prices.sizes_bytes))]
    limits: list[tuple[float, Price]] = [(prices.sizes_bytes[0], winners[0])]
    for place, winner in enumerate(winners[1:], start=1):
        if winner is not winners[place - 1]:
            span = prices.sizes_bytes[place - 1], prices.sizes_bytes[place]
            limits.append((_crossing(winners[place - 1], winner, span), winner))
    ends = [limit for limit, _ in limits[1:]] + [prices.sizes_bytes[-1]]
    return tuple(
        (f"{format_bytes(start)} to {format_bytes(end)}", winner.name)
        for (start, winner), end in zip(limits, ends, strict=True)
    )


def _fastest(rivals: list[Price], place: int) -> Price:
    """Return the first that is as fast as any; rounding decides nothing."""
    least_s = min(price.times_s[place] for price in rivals) * (1 + _EQUAL)
    return next(price for price in rivals if price.times_s[place] <= least_s)


def _crossing(before: Price, after: Price, span: tuple[float, float]) -> float:
    """Return the size at which the second becomes as fast as the first."""
    low, high = span
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if after.at(middle) < before.at(middle):
            high = middle
        else:
            low = middle
    return high


def _sizes(size_bytes: float, points: int) -> tuple[float, ...]:
    low = min(_LEAST_BYTES, size_bytes) if size_bytes > 0 else _LEAST_BYTES
    high = max(_MOST_BYTES, size_bytes)
    grid = {low * (high / low) ** (place / (points - 1)) for place in range(points - 1)} | {high}
    return tuple(sorted(grid | ({float(size_bytes)} if size_bytes > 0 else set())))


def _rivals(found: Schedule, network: Topology) -> dict[str, Schedule]:
    """Return the library's algorithms that fit, but for the one that was found."""
    asked = found.collective
    root = 0 if asked.root is None else asked.root
    try:
        plain = named_collective(asked.name, asked.num_ranks, root=root)
    except FivefoldError:  # an uneven or a custom one has no plain form
        plain = asked
    rivals: dict[str, Schedule] = {}
    left = _TOO_MANY - found.num_transfers
    for name in available_algorithms(plain):
        if asked.num_ranks**2 > left:
            break  # some have as many transfers as there are pairs
        try:
            schedule = build_algorithm(name, plain, network)
        except FivefoldError:
            continue
        same = schedule.name == found.name and schedule.num_transfers == found.num_transfers
        if not same and schedule.num_transfers <= left:
            rivals[name] = schedule
            left -= schedule.num_transfers
    return rivals


def _timer(schedule: Schedule, network: Topology, model: CostModel) -> Callable[[float], float]:

    @cache
    def time_s(size_bytes: float) -> float:
        return float(evaluate(schedule, network, size_bytes=size_bytes, model=model).total_s)

    return time_s


def _bound_timer(schedule: Schedule, network: Topology) -> Callable[[float], float] | None:

    # Exact cuts at so many sizes would take longer than all else on a large network.
    exact = None if network.num_ranks <= 32 else False

    def bound_s(size_bytes: float) -> float:
        return float(lower_bound(schedule.collective, network, size_bytes, exact=exact).seconds)

    try:
        bound_s(_LEAST_BYTES)
    except FivefoldError:  # connected one way only: there is no bound
        return None
    return bound_s


def _price(
    name: str, kind: str, timer: Callable[[float], float], sizes: tuple[float, ...]
) -> Price:
    return Price(name, kind, tuple(timer(size) for size in sizes), timer)
