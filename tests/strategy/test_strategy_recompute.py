"""What recomputation and pipelines repeat or expose, by hand."""

import dataclasses

import pytest

from fivefold.strategy import ModelSpec, ParallelPlan, evaluate_plan, load_cluster, load_model
from fivefold.strategy.cluster import gemm_time_s, memory_time_s
from fivefold.strategy.cost import evaluate_table
from fivefold.strategy.plan import PlanTable

MODEL = ModelSpec(
    name="x", num_layers=8, hidden=4096, num_heads=32, seq_len=2048, vocab=50304, dropout=False
)


def cluster_with(name="h100-nemo", **changed):
    cluster = load_cluster(name)
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **changed))


def time_of(cluster, model, plan):
    return evaluate_plan(model, cluster.device, cluster.fabric, plan=plan).time


def test_stopping_early_leaves_out_the_last_product_and_what_follows():
    plan = ParallelPlan(global_batch=8, data=8, recompute="full")
    whole, early = cluster_with(), cluster_with(recompute_stops_early=True)
    saved_s = time_of(whole, MODEL, plan).total_s - time_of(early, MODEL, plan).total_s
    tokens, device = 2048, whole.device
    product_s = gemm_time_s(device, m=tokens, n=4096, k=4 * 4096)
    residual_s = memory_time_s(device, 3 * 2 * tokens * 4096) + device.kernel_gap_s
    assert saved_s == pytest.approx(8 * (product_s + residual_s), rel=1e-9)


def test_experts_are_repeated_whole():
    plan = ParallelPlan(global_batch=8, data=8, expert=8, recompute="full", zero=1)
    model = load_model("mixtral-8x7b")
    whole = time_of(cluster_with(), model, plan)
    assert time_of(cluster_with(recompute_stops_early=True), model, plan) == whole


def test_kept_products_are_not_repeated():
    plan = ParallelPlan(global_batch=8, data=8, recompute="selective")
    none = time_of(cluster_with(), MODEL, plan).total_s
    half = time_of(cluster_with(selective_products=0.5), MODEL, plan)
    every = time_of(cluster_with(selective_products=1.0), MODEL, plan)
    assert half.recompute_s == pytest.approx(every.recompute_s / 2, rel=1e-12)
    assert every.total_s - none == pytest.approx(every.recompute_s, rel=1e-9)
    full = dataclasses.replace(plan, recompute="full")
    assert every.total_s < time_of(cluster_with(), MODEL, full).total_s


@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [8, 64])
def test_messages_are_hidden_only_in_the_steady_part(virtual, micro_batches):
    model = dataclasses.replace(MODEL, num_layers=32)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    plan = ParallelPlan(
        global_batch=micro_batches, pipeline=8, virtual=virtual, schedule=schedule,
        pipeline_overlap=True,
    )  # fmt: skip
    cluster = cluster_with(overlap_slowdown=0.0)
    beside = time_of(cluster, model, plan).pipeline_p2p_s
    apart = time_of(
        cluster, model, dataclasses.replace(plan, pipeline_overlap=False)
    ).pipeline_p2p_s
    # Plain 1F1B waits for its messages: nothing of them is hidden.
    filling = (virtual - 1) * 8 / (virtual * micro_batches) if virtual > 1 else 1.0
    assert beside == pytest.approx(filling * apart, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_columns_agree_on_every_stack_s_recomputation(recompute, dtype):
    cluster, model = load_cluster("h100-96gb-torchtitan"), load_model("llama3-8b")
    plans = [
        ParallelPlan(
            global_batch=64, data=4, tensor=tensor, pipeline=2, virtual=2, schedule="interleaved",
            sequence_parallel=tensor > 1, recompute=recompute, dtype=dtype,
            pipeline_overlap=overlap,
        )
        for tensor in (1, 4)
        for overlap in (False, True)
    ]  # fmt: skip
    table = PlanTable.of(plans)
    found = evaluate_table(model, cluster.device, cluster.fabric, table=table)
    for i, plan in enumerate(plans):
        one = evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
        assert found.time_s[i] == pytest.approx(one.time_s, rel=1e-12)
