"""``fivefold.optim.OuterSync`` with any of its rules.

Settings: ``rule``, the name of a rule class, and ``options``, its arguments; ``codec`` where the
payload is not sent as fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import fivefold.optim
from _peers._case import Attached, Place

__all__ = ["attach"]

_TIMEOUT_S = 60.0


def attach(
    settings: Mapping[str, Any],
    model: Any,
    optimizer: torch.optim.Optimizer,
    _place: Place,
) -> Attached:
    """Make the engine; it is stepped after the optimizer."""
    rule = getattr(fivefold.optim, settings["rule"])(**settings["options"])
    options = {key: settings[key] for key in ("codec",) if key in settings}
    sync = fivefold.optim.OuterSync(model, optimizer, rule=rule, timeout_s=_TIMEOUT_S, **options)

    def figures() -> dict[str, float]:
        totals = sync.statistics()
        return {
            "rounds": float(totals.merged_rounds),
            "payload_bytes": float(totals.payload_bytes),
            "sent_bytes": float(totals.sent_bytes),
            "in_flight_s": totals.in_flight_s,
            "exposed_wait_s": totals.exposed_wait_s,
            "boundary_s": totals.boundary_s,
        }

    return Attached(
        loss=model.loss,
        optimizer=optimizer,
        after_step=sync.step,
        finalize=sync.finalize,
        figures=figures,
    )
