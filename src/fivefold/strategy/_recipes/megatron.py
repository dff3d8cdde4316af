"""A recipe in the words of Megatron-LM, as a model, a plan and a device with its stack.

Rules are those of ``validate_args`` in megatron/training/arguments.py: what it switches off is
switched off, what it refuses is refused, and nothing else is.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from fivefold.strategy._launchers import chunk_layout
from fivefold.strategy._recipes.automodel import adapted
from fivefold.strategy._recipes.megatron_model import sized_model
from fivefold.strategy._recipes.models import assume_tower
from fivefold.strategy._recipes.told import Setting, Told, UnknownError
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import LowRankAdapters
from fivefold.strategy.plan import ParallelPlan

Recipe = tuple[ModelSpec, ParallelPlan]
_DEGREES = {
    "tensor": ("tensor_model_parallel_size", "model_parallel_size"),
    "pipeline": ("pipeline_model_parallel_size",),
    "context": ("context_parallel_size",),
    "expert": ("expert_model_parallel_size",),
}
_STATE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2,
                "fp8": 1, "uint8": 1}  # fmt: skip
_DROPS = {"core_attn": "scores", "layernorm": "norm", "moe_act": "activation",
          "mla_up_proj": "latent"}  # fmt: skip
_SHARING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
_NONE = Setting("", value=None)
_PLAIN_TYPES = {"", "auto", "flash", "fused"}
_FP8 = {"hybrid", "e4m3", "true", "false", "1", "0"}
_FP8_RECIPES = {"tensorwise", "delayed", "blockwise", "mxfp8"}


def read_megatron(told: Told) -> Recipe:
    """Return model and plan of a recipe of Megatron-LM; its stack goes to ``told.device``."""
    degrees: dict[str, Any] = {axis: told.degree(axis, *names) for axis, names in _DEGREES.items()}
    model = adapted(told, sized_model(told, degrees))
    if "launch.tower" in told.settings:
        assume_tower(told, "the model", frozen=told.on("mm_cfg.vision_encoder.freeze"))
        why = "samples with images are padded to the longest of a batch, and this is the most"
        told.assume_model("sequence length", model.seq_len, why, least={"seq_len": 64}, most={})
        if told.on("mm_cfg.llm.freeze") and model.adapters is None:
            # Gradients go through it to what is before it, and it has no states.
            frozen = LowRankAdapters(rank=degrees["tensor"], modules=("o_proj",))
            model = dataclasses.replace(model, adapters=frozen)
    micro = told.whole("micro_batch_size", least=1)
    data = _replicas(told, model, degrees, micro)
    whole = _global_batch(told, default=micro * data)
    _refuse(told, model, degrees, data=data, micro=micro, whole=whole)
    virtual, ends = _chunks(told, model, degrees["pipeline"], whole // (micro * data))
    interleaved = degrees["pipeline"] > 1 and virtual > 1
    tensor = degrees["tensor"]
    _stack(told)
    recompute, some = _recompute(told, virtual)
    zero = _sharing(told)
    parallel = told.on("sequence_parallel") and tensor > 1
    if told.on("sequence_parallel") and tensor == 1:
        told.describe("sequence_parallel", "switched off: it splits over more than one tensor rank")
    split_experts = told.whole("expert_tensor_parallel_size", default=tensor)
    shared = told.on("moe_shared_expert_overlap") and degrees["expert"] > 1
    shared = shared and model.experts is not None and model.experts.shared_ffn > 0
    beside = told.on("overlap_moe_expert_parallel_comm")
    if beside:
        told.refuse_unless(
            degrees["expert"] > 1 and not shared and recompute != "full"
            and (degrees["pipeline"] == 1 or interleaved),
            "overlap_moe_expert_parallel_comm is set",
            "it wants expert parallelism, virtual stages where there are several, and neither full "
            "recomputation nor moe_shared_expert_overlap",
        )  # fmt: skip
        why = "layers of two micro-batches are kept at a time"
        told.unpriced("overlap_moe_expert_parallel_comm", why, memory=(1.0, 1.2))
    plan = ParallelPlan(
        global_batch=whole, micro_batch=micro, data=data, **degrees,
        expert_tensor=1 if split_experts == 1 < tensor and model.experts else None,
        shared_overlap=shared, expert_overlap=beside,
        virtual=virtual if interleaved else 1,
        schedule="interleaved" if interleaved else "1f1b",
        zero=zero, shard=_shard(told, data * degrees["context"], zero),
        recompute=recompute,  # type: ignore[arg-type]
        recompute_layers=some,
        embedding_layers=ends,
        offload_optimizer=_moves_states(told),
        **_offloaded(told),
        optimizer=_optimizer(told),  # type: ignore[arg-type]
        order="tcpd" if told.on("use_tp_pp_dp_mapping") else "tcdp",
        sequence_parallel=parallel,
        tensor_overlap="pipe" if told.on("tp_comm_overlap", "ub_tp_comm_overlap") and tensor > 1
        else "none",
        data_overlap=told.on("overlap_grad_reduce", "optim.overlap_grad_sync") or zero > 1,
        pipeline_overlap=interleaved and not told.on("no_overlap_p2p_communication")
        and not told.off("overlap_p2p_comm"),
        dtype=_product_type(told),
    )  # fmt: skip
    return model, plan


def _replicas(told: Told, model: ModelSpec, degrees: dict[str, int], micro: int) -> int:
    split = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
    batch = _global_batch(told, default=0)

    def allows(gpus: int) -> bool:
        data = gpus // split
        ranks = degrees["pipeline"] * _expert_split(told, degrees)
        return (not batch or batch % (micro * data) == 0) and (
            model.experts is None or gpus % ranks == 0
        )

    return told.gpus(told.gpus_said(), split, allows) // split


def _expert_split(told: Told, degrees: dict[str, int]) -> int:
    tensor = told.whole("expert_tensor_parallel_size", default=degrees["tensor"])
    return max(1, tensor * degrees["expert"])


def _global_batch(told: Told, *, default: int) -> int:
    if (steps := told.get("step_batch_size_schedule")) is not None:
        return int(str(steps).split()[-1].rpartition(":")[2])
    if told.get("rampup_batch_size") is not None:
        told.describe("rampup_batch_size", "the batch it ends at is judged")
        if not re.fullmatch(r"[\[(]?\s*\d+([\s,]+\d+)*\s*[\])]?", told.text("rampup_batch_size")):
            message = f"rampup_batch_size is {told.get('rampup_batch_size')!r}, which is not read"
            raise UnknownError(message, hint="start, increment and samples, such as 32 32 65324")
    return told.whole("global_batch_size", default=default)


def _refuse(
    told: Told, model: ModelSpec, degrees: dict[str, int], *, data: int, micro: int, whole: int
) -> None:
    """Raise what Megatron-LM's own validation refuses."""
    expert, moe = degrees["expert"], model.experts
    unit, stages = data * micro, degrees["pipeline"]
    fewer = told.on("decrease_batch_size_if_needed")  # the program rounds it down
    gpus = data * degrees["tensor"] * stages * degrees["context"]
    whole_split = stages * _expert_split(told, degrees)
    batch = f"global_batch_size={whole} is not a multiple of micro_batch_size x data-parallel ranks"
    dealt = f"{gpus} GPUs are not a multiple of expert x expert tensor x pipeline = {whole_split}"
    share = f"expert={expert} does not divide num_experts={moe and moe.num_experts}"
    none = "expert parallelism needs num_experts"
    rules = (
        (
            whole % unit == 0 or (fewer and whole > unit),
            f"{batch} = {unit}",
            "every rank runs equally many micro-batches",
        ),
        (expert == 1 or moe is not None, none, "give num_experts"),
        (moe is None or moe.num_experts % expert == 0, share, "each rank has whole experts"),
        (moe is None or gpus % whole_split == 0, dealt, "experts are dealt out over all ranks"),
    )
    fsdp, own = told.on("use_torch_fsdp2"), "--use-torch-fsdp2 shards by itself"
    fixed = told.on("deterministic_mode")
    more = (
        (not fsdp or stages == 1, f"{own}: pipeline={stages} is refused", "one stage"),
        (not fsdp or expert == 1, f"{own}: expert={expert} is refused", "leave experts whole"),
        (not fsdp or not told.on("use_distributed_optimizer"),
         f"{own}: --use-distributed-optimizer is refused", "leave it out"),
        (not fsdp or not model.tied, f"{own}: embeddings tied to the head are refused",
         "add --untie-embeddings-and-output-weights"),
        (not fixed or not told.on("tp_comm_overlap"),
         "deterministic_mode and tp_comm_overlap are both on", "choose one"),
        (not fixed or not told.on("cross_entropy_loss_fusion"),
         "deterministic_mode and cross_entropy_loss_fusion are both on", "choose one"),
        (not told.on("bf16") or not told.on("fp16"), "bf16 and fp16 are both on", "choose one"),
        (not told.on("swiglu") or not told.on("squared_relu"),
         "swiglu and squared_relu are both on", "choose one"),
    )  # fmt: skip
    for holds, message, hint in (*rules, *more):
        told.refuse_unless(holds, message, hint)


