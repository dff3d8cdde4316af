"""Layers 2 and 3 of one job: what is weighed, and what decides where nothing may be asked.

With Vertical on, layer 3 quotes the price of each algorithm to layer 2, which answers with the
iteration time: both choose together. With Vertical off each follows a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fivefold.codesign._codesigns import CoDesigns
from fivefold.codesign._compile import alone_quote
from fivefold.codesign._iteration import schedule_iteration
from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._modules import local_order
from fivefold.codesign._plans import JobPlan
from fivefold.codesign._records import DecisionRecord
from fivefold.codesign._traffic import aggregation_tree, host_groups
from fivefold.network.topology import Topology
from fivefold.tasks import Ordering

__all__ = ["alone_iteration_s", "collective_options", "plan_single", "slots_for"]

_BUCKETS: tuple[int | None, ...] = (None, 25_000_000, 100_000_000, 0)
_MOST_ROOTS = 4


@dataclass(frozen=True)
class _Option:
    name: str
    plan: JobPlan
    co_designs: tuple[str, ...]


def plan_single(
    topology: Topology, job: JobSpec, start: JobPlan, co_designs: CoDesigns
) -> tuple[JobPlan, list[DecisionRecord]]:
    """Plan layers 2 and 3 of one job, as if it were alone.

    Args:
        topology: The cluster.
        job: The job.
        start: Its plan so far; always one of the alternatives.
        co_designs: What may be used.

    Returns:
        The plan, and who decided what.
    """
    options = list(collective_options(topology, job, start, co_designs))
    if not co_designs.vertical:
        # Nobody is asked: what the co-design offers last is taken.
        chosen = options[-1]
        if chosen.plan == start:
            return start, []
        record = DecisionRecord(
            layer="collectives",
            entity=job.job_id,
            decision=f"{chosen.name}, by rule",
            alternatives={},
            inputs=(("ClusterGraph.nodes", "network"),),
            co_designs=chosen.co_designs,
        )
        return chosen.plan, [record]
    weighed: dict[str, tuple[float, JobPlan, tuple[str, ...]]] = {}
    for option in options:
        for tasks in _task_options(option.plan):
            name = f"{option.name}, {_task_name(tasks)}"
            seconds = alone_iteration_s(topology, job, tasks)
            weighed[name] = (seconds, tasks, option.co_designs)
    best = min(weighed, key=lambda name: weighed[name][0])
    seconds_of = {name: entry[0] for name, entry in weighed.items()}
    algorithm, _, tasks_name = best.partition(", ")
    records = [
        DecisionRecord(
            layer="collectives",
            entity=job.job_id,
            decision=algorithm,
            alternatives=seconds_of,
            inputs=(
                ("ClusterGraph.links", "network"),
                ("CommTask.criticality", "tasks"),
            ),
            co_designs=("V", *weighed[best][2]),
        ),
        DecisionRecord(
            layer="tasks",
            entity=job.job_id,
            decision=tasks_name,
            alternatives=seconds_of,
            inputs=(("CostQuote.time_s", "collectives"),),
            co_designs=("V",),
        ),
    ]
    return weighed[best][1], records


def alone_iteration_s(topology: Topology, job: JobSpec, plan: JobPlan) -> float:
    """Seconds of an iteration with the network to itself."""
    return schedule_iteration(job, plan, alone_quote(topology, job, plan)).end_s


def collective_options(
    topology: Topology, job: JobSpec, start: JobPlan, co_designs: CoDesigns
) -> Iterator[_Option]:
    """What layer 3 may choose among; the plan so far comes first."""
    yield _Option("ring in the order given", start, ())
    order = local_order(topology, job.ranks) if co_designs.vertical else start.order
    if co_designs.vertical and order != start.order:
        yield _Option("ring along the topology", replace(start, order=order, paths={}), ())
    groups = host_groups(topology, job.ranks)
    if co_designs.intra_inter and groups is not None and 1 < len(groups[0]) < len(job.ranks):
        plan = replace(start, order=order, algorithm="hierarchical", paths={})
        yield _Option("hierarchical", plan, ("II",))
    # Several ranks of a host sum inside it first, which only Intra-Inter may plan.
    single = groups is not None and len(groups[0]) == 1
    if co_designs.host_net and groups is not None and (single or co_designs.intra_inter):
        tags = ("HN",) if single else ("II", "HN")
        for root, slots in _roots(topology, groups)[:: 1 if co_designs.vertical else -1]:
            plan = replace(
                start, order=order, algorithm="in_network", root=root, slots=slots, paths={}
            )
            yield _Option(f"in the network at {root}", plan, tags)


def slots_for(topology: Topology, tree: tuple[tuple[str, str], ...]) -> int:
    """Slots that keep a tree busy: what its fastest link carries in a round trip to the root.

    At most as many as its smallest switch has.
    """
    above = dict(tree)
    delays_s, wanted, most = [], 0.0, math.inf
    for child, parent in tree:
        node, delay_s = child, 0.0
        while node in above:
            link = _link_between(topology, node, above[node])
            delay_s += 2 * float(topology.latencies_s[link])
            node = above[node]
        delays_s.append(delay_s)
        rate = float(topology.capacities_bytes_per_s[_link_between(topology, child, parent)])
        pool = topology.ability_of(parent).aggregation
        if pool is None:  # it only passes on
            continue
        wanted, most = max(wanted, rate / pool.slot_bytes), min(most, pool.slots)
    return int(max(1, min(most, math.ceil(wanted * max(delays_s)))))


def _link_between(topology: Topology, source: str, target: str) -> int:
    """The widest link from one node to a neighbour."""
    links = topology.out_links(source)
    links = links[topology.link_targets[links] == topology.index(target)]
    return int(links[np.argmax(topology.capacities_bytes_per_s[links])])


def _roots(topology: Topology, groups: list[tuple[int, ...]]) -> list[tuple[str, int]]:
    """The nearest switches at which the job's ranks can be summed, and the slots they need."""
    found = []
    for ability in topology.switches:
        if ability.aggregation is None:
            continue
        columns = [tuple(group[place] for group in groups) for place in range(len(groups[0]))]
        trees = [aggregation_tree(topology, column, ability.node) for column in columns]
        whole = [tree for tree in trees if tree is not None]
        if len(whole) == len(columns):
            slots = max(slots_for(topology, tree) for tree in whole)
            found.append((max(len(tree) for tree in whole), ability.node, slots))
    return [(node, slots) for _, node, slots in sorted(found)[:_MOST_ROOTS]]


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
