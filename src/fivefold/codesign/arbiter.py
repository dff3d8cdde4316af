"""Horizontal: jobs share paths, classes, times and slots so that none loses.

Every proposal is judged by simulating all jobs together, and taken only where the weighted mean
completion improves and no job ends later than under the baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fivefold.codesign.baselines import job_traffic, routed
from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, CoDesigns, DecisionRecord, JobPlan, Layer
from fivefold.codesign.simulate import run_plan
from fivefold.codesign.steps import edge_route
from fivefold.codesign.trees import aggregated_columns, free_slots, job_trees, spread_trees
from fivefold.collectives.pricing.phases import ALGORITHMS, Algorithm, tree_links
from fivefold.errors import require_one_of, require_whole
from fivefold.flows import priority_classes, time_shifts
from fivefold.flows.routing import Routing
from fivefold.network.topology import Topology

Progress = Callable[[str, int, int], None]
_TOLERANCE = 1e-6
_MENDING_SHARE = 4  # of the budget: at most one part in so many mends one proposal
_LOADS = (("LinkState.load_Bps", "network"), ("FlowSet.flows", "collectives"))
_INPUTS: dict[Layer, tuple[tuple[str, str], ...]] = dict.fromkeys(
    ("tasks", "collectives", "flows", "coordinator"), _LOADS
)
_INPUTS["strategy"] = (("PlanReport.iteration_s", "tasks"), *_LOADS)
_INPUTS["network"] = (("SwitchState.slots_free", "network"), *_LOADS)


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Guard and budget of the coordinator's search.

    Args:
        guard: With Horizontal on: whether nobody may end later than under the baseline.
        iterations: Iterations that are simulated to judge a proposal.
        budget: Most simulations while planning; once more where these iterations show no gain and
            jobs have more of them.
        classes: Strict priority classes that switches have; 1 for none.
        algorithms: What layer 3 may choose among, such as what can be run.

    Raises:
        ConfigurationError: A number is below one, or there is no such algorithm.
    """

    guard: bool = True
    iterations: int = 6
    budget: int = 60
    classes: int = 8
    algorithms: tuple[Algorithm, ...] = ALGORITHMS

    def __post_init__(self) -> None:
        for name in ("iterations", "budget", "classes"):
            require_whole(name, getattr(self, name))
        for name in self.algorithms:
            require_one_of(name, ALGORITHMS, f"there is no algorithm {name!r}")

    @property
    def library(self) -> Algorithm:
        """Return what jobs use that nobody plans."""
        return "ring_or_tree" if "ring_or_tree" in self.algorithms else "ring"


@dataclass(frozen=True)
class _Judged:
    """Completion of each job under a plan."""

    plan: ClusterPlan
    completion_s: Mapping[str, float]


def objective_s(jobs: Sequence[JobSpec], completion_s: Mapping[str, float]) -> float:
    """Return the weighted mean completion time."""
    weight = sum(job.weight for job in jobs)
    return sum(job.weight * completion_s[job.job_id] for job in jobs) / weight


@functools.lru_cache(maxsize=1024)  # an ablation asks the same again and again
def _completion_s(
    topology: Topology, jobs: tuple[JobSpec, ...], plan: ClusterPlan, iterations: int
) -> Mapping[str, float]:
    return run_plan(topology, jobs, plan, iterations=iterations).completion_s


