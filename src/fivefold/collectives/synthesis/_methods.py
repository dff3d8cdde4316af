"""The methods behind the front: each yields verified-to-be candidates, best guesses first.

A method raises what its solver raises; the front decides whether that ends the request (a method
that was asked for by name) or only this method (``auto``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import (
    Collective,
    Schedule,
    broadcast,
    evaluate,
    named_collective,
    reduce,
)
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.collectives.schedules.schedule import compose_all_reduce
from fivefold.collectives.schedules.throughput import whole_capacities
from fivefold.collectives.schedules.timing import CostModel
from fivefold.collectives.synthesis._flow import all_to_all_flow
from fivefold.collectives.synthesis._instance import bound_of
from fivefold.collectives.synthesis._matching import matching
from fivefold.collectives.synthesis._sketch import Sketch
from fivefold.collectives.synthesis._solver import clock_s
from fivefold.collectives.synthesis._taccl import taccl
from fivefold.collectives.synthesis._trees import spanning_trees
from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError, require_one_of
from fivefold.network.topology import Topology

_TREE_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_FLOW_COLLECTIVES = ("all_to_all", "all_to_allv", "scatter", "gather")
_MOST_WHOLE_CHUNKS = 6  # of a rank, for TACCL
_FINEST_PIPELINE = 16  # times the ranks: chunks of a pipelined all-reduce
_SOME, _MANY = 32, 128  # ranks up to which auto tries TACCL, trees


def _library(request: Request) -> Iterator[Schedule]:
    """Yield every algorithm of the textbooks that fits."""
    for count, collective in request.chunkings(most=8):
        if count > 1 and collective.name not in {"broadcast", "reduce"}:
            return
        for name in available_algorithms(collective):
            try:
                yield build_algorithm(name, collective, request.topology)
            except (ConfigurationError, InfeasibleError, UnsupportedError) as error:
                request.say(f"library, {name}: {error.message}")


def _trees(request: Request) -> Iterator[Schedule]:
    collective = request.collective
    message = f"spanning trees do not do {collective.name}"
    require_one_of(collective.name, _TREE_COLLECTIVES, message)
    # A sum runs the trees of the reversed topology backwards; the packing knows that.
    packing = spanning_trees(request.topology, root=collective.root)
    asked = collective.name if request.free else collective
    yield packing.to_schedule(asked, size_bytes=request.size_bytes)
    if collective.name == "all_reduce":
        yield from _pipelined(request)


def _pipelined(request: Request) -> Iterator[Schedule]:
    """Reduce and broadcast that overlap: with the plain chunks, and with the finest that pay."""
    counts = [count for count, _ in request.chunkings(most=_FINEST_PIPELINE)]
    for root in roots_of(request.topology):
        for count in counts[-2:]:
            if request.left_s() <= 0:
                return
            finer = request.with_chunks(count)
            size_bytes = request.size_bytes
            yield pipelined_all_reduce(finer, request.topology, root=root, size_bytes=size_bytes)


def _matching(request: Request) -> Iterator[Schedule]:
    for _, collective in request.chunkings(most=8):
        started_s = clock_s()
        yield matching(
            collective,
            request.topology,
            size_bytes=request.size_bytes,
            seed=request.seed,
            time_limit_s=request.left_s(0.5),
        )
        if request.left_s() < 2 * (clock_s() - started_s):
            return  # twice the chunks would take longer than is left


def _flow(request: Request) -> Iterator[Schedule]:
    for _, collective in request.chunkings(most=8):
        started_s = clock_s()
        yield all_to_all_flow(
            collective,
            request.topology,
            size_bytes=request.size_bytes,
            time_limit_s=request.left_s(),
        )
        if request.left_s(0.5) < 2 * (clock_s() - started_s):
            return


def _taccl(request: Request) -> Iterator[Schedule]:
    counts = [count for count, _ in request.chunkings(most=2)]
    if request.sketch is not None and request.free:
        counts = [request.sketch.chunks]
    elif len(counts) > 1:
        counts = sorted({*counts, min(_whole_chunks(request), request.finest())})
    for place, count in enumerate(counts):
        result = taccl(
            request.with_chunks(count),
            request.topology,
            request.sketch,
            size_bytes=request.size_bytes,
            time_limit_s=request.left_s(1 / (len(counts) - place)),
            seed=request.seed,
            progress=request.progress,
        )
        yield result.schedule


def _whole_chunks(request: Request) -> int:
    """Return the number of chunks with which the lower bound is a whole number of sends."""
    _, unit, _ = whole_capacities(request.topology)
    free = request.topology.scaled(latency=0.0)
    bound_s = bound_of(request.collective, free, request.size_bytes).seconds
    send_s = float(np.max(request.collective.chunk_bytes(request.size_bytes)) / float(unit))
    sends = Fraction(bound_s / send_s).limit_denominator(_MOST_WHOLE_CHUNKS)
    return sends.denominator if math.isclose(sends, bound_s / send_s) else 1


METHODS: dict[str, Callable[[Request], Iterator[Schedule]]] = {
    "library": _library,
    "trees": _trees,
    "matching": _matching,
    "flow": _flow,
    "taccl": _taccl,
}
"""The methods by name, in the order in which ``auto`` tries them."""

SHARES = {"matching": 0.3}
"""Of the time that is left, how much ``auto`` gives to a method; all of it where not named."""


def in_auto(method: str, request: Request) -> str | None:
    """Return why ``auto`` leaves a method out; None where it tries it."""
    ranks, name = request.topology.num_ranks, request.collective.name
    if method in {"trees", "matching"} and name not in _TREE_COLLECTIVES:
        return f"does not do {name}"
    if method == "flow" and name not in _FLOW_COLLECTIVES:
        return f"does not do {name}"
    most = {"trees": _MANY, "taccl": _SOME}
    if ranks > most.get(method, ranks):
        return f"takes too long beyond {most[method]} ranks"
    return None


_EVERY_ROOT = 8  # ranks up to which every one is tried as the root
_SOME_ROOTS = 3


def pipelined_all_reduce(
    collective: Collective, topology: Topology, *, root: int, size_bytes: float
) -> Schedule:
    """Reduce to a root and broadcast from it, overlapping."""
    if collective.name != "all_reduce":
        raise ConfigurationError(f"{collective.name} is no all-reduce", hint="use method='trees'")
    ranks, chunks = collective.num_ranks, collective.num_chunks
    packing = spanning_trees(topology, root=root)
    collect = packing.to_schedule(reduce(ranks, chunks, root=root), size_bytes=size_bytes)
    spread = packing.to_schedule(broadcast(ranks, chunks, root=root), size_bytes=size_bytes)
    return overlapped(collect, spread, topology, size_bytes=size_bytes)


def overlapped(
    collect: Schedule, spread: Schedule, topology: Topology, *, size_bytes: float
) -> Schedule:
    """Return the second schedule behind the first, each chunk as soon as its sum is complete."""
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
    plain: dict[str, Any] = {"starts_s": None, "ends_s": None, "steps": None, "attributes": {}}
    whole = compose_all_reduce(
        collect.selected(np.argsort(first.starts_s, kind="stable"), **plain),
        spread.selected(np.argsort(later_s, kind="stable"), **plain),
    )
    starts_s = np.concatenate([np.sort(first.starts_s), np.sort(later_s)])
    halves = np.repeat([0, 1], [collect.num_transfers, spread.num_transfers])
    order = np.lexsort((halves, starts_s))
    return whole.selected(order, topology=topology, name="pipelined all-reduce")


def roots_of(topology: Topology) -> Iterator[int]:
    """Return ranks to try as the root: all of few, else those with the widest links each way."""
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


_FINEST = 0.25  # chunks that take less than this share of the latency are not worth their cost


@dataclass(frozen=True, kw_only=True)
class Request:
    """A collective on a topology, for a size, under a deadline."""

    collective: Collective
    free: bool
    topology: Topology
    size_bytes: float
    model: CostModel
    sketch: Sketch | None
    deadline_s: float
    seed: int
    progress: Callable[[str], None] | None

    def left_s(self, share: float = 1.0) -> float:
        """Return a share of the time that is left; 0 where none is."""
        return max((self.deadline_s - clock_s()) * share, 0.0)

    def say(self, line: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(line)

    def with_chunks(self, count: int) -> Collective:
        """Return the collective with ``count`` chunks where there was one."""
        plain = self.collective
        if count == 1:
            return plain
        ranks = plain.num_ranks if plain.name == "all_reduce" else 1
        root = plain.root if plain.root is not None else 0
        return named_collective(plain.name, plain.num_ranks, chunks=count * ranks, root=root)

    def chunkings(self, *, most: int) -> Iterator[tuple[int, Collective]]:
        """Yield the collective in 1, 2, 4, ... chunks where that is free, as far as it can pay."""
        yield 1, self.collective
        if not self.free or self.collective.name not in COLLECTIVES:
            return
        count = 2
        while count <= min(most, self.finest()):
            yield count, self.with_chunks(count)
            count *= 2

    def finest(self) -> int:
        """Return the most chunks that can pay: finer ones are not worth their latencies."""
        chunk_bytes = float(np.max(self.collective.chunk_bytes(self.size_bytes), initial=0.0))
        rates = self.topology.capacities_bytes_per_s
        latencies = self.topology.latencies_s
        if not len(rates) or chunk_bytes <= 0:
            return 1
        latency_s = float(np.median(latencies))
        if latency_s <= 0:
            return 1 << 20
        sending_s = chunk_bytes / float(np.min(rates))
        return int(sending_s / (latency_s * _FINEST))
