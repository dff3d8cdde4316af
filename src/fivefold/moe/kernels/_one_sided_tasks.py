# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917, SIM102
# mypy: ignore-errors
"""The tasks of dispatch and combine between ranks, each on one tile.

announce counts to a peer, plan the rows to come, dispatch a row tile, address and return the
results of a tile that came, combine rows that came back. What they wait for is written in them,
except for what all programs have waited for at the start of a phase.

Legend, beyond that of ``_products``: P ranks (PP: next power of two), L experts of a rank (LP:
likewise), E = P L. ``C``: rows of a receive cell in the capacity layout, 0 in the compact layout. A
source's own rows are its slots sorted by expert, cut into row tiles; a place is a row's number
among the source's rows for the same expert. ``r`` is a rank of this launch, ``heap`` says where
what lies in all ranks' heaps, ``p`` has the rank's private tables.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fivefold.moe.kernels._forward import add_counts
from fivefold.moe.kernels._products import (
    combine,
    first_product,
    narrow,
    second_product,
    slots_of_block,
    tile_rows,
)
from fivefold.moe.kernels.sync import (
    ANNOUNCED,
    CONFLICT,
    COUNTS,
    ERROR,
    FLAGS,
    OVERFLOW,
    PLANNED,
    RETURNS,
    ROWS,
    complete,
    fail,
    give_back,
    publish,
    signal,
    wait,
    wait_counts,
    wait_signals,
)

# Rows of the statistics, each with one number for every peer.
SENT_BYTES = tl.constexpr(0)
RETURNED_BYTES = tl.constexpr(1)
SENT_SIGNALS = tl.constexpr(2)
RETURNED_SIGNALS = tl.constexpr(3)


class Rank(NamedTuple):
    """A rank of this launch in the current epoch."""

    rank: Any
    epoch: Any
    control: Any
    stats: Any
    limit_ns: Any
    first_token: Any
    tokens: Any
    chunks: Any  # counting tasks


@triton.jit
def base_of(r, heap):
    """Return the address of a rank's own heap; loaded where needed, to free registers."""
    return tl.load(heap.bases + r.rank)


@triton.jit
def section(base, at, dtype: tl.constexpr):
    """Return a part of a heap."""
    return (base + at).to(tl.pointer_type(dtype))


@triton.jit
def rows_at(base, at, dtype: tl.constexpr):
    """Return rows in a heap; they begin at multiples of 16 bytes, so that reads are wide."""
    return tl.multiple_of(section(base, at, dtype), 16)


@triton.jit
def _count(r, which, peers, number, mask, S: tl.constexpr):
    """Add to a row of the statistics."""
    tl.atomic_add(r.stats + which * S.P + peers, number, mask=mask, sem="relaxed")


@triton.jit
def _count_matrix(r, heap, S: tl.constexpr):
    """Return this rank's copy of all ranks' counts [P, E], compact layout."""
    return section(base_of(r, heap), heap.counts, tl.int32) + (r.epoch % 2) * S.P * S.E


@triton.jit
def _rows_for(matrix, rank, S: tl.constexpr):
    """Return the rows from each source for each expert of a rank, [PP, LP]."""
    peers = tl.arange(0, S.PP)
    local = tl.arange(0, S.LP)
    return tl.load(
        matrix + peers[:, None] * S.E + (rank * S.L + local)[None, :],
        mask=(peers < S.P)[:, None] & (local < S.L)[None, :],
        other=0,
    )


@triton.jit
def _one(value):
    """Return a block of one."""
    return tl.full([1], 0, tl.int32) + value


@triton.jit
def announce(peer, r, heap, t, p, S: tl.constexpr):
    """Add the chunks' counts up and tell a peer: all of them, or which cells stay empty."""
    bins = tl.arange(0, S.EP)
    total, _ = add_counts(t, None, r.chunks, S)
    base = tl.load(heap.bases + peer)
    if peer == r.rank:
        tl.store(p.totals + bins, total, mask=bins < S.E)
        tl.store(p.own_first + bins, tl.cumsum(total, 0) - total, mask=bins < S.E)
        if S.C > 0:
            if tl.max(total, 0) > S.C:
                fail(r.control, OVERFLOW, r.rank, 0)
    if S.C == 0:
        place = ((r.epoch % 2) * S.P + r.rank) * S.E + bins
        tl.store(section(base, heap.counts, tl.int32) + place, total, mask=bins < S.E)
        words = section(base, heap.signals, tl.int64) + r.rank + tl.arange(0, 1)
        signal(words, r.epoch, _one(tl.sum(total, 0)), tl.arange(0, 1) == 0)
        tl.atomic_add(r.stats + SENT_SIGNALS * S.P + peer, 1, sem="relaxed")
    else:
        local = bins - peer * S.L
        empty = (local >= 0) & (local < S.L) & (total == 0)
        words = section(base, heap.arrivals, tl.int64) + r.rank * S.L + local
        signal(words, r.epoch, total, empty)
        told = tl.sum(empty.to(tl.int64), 0)
        tl.atomic_add(r.stats + SENT_SIGNALS * S.P + peer, told, sem="relaxed")
    publish(r.control + ANNOUNCED)


