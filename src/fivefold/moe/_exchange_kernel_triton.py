# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, C901, E741, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""The single kernel over several ranks: experts live elsewhere, and rows travel within the launch.

Phases, each with a queue of its own on every rank:

    0 gate blocks of tokens (by option), count chunks | 1 announce to peers, place chunks
    2 plan, dispatch row tiles | 3 products on rows that came | 4 combine

One launch serves V ranks: one where ranks are GPUs or processes, all of them where they
are virtual and share a GPU. Private memory of the ranks of a launch lies ``scratch_words`` apart;
tokens lie one rank after the other, ``token_first`` says where each begins.
"""

import triton
import triton.language as tl

from fivefold.moe._exchange_sync_triton import (
    ANNOUNCED,
    COUNTED,
    EPOCH,
    GATED_BLOCKS,
    LEFT,
    PLACED,
    PLANNED,
    QUEUES,
    SENT,
    clear,
    publish,
    take,
    wait,
)
from fivefold.moe._exchange_tasks_triton import (
    address_rows,
    announce,
    arrived,
    combine,
    dispatch,
    first_product,
    plan,
    second_product,
    section,
)
from fivefold.moe._gate_triton import route_block
from fivefold.moe._kernels_triton import _product_task
from fivefold.moe._tasks_triton import count_chunk, place_chunk


@triton.jit
def _slots(token_first, v, K: tl.constexpr, CHUNK: tl.constexpr):
    """First token, tokens, assignments and counting tasks of a rank of this launch."""
    first = tl.load(token_first + v)
    tokens = tl.load(token_first + v + 1) - first
    chunks = tl.maximum((tokens * K + CHUNK - 1) // CHUNK, 1)
    return first.to(tl.int64), tokens, tokens * K, chunks


_RUN_TIME = [
    "scratch_words",
    "control_words",
    "first_rank",
    "max_tiles",
    "max_rows",
    "max_lag",
    "combine_columns",
    "limit_ns",
    "at_signals",
    "at_counts",
    "at_arrivals",
    "at_return_counts",
    "at_receive",
    "at_weights",
    "at_returned",
    "at_shadow",
    "at_return_shadow",
    "num_return_counts",
]


@triton.jit(do_not_specialize=_RUN_TIME)
def exchange_kernel(
    x,
    w13,
    w2,
    ids,
    weights,
    b13,
    b2,
    gate,
    selection_bias,
    out,
    token_first,
    bases,
    control,
    stats,
    counts,
    totals,
    own_first,
    num_tiles,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    tile_of_slot,
    return_row,
    expert_first,
    return_first,
    return_tile,
    return_address,
    shadow_address,
    count_address,
    count_rows,
    count_upper,
    recv_tiles,
    recv_expert,
    recv_first,
    recv_stop,
    inner,
    scratch_words,
    control_words,
    first_rank,
    max_tiles,
    max_rows,
    max_lag,
    combine_columns,
    limit_ns,
    at_signals,
    at_counts,
    at_arrivals,
    at_return_counts,
    at_receive,
    at_weights,
    at_returned,
    at_shadow,
    at_return_shadow,
    num_return_counts,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    C: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    SHADOW: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    READ: tl.constexpr,
    BYTES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BN2: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    COPY: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
):
    """Count, announce, place, plan, dispatch, both products, combine: one launch."""
    epoch = tl.load(control + EPOCH) + 1
    _place(
        x, gate, selection_bias, ids, weights, token_first, bases, control, stats, counts, totals,
        own_first, num_tiles, tile_expert, tile_first, tile_stop, slot_of_row, tile_of_slot, epoch,
        scratch_words, control_words, first_rank, limit_ns, at_signals, at_counts, at_arrivals, V,
        H, K, KP, E, EP, P, L, C, INTERPRETED, CHUNK, PART, READ, BM, SCORE, NORMALIZE, SCALE,
        GROUPS, TOP_GROUPS, GROUP_SUM, BG, BD,
    )  # fmt: skip
    _send(
        x, weights, token_first, bases, control, stats, totals, own_first, num_tiles, tile_expert,
        tile_first, tile_stop, slot_of_row, return_row, expert_first, return_first, return_tile,
        recv_tiles, recv_expert, recv_first, recv_stop, epoch, scratch_words, control_words,
        first_rank, max_rows, limit_ns, at_signals, at_counts, at_arrivals, at_receive, at_weights,
        at_shadow, V, H, K, E, EP, P, PP, L, LP, C, WEIGHT_ON_INPUT, SHADOW, CHUNK, BYTES, BM, COPY,
    )  # fmt: skip
    _products(
        w13, w2, b13, b2, bases, control, stats, expert_first, return_first, return_tile,
        return_address, shadow_address, count_address, count_rows, count_upper, recv_tiles,
        recv_expert, recv_first, recv_stop, inner, epoch, scratch_words, control_words,
        first_rank, max_lag, limit_ns, at_counts, at_arrivals, at_return_counts,
        at_receive, at_weights, at_returned, at_return_shadow, V, H, I, E, P, PP, L, C, GATED,
        ACTIVATION, WEIGHT_ON_INPUT, SHADOW, TMA, INTERPRETED, PRECISION, BYTES, BM, BN, BK, BN2,
        STAGES, GROUP,
    )  # fmt: skip
    parts = (H + combine_columns - 1) // combine_columns
    for v in range(V):
        first, tokens, _slots_of_rank, _chunks = _slots(token_first, v, K, CHUNK)
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        ticket = take(own, 4)
        while ticket < (tokens + BT - 1) // BT * parts:
            combine(
                ticket // parts, ticket % parts * combine_columns, combine_columns,
                tl.load(bases + first_rank + v), at_returned, at_return_counts,
                weights + first * K, out + first * H, tile_of_slot + at, tile_expert + at,
                tile_first + at, tile_stop + at, own_first + at, return_row + at, tokens, own,
                limit_ns, H, K, KP, L, C, WEIGHT_ON_INPUT, INTERPRETED, BYTES, BM, BN2, BT, BH,
            )  # fmt: skip
            ticket = take(own, 4)
    _leave(
        control, control_words, first_rank, bases, at_return_counts, num_return_counts,
        epoch, max_tiles, V, E,
    )  # fmt: skip


@triton.jit
def _place(
    x, gate, selection_bias, ids, weights, token_first, bases, control, stats, counts, totals,
    own_first, num_tiles, tile_expert, tile_first, tile_stop, slot_of_row, tile_of_slot, epoch,
    scratch_words, control_words, first_rank, limit_ns, at_signals, at_counts, at_arrivals,
    V: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, P: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    INTERPRETED: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, READ: tl.constexpr,
    BM: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SUM: tl.constexpr, BG: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Phases 0 and 1: gate and counts; what peers must know, and the places of the rank's rows."""
    for v in range(V):
        first, tokens, slots, chunks = _slots(token_first, v, K, CHUNK)
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        gates = 0
        if gate is not None:
            gates += (tokens + BG - 1) // BG
        ticket = take(own, 0)
        while ticket < gates + chunks:
            if ticket >= gates:
                if wait(own + GATED_BLOCKS, gates, own, limit_ns):
                    count_chunk(ticket - gates, ids + first * K, counts + at, slots, E, EP, CHUNK)
                    publish(own + COUNTED)
            elif gate is not None:
                route_block(
                    ticket, x + first * H, gate, selection_bias, ids + first * K,
                    weights + first * K, tokens, H, K, KP, E, EP, SCORE, NORMALIZE, SCALE, GROUPS,
                    TOP_GROUPS, GROUP_SUM, INTERPRETED, BG, BD,
                )  # fmt: skip
                publish(own + GATED_BLOCKS)
            ticket = take(own, 0)
    for v in range(V):
        first, tokens, slots, chunks = _slots(token_first, v, K, CHUNK)
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        good = wait(own + COUNTED, chunks, own, limit_ns)
        ticket = take(own, 1)
        while (ticket < P + chunks) & good:
            if ticket < P:
                announce(
                    ticket, first_rank + v, epoch, bases, at_signals, at_counts, at_arrivals,
                    counts + at, totals + at, own_first + at, chunks, own, stats + v * 4 * P, P, L,
                    E, EP, C, READ,
                )  # fmt: skip
            else:
                place_chunk(
                    ticket - P, ids + first * K, counts + at, num_tiles + at, tile_expert + at,
                    tile_first + at, tile_stop + at, slot_of_row + at, tile_of_slot + at, slots,
                    chunks, E, EP, CHUNK, PART, READ, BM,
                )  # fmt: skip
                publish(own + PLACED)
            ticket = take(own, 1)


