"""Which algorithm for which message size: the cost model decides, once per power of two.

Candidates are the library's algorithms, tree packings of the topology, and what was registered,
each in several numbers of parts for the pipeline. The inner backend wins unless another one is
predicted to be faster by a margin. The same job on the same topology chooses the same in every
run, which bitwise equal results need.
"""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.execution._settings import Settings, lowered, registered_algorithms
from fivefold.collectives.lowering import Program
from fivefold.collectives.lowering.machine import run_order
from fivefold.collectives.pricing.messages import LinkClock, load_bound_s, schedule_s, with_work_s
from fivefold.collectives.schedules import Collective, Schedule, broadcast, named_collective
from fivefold.collectives.schedules.schedule import compose_all_reduce
from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.network.topology import Topology

_log = logging.getLogger(__name__)
_MAX_OPERATIONS = 60_000  # a longer program takes seconds to price and to order
_INNER_PIECES = 2  # gloo's ring cuts each share in two
_WORTH_IT = 0.98  # twice the messages must save at least this much
_TREES = "trees"
_ROOTED = "rooted_trees"
_MOST_TREES = 8  # of each root: more trees are more and smaller messages
_TREE_COUNTS = (1, 2, 4)
_STEPS_OF_SMALLEST = 4
_MOST_ROOTS = 16


@dataclass(frozen=True)
class Choice:
    """Algorithm that runs a collective of one size class."""

    label: str  # name of the algorithm; "inner" for the inner backend's own
    program: Program | None  # None for the inner backend
    predicted_s: float
    inner_s: float  # predicted time of the inner backend; 0 where it was not asked for
    size_bytes: int  # size that it was chosen for
    others: dict[str, float] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return what rank 0 tells the others."""
        return zlib.compress(pickle.dumps(self))

    @staticmethod
    def from_bytes(data: bytes) -> Choice:
        """Read it back."""
        found: Choice = pickle.loads(zlib.decompress(data))  # noqa: S301 - from our own rank 0
        return found


def size_class(size_bytes: int) -> int:
    """Return the power of two that stands for a size."""
    return 1 << max(size_bytes - 1, 0).bit_length()


def choose(
    name: str, *, topology: Topology, settings: Settings, size_bytes: int, root: int = 0
) -> Choice:
    """Choose the algorithm for a collective of a size on a topology."""
    asked = settings.algorithm_of(name)
    num_ranks = topology.num_ranks
    inner_s = _inner_s(name, topology, settings, size_bytes=size_bytes, root=root)
    if asked == "inner" or num_ranks == 1 or not topology.is_connected():
        return Choice("inner", None, inner_s, inner_s, size_bytes)
    collective = named_collective(name, num_ranks, root=root)
    times: dict[str, float] = {}
    best: tuple[float, str, Program] | None = None
    for label, program, time_s in _candidates(collective, topology, settings, asked, size_bytes):
        times[label] = min(times.get(label, time_s), time_s)
        if best is None or time_s < best[0]:
            best = (time_s, label, program)
    if best is None:
        if asked == "auto":
            return Choice("inner", None, inner_s, inner_s, size_bytes)
        own = [
            label
            for label, (program, _, _) in registered_algorithms().items()
            if program.collective.name == name
        ]
        names = ["auto", "inner", *library_names(collective), *own]
        raise ConfigurationError(
            f"there is no algorithm {asked!r} for {name} of {num_ranks} ranks",
            hint=f"there are {', '.join(names)}",
        )
    if asked == "auto" and best[0] > inner_s * (1 - settings.margin):
        return Choice("inner", None, inner_s, inner_s, size_bytes, times)
    return Choice(best[1], best[2], best[0], inner_s, size_bytes, times)


def _candidates(
    collective: Collective, topology: Topology, settings: Settings, asked: str, size_bytes: int
) -> Iterator[tuple[str, Program, float]]:
    """Return what fits, each in the number of parts that is fastest, with its predicted time."""
    for name, (program, least, most) in registered_algorithms().items():
        fits = (program.collective.name, program.num_ranks) == (
            collective.name,
            collective.num_ranks,
        ) and program.collective.root == collective.root
        in_range = least <= size_bytes and (most == 0 or size_bytes <= most)
        if fits and (asked == name or (asked == "auto" and in_range)):
            yield name, program, _program_s(program, topology, settings, size_bytes)
    bounded = [
        (load_bound_s(schedule, topology, size_bytes), name, schedule)
        for name, schedule in candidate_schedules(collective, topology, asked)
    ]
    fastest_s = float("inf")
    for bound_s, name, schedule in sorted(bounded, key=lambda item: item[0]):
        if bound_s > fastest_s:  # no number of parts makes it faster than its fullest link
            break
        found = _in_pieces(schedule, topology, settings, size_bytes)
        if found is not None:
            yield name, *found
            fastest_s = min(fastest_s, found[1])


def _program_s(program: Program, topology: Topology, settings: Settings, size_bytes: int) -> float:
    """Return the time that a program's messages take, where no schedule is known."""
    chunk_bytes = float(program.collective.chunk_bytes(size_bytes).max(initial=0.0))
    clock = LinkClock(topology, chunk_bytes, settings.message_s)
    time_s = max((step.end_s for step in run_order(program, arrival_s=clock)), default=0.0)
    handled = [0] * program.num_ranks
    for rank, _, block in program.blocks():
        handled[rank] += sum(step.kind.sends + step.kind.receives for step in block.operations)
    return _with_work_s(time_s, handled, settings)


