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
from fivefold.collectives.pricing.phases import ranks_by_host
from fivefold.collectives.pricing.software import Protocol, Software
from fivefold.collectives.schedules import (
    Collective,
    Schedule,
    broadcast,
    evaluate,
    named_collective,
)
from fivefold.collectives.schedules.messages import messages_of
from fivefold.collectives.schedules.schedule import compose_all_reduce
from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.flows.paths import default_paths
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
        # Not as MSCCL XML: that is twice as long, and refuses programs that need longer queues
        # than MSCCL's. The store is trusted as torch's own object collectives trust it.
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
    asked, prices = settings.algorithm_of(name), _Prices(topology, settings, size_bytes)
    joined = topology.num_ranks > 1 and topology.is_connected()
    inner_s = prices.of_inner_s(name, root) if joined and asked == "auto" else 0.0
    inner = Choice("inner", None, inner_s, inner_s, size_bytes)
    if asked == "inner" or not joined:
        return inner
    collective = named_collective(name, topology.num_ranks, root=root)
    times: dict[str, float] = {}
    best: tuple[float, str, Program] | None = None
    for label, program, time_s in _candidates(collective, prices, asked):
        times[label] = min(times.get(label, time_s), time_s)
        if best is None or time_s < best[0]:
            best = (time_s, label, program)
    if asked == "auto" and (best is None or best[0] > inner_s * (1 - settings.margin)):
        return replace(inner, others=times)
    if best is None:
        own = [
            label
            for label, (program, _, _) in registered_algorithms().items()
            if program.collective.name == name
        ]
        names = ["auto", "inner", *library_names(collective), *own]
        raise ConfigurationError(
            f"there is no algorithm {asked!r} for {name} of {topology.num_ranks} ranks",
            hint=f"there are {', '.join(names)}",
        )
    return Choice(best[1], best[2], best[0], inner_s, size_bytes, times)


def _candidates(
    collective: Collective, prices: _Prices, asked: str
) -> Iterator[tuple[str, Program, float]]:
    """Return what fits, each in the number of parts that is fastest, with its predicted time."""
    wanted = collective.name, collective.num_ranks, collective.root
    for name, (program, least, most) in registered_algorithms().items():
        own = program.collective
        in_range = least <= prices.size_bytes and (most == 0 or prices.size_bytes <= most)
        if (own.name, own.num_ranks, own.root) == wanted and (
            asked == name or (asked == "auto" and in_range)
        ):
            yield name, program, prices.of_program_s(program)
    bounded = [
        (_load_bound_s(schedule, prices.topology, prices.size_bytes), name, schedule)
        for name, schedule in candidate_schedules(collective, prices.topology, asked)
    ]
    fastest_s = float("inf")
    for bound_s, name, schedule in sorted(bounded, key=lambda item: item[0]):
        if bound_s > fastest_s:  # no number of parts makes it faster than its fullest link
            break
        found = prices.in_pieces(schedule)
        if found is not None:
            yield name, *found
            fastest_s = min(fastest_s, found[1])


