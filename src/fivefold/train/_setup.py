"""What a run is set up from: checks before ranks start, the data that all share, the optimizer."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import torch

from fivefold.errors import ConfigurationError, DataError, UnsupportedError
from fivefold.runs import FolderLock
from fivefold.runs.checkpoints import require_resumable
from fivefold.runs.ranks import Ranks
from fivefold.train._config import DataConfig, SyncConfig, TasksConfig, TrainConfig
from fivefold.train._corpus import Corpus, load_corpus, resolve_source
from fivefold.train._ddp import DataParallelMethod, ScheduledDataParallelMethod
from fivefold.train._expert_ranks import ExpertRanks, require_shares
from fivefold.train._methods import Method, NoMethod, require_peers
from fivefold.train._outer import OuterMethod, make_rule
from fivefold.train._tokenizer import Tokenizer, load_tokenizer


def require_settings(config: TrainConfig, *, world_size: int) -> None:
    """Check what is the same on every host: the method, its rule, the number of ranks."""
    require_peers(config.sync, world_size=world_size)
    require_shares(config.model, world_size=world_size)
    if config.sync.method not in {"none", "ddp"}:
        make_rule(config.sync)


def require_host(config: TrainConfig, *, nproc: int) -> None:
    """Check what this host must have for the ranks that are about to start on it."""
    resolve_source(config.data.path)
    load_tokenizer(config.data.tokenizer)
    if config.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        message = "run.tensorboard is true, but tensorboard is not installed"
        raise UnsupportedError(message, hint="pip install 'fivefold[tensorboard]'")
    found = torch.cuda.device_count()
    if nproc > found and (config.run.device == "cuda" or (config.run.device == "auto" and found)):
        message = f"{nproc} ranks need as many CUDA devices; this host has {found}"
        raise ConfigurationError(message, hint='use a smaller --nproc, or run.device = "cpu"')
    require_resumable(config.run.output, config.run.resume)
    with FolderLock(config.run.output, "run.output"):
        pass  # rank 0 will hold it


def load_equal_data(config: DataConfig, ranks: Ranks) -> tuple[Tokenizer, Corpus]:
    """Load the text, and refuse to train where it differs between hosts; a collective call."""
    loaded: list[tuple[Tokenizer, Corpus]] = []

    def load() -> str:
        tokenizer = load_tokenizer(config.tokenizer)
        loaded.append((tokenizer, load_corpus(config, tokenizer)))
        return loaded[0][1].fingerprint

    found = ranks.together(load, what="the data's fingerprint")
    odd = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if odd:
        message = f"rank {odd[0]} reads other data than rank 0"
        hint = "give all hosts the same folder of text and the same tokenizer"
        raise DataError(message, hint=hint)
    return loaded[0]


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Make AdamW; weight decay acts on matrices only: a norm's scale has no reason to shrink."""
    optim = config.optim
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas)


def describe_run(config: TrainConfig, *, data_fingerprint: str) -> dict[str, Any]:
    """Describe what decides the parameters and must be equal for a run to be resumed.

    Paths, intervals, devices and timeouts may change; whatever decides the parameters may not.
    """
    sections = config.model_dump(mode="json", include={"model", "optim", "sync"})
    del sections["optim"]["validation_batches"]
    moe = sections["model"]["moe"]
    if moe is not None and moe["group_score"] == "max":
        del moe["group_score"]  # as in checkpoints from before there was a choice
    sections["run"] = {"seed": config.run.seed, "steps": config.run.steps}
    sections["data"] = {
        "tokenizer": config.data.tokenizer,
        "sequence_length": config.data.sequence_length,
        "fingerprint": data_fingerprint,
    }
    # As it will be read back: tuples become lists.
    normal: dict[str, Any] = json.loads(json.dumps(sections))
    return normal


def make_method(
    config: SyncConfig,
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    experts: ExpertRanks | None = None,
    tasks: TasksConfig | None = None,
) -> Method:
    """Set up the configured method; a collective call for all but "none"."""
    if config.method == "none":
        return NoMethod(model)
    require_peers(config, world_size=ranks.world_size)
    if config.method == "ddp" and tasks is not None:
        return ScheduledDataParallelMethod(model, ranks=ranks, tasks=tasks, optimizer=optimizer)
    if config.method == "ddp":
        return DataParallelMethod(model, ranks=ranks, codec=config.codec or "fp32", experts=experts)
    return OuterMethod(config, model, optimizer=optimizer, ranks=ranks)
