"""Muon: its products, its states and what it sends, by hand."""

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
    load_job,
    load_model,
    search_plans,
    target_problem,
    trainer_config,
)
from fivefold.strategy.cost import evaluate_table
from fivefold.strategy.demand import plan_demand
from fivefold.strategy.parts import LowRankAdapters, MixtureOfExperts
from fivefold.strategy.plan import PlanTable

CLUSTER = load_cluster("h100-nemo")
PLAIN = {"tied": False, "learned_positions": False, "dropout": False, "biases": False}
MODEL = ModelSpec(name="x", num_layers=4, hidden=8192, num_heads=64, seq_len=1024, vocab=32000,
                  ffn=8192, **PLAIN)  # fmt: skip
PLAN = ParallelPlan(global_batch=8, data=8)


def price(plan=PLAN, model=MODEL, **device):
    changed = dataclasses.replace(CLUSTER.device, **device)
    return evaluate_plan(model, changed, CLUSTER.fabric, plan=plan)


def muon(plan=PLAN, **changes):
    return dataclasses.replace(plan, optimizer="muon", **changes)


def products_s(model=MODEL, plan=PLAN):
    """Muon's time over AdamW's where a moment's bytes cost nothing."""
    fast = {"memory_bandwidth_bytes_per_s": 1e30}
    both = [price(one, model, **fast).time.optimizer_s for one in (plan, muon(plan))]
    return both[1] - both[0]


def test_five_steps_of_4aab_and_2aaa():
    """Six matrices of 8,192 x 8,192 a layer, at the rate of large products."""
    flops = 4 * 6 * 5 * (4 + 2) * 8192.0**3
    rate = CLUSTER.device.matrix_flops(dtype="bf16")
    assert products_s() == pytest.approx(flops / rate, rel=0.06)


def test_a_wide_matrix_is_taken_on_its_short_side():
    wide = dataclasses.replace(MODEL, ffn=65536)
    square, short = 8192.0**3, 8192.0**2 * 65536
    flops = 4 * 5 * (4 * 6 * square + 2 * (4 * short + 2 * square))
    rate = CLUSTER.device.matrix_flops(dtype="bf16")
    assert products_s(wide) == pytest.approx(flops / rate, rel=0.08)


def test_states_are_a_master_copy_and_one_moment():
    """8 bytes for matrices of layers, 12 for the rest."""
    rest = MODEL.num_parameters - 4 * 6 * 8192**2
    expected = 8 * 4 * 6 * 8192**2 + 12 * rest
    assert price(muon()).memory.optimizer_bytes == pytest.approx(expected)
    assert price(muon(zero=1)).memory.optimizer_bytes == pytest.approx(expected / 8)
    # Moments of 16 bits, as of DeepSeek-V3, leave 4 + 2.
    narrow = price(muon(), optimizer_state_bytes=8.0).memory.optimizer_bytes
    assert narrow == pytest.approx(6 * 4 * 6 * 8192**2 + 8 * rest)


def test_whole_matrices_are_dealt_out():
    """24 equal matrices: a third each on 8 ranks' share, and never less than one."""
    alone = products_s()
    assert products_s(plan=dataclasses.replace(PLAN, zero=1)) == pytest.approx(alone / 8, rel=1e-6)
    many = ParallelPlan(global_batch=64, data=64, zero=1)
    assert products_s(plan=many) == pytest.approx(alone / 24, rel=1e-6)


def test_shared_parameters_are_made_whole_and_sent_back():
    plan = ParallelPlan(global_batch=8, data=8, zero=3)
    demand = plan_demand(MODEL, CLUSTER.device, muon(plan))
    sent = [m for m in demand.messages if m.kind == "all_to_all"]
    assert [m.axis for m in sent] == ["shard"]
    matrices = 4 * 6 * 8192**2
    assert sent[0].size_bytes * demand.segments == pytest.approx(2 * 2 * matrices / 8, rel=1e-6)
    assert not [m for m in plan_demand(MODEL, CLUSTER.device, plan).messages
                if m.kind == "all_to_all"]  # fmt: skip
    shared = dataclasses.replace(PLAN, zero=1)
    assert products_s(plan=plan) > products_s(plan=shared)


def test_experts_split_by_expert_parallelism():
    experts = MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=8192)
    model = dataclasses.replace(MODEL, experts=experts)
    dense = dataclasses.replace(MODEL, num_layers=4)
    attention = products_s(dense) * 4 / 6
    one, eight = products_s(model), products_s(model, dataclasses.replace(PLAN, expert=8))
    router = one - attention - 8 * products_s(dense) * 2 / 6
    assert 0 <= router < 0.01 * one
    assert eight - attention - router == pytest.approx(products_s(dense) * 2 / 6, rel=1e-6)


def test_adapters_alone_are_made_orthogonal():
    thin = dataclasses.replace(MODEL, adapters=LowRankAdapters(rank=16))
    assert products_s(thin) < 0.05 * products_s()


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3), st.booleans()),
                min_size=2, max_size=5))  # fmt: skip
def test_a_table_costs_what_each_costs_alone(drawn):
    plans = [
        ParallelPlan(global_batch=8, data=8 // tensor, tensor=tensor, zero=zero,
                     optimizer="muon" if by_muon else "adamw")
        for tensor, zero, by_muon in drawn
    ]  # fmt: skip
    found = evaluate_table(MODEL, CLUSTER.device, CLUSTER.fabric, table=PlanTable.of(plans))
    for plan, time_s, memory in zip(plans, found.time_s, found.memory_bytes, strict=True):
        one = price(plan)
        assert (time_s, memory) == pytest.approx((one.time_s, one.memory.total_bytes), rel=1e-12)


def test_no_search_takes_it_unasked_and_its_bounds_lose_nothing():
    space = SearchSpace(num_gpus=8, global_batch=16)
    best = search_plans(MODEL, CLUSTER.device, CLUSTER.fabric, space=space).best[0]
    assert best.plan.optimizer == "adamw"
    asked = dataclasses.replace(space, optimizers=("muon",), offload=(False, True))
    found = [
        search_plans(MODEL, CLUSTER.device, CLUSTER.fabric, space=asked, bounds=bounds).best[0]
        for bounds in (True, False)
    ]
    assert found[0].plan.optimizer == "muon"
    assert found[0].time_s == found[1].time_s


def test_jobs_and_programs(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('model = "llama3-8b"\ngpus = 8\nglobal_batch = 8\noptimizer = "muon"\n')
    assert load_job(path).space.optimizers == ("muon",)
    path.write_text(path.read_text() + "[plan]\ndata = 8\n")
    assert load_job(path).plan.optimizer == "muon"
    small = load_model("gpt3-1.3b")
    table = tomllib.loads(trainer_config(small, muon()))
    assert table["optim"]["optimizer"] == "muon"
    assert "optimizer" not in tomllib.loads(trainer_config(small, PLAN))["optim"]
    for target in ("torchtitan", "megatron"):
        assert "Muon" in str(target_problem(small, muon(), target))


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match="optimizer='lion'"):
        dataclasses.replace(PLAN, optimizer="lion")
    with pytest.raises(ConfigurationError, match="states in host memory"):
        muon(offload_optimizer=True)
    with pytest.raises(ConfigurationError, match="priced for transformers only"):
        price(muon(), load_model("resnet50"))
