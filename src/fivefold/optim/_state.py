"""What of the engine a checkpoint holds, and how it is put back.

The structure of a state depends on the rule, the model and the number of ranks only, never on the
moment, so that loaders which fill a prepared structure (``torch.distributed.checkpoint``) can be
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import FlatGroup
from fivefold.optim._lane import LaneReading
from fivefold.optim._rule import OuterRule
from fivefold.optim._transport import Flight
from fivefold.optim._update import Number

_FORMAT = 4

SHARED_BUFFERS = ("anchor", "momentum")
"""Buffers that are equal on all workers between boundaries."""


@dataclass(kw_only=True)
class InFlight:
    """A launched round.

    Attributes:
        round: Its number.
        unit: Inner learning rate when it was launched.
        weight: Weight of this rank's payload.
        handle: The transport's flight; None once it has landed (the sum is in the payload).
        arrived: Whether it landed whole; False where it was lost.
        reading: What its lane brought, once it has landed.
        non_finite: What its lane says of this rank's payload; see ``LaneReading``.
    """

    round: int
    unit: float
    weight: float
    handle: Flight | None
    arrived: bool = True
    reading: LaneReading | None = None
    non_finite: int = 0


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
        last_flight_s: Seconds of the last flight.
        own_share: This rank's share of the weights of the last flight.
        weight: Weight of the local steps since the last launch; None where none was given.
    """

    gap_reference: float | None = None
    gap: float = 1.0
    last_step: float = 0.0
    last_move: Number = 0.0
    last_delta: Number = 0.0
    last_flight_s: float = 0.0
    own_share: float = 0.0
    weight: float | None = None

    def numbers(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        plain = dict(vars(self))
        return plain | {name: float(plain[name]) for name in ("last_move", "last_delta")}


def settings(rule: OuterRule, *, fragments: int, codec: str) -> dict[str, Any]:
    """Return what a state and the engine that loads it must agree on."""
    return {
        "format": _FORMAT,
        "rule": rule.name,
        "rule_settings": repr(sorted(asdict(rule).items(), key=lambda item: item[0])),
        "fragments": fragments,
        "codec": codec,
    }


def require_same(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that a saved state belongs to this engine.

    Raises:
        ConfigurationError: They differ; the message names the first difference.
    """
    for key, value in current.items():
        if saved.get(key) != value:
            message = f"the saved outer state has {key}={saved.get(key)!r}, this run has {value!r}"
            hint = "resume with the same rule, or load the model alone into a new OuterSync"
            raise ConfigurationError(message, hint=hint)


def groups_state(
    groups: Sequence[FlatGroup], *, only: Sequence[str] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the live buffers by group and name."""
    return {str(index): _buffers(group, only) for index, group in enumerate(groups)}


def restore_groups(
    groups: Sequence[FlatGroup],
    state: dict[str, dict[str, torch.Tensor]],
    *,
    only: Sequence[str] | None = None,
) -> None:
    """Copy saved buffers into the live ones.

    Raises:
        ConfigurationError: Another number of buffers, or another size.
    """
    for index, group in enumerate(groups):
        saved = state.get(str(index), {})
        for name, buffer in _buffers(group, only).items():
            if name not in saved or saved[name].shape != buffer.shape:
                found = tuple(saved[name].shape) if name in saved else "nothing"
                message = (
                    f"the saved outer state has {found} for {name} of group {index}, the model "
                    f"has {tuple(buffer.shape)}"
                )
                raise ConfigurationError(message, hint="resume with the model that was saved")
            buffer.copy_(saved[name])


def _buffers(group: FlatGroup, only: Sequence[str] | None) -> dict[str, torch.Tensor]:
    buffers = group.buffers()
    return buffers if only is None else {n: b for n, b in buffers.items() if n in only}
