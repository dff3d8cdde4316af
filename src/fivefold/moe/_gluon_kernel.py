# Device code: Gluon's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, E741, FURB136, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""The single kernel with specialised warps, for Hopper: EXPERIMENTAL, it has never run on a GPU.

Tickets, tasks, flags and their order are those of ``_kernels_triton.moe_kernel``; what is new is
inside a program. Its warps have three roles, which run at the same time:

* *weights*, one warp: takes the tickets and hands them on; asks the copy engine (TMA) for the
  tiles of weights of a product, as far ahead as the stage ring goes. Weights do not depend on
  other tasks, so it never waits for a task's inputs: the next task's weights are on their way
  while this one's rows are waited for.
* *rows*, two warps: waits for what a second product needs, and copies the row tile (gathered
  tokens, or inner values) with ``cp.async`` into the swizzled form that the tensor cores read.
  Hopper's copy engine cannot gather rows, and inner values are written by ordinary stores in this
  launch: the engine would need a fence between proxies at both ends.
* *products*, eight warps: all else. Counts, places, multiplies (WGMMA, 128 x 256 at a time, one
  product in flight while the next operands are awaited), epilogues, publishes, combines.

A stage is released one step late, when the product that read it has surely ended. So rows may
keep at most STAGES - 2 copies that it has not yet signalled (AHEAD): the products role waits for
step s + 1 before it releases step s.

Why this cannot hang, given that it cannot in ``_sync_triton``'s argument with one role: call a
ticket *held* from the time that a weights role takes it. In every program, every role goes through
the program's tickets in the same, rising order. Let t be the lowest ticket whose task is
unfinished; all below t are finished, so nothing in t's program is stuck before t. (1) The weights
role waits for places in rings only (and once for all places of assignments, which are lower tickets
than any product): ring places are released by the program's other roles when they have passed lower
tickets or steps. It reaches t, and issues t's steps as stages become free. (2) The rows role has
signalled *all* steps of a task before it looks at the next ticket (it never sleeps on a copy that
the products role needs); at t it waits for flags of lower tickets, which are set. (3) The products
role gets t's steps in order and releases each; at t's own wait (place, combine) all is lower. So t
finishes. Nothing is assumed about how many programs are resident.

The control words are cleared by the last program after all three roles have met at the end of
``warp_specialize``: none of them can still be looking at a flag.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fivefold.moe._gluon_sync import (
    await_empty,
    await_full,
    hand_on,
    leave,
    place_of,
    receive,
    wait_all,
)
from fivefold.moe._gluon_tasks import (
    LINE,
    combine,
    count_chunk,
    first_epilogue,
    place_chunk,
    second_epilogue,
)
from fivefold.moe._kernels_triton import _product_task
from fivefold.moe._sync_triton import COUNTED, FLAGS, PLACED, publish, take_ticket, wait

GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [2, 1], [1, 0]))
"""A tile of rows on its way to shared memory: 16 bytes a thread, 128 bytes of a row together."""
ONE_OF_1 = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
ONE_OF_2 = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))
ONE_OF_8 = LINE
"""A ticket, for as many warps."""


