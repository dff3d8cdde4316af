# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, E741, N803, PLR0913, PLR0917, RET505, SIM102
# mypy: ignore-errors
"""The five tasks of the mixture-of-experts kernel, each on one tile; nothing here waits.

count a chunk of assignments, place its rows, first product, second product, combine. The single
kernel and the separate launches of ``_kernels_triton`` call the same functions.

Legend: T tokens, K experts per token, slots T K (slot = t K + k), E experts (EP: next power of
two), H hidden, I inner size. Rows are the slots sorted by expert, without gaps: an expert's rows
are cut into row tiles of BM, the last one short. BN, BK: columns and depth of a step of a product.
"""

import triton
import triton.language as tl


@triton.jit
def count_chunk(
    chunk, ids, counts, num_slots, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr
):
    """Write how many of a chunk's assignments go to each expert."""
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + slot, mask=slot < num_slots, other=-1).to(tl.int32)
    valid = (expert >= 0) & (expert < E)
    found = tl.histogram(tl.where(valid, expert, 0), EP, mask=valid)
    place = tl.arange(0, EP)
    tl.store(counts + chunk * E + place, found, mask=place < E)


@triton.jit
def place_chunk(
    chunk,
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
    """Give a chunk's assignments their rows, in the order of slots within an expert.

    The assignment that begins a row tile writes the tile's table entry.
    """
    bins = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    cursor = tl.zeros([EP], tl.int32)
    for first in range(0, num_chunks, READ):
        other = first + tl.arange(0, READ)
        block = tl.load(
            counts + other[:, None] * E + bins[None, :],
            mask=(other < num_chunks)[:, None] & (bins < E)[None, :],
            other=0,
        )
        total += tl.sum(block, 0)
        cursor += tl.sum(tl.where((other < chunk)[:, None], block, 0), 0)
    stop_row = tl.cumsum(total, 0)
    first_row = stop_row - total
    tiles = (total + BM - 1) // BM
    first_tile = tl.cumsum(tiles, 0) - tiles
    if chunk == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    index = tl.arange(0, PART)
    earlier = index[None, :] < index[:, None]
    for part in range(0, CHUNK, PART):
        slot = chunk * CHUNK + part + index
        inside = slot < num_slots
        expert = tl.load(ids + slot, mask=inside, other=-1).to(tl.int32)
        valid = (expert >= 0) & (expert < E)
        # A dropped slot gets a negative name of its own kind: equal to no expert's.
        name = tl.where(valid, expert, -1)
        expert = tl.where(valid, expert, 0)
        same = (name[:, None] == name[None, :]) & earlier
        rank = tl.gather(cursor, expert, 0) + tl.sum(same.to(tl.int32), 1)
        begin = tl.gather(first_row, expert, 0)
        tile = tl.gather(first_tile, expert, 0) + rank // BM
        tl.store(slot_of_row + begin + rank, slot, mask=valid)
        tl.store(tile_of_slot + slot, tl.where(valid, tile, -1), mask=inside)
        starts = valid & (rank % BM == 0)
        end = tl.minimum(begin + rank + BM, tl.gather(stop_row, expert, 0))
        tl.store(tile_expert + tile, expert, mask=starts)
        tl.store(tile_first + tile, begin + rank, mask=starts)
        tl.store(tile_stop + tile, end, mask=starts)
        cursor += tl.histogram(expert, EP, mask=valid)


@triton.jit
def _activate(h, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        h = h * tl.sigmoid(h)
    elif ACTIVATION == "gelu":
        h = 0.5 * h * (1.0 + tl.math.erf(h * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u)
        h = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
    elif ACTIVATION == "relu":
        h = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACTIVATION == "relu2", "no such activation on the device")
        h = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
        h = h * h
    return h


@triton.jit
def _weights(
    w,
    row,
    num_rows,
    depth,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows [row, row + BN) and columns [depth, depth + BK) of a weight [num_rows, DEPTH].

    Zero beyond the depth. Rows that belong to another part give columns that no one stores.
    """
    if TMA:
        return w.load([row, depth])
    else:  # Triton compiles what stands behind a return, and a descriptor has no `+`
        rows = row + tl.arange(0, BN)
        columns = depth + tl.arange(0, BK)
        return tl.load(
            w + rows.to(tl.int64)[:, None] * DEPTH + columns[None, :],
            mask=(rows < num_rows)[:, None] & (columns < DEPTH)[None, :],
            other=0.0,
        )


@triton.jit
def _multiply(a, b, total, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # its bfloat16 are bit patterns that numpy cannot multiply
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b.T, total, input_precision=PRECISION)


@triton.jit
def _narrow(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """To the data type of storage, to nearest even; the interpreter cuts bfloat16 off instead."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = value.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            value = bits.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def _with_weight_and_bias(
    gate,
    up,
    expert,
    slot,
    inside,
    column,
    b13,
    weights,
    I: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
):
    """From W13 x to what the activation takes."""
    width: tl.constexpr = 2 * I if GATED else I
    if WEIGHT_ON_INPUT:  # W (w x) = w (W x), and in float32
        factor = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
        gate = gate * factor[:, None]
        if GATED:
            up = up * factor[:, None]
    if b13 is not None:
        bias = tl.load(b13 + expert * width + column, mask=column < I, other=0.0)
        gate += bias.to(tl.float32)[None, :]
        if GATED:
            bias = tl.load(b13 + expert * width + I + column, mask=column < I, other=0.0)
            up += bias.to(tl.float32)[None, :]
    return gate, up


@triton.jit
def first_product(
    m,
    n,
    x,
    w13,
    b13,
    weights,
    inner,
    hidden,
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
):
    """inner[rows, n BN : (n+1) BN] = f(W13 x[tokens] + b13) for row tile m.

    W13 x itself goes to ``hidden``, for the backward, where that is not None; ``inner`` may be
    None then.
    """
    expert = tl.load(tile_expert + m)
    row = tl.load(tile_first + m) + tl.arange(0, BM)
    inside = row < tl.load(tile_stop + m)
    slot = tl.load(slot_of_row + row, mask=inside, other=0)
    depth = tl.arange(0, BK)
    source = x + (slot // K).to(tl.int64)[:, None] * H + depth[None, :]
    width: tl.constexpr = 2 * I if GATED else I
    rows = expert * width + n * BN
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        if H % BK == 0:
            a = tl.load(source + k, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(source + k, mask=inside[:, None] & (k + depth < H)[None, :], other=0.0)
        b = _weights(w13, rows, E * width, k, H, TMA, BN, BK)
        gate = _multiply(a, b, gate, PRECISION, INTERPRETED)
        if GATED:
            b = _weights(w13, rows + I, E * width, k, H, TMA, BN, BK)
            up = _multiply(a, b, up, PRECISION, INTERPRETED)
    column = n * BN + tl.arange(0, BN)
    keep = inside[:, None] & (column < I)[None, :]
    if hidden is not None:
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        raw = _narrow(gate, hidden.dtype.element_ty, INTERPRETED)
        tl.store(hidden + place, raw, mask=keep)
        if GATED:
            raw = _narrow(up, hidden.dtype.element_ty, INTERPRETED)
            tl.store(hidden + place + I, raw, mask=keep)
    if inner is not None:
        gate, up = _with_weight_and_bias(
            gate, up, expert, slot, inside, column, b13, weights, I, GATED, WEIGHT_ON_INPUT
        )
        value = _activate(gate, ACTIVATION)
        if GATED:
            value = value * up
        tl.store(
            inner + row.to(tl.int64)[:, None] * I + column[None, :],
            _narrow(value, inner.dtype.element_ty, INTERPRETED),
            mask=keep,
        )


@triton.jit
def second_product(
    m,
    n,
    inner,
    w2,
    b2,
    outputs,
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
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """outputs[slots, n BN : (n+1) BN] = W2 inner[rows] + b2 for row tile m."""
    expert = tl.load(tile_expert + m)
    row = tl.load(tile_first + m) + tl.arange(0, BM)
    inside = row < tl.load(tile_stop + m)
    slot = tl.load(slot_of_row + row, mask=inside, other=0)
    depth = tl.arange(0, BK)
    source = inner + row.to(tl.int64)[:, None] * I + depth[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, I, BK, num_stages=STAGES):
        if I % BK == 0:
            a = tl.load(source + k, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(source + k, mask=inside[:, None] & (k + depth < I)[None, :], other=0.0)
        b = _weights(w2, expert * H + n * BN, E * H, k, I, TMA, BN, BK)
        total = _multiply(a, b, total, PRECISION, INTERPRETED)
    column = n * BN + tl.arange(0, BN)
    if b2 is not None:
        bias = tl.load(b2 + expert * H + column, mask=column < H, other=0.0)
        total += bias.to(tl.float32)[None, :]
    tl.store(
        outputs + slot.to(tl.int64)[:, None] * H + column[None, :],
        _narrow(total, outputs.dtype.element_ty, INTERPRETED),
        mask=inside[:, None] & (column < H)[None, :],
    )


@triton.jit
def combine(
    block,
    first_column,
    columns,
    outputs,
    weights,
    tile_of_slot,
    out,
    num_tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """out[t] = sum over k, in order and in float32, of weight[t, k] outputs[t, k]."""
    token = block * BT + tl.arange(0, BT)
    present = token < num_tokens
    for start in range(first_column, first_column + columns, BH):
        column = start + tl.arange(0, BH)
        keep = present[:, None] & (column < H)[None, :]
        total = tl.zeros([BT, BH], tl.float32)
        for k in range(K):
            slot = token * K + k
            # A dropped slot's output was never written: nothing of it may be read.
            used = present & (tl.load(tile_of_slot + slot, mask=present, other=-1) >= 0)
            term = tl.load(
                outputs + slot.to(tl.int64)[:, None] * H + column[None, :],
                mask=used[:, None] & keep,
                other=0.0,
            ).to(tl.float32)
            if not WEIGHT_ON_INPUT:
                weight = tl.load(weights + slot, mask=used, other=0.0).to(tl.float32)
                term = term * weight[:, None]
            total += term
        tl.store(
            out + token.to(tl.int64)[:, None] * H + column[None, :],
            _narrow(total, out.dtype.element_ty, INTERPRETED),
            mask=keep,
        )
