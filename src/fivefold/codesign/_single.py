"""Layers 1 to 3 of one job: what is weighed, and what decides where nothing may be asked.

With Vertical on, layer 3 quotes the price of each algorithm to layer 2, which answers with the
iteration time: both choose together. With Vertical off each follows a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.codesign._codesigns import CoDesigns
from fivefold.codesign._compile import alone_quote
from fivefold.codesign._iteration import schedule_iteration
from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._modules import local_order
from fivefold.codesign._plans import JobPlan
from fivefold.codesign._records import DecisionRecord
from fivefold.codesign._traffic import job_groups
from fivefold.codesign._trees import nearest_roots, spread_trees
from fivefold.collectives.pricing.phases import host_groups
from fivefold.network.topology import Topology
from fivefold.tasks.scheduler import Ordering

_BUCKETS: tuple[int | None, ...] = (None, 25_000_000, 100_000_000, 0)


@dataclass(frozen=True)
class _Option:
    name: str
    plan: JobPlan
    co_designs: tuple[str, ...]


@dataclass(frozen=True)
class _Weighed:
    """An option of all three layers, with its price."""

    seconds: float
    split: str
    algorithm: str
    tasks: str
    plan: JobPlan
    co_designs: tuple[str, ...]

    @property
    def name(self) -> str:
        parts = (self.split, self.algorithm, self.tasks)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class SinglePlan:
    """What a job plans for itself.

    Attributes:
        plan: The plan.
        decisions: Who decided what.
        splits: With Vertical, the best plan of each other split, the best of them first.
    """

    plan: JobPlan
    decisions: tuple[DecisionRecord, ...]
    splits: tuple[JobPlan, ...] = ()


def plan_single(
    topology: Topology, job: JobSpec, start: JobPlan, co_designs: CoDesigns
) -> SinglePlan:
    """Plan layers 1 to 3 of one job, as if it were alone."""
    if not co_designs.vertical:
        return _by_rule(topology, job, start, co_designs)
    weighed = list(_weighed(topology, job, start, co_designs))
    best = min(weighed, key=lambda one: one.seconds)
    of_splits: dict[str, _Weighed] = {}
    for one in sorted(weighed, key=lambda one: one.seconds):
        of_splits.setdefault(one.split, one)
    others = tuple(one.plan for one in of_splits.values() if one.split != best.split)
    return SinglePlan(best.plan, tuple(_records(job, best, weighed, of_splits)), others)


def _weighed(
    topology: Topology, job: JobSpec, start: JobPlan, co_designs: CoDesigns
) -> Iterator[_Weighed]:
    """Every option of layers 1 to 3 at the price that the layers below ask for it."""
    for number in range(max(1, len(job.splits))):
        split = job.splits[number].name if job.splits else ""
        begin = start
        if number != start.split:
            begin = replace(start, split=number, order=job.splits[number].ranks, paths={})
        for option in collective_options(topology, job, begin, co_designs):
            quote = alone_quote(topology, job, option.plan)
            for tasks in _task_options(option.plan):
                seconds = schedule_iteration(job, tasks, quote).end_s
                name = _task_name(tasks)
                yield _Weighed(seconds, split, option.name, name, tasks, option.co_designs)


def _records(
    job: JobSpec, best: _Weighed, weighed: Sequence[_Weighed], of_splits: Mapping[str, _Weighed]
) -> Iterator[DecisionRecord]:
    if job.splits:
        yield DecisionRecord(
            layer="strategy",
            entity=job.job_id,
            decision=best.split,
            alternatives={name: one.seconds for name, one in of_splits.items()},
            inputs=(
                ("JobSpec.model", "strategy"),
                ("PlanReport.iteration_s", "tasks"),
                ("CostQuote.time_s", "collectives"),
                ("ClusterGraph.links", "network"),
            ),
            co_designs=("V",),
        )
    same = {one.name: one.seconds for one in weighed if one.split == best.split}
    yield DecisionRecord(
        layer="collectives",
        entity=job.job_id,
        decision=best.algorithm,
        alternatives=same,
        inputs=(("ClusterGraph.links", "network"), ("CommTask.criticality", "tasks")),
        co_designs=("V", *best.co_designs),
    )
    yield DecisionRecord(
        layer="tasks",
        entity=job.job_id,
        decision=best.tasks,
        alternatives=same,
        inputs=(("CostQuote.time_s", "collectives"),),
        co_designs=("V",),
    )


def _by_rule(topology: Topology, job: JobSpec, start: JobPlan, co_designs: CoDesigns) -> SinglePlan:
    """Nobody is asked: what the co-design offers last is taken, and layer 1's own favourite."""
    chosen = list(collective_options(topology, job, start, co_designs))[-1]
    records = []
    if job.splits:
        records.append(nominal_record(job))
    if chosen.plan != start:
        records.append(
            DecisionRecord(
                layer="collectives",
                entity=job.job_id,
                decision=f"{chosen.name}, by rule",
                alternatives={},
                inputs=(("ClusterGraph.nodes", "network"),),
                co_designs=chosen.co_designs,
            )
        )
    return SinglePlan(chosen.plan, tuple(records))


