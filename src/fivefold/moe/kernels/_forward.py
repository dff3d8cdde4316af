# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""The single kernel, and the same tasks as five launches.

``moe_kernel`` is persistent: its programs take tickets until there are none. Tickets in order:

    count chunk 0 .. C-1 | place chunk 0 .. C-1 | products | combine block 0 .. B-1

and the products in steps of G row tiles: step s has the first products of group s and the second
products of group s - lag, so that a second product finds its inputs finished, and still in the L2
cache. Whoever takes a ticket first waits for what it needs; all of that has lower tickets (``sync``
says why this cannot hang).

Numbers that depend on T are run-time arguments, so that another T needs no other kernel.
"""

import triton
import triton.language as tl

from fivefold.moe.kernels._products import (
    combine,
    first_product,
    second_product,
    slots_of_block,
    store_rows,
    tile_in_step,
    tile_rows,
)
from fivefold.moe.kernels.sync import (
    COUNTED,
    ERROR,
    FLAGS,
    LEFT,
    OWN_TASK,
    PLACED,
    clear_control,
    last_to_leave,
    publish,
    take,
    wait,
    wait_counts,
)


@triton.jit
def count_chunk(chunk, ids, t, num_slots, S: tl.constexpr):
    """Write how many of a chunk's assignments go to each expert."""
    slot = chunk * S.CHUNK + tl.arange(0, S.CHUNK)
    expert = tl.load(ids + slot, mask=slot < num_slots, other=-1).to(tl.int32)
    valid = (expert >= 0) & (expert < S.E)
    found = tl.histogram(tl.where(valid, expert, 0), S.EP, mask=valid)
    place = tl.arange(0, S.EP)
    tl.store(t.counts + chunk * S.E + place, found, mask=place < S.E)


@triton.jit
def add_counts(t, chunk, num_chunks, S: tl.constexpr):
    """Add up the assignments of each expert, of all chunks and of those before ``chunk``."""
    bins = tl.arange(0, S.EP)
    total = tl.full([S.EP], 0, tl.int32)
    before = tl.full([S.EP], 0, tl.int32)
    for first in range(0, num_chunks, S.READ):
        other = first + tl.arange(0, S.READ)
        block = tl.load(
            t.counts + other[:, None] * S.E + bins[None, :],
            mask=(other < num_chunks)[:, None] & (bins < S.E)[None, :],
            other=0,
        )
        total += tl.sum(block, 0)
        if chunk is not None:
            before += tl.sum(tl.where((other < chunk)[:, None], block, 0), 0)
    return total, before


@triton.jit
def place_chunk(chunk, ids, t, num_slots, num_chunks, S: tl.constexpr):
    """Give a chunk's assignments their rows, in the order of slots within an expert.

    The assignment that begins a row tile writes the tile's table entry.
    """
    total, cursor = add_counts(t, chunk, num_chunks, S)
    stop_row = tl.cumsum(total, 0)
    first_row = stop_row - total
    tiles = (total + S.BM - 1) // S.BM
    first_tile = tl.cumsum(tiles, 0) - tiles
    if chunk == 0:
        tl.store(t.num_tiles, tl.sum(tiles, 0))
    index = tl.arange(0, S.PART)
    earlier = index[None, :] < index[:, None]
    for part in range(0, S.CHUNK, S.PART):
        slot = chunk * S.CHUNK + part + index
        inside = slot < num_slots
        expert = tl.load(ids + slot, mask=inside, other=-1).to(tl.int32)
        valid = (expert >= 0) & (expert < S.E)
        # A dropped slot gets a negative name of its own kind: equal to no expert's.
        name = tl.where(valid, expert, -1)
        expert = tl.where(valid, expert, 0)
        same = (name[:, None] == name[None, :]) & earlier
        rank = tl.gather(cursor, expert, 0) + tl.sum(same.to(tl.int32), 1)
        begin = tl.gather(first_row, expert, 0)
        tile = tl.gather(first_tile, expert, 0) + rank // S.BM
        tl.store(t.slot_of_row + begin + rank, slot, mask=valid)
        tl.store(t.tile_of_slot + slot, tl.where(valid, tile, -1), mask=inside)
        starts = valid & (rank % S.BM == 0)
        end = tl.minimum(begin + rank + S.BM, tl.gather(stop_row, expert, 0))
        tl.store(t.tile_expert + tile, expert, mask=starts)
        tl.store(t.tile_first + tile, begin + rank, mask=starts)
        tl.store(t.tile_stop + tile, end, mask=starts)
        cursor += tl.histogram(expert, S.EP, mask=valid)


