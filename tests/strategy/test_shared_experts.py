"""Experts that every token visits, beside dispatch and combine."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.strategy import (
    ModelSpec,
    ParallelPlan,
    SearchSpace,
    evaluate_plan,
    load_cluster,
    load_model,
    megatron_flags,
    search_plans,
    target_problem,
    trainer_config,
)
from fivefold.strategy.parts import MixtureOfExperts
from fivefold.strategy.recipes import check_recipe

CLUSTER = load_cluster("h100-bridge")
PLAN = ParallelPlan(global_batch=256, data=64, expert=64, zero=1, data_overlap=True)
EXPERTS = MixtureOfExperts(num_experts=64, top_k=6, expert_ffn=1024, shared_ffn=2048)
MODEL = ModelSpec(
    name="x", num_layers=8, hidden=4096, num_heads=32, seq_len=4096, vocab=32000, gated=True,
    tied=False, learned_positions=False, dropout=False, biases=False, experts=EXPERTS,
)  # fmt: skip


def times(plan=PLAN, model=MODEL, **device):
    changed = dataclasses.replace(CLUSTER.device, **device)
    return evaluate_plan(model, changed, CLUSTER.fabric, plan=plan).time


def shared(plan=PLAN):
    return dataclasses.replace(plan, shared_overlap=True)


def test_what_hides_is_the_shared_experts_compute_and_never_more():
    """An exchange is hidden up to the shared experts' own time, which is what they add."""
    without = dataclasses.replace(MODEL, experts=dataclasses.replace(EXPERTS, shared_ffn=0))
    plain, hidden = times(), times(shared())
    compute_s = plain.compute_s - times(model=without).compute_s
    assert hidden.compute_s == pytest.approx(plain.compute_s)
    saved_s = plain.expert_s - hidden.expert_s
    assert 0 < saved_s < compute_s
    slowdown = CLUSTER.device.overlap_slowdown
    assert saved_s == pytest.approx((1 - slowdown) * compute_s, rel=0.05)


def test_a_slow_gpu_hides_the_whole_exchange():
    slow = {"peak_flops": CLUSTER.device.peak_flops / 200}
    before, after = times(**slow), times(shared(), **slow)
    # What stays is what compute loses while messages run beside it.
    assert after.expert_s < 1.01 * CLUSTER.device.overlap_slowdown * before.expert_s


def beside(plan=PLAN, **more):
    return dataclasses.replace(plan, expert_overlap=True, **more)


def test_another_micro_batch_hides_the_exchange_but_for_the_first_and_the_last():
    plain, hidden = times(), times(beside())
    micro_batches = PLAN.num_micro_batches
    assert hidden.compute_s == pytest.approx(plain.compute_s, rel=0.02)
    assert plain.expert_s / micro_batches < hidden.expert_s < plain.expert_s
    one = dataclasses.replace(PLAN, global_batch=PLAN.data * PLAN.micro_batch)
    assert times(beside(one)).expert_s == pytest.approx(times(one).expert_s)  # nothing is beside it


def test_a_search_hides_exchanges_by_itself():
    base = {"num_gpus": 64, "global_batch": 1024, "expert": (64,), "tensor": (1,), "pipeline": (1,)}
    found = [
        search_plans(MODEL, CLUSTER.device, CLUSTER.fabric, space=SearchSpace(**base, **more)).best
        for more in ({}, {"expert_overlap": (False,)})
    ]
    assert found[0][0].plan.expert_overlap
    assert found[0][0].time_s < found[1][0].time_s


def test_a_search_takes_it_where_asked():
    base = {"num_gpus": 64, "global_batch": 256, "expert": (64,), "tensor": (1,), "pipeline": (1,)}
    base["expert_overlap"] = (False,)
    found = [
        search_plans(MODEL, CLUSTER.device, CLUSTER.fabric, space=SearchSpace(**base, **more)).best
        for more in ({}, {"shared_overlap": (False, True)})
    ]
    assert not found[0][0].plan.shared_overlap
    assert found[1][0].plan.shared_overlap
    assert found[1][0].time_s < found[0][0].time_s


