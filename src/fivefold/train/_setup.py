"""Parts that a run is set up from: data that all ranks share, the optimizer, random states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fivefold.errors import DataError

if TYPE_CHECKING:
    from fivefold.train._config import TrainConfig
    from fivefold.train._corpus import Corpus
    from fivefold.train._world import World

__all__ = ["make_optimizer", "require_equal_data", "restore_rng", "rng_state"]


def require_equal_data(world: World, corpus: Corpus) -> None:
    """Refuse to train on data that differs between hosts; a collective call.

    Raises:
        DataError: A rank reads other data than rank 0.
        CommunicationError: A peer died or did not answer in time.
    """
    fingerprints = world.gather(corpus.fingerprint, what="the data's fingerprint")
    odd = [rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]]
    if odd:
        message = f"rank {odd[0]} reads other data than rank 0"
        hint = "give all hosts the same folder of text and the same tokenizer"
        raise DataError(message, hint=hint)


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
