"""What an exchange needs memory for: the same heap on all ranks, and each rank's private memory.

Two layouts of the rows in a heap.

*Capacity* (FlashMoE, arXiv 2506.04667, section 3.2): ``receive[source, local expert, place]`` and
``returned[peer, local expert of the peer, place]``, cells of C rows. Every valid index that a rank
writes carries its own number, so no two ranks write one row (Theorem 3.1). The paper's outgoing
buffer is left out: rows are read from the tokens and stored into the peer's memory directly.

*Compact* (dropless): counts are exchanged first; the rows for an expert lie one source after the
other, the experts one after the other, without gaps. The indices are disjoint as the intervals of
a running sum are.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace

import torch

from fivefold.errors import ConfigurationError
from fivefold.moe.kernels.arguments import (
    Sizes,
    Tiles,
    interpreting,
    power_of_two,
    sizes_for,
    tiles_for,
)
from fivefold.moe.kernels.launch import DTYPES
from fivefold.moe.kernels.workspace import CHUNK_SLOTS, CONTROL_WORDS, Layout
from fivefold.moe.operator.activations import activation_named
from fivefold.moe.operator.operands import Precision, check_precision
from fivefold.moe.routing.router import Router

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """Sizes of an exchange; the same on all ranks.

    Attributes:
        ranks: P.
        experts: Of all ranks, E: rank r has experts r E / P to (r + 1) E / P - 1.
        hidden: H.
        intermediate: I.
        top_k: K, distinct experts of a token.
        max_tokens: Most tokens of a rank in a call.
        dtype: Of tokens and weights.
        activation: A key of ``ACTIVATIONS``.
        capacity: Most rows that a rank sends to one expert, for the source-indexed layout; None
            for the compact one, which drops nothing.
        max_rows: Compact layout: rows that a rank has room for; None: for whatever may come.
        precision: Of float32, as in ``fused_moe``.
        training: Room for a backward: received rows are twice as wide, as gradients come along.
        debug: Note the writer of every row, and make it an error if a row is written twice.

    Raises:
        ConfigurationError: A number is out of range or does not fit the others.

    Examples:
        >>> config = ExchangeConfig(
        ...     ranks=4, experts=8, hidden=64, intermediate=32, top_k=2, max_tokens=100
        ... )
        >>> config.local_experts, config.room_rows
        (2, 800)
    """

    ranks: int
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    activation: str = "swiglu"
    capacity: int | None = None
    max_rows: int | None = None
    precision: Precision = "ieee"
    training: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "experts", "hidden", "intermediate", "top_k", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be positive; got {getattr(self, name)}")
        if self.ranks > 1024:
            raise ConfigurationError(f"at most 1024 ranks; got {self.ranks}")
        if self.experts % self.ranks:
            raise ConfigurationError(
                f"{self.experts} experts cannot be shared out evenly among {self.ranks} ranks",
                hint="choose a number of ranks that divides the number of experts",
            )
        if self.top_k > self.experts:
            raise ConfigurationError(f"top_k is {self.top_k}, there are {self.experts} experts")
        activation_named(self.activation)
        check_precision(self.precision)
        self._check_room()

    def _check_room(self) -> None:
        if self.dtype not in DTYPES:
            names = ", ".join(sorted(str(dtype) for dtype in DTYPES))
            raise ConfigurationError(f"dtype is {self.dtype}", hint=f"use {names}")
        if self.capacity is not None and self.max_rows is not None:
            message = "max_rows is for the compact layout, and capacity asks for the other one"
            raise ConfigurationError(message, hint="give one of them")
        for name in ("capacity", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be positive or None; got {value}")
        if max(self.room_rows, self.max_tokens * self.top_k) >= 2**31 - 2**16:
            raise ConfigurationError(
                f"a rank would need room for {self.room_rows} rows",
                hint="lower max_tokens or capacity, or set max_rows: it must be below 2^31",
            )

    @property
    def local_experts(self) -> int:
        """Experts of a rank, L."""
        return self.experts // self.ranks

    @property
    def by_descriptor(self) -> bool:
        """Return whether the tensor memory accelerator can read weights of this shape."""
        sizes = (self.hidden, self.intermediate)
        return all(size * self.dtype.itemsize % 16 == 0 for size in sizes)

    @property
    def tiles(self) -> Tiles:
        """The kernel's variant; narrower than on one rank: peers' addresses take registers."""
        gated = activation_named(self.activation).gated
        tiles = tiles_for(
            self.dtype,
            gated=gated,
            precision=self.precision,
            by_descriptor=self.by_descriptor,
            interpreted=interpreting(),
        )
        if interpreting():
            return tiles
        slow = self.dtype == torch.float32 and self.precision != "tf32"
        widest = 32 if slow and gated else 128
        return replace(
            tiles,
            columns=min(tiles.columns, widest),
            second_columns=min(tiles.second_columns, 128),
        )

    @property
    def cell_rows(self) -> int:
        """C: the capacity in whole row tiles, as cells have them; 0 in the compact layout."""
        return 0 if self.capacity is None else _up(self.capacity, self.tiles.rows)

    @property
    def room_rows(self) -> int:
        """Rows that a rank has room to receive."""
        if self.capacity is not None:
            return self.experts * self.cell_rows
        most = self.ranks * self.max_tokens * min(self.top_k, self.local_experts)
        return most if self.max_rows is None else min(most, self.max_rows)

    @property
    def return_rows(self) -> int:
        """Rows that a rank has room for when its own come back."""
        own = self.max_tokens * self.top_k
        return own if self.capacity is None else self.experts * self.cell_rows

    @property
    def tag(self) -> str:
        """Return a short text that differs where configurations do."""
        described = repr(sorted((k, str(v)) for k, v in asdict(self).items()))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def heap_bytes(self) -> int:
        """Return bytes of symmetric memory that every rank needs.

        Examples:
            >>> config = ExchangeConfig(
            ...     ranks=8, experts=64, hidden=2048, intermediate=1024, top_k=2, max_tokens=8192,
            ...     capacity=256,
            ... )
            >>> rows = 2 * 64 * 256  # to receive and to return
            >>> 1.0 < config.heap_bytes() / (rows * 2048 * 2) < 1.01
            True
        """
        return heap_layout(self).scratch_bytes

    def private_bytes(self) -> int:
        """Return bytes of memory of its own that every rank needs, mostly inner values."""
        layout = private_layout(self)
        return layout.scratch_bytes + 4 * layout.control_words


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _laid_out(
    sizes: dict[str, tuple[int, torch.dtype]], *, control_words: int, num_chunks: int, tiles: int
) -> Layout:
    sections, end = {}, 0
    for name, (count, kind) in sizes.items():
        sections[name] = (end, count, kind)
        end += _up(count * kind.itemsize, _ALIGNMENT_BYTES)
    return Layout(
        sections=sections,
        scratch_bytes=end,
        control_words=control_words,
        num_chunks=num_chunks,
        max_tiles=tiles,
    )


def source_tiles(config: ExchangeConfig) -> int:
    """Most row tiles that a rank's own rows are cut into."""
    slots = config.max_tokens * config.top_k
    return slots // config.tiles.rows + min(config.experts, slots)


