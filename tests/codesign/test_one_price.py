"""One price: what layer 1 says of a plan alone on a network is what its simulation takes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.codesign import run_plan
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.workloads import job_from_plan
from fivefold.collectives.pricing import fabric_from_topology
from fivefold.network.topology import HostSpec, leaf_spine
from fivefold.strategy import (
    Cluster,
    Job,
    ModelSpec,
    ParallelPlan,
    SearchSpace,
    evaluate_plan,
    load_cluster,
)
from fivefold.strategy.cluster import reached_tiers
from fivefold.strategy.parts import MixtureOfExperts
from helpers.night import by_day

BASE = load_cluster("h100-nemo")
LARGE = dataclasses.replace(BASE.device, memory_bytes=1e15)
MODEL = ModelSpec(
    name="g", num_layers=48, hidden=1536, num_heads=24, seq_len=2304, vocab=51200, tied=False
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_1p", "zb_2p", "zb_v", "v_half", "v_min",
             "dualpipe", "dualpipe_v")  # fmt: skip
TWO_CHUNKS = {"zb_v", "v_half", "v_min", "dualpipe_v", "interleaved"}


def network(hosts, gpus, rate):
    """Hosts whose own links are ten times as fast as all their ports together."""
    return leaf_spine(
        hosts, leaves=1, spines=1, bandwidth=rate, host=HostSpec(gpus=gpus, nvlink=10 * gpus * rate)
    )


def devices(topology):
    return Cluster(
        name="x", device=LARGE, fabric=reached_tiers(fabric_from_topology(topology), BASE.fabric)
    )


def simulated_s(topology, plan, model=MODEL, ranks=None, where=None):
    job = Job(
        model=model, plan=plan,
        space=SearchSpace(num_gpus=plan.num_gpus, global_batch=plan.global_batch),
    )  # fmt: skip
    ranks = ranks or range(plan.num_gpus)
    jobs = [job_from_plan(topology, job, where or devices(topology), ranks, job_id="a")]
    return run_plan(topology, jobs, null_plan(topology, jobs)).iteration_s["a"]


def planned_s(topology, plan, model=MODEL):
    where = devices(topology)
    return evaluate_plan(model, where.device, where.fabric, plan=plan).time_s


@st.composite
def cases(draw, *, calm):
    """A network and a plan for all of it."""
    gpus, hosts = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([2, 3, 4]))
    number, flag = gpus * hosts, st.booleans()
    t = draw(st.sampled_from([d for d in range(1, gpus + 1) if gpus % d == 0]))
    p = draw(st.sampled_from([d for d in (1, 2, 3, 4, 6) if number // t % d == 0]))
    d = number // t // p
    schedule = draw(st.sampled_from(SCHEDULES)) if p > 1 else "1f1b"
    beside = {} if calm else {
        "data_overlap": draw(flag), "pipeline_overlap": draw(flag),
        "tensor_overlap": draw(st.sampled_from(["none", "ring", "pipe"])),
    }  # fmt: skip
    plan = ParallelPlan(
            global_batch=d * p * draw(st.sampled_from([1, 4])), data=d, tensor=t, pipeline=p,
            schedule=schedule, virtual=2 if schedule in TWO_CHUNKS else 1,
            zero=draw(st.integers(1, 3)), recompute=draw(st.sampled_from(["none", "full"])),
            sequence_parallel=t > 1 and draw(flag), offload_weights=draw(flag),
            order=draw(st.sampled_from(["tcdp", "tcpd"])), **beside,
        )  # fmt: skip
    return network(hosts, gpus, draw(st.sampled_from([3e8, 3e9, 2e10]))), plan


@by_day(15)
@given(cases(calm=True))
def test_a_plan_takes_as_long_alone_as_layer_1_says(case):
    """Within 5 %: layer 1 adds up what the simulation may run side by side.

    What a collective pays once, and not by layer, is up to 3 %. Reductions begin during the
    backward pass, where inside a host they share links with its tensor messages: up to 4 % seen.
    """
    assert simulated_s(*case) == pytest.approx(planned_s(*case), rel=0.05)


@by_day(15)
@given(cases(calm=False))
def test_beside_compute_messages_may_only_be_in_one_another_s_way(case):
    """Layer 1 prices each axis by itself: what shares a link in truth takes longer, never less."""
    assert simulated_s(*case) >= 0.97 * planned_s(*case)


@pytest.mark.parametrize("plan", [
    ParallelPlan(global_batch=128, tensor=8, pipeline=8, sequence_parallel=True),
    ParallelPlan(global_batch=128, tensor=8, pipeline=4, data=2, zero=1, recompute="full"),
    ParallelPlan(global_batch=128, tensor=8, pipeline=4, data=2, virtual=5, zero=1,
                 schedule="interleaved", pipeline_overlap=True, data_overlap=True),
    ParallelPlan(global_batch=128, tensor=8, data=8, zero=3, data_overlap=True),
], ids=["stages", "full", "interleaved", "zero3"])  # fmt: skip
def test_a_large_model_has_one_price(plan):
    """Seventy billion parameters on eight hosts of eight: within 1 %."""
    model = ModelSpec(
        name="70b", num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, ffn=28672,
        seq_len=4096, vocab=128256, gated=True, tied=False, learned_positions=False,
    )  # fmt: skip
    topology = leaf_spine(
        8, leaves=1, spines=1, bandwidth=50e9, host=HostSpec(gpus=8, nvlink=450e9)
    )
    assert simulated_s(topology, plan, model) == pytest.approx(
        planned_s(topology, plan, model), rel=0.01
    )


@pytest.mark.parametrize("gpus", [9, 12, 20])
def test_a_node_that_is_not_full_has_the_links_of_its_gpus(gpus):
    """Of a known cluster, whose tiers say what a GPU has."""
    where = dataclasses.replace(BASE, device=LARGE, num_gpus=gpus)
    plan = ParallelPlan(global_batch=4 * gpus, data=gpus, zero=1)
    known_s = evaluate_plan(MODEL, LARGE, BASE.fabric, plan=plan).time_s
    assert simulated_s(where.graph(), plan, where=where) == pytest.approx(known_s, rel=0.01)


@by_day(12)
@given(cases(calm=False), st.sampled_from([0.9, 0.1, 1e-3]))
def test_no_simulated_plan_gets_faster_on_a_slower_network(case, factor):
    topology, plan = case
    rate = float(min(topology.capacities_bytes_per_s))
    gpus = len(next(iter(topology.hosts.values())))
    hosts = len(topology.ranks) // gpus
    slower = leaf_spine(
        hosts, leaves=1, spines=1, bandwidth=factor * rate,
        host=HostSpec(gpus=gpus, nvlink=10 * gpus * rate),
    )  # fmt: skip
    same = network(hosts, gpus, rate)
    # Where messages run beside compute and share links, another rate is another order of events:
    # with a tenth less an iteration was seen to end 0.6 % sooner. A much slower link never helps.
    bound = 0.97 if factor == 0.9 else 1 - 1e-6
    assert simulated_s(slower, plan) >= simulated_s(same, plan) * bound


@by_day(12)
@given(cases(calm=False), st.randoms(use_true_random=False))
def test_other_hosts_of_the_same_kind_change_nothing(case, random):
    topology, plan = case
    gpus = len(next(iter(topology.hosts.values())))
    hosts = list(range(plan.num_gpus // gpus))
    random.shuffle(hosts)
    ranks = [host * gpus + place for host in hosts for place in range(gpus)]
    found_s = simulated_s(topology, plan, ranks=ranks)
    assert found_s == pytest.approx(simulated_s(topology, plan), rel=1e-6)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("gpus", "hosts", "pipeline"), [(4, 3, 2), (6, 2, 3), (4, 6, 4)])
def test_a_group_uneven_over_hosts_leaves_them_by_all_ports_that_each_has(
    gpus, hosts, pipeline, zero
):
    """Six ranks over four and two of two hosts: two rings, not one, as layer 1 says."""
    topology, number = network(hosts, gpus, 3e8), gpus * hosts
    data = number // pipeline
    plan = ParallelPlan(global_batch=4 * number, data=data, pipeline=pipeline, zero=zero)
    assert simulated_s(topology, plan) == pytest.approx(planned_s(topology, plan), rel=0.1)


@pytest.mark.parametrize(("zero", "tau"), [(1, 1), (2, 1), (3, 1), (3, 4)])
def test_experts_whose_states_a_part_of_the_ranks_shares_have_one_price(zero, tau):
    """Their gradients are summed over the ranks that hold them, and over the parts that share."""
    experts = MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=4096)
    model = dataclasses.replace(MODEL, experts=experts)
    plan = ParallelPlan(global_batch=16, data=16, expert=2, shard=4, zero=zero, tau=tau)
    fast, slow = (network(4, 4, rate) for rate in (50e9, 5e9))
    for topology in (fast, slow):
        wanted = planned_s(topology, plan, model)
        found = simulated_s(topology, plan, model)
        if tau == 1:
            assert found == pytest.approx(wanted, rel=0.05)
        assert found >= 0.97 * wanted  # outer updates are in the way of others' messages
    apart = dataclasses.replace(plan, shard=2)  # experts are shared by nobody, and summed by eight
    sent = 2 * (model.num_layers * model.share_of("E")) * model.routed_parameters / 2 / tau
    assert planned_s(slow, apart, model) > sent / 5e9
