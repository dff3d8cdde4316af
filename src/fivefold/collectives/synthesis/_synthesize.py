"""One door to all synthesisers: the best verified schedule within a time limit, with its gap.

Each method yields verified-to-be candidates, best guesses first, and raises what its solver raises;
whether that ends the request (of a method that was asked for by name) or only this method
(``auto``) is decided here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
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
    verify_schedule,
)
from fivefold.collectives.schedules.bounds import Bound
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.collectives.schedules.schedule import compose_all_reduce
from fivefold.collectives.schedules.throughput import whole_capacities
from fivefold.collectives.schedules.timing import MODELS, CostModel, Timing, with_times
from fivefold.collectives.synthesis._flow import all_to_all_flow
from fivefold.collectives.synthesis._instance import bound_of
from fivefold.collectives.synthesis._matching import matching
from fivefold.collectives.synthesis._paths import path_schedules
from fivefold.collectives.synthesis._sketch import Sketch
from fivefold.collectives.synthesis._solver import SLACK_S, clock_s, time_left_s, time_limit
from fivefold.collectives.synthesis._taccl import taccl
from fivefold.collectives.synthesis._trees import spanning_trees
from fivefold.errors import (
    ConfigurationError,
    FivefoldError,
    InfeasibleError,
    StorageError,
    UnsupportedError,
    require_number,
    require_one_of,
    require_whole,
)
from fivefold.files import read_json, write_atomically
from fivefold.network.topology import Topology

_TREE_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_FLOW_COLLECTIVES = ("all_to_all", "all_to_allv", "scatter", "gather")
_MOST_WHOLE_CHUNKS = 6  # of a rank, for TACCL
_FINEST_PIPELINE = 16  # times the ranks: chunks of a pipelined all-reduce
_SOME, _MANY = 32, 128  # ranks up to which auto tries TACCL, trees
_EVERY_ROOT, _SOME_ROOTS = 8, 3  # ranks up to which each is tried as the root; how many beyond
_FEW_TREES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # chunks of a root where the output has limits
_PIECES = 9  # powers of two that are tried as chunks of a pipeline
_FEW_PIECES, _SOME_PIECES = (1, 2, 4), 64  # of a rank's share; ranks up to which all are tried
_WORSE = 2  # numbers of chunks that were no better, after which finer ones are left
_FINEST = 0.25  # chunks that take less than this share of the latency are not worth their cost
_LOG = logging.getLogger(__name__)
_VERSION = 1  # of the cache
_OPTIMAL = 1e-9  # relative: a schedule this close to the bound is optimal


Candidates = Generator[Schedule, float, None]
"""Schedules that a method offers; it is told the time of each."""


def _library(request: Request) -> Candidates:
    """Yield every algorithm of the textbooks that fits, in more and more chunks while that pays."""
    unable: dict[str, str] = {}
    for name in available_algorithms(request.collective):
        last_s, worse = math.inf, 0
        for count in request.library_pieces():
            try:
                schedule = build_algorithm(name, request.cut(count), request.topology)
            except (ConfigurationError, InfeasibleError, UnsupportedError) as error:
                unable[name] = error.message
                break
            found_s = yield schedule
            if schedule.messages is not None and request.finest() >= 1:
                # Large chunks may be worth a latency each: they are passed on sooner.
                found_s = min(found_s, (yield schedule.replaced(messages=None)))
            worse = 0 if found_s < last_s else worse + 1
            last_s = min(last_s, found_s)
            if worse == _WORSE:
                break
    for name, message in unable.items():
        request.say(f"library, {name}: {message}")


def _trees(request: Request) -> Candidates:
    collective = request.collective
    message = f"spanning trees do not do {collective.name}"
    require_one_of(collective.name, _TREE_COLLECTIVES, message)
    asked = collective.name if request.free else collective
    # Where its chunks do not divide among the ranks, an all-reduce still has trees of one root.
    if collective.name != "all_reduce" or not collective.num_chunks % collective.num_ranks:
        # A sum runs the trees of the reversed topology backwards; the packing knows that.
        packing = spanning_trees(request.topology, root=collective.root)
        if request.options.misfit is not None and request.free:  # the best number may be too large
            for count in _FEW_TREES:
                yield packing.to_schedule(
                    collective.name, chunks=count, size_bytes=request.size_bytes
                )
        yield packing.to_schedule(asked, size_bytes=request.size_bytes)
    if collective.name != "all_reduce":
        return
    # Reduce and broadcast that overlap: with the plain chunks, and with the finest that pay.
    counts = [count for count, _ in request.chunkings(most=_FINEST_PIPELINE)]
    for root in roots_of(request.topology):
        for count in counts if request.options.misfit is not None else counts[-2:]:
            if request.left_s() <= 0:
                return
            finer, size_bytes = request.with_chunks(count), request.size_bytes
            yield pipelined_all_reduce(finer, request.topology, root=root, size_bytes=size_bytes)


def _paths(request: Request) -> Candidates:
    collective = request.collective
    if collective.name not in COLLECTIVES and collective.name != "all_to_allv":
        message = f"trees of shortest paths do not do {collective.name}"
        raise ConfigurationError(message, hint="ask another method")
    yield from path_schedules(
        request.cut, request.pieces(), request.topology, request.size_bytes, request.best_s
    )


def _matching(request: Request) -> Candidates:
    for collective in request.finer(1.0):
        yield matching(
            collective,
            request.topology,
            size_bytes=request.size_bytes,
            seed=request.options.seed,
            time_limit_s=request.left_s(0.5),
        )


def _flow(request: Request) -> Candidates:
    for collective in request.finer(0.5):
        yield all_to_all_flow(
            collective,
            request.topology,
            size_bytes=request.size_bytes,
            time_limit_s=request.left_s(),
        )


def _taccl(request: Request) -> Candidates:
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
            seed=request.options.seed,
            progress=request.options.progress,
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


# In the order in which ``auto`` tries them.
_METHODS: dict[str, Callable[[Request], Candidates]] = {
    "library": _library,
    "paths": _paths,
    "trees": _trees,
    "matching": _matching,
    "flow": _flow,
    "taccl": _taccl,
}
_SHARES = {"matching": 0.3}  # of the time left that ``auto`` gives to a method; else all of it


def _left_out(method: str, request: Request) -> str | None:
    """Return why ``auto`` leaves a method out; None where it tries it."""
    ranks, name = request.topology.num_ranks, request.collective.name
    if method in {"trees", "matching"} and name not in _TREE_COLLECTIVES:
        return f"does not do {name}"
    if method == "flow" and name not in _FLOW_COLLECTIVES:
        return f"does not do {name}"
    most = {"paths": _MANY, "trees": _MANY, "taccl": _SOME}
    if method == "paths" and name not in COLLECTIVES and name != "all_to_allv":
        return f"does not do {name}"
    if ranks > most.get(method, ranks):
        return f"takes too long beyond {most[method]} ranks"
    return None


def pipelined_all_reduce(
    collective: Collective, topology: Topology, *, root: int, size_bytes: float
) -> Schedule:
    """Reduce to a root, and broadcast each chunk from it as soon as its sum is complete."""
    ranks, chunks = collective.num_ranks, collective.num_chunks
    packing = spanning_trees(topology, root=root)

    def half(one: Collective) -> Schedule:
        weighed = one.replaced(chunk_weights=collective.chunk_weights)
        return packing.to_schedule(weighed, size_bytes=size_bytes)

    collect = half(reduce(ranks, chunks, root=root))
    spread = half(broadcast(ranks, chunks, root=root))
    first = evaluate(collect, topology, size_bytes=size_bytes)
    second = evaluate(spread, topology, size_bytes=size_bytes)
    done_s, needed_s = np.zeros(chunks), np.full(chunks, np.inf)
    np.maximum.at(done_s, collect.chunks, first.ends_s)
    np.minimum.at(needed_s, spread.chunks, second.starts_s)
    # Equal chunks are alike: what is summed first is spread first. (A reduce is a broadcast run
    # backwards, so that without this the first sum would be the last to be asked for.)
    numbers = np.empty(chunks, dtype=np.int32)
    numbers[np.argsort(needed_s, kind="stable")] = np.argsort(done_s, kind="stable")
    # Each chunk waits for its own sum only; a whole tree is shifted, so its order stays.
    lag_s = np.maximum(done_s[numbers] - needed_s, 0.0)
    starts_s = np.concatenate([first.starts_s, second.starts_s + lag_s[spread.chunks]])
    plain: dict[str, Any] = {"starts_s": None, "ends_s": None, "steps": None, "attributes": {}}
    whole = compose_all_reduce(
        collect.replaced(**plain), spread.replaced(**plain, chunks=numbers[spread.chunks])
    )
    order = np.argsort(starts_s, kind="stable")
    return whole.selected(order, topology=topology, name="pipelined all-reduce")


def roots_of(topology: Topology) -> list[int]:
    """Return ranks to try as the root: all of few, else those with the widest links each way."""
    ends = (topology.link_sources, topology.link_targets)
    sums = [np.bincount(end, topology.capacities_bytes_per_s, topology.num_nodes) for end in ends]
    width = np.minimum(*sums)[topology.rank_nodes]
    count = width.size if width.size <= _EVERY_ROOT else _SOME_ROOTS
    found: list[int] = np.argsort(-width, kind="stable")[:count].tolist()
    return found


@dataclass(frozen=True, kw_only=True)
class Request:
    """A collective on a topology, for a size, under a deadline."""

    collective: Collective
    free: bool
    topology: Topology
    size_bytes: float
    sketch: Sketch | None
    deadline_s: float
    options: SynthesisOptions
    best_s: float = math.inf  # of what is found already

    def left_s(self, share: float = 1.0) -> float:
        """Return a share of the time that is left; 0 where none is."""
        return max((self.deadline_s - clock_s()) * share, 0.0)

    def say(self, line: str) -> None:
        """Report progress."""
        if self.options.progress is not None:
            self.options.progress(line)

    def with_chunks(self, count: int) -> Collective:
        """Return the collective with ``count`` chunks where there was one."""
        plain = self.collective
        if count == 1:
            return plain
        ranks = plain.num_ranks if plain.name == "all_reduce" else 1
        root = plain.root if plain.root is not None else 0
        return named_collective(plain.name, plain.num_ranks, chunks=count * ranks, root=root)

    def cut(self, count: int) -> Collective:
        """Return the collective in ``count`` chunks, for each rank where ranks own chunks."""
        plain = self.collective
        if not self.free:
            return plain
        root = plain.root if plain.root is not None else 0
        return named_collective(plain.name, plain.num_ranks, chunks=count, root=root)

    def pieces(self) -> list[int]:
        """Return numbers of chunks of a pipeline down a tree: 1, 2, 4, ... as far as it can pay."""
        if not self.free:
            return [1]
        one_source = self.collective.name in {"all_reduce", "broadcast", "reduce"}
        finest = self.finest(self.size_bytes) if one_source else 1
        return [1 << power for power in range(_PIECES) if power == 0 or 1 << power <= finest]

    def library_pieces(self) -> list[int]:
        """Return numbers of chunks for the library; those of an all-reduce fit its ranks, too.

        Few chunks more are dealt evenly, such as to both directions of a ring; joined, they cost
        nothing.
        """
        name, ranks = self.collective.name, self.collective.num_ranks
        if not self.free:
            return [1]
        few = _FEW_PIECES if ranks <= _SOME_PIECES else _FEW_PIECES[:1]
        if name == "all_reduce":
            whole = {ranks * count for count in few}
            return sorted({*self.pieces(), *whole, 1 << (ranks.bit_length() - 1)})
        return sorted({*self.pieces(), *few})

    def chunkings(self, *, most: int) -> Iterator[tuple[int, Collective]]:
        """Yield the collective in 1, 2, 4, ... chunks where that is free, as far as it can pay."""
        yield 1, self.collective
        if not self.free or self.collective.name not in COLLECTIVES:
            return
        count = 2
        while count <= min(most, self.finest()):
            yield count, self.with_chunks(count)
            count *= 2

    def finer(self, share: float) -> Iterator[Collective]:
        """Yield chunkings while a share of the time is enough for one of twice the chunks."""
        few = self.few_pieces()
        for collective in (*map(self.cut, few), *(one for _, one in self.chunkings(most=8))):
            started_s = clock_s()
            yield collective
            if self.left_s(share) < 2 * (clock_s() - started_s):
                return

    def few_pieces(self) -> list[int]:
        """Return numbers of chunks of an all-reduce below one for each rank."""
        if not self.free or self.collective.name != "all_reduce":
            return []
        powers = [1 << power for power in range(self.collective.num_ranks.bit_length())]
        return sorted(
            {n for one in powers for n in (one, 3 * one) if n < self.collective.num_ranks}
        )

    def finest(self, chunk_bytes: float | None = None) -> int:
        """Return the most parts of a chunk that are worth their latencies."""
        if chunk_bytes is None:
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


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions:
    """Options of a search.

    Args:
        model: Cost model by which schedules are compared and timed.
        seed: Seed of everything random.
        root: Root of a collective that is given by its name.
        gap: The search ends at the first schedule that is at most this share above the bound.
        cache: Folder of known answers; None: none. A known answer is taken if it is optimal or
            was searched for at least as long.
        progress: Called with one line per step of the work.
        misfit: Says why a verified schedule that is better than any that fitted does not fit, such
            as the program that is to run it; None where it does. None for no such question.
        misfit_name: Name of that question, for the cache.

    Raises:
        ConfigurationError: The model is unknown, or a number is negative.

    Examples:
        >>> SynthesisOptions(seed=7).model
        'serial'
    """

    model: CostModel = "serial"
    seed: int = 0
    root: int = 0
    gap: float = 0.0
    cache: Path | None = None
    progress: Callable[[str], None] | None = None
    misfit: Callable[[Schedule], str | None] | None = None
    misfit_name: str = ""

    def __post_init__(self) -> None:
        known = [model for model in MODELS if model != "synchronous"]
        require_one_of(self.model, known, f"cost model {self.model!r} is unknown")
        require_whole("seed", self.seed, least=0)
        require_whole("root", self.root, least=0)
        require_number("gap", self.gap, hint="0.01 is 1 % above the bound")


@dataclass(frozen=True)
class Attempt:
    """Result of one method."""

    method: str
    time_s: float | None
    spent_s: float
    note: str


@dataclass(frozen=True)
class Synthesis:
    """The best schedule that was found, and how good it is.

    Args:
        schedule: The verified schedule, with times in the cost model.
        time_s: Its time.
        bound: The best lower bound, with its certificate.
        method: The method that found it.
        solver_s: Seconds that the method took for it.
        log: What every method came to.
        cached: Whether it was read from the cache.

    Examples:
        >>> from fivefold.network.topology import ring
        >>> found = synthesize("all_gather", ring(4, bandwidth=1e9, latency=0), size_bytes=4e6)
        >>> found.optimal, found.gap
        (True, 0.0)
    """

    schedule: Schedule
    time_s: float
    bound: Bound
    method: str
    solver_s: float
    log: tuple[Attempt, ...]
    cached: bool = False

    @property
    def gap(self) -> float:
        """Time over bound, less one; 0 is optimal, infinite where the bound is 0."""
        if self.time_s <= self.bound.seconds * (1 + _OPTIMAL):
            return 0.0
        return self.time_s / self.bound.seconds - 1 if self.bound.seconds > 0 else float("inf")

    @property
    def optimal(self) -> bool:
        """Return whether no schedule can be faster: its time meets the bound."""
        return self.gap == 0.0


def synthesize(
    collective: Collective | str,
    topology: Topology,
    *,
    size_bytes: float,
    method: str = "auto",
    sketch: Sketch | None = None,
    time_limit_s: float = 60.0,
    options: SynthesisOptions | None = None,
) -> Synthesis:
    """Find a fast schedule for a collective on a topology.

    With ``method="auto"`` the library, shortest paths, spanning trees, matching, flows and TACCL
    are tried, as far as they fit the collective and the number of ranks, until one meets
    the lower bound or time is over. Every schedule is verified before it counts.

    Args:
        collective: A collective with its chunks, or its name (its root is in the options) to
            have the number of chunks chosen too.
        topology: Where.
        size_bytes: Size of the collective, as ``Collective.buffer_weight`` counts it.
        method: "auto", "library", "paths", "trees", "matching", "flow" or "taccl".
        sketch: For TACCL; given with "auto" only TACCL is asked.
        time_limit_s: Limit of the whole search, with the building of models. Where there is no
            schedule by then, or for 0, the search has two seconds more. Verifying and pricing
            a schedule (a second or two per million transfers) is not interrupted.
        options: Cost model, root, seed, cache, progress.

    Returns:
        The best schedule with its gap to the lower bound.

    Raises:
        ConfigurationError: The method is unknown or does not fit, or a number is out of range.
        InfeasibleError: Some rank cannot be reached, or nothing was found in time.

    Examples:
        >>> from fivefold.network.topology import named_topology
        >>> found = synthesize("broadcast", named_topology("dgx1"), size_bytes=1e3,
        ...                    method="library")
        >>> found.method, found.time_s >= found.bound.seconds
        ('library', True)
    """
    chosen = SynthesisOptions() if options is None else options
    require_one_of(method, ("auto", *_METHODS), f"method {method!r} is unknown")
    require_number("time_limit_s", time_limit_s, hint="0 asks the library only")
    asked = _asked(collective, topology.num_ranks, chosen.root)
    asked.chunk_bytes(size_bytes)  # refuses what is no size
    request = Request(
        collective=asked,
        free=isinstance(collective, str),
        topology=topology,
        size_bytes=float(size_bytes),
        sketch=sketch,
        deadline_s=clock_s() + time_limit_s,
        options=chosen,
    )
    bound = bound_of(request.collective, topology, request.size_bytes, model=chosen.model)
    method = "taccl" if sketch is not None and method == "auto" else method
    search = _Search(request, method, bound, enough=chosen.gap)
    return search.cached(chosen.cache, time_limit_s)


def _asked(collective: Collective | str, num_ranks: int, root: int) -> Collective:
    if isinstance(collective, Collective):
        return collective
    found = named_collective(collective, num_ranks, root=root)
    if root != 0 and found.root is None:
        raise ConfigurationError(
            f"{found.name} has no root; got root={root}",
            hint="broadcast, reduce, scatter and gather have one",
        )
    return found


class _Search:
    """Asks the methods one after another and keeps the best verified schedule."""

    def __init__(self, request: Request, method: str, bound: Bound, *, enough: float) -> None:
        self.request, self.method, self.bound = request, method, bound
        self.enough_s = bound.seconds * (1 + max(enough, _OPTIMAL))
        self.best: Synthesis | None = None
        self.log: list[Attempt] = []
        self.misfit: str | None = None  # of the last that was left out for it

    def cached(self, folder: Path | None, time_limit_s: float) -> Synthesis:
        """Return the answer from the cache, else from the search, which is then stored."""
        if folder is None:
            return self.run()
        path = folder / f"{self._key()}.json"
        known = self._known(path, time_limit_s)
        if known is not None:
            return known
        found = self.run()
        notes = {"method": found.method, "solver_s": found.solver_s, "time_limit_s": time_limit_s}
        record = {"version": _VERSION, "schedule": found.schedule.to_json(), "notes": notes}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(record))
        except OSError as error:
            message = f"the cache {folder} cannot be written: {error}"
            raise StorageError(message, hint="give another cache folder, or cache=None") from error
        return found

    def _known(self, path: Path, time_limit_s: float) -> Synthesis | None:
        """Return the stored answer, if it answers this question as well as a new search may."""
        try:
            record = read_json(path)
            if record["version"] != _VERSION:
                return None
            schedule, notes = Schedule.from_json(record["schedule"]), record["notes"]
            timing = self._timing(schedule)
            found = self._result(schedule, timing, notes["method"], notes["solver_s"], cached=True)
            searched_s = float(notes["time_limit_s"])
            asks = self.request.options.misfit
            if asks is not None and asks(found.schedule) is not None:
                return None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, FivefoldError) as error:
            _LOG.warning("ignoring the cache file %s: %s", path, error)
            return None
        return found if found.time_s <= self.enough_s or searched_s >= time_limit_s else None

    def _key(self) -> str:
        request = self.request
        parts = {
            "version": _VERSION,
            "topology": request.topology.fingerprint,
            "collective": request.collective.fingerprint,
            "free": request.free,
            "size_bytes": request.size_bytes,
            "method": self.method,
            "model": request.options.model,
            "seed": request.options.seed,
            "misfit_name": request.options.misfit_name,
            "sketch": request.sketch.to_toml() if request.sketch is not None else None,
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def run(self) -> Synthesis:
        """Ask the methods."""
        names = list(_METHODS) if self.method == "auto" else [self.method]
        for name in names:
            left_out = _left_out(name, self.request) if self.method == "auto" else None
            if left_out is None and self.best is not None and self.request.left_s() <= 0:
                left_out = "no time left"
            if left_out is not None:
                self.log.append(Attempt(name, None, 0.0, left_out))
                continue
            self._ask(name)
            if self.best is not None and self.best.time_s <= self.enough_s:
                break
        if self.best is None:
            reasons = "; ".join(f"{attempt.method}: {attempt.note}" for attempt in self.log)
            message = f"nothing does {self.request.collective.name} on {self.request.topology.name}"
            hint = "allow more time or another method"
            if self.misfit is not None:
                hint = "ask for fewer chunks, other limits, or a file without them (.json)"
            raise InfeasibleError(f"{message}: {reasons}", hint=hint)
        return replace(self.best, log=tuple(self.log))

    def _ask(self, name: str) -> None:
        started_s = time.perf_counter()
        best_s, note = None, "nothing fits"
        try:
            best = math.inf if self.best is None else self.best.time_s
            share = replace(self.request, best_s=best)
            if self.method == "auto" and name in _SHARES:
                ends_s = clock_s() + share.left_s(_SHARES[name])
                share = replace(share, deadline_s=ends_s)
            with time_limit(share.left_s(), slack_s=SLACK_S):
                begun_s = started_s
                candidates = _METHODS[name](share)
                schedule = next(candidates, None)
                while schedule is not None:
                    found_s, misfit = self._offer(schedule, name, time.perf_counter() - begun_s)
                    begun_s = time.perf_counter()
                    if misfit is not None:
                        self.misfit = misfit
                        note = note if best_s is not None else f"{schedule.name}: {misfit}"
                    elif best_s is None or found_s < best_s:
                        best_s, note = found_s, schedule.name
                    enough = misfit is None and found_s <= self.enough_s
                    if enough or time_left_s() <= 0:
                        break
                    try:
                        schedule = candidates.send(found_s)
                    except StopIteration:
                        break
        except (ConfigurationError, InfeasibleError, UnsupportedError) as error:
            if best_s is None:
                note = error.message
                if self.method != "auto":
                    raise
        spent_s = time.perf_counter() - started_s
        self.log.append(Attempt(name, best_s, spent_s, note))
        self.request.say(f"{name}: {note}" + ("" if best_s is None else f", {best_s:.6g} s"))

    def _offer(self, schedule: Schedule, method: str, solver_s: float) -> tuple[float, str | None]:
        """Return a schedule's time, and why it does not fit; verify and keep it if it is best."""
        timing, asks = self._timing(schedule), self.request.options.misfit
        if self.best is not None and timing.total_s >= self.best.time_s:
            return timing.total_s, None
        found = self._result(schedule, timing, method, solver_s)
        misfit = None if asks is None else asks(found.schedule)
        if misfit is None:
            self.best = found
        return timing.total_s, misfit

    def _timing(self, schedule: Schedule) -> Timing:
        size_bytes, model = self.request.size_bytes, self.request.options.model
        return evaluate(schedule, self.request.topology, size_bytes=size_bytes, model=model)

    def _result(
        self,
        schedule: Schedule,
        timing: Timing,
        method: str,
        solver_s: float,
        *,
        cached: bool = False,
    ) -> Synthesis:
        """Return a verified schedule with its times."""
        request, made, asked = self.request, schedule.collective, self.request.collective
        same_kind = (made.name, made.num_ranks, made.root) == (
            asked.name,
            asked.num_ranks,
            asked.root,
        )
        fits = same_kind if request.free else made == asked  # where free, chunks may differ
        if not fits:
            message = f"{method} made another {made.name} than was asked for"
            raise ConfigurationError(message, hint="ask another method")
        verify_schedule(schedule, topology=request.topology)
        timed = with_times(schedule, timing).replaced(topology=request.topology)
        return Synthesis(timed, timing.total_s, self.bound, method, solver_s, (), cached)
