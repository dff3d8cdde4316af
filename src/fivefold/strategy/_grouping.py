"""Jobs that share GPUs by taking turns at storage, processor, GPU and network (Muri, SIGCOMM'22).

A job's iteration loads (storage, then host processor), computes and sends. Jobs of a group start
a quarter of the period apart, so that each resource has one user at a time: loading takes two
quarters, computing one, sending one. A quarter lasts as long as its slowest user.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from fivefold.errors import ConfigurationError, UnsupportedError

GROUP_LIMIT = 4

Stages = tuple[float, float, float]


@functools.lru_cache(maxsize=100_000)
def group_period_s(stages: tuple[Stages, ...]) -> float:
    """Common iteration time of jobs that take turns in their best order.

    Args:
        stages: Of each job, the seconds of loading, computing and sending in one iteration.

    Returns:
        Seconds from one iteration of a job to its next; all jobs of the group have the same.

    Raises:
        ConfigurationError: There is no job, or more than four.

    Examples:
        >>> group_period_s(((2.0, 1.0, 1.0), (1.0, 2.0, 0.0)))
        4.0
    """
    if not 1 <= len(stages) <= GROUP_LIMIT:
        message = f"a group of {len(stages)} jobs cannot take turns at {GROUP_LIMIT} resources"
        raise ConfigurationError(message, hint=f"1 to {GROUP_LIMIT} jobs")
    others = itertools.permutations(range(1, GROUP_LIMIT), len(stages) - 1)
    return min(_period_s(stages, (0, *places)) for places in others)


def _period_s(stages: Sequence[Stages], places: Sequence[int]) -> float:
    """Period when each job starts in the quarter of its place.

    A quarter ends when those who compute or send in it have; two in a row also wait for who loads
    in them. The longest way once round the circle by such steps is the period.
    """
    single, double = [0.0] * GROUP_LIMIT, [0.0] * GROUP_LIMIT
    for (load, compute, send), place in zip(stages, places, strict=True):
        double[place] = load
        for quarter, seconds in ((place + 2, compute), (place + 3, send)):
            single[quarter % 4] = max(single[quarter % 4], seconds)
    one_load = (
        double[q] + single[(q + 2) % GROUP_LIMIT] + single[(q + 3) % GROUP_LIMIT] for q in range(4)
    )
    return max(sum(single), *one_load, double[0] + double[2], double[1] + double[3])


def match_groups(
    groups: Sequence[tuple[int, ...]], stages: Sequence[Stages]
) -> list[tuple[int, int]]:
    """Pairs of groups that use the resources best together, as numbers of groups.

    Args:
        groups: Jobs of each group, as indices into ``stages``.
        stages: Of each job.

    Raises:
        UnsupportedError: networkx is not installed.

    Examples:
        >>> match_groups([(0,), (1,), (2,)], [(3.0, 1.0, 0.0), (1.0, 3.0, 0.0), (2.0, 1.0, 0.0)])
        [(0, 1)]
    """
    try:
        import networkx as nx  # noqa: PLC0415 - only groups need it
    except ImportError as error:
        message = "matching jobs needs networkx"
        raise UnsupportedError(message, hint="pip install 'fivefold[network]'") from error
    graph = nx.Graph()
    for a, b in itertools.combinations(range(len(groups)), 2):
        together = (*groups[a], *groups[b])
        if len(together) <= GROUP_LIMIT:
            chosen = tuple(sorted(stages[job] for job in together))
            used_s = sum(map(sum, chosen))
            if used_s > 0.0:
                graph.add_edge(a, b, weight=used_s / group_period_s(chosen))
    return sorted((min(pair), max(pair)) for pair in nx.max_weight_matching(graph))
