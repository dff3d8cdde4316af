"""What ``fivefold plan`` plans for: a job file, a configuration of the trainer, a config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.cli._arguments import ArgumentError
from fivefold.cli._later import later
from fivefold.files import read_toml

with later():
    from fivefold.strategy import Cluster, Job, ModelSpec, SearchSpace
    from fivefold.strategy.job import job_from_table
    from fivefold.strategy.parts import MixtureOfExperts
    from fivefold.train.config import SyncConfig, TrainConfig, load_config

_TRAINER_TABLES = {"run", "data", "optim", "sync", "tasks", "prediction"}
_BYTES_VOCAB = 257  # of the trainer's tokenizer of bytes
_TAUS = (2, 4, 8, 16, 32, 64)
_WAITING = ("local_sgd", "slowmo", "diloco")
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


@dataclass(frozen=True, kw_only=True)
class JobSizes:
    """Sizes from the command line, for files that do not have them; None where not given."""

    gpus: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None


def as_sent(cluster: Cluster, config: TrainConfig | None) -> Cluster:
    """Return the cluster with what fivefold's trainer sends, and what it keeps to send it."""
    codec = "fp32" if config is None else config.sync.codec or "fp32"
    method = "co2" if config is None else config.sync.method
    # A plan without local updates is DDP, which sends 32 bits if nothing else is asked of it.
    plain = codec if method in {"ddp", "delayed_gradients"} else "fp32"
    changes: dict[str, Any] = {
        "gradient_wire_bytes": CODEC_BYTES[plain], "outer_wire_bytes": CODEC_BYTES[codec],
    }  # fmt: skip
    if config is not None and method not in {"none", "ddp"}:
        averaged = len(config.sync.average_states or {})  # anchor, payload and what was sent
        residual = 0.0 if codec == "fp32" else 4.0 * (1 + averaged)
        changes |= {
            "outer_state_bytes": 4.0 * (_buffers(config.sync) + 3 * averaged) + residual,
            "outer_owned_bytes": residual,
            "outer_window": _window(config.sync),
        }
        if method == "delayed_gradients":  # at every step: no plan has tau > 1
            states = cluster.device.optimizer_state_bytes + 4.0 * _buffers(config.sync)
            changes["optimizer_state_bytes"] = states + 1.5 * residual  # of two ranks or more
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **changes))


def _window(sync: SyncConfig) -> float:
    """Share of a round behind which its outer updates travel; 0 where all ranks wait for them."""
    if sync.method in _WAITING or (sync.method == "outer_optimizer" and not sync.hidden):
        return 0.0
    if sync.delay_steps is None or not isinstance(sync.tau, int):
        return 1.0
    return min(1.0, sync.delay_steps * (sync.fragments or 1) / sync.tau)


def _buffers(sync: SyncConfig) -> float:
    """Numbers per parameter that a rule keeps: anchor and payload, and what its merge needs."""
    merges = {"delay_corrected": 1, "eager_diloco": 2, "outer_optimizer": 1}
    count = 2.0 + merges.get(sync.method, 0)
    momentum = bool(sync.outer_momentum or sync.extrapolation or sync.staleness == "gap-param")
    count += momentum * (2 if sync.method == "eager_diloco" else 1)
    if sync.optimizer is not None:
        count += _numbers_of_optimizer(sync.optimizer, sync.options or {})
    return count


def _numbers_of_optimizer(name: str, options: Mapping[str, Any]) -> float:
    """State of one of torch's optimizers per parameter, found by one step of it."""
    import torch  # noqa: PLC0415 - only this method needs it

    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros(64, 64)
    try:
        optimizer = getattr(torch.optim, name)([parameter], **options)
        optimizer.step()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = f"sync.optimizer {name!r} with options {dict(options)!r}: {error}"
        raise ArgumentError(message, hint="a class of torch.optim and its arguments") from error
    states = optimizer.state[parameter].values()
    return sum(s.numel() for s in states if torch.is_tensor(s)) // 4096


