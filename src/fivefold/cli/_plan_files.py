"""Files of ``fivefold plan``: the job it reads, and the plan in the words of other programs.

A job file, a configuration of the trainer or a config.json is read; files that run are written.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._options import ArgumentError
from fivefold.errors import UnsupportedError
from fivefold.files import read_toml
from fivefold.runs import check_tables, format_toml, write_text
from fivefold.strategy import (
    Cluster,
    Job,
    ModelSpec,
    PlanPrediction,
    SearchSpace,
    device_mesh,
    evaluate_plan,
    megatron_flags,
    megatron_script,
    plan_to_toml,
    torchtitan_config,
    trainer_config,
)
from fivefold.strategy.cluster import memory_time_s
from fivefold.strategy.job import job_from_table
from fivefold.strategy.parts import MixtureOfExperts
from fivefold.train import load_tokenizer
from fivefold.train.config import PredictionConfig, TrainConfig, load_config, settings_fingerprint

_TRAINER_TABLES = {"run", "data", "optim", "sync", "tasks", "prediction"}
_BYTES_VOCAB = 257  # of the trainer's tokenizer of bytes
_TAUS = (2, 4, 8, 16, 32, 64)
_LEAST_16_BIT_FLOPS = 1e12  # a processor has no fast products of 16 bits
CODEC_BYTES = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.02, "int4": 0.52, "topk": 0.021, "auto": 0.52,
}  # fmt: skip
"""Bytes on the wire of one number of each codec, scales counted; of "auto" the smallest."""


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job, and the trainer's configuration that it was read from, where it was."""

    job: Job
    config: TrainConfig | None = None


def as_sent(cluster: Cluster, config: TrainConfig | None) -> Cluster:
    """Return the cluster with what fivefold's trainer sends, and what it keeps to send it."""
    codec = "fp32" if config is None else config.sync.codec or "fp32"
    rule = None if config is None else config.sync.rule_class
    # A plan without local updates is DDP, which sends 32 bits if nothing else is asked of it.
    rounds = config is None or config.sync.has_rounds or config.sync.method == "none"
    plain = "fp32" if rounds else codec
    changes: dict[str, Any] = {
        "gradient_wire_bytes": CODEC_BYTES[plain], "outer_wire_bytes": CODEC_BYTES[codec],
    }  # fmt: skip
    if config is not None and rule is not None:
        made = config.sync.rule(total_steps=config.run.steps)
        averaged = len(config.sync.average_states or {})  # anchor, payload and what was sent
        residual = 0.0 if codec == "fp32" else 4.0 * (1 + averaged)
        changes |= {
            "outer_state_bytes": 4.0 * (made.numbers_per_parameter + 3 * averaged) + residual,
            "outer_owned_bytes": residual,
            "outer_window": made.window,
        }
        if made.sends_gradients:  # at every step: no plan has tau > 1
            states = cluster.device.optimizer_state_bytes + 4.0 * made.numbers_per_parameter
            changes["optimizer_state_bytes"] = states + 1.5 * residual  # of two ranks or more
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **changes))


def read_job(path: Path, cluster: Cluster, sizes: Mapping[str, int]) -> PlannedJob:
    """Return what is to be planned on a cluster, which may say how many GPUs there are.

    The path is a job file, a configuration of ``fivefold train``, a Hugging Face ``config.json``
    or the folder of one; ``sizes`` (gpus, global_batch, seq_len) go before those of a file.
    """
    if path.is_dir() and not (path / "config.json").exists():
        message = f"'{path}' is a directory, and has no config.json of a model"
        raise ArgumentError(message, hint="give a job file; fivefold plan --help says what it has")
    if path.is_dir() or path.suffix == ".json":
        if "global_batch" not in sizes:
            message = f"{path} is a model, and how it is trained is not said"
            hint = "add --global-batch 512, the samples of an optimizer step over all GPUs"
            raise ArgumentError(message, hint=hint)
        tables: dict[str, Any] = {"model": str(path.resolve())}
        folder = Path()
    else:
        tables, folder = read_toml(path), path.parent
        model = tables.get("model")
        if _TRAINER_TABLES & set(tables) or (isinstance(model, dict) and "layers" in model):
            return _of_trainer(path, cluster, sizes)
    job = job_from_table({**tables, **sizes}, where=str(path), folder=folder, cluster=cluster)
    return PlannedJob(job=job)


def _of_trainer(path: Path, cluster: Cluster, sizes: Mapping[str, int]) -> PlannedJob:
    config = load_config(path)
    gpus = sizes.get("gpus") or cluster.num_gpus
    if gpus is None:
        message = f"how many ranks {path} will have is not said"
        raise ArgumentError(message, hint="add --gpus 16, or gpus = 16 to the cluster file")
    cluster.require(gpus)
    if "seq_len" in sizes:
        message = f"--seq-len beside {path}, whose data.sequence_length says it"
        raise ArgumentError(message, hint="change it there")
    optim = config.optim
    space = SearchSpace(
        num_gpus=gpus,
        global_batch=sizes.get("global_batch") or optim.batch_size * optim.accumulation * gpus,
        micro_batch=(optim.batch_size,),
        tau=_taus(config),
        dtypes=(precision_of(config, cluster),),
        optimizers=(optim.optimizer,),
        data_overlap=(True,),
    )
    return PlannedJob(job=Job(model=model_of(config), space=space), config=config)


