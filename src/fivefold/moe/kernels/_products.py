# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917, RET505, SIM102
# mypy: ignore-errors
"""What all kernels are made of: rows of a tile, products with an expert's weight, the activation.

Nothing here waits. Legend: T tokens, K experts per token, slots T K (slot = t K + k), E experts
(EP: next power of two), H hidden, I inner size; ``S`` has the sizes that are fixed when a kernel is
compiled. Rows are the slots sorted by expert, without gaps: an expert's rows are cut into row tiles
of BM, the last one short. BN, BK: columns and depth of a step of a product.
"""

import triton
import triton.language as tl


@triton.jit
def tile_rows(t, m, S: tl.constexpr):
    """Return expert, rows and slots of row tile m, and which rows there are."""
    expert = tl.load(t.tile_expert + m)
    row = tl.load(t.tile_first + m) + tl.arange(0, S.BM)
    inside = row < tl.load(t.tile_stop + m)
    slot = tl.load(t.slot_of_row + row, mask=inside, other=0)
    return expert, row, inside, slot


@triton.jit
def tile_in_step(index, COLUMNS: tl.constexpr, S: tl.constexpr):
    """Return row and column tile of a task: GROUP row tiles share columns of the weights."""
    place = index % (S.GROUP * COLUMNS)
    return index // (S.GROUP * COLUMNS) * S.GROUP + place % S.GROUP, place // S.GROUP


@triton.jit
def places(pointer, index, column, WIDTH: tl.constexpr):
    """Return pointers to some columns of rows of WIDTH."""
    return pointer + index.to(tl.int64)[:, None] * WIDTH + column[None, :]


@triton.jit
def narrow(value, dtype: tl.constexpr, S: tl.constexpr):
    """Round to the data type of storage, to nearest even; the interpreter truncates bfloat16."""
    if S.INTERPRETED:
        if dtype == tl.bfloat16:
            bits = value.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            value = bits.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def store_rows(target, index, column, value, inside, WIDTH: tl.constexpr, S: tl.constexpr):
    """Store target[index, column] = value."""
    tl.store(
        places(target, index, column, WIDTH),
        narrow(value, target.dtype.element_ty, S),
        mask=inside[:, None] & (column < WIDTH)[None, :],
    )


@triton.jit
def to_tf32(value, S: tl.constexpr):
    """Round float32 to TF32, ten bits of mantissa, to nearest and ties away from zero.

    The tensor cores cut the thirteen bits behind off, which makes every product too small.
    """
    if S.INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        number = value == value  # noqa: PLR0124 - what is none, the sum might carry away
        value = tl.where(number, rounded, value)
    else:
        value = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return value


