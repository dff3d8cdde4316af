"""What the kernels take: memory to work in, pointers by name, sizes fixed when they are compiled.

Two buffers. ``control`` holds counters and flags, zero between launches: the kernel leaves it as it
found it, so that no call begins with a memset. ``scratch`` holds tables, the inner values and the
outputs per slot; what lies in it between calls means nothing.

A variant depends on data type, activation and sizes of the model, never on the number of tokens.
Tuples of pointers go to a kernel as they are. Whole numbers that change from call to call do not
stand in them: triton would compile a kernel for each kind of number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypedDict, Unpack

import torch

from fivefold.errors import ConfigurationError, require_whole

_GIVE_UP_NS = 50_000_000  # in the interpreter, where a wait that does not end at once never will
_SMALLEST_TILE_ROWS = 16
_ALIGNMENT_BYTES = 256
CONTROL_WORDS = 448
"""Words before the flags; as ``FLAGS`` in ``sync``."""
CHUNK_SLOTS = {False: 1024, True: 32}
"""Assignments that one counting task looks at, by whether the kernel is interpreted."""


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
    tile_rows: int = _SMALLEST_TILE_ROWS,
    chunk_slots: int = min(CHUNK_SLOTS.values()),
    **sizes: Unpack[CallSizes],
) -> Layout:
    """Lay the scratch buffer out; for the smallest tiles and chunks, which need the most of it."""
    for name, value in sizes.items():
        if name != "dtype":
            require_whole(name, value, least=0 if name == "num_tokens" else 1)
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
            >>> qwen3 = dict(hidden=2048, intermediate=768, num_experts=128, top_k=8)
            >>> Workspace.size(num_tokens=8192, **qwen3, dtype=torch.bfloat16) // 2**20
            353
        """
        layout = layout_for(**sizes)
        return layout.nbytes + 4 * layout.control_words

    @classmethod
    def allocate(cls, *, device: str | torch.device = "cpu", **sizes: Unpack[CallSizes]) -> Self:
        """Allocate one on a device, ready for use; sizes and errors are those of ``size``."""
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
            ConfigurationError: It is too small, on another device, or of another form.
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
            ConfigurationError: It does not, or its tokens are on another device.
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


class Operands(NamedTuple):
    """The tensors of a call, but for the experts' weights, which may be descriptors."""

    x: Any
    ids: Any
    weights: Any
    b13: Any = None
    b2: Any = None
    out: Any = None


class Tables(NamedTuple):
    """Tables of rows: slots sorted by expert; an expert's rows are cut into row tiles."""

    counts: Any  # of each chunk of slots and expert
    num_tiles: Any
    tile_expert: Any
    tile_first: Any
    tile_stop: Any
    slot_of_row: Any
    tile_of_slot: Any


class Heap(NamedTuple):
    """All ranks' heaps: their addresses, and the bytes from there to each part."""

    bases: Any
    signals: Any
    counts: Any
    arrivals: Any
    return_counts: Any
    weights: Any
    receive: Any
    returned: Any
    return_weights: Any
    shadow: Any
    return_shadow: Any


class Plan(NamedTuple):
    """A rank's tables of rows to send, to receive and to return."""

    totals: Any
    own_first: Any
    return_row: Any
    expert_first: Any
    return_first: Any
    return_tile: Any
    return_address: Any
    word_address: Any
    count_address: Any
    count_rows: Any
    count_upper: Any
    recv_tiles: Any
    recv_expert: Any
    recv_first: Any
    recv_stop: Any


class Launch(NamedTuple):
    """Arguments that the ranks of a launch share; private tables are ``scratch_words`` apart."""

    control: Any
    stats: Any
    token_first: Any  # of each rank, and the end
    scratch_words: Any
    control_words: Any
    max_tiles: Any
    max_rows: Any
    limit_ns: Any
    num_return_counts: Any


class GatedFunction(Protocol):
    """Activation as the kernels need it."""

    @property
    def plain(self) -> str:
        """Return the name of f."""

    @property
    def gated(self) -> bool:
        """Return whether f(gate) is multiplied with an up half."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of one variant of the kernels.

    ``group`` row tiles share a step; a combining task has ``combine_tokens`` and adds
    ``combine_columns`` up at a time.
    """

    rows: int
    columns: int  # of the first product
    second_columns: int
    depth: int
    stages: int = 3
    warps: int = 8
    group: int = 8
    combine_tokens: int = 8
    combine_columns: int = 256


_INTERPRETED = Tiles(rows=16, columns=16, second_columns=16, depth=16, group=2, combine_columns=16)


