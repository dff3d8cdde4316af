"""The promise on clusters and jobs nobody chose: with the guard on, nobody is worse off."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.codesign import (
    ClusterPlan,
    CoDesigns,
    JobSpec,
    PlanningOptions,
    plan_cluster,
    run_plan,
)
from fivefold.codesign.arbiter import Arbiter
from fivefold.codesign.baselines import best_alone_plan, null_plan
from fivefold.codesign.trees import (
    aggregated_columns,
    free_slots,
    job_trees,
    nearest_roots,
    spread_trees,
)
from fivefold.collectives.pricing.phases import aggregation_tree
from fivefold.network.topology import (
    Aggregation,
    HostSpec,
    fat_tree,
    leaf_spine,
    rail_optimized,
    switch,
)
from fivefold.tasks import LayerCost

KINDS = ("tor", "agg", "core")


@st.composite
def clusters(draw):
    """Leaves and spines or rails, hosts of one to four GPUs, some of whose switches sum."""
    gpus = draw(st.integers(1, 4))
    hosts = draw(st.sampled_from([4, 6]))
    latency = draw(st.sampled_from([0.0, 1e-6]))
    if draw(st.booleans()):
        found = leaf_spine(
            hosts, leaves=2, spines=draw(st.integers(1, 3)), host=HostSpec(gpus=gpus),
            bandwidth=10e9, latency=latency, oversubscription=draw(st.sampled_from([1.0, 2.0])),
        )  # fmt: skip
    else:
        found = rail_optimized(
            hosts, spines=2, host=HostSpec(gpus=gpus), bandwidth=10e9, latency=latency
        )
    slots = draw(st.sampled_from([0, 1, 8, 256]))
    if not slots:
        return found
    kinds = draw(st.sampled_from([("tor",), KINDS]))
    return found.with_aggregation(Aggregation(slots=slots, slot_bytes=1024), kinds=kinds)


@st.composite
def cases(draw):
    """Up to four jobs on ranks drawn without order; some share ranks."""
    topology = draw(clusters())
    jobs = []
    for number in range(draw(st.integers(1, 4))):
        ranks = draw(
            st.lists(st.integers(0, topology.num_ranks - 1), min_size=1, max_size=6, unique=True)
        )
        layer = LayerCost(
            forward_s=draw(st.floats(0.0, 0.3)),
            backward_s=draw(st.floats(0.01, 0.5)),
            gradient_bytes=draw(st.integers(0, 3 * 10**9)),
            all_to_all_bytes=draw(st.sampled_from([0, 0, 10**8])),
        )
        jobs.append(
            JobSpec(
                job_id=f"j{number}", ranks=tuple(ranks), layers=(layer,) * draw(st.integers(1, 3)),
                iterations=draw(st.integers(1, 5)), arrival_s=draw(st.sampled_from([0.0, 0.7])),
                weight=draw(st.sampled_from([1.0, 5.0])),
            )
        )  # fmt: skip
    return topology, jobs


FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(cases(), st.sampled_from(list(CoDesigns.combinations())), st.integers(0, 3))
def test_nobody_is_worse_off_whatever_the_cluster(case, flags, seed):
    topology, jobs = case
    start = ("null", "best")[seed % 2]
    options = PlanningOptions(budget=12, iterations=3)
    found = plan_cluster(topology, jobs, flags, start=start, seed=seed, options=options)
    make = null_plan if start == "null" else best_alone_plan
    assert found.baseline == make(topology, jobs, seed=seed)
    # What is reported is what a simulation of the reported plan finds.
    assert run_plan(topology, jobs, found.plan).completion_s == found.outcome.completion_s
    assert ClusterPlan.from_json(found.plan.to_json()) == found.plan
    if flags.horizontal:
        assert found.worse == ()
        before = found.baseline_outcome.completion_s
        mean = sum(job.weight * before[job.job_id] for job in jobs) / sum(j.weight for j in jobs)
        assert found.mean_completion_s(jobs) <= mean * (1 + 1e-9)
    if not flags.host_net:
        assert all(plan.algorithm != "in_network" for plan in found.plan.jobs.values())
    if not flags.intra_inter:
        assert all(plan.algorithm != "hierarchical" for plan in found.plan.jobs.values())


@pytest.mark.slow
@FEW
@given(cases(), st.integers(1, 9))
def test_the_budget_is_kept_and_a_second_look_has_one_more(case, budget):
    """Only jobs longer than the iterations that are simulated are looked at a second time."""
    topology, jobs = case
    longest = max(one.iterations for one in jobs)
    for iterations in (longest, 1):
        options = PlanningOptions(budget=budget, iterations=iterations)
        found = plan_cluster(topology, jobs, options=options)
        assert found.simulations <= budget * (1 if iterations >= longest else 2)


@pytest.mark.parametrize("beside", [(), ("short",)])
def test_a_gain_that_one_iteration_does_not_show_is_found_by_looking_at_all(beside):
    """The first iteration ends with the computation; later ones wait for each other's messages."""
    thin, wide = (
        LayerCost(forward_s=0.2, backward_s=0.2, gradient_bytes=size) for size in (10**9, 4 * 10**9)
    )
    late = LayerCost(forward_s=0.2, backward_s=1.0, gradient_bytes=4 * 10**9)
    jobs = [
        JobSpec(job_id="a", ranks=(0, 1), layers=(wide,), iterations=8),
        JobSpec(job_id="b", ranks=(3, 1), layers=(thin, thin), iterations=8),
        JobSpec(job_id="c", ranks=(3, 2), layers=(late,), iterations=4),
    ]
    silent = (LayerCost(forward_s=0.1, backward_s=0.1, gradient_bytes=0),)
    jobs += [JobSpec(job_id=name, ranks=(0,), layers=silent, iterations=1) for name in beside]
    topology, together = switch(4, bandwidth="10 GB/s"), CoDesigns(horizontal=True)
    options = PlanningOptions(budget=12, iterations=1)
    found = plan_cluster(topology, jobs, together, options=options)
    assert found.worse == ()
    assert found.plan != found.baseline
    before = found.baseline_outcome.completion_s
    assert found.mean_completion_s(jobs) < sum(before.values()) / len(jobs)


