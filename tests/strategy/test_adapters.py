"""Adapters beside frozen weights (LoRA): parameters, time, memory and limits by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.strategy import (
    ModelSpec,
    ParallelPlan,
    SearchSpace,
    error_bar,
    evaluate_plan,
    load_cluster,
    load_job,
    load_model,
    megatron_flags,
    search_plans,
    target_problem,
)
from fivefold.strategy.demand import plan_demand
from fivefold.strategy.parts import LowRankAdapters, MixtureOfExperts

CLUSTER = load_cluster("h100-nemo")
LLAMA = load_model("llama3-8b")
PLAN = ParallelPlan(global_batch=8, data=4, data_overlap=True)


def price(model, plan=PLAN, cluster=CLUSTER):
    return evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)


def adapted(model=LLAMA, **changes):
    return dataclasses.replace(model, adapters=LowRankAdapters(**{"rank": 16, **changes}))


def test_parameters_are_those_that_peft_prints():
    """r (inputs + outputs) of each matrix; 41,943,040 and 3,407,872 are PEFT's for Llama 3 8B."""
    assert adapted().trained_parameters == 41_943_040
    queries = adapted(rank=8, modules=("q_proj", "v_proj"))
    assert queries.trained_parameters == 3_407_872 == 32 * 8 * (4096 + 4096 + 4096 + 1024)
    assert queries.num_parameters == LLAMA.num_parameters + 3_407_872


def test_each_expert_has_an_adapter_and_the_router_none():
    experts = MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=96, shared_ffn=32)
    model = ModelSpec(name="x", num_layers=2, hidden=64, num_heads=4, seq_len=128, vocab=100,
                      gated=True, experts=experts)  # fmt: skip
    found = adapted(model, rank=4, modules=("up_proj",)).trained_parameters
    assert found == 2 * 4 * (8 * (64 + 96) + (64 + 32))


def test_weights_gradients_and_states_are_of_16_and_the_adapters_bytes():
    model, device = adapted(), CLUSTER.device
    memory, trained = price(model).memory, model.trained_parameters
    assert memory.weights_bytes == pytest.approx(2 * model.num_parameters)
    assert memory.gradients_bytes == pytest.approx(device.gradient_bytes * trained)
    assert memory.optimizer_bytes == pytest.approx(device.optimizer_state_bytes * trained)


def test_nf4_keeps_the_layers_at_4_127_bits_and_the_rest_at_16():
    model = adapted(base="nf4")
    outside = LLAMA.embedding_parameters + LLAMA.head_parameters + 64 * LLAMA.norm_parameters
    layers = LLAMA.num_parameters - outside
    expected = layers * 4.127 / 8 + 2 * outside + 2 * model.trained_parameters
    assert price(model).memory.weights_bytes == pytest.approx(expected, rel=1e-4)
    assert price(model).time_s > price(adapted()).time_s  # every product widens its weights
    # The largest matrix is whole in 16 bits while its product runs: gate and up at once.
    assert price(model).memory.working_bytes == pytest.approx(2 * 4096 * 2 * 14336)


def test_frozen_products_are_two_of_three():
    """One thin adapter: forward and backward for inputs; attention and norms are as they were."""
    long = dataclasses.replace(LLAMA, seq_len=8192)
    thin = adapted(long, rank=1, modules=("v_proj",))
    products = 6 * (long.num_parameters - long.embedding_parameters - 65 * 4096) * 8192
    assert long.flops_per_sequence() - thin.flops_per_sequence() == pytest.approx(
        products / 3, rel=1e-3
    )
    full_s, thin_s = price(long).time.compute_s, price(thin).time.compute_s
    assert 0.66 < thin_s / full_s < 0.76


def test_inputs_are_kept_where_an_adapter_needs_them():
    """Without weight gradients a product keeps nothing; attention still reads q, k, v, result."""
    tokens = 8192
    kept = {
        "o_proj": 0,  # attention keeps its result anyway
        "q_proj": 2 * 4096, "v_proj": 2 * 4096,  # the norm's output
        "down_proj": 2 * 14336, "up_proj": 2 * 4096,
    }  # fmt: skip
    bare = price(adapted(rank=1, modules=("o_proj",))).memory.activations_bytes
    for module, input_bytes in kept.items():
        found = price(adapted(rank=1, modules=(module,))).memory.activations_bytes
        assert (found - bare) / (32 * tokens) == pytest.approx(input_bytes, abs=1e-6), module
    # All of them keep what full training keeps but the head's input, and 2 r bytes for each.
    whole, every = price(LLAMA).memory.activations_bytes, price(adapted()).memory.activations_bytes
    assert every == pytest.approx(whole + 32 * 7 * tokens * 2 * 16 - 2 * tokens * 4096)


