"""One optimizer step: data, forward, backward, clipping, update, synchronisation, each timed.

What a step does depends on its number and on the parameters alone. This module knows nothing of
files, intervals or checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from fivefold.errors import ConfigurationError
from fivefold.runs.ranks import Ranks
from fivefold.train._corpus import Corpus
from fivefold.train._methods import LanguageModel, Method
from fivefold.train._mixture import Mixtures
from fivefold.train._spans import Span, subtract
from fivefold.train.config import TrainConfig
from fivefold.train.sampler import ShardedSampler, gather_batch, sequential_starts

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedParts:
    """Objects that a step changes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    method: Method
    mixtures: Mixtures | None = None


class StepRunner:
    """Runs optimizer steps by their number."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks, *, parts: TrainedParts, tokens: np.ndarray
    ) -> None:
        self._config, self._ranks, self._parts, self._tokens = config, ranks, parts, tokens
        self.precision = choose_precision(config.optim.precision, ranks.device)
        self._sampler = ShardedSampler(
            len(tokens),
            sequence_length=config.data.sequence_length,
            batch_size=config.optim.batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=config.run.seed,
        )
        self.loss = torch.zeros(())
        self.grad_norm = torch.zeros(())
        self.lr = 0.0

    def run(self, step: int) -> list[Span]:
        """Do one step."""
        name = f"step {step + 1}"
        begin_s = time.perf_counter()
        count = self._config.optim.accumulation
        batches = [self._batch(step * count + number) for number in range(count)]
        start_s = time.perf_counter()
        self._update(batches, step)
        self._parts.method.after_step()
        if self._parts.mixtures is not None:
            self._parts.mixtures.end_step(self._summed_loads)
        end_s = time.perf_counter()
        spans = self._parts.method.take_spans()
        busy = subtract(start_s, end_s, holes=[span for span in spans if span.lane != "in_flight"])
        data = Span(lane="data", name=name, start_s=begin_s, end_s=start_s)
        compute = [Span(lane="compute", name=name, start_s=a, end_s=b) for a, b in busy]
        return [data, *compute, *spans]

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = self._sampler.batch_starts(number)
        inputs, targets = gather_batch(self._tokens, starts, self._config.data.sequence_length)
        return _to_device(inputs, self._ranks.device), _to_device(targets, self._ranks.device)

    def _update(self, batches: list[tuple[torch.Tensor, torch.Tensor]], step: int) -> None:
        optim, optimizer = self._config.optim, self._parts.optimizer
        self.loss = self._forward_backward(batches)
        self.grad_norm = self._parts.method.clip_gradients(optim.grad_clip)
        self.lr = cosine_with_warmup(
            step,
            lr=optim.lr,
            warmup_steps=optim.warmup_steps,
            steps=self._config.run.steps,
            min_lr_fraction=optim.min_lr_fraction,
        )
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        self._parts.method.update(optimizer)
        if self._ranks.device.type == "cuda":
            # So that what follows is a wait for the network, not for this step's kernels. The
            # device as a whole would be waited for with the all-reduce that runs behind the steps.
            torch.cuda.current_stream(self._ranks.device).synchronize()

    def _summed_loads(self, loads: Sequence[float]) -> list[float]:
        if self._config.sync.method == "none":  # every rank trains alone
            return list(loads)
        return self._ranks.sum(list(loads), what="the experts' loads")

    def _forward_backward(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        total = torch.zeros((), device=self._ranks.device)
        for inputs, targets in batches[:-1]:
            with self._parts.method.accumulating():
                total += self._micro_step(inputs, targets, share=1 / len(batches))
        total += self._micro_step(*batches[-1], share=1 / len(batches))
        return total

    def _micro_step(
        self, inputs: torch.Tensor, targets: torch.Tensor, *, share: float
    ) -> torch.Tensor:
        with autocast_context(self.precision, self._ranks.device):
            loss = self._parts.method.loss(inputs, targets) * share
        self._parts.method.backward(loss)
        return loss.detach()


def _to_device(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return tokens on the device; from pinned memory, so that the host does not wait for them."""
    if device.type == "cuda":
        return tokens.pin_memory().to(device, non_blocking=True)
    return tokens.to(device)


def cosine_with_warmup(
    step: int, *, lr: float, warmup_steps: int, steps: int, min_lr_fraction: float
) -> float:
    """Return the learning rate of one optimizer step.

    With W warmup steps of S, f the last fraction, and t the step counted from 0:
    ``lr * (t + 1) / W`` for t < W, and after that
    ``lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)`` with ``p = (t - W) / (S - 1 - W)``, so that
    the first step moves, the step after warmup has the full rate and the last step has
    ``f * lr``. Steps past the last keep ``f * lr``.
    """
    if step < 0:
        raise ConfigurationError(f"step must not be negative; got {step}", hint="count from 0")
    if not 0 <= warmup_steps <= steps:
        raise ConfigurationError(
            f"warmup_steps must be between 0 and steps; got {warmup_steps} of {steps}",
            hint="lower optim.warmup_steps or raise run.steps",
        )
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    # A cosine over a single step has no slope; the maximum avoids 0 / 0 there.
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return lr * (min_lr_fraction + (1 - min_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def choose_precision(wished: str, device: torch.device) -> str:
    """Settle "auto": "bf16" only where matrix units for it exist.

    Emulated bfloat16 is slower than float32 (five times on a CPU without AVX512-BF16 or AMX).
    """
    native = _has_native_bf16(device)
    if wished == "auto":
        return "bf16" if native else "fp32"
    if wished == "bf16" and not native:
        _LOG.warning('this %s emulates bfloat16; precision = "fp32" is faster', device.type)
    return wished


def autocast_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of forward passes; parameters and optimizer stay in float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _has_native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


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
    if getattr(model, "sharded_parameters", []) or isinstance(model, FSDPModule):
        # Ranks that share experts or parameters need one another in every forward, also who has
        # no more text.
        most = -(-_most_windows(corpus, config) // (ranks.world_size * config.optim.batch_size))
        batches += [np.empty(0, dtype=np.int64)] * (most - len(batches))
    loss_of = cast("LanguageModel", model).loss
    # In float64 as sums of floats are, and on the device: the host waits for it once.
    nats, tokens = torch.zeros((), dtype=torch.float64, device=ranks.device), 0
    model.eval()
    with autocast:
        for starts in batches:
            inputs, targets = gather_batch(corpus.validation, starts, length)
            loss = loss_of(_to_device(inputs, ranks.device), _to_device(targets, ranks.device))
            if targets.numel():
                nats += loss.double() * targets.numel()
            tokens += targets.numel()
    model.train()
    total_nats, total_tokens = ranks.sum([float(nats), float(tokens)], what="the validation loss")
    loss_mean = total_nats / total_tokens
    size = {"num_tokens": len(corpus.validation), "num_bytes": corpus.validation_bytes}
    return Validation(loss=loss_mean, bits_per_byte=bits_per_byte(loss_mean, **size))
