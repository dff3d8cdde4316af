"""Memory that the kernel works in: how much, where what lies, and who owns it.

Two buffers. ``control`` holds counters and flags, zero between launches: the kernel leaves it as it
found it, so that no call begins with a memset. ``scratch`` holds tables, the inner values and the
outputs per slot; what lies in it between calls means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypedDict, Unpack

import torch

from fivefold.errors import ConfigurationError

CONTROL_WORDS = 448
"""Words before the flags; as ``FLAGS`` in ``sync``."""
CHUNK_SLOTS = {False: 1024, True: 32}
"""Assignments that one counting task looks at, by whether the kernel is interpreted."""
SMALLEST_TILE_ROWS = 16
_ALIGNMENT_BYTES = 256


class CallSizes(TypedDict):
    """Sizes of a call: T, H, I, E, K, and the data type of the tokens."""

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Offsets of the sections of a buffer."""

    sections: dict[str, tuple[int, int, torch.dtype]]  # offset in bytes, elements, data type
    nbytes: int
    control_words: int = 0  # counters and flags, int32
    num_chunks: int = 0  # counting tasks
    max_tiles: int = 0  # most row tiles there can be, whatever the routing

    @classmethod
    def of(cls, sizes: dict[str, tuple[int, torch.dtype]], **numbers: int) -> Layout:
        """Lay elements of a data type out by name, one after the other."""
        sections, end = {}, 0
        for name, (count, kind) in sizes.items():
            sections[name] = (end, count, kind)
            end += -(-count * kind.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(sections=sections, nbytes=end, **numbers)

    def view(self, name: str, memory: torch.Tensor) -> torch.Tensor:
        """Return a section of a buffer, uint8 [..., at least nbytes]."""
        first, count, dtype = self.sections[name]
        return memory[..., first : first + count * dtype.itemsize].view(dtype)

    def cut(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return all sections of a buffer by name."""
        return {name: self.view(name, memory) for name in self.sections}


def layout_for(
    *,
    tile_rows: int = SMALLEST_TILE_ROWS,
    chunk_slots: int = min(CHUNK_SLOTS.values()),
    **sizes: Unpack[CallSizes],
) -> Layout:
    """Lay the scratch buffer out; for the smallest tiles and chunks, which need the most of it."""
    for name, value in sizes.items():
        if isinstance(value, int) and value < (0 if name == "num_tokens" else 1):
            raise ConfigurationError(f"{name} must be positive; got {value}")
    dtype, experts = sizes["dtype"], sizes["num_experts"]
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"dtype is {dtype!r}", hint="use torch.bfloat16 or another")
    slots = sizes["num_tokens"] * sizes["top_k"]
    if slots >= 2**31 - chunk_slots:
        raise ConfigurationError(
            f"{sizes['num_tokens']} tokens with {sizes['top_k']} experts each are {slots} "
            "assignments",
            hint="split the batch: a call takes fewer than 2^31",
        )
    chunks = -(-slots // chunk_slots)
    tiles = slots // tile_rows + min(experts, slots)
    int32 = torch.int32
    return Layout.of(
        {
            "counts": (chunks * experts, int32),
            **table_sizes(tiles, slots),
            "inner": (slots * sizes["intermediate"], dtype),
            "outputs": (slots * sizes["hidden"], dtype),
        },
        control_words=CONTROL_WORDS + 2 * tiles,
        num_chunks=chunks,
        max_tiles=tiles,
    )


def table_sizes(tiles: int, slots: int) -> dict[str, tuple[int, torch.dtype]]:
    """Return the sizes of ``Tables`` but for the counts."""
    counts = {"num_tiles": 1, "tile_expert": tiles, "tile_first": tiles, "tile_stop": tiles}
    counts |= {"slot_of_row": slots, "tile_of_slot": slots}
    return {name: (count, torch.int32) for name, count in counts.items()}


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Caller-owned memory for ``fused_moe``: give the same one to all layers of a stream.

    Without one, every call takes its memory from torch's allocator and clears the control words
    with a launch of its own; with one, a forward is one launch. Calls that may run at the same
    time (on several streams) need one each.

    Attributes:
        control: int32, zero between calls.
        scratch: uint8.

    Examples:
        >>> sizes = dict(num_tokens=8, hidden=16, intermediate=32, num_experts=4, top_k=2)
        >>> workspace = Workspace.allocate(**sizes, dtype=torch.bfloat16)
        >>> workspace.nbytes == Workspace.size(**sizes, dtype=torch.bfloat16)
        True
    """

    control: torch.Tensor
    scratch: torch.Tensor

    @staticmethod
    def size(**sizes: Unpack[CallSizes]) -> int:
        """Return bytes that are enough for calls up to these sizes, whatever the routing.

        Args:
            **sizes: ``num_tokens`` (the most, T; may be 0), ``hidden`` (H), ``intermediate`` (I),
                ``num_experts`` (E), ``top_k`` (K) and ``dtype`` (of the tokens).

        Returns:
            Bytes of both buffers: about T K (H + I) elements.

        Raises:
            ConfigurationError: A size is not positive, dtype is none, or there are 2^31 assignments
                or more.

        Examples:
            >>> Workspace.size(
            ...     num_tokens=8192,
            ...     hidden=2048,
            ...     intermediate=768,
            ...     num_experts=128,
            ...     top_k=8,
            ...     dtype=torch.bfloat16,
            ... ) // 2**20
            353
        """
        layout = layout_for(**sizes)
        return layout.nbytes + 4 * layout.control_words

    @classmethod
    def allocate(cls, *, device: str | torch.device = "cpu", **sizes: Unpack[CallSizes]) -> Self:
        """Allocate one, ready for use.

        Args:
            device: Where.
            **sizes: As in ``size``.

        Raises:
            ConfigurationError: As ``size``.
        """
        layout = layout_for(**sizes)
        return cls(
            control=torch.zeros(layout.control_words, dtype=torch.int32, device=device),
            scratch=torch.empty(layout.nbytes, dtype=torch.uint8, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Return bytes of both buffers."""
        return self.control.nbytes + self.scratch.nbytes

    def reset(self) -> None:
        """Clear the control words: needed after a call that failed half way only."""
        self.control.zero_()

    def check_call(self, x: torch.Tensor, w2: torch.Tensor, top_k: int) -> None:
        """Check that it is one, and enough for a call, whatever the backend.

        Raises:
            ConfigurationError: It is smaller than ``size`` says, elsewhere, or of another form.
        """
        for name, tensor, kind in (
            ("control", self.control, torch.int32),
            ("scratch", self.scratch, torch.uint8),
        ):
            if tensor.dtype != kind or tensor.ndim != 1 or not tensor.is_contiguous():
                raise ConfigurationError(
                    f"the workspace's {name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous: "
                    f"{tensor.is_contiguous()}",
                    hint=f"it is one contiguous row of {kind}; Workspace.allocate makes one",
                )
            if tensor.device.type != "meta" and tensor.data_ptr() % 16:
                raise ConfigurationError(
                    f"the workspace's {name} does not begin at a multiple of 16 bytes",
                    hint="Workspace.allocate makes one that does",
                )
        self.check(layout_for(**call_sizes(x, w2, max(top_k, 1))), x.device)

    def check(self, layout: Layout, device: torch.device) -> None:
        """Check that a call fits.

        Raises:
            ConfigurationError: It does not, or the workspace is elsewhere.
        """
        if self.control.device != device or self.scratch.device != device:
            raise ConfigurationError(
                f"the workspace is on {self.scratch.device}, the tokens are on {device}",
                hint="Workspace.allocate(..., device=x.device)",
            )
        if layout.nbytes > self.scratch.numel() or layout.control_words > self.control.numel():
            raise ConfigurationError(
                f"the workspace has {self.scratch.numel()} bytes of scratch and "
                f"{self.control.numel()} control words; this call needs {layout.nbytes} "
                f"and {layout.control_words}",
                hint="give Workspace.allocate the largest num_tokens, top_k and sizes in use",
            )


def call_sizes(x: torch.Tensor, w2: torch.Tensor, top_k: int) -> CallSizes:
    """Return the sizes of a call."""
    experts, hidden, inner = w2.shape
    return {
        "num_tokens": len(x),
        "hidden": hidden,
        "intermediate": inner,
        "num_experts": experts,
        "top_k": top_k,
        "dtype": x.dtype,
    }
