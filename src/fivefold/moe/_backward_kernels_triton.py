# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, E741, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""The backward's launches: each kernel runs one kind of task of ``_backward_tasks_triton``.

A program takes every ``num_programs``-th task, so any number of programs gives the same bits; with
one program per task the machine's own scheduler balances them. The order between launches is that
of the stream: nothing waits inside a kernel. How many row tiles there are stands in device memory,
so launches are as large as the most there can be, and tasks beyond the last tile are empty.
"""

import triton
import triton.language as tl

from fivefold.moe._backward_tasks_triton import (
    bias_gradient,
    expert_ranges,
    hidden_gradient,
    routing_gradient,
    token_gradient,
    weight_gradient,
)


@triton.jit(do_not_specialize=["num_chunks"])
def ranges_kernel(
    counts,
    range_first,
    range_stop,
    num_chunks,
    E: tl.constexpr,
    EP: tl.constexpr,
    READ: tl.constexpr,
):
    """``expert_ranges``, by one program."""
    expert_ranges(counts, range_first, range_stop, num_chunks, E, EP, READ)


@triton.jit(do_not_specialize=["num_slots", "tasks"])
def hidden_gradient_kernel(
    gradient,
    w2_deep,
    b13,
    weights,
    hidden,
    d_hidden,
    inner,
    partial,
    num_tiles,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    num_slots,
    tasks,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``hidden_gradient`` for all row tiles; groups of them share their columns of the weights."""
    columns: tl.constexpr = (I + BN - 1) // BN
    tiles = tl.load(num_tiles)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        place = task % (GROUP * columns)
        m = task // (GROUP * columns) * GROUP + place % GROUP
        if m < tiles:
            hidden_gradient(
                m, place // GROUP, gradient, w2_deep, b13, weights, hidden, d_hidden, inner,
                partial, tile_expert, tile_first, tile_stop, slot_of_row, num_slots, H, I, K,
                GATED, ACTIVATION, WEIGHT_ON_INPUT, TMA, INTERPRETED, PRECISION, BM, BN, BK,
                STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tasks"])
def token_gradient_kernel(
    d_hidden,
    w13_deep,
    outputs,
    num_tiles,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    tasks,
    H: tl.constexpr,
    D: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN2: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``token_gradient`` for all row tiles, in the same order."""
    columns: tl.constexpr = (H + BN2 - 1) // BN2
    tiles = tl.load(num_tiles)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        place = task % (GROUP * columns)
        m = task // (GROUP * columns) * GROUP + place % GROUP
        if m < tiles:
            token_gradient(
                m, place // GROUP, d_hidden, w13_deep, outputs, tile_expert, tile_first,
                tile_stop, slot_of_row, H, D, TMA, INTERPRETED, PRECISION, BM, BN2, BK, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tasks"])
def weight_gradient_kernel(
    left,
    right,
    weights,
    out,
    range_first,
    range_stop,
    slot_of_row,
    tasks,
    P: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN2: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``weight_gradient`` for all experts, tile by tile: BM of P columns by BN2 of Q columns."""
    p_tiles: tl.constexpr = (P + BM - 1) // BM
    q_tiles: tl.constexpr = (Q + BN2 - 1) // BN2
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        place = task % (p_tiles * q_tiles)
        weight_gradient(
            task // (p_tiles * q_tiles), place % p_tiles, place // p_tiles, left, right, weights,
            out, range_first, range_stop, slot_of_row, P, Q, K, GATHER_LEFT, WEIGHTED,
            INTERPRETED, PRECISION, BM, BN2, BK, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tasks"])
def bias_gradient_kernel(
    source,
    weights,
    out,
    range_first,
    range_stop,
    slot_of_row,
    tasks,
    N: tl.constexpr,
    K: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """``bias_gradient`` for all experts."""
    columns: tl.constexpr = (N + BN - 1) // BN
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        bias_gradient(
            task // columns, task % columns, source, weights, out, range_first, range_stop,
            slot_of_row, N, K, GATHER, WEIGHTED, INTERPRETED, BK, BN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots", "tasks"])
def routing_gradient_kernel(
    partial,
    gradient,
    b2,
    tile_of_slot,
    tile_expert,
    out,
    num_slots,
    tasks,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """``routing_gradient`` for all slots; BN is that of the launch that wrote the parts."""
    columns: tl.constexpr = (I + BN - 1) // BN
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        routing_gradient(
            task, partial, gradient, b2, tile_of_slot, tile_expert, out, num_slots, columns, H, K,
            WEIGHT_ON_INPUT, INTERPRETED, BT, BH,
        )  # fmt: skip