@dataclass
class Arbiter:
    """Improves a plan for all jobs at once."""

    topology: Topology
    jobs: Sequence[JobSpec]
    baseline: ClusterPlan
    co_designs: CoDesigns
    options: PlanningOptions
    progress: Progress | None = None
    log: list[DecisionRecord] = field(default_factory=list)
    simulations: int = 0
    adopted: str | None = None  # whose plans of single jobs the best plan was built on

    def __post_init__(self) -> None:
        self._known: dict[ClusterPlan, _Judged] = {}
        self.floor = self.predict(self.baseline)
        self.history = [self.floor]  # plans that were accepted, each better than the one before

    def predict(self, plan: ClusterPlan) -> _Judged:
        """Simulate all jobs together."""
        if plan not in self._known:
            if self.progress is not None:
                self.progress("plans simulated", self.simulations, self.options.budget)
            self.simulations += 1
            found = _completion_s(self.topology, tuple(self.jobs), plan, self.options.iterations)
            self._known[plan] = _Judged(plan, found)
        return self._known[plan]

    def worse(self, found: Mapping[str, float], floor: Mapping[str, float]) -> list[str]:
        """Return the jobs that end later than they may, the worst first."""
        late = [name for name in floor if found[name] > floor[name] * (1 + _TOLERANCE)]
        return sorted(late, key=lambda name: -found[name] / floor[name])

    def consider(
        self, layer: Layer, decision: str, plan: ClusterPlan, *, entity: str = "all jobs",
        tags: tuple[str, ...] = (), mend: bool = True,
    ) -> bool:  # fmt: skip
        """Take a proposal where it helps and hurts nobody, after trying to mend what it hurts."""
        if self.simulations >= self.options.budget or plan == self.best.plan:
            return False
        candidate = self.predict(plan)
        if self.options.guard and mend:
            candidate = self._mended(candidate)
        before = objective_s(self.jobs, self.best.completion_s)
        after = objective_s(self.jobs, candidate.completion_s)
        taken = after < before * (1 - _TOLERANCE) and not self._late(candidate)
        if taken:
            self.history.append(candidate)
        self.log.append(
            DecisionRecord(
                layer, entity, decision if taken else f"not {decision}", _INPUTS[layer],
                (*tags, "H"), {"as before": before, decision: after}, round=len(self.history) - 1,
            )
        )  # fmt: skip
        return taken

    def _late(self, candidate: _Judged) -> list[str]:
        """Return the jobs for which the guard refuses the candidate."""
        if not self.options.guard:
            return []
        return self.worse(candidate.completion_s, self.floor.completion_s)

    @property
    def best(self) -> _Judged:
        """Return the last plan that was accepted."""
        return self.history[-1]

    def improve(
        self,
        plans: Mapping[str, ClusterPlan],
        splits: Mapping[str, Sequence[JobPlan]] | None = None,
    ) -> None:
        """Take the best of what single jobs planned, then share the network among them."""
        for name, plan in plans.items():
            taken = self.consider("coordinator", f"what each job planned with {name}", plan)
            routes = routed(self.topology, self.jobs, plan, policy="intensity")
            taken |= self.consider("flows", f"plans with {name}, paths by intensity", routes)
            if taken:
                self.adopted = name
        everywhere = routed(self.topology, self.jobs, self.best.plan, policy="least_loaded")
        self.consider("flows", "paths by the load of all jobs", everywhere)
        self._split_again(splits or {})
        if self.co_designs.host_net:
            self._leave_slots()
            self._give_slots()
        gained = True
        while gained and self.simulations < self.options.budget:
            gained = self.consider("flows", "priority classes", self._with_classes())
            gained |= self.consider("flows", "time shifts", self._with_shifts())
            gained |= self.consider("flows", "equal priorities", self._with_classes(plain=True))

    def _mended(self, candidate: _Judged) -> _Judged:
        """Help the jobs that a proposal hurts: give back what others changed, nearest first."""
        # One proposal may not spend what all the others need.
        most = min(self.options.budget, self.simulations + self.options.budget // _MENDING_SHARE)
        while self.simulations < most:
            late = self.worse(candidate.completion_s, self.floor.completion_s)
            if not late:
                return candidate
            better = self._without_harm(candidate, late[0])
            if better is None:
                return candidate
            candidate = better
        return candidate

    def _without_harm(self, candidate: _Judged, name: str) -> _Judged | None:
        """Return the candidate with the hurt job first in line or with its neighbours as before."""
        moves: list[Callable[[], ClusterPlan]] = [
            lambda: self._ahead(candidate.plan, name),
            lambda: self._as_before(candidate.plan, [name]),
            lambda: self._as_before(candidate.plan, [name, *self._neighbours(candidate, name)]),
        ]
        before = candidate.completion_s[name]
        for move in moves:
            found = self.predict(move())
            others = len(self.worse(found.completion_s, self.floor.completion_s))
            now = len(self.worse(candidate.completion_s, self.floor.completion_s))
            if found.completion_s[name] < before and others < now:
                return found
        return None

    def _ahead(self, plan: ClusterPlan, name: str) -> ClusterPlan:
        last = self.options.classes - 1
        jobs = {
            other: old if other == name else replace(old, priority=min(last, old.priority + 1))
            for other, old in plan.jobs.items()
        }
        return ClusterPlan({**jobs, name: replace(plan.jobs[name], priority=0)})

    def _as_before(self, plan: ClusterPlan, names: Sequence[str]) -> ClusterPlan:
        return ClusterPlan({**plan.jobs, **{n: self.best.plan.jobs[n] for n in names}})

    def _neighbours(self, candidate: _Judged, name: str) -> list[str]:
        routing = self._routing(candidate.plan)
        others = (job.job_id for job in self.jobs if job.job_id != name)
        return [other for other in others if len(routing.shared_links(name, other))]

    def _routing(self, plan: ClusterPlan) -> Routing:
        traffic = [job_traffic(self.topology, j, plan.jobs[j.job_id]) for j in self.jobs]
        paths = {
            job.job_id: tuple(
                edge_route(self.topology, plan.jobs[job.job_id], (flow.source, flow.target))
                for flow in job.flows
            )
            for job in traffic
        }
        return Routing(self.topology, tuple(traffic), paths, "as planned")

    def _with_classes(self, *, plain: bool = False) -> ClusterPlan:
        plan = self.best.plan
        if plain:
            classes = dict.fromkeys(plan.jobs, 0)
        else:
            number = self.options.classes
            classes = dict(priority_classes(self._routing(plan), classes=number).classes)
        return ClusterPlan({n: replace(p, priority=classes[n]) for n, p in plan.jobs.items()})

    def _with_shifts(self) -> ClusterPlan:
        plan = self.best.plan
        shifts = time_shifts(self._routing(plan)).shift_s
        return ClusterPlan({n: replace(p, shift_s=shifts[n]) for n, p in plan.jobs.items()})

    def _split_again(self, splits: Mapping[str, Sequence[JobPlan]]) -> None:
        """Try layer 1's other candidates at what they cost beside the other jobs."""
        for job in self.jobs:
            for other in splits.get(job.job_id, ()):
                plan = ClusterPlan({**self.best.plan.jobs, job.job_id: other})
                self.consider(
                    "strategy", f"{job.job_id} split as {job.splits[other.split].name}",
                    self._rerouted(plan, job.job_id), entity=job.job_id, tags=("V",), mend=False,
                )  # fmt: skip

    def _rerouted(self, plan: ClusterPlan, name: str) -> ClusterPlan:
        """Return the plan with paths of one job by the load of all."""
        found = routed(self.topology, self.jobs, plan, policy="least_loaded")
        return plan.changed(name, paths=found.jobs[name].paths)

    def _give_slots(self) -> None:
        """Move aggregation to switches where all gain, job by job, the largest sender first.

        Who was refused asks again while others change, as long as anything is gained.
        """
        while any(self._give_slots_to(job) for job in self._by_size()):
            pass

    def _by_size(self) -> list[JobSpec]:
        return sorted(
            self.jobs,
            key=lambda job: (-job.gradient_bytes * len(job.ranks), tuple(job.ranks)),
        )

    def _give_slots_to(self, job: JobSpec) -> bool:
        """Propose trees for a job where links are least loaded; return whether they were taken."""
        plan, name = self.best.plan, job.job_id
        if not self._may_aggregate(job):
            return False
        choice = spread_trees(
            self.topology,
            job,
            plan.jobs[name],
            loads=self._loads(without=name),
            free=free_slots(self.topology, self.jobs, plan, without=name),
        )
        if choice is None:
            return False
        proposal = plan.changed(name, **choice.changes())
        if proposal in self._known:  # asked before, or as it is
            return False
        decision = f"{name} aggregates in the network at {choice.name}"
        return self.consider("network", decision, proposal, entity=name, tags=("HN",), mend=False)

    def _may_aggregate(self, job: JobSpec) -> bool:
        """Return whether switches may aggregate: several ranks of a host need Intra-Inter first."""
        plan = self.best.plan.jobs[job.job_id]
        columns = aggregated_columns(self.topology, job, plan)
        hosts = {self.topology.host_of(rank) or f"rank {rank}" for rank in job.ranks}
        single = len(hosts) == len(job.ranks)
        return columns is not None and (single or self.co_designs.intra_inter)

    def _loads(self, *, without: str) -> dict[int, float]:
        """Return bytes per second that the other jobs put on each link, over their iterations."""
        loads: dict[int, float] = {}
        for job in self.jobs:
            if job.job_id == without:
                continue
            own = self.best.plan.jobs[job.job_id]
            iteration_s = self.best.completion_s[job.job_id] / job.iterations
            for flow in job_traffic(self.topology, job, own).flows:
                for link in edge_route(self.topology, own, (flow.source, flow.target)):
                    loads[link] = loads.get(link, 0.0) + flow.size_bytes / iteration_s
            if own.algorithm == "in_network":
                trees = job_trees(self.topology, job, own)
                share = job.split_as(own.split).gradient_bytes / max(1, len(trees)) / iteration_s
                for tree in trees:
                    for link in tree_links(self.topology, tree):
                        loads[link] = loads.get(link, 0.0) + share
        return loads

    def _leave_slots(self) -> None:
        """Let the job that gains least from its slots give them up, while that helps."""
        for _ in range(len(self.jobs)):
            plan = self.best.plan
            aggregating = [n for n, p in plan.jobs.items() if p.algorithm == "in_network"]
            if not aggregating or self.simulations >= self.options.budget:
                return
            gains = {n: self.floor.completion_s[n] / self.best.completion_s[n] for n in aggregating}
            name = min(gains, key=lambda n: gains[n])
            inside = self.co_designs.intra_inter and "hierarchical" in self.options.algorithms
            algorithm = "hierarchical" if inside else self.options.library
            host = plan.changed(name, algorithm=algorithm, root=None, roots=(), slots=0, paths={})
            if not self.consider(
                "network", f"{name} leaves its slots", self._rerouted(host, name), entity=name,
                tags=("HN",), mend=False,
            ):  # fmt: skip
                return