def tiles_for(
    dtype: torch.dtype,
    *,
    halves: bool,
    precision: str,
    by_descriptor: bool,
    few: bool = False,
) -> Tiles:
    """Return the variant for a data type: timed on an H200 for 16 bits, else what does not spill.

    ``few``: an expert has a few rows at most, as in decoding. ``halves``: the first product has two
    of its tiles in registers at a time, as that of a gated activation, or of the backward. Weights
    that do not come through the tensor memory accelerator (``by_descriptor``) need registers for
    their addresses. A weight gradient's tile is ``rows`` by ``second_columns``.
    """
    if interpreting():
        return _INTERPRETED
    if not by_descriptor or (dtype == torch.float32 and precision != "tf32"):
        # Ordinary multiply-adds unroll the depth: 32 would spill.
        depth = 16 if dtype == torch.float32 and precision == "ieee" else 32
        return Tiles(rows=64, columns=64, second_columns=64, depth=depth, stages=2)
    if dtype == torch.float32:
        return Tiles(rows=128, columns=64 if halves else 128, second_columns=128, depth=32)
    if few:
        return Tiles(rows=64, columns=128, second_columns=256, depth=64, warps=4)
    columns = 128 if halves else 256
    return Tiles(rows=128, columns=columns, second_columns=256, depth=64, stages=4)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All that is fixed when a kernel is compiled."""

    H: int  # hidden
    I: int  # inner  # noqa: E741 - as in the formulas
    K: int  # experts per token; KP: the next power of two
    KP: int
    E: int  # experts; EP likewise
    EP: int
    GATED: bool
    ACTIVATION: str
    WEIGHT_ON_INPUT: bool
    TMA: bool  # whether weights are descriptors
    INTERPRETED: bool
    PRECISION: str
    BYTES: int  # of an element
    CHUNK: int  # slots that a counting task looks at, PART of them at a time
    PART: int
    READ: int  # chunks whose counts are read at a time
    BM: int  # a tile of the first product: BM rows, BN columns, BK deep
    BN: int
    BK: int
    BN2: int  # columns of the second product
    STAGES: int
    GROUP: int  # row tiles of a step
    BT: int  # a combining task: BT tokens, BH columns at a time
    BH: int
    # Of one-sided groups only.
    V: int = 1  # ranks of a launch
    P: int = 1  # ranks; PP: the next power of two
    PP: int = 1
    L: int = 1  # experts of a rank; LP likewise
    LP: int = 1
    C: int = 0  # rows of a cell in the capacity layout, 0 in the compact one
    SHADOW: bool = False  # whether writers of rows are noted
    SCALARS: bool = False  # whether a number comes back with each row
    COPY: int = 1  # columns copied at a time
    SCORE: str = ""
    NORMALIZE: bool = True
    SCALE: float = 1.0
    GROUPS: int = 1
    TOP_GROUPS: int = 1
    GROUP_SUM: bool = False
    BG: int = 1  # a task of the gate: BG tokens, BD deep
    BD: int = 1


def sizes_for(
    tiles: Tiles,
    call: CallSizes,
    *,
    activation: GatedFunction,
    weight_on_input: bool,
    precision: str,
    by_descriptor: bool,
) -> Sizes:
    """Return the sizes of a call on one rank."""
    interpreted = interpreting()
    bins = max(16, power_of_two(call["num_experts"]))
    return Sizes(
        H=call["hidden"],
        I=call["intermediate"],
        K=call["top_k"],
        KP=power_of_two(call["top_k"]),
        E=call["num_experts"],
        EP=bins,
        GATED=activation.gated,
        ACTIVATION=activation.plain,
        WEIGHT_ON_INPUT=weight_on_input,
        TMA=by_descriptor,
        INTERPRETED=interpreted,
        PRECISION=precision,
        BYTES=call["dtype"].itemsize,
        CHUNK=CHUNK_SLOTS[interpreted],
        PART=16 if interpreted else 128,
        READ=max(2, min(32, 8192 // bins)),
        BM=tiles.rows,
        BN=tiles.columns,
        BK=tiles.depth,
        BN2=tiles.second_columns,
        STAGES=tiles.stages,
        GROUP=tiles.group,
        BT=tiles.combine_tokens,
        BH=tiles.combine_columns,
    )


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def interpreting() -> bool:
    """Return whether triton runs kernels in its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def debugging() -> bool:
    """Return whether waits are bounded, and looked at after each call.

    ``FIVEFOLD_MOE_DEBUG=1`` bounds them by 30 s, a number above 1 by so many seconds.
    """
    return os.environ.get("FIVEFOLD_MOE_DEBUG", "0") != "0"


def wait_limit_ns() -> int | None:
    """Return how long a task waits for one of its own launch; None: for ever."""
    if interpreting():
        return _GIVE_UP_NS
    if not debugging():
        return None
    seconds = int(os.environ["FIVEFOLD_MOE_DEBUG"])
    return (30 if seconds == 1 else seconds) * 1_000_000_000
