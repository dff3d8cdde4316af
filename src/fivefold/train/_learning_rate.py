"""The learning rate as a pure function of the step: linear warmup, then half a cosine.

Pure, so that a resumed run needs no scheduler state: the step number is enough. Cosine annealing:
arXiv 1608.03983 (one cycle, no restart). This module knows nothing of optimizers.
"""

from __future__ import annotations

import math

from fivefold.errors import ConfigurationError


def cosine_with_warmup(
    step: int, *, lr: float, warmup_steps: int, steps: int, min_lr_fraction: float
) -> float:
    """Learning rate of one optimizer step.

    With W warmup steps of S, f the last fraction, and t the step counted from 0:
    ``lr * (t + 1) / W`` for t < W, and after that
    ``lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)`` with ``p = (t - W) / (S - 1 - W)``, so that
    the first step moves, the step after warmup has the full rate and the last step has
    ``f * lr``. Steps past the last keep ``f * lr``.

    Args:
        step: Optimizer step, counted from 0.
        lr: Peak learning rate.
        warmup_steps: W; 0 for no warmup.
        steps: S, the number of steps of the run, at least W.
        min_lr_fraction: f, in [0, 1].

    Returns:
        The learning rate of that step.

    Raises:
        ConfigurationError: The step is negative, or warmup_steps is not in [0, steps].

    References:
        arXiv 1608.03983, equation 5.

    Examples:
        >>> [round(cosine_with_warmup(t, lr=1.0, warmup_steps=2, steps=5, min_lr_fraction=0.0), 6)
        ...  for t in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
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
