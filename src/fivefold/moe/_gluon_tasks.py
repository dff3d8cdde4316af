# Device code: Gluon's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, E741, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""The tasks of the Gluon kernel outside its main loop: count, place, the two epilogues, combine.

They do what the functions of the same names in ``_tasks_triton`` do (see the legend there), with
the layouts that Gluon wants to be told. All of them run on the eight warps of the products role.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fivefold.moe._tasks_triton import _activate

WARPS = gl.constexpr(8)
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
"""A row of numbers."""
TABLE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
"""Rows of numbers, a warp to a row."""
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
"""A tile on its way to memory: 16 bytes a thread, 256 bytes of a row at a time."""


@gluon.jit
def count_chunk(
    chunk, ids, counts, num_slots, E: gl.constexpr, EP: gl.constexpr, CHUNK: gl.constexpr
):
    """Write how many of a chunk's assignments go to each expert."""
    slot = chunk * CHUNK + gl.arange(0, CHUNK, LINE)
    expert = gl.load(ids + slot, mask=slot < num_slots, other=-1).to(gl.int32)
    valid = (expert >= 0) & (expert < E)
    found = gl.histogram(gl.where(valid, expert, 0), EP, mask=valid, layout=LINE)
    place = gl.arange(0, EP, LINE)
    gl.store(counts + chunk * E + place, found, mask=place < E)


@gluon.jit
def place_chunk(
    chunk,
    ids,
    counts,
    num_tiles,
    tables,
    num_slots,
    num_chunks,
    E: gl.constexpr,
    EP: gl.constexpr,
    CHUNK: gl.constexpr,
    PART: gl.constexpr,
    READ: gl.constexpr,
    BM: gl.constexpr,
):
    """Give a chunk's assignments their rows, in the order of slots within an expert."""
    tile_expert, tile_first, tile_stop, slot_of_row, tile_of_slot = tables
    bins = gl.arange(0, EP, gl.SliceLayout(0, TABLE))
    total = gl.zeros([EP], gl.int32, gl.SliceLayout(0, TABLE))
    before = gl.zeros([EP], gl.int32, gl.SliceLayout(0, TABLE))
    for first in range(0, num_chunks, READ):
        other = first + gl.arange(0, READ, gl.SliceLayout(1, TABLE))
        block = gl.load(
            counts + other[:, None] * E + bins[None, :],
            mask=(other < num_chunks)[:, None] & (bins < E)[None, :],
            other=0,
        )
        total += gl.sum(block, 0)
        before += gl.sum(gl.where((other < chunk)[:, None], block, 0), 0)
    total = gl.convert_layout(total, LINE)
    cursor = gl.convert_layout(before, LINE)
    stop_row = gl.cumsum(total, 0)
    first_row = stop_row - total
    tiles = (total + BM - 1) // BM
    first_tile = gl.cumsum(tiles, 0) - tiles
    if chunk == 0:
        gl.store(num_tiles, gl.sum(tiles, 0))
    index = gl.arange(0, PART, LINE)
    row_index = gl.arange(0, PART, gl.SliceLayout(1, TABLE))
    column_index = gl.arange(0, PART, gl.SliceLayout(0, TABLE))
    earlier = column_index[None, :] < row_index[:, None]
    for part in range(0, CHUNK, PART):
        slot = chunk * CHUNK + part + index
        inside = slot < num_slots
        expert = gl.load(ids + slot, mask=inside, other=-1).to(gl.int32)
        valid = (expert >= 0) & (expert < E)
        # A dropped slot gets a negative name of its own kind: equal to no expert's.
        name = gl.where(valid, expert, -1)
        expert = gl.where(valid, expert, 0)
        down = gl.convert_layout(name, gl.SliceLayout(1, TABLE))
        across = gl.convert_layout(name, gl.SliceLayout(0, TABLE))
        same = (down[:, None] == across[None, :]) & earlier
        ahead = gl.convert_layout(gl.sum(same.to(gl.int32), 1), LINE)
        rank = gl.gather(cursor, expert, 0) + ahead
        begin = gl.gather(first_row, expert, 0)
        tile = gl.gather(first_tile, expert, 0) + rank // BM
        gl.store(slot_of_row + begin + rank, slot, mask=valid)
        gl.store(tile_of_slot + slot, gl.where(valid, tile, -1), mask=inside)
        starts = valid & (rank % BM == 0)
        end = gl.minimum(begin + rank + BM, gl.gather(stop_row, expert, 0))
        gl.store(tile_expert + tile, expert, mask=starts)
        gl.store(tile_first + tile, begin + rank, mask=starts)
        gl.store(tile_stop + tile, end, mask=starts)
        cursor += gl.histogram(expert, EP, mask=valid, layout=LINE)


