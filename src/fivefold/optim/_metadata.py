"""The metadata: a few numbers of each rank that travel with every payload.

Each rank has a slot of its own, so a sum over the ranks is a table of what each rank wrote, the
same bit for bit everywhere. All decisions of the engine (staleness gap, tau, replica check) are
made from it, so all ranks decide alike, whatever each rank's hardware rounds to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._update import Number

_FIELDS = (
    "weight",
    "weighted",
    "hash",
    "move",
    "delta",
    "step_s",
    "all_reduce_s",
    "pending",
    "non_finite",
)


@dataclass(frozen=True, kw_only=True)
class MetadataReading:
    """What all ranks wrote, in slot order.

    Attributes:
        weight: Weight of each rank's payload; 0 where a slot is empty.
        weighted: 1 where the user gave the weight, 0 where it stands for itself.
        hash: Replica hash of each rank's anchor, 0 where it was not taken.
        move: Norm of the anchor's last movement, as each rank computed it.
        delta: Norm of the mean pseudo-gradient applied last, as each rank computed it.
        step_s: Seconds per local step that an all-reduce can hide behind.
        all_reduce_s: Seconds of each rank's last all-reduce.
        pending: What of the model's parameters each rank would adopt; 0 for nothing.
        non_finite: Number, from 1, of the first tensor in which each rank had a not-a-number or an
            infinity: its payload is zeros of weight 0. 0 where all numbers are finite.
    """

    weight: list[float]
    weighted: list[float]
    hash: list[float]
    move: list[float]
    delta: list[float]
    step_s: list[float]
    all_reduce_s: list[float]
    pending: list[float]
    non_finite: list[float]

    @property
    def total_weight(self) -> float:
        """Sum of the weights."""
        return math.fsum(self.weight)  # sum() rounds by Python's version

    def fits(self, world_size: int) -> bool:
        """Whether it has this many slots; not after a resume on another number of workers."""
        return len(self.weight) == world_size

    def require_weights_alike(self) -> None:
        """Refuse a sum in which some ranks count their tokens and others count 1."""
        taken = [slot for slot, weight in enumerate(self.weight) if weight > 0]
        plain = [slot for slot in taken if not self.weighted[slot]]
        if plain and len(plain) < len(taken):
            ranks = ", ".join(map(str, plain))
            message = f"rank(s) {ranks} gave no weight to step(), the others did"
            raise ConfigurationError(message, hint="call step(weight=...) on every rank or nowhere")

    def agreed(self, values: list[float]) -> float:
        """Mean over the ranks that took part, for values that are equal up to rounding."""
        taken = [v for v, weight in zip(values, self.weight, strict=True) if weight > 0]
        return math.fsum(taken) / len(taken) if taken else 0.0

    def numbers(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {name: list(getattr(self, name)) for name in _FIELDS}

    @classmethod
    def empty(cls, world_size: int) -> MetadataReading:
        """Return a reading in which nobody took part."""
        return cls(**{name: [0.0] * world_size for name in _FIELDS})


class Metadata:
    """The tensor that travels, float64, one slot per rank and field."""

    def __init__(self, world_size: int, *, device: torch.device) -> None:
        self._world_size = world_size
        size = len(_FIELDS) * world_size
        self.tensor = torch.zeros(size, dtype=torch.float64, device=device)
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=True) if pinned else None

    def write(self, rank: int, **values: Number) -> None:
        """Fill this rank's slot, and nothing else."""
        self.tensor.zero_()
        for name, value in values.items():
            self.tensor[_FIELDS.index(name) * self._world_size + rank] = value

    def fetch(self) -> None:
        """Queue the copy to the host on the current stream; nothing to do on a CPU."""
        if self._host is not None:
            self._host.copy_(self.tensor, non_blocking=True)

    def read(self) -> MetadataReading:
        """Return what arrived; on a GPU what was fetched."""
        values = (self.tensor if self._host is None else self._host).tolist()
        size = self._world_size
        columns = {n: values[i * size : (i + 1) * size] for i, n in enumerate(_FIELDS)}
        return MetadataReading(**columns)
