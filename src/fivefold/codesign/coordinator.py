"""Plan down, cost up, until nothing is gained: the coordinator over the layers.

Which information a planner may use, also to predict, is what the co-designs let through. With
Horizontal off every job is planned and predicted as if it were alone; with Vertical off nothing is
predicted and rules decide. What comes out is then judged by the same full simulation for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fivefold.codesign.arbiter import Arbiter, PlanningOptions, Progress, objective_s
from fivefold.codesign.baselines import best_alone_plan, local_order, null_plan, routed_one_by_one
from fivefold.codesign.jobs import JobSpec, check_jobs
from fivefold.codesign.plans import ClusterPlan, CoDesigns, DecisionRecord, JobPlan
from fivefold.codesign.simulate import Outcome, alone_quote, run_plan, schedule_iteration
from fivefold.codesign.steps import job_groups
from fivefold.codesign.synthesized import may_synthesize
from fivefold.codesign.trees import SwitchState, TreeChoice, nearest_roots, spread_trees
from fivefold.collectives.pricing.phases import ALGORITHMS, Algorithm, host_groups
from fivefold.errors import require_one_of
from fivefold.network.topology import Topology
from fivefold.tasks.iteration import STATE_AXES
from fivefold.tasks.schedule import Ordering

_BUCKETS: tuple[int | None, ...] = (None, 25_000_000, 100_000_000, 0)


_LINKS = ("ClusterGraph.links", "network")
_QUOTE = ("CostQuote.time_s", "collectives")


@dataclass(frozen=True)
class _Option:
    """A plan of layers 1 to 3, in what each of them chose; seconds where it was priced."""

    algorithm: str
    plan: JobPlan
    co_designs: tuple[str, ...] = ()
    split: str = ""
    tasks: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Return the names of split, algorithm and tasks."""
        return ", ".join(part for part in (self.split, self.algorithm, self.tasks) if part)


@dataclass(frozen=True)
class SinglePlan:
    """Plan that a job makes for itself."""

    plan: JobPlan
    decisions: tuple[DecisionRecord, ...]
    splits: tuple[JobPlan, ...] = ()


def plan_single(
    topology: Topology,
    job: JobSpec,
    start: JobPlan,
    co_designs: CoDesigns,
    switches: SwitchState | None = None,
    choices: tuple[Algorithm, ...] = ALGORITHMS,
) -> SinglePlan:
    """Plan layers 1 to 3 of one job, as if it were alone; aggregating switches know their trees."""
    if not co_designs.vertical:
        # Without prices: the last collective on offer, and layer 1's favourite.
        chosen = [*collective_options(topology, job, start, co_designs, switches, choices)][-1]
        records = [nominal_record(job)] if job.splits else []
        if chosen.plan != start:
            nodes = (("ClusterGraph.nodes", "network"),)
            rule = f"{chosen.algorithm}, by rule"
            records.append(
                DecisionRecord("collectives", job.job_id, rule, nodes, chosen.co_designs)
            )
        return SinglePlan(chosen.plan, tuple(records))
    weighed = sorted(
        _weighed(topology, job, start, co_designs, switches, choices), key=lambda one: one.seconds
    )
    best = weighed[0]
    of_splits: dict[str, _Option] = {}
    for one in weighed:
        of_splits.setdefault(one.split, one)
    others = tuple(one.plan for one in of_splits.values() if one.split != best.split)
    return SinglePlan(best.plan, tuple(_records(job, weighed, of_splits)), others)


def _weighed(
    topology: Topology,
    job: JobSpec,
    start: JobPlan,
    co_designs: CoDesigns,
    switches: SwitchState | None,
    choices: tuple[Algorithm, ...],
) -> Iterator[_Option]:
    """Yield every option of layers 1 to 3 at the price that the layers below ask for it."""
    for number in range(max(1, len(job.splits))):
        split = job.splits[number].name if job.splits else ""
        begin = start
        if number != start.split:
            begin = replace(start, split=number, order=job.splits[number].ranks, paths={})
        for option in collective_options(topology, job, begin, co_designs, switches, choices):
            quote = alone_quote(topology, job, option.plan)
            for plan in task_options(option.plan):
                seconds = schedule_iteration(job, plan, quote).end_s
                yield replace(
                    option, plan=plan, split=split, tasks=plan.order_words, seconds=seconds
                )


