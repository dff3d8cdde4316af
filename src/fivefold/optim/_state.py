"""What of the engine a checkpoint holds, and how it is put back.

The structure of a state depends on the rule and the model only, never on the moment, so that
loaders which fill a prepared structure (``torch.distributed.checkpoint``) can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import FlatGroup
from fivefold.optim._rules import OuterRule
from fivefold.optim._transport import Flight

__all__ = ["InFlight", "OuterState", "groups_state", "require_same", "restore_groups", "settings"]

_FORMAT = 1


@dataclass(kw_only=True)
class InFlight:
    """A launched round.

    Attributes:
        round: Its number.
        unit: Inner learning rate when it was launched.
        handle: The transport's flight; None once it has landed (the sum is in the payload).
    """

    round: int
    unit: float
    handle: Flight | None


@dataclass(kw_only=True)
class OuterState:
    """Scalars that outlive a boundary; equal on all ranks up to the last bits of the norms.

    Attributes:
        gap_reference: C of the gap penalty; None before the first applied round.
        gap: L of the last outer step.
        last_step: Factor from the momentum to the anchor's movement at the last boundary; 0
            where it did not move.
        last_move: Norm of that movement.
        last_delta: Norm of the mean pseudo-gradient applied last, until it has been sent.
    """

    gap_reference: float | None = None
    gap: float = 1.0
    last_step: float = 0.0
    last_move: float = 0.0
    last_delta: float = 0.0


def settings(rule: OuterRule, *, world_size: int) -> dict[str, Any]:
    """Return what a state and the engine that loads it must agree on."""
    return {
        "format": _FORMAT,
        "world_size": world_size,
        "rule": rule.name,
        "rule_settings": repr(sorted(asdict(rule).items(), key=lambda item: item[0])),
    }


def require_same(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that a saved state belongs to this engine.

    Raises:
        ConfigurationError: They differ; the message names the first difference.
    """
    for key, value in current.items():
        if saved.get(key) != value:
            message = f"the saved outer state has {key}={saved.get(key)!r}, this run has {value!r}"
            hint = (
                "resume with the same rule and number of ranks, or load the model alone and "
                "start a new OuterSync from it"
            )
            raise ConfigurationError(message, hint=hint)


def groups_state(groups: Sequence[FlatGroup]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the live buffers by group and name."""
    return {str(index): _buffers(group) for index, group in enumerate(groups)}


def restore_groups(groups: Sequence[FlatGroup], state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Copy saved buffers into the live ones.

    Raises:
        ConfigurationError: Another number of buffers, or another size.
    """
    for index, group in enumerate(groups):
        saved = state.get(str(index), {})
        for name, buffer in _buffers(group).items():
            if name not in saved or saved[name].shape != buffer.shape:
                found = tuple(saved[name].shape) if name in saved else "nothing"
                message = (
                    f"the saved outer state has {found} for {name} of group {index}, the model "
                    f"has {tuple(buffer.shape)}"
                )
                raise ConfigurationError(message, hint="resume with the model that was saved")
            buffer.copy_(saved[name])


def _buffers(group: FlatGroup) -> dict[str, torch.Tensor]:
    buffers = {"anchor": group.anchor, "payload": group.payload}
    if group.momentum is not None:
        buffers["momentum"] = group.momentum
    if group.sent is not None:
        buffers["sent"] = group.sent
    return buffers
