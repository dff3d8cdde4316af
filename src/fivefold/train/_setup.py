"""Parts that a run is set up from: its folder, the data that all ranks share, the optimizer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from fivefold.errors import DataError, FivefoldError
from fivefold.runs import FolderLock
from fivefold.train._corpus import load_corpus
from fivefold.train._outcome import error_from_record, error_to_record
from fivefold.train._tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fivefold.train._config import DataConfig, TrainConfig
    from fivefold.train._corpus import Corpus
    from fivefold.train._tokenizer import Tokenizer
    from fivefold.train._world import World


@contextlib.contextmanager
def hold_folder(root: Path, world: World) -> Iterator[None]:
    """Keep other runs out of the run's folder; a collective call. Rank 0 holds the lock.

    Raises:
        ConfigurationError: Another run writes there; raised on every rank.
        CheckpointError: The folder cannot be written; raised on every rank.
        CommunicationError: A peer died or did not answer in time.
    """
    with contextlib.ExitStack() as held:
        failed = None
        if world.is_main:
            try:
                held.enter_context(FolderLock(root, "run.output"))
            except FivefoldError as error:
                failed = error_to_record(error)
        failed = world.broadcast(failed, what="whether the run's folder is free")
        if failed is not None:
            raise error_from_record(failed)
        yield


def load_equal_data(config: DataConfig, world: World) -> tuple[Tokenizer, Corpus]:
    """Load the text, and refuse to train where it differs between hosts; a collective call.

    Raises:
        ConfigurationError: A rank's tokenizer cannot be loaded; raised on every rank.
        DataError: A rank has no usable text, or other text than rank 0; raised on every rank.
        CommunicationError: A peer died or did not answer in time.
    """
    failed, fingerprint = None, None
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        corpus = load_corpus(config, tokenizer)
        fingerprint = corpus.fingerprint
    except FivefoldError as error:
        failed = error_to_record(error)
    found = world.gather((fingerprint, failed), what="the data's fingerprint")
    for _, other in found:
        if other is not None:
            raise error_from_record(other)
    odd = [rank for rank, (value, _) in enumerate(found) if value != found[0][0]]
    if odd:
        message = f"rank {odd[0]} reads other data than rank 0"
        hint = "give all hosts the same folder of text and the same tokenizer"
        raise DataError(message, hint=hint)
    return tokenizer, corpus


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; weight decay acts on matrices only, since a norm's scale has no reason to shrink."""
    optim = config.optim
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas)


def rng_state() -> dict[str, Any]:
    """State of torch's generators on this rank."""
    # Not is_available(): asking a CUDA device for its state would start CUDA in a CPU run.
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
    cuda = torch.cuda.get_rng_state() if started else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_rng(state: dict[str, Any]) -> None:
    """Continue torch's generators where a checkpoint left them."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
