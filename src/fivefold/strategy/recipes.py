"""Recipes of other programs, checked before anyone waits for a GPU: are they valid, do they fit.

Each program's words are turned into a model and a plan, which are then asked what every plan is
asked. What a recipe does not say is assumed, and said; what cannot be read is "unknown", never ok.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fivefold.errors import ConfigurationError, FivefoldError, UnsupportedError, require_whole
from fivefold.files import parse_toml, parse_yaml, read_text
from fivefold.strategy._launchers import chunk_layout, megatron_flags, torchtitan_config
from fivefold.strategy._recipe_texts import (
    python_settings,
    script_settings,
    toml_settings,
)
from fivefold.strategy.cluster import Cluster
from fivefold.strategy.cost import PlanPrediction, evaluate_plan
from fivefold.strategy.job import job_from_table
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import MixtureOfExperts
from fivefold.strategy.plan import ParallelPlan
from fivefold.strategy.presets import load_model, named_models
from fivefold.strategy.search import search_plans
from fivefold.units import format_bytes

Status = Literal["ok", "invalid", "memory", "unknown"]
Program = Literal["fivefold", "megatron", "torchtitan", "nemo"]
_ENDINGS = (".toml", ".yaml", ".yml", ".sh", ".py", ".txt")
_MOST_FILES = 10_000
# Flags that change what layers are made of; experts in all layers are read.
_UNREAD = (
    "experimental_attention_variant", "heterogeneous_layers_config_path", "hybrid_layer_pattern",
    "hybrid_override_pattern", "is_hybrid_model", "moe_layer_freq", "mtp_num_layers",
    "multi_latent_attention", "window_size",
)  # fmt: skip
_ALL_LAYERS = re.compile(r"1|\(?\[1\]\*\d+\)?")
# What follows a model's name where another size or version of it is meant.
_ANOTHER = re.compile(r"\.\d|\d+(\.\d+)?[bm]|debug|distill|lite|mini|small|tiny")


@dataclass(frozen=True, kw_only=True)
class RecipeVerdict:
    """Findings about one recipe.

    Args:
        path: The file.
        program: Whose recipe it is.
        status: "ok"; "invalid" where the program would refuse it; "memory" where it does not fit;
            "unknown" where it says too little to tell.
        message: What is wrong, or what was found.
        hint: What to do; empty where nothing is wrong.
        line: Of the file, counted from 1, that the message is about.
        prediction: Time and memory; None where it is invalid or unknown.
        model: What is trained; None where it is not known.
        assumed: What the recipe does not say and was taken to be so.
    """

    path: Path
    program: Program
    status: Status
    message: str
    hint: str = ""
    line: int = 1
    prediction: PlanPrediction | None = None
    model: ModelSpec | None = None
    assumed: tuple[str, ...] = ()


def check_recipes(folder: Path, cluster: Cluster) -> Iterator[RecipeVerdict]:
    """Check every recipe of a folder at any depth, or one file, in the order of their names.

    What is no recipe of Megatron-LM, torchtitan, NeMo or fivefold is passed over.

    Raises:
        ConfigurationError: The folder holds no recipe.
    """
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    count = 0
    for path in [one for one in paths if one.suffix in _ENDINGS and one.is_file()][:_MOST_FILES]:
        verdict = check_recipe(path, cluster)
        if verdict is not None:
            count += 1
            yield verdict
    if not count:
        raise ConfigurationError(
            f"{folder} holds no recipe of Megatron-LM, torchtitan, NeMo or fivefold",
            hint="looked at .toml, .yaml, .yml, .sh, .py and .txt files at any depth",
        )


def check_recipe(path: Path, cluster: Cluster) -> RecipeVerdict | None:
    """Check one file; None where it is no recipe."""
    try:
        text = read_text(path)
        found = _recognised(path, text)
    except FivefoldError as error:
        return RecipeVerdict(
            path=path, program=_program_of(path), status="invalid", message=error.message,
            hint=error.hint or "",
        )  # fmt: skip
    if found is None:
        return None
    program, settings = found
    known: dict[str, Any] = {"path": path, "program": program}
    told = _Told(settings, path, cluster)
    try:
        model, plan = _READERS[program](told)
        prediction = evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
        cluster.require(plan.num_gpus)
        _ask_the_program(program, model, plan)
    except FivefoldError as error:
        return RecipeVerdict(
            **known,
            status="unknown" if isinstance(error, _UnknownError) else "invalid",
            message=error.message,
            hint=error.hint or "",
            line=_line_of(text, error.message),
        )
    known |= {"prediction": prediction, "model": model, "assumed": tuple(told.assumed)}
    needs, has = prediction.memory.total_bytes, cluster.device.memory_bytes
    message = f"needs {format_bytes(needs)} of {format_bytes(has)} a GPU"
    if prediction.fits:
        return RecipeVerdict(**known, status="ok", message=message)
    return RecipeVerdict(
        **known,
        status="memory",
        message=f"does not fit: {message}",
        hint="smaller micro-batches, recomputation, sharding or more pipeline stages; fivefold "
        "plan searches for one that fits",
        line=_line_of(text, "micro_batch"),
    )


class _UnknownError(FivefoldError):
    """A recipe says too little to be checked."""


def _program_of(path: Path) -> Program:
    return {".sh": "megatron", ".txt": "megatron", ".py": "torchtitan"}.get(path.suffix, "nemo")  # type: ignore[return-value]


def _recognised(path: Path, text: str) -> tuple[Program, dict[str, Any]] | None:
    """Return whose recipe it is with its settings as they stand there; None for no recipe."""
    if path.suffix == ".py":
        settings = python_settings(text)
        return None if settings is None else ("torchtitan", settings)
    if path.suffix in {".sh", ".txt"}:
        settings = script_settings(text)
        return ("megatron", settings) if {"num_layers", "hidden_size"} <= set(settings) else None
    if path.suffix == ".toml":
        if not any(word in text for word in ("global_batch", "parallelism", "flavor")):
            return None
        table = parse_toml(text, where=str(path))
        if "global_batch" in table and "model" in table:
            return "fivefold", table
        named = "parallelism" in table or "flavor" in dict(table.get("model") or {})
        return ("torchtitan", toml_settings(table)) if named else None
    return _recognised_yaml(path, text)


def _recognised_yaml(path: Path, text: str) -> tuple[Program, dict[str, Any]] | None:
    words = ("model_parallel_size", "model-parallel-size", "tp_size", "micro_batch_size",
             "local_batch_size")  # fmt: skip
    if not any(word in text for word in words):
        return None
    table = parse_yaml(text, where=str(path))
    if not isinstance(table, dict):
        return None
    if isinstance(arguments := table.get("MODEL_ARGS"), dict):
        flags = {str(k).lstrip("-").replace("-", "_"): v for k, v in arguments.items()}
        known = {str(k).lower(): v for k, v in table.items() if isinstance(v, int)}
        return "megatron", known | flags
    return "nemo", toml_settings(table)


_DEGREES = {
    "tensor": ("tp_size", "tensor_model_parallel_size", "tensor_parallel_degree"),
    "pipeline": ("pp_size", "pipeline_model_parallel_size", "pipeline_parallel_degree"),
    "context": ("cp_size", "context_parallel_size", "context_parallel_degree"),
    "expert": ("ep_size", "expert_model_parallel_size", "expert_parallel_degree"),
}


class _Told:
    """What a recipe says, and what was assumed where it says nothing."""

    def __init__(self, settings: Mapping[str, Any], path: Path, cluster: Cluster) -> None:
        self.settings, self.path, self.cluster = settings, path, cluster
        self.get = settings.get
        self.assumed: list[str] = []

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return the first of some settings that is given, a whole number."""
        for name in names:
            if (value := self.get(name)) is None:
                continue
            try:
                return int(str(value).replace("_", ""))
            except ValueError:
                if "$" in str(value) or "{" in str(value):
                    message = f"{name} is {value!r}, which only the launch decides"
                    raise _UnknownError(message, hint="give it a value in the file") from None
                message = f"{name} must be a whole number; got {value!r}"
                raise ConfigurationError(message, hint="such as 8") from None
        if default is None:
            message = f"the recipe does not say {names[0]}"
            raise _UnknownError(message, hint=f"add {names[0]}, or check it with its base")
        return default

    def on(self, *names: str) -> bool:
        """Return whether one of some switches is on."""
        return any(str(self.get(name, False)).lower() in {"true", "1", "yes"} for name in names)

    def degrees(self, *, less_is_one: bool = False) -> dict[str, Any]:
        """Return the degrees of the model's split."""
        found = {axis: self.whole(*names, default=1) for axis, names in _DEGREES.items()}
        if less_is_one:
            return {axis: max(degree, 1) for axis, degree in found.items()}
        for axis, degree in found.items():
            require_whole(f"the {axis} parallel degree", degree, hint="1 leaves it whole")
        return found

    def replicas(self, degrees: Mapping[str, int], *, copies: int = 1) -> int:
        """Return the data-parallel ranks: what is left of the GPUs, as told or as there are."""
        split = copies * math.prod(degrees[axis] for axis in ("tensor", "pipeline", "context"))
        per_node = self.whole("nproc_per_node", "gpus_per_node", "devices", "gpus", "ngpu",
                              "ntasks_per_node", default=0)  # fmt: skip
        nodes = self.whole("nnodes", "num_nodes", "nodes", default=1)
        gpus = self.whole("world_size", default=per_node * nodes)
        if not gpus:
            gpus = self.cluster.num_gpus or max(split, self.cluster.fabric.gpus_per_node)
            self.assumed.append(f"{gpus} GPUs")
        if gpus % split:
            what = "replicate x " * (copies > 1) + "tensor x pipeline x context"
            raise ConfigurationError(
                f"{gpus} GPUs are not a multiple of {what} = {split}",
                hint="data parallelism takes what is left: degrees must divide the GPUs",
            )
        return gpus // split


