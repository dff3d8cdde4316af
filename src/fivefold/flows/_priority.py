"""Priorities of jobs, compressed to the few classes that a switch has.

References:
    Crux, SIGCOMM 2024: intensity as priority, compression over the contention graph. How the
    cut is searched here (random topological orders, then dynamic programming) is our own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fivefold.errors import require_whole
from fivefold.flows.routing import Routing

_ORDERS = 32


@dataclass(frozen=True)
class PriorityClasses:
    """The class of each job.

    Attributes:
        classes: By job, 0 the most urgent.
        priorities: What they were compressed from: weight times intensity.
        lost: Weight of the contending pairs that fell into one class, over that of all.
    """

    classes: Mapping[str, int]
    priorities: Mapping[str, float]
    lost: float


def priority_classes(routing: Routing, *, classes: int = 8) -> PriorityClasses:
    """Give each job one of a few strict classes.

    Jobs that share no link may share a class without loss, so only pairs that contend count: a
    pair in one class loses the priority of its more urgent job. Of several orders that respect
    all contending pairs, each is cut into classes where the least is lost.

    Args:
        routing: Paths of all jobs.
        classes: How many classes there are.

    Returns:
        The classes; with as many classes as contending jobs nothing is lost.

    Raises:
        ConfigurationError: There is no class.

    Examples:
        >>> from fivefold.flows import FlowDemand, JobTraffic, route_flows
        >>> from fivefold.network.topology import switch
        >>> jobs = [
        ...     JobTraffic(job_id=name, compute_s=s, flows=(FlowDemand(0, 1, 1e9),))
        ...     for name, s in (("slow", 1.0), ("fast", 9.0))
        ... ]
        >>> dict(priority_classes(route_flows(switch(2), jobs)).classes)
        {'slow': 1, 'fast': 0}
    """
    require_whole("classes", classes)
    names = [job.job_id for job in routing.traffic]
    priority = np.array([
        routing.jobs[name].weight * routing.intensity(name) for name in names
    ])  # fmt: skip
    # A job that sends nothing contends with nobody; any finite priority does.
    finite = np.where(np.isfinite(priority), priority, 0.0)
    lost = _pair_losses(routing, names, finite)
    total = float(lost.sum())
    best, found = np.inf, dict.fromkeys(names, 0)
    for order in _orders(finite, lost > 0):
        cost, cut = _cut(lost[np.ix_(order, order)], classes)
        if cost < best - 1e-12:
            best, found = cost, {names[i]: run for i, run in zip(order, cut, strict=True)}
    return PriorityClasses(
        {name: found[name] for name in names},
        dict(zip(names, priority.tolist(), strict=True)),
        best / total if total > 0 else 0.0,
    )


FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def _pair_losses(routing: Routing, names: list[str], priority: FloatArray) -> FloatArray:
    """Return by [urgent, less urgent] the urgent one's priority where they share links, else 0."""
    lost = np.zeros((len(names), len(names)))
    for a, b in itertools.combinations(range(len(names)), 2):
        if len(routing.shared_links(names[a], names[b])):
            first, second = (a, b) if priority[a] >= priority[b] else (b, a)
            lost[first, second] = priority[first]
    return lost


def _orders(priority: FloatArray, before: BoolArray) -> list[list[int]]:
    """Return the orders in which of each contending pair the more urgent job comes first."""
    number = len(priority)
    plain = sorted(range(number), key=lambda i: (-priority[i], i))
    orders = [plain]
    draw = np.random.default_rng(0)
    for _ in range(_ORDERS if number > 2 else 0):
        waiting = before.sum(axis=0)
        ready = [i for i in range(number) if waiting[i] == 0]
        order: list[int] = []
        while ready:
            taken = ready.pop(int(draw.integers(len(ready))))
            order.append(taken)
            for other in np.flatnonzero(before[taken]).tolist():
                waiting[other] -= 1
                if waiting[other] == 0:
                    ready.append(other)
        orders.append(order)
    return orders


def _cut(lost: FloatArray, classes: int) -> tuple[float, list[int]]:
    """Cut an order into at most so many runs; least loss within runs, and the run of each."""
    number = len(lost)
    within = np.zeros((number + 1, number + 1))  # [start, stop): what is lost in one run
    for start in range(number):
        for stop in range(start + 1, number + 1):
            column = lost[start : stop - 1, stop - 1].sum()
            within[start, stop] = within[start, stop - 1] + column
    best = np.full((classes + 1, number + 1), np.inf)
    best[0, 0] = 0.0
    came = np.zeros((classes + 1, number + 1), np.int64)
    for run in range(1, classes + 1):
        for stop in range(number + 1):
            costs = best[run - 1, : stop + 1] + within[: stop + 1, stop]
            came[run, stop] = int(np.argmin(costs))
            best[run, stop] = costs[came[run, stop]]
    runs = int(np.argmin(best[:, number]))  # the fewest runs of the least loss
    bounds = [number]
    for run in range(runs, 0, -1):
        bounds.append(int(came[run, bounds[-1]]))
    bounds.reverse()
    found = [run for run, (a, b) in enumerate(itertools.pairwise(bounds)) for _ in range(b - a)]
    return float(best[runs, number]), found
