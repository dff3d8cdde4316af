"""A recipe in the words of torchtitan, as a model, a plan and a device with its stack."""

from __future__ import annotations

import dataclasses
import math

from fivefold.strategy._recipes.models import chosen_model
from fivefold.strategy._recipes.told import RefusedError, Told, UnknownError
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan

_DEGREES = {
    "tensor": "parallelism.tensor_parallel_degree",
    "pipeline": "parallelism.pipeline_parallel_degree",
    "context": "parallelism.context_parallel_degree",
    "expert": "parallelism.expert_parallel_degree",
}
_SCHEDULES = {
    "gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb_v",
    "interleavedzerobubble": "zb_1p", "dualpipev": "dualpipe_v",
}  # fmt: skip
_LENGTH, _BATCH, _EACH_LAYER = 2048, 8, "2"  # torchtitan's defaults where a file says nothing
_COMPILED_LOSS_BYTES = 6.0
_PRODUCTS = {
    "float8": "fp8",
    "mx": "mxfp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "primus_turbo": "bf16",
}


def read_torchtitan(told: Told) -> tuple[ModelSpec, ParallelPlan]:
    """Return model and plan of a recipe of torchtitan; its stack goes to ``told.device``."""
    model = _model(told)
    degree = {axis: told.degree(axis, name) for axis, name in _DEGREES.items()}
    copies = told.degree("replicate", "parallelism.data_parallel_replicate_degree")
    shards = told.whole("parallelism.data_parallel_shard_degree", default=-1, least=-1)
    split = math.prod(degree[axis] for axis in ("tensor", "pipeline", "context")) * copies
    data = copies * (shards if shards > 0 else _left(told, model, split, copies))
    local, whole = _batch(told, model, data)
    _refuse(told, model, degree, data=data, local=local, whole=whole)
    schedule, virtual = _schedule(told, model, degree["pipeline"])
    _stack(told)
    layers = -(-model.num_layers // degree["pipeline"])
    recompute, some = _recompute(told, layers, experts=model.experts is not None)
    always = told.word("parallelism.fsdp_reshard_after_forward", default="default",
                       among={"default", "always", "never"})  # fmt: skip
    pipelined, wide = degree["pipeline"] > 1, degree["tensor"] > 1
    gathers_again = always == "always" or (always == "default" and not pipelined)
    in_parts = pipelined and "training.num_tokens_per_microbatch_per_dp_rank" not in told.settings
    micro = told.whole("parallelism.pipeline_parallel_microbatch_size",
                       default=1 if in_parts else local)  # fmt: skip
    sharing = data // copies * degree["context"]
    less = told.whole("parallelism.pipeline_parallel_first_stage_less_layers", default=1)
    moved = told.on("training.enable_cpu_offload") and sharing > 1
    async_tensor = told.on("parallelism.enable_async_tensor_parallel",
                           "compile.enable_async_tensor_parallel")  # fmt: skip
    plan = ParallelPlan(
        global_batch=whole, micro_batch=micro, data=data, **degree, schedule=schedule,  # type: ignore[arg-type]
        virtual=virtual, zero=0 if sharing == 1 else 3 if gathers_again else 2,
        shard=sharing if copies > 1 and sharing > 1 else None,
        embedding_layers=pipelined and less > 0,
        recompute=recompute,  # type: ignore[arg-type]
        recompute_layers=some,
        sequence_parallel=wide and not told.off("parallelism.enable_sequence_parallel")
        and not told.on("parallelism.disable_sequence_parallel"),
        tensor_overlap="pipe" if async_tensor and wide else "none",
        data_overlap=data * degree["context"] > 1,
        pipeline_overlap=pipelined and schedule not in {"gpipe", "1f1b"},
        offload_weights=moved, offload_optimizer=moved,
        optimizer=_optimizer(told),  # type: ignore[arg-type]
        dtype=_product_type(told),
    )  # fmt: skip
    return model, plan


def _model(told: Told) -> ModelSpec:
    name, flavor = told.get("model.name"), told.get("model.flavor")
    plain = told.get("config_function", default=name or "")
    model = chosen_model(told, str(plain) if flavor is None else f"{name}-{flavor}")
    length = told.whole("training.seq_len", "training.max_context_length", default=0)
    if not length:
        length = _LENGTH
        told.assume("training.seq_len", length, "torchtitan's own default")
    return dataclasses.replace(model, seq_len=length)


def _left(told: Told, model: ModelSpec, split: int, copies: int) -> int:
    """Return the ranks that share states: what is left of the GPUs."""

    def allows(gpus: int) -> bool:
        data = gpus // split * copies
        local, whole = _batch(told, model, data)
        return whole % (data * local) == 0

    said = told.whole("launch.ngpu", "launch.nproc_per_node", default=0)
    return told.gpus(said * told.whole("launch.nnodes", default=1), split, allows) // split


def _refuse(
    told: Told, model: ModelSpec, degree: dict[str, int], *, data: int, local: int, whole: int
) -> None:
    tensor, expert, moe = degree["tensor"], degree["expert"], model.experts
    told.refuse_unless(
        model.num_heads % tensor == 0,
        f"tensor={tensor} does not divide num_heads={model.num_heads}", "each rank has whole heads",
    )  # fmt: skip
    told.refuse_unless(
        whole % (data * local) == 0,
        f"global_batch_size={whole} is not a multiple of local_batch_size x data-parallel ranks = "
        f"{data * local}", "every rank runs equally many whole batches",
    )  # fmt: skip
    told.refuse_unless(
        moe is None or moe.num_experts % expert == 0,
        f"expert={expert} does not divide num_experts={moe and moe.num_experts}",
        "each rank has whole experts",
    )


def _recompute(told: Told, layers: int, *, experts: bool) -> tuple[str, int | None]:
    """Return what is recomputed, and of how many layers of a stage."""
    mode = told.text("activation_checkpoint.mode")
    if not mode:
        mode = "selective"
        told.assume("activation_checkpoint.mode", mode, "torchtitan's own default")
    if mode in {"none", "full"}:
        told.get("activation_checkpoint.selective_ac_option")
        return mode, None
    each = told.text("activation_checkpoint.selective_ac_option")
    if mode == "selective" and not each:
        each = _EACH_LAYER
        why = "torchtitan's own default: one layer in two"
        told.assume("activation_checkpoint.selective_ac_option", each, why)
    if mode != "selective" or not (each == "op" or (each.isdecimal() and int(each))):
        message = (
            f"activation_checkpoint.mode {mode!r} with selective_ac_option {each!r} is not read"
        )
        raise UnknownError(message, hint="none, full, and selective by operator or layer are")
    if each == "op":
        if experts:
            why = "which grouped products are kept differs between releases; priced as all"
            told.assume("activations of experts", "kept", why, memory=(0.3, 1.0))
        return "selective", None
    some = layers // int(each)
    return ("full", None if each == "1" else some) if some else ("none", None)


def _batch(told: Told, model: ModelSpec, data: int) -> tuple[int, int]:
    """Return the samples of a rank's batch, and of an iteration."""
    if tokens := told.whole("training.num_tokens_per_microbatch_per_dp_rank", default=0):
        local = max(1, tokens // model.seq_len)
        step = told.whole("training.num_tokens_per_train_step", default=0)
        return local, step // model.seq_len or local * data
    local = told.whole("training.local_batch_size", "training.batch_size", default=0)
    if not local:
        local = _BATCH
        told.assume("training.local_batch_size", local, "torchtitan's own default")
    whole = told.whole("training.global_batch_size", default=-1, least=-1)
    return local, whole if whole > 0 else local * data


def _schedule(told: Told, model: ModelSpec, stages: int) -> tuple[str, int]:
    name = str(told.get("parallelism.pipeline_parallel_schedule", default="1F1B"))
    if stages == 1:
        return "1f1b", 1
    schedule = _SCHEDULES.get(name.lower())
    if schedule is None:
        message = f"pipeline_parallel_schedule {name!r} is unknown"
        raise RefusedError(message, hint=f"use one of {', '.join(_SCHEDULES)}")
    if schedule in {"zb_v", "dualpipe_v"}:
        return schedule, 2
    if schedule != "interleaved":
        return schedule, 1
    a_chunk = told.whole("parallelism.pipeline_parallel_layers_per_stage", default=0)
    less = sum(
        told.whole(f"parallelism.pipeline_parallel_{end}_stage_less_layers", default=1)
        for end in ("first", "last")
    )
    chunks = math.ceil((model.num_layers + less) / a_chunk) if a_chunk else 2 * stages
    return schedule, max(2, chunks // stages)


def _stack(told: Told) -> None:
    """Change the stack as the recipe says: types of parameters, gradients and states."""
    if told.word("training.dtype", among={"float32", "bfloat16"}) == "bfloat16":
        told.device = dataclasses.replace(
            told.device, optimizer_state_bytes=4.0, gradient_bytes=2.0, gradient_wire_bytes=2.0
        )
    # A compiled loss keeps logits and their gradient in 16 bits, and sums; the rest is left out.
    parts = told.settings.get("compile.components")
    compiled = told.is_true("compile.enable") and (parts is None or "loss" in str(parts.value))
    if compiled or told.is_true("training.compile"):
        width = min(told.device.loss_bytes, _COMPILED_LOSS_BYTES)
        told.device = dataclasses.replace(told.device, loss_bytes=width)
    reduce = told.word("training.mixed_precision_reduce", among={"float32", "bfloat16", "float16"})
    if reduce:
        width = 2.0 if reduce in {"bfloat16", "float16"} else 4.0
        told.device = dataclasses.replace(told.device, gradient_wire_bytes=width)
    newest = "training.num_tokens_per_microbatch_per_dp_rank" in told.settings
    if newest and not told.gives("training.disable_cuda_graphs"):
        why = "torchtitan's own default: graphs of whole steps keep a pool of memory"
        told.assume("CUDA graphs", "on", why, memory=(0.9, 1.2))
    if told.on("optimizer.early_step_in_backward"):  # a gradient is used up as soon as it is there
        told.device = dataclasses.replace(told.device, gradient_bytes=0.0)


def _optimizer(told: Told) -> str:
    name = told.text("optimizer.name", default="adamw")
    if "muon" not in name and "adam" not in name:
        told.unpriced("optimizer.name", "its states are priced as AdamW's", memory=(0.4, 1.2))
    return "muon" if "muon" in name else "adamw"


def _product_type(told: Told) -> str:
    """Return the type of matrix products, as the converters of a model say."""
    found = told.get("model.converters", "model_converters.converters", default=())
    words = [found] if isinstance(found, str) else list(found)
    kinds = {_PRODUCTS.get(word.split(".")[-1]) for word in map(str, words)}
    kinds = kinds - {"bf16"} or kinds  # kernels alone
    if None in kinds or len(kinds) > 1:
        own = "model.converters" if "model.converters" in told.settings else (
            "model_converters.converters")  # fmt: skip
        told.unpriced(own, "products are priced as in 16 bits where a converter is not known",
                      memory=(0.7, 1.2))  # fmt: skip
    return next((kind for kind in kinds if kind), "bf16")
