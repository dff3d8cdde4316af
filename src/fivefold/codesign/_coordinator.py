"""Plan down, cost up, until nothing is gained: the coordinator over the layers.

Which information a planner may use, also to predict, is what the co-designs let through. With
Horizontal off every job is planned and predicted as if it were alone; with Vertical off nothing is
predicted and rules decide. What comes out is then judged by the same full simulation for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fivefold.codesign._arbiter import Arbiter, PlanningOptions, objective_s
from fivefold.codesign._codesigns import CoDesigns
from fivefold.codesign._compile import Outcome, run_plan
from fivefold.codesign._jobs import JobSpec, check_jobs
from fivefold.codesign._modules import best_alone_plan, null_plan, routed_one_by_one
from fivefold.codesign._plans import ClusterPlan, JobPlan
from fivefold.codesign._records import DecisionRecord
from fivefold.codesign._single import nominal_record, plan_single
from fivefold.network.topology import Topology

Start = Literal["null", "best"]
_MOST_EVENTS = 3e5  # of simulations in a second look at all iterations


@dataclass(frozen=True, kw_only=True)
class CoDesignResult:
    """A plan for all jobs, with what it was compared to.

    Attributes:
        plan: The decisions.
        baseline: The plan that it started from.
        decisions: Who decided what from which information.
        outcome: The full simulation of the plan.
        baseline_outcome: The full simulation of the baseline.
        simulations: How many simulations planning took.
    """

    plan: ClusterPlan
    baseline: ClusterPlan
    decisions: tuple[DecisionRecord, ...]
    outcome: Outcome
    baseline_outcome: Outcome
    simulations: int

    @property
    def worse(self) -> tuple[str, ...]:
        """Jobs that end later than under the baseline."""
        before = self.baseline_outcome.completion_s
        after = self.outcome.completion_s
        return tuple(name for name in before if after[name] > before[name] * (1 + 1e-6))

    def mean_completion_s(self, jobs: Sequence[JobSpec]) -> float:
        """Weighted mean completion of the plan."""
        return objective_s(jobs, self.outcome.completion_s)


def plan_cluster(
    topology: Topology,
    jobs: Sequence[JobSpec],
    co_designs: CoDesigns | None = None,
    *,
    start: Start = "null",
    seed: int = 0,
    options: PlanningOptions | None = None,
) -> CoDesignResult:
    """Plan all jobs on a cluster.

    Args:
        topology: The cluster.
        jobs: The jobs.
        co_designs: What may be exchanged; None for everything.
        start: Baseline: every layer as today (``"null"``, B0) or at its best alone (``"best"``,
            B1).
        seed: Of hashed paths.
        options: How hard to try; None for the defaults.

    Returns:
        The plan; with Horizontal on never worse than the baseline.

    Raises:
        ConfigurationError: The jobs are not allowed.
        InfeasibleError: A job does not fit the cluster.

    References:
        arXiv 2403.07585 (five layers, four co-designs); the algorithms are named where they are
        used: Crux, CASSINI, SwitchML, ATP.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layers = (LayerCost(forward_s=0.5, backward_s=1.0, gradient_bytes=10**9),) * 2
        >>> jobs = [JobSpec(job_id=n, ranks=(0, 1), layers=layers, iterations=9) for n in "ab"]
        >>> found = plan_cluster(switch(2, bandwidth="1 GB/s"), jobs)
        >>> found.mean_completion_s(jobs) < found.baseline_outcome.completion_s["a"]
        True
    """
    check_jobs(topology, jobs)
    allowed = CoDesigns.all() if co_designs is None else co_designs
    make = null_plan if start == "null" else best_alone_plan
    baseline = make(topology, jobs, seed=seed)
    if allowed.horizontal:
        options = PlanningOptions() if options is None else options
        return _plan_together(topology, jobs, baseline, allowed, seed=seed, options=options)
    single = _plan_singles(topology, tuple(jobs), baseline, allowed, seed)
    outcome, floor = (_outcome(topology, tuple(jobs), one) for one in (single.plan, baseline))
    return CoDesignResult(
        plan=single.plan,
        baseline=baseline,
        decisions=single.decisions,
        outcome=_own(outcome),
        baseline_outcome=_own(floor),
        simulations=0,
    )


def _plan_together(
    topology: Topology,
    jobs: Sequence[JobSpec],
    baseline: ClusterPlan,
    allowed: CoDesigns,
    *,
    seed: int,
    options: PlanningOptions,
) -> CoDesignResult:
    """With Horizontal: what jobs plan for themselves is put before all of them."""
    singles = {
        subset.label: _plan_singles(topology, tuple(jobs), baseline, subset, seed)
        for subset in CoDesigns.combinations()
        if subset in allowed and not subset.horizontal
    }
    arbiter = Arbiter(topology, jobs, baseline, allowed, options)
    plan, outcome, floor = _arbitrate(arbiter, jobs, singles)
    simulations = arbiter.simulations
    longer = _judging_longer(jobs, options, floor)
    if plan == baseline and longer is not None:
        # A few iterations show no gain, or none that lasts: judge by all of them.
        arbiter = Arbiter(topology, jobs, baseline, allowed, longer)
        plan, outcome, floor = _arbitrate(arbiter, jobs, singles)
        simulations += arbiter.simulations
    adopted = None if arbiter.adopted is None else singles[arbiter.adopted]
    decisions = _nominal(jobs) if adopted is None else list(adopted.decisions)
    return CoDesignResult(
        plan=plan,
        baseline=baseline,
        decisions=(*decisions, *arbiter.log),
        outcome=_own(outcome),
        baseline_outcome=_own(floor),
        simulations=simulations,
    )


def _arbitrate(
    arbiter: Arbiter, jobs: Sequence[JobSpec], singles: Mapping[str, _Singles]
) -> tuple[ClusterPlan, Outcome, Outcome]:
    """Let jobs share the network and keep what hurts nobody: plan, outcome, the baseline's."""
    arbiter.improve(
        {label: found.plan for label, found in singles.items()},
        _other_splits(jobs, singles.values()),
    )
    return _keep_promise(arbiter.topology, jobs, arbiter)