def nominal_record(job: JobSpec) -> DecisionRecord:
    """Layer 1 by itself: the cheapest split by the devices' nominal constants."""
    return DecisionRecord(
        layer="strategy",
        entity=job.job_id,
        decision=job.splits[0].name,
        alternatives={split.name: split.nominal_s for split in job.splits},
        inputs=(("JobSpec.model", "strategy"), ("nominal bandwidth", "strategy")),
        co_designs=(),
    )


def alone_iteration_s(topology: Topology, job: JobSpec, plan: JobPlan) -> float:
    """Return seconds of an iteration with the network to itself."""
    return schedule_iteration(job, plan, alone_quote(topology, job, plan)).end_s


def collective_options(
    topology: Topology, job: JobSpec, start: JobPlan, co_designs: CoDesigns
) -> Iterator[_Option]:
    """What layer 3 may choose among; the plan so far comes first."""
    yield _Option("ring in the order given", start, ())
    ranks = start.order
    order = local_order(topology, ranks) if co_designs.vertical else ranks
    if order != start.order:
        yield _Option("ring along the topology", replace(start, order=order, paths={}), ())
    groups = _reducing_groups(job.split_as(start.split), replace(start, order=order))
    by_host = [host_groups(topology, group) for group in groups]
    even = all(hosts is not None for hosts in by_host)
    several = [hosts for hosts in by_host if hosts and 1 < len(hosts[0]) < sum(map(len, hosts))]
    if co_designs.intra_inter and even and several:
        plan = replace(start, order=order, algorithm="hierarchical", paths={})
        yield _Option("hierarchical", plan, ("II",))
    # Several ranks of a host sum inside it first, which only Intra-Inter may plan.
    single = even and all(len(hosts[0]) == 1 for hosts in by_host if hosts)
    if co_designs.host_net and even and (single or co_designs.intra_inter):
        begin = replace(start, order=order)
        tags = ("HN",) if single else ("II", "HN")
        yield from _summing_options(topology, job, begin, tags, vertical=co_designs.vertical)


def _summing_options(
    topology: Topology, job: JobSpec, start: JobPlan, tags: tuple[str, ...], *, vertical: bool
) -> Iterator[_Option]:
    """Trees of switches: with Vertical apart from one another, by rule all at the nearest root."""
    choices = nearest_roots(topology, job, start)
    if vertical:
        apart = spread_trees(topology, job, start)
        if apart is not None and len(set(apart.roots)) > 1:
            choices.append(apart)
    for choice in choices if vertical else choices[:1]:
        plan = replace(start, **choice.changes())  # type: ignore[arg-type]
        yield _Option(f"in the network at {choice.name}", plan, tags)


def _reducing_groups(job: JobSpec, plan: JobPlan) -> list[tuple[int, ...]]:
    """Groups that reduce gradients."""
    axes = [""]
    if job.mesh is not None:
        state = ("data", "shard", "expert_data", "replica")
        axes = [axis for axis in state if any(m.axis == axis for m in job.mesh.demand.messages)]
    return [group for axis in axes for group in job_groups(job, plan, axis) if len(group) > 1]


def _task_options(plan: JobPlan) -> Iterator[JobPlan]:
    """What layer 2 may choose among; the plan so far comes first."""
    yield plan
    for bucket in _BUCKETS:
        for overlap in (False, True):
            ordering: Ordering = "priority" if overlap else "fifo"
            option = replace(plan, bucket_bytes=bucket, overlap_forward=overlap, ordering=ordering)
            if option != plan:
                yield option


def _task_name(plan: JobPlan) -> str:
    size = {None: "layer by layer", 0: "all at once"}.get(
        plan.bucket_bytes, f"buckets of {(plan.bucket_bytes or 0) / 1e6:g} MB"
    )
    wait = "each layer waits for its own" if plan.overlap_forward else "forward waits for all"
    return f"{size}, {plan.ordering}, {wait}"
