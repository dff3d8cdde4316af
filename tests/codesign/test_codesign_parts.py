"""Plans, traffic and compilation against schedules, closed forms and bad input."""

import pickle

import numpy as np
import pytest

from fivefold.codesign import (
    ClusterPlan,
    CoDesigns,
    JobPlan,
    JobSpec,
    PlanningOptions,
    plan_cluster,
    run_plan,
)
from fivefold.codesign.baselines import best_alone_plan, null_plan
from fivefold.codesign.jobs import Split, check_jobs
from fivefold.codesign.plans import decisions_to_json
from fivefold.codesign.simulate import alone_quote, iteration_of, schedule_iteration
from fivefold.codesign.steps import steps_of
from fivefold.codesign.trees import slots_for, spread_trees
from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.pricing.phases import aggregation_tree, host_groups
from fivefold.collectives.schedules import all_reduce
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import (
    Aggregation,
    HostSpec,
    SwitchAbility,
    Topology,
    leaf_spine,
    line,
    switch,
)
from fivefold.strategy import ParallelPlan
from fivefold.tasks import LayerCost
from fivefold.tasks.iteration import IterationDemand


def job(name="a", ranks=(0, 1), layers=1, size=10**9, **more):
    layer = LayerCost(forward_s=0.5, backward_s=1.0, gradient_bytes=size)
    return JobSpec(job_id=name, ranks=ranks, layers=(layer,) * layers, **more)


def parted():
    whole = line(3)
    return whole.with_links(whole.links[:2])


@pytest.mark.parametrize("number", [2, 3, 5, 8])
def test_a_ring_moves_what_the_schedule_moves(number):
    """Bytes per edge and steps of the closed form are those of the verified schedule."""
    schedule = build_algorithm("ring", all_reduce(number, chunks=number))
    edges = {}
    for move in schedule:
        edges[move.source, move.target] = edges.get((move.source, move.target), 0) + 1
    size = 12e9
    ((group,),) = steps_of(
        switch(number), job(ranks=tuple(range(number))), JobPlan(order=tuple(range(number))),
        kind="all_reduce", size_bytes=size,
    )  # fmt: skip
    (phase,) = group.phases()
    assert set(phase.edges) == set(edges)
    for count in edges.values():
        assert count * size / number == pytest.approx(phase.edge_bytes)
    assert phase.steps == len(np.unique(schedule.steps))


def test_a_hierarchy_has_the_closed_forms_volumes():
    topology = leaf_spine(3, leaves=3, spines=1, host=HostSpec(gpus=2), bandwidth="1 GB/s")
    ranks = tuple(range(6))
    plan = JobPlan(order=ranks, algorithm="hierarchical")
    (inside,), (across,), (again,) = steps_of(
        topology, job(ranks=ranks), plan, kind="all_reduce", size_bytes=6e9
    )
    inside, across, again = inside.phases(), across.phases(), again.phases()
    assert [phase.edge_bytes for phase in inside] == [3e9] * 3  # S (g - 1) / g
    assert [phase.edge_bytes for phase in across] == [4e9] * 2  # 2 (S / g) (m - 1) / m
    assert inside == again
    assert host_groups(topology, (0, 1, 2)) is None
    uneven = JobPlan(order=(0, 1, 2), algorithm="hierarchical")
    with pytest.raises(InfeasibleError, match="same number of ranks on each host"):
        steps_of(topology, job(ranks=(0, 1, 2)), uneven, kind="all_reduce", size_bytes=1.0)


def test_quotes_are_what_the_simulator_takes_alone():
    """Layer 3's price and layer 5's time agree on an idle network, latency included."""
    topology = leaf_spine(
        4, leaves=2, spines=2, host=HostSpec(gpus=2), bandwidth="1 GB/s", latency="1 ms"
    )
    able = [
        SwitchAbility(n.name, aggregation=Aggregation(slots=4096, slot_bytes=4096))
        for n in topology.nodes if not n.is_rank and n.kind != "nvswitch"
    ]  # fmt: skip
    topology = Topology("s", topology.nodes, topology.links, switches=able)
    spec = job(ranks=tuple(range(8)), layers=2, iterations=3)
    for plan in (
        JobPlan(order=spec.ranks, bucket_bytes=None),
        JobPlan(order=spec.ranks, bucket_bytes=0, overlap_forward=True, ordering="priority"),
        JobPlan(order=spec.ranks, algorithm="hierarchical"),
        JobPlan(order=spec.ranks, algorithm="in_network", root="spine0", slots=2048),
    ):
        alone_s = schedule_iteration(spec, plan, alone_quote(topology, spec, plan)).end_s
        found = run_plan(topology, [spec], ClusterPlan({"a": plan}))
        assert found.iteration_s["a"] == pytest.approx(alone_s, rel=1e-6), plan.algorithm