def test_gradients_of_adapters_alone_are_summed():
    plan = ParallelPlan(global_batch=4, data=4)
    both = [plan_demand(model, CLUSTER.device, plan) for model in (LLAMA, adapted())]
    sums = [
        sum(m.size_bytes for m in one.messages if m.phase == "reduce") * one.segments
        for one in both
    ]
    wire = CLUSTER.device.gradient_wire_bytes
    assert sums[1] == pytest.approx(wire * 41_943_040, rel=1e-6)
    assert sums[0] == pytest.approx(wire * LLAMA.num_parameters, rel=1e-6)


def test_shared_states_gather_frozen_weights_and_scatter_adapters():
    plan = ParallelPlan(global_batch=4, data=4, zero=3)
    demand = plan_demand(adapted(base="nf4"), CLUSTER.device, plan)
    gathers = [m for m in demand.messages if m.kind == "all_gather"]
    memory = price(adapted(base="nf4"), plan).memory
    assert len(gathers) == 2
    for gather in gathers:
        whole = gather.size_bytes * demand.segments / 4
        assert whole == pytest.approx(memory.weights_bytes, rel=1e-6)


@given(st.sampled_from([1, 4, 16, 64]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_larger_rank_costs_more(rank, tensor, recomputed):
    plan = ParallelPlan(
        global_batch=8, tensor=tensor, data=8 // tensor,
        recompute="full" if recomputed else "none",
    )  # fmt: skip
    less, more = (price(adapted(rank=tensor * r), plan) for r in (rank, 2 * rank))
    assert more.time_s >= less.time_s
    assert more.memory.total_bytes > less.memory.total_bytes


def test_error_bars_say_that_no_row_has_adapters():
    whole, some = (error_bar(m, CLUSTER.device, PLAN, time_s=5.0) for m in (LLAMA, adapted()))
    assert "none is of" not in whole.like
    assert some.like.endswith("none is of adapters, Megatron, 16 bits")
    assert some.share > whole.share


def test_bounds_of_the_search_lose_no_plan():
    space = SearchSpace(num_gpus=8, global_batch=16, offload=(False, True))
    model = adapted(dataclasses.replace(LLAMA, num_layers=8), base="nf4")
    found = [
        search_plans(model, CLUSTER.device, CLUSTER.fabric, space=space, bounds=bounds).best[0]
        for bounds in (True, False)
    ]
    assert found[0].time_s == found[1].time_s


def test_70b_is_tuned_on_one_gpu_of_80_gb_only_narrow():
    model = load_model("llama3-70b", seq_len=2048)
    plan = ParallelPlan(global_batch=4, recompute="full")
    assert not price(model, plan).fits
    assert not price(adapted(model), plan).fits
    assert price(adapted(model, base="nf4"), plan).fits


def test_a_job_names_adapters_and_programs_refuse_them(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "llama3-8b"\ngpus = 8\nglobal_batch = 8\n'
        '[adapters]\nrank = 8\nmodules = ["q_proj", "v_proj"]\n'
    )
    model = load_job(path).model
    assert model.trained_parameters == 3_407_872
    plan = ParallelPlan(global_batch=8, data=8)
    for target in ("train", "torchtitan", "megatron"):
        assert "adapters" in str(target_problem(model, plan, target))
    with pytest.raises(UnsupportedError, match="adapters"):
        megatron_flags(model, plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 0}, "rank must be a whole number from 1"),
        ({"modules": ("query",)}, "'query'"),
        ({"modules": ("q_a_proj",)}, "no q_a_proj to adapt"),
        ({"base": "int4"}, "base='int4'"),
    ],
)
def test_wrong_adapters_are_refused(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        adapted(**changes)
    plan = ParallelPlan(global_batch=8, tensor=8)
    with pytest.raises(ConfigurationError, match="does not divide rank=4"):
        price(adapted(rank=4), plan)