def _records(
    job: JobSpec, weighed: Sequence[_Option], of_splits: Mapping[str, _Option]
) -> Iterator[DecisionRecord]:
    """Yield who decided for the first of the options, and against which others."""
    best, name = weighed[0], job.job_id
    if job.splits:
        known = (("JobSpec.model", "strategy"), ("PlanReport.iteration_s", "tasks"), _QUOTE, _LINKS)
        seconds = {split: one.seconds for split, one in of_splits.items()}
        yield DecisionRecord("strategy", name, best.split, known, ("V",), seconds)
    same = {one.name: one.seconds for one in weighed if one.split == best.split}
    asked, tags = (_LINKS, ("CommTask.criticality", "tasks")), ("V", *best.co_designs)
    yield DecisionRecord("collectives", name, best.algorithm, asked, tags, same)
    yield DecisionRecord("tasks", name, best.tasks, (_QUOTE,), ("V",), same)


def nominal_record(job: JobSpec) -> DecisionRecord:
    """Record layer 1's choice by itself: the cheapest split by the devices' nominal constants."""
    known = (("JobSpec.model", "strategy"), ("nominal bandwidth", "strategy"))
    seconds = {split.name: split.nominal_s for split in job.splits}
    return DecisionRecord("strategy", job.job_id, job.splits[0].name, known, (), seconds)


def collective_options(
    topology: Topology,
    job: JobSpec,
    start: JobPlan,
    co_designs: CoDesigns,
    switches: SwitchState | None = None,
    choices: Sequence[Algorithm] = ALGORITHMS,
) -> Iterator[_Option]:
    """Yield what layer 3 may choose among; the plan so far comes first."""
    yield _Option(f"{_words(start)} in the order given", start)
    ranks = start.order
    order = local_order(topology, ranks) if co_designs.vertical else ranks
    if order != start.order:
        along = replace(start, order=order, paths={})
        yield _Option(f"{_words(start)} along the topology", along)
    groups = _reducing_groups(job.split_as(start.split), replace(start, order=order))
    for algorithm in _flat_algorithms(topology, groups, choices) if co_designs.vertical else ():
        plan = replace(start, order=order, algorithm=algorithm, paths={})
        yield _Option(algorithm.replace("_", " "), plan)
    by_host = [host_groups(topology, group) for group in groups]
    even = all(hosts is not None for hosts in by_host)
    several = [hosts for hosts in by_host if hosts and 1 < len(hosts[0]) < sum(map(len, hosts))]
    if co_designs.intra_inter and even and several and "hierarchical" in choices:
        plan = replace(start, order=order, algorithm="hierarchical", paths={})
        yield _Option("hierarchical", plan, ("II",))
    # Several ranks of a host reduce inside it first, which only Intra-Inter may plan.
    single = even and all(len(hosts[0]) == 1 for hosts in by_host if hosts)
    if co_designs.host_net and even and (single or co_designs.intra_inter):
        tags = ("HN",) if single else ("II", "HN")
        state = SwitchState(topology) if switches is None else switches
        start = replace(start, order=order)
        for choice in _tree_choices(topology, job, start, state, everywhere=co_designs.vertical):
            plan = replace(start, **choice.changes())  # type: ignore[arg-type]
            yield _Option(f"in the network at {choice.name}", plan, tags)


def _words(plan: JobPlan) -> str:
    return plan.algorithm.replace("_", " ")


def _flat_algorithms(
    topology: Topology, groups: Sequence[tuple[int, ...]], choices: Sequence[Algorithm]
) -> Iterator[Algorithm]:
    """Yield the algorithms beside rings and trees that may pay for groups that reduce."""
    for name in ("tree", "halving_doubling"):
        if name in choices and any(len(group) > 2 for group in groups):
            yield name
    if "synthesized" in choices and any(may_synthesize(topology, group) for group in groups):
        yield "synthesized"