@triton.jit
def _gathered_product(m, n, given, w13, t, inner, hidden, S: tl.constexpr):
    """Compute the first product of row tile m, whose tokens are gathered."""
    expert, row, inside, slot = tile_rows(t, m, S)
    first_product(
        n, expert, row, inside, given.x, slot // S.K, given.weights + slot, w13, given.b13, inner,
        hidden, S,
    )  # fmt: skip


@triton.jit
def _scattered_product(m, n, given, w2, t, inner, outputs, S: tl.constexpr):
    """Compute the second product of row tile m and write it to the slots."""
    expert, row, inside, slot = tile_rows(t, m, S)
    total, column = second_product(n, expert, row, inside, inner, w2, given.b2, S)
    store_rows(outputs, slot, column, total, inside, S.H, S)


@triton.jit
def product_task(index, num_groups, lag, FIRST, SECOND):
    """Return which product, which group and which place within it an index of the products means.

    FIRST and SECOND are how many tasks of either product a group of row tiles has. The first
    ``lag`` steps have first products only, the last ``lag`` second products only.
    """
    lead = lag * FIRST
    both = (num_groups - lag) * (FIRST + SECOND)
    middle = index - lead
    last = middle - both
    in_step = middle % (FIRST + SECOND)
    step = middle // (FIRST + SECOND)
    leading = middle < 0
    trailing = last >= 0
    second = trailing | (~leading & (in_step >= FIRST))
    group = tl.where(second, step, step + lag)
    group = tl.where(leading, index // FIRST, group)
    group = tl.where(trailing, num_groups - lag + last // SECOND, group)
    place = tl.where(second, in_step - FIRST, in_step)
    place = tl.where(leading, index % FIRST, place)
    place = tl.where(trailing, last % SECOND, place)
    return second, group, place


@triton.jit
def _place_rows(given, t, control, num_slots, num_chunks, limit_ns, S: tl.constexpr):
    """Count and place all chunks with the other programs; return the next ticket."""
    ticket = take(control, 0)
    while ticket < num_chunks:
        count_chunk(ticket, given.ids, t, num_slots, S)
        publish(control + COUNTED)
        ticket = take(control, 0)
    while ticket < 2 * num_chunks:
        wait(control + COUNTED, num_chunks, control, limit_ns)
        place_chunk(ticket - num_chunks, given.ids, t, num_slots, num_chunks, S)
        publish(control + PLACED)
        ticket = take(control, 0)
    wait(control + PLACED, num_chunks, control, limit_ns)
    return ticket


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_slots",
        "max_tiles",
        "max_lag",
        "first_span",
        "second_span",
        "combine_columns",
        "limit_ns",
    ]
)
def moe_kernel(
    given, w13, w2, t, inner, hidden, outputs, control, num_tokens, num_slots, max_tiles, max_lag,
    first_span, second_span, combine_columns, limit_ns, S: tl.constexpr,
):  # fmt: skip
    """Compute the whole forward in one launch.

    A task of a product does ``span`` tiles of columns one after another: taking a ticket, waiting
    and publishing take some microseconds, as long as half a small tile.
    """
    first_columns: tl.constexpr = (S.I + S.BN - 1) // S.BN
    second_columns: tl.constexpr = (S.H + S.BN2 - 1) // S.BN2
    first_tasks = (first_columns + first_span - 1) // first_span
    second_tasks = (second_columns + second_span - 1) // second_span
    first_done = control + FLAGS
    second_done = control + FLAGS + max_tiles
    num_chunks = (num_slots + S.CHUNK - 1) // S.CHUNK
    ticket = _place_rows(given, t, control, num_slots, num_chunks, limit_ns, S)
    tiles = tl.load(t.num_tiles)
    groups = (tiles + S.GROUP - 1) // S.GROUP
    lag = tl.minimum(max_lag, groups)
    base = 2 * num_chunks
    stop = base + groups * S.GROUP * (first_tasks + second_tasks)
    while ticket < stop:
        second, group, place = product_task(
            ticket - base, groups, lag, S.GROUP * first_tasks, S.GROUP * second_tasks
        )
        m = group * S.GROUP + place % S.GROUP
        n = place // S.GROUP
        if m < tiles:
            if not second:
                for column in range(
                    n * first_span, tl.minimum(n * first_span + first_span, first_columns)
                ):
                    _gathered_product(m, column, given, w13, t, inner, hidden, S)
                publish(first_done + m)
            else:
                wait(first_done + m, first_tasks, control, limit_ns)
                for column in range(
                    n * second_span, tl.minimum(n * second_span + second_span, second_columns)
                ):
                    _scattered_product(m, column, given, w2, t, inner, outputs, S)
                publish(second_done + m)
        ticket = take(control, 0)

    parts = (S.H + combine_columns - 1) // combine_columns
    end = stop + (num_tokens + S.BT - 1) // S.BT * parts
    while ticket < end:
        block = (ticket - stop) // parts
        _slot, _mask, tile = slots_of_block(block, num_tokens, t, S)
        wait_counts(
            second_done + tile, second_tasks, tl.zeros_like(tile), tile >= 0, control, limit_ns,
            OWN_TASK, "gpu",
        )  # fmt: skip
        combine(
            block, (ticket - stop) % parts * combine_columns, combine_columns, outputs, None,
            given.weights, t, given.out, num_tokens, None, S,
        )  # fmt: skip
        ticket = take(control, 0)
    if last_to_leave(control):
        failed = False
        if limit_ns is not None:  # a wait was given up: what was waited for stays to be seen
            failed = tl.load(control + ERROR) != 0
        if not failed:
            clear_control(control, 2 * max_tiles)
            tl.store(control + LEFT, 0)


