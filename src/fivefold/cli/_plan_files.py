"""What ``fivefold plan`` writes: the plan in the words of other programs, as files that run."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._later import later
from fivefold.cli._plan_job import CODEC_BYTES, PlannedJob, as_sent
from fivefold.errors import DataError, UnsupportedError

with later():
    from fivefold.runs import check_tables, format_toml, write_text
    from fivefold.strategy import (
        Cluster,
        PlanPrediction,
        device_mesh,
        evaluate_plan,
        megatron_flags,
        megatron_script,
        plan_to_toml,
        torchtitan_config,
        trainer_config,
    )
    from fivefold.strategy.cluster import memory_time_s
    from fivefold.train.config import PredictionConfig, TrainConfig, settings_fingerprint

_MOST_FRAGMENTS = 8  # more are more messages, each with its latency
_OUTER_PASSES = 8  # over parameters, anchors and momenta in an outer update, 4 bytes each
_FIRST_BUCKET, _BUCKET = 2.0**20, 25 * 2.0**20  # of DistributedDataParallel


def write_plan_files(
    folder: Path, planned: PlannedJob, best: PlanPrediction, cluster: Cluster, *, base: str | None
) -> None:
    """Write each form that the plan has, and say why where it has none.

    Args:
        folder: Where to write; made where it is not there.
        planned: The job.
        best: Its plan and what it costs.
        cluster: Where it runs.
        base: torchtitan's configuration of the model; None to find it.

    Raises:
        DataError: The folder cannot be made.
    """
    make_folder(folder)
    job, plan = planned.job, best.plan
    forms: dict[str, Callable[[], str]] = {
        "plan.toml": lambda: plan_to_toml(plan),
        "mesh.json": lambda: json.dumps(device_mesh(plan)) + "\n",
        "megatron_flags.txt": lambda: " ".join(megatron_flags(job.model, plan)) + "\n",
        "torchtitan_planned.py": lambda: torchtitan_config(job.model, plan, base=base),
        "fivefold_train.toml": lambda: runnable("train", planned, best, cluster, base=base),
    }
    for name, make in forms.items():
        try:
            write_text(folder / name, make())
        except UnsupportedError as error:
            typer.echo(f"not written: {name}: {error.message}", err=True)
        else:
            typer.echo(f"written: {folder / name}", err=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        DataError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be made: {error.strerror}",
            hint="name another one, or check the permissions",
        ) from error


def runnable(
    target: str, planned: PlannedJob, best: PlanPrediction, cluster: Cluster, *, base: str | None
) -> str:
    """Return the file with which a program runs a plan.

    Args:
        target: ``"train"``, ``"torchtitan"`` or ``"megatron"``.
        planned: The job.
        best: Its plan and what it costs.
        cluster: Where it runs.
        base: torchtitan's configuration of the model; None to find it.

    Raises:
        UnsupportedError: The program cannot run the plan or the model.
    """
    model, plan = planned.job.model, best.plan
    per_node = cluster.fabric.gpus_per_node
    if target == "torchtitan":
        return torchtitan_config(model, plan, base=base)
    if target == "megatron":
        return megatron_script(model, plan, gpus_per_node=per_node)
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
        if config.sync.tau == "auto":
            parts = config.sync.fragments
            if config.sync.method == "delay_corrected" and parts is None:
                # A part at a time hides as well as all of it per round, and is less late.
                parts = _MOST_FRAGMENTS
            if parts is not None:
                sync["fragments"] = min(plan.tau, parts)
    elif config.sync.method in {"ddp", "none"}:
        sync = {**given.get("sync", {}), "method": "ddp" if plan.data > 1 else "none"}
    elif config.sync.method == "delayed_gradients" and plan.data > 1:
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
    """Return what the planner expects of a step of the trainer, part by part.

    Args:
        config: The trainer's configuration.
        planned: The job that was planned.
        best: The plan and what it costs.
        cluster: Where it runs.
    """
    plan, device = best.plan, as_sent(cluster, config).device
    width = CODEC_BYTES[config.sync.codec or "fp32"]
    time = evaluate_plan(planned.job.model, device, cluster.fabric, plan=plan).time
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
    if config.sync.method == "delayed_gradients":  # behind the whole of the next step
        rest_s = time.total_s - time.data_s
        exposed_s += max(whole.data_s - rest_s, 0.0) - time.data_s
    outer_s = 0.0
    if plan.tau > 1:
        states = 4.0 * planned.job.model.num_parameters / (plan.shards if plan.zero == 3 else 1)
        outer_s = memory_time_s(device, _OUTER_PASSES * states) / plan.tau
    outermost = cluster.fabric.tiers[-1]
    return PredictionConfig(
        cluster=cluster.name,
        ranks=plan.num_gpus,
        settings=settings_fingerprint(config, ranks=plan.num_gpus),
        compute_s=time.compute_s + time.recompute_s + time.optimizer_s + time.offload_s + outer_s,
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
