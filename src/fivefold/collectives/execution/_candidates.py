"""Schedules that a group may run: the library's, and trees packed into the topology.

Trees need whole-number rates: capacities are rounded to multiples of a quarter of the smallest
one, which changes the trees a little where rates are uneven, and their price not at all, for that
is found on the true topology. All of it is polynomial and deterministic.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import Collective, Schedule, compose_all_reduce
from fivefold.errors import FivefoldError
from fivefold.network.topology import Topology

_log = logging.getLogger(__name__)
_SKIPPED = ("in_network_tree",)  # needs switches that aggregate
_TREES = "trees"
_ROOTED = "rooted_trees"
_MOST_TREES = 8  # of each root: more trees are more and smaller messages
_TREE_COUNTS = (1, 2, 4)
_STEPS_OF_SMALLEST = 4
_MOST_ROOTS = 16


def library_names(collective: Collective) -> list[str]:
    """Names of the algorithms that may be asked for.

    Examples:
        >>> from fivefold.collectives.schedules import all_reduce
        >>> "ring" in library_names(all_reduce(4))
        True
    """
    library = [name for name in available_algorithms(collective) if name not in _SKIPPED]
    return [*library, _TREES, *([_ROOTED] if collective.name == "all_reduce" else [])]


def candidate_schedules(
    collective: Collective, topology: Topology, asked: str
) -> Iterator[tuple[str, Schedule]]:
    """Schedules for a collective on a topology, by name.

    Args:
        collective: What is to be done; chunks are for each algorithm to choose.
        topology: The network.
        asked: ``"auto"`` for all, or one of :func:`library_names`.

    Yields:
        Name and schedule; what does not fit the topology is left out.

    Examples:
        >>> from fivefold.collectives.schedules import all_reduce
        >>> from fivefold.network.topology import switch
        >>> [name for name, _ in candidate_schedules(all_reduce(4), switch(4), "ring")]
        ['ring']
    """
    for name in library_names(collective):
        if asked not in ("auto", name):
            continue
        try:
            yield from _schedules_of(name, collective, topology)
        except FivefoldError as error:
            _log.debug("%s does not fit %s: %s", name, topology.name, error)


def _schedules_of(
    name: str, collective: Collective, topology: Topology
) -> Iterator[tuple[str, Schedule]]:
    if name == _TREES:
        for schedule in _tree_schedules(collective, topology):
            yield name, schedule
    elif name == _ROOTED:
        for schedule in _rooted_schedules(topology):
            yield name, schedule
    else:
        yield name, build_algorithm(name, collective, topology)


def _tree_schedules(collective: Collective, topology: Topology) -> Iterator[Schedule]:
    from fivefold.collectives.synthesis import spanning_trees  # noqa: PLC0415 - loads a solver

    if collective.name == "all_to_all":
        return
    root = collective.root if collective.name == "broadcast" else None
    rounded = _rounded(topology)
    counts: set[int] = set()
    for k in (None, *_TREE_COUNTS):
        packing = spanning_trees(rounded, k=k, root=root)
        if packing.k in counts or packing.k > _MOST_TREES:
            continue
        counts.add(packing.k)
        yield packing.to_schedule(collective.name, chunks=packing.k)


def _rooted_schedules(topology: Topology) -> Iterator[Schedule]:
    """All-reduce as a reduction to one rank and a broadcast from it, both down the same trees.

    Its two halves use opposite directions of the links, so that parts of the buffer overlap in
    time; no rank needs to own a share, which suits ranks behind slow links.
    """
    from fivefold.collectives.synthesis import spanning_trees  # noqa: PLC0415 - loads a solver

    rounded = _rounded(topology)
    for root in range(min(topology.num_ranks, _MOST_ROOTS)):
        for k in _TREE_COUNTS[:2]:
            packing = spanning_trees(rounded, k=k, root=root)
            spread = packing.to_schedule("broadcast", chunks=packing.k)
            # Sums run against the links' direction: neither half keeps the routes of the other.
            spread = spread.replaced(topology=None, route_offsets=None, route_links=None)
            yield compose_all_reduce(spread.inverted(), spread, name=_ROOTED)


def _rounded(topology: Topology) -> Topology:
    unit = min(float(rate) for rate in topology.capacities_bytes_per_s) / _STEPS_OF_SMALLEST
    return topology.with_links(
        replace(
            link,
            bandwidth_bytes_per_s=float(max(round(link.capacity_bytes_per_s / unit), 1)),
            count=1,
            latency_s=0.0,
        )
        for link in topology.links
    )