@triton.jit
def _send(
    x, weights, token_first, bases, control, stats, totals, own_first, num_tiles, tile_expert,
    tile_first, tile_stop, slot_of_row, return_row, expert_first, return_first, return_tile,
    recv_tiles, recv_expert, recv_first, recv_stop, epoch, scratch_words, control_words,
    first_rank, max_rows, limit_ns, at_signals, at_counts, at_arrivals, at_receive, at_weights,
    at_shadow, V: tl.constexpr, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    C: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, SHADOW: tl.constexpr, CHUNK: tl.constexpr,
    BYTES: tl.constexpr, BM: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Phase 2: the plan first, then one task for each row tile of the rank's own."""
    for v in range(V):
        first, _tokens, _slots_of_rank, chunks = _slots(token_first, v, K, CHUNK)
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        good = wait(own + PLACED, chunks, own, limit_ns)
        good = wait(own + ANNOUNCED, P, own, limit_ns) & good
        tiles = 0
        if good:
            tiles = tl.load(num_tiles + at)
        ticket = take(own, 2)
        while ticket <= tiles:
            if ticket == 0:
                if C == 0:
                    plan(
                        first_rank + v, epoch, bases, at_signals, at_counts, expert_first + at,
                        return_first + at, return_tile + at, recv_tiles + at, recv_expert + at,
                        recv_first + at, recv_stop + at, max_rows, own, limit_ns, P, PP, L, LP, E,
                        EP, BM, 64,
                    )  # fmt: skip
                else:
                    publish(own + PLANNED)
            elif wait(own + PLANNED, 1, own, limit_ns):
                dispatch(
                    ticket - 1, first_rank + v, epoch, x + first * H, weights + first * K, bases,
                    at_counts, at_arrivals, at_receive, at_weights, at_shadow, tile_expert + at,
                    tile_first + at, tile_stop + at, slot_of_row + at, totals + at, own_first + at,
                    return_row + at, own, stats + v * 4 * P, H, K, P, PP, L, LP, E, C,
                    WEIGHT_ON_INPUT, SHADOW, BYTES, BM, COPY,
                )  # fmt: skip
            ticket = take(own, 2)


@triton.jit
def _products(
    w13, w2, b13, b2, bases, control, stats, expert_first, return_first, return_tile,
    return_address, shadow_address, count_address, count_rows, count_upper, recv_tiles,
    recv_expert, recv_first, recv_stop, inner, epoch, scratch_words, control_words,
    first_rank, max_lag, limit_ns, at_counts, at_arrivals, at_return_counts, at_receive,
    at_weights, at_returned, at_return_shadow, V: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    E: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    SHADOW: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BN2: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Phase 3: first and second products on received rows, in the order of the single kernel."""
    first_columns: tl.constexpr = (I + BN - 1) // BN
    second_columns: tl.constexpr = (H + BN2 - 1) // BN2
    for v in range(V):
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        rank = first_rank + v
        base = tl.load(bases + rank)
        first_done = own + SENT + E
        apart = tl.multiple_of(scratch_words.to(tl.int64) * (4 // BYTES) * v, 16)
        rows_of_rank = inner + apart
        tiles = 0
        if C > 0:
            tiles += P * L * (C // BM)
        elif wait(own + PLANNED, 1, own, limit_ns):
            tiles += tl.load(recv_tiles + at)
        in_group: tl.constexpr = GROUP * (first_columns + second_columns)
        ticket = take(own, 3)
        while ticket < (tiles + GROUP - 1) // GROUP * in_group:
            groups = (tiles + GROUP - 1) // GROUP
            lag = tl.minimum(max_lag, groups)
            second, group, place = _product_task(
                ticket, groups, lag, GROUP * first_columns, GROUP * second_columns
            )
            m = group * GROUP + place % GROUP
            n = place // GROUP
            if m < tiles:
                local, begin, end = arrived(
                    m, rank, epoch, bases, at_arrivals, at_counts, recv_expert + at,
                    recv_first + at, recv_stop + at, expert_first + at, own, limit_ns, P, PP, L,
                    E, C, BM,
                )  # fmt: skip
                expert = v * L + local
                if begin < end:
                    if not second:
                        if n == 0:
                            address_rows(
                                m, local, begin, end, rank, epoch, bases, at_counts,
                                at_return_counts, at_returned, at_return_shadow, expert_first + at,
                                return_first + at, return_tile + at, return_address + at // 2,
                                shadow_address + at // 2, count_address + at // 2,
                                count_rows + at, count_upper + at, H, P, PP, L, E, C, SHADOW,
                                BYTES, BM, BN2,
                            )  # fmt: skip
                        first_product(
                            n, begin, end, expert, V * L, base, at_receive,
                            at_weights, w13, b13, rows_of_rank, H, I, GATED, ACTIVATION,
                            WEIGHT_ON_INPUT, TMA, INTERPRETED, PRECISION, BYTES, BM, BN, BK,
                            STAGES,
                        )  # fmt: skip
                        publish(first_done + m)
                    elif wait(first_done + m, first_columns, own, limit_ns):
                        second_product(
                            m, n, begin, end, expert, V * L, rank, epoch, w2, b2,
                            rows_of_rank, return_address + at // 2, shadow_address + at // 2,
                            count_address + at // 2, count_rows + at, count_upper + at, own,
                            stats + v * 4 * P, H, I, P, PP, TMA, INTERPRETED, PRECISION, SHADOW,
                            BYTES, BM, BN2, BK, STAGES,
                        )  # fmt: skip
            ticket = take(own, 3)
            if C == 0:  # loaded again, so that no register keeps it through a product
                tiles = tl.load(recv_tiles + at)


@triton.jit
def _leave(
    control, control_words, first_rank, bases, at_return_counts, num_return_counts,
    epoch, max_tiles, V: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Count this program out; the last one clears what the next launch counts, and ends the epoch.

    Epoch and error stay. All rows of this epoch are back, so no peer adds to the counts cleared.
    """
    tl.debug_barrier()
    before = tl.atomic_add(control + LEFT, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        for v in range(V):
            own = control + v * control_words
            for phase in range(6):
                tl.store(own + QUEUES + phase * 32, 0)
            tl.store(own + GATED_BLOCKS, 0)
            tl.store(own + COUNTED, 0)
            tl.store(own + ANNOUNCED, 0)
            tl.store(own + PLACED, 0)
            tl.store(own + PLANNED, 0)
            clear(own + SENT, E + max_tiles, 1024)
            base = tl.load(bases + first_rank + v)
            clear(section(base, at_return_counts, tl.int32), num_return_counts, 1024)
        tl.debug_barrier()
        tl.store(control + LEFT, 0)
        tl.store(control + EPOCH, epoch)