@FEW
@given(cases())
def test_slots_that_are_promised_are_there(case):
    """Trees chosen one after the other never take more slots than a switch has."""
    topology, jobs = case
    plan = null_plan(topology, jobs)
    for job in jobs:
        free = free_slots(topology, jobs, plan, without=job.job_id)
        choice = spread_trees(topology, job, plan.jobs[job.job_id], free=free)
        if choice is not None:
            plan = plan.changed(job.job_id, **choice.changes())
    pools = {a.node: a.aggregation.slots for a in topology.switches if a.aggregation is not None}
    taken = dict.fromkeys(pools, 0)
    for job in jobs:
        own = plan.jobs[job.job_id]
        if own.algorithm == "in_network":
            assert len(job_trees(topology, job, own)) == len(aggregated_columns(topology, job, own))
            for tree in job_trees(topology, job, own):
                parents = [parent for _, parent in tree]
                for name in set(parents):
                    if parents.count(name) > 1 or name not in dict(tree):
                        taken[name] += own.slots
    assert all(taken[name] <= pools[name] for name in pools)
    assert run_plan(topology, jobs, plan).result.refusals == 0


def job(name, *ranks, size=10**9, compute_s=0.3):
    layer = LayerCost(forward_s=compute_s / 3, backward_s=2 * compute_s / 3, gradient_bytes=size)
    return JobSpec(job_id=name, ranks=ranks, layers=(layer,), iterations=4)


def test_trees_of_one_job_lie_apart():
    """Two ports per host and two thin uplinks: one root for both would halve their rate."""
    topology = leaf_spine(
        4, leaves=4, spines=2, host=HostSpec(gpus=2), bandwidth=10e9, oversubscription=2
    ).with_aggregation(Aggregation(slots=64, slot_bytes=1024), kinds=KINDS)
    spec = job("a", *range(8))
    plan = null_plan(topology, [spec]).jobs["a"]
    apart = spread_trees(topology, spec, plan)
    assert len(set(apart.roots)) == 2
    together = nearest_roots(topology, spec, plan)[0]
    assert len(set(together.roots)) == 1
    ends = [
        run_plan(topology, [spec], ClusterPlan({"a": plan}).changed("a", **choice.changes()))
        for choice in (apart, together)
    ]
    assert ends[0].completion_s["a"] < ends[1].completion_s["a"]