def receive_tiles(config: ExchangeConfig) -> int:
    """Most row tiles that the rows which a rank receives are cut into."""
    if config.capacity is not None:
        return config.room_rows // config.tiles.rows
    return config.room_rows // config.tiles.rows + min(config.local_experts, config.room_rows)


def heap_layout(config: ExchangeConfig) -> Layout:
    """Lay a rank's symmetric memory out: words first, rows after them."""
    ranks, experts, tiles = config.ranks, config.experts, config.tiles
    int32, int64 = torch.int32, torch.int64
    compact = config.capacity is None
    cells = source_tiles(config) if compact else experts * config.cell_rows // tiles.rows
    columns = -(-config.hidden // tiles.second_columns)
    sizes = {
        "signals": (ranks, int64),
        "counts": (2 * ranks * experts if compact else 0, int32),
        "arrivals": (experts, int64),  # [P, L]
        "return_counts": (cells, int32),
        "weights": (config.room_rows, torch.float32),
        "receive": (config.room_rows * config.hidden * (1 + config.training), config.dtype),
        "returned": (config.return_rows * config.hidden, config.dtype),
        "return_weights": (config.return_rows if config.training else 0, torch.float32),
        "shadow": (config.room_rows if config.debug else 0, int32),
        "return_shadow": (config.return_rows * columns if config.debug else 0, int32),
    }
    return _laid_out(sizes, control_words=0, num_chunks=0, tiles=cells)


def private_layout(config: ExchangeConfig) -> Layout:
    """Lay the memory of its own of a rank out; ``max_tiles`` is that of received rows."""
    int32 = torch.int32
    slots = config.max_tokens * config.top_k
    chunks = max(1, -(-slots // CHUNK_SLOTS[interpreting()]))
    tiles, recv = source_tiles(config), receive_tiles(config)
    experts, local = config.experts, config.local_experts
    sizes = {
        "counts": (chunks * experts, int32),
        "totals": (experts, int32),
        "own_first": (experts, int32),
        "num_tiles": (1, int32),
        "tile_expert": (tiles, int32),
        "tile_first": (tiles, int32),
        "tile_stop": (tiles, int32),
        "slot_of_row": (slots, int32),
        "tile_of_slot": (slots, int32),
        "return_row": (slots, int32),
        "expert_first": (local, int32),
        "return_first": (experts, int32),  # [P, L]
        "return_tile": (experts, int32),
        "return_address": (config.room_rows, torch.int64),
        "word_address": (config.room_rows if config.debug or config.training else 0, torch.int64),
        "count_address": (recv * config.ranks, torch.int64),
        "count_rows": (recv * config.ranks, int32),
        "count_upper": (recv * config.ranks, int32),
        "recv_tiles": (1, int32),
        "recv_expert": (recv, int32),
        "recv_first": (recv, int32),
        "recv_stop": (recv, int32),
        "inner": (config.room_rows * config.intermediate, config.dtype),
    }
    return _laid_out(
        sizes,
        control_words=_up(CONTROL_WORDS + experts + recv, 64),
        num_chunks=chunks,
        tiles=recv,
    )


def sizes_of(
    config: ExchangeConfig, *, num_local: int, weight_on_input: bool, router: Router | None = None
) -> Sizes:
    """Return what is fixed when the kernels are compiled; ``num_local`` ranks share a launch.

    ``router`` is that of the gate in the launch; None where ids and weights are given.
    """
    router = router or Router(top_k=config.top_k)
    sizes = sizes_for(
        config.tiles,
        dtype=config.dtype,
        activation=activation_named(config.activation),
        hidden=config.hidden,
        intermediate=config.intermediate,
        num_experts=config.experts,
        top_k=config.top_k,
        weight_on_input=weight_on_input,
        precision=config.precision,
        by_descriptor=config.by_descriptor,
        interpreted=interpreting(),
    )
    return replace(
        sizes,
        V=num_local,
        P=config.ranks,
        PP=power_of_two(config.ranks),
        L=config.local_experts,
        LP=power_of_two(config.local_experts),
        C=config.cell_rows,
        SHADOW=config.debug,
        COPY=16 if interpreting() else 64,
        SCORE=router.score,
        NORMALIZE=router.normalize,
        SCALE=router.scale,
        GROUPS=router.groups,
        TOP_GROUPS=router.top_groups,
        GROUP_SUM=router.group_score == "top2_sum",
        BG=16 if interpreting() or sizes.EP > 256 else 32,
        BD=16 if interpreting() else 64,
    )
