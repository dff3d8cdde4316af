"""A plan in the words of the programs that train: Megatron-LM's flags, a torch device mesh.

Names as in Megatron-LM since core 0.8 (2024); what it has no flag for is refused rather than left
out. This module knows no file and starts nothing.
"""

from __future__ import annotations

from fivefold.errors import UnsupportedError
from fivefold.strategy._model import ModelSpec
from fivefold.strategy._plan import WAITING_SCHEDULES, ParallelPlan


def device_mesh(plan: ParallelPlan) -> dict[str, int]:
    """Axes of ``torch.distributed.device_mesh.init_device_mesh``, the outermost first.

    Data-parallel ranks that share states are ``shard``, copies of those ``replicate``; axes of
    size 1 are left out.

    Args:
        plan: The plan.

    Returns:
        Size of each axis by name; their product is the number of GPUs.

    Examples:
        >>> device_mesh(ParallelPlan(global_batch=64, data=8, tensor=4, zero=3))
        {'shard': 8, 'tensor': 4}
    """
    shared = plan.shards // plan.context if plan.zero == 3 else 1
    copies = plan.data // max(1, shared)
    inner = {"context": plan.context, "tensor": plan.tensor}
    if plan.order == "tcpd":
        axes = {"replicate": copies, "shard": shared, "pipeline": plan.pipeline, **inner}
    else:
        axes = {"pipeline": plan.pipeline, "replicate": copies, "shard": shared, **inner}
    return {name: size for name, size in axes.items() if size > 1} or {"replicate": 1}


def megatron_flags(model: ModelSpec, plan: ParallelPlan) -> list[str]:
    """Flags of Megatron-LM's ``pretrain_gpt.py`` for a model and a plan.

    Args:
        model: The model.
        plan: How it is split.

    Returns:
        Flags and values, ready to be put behind the script's name. Data, tokenizer, learning rate
        and checkpoints are the user's.

    Raises:
        UnsupportedError: Megatron-LM cannot run the plan, or has no flag for a part of it.

    References:
        https://github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py.

    Examples:
        >>> from fivefold.strategy import named_model
        >>> plan = ParallelPlan(global_batch=64, data=8, tensor=8, sequence_parallel=True)
        >>> flags = megatron_flags(named_model("llama2-7b"), plan)
        >>> flags[:2], "--sequence-parallel" in flags
        (['--tensor-model-parallel-size', '8'], True)
    """
    problem = _why_not(model, plan)
    if problem is not None:
        raise UnsupportedError(
            f"Megatron-LM has no flags for this plan: {problem}",
            hint="search with SearchSpace limited to what it can do",
        )
    return [*_split(plan, model), *_memory(plan), *_shape(model)]


