"""The outer state as flat buffers, and how a model's tensors map into them.

Tensors of one device and one outer data type (at least float32) share a buffer, so that one round
needs one all-reduce per group. Live tensors are read and written through their current storage at
each boundary and never kept: user code may replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._shards import RowShare, local_tensor

# 256 k float32 elements are 1 MiB. Smaller pieces cost more in Python (about 30 us each) than the
# second-level cache gains; larger ones leave the third-level cache. Measured with 10 and 50 million
# parameters: a boundary of 2^16 took 1.2 times as long.
_CPU_PIECE_ELEMENTS = 1 << 18
# Tensors smaller than this share a piece, through a stage: the operations of a piece cost about
# 30 us in Python, the two copies of this many elements less.
_SMALL_ELEMENTS = 1 << 16
# On accelerators each operation is a launch, of some 4 us, and a temporary is as large as a piece:
# 32 MiB of float32, which an H200 reads and writes in 14 us.
_DEVICE_PIECE_ELEMENTS = 1 << 23
_DEVICE_SMALL_ELEMENTS = 1 << 22


# For tests without a GPU: take the way over a stage also from a CPU to the same CPU.
_STAGE_ALWAYS = False


@dataclass(frozen=True)
class Piece:
    """Views of the same elements: outer state and live tensor."""

    anchor: torch.Tensor  # x, shape as ``local``
    payload: torch.Tensor  # buffer for the pseudo-gradient and its sum over the ranks
    local: torch.Tensor  # the live tensor, in its own data type
    # Room for one temporary of this size, or None where the allocator is as good.
    scratch: torch.Tensor | None
    momentum: torch.Tensor | None = None  # m
    # This rank's own pseudo-gradient in flight; of the eager merge its share of it.
    sent: torch.Tensor | None = None
    value: torch.Tensor | None = None  # of what is only averaged: this rank's own value in flight
    start: torch.Tensor | None = None  # where this rank's round began, where that is not the anchor
    own_momentum: torch.Tensor | None = None  # v of the eager merge
    gradient: torch.Tensor | None = None  # D for an outer optimizer
    rest: torch.Tensor | None = None  # what the last write into 16-bit tensors rounded away
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)  # a rule's other buffers

    @classmethod
    def of(
        cls,
        buffers: Mapping[str, torch.Tensor],
        *,
        local: torch.Tensor,
        scratch: torch.Tensor | None,
    ) -> Piece:
        """Return a piece of these buffers, by name."""
        known = {name: buffer for name, buffer in buffers.items() if name in _KNOWN}
        own = {name: buffer for name, buffer in buffers.items() if name not in _KNOWN}
        return cls(local=local, scratch=scratch, own=own, **known)

    def apart(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return how far the anchor is from what the worker has: its pseudo-gradient."""
        if self.rest is None:
            return torch.sub(self.as_written(self.anchor), self.local, out=out)
        return torch.sub(self.anchor, self.local, out=out).sub_(self.rest)

    def as_written(self, values: torch.Tensor) -> torch.Tensor:
        """Return what values of the outer state become where they are written."""
        if not is_narrow(self.local):
            return values
        return values.to(self.local.dtype).to(values.dtype)

    def write(self, values: torch.Tensor) -> None:
        """Set the live tensor, and keep what it cannot hold."""
        self.local.copy_(values)
        if self.rest is not None:
            torch.sub(values, self.local, out=self.rest)

    def add(self, change: torch.Tensor) -> None:
        """Add to the live tensor; ``change`` is overwritten."""
        if self.rest is None:
            self.local.add_(change)
        else:
            self.write(change.add_(self.rest).add_(self.local))


_KNOWN = frozenset(each.name for each in fields(Piece)) - {"local", "scratch", "own"}


