"""Exact synthesis in time slots, for links of unequal speed and latency.

A slot is the time of one chunk on the fastest link; a link of half its rate is busy for two.
The search asks for T slots, upwards from a lower bound, so that the first answer is optimal in
slots; where a length stays undecided the best schedule is returned with the gap to the bound.

References: the epochs of TE-CCL, arXiv 2305.13479, section 3; ours rounds every latency up and
drops none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.collectives.exact import (
    ExactResult,
    Refuted,
    Undecided,
    answer,
    integer_capacities,
    reach,
)
from fivefold.collectives.schedules import Collective, Schedule, evaluate
from fivefold.collectives.schedules.timing import with_times
from fivefold.collectives.synthesis._instance import (
    UNREACHABLE,
    Instance,
    Logical,
    Orbits,
    bound_of,
    hops_from,
    logical_of,
    prune,
    schedule_of,
)
from fivefold.collectives.synthesis._solver import (
    CpOutcome,
    OutOfTime,
    check_time,
    new_model,
    solve,
    time_limit,
)
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology

_MOST_VARIABLES = 1_500_000
_VARIABLES_PER_S = 15_000  # at which a model is built, with its constraints
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class SlotModel:
    """How time is cut into slots.

    Args:
        slot_s: Length of a slot; None: the time of one chunk on a link of the
            least common multiple of all rates, so that every link takes whole slots; where that is
            small, the time on the fastest link.
        negligible_latency: Share of a slot below which a latency costs no slot.
        symmetries: Permutations of the ranks that the schedule must keep. They make a search
            small; that there is no symmetric schedule proves nothing about the others.
        seed: Seed of the solver.
        use_bounds: Whether lengths below a bound by arithmetic are refused without the solver.

    Raises:
        ConfigurationError: A length is not positive.

    Examples:
        >>> SlotModel(negligible_latency=0.0).slot_s is None
        True
    """

    slot_s: float | None = None
    negligible_latency: float = 0.1
    symmetries: Sequence[NDArray[np.int32]] = ()
    seed: int = 0
    use_bounds: bool = True

    def __post_init__(self) -> None:
        if self.slot_s is not None and not self.slot_s > 0:
            raise ConfigurationError(f"slot_s must be positive; got {self.slot_s}")
        if not self.negligible_latency >= 0:
            message = f"negligible_latency must not be negative; got {self.negligible_latency}"
            raise ConfigurationError(message)


def slotted(
    collective: Collective,
    topology: Topology,
    *,
    size_bytes: float,
    slots: int | None = None,
    model: SlotModel | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> ExactResult:
    """Find a schedule of fewest time slots, or decide whether ``slots`` slots are enough.

    A send occupies each link of its route for the chunk's time on that link and arrives after
    its time on the slowest link plus the latency of the route, rounded up to whole slots; a
    negligible latency (see ``SlotModel``) is left out of the search. The times of the
    schedule are exact: the order found, priced with every latency.

    Args:
        collective: What is to be done, with its chunks; they must be equal in size.
        topology: Where.
        size_bytes: Size of the collective.
        slots: Ask about this length only; None: the fewest that can be found.
        model: How time is cut; None: the defaults.
        time_limit_s: Limit of the whole search.
        progress: Called with one line per length that was asked.

    Returns:
        The schedule with times; ``attributes`` hold "slots", "slot_s", "slots_bound" (proved) and
        "optimal". Without a schedule: a proof, or "unknown".

    Raises:
        ConfigurationError: A size or length is not positive, chunks differ in size, or the
            instance is too large.
        InfeasibleError: Some rank cannot be reached at all.

    References:
        TE-CCL, arXiv 2305.13479, section 3.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> result = slotted(all_gather(4), ring(4, bandwidth=1e9, latency=0), size_bytes=4000)
        >>> result.schedule.attributes["slots"], result.schedule.attributes["optimal"]
        (2, True)
    """
    if size_bytes <= 0:
        raise ConfigurationError(
            f"size_bytes must be positive; got {size_bytes}",
            hint="nothing to send needs no slots: the library does it",
        )
    if slots is not None and slots < 0:
        raise ConfigurationError(f"slots must not be negative; got {slots}")
    cut = SlotModel() if model is None else model

    def find(part: Collective, place: Topology) -> tuple[Schedule, float]:
        try:
            with time_limit(time_limit_s):
                search = _Search(logical_of(part, place), size_bytes, cut, time_limit_s)
                return search.run(slots, progress)
        except OutOfTime as late:
            raise Undecided(f"{collective.name}: {late.message}") from late

    return answer(collective, topology, find)


def _slot_length_s(logical: Logical, size_bytes: float) -> float:
    chunk_bytes = logical.chunk_bytes(size_bytes)
    if not logical.num_links or chunk_bytes <= 0:
        return 1.0  # nothing moves, or nothing takes time but latencies
    rates = np.unique(1.0 / logical.seconds_per_byte())
    fastest = float(max(rates))
    try:
        multiples, unit = integer_capacities(logical.topology)
    except ConfigurationError:
        return chunk_bytes / fastest
    used = {round(float(rate) / unit) for rate in rates}
    common = math.lcm(*used)
    # A finer slot than the fastest link needs would make every model longer.
    assert multiples.size == 0 or unit > 0, "rates are positive"
    return chunk_bytes / (common * unit) if common * unit <= fastest * 4 else chunk_bytes / fastest


class _Search:
    """Asks for one length after another until the time is over."""

    def __init__(
        self, logical: Logical, size_bytes: float, cut: SlotModel, time_limit_s: float
    ) -> None:
        self.logical, self.size_bytes, self.cut = logical, size_bytes, cut
        self.deadline_s = time.perf_counter() + time_limit_s
        self.limit_s = time_limit_s
        self.slot_s = cut.slot_s or _slot_length_s(logical, size_bytes)
        self.times = self._times()
        self.orbits = Orbits(logical, cut.symmetries)
        self.solver_s = 0.0
        self.share = 1.0 / 3  # of the time: a length that stays undecided leaves some for the next
        self.progress: Callable[[str], None] | None = None

    def run(
        self, slots: int | None, progress: Callable[[str], None] | None
    ) -> tuple[Schedule, float]:
        """Return the schedule of so many slots, or of fewest, and the seconds of the solver."""
        self.progress = progress
        if slots is None:
            return self._fewest(self._bound()), self.solver_s
        self.share = 1.0
        return self._one(slots, self._bound()), self.solver_s

    def _times(self) -> SlotTimes:
        logical, slot_s = self.logical, self.slot_s
        chunk_bytes = logical.chunk_bytes(self.size_bytes)
        busy = tuple(
            tuple(
                _slots(chunk_bytes / float(logical.capacities_bytes_per_s[resource]), slot_s)
                for resource in resources
            )
            for resources in logical.resources
        )
        sending_s = chunk_bytes * logical.seconds_per_byte()
        counts = logical.latencies_s >= self.cut.negligible_latency * slot_s
        lasts_s = sending_s + np.where(counts, logical.latencies_s, 0.0)
        delays = [_slots(float(last_s), slot_s) for last_s in lasts_s]
        return SlotTimes(busy, np.array(delays, np.int64))

    def _bound(self) -> int:
        instance = self.logical
        bound = reach(instance, self.times.delays).horizon(instance)
        if not self.cut.use_bounds:
            return bound
        everyone = frozenset(range(instance.num_ranks))
        for inside in [frozenset([rank]) for rank in everyone] + self._cuts():
            bound = max(bound, ingress_bound(instance, self.times, inside))
        # Latencies may be left out of the slots, so they are left out of the bound as well.
        place = self.logical.topology.scaled(latency=0.0)
        least_s = bound_of(self.logical.collective, place, self.size_bytes).seconds
        return max(bound, _slots(least_s, self.slot_s) if least_s > 0 else 0)

    def _cuts(self) -> list[frozenset[int]]:
        boxes = [frozenset(box) for box in self.logical.boxes]
        return boxes if len(boxes) > 1 else []

    def _one(self, slots: int, bound: int) -> Schedule:
        what = f"{self.logical.collective.name} in {slots} slots of {self.slot_s:.4g} s"
        if slots < bound:
            raise Refuted(f"{what}: at least {bound} are needed")
        status, transfers = self._ask(slots)
        if transfers is None:
            symmetric = bool(self.cut.symmetries)
            proved = status == "infeasible" and not symmetric
            reason = "the solver proved that there is none" if proved else "not decided"
            raise (Refuted if proved else Undecided)(f"{what}: {reason}")
        return self._schedule(transfers, slots, bound)

    def _fewest(self, bound: int) -> Schedule:
        """Upwards from the bound while lengths are refuted, then in steps of an eighth."""
        proved, slots = bound, bound
        while True:
            status, transfers = self._ask(slots)
            if transfers is not None:
                return self._schedule(transfers, slots, proved)
            if status == "infeasible" and proved == slots and not self.cut.symmetries:
                proved = slots + 1
            slots += 1 if status == "infeasible" else max(slots // 8, 1)
            left_s = self.deadline_s - time.perf_counter()
            if left_s <= 0 or self._too_many(slots, left_s):
                reason = f"no schedule within {self.limit_s:g} s; at least {proved}"
                raise Undecided(f"{self.logical.collective.name}: {reason} slots")

    def _too_many(self, slots: int, left_s: float) -> bool:
        size = self._variables(slots)
        return size > _MOST_VARIABLES or size > max(left_s, 1.0) * _VARIABLES_PER_S

    def _ask(self, slots: int) -> tuple[str, list[tuple[int, int, int]] | None]:
        instance = self.logical
        left_s = self.deadline_s - time.perf_counter()
        if self._too_many(slots, left_s):
            message = f"{instance.num_chunks} chunks on {instance.num_links} links in {slots} slots"
            hint = "allow more time, or give symmetries"
            raise ConfigurationError(f"{message} are too many for an exact search", hint=hint)
        limit_s = max(left_s * self.share, 1.0)
        outcome, transfers = search_slots(
            instance,
            self.times,
            slots=slots,
            orbits=self.orbits,
            cuts=self._cuts(),
            time_limit_s=min(limit_s, max(left_s, 0.0)),
            seed=self.cut.seed,
        )
        self.solver_s += outcome.solver_s
        if self.progress is not None:
            self.progress(f"{slots} slots: {outcome.status}, {outcome.solver_s:.1f} s")
        return outcome.status, transfers if outcome.found else None

    def _variables(self, slots: int) -> int:
        """Return how many (chunk, link, slot) there are, symmetric ones counted once."""
        instance, window = self.logical, reach(self.logical, self.times.delays)
        first = window.earliest[:, instance.sources]
        last = slots - window.remaining[:, instance.targets] - self.times.delays
        kept = self.orbits.link_orbits == np.arange(first.size).reshape(first.shape)
        return int(np.clip(last - first + 1, 0, None)[kept].sum())

    def _schedule(self, transfers: list[tuple[int, int, int]], slots: int, bound: int) -> Schedule:
        ends = [slot + int(self.times.delays[link]) for slot, _, link in transfers]
        order = schedule_of(
            self.logical,
            [(chunk, link) for _, chunk, link in transfers],
            name="slotted",
            attributes={
                "slots": max(ends, default=0),
                "slot_s": self.slot_s,
                "slots_bound": bound,
                "optimal": slots <= bound,
            },
        )
        return with_times(order, evaluate(order, size_bytes=self.size_bytes, model="slotted"))


def _slots(duration_s: float, slot_s: float) -> int:
    return max(math.ceil(duration_s / slot_s * (1 - _TOLERANCE)), 1)


@dataclass(frozen=True)
class SlotTimes:
    """Whole slots that a chunk costs."""

    busy: tuple[tuple[int, ...], ...]
    delays: NDArray[np.int64]


class SendModel:
    """Sends of chunks over links at whole times, each chunk from where it is, as variables.

    What links can carry is for those who build on it to add.
    """

    def __init__(
        self, instance: Instance, delays: NDArray[np.int64], length: int, orbits: Orbits
    ) -> None:
        self.instance, self.delays, self.length, self.orbits = instance, delays, length, orbits
        self.model = new_model()
        self.sends: dict[tuple[int, int], Any] = {}
        self.active: list[tuple[int, int, int]] = []  # (chunk, link, time) that have a variable
        for chunk, link, first, end in reach(instance, delays).windows(instance, delays, length):
            orbit = int(orbits.link_orbits[chunk, link])
            check_time()
            for when in range(first, end):
                self.active.append((chunk, link, when))
                if (orbit, when) not in self.sends:
                    self.sends[orbit, when] = self.model.new_bool_var(f"y{orbit}.{when}")
        self._add_arrivals()

    def variable(self, chunk: int, link: int, when: int) -> Any:
        """Return whether a chunk leaves over a link at a time."""
        return self.sends[int(self.orbits.link_orbits[chunk, link]), when]

    def _add_arrivals(self) -> None:
        first = self.orbits.representative_ranks()
        into: dict[tuple[int, int], dict[int, list[Any]]] = {}
        out_of: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for chunk, link, slot in self.active:
            check_time()
            send = self.variable(chunk, link, slot)
            target, source = int(self.instance.targets[link]), int(self.instance.sources[link])
            if first[chunk, target]:
                when = slot + int(self.delays[link])
                into.setdefault((chunk, target), {}).setdefault(when, []).append(send)
            if first[chunk, source] and source not in self.instance.holders[chunk]:
                out_of.setdefault((chunk, source), []).append((slot, send))
        self._receive_once(into, first)
        for pair, sends in out_of.items():
            check_time()
            self._send_what_is_there(into.get(pair, {}), sends)

    def _receive_once(
        self, into: dict[tuple[int, int], dict[int, list[Any]]], first: NDArray[np.bool_]
    ) -> None:
        for chunk, wanted in enumerate(self.instance.wanted):
            for rank in wanted - self.instance.holders[chunk]:
                if first[chunk, rank]:
                    self.model.add(_total(into.get((chunk, rank), {})) == 1)
        for (chunk, rank), arrivals in into.items():
            if rank not in self.instance.wanted[chunk]:
                self.model.add(_total(arrivals) <= 1)

    def _send_what_is_there(
        self, arrivals: dict[int, list[Any]], sends: list[tuple[int, Any]]
    ) -> None:
        """One boolean per slot says whether the chunk is there: short clauses, not long sums."""
        there: dict[int, Any] = {}
        slots = range(min(arrivals, default=self.length), self.length)
        before = None
        for slot in slots:
            now = self.model.new_bool_var("")
            arriving = arrivals.get(slot, [])
            causes = arriving if before is None else [*arriving, before]
            self.model.add_bool_or([now.negated(), *causes])
            for cause in causes:
                self.model.add_implication(cause, now)
            there[slot] = before = now
        for slot, send in sends:
            if slot in there:
                self.model.add_implication(send, there[slot])
            else:
                self.model.add(send == 0)

    def plan(self, outcome: CpOutcome) -> list[tuple[int, int, int]]:
        """Return (time, chunk, link) of each transfer that somebody needs."""
        found = [
            (slot, chunk, link)
            for chunk, link, slot in self.active
            if outcome.value(self.variable(chunk, link, slot))
        ]
        return prune(self.instance, found)


class _SlotModel(SendModel):
    """Whether T slots are enough."""

    def __init__(self, instance: Instance, times: SlotTimes, slots: int, orbits: Orbits) -> None:
        super().__init__(instance, times.delays, slots, orbits)
        self._add_loads(times)

    def _add_loads(self, times: SlotTimes) -> None:
        loads: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for chunk, link, start in self.active:
            check_time()
            orbit = int(self.orbits.link_orbits[chunk, link])
            taken = zip(self.instance.resources[link], times.busy[link], strict=True)
            for resource, busy in taken:
                for slot in range(start, start + busy):
                    loads.setdefault((resource, slot), []).append((orbit, start))
        seen = set()
        for users in loads.values():
            check_time()
            row = tuple(sorted(users))
            if len(row) > 1 and row not in seen:
                seen.add(row)
                if len(set(row)) == len(row):
                    self.model.add_at_most_one(self.sends[key] for key in row)
                else:  # a symmetry puts two equal sends on one resource: neither may happen
                    self.model.add(sum(self.sends[key] for key in row) <= 1)

    def add_cut(self, inside: frozenset[int]) -> None:
        """A chunk that is held outside and wanted inside must enter at least once."""
        entries: dict[int, list[Any]] = {}
        entering = set(entries_of(self.instance, inside))
        for chunk, link, slot in self.active:
            if link in entering:
                entries.setdefault(chunk, []).append(self.variable(chunk, link, slot))
        for chunk, holders in enumerate(self.instance.holders):
            if not holders & inside and self.instance.wanted[chunk] & inside:
                self.model.add_bool_or(entries.get(chunk, []))


def _total(arrivals: dict[int, list[Any]]) -> Any:
    return sum(send for sends in arrivals.values() for send in sends)


def search_slots(
    instance: Instance,
    times: SlotTimes,
    *,
    slots: int,
    orbits: Orbits | None = None,
    cuts: Iterable[frozenset[int]] = (),
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> tuple[CpOutcome, list[tuple[int, int, int]]]:
    """Find a schedule that ends within ``slots`` slots, or prove that there is none."""
    if reach(instance, times.delays).horizon(instance) > slots:
        return CpOutcome("infeasible", None, 0.0, 0.0), []
    model = _SlotModel(instance, times, slots, orbits or Orbits(instance))
    for inside in cuts:
        model.add_cut(inside)
    outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed)
    return outcome, model.plan(outcome) if outcome.found else []


def ingress_bound(instance: Instance, times: SlotTimes, inside: frozenset[int]) -> int:
    """Least slots in which the chunks that a set of ranks lacks can enter it.

    Every chunk enters once at least, whole, and what enters one rank shares that rank's links.
    Where there is only one rank to enter by, the last chunk must also travel on from there.
    """
    lacking = [
        chunk
        for chunk, (holders, wanted) in enumerate(
            zip(instance.holders, instance.wanted, strict=True)
        )
        if not holders & inside and wanted & inside
    ]
    entries = entries_of(instance, inside)
    if not lacking or not entries:
        return 0
    periods = _entry_periods(instance, times, entries)
    slots = _slots_to_enter(periods, len(lacking))
    ends = {int(instance.targets[link]) for link in entries}
    return slots + (_tail(instance, times, lacking, ends.pop()) if len(ends) == 1 else 0)


def entries_of(instance: Instance, inside: frozenset[int]) -> list[int]:
    """Return the links that lead into a set of ranks."""
    ends = zip(instance.sources.tolist(), instance.targets.tolist(), strict=True)
    return [
        n for n, (source, target) in enumerate(ends) if source not in inside and target in inside
    ]


def _slots_to_enter(periods: list[tuple[int, int]], chunks: int) -> int:
    """Least slots in which so many chunks can have come in, by bisection."""
    least, most = 0, max(extra for _, extra in periods) + chunks * max(busy for busy, _ in periods)
    while least < most:
        middle = (least + most) // 2
        entered = sum((middle - extra) // busy for busy, extra in periods if middle > extra)
        least, most = (least, middle) if entered >= chunks else (middle + 1, most)
    return least


def _tail(instance: Instance, times: SlotTimes, chunks: list[int], entry: int) -> int:
    """Time that every one of the chunks still needs from the entry to its last receiver."""
    sides = {chunk: instance.wanted[chunk] - instance.holders[chunk] for chunk in chunks}
    behind = _behind(instance, sides, entry)
    none: frozenset[int] = frozenset()
    everyone = range(instance.num_chunks)
    at_entry = replace(
        instance,
        holders=tuple(frozenset([entry]) for _ in everyone),
        wanted=tuple(behind.get(chunk, none) for chunk in everyone),
    )
    earliest = reach(at_entry, times.delays).earliest
    return min(
        max((int(earliest[chunk, rank]) for rank in ranks), default=0)
        for chunk, ranks in behind.items()
    )


def _behind(
    instance: Instance, sides: dict[int, frozenset[int]], entry: int
) -> dict[int, frozenset[int]]:
    """For each chunk the receivers that only the entry can serve: its own side of the cut."""
    # Whoever can be reached from a holder without passing the entry may be served another way.
    behind, past = {}, instance.targets != entry
    ends = instance.sources[past], instance.targets[past]
    for chunk, ranks in sides.items():
        check_time()
        hops = hops_from(instance.holders[chunk], *ends, instance.num_ranks)
        behind[chunk] = frozenset(rank for rank in ranks if hops[rank] == UNREACHABLE)
    return behind


def _entry_periods(
    instance: Instance, times: SlotTimes, entries: list[int]
) -> list[tuple[int, int]]:
    """Slots per chunk and further delay of each way in; ways that share a link count once."""
    groups: dict[int, tuple[int, int]] = {}
    for link in entries:
        # The last link of a route ends in the rank: all routes over it share it.
        resource, busy = instance.resources[link][-1], times.busy[link][-1]
        extra = max(int(times.delays[link]) - busy, 0)
        known = groups.get(resource, (busy, extra))
        groups[resource] = min(known[0], busy), min(known[1], extra)
    return list(groups.values())