def _chunks(told: Told, model: ModelSpec, stages: int, micro_batches: int) -> tuple[int, bool]:
    """Return chunks of a stage, and whether embedding and head count as layers."""
    accounts = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    said = [told.on(name) for name in accounts]  # both are read
    ends = any(said)
    if stages == 1:
        told.get("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
                 "num_virtual_stages_per_pipeline_rank")  # fmt: skip
        told.get("num_layers_per_virtual_pipeline_stage")
        return 1, False
    if layout := str(told.get("pipeline_model_parallel_layout", default="")):
        return _laid_out(told, model, layout, stages)
    uneven = [told.whole(*names, default=0) for names in (_FIRST, _LAST)]
    even = not any(uneven) and not ends and not model.pattern and not model.predicted_tokens
    told.refuse_unless(
        not even or model.num_layers % stages == 0,
        f"num_layers={model.num_layers} is not a multiple of pipeline={stages}",
        "give the first or last stage a number of its own, or a layout",
    )
    if any(uneven):
        return _uneven(told, model, stages, uneven), ends
    chunks = told.whole("num_virtual_stages_per_pipeline_rank",
                        "virtual_pipeline_model_parallel_size", default=0)  # fmt: skip
    if a_chunk := told.whole("num_layers_per_virtual_pipeline_stage", default=0):
        layers = model.num_layers + 2 * ends
        told.refuse_unless(
            layers // stages % a_chunk == 0,
            f"{layers // stages} layers of a stage are not a multiple of "
            f"num_layers_per_virtual_pipeline_stage={a_chunk}",
            "each chunk has equally many",
        )
        chunks = layers // stages // a_chunk
    group = told.whole("microbatch_group_size_per_vp_stage",
                       "microbatch_group_size_per_virtual_pipeline_stage",
                       default=stages)  # fmt: skip
    rest = micro_batches % group
    told.refuse_unless(
        chunks <= 1 or rest == 0 or rest >= stages,
        f"interleaving needs a multiple of pipeline={stages} micro-batches; got {micro_batches}",
        "change global_batch_size or the number of GPUs",
    )
    if chunks > 1 and micro_batches % stages:
        message = f"{micro_batches} micro-batches over {stages} interleaved stages have no price"
        raise UnknownError(message, hint="a multiple of the stages has one")
    return max(1, chunks), ends