@gluon.jit
def halves(total, BM: gl.constexpr, HALF: gl.constexpr):
    """The left and the right columns of an accumulator: the same thread has both."""
    pair = gl.permute(gl.reshape(total, [BM, 2, HALF]), (0, 2, 1))
    return gl.split(pair)


@gluon.jit
def first_epilogue(
    total,
    m,
    n,
    expert,
    b13,
    weights,
    inner,
    tables,
    I: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    BM: gl.constexpr,
    HALF: gl.constexpr,
):
    """inner[rows, columns of tile n] = f(total + b13); gate left and up right where gated.

    A quarter of the accumulator's columns at a time: more would not fit into the registers.
    """
    part: gl.constexpr = HALF // 2
    left, right = halves(total, BM, HALF)
    first, second = halves(left, BM, part)
    third, fourth = halves(right, BM, part)
    if GATED:
        column = n * HALF
        _finish(
            first, third, m, column, expert, b13, weights, inner, tables, I, True, ACTIVATION,
            WEIGHT_ON_INPUT, BM, part,
        )  # fmt: skip
        _finish(
            second, fourth, m, column + part, expert, b13, weights, inner, tables, I, True,
            ACTIVATION, WEIGHT_ON_INPUT, BM, part,
        )  # fmt: skip
    else:
        column = n * 2 * HALF
        _finish(
            first, first, m, column, expert, b13, weights, inner, tables, I, False, ACTIVATION,
            WEIGHT_ON_INPUT, BM, part,
        )  # fmt: skip
        _finish(
            second, second, m, column + part, expert, b13, weights, inner, tables, I, False,
            ACTIVATION, WEIGHT_ON_INPUT, BM, part,
        )  # fmt: skip
        _finish(
            third, third, m, column + HALF, expert, b13, weights, inner, tables, I, False,
            ACTIVATION, WEIGHT_ON_INPUT, BM, part,
        )  # fmt: skip
        _finish(
            fourth, fourth, m, column + HALF + part, expert, b13, weights, inner, tables, I, False,
            ACTIVATION, WEIGHT_ON_INPUT, BM, part,
        )  # fmt: skip


