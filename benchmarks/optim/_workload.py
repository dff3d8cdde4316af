"""The one training problem of all loss benchmarks in this room.

A small decoder-only transformer learns the source code of Python's standard library, byte by byte,
in float32. Everything follows from a seed: the parameters, and which windows of text each rank
reads at each step, so that every method sees the same tokens. One step of one rank costs about
20 ms of one core, the payload is 2.5 MB. This module knows nothing of methods or networks.

    from benchmarks.optim._workload import Problem, Worker  # scripts of this folder only

    worker = Worker(Problem(steps=160, lr=4e-3), rank=rank, world_size=world_size)
    for _ in range(worker.problem.steps):
        worker.step()                      # or worker.step(loss=data_parallel) for a wrapper
        sync.step()
    print(validate(worker.model))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from fivefold.optim import MuonAdamW
from fivefold.train import ShardedSampler, Transformer, load_corpus, load_tokenizer
from fivefold.train._corpus import Corpus
from fivefold.train.config import DataConfig, ModelConfig
from fivefold.train.sampler import gather_batch

__all__ = [
    "ADAMW",
    "BATCH_SIZE",
    "CLIP_NORM",
    "MODEL",
    "MUON",
    "SEQUENCE_LENGTH",
    "Batch",
    "LossModule",
    "Problem",
    "Worker",
    "batches",
    "corpus",
    "learning_rate",
    "make_model",
    "make_muon",
    "make_optimizer",
    "set_learning_rate",
    "validate",
]

MODEL = ModelConfig(layers=3, width=128, heads=4)
SEQUENCE_LENGTH = 64
BATCH_SIZE = 4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
MIN_LR_FRACTION = 0.1
VALIDATION_WINDOWS = 256
_VALIDATION_BATCH = 16

ADAMW, MUON = "AdamW", "Muon"

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained, apart from the method.

    Attributes:
        steps: Optimizer steps of each rank.
        lr: Peak of the inner learning rate.
        seed: Seed of the parameters and of the order of the text.
        warmup_steps: Steps of linear warm-up.
        batch_size: Sequences per rank and step.
        optimizer: ADAMW or MUON.
        width: Width of the model.
        layers: Layers of the model.

    Example:
        >>> Problem(steps=100).tokens_per_rank
        25600
    """

    steps: int
    lr: float = 4e-3
    seed: int = 0
    warmup_steps: int = 20
    batch_size: int = BATCH_SIZE
    optimizer: str = ADAMW
    width: int = MODEL.width
    layers: int = MODEL.layers

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that each rank learns from."""
        return self.steps * self.batch_size * SEQUENCE_LENGTH


@cache
def corpus() -> Corpus:
    """The text as tokens, one per byte; built once and kept in the user's cache folder.

    Raises:
        DataError: There is no text, or the cache cannot be written.
    """
    return load_corpus(DataConfig(sequence_length=SEQUENCE_LENGTH), load_tokenizer("bytes"))


def make_model(seed: int, model: ModelConfig = MODEL) -> Transformer:
    """A fresh model, of 0.64 million parameters unless said; equal seeds give equal parameters.

    Args:
        seed: Seed of the parameters.
        model: Its shape.
    """
    vocab_size = load_tokenizer("bytes").vocab_size
    return Transformer(model, vocab_size=vocab_size, sequence_length=SEQUENCE_LENGTH, seed=seed)


def make_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; only matrices decay, as is customary for transformers.

    Args:
        model: Its parameters are trained.
        lr: Learning rate until ``set_learning_rate`` sets another.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)


def make_muon(model: torch.nn.Module, lr: float) -> MuonAdamW:
    """Muon on the matrices of the layers, AdamW without weight decay on embeddings and scales.

    Args:
        model: Its parameters are trained.
        lr: Learning rate of both; Muon's update is scaled to the size of one of AdamW.
    """
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if p.dim() == 2 and "embedding" not in n}
    rest = [p for name, p in named.items() if name not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": list(matrices.values()), "algorithm": "muon"},
        {"params": rest, "algorithm": "adamw", "weight_decay": 0.0},
    ]
    return MuonAdamW(groups, lr, weight_decay=WEIGHT_DECAY, betas=BETAS)


def learning_rate(step: int, problem: Problem) -> float:
    """Linear warm-up, then half a cosine down to a tenth of the peak.

    Args:
        step: Steps done before, from 0.
        problem: Its peak, warm-up and length.

    Example:
        >>> problem = Problem(steps=41, lr=1.0, warmup_steps=20)
        >>> [round(learning_rate(step, problem), 3) for step in (0, 19, 20, 30, 40)]
        [0.05, 1.0, 1.0, 0.55, 0.1]
    """
    if step < problem.warmup_steps:
        return problem.lr * (step + 1) / problem.warmup_steps
    length = max(1, problem.steps - 1 - problem.warmup_steps)
    progress = min(1.0, (step - problem.warmup_steps) / length)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return problem.lr * (MIN_LR_FRACTION + (1 - MIN_LR_FRACTION) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def batches(
    rank: int, *, world_size: int, seed: int, batch_size: int = BATCH_SIZE
) -> Iterator[Batch]:
    """This rank's batches, without end: disjoint from the other ranks', equal for all methods.

    Args:
        rank: This rank.
        world_size: Number of ranks that share the text.
        seed: Seed of the order.
        batch_size: Sequences per batch.

    Yields:
        Inputs and next-byte targets, int64, [batch_size, SEQUENCE_LENGTH].
    """
    tokens = corpus().train
    sampler = ShardedSampler(
        len(tokens),
        sequence_length=SEQUENCE_LENGTH,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )
    step = 0
    while True:
        yield gather_batch(tokens, sampler.batch_starts(step), SEQUENCE_LENGTH)
        step += 1


@torch.no_grad()
def validate(model: torch.nn.Module, *, windows: int = VALIDATION_WINDOWS) -> float:
    """Bits per byte on held-out files, over the same evenly spread windows each time.

    Args:
        model: A ``Transformer``; judged with the parameters that it has now.
        windows: Number of windows of SEQUENCE_LENGTH bytes.

    Returns:
        Mean over all bytes predicted, in bits.
    """
    assert isinstance(model, Transformer), "the bare model, not a wrapper around it"
    found = corpus()
    available = (len(found.validation) - 1) // SEQUENCE_LENGTH
    places = np.arange(windows) * available // windows * SEQUENCE_LENGTH
    model.eval()
    nats = 0.0
    for first in range(0, windows, _VALIDATION_BATCH):
        starts = places[first : first + _VALIDATION_BATCH]
        inputs, targets = gather_batch(found.validation, starts, SEQUENCE_LENGTH)
        nats += float(model.loss(inputs, targets)) * len(starts)
    model.train()
    # One token is one byte but for the ends of files, which are tokens too.
    tokens_per_byte = len(found.validation) / found.validation_bytes
    return nats / windows / math.log(2) * tokens_per_byte


class LossModule(torch.nn.Module):
    """The model with its loss as ``forward``, for wrappers that hook it (DistributedDataParallel).

    Args:
        model: The bare model.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats per token."""
        return self.model.loss(inputs, targets)


class Worker:
    """One rank's model, optimizer, schedule and text, and one whole optimizer step at a time.

    Args:
        problem: What is trained.
        rank: This rank.
        world_size: Number of ranks that share the text.
        clip_norm: Bound of the gradient's norm; None for none.

    Example:
        >>> worker = Worker(Problem(steps=2), rank=0, world_size=4)
        >>> worker.step() > 0, worker.steps_done
        (True, 1)
    """

    def __init__(
        self, problem: Problem, *, rank: int, world_size: int, clip_norm: float | None = CLIP_NORM
    ) -> None:
        self.problem = problem
        self._clip_norm = clip_norm
        shape = MODEL.model_copy(update={"width": problem.width, "layers": problem.layers})
        self.model = make_model(problem.seed, shape)
        make = make_muon if problem.optimizer == MUON else make_optimizer
        self.optimizer: torch.optim.Optimizer = make(self.model, problem.lr)
        self.steps_done = 0
        self._batches = batches(
            rank, world_size=world_size, seed=problem.seed, batch_size=problem.batch_size
        )

    def step(
        self, *, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> float:
        """Read a batch, forward, backward, clip the gradient, update.

        Args:
            loss: What computes the loss of a batch; None for the bare model's.

        Returns:
            The loss of the batch before the update, in nats per token.
        """
        self.gradient(loss=loss)
        return self.update()

    def gradient(
        self, *, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """The first half of a step: batch, forward and backward; leaves the gradients."""
        inputs, targets = next(self._batches)
        set_learning_rate(self.optimizer, learning_rate(self.steps_done, self.problem))
        value = (loss or self.model.loss)(inputs, targets)
        torch.autograd.backward(value)
        self._loss = float(value.detach())

    def update(self) -> float:
        """The second half of a step: clip the gradient, update, forget the gradient."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return self._loss
