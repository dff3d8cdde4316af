"""Parameters that are frozen while training: they stop where the last of their work has arrived.

An outer momentum, a pull or an inner optimizer's weight decay would move them on. When a tensor is
frozen its last local steps are still to be sent; the message that brings them says that it is
frozen, and once all ranks have said so it is held.

A tensor that moves all the same in the local steps is not frozen but switched off for a moment (a
discriminator while the generator steps): it is trained, and the next message says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence

import torch

from fivefold.optim._flat import FlatGroup
from fivefold.optim._metadata import MetadataReading
from fivefold.optim._update import read_numbers


class FrozenTensors:
    """Those of one fragment's tensors that have ``requires_grad=False`` by now."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups
        self._held: dict[int, torch.Tensor] = {}  # value by number; over the groups in order
        self._left: dict[int, torch.Tensor] = {}  # what the last boundary left of what is frozen
        self._moving: set[int] = set()
        self._told: list[int] = []  # numbers in the last message

    def announced(self) -> float:
        """Return what says which tensors are frozen now; 0 for none."""
        self._told = self._numbers()
        return _digest(self._told)

    @property
    def held(self) -> list[torch.Tensor]:
        """The live tensors that are held."""
        still = self._still_held()
        return [tensor for number, tensor in enumerate(self._tensors()) if number in still]

    def look(self) -> None:
        """Find out, before a merge, which frozen tensors the local steps have moved."""
        if self._left:
            parts = list(self._parts())
            moved = _differ([(parts[number], value) for number, value in self._left.items()])
            self._moving -= self._left.keys()
            self._moving |= {n for n, differs in zip(self._left, moved, strict=True) if differs}

    def forget(self) -> None:
        """Take what follows as a new start: something else has written into the model."""
        self._left = {}

    def agree(self, reading: MetadataReading) -> None:
        """Hold from now on, at the anchor, what all ranks say is frozen, and nothing else."""
        # From the message alone, so that all ranks decide alike.
        said = {f for f, weight in zip(reading.frozen, reading.weight, strict=True) if weight}
        numbers = self._told if said == {_digest(self._told)} else []
        if numbers or self._held:
            anchors = self._views("anchor")
            held = self._held
            self._held = {n: held[n] if n in held else anchors[n].clone() for n in numbers}

    def hold(self, reading: MetadataReading | None, *, send: bool) -> None:
        """Take in what arrived; undo what a merge did to what is held; it sends nothing."""
        if reading is not None:
            self.agree(reading)
        self._undo(send=send)
        frozen = (n for n, tensor in enumerate(self._tensors()) if not tensor.requires_grad)
        numbers = set(frozen)
        parts = enumerate(self._parts()) if numbers else ()
        self._left = {n: part.clone() for n, part in parts if n in numbers}

    def _undo(self, *, send: bool) -> None:
        if not self._held:
            return
        anchors, parts = self._views("anchor"), list(self._parts())
        still = self._still_held()
        for number, value in self._held.items():
            anchors[number].copy_(value)
            if number in still:
                parts[number].copy_(value)
        for view in self._of("momentum", self._held.keys()).values():
            view.zero_()
        for name in ["sent", "own_momentum", *(["payload"] if send else [])]:
            for view in self._of(name, still).values():
                view.zero_()
        for number, view in self._of("start", still).items():
            view.copy_(self._held[number])
        for number, view in self._of("rest", still).items():
            torch.sub(self._held[number], parts[number], out=view)

    def _of(self, name: str, numbers: Collection[int]) -> dict[int, torch.Tensor]:
        return {n: view for n, view in self._views(name).items() if n in numbers}

    def _still_held(self) -> set[int]:
        """Return what is held and has not begun to train again on this rank."""
        return self._held.keys() & set(self._numbers())

    def _numbers(self) -> list[int]:
        frozen = (n for n, tensor in enumerate(self._tensors()) if not tensor.requires_grad)
        return [n for n in frozen if n not in self._moving]

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for group in self._groups for tensor in group.tensors)

    def _parts(self) -> Iterator[torch.Tensor]:
        return (part for group in self._groups for part in group.parts())

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


def _differ(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return for each pair whether it differs anywhere; one wait for the device."""
    if not any(one.is_cuda for one, _ in pairs):
        return [not torch.equal(one, other) for one, other in pairs]
    return read_numbers([one.ne(other).any() for one, other in pairs])


def _digest(numbers: Sequence[int]) -> float:
    return float(zlib.crc32(repr(list(numbers)).encode()) + 1) if numbers else 0.0
