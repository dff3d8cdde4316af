"""A plan in the words of the programs that train: Megatron-LM, torchtitan, fivefold's own trainer.

Names are Megatron-LM's since core 0.8 (2024) and torchtitan's of commit b5bcd76 (August 2026); what
a program cannot do is refused rather than left out. This module knows no file and starts nothing.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

from fivefold.errors import (
    ConfigurationError,
    InfeasibleError,
    UnsupportedError,
    require_one_of,
    require_whole,
)
from fivefold.runs import format_toml
from fivefold.strategy._space import SearchSpace
from fivefold.strategy.cluster import DeviceSpec
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import WAITING_SCHEDULES, ParallelPlan


def device_mesh(plan: ParallelPlan) -> dict[str, int]:
    """Return the axes of ``torch.distributed.device_mesh.init_device_mesh``, the outermost first.

    Data-parallel ranks that share states are ``shard``, copies of those ``replicate``; axes of
    size 1 are left out.

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


TARGETS = ("train", "torchtitan", "megatron")
"""Programs that a search can be limited to: fivefold's own trainer, torchtitan, Megatron-LM."""

_LIMITS: dict[str, dict[str, tuple[Any, ...]]] = {
    "train": {
        "tensor": (1,), "pipeline": (1,), "context": (1,), "zero": (0, 3), "recompute": ("none",),
        "dtypes": ("bf16", "fp32"), "offload": (False,), "schedules": ("1f1b",),
        "expert_overlap": (False,),
    },
    "torchtitan": {
        "zero": (0, 2, 3), "dtypes": ("bf16",), "regather": (True,),
        "schedules": ("1f1b", "interleaved", "gpipe", "zb_v", "dualpipe_v"), "orders": ("tcdp",),
        "expert_overlap": (False,), "tensor_overlap": ("none", "ring"),
    },
    "megatron": {
        "zero": (0, 1), "tau": (1,), "shards": (None,), "schedules": ("1f1b", "interleaved"),
        "regather": (True,), "offload": (False,), "tensor_overlap": ("none", "pipe"),
    },
}  # fmt: skip


def space_of_target(space: SearchSpace, target: str, *, gpus_per_node: int) -> SearchSpace:
    """Return the part of a search space that a program can run.

    Args:
        space: Which plans would be looked at.
        target: One of ``TARGETS``.
        gpus_per_node: GPUs of a node, over which the trainer shares states of large models.

    Raises:
        ConfigurationError: There is no such program, or ``gpus_per_node`` is below 1.
        InfeasibleError: The space names values of a setting, and none that the program can run.

    Examples:
        >>> space = SearchSpace(num_gpus=8, global_batch=64)
        >>> space_of_target(space, "megatron", gpus_per_node=8).zero
        (0, 1)
    """
    require_one_of(target, TARGETS, f"there is no target {target!r}")
    require_whole("gpus_per_node", gpus_per_node)
    changes: dict[str, Any] = {}
    for name, able in _LIMITS[target].items():
        wanted = getattr(space, name)
        both = able if wanted is None else tuple(one for one in wanted if one in able)
        if not both:
            message = f"{target} cannot run {name} = {list(wanted)}"
            raise InfeasibleError(message, hint=f"it can run {name} = {list(able)}")
        changes[name] = both
    if target == "train" and gpus_per_node > 1 and space.num_gpus > gpus_per_node:
        changes["shards"] = (gpus_per_node,)
    elif target == "train":
        changes["zero"] = (0,)
    return dataclasses.replace(space, **changes)


def _unwritten(model: ModelSpec, plan: ParallelPlan | None = None) -> dict[str, bool]:
    """Return what no program's words are written for; a plan, where Muon is none of them."""
    return {
        "Muon (newer than the flags written here)": (plan is not None and plan.optimizer == "muon"),
        "adapters beside frozen weights (LoRA)": model.adapters is not None,
        "layers that follow a pattern (Mamba)": bool(model.pattern),
        "experts that work at another width than the model": (
            model.experts is not None and model.experts.latent > 0
        ),
    }