@triton.jit
def add_product(a, b, total, PRECISION: tl.constexpr, S: tl.constexpr):
    """Return total + a b, in float32."""
    if S.INTERPRETED:  # its bfloat16 are bit patterns that numpy cannot multiply
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if (PRECISION == "tf32") & (S.BYTES == 4):
        a = to_tf32(a, S)
        b = to_tf32(b, S)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _weight_tile(
    w, expert, column, k, DEPTH: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
    DEEP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Load columns [column, column + BN) of depth [k, k + BK) of an expert's weight, [BK, BN].

    Zero beyond the depth: behind it lies the next expert, whose numbers may be infinite. Columns
    beyond the width are anything: no one stores what they give.
    """
    depth = k + tl.arange(0, S.BK)
    columns = column + tl.arange(0, BN)
    if DEEP:
        if S.TMA:
            block = w.load([expert * DEPTH + k, column])
            if DEPTH % S.BK != 0:
                if S.INTERPRETED:
                    block = block.to(tl.float32)
                block = tl.where((depth < DEPTH)[:, None], block, 0.0)
            return block
        else:  # Triton compiles what stands behind a return, and a descriptor has no `+`
            return tl.load(
                places(w, expert * DEPTH + depth, columns, WIDTH),
                mask=(depth < DEPTH)[:, None] & (columns < WIDTH)[None, :],
                other=0.0,
            )
    elif S.TMA:
        return w.load([expert * WIDTH + column, k]).T
    else:
        return tl.load(
            places(w, expert * WIDTH + columns, depth, DEPTH),
            mask=(columns < WIDTH)[:, None] & (depth < DEPTH)[None, :],
            other=0.0,
        ).T


@triton.jit
def multiply(
    source, index, inside, w, expert, column, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    BN: tl.constexpr, OTHER: tl.constexpr, DEEP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Multiply source[index] by an expert's weight, columns [column, column + BN), in float32.

    The weight lies as [WIDTH, DEPTH], or as [DEPTH, WIDTH] where DEEP. Where OTHER is not 0, the
    second result has the columns OTHER further on.
    """
    depth = tl.arange(0, S.BK)
    source = places(source, index, depth, DEPTH)
    precision: tl.constexpr = S.PRECISION
    total = tl.full([S.BM, BN], 0, tl.float32)
    other = tl.full([S.BM, BN], 0, tl.float32)
    for k in tl.range(0, DEPTH, S.BK, num_stages=S.STAGES):
        if DEPTH % S.BK == 0:
            a = tl.load(source + k, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(source + k, mask=inside[:, None] & (k + depth < DEPTH)[None, :], other=0.0)
        b = _weight_tile(w, expert, column, k, DEPTH, WIDTH, BN, DEEP, S)
        total = add_product(a, b, total, precision, S)
        if OTHER > 0:
            b = _weight_tile(w, expert, column + OTHER, k, DEPTH, WIDTH, BN, DEEP, S)
            other = add_product(a, b, other, precision, S)
    return total, other


@triton.jit
def activate(h, S: tl.constexpr):
    """Return f(h)."""
    if S.ACTIVATION == "silu":
        h = h * tl.sigmoid(h)
    elif S.ACTIVATION == "gelu":
        h = 0.5 * h * (1.0 + tl.math.erf(h * 0.7071067811865476))
    elif S.ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u)
        h = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
    elif S.ACTIVATION == "relu":
        h = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(S.ACTIVATION == "relu2", "no such activation on the device")
        h = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
        h = h * h
    return h


@triton.jit
def slope_of(h, S: tl.constexpr):
    """Return f'(h)."""
    if S.ACTIVATION == "silu":
        s = tl.sigmoid(h)
        slope = s * (1.0 + h * (1.0 - s))
    elif S.ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * h * h)
        slope = 0.5 * (1.0 + tl.math.erf(h * 0.7071067811865476)) + h * density
    elif S.ACTIVATION == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * h * h)
        slope = s + h * (s * (1.0 - s)) * inner
    elif S.ACTIVATION == "relu":
        slope = tl.where(h > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(S.ACTIVATION == "relu2", "no such activation on the device")
        slope = 2.0 * tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return slope


@triton.jit
def add_bias(total, bias, expert, first, column, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """Add an expert's biases [WIDTH] from ``first`` on to some of LIMIT columns; None adds none."""
    if bias is not None:
        value = tl.load(bias + expert * WIDTH + first + column, mask=column < LIMIT, other=0.0)
        total += value.to(tl.float32)[None, :]
    return total


@triton.jit
def weigh_and_bias(gate, up, factors, inside, expert, column, b13, S: tl.constexpr):
    """Return what the activation takes, from W13 x; ``factors`` points to the routing weights."""
    width: tl.constexpr = 2 * S.I if S.GATED else S.I
    if S.WEIGHT_ON_INPUT:  # W (w x) = w (W x), and in float32
        factor = tl.load(factors, mask=inside, other=0.0).to(tl.float32)
        gate = gate * factor[:, None]
        if S.GATED:
            up = up * factor[:, None]
    gate = add_bias(gate, b13, expert, 0, column, width, S.I)
    if S.GATED:
        up = add_bias(up, b13, expert, S.I, column, width, S.I)
    return gate, up


@triton.jit
def keep_columns(hidden, row, column, gate, up, inside, S: tl.constexpr):
    """Store some columns of both halves of what the first product gives, or of its gradient."""
    width: tl.constexpr = 2 * S.I if S.GATED else S.I
    keep = inside[:, None] & (column < S.I)[None, :]
    place = places(hidden, row, column, width)
    tl.store(place, narrow(gate, hidden.dtype.element_ty, S), mask=keep)
    if S.GATED:
        tl.store(place + S.I, narrow(up, hidden.dtype.element_ty, S), mask=keep)


@triton.jit
def first_product(
    n, expert, row, inside, x, token, factors, w13, b13, inner, hidden, S: tl.constexpr
):  # fmt: skip
    """Store inner[row, n BN : (n+1) BN] = f(W13 x[token] + b13).

    For the backward, what the activation takes goes to ``hidden`` where that is not None, or
    W13 x itself where the weights are on the input; ``inner`` may be None then.
    """
    width: tl.constexpr = 2 * S.I if S.GATED else S.I
    up_at: tl.constexpr = S.I if S.GATED else 0
    gate, up = multiply(x, token, inside, w13, expert, n * S.BN, S.H, width, S.BN, up_at, False, S)
    column = n * S.BN + tl.arange(0, S.BN)
    if hidden is not None:
        if S.WEIGHT_ON_INPUT:
            keep_columns(hidden, row, column, gate, up, inside, S)
    gate, up = weigh_and_bias(gate, up, factors, inside, expert, column, b13, S)
    if hidden is not None:
        # With its bias: rounded without, a sum may come out on the other side of a kink.
        if not S.WEIGHT_ON_INPUT:
            keep_columns(hidden, row, column, gate, up, inside, S)
    if inner is not None:
        value = activate(gate, S)
        if S.GATED:
            value = value * up
        store_rows(inner, row, column, value, inside, S.I, S)


@triton.jit
def second_product(n, expert, row, inside, inner, w2, b2, S: tl.constexpr):
    """Return W2 inner[row] + b2, columns n BN2 : (n+1) BN2, and their numbers."""
    total, _ = multiply(inner, row, inside, w2, expert, n * S.BN2, S.I, S.H, S.BN2, 0, False, S)
    column = n * S.BN2 + tl.arange(0, S.BN2)
    return add_bias(total, b2, expert, 0, column, S.H, S.H), column


@triton.jit
def combine(
    block, first_column, columns, outputs, row_of_slot, weights, t, out, num_tokens, came,
    S: tl.constexpr,
):  # fmt: skip
    """Store out[t] = sum over k, in order and in float32, of weight[t, k] outputs[t, k].

    ``row_of_slot`` says where outputs lie; None: by slot. ``came`` says whether they did: NaN where
    not, as an error is raised, but not at once on a GPU; None: they did.
    """
    token = block * S.BT + tl.arange(0, S.BT)
    present = token < num_tokens
    step: tl.constexpr = S.BH
    for start in range(first_column, first_column + columns, S.BH):
        column = tl.multiple_of(start, step) + tl.arange(0, S.BH)
        keep = present[:, None] & (column < S.H)[None, :]
        total = tl.full([S.BT, S.BH], 0, tl.float32)
        for k in range(S.K):
            slot = token * S.K + k
            # A dropped slot's output was never written: nothing of it may be read.
            used = present & (tl.load(t.tile_of_slot + slot, mask=present, other=-1) >= 0)
            row = slot
            if row_of_slot is not None:
                used = used & came
                row = tl.load(row_of_slot + slot, mask=used, other=0)
            source = places(outputs, row, column, S.H)
            term = tl.load(source, mask=used[:, None] & keep, other=0.0).to(tl.float32)
            if not S.WEIGHT_ON_INPUT:
                weight = tl.load(weights + slot, mask=used, other=0.0).to(tl.float32)
                term = term * weight[:, None]
            total += term
        if row_of_slot is not None:
            total = tl.where(came[:, None], total, float("nan"))
        store_rows(out, token, column, total, present, S.H, S)


@triton.jit
def slots_of_block(block, num_tokens, t, S: tl.constexpr):
    """Return the slots of a combining task's tokens, and their row tiles; below 0 for none."""
    index = tl.arange(0, S.BT * S.KP)
    token = block * S.BT + index // S.KP
    slot = token * S.K + index % S.KP
    mask = (index % S.KP < S.K) & (token < num_tokens)
    return slot, mask, tl.load(t.tile_of_slot + slot, mask=mask, other=-1)