@triton.jit
def plan(r, heap, p, max_rows, S: tl.constexpr):
    """Lay out the rows to come (compact layout) from the counts of all ranks, and their tiles."""
    peers = tl.arange(0, S.PP)
    local = tl.arange(0, S.LP)
    bins = tl.arange(0, S.EP)
    good, _ = wait_signals(
        section(base_of(r, heap), heap.signals, tl.int64) + peers, peers, peers < S.P, r.epoch,
        r.control, COUNTS, 0, r.limit_ns,
    )  # fmt: skip
    if good:
        matrix = _count_matrix(r, heap, S)
        largest = 0
        for other in range(S.P):
            rows = tl.sum(tl.sum(_rows_for(matrix, other, S), 1), 0)
            largest = tl.maximum(largest, rows)
        if largest > max_rows:  # all ranks see the same, and none sends anything
            fail(r.control, OVERFLOW, r.rank, 0)
        else:
            total = tl.sum(_rows_for(matrix, r.rank, S), 0)
            tiles = (total + S.BM - 1) // S.BM
            last_tile = tl.cumsum(tiles, 0)
            first_row = tl.cumsum(total, 0) - total
            num_tiles = tl.sum(tiles, 0)
            tl.store(p.recv_tiles, num_tiles)
            tl.store(p.expert_first + local, first_row, mask=local < S.L)
            for start in range(0, num_tiles, 64):
                tile = start + tl.arange(0, 64)
                before = last_tile[None, :] <= tile[:, None]
                expert = tl.sum(before.to(tl.int32), 1)
                here = local[None, :] == expert[:, None]
                first_tile = tl.sum(tl.where(here, (last_tile - tiles)[None, :], 0), 1)
                begin = tl.sum(tl.where(here, first_row[None, :], 0), 1)
                end = begin + tl.sum(tl.where(here, total[None, :], 0), 1)
                begin += (tile - first_tile) * S.BM
                tl.store(p.recv_expert + tile, expert, mask=tile < num_tiles)
                tl.store(p.recv_first + tile, begin, mask=tile < num_tiles)
                tl.store(p.recv_stop + tile, tl.minimum(begin + S.BM, end), mask=tile < num_tiles)
            mine = (bins >= r.rank * S.L) & (bins < (r.rank + 1) * S.L)
            for source in range(S.P):
                count = tl.load(matrix + source * S.E + bins, mask=bins < S.E, other=0)
                of_source = (count + S.BM - 1) // S.BM
                place = source * S.L + bins - r.rank * S.L
                tl.store(p.return_first + place, tl.cumsum(count, 0) - count, mask=mine)
                tl.store(p.return_tile + place, tl.cumsum(of_source, 0) - of_source, mask=mine)
            publish(r.control + PLANNED)


