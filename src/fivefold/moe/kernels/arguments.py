"""What the kernels take: sizes fixed when they are compiled, and pointers by name.

A variant depends on data type, activation and sizes of the model, never on the number of tokens.
Tuples of pointers go to a kernel as they are. Whole numbers that change from call to call do not
stand in them: triton would compile a kernel for each kind of number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fivefold.moe.kernels.workspace import CHUNK_SLOTS, CallSizes

_GIVE_UP_NS = 50_000_000  # in the interpreter, where a wait that does not end at once never will
_DEBUG_GIVE_UP_NS = 30_000_000_000


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


_INTERPRETED = Tiles(
    rows=16, columns=16, second_columns=16, depth=16, group=2, combine_tokens=8, combine_columns=16
)


def tiles_for(
    dtype: torch.dtype, *, halves: bool, precision: str, by_descriptor: bool, interpreted: bool
) -> Tiles:
    """Return the variant for a data type; chosen by what compiles without spills, not by timing.

    ``halves``: the first product has two of its tiles in registers at a time, as that of a gated
    activation, or of the backward. Weights that do not come through the tensor memory accelerator
    (``by_descriptor``) need registers for their addresses. A weight gradient's tile is ``rows`` by
    ``second_columns``.
    """
    if interpreted:
        return _INTERPRETED
    if not by_descriptor or (dtype == torch.float32 and precision != "tf32"):
        # Ordinary multiply-adds unroll the depth: 32 would spill.
        depth = 16 if dtype == torch.float32 and precision == "ieee" else 32
        return Tiles(rows=64, columns=64, second_columns=64, depth=depth, stages=2)
    widest, depth = (128, 32) if dtype == torch.float32 else (256, 64)
    columns = widest // 2 if halves else widest
    return Tiles(rows=128, columns=columns, second_columns=widest, depth=depth)


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
    interpreted: bool,
) -> Sizes:
    """Return the sizes of a call on one rank."""
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
    return _DEBUG_GIVE_UP_NS if seconds == 1 else seconds * 1_000_000_000
