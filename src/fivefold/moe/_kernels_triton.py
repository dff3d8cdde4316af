# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, E741, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""The single kernel, and the same tasks as five launches.

``moe_kernel`` is persistent: its programs take tickets until there are none. Tickets in order:

    count chunk 0 .. C-1 | place chunk 0 .. C-1 | products | combine block 0 .. B-1

and the products in steps of G row tiles: step s has the first products of group s and the second
products of group s - lag, so that a second product finds its inputs finished, and still in the L2
cache. Whoever takes a ticket first waits for what it needs; all of that has lower tickets
(``_sync_triton`` says why this cannot hang).

Numbers that depend on T are run-time arguments, so that another T needs no other kernel.
"""

import triton
import triton.language as tl

from fivefold.moe._sync_triton import (
    COUNTED,
    FLAGS,
    PLACED,
    leave,
    publish,
    take_ticket,
    wait,
    wait_all,
)
from fivefold.moe._tasks_triton import (
    combine,
    count_chunk,
    first_product,
    place_chunk,
    second_product,
)


@triton.jit
def _product_task(index, num_groups, lag, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Which step, which product and which place within the step an index of the products means.

    FIRST and SECOND are how many tasks of either product a group of row tiles has. The first
    ``lag`` steps have first products only, the last ``lag`` second products only.
    """
    lead = lag * FIRST
    both = (num_groups - lag) * (FIRST + SECOND)
    middle = index - lead
    last = middle - both
    in_step = middle % (FIRST + SECOND)
    step = middle // (FIRST + SECOND)
    leading = middle < 0
    trailing = last >= 0
    second = trailing | (~leading & (in_step >= FIRST))
    group = tl.where(second, step, step + lag)
    group = tl.where(leading, index // FIRST, group)
    group = tl.where(trailing, num_groups - lag + last // SECOND, group)
    place = tl.where(second, in_step - FIRST, in_step)
    place = tl.where(leading, index % FIRST, place)
    place = tl.where(trailing, last % SECOND, place)
    return second, group, place


_RUN_TIME = [
    "num_tokens",
    "num_slots",
    "num_chunks",
    "max_tiles",
    "max_lag",
    "combine_columns",
]


@triton.jit(do_not_specialize=_RUN_TIME)
def moe_kernel(
    x,
    w13,
    w2,
    ids,
    weights,
    b13,
    b2,
    out,
    control,
    counts,
    num_tiles,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    tile_of_slot,
    inner,
    hidden,
    outputs,
    num_tokens,
    num_slots,
    num_chunks,
    max_tiles,
    max_lag,
    combine_columns,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    READ: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BN2: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """The whole forward in one launch."""
    first_columns: tl.constexpr = (I + BN - 1) // BN
    second_columns: tl.constexpr = (H + BN2 - 1) // BN2
    first_done = control + FLAGS
    second_done = control + FLAGS + max_tiles

    ticket = take_ticket(control)
    while ticket < num_chunks:
        count_chunk(ticket, ids, counts, num_slots, E, EP, CHUNK)
        publish(control + COUNTED)
        ticket = take_ticket(control)
    while ticket < 2 * num_chunks:
        wait(control + COUNTED, num_chunks, control, SPIN_LIMIT)
        place_chunk(
            ticket - num_chunks, ids, counts, num_tiles, tile_expert, tile_first, tile_stop,
            slot_of_row, tile_of_slot, num_slots, num_chunks, E, EP, CHUNK, PART, READ, BM,
        )  # fmt: skip
        publish(control + PLACED)
        ticket = take_ticket(control)

    wait(control + PLACED, num_chunks, control, SPIN_LIMIT)
    tiles = tl.load(num_tiles)
    groups = (tiles + GROUP - 1) // GROUP
    lag = tl.minimum(max_lag, groups)
    base = 2 * num_chunks
    stop = base + groups * GROUP * (first_columns + second_columns)
    while ticket < stop:
        second, group, place = _product_task(
            ticket - base, groups, lag, GROUP * first_columns, GROUP * second_columns
        )
        m = group * GROUP + place % GROUP
        n = place // GROUP
        if m < tiles:
            if not second:
                first_product(
                    m, n, x, w13, b13, weights, inner, hidden, tile_expert, tile_first,
                    tile_stop, slot_of_row, H, I, K, E, GATED, ACTIVATION, WEIGHT_ON_INPUT, TMA,
                    INTERPRETED, PRECISION, BM, BN, BK, STAGES,
                )  # fmt: skip
                publish(first_done + m)
            else:
                wait(first_done + m, first_columns, control, SPIN_LIMIT)
                second_product(
                    m, n, inner, w2, b2, outputs, tile_expert, tile_first, tile_stop,
                    slot_of_row, H, I, E, TMA, INTERPRETED, PRECISION, BM, BN2, BK, STAGES,
                )  # fmt: skip
                publish(second_done + m)
        ticket = take_ticket(control)

    parts = (H + combine_columns - 1) // combine_columns
    end = stop + (num_tokens + BT - 1) // BT * parts
    while ticket < end:
        block = (ticket - stop) // parts
        index = tl.arange(0, BT * KP)
        slot = (block * BT + index // KP) * K + index % KP
        mask = (index % KP < K) & (slot < num_slots)
        tile = tl.load(tile_of_slot + slot, mask=mask, other=-1)
        wait_all(second_done + tile, tile >= 0, second_columns, control, SPIN_LIMIT)
        combine(
            block, (ticket - stop) % parts * combine_columns, combine_columns, outputs, weights,
            tile_of_slot, out, num_tokens, H, K, WEIGHT_ON_INPUT, INTERPRETED, BT, BH,
        )  # fmt: skip
        ticket = take_ticket(control)
    leave(control, 2 * max_tiles, 1024)


@triton.jit(do_not_specialize=["num_slots"])
def count_kernel(ids, counts, num_slots, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """``count_chunk`` as a launch of its own."""
    count_chunk(tl.program_id(0), ids, counts, num_slots, E, EP, CHUNK)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"])
def place_kernel(
    ids,
    counts,
    num_tiles,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    tile_of_slot,
    num_slots,
    num_chunks,
    E: tl.constexpr,
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    READ: tl.constexpr,
    BM: tl.constexpr,
):
    """``place_chunk`` as a launch of its own."""
    place_chunk(
        tl.program_id(0), ids, counts, num_tiles, tile_expert, tile_first, tile_stop, slot_of_row,
        tile_of_slot, num_slots, num_chunks, E, EP, CHUNK, PART, READ, BM,
    )  # fmt: skip


@triton.jit
def first_kernel(
    x,
    w13,
    b13,
    weights,
    inner,
    hidden,
    num_tiles,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
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
    """``first_product`` as a launch of its own, over the most tiles there can be."""
    columns: tl.constexpr = (I + BN - 1) // BN
    group = tl.program_id(0) // (GROUP * columns)
    place = tl.program_id(0) % (GROUP * columns)
    m = group * GROUP + place % GROUP
    if m < tl.load(num_tiles):
        first_product(
            m, place // GROUP, x, w13, b13, weights, inner, hidden, tile_expert, tile_first,
            tile_stop, slot_of_row, H, I, K, E, GATED, ACTIVATION, WEIGHT_ON_INPUT, TMA,
            INTERPRETED, PRECISION, BM, BN, BK, STAGES,
        )  # fmt: skip


@triton.jit
def second_kernel(
    inner,
    w2,
    b2,
    outputs,
    num_tiles,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN2: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``second_product`` as a launch of its own, over the most tiles there can be."""
    columns: tl.constexpr = (H + BN2 - 1) // BN2
    group = tl.program_id(0) // (GROUP * columns)
    place = tl.program_id(0) % (GROUP * columns)
    m = group * GROUP + place % GROUP
    if m < tl.load(num_tiles):
        second_product(
            m, place // GROUP, inner, w2, b2, outputs, tile_expert, tile_first, tile_stop,
            slot_of_row, H, I, E, TMA, INTERPRETED, PRECISION, BM, BN2, BK, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "combine_columns"])
def combine_kernel(
    outputs,
    weights,
    tile_of_slot,
    out,
    num_tokens,
    combine_columns,
    H: tl.constexpr,
    K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """``combine`` as a launch of its own."""
    parts = (H + combine_columns - 1) // combine_columns
    combine(
        tl.program_id(0) // parts, tl.program_id(0) % parts * combine_columns, combine_columns,
        outputs, weights, tile_of_slot, out, num_tokens, H, K, WEIGHT_ON_INPUT, INTERPRETED, BT, BH,
    )  # fmt: skip