def _judging_longer(
    jobs: Sequence[JobSpec], options: PlanningOptions, floor: Outcome
) -> PlanningOptions | None:
    """Return the options with all iterations and as large a budget as their simulation allows."""
    most = max(job.iterations for job in jobs)
    assert floor.result is not None, "run_plan simulates"
    budget = min(options.budget, int(_MOST_EVENTS // max(1, floor.result.events)))
    if most <= options.iterations or not budget:
        return None
    return replace(options, iterations=most, budget=budget)


@dataclass(frozen=True)
class _Singles:
    """What all jobs planned for themselves; with Vertical, each job's other splits too."""

    plan: ClusterPlan
    decisions: tuple[DecisionRecord, ...]
    splits: Mapping[str, tuple[JobPlan, ...]]


def _nominal(jobs: Sequence[JobSpec]) -> list[DecisionRecord]:
    """Return what layer 1 decided where the baseline was kept."""
    return [nominal_record(job) for job in jobs if job.splits]


def _other_splits(
    jobs: Sequence[JobSpec], singles: Iterable[_Singles]
) -> dict[str, tuple[JobPlan, ...]]:
    """Of each job its other splits, as the planners with most information have them."""
    found: dict[str, tuple[JobPlan, ...]] = {}
    for one in singles:  # combinations come in order of what they let through
        found |= {name: plans for name, plans in one.splits.items() if plans}
    return {job.job_id: found.get(job.job_id, ()) for job in jobs if job.splits}


@functools.lru_cache(maxsize=4)
def _outcome(topology: Topology, jobs: tuple[JobSpec, ...], plan: ClusterPlan) -> Outcome:
    """Return the full simulation; an ablation asks for that of the baseline again and again."""
    return run_plan(topology, jobs, plan)


def _own(outcome: Outcome) -> Outcome:
    """Return a copy that the caller may change without changing what is remembered."""
    return replace(
        outcome, completion_s=dict(outcome.completion_s), iteration_s=dict(outcome.iteration_s)
    )


@functools.lru_cache(maxsize=32)
def _plan_singles(
    topology: Topology,
    jobs: tuple[JobSpec, ...],
    baseline: ClusterPlan,
    allowed: CoDesigns,
    seed: int,
) -> _Singles:
    """Layers 1 to 3 of each job, and with Vertical its paths, as if it were alone."""
    plan, splits = baseline, {}
    decisions: list[DecisionRecord] = []
    for job in jobs:
        found = plan_single(topology, job, plan.jobs[job.job_id], allowed)
        plan = ClusterPlan({**plan.jobs, job.job_id: found.plan})
        splits[job.job_id] = found.splits
        decisions += found.decisions
    if allowed.vertical and plan != baseline:
        plan = routed_one_by_one(topology, jobs, plan, seed=seed)
        decisions.append(
            DecisionRecord(
                layer="flows",
                entity="each job",
                decision="paths by the job's own load",
                alternatives={},
                inputs=(("FlowSet.flows", "collectives"), ("ClusterGraph.links", "network")),
                co_designs=("V",),
            )
        )
    return _Singles(plan, tuple(decisions), splits)


def _keep_promise(
    topology: Topology, jobs: Sequence[JobSpec], arbiter: Arbiter
) -> tuple[ClusterPlan, Outcome, Outcome]:
    """The last accepted plan that also in full simulation hurts nobody; the baseline hurts none."""
    floor = _outcome(topology, tuple(jobs), arbiter.baseline)
    before = objective_s(jobs, floor.completion_s)
    for accepted in reversed(arbiter.history[1:]):
        found = _outcome(topology, tuple(jobs), accepted.plan)
        outcome = found.completion_s
        late = arbiter.worse(outcome, floor.completion_s)
        if objective_s(jobs, outcome) <= before and not (arbiter.options.guard and late):
            return accepted.plan, found, floor
    return arbiter.baseline, floor, floor
