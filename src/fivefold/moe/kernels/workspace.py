"""Memory that the kernel works in: how much, where what lies, and who owns it.

Two buffers. ``control`` holds counters and flags, zero between launches: the kernel leaves it as it
found it, so that no call begins with a memset. ``scratch`` holds tables, the inner values and the
outputs per slot; what lies in it between calls means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from fivefold.errors import ConfigurationError

CONTROL_WORDS = 448
"""Words before the flags; as ``FLAGS`` in ``sync``."""
CHUNK_SLOTS = {False: 1024, True: 32}
"""Assignments that one counting task looks at, by whether the kernel is interpreted."""
SMALLEST_TILE_ROWS = 16
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where what lies in the scratch buffer for one call.

    Attributes:
        sections: (offset in bytes, number of elements, data type) by name.
        scratch_bytes: All of it.
        control_words: Counters and flags, int32.
        num_chunks: Counting tasks.
        max_tiles: Most row tiles there can be, whatever the routing.
    """

    sections: dict[str, tuple[int, int, torch.dtype]]
    scratch_bytes: int
    control_words: int
    num_chunks: int
    max_tiles: int

    def cut(self, scratch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the scratch buffer by name.

        Args:
            scratch: uint8, at least ``scratch_bytes``.

        Returns:
            One flat tensor per section.
        """
        return {
            name: scratch[first : first + count * dtype.itemsize].view(dtype)
            for name, (first, count, dtype) in self.sections.items()
        }


def layout_for(  # noqa: PLR0913 - the sizes of a call
    *,
    num_tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    tile_rows: int,
    chunk_slots: int,
) -> Layout:
    """Lay the scratch buffer out.

    Args:
        num_tokens: T.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: K.
        dtype: Of the tokens.
        tile_rows: Rows of a tile.
        chunk_slots: Assignments that one counting task looks at.

    Returns:
        The layout.

    Raises:
        ConfigurationError: There are 2^31 assignments or more.
    """
    slots = num_tokens * top_k
    if slots >= 2**31 - chunk_slots:
        raise ConfigurationError(
            f"{num_tokens} tokens with {top_k} experts each are {slots} assignments",
            hint="split the batch: a call takes fewer than 2^31",
        )
    chunks = -(-slots // chunk_slots)
    tiles = slots // tile_rows + min(num_experts, slots)
    int32 = torch.int32
    sizes = {
        "counts": (chunks * num_experts, int32),
        "num_tiles": (1, int32),
        "tile_expert": (tiles, int32),
        "tile_first": (tiles, int32),
        "tile_stop": (tiles, int32),
        "slot_of_row": (slots, int32),
        "tile_of_slot": (slots, int32),
        "inner": (slots * intermediate, dtype),
        "outputs": (slots * hidden, dtype),
    }
    sections, end = {}, 0
    for name, (count, kind) in sizes.items():
        sections[name] = (end, count, kind)
        end += -(-count * kind.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return Layout(
        sections=sections,
        scratch_bytes=end,
        control_words=CONTROL_WORDS + 2 * tiles,
        num_chunks=chunks,
        max_tiles=tiles,
    )


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
    def _layout(
        *,
        num_tokens: int,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype,
    ) -> Layout:
        sizes = {
            "num_tokens": num_tokens,
            "hidden": hidden,
            "intermediate": intermediate,
            "num_experts": num_experts,
            "top_k": top_k,
        }
        for name, value in sizes.items():
            if value < (0 if name == "num_tokens" else 1):
                raise ConfigurationError(f"{name} must be positive; got {value}")
        if not isinstance(dtype, torch.dtype):
            raise ConfigurationError(f"dtype is {dtype!r}", hint="use torch.bfloat16 or another")
        # The smallest tiles and chunks of any backend: they need the most flags and counts.
        return layout_for(
            **sizes,
            dtype=dtype,
            tile_rows=SMALLEST_TILE_ROWS,
            chunk_slots=min(CHUNK_SLOTS.values()),
        )

    @classmethod
    def size(
        cls,
        *,
        num_tokens: int,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype,
    ) -> int:
        """Return bytes that are enough for calls up to these sizes, whatever the routing.

        Args:
            num_tokens: Most tokens, T.
            hidden: H.
            intermediate: I.
            num_experts: E.
            top_k: K.
            dtype: Of the tokens.

        Returns:
            Bytes of both buffers: about T K (H + I) elements.

        Raises:
            ConfigurationError: A size is not positive (there may be 0 tokens), or dtype is none.

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
        layout = cls._layout(
            num_tokens=num_tokens,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            dtype=dtype,
        )
        return layout.scratch_bytes + 4 * layout.control_words

    @classmethod
    def allocate(
        cls,
        *,
        num_tokens: int,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Allocate one.

        Args:
            num_tokens: As in ``size``.
            hidden: As in ``size``.
            intermediate: As in ``size``.
            num_experts: As in ``size``.
            top_k: As in ``size``.
            dtype: As in ``size``.
            device: Where.

        Returns:
            The workspace, ready for use.

        Raises:
            ConfigurationError: As ``size``.
        """
        layout = cls._layout(
            num_tokens=num_tokens,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            dtype=dtype,
        )
        return cls(
            control=torch.zeros(layout.control_words, dtype=torch.int32, device=device),
            scratch=torch.empty(layout.scratch_bytes, dtype=torch.uint8, device=device),
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

        Args:
            x: Tokens.
            w2: Second weights.
            top_k: K.

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
        experts, hidden, inner = w2.shape
        layout = self._layout(
            num_tokens=len(x),
            hidden=hidden,
            intermediate=inner,
            num_experts=experts,
            top_k=max(top_k, 1),
            dtype=x.dtype,
        )
        self.check(layout, x.device)

    def check(self, layout: Layout, device: torch.device) -> None:
        """Check that a call fits.

        Args:
            layout: Of the call.
            device: Of the call.

        Raises:
            ConfigurationError: It does not, or the workspace is elsewhere.
        """
        if self.control.device != device or self.scratch.device != device:
            raise ConfigurationError(
                f"the workspace is on {self.scratch.device}, the tokens are on {device}",
                hint="Workspace.allocate(..., device=x.device)",
            )
        short = (
            layout.scratch_bytes > self.scratch.numel()
            or layout.control_words > self.control.numel()
        )
        if short:
            raise ConfigurationError(
                f"the workspace has {self.scratch.numel()} bytes of scratch and "
                f"{self.control.numel()} control words; this call needs {layout.scratch_bytes} "
                f"and {layout.control_words}",
                hint="give Workspace.allocate the largest num_tokens, top_k and sizes in use",
            )