def _tree_choices(
    topology: Topology, job: JobSpec, start: JobPlan, switches: SwitchState, *, everywhere: bool
) -> Iterator[TreeChoice]:
    """Yield trees where switches carry least; everywhere: also all at one that serves nobody."""
    apart = spread_trees(topology, job, start, loads=switches.loads, free=switches.free)
    if apart is not None:
        yield apart
    for one in nearest_roots(topology, job, start) if everywhere else ():
        if one != apart and switches.serving_nobody(one.roots):
            yield one


def _reducing_groups(job: JobSpec, plan: JobPlan) -> list[tuple[int, ...]]:
    """Return the groups that reduce gradients."""
    axes = [""]
    if job.mesh is not None:
        axes = [
            axis for axis in STATE_AXES if any(m.axis == axis for m in job.mesh.demand.messages)
        ]
    return [group for axis in axes for group in job_groups(job, plan, axis) if len(group) > 1]


def task_options(plan: JobPlan) -> Iterator[JobPlan]:
    """Yield what layer 2 may choose among; the plan so far comes first."""
    yield plan
    for bucket in _BUCKETS:
        for overlap in (False, True):
            ordering: Ordering = "priority" if overlap else "fifo"
            option = replace(plan, bucket_bytes=bucket, overlap_forward=overlap, ordering=ordering)
            if option != plan:
                yield option


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
        """Return the weighted mean completion of the plan."""
        return objective_s(jobs, self.outcome.completion_s)


