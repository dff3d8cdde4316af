"""Parameters that are frozen while training: they stop where the last of their work has arrived.

An outer momentum, a pull or an inner optimizer's weight decay would move them on. When a tensor is
frozen its last local steps are still to be sent; the message that brings them says that it is
frozen, and once all ranks have said so it is held.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from fivefold.optim._flat import FlatGroup
from fivefold.optim._metadata import MetadataReading


class FrozenTensors:
    """Those of one fragment's tensors that have ``requires_grad=False`` by now."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups
        self._held: dict[int, torch.Tensor] = {}  # value by number; over the groups in order

    def announced(self) -> float:
        """Return what says which tensors are frozen now; 0 for none."""
        return _digest(self._numbers())

    @property
    def held(self) -> list[torch.Tensor]:
        """The live tensors that are held."""
        return [tensor for number, tensor in enumerate(self._tensors()) if number in self._held]

    def agree(self, reading: MetadataReading) -> None:
        """Hold from now on, at the anchor, what all ranks say is frozen."""
        said = {f for f, weight in zip(reading.frozen, reading.weight, strict=True) if weight}
        numbers = self._numbers()
        if said != {_digest(numbers)}:
            return  # not yet all of them, or it has changed again since
        anchors = self._views("anchor")
        self._held = {n: self._held[n] if n in self._held else anchors[n].clone() for n in numbers}

    def hold(self, reading: MetadataReading | None, *, send: bool) -> None:
        """Take in what arrived; undo what a merge did to what is held; it sends nothing."""
        if reading is not None:
            self.agree(reading)
        if not self._held:
            return
        anchors, parts = self._views("anchor"), list(self._parts())
        for number, value in self._held.items():
            anchors[number].copy_(value)
            parts[number].copy_(value)
        emptied = ["momentum", "sent", "own_momentum", *(["payload"] if send else [])]
        for name in emptied:
            for view in self._held_views(name).values():
                view.zero_()
        for number, view in self._held_views("start").items():
            view.copy_(self._held[number])
        for number, view in self._held_views("rest").items():
            torch.sub(self._held[number], parts[number], out=view)

    def _numbers(self) -> list[int]:
        return [n for n, tensor in enumerate(self._tensors()) if not tensor.requires_grad]

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for group in self._groups for tensor in group.tensors)

    def _parts(self) -> Iterator[torch.Tensor]:
        return (part for group in self._groups for part in group.parts())

    def _held_views(self, name: str) -> dict[int, torch.Tensor]:
        return {n: view for n, view in self._views(name).items() if n in self._held}

    def _views(self, name: str) -> dict[int, torch.Tensor]:
        """Return views of one buffer by number; of the groups that have it."""
        found: dict[int, torch.Tensor] = {}
        first = 0
        for group in self._groups:
            buffer = group.buffers().get(name)
            if buffer is not None:
                found |= dict(enumerate(group.shaped(buffer), start=first))
            first += len(group.tensors)
        return found


def _digest(numbers: Sequence[int]) -> float:
    return float(zlib.crc32(repr(list(numbers)).encode()) + 1) if numbers else 0.0