def test_all_to_all_layers_exchange_within_their_passes():
    layer = LayerCost(forward_s=1.0, backward_s=1.0, all_to_all_bytes=2 * 10**9)
    spec = JobSpec(job_id="a", ranks=(0, 1), layers=(layer,), iterations=2)
    plan = JobPlan(order=(0, 1))
    names = [t.task_id for t in iteration_of(spec, plan, lambda *_: 1.0).communication]
    assert len(names) == 4
    # Half of 2 GB goes to the other rank: 1 s at 1 GB/s, four times.
    topology = switch(2, bandwidth="1 GB/s")
    found = run_plan(topology, [spec], ClusterPlan({"a": plan}))
    assert found.iteration_s["a"] == pytest.approx(2 + 4)


def test_a_job_of_one_rank_only_computes():
    found = plan_cluster(switch(2), [job(ranks=(1,), iterations=4)])
    assert found.outcome.iteration_s["a"] == pytest.approx(1.5)


def test_arrivals_count_from_the_arrival():
    topology, late = switch(4, bandwidth="1 GB/s"), job("b", (2, 3), arrival_s=7.0, iterations=2)
    found = run_plan(topology, [job(), late], null_plan(topology, [job(), late]))
    assert found.completion_s["b"] == pytest.approx(2 * 2.5)


def test_a_job_without_an_arrival_is_there_from_the_start():
    topology, other = switch(2, bandwidth="1 GB/s"), job("b", arrival_s=0.0)
    left_out, stated = (
        run_plan(topology, [one, other], null_plan(topology, [one, other])).completion_s
        for one in (job("a", size=3 * 10**9), job("a", size=3 * 10**9, arrival_s=0.0))
    )
    assert left_out == stated


@pytest.mark.parametrize("arrival_s", [1e14, 9223372036854775807])
def test_an_arrival_beside_which_a_jobs_own_times_are_lost_is_refused(arrival_s):
    """1.5 s of compute are 96 roundings of 1e14, and none of 2^63."""
    one = job("late", arrival_s=arrival_s)
    with pytest.raises(ConfigurationError, match=r"'late' arrives at .* its own times are lost"):
        plan_cluster(switch(2), [one], CoDesigns.all())
    today = job("late", arrival_s=1.8e9)  # seconds since 1970 are well told apart
    assert run_plan(switch(2), [today], null_plan(switch(2), [today])).completion_s["late"] > 1.5


def test_fewer_iterations_are_extrapolated():
    topology, spec = switch(2, bandwidth="1 GB/s"), job(iterations=50)
    plan = null_plan(topology, [spec])
    whole = run_plan(topology, [spec], plan)
    part = run_plan(topology, [spec], plan, iterations=3)
    assert part.completion_s == pytest.approx(whole.completion_s)


def test_a_tree_stops_at_switches_that_cannot_sum():
    topology = leaf_spine(4, leaves=2, spines=1, bandwidth="1 GB/s")
    able = Aggregation(slots=2, slot_bytes=512)
    part = Topology("p", topology.nodes, topology.links,
                    switches=[SwitchAbility("spine0", aggregation=able)])  # fmt: skip
    assert aggregation_tree(part, (0, 1, 2, 3), "spine0") is None
    assert aggregation_tree(line(3), (0, 2), "gpu1") is None


def test_a_nic_passes_sums_on():
    """Two hosts with NICs: only the switch where their streams meet must sum."""
    topology = leaf_spine(
        2, leaves=1, spines=1, host=HostSpec(gpus=1, nics=1), bandwidth="1 GB/s"
    ).with_aggregation(Aggregation(slots=8, slot_bytes=512), kinds=("tor",))
    tree = aggregation_tree(topology, (0, 1), "leaf0")
    assert tree is not None
    spec = job(iterations=2)
    plan = JobPlan(order=(0, 1), algorithm="in_network", root="leaf0", slots=8)
    alone_s = schedule_iteration(spec, plan, alone_quote(topology, spec, plan)).end_s
    found = run_plan(topology, [spec], ClusterPlan({"a": plan}))
    assert found.iteration_s["a"] == pytest.approx(alone_s) == pytest.approx(1.5 + 1.0)
    assert found.result.refusals == 0