_Recipe = tuple[ModelSpec, ParallelPlan]


def _megatron(told: _Told) -> _Recipe:
    degrees = told.degrees()
    tensor, pipeline = degrees["tensor"], degrees["pipeline"]
    data, model = told.replicas(degrees), _megatron_model(told)
    micro = told.whole("micro_batch_size")
    whole = told.whole("global_batch_size", default=micro * data)
    virtual, ends = _megatron_chunks(told, model, pipeline)
    how = str(told.get("recompute_granularity",
                           told.get("activations_checkpoint_granularity", "")))  # fmt: skip
    kept = "selective" if told.on("recompute_activations") else "none"
    distributed = told.on("use_distributed_optimizer") or "distributed" in str(
        told.get("optim.name", "")
    )
    interleaved = pipeline > 1 and virtual > 1
    recompute = how if how in {"full", "selective"} else kept
    some = told.whole("recompute_num_layers", default=0) * virtual
    split_experts = told.whole("expert_tensor_parallel_size", default=tensor)
    plan = ParallelPlan(
        global_batch=whole, micro_batch=micro, data=data, **degrees,
        expert_tensor=1 if split_experts == 1 < tensor else None,
        shared_overlap=told.on("moe_shared_expert_overlap") and degrees["expert"] > 1,
        virtual=virtual if interleaved else 1,
        schedule="interleaved" if interleaved else "1f1b",
        zero=1 if distributed else 0,
        recompute=recompute,  # type: ignore[arg-type]
        recompute_layers=some or None
        if recompute == "full" and told.get("recompute_method") == "block" else None,
        embedding_layers=ends,
        offload_optimizer=told.on("optimizer_cpu_offload"),
        order="tcpd" if told.on("use_tp_pp_dp_mapping") else "tcdp",
        sequence_parallel=told.on("sequence_parallel"),
        tensor_overlap="pipe" if told.on("tp_comm_overlap") and tensor > 1 else "none",
        data_overlap=told.on("overlap_grad_reduce"),
        pipeline_overlap=interleaved and not told.on("no_overlap_p2p_communication"),
        dtype=_megatron_type(told),
    )  # fmt: skip
    return model, plan