@triton.jit
def dispatch(tile, r, given, heap, t, p, S: tl.constexpr):
    """Copy the tokens of a row tile into the peer's heap; the expert's last tile signals."""
    expert, row, inside, slot = tile_rows(t, tile, S)
    place = row - tl.load(p.own_first + expert)
    peer = expert // S.L
    mine = expert - peer * S.L
    base = tl.load(heap.bases + peer)
    if S.C == 0:
        peers = tl.arange(0, S.PP)
        local = tl.arange(0, S.LP)
        # Our own copy of the matrix, which all ranks have.
        block = _rows_for(_count_matrix(r, heap, S), peer, S)
        earlier = (local < mine)[None, :] | ((local == mine)[None, :] & (peers < r.rank)[:, None])
        target = tl.sum(tl.sum(tl.where(earlier, block, 0), 1), 0) + place
        back = row
    else:
        inside = inside & (place < S.C)
        target = (r.rank * S.L + mine) * S.C + place
        back = expert * S.C + place
    tl.store(p.return_row + slot, back, mask=inside)
    first = r.first_token
    receive = rows_at(base, heap.receive, given.x.dtype.element_ty)
    target_rows = receive + target.to(tl.int64)[:, None] * S.H
    copy_rows(given.x + first * S.H, slot // S.K, target_rows, inside, S)
    rows = tl.sum(inside.to(tl.int32), 0)
    sent = rows.to(tl.int64) * (S.H * S.BYTES)
    if S.WEIGHT_ON_INPUT:
        weights = given.weights + first * S.K
        factor = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
        tl.store(section(base, heap.weights, tl.float32) + target, factor, mask=inside)
        sent += rows * 4
    if S.SHADOW:
        _written(section(base, heap.shadow, tl.int32) + target, r, inside, S)
    tl.atomic_add(r.stats + SENT_BYTES * S.P + peer, sent, sem="relaxed")
    count = tl.load(p.totals + expert)
    if complete(r.control + FLAGS + expert) == (count + S.BM - 1) // S.BM - 1:
        tl.store(r.control + FLAGS + expert, 0)
        words = section(base, heap.arrivals, tl.int64) + r.rank * S.L + mine + tl.arange(0, 1)
        if S.C > 0:
            count = tl.minimum(count, S.C)
        signal(words, r.epoch, _one(count), tl.arange(0, 1) == 0)
        tl.atomic_add(r.stats + SENT_SIGNALS * S.P + peer, 1, sem="relaxed")


@triton.jit
def copy_rows(source, index, target, inside, S: tl.constexpr):
    """Copy source[index] to where ``target`` [BM, 1] points."""
    source += index.to(tl.int64)[:, None] * S.H
    for start in range(0, S.H, S.COPY):
        column = start + tl.arange(0, S.COPY)[None, :]
        keep = inside[:, None] & (column < S.H)
        value = tl.load(source + column, mask=keep, other=0.0)
        place = target + column
        if S.H * S.BYTES % 16 == 0:  # rows begin at multiples of 16 bytes
            place = tl.multiple_of(place, (16, 16))
        tl.store(place, value, mask=keep)


@triton.jit
def _written(words, r, mask, S: tl.constexpr):
    """Note who writes a row, and complain if it was written in this epoch already (debugging)."""
    before = tl.atomic_xchg(words, r.epoch * S.P + r.rank + 1, mask=mask, sem="relaxed")
    again = mask & (before > r.epoch * S.P)
    if tl.max(again.to(tl.int32), 0) > 0:
        other = tl.max(tl.where(again, before - r.epoch * S.P - 1, 0), 0)
        fail(r.control, CONFLICT, other, 0)


@triton.jit
def received_tiles(r, p, S: tl.constexpr):
    """Return the row tiles that this rank receives, as far as it knows; 0 without a plan."""
    tiles = 0
    if S.C > 0:
        tiles += S.P * S.L * (S.C // S.BM)
    elif wait(r.control + PLANNED, 1, r.control, r.limit_ns):
        tiles += tl.load(p.recv_tiles)
    return tiles


@triton.jit
def _sources_of(r, heap, p, local, S: tl.constexpr):
    """Return the rows from each source for a local expert, and their ends (compact layout)."""
    peers = tl.arange(0, S.PP)
    place = _count_matrix(r, heap, S) + peers * S.E + r.rank * S.L + local
    count = tl.load(place, mask=peers < S.P, other=0)
    return count, tl.load(p.expert_first + local) + tl.cumsum(count, 0)


@triton.jit
def arrived(m, r, heap, p, S: tl.constexpr):
    """Wait for the rows of a receive tile; gives expert, first row and end.

    The end is not above the first row where there are none, or they did not come.
    """
    peers = tl.arange(0, S.PP)
    if S.C == 0:
        local = tl.load(p.recv_expert + m)
        first = tl.load(p.recv_first + m)
        stop = tl.load(p.recv_stop + m)
        count, ends = _sources_of(r, heap, p, local, S)
        needed = (peers < S.P) & (count > 0) & (ends > first) & (ends - count < stop)
    else:  # one's own rows first: they are there the soonest
        tiles: tl.constexpr = S.C // S.BM
        cell = m // tiles
        source = (cell // S.L + r.rank) % S.P
        local = cell % S.L
        needed = peers == source
    words = section(base_of(r, heap), heap.arrivals, tl.int64) + peers * S.L + local
    good, seen = wait_signals(words, peers, needed, r.epoch, r.control, ROWS, local, r.limit_ns)
    if S.C == 0:
        if not good:
            stop = first
    else:
        cells = (source * S.L + local) * S.C
        first = cells + m % tiles * S.BM
        stop = tl.minimum(first + S.BM, cells + tl.sum(seen, 0))
    return local, first, stop


@triton.jit
def address_rows(m, local, first, stop, r, heap, p, S: tl.constexpr):
    """Write down where the results of a receive tile belong, and which counts to add to.

    Ahead of the products, because a product's last part has no registers to spare. The rows of one
    source belong to one or two of its own row tiles: so many to the first, the others to the next.
    """
    row = first + tl.arange(0, S.BM)
    inside = row < stop
    peers = tl.arange(0, S.PP)
    if S.C == 0:
        count, ends = _sources_of(r, heap, p, local, S)
        starts = ends - count  # never descending
    else:
        cell = first // S.C
        starts = tl.where(peers <= cell // S.L, cell * S.C, 2147483647)
        ends = tl.where(peers == cell // S.L, stop, starts)
    begun = (peers < S.P)[None, :] & (starts[None, :] <= row[:, None])
    source = tl.sum(begun.to(tl.int32), 1) - 1  # the last that begins at or before the row
    source = tl.where(inside, source, 0)
    start = tl.sum(tl.where(peers[None, :] == source[:, None], starts[None, :], 0), 1)
    if S.C == 0:
        back = tl.load(p.return_first + source * S.L + local, mask=inside, other=0) + row - start
    else:
        back = (r.rank * S.L + local) * S.C + row - start
    heaps = tl.load(heap.bases + source, mask=inside, other=0)
    address = heaps + heap.returned + back.to(tl.int64) * (S.H * S.BYTES)
    tl.store(p.return_address + row, address, mask=inside)
    if S.SCALARS:
        address = heaps + heap.return_weights + back.to(tl.int64) * 4
        tl.store(p.word_address + row, address, mask=inside)
    elif S.SHADOW:
        columns: tl.constexpr = (S.H + S.BN2 - 1) // S.BN2
        address = heaps + heap.return_shadow + back.to(tl.int64) * (4 * columns)
        tl.store(p.word_address + row, address, mask=inside)
    begin = tl.maximum(first - starts, 0)
    rows = tl.maximum(tl.minimum(stop, ends) - tl.maximum(first, starts), 0)
    some = (peers < S.P) & (rows > 0)
    if S.C == 0:
        tile = tl.load(p.return_tile + peers * S.L + local, mask=some, other=0) + begin // S.BM
    else:
        tile = (r.rank * S.L + local) * (S.C // S.BM) + begin // S.BM
    upper = tl.maximum(begin % S.BM + rows - S.BM, 0)
    address = tl.load(heap.bases + peers, mask=some, other=0) + heap.return_counts + 4 * tile
    tl.store(p.count_address + m * S.P + peers, address, mask=peers < S.P)
    tl.store(p.count_rows + m * S.P + peers, rows, mask=peers < S.P)
    tl.store(p.count_upper + m * S.P + peers, upper, mask=peers < S.P)


@triton.jit
def received_product(n, first, stop, expert, w13, b13, inner, r, heap, S: tl.constexpr):
    """Compute the first product on the rows of a receive tile."""
    row = first + tl.arange(0, S.BM)
    received = rows_at(base_of(r, heap), heap.receive, inner.dtype.element_ty)
    factors = section(base_of(r, heap), heap.weights, tl.float32) + row
    first_product(n, expert, row, row < stop, received, row, factors, w13, b13, inner, None, S)


@triton.jit
def returned_product(m, n, first, stop, expert, w2, b2, inner, r, p, S: tl.constexpr):
    """Compute the second product, into the heaps of the ranks that the rows came from."""
    row = first + tl.arange(0, S.BM)
    inside = row < stop
    total, column = second_product(n, expert, row, inside, inner, w2, b2, S)
    address = tl.load(p.return_address + row, mask=inside, other=0)
    returned = address.to(tl.pointer_type(inner.dtype.element_ty))
    target = returned[:, None] + column[None, :]
    if S.H * S.BYTES % 16 == 0:  # said here: a function's argument would not keep it
        target = tl.multiple_of(target, (16, 16))
    tl.store(
        target,
        narrow(total, inner.dtype.element_ty, S),
        mask=inside[:, None] & (column < S.H)[None, :],
    )
    if S.SHADOW:
        words = tl.load(p.word_address + row, mask=inside, other=0)
        _written(words.to(tl.pointer_type(tl.int32)) + n, r, inside, S)
    row_bytes = tl.minimum(S.BN2, S.H - n * S.BN2) * S.BYTES
    tell_sources(m, row_bytes, r, p, S)


@triton.jit
def return_rows(m, first, stop, rows, scalars, r, p, S: tl.constexpr):
    """Store a tile's rows, and a number for each, into the heaps of the ranks they came from."""
    row = first + tl.arange(0, S.BM)
    inside = row < stop
    address = tl.load(p.return_address + row, mask=inside, other=0)
    target = address.to(tl.pointer_type(rows.dtype.element_ty))[:, None]
    copy_rows(rows, row, target, inside, S)
    row_bytes: tl.constexpr = S.H * S.BYTES + (4 if S.SCALARS else 0)
    if S.SCALARS:
        words = tl.load(p.word_address + row, mask=inside, other=0)
        value = tl.load(scalars + row, mask=inside, other=0.0)
        tl.store(words.to(tl.pointer_type(tl.float32)), value, mask=inside)
    tell_sources(m, row_bytes, r, p, S)


@triton.jit
def tell_sources(m, row_bytes, r, p, S: tl.constexpr):
    """Add the rows of a receive tile, which this program has returned, to their owners' counts."""
    peers = tl.arange(0, S.PP)
    rows = tl.load(p.count_rows + m * S.P + peers, mask=peers < S.P, other=0)
    upper = tl.load(p.count_upper + m * S.P + peers, mask=peers < S.P, other=0)
    counts = tl.load(p.count_address + m * S.P + peers, mask=peers < S.P, other=0)
    counts = counts.to(tl.pointer_type(tl.int32))
    give_back(counts, rows - upper, rows > 0)
    give_back(counts + 1, upper, upper > 0)
    _count(r, RETURNED_BYTES, peers, rows.to(tl.int64) * row_bytes, rows > 0, S)
    signals = (rows > 0).to(tl.int64) + (upper > 0).to(tl.int64)
    _count(r, RETURNED_SIGNALS, peers, signals, rows > 0, S)


@triton.jit
def combine_returned(block, first_column, columns, r, given, heap, t, p, S: tl.constexpr):
    """Wait for the rows of some tokens and combine them."""
    _slot, mask, tile = slots_of_block(block, r.tokens, t, S)
    mask = mask & (tile >= 0)
    expert = tl.load(t.tile_expert + tile, mask=mask, other=0)
    begin = tl.load(t.tile_first + tile, mask=mask, other=0)
    rows = tl.load(t.tile_stop + tile, mask=mask, other=0) - begin
    if S.C > 0:
        first = tl.load(p.own_first + expert, mask=mask, other=0)
        tile = expert * (S.C // S.BM) + (begin - first) // S.BM
    missing = wait_counts(
        section(base_of(r, heap), heap.return_counts, tl.int32) + tile,
        rows * ((S.H + S.BN2 - 1) // S.BN2), expert // S.L, mask, r.control, r.limit_ns, RETURNS,
        "sys",
    )  # fmt: skip
    returned = rows_at(base_of(r, heap), heap.returned, given.out.dtype.element_ty)
    came = (tl.full([S.BT], 0, tl.int32) + missing) < 0
    combine(
        block, first_column, columns, returned, p.return_row, given.weights + r.first_token * S.K,
        t, given.out + r.first_token * S.H, r.tokens, came, S,
    )  # fmt: skip


@triton.jit
def scalars_back(block, out, r, heap, t, p, S: tl.constexpr):
    """Store the numbers that came back, by slot; after ``combine_returned`` waited for the rows."""
    slot, mask, tile = slots_of_block(block, r.tokens, t, S)
    used = mask & (tile >= 0)
    row = tl.load(p.return_row + slot, mask=used, other=0)
    value = tl.load(
        section(base_of(r, heap), heap.return_weights, tl.float32) + row, mask=used, other=0.0
    )
    broken = tl.atomic_add(r.control + ERROR, 0, sem="relaxed", scope="gpu") != 0
    value = tl.where(broken, float("nan"), value)
    tl.store(out + r.first_token * S.K + slot, value, mask=mask)
