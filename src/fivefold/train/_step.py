"""One optimizer step: data, forward, backward, clipping, update, synchronisation, each timed.

What a step does depends on its number and on the parameters alone. This module knows nothing of
files, intervals or checkpoints.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fivefold.train._learning_rate import cosine_with_warmup
from fivefold.train._precision import autocast_context, choose_precision
from fivefold.train._sampler import ShardedSampler, gather_batch
from fivefold.train._spans import Span, subtract

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from fivefold.runs.ranks import Ranks
    from fivefold.train._config import TrainConfig
    from fivefold.train._methods import Method
    from fivefold.train._mixture import Mixtures


@dataclass(frozen=True, kw_only=True)
class TrainedParts:
    """What a step changes.

    Args:
        model: The bare module.
        optimizer: The inner optimizer.
        method: How the ranks are kept together.
        mixtures: The model's mixtures of experts; None in a dense model.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    method: Method
    mixtures: Mixtures | None = None


class StepRunner:
    """Runs optimizer steps by their number.

    Args:
        config: The whole configuration.
        ranks: The ranks.
        parts: Model, optimizer and method.
        tokens: The training split.

    Raises:
        DataError: There are too few tokens for one step of all ranks.
    """

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
        """Do one step.

        Args:
            step: Steps done before.

        Returns:
            Where its time went.

        Raises:
            CommunicationError: A peer died or did not answer in time.
            ReplicaMismatchError: Replicas that must be equal are not.
        """
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
        busy = subtract(start_s, end_s, holes=[span for span in spans if span.lane != "flight"])
        data = Span(lane="data", name=name, start_s=begin_s, end_s=start_s)
        compute = [Span(lane="compute", name=name, start_s=a, end_s=b) for a, b in busy]
        return [data, *compute, *spans]

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = self._sampler.batch_starts(number)
        inputs, targets = gather_batch(self._tokens, starts, self._config.data.sequence_length)
        return inputs.to(self._ranks.device), targets.to(self._ranks.device)

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