def _with_work_s(time_s: float, handled: list[int], settings: Settings) -> float:
    work_s, cores = settings.message_work_s, settings.shared_cores or 0
    return with_work_s(time_s, handled, message_work_s=work_s, shared_cores=cores)


def _in_pieces(
    schedule: Schedule, topology: Topology, settings: Settings, size_bytes: int
) -> tuple[Program, float] | None:
    """Double the number of parts as long as that helps."""
    best: tuple[int, float] | None = None
    pieces = 1
    while pieces <= settings.max_pieces:
        chunk_bytes = float(schedule.collective.chunk_bytes(size_bytes).max(initial=0.0))
        too_small = pieces > 1 and chunk_bytes / pieces < settings.min_piece_bytes
        if too_small or 2 * schedule.num_transfers * pieces > _MAX_OPERATIONS:
            break
        finer = schedule.replicated(pieces) if pieces > 1 else schedule
        time_s = _price_s(finer, topology, settings, size_bytes=size_bytes)
        if best is not None and time_s > best[1] * _WORTH_IT:
            break
        best = (pieces, time_s)
        pieces *= 2
    return None if best is None else (lowered(schedule, best[0]), best[1])


def _price_s(
    schedule: Schedule, topology: Topology, settings: Settings, *, size_bytes: int
) -> float:
    if settings.algorithm_of(schedule.collective.name) == "auto":
        count = topology.num_ranks
        time_s = schedule_s(
            schedule,
            topology,
            size_bytes=size_bytes,
            message_s=settings.message_s,
            shared_link_share=settings.shared_link_share,
        )
        handled = np.bincount(schedule.sources, minlength=count)
        handled += np.bincount(schedule.targets, minlength=count)
        return _with_work_s(time_s, handled.tolist(), settings)
    # There is nothing to compare: the plain clock will do, which needs no compiled simulator.
    return _program_s(lowered(schedule), topology, settings, size_bytes)


def _inner_s(
    name: str, topology: Topology, settings: Settings, *, size_bytes: int, root: int
) -> float:
    """Return the predicted time of the inner backend, priced as what gloo does."""
    count = topology.num_ranks
    if count == 1 or not topology.is_connected() or settings.algorithm_of(name) != "auto":
        return 0.0
    if name == "broadcast":  # gloo sends whole buffers down a binomial tree
        schedule = build_algorithm("binomial_tree", broadcast(count, root=root))
    else:
        # gloo: all-reduce and all-gather are rings, reduce-scatter is an all-reduce of its input.
        same = {"reduce_scatter": "all_reduce"}.get(name, name)
        algorithm = "pairwise" if name == "all_to_all" else "ring"
        schedule = build_algorithm(algorithm, named_collective(same, count))
        if same == "all_reduce":
            schedule = schedule.replicated(_INNER_PIECES)
    return schedule_s(schedule, topology, size_bytes=size_bytes, message_s=settings.inner_message_s)


def library_names(collective: Collective) -> list[str]:
    """Return the names of the algorithms that may be asked for."""
    rooted = [_ROOTED] if collective.name == "all_reduce" else []
    return [*available_algorithms(collective), _TREES, *rooted]


def candidate_schedules(
    collective: Collective, topology: Topology, asked: str
) -> Iterator[tuple[str, Schedule]]:
    """Return the schedules for a collective on a topology, by name."""
    for name in library_names(collective):
        if asked not in ("auto", name):
            continue
        try:
            if name == _TREES:
                yield from ((name, found) for found in _tree_schedules(collective, topology))
            elif name == _ROOTED:
                yield from ((name, found) for found in _rooted_schedules(topology))
            else:
                yield name, build_algorithm(name, collective, topology)
        except FivefoldError as error:
            _log.debug("%s does not fit %s: %s", name, topology.name, error)


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
    """Return an all-reduce as a reduction to one rank and a broadcast back down the same trees.

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