def test_a_tree_avoids_what_others_load():
    topology = fat_tree(4, bandwidth=10e9).with_aggregation(
        Aggregation(slots=64, slot_bytes=1024), kinds=KINDS
    )
    spec = job("a", 0, 4, 8, 12)
    plan = null_plan(topology, [spec]).jobs["a"]
    free = spread_trees(topology, spec, plan)
    tree = aggregation_tree(topology, (0, 4, 8, 12), free.roots[0])
    above = dict(tree)
    link = next(
        i for i in range(topology.num_links)
        if topology.nodes[topology.link_sources[i]].kind == "tor"
        and above.get(topology.nodes[topology.link_sources[i]].name)
        == topology.nodes[topology.link_targets[i]].name
    )  # fmt: skip
    moved = spread_trees(topology, spec, plan, loads={link: 9e9})
    assert moved.roots != free.roots
    # A root whose slots are gone is not chosen either.
    pools = {a.node: a.aggregation.slots for a in topology.switches}
    elsewhere = spread_trees(topology, spec, plan, free=pools | {free.roots[0]: 0})
    assert elsewhere.roots != free.roots
    assert spread_trees(topology, spec, plan, free=dict.fromkeys(pools, 0)) is None


def test_switches_that_sum_buy_something_beside_the_other_co_designs():
    """Three jobs over four hosts each: their rings send half as much again as their sums."""
    topology = leaf_spine(
        12, leaves=4, spines=2, bandwidth=10e9, oversubscription=1.5
    ).with_aggregation(Aggregation(slots=512, slot_bytes=4096), kinds=KINDS)
    jobs = [job(name, i, i + 3, i + 6, i + 9, size=3 * 10**9) for i, name in enumerate("abc")]
    flags = {"vertical": True, "horizontal": True, "intra_inter": True}
    without = plan_cluster(topology, jobs, CoDesigns(**flags))
    summed = plan_cluster(topology, jobs, CoDesigns.all())
    assert summed.worse == ()
    assert any(plan.algorithm == "in_network" for plan in summed.plan.jobs.values())
    assert summed.mean_completion_s(jobs) < 0.95 * without.mean_completion_s(jobs)
    assert any("in the network" in d.decision for d in summed.decisions if "HN" in d.co_designs)


@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_is_that_of_the_flows_layer(guard):
    """One rule for both: slower beyond the tolerance is worse, equal is not."""
    topology = leaf_spine(4, leaves=2, spines=1, bandwidth=10e9)
    jobs = [job("a", 0, 2), job("b", 1, 3)]
    options = PlanningOptions(guard=guard)
    arbiter = Arbiter(topology, jobs, null_plan(topology, jobs), CoDesigns.all(), options)
    assert arbiter.worse({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 1.0}) == ["b"]
    assert arbiter.worse({"a": 3.0, "b": 2.0}, {"a": 1.0, "b": 1.0}) == ["a", "b"]
    assert arbiter.worse({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 1.0}) == []


@FEW
@given(cases(), st.booleans())
def test_what_was_taken_last_is_what_the_plan_costs(case, guard):
    """Nothing that hurts a job is taken on the way: the last plan taken is the one kept."""
    topology, jobs = case
    options = PlanningOptions(budget=6, iterations=5, guard=guard)
    found = plan_cluster(topology, jobs, options=options)
    taken = [
        one for one in found.decisions
        if "H" in one.co_designs and not one.decision.startswith("not ")
    ]  # fmt: skip
    if taken:
        cost_s = taken[-1].alternatives[taken[-1].decision]
        assert found.mean_completion_s(jobs) == pytest.approx(cost_s, rel=1e-9)
    else:
        assert found.plan == found.baseline


def test_a_gain_for_most_that_one_job_pays_for_is_not_taken():
    """Strict classes are good for the heavy job and delay the other; there is no time to mend."""
    slow = LayerCost(forward_s=0.5, backward_s=0.1, gradient_bytes=4 * 10**9)
    heavy = LayerCost(forward_s=0.02, backward_s=0.1, gradient_bytes=4 * 10**9)
    jobs = [
        JobSpec(job_id="slow", ranks=(3, 1), layers=(slow,) * 2, iterations=4),
        JobSpec(job_id="heavy", ranks=(3, 2), layers=(heavy,), iterations=4, weight=10.0),
    ]
    topology = switch(4, bandwidth="10 GB/s")
    for guard in (True, False):
        options = PlanningOptions(guard=guard, budget=3, iterations=4)
        found = plan_cluster(topology, jobs, options=options)
        assert found.worse == (() if guard else ("slow",))
        assert found.simulations <= 3  # mending would go beyond
        (classes,) = (one for one in found.decisions if "priority classes" in one.decision)
        assert classes.decision == ("not " * guard) + "priority classes"
        assert classes.alternatives["priority classes"] < classes.alternatives["as before"]