def target_problem(model: ModelSpec, plan: ParallelPlan, target: str) -> str | None:
    """Return why a program cannot run a plan; None where it can."""
    problems = {
        "train": lambda: _trainer_problems(model, plan),
        "torchtitan": lambda: _torchtitan_problems(model, plan),
        "megatron": lambda: _megatron_problems(model, plan),
    }[target]()
    return next((problem for problem, holds in problems.items() if holds), None)


def _refuse(problems: Mapping[str, bool], what: str) -> None:
    """Refuse a plan with the first problem that it has."""
    for problem, holds in problems.items():
        if holds:
            raise UnsupportedError(
                f"{what}: {problem}", hint="limit [search] to what the program can run"
            )


def megatron_flags(
    model: ModelSpec, plan: ParallelPlan, *, device: DeviceSpec | None = None
) -> list[str]:
    """Return the flags of Megatron-LM's ``pretrain_gpt.py`` for a model and a plan.

    Args:
        model: What is trained.
        plan: How it is split.
        device: What it was planned for; its stack says whether gradients have 16 bits. None:
            Megatron-LM's own 32.

    Returns:
        Flags and values, ready to be put behind the script's name. Data, tokenizer, learning rate
        and checkpoints are the user's.

    Raises:
        UnsupportedError: Megatron-LM cannot run the plan, or has no flag for a part of it.

    References:
        https://github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py.

    Examples:
        >>> from fivefold.strategy import load_model
        >>> plan = ParallelPlan(global_batch=64, data=8, tensor=8, sequence_parallel=True)
        >>> flags = megatron_flags(load_model("llama2-7b"), plan)
        >>> flags[:2], "--sequence-parallel" in flags
        (['--tensor-model-parallel-size', '8'], True)
    """
    _refuse(_megatron_problems(model, plan), "Megatron-LM has no flags for this plan")
    narrow = device is not None and device.gradient_bytes == 2
    told = _megatron_plan(model, plan) | _megatron_model(model)
    told["--grad-reduce-in-bf16"] = narrow and plan.dtype != "fp32"
    return " ".join(words for words, holds in told.items() if holds).split()


def megatron_script(
    model: ModelSpec, plan: ParallelPlan, *, gpus_per_node: int, device: DeviceSpec | None = None
) -> str:
    """Return a shell script that starts Megatron-LM's ``pretrain_gpt.py`` with a plan.

    Args:
        model: What is trained.
        plan: How it is split.
        gpus_per_node: Processes of a node.
        device: As of ``megatron_flags``.

    Returns:
        The script; it is started on every node, with data and the like as its arguments.

    Raises:
        ConfigurationError: ``gpus_per_node`` is below 1.
        UnsupportedError: As of ``megatron_flags``.

    Examples:
        >>> from fivefold.strategy import load_model
        >>> plan = ParallelPlan(global_batch=64, data=8)
        >>> megatron_script(load_model("llama2-7b"), plan, gpus_per_node=8).splitlines()[0]
        '#!/usr/bin/env bash'
    """
    # A layout's bars are quoted, which a shell would take for pipes.
    lines = re.split(r" (?=--)", shlex.join(megatron_flags(model, plan, device=device)))
    nproc = min(require_whole("gpus_per_node", gpus_per_node), plan.num_gpus)
    nodes = plan.num_gpus // nproc
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {_clean(model.name)} on {plan.num_gpus} GPUs, planned by fivefold. Start it on",
            "# every node, in Megatron-LM's folder; data, tokenizer, learning rate and more are",
            "# yours: bash THIS --data-path ... --tokenizer-type ... --train-iters ... --lr ...",
            "set -eu",
            f"torchrun --nnodes {nodes} --nproc-per-node {nproc} \\",
            '  --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" \\',
            '  --master-port "${MASTER_PORT:-29500}" pretrain_gpt.py \\',
            *(f"  {line} \\" for line in lines),
            '  "$@"',
            "",
        ]
    )


