# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, E741, N803, PLR0913, PLR0917, SIM102
# mypy: ignore-errors
"""The tasks of the exchange kernel that the single kernel does not have, each on one tile.

announce counts to a peer, plan the rows to come, dispatch a row tile, first and second product on
rows that came, combine rows that came back. What they wait for is written in them, except for what
all programs have waited for at the start of a phase.

Legend, beyond that of ``_tasks_triton``: P ranks (PP: next power of two), L experts of a rank (LP:
likewise), E = P L. ``C``: rows of a receive cell in the capacity layout, 0 in the compact layout.
``rank``: of this rank among P. ``base``: address of a rank's heap, ``at_*``: bytes from there.
A source's own rows are its slots sorted by expert, cut into row tiles; a place is a row's number
among the source's rows for the same expert.
"""

import triton
import triton.language as tl

from fivefold.moe._exchange_sync_triton import (
    ANNOUNCED,
    CONFLICT,
    COUNTS,
    OVERFLOW,
    PLANNED,
    ROWS,
    SENT,
    complete,
    fail,
    give_back,
    publish,
    signal,
    wait_returns,
    wait_signals,
)
from fivefold.moe._tasks_triton import _activate, _multiply, _narrow, _weights

# Rows of the statistics, each with one number for every peer.
SENT_BYTES = tl.constexpr(0)
RETURNED_BYTES = tl.constexpr(1)
SENT_SIGNALS = tl.constexpr(2)
RETURNED_SIGNALS = tl.constexpr(3)


@triton.jit
def section(base, at, dtype: tl.constexpr):
    """A part of a heap."""
    return (base + at).to(tl.pointer_type(dtype))


