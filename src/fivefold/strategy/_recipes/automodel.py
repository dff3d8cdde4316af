"""A recipe that names a Hugging Face model: NeMo AutoModel, NeMo-RL, and NeMo's fine-tuning."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from typing import Any

from fivefold.strategy._recipes.models import chosen_model, named_model
from fivefold.strategy._recipes.told import Told, UnknownError
from fivefold.strategy.model import BLOCKS, ModelSpec
from fivefold.strategy.parts import LowRankAdapters
from fivefold.strategy.plan import ParallelPlan

_DEGREES = {
    "tensor": ("tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline": ("pp_size", "pipeline_model_parallel_size"),
    "context": ("cp_size", "context_parallel_size"),
    "expert": ("ep_size", "expert_parallel_size", "expert_model_parallel_size"),
}
_UNSAID_LENGTH, _LONGEST = 2048, 65_536
# Public data whose samples are no longer, in tokens of any usual vocabulary.
_SHORT_DATA = {"squad": 1280, "hellaswag": 384, "gsm8k": 1280, "glue_mrpc": 512}


def read_automodel(told: Told) -> tuple[ModelSpec, ParallelPlan]:
    """Return model and plan of a recipe around a named model; its stack goes to the device."""
    names = ("pretrained_model_name_or_path", "config", "model_name", "hf_model_id",
             "run.model_train_name")  # fmt: skip
    model = chosen_model(told, _name(told, *names))
    model = adapted(told, dataclasses.replace(model, seq_len=_length(told)))
    degrees: dict[str, Any] = {
        axis: max(1, told.whole(*own, default=1)) for axis, own in _DEGREES.items()
    }
    split = math.prod(degrees[axis] for axis in ("tensor", "pipeline", "context"))
    micro = told.whole("local_batch_size", "micro_batch_size", "train_micro_batch_size", default=1)
    batch = told.whole("global_batch_size", "train_global_batch_size", default=0)
    data = told.whole("dp_size", default=0, least=-1)
    if data <= 0:
        said = _gpus_said(told)
        moe = model.experts

        def allows(gpus: int) -> bool:
            ranks = gpus // split
            unit = ranks * micro
            whole = gpus // degrees["pipeline"] % degrees["expert"] == 0
            return (not batch or batch % unit == 0) and (moe is None or whole)

        each = told.get("launch.gpus_per_node", "launch.nproc_per_node")
        if said and each is None and (said % split or not allows(said)):
            message = f"its nodes have another number of GPUs than the cluster's: {said} in all"
            raise UnknownError(message, hint="name a cluster with nodes like those")
        data = told.gpus(said, split, allows) // split
    whole = batch or micro * data
    micro = _packed(told, model, micro, share=whole // data)
    told.refuse_unless(
        whole % (micro * data) == 0,
        f"global_batch_size={whole} is not a multiple of the micro-batch x data-parallel ranks = "
        f"{micro * data}", "every rank runs equally many whole micro-batches",
    )  # fmt: skip
    told.refuse_unless(
        model.num_heads % degrees["tensor"] == 0,
        f"tensor={degrees['tensor']} does not divide num_heads={model.num_heads}",
        "each rank has whole heads",
    )
    _stack(told)
    if degrees["pipeline"] == 1:
        alone = [name for name in told.settings if name.startswith("pipeline.")]
        told.idle("there is one pipeline stage", *alone)
    copies = max(1, told.whole("dp_replicate_size", default=1, least=-1))
    sharing = data * degrees["context"]
    told.refuse_unless(
        sharing % copies == 0, f"dp_replicate_size={copies} does not divide {sharing} ranks",
        "each copy has equally many ranks",
    )  # fmt: skip
    strategy = told.text("strategy", default="fsdp2")
    zero = 0 if strategy == "ddp" or sharing == 1 else 3
    if strategy not in {"fsdp2", "megatron_fsdp", "ddp", "none"}:
        message = f"distributed.strategy {strategy!r} is unknown"
        raise UnknownError(message, hint="fsdp2, megatron_fsdp and ddp are read")
    if strategy == "megatron_fsdp" and zero:
        zero = told.whole("zero_dp_strategy", default=3)
    if told.text("launch.backend") == "megatron_cfg":
        zero = 1
    moved = told.on("cpu_offload", "offload_policy") and zero == 3
    _unsharded(told, model, sharing=sharing if zero == 3 else 1)
    _teacher(told, model, micro, sharing=sharing if zero else 1)
    schedule, virtual, micro = _pipeline(told, model, degrees["pipeline"], micro)
    narrow = told.text("launch.backend") == "megatron_cfg" and degrees["tensor"] > 1
    narrow = narrow and told.whole("expert_tensor_parallel_size", default=1) == 1
    plan = ParallelPlan(
        expert_tensor=1 if narrow and model.experts else None,
        global_batch=whole, micro_batch=micro, schedule=schedule,  # type: ignore[arg-type]
        virtual=virtual, pipeline_overlap=virtual > 1, data=data, **degrees, zero=zero,
        shard=sharing // copies if copies > 1 and zero else None,
        data_overlap=sharing > 1, recompute=_recompute(told),  # type: ignore[arg-type]
        sequence_parallel=told.on("sequence_parallel") and degrees["tensor"] > 1,
        offload_weights=moved, offload_optimizer=moved, dtype=_product_type(told),
    )  # fmt: skip
    return model, plan


def _unsharded(told: Told, model: ModelSpec, *, sharing: int) -> None:
    """Note what stays whole on each GPU: weights after the forward, embedding and head."""
    if not told.on("compile.enabled", "enable_compile"):
        told.idle("nothing is compiled", *(n for n in told.settings if n.startswith("compile.")))
    experts, moe = 0, model.experts
    if moe is not None:  # which are sharded by themselves
        matrix = model.hidden * moe.expert_ffn * (3 if model.gated else 2)
        experts = (model.num_layers - moe.dense_layers) // moe.every * moe.num_experts * matrix
    dense = max(model.num_parameters - experts, 0)
    if told.off("moe.reshard_after_forward") or told.off("reshard_after_forward"):
        why = "the weights beside experts are not freed after the forward"
        told.assume("gathered weights", "kept", why, added=2.0 * dense if sharing > 1 else 0.0)
    if told.off("moe.wrap_outer_model"):
        ends = 2.0 * model.vocab * model.hidden
        why = "embedding and head are not shared out"
        told.assume("embedding and head", "whole", why, added=14.0 * ends if sharing > 1 else 0.0)


def _teacher(told: Told, model: ModelSpec, micro: int, *, sharing: int) -> None:
    """Note what a teacher keeps beside the model: its weights in 16 bits, and its logits."""
    name = told.get("teacher_model.pretrained_model_name_or_path")
    if name is None:
        return
    teacher = named_model(str(name), beside=told.path.parent)
    logits = micro * model.seq_len * teacher.spec.vocab
    layer = teacher.spec.num_parameters / teacher.spec.num_layers
    weights = 2.0 * teacher.spec.num_parameters / sharing + 4.0 * layer
    told.assume("teacher", teacher.spec.name, "its weights and logits lie beside the model",
                added=weights * (1.5 if teacher.tower else 1.0) + 12.0 * logits)  # fmt: skip


def _packed(told: Told, model: ModelSpec, micro: int, *, share: int) -> int:
    """Return the samples of a micro-batch; packed ones are so many tokens, of any number of them.

    Args:
        told: The recipe.
        model: What is trained.
        micro: Samples that the recipe says.
        share: Samples of a rank in a step.
    """
    tokens = 0
    for name in ("sequence_packing", "dynamic_batching"):
        if told.on(f"{name}.enabled"):
            tokens = told.whole(f"{name}.train_mb_tokens", default=2 * micro * model.seq_len)
        else:
            told.idle("it is off", f"{name}.train_mb_tokens")
    if tokens:
        why = f"samples are packed: a micro-batch has {tokens} tokens at most"
        micro = math.gcd(micro, share) or micro
        most = max(1.0, tokens / (micro * model.seq_len))
        told.assume("micro-batch", micro, why, memory=(0.25, most))
    return micro


def _pipeline(told: Told, model: ModelSpec, stages: int, local: int) -> tuple[str, int, int]:
    """Return schedule, chunks of a stage, and samples of a micro-batch."""
    if stages == 1:
        return "1f1b", 1, local
    word = told.text("pipeline.pp_schedule", default="1f1b")
    if word not in {"1f1b", "gpipe", "interleaved1f1b"}:
        told.unpriced("pipeline.pp_schedule", "priced as 1F1B", memory=(0.7, 1.5))
    micro = told.whole("pipeline.pp_microbatch_size", default=1)
    a_chunk = told.whole("pipeline.layers_per_stage", default=0)
    chunks = -(-model.num_layers // a_chunk) if a_chunk else stages
    virtual = max(1, round(chunks / stages))
    if word != "interleaved1f1b" or virtual == 1:
        return ("gpipe" if word == "gpipe" else "1f1b"), 1, micro
    return "interleaved", virtual, micro


def _gpus_said(told: Told) -> int:
    nodes = told.whole("launch.nnodes", default=0)
    if told.off("generation.colocated.enabled"):
        others = told.whole("generation.colocated.resources.num_nodes", default=0)
        if not others:
            message = "generation takes some of the GPUs of the cluster, and not whole nodes"
            raise UnknownError(message, hint="say how many nodes generate")
        nodes = max(nodes - others, 1)
    each = told.whole("launch.gpus_per_node", "launch.nproc_per_node", default=0)
    if nodes and not each:
        each = told.cluster.fabric.gpus_per_host
        told.assume("GPUs of a node", each, "as the cluster has")
    return each * max(nodes, 1)


def _name(told: Told, *names: str) -> str:
    found = told.get(*names)
    if isinstance(found, str):
        return found
    if told.model is None and told.get("num_layers", "num_hidden_layers") is not None:
        message = "the model's sizes stand in the recipe in a form that has no reader here"
        raise UnknownError(message, hint="give its config.json with --model")
    return ""


def _length(told: Told) -> int:
    lengths = ("packed_sequence_size", "pack_size")
    packed = max(told.whole(name, default=0) for name in lengths)
    if packed:
        told.idle("packed samples have another length", "seq_length", "max_length")
    else:
        told.idle("samples are not packed", *(name for name in told.settings if name.startswith(
            ("split_across_pack", "packing_", "pretokenize", "drop_long_samples"))))  # fmt: skip
    length = packed or told.whole("seq_length", "seq_len", "max_length", "max_seq_length",
                                  "max_total_sequence_length", default=0)  # fmt: skip
    if length:
        told.idle("another setting says how long samples are", "max_length", "max_seq_length")
        return length
    names = ("dataset.path_or_dataset", "dataset.dataset_name", "dataset._target_")
    said = " ".join(told.text(name) for name in names if name in told.settings)
    known = next((name for name in _SHORT_DATA if name in said), None)
    if known is not None:
        most, why = _SHORT_DATA[known], f"no sample of {known} is longer"
    else:
        most, why = _LONGEST, "the recipe does not say how long samples are"
    value = min(most, _UNSAID_LENGTH)
    told.assume_model("sequence length", value, why, least={"seq_len": 64}, most={"seq_len": most})
    return value


def _recompute(told: Told) -> str:
    mode = told.word("activation_checkpointing", "activations_checkpoint_granularity",
                     "recompute_granularity",
                     among={"selective", "full", "true", "false", "1", "0"})  # fmt: skip
    if mode in {"", "false", "0"}:
        return "none"
    return "selective" if mode == "selective" else "full"


def adapted(told: Told, model: ModelSpec) -> ModelSpec:
    """Return the model with the adapters that ``peft`` describes."""
    rank = told.whole("peft.dim", "peft.r", "peft.adapter_dim", "peft.lora_tuning.adapter_dim",
                      default=0)  # fmt: skip
    if not rank or told.off("peft.enabled"):
        return model
    scheme = told.text("peft.peft_scheme", default="lora")
    other = re.compile(r"peft\.(adapter_tuning|p_tuning|ia3_tuning|selective_tuning)\..*")
    told.idle("of another scheme", *(name for name in told.settings if other.fullmatch(name)))
    if scheme not in {"lora", "qlora"}:
        message = f"peft_scheme {scheme} is not read: it has no price here"
        raise UnknownError(message, hint="lora has one")
    has = [m.module for parts in BLOCKS.values() for part in parts for m in model.matrices(part)]
    modules = [name for name in dict.fromkeys(has) if name != "router"]
    chosen = modules
    wanted = told.get("peft.target_modules", default=[])
    if wanted and told.on("peft.match_all_linear"):
        told.unpriced("peft.target_modules", "all linear modules are matched")
    elif wanted:
        patterns = [wanted] if isinstance(wanted, str) else list(map(str, wanted))
        chosen = [name for name in modules if any(_means(one, name) for one in patterns)]
        others = [one for one in patterns if not any(_means(one, name) for name in modules)]
        if others and chosen:
            why = f"no matrix here is called {', '.join(others)}"
            told.unpriced("peft.target_modules", why, memory=(0.9, 1.1))
    without = told.get("peft.exclude_modules", default=[]) or []
    patterns = [without] if isinstance(without, str) else list(map(str, without))
    if others := [one for one in patterns if not any(_means(one, name) for name in modules)]:
        why = f"no matrix here is called {', '.join(others)}"
        told.unpriced("peft.exclude_modules", why)
    chosen = [name for name in chosen if not any(_means(one, name) for one in patterns)]
    if not chosen:
        message = f"target_modules {wanted} names no matrix that has a price here"
        raise UnknownError(message, hint=f"known are {', '.join(modules)}")
    base = "nf4" if told.on("quantization.load_in_4bit", "load_in_4bit") else "bf16"
    base = "int8" if told.on("quantization.load_in_8bit", "load_in_8bit") else base
    adapters = LowRankAdapters(rank=rank, modules=tuple(chosen), base=base)  # type: ignore[arg-type]
    return dataclasses.replace(model, adapters=adapters)


# Matrices of Megatron, which joins some, and of NeMo's launcher.
_OF_MEGATRON = {
    "linear_qkv": {"q_proj", "k_proj", "v_proj"}, "linear_proj": {"o_proj"},
    "linear_fc1": {"gate_proj", "up_proj"}, "linear_fc2": {"down_proj"},
    "linear_q_proj": {"q_proj"}, "linear_q_down_proj": {"q_a_proj"},
    "linear_q_up_proj": {"q_b_proj"}, "linear_kv_down_proj": {"kv_a_proj_with_mqa"},
    "linear_kv_up_proj": {"kv_b_proj"}, "attention_qkv": {"q_proj", "k_proj", "v_proj"},
    "attention_dense": {"o_proj"}, "mlp_fc1": {"gate_proj", "up_proj"}, "mlp_fc2": {"down_proj"},
}  # fmt: skip


def _means(pattern: str, module: str) -> bool:
    """Return whether a pattern of module names, which may hold the path above, means a module."""
    last = pattern.rsplit(".", maxsplit=1)[-1]
    if last in _OF_MEGATRON:
        return module in _OF_MEGATRON[last]
    return fnmatch.fnmatchcase(module, last) or last == "all-linear"


_NARROW, _WIDE = {"bf16", "bfloat16", "fp16", "float16", "16"}, {"float32", "fp32", "32"}
_FUSED = {"", "none", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "te"}


def _stack(told: Told) -> None:
    """Change the stack as the recipe says: attention, types of gradients and states."""
    attention = told.text("attn_implementation")
    if attention == "eager" or told.off("use_flash_attention"):
        told.device = dataclasses.replace(told.device, fused_attention=False)
    elif attention not in _FUSED:
        told.unpriced("attn_implementation", "priced as fused attention", memory=(0.7, 2.0))
    if told.text("launch.backend") == "megatron_cfg":
        return
    kind = told.word("torch_dtype", "dtype", among={*_NARROW, *_WIDE, "auto"})
    wide = kind in _WIDE or told.program == "nemo-rl"
    optimizer = told.text("optimizer._target_", "optimizer.name", default="adam")
    gradients, states = (4.0, 10.0) if wide else (2.0, 4.0)
    rest = told.on("optimizer.store_param_remainders", "optimizer.kwargs.store_param_remainders")
    if told.on("optimizer.master_weights", "optimizer.kwargs.master_weights") and not wide:
        # Master weights are whole, or the 16 bits that the weights lack.
        states = 10.0 if rest else 12.0
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        word = told.word(f"optimizer.{name}", f"optimizer.kwargs.{name}", among=_NARROW | _WIDE)
        if word in _NARROW and (wide or states > 4.0):
            states -= 2.0
    if "flashadam" in optimizer:  # moments of 8 bits with scales, and bits that the weights lack
        bits = told.whole("optimizer.master_weight_bits", default=24)
        states = 2.2 + max(bits - 16, 0) / 8
    if not any(word in optimizer for word in ("adam", "none")):
        own = next(name for name in ("optimizer._target_", "optimizer.name") if told.get(name))
        told.unpriced(own, "its states are priced as Adam's", memory=(0.4, 1.2))
    told.device = dataclasses.replace(
        told.device, optimizer_state_bytes=states, gradient_bytes=gradients
    )


def _product_type(told: Told) -> str:
    if told.text("precision", default="bf16").removesuffix("-mixed") not in _NARROW:
        told.unpriced("precision", "products are priced as in 16 bits", memory=(0.5, 2.0))
    if not told.on("fp8.enabled", "fp8"):
        return "bf16"
    return "mxfp8" if "mx" in told.text("fp8.recipe_name") else "fp8"