def _why_not(model: ModelSpec, plan: ParallelPlan) -> str | None:
    reasons = {
        "it trains language models only": bool(model.stages) or not model.embeds_tokens,
        f"schedule {plan.schedule}": plan.schedule not in {"1f1b", "interleaved"},
        f"ZeRO-{plan.zero}": plan.zero > 1,
        "states shared by a part of the data-parallel ranks": plan.shard is not None,
        "local updates (tau)": plan.tau > 1,
        "weights or activations in host memory": plan.offload_weights or plan.offload_activations,
        "optimizer states in host memory without ZeRO-1": plan.offload_optimizer and not plan.zero,
        "inputs that sequence parallelism keeps instead of gathering them again": (
            plan.sequence_parallel and not plan.regather
        ),
        "rings of messages beside products (it chooses between rings and pipelines by itself)": (
            plan.tensor_overlap == "ring"
        ),
        "tensor overlap without sequence parallelism": (
            plan.tensor_overlap != "none" and not plan.sequence_parallel
        ),
        f"messages between stages beside compute under {plan.schedule}": (
            plan.pipeline > 1 and plan.pipeline_overlap and plan.schedule in WAITING_SCHEDULES
        ),
        "interleaving two stages whose messages wait": (
            plan.schedule == "interleaved" and plan.pipeline == 2 and not plan.pipeline_overlap
        ),
        "latent attention": model.latent is not None,
        "experts split by tensor and expert parallelism without sequence parallelism": (
            plan.expert > 1 and plan.tensor > 1 and not plan.sequence_parallel
        ),
        "experts in 32 bits (their grouped products want 16)": (
            model.experts is not None and plan.dtype == "fp32"
        ),
        "layers with experts only here and there": model.experts is not None
        and (model.experts.every > 1 or model.experts.dense_layers > 0),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _split(plan: ParallelPlan, model: ModelSpec) -> list[str]:
    flags = [
        *("--tensor-model-parallel-size", str(plan.tensor)),
        *("--pipeline-model-parallel-size", str(plan.pipeline)),
        *("--context-parallel-size", str(plan.context)),
        *("--expert-model-parallel-size", str(plan.expert)),
        *("--micro-batch-size", str(plan.micro_batch)),
        *("--global-batch-size", str(plan.global_batch)),
    ]
    if plan.schedule == "interleaved":
        layers = model.num_layers // (plan.pipeline * plan.virtual)
        flags += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
        if not plan.pipeline_overlap:
            flags.append("--no-overlap-p2p-communication")
    if plan.order == "tcpd":
        flags += ["--use-tp-pp-dp-mapping"]
    if plan.sequence_parallel:
        flags.append("--sequence-parallel")
    if plan.tensor_overlap != "none":
        flags.append("--tp-comm-overlap")
    if plan.data_overlap:
        flags.append("--overlap-grad-reduce")
        if plan.zero:
            flags.append("--overlap-param-gather")
    if model.experts is not None:
        flags += ["--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"]
    return flags


def _memory(plan: ParallelPlan) -> list[str]:
    flags = ["--use-distributed-optimizer"] if plan.zero else []
    if plan.offload_optimizer:
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if plan.recompute == "selective":
        flags += ["--recompute-granularity", "selective"]
    elif plan.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        flags += ["--recompute-num-layers", "1"]
    if plan.embedding_layers:
        flags += ["--account-for-embedding-in-pipeline-split"]
        flags += ["--account-for-loss-in-pipeline-split"]
    # Parameters stay 16 bits wide under FP8: without --bf16 they would be 32.
    types = {"bf16": ["--bf16"], "fp8": ["--bf16", "--fp8-format", "hybrid"], "fp32": []}
    return flags + types[plan.dtype]


def _shape(model: ModelSpec) -> list[str]:
    flags = [
        *("--num-layers", str(model.num_layers)),
        *("--hidden-size", str(model.hidden)),
        *("--num-attention-heads", str(model.num_heads)),
        *("--ffn-hidden-size", str(model.ffn_width)),
        *("--seq-length", str(model.seq_len)),
        *("--max-position-embeddings", str(model.seq_len)),
    ]
    if model.kv_heads != model.num_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]
    if model.head_dim is not None:
        flags += ["--kv-channels", str(model.head_dim)]
    if model.gated:
        flags.append("--swiglu")
    if not model.tied:
        flags.append("--untie-embeddings-and-output-weights")
    if not model.learned_positions:
        flags += ["--position-embedding-type", "rope"]
    if not model.biases:
        flags += ["--disable-bias-linear", "--normalization", "RMSNorm"]
    if not model.dropout:
        flags += ["--attention-dropout", "0.0", "--hidden-dropout", "0.0"]
    if model.experts is not None:
        flags += ["--num-experts", str(model.experts.num_experts)]
        flags += ["--moe-router-topk", str(model.experts.top_k)]
        flags += ["--moe-ffn-hidden-size", str(model.experts.expert_ffn)]
        if model.experts.shared_ffn:
            flags += ["--moe-shared-expert-intermediate-size", str(model.experts.shared_ffn)]
    return flags
