"""Parameters that become trainable after the engine was made, or whose objects are replaced.

Without care they would drift apart silently. At every boundary the model's trainable parameters
are compared with those that the engine knows. A known name with a new object (``load_state_dict``
with ``assign=True``) is followed. New ones are announced in the metadata, so that every rank sees
at the same round what the others announced, and all adopt them at that boundary or all raise an
error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import FlatGroup
from fivefold.optim._shards import local_tensor

_PATIENCE_ROUNDS = 2  # ranks whose rounds have other numbers of steps may announce one round apart


class LateParameters:
    """Which trainable parameters the engine knows."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known = _trainable(model)
        self._different_rounds = 0
        self.announced = 0.0

    def look(self, groups: Iterable[FlatGroup]) -> dict[str, torch.Tensor]:
        """Return what is not known yet, by name, after following replaced objects."""
        now = _trainable(self._model)
        known_objects = {id(p) for p in self._known.values()}
        unknown = {name: p for name, p in now.items() if id(p) not in known_objects}
        if unknown:
            still_there = {id(p) for p in self._model.parameters()}
            for name in list(unknown):
                old = self._known.get(name)
                if old is not None and id(old) not in still_there:
                    _follow(groups, name, old=old, new=unknown[name])
                    self._known[name] = unknown.pop(name)
        text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in unknown.items())
        self.announced = float(zlib.crc32(text.encode()) + 1) if unknown else 0.0
        return unknown

    def know(self, found: dict[str, torch.Tensor]) -> None:
        """Count parameters as known from now on."""
        self._known.update(found)
        self.announced = 0.0

    def all_announced(self, values: list[float]) -> bool:
        """Return whether all ranks announced the same parameters."""
        if len(set(values)) == 1:
            self._different_rounds = 0
            return values[0] != 0.0
        self._different_rounds += 1
        if self._different_rounds < _PATIENCE_ROUNDS:
            return False
        ranks = [rank for rank, value in enumerate(values) if value != values[0]]
        message = f"rank(s) {ranks} have other new trainable parameters than rank 0"
        hint = "make the same parameters trainable on all ranks, after the same step"
        raise ConfigurationError(message, hint=hint)


def require_same_names(names: list[list[str]]) -> None:
    """Check what all ranks are about to adopt."""
    for rank, found in enumerate(names):
        if found != names[0]:
            apart = sorted(set(found) ^ set(names[0]))
            message = f"rank {rank} has other new trainable parameters than rank 0: {apart}"
            hint = "make the same parameters trainable on all ranks, after the same step"
            raise ConfigurationError(message, hint=hint)


def _trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _follow(
    groups: Iterable[FlatGroup], name: str, *, old: torch.Tensor, new: torch.Tensor
) -> None:
    was, now = local_tensor(old), local_tensor(new)
    if (was.shape, was.dtype, was.device) != (now.shape, now.dtype, now.device):
        message = (
            f"parameter {name} was {tuple(was.shape)} {was.dtype} on {was.device}, and is now "
            f"{tuple(now.shape)} {now.dtype} on {now.device}"
        )
        raise ConfigurationError(message, hint="make a new OuterSync for a changed model")
    for group in groups:
        group.tensors = [new if tensor is old else tensor for tensor in group.tensors]