@triton.jit
def announce(
    peer, rank, epoch, bases, at_signals, at_counts, at_arrivals, counts, totals, own_first,
    num_chunks, control, stats, P: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, C: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Add the chunks' counts up and tell a peer: all of them, or which cells stay empty."""
    bins = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    for first in range(0, num_chunks, READ):
        chunk = first + tl.arange(0, READ)
        block = tl.load(
            counts + chunk[:, None] * E + bins[None, :],
            mask=(chunk < num_chunks)[:, None] & (bins < E)[None, :],
            other=0,
        )
        total += tl.sum(block, 0)
    base = tl.load(bases + peer)
    if peer == rank:
        tl.store(totals + bins, total, mask=bins < E)
        tl.store(own_first + bins, tl.cumsum(total, 0) - total, mask=bins < E)
        if C > 0:
            if tl.max(total, 0) > C:
                fail(control, OVERFLOW, rank, 0)
    if C == 0:
        place = ((epoch % 2) * P + rank) * E + bins
        tl.store(section(base, at_counts, tl.int32) + place, total, mask=bins < E)
        words = section(base, at_signals, tl.int64) + rank + tl.arange(0, 1)
        signal(words, epoch, tl.zeros([1], tl.int32) + tl.sum(total, 0), tl.arange(0, 1) == 0)
        tl.atomic_add(stats + SENT_SIGNALS * P + peer, 1, sem="relaxed")
    else:
        local = bins - peer * L
        empty = (local >= 0) & (local < L) & (total == 0)
        signal(section(base, at_arrivals, tl.int64) + rank * L + local, epoch, total, empty)
        told = tl.sum(empty.to(tl.int64), 0)
        tl.atomic_add(stats + SENT_SIGNALS * P + peer, told, sem="relaxed")
    publish(control + ANNOUNCED)


@triton.jit
def plan(
    rank, epoch, bases, at_signals, at_counts, expert_first, return_first, return_tile,
    recv_tiles, recv_expert, recv_first, recv_stop, max_rows, control, limit_ns,
    P: tl.constexpr, PP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compact layout: from all ranks' counts, where their rows come to lie, and the row tiles."""
    base = tl.load(bases + rank)
    peers = tl.arange(0, PP)
    local = tl.arange(0, LP)
    bins = tl.arange(0, EP)
    good, _ = wait_signals(
        section(base, at_signals, tl.int64) + peers, peers, peers < P, epoch, control, COUNTS, 0,
        limit_ns,
    )  # fmt: skip
    if good:
        matrix = section(base, at_counts, tl.int32) + (epoch % 2) * P * E
        inside = (peers < P)[:, None] & (local < L)[None, :]
        largest = 0
        for other in range(P):
            block = matrix + peers[:, None] * E + (other * L + local)[None, :]
            rows = tl.sum(tl.sum(tl.load(block, mask=inside, other=0), 1), 0)
            largest = tl.maximum(largest, rows)
        if largest > max_rows:  # all ranks see the same, and none sends anything
            fail(control, OVERFLOW, rank, 0)
        else:
            block = matrix + peers[:, None] * E + (rank * L + local)[None, :]
            total = tl.sum(tl.load(block, mask=inside, other=0), 0)
            tiles = (total + BM - 1) // BM
            last_tile = tl.cumsum(tiles, 0)
            first_row = tl.cumsum(total, 0) - total
            num_tiles = tl.sum(tiles, 0)
            tl.store(recv_tiles, num_tiles)
            tl.store(expert_first + local, first_row, mask=local < L)
            for start in range(0, num_tiles, BLOCK):
                tile = start + tl.arange(0, BLOCK)
                before = last_tile[None, :] <= tile[:, None]
                expert = tl.sum(before.to(tl.int32), 1)
                here = local[None, :] == expert[:, None]
                first_tile = tl.sum(tl.where(here, (last_tile - tiles)[None, :], 0), 1)
                begin = tl.sum(tl.where(here, first_row[None, :], 0), 1)
                end = begin + tl.sum(tl.where(here, total[None, :], 0), 1)
                begin += (tile - first_tile) * BM
                tl.store(recv_expert + tile, expert, mask=tile < num_tiles)
                tl.store(recv_first + tile, begin, mask=tile < num_tiles)
                tl.store(recv_stop + tile, tl.minimum(begin + BM, end), mask=tile < num_tiles)
            mine = (bins >= rank * L) & (bins < (rank + 1) * L)
            for source in range(P):
                count = tl.load(matrix + source * E + bins, mask=bins < E, other=0)
                of_source = (count + BM - 1) // BM
                place = source * L + bins - rank * L
                tl.store(return_first + place, tl.cumsum(count, 0) - count, mask=mine)
                tl.store(return_tile + place, tl.cumsum(of_source, 0) - of_source, mask=mine)
            publish(control + PLANNED)


@triton.jit
def dispatch(
    tile, rank, epoch, x, weights, bases, at_counts, at_arrivals, at_receive, at_weights,
    at_shadow, tile_expert, tile_first, tile_stop, slot_of_row, totals, own_first, return_row,
    control, stats, H: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    L: tl.constexpr, LP: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, SHADOW: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr,
    COPY: tl.constexpr,
):  # fmt: skip
    """Copy the tokens of a row tile into the peer's heap; the expert's last tile signals."""
    expert = tl.load(tile_expert + tile)
    row = tl.load(tile_first + tile) + tl.arange(0, BM)
    inside = row < tl.load(tile_stop + tile)
    slot = tl.load(slot_of_row + row, mask=inside, other=0)
    place = row - tl.load(own_first + expert)
    peer = expert // L
    mine = expert - peer * L
    base = tl.load(bases + peer)
    if C == 0:
        peers = tl.arange(0, PP)
        local = tl.arange(0, LP)
        # Our own copy of the matrix, which all ranks have.
        matrix = section(tl.load(bases + rank), at_counts, tl.int32) + (epoch % 2) * P * E
        block = tl.load(
            matrix + peers[:, None] * E + (peer * L + local)[None, :],
            mask=(peers < P)[:, None] & (local < L)[None, :],
            other=0,
        )
        earlier = (local < mine)[None, :] | ((local == mine)[None, :] & (peers < rank)[:, None])
        target = tl.sum(tl.sum(tl.where(earlier, block, 0), 1), 0) + place
        back = row
    else:
        inside = inside & (place < C)
        target = (rank * L + mine) * C + place
        back = expert * C + place
    tl.store(return_row + slot, back, mask=inside)
    source = x + (slot // K).to(tl.int64)[:, None] * H
    receive = section(base, at_receive, x.dtype.element_ty) + target.to(tl.int64)[:, None] * H
    for start in range(0, H, COPY):
        column = start + tl.arange(0, COPY)[None, :]
        keep = inside[:, None] & (column < H)
        value = tl.load(source + column, mask=keep, other=0.0)
        target_row = receive + column
        if H * BYTES % 16 == 0:
            target_row = tl.multiple_of(target_row, (16, 16))
        tl.store(target_row, value, mask=keep)
    rows = tl.sum(inside.to(tl.int32), 0)
    sent = rows.to(tl.int64) * (H * BYTES)
    if WEIGHT_ON_INPUT:
        factor = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
        tl.store(section(base, at_weights, tl.float32) + target, factor, mask=inside)
        sent += rows * 4
    if SHADOW:
        written(section(base, at_shadow, tl.int32) + target, rank, epoch, inside, control, P)
    tl.atomic_add(stats + SENT_BYTES * P + peer, sent, sem="relaxed")
    count = tl.load(totals + expert)
    if complete(control + SENT + expert) == (count + BM - 1) // BM - 1:
        tl.store(control + SENT + expert, 0)
        words = section(base, at_arrivals, tl.int64) + rank * L + mine + tl.arange(0, 1)
        if C > 0:
            count = tl.minimum(count, C)
        signal(words, epoch, tl.zeros([1], tl.int32) + count, tl.arange(0, 1) == 0)
        tl.atomic_add(stats + SENT_SIGNALS * P + peer, 1, sem="relaxed")


@triton.jit
def written(words, rank, epoch, mask, control, P: tl.constexpr):
    """Debugging: note who writes a row, and complain if it was written in this epoch already."""
    before = tl.atomic_xchg(words, epoch * P + rank + 1, mask=mask, sem="relaxed")
    again = mask & (before > epoch * P)
    if tl.max(again.to(tl.int32), 0) > 0:
        other = tl.max(tl.where(again, before - epoch * P - 1, 0), 0)
        fail(control, CONFLICT, other, 0)


@triton.jit
def arrived(
    m, rank, epoch, bases, at_arrivals, at_counts, recv_expert, recv_first, recv_stop,
    expert_first, control, limit_ns, P: tl.constexpr, PP: tl.constexpr, L: tl.constexpr,
    E: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Wait for the rows of a receive tile; gives expert, first row and end.

    The end is not above the first row where there are none, or they did not come.
    """
    base = tl.load(bases + rank)
    peers = tl.arange(0, PP)
    if C == 0:
        local = tl.load(recv_expert + m)
        first = tl.load(recv_first + m)
        stop = tl.load(recv_stop + m)
        matrix = section(base, at_counts, tl.int32) + (epoch % 2) * P * E
        place = matrix + peers * E + rank * L + local
        count = tl.load(place, mask=peers < P, other=0)
        ends = tl.load(expert_first + local) + tl.cumsum(count, 0)
        needed = (peers < P) & (count > 0) & (ends > first) & (ends - count < stop)
    else:  # one's own rows first: they are there the soonest
        tiles: tl.constexpr = C // BM
        cell = m // tiles
        source = (cell // L + rank) % P
        local = cell % L
        needed = peers == source
    words = section(base, at_arrivals, tl.int64) + peers * L + local
    good, seen = wait_signals(words, peers, needed, epoch, control, ROWS, local, limit_ns)
    if C == 0:
        if not good:
            stop = first
    else:
        cells = (source * L + local) * C
        first = cells + m % tiles * BM
        stop = tl.minimum(first + BM, cells + tl.sum(seen, 0))
    return local, first, stop


@triton.jit
def address_rows(
    m, local, first, stop, rank, epoch, bases, at_counts, at_return_counts, at_returned,
    at_shadow, expert_first, return_first, return_tile, return_address, shadow_address,
    count_address, count_rows, count_upper, H: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, L: tl.constexpr, E: tl.constexpr, C: tl.constexpr, SHADOW: tl.constexpr,
    BYTES: tl.constexpr, BM: tl.constexpr, BN2: tl.constexpr,
):  # fmt: skip
    """Write down where the results of a receive tile belong, and which counts to add to.

    Ahead of the products, because a product's last part has no registers to spare. The rows of one
    source belong to one or two of its own row tiles: so many to the first, the others to the next.
    """
    row = first + tl.arange(0, BM)
    inside = row < stop
    peers = tl.arange(0, PP)
    base = tl.load(bases + rank)
    if C == 0:
        matrix = section(base, at_counts, tl.int32) + (epoch % 2) * P * E
        place = matrix + peers * E + rank * L + local
        count = tl.load(place, mask=peers < P, other=0)
        ends = tl.load(expert_first + local) + tl.cumsum(count, 0)
        starts = ends - count  # never descending
    else:
        cell = first // C
        starts = tl.where(peers <= cell // L, cell * C, 2147483647)
        ends = tl.where(peers == cell // L, stop, starts)
    begun = (peers < P)[None, :] & (starts[None, :] <= row[:, None])
    source = tl.sum(begun.to(tl.int32), 1) - 1  # the last that begins at or before the row
    source = tl.where(inside, source, 0)
    start = tl.sum(tl.where(peers[None, :] == source[:, None], starts[None, :], 0), 1)
    if C == 0:
        back = tl.load(return_first + source * L + local, mask=inside, other=0) + row - start
    else:
        back = (rank * L + local) * C + row - start
    heaps = tl.load(bases + source, mask=inside, other=0)
    address = heaps + at_returned + back.to(tl.int64) * (H * BYTES)
    tl.store(return_address + row, address, mask=inside)
    if SHADOW:
        columns: tl.constexpr = (H + BN2 - 1) // BN2
        address = heaps + at_shadow + back.to(tl.int64) * (4 * columns)
        tl.store(shadow_address + row, address, mask=inside)
    begin = tl.maximum(first - starts, 0)
    rows = tl.maximum(tl.minimum(stop, ends) - tl.maximum(first, starts), 0)
    some = (peers < P) & (rows > 0)
    if C == 0:
        tile = tl.load(return_tile + peers * L + local, mask=some, other=0) + begin // BM
    else:
        tile = (rank * L + local) * (C // BM) + begin // BM
    upper = tl.maximum(begin % BM + rows - BM, 0)
    address = tl.load(bases + peers, mask=some, other=0) + at_return_counts + 4 * tile
    tl.store(count_address + m * P + peers, address, mask=peers < P)
    tl.store(count_rows + m * P + peers, rows, mask=peers < P)
    tl.store(count_upper + m * P + peers, upper, mask=peers < P)


@triton.jit
def first_product(
    n, first, stop, expert, num_experts, base, at_receive, at_weights, w13, b13, inner,
    H: tl.constexpr, I: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """inner[rows, n BN : (n+1) BN] = f(W13 received[rows] + b13)."""
    row = first + tl.arange(0, BM)
    inside = row < stop
    depth = tl.arange(0, BK)
    receive = section(base, at_receive, inner.dtype.element_ty)
    source = receive + row.to(tl.int64)[:, None] * H + depth[None, :]
    width: tl.constexpr = 2 * I if GATED else I
    rows = expert * width + n * BN
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        step = source + k
        if H * BYTES % 16 == 0:
            step = tl.multiple_of(step, (16, 16))
        if H % BK == 0:
            a = tl.load(step, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(step, mask=inside[:, None] & (k + depth < H)[None, :], other=0.0)
        b = _weights(w13, rows, num_experts * width, k, H, TMA, BN, BK)
        gate = _multiply(a, b, gate, PRECISION, INTERPRETED)
        if GATED:
            b = _weights(w13, rows + I, num_experts * width, k, H, TMA, BN, BK)
            up = _multiply(a, b, up, PRECISION, INTERPRETED)
    column = n * BN + tl.arange(0, BN)
    if WEIGHT_ON_INPUT:
        factor = tl.load(section(base, at_weights, tl.float32) + row, mask=inside, other=0.0)
        gate = gate * factor[:, None]
        if GATED:
            up = up * factor[:, None]
    if b13 is not None:
        bias = tl.load(b13 + expert * width + column, mask=column < I, other=0.0)
        gate += bias.to(tl.float32)[None, :]
        if GATED:
            bias = tl.load(b13 + expert * width + I + column, mask=column < I, other=0.0)
            up += bias.to(tl.float32)[None, :]
    value = _activate(gate, ACTIVATION)
    if GATED:
        value = value * up
    tl.store(
        inner + row.to(tl.int64)[:, None] * I + column[None, :],
        _narrow(value, inner.dtype.element_ty, INTERPRETED),
        mask=inside[:, None] & (column < I)[None, :],
    )


@triton.jit
def second_product(
    m, n, first, stop, expert, num_experts, rank, epoch, w2, b2, inner, return_address,
    shadow_address, count_address, count_rows, count_upper, control, stats, H: tl.constexpr,
    I: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, TMA: tl.constexpr,
    INTERPRETED: tl.constexpr, PRECISION: tl.constexpr, SHADOW: tl.constexpr,
    BYTES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """W2 inner[rows] + b2, columns n BN : (n+1) BN, into the heaps of the ranks they came from."""
    row = first + tl.arange(0, BM)
    inside = row < stop
    depth = tl.arange(0, BK)
    operand = inner + row.to(tl.int64)[:, None] * I + depth[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, I, BK, num_stages=STAGES):
        if I % BK == 0:
            a = tl.load(operand + k, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(operand + k, mask=inside[:, None] & (k + depth < I)[None, :], other=0.0)
        b = _weights(w2, expert * H + n * BN, num_experts * H, k, I, TMA, BN, BK)
        total = _multiply(a, b, total, PRECISION, INTERPRETED)
    column = n * BN + tl.arange(0, BN)
    if b2 is not None:
        bias = tl.load(b2 + expert * H + column, mask=column < H, other=0.0)
        total += bias.to(tl.float32)[None, :]
    address = tl.load(return_address + row, mask=inside, other=0)
    returned = address.to(tl.pointer_type(inner.dtype.element_ty))
    target = returned[:, None] + column[None, :]
    if H * BYTES % 16 == 0:
        target = tl.multiple_of(target, (16, 16))
    tl.store(
        target,
        _narrow(total, inner.dtype.element_ty, INTERPRETED),
        mask=inside[:, None] & (column < H)[None, :],
    )
    if SHADOW:
        words = tl.load(shadow_address + row, mask=inside, other=0).to(tl.pointer_type(tl.int32))
        written(words + n, rank, epoch, inside, control, P)
    row_bytes = tl.minimum(BN, H - n * BN) * BYTES
    tell_sources(m, row_bytes, count_address, count_rows, count_upper, stats, P, PP)


@triton.jit
def tell_sources(
    m, row_bytes, count_address, count_rows, count_upper, stats, P: tl.constexpr,
    PP: tl.constexpr,
):  # fmt: skip
    """Add the rows of a receive tile, which this program has returned, to their owners' counts."""
    peers = tl.arange(0, PP)
    rows = tl.load(count_rows + m * P + peers, mask=peers < P, other=0)
    upper = tl.load(count_upper + m * P + peers, mask=peers < P, other=0)
    counts = tl.load(count_address + m * P + peers, mask=peers < P, other=0)
    counts = counts.to(tl.pointer_type(tl.int32))
    give_back(counts, rows - upper, rows > 0)
    give_back(counts + 1, upper, upper > 0)
    sent = rows.to(tl.int64) * row_bytes
    tl.atomic_add(stats + RETURNED_BYTES * P + peers, sent, mask=rows > 0, sem="relaxed")
    signals = (rows > 0).to(tl.int64) + (upper > 0).to(tl.int64)
    tl.atomic_add(stats + RETURNED_SIGNALS * P + peers, signals, mask=rows > 0, sem="relaxed")


@triton.jit
def combine(
    block, first_column, columns, base, at_returned, at_return_counts, weights, out, tile_of_slot,
    tile_expert, tile_first, tile_stop, own_first, return_row, num_tokens, control, limit_ns,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, INTERPRETED: tl.constexpr, BYTES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k, in order and in float32, of weight[t, k] times the row that came back.

    NaN where it did not come: an error is raised, but not at once on a GPU.
    """
    index = tl.arange(0, BT * KP)
    slot = (block * BT + index // KP) * K + index % KP
    mask = (index % KP < K) & (block * BT + index // KP < num_tokens)
    tile = tl.load(tile_of_slot + slot, mask=mask, other=-1)
    mask = mask & (tile >= 0)
    expert = tl.load(tile_expert + tile, mask=mask, other=0)
    begin = tl.load(tile_first + tile, mask=mask, other=0)
    rows = tl.load(tile_stop + tile, mask=mask, other=0) - begin
    if C > 0:
        first = tl.load(own_first + expert, mask=mask, other=0)
        tile = expert * (C // BM) + (begin - first) // BM
    wanted = rows * ((H + BN - 1) // BN)
    missing = wait_returns(
        section(base, at_return_counts, tl.int32) + tile, wanted, expert // L, mask, control,
        limit_ns,
    )  # fmt: skip
    returned = section(base, at_returned, out.dtype.element_ty)
    token = block * BT + tl.arange(0, BT)
    present = token < num_tokens
    came = (tl.zeros([BT], tl.int32) + missing) < 0
    for start in range(first_column, first_column + columns, BH):
        column = start + tl.arange(0, BH)
        keep = present[:, None] & (column < H)[None, :]
        total = tl.zeros([BT, BH], tl.float32)
        for k in range(K):
            one = token * K + k
            used = present & (tl.load(tile_of_slot + one, mask=present, other=-1) >= 0) & came
            row = tl.load(return_row + one, mask=used, other=0)
            place = returned + row.to(tl.int64)[:, None] * H + column[None, :]
            if H * BYTES % 16 == 0:
                place = tl.multiple_of(place, (16, 16))
            term = tl.load(
                place,
                mask=used[:, None] & keep,
                other=0.0,
            ).to(tl.float32)
            if not WEIGHT_ON_INPUT:
                weight = tl.load(weights + one, mask=used, other=0.0).to(tl.float32)
                term = term * weight[:, None]
            total += term
        total = tl.where(came[:, None], total, float("nan"))
        tl.store(
            out + token.to(tl.int64)[:, None] * H + column[None, :],
            _narrow(total, out.dtype.element_ty, INTERPRETED),
            mask=keep,
        )