@dataclass(frozen=True)
class _Prices:
    """Predicted times of collectives of one size on one topology."""

    topology: Topology
    settings: Settings
    size_bytes: int

    def of_program_s(self, program: Program) -> float:
        """Return the time that a program's messages take, where no schedule is known."""
        clock = clock_of(program, self.topology, self.settings, self.size_bytes)
        time_s = max((step.end_s for step in run_order(program, arrival_s=clock)), default=0.0)
        handled = [0] * program.num_ranks
        for rank, _, block in program.blocks():
            handled[rank] += sum(step.kind.sends + step.kind.receives for step in block.operations)
        return self._with_work_s(time_s, handled)

    def _with_work_s(self, time_s: float, handled: list[int]) -> float:
        """Return a time with the processors' work for the messages that each rank handles.

        Processors of their own work while the links carry, so they count only where they need
        longer; cores that all ranks share, as in the lab, hold up what the links wait for.
        """
        work_s, cores = self.settings.message_work_s / 2, self.settings.shared_cores
        if cores:
            return time_s + sum(handled) * work_s / cores
        return max(time_s, max(handled, default=0) * work_s)

    def in_pieces(self, schedule: Schedule) -> tuple[Program, float] | None:
        """Double the number of parts as long as that helps."""
        best: tuple[int, float] | None = None
        chunk_bytes = float(schedule.collective.chunk_bytes(self.size_bytes).max(initial=0.0))
        pieces = 1
        while pieces <= self.settings.max_pieces:
            too_small = pieces > 1 and chunk_bytes / pieces < self.settings.min_piece_bytes
            if too_small or 2 * schedule.num_transfers * pieces > _MAX_OPERATIONS:
                break
            time_s = self._of_schedule_s(schedule.replicated(pieces, apart=True))
            if best is not None and time_s > best[1] * _WORTH_IT:
                break
            best = (pieces, time_s)
            pieces *= 2
        return None if best is None else (lowered(schedule, best[0]), best[1])

    def _of_schedule_s(self, schedule: Schedule) -> float:
        if self.settings.algorithm_of(schedule.collective.name) != "auto":
            # There is nothing to compare: the plain clock will do, which compiles no simulator.
            return self.of_program_s(lowered(schedule))
        if self.settings.software is not None:
            return self._of_library_s(schedule, self.settings.software)
        time_s = _schedule_s(
            schedule,
            self.topology,
            size_bytes=self.size_bytes,
            message_s=self.settings.message_s,
            shared_link_share=self.settings.shared_link_share,
        )
        leaders = np.unique(messages_of(schedule))
        ends = np.concatenate([schedule.sources[leaders], schedule.targets[leaders]])
        handled = np.bincount(ends, minlength=self.topology.num_ranks)
        return self._with_work_s(time_s, handled.tolist())

    def _of_library_s(self, schedule: Schedule, software: Software) -> float:
        """Return the time of a schedule by a library's best protocol for it."""
        bound_s = _load_bound_s(schedule, self.topology, self.size_bytes)
        hosts = [self.topology.host_of(rank) for rank in range(self.topology.num_ranks)]
        ends = zip(schedule.sources.tolist(), schedule.targets.tolist(), strict=True)
        across = any(hosts[a] is None or hosts[a] != hosts[b] for a, b in ends)

        def roughly_s(one: Protocol) -> float:
            step_s = one.across_s if across else one.inside_s
            return one.base_s + schedule.num_steps * step_s + bound_s / one.share

        best = min(software.protocols, key=roughly_s)
        network = best.on(self.topology)
        return best.base_s + _schedule_s(schedule, network, size_bytes=self.size_bytes)

    def of_inner_s(self, name: str, root: int) -> float:
        """Return the predicted time of the inner backend, priced as what it does."""
        software = self.settings.software
        if software is not None and name != "broadcast":
            sizes = {
                len(ranks) for ranks in ranks_by_host(self.topology, range(self.topology.num_ranks))
            }
            if len(sizes) == 1:
                size_bytes = self.size_bytes
                return software.default_s(self.topology, name, size_bytes=size_bytes)
        count = self.topology.num_ranks
        if name == "broadcast":  # gloo sends whole buffers down a binomial tree
            schedule = build_algorithm("binomial_tree", broadcast(count, root=root))
        else:
            # gloo: all-reduce and all-gather are rings, reduce-scatter an all-reduce of its input.
            same = "all_reduce" if name == "reduce_scatter" else name
            algorithm = "pairwise" if name == "all_to_all" else "ring"
            schedule = build_algorithm(algorithm, named_collective(same, count))
            if same == "all_reduce":
                schedule = schedule.replicated(_INNER_PIECES, apart=True)
        if software is not None:
            return self._of_library_s(schedule, software)
        message_s = self.settings.inner_message_s
        return _schedule_s(schedule, self.topology, size_bytes=self.size_bytes, message_s=message_s)


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