class FlatGroup:
    """Outer state of tensors of one device and one outer data type.

    Of a sharded tensor (DTensor) this rank's own shard is meant, and where the ranks of a worker
    share the outer state of replicated tensors, this rank's rows.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype,
        extras: Iterable[str],
        share: RowShare,
        device: torch.device | None = None,
        copies: int = 1,
    ) -> None:
        self.tensors = list(tensors)
        self.copies = copies  # ranks of the worker that hold the same elements
        self._share = share
        live_device = local_tensor(self.tensors[0]).device
        self._staged = _STAGE_ALWAYS or (device is not None and device != live_device)
        device = live_device if device is None else device
        size = sum(part.numel() for part in self.parts())
        # Pinned, so that copies to and from a GPU run at the speed of the bus.
        self._pinned = pinned = device.type == "cpu" and live_device.type == "cuda"

        def zeros() -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)

        self.anchor, self.payload = zeros(), zeros()
        kept = set(extras) - ({"rest"} if not is_narrow(self.tensors[0]) else set())
        self.extras = {name: zeros() for name in sorted(kept)}
        # Fresh memory costs a page fault per 4 KiB, which is more than the arithmetic on it; on an
        # accelerator it would be as large as the largest tensor.
        on_cpu = device.type == "cpu"
        self._piece_elements = _CPU_PIECE_ELEMENTS if on_cpu else _DEVICE_PIECE_ELEMENTS
        room = self._piece_elements if on_cpu else min(size, self._piece_elements)
        self._scratch = torch.empty(room, dtype=dtype, device=device)
        self._stages: dict[torch.dtype, torch.Tensor] = {}
        for piece in self.pieces():
            piece.anchor.copy_(piece.local)
        self.forget_own_part()

    def parts(self, of: Sequence[torch.Tensor] | None = None) -> Iterator[torch.Tensor]:
        """Yield the parts that the buffers cover of each live tensor, or of others like them."""
        return (self._share.part(tensor) for tensor in (self.tensors if of is None else of))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the live buffers of a state by name."""
        # An outer optimizer's gradient is none: a merge writes it before each of its steps.
        kept = {name: buffer for name, buffer in self.extras.items() if name != "gradient"}
        return {"anchor": self.anchor, "payload": self.payload} | kept

    def forget_own_part(self) -> None:
        """Stand as a worker that has done nothing since the anchor."""
        for name, buffer in self.extras.items():
            if name in {"sent", "own_momentum"} or name not in _KNOWN:
                buffer.zero_()
        for name in ("start", "value"):
            if name in self.extras:
                self.extras[name].copy_(self.anchor)

    def pieces(self, of: Sequence[torch.Tensor] | None = None) -> Iterator[Piece]:
        """Yield views over all elements, of a size that suits the device, in a fixed order.

        With ``of`` the pieces' ``local`` is of those instead of the live tensors: their gradients.
        """
        offset = 0
        on_cpu = self.anchor.device.type == "cpu"
        small = _SMALL_ELEMENTS if on_cpu else _DEVICE_SMALL_ELEMENTS
        small, most = min(small, self._piece_elements), self._piece_elements
        if self._staged:
            small = most = _DEVICE_PIECE_ELEMENTS
        kinds = groupby(
            self._cut(self.parts(of)), lambda part: part.numel() <= small and part.is_contiguous()
        )
        for together, parts in kinds:
            for few in _batches(parts, most) if together else ([part] for part in parts):
                size = sum(part.numel() for part in few)
                if together or self._staged:
                    yield from self._pieces_of_several(few, offset, offset + size)
                else:
                    yield from self._pieces_of(few[0], offset)
                offset += size

    def _cut(self, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Cut what is larger than a piece of an accelerator, along its elements or its rows."""
        on_cpu, most = self.anchor.device.type == "cpu", _DEVICE_PIECE_ELEMENTS
        for part in parts:
            if part.numel() <= most or (on_cpu and not self._staged):
                yield part
            elif part.is_contiguous():
                yield from torch.split(part.view(-1), most)
            else:
                yield from torch.split(part, max(most * part.shape[0] // part.numel(), 1))

    def _pieces_of(self, local: torch.Tensor, offset: int) -> Iterator[Piece]:
        size, whole = local.numel(), local.is_contiguous()
        for start in range(0, size, self._piece_elements if whole else max(size, 1)):
            stop = min(start + self._piece_elements, size) if whole else size
            view = local.view(-1)[start:stop] if whole else local
            yield self._piece(view, offset + start, offset + stop)

    def _stage(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Return room for so many live elements beside the outer state, kept for the next piece."""
        stage = self._stages.get(dtype)
        if stage is None or stage.numel() < size:
            most = _DEVICE_PIECE_ELEMENTS if self._staged else self._piece_elements
            stage = self._stages[dtype] = torch.empty(
                max(size, min(self.anchor.numel(), most)),
                dtype=dtype, device=self.anchor.device, pin_memory=self._pinned,
            )  # fmt: skip
        return stage[:size]

    def _pieces_of_several(
        self, parts: list[torch.Tensor], start: int, stop: int
    ) -> Iterator[Piece]:
        """Yield pieces of several tensors together; they are read before and written after."""
        stage = self._stage(parts[0].dtype, stop - start)
        views = [
            view.view(part.shape)
            for view, part in zip(
                torch.split(stage, [p.numel() for p in parts]), parts, strict=True
            )
        ]
        # The host waits once for all, and not before it reads.
        torch._foreach_copy_(views, parts, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream(parts[0].device).synchronize()
        yield from self._pieces_of(stage, start)
        # The next copy into the stage is queued behind this one.
        torch._foreach_copy_(parts, views, non_blocking=self._pinned)

    def shaped(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of one buffer in the shapes of the parts."""
        shapes = [local.shape for local in self.parts()]
        parts = torch.split(buffer, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _piece(self, local: torch.Tensor, start: int, stop: int) -> Piece:
        shape = local.shape
        scratch = None
        if local.numel() <= self._scratch.numel():
            scratch = self._scratch[: local.numel()].view(shape)
        buffers = {"anchor": self.anchor, "payload": self.payload} | self.extras
        views = {name: buffer[start:stop].view(shape) for name, buffer in buffers.items()}
        return Piece.of(views, local=local, scratch=scratch)


def _batches(parts: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Cut a run of small tensors where the data type changes or a piece of so many is full."""
    few: list[torch.Tensor] = []
    size = 0
    for part in parts:
        if few and (part.dtype != few[0].dtype or size + part.numel() > most):
            yield few
            few, size = [], 0
        few.append(part)
        size += part.numel()
    if few:
        yield few


def flat_groups(
    tensors: Iterable[torch.Tensor],
    *,
    extras: Iterable[str],
    share: RowShare,
    copies_of: Callable[[torch.Tensor], int] = lambda _: 1,
    device: torch.device | None = None,
    least: torch.dtype = torch.float32,
) -> list[FlatGroup]:
    """Group tensors by device and outer data type, which is at least ``least``.

    Those of 16 bits are apart: they alone need room for what a write rounds away. So are those
    that other ranks of the worker hold too, which count once in its norms.
    """
    groups: dict[tuple[torch.device, torch.dtype, bool, int], list[torch.Tensor]] = {}
    names = tuple(extras)
    for tensor in dict.fromkeys(tensors):
        _require_dense(tensor)
        dtype = torch.promote_types(tensor.dtype, least)
        key = (tensor.device, dtype, is_narrow(tensor), copies_of(tensor))
        groups.setdefault(key, []).append(tensor)
    return [
        FlatGroup(found, dtype=dtype, extras=names, share=share, device=device, copies=copies)
        for (_, dtype, _, copies), found in groups.items()
    ]


def is_narrow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has fewer bits than the outer state, which writes round away."""
    return tensor.element_size() < torch.float32.itemsize


def _require_dense(tensor: torch.Tensor) -> None:
    local = local_tensor(tensor)
    strides = zip(local.shape, local.stride(), strict=True) if local.layout == torch.strided else ()
    if any(size > 1 and stride == 0 for size, stride in strides):
        shape = tuple(local.shape)
        message = f"a tensor of shape {shape} that is to be averaged repeats its elements (expand)"
        raise ConfigurationError(message, hint="keep tensor.clone(), or what was expanded")
    plain = type(local) is torch.Tensor and local.layout == torch.strided
    if plain and local.is_floating_point() and local.element_size() > 1:
        return
    message = f"parameters must be dense real tensors; got {type(local).__name__} of {local.dtype}"
    hint = "sparse, quantised, complex and 8-bit ones cannot be trained here; freeze them"
    raise ConfigurationError(message, hint=hint)
