# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917, SIM102
# mypy: ignore-errors
"""The exchange kernel cut in two at its products: rows to the experts, and rows back.

``scatter_kernel`` does phases 0 to 2 of ``_exchange_kernel_triton`` and waits until all rows that
come to this rank are there; ``gather_kernel`` returns a row for each of them, and combines what
came back. Anything may compute the rows in between: another backend, or the backward. Both belong
to one epoch, which the second one ends. Between them no peer overwrites a received row: it would
have to send in a later epoch, and waits for this rank's counts (compact layout) or for the return
of what it sent before (capacity layout) first.

Queue 3 counts the tiles that arrived, queue 5 the tiles returned, queue 4 combining tasks.
"""

import triton
import triton.language as tl

from fivefold.moe._exchange_kernel_triton import _leave, _place, _send, _slots
from fivefold.moe._exchange_sync_triton import EPOCH, ERROR, PLANNED, take, wait
from fivefold.moe._exchange_tasks_triton import (
    address_rows,
    arrived,
    combine,
    section,
    tell_sources,
)

_RUN_TIME = [
    "scratch_words",
    "control_words",
    "first_rank",
    "max_tiles",
    "max_rows",
    "room_rows",
    "combine_columns",
    "limit_ns",
    "at_signals",
    "at_counts",
    "at_arrivals",
    "at_return_counts",
    "at_receive",
    "at_weights",
    "at_returned",
    "at_return_weights",
    "at_shadow",
    "num_return_counts",
]