@dataclass
class LinkClock:
    """When messages arrive, given those sent before; an ``arrival_s`` of :func:`run_order`.

    Those between the same two ranks follow one another; on a link that several pairs use at that
    moment each gets an equal share.
    """

    topology: Topology  # its ranks are the program's
    chunk_bytes: float  # of one chunk slot
    message_s: float  # software cost of one message
    _free_s: dict[tuple[int, int], float] = field(default_factory=dict)
    _users: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    _routes: dict[tuple[int, int], tuple[list[int], float]] = field(default_factory=dict)

    def __call__(self, sent_s: float, source: int, target: int, count: int) -> float:
        """Return the arrival of a message; see :func:`run_order`."""
        pair = (source, target)
        if pair not in self._routes:
            links = [int(link) for link in self.topology.shortest_route(*pair)]
            self._routes[pair] = (
                links,
                float(sum(self.topology.latencies_s[link] for link in links)),
            )
        route, latency_s = self._routes[pair]
        start_s = max(sent_s, self._free_s.get(pair, 0.0))
        size_bytes = count * self.chunk_bytes
        longest_s = 0.0
        for link in route:
            users = self._users.setdefault(link, set())
            users.add(pair)
            busy = {other for other in users if other == pair or self._free_s[other] > sent_s}
            self._users[link] = busy
            rate = float(self.topology.capacities_bytes_per_s[link]) / len(busy)
            longest_s = max(longest_s, size_bytes / rate)
        self._free_s[pair] = start_s + longest_s
        return start_s + longest_s + latency_s + self.message_s


def clock_of(
    program: Program, topology: Topology, settings: Settings, size_bytes: int
) -> LinkClock:
    """Return the clock by which the messages of a collective of a size arrive."""
    chunk_bytes = float(program.collective.chunk_bytes(size_bytes).max(initial=0.0))
    return LinkClock(topology, chunk_bytes, settings.message_s)


def _load_bound_s(schedule: Schedule, topology: Topology, size_bytes: float) -> float:
    """Return the time of a schedule's fullest link: no order and no pipeline makes it faster."""
    sizes = np.asarray(schedule.collective.chunk_bytes(size_bytes))[schedule.chunks]
    loads_s = _on_links(schedule, topology, sizes) / topology.capacities_bytes_per_s
    return float(loads_s.max(initial=0.0))


def _on_links(schedule: Schedule, topology: Topology, sizes: np.ndarray | None) -> np.ndarray:
    """Return the bytes on each link, or for None the pairs of ranks that use it."""
    count = topology.num_ranks
    keys = schedule.sources.astype(np.int64) * count + schedule.targets
    pairs, number = np.unique(keys, return_inverse=True)
    sent = np.ones(pairs.size) if sizes is None else np.bincount(number, sizes, pairs.size)
    paths = default_paths(topology, pairs // count, pairs % count)
    found = np.bincount(paths.links, np.repeat(sent, np.diff(paths.offsets)), topology.num_links)
    return found.astype(np.float64)


def _schedule_s(
    schedule: Schedule,
    topology: Topology,
    *,
    size_bytes: float,
    message_s: float = 0.0,
    shared_link_share: float = 1.0,
) -> float:
    """Return the time of a schedule in the fluid model."""
    bare = schedule.replaced(topology=None, route_offsets=None, route_links=None)
    ranks = {node.name for node in topology.nodes if node.is_rank}
    if message_s:  # on every link that leaves a rank
        topology = topology.with_links(
            replace(link, latency_s=link.latency_s + message_s) if link.source in ranks else link
            for link in topology.links
        )
    if shared_link_share < 1:  # where several connections meet
        shared = _on_links(bare, topology, None) > 1
        topology = topology.with_links(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * shared_link_share)
            if shared[number]
            else link
            for number, link in enumerate(topology.links)
        )
    return float(evaluate(bare, topology, size_bytes=size_bytes, model="fluid").total_s)
