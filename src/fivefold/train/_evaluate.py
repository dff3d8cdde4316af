"""Validation in bits per byte over fixed batches that the ranks share out.

Bits per byte do not depend on the tokenizer: nats per token, divided by ln 2, times tokens per
byte of the validation text. This module knows nothing of methods or files.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from fivefold.runs.ranks import Ranks
from fivefold.train._config import TrainConfig
from fivefold.train._corpus import Corpus
from fivefold.train._methods import LanguageModel
from fivefold.train._sampler import gather_batch, sequential_starts


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Result of one validation."""

    loss: float
    bits_per_byte: float


def bits_per_byte(loss: float, *, num_tokens: int, num_bytes: int) -> float:
    """Convert nats per token."""
    return loss / math.log(2) * num_tokens / num_bytes


def _most_windows(corpus: Corpus, config: TrainConfig) -> int:
    available = (len(corpus.validation) - 1) // config.data.sequence_length
    return min(available, config.optim.validation_batches * config.optim.batch_size)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    corpus: Corpus,
    *,
    config: TrainConfig,
    ranks: Ranks,
    autocast: AbstractContextManager[object],
) -> Validation:
    """Judge the parameters as they are; a collective call.

    Args:
        model: The bare module.
        corpus: Its validation split is read.
        config: Batch size, number of batches and sequence length.
        ranks: The ranks; each reads its own part of the same fixed batches.
        autocast: Precision context of the forward passes.

    Returns:
        Loss and bits per byte, equal on all ranks.

    Raises:
        CommunicationError: A peer died or did not answer in time.
        DataError: The validation split is shorter than one sequence.
    """
    length = config.data.sequence_length
    batches = sequential_starts(
        len(corpus.validation),
        sequence_length=length,
        batch_size=config.optim.batch_size,
        num_batches=config.optim.validation_batches,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    if getattr(model, "sharded_parameters", []):
        # Ranks that share experts need one another in every forward, also who has no more text.
        most = -(-_most_windows(corpus, config) // (ranks.world_size * config.optim.batch_size))
        batches += [np.empty(0, dtype=np.int64)] * (most - len(batches))
    loss_of = cast("LanguageModel", model).loss
    nats, tokens = 0.0, 0
    model.eval()
    with autocast:
        for starts in batches:
            inputs, targets = gather_batch(corpus.validation, starts, length)
            loss = loss_of(inputs.to(ranks.device), targets.to(ranks.device))
            nats += float(loss) * targets.numel() if targets.numel() else 0.0
            tokens += targets.numel()
    model.train()
    total_nats, total_tokens = ranks.sum([nats, float(tokens)], what="the validation loss")
    loss_mean = total_nats / total_tokens
    size = {"num_tokens": len(corpus.validation), "num_bytes": corpus.validation_bytes}
    return Validation(loss=loss_mean, bits_per_byte=bits_per_byte(loss_mean, **size))