def read_job(path: Path, cluster: Cluster, sizes: JobSizes) -> PlannedJob:
    """Return what is to be planned.

    Args:
        path: A job file, a configuration of ``fivefold train``, a Hugging Face ``config.json`` or
            the folder of one.
        cluster: Where it will run; gives the number of GPUs where nothing else does.
        sizes: Of the command line; they go before those of a file.

    Raises:
        ConfigurationError: A key is missing, unknown or not allowed.
        DataError: A config.json cannot be read.
        InfeasibleError: The cluster has fewer GPUs than are wanted.
    """
    given = {key: value for key, value in dataclasses.asdict(sizes).items() if value is not None}
    if path.is_dir() and not (path / "config.json").exists():
        message = f"'{path}' is a directory, and has no config.json of a model"
        raise ArgumentError(message, hint="give a job file; fivefold plan --help says what it has")
    if path.is_dir() or path.suffix == ".json":
        table = {"model": str(path.resolve()), **given}
        if sizes.global_batch is None:
            message = f"{path} is a model, and how it is trained is not said"
            hint = "add --global-batch 512, the samples of an optimizer step over all GPUs"
            raise ArgumentError(message, hint=hint)
        return PlannedJob(
            job=job_from_table(table, where=str(path), folder=Path(), cluster=cluster)
        )
    tables = read_toml(path)
    model = tables.get("model")
    if _TRAINER_TABLES & set(tables) or (isinstance(model, dict) and "layers" in model):
        return _of_trainer(path, cluster, sizes)
    table = tables | given
    return PlannedJob(
        job=job_from_table(table, where=str(path), folder=path.parent, cluster=cluster)
    )


def _of_trainer(path: Path, cluster: Cluster, sizes: JobSizes) -> PlannedJob:
    config = load_config(path)
    gpus = sizes.gpus or cluster.num_gpus
    if gpus is None:
        message = f"how many ranks {path} will have is not said"
        raise ArgumentError(message, hint="add --gpus 16, or gpus = 16 to the cluster file")
    cluster.require(gpus)
    if sizes.seq_len is not None:
        message = f"--seq-len beside {path}, whose data.sequence_length says it"
        raise ArgumentError(message, hint="change it there")
    optim = config.optim
    batch = sizes.global_batch or optim.batch_size * optim.accumulation * gpus
    space = SearchSpace(
        num_gpus=gpus,
        global_batch=batch,
        micro_batch=(optim.batch_size,),
        tau=_taus(config),
        dtypes=(precision_of(config, cluster),),
        optimizers=(optim.optimizer,),
        data_overlap=(True,),
    )
    return PlannedJob(job=Job(model=model_of(config), space=space), config=config)


def _taus(config: TrainConfig) -> tuple[int, ...]:
    """Local steps to look at: what changes convergence is only searched where it is wanted."""
    tau = config.sync.tau
    if config.sync.method in {"none", "ddp", "delayed_gradients"}:
        return (1,)
    return (1, *_TAUS) if tau == "auto" else tuple(sorted({1, int(tau or 1)}))


def precision_of(config: TrainConfig, cluster: Cluster) -> str:
    """Return the type of matrix products that the trainer will choose on the cluster's device."""
    if config.optim.precision != "auto":
        return config.optim.precision
    return "bf16" if cluster.device.peak_flops >= _LEAST_16_BIT_FLOPS else "fp32"


def model_of(config: TrainConfig, *, vocab: int | None = None) -> ModelSpec:
    """Return the trainer's model in the planner's words.

    Args:
        config: The trainer's configuration.
        vocab: Tokens of the vocabulary; None to find it by the tokenizer.

    Raises:
        DataError: The tokenizer's file cannot be read.
    """
    model = config.model
    if vocab is None and config.data.tokenizer == "bytes":
        vocab = _BYTES_VOCAB
    if vocab is None:
        from fivefold.train import load_tokenizer  # noqa: PLC0415 - loads torch

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
