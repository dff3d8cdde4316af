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
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import FabricSpec
from fivefold.errors import FivefoldError, InfeasibleError
from fivefold.strategy._columns import Columns, Floats
from fivefold.strategy._memory import stored_bytes
from fivefold.strategy._muon import moment_bytes
from fivefold.strategy._space import (
    Outer,
    Pattern,
    SearchSpace,
    block_table,
    divisors,
    inner_table,
    layer_table,
    outer_choices,
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


@dataclass
class _Found:
    """The state of a search."""

    model: ModelSpec
    device: DeviceSpec
    fabric: FabricSpec
    top: int
    times: Floats = field(default_factory=lambda: np.zeros(0))
    memory: Floats = field(default_factory=lambda: np.zeros(0))
    plans: list[ParallelPlan] = field(default_factory=list)
    front: list[tuple[float, float, ParallelPlan]] = field(default_factory=list)
    evaluated: int = 0
    over: int = 0
    longer: int = 0
    least_bytes: float = np.inf
    least_plan: ParallelPlan | None = None

    @property
    def worst_s(self) -> float:
        """Return the time that a plan must beat to be kept."""
        return float(self.times[-1]) if len(self.times) == self.top else np.inf

    def look_at(self, table: PlanTable, *, front: bool, taus: Sequence[int]) -> None:
        """Evaluate a block and keep what is best."""
        if not len(table):
            return
        costs = evaluate_table(self.model, self.device, self.fabric, table=table)
        fits = costs.memory_bytes <= self.device.memory_bytes
        self.evaluated += len(table)
        self.over += int((~fits).sum())
        least = int(np.argmin(costs.memory_bytes))
        if costs.memory_bytes[least] < self.least_bytes:
            self.least_bytes = float(costs.memory_bytes[least])
            self.least_plan = table.plan(least)
        # A longer round disturbs compute less often and learns less of a token: it is for plans
        # whose outer updates a shorter one does not hide.
        shorter = np.r_[0, taus][np.searchsorted(taus, table.tau)]
        longer = fits & (shorter > 1) & (shorter >= costs.least_tau)
        self.longer += int(longer.sum())
        rows = np.flatnonzero(fits & ~longer)
        if not len(rows):
            return
        self._keep_best(table, rows, costs.time_s[rows])
        if front:
            self._keep_front(table, rows, costs.time_s[rows], costs.memory_bytes[rows])

    def _keep_best(self, table: PlanTable, rows: npt.NDArray[np.int64], times: Floats) -> None:
        # Switches without effect (selective recomputation of fused attention) give equal times:
        # the first, plainest one of each is kept.
        unique, first = np.unique(times, return_index=True)
        few = first[(unique < self.worst_s) & ~np.isin(unique, self.times)][: self.top]
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

    def beats(self, time_s: float, memory_bytes: float, *, front: bool) -> bool:
        """Return whether what was found makes plans with these bounds pointless."""
        if time_s < self.worst_s:
            return False
        return not front or any(t <= time_s and m <= memory_bytes for t, m, _ in self.front)


def search_plans(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, space: SearchSpace, top: int = 1,
    front: bool = False, bounds: bool = True,
) -> PlanSearchResult:  # fmt: skip
    """Find the fastest plans that fit in memory.

    Args:
        model: What is trained.
        device: On which GPU and stack.
        fabric: Joined how.
        space: Which plans are looked at.
        top: How many of the fastest to return.
        front: Whether the Pareto front of time against memory is wanted, which bounds less.
        bounds: False evaluates every plan.

    Raises:
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
    if space.num_gpus > fabric.num_gpus:
        message = f"the job wants {space.num_gpus} GPUs, {fabric.name!r} has {fabric.num_gpus}"
        raise InfeasibleError(message, hint=f"use at most {fabric.num_gpus} GPUs")
    space = _with_workers(space, fabric)
    outer = outer_choices(model, space, fabric=fabric)
    if not outer.plans:
        _raise_no_choice(outer, space)
    found = _Found(model=model, device=device, fabric=fabric, top=top)
    walk = _Walk(found, space, outer.plans, front=front, bounds=bounds)
    walk.run()
    ruled_out = walk.ruled_out
    num_bounded = sum(ruled_out.values())
    if not found.plans:
        _raise_no_fit(found, space)
    ruled_out["memory: more than the device has"] += found.over
    if found.longer:
        ruled_out["tau: a shorter round hides its outer updates too"] = found.longer
    ruled_out.update({f"cannot run: {reason}": n for reason, n in outer.ruled_out.items()})
    listed = sorted(found.front, key=lambda point: point[0])
    return PlanSearchResult(
        best=tuple(evaluate_plan(model, device, fabric, plan=plan) for plan in found.plans),
        front=tuple(evaluate_plan(model, device, fabric, plan=plan) for *_, plan in listed),
        num_plans=walk.num_plans, num_evaluated=found.evaluated, num_over_memory=found.over,
        num_bounded=num_bounded, ruled_out=dict(ruled_out),
        seconds=time.perf_counter() - started_s,
    )  # fmt: skip


def _with_workers(space: SearchSpace, fabric: FabricSpec) -> SearchSpace:
    """Let ranks of a node share states where local updates are asked for and nothing is said."""
    if max(space.tau) == 1 or space.shards != (None,):
        return space
    inside = [size for size in divisors(fabric.gpus_per_node) if size > 1]
    return dataclasses.replace(space, shards=(None, *inside))


class _Walk:
    """Goes through the outer choices in the order of their bounds."""

    def __init__(
        self, found: _Found, space: SearchSpace, plans: list[ParallelPlan], *, front: bool,
        bounds: bool,
    ) -> None:  # fmt: skip
        self.found, self.plans, self.front = found, plans, front
        self.taus = sorted(set(space.tau))
        self.ruled_out: Counter[str] = Counter()
        self.patterns = [Pattern.of(found.model, space, plan) for plan in plans]
        self.inner = {pattern: inner_table(space, pattern) for pattern in set(self.patterns)}
        self.time_s = np.zeros(len(plans))
        self.memory_bytes = np.zeros(len(plans))
        if bounds:
            self.time_s, self.memory_bytes = _lower_bounds(
                found.model, found.device, found.fabric, space=space, plans=plans,
                patterns=self.patterns,
            )  # fmt: skip

    def size(self, i: int) -> int:
        """Return the plans of an outer choice."""
        return len(self.inner[self.patterns[i]]["recompute"])

    @property
    def num_plans(self) -> int:
        """Return the plans of the space."""
        return sum(self.size(i) for i in range(len(self.plans)))

    def run(self) -> None:
        """Evaluate what no bound rules out."""
        waiting: list[int] = []
        rows = 0
        for i in np.argsort(self.time_s, kind="stable"):
            waiting.append(int(i))
            rows += self.size(int(i))
            # Small blocks first: a good plan found early rules out most of the rest.
            if rows >= min(_BLOCK_ROWS, _FIRST_ROWS + self.found.evaluated):
                self.look_at(waiting)
                waiting, rows = [], 0
        self.look_at(waiting)

    def look_at(self, chosen: list[int]) -> None:
        """Evaluate some outer choices with all their switches, or say why not."""
        by_pattern: dict[Pattern, list[ParallelPlan]] = {}
        for i in chosen:
            if self.memory_bytes[i] > self.found.device.memory_bytes:
                reason = "memory: more than the device has, whatever the switches"
            elif self.found.beats(self.time_s[i], self.memory_bytes[i], front=self.front):
                reason = "time: the bound is above the best found"
            else:
                by_pattern.setdefault(self.patterns[i], []).append(self.plans[i])
                continue
            self.ruled_out[reason] += self.size(i)
        for pattern, plans in by_pattern.items():
            table = block_table(plans, self.inner[pattern])
            self.found.look_at(table, front=self.front, taus=self.taus)


def _lower_bounds(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, space: SearchSpace,
    plans: list[ParallelPlan], patterns: list[Pattern],
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return the least seconds and bytes of every outer choice, whatever its switches.

    Time: every micro-batch on a stage of mean speed at the fastest layer that any switch gives, and
    the bubble at that speed. The slowest stage is no faster than the mean, messages and the
    optimizer only add. Memory: states shared and offloaded as far as the space allows, the least
    stored activations of any switch.
    """
    time_s, memory_bytes = np.zeros(len(plans)), np.zeros(len(plans))
    for pattern in set(patterns):
        rows = np.array([i for i, p in enumerate(patterns) if p == pattern])
        inner = layer_table(space, pattern)
        table = block_table([plans[i] for i in rows], inner)
        columns = Columns(model, device, fabric, table)
        shape = (len(rows), len(inner["recompute"]))
        time_s[rows] = least_time_s(columns).reshape(shape).min(axis=1)
        stored = stored_bytes(columns, stage=0)
        if True in space.offload:
            stored = np.minimum(stored, 2.0 * columns.layer["stored_bytes"])
        working = 0.0 if device.frees_gradients else columns.layer["working_bytes"]
        least = (stored + working).reshape(shape).min(axis=1)
        states = _least_states(columns, space, pattern).reshape(shape).min(axis=1)
        memory_bytes[rows] = least + states + device.reserved_bytes
    return time_s * (1 - _ROUNDING), memory_bytes * (1 - _ROUNDING)


def _least_states(columns: Columns, space: SearchSpace, pattern: Pattern) -> Floats:
    """Return the states of the first stage, whose activations the bound takes too."""
    kept, routed = columns.parameters(0)
    whole = kept + routed
    levels = space.zero if pattern.copies else (0,)
    most = max(levels)
    shards = columns.replicas
    shared = kept / shards + routed / np.maximum(shards / columns.table.expert, 1.0)
    frozen = columns.frozen_bytes(0, width=columns.element_bytes)
    frozen_shared = frozen[0] / shards + frozen[1] / np.maximum(shards / columns.table.expert, 1.0)
    weights = columns.element_bytes * (shared if most >= 3 else whole)
    weights = weights + (frozen_shared if most >= 3 else sum(frozen))
    gradients = columns.device.gradient_bytes * (shared if most >= 2 else whole)
    if columns.device.frees_gradients:  # activations may be what is there instead
        gradients = np.zeros(len(whole))
    bytes_each = columns.state_bytes
    if "muon" in space.optimizers:
        bytes_each = bytes_each - moment_bytes(columns.device)
    optimizer = bytes_each * (shared if most >= 1 else whole)
    if True in space.offload:
        layers = np.maximum(columns.model.num_layers / columns.table.pipeline, 1.0)
        return weights * np.minimum(2.0 / layers, 1.0) + gradients
    return weights + gradients + optimizer


def _raise_no_choice(outer: Outer, space: SearchSpace) -> None:
    reasons = "; ".join(reason for reason, _ in outer.ruled_out.most_common(3))
    reasons = reasons or f"no degrees of the search space multiply to {space.num_gpus}"
    message = (
        f"no split of {space.num_gpus} GPUs and {space.global_batch} samples can run: {reasons}"
    )
    hint = "change the number of GPUs or the global batch, or allow more degrees in [search]"
    raise InfeasibleError(message, hint=hint)


def _raise_no_fit(found: _Found, space: SearchSpace) -> None:
    """Say what binds, and look for the nearest change that helps."""
    device = found.device
    changes = []
    if space.offload == (False,) and _fits(
        found, dataclasses.replace(space, offload=(False, True))
    ):
        changes.append("allow offloading to host memory")
    if 3 not in space.zero and _fits(found, dataclasses.replace(space, zero=(0, 1, 2, 3))):
        changes.append("allow ZeRO-3")
    if "full" not in space.recompute:
        wider = dataclasses.replace(space, recompute=("none", "selective", "full"))
        if _fits(found, wider):
            changes.append("allow full recomputation")
    for doubling in range(1, _MOST_DOUBLINGS):
        count = space.num_gpus << doubling
        larger = dataclasses.replace(space, num_gpus=count)
        if count <= found.fabric.num_gpus and _fits(found, larger):
            changes.append(f"use {count} GPUs")
            break
    needed = found.least_bytes
    if found.least_plan is None:
        table = _bytes_bounds(found, space)
        needed = float(table.min())
    message = (
        f"no plan fits: memory binds; the least that any plan needs is {format_bytes(needed)} "
        f"a GPU, {device.name!r} has {format_bytes(device.memory_bytes)}"
    )
    hint = "nearest changes: " + ("; or ".join(changes) or "a device with more memory")
    raise InfeasibleError(message, hint=hint)


def _bytes_bounds(found: _Found, space: SearchSpace) -> Floats:
    """Return lower bounds of memory over a space."""
    plans = outer_choices(found.model, space, fabric=found.fabric).plans
    patterns = [Pattern.of(found.model, space, plan) for plan in plans]
    return _lower_bounds(
        found.model, found.device, found.fabric, space=space, plans=plans, patterns=patterns
    )[1]


def _fits(found: _Found, space: SearchSpace) -> bool:
    """Return whether any plan of a space fits in memory."""
    outer = outer_choices(found.model, space, fabric=found.fabric)
    if not outer.plans:
        return False
    state = _Found(model=found.model, device=found.device, fabric=found.fabric, top=1)
    walk = _Walk(state, space, outer.plans, front=False, bounds=True)
    order = np.argsort(walk.memory_bytes, kind="stable")
    for i in order[:_MOST_TRIED]:
        if walk.memory_bytes[i] > found.device.memory_bytes:
            return False
        walk.look_at([int(i)])
        if state.plans:
            return True
    return False


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
    """Return the tokens of an iteration over its seconds, of all GPUs together.

    Examples:
        >>> from fivefold.strategy import ParallelPlan, evaluate_plan, load_cluster, load_model
        >>> model, cluster = load_model("gpt3-1.3b"), load_cluster("a100-megatron")
        >>> plan = ParallelPlan(global_batch=8, data=8)
        >>> found = evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
        >>> tokens_per_s(model, found) == 8 * model.seq_len / found.time_s
        True
    """
    return found.plan.global_batch * model.seq_len / found.time_s


def compare_clusters(pairs: Sequence[tuple[Job, Cluster]]) -> list[ClusterOutcome]:
    """Plan each job on its cluster, and again with slower and faster links between nodes.

    Args:
        pairs: A job for each cluster: GPUs may differ.

    Returns:
        An outcome each, in the same order; where no plan fits it says why.
    """
    return [_outcome(job, cluster) for job, cluster in pairs]


def _outcome(job: Job, cluster: Cluster) -> ClusterOutcome:
    known = {"cluster": cluster, "model": job.model, "num_gpus": job.space.num_gpus}
    try:
        best = _fastest(job, cluster, cluster.fabric)
    except FivefoldError as error:  # of one cluster: the others are still compared
        return ClusterOutcome(**known, best=None, problem=error.message)  # type: ignore[arg-type]
    at_rate_s: dict[float, float] = {}
    if job.space.num_gpus > cluster.fabric.gpus_per_node:
        for rate in RATES:
            at_rate_s[rate] = _fastest(job, cluster, _at_rate(cluster.fabric, rate)).time_s
    return ClusterOutcome(**known, best=best, at_rate_s=at_rate_s)  # type: ignore[arg-type]


def _fastest(job: Job, cluster: Cluster, fabric: FabricSpec) -> PlanPrediction:
    return search_plans(job.model, cluster.device, fabric, space=job.space, top=1).best[0]


def _at_rate(fabric: FabricSpec, rate: float) -> FabricSpec:
    node, *outer = fabric.tiers
    tiers = tuple(
        dataclasses.replace(tier, bandwidth_bytes_per_s=rate * tier.bandwidth_bytes_per_s)
        for tier in outer
    )
    return dataclasses.replace(fabric, tiers=(node, *tiers))