def _megatron_problems(model: ModelSpec, plan: ParallelPlan) -> dict[str, bool]:
    return {
        **_unwritten(model, plan),
        "it trains language models only": bool(model.stages) or not model.embeds_tokens,
        f"schedule {plan.schedule}": plan.schedule not in {"1f1b", "interleaved"},
        f"ZeRO-{plan.zero}": plan.zero > 1,
        "states shared by a part of the data-parallel ranks": plan.shard is not None,
        "local updates (tau)": plan.tau > 1,
        "weights or activations in host memory": plan.offload_weights or plan.offload_activations,
        "optimizer states in host memory without ZeRO-1": plan.offload_optimizer and not plan.zero,
        "sequence parallelism that keeps its inputs instead of gathering them again": (
            plan.sequence_parallel and not plan.regather
        ),
        "tensor overlap in rings (it chooses between rings and pipelines itself)": (
            plan.tensor_overlap == "ring"
        ),
        "tensor overlap without sequence parallelism": (
            plan.tensor_overlap != "none" and not plan.sequence_parallel
        ),
        f"pipeline p2p overlapped with compute under {plan.schedule}": (
            plan.pipeline > 1 and plan.pipeline_overlap and plan.schedule in WAITING_SCHEDULES
        ),
        "interleaving two stages whose messages wait": (
            plan.schedule == "interleaved" and plan.pipeline == 2 and not plan.pipeline_overlap
        ),
        "latent attention": model.latent is not None,
        "selective recomputation of some layers only": (
            plan.recompute == "selective" and plan.recompute_layers is not None
        ),
        "sliding windows, clamped gates or multi-token prediction": bool(
            model.window or model.clamped or model.predicted_tokens
        ),
        "experts split by tensor and expert parallelism without sequence parallelism": (
            plan.expert > 1 and plan.tensor > 1 and not plan.sequence_parallel
        ),
        "experts in 32 bits (their grouped products want 16)": (
            model.experts is not None and plan.dtype == "fp32"
        ),
        "layers with experts only here and there": model.experts is not None
        and (model.experts.every > 1 or model.experts.dense_layers > 0),
    }


