# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917, RET505, SIM102
# mypy: ignore-errors
"""The backward, one launch for each kind of task; nothing here waits, and no sum is atomic.

With z = W13 x, h what the activation f takes (``hidden``), u = f(h), g the gradient of the output
of a token, and a row's weight w on the output:

    q = g W2,  dw = q . u,  dh = w q f'(h),  dx = dh W13 added over k,  dW2 = g^T (w u),
    dW13 = dh^T x

and with the weight on the input, where ``hidden`` has z, dw = dh . z, dx = w dh W13, dW2 = g^T u,
dW13 = dh^T (w x). So the expert's output is never computed again, and a routing weight of zero
needs no division. What is added over columns comes as one partial sum per tile of columns, added in
order afterwards.

A program takes every ``num_programs``-th task, so any number of programs gives the same bits; with
one program per task the machine's own scheduler balances them. The order between launches is that
of the stream. How many row tiles there are stands in device memory, so launches are as large as the
most there can be, and tasks beyond the last tile are empty.
"""

import triton
import triton.language as tl

from fivefold.moe.kernels._forward import add_counts
from fivefold.moe.kernels._products import (
    activate,
    add_product,
    keep_columns,
    multiply,
    narrow,
    places,
    slope_of,
    store_rows,
    tile_in_step,
    tile_rows,
    weigh_and_bias,
)


@triton.jit(do_not_specialize=["num_slots"])
def ranges_kernel(t, ranges, num_slots, S: tl.constexpr):
    """Write each expert's first row and the one behind its last, [2, E]; by one program."""
    num_chunks = (num_slots + S.CHUNK - 1) // S.CHUNK
    total, _ = add_counts(t, None, num_chunks, S)
    bins = tl.arange(0, S.EP)
    stop = tl.cumsum(total, 0)
    tl.store(ranges + bins, stop - total, mask=bins < S.E)
    tl.store(ranges + S.E + bins, stop, mask=bins < S.E)


@triton.jit
def _through_the_activation(
    q, column, expert, row, inside, slot, given, hidden, d_hidden, inner, S: tl.constexpr
):  # fmt: skip
    """Store d_hidden and the inner values of some columns; returns their part of dw."""
    width: tl.constexpr = 2 * S.I if S.GATED else S.I
    keep = inside[:, None] & (column < S.I)[None, :]
    place = places(hidden, row, column, width)
    raw_gate = tl.load(place, mask=keep, other=0.0).to(tl.float32)
    raw_up = raw_gate
    if S.GATED:
        raw_up = tl.load(place + S.I, mask=keep, other=0.0).to(tl.float32)
    factors = given.weights + slot
    gate, up = raw_gate, raw_up  # with their bias
    if S.WEIGHT_ON_INPUT:
        gate, up = weigh_and_bias(gate, up, factors, inside, expert, column, given.b13, S)
    value = activate(gate, S)
    slope = slope_of(gate, S)
    if S.GATED:
        d_gate = q * up * slope
        d_up = q * value
        value = value * up
    else:
        d_gate = q * slope
        d_up = d_gate
    if S.WEIGHT_ON_INPUT:
        share = d_gate * raw_gate
        if S.GATED:
            share += d_up * raw_up
    else:
        share = q * value
        weight = tl.load(factors, mask=inside, other=0.0).to(tl.float32)
        value = value * weight[:, None]
        d_gate = d_gate * weight[:, None]
        d_up = d_up * weight[:, None]
    store_rows(inner, row, column, value, inside, S.I, S)
    keep_columns(d_hidden, row, column, d_gate, d_up, inside, S)
    # Behind the last column stands f(0) at best: it must not meet what it is multiplied with.
    return tl.sum(tl.where(keep, share, 0.0), 1)