@triton.jit
def _received_tiles(
    recv_tiles, control, limit_ns, P: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Row tiles that this rank receives, as far as it knows; none where the plan is missing."""
    tiles = 0
    if C > 0:
        tiles += P * L * (C // BM)
    elif wait(control + PLANNED, 1, control, limit_ns):
        tiles += tl.load(recv_tiles)
    return tiles


@triton.jit(do_not_specialize=_RUN_TIME)
def scatter_kernel(
    x,
    ids,
    weights,
    row_expert,
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
    recv_tiles,
    recv_expert,
    recv_first,
    recv_stop,
    scratch_words,
    control_words,
    first_rank,
    max_rows,
    room_rows,
    limit_ns,
    at_signals,
    at_counts,
    at_arrivals,
    at_receive,
    at_weights,
    at_shadow,
    W: tl.constexpr,
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
    SEND_WEIGHTS: tl.constexpr,
    SHADOW: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    READ: tl.constexpr,
    BYTES: tl.constexpr,
    BM: tl.constexpr,
    COPY: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
):
    """Rows [T, W] to the ranks of their experts; row_expert says what came, and for whom."""
    epoch = tl.load(control + EPOCH) + 1
    _place(
        x, None, None, ids, weights, token_first, bases, control, stats, counts, totals, own_first,
        num_tiles, tile_expert, tile_first, tile_stop, slot_of_row, tile_of_slot, epoch,
        scratch_words, control_words, first_rank, limit_ns, at_signals, at_counts, at_arrivals, V,
        W, K, KP, E, EP, P, L, C, INTERPRETED, CHUNK, PART, READ, BM, SCORE, NORMALIZE, SCALE,
        GROUPS, TOP_GROUPS, GROUP_SUM, BG, BD,
    )  # fmt: skip
    _send(
        x, weights, token_first, bases, control, stats, totals, own_first, num_tiles, tile_expert,
        tile_first, tile_stop, slot_of_row, return_row, expert_first, return_first, return_tile,
        recv_tiles, recv_expert, recv_first, recv_stop, epoch, scratch_words, control_words,
        first_rank, max_rows, limit_ns, at_signals, at_counts, at_arrivals, at_receive, at_weights,
        at_shadow, V, W, K, E, EP, P, PP, L, LP, C, SEND_WEIGHTS, SHADOW, CHUNK, BYTES, BM, COPY,
    )  # fmt: skip
    for v in range(V):
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        experts = row_expert + room_rows.to(tl.int64) * v
        tiles = _received_tiles(recv_tiles + at, own, limit_ns, P, L, C, BM)
        ticket = take(own, 3)
        while ticket < tiles:
            local, begin, end = arrived(
                ticket, first_rank + v, epoch, bases, at_arrivals, at_counts, recv_expert + at,
                recv_first + at, recv_stop + at, expert_first + at, own, limit_ns, P, PP, L, E, C,
                BM,
            )  # fmt: skip
            row = begin + tl.arange(0, BM)
            tl.store(experts + row, tl.zeros([BM], tl.int32) + local, mask=row < end)
            ticket = take(own, 3)


@triton.jit(do_not_specialize=_RUN_TIME)
def gather_kernel(
    rows,
    scalars,
    weights,
    out,
    scalars_out,
    token_first,
    bases,
    control,
    stats,
    own_first,
    tile_expert,
    tile_first,
    tile_stop,
    tile_of_slot,
    return_row,
    expert_first,
    return_first,
    return_tile,
    return_address,
    scalar_address,
    count_address,
    count_rows,
    count_upper,
    recv_tiles,
    recv_expert,
    recv_first,
    recv_stop,
    scratch_words,
    control_words,
    first_rank,
    max_tiles,
    room_rows,
    combine_columns,
    limit_ns,
    at_counts,
    at_arrivals,
    at_return_counts,
    at_returned,
    at_return_weights,
    num_return_counts,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    PLAIN_SUM: tl.constexpr,
    SCALARS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CHUNK: tl.constexpr,
    BYTES: tl.constexpr,
    BM: tl.constexpr,
    COPY: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Rows [room, H] back to where those received came from, and their sum for every token."""
    epoch = tl.load(control + EPOCH) + 1
    for v in range(V):
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        room = room_rows.to(tl.int64) * v
        tiles = _received_tiles(recv_tiles + at, own, limit_ns, P, L, C, BM)
        ticket = take(own, 5)
        while ticket < tiles:
            local, begin, end = arrived(
                ticket, first_rank + v, epoch, bases, at_arrivals, at_counts, recv_expert + at,
                recv_first + at, recv_stop + at, expert_first + at, own, limit_ns, P, PP, L, E, C,
                BM,
            )  # fmt: skip
            if begin < end:
                address_rows(
                    ticket, local, begin, end, first_rank + v, epoch, bases, at_counts,
                    at_return_counts, at_returned, at_return_weights, expert_first + at,
                    return_first + at, return_tile + at, return_address + at // 2,
                    scalar_address + at // 2, count_address + at // 2, count_rows + at,
                    count_upper + at, H, P, PP, L, E, C, SCALARS, BYTES, BM, H,
                )  # fmt: skip
                tl.debug_barrier()  # other threads read the addresses
                _return_tile(
                    ticket, begin, end, rows + room * H, scalars + room, return_address + at // 2,
                    scalar_address + at // 2, count_address + at // 2, count_rows + at,
                    count_upper + at, stats + v * 4 * P, H, P, PP, SCALARS, BYTES, BM, COPY,
                )  # fmt: skip
            ticket = take(own, 5)
    parts = (H + combine_columns - 1) // combine_columns
    for v in range(V):
        first, tokens, _slots_of_rank, _chunks = _slots(token_first, v, K, CHUNK)
        own = control + v * control_words
        at = scratch_words.to(tl.int64) * v
        base = tl.load(bases + first_rank + v)
        ticket = take(own, 4)
        while ticket < (tokens + BT - 1) // BT * parts:
            combine(
                ticket // parts, ticket % parts * combine_columns, combine_columns, base,
                at_returned, at_return_counts, weights + first * K, out + first * H,
                tile_of_slot + at, tile_expert + at, tile_first + at, tile_stop + at,
                own_first + at, return_row + at, tokens, own, limit_ns, H, K, KP, L, C, PLAIN_SUM,
                INTERPRETED, BYTES, BM, H, BT, BH,
            )  # fmt: skip
            if SCALARS:
                if ticket % parts == 0:
                    _scalars_back(
                        ticket // parts, base, at_return_weights, scalars_out + first * K,
                        tile_of_slot + at, return_row + at, tokens, own, K, KP, BT,
                    )  # fmt: skip
            ticket = take(own, 4)
    _leave(
        control, control_words, first_rank, bases, at_return_counts, num_return_counts,
        epoch, max_tiles, V, E,
    )  # fmt: skip


@triton.jit
def _return_tile(
    m, first, stop, rows, scalars, return_address, scalar_address, count_address, count_rows,
    count_upper, stats, H: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    SCALARS: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Store a tile's rows, and a number for each, into the heaps of the ranks they came from."""
    row = first + tl.arange(0, BM)
    inside = row < stop
    address = tl.load(return_address + row, mask=inside, other=0)
    target = address.to(tl.pointer_type(rows.dtype.element_ty))[:, None]
    source = rows + row.to(tl.int64)[:, None] * H
    for start in range(0, H, COPY):
        column = start + tl.arange(0, COPY)[None, :]
        keep = inside[:, None] & (column < H)
        place = target + column
        if H * BYTES % 16 == 0:
            place = tl.multiple_of(place, (16, 16))
        tl.store(place, tl.load(source + column, mask=keep, other=0.0), mask=keep)
    row_bytes: tl.constexpr = H * BYTES + (4 if SCALARS else 0)
    if SCALARS:
        words = tl.load(scalar_address + row, mask=inside, other=0)
        value = tl.load(scalars + row, mask=inside, other=0.0)
        tl.store(words.to(tl.pointer_type(tl.float32)), value, mask=inside)
    tell_sources(m, row_bytes, count_address, count_rows, count_upper, stats, P, PP)


@triton.jit
def _scalars_back(
    block, base, at_return_weights, out, tile_of_slot, return_row, num_tokens, control,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The numbers that came back, by slot; after ``combine`` has waited for the same rows."""
    index = tl.arange(0, BT * KP)
    slot = (block * BT + index // KP) * K + index % KP
    mask = (index % KP < K) & (block * BT + index // KP < num_tokens)
    used = mask & (tl.load(tile_of_slot + slot, mask=mask, other=-1) >= 0)
    row = tl.load(return_row + slot, mask=used, other=0)
    value = tl.load(section(base, at_return_weights, tl.float32) + row, mask=used, other=0.0)
    broken = tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0
    value = tl.where(broken, float("nan"), value)
    tl.store(out + slot, value, mask=mask)
