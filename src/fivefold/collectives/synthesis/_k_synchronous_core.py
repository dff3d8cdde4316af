"""The search for one k-synchronous point (chunks, steps, rounds) as a CP-SAT model.

In step s a resource with capacity b carries at most b * r_s chunks, and a chunk that is sent in
step s was there at the end of step s - 1; the rounds r_s >= 1 sum to R (SCCL, arXiv 2008.08708).
Decision variables: which chunk goes over which link in which step, and the rounds of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.synthesis._cp import CpOutcome, new_model, solve
from fivefold.collectives.synthesis._deadline import check_time
from fivefold.collectives.synthesis._instance import Instance, Orbits, prune, reach


@dataclass(frozen=True)
class StepPlan:
    """A point that was found: the rounds of each step, and (step, chunk, link) of each transfer."""

    rounds: tuple[int, ...]
    transfers: tuple[tuple[int, int, int], ...]


class _Model:
    """Variables and constraints of one point."""

    def __init__(
        self, instance: Instance, capacities: Sequence[int], shape: tuple[int, int], orbits: Orbits
    ) -> None:
        self.instance, self.orbits = instance, orbits
        self.steps, num_rounds = shape
        self.model = new_model()
        most = num_rounds - self.steps + 1
        self.rounds = [self.model.new_int_var(1, most, f"r{step}") for step in range(self.steps)]
        self.model.add(sum(self.rounds) == num_rounds)
        self.sends: dict[tuple[int, int], Any] = {}
        self.active: list[tuple[int, int, int]] = []  # (chunk, link, step) that have a variable
        self._add_sends()
        self._add_arrivals()
        self._add_loads(capacities)

    def _add_sends(self) -> None:
        instance = self.instance
        hops = np.ones(instance.num_links, np.int64)
        windows = reach(instance, hops).windows(instance, hops, self.steps)
        for chunk, link, first, end in windows:
            check_time()
            for step in range(first, end):
                self.active.append((chunk, link, step))
                self._variable(chunk, link, step, make=True)

    def _variable(self, chunk: int, link: int, step: int, *, make: bool = False) -> Any:
        key = (int(self.orbits.link_orbits[chunk, link]), step)
        if make and key not in self.sends:
            self.sends[key] = self.model.new_bool_var(f"x{key[0]}.{step}")
        return self.sends.get(key)

    def _add_arrivals(self) -> None:
        """At most one arrival per chunk and rank; a send needs an earlier one at its source."""
        first = self.orbits.representative_ranks()
        into: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        out_of: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for chunk, link, step in self.active:
            check_time()
            send = self._variable(chunk, link, step)
            target, source = int(self.instance.targets[link]), int(self.instance.sources[link])
            if first[chunk, target]:
                into.setdefault((chunk, target), []).append((step, send))
            if first[chunk, source] and source not in self.instance.holders[chunk]:
                out_of.setdefault((chunk, source), []).append((step, send))
        self._receive_once(into, first)
        for pair, sends in out_of.items():
            check_time()
            arrivals = into.get(pair, [])
            for step, send in sends:
                earlier = [arrival for when, arrival in arrivals if when < step]
                self.model.add_bool_or([send.negated(), *earlier])

    def _receive_once(
        self, into: dict[tuple[int, int], list[tuple[int, Any]]], first: NDArray[np.bool_]
    ) -> None:
        for chunk, wanted in enumerate(self.instance.wanted):
            for rank in wanted - self.instance.holders[chunk]:
                if first[chunk, rank]:
                    arrivals = into.get((chunk, rank), [])
                    self.model.add(sum(send for _, send in arrivals) == 1)
        for (chunk, rank), arrivals in into.items():
            if rank not in self.instance.wanted[chunk]:
                self.model.add(sum(send for _, send in arrivals) <= 1)

    def _add_loads(self, capacities: Sequence[int]) -> None:
        loads: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for chunk, link, step in self.active:
            key = (int(self.orbits.link_orbits[chunk, link]), step)
            check_time()
            for resource in self.instance.resources[link]:
                loads.setdefault((resource, step), []).append((key[0], self.sends[key]))
        seen = set()
        for (resource, step), users in loads.items():
            # Resources that a symmetry makes equal carry the same variables: one row for all.
            check_time()
            row = (step, capacities[resource], tuple(sorted(orbit for orbit, _ in users)))
            if row not in seen:
                seen.add(row)
                load = sum(send for _, send in users)
                self.model.add(load <= capacities[resource] * self.rounds[step])

    def plan(self, outcome: CpOutcome) -> StepPlan:
        found = [
            (step, chunk, link)
            for chunk, link, step in self.active
            if outcome.value(self._variable(chunk, link, step))
        ]
        rounds = tuple(outcome.value(count) for count in self.rounds)
        return StepPlan(rounds, tuple(prune(self.instance, found)))


def search_steps(
    instance: Instance,
    capacities: Sequence[int],
    *,
    steps: int,
    rounds: int,
    orbits: Orbits | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> tuple[CpOutcome, StepPlan | None]:
    """Find a schedule of ``steps`` steps and ``rounds`` rounds, or prove that there is none.

    Args:
        instance: Chunks and logical links.
        capacities: Chunks that each resource carries per round.
        steps: Steps S, at least 1.
        rounds: Rounds R over all steps, at least S.
        orbits: Pairs that symmetries make equal; a proof then holds for symmetric schedules only.
        time_limit_s: Limit of the solver.
        seed: Seed of the solver's random choices.
    """
    model = _Model(instance, capacities, (steps, rounds), orbits or Orbits(instance))
    outcome = solve(model.model, time_limit_s=time_limit_s, seed=seed)
    return outcome, model.plan(outcome) if outcome.found else None