def test_programs_and_recipes(tmp_path):
    flags = megatron_flags(MODEL, shared())
    assert "--moe-shared-expert-overlap" in flags
    assert "--moe-shared-expert-overlap" not in megatron_flags(MODEL, PLAN)
    assert "--overlap-moe-expert-parallel-comm" in " ".join(megatron_flags(MODEL, beside()))
    sharded = dataclasses.replace(PLAN, zero=3)
    assert "shared experts" in str(target_problem(MODEL, shared(sharded), "torchtitan"))
    path = tmp_path / "run.sh"
    words = " ".join([*flags, "--vocab-size 32000 --nproc-per-node 8 --nnodes 8"])
    path.write_text(f"torchrun pretrain_gpt.py {words}\n")
    read = check_recipe(path, CLUSTER)
    assert read.prediction.plan.shared_overlap
    words = " ".join([*megatron_flags(MODEL, beside()), "--vocab-size 32000 --nproc-per-node 8"])
    path.write_text(f"torchrun --nnodes 8 pretrain_gpt.py {words}\n")
    assert check_recipe(path, CLUSTER).prediction.plan.expert_overlap
    assert read.model.experts.shared_ffn == 2048
    table = tomllib.loads(trainer_config(MODEL, ParallelPlan(global_batch=8, data=8)))
    assert table["model"]["moe"]["shared"] == 2
    odd = dataclasses.replace(MODEL, experts=dataclasses.replace(EXPERTS, shared_ffn=1500))
    assert "shared experts" in str(
        target_problem(odd, ParallelPlan(global_batch=8, data=8), "train")
    )


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match="needs expert > 1"):
        ParallelPlan(global_batch=8, data=8, shared_overlap=True)
    with pytest.raises(ConfigurationError, match="hides dispatch and combine by itself"):
        ParallelPlan(global_batch=32, data=4, pipeline=2, expert=4, schedule="dualpipe",
                     shared_overlap=True)  # fmt: skip
    for changes, problem in (
        ({"expert": 1}, "expert_overlap needs expert > 1"),
        ({"recompute": "full"}, "needs what full recomputation drops"),
        ({"shared_overlap": True}, "hide the same messages"),
        ({"pipeline": 2, "data": PLAN.data // 2, "expert": 2}, "has no forward beside a backward"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            beside(**changes)
    with pytest.raises(ConfigurationError, match="needs a model with shared experts"):
        times(shared(dataclasses.replace(PLAN, expert=8)), load_model("mixtral-8x7b"))


@given(
    rate=st.floats(1.05, 50.0),
    expert=st.sampled_from([2, 8, 32]),
    micro_batch=st.sampled_from([1, 4]),
    dtype=st.sampled_from(["bf16", "fp8", "mxfp8"]),
    schedule=st.sampled_from(["1f1b", "dualpipe", "interleaved"]),
)
def test_hidden_or_not_a_slower_link_never_makes_an_exchange_cheaper(
    rate, expert, micro_batch, dtype, schedule
):
    """Also where the host is what a layer waits for, which an exchange fills."""
    stages = 1 if schedule == "1f1b" else 4
    plan = ParallelPlan(
        global_batch=1024, micro_batch=micro_batch, data=32, pipeline=stages, expert=expert,
        dtype=dtype, schedule=schedule, virtual=2 if schedule == "interleaved" else 1,
        expert_overlap=schedule != "dualpipe",
    )  # fmt: skip
    cluster = load_cluster("h100-bridge")
    model = dataclasses.replace(load_model("qwen3-30b-a3b"), num_layers=48)
    slower = dataclasses.replace(
        cluster.fabric,
        tiers=tuple(
            dataclasses.replace(tier, bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s / rate)
            for tier in cluster.fabric.tiers
        ),
    )
    device = dataclasses.replace(cluster.device, peak_flops_fp4=0.0)
    usual, late = (
        evaluate_plan(model, device, fabric, plan=plan).time_s
        for fabric in (cluster.fabric, slower)
    )
    assert late >= usual * (1 - 1e-9)
    if schedule != "dualpipe":
        plain = dataclasses.replace(plan, expert_overlap=False)
        assert usual <= evaluate_plan(model, device, cluster.fabric, plan=plain).time_s * (1 + 1e-9)