@triton.jit(do_not_specialize=["num_slots"])
def count_kernel(given, t, num_slots, S: tl.constexpr):
    """Run ``count_chunk`` as a launch of its own."""
    count_chunk(tl.program_id(0), given.ids, t, num_slots, S)


@triton.jit(do_not_specialize=["num_slots"])
def place_kernel(given, t, num_slots, S: tl.constexpr):
    """Run ``place_chunk`` as a launch of its own."""
    num_chunks = (num_slots + S.CHUNK - 1) // S.CHUNK
    place_chunk(tl.program_id(0), given.ids, t, num_slots, num_chunks, S)


@triton.jit
def first_kernel(given, w13, t, inner, hidden, S: tl.constexpr):
    """Compute the first product in a launch of its own, over the most tiles there can be."""
    m, n = tile_in_step(tl.program_id(0), (S.I + S.BN - 1) // S.BN, S)
    if m < tl.load(t.num_tiles):
        _gathered_product(m, n, given, w13, t, inner, hidden, S)


@triton.jit
def second_kernel(given, w2, t, inner, outputs, S: tl.constexpr):
    """Compute the second product in a launch of its own, over the most tiles there can be."""
    m, n = tile_in_step(tl.program_id(0), (S.H + S.BN2 - 1) // S.BN2, S)
    if m < tl.load(t.num_tiles):
        _scattered_product(m, n, given, w2, t, inner, outputs, S)


@triton.jit(do_not_specialize=["num_tokens", "combine_columns"])
def combine_kernel(given, t, outputs, num_tokens, combine_columns, S: tl.constexpr):
    """Run ``combine`` as a launch of its own."""
    parts = (S.H + combine_columns - 1) // combine_columns
    combine(
        tl.program_id(0) // parts, tl.program_id(0) % parts * combine_columns, combine_columns,
        outputs, None, given.weights, t, given.out, num_tokens, None, S,
    )  # fmt: skip
