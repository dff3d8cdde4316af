"""A plan as a configuration of this package's own trainer, ``fivefold train``.

The trainer replicates the model and may share experts or take local steps; other splits are
refused. It has a transformer of its own: layers, width, heads and experts are the model's, the
vocabulary is that of its tokenizer.
"""

from __future__ import annotations

from typing import Any

from fivefold.errors import UnsupportedError
from fivefold.runs import format_toml
from fivefold.strategy._model import ModelSpec
from fivefold.strategy._plan import ParallelPlan


def trainer_config(model: ModelSpec, plan: ParallelPlan) -> str:
    """Return a configuration file of ``fivefold train`` for a model and a plan.

    Args:
        model: The model.
        plan: How it is split.

    Returns:
        TOML; data, learning rate and steps are the trainer's defaults.

    Raises:
        UnsupportedError: The trainer cannot run the plan or the model.

    Examples:
        >>> from fivefold.strategy import named_model
        >>> plan = ParallelPlan(global_batch=32, data=8, micro_batch=2, tau=4)
        >>> print(trainer_config(named_model("gpt3-1.3b"), plan).split("[sync]")[1].strip())
        method = "co2"
        tau = 4
    """
    problem = _why_not(model, plan)
    if problem is not None:
        raise UnsupportedError(
            f"fivefold train cannot run this plan: {problem}",
            hint="it replicates the model (data, expert and tau); plan with these alone",
        )
    shape: dict[str, Any] = {
        "layers": model.num_layers, "width": model.hidden, "heads": model.num_heads
    }  # fmt: skip
    if model.experts is not None:
        shape["moe"] = {
            "experts": model.experts.num_experts, "top_k": model.experts.top_k,
            "expert_width": model.experts.expert_ffn, "expert_parallel": plan.expert,
            "every": model.experts.every,
        }  # fmt: skip
    sync: dict[str, Any] = {"method": "ddp" if plan.data > 1 else "none"}
    if plan.tau > 1:
        sync = {"method": "co2", "tau": plan.tau}
    return format_toml(
        {
            "run": {"output": f"runs/{_folder(model.name)}"},
            "data": {"sequence_length": model.seq_len},
            "model": shape,
            "optim": {
                "batch_size": plan.micro_batch,
                "accumulation": plan.num_micro_batches,
                "precision": plan.dtype,
            },
            "sync": sync,
        }
    )


def _why_not(model: ModelSpec, plan: ParallelPlan) -> str | None:
    experts = model.experts
    reasons = {
        "it trains language models only": bool(model.stages) or not model.embeds_tokens,
        "tensor, pipeline or context parallelism": plan.num_gpus != plan.data,
        f"ZeRO-{plan.zero}": plan.zero > 0,
        "recomputation": plan.recompute != "none",
        "states in host memory": plan.offload_weights
        or plan.offload_activations
        or plan.offload_optimizer,
        f"matrix products in {plan.dtype}": plan.dtype != "bf16",
        "latent attention": model.latent is not None,
        "heads of keys and values of their own number": model.kv_heads != model.num_heads,
        "heads of an odd or their own width": model.hidden % (2 * model.num_heads) != 0
        or (model.head_dim is not None and model.head_dim * model.num_heads != model.hidden),
        "dense layers before the experts": experts is not None and experts.dense_layers > 0,
        "experts beside local updates": plan.expert > 1 and plan.tau > 1,
        "local updates of one replica": plan.tau > 1 and plan.data == 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".") or "planned"
