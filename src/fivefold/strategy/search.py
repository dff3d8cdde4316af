"""The best plan of a space, its Pareto front of time against memory, and why the others are out.

Outer choices are bounded from below in time and in memory by what no switch can change, sorted by
the bound, and evaluated block by block in columns, until no bound is under the best time found.
The bounds are true ones, so the best is that of evaluating everything. One job is compared on
several clusters by such searches, with slower and faster links between nodes.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import FabricSpec
from fivefold.errors import FivefoldError, InfeasibleError, require_whole
from fivefold.strategy._columns import Columns
from fivefold.strategy._layer import Floats
from fivefold.strategy._memory import stored_bytes
from fivefold.strategy._muon import moment_bytes
from fivefold.strategy._space import (
    Pattern,
    SearchSpace,
    block_table,
    inner_table,
    layer_table,
    outer_choices,
    pattern_of,
    settled,
)
from fivefold.strategy.cluster import Cluster, DeviceSpec
from fivefold.strategy.cost import PlanPrediction, evaluate_plan, evaluate_table, least_time_s
from fivefold.strategy.job import Job
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan, PlanTable
from fivefold.units import format_bytes

_BLOCK_ROWS = 200_000
_FIRST_ROWS = 5_000
_MOST_TRIED = 200
_MOST_DOUBLINGS = 7
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class PlanSearchResult:
    """Plans that a search found, and how many it looked at.

    Args:
        best: The fastest plans that fit, fastest first.
        front: Plans that no other beats in both time and memory, fastest first.
        num_plans: Plans in the space, after those that cannot run the model.
        num_evaluated: Plans whose cost was computed.
        num_over_memory: Of those, how many do not fit.
        num_bounded: Plans that a bound ruled out unseen.
        ruled_out: Reasons, each with the number of plans (or of outer choices, for those that
            cannot run the model) it ruled out.
        seconds: Of the search.
    """

    best: tuple[PlanPrediction, ...]
    front: tuple[PlanPrediction, ...]
    num_plans: int
    num_evaluated: int
    num_over_memory: int
    num_bounded: int
    ruled_out: dict[str, int]
    seconds: float


def search_plans(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, space: SearchSpace, top: int = 1,
    front: bool = False, bounds: bool = True,
) -> PlanSearchResult:  # fmt: skip
    """Find the fastest plans that fit in memory, with the stack's ``spare_memory`` left free.

    Where no plan leaves that much, the leanest of those that fit is taken.

    Args:
        model: What is trained.
        device: On which GPU and stack.
        fabric: Joined how.
        space: Which plans are looked at.
        top: How many of the fastest to return.
        front: Whether the Pareto front of time against memory is wanted, which bounds less.
        bounds: False evaluates every plan.

    Raises:
        ConfigurationError: ``top`` is below 1.
        InfeasibleError: The fabric has fewer GPUs, no plan can run the model, or none fits.

    Examples:
        >>> from fivefold.strategy import load_cluster, load_model
        >>> cluster = load_cluster("a100-megatron")
        >>> space = SearchSpace(num_gpus=8, global_batch=64)
        >>> found = search_plans(load_model("gpt3-1.3b"), cluster.device, cluster.fabric,
        ...                      space=space)
        >>> found.best[0].plan.data
        8
    """
    started_s = time.perf_counter()
    require_whole("top", top)
    if space.num_gpus > fabric.num_gpus:
        message = f"the job wants {space.num_gpus} GPUs, {fabric.name!r} has {fabric.num_gpus}"
        raise InfeasibleError(message, hint=f"use at most {fabric.num_gpus} GPUs")
    fabric = fabric.packed(space.num_gpus)
    space = settled(space, model, fabric)
    if not (device.reduces_beside or device.gathers_beside):  # a plan may not say what none can do
        space = dataclasses.replace(space, data_overlap=(False,))
    found = _Search(model, device, fabric, space, top=top, front=front, bounds=bounds)
    if not found.choices:
        _raise_no_choice(found.impossible, space)
    found.run()
    if not found.plans and device.spare_memory:
        full = dataclasses.replace(device, spare_memory=0.0)
        found = _Search(model, full, fabric, space, top=top, front=True, bounds=bounds)
        found.run()
        # The leanest: with more memory it is among those to choose from, so none gets slower.
        found.plans = [min(found.front, key=lambda point: point[1])[2]] if found.front else []
        found.front = found.front if front else []
    if not found.plans:
        _raise_no_fit(found)
    ruled_out, num_bounded = found.bounded, found.bounded.total()
    spare = ", less what is left free" if found.device.spare_memory else ""
    ruled_out[f"memory: more than the device has{spare}"] += found.over
    if found.longer:
        ruled_out["tau: a shorter round hides its outer updates too"] = found.longer
    ruled_out.update({f"cannot run: {reason}": n for reason, n in found.impossible.items()})
    listed = sorted(found.front, key=lambda point: point[0])
    return PlanSearchResult(
        best=tuple(evaluate_plan(model, device, fabric, plan=plan) for plan in found.plans),
        front=tuple(evaluate_plan(model, device, fabric, plan=plan) for *_, plan in listed),
        num_plans=found.num_plans, num_evaluated=found.evaluated, num_over_memory=found.over,
        num_bounded=num_bounded, ruled_out=dict(ruled_out),
        seconds=time.perf_counter() - started_s,
    )  # fmt: skip


class _Search:
    """Goes through the outer choices of a space in the order of their bounds; keeps the best."""

    def __init__(
        self, model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, space: SearchSpace, *,
        top: int = 1, front: bool = False, bounds: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.device, self.fabric, self.space = model, device, fabric, space
        self.top, self.with_front = top, front
        self.choices, self.impossible = outer_choices(model, space, fabric=fabric)
        self.taus = sorted(set(space.tau))
        self.patterns = [pattern_of(model, space, plan) for plan in self.choices]
        self.inner = {pattern: inner_table(space, pattern) for pattern in set(self.patterns)}
        self.bound_s, self.bound_bytes = np.zeros(len(self.choices)), np.zeros(len(self.choices))
        if bounds:
            self._set_bounds()
        self.times = np.zeros(0)
        self.plans: list[ParallelPlan] = []
        self.front: list[tuple[float, float, ParallelPlan]] = []
        self.bounded: Counter[str] = Counter()
        self.evaluated = self.over = self.longer = 0
        self.least_bytes = np.inf
        self.room_bytes = device.memory_bytes * (1.0 - device.spare_memory)

    @property
    def num_plans(self) -> int:
        """Return the plans of the space."""
        return sum(self._size(i) for i in range(len(self.choices)))

    def _size(self, i: int) -> int:
        """Return the plans of an outer choice."""
        return len(self.inner[self.patterns[i]]["recompute"])

    def run(self) -> None:
        """Evaluate what no bound rules out."""
        waiting: list[int] = []
        rows = 0
        for i in np.argsort(self.bound_s, kind="stable").tolist():
            waiting.append(i)
            rows += self._size(i)
            # Small blocks first: a good plan found early rules out most of the rest.
            if rows >= min(_BLOCK_ROWS, _FIRST_ROWS + self.evaluated):
                self._look_at(waiting)
                waiting, rows = [], 0
        self._look_at(waiting)

    def fits(self) -> bool:
        """Return whether any plan of the space fits in memory."""
        for i in np.argsort(self.bound_bytes, kind="stable")[:_MOST_TRIED].tolist():
            if self.bound_bytes[i] > self.room_bytes:
                return False
            self._look_at([i])
            if self.plans:
                return True
        return False

    def _look_at(self, chosen: list[int]) -> None:
        """Evaluate some outer choices with all their switches, or say why not."""
        by_pattern: dict[Pattern, list[ParallelPlan]] = {}
        for i in chosen:
            if self.bound_bytes[i] > self.room_bytes:
                reason = "memory: more than the device has, whatever the switches"
            elif self._beats(self.bound_s[i], self.bound_bytes[i]):
                reason = "time: the bound is above the best found"
            else:
                by_pattern.setdefault(self.patterns[i], []).append(self.choices[i])
                continue
            self.bounded[reason] += self._size(i)
        for pattern, plans in by_pattern.items():
            self._evaluate(block_table(plans, self.inner[pattern]))

    def _beats(self, time_s: float, memory_bytes: float) -> bool:
        """Return whether what was found makes plans with these bounds pointless."""
        if time_s < self._worst_s:
            return False
        return not self.with_front or any(
            t <= time_s and m <= memory_bytes for t, m, _ in self.front
        )

    @property
    def _worst_s(self) -> float:
        """Return the time that a plan must beat to be kept."""
        return float(self.times[-1]) if len(self.times) == self.top else np.inf

    def _evaluate(self, table: PlanTable) -> None:
        """Evaluate a block and keep what is best."""
        if not len(table):
            return
        costs = evaluate_table(self.model, self.device, self.fabric, table=table)
        fits = costs.memory_bytes <= self.room_bytes
        self.evaluated += len(table)
        self.over += int((~fits).sum())
        self.least_bytes = min(self.least_bytes, float(costs.memory_bytes.min()))
        # A longer round disturbs compute less often and learns less of a token: it is for plans
        # whose outer updates a shorter one does not hide.
        shorter = np.r_[0, self.taus][np.searchsorted(self.taus, table.tau)]
        longer = fits & (shorter > 1) & (shorter >= costs.least_tau)
        self.longer += int(longer.sum())
        rows = np.flatnonzero(fits & ~longer)
        if not len(rows):
            return
        self._keep_best(table, rows, costs.time_s[rows])
        if self.with_front:
            self._keep_front(table, rows, costs.time_s[rows], costs.memory_bytes[rows])

    def _keep_best(self, table: PlanTable, rows: npt.NDArray[np.int64], times: Floats) -> None:
        # Switches without effect (selective recomputation of fused attention) give equal times:
        # the first, plainest one of each is kept.
        unique, first = np.unique(times, return_index=True)
        few = first[(unique < self._worst_s) & ~np.isin(unique, self.times)][: self.top]
        if not len(few):
            return
        self.plans += [table.plan(int(rows[i])) for i in few]
        merged = np.concatenate([self.times, times[few]])
        order = np.argsort(merged, kind="stable")[: self.top]
        self.times = merged[order]
        self.plans = [self.plans[i] for i in order]

    def _keep_front(
        self, table: PlanTable, rows: npt.NDArray[np.int64], times: Floats, memory: Floats
    ) -> None:
        order = np.lexsort((memory, times))
        lowest = np.minimum.accumulate(memory[order])
        better = np.r_[True, lowest[1:] < lowest[:-1]]
        for i in order[better]:
            point = (float(times[i]), float(memory[i]))
            if not any(t <= point[0] and m <= point[1] for t, m, _ in self.front):
                self.front = [old for old in self.front if old[0] < point[0] or old[1] < point[1]]
                self.front.append((*point, table.plan(int(rows[i]))))

    def _set_bounds(self) -> None:
        """Set the least seconds and bytes of every outer choice, whatever its switches.

        Time: every micro-batch on a stage of mean speed at the fastest layer that any switch gives,
        and the bubble at that speed. The slowest stage is no faster than the mean, messages and the
        optimizer only add. Memory: states shared and offloaded as far as the space allows, the
        least stored activations of any switch.
        """
        device, space = self.device, self.space
        for pattern in self.inner:
            rows = np.array([i for i, p in enumerate(self.patterns) if p == pattern])
            inner = layer_table(space, pattern)
            table = block_table([self.choices[i] for i in rows], inner)
            columns = Columns(self.model, device, self.fabric, table)
            shape = (len(rows), len(inner["recompute"]))
            self.bound_s[rows] = least_time_s(columns).reshape(shape).min(axis=1)
            stored = stored_bytes(columns, stage=0)
            if True in space.offload:
                stored = np.minimum(stored, 2.0 * columns.layer["stored_bytes"])
            working = 0.0 if device.frees_gradients else columns.layer["working_bytes"]
            least = (stored + working).reshape(shape).min(axis=1)
            states = _least_states(columns, space, pattern).reshape(shape).min(axis=1)
            self.bound_bytes[rows] = least + states + device.reserved_bytes
        self.bound_s *= 1 - _ROUNDING
        self.bound_bytes *= 1 - _ROUNDING


def _least_states(columns: Columns, space: SearchSpace, pattern: Pattern) -> Floats:
    """Return the states of the first stage, whose activations the bound takes too."""
    states, width = columns.parameters(0), columns.element_bytes
    frozen = columns.frozen_bytes(0, width=width)
    most = max(space.zero) if pattern.copies else 0
    replicas = columns.replicas
    shards = np.stack([replicas, np.maximum(replicas / columns.table.expert, 1.0)])
    whole, shared = states.sum(0), (states / shards).sum(0)
    weights = width * (shared if most >= 3 else whole)
    weights = weights + ((frozen / shards) if most >= 3 else frozen).sum(0)
    gradients = columns.device.gradient_bytes * (shared if most >= 2 else whole)
    if columns.device.frees_gradients:  # activations may be what is there instead
        gradients = np.zeros(len(whole))
    bytes_each = columns.state_bytes
    if "muon" in space.optimizers:
        bytes_each = bytes_each - moment_bytes(columns.device)
    optimizer = bytes_each * (shared if most >= 1 else whole)
    if True in space.offload:
        weights = weights * np.minimum(2.0 / columns.each, 1.0)
        optimizer = np.zeros(len(whole))
    least: Floats = weights + gradients + optimizer
    return least


def _raise_no_choice(impossible: Counter[str], space: SearchSpace) -> None:
    reasons = "; ".join(reason for reason, _ in impossible.most_common(3))
    reasons = reasons or f"no degrees of the search space multiply to {space.num_gpus}"
    message = (
        f"no split of {space.num_gpus} GPUs and {space.global_batch} samples can run: {reasons}"
    )
    hint = "change the number of GPUs or the global batch, or allow more degrees in [search]"
    raise InfeasibleError(message, hint=hint)


def _raise_no_fit(found: _Search) -> None:
    """Say what binds, and look for the nearest change that helps."""
    device, space, fabric = found.device, found.space, found.fabric

    def fits(**changed: Any) -> bool:
        wider = dataclasses.replace(space, **changed)
        return _Search(found.model, device, fabric, wider).fits()

    changes = []
    if space.offload == (False,) and fits(offload=(False, True)):
        changes.append("allow offloading to host memory")
    if 3 not in space.zero and fits(zero=(0, 1, 2, 3)):
        changes.append("allow ZeRO-3")
    if "full" not in space.recompute and fits(recompute=("none", "selective", "full")):
        changes.append("allow full recomputation")
    larger = (space.num_gpus << doubling for doubling in range(1, _MOST_DOUBLINGS))
    count = next((n for n in larger if n <= fabric.num_gpus and fits(num_gpus=n)), None)
    if count is not None:
        changes.append(f"use {count} GPUs")
    needed = found.least_bytes if found.evaluated else float(found.bound_bytes.min())
    message = (
        f"no plan fits: memory binds; the least that any plan needs is {format_bytes(needed)} "
        f"a GPU, {device.name!r} has {format_bytes(device.memory_bytes)}"
    )
    hint = "nearest changes: " + ("; or ".join(changes) or "a device with more memory")
    raise InfeasibleError(message, hint=hint)


RATES = (0.5, 2.0)
"""Times the rate of the links between nodes at which each cluster is asked again."""


@dataclass(frozen=True, kw_only=True)
class ClusterOutcome:
    """The best plan of a job on one cluster.

    Args:
        cluster: The cluster.
        model: What is trained.
        num_gpus: GPUs that the job takes there.
        best: The fastest plan that fits; None where none does.
        problem: Why there is none; None where there is one.
        at_rate_s: Seconds of an iteration, planned again, with the links between nodes at so many
            times their rate; empty for a single node.
    """

    cluster: Cluster
    model: ModelSpec
    num_gpus: int
    best: PlanPrediction | None
    problem: str | None = None
    at_rate_s: dict[float, float] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Return tokens of all GPUs in a second; 0 where nothing fits."""
        return 0.0 if self.best is None else tokens_per_s(self.model, self.best)

    def gpu_hours(self, tokens: float) -> float:
        """Return what a number of tokens takes; infinite where nothing fits."""
        if self.best is None:
            return float("inf")
        return tokens / self.tokens_per_s * self.num_gpus / 3600.0


