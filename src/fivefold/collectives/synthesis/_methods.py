"""The methods behind the front: each yields verified-to-be candidates, best guesses first.

A method raises what its solver raises; the front decides whether that ends the request (a method
that was asked for by name) or only this method (``auto``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import Collective, bandwidth_bound
from fivefold.collectives.synthesis._flow_schedule import all_to_all_flow
from fivefold.collectives.synthesis._instance import reach
from fivefold.collectives.synthesis._k_synchronous import k_synchronous
from fivefold.collectives.synthesis._logical import (
    all_reduce_halves,
    integer_capacities,
    logical_of,
)
from fivefold.collectives.synthesis._matching import matching
from fivefold.collectives.synthesis._pipelined import pipelined_all_reduce, roots_of
from fivefold.collectives.synthesis._request import Candidate, Request
from fivefold.collectives.synthesis._sketched import derive_sketch, rotation
from fivefold.collectives.synthesis._slotted import SlotModel, slotted
from fivefold.collectives.synthesis._taccl import taccl
from fivefold.collectives.synthesis._trees import spanning_trees
from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError
from fivefold.network.topology import Topology

_TREE_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_FLOW_COLLECTIVES = ("all_to_all", "all_to_allv", "scatter", "gather")
_FINEST_PIPELINE = 16  # times the ranks: chunks of a pipelined all-reduce
_FEW, _SOME, _MANY = 16, 32, 128  # ranks up to which auto tries exact search, TACCL, trees
_SPARE_STEPS, _SPARE_ROUNDS = 4, 6  # beyond the bounds, in the search for the cheapest point


def _library(request: Request) -> Iterator[Candidate]:
    """Every algorithm of the textbooks that fits."""
    for count, collective in request.chunkings(most=8):
        if count > 1 and collective.name not in {"broadcast", "reduce"}:
            return
        for name in available_algorithms(collective):
            try:
                yield build_algorithm(name, collective, request.topology), 0.0
            except (ConfigurationError, InfeasibleError, UnsupportedError) as error:
                request.say(f"library, {name}: {error.message}")


def _trees(request: Request) -> Iterator[Candidate]:
    collective = request.collective
    if collective.name not in _TREE_COLLECTIVES:
        message = f"spanning trees do not do {collective.name}"
        raise ConfigurationError(message, hint=f"they do {', '.join(_TREE_COLLECTIVES)}")
    started_s = time.perf_counter()
    # A sum runs the trees of the reversed topology backwards; the packing knows that.
    packing = spanning_trees(request.topology, root=collective.root)
    asked = collective.name if request.free else collective
    schedule = packing.to_schedule(asked, size_bytes=request.size_bytes)
    yield schedule, time.perf_counter() - started_s
    if collective.name == "all_reduce":
        yield from _pipelined(request)


def _pipelined(request: Request) -> Iterator[Candidate]:
    """Reduce and broadcast that overlap: with the plain chunks, and with the finest that pay."""
    counts = [count for count, _ in request.chunkings(most=_FINEST_PIPELINE)]
    for root in roots_of(request.topology):
        for count in counts[-2:]:
            if request.left_s() <= 0:
                return
            started_s = time.perf_counter()
            schedule = pipelined_all_reduce(
                request.with_chunks(count),
                request.topology,
                root=root,
                size_bytes=request.size_bytes,
            )
            yield schedule, time.perf_counter() - started_s


def _matching(request: Request) -> Iterator[Candidate]:
    for _, collective in request.chunkings(most=8):
        started_s = time.perf_counter()
        schedule = matching(
            collective,
            request.topology,
            size_bytes=request.size_bytes,
            seed=request.seed,
            time_limit_s=request.left_s(0.5),
        )
        yield schedule, time.perf_counter() - started_s
        if request.left_s() < 2 * (time.perf_counter() - started_s):
            return  # twice the chunks would take longer than is left


def _flow(request: Request) -> Iterator[Candidate]:
    for _, collective in request.chunkings(most=8):
        started_s = time.perf_counter()
        schedule = all_to_all_flow(
            collective,
            request.topology,
            size_bytes=request.size_bytes,
            time_limit_s=request.left_s(),
        )
        yield schedule, time.perf_counter() - started_s
        if request.left_s(0.5) < 2 * (time.perf_counter() - started_s):
            return


def _taccl(request: Request) -> Iterator[Candidate]:
    choices = list(request.chunkings(most=2))
    if request.sketch is not None and request.free:
        choices = [(request.sketch.chunks, request.with_chunks(request.sketch.chunks))]
    for place, (_, collective) in enumerate(choices):
        started_s = time.perf_counter()
        result = taccl(
            collective,
            request.topology,
            request.sketch,
            size_bytes=request.size_bytes,
            time_limit_s=request.left_s(1 / (len(choices) - place)),
            seed=request.seed,
            progress=request.progress,
        )
        yield result.schedule, time.perf_counter() - started_s


def _slotted(request: Request) -> Iterator[Candidate]:
    last: InfeasibleError | None = None
    for _, collective in itertools.islice(request.chunkings(most=2), 2):
        for symmetric in (True, False):
            model = SlotModel(symmetries=_symmetries(request, collective) if symmetric else ())
            if symmetric and not model.symmetries:
                continue
            result = slotted(
                collective,
                request.topology,
                size_bytes=request.size_bytes,
                model=model,
                time_limit_s=request.left_s(0.4 if symmetric else 0.8),
                progress=request.progress,
            )
            if result.schedule is not None:
                yield result.schedule, result.solver_s
                break
            last = InfeasibleError(result.reason, hint="allow more time")
    if last is not None:
        raise last


def _symmetries(request: Request, collective: Collective) -> list[NDArray[np.int32]]:
    # Only the symmetries of the sketch are used: the search itself is not restricted by it.
    sketch = derive_sketch(request.topology, collective, size_bytes=request.size_bytes)
    ranks = request.topology.num_ranks
    return [rotation(*pair, num_ranks=ranks) for pair in sketch.symmetry]


def _k_synchronous(request: Request) -> Iterator[Candidate]:
    """The cheapest point S * alpha + R * chunk time: asked in that order, the first is the best."""
    undecided = 0
    for count, steps, rounds in _points(request):
        if request.left_s() <= 0:
            break
        halves = 2 if request.collective.name == "all_reduce" else 1
        result = k_synchronous(
            request.with_chunks(count),
            request.topology,
            steps=steps * halves,
            rounds=rounds * halves,
            time_limit_s=request.left_s(0.3),
            seed=request.seed,
        )
        if result.schedule is not None:
            yield result.schedule, result.solver_s
            return
        undecided += result.status == "unknown"
    message = f"no synchronous schedule was found; {undecided} points stayed undecided"
    raise InfeasibleError(message, hint="allow more time")


def _points(request: Request) -> list[tuple[int, int, int]]:
    """(chunks, steps, rounds) by cost in the synchronous model."""
    collective, topology = request.collective, request.topology
    if collective.name == "all_reduce":
        collective = all_reduce_halves(collective)[0]
    elif collective.reducing:
        collective, topology = collective.inverted(), topology.reversed()
    logical = logical_of(collective, topology)
    hops = reach(logical.instance, np.ones(logical.instance.num_links, np.int64))
    fewest = hops.horizon(logical.instance)
    _, unit_bytes_per_s = integer_capacities(topology)
    least = _least_rounds(collective, topology.scaled(latency=0.0), unit_bytes_per_s)
    chunk_s = logical.chunk_bytes(request.size_bytes) / unit_bytes_per_s
    alpha_s = float(np.max(logical.latencies_s, initial=0.0))
    most = 6 if request.free else 1
    costs = []
    for count in range(1, most + 1):
        first = -(-least * count // 1)
        for steps in range(fewest, fewest + _SPARE_STEPS + 1):
            for rounds in range(max(steps, int(first)), int(first) + steps + _SPARE_ROUNDS):
                cost_s = steps * alpha_s + rounds * chunk_s / count
                costs.append((cost_s, count, steps, rounds))
    return [point for _, *point in sorted(costs)]  # type: ignore[misc]


def _least_rounds(collective: Collective, topology: Topology, unit_bytes_per_s: float) -> Fraction:
    size_bytes = unit_bytes_per_s * collective.buffer_weight
    bound = bandwidth_bound(collective, topology, size_bytes).seconds
    return Fraction(bound * (1 - 1e-9))


METHODS: dict[str, Callable[[Request], Iterator[Candidate]]] = {
    "library": _library,
    "trees": _trees,
    "matching": _matching,
    "flow": _flow,
    "k_synchronous": _k_synchronous,
    "taccl": _taccl,
    "slotted": _slotted,
}
"""The methods by name, in the order in which ``auto`` tries them."""

SHARES = {"matching": 0.3, "k_synchronous": 0.4, "taccl": 0.6}
"""Of the time that is left, how much ``auto`` gives to a method; all of it where not named."""


def in_auto(method: str, request: Request) -> str | None:
    """Why ``auto`` leaves a method out; None where it tries it."""
    ranks, name = request.topology.num_ranks, request.collective.name
    if method in {"trees", "matching"} and name not in _TREE_COLLECTIVES:
        return f"does not do {name}"
    if method == "flow" and name not in _FLOW_COLLECTIVES:
        return f"does not do {name}"
    most = {"trees": _MANY, "taccl": _SOME, "slotted": _FEW, "k_synchronous": _FEW}
    if ranks > most.get(method, ranks):
        return f"takes too long beyond {most[method]} ranks"
    if method == "k_synchronous" and len(set(request.topology.latencies_s.tolist())) > 1:
        return "knows one latency only"
    return None
