"""The search for a schedule of T time slots on unequal links, as a CP-SAT model.

A send that starts in slot t keeps each resource of its route busy for some slots, one chunk at a
time, and arrives ``delay`` slots after its start; a longer latency only delays the arrival. The
windows of every send come from shortest times to and from its ends. Whoever wants to prove that
T slots are too few adds cuts: a set of ranks that a chunk must enter, however it travels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._cp import CpOutcome, new_model, solve
from fivefold.collectives.synthesis._deadline import check_time
from fivefold.collectives.synthesis._instance import Instance, Orbits, Reach, prune, reach


@dataclass(frozen=True)
class SlotTimes:
    """Whole slots that a chunk costs.

    Args:
        busy: For each logical link the slots that each resource of its route is taken.
        delays: For each logical link the slots from the start of a send to its arrival.
    """

    busy: tuple[tuple[int, ...], ...]
    delays: NDArray[np.int64]


class _Model:
    """Variables and constraints of the question whether T slots are enough."""

    def __init__(
        self, instance: Instance, times: SlotTimes, slots: int, orbits: Orbits, window: Reach
    ) -> None:
        self.instance, self.times, self.slots = instance, times, slots
        self.orbits, self.window = orbits, window
        self.model = new_model()
        self.sends: dict[tuple[int, int], Any] = {}
        self.active: list[tuple[int, int, int]] = []  # (chunk, link, slot) that have a variable
        self._add_sends()
        self._add_arrivals()
        self._add_loads()

    def _add_sends(self) -> None:
        windows = self.window.windows(self.instance, self.times.delays, self.slots)
        for chunk, link, first, end in windows:
            orbit = int(self.orbits.link_orbits[chunk, link])
            check_time()
            for slot in range(first, end):
                self.active.append((chunk, link, slot))
                if (orbit, slot) not in self.sends:
                    self.sends[orbit, slot] = self.model.new_bool_var(f"y{orbit}.{slot}")

    def _variable(self, chunk: int, link: int, slot: int) -> Any:
        return self.sends[int(self.orbits.link_orbits[chunk, link]), slot]

    def _add_arrivals(self) -> None:
        first = self.orbits.representative_ranks()
        into: dict[tuple[int, int], dict[int, list[Any]]] = {}
        out_of: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for chunk, link, slot in self.active:
            check_time()
            send = self._variable(chunk, link, slot)
            target, source = int(self.instance.targets[link]), int(self.instance.sources[link])
            if first[chunk, target]:
                when = slot + int(self.times.delays[link])
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
        slots = range(min(arrivals, default=self.slots), self.slots)
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

    def _add_loads(self) -> None:
        loads: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for chunk, link, start in self.active:
            check_time()
            orbit = int(self.orbits.link_orbits[chunk, link])
            taken = zip(self.instance.resources[link], self.times.busy[link], strict=True)
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
        entering = [
            link
            for link in range(self.instance.num_links)
            if int(self.instance.sources[link]) not in inside
            and int(self.instance.targets[link]) in inside
        ]
        entries: dict[int, list[Any]] = {}
        entering_set = set(entering)
        for chunk, link, slot in self.active:
            if link in entering_set:
                entries.setdefault(chunk, []).append(self._variable(chunk, link, slot))
        for chunk, holders in enumerate(self.instance.holders):
            if not holders & inside and self.instance.wanted[chunk] & inside:
                self.model.add_bool_or(entries.get(chunk, []))

    def plan(self, outcome: CpOutcome) -> list[tuple[int, int, int]]:
        found = [
            (slot, chunk, link)
            for chunk, link, slot in self.active
            if outcome.value(self._variable(chunk, link, slot))
        ]
        return prune(self.instance, found)


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
    """Find a schedule that ends within ``slots`` slots, or prove that there is none.

    Args:
        instance: Chunks and logical links.
        times: Whole slots that a chunk takes.
        slots: The length T.
        orbits: Pairs that symmetries make equal; a proof then holds for symmetric schedules only.
        cuts: Sets of ranks; they only speed proofs up.
        time_limit_s: Limit of the solver.
        seed: Seed of the solver's random choices.

    Returns:
        The solver's answer and (start slot, chunk, link) of each transfer, in the order of time.
    """
    window = reach(instance, times.delays)
    if window.horizon(instance) > slots:
        return CpOutcome("infeasible", None, 0.0, 0.0), []
    model = _Model(instance, times, slots, orbits or Orbits(instance), window)
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
    entries = [
        link
        for link in range(instance.num_links)
        if int(instance.sources[link]) not in inside and int(instance.targets[link]) in inside
    ]
    if not lacking or not entries:
        return 0
    periods = _entry_periods(instance, times, entries)
    slots = _slots_to_enter(periods, len(lacking))
    ends = {int(instance.targets[link]) for link in entries}
    return slots + (_tail(instance, times, lacking, ends.pop()) if len(ends) == 1 else 0)


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
    behind = {}
    for chunk, ranks in sides.items():
        check_time()
        seen = set(instance.holders[chunk])
        stack = list(seen)
        while stack:
            here = stack.pop()
            for source, target in zip(
                instance.sources.tolist(), instance.targets.tolist(), strict=True
            ):
                if source == here and target not in seen and target != entry:
                    seen.add(target)
                    stack.append(target)
        behind[chunk] = frozenset(rank for rank in ranks if rank not in seen)
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