def test_plans_survive_files_and_pickles():
    topology = switch(4, bandwidth="1 GB/s")
    found = plan_cluster(topology, [job("a", (0, 1)), job("b", (0, 2))])
    assert ClusterPlan.from_json(found.plan.to_json()) == found.plan
    assert pickle.loads(pickle.dumps(found.plan)) == found.plan  # noqa: S301 - our own
    assert len(decisions_to_json(found.decisions).splitlines()) == len(found.decisions)
    for text in ("{", "{}", '{"schema": "x"}'):
        with pytest.raises(ConfigurationError):
            ClusterPlan.from_json(text)


def test_planning_is_deterministic():
    topology = leaf_spine(6, leaves=3, spines=2, bandwidth="1 GB/s")
    jobs = [job("a", (0, 2, 4)), job("b", (1, 3, 5)), job("c", (0, 5))]
    once, again = (plan_cluster(topology, jobs, seed=4) for _ in range(2))
    assert once.plan == again.plan
    assert once.decisions == again.decisions


def test_labels_and_subsets():
    assert len(list(CoDesigns.combinations())) == 16
    assert CoDesigns.all().label == "V+H+II+HN"
    assert CoDesigns(vertical=True) in CoDesigns.all()
    assert CoDesigns.all() not in CoDesigns(vertical=True)


def test_every_mask_is_seen_in_the_log():
    """A decision names only information that its co-designs let through."""
    topology = leaf_spine(4, leaves=2, spines=2, host=HostSpec(gpus=2), bandwidth="1 GB/s")
    jobs = [job("a", (0, 1, 4, 5), layers=2), job("b", (2, 3, 6, 7), layers=2)]
    allowed = {"V": "vertical", "H": "horizontal", "II": "intra_inter", "HN": "host_net"}
    for flags in CoDesigns.combinations():
        found = plan_cluster(topology, jobs, flags)
        for record in found.decisions:
            assert all(getattr(flags, allowed[tag]) for tag in record.co_designs)
        assert bool(found.decisions) or found.plan == found.baseline


def test_layers_are_those_of_the_first_split_unless_given():
    with pytest.raises(ConfigurationError, match="needs a name, ranks and layers"):
        JobSpec(job_id="a", ranks=(0, 1))
    plan = ParallelPlan(global_batch=2, data=2)
    demand = IterationDemand(
        segments=2, micro_batches=1, forward_s=0.1, backward_s=0.2, messages=()
    )
    split = Split(
        name="d2", plan=plan, demand=demand, ranks=(0, 1), nominal_s=1.0, memory_bytes=1.0
    )
    assert len(JobSpec(job_id="a", ranks=(0, 1), splits=(split,)).layers) == 2
    own = job().layers
    assert JobSpec(job_id="a", ranks=(0, 1), layers=own, splits=(split,)).layers == own


@pytest.mark.parametrize(("slots", "expected"), [(10_000, 2000), (500, 500)])
def test_slots_cover_a_round_trip_to_the_root(slots, expected):
    """A link of 1 GB/s, 1 ms long, fills 2000 slots of 1 kB before the first sum is back."""
    topology = switch(3, bandwidth="1 GB/s", latency="1 ms").with_aggregation(
        Aggregation(slots=slots, slot_bytes=1000), kinds=("switch",)
    )
    flags = CoDesigns(host_net=True)
    plan = plan_cluster(topology, [job(ranks=(0, 1, 2))], flags).plan.jobs["a"]
    assert (plan.algorithm, plan.slots) == ("in_network", expected)


def shared_hosts(slots):
    """Two hosts of two ranks, each on a leaf; both leaves and the spine add."""
    return leaf_spine(
        2, leaves=2, spines=1, host=HostSpec(gpus=2), bandwidth="1 GB/s", latency="1 ms"
    ).with_aggregation(Aggregation(slots=slots, slot_bytes=1000), kinds=("tor", "core"))


def test_slots_cover_the_longest_way_to_the_root():
    """Rank, leaf, spine: two links of 1 ms there and two back, at the rate of the widest link."""
    topology = leaf_spine(
        4, leaves=2, spines=1, host=HostSpec(gpus=1), bandwidth="1 GB/s", latency="1 ms"
    ).with_aggregation(Aggregation(slots=10**6, slot_bytes=1000), kinds=("tor", "core"))
    spine = next(node.name for node in topology.nodes if node.kind == "core")
    tree = aggregation_tree(topology, (0, 1, 2, 3), spine)
    widest = max(topology.capacities_bytes_per_s)
    assert slots_for(topology, tree) == pytest.approx(2 * 2 * 1e-3 * widest / 1000)