def _megatron_plan(model: ModelSpec, plan: ParallelPlan) -> dict[str, bool]:
    """Return flags, and whether they hold; parameters are 16 bits wide with narrow products too."""
    chunks, ends = plan.pipeline * plan.virtual, plan.embedding_layers
    each, rest = divmod(model.num_layers + 2 * ends, chunks)
    layout = chunk_layout(model.num_layers, chunks, embedding_layers=ends)
    # Stages with equally many layers are all that Megatron-LM deals out by itself.
    interleaved, named = plan.schedule == "interleaved", plan.pipeline > 1 and rest > 0
    some = plan.recompute_layers  # of a block, so many layers of each chunk recompute
    method, count = ("uniform", 1) if some is None else ("block", -(-some // plan.virtual))
    return {
        f"--tensor-model-parallel-size {plan.tensor}": True,
        f"--pipeline-model-parallel-size {plan.pipeline}": True,
        f"--context-parallel-size {plan.context}": True,
        f"--expert-model-parallel-size {plan.expert}": True,
        f"--micro-batch-size {plan.micro_batch}": True,
        f"--global-batch-size {plan.global_batch}": True,
        # Where layers differ, each chunk is named.
        f"--num-layers-per-virtual-pipeline-stage {each}": interleaved and not rest,
        f"--pipeline-model-parallel-layout {layout}": named,
        "--no-overlap-p2p-communication": interleaved and not plan.pipeline_overlap,
        f"--expert-tensor-parallel-size {plan.expert_tensor}": plan.expert_tensor is not None,
        "--use-tp-pp-dp-mapping": plan.order == "tcpd",
        "--sequence-parallel": plan.sequence_parallel,
        "--tp-comm-overlap": plan.tensor_overlap != "none",
        "--overlap-grad-reduce": plan.data_overlap,
        "--overlap-param-gather": plan.data_overlap and plan.zero > 0,
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall": model.experts is not None,
        "--moe-shared-expert-overlap": plan.shared_overlap,
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute": plan.expert_overlap,
        "--use-distributed-optimizer": plan.zero > 0,
        "--optimizer-cpu-offload --use-precision-aware-optimizer": plan.offload_optimizer,
        "--recompute-granularity selective": plan.recompute == "selective",
        f"--recompute-granularity full --recompute-method {method} "
        f"--recompute-num-layers {count}": plan.recompute == "full",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split": (
            ends and not named
        ),
        # Parameters stay 16 bits wide under FP8: without --bf16 they would be 32.
        "--bf16": plan.dtype != "fp32",
        "--fp8-format hybrid": plan.dtype == "fp8",
        "--fp8-format e4m3 --fp8-recipe mxfp8": plan.dtype == "mxfp8",
        "--fp4-format e2m1": plan.dtype == "nvfp4",
    }


def chunk_layout(num_layers: int, chunks: int, *, embedding_layers: bool) -> str:
    """Return the layers of uneven chunks in Megatron-LM's letters, such as ``Ett|ttt|ttL``."""
    each, rest = divmod(num_layers + 2 * embedding_layers, chunks)
    # Chunks behind the first take what is left over, for the outer ones hold embedding and loss.
    sizes = [each + (1 <= chunk <= rest) for chunk in range(chunks)]
    sizes[0] -= embedding_layers
    sizes[-1] -= embedding_layers
    return f"E{'|'.join('t' * size for size in sizes)}L"


def _megatron_model(model: ModelSpec) -> dict[str, bool]:
    moe = model.experts
    return {
        f"--num-layers {model.num_layers} --hidden-size {model.hidden} "
        f"--num-attention-heads {model.num_heads} --ffn-hidden-size {model.ffn_width} "
        f"--seq-length {model.seq_len} --max-position-embeddings {model.seq_len} "
        f"--vocab-size {model.vocab}": True,
        f"--group-query-attention --num-query-groups {model.kv_heads}": (
            model.kv_heads != model.num_heads
        ),
        f"--kv-channels {model.head_dim}": model.head_dim is not None,
        "--swiglu": model.gated,
        "--untie-embeddings-and-output-weights": not model.tied,
        "--position-embedding-type rope": not model.learned_positions,
        "--disable-bias-linear --normalization RMSNorm": not model.biases,
        "--attention-dropout 0.0 --hidden-dropout 0.0": not model.dropout,
        f"--num-experts {moe and moe.num_experts} --moe-router-topk {moe and moe.top_k} "
        f"--moe-ffn-hidden-size {moe and moe.expert_ffn}": moe is not None,
        f"--moe-shared-expert-intermediate-size {moe and moe.shared_ffn}": (
            moe is not None and moe.shared_ffn > 0
        ),
    }


_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}  # fmt: skip
# Of torchtitan's own configurations: layers, hidden, heads, heads of keys, inner width, vocabulary.
_KNOWN = {
    (32, 4096, 32, 8, 14336, 128256): "llama3.llama3_8b",
    (80, 8192, 64, 8, 28672, 128256): "llama3.llama3_70b",
    (126, 16384, 128, 8, 53248, 128256): "llama3.llama3_405b",
    (28, 1024, 16, 8, 3072, 151936): "qwen3.qwen3_0_6b",
    (28, 2048, 16, 8, 6144, 151936): "qwen3.qwen3_1_7b",
}
_KNOWN_EXPERTS = {
    "deepseek-v3": "deepseek_v3.deepseek_v3_671b",
    "qwen3-30b-a3b": "qwen3.qwen3_30b_a3b",
}