def _taus(config: TrainConfig) -> tuple[int, ...]:
    """Return local steps to look at; what changes convergence is only searched where wanted."""
    tau = config.sync.tau
    if not config.sync.has_rounds:
        return (1,)
    return (1, *_TAUS) if tau == "auto" else tuple(sorted({1, int(tau or 1)}))


def precision_of(config: TrainConfig, cluster: Cluster) -> str:
    """Return the type of matrix products that the trainer will choose on the cluster's device."""
    if config.optim.precision != "auto":
        return config.optim.precision
    return "bf16" if cluster.device.peak_flops >= _LEAST_16_BIT_FLOPS else "fp32"


def model_of(config: TrainConfig, *, vocab: int | None = None) -> ModelSpec:
    """Return the trainer's model in the planner's words; a ``vocab`` of None is the tokenizer's."""
    model = config.model
    if vocab is None and config.data.tokenizer == "bytes":
        vocab = _BYTES_VOCAB
    if vocab is None:
        vocab = load_tokenizer(config.data.tokenizer).vocab_size
    experts = None
    if model.moe is not None:
        inner = model.expert_width
        experts = MixtureOfExperts(
            num_experts=model.moe.experts, top_k=model.moe.top_k, expert_ffn=inner,
            shared_ffn=model.moe.shared * inner, every=model.moe.every,
        )  # fmt: skip
    return ModelSpec(
        name=config.run.output.name, num_layers=model.layers, hidden=model.width,
        num_heads=model.heads, seq_len=config.data.sequence_length, vocab=vocab,
        ffn=model.dense_width, gated=True, tied=True, learned_positions=False, dropout=False,
        biases=False, experts=experts,
    )  # fmt: skip


_OUTER_PASSES = 8  # over parameters, anchors and momenta in an outer update, 4 bytes each
_FIRST_BUCKET, _BUCKET = 2.0**20, 25 * 2.0**20  # of DistributedDataParallel


def write_plan_files(
    folder: Path, planned: PlannedJob, best: PlanPrediction, cluster: Cluster, *, base: str | None
) -> None:
    """Write each form that the plan has; say why where it has none, and leave no older one."""
    job, plan = planned.job, best.plan
    forms: dict[str, Callable[[], str]] = {
        "plan.toml": lambda: plan_to_toml(plan),
        "mesh.json": lambda: json.dumps(device_mesh(plan)) + "\n",
        "megatron_flags.txt": lambda: (
            " ".join(megatron_flags(job.model, plan, device=cluster.device)) + "\n"
        ),
        "torchtitan_planned.py": lambda: torchtitan_config(job.model, plan, base=base),
        "fivefold_train.toml": lambda: runnable("train", planned, best, cluster, base=base),
    }
    for name, make in forms.items():
        try:
            write_text(folder / name, make())
        except UnsupportedError as error:
            (folder / name).unlink(missing_ok=True)  # of an earlier plan
            typer.echo(f"not written: {name}: {error.message}", err=True)
        else:
            typer.echo(f"written: {folder / name}", err=True)


def runnable(
    target: str | None,
    planned: PlannedJob,
    best: PlanPrediction,
    cluster: Cluster,
    *,
    base: str | None,
) -> str:
    """Return the file with which a program runs a plan, for None a table; ``base``: torchtitan."""
    model, plan = planned.job.model, best.plan
    if target is None:
        return plan_to_toml(plan)
    per_node = cluster.fabric.gpus_per_host
    if target == "torchtitan":
        return torchtitan_config(model, plan, base=base)
    if target == "megatron":
        return megatron_script(model, plan, gpus_per_node=per_node, device=cluster.device)
    tables = tomllib.loads(trainer_config(model, plan, more=_kept(planned, best)))
    # What the planner's file leaves to defaults is decided here, so that the fingerprint holds.
    config = check_tables(tables, TrainConfig, source="the planned configuration")
    prediction = predict_step(config, planned, best, cluster)
    nproc = min(per_node, plan.num_gpus)
    nodes = plan.num_gpus // nproc
    start = f"fivefold train THIS --nproc {nproc}"
    if nodes > 1:
        start = (
            f"torchrun --nnodes {nodes} --nproc-per-node {nproc} --rdzv-endpoint HOST:29500 "
            "--no-python fivefold train THIS"
        )
    lines = [
        f"# {model.name} on {plan.num_gpus} GPUs of {cluster.name}, planned by fivefold. Start it:",
        f"#   {start}",
        "# Data, tokenizer, steps and learning rate are yours; defaults stand where none are.",
        f"# Planned for a vocabulary of {model.vocab}; the tokenizer decides it. [prediction]",
        "# changes nothing: fivefold report puts it beside what was measured.",
    ]
    return "\n".join(lines) + "\n" + format_toml(tables | {"prediction": prediction.model_dump()})


