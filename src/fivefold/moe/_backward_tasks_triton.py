# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, E741, N803, PLR0913, PLR0917, RET505, SIM102
# mypy: ignore-errors
"""The tasks of the backward, each on one tile; nothing here waits, and no sum is atomic.

With z = W13 x (``hidden``), h what the activation f takes, u = f(h), g the gradient of the output
of a token, and a row's weight w on the output:

    q = g W2,  dw = q . u,  dh = w q f'(h),  dx = dh W13 added over k,  dW2 = g^T (w u),
    dW13 = dh^T x

and with the weight on the input dw = dh . z, dx = w dh W13, dW2 = g^T u, dW13 = dh^T (w x). So the
expert's output is never computed again, and a routing weight of zero needs no division. What is
added over columns comes as one partial sum per tile of columns, added in order afterwards.

Legend: as in ``_tasks_triton``. D: width of the first product, 2 I where gated, else I. The weight
gradients are products over an expert's rows: [P, Q] = left^T right.
"""

import triton
import triton.language as tl

from fivefold.moe._tasks_triton import _activate, _narrow, _with_weight_and_bias


@triton.jit
def expert_ranges(
    counts,
    range_first,
    range_stop,
    num_chunks,
    E: tl.constexpr,
    EP: tl.constexpr,
    READ: tl.constexpr,
):
    """Write each expert's first row and the one behind its last."""
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
    stop = tl.cumsum(total, 0)
    tl.store(range_first + bins, stop - total, mask=bins < E)
    tl.store(range_stop + bins, stop, mask=bins < E)


@triton.jit
def _slope(h, ACTIVATION: tl.constexpr):
    """f'(h)."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(h)
        slope = s * (1.0 + h * (1.0 - s))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * h * h)
        slope = 0.5 * (1.0 + tl.math.erf(h * 0.7071067811865476)) + h * density
    elif ACTIVATION == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * h * h)
        slope = s + h * (s * (1.0 - s)) * inner
    elif ACTIVATION == "relu":
        slope = tl.where(h > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2", "no such activation on the device")
        slope = 2.0 * tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return slope


@triton.jit
def _deep_weights(
    w,
    expert,
    depth,
    column,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
):
    """Rows [depth, depth + BK) and columns [column, column + BN) of an expert's [DEPTH, COLUMNS].

    Zero beyond either end: behind the last row of an expert lies the next one, whose numbers may
    be infinite.
    """
    row = depth + tl.arange(0, BK)
    if TMA:
        block = w.load([expert * DEPTH + depth, column])
        if DEPTH % BK != 0:
            if INTERPRETED:
                block = block.to(tl.float32)
            block = tl.where((row < DEPTH)[:, None], block, 0.0)
        return block
    else:  # Triton compiles what stands behind a return, and a descriptor has no `+`
        columns = column + tl.arange(0, BN)
        return tl.load(
            w + (expert * DEPTH + row).to(tl.int64)[:, None] * COLUMNS + columns[None, :],
            mask=(row < DEPTH)[:, None] & (columns < COLUMNS)[None, :],
            other=0.0,
        )


@triton.jit
def _add_product(a, b, total, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # its bfloat16 are bit patterns that numpy cannot multiply
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _through_the_activation(
    q,
    column,
    expert,
    row,
    inside,
    slot,
    b13,
    weights,
    hidden,
    d_hidden,
    inner,
    I: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store d_hidden and the inner values of some columns; returns their part of dw."""
    width: tl.constexpr = 2 * I if GATED else I
    keep = inside[:, None] & (column < I)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    raw_gate = tl.load(hidden + place, mask=keep, other=0.0).to(tl.float32)
    raw_up = raw_gate
    if GATED:
        raw_up = tl.load(hidden + place + I, mask=keep, other=0.0).to(tl.float32)
    gate, up = _with_weight_and_bias(
        raw_gate, raw_up, expert, slot, inside, column, b13, weights, I, GATED, WEIGHT_ON_INPUT
    )
    value = _activate(gate, ACTIVATION)
    slope = _slope(gate, ACTIVATION)
    if GATED:
        d_gate = q * up * slope
        d_up = q * value
        value = value * up
    else:
        d_gate = q * slope
        d_up = d_gate
    if WEIGHT_ON_INPUT:
        share = d_gate * raw_gate
        if GATED:
            share += d_up * raw_up
    else:
        share = q * value
        weight = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
        value = value * weight[:, None]
        d_gate = d_gate * weight[:, None]
        d_up = d_up * weight[:, None]
    tl.store(
        inner + row.to(tl.int64)[:, None] * I + column[None, :],
        _narrow(value, inner.dtype.element_ty, INTERPRETED),
        mask=keep,
    )
    tl.store(d_hidden + place, _narrow(d_gate, d_hidden.dtype.element_ty, INTERPRETED), mask=keep)
    if GATED:
        found = _narrow(d_up, d_hidden.dtype.element_ty, INTERPRETED)
        tl.store(d_hidden + place + I, found, mask=keep)
    # Behind the last column stands f(0) at best: it must not meet what it is multiplied with.
    return tl.sum(tl.where(keep, share, 0.0), 1)