@triton.jit(do_not_specialize=["num_slots", "tasks"])
def hidden_gradient_kernel(
    given, gradient, w2_deep, t, hidden, d_hidden, inner, partial, num_slots, tasks,
    S: tl.constexpr,
):  # fmt: skip
    """Write d_hidden, the inner values for dW2 and a part of dw, by row tile and BN columns.

    ``d_hidden`` may be ``hidden``: each element is read by who writes it, before. The columns come
    in two halves, or the registers would not do.
    """
    tiles = tl.load(t.num_tiles)
    half: tl.constexpr = S.BN // 2
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        m, n = tile_in_step(task, (S.I + S.BN - 1) // S.BN, S)
        if m < tiles:
            expert, row, inside, slot = tile_rows(t, m, S)
            token = slot // S.K
            q, _ = multiply(
                gradient, token, inside, w2_deep, expert, n * S.BN, S.H, S.I, S.BN, 0, True, S
            )
            lower, upper = tl.split(tl.permute(tl.reshape(q, [S.BM, 2, half]), (0, 2, 1)))
            share = tl.full([S.BM], 0, tl.float32)
            for part in tl.static_range(2):
                share += _through_the_activation(
                    upper if part == 1 else lower, n * S.BN + part * half + tl.arange(0, half),
                    expert, row, inside, slot, given, hidden, d_hidden, inner, S,
                )  # fmt: skip
            tl.store(partial + num_slots.to(tl.int64) * n + slot, share, mask=inside)


@triton.jit(do_not_specialize=["tasks"])
def token_gradient_kernel(w13_deep, t, d_hidden, outputs, tasks, S: tl.constexpr):
    """Store outputs[slots] = d_hidden[rows] W13 for each row tile and BN2 columns."""
    tiles = tl.load(t.num_tiles)
    width: tl.constexpr = 2 * S.I if S.GATED else S.I
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        m, n = tile_in_step(task, (S.H + S.BN2 - 1) // S.BN2, S)
        if m < tiles:
            expert, row, inside, slot = tile_rows(t, m, S)
            first = n * S.BN2
            total, _ = multiply(
                d_hidden, row, inside, w13_deep, expert, first, width, S.H, S.BN2, 0, True, S
            )
            column = first + tl.arange(0, S.BN2)
            store_rows(outputs, slot, column, total, inside, S.H, S)


@triton.jit
def _read_rows(source, index, inside, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load source[index, column], zero where there is no row or no column."""
    place = places(source, index, column, WIDTH)
    if WIDTH % BLOCK == 0:
        return tl.load(place, mask=inside[:, None], other=0.0)
    else:
        return tl.load(place, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["tasks"])
def gather_rows_kernel(
    source, rows, weights, ranges, t, tasks, WEIGHTED: tl.constexpr, S: tl.constexpr
):
    """Store rows[row] = source[its token], of H, BT rows and BH columns a task.

    Times its routing weight where WEIGHTED. A product whose loads look a token up first can hold
    two steps at most; through what is gathered here it holds as many as there is memory for.
    """
    columns: tl.constexpr = (S.H + S.BH - 1) // S.BH
    stop = tl.load(ranges + 2 * S.E - 1)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = task // columns * S.BT + tl.arange(0, S.BT)
        column = task % columns * S.BH + tl.arange(0, S.BH)
        inside = row < stop
        slot = tl.load(t.slot_of_row + row, mask=inside, other=0)
        block = _read_rows(source, slot // S.K, inside, column, S.H, S.BH)
        if WEIGHTED:
            weight = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
            block = narrow(block.to(tl.float32) * weight[:, None], rows.dtype.element_ty, S)
        keep = inside[:, None] & (column < S.H)[None, :]
        tl.store(places(rows, row, column, S.H), block, mask=keep)


@triton.jit
def _row_tile(
    source, first, stop, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Load BK rows from ``first`` on, columns [column, column + BLOCK); zero from ``stop`` on.

    WHOLE: there is none from ``stop`` on.
    """
    row = first + tl.arange(0, S.BK)
    if S.TMA:
        block = source.load([first, column])
        if not WHOLE:  # behind an expert's last row stand the next one's, or what may be NaN
            if S.INTERPRETED:
                block = block.to(tl.float32)
            block = tl.where((row < stop)[:, None], block, 0.0)
        return block
    else:  # Triton compiles what stands behind a return, and a descriptor has no `+`
        return _read_rows(source, row, row < stop, column + tl.arange(0, BLOCK), WIDTH, BLOCK)


@triton.jit(do_not_specialize=["tasks"])
def weight_gradient_kernel(
    left, right, out, ranges, tasks, P: tl.constexpr, Q: tl.constexpr, S: tl.constexpr
):
    """Store out[expert] = left^T right over the expert's rows, [P, Q], in tiles of BM x BN2.

    Zero where there are no rows. Tasks go along the side with fewer tiles first, whose columns then
    stay in the cache.
    """
    p_tiles: tl.constexpr = (P + S.BM - 1) // S.BM
    q_tiles: tl.constexpr = (Q + S.BN2 - 1) // S.BN2
    precision: tl.constexpr = S.PRECISION
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        expert = task // (p_tiles * q_tiles)
        place = task % (p_tiles * q_tiles)
        if p_tiles <= q_tiles:
            p_first = place % p_tiles * S.BM
            q_first = place // p_tiles * S.BN2
        else:
            p_first = place // q_tiles * S.BM
            q_first = place % q_tiles * S.BN2
        first = tl.load(ranges + expert)
        stop = tl.load(ranges + S.E + expert)
        whole = first + (stop - first) // S.BK * S.BK
        total = tl.full([S.BM, S.BN2], 0, tl.float32)
        for row in tl.range(first, whole, S.BK, num_stages=S.STAGES):
            a = _row_tile(left, row, stop, p_first, P, S.BM, True, S)
            b = _row_tile(right, row, stop, q_first, Q, S.BN2, True, S)
            total = add_product(a.T, b, total, precision, S)
        if whole < stop:
            a = _row_tile(left, whole, stop, p_first, P, S.BM, False, S)
            b = _row_tile(right, whole, stop, q_first, Q, S.BN2, False, S)
            total = add_product(a.T, b, total, precision, S)
        p_column = p_first + tl.arange(0, S.BM)
        q_column = q_first + tl.arange(0, S.BN2)
        store_rows(out, expert * P + p_column, q_column, total, p_column < P, Q, S)


@triton.jit(do_not_specialize=["tasks"])
def bias_gradient_kernel(
    source, out, weights, ranges, t, tasks, N: tl.constexpr, GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store out[expert] = the sum of an expert's rows of ``source`` [., N], weighted or not."""
    columns: tl.constexpr = (N + S.BN - 1) // S.BN
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        expert = task // columns
        stop = tl.load(ranges + S.E + expert)
        column = task % columns * S.BN + tl.arange(0, S.BN)
        total = tl.full([S.BN], 0, tl.float32)
        for first in range(tl.load(ranges + expert), stop, S.BK):
            row = first + tl.arange(0, S.BK)
            inside = row < stop
            slot = tl.load(t.slot_of_row + row, mask=inside, other=0)
            index = slot // S.K if GATHER else row
            block = _read_rows(source, index, inside, column, N, S.BN).to(tl.float32)
            if WEIGHTED:
                weight = tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32)
                block = block * weight[:, None]
            total += tl.sum(block, 0)
        value = narrow(total, out.dtype.element_ty, S)
        tl.store(out + expert * N + column, value, mask=column < N)


@triton.jit(do_not_specialize=["num_slots", "tasks"])
def routing_gradient_kernel(given, gradient, t, partial, out, num_slots, tasks, S: tl.constexpr):
    """Add up dw of BT slots: all tiles' parts, in the order of columns, and g . b2; 0 if dropped.

    BN is that of the launch that wrote the parts.
    """
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        slot = task * S.BT + tl.arange(0, S.BT)
        present = slot < num_slots
        tile = tl.load(t.tile_of_slot + slot, mask=present, other=-1)
        used = tile >= 0
        total = tl.full([S.BT], 0, tl.float32)
        for n in range((S.I + S.BN - 1) // S.BN):
            total += tl.load(partial + num_slots.to(tl.int64) * n + slot, mask=used, other=0.0)
        if given.b2 is not None:
            if not S.WEIGHT_ON_INPUT:
                expert = tl.load(t.tile_expert + tile, mask=used, other=0)
                for first in range(0, S.H, S.BH):
                    column = first + tl.arange(0, S.BH)
                    keep = used[:, None] & (column < S.H)[None, :]
                    place = places(gradient, slot // S.K, column, S.H)
                    g = tl.load(place, mask=keep, other=0.0)
                    biases = given.b2 + expert[:, None] * S.H + column[None, :]
                    bias = tl.load(biases, mask=keep, other=0.0)
                    total += tl.sum(g.to(tl.float32) * bias.to(tl.float32), 1)
        tl.store(out + slot, narrow(total, out.dtype.element_ty, S), mask=present)