def torchtitan_config(model: ModelSpec, plan: ParallelPlan, *, base: str | None = None) -> str:
    """Return a module for torchtitan's ``--module``, with a function ``planned`` for ``--config``.

    Args:
        model: The model.
        plan: How it is split.
        base: torchtitan's configuration to start from, as ``llama3.llama3_8b`` for the function
            ``llama3_8b`` of ``torchtitan.models.llama3.config_registry``; None to find it by the
            model's sizes.

    Raises:
        UnsupportedError: torchtitan cannot run the plan, or has no configuration of the model.
        ConfigurationError: ``base`` is no dotted name.

    References:
        https://github.com/pytorch/torchtitan, torchtitan/config/README.md and configs.py.

    Examples:
        >>> from fivefold.strategy import load_model
        >>> plan = ParallelPlan(global_batch=64, data=8, tensor=8, zero=3)
        >>> source = torchtitan_config(load_model("llama3-70b"), plan)
        >>> "tensor_parallel_degree=8," in source
        True
    """
    _refuse(_torchtitan_problems(model, plan), "torchtitan cannot run this plan")
    package, function = _base(model, base)
    layout = "".join(
        f"        {name}={value!r},\n" for name, value in _degrees(model, plan).items()
    )
    kind = {"selective": "SelectiveAC", "full": "FullAC"}.get(plan.recompute)
    overlapped = plan.tensor_overlap != "none"
    outer = plan.tau > 1
    lines = [
        f'"""{_clean(model.name)} on {plan.num_gpus} GPUs, planned by fivefold.',
        "",
        f"NGPU={plan.num_gpus} MODULE=torchtitan_planned CONFIG=planned ./run_train.sh",
        "",
        'Names are those of torchtitan 0.3.0, and of its main branch (b5bcd76, 2026-08)."""',
        "",
        *["from fivefold.optim import DelayCorrected"] * outer,
        *["from fivefold.optim.integrations import torchtitan_outer_sync"] * outer,
        "from torchtitan.config import ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {kind}"] if kind else []),
        f"from torchtitan.models.{package}.config_registry import {function}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def planned() -> Trainer.Config:",
        f"    config = {function}()",
        f"    config.parallelism = ParallelismConfig(\n{layout}    )",
        "    training, parallelism = config.training, config.parallelism",
        *_batches(model, plan),
        f"    config.activation_checkpoint = {f'{kind}.Config()' if kind else None}",
        *["    config.training.enable_cpu_offload = True"] * plan.offload_weights,
        *["    config.compile.enable = True"] * overlapped,
        *["    config.compile.enable_async_tensor_parallel = True"] * overlapped,
        f"    return torchtitan_outer_sync(config, DelayCorrected(tau={plan.tau}))"
        if outer
        else "    return config",
    ]
    return "\n".join(lines) + "\n"


def _batches(model: ModelSpec, plan: ParallelPlan) -> list[str]:
    """Return the lines that say how much a step takes, as either release counts it."""
    piped, micro = plan.pipeline > 1, plan.micro_batch
    own = micro * plan.num_micro_batches if piped else micro  # in one accumulation step
    return [
        '    if hasattr(training, "seq_len"):  # 0.3.0 counts sequences',
        f"        training.seq_len = {model.seq_len}",
        f"        training.local_batch_size = {own}",
        f"        training.global_batch_size = {plan.global_batch}",
        *[f"        parallelism.pipeline_parallel_microbatch_size = {micro}"] * piped,
        "    else:  # later ones tokens",
        f"        training.max_context_length = {model.seq_len}",
        f"        training.num_tokens_per_microbatch_per_dp_rank = {micro * model.seq_len}",
        f"        training.num_tokens_per_train_step = {plan.global_batch * model.seq_len}",
        *[f"        parallelism.num_pp_microbatches = {plan.num_micro_batches}"] * piped,
    ]


