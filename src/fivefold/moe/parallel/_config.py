"""Sizes of a one-sided group, the layout of its memory, and checks of calls against them.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fivefold.errors import ConfigurationError, UnsupportedError, require_whole
from fivefold.moe.kernels.arguments import (
    CHUNK_SLOTS,
    CONTROL_WORDS,
    CallSizes,
    Layout,
    Sizes,
    Tiles,
    interpreting,
    power_of_two,
    sizes_for,
    table_sizes,
    tiles_for,
)
from fivefold.moe.kernels.launch import DTYPES
from fivefold.moe.operator.activations import activation_named
from fivefold.moe.operator.layer import MoEConfig
from fivefold.moe.operator.operands import PRECISIONS, Precision, check_operands, check_precision
from fivefold.moe.parallel._heaps import SymmetricHeap
from fivefold.moe.routing.router import Router

_SCORES = frozenset({"softmax", "topk_softmax", "sigmoid"})  # of the kernel's gate


@dataclass(frozen=True, kw_only=True)
class OneSidedConfig:
    """Sizes of a one-sided group; the same on all ranks.

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
        >>> config = OneSidedConfig(
        ...     ranks=4, experts=8, hidden=64, intermediate=32, top_k=2, max_tokens=100
        ... )
        >>> config.local_experts, config.receive_rows
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
            require_whole(name, getattr(self, name), most=1024 if name == "ranks" else None)
        if self.experts % self.ranks:
            raise ConfigurationError(
                f"{self.experts} experts cannot be shared out evenly among {self.ranks} ranks",
                hint="choose a number of ranks that divides the number of experts",
            )
        if self.top_k > self.experts:
            raise ConfigurationError(
                f"top_k is {self.top_k}, there are {self.experts} experts",
                hint="use at most as many as there are experts",
            )
        activation_named(self.activation)
        check_precision(self.precision)
        self._check_memory()

    def _check_memory(self) -> None:
        if self.dtype not in DTYPES:
            names = ", ".join(sorted(str(dtype) for dtype in DTYPES))
            raise ConfigurationError(f"dtype is {self.dtype}", hint=f"use {names}")
        if self.capacity is not None and self.max_rows is not None:
            message = "max_rows is for the compact layout, and capacity asks for the other one"
            raise ConfigurationError(message, hint="give one of them")
        for name in ("capacity", "max_rows"):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value)
        if max(self.receive_rows, self.max_tokens * self.top_k) >= 2**31 - 2**16:
            raise ConfigurationError(
                f"a rank would need room for {self.receive_rows} rows",
                hint="lower max_tokens or capacity, or set max_rows: it must be below 2^31",
            )

    @property
    def local_experts(self) -> int:
        """Return the experts of a rank, L."""
        return self.experts // self.ranks

    @property
    def by_descriptor(self) -> bool:
        """Return whether the tensor memory accelerator can read weights of this shape."""
        sizes = (self.hidden, self.intermediate)
        return all(size * self.dtype.itemsize % 16 == 0 for size in sizes)

    @property
    def tiles(self) -> Tiles:
        """Return the kernel's variant, narrower than on one rank: addresses take registers."""
        gated = activation_named(self.activation).gated
        how: dict[str, Any] = {"precision": self.precision, "by_descriptor": self.by_descriptor}
        tiles = tiles_for(self.dtype, halves=gated, **how)
        slow = self.dtype == torch.float32 and self.precision != "tf32"
        columns = min(tiles.columns, 32 if slow and gated else 128)
        return replace(tiles, columns=columns, second_columns=min(tiles.second_columns, 128))

    @property
    def cell_rows(self) -> int:
        """Return C, the rows of a cell: the capacity in whole row tiles; 0 if compact."""
        return 0 if self.capacity is None else _up(self.capacity, self.tiles.rows)

    @property
    def receive_rows(self) -> int:
        """Return the rows that a rank has room to receive."""
        if self.capacity is not None:
            return self.experts * self.cell_rows
        most = self.ranks * self.max_tokens * min(self.top_k, self.local_experts)
        return most if self.max_rows is None else min(most, self.max_rows)

    @property
    def return_rows(self) -> int:
        """Return the rows that a rank has room for when its own come back."""
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
            >>> config = OneSidedConfig(
            ...     ranks=8, experts=64, hidden=2048, intermediate=1024, top_k=2, max_tokens=8192,
            ...     capacity=256,
            ... )
            >>> rows = 2 * 64 * 256  # to receive and to return
            >>> 1.0 < config.heap_bytes() / (rows * 2048 * 2) < 1.01
            True
        """
        return heap_layout(self).nbytes


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def source_tiles(config: OneSidedConfig) -> int:
    """Return the most row tiles that a rank's own rows are cut into."""
    slots = config.max_tokens * config.top_k
    return slots // config.tiles.rows + min(config.experts, slots)


