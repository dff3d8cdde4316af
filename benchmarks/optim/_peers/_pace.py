"""Makes the computation of a step last a stated time, in the same way for every method.

Several ranks share few cores, so the real time of a step would measure the cores. Each rank does
its real forward pass, backward pass and update, and sleeps what is left of the time that the
phase may take: simulated compute. The time inside the backward pass is spread over the model's
blocks, and is slept before a block's gradients are ready: gradients become ready one block after
the other, as on a device that computes for that long, and DDP's buckets can travel meanwhile.

What a method does in hooks of the backward pass (DDP's copies, PowerSGD's products) disappears in
the padding as far as it fits, in its favour; waiting for the network at the end of the backward
pass and whatever a method does after the update is never padded away. A step whose real work is
longer than the stated time is an overrun; overruns are counted and reported.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.optim._peers._case import Loss

__all__ = ["Pacer"]

_FORWARD_SHARE = 0.3
_BACKWARD_SHARE = 0.6  # twice the forward pass, as is customary; the rest is the update


class Pacer:
    """Pads the phases of one rank's steps.

    Args:
        step_s: What the computation of a step lasts, in seconds; 0 pads nothing.
        model: Has ``blocks`` in the order of the forward pass.
        optimizer: Its step ends the padded time.
    """

    def __init__(self, step_s: float, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.step_s = step_s
        self.overruns = 0
        self.overrun_s = 0.0
        self._start_s = self._ready_s = self._update_until_s = 0.0
        if step_s > 0:
            self._hook(model, optimizer)

    def forward(self, loss: Loss) -> Loss:
        """Wrap the loss: its call is the padded forward pass."""

        def padded(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self._start_s = time.perf_counter()
            value = loss(inputs, targets)
            _sleep_until(self._start_s + _FORWARD_SHARE * self.step_s)
            return value

        return padded

    def backward_done(self) -> None:
        """Say that ``backward()`` returned; a wait for the network before that stays a wait."""
        left_s = self.step_s - (self._ready_s - self._start_s)
        self._update_until_s = time.perf_counter() + left_s

    def _hook(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        # The last block's real work and the embedding's come after the last sleep.
        parts = len(model.blocks) + 0.5
        for index, block in enumerate(reversed(model.blocks)):
            share = _FORWARD_SHARE + _BACKWARD_SHARE * (index + 1) / parts

            def sleep(*_: object, share: float = share) -> None:
                _sleep_until(self._start_s + share * self.step_s)

            block.register_full_backward_pre_hook(sleep)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)
        optimizer.register_step_post_hook(self._update_done)

    def _gradient_ready(self, _parameter: torch.Tensor) -> None:
        self._ready_s = time.perf_counter()

    def _update_done(self, *_: object) -> None:
        late_s = time.perf_counter() - self._update_until_s
        if late_s > 0:
            self.overruns += 1
            self.overrun_s += late_s
        else:
            time.sleep(-late_s)


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