def _torchtitan_problems(model: ModelSpec, plan: ParallelPlan) -> dict[str, bool]:
    moved = (plan.offload_weights, plan.offload_optimizer)
    layers, chunks = model.num_layers + 2 * plan.embedding_layers, plan.pipeline * plan.virtual
    return {
        **_unwritten(model, plan),
        f"{layers} layers in {chunks} chunks, which it cuts by the layers of a chunk": (
            plan.schedule == "interleaved" and -(-layers // -(-layers // chunks)) != chunks
        ),
        f"it has no pipeline schedule {plan.schedule}": plan.pipeline > 1
        and plan.schedule not in _SCHEDULES,
        "it shares gradients wherever it shares optimizer states (ZeRO-1)": plan.zero == 1,
        "local updates (tau) of replicas that are pipelines": plan.tau > 1 and plan.pipeline > 1,
        "sequence parallelism that keeps its inputs instead of gathering them again": (
            plan.sequence_parallel and not plan.regather
        ),
        f"pipeline p2p overlapped with compute under {plan.schedule}": (
            plan.pipeline > 1 and plan.pipeline_overlap and plan.schedule in WAITING_SCHEDULES
        ),
        "context parallelism without ZeRO (it shares states over context ranks)": (
            plan.zero == 0 and plan.context > 1
        ),
        "activations in host memory": plan.offload_activations,
        "recomputation of some layers only": plan.recompute_layers is not None,
        "experts that the tensor group does not split": plan.expert_tensor is not None,
        "shared experts beside dispatch and combine": plan.shared_overlap,
        "dispatch and combine beside another micro-batch": plan.expert_overlap,
        "weights and optimizer states go to host memory together or not at all, with ZeRO": any(
            moved
        )
        and not (all(moved) and plan.zero >= 2),
        "the pipeline is its outermost axis": plan.order == "tcpd" and plan.pipeline > 1,
        f"matrix products in {plan.dtype}": plan.dtype != "bf16",
        "states shared by a part of a context group": bool(plan.zero)
        and plan.shards % plan.context != 0,
        "experts are split over ranks that share states": plan.expert > 1
        and _shard(plan) * plan.context % plan.expert != 0,
    }


def _base(model: ModelSpec, base: str | None) -> tuple[str, str]:
    if base is None:
        sizes = (model.num_layers, model.hidden, model.num_heads, model.kv_heads, model.ffn_width)
        found = _KNOWN_EXPERTS.get(model.name)
        if model.experts is None and model.latent is None and not model.stages:
            found = _KNOWN.get((*sizes, model.vocab))
        if found is None:
            raise UnsupportedError(
                f"torchtitan has no configuration of {model.name!r} that is known here",
                hint="give base= (--torchtitan-base), one of its own such as llama3.llama3_8b",
            )
        base = found
    package, _, function = base.partition(".")
    if not (package.isidentifier() and function.isidentifier()):
        raise ConfigurationError(
            f"base must be a package and a function of torchtitan's models; got {base!r}",
            hint="such as llama3.llama3_8b",
        )
    return package, function


def _shard(plan: ParallelPlan) -> int:
    """Return how many data-parallel ranks share states."""
    return max(1, plan.shards // plan.context) if plan.zero else 1


def _degrees(model: ModelSpec, plan: ParallelPlan) -> dict[str, Any]:
    """Return the arguments of ParallelismConfig."""
    shard = _shard(plan)
    degrees: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.data // shard,
        "data_parallel_shard_degree": shard,
        # ZeRO-2 keeps gathered parameters from forward to backward, ZeRO-3 gathers them again.
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
        "tensor_parallel_degree": plan.tensor,
        "enable_sequence_parallel": plan.sequence_parallel,
        "pipeline_parallel_degree": plan.pipeline,
        "context_parallel_degree": plan.context,
        "expert_parallel_degree": plan.expert,
    }
    if plan.pipeline > 1:
        ends = int(plan.embedding_layers)
        chunks = 2 if plan.schedule in {"zb_v", "dualpipe_v"} else plan.virtual
        layers = model.num_layers + 2 * ends
        degrees |= {
            "pipeline_parallel_schedule": _SCHEDULES[plan.schedule],
            "pipeline_parallel_first_stage_less_layers": ends,
            "pipeline_parallel_last_stage_less_layers": ends,
            "pipeline_parallel_layers_per_stage": -(-layers // (plan.pipeline * chunks)),
        }
    return degrees


def _clean(name: str) -> str:
    """Return a name that can stand in a docstring."""
    return name.replace("\\", "/").replace('"', "'")


def trainer_config(
    model: ModelSpec, plan: ParallelPlan, *, more: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Return a configuration file of ``fivefold train`` for a model and a plan.

    Args:
        model: The model.
        plan: How it is split.
        more: Keys of tables that go before those made here, such as those of the file that the
            plan was made for; None for none.

    Returns:
        TOML; data, learning rate and steps are the trainer's defaults where ``more`` has none.

    Raises:
        UnsupportedError: The trainer cannot run the plan or the model.

    Examples:
        >>> from fivefold.strategy import load_model
        >>> plan = ParallelPlan(global_batch=32, data=8, micro_batch=2, tau=4)
        >>> print(trainer_config(load_model("gpt3-1.3b"), plan).split("[sync]")[1].strip())
        method = "delay_corrected"
        tau = 4
    """
    _refuse(_trainer_problems(model, plan), "fivefold train cannot run this plan")
    shape: dict[str, Any] = {
        "layers": model.num_layers, "width": model.hidden, "heads": model.num_heads,
        "ffn_width": model.ffn_width,
    }  # fmt: skip
    if (moe := model.experts) is not None:
        shape["moe"] = {
            "experts": moe.num_experts, "top_k": moe.top_k, "expert_width": moe.expert_ffn,
            "expert_parallel": plan.expert, "every": moe.every,
        }  # fmt: skip
        if shared := moe.shared_ffn // moe.expert_ffn:  # as wide as a routed one
            shape["moe"]["shared"] = shared
    sync: dict[str, Any] = {"method": "ddp" if plan.data > 1 else "none"}
    if plan.tau > 1:
        sync = {"method": "delay_corrected", "tau": plan.tau}
    if plan.zero == 3:
        sync["shard"] = plan.shards
    tables: dict[str, dict[str, Any]] = {
        "run": {"output": f"runs/{_folder(model.name)}"},
        "data": {"sequence_length": model.seq_len},
        "model": shape,
        "optim": {
            "batch_size": plan.micro_batch,
            "accumulation": plan.num_micro_batches,
            "precision": plan.dtype,
            **({"optimizer": plan.optimizer} if plan.optimizer != "adamw" else {}),
        },
        "sync": sync,
    }
    for name, keys in (more or {}).items():
        tables[name] = tables.get(name, {}) | dict(keys)
    return format_toml(tables)


def _trainer_problems(model: ModelSpec, plan: ParallelPlan) -> dict[str, bool]:
    experts = model.experts
    return {
        **_unwritten(model),
        "it trains language models only": bool(model.stages) or not model.embeds_tokens,
        "tensor, pipeline or context parallelism": plan.num_gpus != plan.data,
        f"ZeRO-{plan.zero}": plan.zero in {1, 2},
        "sharing states (ZeRO-3) without local updates": plan.zero == 3 and plan.tau == 1,
        "sharing states (ZeRO-3) of experts": plan.zero == 3 and experts is not None,
        "recomputation": plan.recompute != "none",
        "states in host memory": plan.offload_weights
        or plan.offload_activations
        or plan.offload_optimizer,
        f"matrix products in {plan.dtype}": plan.dtype not in {"bf16", "fp32"},
        "latent attention": model.latent is not None,
        "sliding windows, clamped gates or multi-token prediction": bool(
            model.window or model.clamped or model.predicted_tokens
        ),
        "heads of keys and values of their own number": model.kv_heads != model.num_heads,
        "heads of an odd or their own width": model.hidden % (2 * model.num_heads) != 0
        or (model.head_dim is not None and model.head_dim * model.num_heads != model.hidden),
        "dense layers before the experts": experts is not None and experts.dense_layers > 0,
        "shared experts that are no whole number of experts wide": (
            experts is not None and experts.shared_ffn % experts.expert_ffn > 0
        ),
        "experts beside local updates": plan.expert > 1 and plan.tau > 1,
        "local updates of one replica": plan.tau > 1 and plan.data <= max(1, _shard(plan)),
    }


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".") or "planned"
