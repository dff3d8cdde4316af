"""Search: columns equal the readable evaluator, bounds lose nothing, refusals say why."""

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fivefold.collectives.pricing import FabricSpec, Tier
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.strategy import (
    ModelSpec,
    ParallelPlan,
    SearchSpace,
    evaluate_plan,
    load_cluster,
    load_model,
    megatron_script,
    search_plans,
    space_of_target,
)
from fivefold.strategy.cost import evaluate_table
from fivefold.strategy.parts import MixtureOfExperts
from fivefold.strategy.plan import PipelineSchedule, PlanTable, plan_problem
from helpers.night import number_of

GPT = ModelSpec(name="gpt", num_layers=24, hidden=2048, num_heads=16, seq_len=2048, vocab=51200)
MOE = dataclasses.replace(
    GPT, gated=True, tied=False, learned_positions=False, dropout=False, num_kv_heads=8,
    experts=MixtureOfExperts(num_experts=16, top_k=2, expert_ffn=4096, shared_ffn=512,
                             dense_layers=2),
)  # fmt: skip
A100 = load_cluster("a100-megatron")
H100 = load_cluster("h100-nemo")
DEVICES = {
    "gpt": dataclasses.replace(A100.device, jitter=0.01, step_overhead_s=0.02),
    "moe": dataclasses.replace(H100.device, splits_stage_messages=False),
}
FABRIC = FabricSpec(
    name="three",
    tiers=(
        A100.fabric.tiers[0],
        Tier(name="pod", gpus=64, bandwidth_bytes_per_s=25e9, fill_s=1e-7),
        Tier(name="top", gpus=4096, bandwidth_bytes_per_s=10e9),
    ),
)
TWO_CHUNKS = ("zb_v", "v_half", "v_min", "dualpipe_v")
POWERS = st.integers(0, 4).map(lambda n: 2**n)