def receive_tiles(config: OneSidedConfig) -> int:
    """Return the most row tiles that the rows which a rank receives are cut into."""
    rows = config.receive_rows
    cut_short = min(config.local_experts, rows) if config.capacity is None else 0
    return rows // config.tiles.rows + cut_short


def heap_layout(config: OneSidedConfig) -> Layout:
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
        "weights": (config.receive_rows, torch.float32),
        "receive": (config.receive_rows * config.hidden * (1 + config.training), config.dtype),
        "returned": (config.return_rows * config.hidden, config.dtype),
        "return_weights": (config.return_rows if config.training else 0, torch.float32),
        "shadow": (config.receive_rows if config.debug else 0, int32),
        "return_shadow": (config.return_rows * columns if config.debug else 0, int32),
    }
    return Layout.of(sizes, max_tiles=cells)


def private_layout(config: OneSidedConfig) -> Layout:
    """Lay the memory of its own of a rank out; ``max_tiles`` is that of received rows."""
    slots, rows = config.max_tokens * config.top_k, config.receive_rows
    chunks = max(1, -(-slots // CHUNK_SLOTS[interpreting()]))
    recv, experts = receive_tiles(config), config.experts
    counts = {
        "counts": chunks * experts,
        **dict.fromkeys(("totals", "own_first", "return_first", "return_tile"), experts),
        "return_row": slots,
        "expert_first": config.local_experts,
        **dict.fromkeys(("count_rows", "count_upper"), recv * config.ranks),
        "recv_tiles": 1,
        **dict.fromkeys(("recv_expert", "recv_first", "recv_stop"), recv),
    }
    sizes = {
        **{name: (count, torch.int32) for name, count in counts.items()},
        **table_sizes(source_tiles(config), slots),
        "return_address": (rows, torch.int64),
        "word_address": (rows if config.debug or config.training else 0, torch.int64),
        "count_address": (recv * config.ranks, torch.int64),
        "inner": (rows * config.intermediate, config.dtype),
    }
    words = _up(CONTROL_WORDS + experts + recv, 64)
    return Layout.of(sizes, control_words=words, num_chunks=chunks, max_tiles=recv)


def sizes_of(
    config: OneSidedConfig, *, num_local: int, router: Router | None = None, **changes: Any
) -> Sizes:
    """Return what is fixed when the kernels are compiled; ``num_local`` ranks share a launch.

    ``router`` is that of the gate in the launch; None where ids and weights are given.
    ``changes`` are sizes of this launch that differ from the group's.
    """
    router = router or Router(top_k=config.top_k)
    call: CallSizes = {
        "num_tokens": config.max_tokens,
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "num_experts": config.experts,
        "top_k": config.top_k,
        "dtype": config.dtype,
    }
    sizes = sizes_for(
        config.tiles,
        call,
        activation=activation_named(config.activation),
        weight_on_input=False,
        precision=config.precision,
        by_descriptor=config.by_descriptor,
    )
    of_groups: dict[str, Any] = {
        "V": num_local,
        "P": config.ranks,
        "PP": power_of_two(config.ranks),
        "L": config.local_experts,
        "LP": power_of_two(config.local_experts),
        "C": config.cell_rows,
        "SHADOW": config.debug,
        "COPY": 16 if interpreting() else 64,
        "SCORE": router.score,
        "NORMALIZE": router.normalize,
        "SCALE": router.scale,
        "GROUPS": router.groups,
        "TOP_GROUPS": router.top_groups,
        "GROUP_SUM": router.group_score == "top2_sum",
        "BG": 16 if interpreting() or sizes.EP > 256 else 32,
        "BD": 16 if interpreting() else 64,
    }
    return replace(sizes, **of_groups | changes)


def check_call(
    config: OneSidedConfig,
    heap: SymmetricHeap,
    operands: tuple[torch.Tensor, ...],
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    num_tokens: Sequence[int] | None,
) -> tuple[int, ...]:
    """Check operands without looking at values; return the tokens of each rank of this process."""
    b13, b2 = biases
    x, w13, w2, ids, weights = operands
    kind = activation_named(config.activation)
    check_operands(x, w13, w2, ids, weights, activation=kind, b13=b13, b2=b2)
    wanted = (heap.num_local * config.local_experts, config.hidden, config.intermediate)
    if tuple(w2.shape) != wanted or ids.shape[1] != config.top_k or x.dtype != config.dtype:
        raise ConfigurationError(
            f"w2 {tuple(w2.shape)}, top_k {ids.shape[1]} and {x.dtype} are not those of the "
            f"group: {wanted}, {config.top_k}, {config.dtype}",
            hint="a rank passes the weights of its own experts, a virtual heap those of all",
        )
    if x.device != heap.device:
        raise ConfigurationError(
            f"x is on {x.device}, the heap on {heap.device}", hint="bring x there first"
        )
    if num_tokens is None:  # as evenly as can be
        each, more = divmod(len(x), heap.num_local)
        num_tokens = [each + (place < more) for place in range(heap.num_local)]
    counts = tuple(require_whole("num_tokens", number, least=0) for number in num_tokens)
    if len(counts) != heap.num_local or sum(counts) != len(x):
        raise ConfigurationError(
            f"num_tokens is {counts}, for {heap.num_local} ranks and {len(x)} tokens",
            hint="give one count for every rank of this process; they add up to len(x)",
        )
    if max(counts) > config.max_tokens:
        raise ConfigurationError(
            f"a rank has {max(counts)} tokens, the group was made for {config.max_tokens}",
            hint="make it with a larger max_tokens, on all ranks",
        )
    return counts


def check_options(
    config: OneSidedConfig, *, activation: str | None, precision: str | None, dtype: torch.dtype
) -> None:
    """Check what a call asks for against what the group was made for; None asks for nothing."""
    if activation not in {None, config.activation}:
        raise ConfigurationError(
            f"activation is {activation!r}, the group was made for {config.activation!r}",
            hint="make OneSidedConfig and the call with the same activation",
        )
    if precision is None or dtype != torch.float32:
        return
    check_precision(precision)
    if PRECISIONS.index(config.precision) > PRECISIONS.index(precision):
        raise ConfigurationError(
            f"precision is {precision!r}, the group computes in {config.precision!r}",
            hint=f"ask for precision={config.precision!r}, or make the group with {precision!r}",
        )


def check_gate(
    config: OneSidedConfig,
    x: torch.Tensor,
    gate: torch.Tensor,
    router: Router,
    *,
    selection_bias: torch.Tensor | None,
) -> None:
    """Check the operands of a gate in the launch."""
    router.check_experts(config.experts)
    if router.score not in _SCORES or router.epsilon != Router(top_k=1).epsilon:
        raise UnsupportedError(
            f"the gate in the launch has no score {router.score!r} with epsilon {router.epsilon}",
            hint="route first, and call fused_moe(..., group=group)",
        )
    if router.top_k != config.top_k:
        raise ConfigurationError(
            f"the router has top_k {router.top_k}, the group {config.top_k}",
            hint="make Router and OneSidedConfig with the same top_k",
        )
    if config.capacity is not None and config.capacity < config.max_tokens:
        raise UnsupportedError(
            f"capacity is {config.capacity}, below max_tokens {config.max_tokens}: who is "
            "dropped is decided before the launch",
            hint="route first, or use the compact layout",
        )
    for name, tensor, shape in (
        ("gate", gate, (config.experts, config.hidden)),
        ("selection_bias", selection_bias, (config.experts,)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.device != x.device):
            raise ConfigurationError(
                f"{name} is {tuple(tensor.shape)} on {tensor.device}; it must be {shape} on "
                f"{x.device}",
                hint="every rank passes that of all experts",
            )
    if gate.dtype != x.dtype:
        raise ConfigurationError(
            f"gate has dtype {gate.dtype}, x has {x.dtype}", hint="cast the gate to x's"
        )


def check_layer(config: OneSidedConfig, layer: MoEConfig) -> None:
    """Refuse a layer that a group was not made for."""
    for name in ("hidden", "intermediate", "top_k", "activation"):
        its, ours = getattr(layer.router if name == "top_k" else layer, name), getattr(config, name)
        if its != ours:
            raise ConfigurationError(
                f"{name} of the layer is {its!r}, of the group {ours!r}",
                hint="make MoEConfig and OneSidedConfig with the same sizes",
            )
    if not layer.recompute:
        message = "a one-sided group keeps nothing for the backward"
        raise UnsupportedError(message, hint="use MoEConfig(recompute=True)")
