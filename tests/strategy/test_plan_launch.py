"""Plans as Megatron-LM's flags and as device meshes."""

import argparse
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UnsupportedError
from fivefold.strategy import (
    ParallelPlan,
    SearchSpace,
    device_mesh,
    load_cluster,
    load_model,
    megatron_flags,
    search_plans,
)


def parsed(flags):
    """Values by flag; a flag without a value is True."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for place, flag in enumerate(flags):
        if not flag.startswith("--"):
            continue
        has_value = place + 1 < len(flags) and not flags[place + 1].startswith("--")
        parser.add_argument(flag, **({} if has_value else {"action": "store_true"}))
    return vars(parser.parse_args(flags))


def test_flags_of_a_dense_model():
    plan = ParallelPlan(
        global_batch=512, micro_batch=2, data=8, tensor=4, pipeline=4, virtual=5, zero=1,
        schedule="interleaved", sequence_parallel=True, recompute="full", data_overlap=True,
    )  # fmt: skip
    found = parsed(megatron_flags(load_model("llama3-70b"), plan))
    assert found["num_layers"] == "80"
    assert found["num_layers_per_virtual_pipeline_stage"] == "4"
    assert (found["tensor_model_parallel_size"], found["global_batch_size"]) == ("4", "512")
    assert found["num_query_groups"] == "8"
    assert found["recompute_granularity"] == "full"
    for switch in ("sequence_parallel", "use_distributed_optimizer", "overlap_param_gather",
                   "swiglu", "bf16", "untie_embeddings_and_output_weights"):  # fmt: skip
        assert found[switch] is True


def test_flags_of_a_model_with_experts():
    plan = ParallelPlan(global_batch=64, data=8, expert=8)
    found = parsed(megatron_flags(load_model("mixtral-8x7b"), plan))
    assert (found["num_experts"], found["moe_router_topk"]) == ("8", "2")
    assert found["expert_model_parallel_size"] == "8"
    assert found["moe_grouped_gemm"] is True
    assert found["moe_token_dispatcher_type"] == "alltoall"  # noqa: S105 - no secret


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bf16", (True, None)), ("fp8", (True, "hybrid")), ("fp32", (None, None))],
)
def test_flags_of_the_type_of_products(dtype, expected):
    """Megatron-LM's parameters are 32 bits wide without --bf16, under FP8 too."""
    plan = ParallelPlan(global_batch=64, dtype=dtype)
    found = parsed(megatron_flags(load_model("llama2-7b"), plan))
    assert (found.get("bf16"), found.get("fp8_format")) == expected
    assert "fp16" not in found


@pytest.mark.parametrize("overlap", [False, True])
def test_flags_of_messages_between_interleaved_stages(overlap):
    """Megatron-LM overlaps them unless it is told not to."""
    plan = ParallelPlan(
        global_batch=64, pipeline=4, virtual=2, schedule="interleaved", pipeline_overlap=overlap
    )
    found = megatron_flags(load_model("llama2-7b"), plan)
    assert ("--no-overlap-p2p-communication" in found) is not overlap


def test_what_a_search_finds_for_plain_schedules_has_flags():
    """No switch is on that the schedule does not have."""
    model, cluster = load_model("llama2-7b"), load_cluster("h100-nemo")
    space = SearchSpace(num_gpus=16, global_batch=64, pipeline=(4,), schedules=("1f1b",),
                        zero=(0, 1))  # fmt: skip
    best = search_plans(model, cluster.device, cluster.fabric, space=space).best[0]
    assert not best.plan.pipeline_overlap
    assert megatron_flags(model, best.plan)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("llama2-7b", {"zero": 3, "data": 2}, "ZeRO-3"),
        ("llama2-7b", {"tau": 8, "data": 2}, "tau"),
        ("llama2-7b", {"schedule": "zb_1p", "pipeline": 4}, "zb_1p"),
        ("deepseek-v3", {}, "latent attention"),
        ("resnet50", {}, "language models only"),
        ("llama2-7b", {"tensor": 2, "sequence_parallel": True, "regather": False}, "keeps"),
        ("llama2-7b", {"tensor": 2, "sequence_parallel": True, "tensor_overlap": "ring"}, "rings"),
        ("llama2-7b", {"tensor": 2, "tensor_overlap": "pipe"}, "without sequence"),
        ("llama2-7b", {"pipeline": 4, "pipeline_overlap": True}, "with compute under 1f1b"),
        ("llama2-7b", {"pipeline": 2, "virtual": 2, "schedule": "interleaved"}, "messages wait"),
        ("llama2-7b", {"offload_optimizer": True}, "without ZeRO-1"),
        ("mixtral-8x7b", {"data": 8, "tensor": 2, "expert": 8}, "without sequence"),
        ("mixtral-8x7b", {"dtype": "fp32"}, "32 bits"),
    ],
)
def test_what_has_no_flag_is_refused(model, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        megatron_flags(load_model(model), ParallelPlan(global_batch=64, **changes))


@given(
    data=st.sampled_from([1, 2, 4, 8]), tensor=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 4]), context=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 3]), order=st.sampled_from(["tcdp", "tcpd"]),
)  # fmt: skip
def test_a_mesh_has_every_gpu_once(**degrees):
    plan = ParallelPlan(global_batch=64, **degrees)
    mesh = device_mesh(plan)
    assert math.prod(mesh.values()) == plan.num_gpus
    assert list(mesh)[-1] == "tensor" or plan.tensor == 1


def test_hybrid_sharding_has_two_axes():
    plan = ParallelPlan(global_batch=64, data=8, zero=3, shard=4)
    assert device_mesh(plan) == {"replicate": 2, "shard": 4}