def _megatron_chunks(told: _Told, model: ModelSpec, stages: int) -> tuple[int, bool]:
    """Return chunks of a stage, and whether embedding and head count as layers."""
    ends = told.on("account_for_embedding_in_pipeline_split")
    if layout := str(told.get("pipeline_model_parallel_layout", "")):
        chunks = layout.count("|") + 1
        for ends in (False, True):
            if layout == chunk_layout(model.num_layers, chunks, embedding_layers=ends):
                return max(1, chunks // stages), ends
        told.assumed.append("layers dealt out evenly")
        return max(1, chunks // stages), "t" not in layout.partition("|")[0]
    if a_chunk := told.whole("num_layers_per_virtual_pipeline_stage", default=0):
        whole = model.num_layers // stages // a_chunk * a_chunk * stages == model.num_layers
        ends = ends or not whole
        return max(1, (model.num_layers + 2 * ends) // stages // a_chunk), ends
    return told.whole("virtual_pipeline_model_parallel_size", default=1), ends


def _megatron_type(told: _Told) -> str:
    """Return the type of matrix products."""
    if told.get("fp4_format", told.get("fp4")):
        return "nvfp4"
    if told.get("fp8_format", told.get("fp8")):
        return "mxfp8" if str(told.get("fp8_recipe")) == "mxfp8" else "fp8"
    if not told.on("bf16", "fp16") and "16" not in str(told.get("precision", "")):
        told.assumed.append("products in 16 bits")
    return "bf16"


def _megatron_model(told: _Told) -> ModelSpec:
    for name in _UNREAD:
        value = str(told.get(name, "")).lower()
        if value not in {"", "none", "null", "false", "0"} and not _ALL_LAYERS.fullmatch(value):
            message = f"{name} {value} is not read: what it makes of the layers has no price here"
            raise _UnknownError(message, hint="plan the model from its config.json")
    hidden = told.whole("hidden_size")
    activation = str(told.get("activation", ""))
    gated = told.on("swiglu") or "swiglu" in activation or "geglu" in activation
    ffn = 4 * hidden if not gated else int(4 * hidden * 2 / 3 / 64) * 64
    vocab = told.whole("vocab_size", "padded_vocab_size", default=0)
    if not vocab:
        vocab = 51200
        told.assumed.append("a vocabulary of 51,200")
    heads = told.whole("num_attention_heads")
    experts = told.whole("num_experts", "num_moe_experts", default=0)
    inner = told.whole("ffn_hidden_size", default=ffn)
    positions = str(told.get("position_embedding_type", "learned_absolute"))
    plain_bias = told.on("disable_bias_linear") or told.get("bias") is False
    tied = told.get("share_embeddings_and_output_weights", True)
    # Megatron-LM's number of groups counts beside its flag alone.
    grouped = told.path.suffix not in {".sh", ".txt"} or told.on("group_query_attention")
    return ModelSpec(
        name=told.path.stem, num_layers=told.whole("num_layers"), hidden=hidden,
        num_heads=heads, vocab=vocab, ffn=inner, gated=gated,
        seq_len=told.whole("seq_length", "encoder_seq_length"),
        num_kv_heads=told.whole("num_query_groups", default=heads) if grouped else None,
        head_dim=told.whole("kv_channels", default=0) or None,
        tied=not told.on("untie_embeddings_and_output_weights") and tied is not False,
        learned_positions=positions == "learned_absolute", biases=not plain_bias,
        dropout=float(told.get("hidden_dropout", 0.1)) > 0,
        experts=None if not experts else MixtureOfExperts(
            num_experts=experts, top_k=told.whole("moe_router_topk", default=2),
            expert_ffn=told.whole("moe_ffn_hidden_size", default=inner),
            shared_ffn=told.whole("moe_shared_expert_intermediate_size", default=0),
        ),
    )  # fmt: skip


def _torchtitan(told: _Told) -> _Recipe:
    name, flavor = told.get("model.name"), told.get("model.flavor")
    named = told.get("config_function", name or "") if flavor is None else f"{name}-{flavor}"
    model = _named_model(str(named))
    if length := told.whole("seq_len", "max_context_length", default=0):
        model = dataclasses.replace(model, seq_len=length)
    degree = told.degrees()
    copies = told.whole("data_parallel_replicate_degree", default=1)
    require_whole("the replicate degree", copies, hint="1 is for no replicas")
    shards = told.whole("data_parallel_shard_degree", default=-1)
    if shards < 0:
        shards = told.replicas(degree, copies=copies)
    data = copies * shards
    local, whole = _titan_batch(told, model, data)
    schedule, virtual = _titan_schedule(told, model, degree["pipeline"])
    always = str(told.get("fsdp_reshard_after_forward", "default"))
    pipelined = degree["pipeline"] > 1
    gathers_again = always == "always" or (always == "default" and not pipelined)
    async_tensor = told.on("enable_async_tensor_parallel")
    in_parts = pipelined and "num_tokens_per_microbatch_per_dp_rank" not in told.settings
    micro = told.whole("pipeline_parallel_microbatch_size", default=1 if in_parts else local)
    sharing = shards * degree["context"]
    less = told.whole("pipeline_parallel_first_stage_less_layers", default=1)
    plan = ParallelPlan(
        global_batch=whole, micro_batch=micro, data=data, **degree, schedule=schedule,  # type: ignore[arg-type]
        virtual=virtual, zero=0 if sharing == 1 else 3 if gathers_again else 2,
        shard=sharing if copies > 1 and sharing > 1 else None,
        embedding_layers=pipelined and less > 0,
        recompute=_titan_recompute(told),  # type: ignore[arg-type]
        sequence_parallel=degree["tensor"] > 1
        and str(told.get("enable_sequence_parallel", True)).lower() != "false",
        tensor_overlap="pipe" if async_tensor and degree["tensor"] > 1 else "none",
        data_overlap=data * degree["context"] > 1,
        pipeline_overlap=pipelined and schedule not in {"gpipe", "1f1b"},
    )  # fmt: skip
    return model, plan


def _titan_recompute(told: _Told) -> str:
    mode = str(told.get("activation_checkpoint.mode", told.get("mode", "selective")))
    each = str(told.get("selective_ac_option", "op")) if mode == "selective" else "op"
    if mode not in {"none", "selective", "full"} or each not in {"op", "1"}:
        message = (
            f"activation_checkpoint.mode {mode!r} with selective_ac_option {each!r} is not read"
        )
        raise _UnknownError(message, hint="none, full, and selective by operator are")
    return mode if each == "op" else "full"


def _titan_batch(told: _Told, model: ModelSpec, data: int) -> tuple[int, int]:
    """Return the samples of a rank's batch, and of an iteration."""
    if tokens := told.whole("num_tokens_per_microbatch_per_dp_rank", default=0):
        local = max(1, tokens // model.seq_len)
        return local, told.whole("num_tokens_per_train_step") // model.seq_len
    local = told.whole("local_batch_size", "batch_size", default=8)
    whole = told.whole("global_batch_size", default=-1)
    return local, whole if whole > 0 else local * data


_TITAN_SCHEDULES = {
    "gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb_v",
    "interleavedzerobubble": "zb_1p", "dualpipev": "dualpipe_v",
}  # fmt: skip


def _titan_schedule(told: _Told, model: ModelSpec, stages: int) -> tuple[str, int]:
    name = str(told.get("pipeline_parallel_schedule", "1F1B"))
    if stages == 1:
        return "1f1b", 1
    schedule = _TITAN_SCHEDULES.get(name.lower())
    if schedule is None:
        message = f"pipeline_parallel_schedule {name!r} is unknown"
        raise ConfigurationError(message, hint=f"use one of {', '.join(_TITAN_SCHEDULES)}")
    if schedule in {"zb_v", "dualpipe_v"}:
        return schedule, 2
    if schedule != "interleaved":
        return schedule, 1
    a_chunk = told.whole("pipeline_parallel_layers_per_stage", default=0)
    less = sum(
        told.whole(f"pipeline_parallel_{end}_stage_less_layers", default=1)
        for end in ("first", "last")
    )
    chunks = math.ceil((model.num_layers + less) / a_chunk) if a_chunk else 2 * stages
    return schedule, max(2, chunks // stages)


def _nemo(told: _Told) -> _Recipe:
    if {"num_layers", "hidden_size"} <= set(told.settings):
        return _megatron(told)
    keys = ("pretrained_model_name_or_path", "hf_model_id", "model")
    names = (told.get(key) for key in keys)
    model = _named_model(next((name for name in names if isinstance(name, str)), ""))
    if length := told.whole("packed_sequence_size", "seq_length", "seq_len", default=0):
        model = dataclasses.replace(model, seq_len=length)
    degrees = told.degrees(less_is_one=True)
    data = told.whole("dp_size", default=0)
    data = data if data > 0 else told.replicas(degrees)
    micro = told.whole("local_batch_size", "micro_batch_size", default=1)
    shared = data * degrees["context"] > 1
    return model, ParallelPlan(
        global_batch=told.whole("global_batch_size", default=micro * data), micro_batch=micro,
        data=data, **degrees, zero=3 if shared else 0, data_overlap=shared,
        recompute="full" if told.on("activation_checkpointing") else "none",
        sequence_parallel=told.on("sequence_parallel"),
    )  # fmt: skip


def _fivefold(told: _Told) -> _Recipe:
    where, cluster = str(told.path), told.cluster
    job = job_from_table(told.settings, where=where, folder=told.path.parent, cluster=cluster)
    if job.plan is not None:
        return job.model, job.plan
    told.assumed.append("the fastest plan of its space")
    found = search_plans(job.model, cluster.device, cluster.fabric, space=job.space, top=1)
    return job.model, found.best[0].plan


_READERS: Mapping[Program, Callable[[_Told], _Recipe]] = {
    "megatron": _megatron, "torchtitan": _torchtitan, "nemo": _nemo, "fivefold": _fivefold,
}  # fmt: skip


def _named_model(name: str) -> ModelSpec:
    """Return the preset that a name of another program means."""
    plain = _letters(name.rsplit("/", maxsplit=1)[-1])
    for known in sorted(named_models(), key=len, reverse=True):
        if plain.startswith(_letters(known)) and not _ANOTHER.match(plain[len(_letters(known)) :]):
            return load_model(known)
    message = f"the model {name!r} is not known here" if name else "the recipe names no model"
    raise _UnknownError(message, hint=f"known are {', '.join(named_models())}")


def _letters(name: str) -> str:
    """Return a name without what programs write differently: llama3_8b, Llama-3.1-8B."""
    text = name.lower().replace("meta-", "")
    for version in (".1", ".2", ".3"):
        text = text.replace(f"llama-3{version}", "llama3")
    for same, plain in (("-v3.1", "-v3"), ("-671b", ""), ("_671b", ""), ("nano-30b-a3b", "nano")):
        text = text.replace(same, plain)
    return "".join(c for c in text if c.isalnum() or c == ".")


def _ask_the_program(program: Program, model: ModelSpec, plan: ParallelPlan) -> None:
    """Raise what the program itself would refuse."""
    try:
        if program == "megatron":
            megatron_flags(model, plan)
        elif program == "torchtitan":
            torchtitan_config(model, plan, base="any.model")
    except UnsupportedError as error:
        raise ConfigurationError(error.message, hint=error.hint) from error


_KEYS = {
    "tensor": ("tensor",), "pipeline": ("pipeline",), "context": ("context",),
    "expert": ("expert", "ep_size"), "micro_batch": ("micro", "local_batch", "batch"),
    "global_batch": ("global",), "sequence": ("sequence",), "virtual": ("virtual",),
    "heads": ("heads",), "GPUs": ("nproc", "devices", "gpus", "GPUS"), "model": ("model", "flavor"),
}  # fmt: skip


def _line_of(text: str, message: str) -> int:
    """Return the line of a file that a message is about, as well as words tell; else 1."""
    lines = text.splitlines()
    for said in _said(message):
        for number, line in enumerate(lines, start=1):
            plain = line.replace("-", "_")
            if said in plain and not plain.lstrip().startswith("#"):
                return number
    return 1


def _said(message: str) -> Iterable[str]:
    found = sorted((message.find(word), word) for word in _KEYS if word in message)
    yield from (word for word in message.replace(",", " ").split() if "_" in word)
    for _, word in found:
        yield from _KEYS[word]
