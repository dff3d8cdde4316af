"""All-reduce as a reduce and a broadcast that overlap, chunk by chunk.

A reduce-scatter and an all-gather send every byte of a slow rank's link twice in one direction or
the other, one phase after the other. Summed at one root instead, a slow rank's outgoing link
carries its contribution once while its incoming link carries sums that are done already: on a
star with one slow host that is up to twice as fast. The two halves are tree packings; here their
transfers are put into one order, each chunk spread as soon as its sum is complete.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import (
    Collective,
    Schedule,
    broadcast,
    compose_all_reduce,
    evaluate,
    reduce,
)
from fivefold.collectives.synthesis._trees import spanning_trees
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology

_EVERY_ROOT = 8  # ranks up to which every one is tried as the root
_SOME_ROOTS = 3


def pipelined_all_reduce(
    collective: Collective, topology: Topology, *, root: int, size_bytes: float
) -> Schedule:
    """Reduce to a root and broadcast from it, overlapping.

    Args:
        collective: An all-reduce; the more chunks, the more the halves overlap.
        topology: Where.
        root: The rank that holds the sums first.
        size_bytes: Size of the collective.

    Raises:
        ConfigurationError: The collective is no all-reduce.
        InfeasibleError: Some rank cannot be reached.
    """
    if collective.name != "all_reduce":
        message = f"{collective.name} is no all-reduce"
        raise ConfigurationError(message, hint="use method='trees'")
    ranks, chunks = collective.num_ranks, collective.num_chunks
    packing = spanning_trees(topology, root=root)
    collect = packing.to_schedule(reduce(ranks, chunks, root=root), size_bytes=size_bytes)
    spread = packing.to_schedule(broadcast(ranks, chunks, root=root), size_bytes=size_bytes)
    return overlapped(collect, spread, topology, size_bytes=size_bytes)


def overlapped(
    collect: Schedule, spread: Schedule, topology: Topology, *, size_bytes: float
) -> Schedule:
    """The second schedule behind the first, each chunk as soon as its sum is complete.

    Args:
        collect: A reduce or reduce-scatter.
        spread: The broadcast or all-gather of the same chunks.
        topology: Where.
        size_bytes: Size of the collective.

    Returns:
        An all-reduce without times, its transfers in the order in which they are to go.
    """
    first = evaluate(collect, topology, size_bytes=size_bytes)
    second = evaluate(spread, topology, size_bytes=size_bytes)
    chunks = collect.collective.num_chunks
    if not chunks:
        return compose_all_reduce(collect, spread)
    done_s, needed_s = np.zeros(chunks), np.full(chunks, np.inf)
    np.maximum.at(done_s, collect.chunks, first.ends_s)
    np.minimum.at(needed_s, spread.chunks, second.starts_s)
    # Equal chunks are alike: what is summed first is spread first. (A reduce is a broadcast run
    # backwards, so that without this the first sum would be the last to be asked for.)
    numbers = np.arange(chunks, dtype=np.int32)
    if np.ptp(collect.collective.chunk_weights) == 0:
        numbers[np.argsort(needed_s, kind="stable")] = np.argsort(done_s, kind="stable")
        needed_s = needed_s[np.argsort(numbers)]
        spread = spread.replaced(chunks=numbers[spread.chunks])
    # Each chunk waits for its own sum only; a whole tree is shifted, so its order stays.
    lag_s = np.maximum(done_s - needed_s, 0.0)
    later_s = second.starts_s + lag_s[spread.chunks]
    whole = compose_all_reduce(_listed(collect, first.starts_s), _listed(spread, later_s))
    starts_s = np.concatenate([np.sort(first.starts_s), np.sort(later_s)])
    halves = np.repeat([0, 1], [collect.num_transfers, spread.num_transfers])
    order = np.lexsort((halves, starts_s))
    return _reordered(whole, order).replaced(topology=topology, name="pipelined all-reduce")


def _listed(schedule: Schedule, starts_s: NDArray[np.float64]) -> Schedule:
    """The transfers in the order of their starts, without times and steps."""
    plain = schedule.replaced(starts_s=None, ends_s=None, steps=None, attributes={})
    return _reordered(plain, np.argsort(starts_s, kind="stable"))


def _reordered(schedule: Schedule, order: NDArray[np.int64]) -> Schedule:
    offsets, links = schedule.route_offsets, schedule.route_links
    if offsets is not None and links is not None:
        lengths = np.diff(offsets)[order]
        turned = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        within = np.arange(turned[-1]) - np.repeat(turned[:-1], lengths)
        links = links[np.repeat(offsets[:-1][order], lengths) + within]
        offsets = turned
    return schedule.replaced(
        chunks=schedule.chunks[order],
        sources=schedule.sources[order],
        targets=schedule.targets[order],
        reduces=schedule.reduces[order],
        steps=None,
        route_offsets=offsets,
        route_links=links,
    )


def roots_of(topology: Topology) -> Iterator[int]:
    """Ranks to try as the root: all of few, else those with the widest links each way."""
    nodes, rates = topology.rank_nodes, topology.capacities_bytes_per_s
    width = [
        min(
            float(rates[topology.in_links(int(node))].sum()),
            float(rates[topology.out_links(int(node))].sum()),
        )
        for node in nodes
    ]
    order = np.argsort(-np.array(width), kind="stable")
    count = len(order) if len(order) <= _EVERY_ROOT else _SOME_ROOTS
    yield from (int(rank) for rank in order[:count])