def test_trees_of_one_job_share_the_slots_of_a_switch():
    """Ranks of a host have a tree each; 100 slots of a switch that both pass are 50 for each."""
    topology, one = shared_hosts(100), job(ranks=(0, 1, 2, 3))
    choice = spread_trees(topology, one, null_plan(topology, [one]).jobs["a"])
    assert choice.slots == 50


def test_only_intra_inter_lets_jobs_reduce_inside_hosts_before_the_network():
    topology, one = shared_hosts(10**5), job(ranks=(0, 1, 2, 3), size=10**10)
    # Trees over two hosts send as little as sums in a switch do.
    options = PlanningOptions(algorithms=("ring", "hierarchical", "in_network"))
    without, allowed = (
        plan_cluster(topology, [one], flags, options=options).plan.jobs["a"].algorithm
        for flags in (
            CoDesigns(horizontal=True, host_net=True),
            CoDesigns(horizontal=True, host_net=True, intra_inter=True),
        )
    )
    assert (without, allowed) == ("ring", "in_network")


@pytest.mark.parametrize("flags", [CoDesigns(), CoDesigns(horizontal=True)], ids=["alone", "H"])
def test_a_plan_is_compared_with_the_baseline_that_was_asked_for(flags):
    topology, both = leaf_spine(4, leaves=2, spines=1), [job("a", (0, 2)), job("b", (1, 3))]
    baselines = {
        start: plan_cluster(topology, both, flags, start=start, seed=3).baseline
        for start in ("null", "best")
    }
    assert baselines["null"] == null_plan(topology, both, seed=3)
    assert baselines["best"] == best_alone_plan(topology, both, seed=3)
    assert baselines["null"] != baselines["best"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: job(""), ConfigurationError),
        (lambda: job(ranks=()), ConfigurationError),
        (lambda: job(ranks=(0, 0)), ConfigurationError),
        (lambda: job(iterations=0), ConfigurationError),
        (lambda: job(weight=0.0), ConfigurationError),
        (lambda: job(arrival_s=-1.0), ConfigurationError),
        (lambda: job(size=-1), ConfigurationError),
        (lambda: PlanningOptions(budget=0), ConfigurationError),
        (lambda: JobPlan(order=(0,), algorithm="in_network"), ConfigurationError),
        (lambda: JobPlan(order=(0,), shift_s=float("nan")), ConfigurationError),
        (lambda: JobPlan(order=(0,), priority=1.5), ConfigurationError),
        (lambda: JobPlan(order=(0,), bucket_bytes="1"), ConfigurationError),
        (lambda: job(arrival_s="0"), ConfigurationError),
        (lambda: plan_cluster(switch(2), [job(ranks=(0, 1))], start="nul"), ConfigurationError),
        (lambda: plan_cluster(switch(2), [job(ranks=(0, 1))], seed="0"), ConfigurationError),
        (lambda: check_jobs(switch(2), []), ConfigurationError),
        (lambda: check_jobs(switch(2), [job(), job()]), ConfigurationError),
        (lambda: check_jobs(switch(2), [job(ranks=(0, 7))]), InfeasibleError),
        (lambda: plan_cluster(parted(), [job(ranks=(0, 2))]), InfeasibleError),
    ],
)
def test_bad_jobs_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_a_large_job_of_many_iterations_is_planned_without_running_them():
    """Its iterations repeat: what is simulated does not grow with their number."""
    topology = leaf_spine(128, leaves=8, spines=4)
    told = []
    few, many = (
        plan_cluster(
            topology,
            [job(ranks=range(128), layers=2, iterations=iterations)],
            progress=lambda *step: told.append(step),
        )
        for iterations in (4, 400_000)
    )
    assert many.outcome.result.events <= few.outcome.result.events
    iteration_s = many.outcome.iteration_s["a"]
    assert iteration_s == pytest.approx(few.outcome.iteration_s["a"], rel=1e-9)
    assert many.outcome.completion_s["a"] == pytest.approx(400_000 * iteration_s)
    assert {stage for stage, _, _ in told} == {"jobs planned alone", "plans simulated"}
    assert all(0 <= done <= total for _, done, total in told)