@triton.jit
def hidden_gradient(
    m,
    n,
    gradient,
    w2,
    b13,
    weights,
    hidden,
    d_hidden,
    inner,
    partial,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    num_slots,
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
):
    """For row tile m and columns n: d_hidden, the inner values for dW2, and this tile's part of dw.

    ``d_hidden`` may be ``hidden``: each element is read by who writes it, before. The columns come
    in two halves, or the registers would not do.
    """
    expert = tl.load(tile_expert + m)
    row = tl.load(tile_first + m) + tl.arange(0, BM)
    inside = row < tl.load(tile_stop + m)
    slot = tl.load(slot_of_row + row, mask=inside, other=0)
    depth = tl.arange(0, BK)
    source = gradient + (slot // K).to(tl.int64)[:, None] * H + depth[None, :]
    q = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        if H % BK == 0:
            a = tl.load(source + k, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(source + k, mask=inside[:, None] & (k + depth < H)[None, :], other=0.0)
        b = _deep_weights(w2, expert, k, n * BN, H, I, TMA, INTERPRETED, BK, BN)
        q = _add_product(a, b, q, PRECISION, INTERPRETED)

    half: tl.constexpr = BN // 2
    lower, upper = tl.split(tl.permute(tl.reshape(q, [BM, 2, half]), (0, 2, 1)))
    share = tl.zeros([BM], tl.float32)
    for part in tl.static_range(2):
        share += _through_the_activation(
            upper if part == 1 else lower, n * BN + part * half + tl.arange(0, half), expert, row,
            inside, slot, b13, weights, hidden, d_hidden, inner, I, GATED, ACTIVATION,
            WEIGHT_ON_INPUT, INTERPRETED,
        )  # fmt: skip
    tl.store(partial + num_slots.to(tl.int64) * n + slot, share, mask=inside)


@triton.jit
def token_gradient(
    m,
    n,
    d_hidden,
    w13,
    outputs,
    tile_expert,
    tile_first,
    tile_stop,
    slot_of_row,
    H: tl.constexpr,
    D: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """outputs[slots, n BN : (n+1) BN] = d_hidden[rows] W13 for row tile m."""
    expert = tl.load(tile_expert + m)
    row = tl.load(tile_first + m) + tl.arange(0, BM)
    inside = row < tl.load(tile_stop + m)
    slot = tl.load(slot_of_row + row, mask=inside, other=0)
    depth = tl.arange(0, BK)
    source = d_hidden + row.to(tl.int64)[:, None] * D + depth[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        if D % BK == 0:
            a = tl.load(source + k, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(source + k, mask=inside[:, None] & (k + depth < D)[None, :], other=0.0)
        b = _deep_weights(w13, expert, k, n * BN, D, H, TMA, INTERPRETED, BK, BN)
        total = _add_product(a, b, total, PRECISION, INTERPRETED)
    column = n * BN + tl.arange(0, BN)
    tl.store(
        outputs + slot.to(tl.int64)[:, None] * H + column[None, :],
        _narrow(total, outputs.dtype.element_ty, INTERPRETED),
        mask=inside[:, None] & (column < H)[None, :],
    )


@triton.jit
def _rows_of(source, index, inside, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """source[index, column], zero where there is no row or no column."""
    place = source + index.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if WIDTH % BLOCK == 0:
        return tl.load(place, mask=inside[:, None], other=0.0)
    else:
        return tl.load(place, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def weight_gradient(
    expert,
    p,
    q,
    left,
    right,
    weights,
    out,
    range_first,
    range_stop,
    slot_of_row,
    P: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    BP: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[expert] = left^T right over the expert's rows, on one tile; zero where there are none.

    One of the two has a row per token and is gathered, the other has the rows themselves. Where
    WEIGHTED, rows of ``right`` are multiplied by their routing weight.
    """
    stop = tl.load(range_stop + expert)
    p_column = p * BP + tl.arange(0, BP)
    q_column = q * BQ + tl.arange(0, BQ)
    total = tl.zeros([BP, BQ], tl.float32)
    for first in tl.range(tl.load(range_first + expert), stop, BK, num_stages=STAGES):
        row = first + tl.arange(0, BK)
        inside = row < stop
        slot = tl.load(slot_of_row + row, mask=inside, other=0)
        if GATHER_LEFT:
            a = _rows_of(left, slot // K, inside, p_column, P, BP)
            b = _rows_of(right, row, inside, q_column, Q, BQ)
        else:
            a = _rows_of(left, row, inside, p_column, P, BP)
            b = _rows_of(right, slot // K, inside, q_column, Q, BQ)
        if WEIGHTED:
            weight = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
            b = b.to(tl.float32) * weight[:, None]
            b = _narrow(b, right.dtype.element_ty, INTERPRETED)
        total = _add_product(a.T, b, total, PRECISION, INTERPRETED)
    tl.store(
        out + (expert * P + p_column).to(tl.int64)[:, None] * Q + q_column[None, :],
        _narrow(total, out.dtype.element_ty, INTERPRETED),
        mask=(p_column < P)[:, None] & (q_column < Q)[None, :],
    )


@triton.jit
def bias_gradient(
    expert,
    n,
    source,
    weights,
    out,
    range_first,
    range_stop,
    slot_of_row,
    N: tl.constexpr,
    K: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
):
    """out[expert] = the sum of an expert's rows of ``source``, weighted or not, on BN columns."""
    stop = tl.load(range_stop + expert)
    column = n * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for first in range(tl.load(range_first + expert), stop, BK):
        row = first + tl.arange(0, BK)
        inside = row < stop
        slot = tl.load(slot_of_row + row, mask=inside, other=0)
        block = _rows_of(source, slot // K if GATHER else row, inside, column, N, BN)
        block = block.to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
            block = block * weight[:, None]
        total += tl.sum(block, 0)
    value = _narrow(total, out.dtype.element_ty, INTERPRETED)
    tl.store(out + expert * N + column, value, mask=column < N)


@triton.jit
def routing_gradient(
    block,
    partial,
    gradient,
    b2,
    tile_of_slot,
    tile_expert,
    out,
    num_slots,
    columns: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Of BT slots dw: all tiles' parts, in the order of columns, and g . b2; 0 for dropped ones."""
    slot = block * BT + tl.arange(0, BT)
    present = slot < num_slots
    tile = tl.load(tile_of_slot + slot, mask=present, other=-1)
    used = tile >= 0
    total = tl.zeros([BT], tl.float32)
    for n in range(columns):
        total += tl.load(partial + num_slots.to(tl.int64) * n + slot, mask=used, other=0.0)
    if b2 is not None:
        if not WEIGHT_ON_INPUT:
            expert = tl.load(tile_expert + tile, mask=used, other=0)
            token = (slot // K).to(tl.int64)
            for first in range(0, H, BH):
                column = first + tl.arange(0, BH)
                keep = used[:, None] & (column < H)[None, :]
                g = tl.load(gradient + token[:, None] * H + column[None, :], mask=keep, other=0.0)
                bias = tl.load(b2 + expert[:, None] * H + column[None, :], mask=keep, other=0.0)
                total += tl.sum(g.to(tl.float32) * bias.to(tl.float32), 1)
    tl.store(out + slot, _narrow(total, out.dtype.element_ty, INTERPRETED), mask=present)