def tokens_per_s(model: ModelSpec, found: PlanPrediction) -> float:
    """Return the tokens of an iteration over its seconds, of all GPUs together."""
    return found.plan.global_batch * model.seq_len / found.time_s


def compare_clusters(pairs: Sequence[tuple[Job, Cluster]]) -> list[ClusterOutcome]:
    """Plan each job on its cluster, and again with slower and faster links between nodes.

    Where no plan fits, an outcome has no best and says why in ``problem``.
    """
    return [_outcome(job, cluster) for job, cluster in pairs]


def _outcome(job: Job, cluster: Cluster) -> ClusterOutcome:
    outcome = ClusterOutcome(
        cluster=cluster, model=job.model, num_gpus=job.space.num_gpus, best=None
    )
    try:
        best = _fastest(job, cluster, cluster.fabric)
    except FivefoldError as error:  # of one cluster: the others are still compared
        return dataclasses.replace(outcome, problem=error.message)
    at_rate_s: dict[float, float] = {}
    if job.space.num_gpus > cluster.fabric.gpus_per_node:
        for rate in RATES:
            at_rate_s[rate] = _fastest(job, cluster, _at_rate(cluster.fabric, rate)).time_s
    return dataclasses.replace(outcome, best=best, at_rate_s=at_rate_s)


def _fastest(job: Job, cluster: Cluster, fabric: FabricSpec) -> PlanPrediction:
    return search_plans(job.model, cluster.device, fabric, space=job.space, top=1).best[0]


def _at_rate(fabric: FabricSpec, rate: float) -> FabricSpec:
    node, *outer = fabric.tiers
    tiers = tuple(
        dataclasses.replace(tier, bandwidth_bytes_per_s=rate * tier.bandwidth_bytes_per_s)
        for tier in outer
    )
    return dataclasses.replace(fabric, tiers=(node, *tiers))
