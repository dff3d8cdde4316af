"""No communication: each rank trains by itself. The rate that all others are measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.optim._peers._case import Attached, Place

__all__ = ["attach"]


def attach(
    _settings: Mapping[str, Any],
    model: Any,
    optimizer: torch.optim.Optimizer,
    _place: Place,
) -> Attached:
    """Train with the bare model and optimizer."""
    return Attached(loss=model.loss, optimizer=optimizer)