def _laid_out(told: Told, model: ModelSpec, layout: str, stages: int) -> tuple[int, bool]:
    """Return chunks of a stage, and whether the ends have fewer layers, of a written layout."""
    spread = re.sub(r"\(([^)]*)\)\*(\d+)|(\w)\*(\d+)",
                    lambda m: (m[1] or m[3]) * int(m[2] or m[4]), layout)  # fmt: skip
    spread = spread.replace(",", "")
    chunks = spread.count("|") + 1
    for ends in (False, True):
        if spread == chunk_layout(model.num_layers, chunks, embedding_layers=ends):
            return max(1, chunks // stages), ends
    counts = [one.count("t") for one in spread.split("|")]
    if not sum(counts):
        message = f"pipeline_model_parallel_layout {layout} has no layers (t)"
        raise UnknownError(message, hint="such as Et*3|t*4|t*3L")
    worst = max(sum(counts[stage::stages]) for stage in range(min(stages, len(counts))))
    share = worst * stages / max(sum(counts), 1)
    told.unpriced("pipeline_model_parallel_layout", "layers are priced as if dealt out evenly",
                  memory=(min(0.9, 1 / share), max(share, 1.0)))  # fmt: skip
    return max(1, chunks // stages), "t" not in spread.partition("|")[0]


def _uneven(told: Told, model: ModelSpec, stages: int, outer: list[int]) -> int:
    """Return the chunks of a stage where the first or last one has layers of its own."""
    named = [count for count in outer if count]
    rest, middle = model.num_layers - sum(named), stages - len(named)
    told.refuse_unless(
        middle == 0 or (rest > 0 and rest % middle == 0),
        f"{rest} layers are not a multiple of the {middle} stages that have no number of their own",
        "change the layers of the first or last stage",
    )
    even = model.num_layers / stages
    worst = max(*named, rest // middle if middle else 0) / even
    for name in (*_FIRST, *_LAST):
        if name in told.settings and told.settings[name].given:
            told.unpriced(name, "layers are priced as if dealt out evenly",
                          memory=(min(0.9, min(named) / even), worst))  # fmt: skip
    return max(1, told.whole("num_virtual_stages_per_pipeline_rank",
                             "virtual_pipeline_model_parallel_size", default=1))  # fmt: skip


def _recompute(told: Told, virtual: int) -> tuple[str, int | None]:
    """Return what is recomputed, and in how many layers of a stage."""
    kinds, methods = {"full", "selective"}, {"uniform", "block"}
    how = told.word("recompute_granularity", "activations_checkpoint_granularity", among=kinds)
    if not how and told.word("activations_checkpoint_method", among=methods):
        how = "full"  # as releases before 2022 called it
    method = told.word("recompute_method", "activations_checkpoint_method", among=methods)
    count = told.whole("recompute_num_layers", "activations_checkpoint_num_layers", default=0)
    chosen = told.on("recompute_activations") and how != "full"
    if how != "selective" and not chosen:
        told.idle("no modules are chosen to be recomputed", "recompute_modules")
    if how == "full":
        if told.settings.get("recompute_granularity", _NONE).given:
            given = method in {"uniform", "block"} and told.gives("recompute_num_layers")
            given = given and (count > 0 or method == "block")
            message = "recompute_granularity full needs recompute_method and recompute_num_layers"
            told.refuse_unless(given, message, "uniform and 1 recompute each layer")
        if method == "block":
            return ("full", count * virtual) if count else ("none", None)
        return "full", None
    if not chosen and how != "selective":
        return "none", None
    words = re.findall(r"\w+", str(told.get("recompute_modules", default="core_attn")))
    unread = [word for word in words if word not in _DROPS]
    drops = " ".join(dict.fromkeys(_DROPS[word] for word in words if word in _DROPS))
    told.device = dataclasses.replace(told.device, selective_drops=drops)
    if unread:
        why = f"recomputing {', '.join(unread)} has no price"
        told.unpriced("recompute_modules", why, memory=(0.4, 1.0))
    return "selective", None


def _sharing(told: Told) -> int:
    """Return what data-parallel ranks share, as a stage of ZeRO."""
    distributed = told.on("use_distributed_optimizer") or "distributed" in told.text("optim.name")
    if told.on("use_torch_fsdp2"):
        return 3
    if told.on("fsdp"):  # of NeMo
        words = {"full": 3, "grad": 2, "hybrid": 3, "no_shard": 0}
        return words[told.word("fsdp_sharding_strategy", among=words, default="full") or "full"]
    if not told.on("use_megatron_fsdp", "use_custom_fsdp"):
        told.idle("fsdp is off", "fsdp_sharding_strategy", "fsdp_grad_reduce_dtype",
                  "fsdp_sharded_checkpoint", "fsdp_use_orig_params")  # fmt: skip
    if told.on("use_megatron_fsdp", "use_custom_fsdp"):
        word = told.text("data_parallel_sharding_strategy", default="no_shard")
        told.refuse_unless(
            word in _SHARING,
            f"data_parallel_sharding_strategy {word!r} is unknown",
            f"use one of {', '.join(_SHARING)}",
        )
        return _SHARING[word]
    return 1 if distributed else 0


def _shard(told: Told, replicas: int, zero: int) -> int | None:
    instances = told.whole("num_distributed_optimizer_instances", default=1)
    if not zero or instances == 1:
        return None
    told.refuse_unless(
        replicas % instances == 0,
        f"num_distributed_optimizer_instances={instances} does not divide {replicas} replicas",
        "each instance has equally many ranks",
    )
    return replicas // instances


def _optimizer(told: Told) -> str:
    name = told.text("optimizer", "optim.name", default="adam")
    if "muon" in name:
        return "muon"
    if name == "sgd":
        told.device = dataclasses.replace(told.device, optimizer_state_bytes=8.0)
    elif "adam" not in name and name != "mcore_distributed_optim":
        own = "optimizer" if told.settings.get("optimizer") else "optim.name"
        told.unpriced(own, "its states are priced as Adam's", memory=(0.4, 1.2))
    return "adamw"


def _moves_states(told: Told) -> bool:
    if not told.on("optimizer_cpu_offload"):
        told.idle("the optimizer is not moved", "optimizer_offload_fraction")
        return False
    share = told.share("optimizer_offload_fraction", default=1.0)
    if 0 < share < 1:
        told.unpriced("optimizer_offload_fraction", "all states are priced as moved",
                      memory=(1.0, 4.0))  # fmt: skip
    return share > 0


def _offloaded(told: Told) -> dict[str, Any]:
    if not told.on("cpu_offloading"):
        return {}
    layers = told.whole("cpu_offloading_num_layers", default=0)
    return {"offload_activations": True, "offload_layers": layers or None}


def _stack(told: Told) -> None:
    """Change the stack as the recipe says: attention, types of gradients and states."""
    if told.off("megatron_amp_o2"):
        told.unpriced("megatron_amp_o2", "weights are priced in 16 bits", memory=(0.8, 2.0))
    device, backend = told.device, told.text("attention_backend")
    kinds = {"local", "transformer_engine", "inference_optimized"}
    local = told.word("transformer_impl", among=kinds) == "local"
    flash = told.on("use_flash_attn", "use_flash_attention")
    env = told.off("env.nvte_flash_attn") and told.off("env.nvte_fused_attn")
    unfused = env or backend in {"unfused", "local"} or (local and not flash and backend != "flash")
    if unfused or told.off("use_flash_attention"):
        device = dataclasses.replace(device, fused_attention=False)
        if not (env or local or backend) and told.on("mcore_gpt"):
            why = "Megatron Core may fuse attention all the same; priced as not fused"
            told.unpriced("use_flash_attention", why, memory=(0.02, 1.0))
    elif backend not in _PLAIN_TYPES:
        told.unpriced("attention_backend", "priced as fused attention", memory=(0.8, 1.5))
    if device.fused_attention:
        told.idle("attention is fused with its softmax", "no_masked_softmax_fusion")
    types = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    widths = [_width(told, name) for name in types]
    if any(width is not None for width in widths):
        states = sum(4.0 if width is None else width for width in widths)
        device = dataclasses.replace(device, optimizer_state_bytes=states)
    told.device = dataclasses.replace(device, **_gradients(told))


def _gradients(told: Told) -> dict[str, Any]:
    """Return the widths of gradients in memory and on the wire, where the recipe decides them."""
    main, narrow = _width(told, "main_grads_dtype"), told.on("grad_reduce_in_bf16")
    if told.on("use_torch_fsdp2"):  # which keeps them in the type of the weights
        told.on("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32")
        return {"gradient_bytes": 2.0, "gradient_wire_bytes": 4.0}
    if sync := _width(told, "optim.grad_sync_dtype"):  # NeMo's optimizer keeps sums as it sends
        return {"gradient_bytes": sync, "gradient_wire_bytes": sync}
    wide = told.on("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32")
    if narrow:
        return {"gradient_bytes": 2.0, "gradient_wire_bytes": 2.0}
    # With --bf16 gradients are accumulated and reduced in 32 bits where nothing else is said.
    if wide or (told.on("bf16") and main in {None, 4.0}):
        return {"gradient_bytes": 4.0, "gradient_wire_bytes": 4.0}
    return {} if main is None else {"gradient_bytes": main}


def _width(told: Told, name: str) -> float | None:
    word = told.text(name).removeprefix("torch.")
    if not word:
        return None
    told.refuse_unless(
        word in _STATE_BYTES, f"{name} {word!r} is unknown", f"use one of {', '.join(_STATE_BYTES)}"
    )
    return float(_STATE_BYTES[word])


def _product_type(told: Told) -> str:
    """Return the type of matrix products."""
    wide_in = told.on("bf16", "fp16") or "16" in told.text("precision", "params_dtype")
    off = {"", "false", "0"}
    narrow = [told.word(name, among={"e2m1", *_FP8}) not in off for name in ("fp4_format", "fp4")]
    named = [told.word(name, among=_FP8) not in off for name in ("fp8_format", "fp8")]
    # Flags of Megatron-LM's first releases, and formats of NeMo, where fp8 alone is the switch.
    formats = told.on("fp8_hybrid", "fp8_e4m3", "transformer_engine.fp8")
    if any(narrow):
        return "nvfp4"
    if any(named) or (formats and not told.gives("fp8")):
        recipe = told.word("fp8_recipe", among=_FP8_RECIPES)
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    told.idle("products are of 16 bits", "fp8_recipe")
    if not wide_in:
        told.assume("products", "16 bits", "neither bf16 nor fp16 is said", memory=(1.0, 2.0))
    return "bf16"
