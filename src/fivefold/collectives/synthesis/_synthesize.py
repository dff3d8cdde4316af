"""One door to all synthesisers: the best verified schedule within a time limit, with its gap."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.collectives.schedules import (
    Collective,
    Schedule,
    evaluate,
    named_collective,
    verify_schedule,
)
from fivefold.collectives.schedules.bounds import Bound
from fivefold.collectives.schedules.timing import MODELS, CostModel, with_times
from fivefold.collectives.synthesis._instance import bound_of
from fivefold.collectives.synthesis._methods import METHODS, SHARES, Request, in_auto
from fivefold.collectives.synthesis._sketch import Sketch
from fivefold.collectives.synthesis._solver import SLACK_S, clock_s, time_left_s, time_limit
from fivefold.errors import (
    ConfigurationError,
    DataError,
    FivefoldError,
    InfeasibleError,
    StorageError,
    UnsupportedError,
    require_one_of,
)
from fivefold.files import read_json, write_atomically
from fivefold.network.topology import Topology

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of the cache
_OPTIMAL = 1e-9  # relative: a schedule this close to the bound is optimal


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

    Raises:
        ConfigurationError: The model is unknown, or the gap is negative.

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

    def __post_init__(self) -> None:
        known = [model for model in MODELS if model != "synchronous"]
        require_one_of(self.model, known, f"cost model {self.model!r} is unknown")
        if not self.gap >= 0:
            raise ConfigurationError(
                f"gap must not be negative; got {self.gap}", hint="0.01 is 1 % above the bound"
            )


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

    With ``method="auto"`` the library, spanning trees, matching, flows and TACCL
    are tried, as far as they fit the collective and the number of ranks, until one meets
    the lower bound or time is over. Every schedule is verified before it counts.

    Args:
        collective: A collective with its chunks, or its name (its root is in the options) to
            have the number of chunks chosen too.
        topology: Where.
        size_bytes: Size of the collective, as ``Collective.buffer_weight`` counts it.
        method: "auto", "library", "trees", "matching", "flow" or "taccl".
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
    _check(method, size_bytes, time_limit_s)
    request = Request(
        collective=_asked(collective, topology.num_ranks, chosen.root),
        free=isinstance(collective, str),
        topology=topology,
        size_bytes=float(size_bytes),
        model=chosen.model,
        sketch=sketch,
        deadline_s=clock_s() + time_limit_s,
        seed=chosen.seed,
        progress=chosen.progress,
    )
    bound = bound_of(request.collective, topology, request.size_bytes)
    method = "taccl" if sketch is not None and method == "auto" else method
    search = _Search(request, method, bound, enough=chosen.gap)
    return search.cached(chosen.cache, time_limit_s)


def _check(method: str, size_bytes: float, time_limit_s: float) -> None:
    require_one_of(method, ("auto", *METHODS), f"method {method!r} is unknown")
    if not 0 <= size_bytes < float("inf"):
        raise ConfigurationError(
            f"size_bytes must be a size; got {size_bytes}", hint="a finite number, 0 or more"
        )
    if not 0 <= time_limit_s < float("inf"):
        raise ConfigurationError(
            f"time_limit_s must not be negative; got {time_limit_s}",
            hint="seconds; 0 asks the library only",
        )


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
        self.best: tuple[Schedule, float, str, float] | None = None
        self.log: list[Attempt] = []

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
            if not self._answers(schedule.collective):
                message = "it does another collective"
                raise DataError(message)
            found = self._result(schedule, notes["method"], notes["solver_s"], cached=True)
            searched_s = float(notes["time_limit_s"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, FivefoldError) as error:
            _LOG.warning("ignoring the cache file %s: %s", path, error)
            return None
        return found if found.time_s <= self.enough_s or searched_s >= time_limit_s else None

    def _answers(self, collective: Collective) -> bool:
        asked = self.request.collective
        if not self.request.free:
            return collective == asked
        alike = (collective.name, collective.num_ranks, collective.root)
        return alike == (asked.name, asked.num_ranks, asked.root)

    def _key(self) -> str:
        request = self.request
        parts = {
            "version": _VERSION,
            "topology": request.topology.fingerprint,
            "collective": request.collective.fingerprint,
            "free": request.free,
            "size_bytes": request.size_bytes,
            "method": self.method,
            "model": request.model,
            "seed": request.seed,
            "sketch": request.sketch.to_toml() if request.sketch is not None else None,
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def run(self) -> Synthesis:
        """Ask the methods."""
        names = list(METHODS) if self.method == "auto" else [self.method]
        for name in names:
            left_out = in_auto(name, self.request) if self.method == "auto" else None
            late = self.best is not None and self.request.left_s() <= 0
            if left_out is not None or late:
                self.log.append(Attempt(name, None, 0.0, left_out or "no time left"))
                continue
            self._ask(name)
            if self.best is not None and self.best[1] <= self.enough_s:
                break
        if self.best is None:
            reasons = "; ".join(f"{attempt.method}: {attempt.note}" for attempt in self.log)
            message = f"nothing does {self.request.collective.name} on {self.request.topology.name}"
            raise InfeasibleError(f"{message}: {reasons}", hint="allow more time or another method")
        schedule, time_s, name, solver_s = self.best
        return Synthesis(schedule, time_s, self.bound, name, solver_s, tuple(self.log))

    def _ask(self, name: str) -> None:
        started_s = time.perf_counter()
        best_s, note = None, "nothing fits"
        try:
            share = self._share(name)
            with time_limit(share.left_s(), slack_s=SLACK_S):
                begun_s = started_s
                for schedule in METHODS[name](share):
                    time_s = self._consider(schedule, name, time.perf_counter() - begun_s)
                    begun_s = time.perf_counter()
                    if best_s is None or time_s < best_s:
                        best_s, note = time_s, schedule.name
                    if time_s <= self.enough_s or time_left_s() <= 0:
                        break
        except (ConfigurationError, InfeasibleError, UnsupportedError) as error:
            if best_s is None:
                note = error.message
                if self.method != "auto":
                    raise
        spent_s = time.perf_counter() - started_s
        self.log.append(Attempt(name, best_s, spent_s, note))
        self.request.say(f"{name}: {note}" + ("" if best_s is None else f", {best_s:.6g} s"))

    def _share(self, name: str) -> Request:
        """Return the request with the time that a method may take."""
        if self.method != "auto" or name not in SHARES:
            return self.request
        ends_s = clock_s() + self.request.left_s(SHARES[name])
        return replace(self.request, deadline_s=ends_s)

    def _consider(self, schedule: Schedule, name: str, solver_s: float) -> float:
        found = self._result(schedule, name, solver_s, cached=False)
        if self.best is None or found.time_s < self.best[1]:
            self.best = (found.schedule, found.time_s, name, solver_s)
        return found.time_s

    def _result(
        self, schedule: Schedule, method: str, solver_s: float, *, cached: bool
    ) -> Synthesis:
        request = self.request
        verify_schedule(schedule, topology=request.topology)
        timing = evaluate(
            schedule, request.topology, size_bytes=request.size_bytes, model=request.model
        )
        timed = with_times(schedule, timing).replaced(topology=request.topology)
        return Synthesis(timed, timing.total_s, self.bound, method, solver_s, (), cached)