def _kept(planned: PlannedJob, best: PlanPrediction) -> dict[str, dict[str, Any]]:
    """Return what the trainer's own file said and the plan does not change."""
    config, plan = planned.config, best.plan
    if config is None:
        return {}
    given = config.model_dump(exclude_unset=True, exclude={"prediction"})
    sync = {} if plan.tau == 1 else dict(given.get("sync", {}))
    if plan.tau > 1:
        sync |= {"method": config.sync.method, "tau": plan.tau}
        sync.pop("auto_tau", None)
        if config.sync.codec == "auto":
            sync["codec"] = "int4"
        sync.pop("shard", None)  # the plan says which ranks share states
        if config.sync.tau == "auto" and config.sync.fragments is not None:
            sync["fragments"] = min(plan.tau, config.sync.fragments)
    elif config.sync.rule_class is None:
        sync = {**given.get("sync", {}), "method": "ddp" if plan.data > 1 else "none"}
    elif not config.sync.has_rounds and plan.data > 1:
        sync = dict(given["sync"])
    optim = {
        "batch_size": plan.micro_batch,
        "accumulation": plan.num_micro_batches,
        "precision": config.optim.precision,
    }
    kept = {name: dict(keys) for name, keys in given.items() if name != "sync"}
    kept["optim"] = kept.get("optim", {}) | optim
    if config.model.moe is not None:
        kept["model"]["moe"] |= {"expert_parallel": plan.expert}
    return kept | {"sync": sync}


def predict_step(
    config: TrainConfig, planned: PlannedJob, best: PlanPrediction, cluster: Cluster
) -> PredictionConfig:
    """Return what the planner expects of a step of the trainer, part by part."""
    plan, device = best.plan, as_sent(cluster, config).device
    width = CODEC_BYTES[config.sync.codec or "fp32"]
    slowed = evaluate_plan(planned.job.model, device, cluster.fabric, plan=plan).time
    # Ranks do not wait for what runs beside them: what it costs is compute that takes longer.
    free = dataclasses.replace(device, overlap_slowdown=0.0)
    time = evaluate_plan(planned.job.model, free, cluster.fabric, plan=plan).time
    slower_s = slowed.total_s - time.total_s
    alone = dataclasses.replace(plan, tau=1, data_overlap=False)
    if plan.zero == 3:  # one worker's share, between workers
        alone = dataclasses.replace(plan, tau=1)
    sends = device
    if plan.tau > 1:
        sends = dataclasses.replace(device, gradient_wire_bytes=device.outer_wire_bytes)
    whole = evaluate_plan(planned.job.model, sends, cluster.fabric, plan=alone).time
    exposed_s = time.data_s + time.tensor_s + time.context_s + time.expert_s + time.pipeline_p2p_s
    if config.sync.method == "ddp":
        # The last bucket is full when the backward pass is over: nothing is left to hide it.
        total = max(width * planned.job.model.num_parameters, 1.0)
        last = (total - _FIRST_BUCKET) % _BUCKET if total > _FIRST_BUCKET else total
        exposed_s += max(whole.data_s * last / total - time.data_s, 0.0)
    rule = config.sync.rule_class
    if rule is not None and rule.sends_gradients:  # behind the whole of the next step
        rest_s = time.total_s - time.data_s
        exposed_s += max(whole.data_s - rest_s, 0.0) - time.data_s
        slower_s = device.overlap_slowdown * min(whole.data_s, rest_s)
    outer_s = 0.0
    if plan.tau > 1:
        states = 4.0 * planned.job.model.num_parameters / (plan.shards if plan.zero == 3 else 1)
        outer_s = memory_time_s(device, _OUTER_PASSES * states) / plan.tau
    compute_s = time.compute_s + time.recompute_s + time.optimizer_s + time.offload_s
    outermost = cluster.fabric.tiers[-1]
    return PredictionConfig(
        cluster=cluster.name,
        ranks=plan.num_gpus,
        settings=settings_fingerprint(config, ranks=plan.num_gpus),
        compute_s=compute_s + outer_s + slower_s,
        exposed_communication_s=exposed_s,
        bubble_s=time.pipeline_bubble_s,
        other_s=time.overhead_s,
        all_reduce_s=whole.data_s,
        memory_bytes=best.memory.total_bytes,
        constants={
            "device.gemm_efficiency": device.gemm_efficiency,
            "device.peak_flops": device.peak_flops,
            "device.step_overhead_s": device.step_overhead_s,
            "device.reserved_bytes": device.reserved_bytes,
            f"tier.{outermost.name}.bandwidth_bytes_per_s": outermost.bandwidth_bytes_per_s,
            f"tier.{outermost.name}.efficiency": outermost.efficiency,
        },
    )
