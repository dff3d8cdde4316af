"""``fivefold.optim.OuterSync`` with any of its rules.

Settings: ``rule``, the name of a rule class, and ``options``, its arguments; ``codec`` where the
payload is not sent as fp32. A tau of "auto" without codec="auto", which measures the link before it
starts, starts at 1 here: it goes up at once and down after much patience, and windows are short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import fivefold.optim
from benchmarks.optim._peers._case import Attached, Place

__all__ = ["CHOSEN", "attach"]

CHOSEN = ("tau", "fragments", "delay_steps", "codec")
_TIMEOUT_S = 60.0


def attach(
    settings: Mapping[str, Any],
    model: Any,
    optimizer: torch.optim.Optimizer,
    _place: Place,
) -> Attached:
    """Make the engine; it is stepped after the optimizer."""
    options = dict(settings["options"])
    codec = settings.get("codec", "fp32")
    if options.get("tau") == "auto" != codec:
        options["tau"] = fivefold.optim.AutoTau(initial=1)
    rule = getattr(fivefold.optim, settings["rule"])(**options)
    sync = fivefold.optim.OuterSync(model, optimizer, rule=rule, codec=codec, timeout_s=_TIMEOUT_S)

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

    def chosen() -> dict[str, Any]:
        now = sync.statistics()
        return {name: getattr(now, name) for name in CHOSEN}

    return Attached(
        loss=model.loss,
        optimizer=optimizer,
        after_step=sync.step,
        finalize=sync.finalize,
        figures=figures,
        chosen=chosen,
    )