def plan_cluster(
    topology: Topology,
    jobs: Sequence[JobSpec],
    co_designs: CoDesigns | None = None,
    *,
    start: Start = "null",
    seed: int = 0,
    options: PlanningOptions | None = None,
    progress: Progress | None = None,
) -> CoDesignResult:
    """Plan all jobs on a cluster.

    Args:
        topology: The cluster.
        jobs: The jobs.
        co_designs: Co-designs to enable; None for everything.
        start: Baseline: every layer as today (``"null"``, B0) or at its best alone (``"best"``,
            B1).
        seed: Seed of the hashed paths.
        options: How hard to try; None for the defaults.
        progress: Called with what is done, how often, and the most times: jobs planned alone, then
            simulations.

    Returns:
        The plan; with Horizontal on never worse than the baseline.

    Raises:
        ConfigurationError: The jobs are not allowed, or there is no such baseline.
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
    require_one_of(start, get_args(Start), f"there is no baseline {start!r}")
    allowed = CoDesigns.all() if co_designs is None else co_designs
    make = null_plan if start == "null" else best_alone_plan
    options = PlanningOptions() if options is None else options
    baseline = make(topology, jobs, seed=seed, algorithm=options.library)
    if allowed.horizontal:
        plan, decisions, outcome, floor, simulations = _plan_together(
            topology, jobs, baseline, allowed, seed=seed, options=options, progress=progress
        )
    else:
        single = _plan_singles(topology, tuple(jobs), baseline, allowed, seed, options.algorithms)
        plan, decisions, simulations = single.plan, single.decisions, 0
        outcome, floor = (_outcome(topology, tuple(jobs), one) for one in (plan, baseline))
    return CoDesignResult(
        plan=plan,
        baseline=baseline,
        decisions=decisions,
        outcome=_own(outcome),
        baseline_outcome=_own(floor),
        simulations=simulations,
    )


def _plan_together(
    topology: Topology,
    jobs: Sequence[JobSpec],
    baseline: ClusterPlan,
    allowed: CoDesigns,
    *,
    seed: int,
    options: PlanningOptions,
    progress: Progress | None,
) -> tuple[ClusterPlan, tuple[DecisionRecord, ...], Outcome, Outcome, int]:
    """Plan with Horizontal: put before all jobs what each planned for itself."""
    subsets = [s for s in CoDesigns.combinations() if s in allowed and not s.horizontal]
    singles = {}
    for number, subset in enumerate(subsets):
        if progress is not None:
            progress("jobs planned alone", number, len(subsets))
        singles[subset.label] = _plan_singles(
            topology, tuple(jobs), baseline, subset, seed, options.algorithms
        )
    arbiter = Arbiter(topology, jobs, baseline, allowed, options, progress)
    plan, outcome, floor = _arbitrate(arbiter, singles)
    simulations = arbiter.simulations
    if arbiter.adopted is not None and simulations < options.budget:
        # What is best for each alone may be no place to begin from: also share what there is.
        rest = replace(options, budget=options.budget - simulations)
        plainly = Arbiter(topology, jobs, baseline, allowed, rest, progress)
        other_plan, other, _ = _arbitrate(plainly, {})
        simulations += plainly.simulations
        if objective_s(jobs, other.completion_s) < objective_s(jobs, outcome.completion_s):
            arbiter, plan, outcome = plainly, other_plan, other
    # All iterations, and as large a budget as their simulation allows.
    most = max(job.iterations for job in jobs)
    budget = min(options.budget, int(_MOST_EVENTS // max(1, floor.result.events)))
    if plan == baseline and most > options.iterations and budget:
        # A few iterations show no gain, or none that lasts: judge by all of them.
        longer = replace(options, iterations=most, budget=budget)
        arbiter = Arbiter(topology, jobs, baseline, allowed, longer, progress)
        plan, outcome, floor = _arbitrate(arbiter, singles)
        simulations += arbiter.simulations
    decisions = tuple(nominal_record(job) for job in jobs if job.splits)  # of a baseline kept
    if arbiter.adopted is not None:
        decisions = singles[arbiter.adopted].decisions
    return plan, (*decisions, *arbiter.log), outcome, floor, simulations


def _arbitrate(
    arbiter: Arbiter, singles: Mapping[str, _Singles]
) -> tuple[ClusterPlan, Outcome, Outcome]:
    """Let jobs share the network and keep what hurts nobody: plan, outcome, the baseline's.

    The plan is the last accepted one that holds in full simulation; else the baseline.
    """
    splits: dict[str, tuple[JobPlan, ...]] = {}
    for one in singles.values():  # combinations come in order of what they let through
        splits |= {name: plans for name, plans in one.splits.items() if plans}
    arbiter.improve({label: found.plan for label, found in singles.items()}, splits)
    topology, jobs = arbiter.topology, tuple(arbiter.jobs)
    floor = _outcome(topology, jobs, arbiter.baseline)
    before = objective_s(jobs, floor.completion_s)
    for accepted in reversed(arbiter.history[1:]):
        found = _outcome(topology, jobs, accepted.plan)
        late = arbiter.worse(found.completion_s, floor.completion_s)
        if objective_s(jobs, found.completion_s) <= before and not (arbiter.options.guard and late):
            return accepted.plan, found, floor
    return arbiter.baseline, floor, floor


@dataclass(frozen=True)
class _Singles:
    """Plans that all jobs made for themselves; with Vertical, each job's other splits too."""

    plan: ClusterPlan
    decisions: tuple[DecisionRecord, ...]
    splits: Mapping[str, tuple[JobPlan, ...]]


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
    choices: tuple[Algorithm, ...],
) -> _Singles:
    """Plan layers 1 to 3 of each job, and with Vertical its paths, as if it were alone."""
    plan, splits = baseline, {}
    decisions: list[DecisionRecord] = []
    switches = SwitchState(topology)
    for job in jobs:
        found = plan_single(topology, job, plan.jobs[job.job_id], allowed, switches, choices)
        switches.admit(job, found.plan)
        plan = ClusterPlan({**plan.jobs, job.job_id: found.plan})
        splits[job.job_id] = found.splits
        decisions += found.decisions
    if allowed.vertical and plan != baseline:
        plan = routed_one_by_one(topology, jobs, plan, seed=seed)
        known = (("FlowSet.flows", "collectives"), _LINKS)
        how = "paths by the job's own load"
        decisions.append(DecisionRecord("flows", "each job", how, known, ("V",)))
    return _Singles(plan, tuple(decisions), splits)
