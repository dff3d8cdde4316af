"""What is checked before ranks start, or before they meet: what needs neither peers nor data."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.runs import FolderLock
from fivefold.train._expert_ranks import require_shares
from fivefold.train._files import resolve_source
from fivefold.train._methods import require_peers
from fivefold.train._outer import make_rule
from fivefold.train._resume import RunFolder, require_resumable
from fivefold.train._tokenizer import load_tokenizer

if TYPE_CHECKING:
    from fivefold.train._config import TrainConfig


def require_settings(config: TrainConfig, *, world_size: int) -> None:
    """Check what is the same on every host: the method, its rule, the number of ranks.

    Raises:
        ConfigurationError: A value or a combination is not allowed.
    """
    require_peers(config.sync, world_size=world_size)
    require_shares(config.model, world_size=world_size)
    if config.sync.method not in {"none", "ddp"}:
        make_rule(config.sync)


def require_host(config: TrainConfig, *, nproc: int) -> None:
    """Check what this host must have for the ranks that are about to start on it.

    Raises:
        ConfigurationError: A file is missing, another run writes into the run's folder, or there
            are too few GPUs.
        CheckpointError: There is no checkpoint to resume from, or the folder cannot be written.
        DataError: The folder of text does not exist.
        UnsupportedError: An optional package is needed and not installed.
    """
    resolve_source(config.data.path)
    load_tokenizer(config.data.tokenizer)
    if config.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        message = "run.tensorboard is true, but tensorboard is not installed"
        raise UnsupportedError(message, hint="pip install 'fivefold[tensorboard]'")
    found = torch.cuda.device_count()
    if nproc > found and (config.run.device == "cuda" or (config.run.device == "auto" and found)):
        message = f"{nproc} ranks need as many CUDA devices; this host has {found}"
        raise ConfigurationError(message, hint='use a smaller --nproc, or run.device = "cpu"')
    require_resumable(RunFolder(root=config.run.output), config.run.resume)
    with FolderLock(config.run.output, "run.output"):
        pass  # rank 0 will hold it
