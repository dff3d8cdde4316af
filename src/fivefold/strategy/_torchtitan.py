"""A plan as a configuration of torchtitan: a Python module with one function, as it wants them.

Since 2026 torchtitan is configured in Python; names are those of its commit b5bcd76 (August 2026).
The module takes a configuration of torchtitan's own for the model and changes what the plan
decides: degrees, micro-batches, recomputation. What torchtitan cannot do is refused rather than
left out. This module knows no file and starts nothing.
"""

from __future__ import annotations

from typing import Any

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.strategy._model import ModelSpec
from fivefold.strategy._plan import WAITING_SCHEDULES, ParallelPlan

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
    """A module for torchtitan's ``--module``, with the function ``planned`` for ``--config``.

    Args:
        model: The model.
        plan: How it is split.
        base: torchtitan's configuration to start from, as ``llama3.llama3_8b`` for the function
            ``llama3_8b`` of ``torchtitan.models.llama3.config_registry``; None to find it by the
            model's sizes.

    Returns:
        Python source.

    Raises:
        UnsupportedError: torchtitan cannot run the plan, or has no configuration of the model.
        ConfigurationError: ``base`` is no dotted name.

    References:
        https://github.com/pytorch/torchtitan, torchtitan/config/README.md and configs.py.

    Examples:
        >>> from fivefold.strategy import named_model
        >>> plan = ParallelPlan(global_batch=64, data=8, tensor=8, zero=3)
        >>> source = torchtitan_config(named_model("llama3-70b"), plan)
        >>> "tensor_parallel_degree=8," in source
        True
    """
    problem = _why_not(plan)
    if problem is not None:
        raise UnsupportedError(
            f"torchtitan cannot run this plan: {problem}",
            hint="search with SearchSpace limited to what it can do",
        )
    room, function = _base(model, base)
    layout = "".join(
        f"        {name}={value!r},\n" for name, value in _degrees(model, plan).items()
    )
    recompute = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
    tokens = plan.micro_batch * model.seq_len
    lines = [
        f'"""{_clean(model.name)} on {plan.num_gpus} GPUs, planned by fivefold.',
        "",
        f"NGPU={plan.num_gpus} MODULE=torchtitan_planned CONFIG=planned ./run_train.sh",
        "",
        'Names are those of torchtitan b5bcd76 (2026-08)."""',
        "",
        "from torchtitan.config import ParallelismConfig",
        *_imports(plan),
        f"from torchtitan.models.{room}.config_registry import {function}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def planned() -> Trainer.Config:",
        f"    config = {function}()",
        f"    config.parallelism = ParallelismConfig(\n{layout}    )",
        f"    config.training.num_tokens_per_microbatch_per_dp_rank = {tokens}",
        f"    config.training.num_tokens_per_train_step = {plan.global_batch * model.seq_len}",
        f"    config.training.max_context_length = {model.seq_len}",
        f"    config.activation_checkpoint = {recompute[plan.recompute]}",
        *_more(plan),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _why_not(plan: ParallelPlan) -> str | None:
    moved = (plan.offload_weights, plan.offload_optimizer)
    reasons = {
        f"it has no pipeline schedule {plan.schedule}": plan.pipeline > 1
        and plan.schedule not in _SCHEDULES,
        "it shares gradients wherever it shares optimizer states (ZeRO-1)": plan.zero == 1,
        "local updates (tau)": plan.tau > 1,
        "inputs that sequence parallelism keeps instead of gathering them again": (
            plan.sequence_parallel and not plan.regather
        ),
        f"messages between stages beside compute under {plan.schedule}": (
            plan.pipeline > 1 and plan.pipeline_overlap and plan.schedule in WAITING_SCHEDULES
        ),
        "activations in host memory": plan.offload_activations,
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
    return next((reason for reason, holds in reasons.items() if holds), None)


def _base(model: ModelSpec, base: str | None) -> tuple[str, str]:
    if base is None:
        sizes = (model.num_layers, model.hidden, model.num_heads, model.kv_heads, model.ffn_width)
        found = _KNOWN_EXPERTS.get(model.name)
        if model.experts is None and model.latent is None and not model.stages:
            found = _KNOWN.get((*sizes, model.vocab))
        if found is None:
            raise UnsupportedError(
                f"torchtitan has no configuration of {model.name!r} that is known here",
                hint="name one of its own with base, such as llama3.llama3_8b",
            )
        base = found
    room, _, function = base.partition(".")
    if not (room.isidentifier() and function.isidentifier()):
        raise ConfigurationError(
            f"base must be a room and a function of torchtitan's models; got {base!r}",
            hint="such as llama3.llama3_8b",
        )
    return room, function


def _shard(plan: ParallelPlan) -> int:
    """Data-parallel ranks that share states."""
    return max(1, plan.shards // plan.context) if plan.zero else 1


def _degrees(model: ModelSpec, plan: ParallelPlan) -> dict[str, Any]:
    """Arguments of ParallelismConfig."""
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
            "num_pp_microbatches": plan.num_micro_batches,
        }
    return degrees


def _imports(plan: ParallelPlan) -> list[str]:
    kinds = {"selective": "SelectiveAC", "full": "FullAC"}
    if plan.recompute == "none":
        return []
    return [f"from torchtitan.distributed.activation_checkpoint import {kinds[plan.recompute]}"]


def _more(plan: ParallelPlan) -> list[str]:
    lines = []
    if plan.offload_weights:
        lines.append("    config.training.enable_cpu_offload = True")
    if plan.tensor_overlap != "none":
        lines += [
            "    config.compile.enable = True",
            "    config.compile.enable_async_tensor_parallel = True",
        ]
    return lines


def _clean(name: str) -> str:
    """Return a name that can stand in a docstring."""
    return name.replace("\\", "/").replace('"', "'")