@gluon.jit
def _finish(
    gate,
    up,
    m,
    column,
    expert,
    b13,
    weights,
    inner,
    tables,
    I: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    BM: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Activate and store some columns of a tile."""
    width: gl.constexpr = 2 * I if GATED else I
    value = _with_weight_and_bias(
        gate, m, column, expert, b13, weights, tables, width, WEIGHT_ON_INPUT, BM, COLUMNS
    )
    value = _activate(value, ACTIVATION)
    if GATED:
        value = value * _with_weight_and_bias(
            up, m, column + I, expert, b13, weights, tables, width, WEIGHT_ON_INPUT, BM, COLUMNS
        )
    tile_first, tile_stop = tables[1], tables[2]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    value = gl.convert_layout(value.to(inner.dtype.element_ty), stored)
    row = gl.load(tile_first + m) + gl.arange(0, BM, gl.SliceLayout(1, stored))
    across = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
    inside = row < gl.load(tile_stop + m)
    gl.store(
        inner + row.to(gl.int64)[:, None] * I + across[None, :],
        value,
        mask=inside[:, None] & (across < I)[None, :],
    )


@gluon.jit
def _with_weight_and_bias(
    value,
    m,
    column,
    expert,
    b13,
    weights,
    tables,
    WIDTH: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    BM: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """From W13 x to what the activation takes; ``column`` is a row of W13."""
    layout: gl.constexpr = value.type.layout
    if WEIGHT_ON_INPUT:  # W (w x) = w (W x), and in float32
        tile_first, tile_stop, slot_of_row = tables[1], tables[2], tables[3]
        row = gl.load(tile_first + m) + gl.arange(0, BM, gl.SliceLayout(1, layout))
        inside = row < gl.load(tile_stop + m)
        slot = gl.load(slot_of_row + row, mask=inside, other=0)
        factor = gl.load(weights + slot, mask=inside, other=0.0).to(gl.float32)
        value = value * factor[:, None]
    if b13 is not None:
        across = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        bias = gl.load(b13 + expert * WIDTH + across, mask=across < WIDTH, other=0.0)
        value = value + bias.to(gl.float32)[None, :]
    return value


@gluon.jit
def second_epilogue(
    total,
    m,
    n,
    expert,
    b2,
    outputs,
    tables,
    H: gl.constexpr,
    BM: gl.constexpr,
    HALF: gl.constexpr,
):
    """outputs[slots, columns of tile n] = total + b2."""
    left, right = halves(total, BM, HALF)
    _store_output(left, m, n * 2 * HALF, expert, b2, outputs, tables, H, BM, HALF)
    _store_output(right, m, n * 2 * HALF + HALF, expert, b2, outputs, tables, H, BM, HALF)


@gluon.jit
def _store_output(
    value,
    m,
    first_column,
    expert,
    b2,
    outputs,
    tables,
    H: gl.constexpr,
    BM: gl.constexpr,
    HALF: gl.constexpr,
):
    tile_first, tile_stop, slot_of_row = tables[1], tables[2], tables[3]
    if b2 is not None:
        layout: gl.constexpr = value.type.layout
        across = first_column + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        bias = gl.load(b2 + expert * H + across, mask=across < H, other=0.0)
        value = value + bias.to(gl.float32)[None, :]
    value = gl.convert_layout(value.to(outputs.dtype.element_ty), STORED)
    row = gl.load(tile_first + m) + gl.arange(0, BM, gl.SliceLayout(1, STORED))
    column = first_column + gl.arange(0, HALF, gl.SliceLayout(0, STORED))
    inside = row < gl.load(tile_stop + m)
    slot = gl.load(slot_of_row + row, mask=inside, other=0)
    gl.store(
        outputs + slot.to(gl.int64)[:, None] * H + column[None, :],
        value,
        mask=inside[:, None] & (column < H)[None, :],
    )


@gluon.jit
def combine(
    block,
    first_column,
    columns,
    outputs,
    weights,
    tile_of_slot,
    out,
    num_tokens,
    H: gl.constexpr,
    K: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    BT: gl.constexpr,
    BH: gl.constexpr,
):
    """out[t] = sum over k, in order and in float32, of weight[t, k] outputs[t, k]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    token = block * BT + gl.arange(0, BT, gl.SliceLayout(1, layout))
    present = token < num_tokens
    for start in range(first_column, first_column + columns, BH):
        column = start + gl.arange(0, BH, gl.SliceLayout(0, layout))
        keep = present[:, None] & (column < H)[None, :]
        total = gl.zeros([BT, BH], gl.float32, layout)
        for k in range(K):
            slot = token * K + k
            # A dropped slot's output was never written: nothing of it may be read.
            used = present & (gl.load(tile_of_slot + slot, mask=present, other=-1) >= 0)
            term = gl.load(
                outputs + slot.to(gl.int64)[:, None] * H + column[None, :],
                mask=used[:, None] & keep,
                other=0.0,
            ).to(gl.float32)
            if not WEIGHT_ON_INPUT:
                weight = gl.load(weights + slot, mask=used, other=0.0).to(gl.float32)
                term = term * weight[:, None]
            total += term
        gl.store(
            out + token.to(gl.int64)[:, None] * H + column[None, :],
            total.to(out.dtype.element_ty),
            mask=keep,
        )