@gluon.jit
def task_of(
    index,
    tiles,
    max_lag,
    FIRST_COLUMNS: gl.constexpr,
    SECOND_COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Which product, row tile and columns an index of the products means."""
    groups = (tiles + GROUP - 1) // GROUP
    lag = gl.minimum(max_lag, groups)
    second, group, place = _product_task(
        index, groups, lag, GROUP * FIRST_COLUMNS, GROUP * SECOND_COLUMNS
    )
    return second, group * GROUP + place % GROUP, place // GROUP


@gluon.jit
def weights_role(
    w13,
    w2,
    control,
    num_tiles,
    tables,
    ring,
    queue,
    num_chunks,
    max_lag,
    num_combines,
    H: gl.constexpr,
    I: gl.constexpr,
    GATED: gl.constexpr,
    SPIN_LIMIT: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    FIRST_COLUMNS: gl.constexpr,
    SECOND_COLUMNS: gl.constexpr,
):
    """Take tickets, hand them on, and fetch weights ahead."""
    tile_expert = tables[0]
    b_ring, full, empty = ring[1], ring[2], ring[3]
    index = 0
    step = 0
    ticket = take_ticket(control)
    while ticket < 2 * num_chunks:
        hand_on(queue, index, ticket, SLOTS, ONE_OF_1)
        index += 1
        ticket = take_ticket(control)
    wait(control + PLACED, num_chunks, control, SPIN_LIMIT)
    tiles = gl.load(num_tiles)
    base = 2 * num_chunks
    products = (tiles + GROUP - 1) // GROUP * GROUP * (FIRST_COLUMNS + SECOND_COLUMNS)
    while ticket < base + products:
        hand_on(queue, index, ticket, SLOTS, ONE_OF_1)
        index += 1
        second, m, n = task_of(ticket - base, tiles, max_lag, FIRST_COLUMNS, SECOND_COLUMNS, GROUP)
        if m < tiles:
            expert = gl.load(tile_expert + m)
            if second:
                for k in range(0, I, BK):
                    place = await_empty(empty, step, STAGES)
                    mbarrier.expect(full.index(place), BN * BK * 2)
                    tma.async_load(
                        w2, [expert * H + n * BN, k], full.index(place), b_ring.index(place)
                    )
                    step += 1
            else:
                for k in range(0, H, BK):
                    place = await_empty(empty, step, STAGES)
                    mbarrier.expect(full.index(place), BN * BK * 2)
                    if GATED:
                        half: gl.constexpr = BN // 2
                        gate = expert * 2 * I + n * half
                        tma.async_load(
                            w13, [gate, k], full.index(place), b_ring.index(place).slice(0, half)
                        )
                        tma.async_load(
                            w13,
                            [gate + I, k],
                            full.index(place),
                            b_ring.index(place).slice(half, half),
                        )
                    else:
                        tma.async_load(
                            w13, [expert * I + n * BN, k], full.index(place), b_ring.index(place)
                        )
                    step += 1
        ticket = take_ticket(control)
    while ticket < base + products + num_combines:
        hand_on(queue, index, ticket, SLOTS, ONE_OF_1)
        index += 1
        ticket = take_ticket(control)
    hand_on(queue, index, ticket, SLOTS, ONE_OF_1)  # too high to be a task: the end


@gluon.jit
def _signal_rows(full, step, STAGES: gl.constexpr):
    """Say that this role's part of a step has arrived; its copies have been waited for."""
    fence_async_shared()
    place, _ = place_of(step, STAGES)
    mbarrier.arrive(full.index(place), count=1)


@gluon.jit
def copy_rows(
    source,
    ring,
    step,
    DEPTH: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Copy a row tile, BK columns at a time, to the next stages; returns the step after them."""
    a_ring, full, empty = ring[0], ring[2], ring[3]
    steps: gl.constexpr = DEPTH // BK
    for k in range(steps):
        place = await_empty(empty, step, STAGES)
        async_copy.async_load(a_ring.index(place), source + k * BK)
        async_copy.commit_group()
        if k >= AHEAD:
            async_copy.wait_group(AHEAD)
            _signal_rows(full, step - AHEAD, STAGES)
        step += 1
    async_copy.wait_group(0)
    left: gl.constexpr = AHEAD if steps > AHEAD else steps
    for back in gl.static_range(left):
        _signal_rows(full, step - left + back, STAGES)
    return step


@gluon.jit
def rows_role(
    x,
    inner,
    control,
    num_tiles,
    tables,
    ring,
    queue,
    num_chunks,
    max_lag,
    num_combines,
    H: gl.constexpr,
    I: gl.constexpr,
    K: gl.constexpr,
    SPIN_LIMIT: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    FIRST_COLUMNS: gl.constexpr,
    SECOND_COLUMNS: gl.constexpr,
):
    """Gather the rows of every product."""
    tile_first, tile_stop, slot_of_row = tables[1], tables[2], tables[3]
    index = 0
    step = 0
    base = 2 * num_chunks
    ticket = receive(queue, index, SLOTS, ONE_OF_2)
    while ticket < base:
        index += 1
        ticket = receive(queue, index, SLOTS, ONE_OF_2)
    # The weights role handed this ticket on after its own acquire of all places; ours comes with
    # its "full". Another wait on the same flag costs one read, and keeps the argument local.
    wait(control + PLACED, num_chunks, control, SPIN_LIMIT)
    tiles = gl.load(num_tiles)
    products = (tiles + GROUP - 1) // GROUP * GROUP * (FIRST_COLUMNS + SECOND_COLUMNS)
    column = gl.arange(0, BK, gl.SliceLayout(0, GATHERED))
    while ticket < base + products:
        second, m, _ = task_of(ticket - base, tiles, max_lag, FIRST_COLUMNS, SECOND_COLUMNS, GROUP)
        if m < tiles:
            # Rows beyond the tile's last are copies of that one: read, multiplied, never stored.
            row = gl.load(tile_first + m) + gl.arange(0, BM, gl.SliceLayout(1, GATHERED))
            row = gl.minimum(row, gl.load(tile_stop + m) - 1)
            if second:
                wait(control + FLAGS + m, FIRST_COLUMNS, control, SPIN_LIMIT)
                source = inner + row.to(gl.int64)[:, None] * I + column[None, :]
                step = copy_rows(source, ring, step, I, BK, STAGES, AHEAD)
            else:
                token = gl.load(slot_of_row + row) // K
                source = x + token.to(gl.int64)[:, None] * H + column[None, :]
                step = copy_rows(source, ring, step, H, BK, STAGES, AHEAD)
        index += 1
        ticket = receive(queue, index, SLOTS, ONE_OF_2)
    while ticket < base + products + num_combines:
        index += 1
        ticket = receive(queue, index, SLOTS, ONE_OF_2)


@gluon.jit
def multiply(ring, step, steps, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """The sum of the products of the next stages, [BM, BN]; returns it and the step after them."""
    a_ring, b_ring, full, empty = ring
    accumulated: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    total = gl.zeros([BM, BN], gl.float32, accumulated)
    for k in range(steps):
        place = await_full(full, step, STAGES)
        total = warpgroup_mma(
            a_ring.index(place), b_ring.index(place).permute((1, 0)), total, is_async=True
        )
        total = warpgroup_mma_wait(1, deps=(total,))
        if k > 0:  # the product before this one has ended
            _release(empty, step - 1, STAGES)
        step += 1
    total = warpgroup_mma_wait(0, deps=(total,))
    _release(empty, step - 1, STAGES)
    return total, step


@gluon.jit
def _release(empty, step, STAGES: gl.constexpr):
    """Say that a step's operands are not needed any more, for all warps of this role."""
    place, _ = place_of(step, STAGES)
    mbarrier.arrive(empty.index(place), count=1)


@gluon.jit
def products_role(
    ids,
    weights,
    b13,
    b2,
    out,
    control,
    counts,
    num_tiles,
    tables,
    inner,
    outputs,
    ring,
    queue,
    num_tokens,
    num_slots,
    num_chunks,
    max_tiles,
    max_lag,
    combine_columns,
    num_combines,
    H: gl.constexpr,
    I: gl.constexpr,
    K: gl.constexpr,
    KP: gl.constexpr,
    E: gl.constexpr,
    EP: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    SPIN_LIMIT: gl.constexpr,
    CHUNK: gl.constexpr,
    PART: gl.constexpr,
    READ: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    BT: gl.constexpr,
    BH: gl.constexpr,
    FIRST_COLUMNS: gl.constexpr,
    SECOND_COLUMNS: gl.constexpr,
):
    """Do every task; for products, with the operands that the other roles bring."""
    tile_expert, tile_of_slot = tables[0], tables[4]
    first_done = control + FLAGS
    second_done = control + FLAGS + max_tiles
    half: gl.constexpr = BN // 2
    index = 0
    step = 0
    ticket = receive(queue, index, SLOTS, ONE_OF_8)
    while ticket < num_chunks:
        count_chunk(ticket, ids, counts, num_slots, E, EP, CHUNK)
        publish(control + COUNTED)
        index += 1
        ticket = receive(queue, index, SLOTS, ONE_OF_8)
    while ticket < 2 * num_chunks:
        wait(control + COUNTED, num_chunks, control, SPIN_LIMIT)
        place_chunk(
            ticket - num_chunks, ids, counts, num_tiles, tables, num_slots, num_chunks,
            E, EP, CHUNK, PART, READ, BM,
        )  # fmt: skip
        publish(control + PLACED)
        index += 1
        ticket = receive(queue, index, SLOTS, ONE_OF_8)

    wait(control + PLACED, num_chunks, control, SPIN_LIMIT)
    tiles = gl.load(num_tiles)
    base = 2 * num_chunks
    products = (tiles + GROUP - 1) // GROUP * GROUP * (FIRST_COLUMNS + SECOND_COLUMNS)
    while ticket < base + products:
        second, m, n = task_of(ticket - base, tiles, max_lag, FIRST_COLUMNS, SECOND_COLUMNS, GROUP)
        if m < tiles:
            expert = gl.load(tile_expert + m)
            steps = gl.where(second, I // BK, H // BK)
            total, step = multiply(ring, step, steps, BM, BN, STAGES)
            if second:
                second_epilogue(total, m, n, expert, b2, outputs, tables, H, BM, half)
                publish(second_done + m)
            else:
                first_epilogue(
                    total, m, n, expert, b13, weights, inner, tables, I, GATED, ACTIVATION,
                    WEIGHT_ON_INPUT, BM, half,
                )  # fmt: skip
                publish(first_done + m)
        index += 1
        ticket = receive(queue, index, SLOTS, ONE_OF_8)

    parts = (H + combine_columns - 1) // combine_columns
    while ticket < base + products + num_combines:
        place = ticket - base - products
        block = place // parts
        number = gl.arange(0, BT * KP, ONE_OF_8)
        slot = (block * BT + number // KP) * K + number % KP
        mask = (number % KP < K) & (slot < num_slots)
        tile = gl.load(tile_of_slot + slot, mask=mask, other=-1)
        wait_all(second_done + tile, tile >= 0, SECOND_COLUMNS, control, SPIN_LIMIT)
        combine(
            block, place % parts * combine_columns, combine_columns, outputs, weights,
            tile_of_slot, out, num_tokens, H, K, WEIGHT_ON_INPUT, BT, BH,
        )  # fmt: skip
        index += 1
        ticket = receive(queue, index, SLOTS, ONE_OF_8)


_RUN_TIME = [
    "num_tokens",
    "num_slots",
    "num_chunks",
    "max_tiles",
    "max_lag",
    "combine_columns",
    "num_combines",
]


@gluon.jit(do_not_specialize=_RUN_TIME)
def gluon_kernel(
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
    outputs,
    num_tokens,
    num_slots,
    num_chunks,
    max_tiles,
    max_lag,
    combine_columns,
    num_combines,
    H: gl.constexpr,
    I: gl.constexpr,
    K: gl.constexpr,
    KP: gl.constexpr,
    E: gl.constexpr,
    EP: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    SPIN_LIMIT: gl.constexpr,
    CHUNK: gl.constexpr,
    PART: gl.constexpr,
    READ: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    BT: gl.constexpr,
    BH: gl.constexpr,
    WEIGHTS_REGISTERS: gl.constexpr,
    ROWS_REGISTERS: gl.constexpr,
):
    """The whole forward in one launch."""
    gl.static_assert(AHEAD <= STAGES - 2, "more unsignalled copies than free stages: it would hang")
    gl.static_assert(H % BK == 0)
    gl.static_assert(I % BK == 0)
    columns: gl.constexpr = BN // 2 if GATED else BN
    first_columns: gl.constexpr = (I + columns - 1) // columns
    second_columns: gl.constexpr = (H + BN - 1) // BN
    dtype: gl.constexpr = x.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BK], dtype)
    a_ring = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], a_layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], b_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ticket_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tickets = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], ticket_layout)
    ticket_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ticket_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # weights (with its bytes) and rows
        mbarrier.init(empty.index(stage), count=1)  # products
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ticket_full.index(slot), count=1)  # weights
        mbarrier.init(ticket_empty.index(slot), count=2)  # rows and products
    fence_async_shared()  # the copy engine uses barriers that ordinary stores made

    ring = (a_ring, b_ring, full, empty)
    queue = (tickets, ticket_full, ticket_empty)
    tables = (tile_expert, tile_first, tile_stop, slot_of_row, tile_of_slot)
    gl.warp_specialize(
        [
            (
                products_role,
                (
                    ids, weights, b13, b2, out, control, counts, num_tiles, tables, inner, outputs,
                    ring, queue, num_tokens, num_slots, num_chunks, max_tiles, max_lag,
                    combine_columns, num_combines, H, I, K, KP, E, EP, GATED, ACTIVATION,
                    WEIGHT_ON_INPUT, SPIN_LIMIT, CHUNK, PART, READ, BM, BN, BK, STAGES, SLOTS,
                    GROUP, BT, BH, first_columns, second_columns,
                ),
            ),
            (
                rows_role,
                (
                    x, inner, control, num_tiles, tables, ring, queue, num_chunks, max_lag,
                    num_combines, H, I, K, SPIN_LIMIT, BM, BK, STAGES, AHEAD, SLOTS, GROUP,
                    first_columns, second_columns,
                ),
            ),
            (
                weights_role,
                (
                    w13, w2, control, num_tiles, tables, ring, queue, num_chunks, max_lag,
                    num_combines, H, I, GATED, SPIN_LIMIT, BN, BK, STAGES, SLOTS, GROUP,
                    first_columns, second_columns,
                ),
            ),
        ],
        [2, 1],
        [ROWS_REGISTERS, WEIGHTS_REGISTERS],
    )  # fmt: skip
    leave(control, 2 * max_tiles, 1024, LINE)