@st.composite
def plans(draw):
    t, p, d, c = (draw(POWERS) for _ in range(4))
    schedule = draw(st.sampled_from(get_args(PipelineSchedule))) if p > 1 else "1f1b"
    virtual = {"interleaved": draw(st.sampled_from([2, 3]))}.get(schedule, 1)
    flag = st.booleans()
    words = {
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "tensor_overlap": draw(st.sampled_from(["none", "ring", "pipe"])),
        "order": draw(st.sampled_from(["tcdp", "tcpd"])),
    }
    flags = {
        name: draw(flag)
        for name in ("regather", "data_overlap", "pipeline_overlap", "offload_weights",
                     "offload_activations", "offload_optimizer", "embedding_layers")
    }  # fmt: skip
    try:
        return ParallelPlan(
            global_batch=d * draw(st.sampled_from([16, 32, 48])), data=d, tensor=t, pipeline=p,
            micro_batch=draw(st.sampled_from([1, 2, 4])), context=c,
            expert=draw(st.sampled_from([1, 2, 4])), schedule=schedule,
            virtual=2 if schedule in TWO_CHUNKS else virtual, zero=draw(st.integers(0, 3)),
            shard=draw(st.sampled_from([None, max(d * c // 2, 1)])),
            sequence_parallel=t > 1 and draw(flag), tau=draw(st.sampled_from([1, 1, 8])),
            **words, **flags,
        )  # fmt: skip
    except ConfigurationError:
        return assume(condition=False)


@given(st.lists(plans(), min_size=1, max_size=8), st.sampled_from(["gpt", "moe"]))
@settings(deadline=None, max_examples=number_of(25, 1000), suppress_health_check=list(HealthCheck))
def test_columns_equal_the_readable_evaluator(found, name):
    model, device = {"gpt": GPT, "moe": MOE}[name], DEVICES[name]
    found = [plan for plan in found if plan_problem(model, plan) is None]
    assume(found)
    one_by_one = [evaluate_plan(model, device, FABRIC, plan=plan) for plan in found]
    table = PlanTable.of(found)
    costs = evaluate_table(model, device, FABRIC, table=table)
    assert costs.time_s == pytest.approx([one.time_s for one in one_by_one], rel=1e-12)
    bytes_ = [one.memory.total_bytes for one in one_by_one]
    assert costs.memory_bytes == pytest.approx(bytes_, rel=1e-12)
    assert [table.plan(row) for row in range(len(table))] == found


def space(**changed):
    return SearchSpace(**{
        "num_gpus": 16, "global_batch": 32, "zero": (0, 1, 3), "offload": (False, True),
        "data_overlap": (False, True), "tensor_overlap": ("none", "pipe"),
        "schedules": ("1f1b", "interleaved", "zb_1p"), **changed,
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe"])
def test_bounds_lose_nothing(model):
    wide = space(micro_batch=(1, 2, 4), context=(1, 2))
    quick, whole = (
        search_plans(model, A100.device, A100.fabric, space=wide, top=3, front=True, bounds=b)
        for b in (True, False)
    )
    assert whole.num_evaluated == whole.num_plans == quick.num_plans
    assert quick.num_evaluated + quick.num_bounded == quick.num_plans
    assert [one.time_s for one in quick.best] == [one.time_s for one in whole.best]
    assert [one.time_s for one in quick.front] == [one.time_s for one in whole.front]
    assert [one.memory for one in quick.front] == [one.memory for one in whole.front]
    # Without a front to keep, time alone rules out more.
    fewer = search_plans(model, A100.device, A100.fabric, space=wide, top=3)
    assert fewer.num_evaluated < quick.num_evaluated
    assert [one.time_s for one in fewer.best] == [one.time_s for one in whole.best]


@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe"])
@pytest.mark.parametrize("levels", [(0, 1), (0, 1, 2), (0, 1, 2, 3)], ids=len)
def test_bounds_keep_the_best_plan_at_every_size_of_memory(model, levels):
    """With as much memory as one plan of the front takes, no other bound may rule that one out."""
    wide = SearchSpace(num_gpus=8, global_batch=32, micro_batch=(1, 4), zero=levels, virtual=(1,))
    large = dataclasses.replace(A100.device, memory_bytes=1e15, spare_memory=0.0)
    front = search_plans(model, large, A100.fabric, space=wide, front=True, bounds=False).front
    assert len(front) > 2
    for one in front:
        tight = dataclasses.replace(large, memory_bytes=one.memory.total_bytes)
        quick = search_plans(model, tight, A100.fabric, space=wide)
        assert quick.best[0].time_s == one.time_s
        assert quick.best[0].memory == one.memory


def test_bounds_leave_plans_that_fit_only_with_activations_on_the_host():
    wide = space(tensor=(1,), pipeline=(1,), micro_batch=(2,), zero=(3,), recompute=("none",))
    moved = [
        search_plans(GPT, A100.device, A100.fabric,
                     space=dataclasses.replace(wide, offload=(flag,))).best[0].memory.total_bytes
        for flag in (False, True)
    ]  # fmt: skip
    tight = dataclasses.replace(A100.device, memory_bytes=(moved[0] + moved[1]) / 2)
    quick, whole = (
        search_plans(GPT, tight, A100.fabric, space=wide, bounds=b).best[0] for b in (True, False)
    )
    assert quick == whole
    assert quick.memory.host_bytes > 0


def test_the_front_is_what_no_other_plan_beats():
    found = search_plans(GPT, A100.device, A100.fabric, space=space(), front=True).front
    times = np.array([one.time_s for one in found])
    memory = np.array([one.memory.total_bytes for one in found])
    assert (np.diff(times) > 0).all()
    assert (np.diff(memory) < 0).all()
    assert found[0].time_s == search_plans(
        GPT, A100.device, A100.fabric, space=space()
    ).best[0].time_s  # fmt: skip


def test_every_plan_that_is_returned_fits_and_runs():
    result = search_plans(GPT, A100.device, A100.fabric, space=space(), top=20)
    assert len({one.time_s for one in result.best}) == 20
    for one in result.best:
        assert one.fits
        assert one.plan.num_gpus == 16
        assert plan_problem(GPT, one.plan) is None
        assert 0 < one.mfu < 1
    assert all(one.plan.tau == 1 for one in result.best)


def test_parts_of_the_time_add_up_and_are_not_negative():
    for plan in search_plans(MOE, H100.device, H100.fabric, space=space(), top=10).best:
        parts = [getattr(plan.time, name) for name in plan.time.__dataclass_fields__]
        assert sum(parts) == pytest.approx(plan.time_s)
        assert min(parts) >= -1e-12


@pytest.mark.parametrize("gpus", [1, 2, 3, 6, 7, 12])
def test_odd_numbers_of_gpus(gpus):
    odd = SearchSpace(num_gpus=gpus, global_batch=84)
    best = search_plans(load_model("gpt3-1.3b"), H100.device, H100.fabric, space=odd).best[0]
    assert best.plan.num_gpus == gpus


def test_more_bandwidth_is_never_slower():
    plan = ParallelPlan(global_batch=64, data=8, tensor=16, zero=1)
    times = []
    for rate in (1e9, 1e10, 1e11, 1e12):
        tiers = (A100.fabric.tiers[0], dataclasses.replace(
            A100.fabric.tiers[1], bandwidth_bytes_per_s=rate))  # fmt: skip
        fabric = FabricSpec(name="x", tiers=tiers)
        times.append(evaluate_plan(GPT, A100.device, fabric, plan=plan).time_s)
    assert times == sorted(times, reverse=True)


def test_a_convolution_network_is_planned():
    best = search_plans(
        load_model("resnet50"), A100.device, A100.fabric,
        space=SearchSpace(num_gpus=8, global_batch=2048),
    ).best[0]  # fmt: skip
    # Eight A100 train roughly 20,000 images a second; the model must be of that order.
    assert 10_000 < 2048 / best.time_s < 40_000


def test_memory_that_binds_is_named_with_the_nearest_change():
    with pytest.raises(InfeasibleError, match="memory binds") as caught:
        search_plans(
            load_model("llama3-70b"), A100.device, A100.fabric,
            space=SearchSpace(num_gpus=2, global_batch=8),
        )  # fmt: skip
    assert caught.value.exit_code == 3
    assert "GPUs" in caught.value.hint


def test_offloading_is_offered_where_it_helps():
    tight = SearchSpace(num_gpus=8, global_batch=8, zero=(0,), recompute=("full",))
    with pytest.raises(InfeasibleError) as caught:
        search_plans(load_model("llama3-70b"), A100.device, A100.fabric, space=tight)
    assert "ZeRO-3" in caught.value.hint or "offloading" in caught.value.hint


def test_a_job_larger_than_the_cluster_and_a_split_that_cannot_run():
    with pytest.raises(InfeasibleError, match="70000 GPUs"):
        search_plans(GPT, A100.device, A100.fabric,
                     space=SearchSpace(num_gpus=70_000, global_batch=70_000))  # fmt: skip
    with pytest.raises(InfeasibleError, match="no split of 7 GPUs"):
        search_plans(GPT, A100.device, A100.fabric,
                     space=SearchSpace(num_gpus=7, global_batch=3, pipeline=(1,)))  # fmt: skip


def test_degrees_that_do_not_multiply_are_named():
    narrow = SearchSpace(num_gpus=8, global_batch=8, tensor=(3,), pipeline=(5,))
    with pytest.raises(InfeasibleError, match="multiply to 8"):
        search_plans(GPT, A100.device, A100.fabric, space=narrow)


def test_hybrid_sharding_lies_between_copies_and_full_sharding():
    narrow = {"tensor": (1,), "pipeline": (1,), "micro_batch": (1,), "recompute": ("none",)}
    memory = {}
    for shard in (2, 8, None):
        best = search_plans(
            GPT, A100.device, A100.fabric,
            space=SearchSpace(num_gpus=16, global_batch=16, zero=(3,), shards=(shard,), **narrow),
        ).best[0]  # fmt: skip
        assert best.plan.shard == shard
        memory[shard] = best.memory.states_bytes
    assert memory[2] == pytest.approx(4 * memory[8])
    assert memory[8] == pytest.approx(2 * memory[None])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data": 3}, "not a multiple"),
        ({"micro_batch": 0}, "whole number from 1"),
        ({"schedule": "2f2b"}, "unknown"),
        ({"virtual": 2}, "no virtual stages"),
        ({"schedule": "interleaved"}, "needs virtual"),
        ({"sequence_parallel": True}, "needs tensor"),
        ({"expert": 3}, "does not divide"),
        ({"data": 4, "shard": 3}, "does not divide"),
        ({"tau": 4, "zero": 3}, "whole states"),
        ({"tau": 4, "zero": 1, "data": 2}, "whole states"),
        ({"zero": 4}, "unknown"),
        ({"zero": True}, "zero must be a whole number"),
        ({"shard": "2"}, "shard must be a whole number"),
        ({"shard": float("nan")}, "shard must be a whole number"),
    ],
)
def test_contradictory_plans_are_refused(changed, words):
    with pytest.raises(ConfigurationError, match=words):
        ParallelPlan(**{"global_batch": 16, **changed})


def test_plans_that_a_model_cannot_run_are_refused():
    with pytest.raises(ConfigurationError, match="does not divide num_heads"):
        evaluate_plan(GPT, A100.device, A100.fabric, plan=ParallelPlan(global_batch=1, tensor=3))
    images = load_model("resnet50")
    for degrees in ({"tensor": 2}, {"context": 2}):
        with pytest.raises(ConfigurationError, match="is not split by tensor or context"):
            evaluate_plan(images, A100.device, A100.fabric,
                          plan=ParallelPlan(global_batch=2, **degrees))  # fmt: skip
    with pytest.raises(ConfigurationError, match="needs a model with experts"):
        evaluate_plan(GPT, A100.device, A100.fabric,
                      plan=ParallelPlan(global_batch=2, data=2, expert=2))  # fmt: skip
    with pytest.raises(ConfigurationError, match="empty"):
        SearchSpace(num_gpus=1, global_batch=1, zero=())


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8", float("nan")])
def test_counts_that_are_none_are_refused(wrong):
    space = SearchSpace(num_gpus=8, global_batch=64)
    with pytest.raises(ConfigurationError, match="top must be a whole number"):
        search_plans(GPT, A100.device, A100.fabric, space=space, top=wrong)
    with pytest.raises(ConfigurationError, match="gpus_per_node must be a whole number"):
        space_of_target(space, "train", gpus_per_node=wrong)
    plan = ParallelPlan(global_batch=64, data=8)
    with pytest.raises(ConfigurationError, match="gpus_per_node must be a whole number"):
        megatron_script(load_model("llama2-7b"), plan, gpus_per_node=wrong)
    with pytest.raises(ConfigurationError, match=r"num_gpus of cluster .* must be a whole number"):
        dataclasses.replace(A100, num_gpus=wrong)


def test_a_large_model_does_local_updates_with_its_states_shared_inside_nodes():
    """Whole states of seven billion parameters are 30 bytes each: no GPU of 80 GB has them."""
    base = load_cluster("h100-nemo")
    node, outer = base.fabric.tiers
    slow = dataclasses.replace(outer, bandwidth_bytes_per_s=1.5e8)
    fabric = dataclasses.replace(base.fabric, tiers=(node, slow))
    space = SearchSpace(num_gpus=16, global_batch=64, tau=(1, 16))
    found = search_plans(load_model("llama2-7b"), base.device, fabric, space=space).best[0]
    assert (found.plan.tau, found.plan.zero) == (16, 3)
    assert 1 < found.plan.shards <= 8


def test_the_shortest_round_that_hides_its_updates_is_chosen():
    """A longer one disturbs compute less often, at the price of what a token teaches."""
    cluster = load_cluster("cpu-lab")
    model = ModelSpec(name="x", num_layers=4, hidden=256, num_heads=4, seq_len=512, vocab=8000)
    rounds = (1, 2, 4, 8, 16, 32, 64)
    free, slowed, waiting = (
        dataclasses.replace(cluster.device, **changes)
        for changes in ({"overlap_slowdown": 0.0}, {"overlap_slowdown": 0.3}, {"outer_window": 0.0})
    )

    def best(device, *taus):
        space = SearchSpace(num_gpus=2, global_batch=2, micro_batch=(1,), tau=taus)
        return search_plans(model, device, cluster.fabric, space=space).best[0]

    hiding = [tau for tau in rounds[1:] if best(free, tau).time.data_s == 0]
    assert 2 < hiding[0] < hiding[-1]
    for device in (free, slowed):
        assert best(device, *rounds).plan.tau == best(device, *reversed(rounds)).plan.tau
        assert best(device, *rounds).plan.tau == hiding[0]
    sent_s = best(waiting, hiding[0]).time.data_s
    found_s = best(slowed, hiding[0]).time_s - best(free, hiding[0]).time_s
    assert found_s == pytest.approx(0.3 * sent_s, rel=1e-6)
    # Where ranks wait for their updates, or none is hidden, a longer round is what helps.
    assert best(waiting, *rounds).plan.tau == rounds[-1]
    assert best(slowed, *rounds[:2]).plan.tau == 2


def test_a_first_choice_leaves_memory_free_where_it_can():
    found = search_plans(GPT, A100.device, A100.fabric, space=space()).best[0]
    wanted = found.memory.total_bytes
    for share, spare in ((1.0, False), (1 / (1 - A100.device.spare_memory) + 1e-6, True)):
        device = dataclasses.replace(A100.device, memory_bytes=wanted * share)
        best = search_plans(GPT, device, A100.fabric, space=space()).best[0]
        assert (best.memory == found.memory) == spare
        assert best.memory.total_bytes <= device.memory_bytes
    only = space(tensor=(1,), pipeline=(1,), micro_batch=(2,), zero=(0,), recompute=("none",))
    full = search_plans(GPT, A100.device, A100.fabric, space=only).best[0].memory.total_bytes
    device = dataclasses.replace(A100.device, memory_bytes=1.001 * full)
    assert search_plans(GPT, device, A100.fabric, space=only).best[0].fits


def test_what_the_default_does_not_search_is_little():
    """Context parallelism, tensor overlap, node-local states: within 3 % of the widest space."""
    cluster, model = load_cluster("h100-nemo"), load_model("llama3-405b", seq_len=8192)
    job = {"num_gpus": 512, "global_batch": 1024, "dtypes": ("fp8",)}
    wide = {
        "context": (1, 2, 4, 8),
        "shards": (None, 2, 4, 8, 16),
        "tensor_overlap": ("none", "ring", "pipe"),
    }
    usual, best = (
        search_plans(model, cluster.device, cluster.fabric, space=SearchSpace(**job, **more))
        .best[0]
        .time_s
        for more in ({}, wide)
    )
    assert best <= usual <= 1.03 * best
