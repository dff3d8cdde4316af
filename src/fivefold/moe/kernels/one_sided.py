# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917, SIM102
# mypy: ignore-errors
"""The single kernel over several ranks: experts live elsewhere, and rows travel within the launch.

Phases, each with a queue of its own on every rank:

    0 gate blocks of tokens (by option), count chunks | 1 announce to peers, place chunks
    2 plan, dispatch row tiles | 3 products on rows that came | 4 combine

``one_sided_kernel`` does all of them. ``scatter_kernel`` and ``gather_kernel`` are the same cut in
two at the products: the first waits until all rows that come to this rank are there (queue 3); the
second returns a row for each of them (queue 5), and combines what came back. Anything may compute
the rows in between: another backend, or the backward. Both belong to one epoch, which the second
one ends. Between them no peer overwrites a received row: it would have to send in a later epoch,
and waits for this rank's counts (compact layout) or for the return of what it sent before (capacity
layout) first.

One launch serves V ranks: one where ranks are GPUs or processes, all of them where they are virtual
and share a GPU. Tokens lie one rank after the other.

The gate is a task of the kernel as well, and does what ``route`` does, with the logits in float32
whatever the tokens are. All experts of a token are in one tile, so nothing travels between
programs. Ties go to the lower expert, and to the lower group. A token whose logits are not numbers
keeps K distinct experts, with weights that are none.
"""

import triton
import triton.language as tl

from fivefold.moe.kernels._forward import count_chunk, place_chunk, product_task
from fivefold.moe.kernels._one_sided_tasks import (
    Rank,
    address_rows,
    announce,
    arrived,
    combine_returned,
    dispatch,
    plan,
    received_product,
    received_tiles,
    return_rows,
    returned_product,
    scalars_back,
    section,
)
from fivefold.moe.kernels._products import add_product
from fivefold.moe.kernels.arguments import Plan, Tables
from fivefold.moe.kernels.sync import (
    ANNOUNCED,
    COUNTED,
    EPOCH,
    FLAGS,
    GATED_BLOCKS,
    LEFT,
    PLACED,
    PLANNED,
    clear,
    clear_control,
    last_to_leave,
    publish,
    take,
    wait,
)


@triton.jit
def _logits(token, x, gate, num_tokens, S: tl.constexpr):
    expert = tl.arange(0, S.EP)
    total = tl.full([S.BG, S.EP], 0, tl.float32)
    for start in range(0, S.H, S.BD):
        depth = start + tl.arange(0, S.BD)
        a = tl.load(
            x + token.to(tl.int64)[:, None] * S.H + depth[None, :],
            mask=(token < num_tokens)[:, None] & (depth < S.H)[None, :],
            other=0.0,
        )
        b = tl.load(
            gate + expert[:, None] * S.H + depth[None, :],
            mask=(expert < S.E)[:, None] & (depth < S.H)[None, :],
            other=0.0,
        )
        total = add_product(a, b.T, total, "ieee", S)
    return total


@triton.jit
def _best(value, free, column, S: tl.constexpr):
    """Return the lowest free column with the largest value; EP where none is a number."""
    largest = tl.max(tl.where(free, value, float("-inf")), 1)
    return tl.min(tl.where(free & (value == largest[:, None]), column, S.EP), 1)


@triton.jit
def _open_groups(choice, free, column, S: tl.constexpr):
    """Return which experts are in the best groups."""
    size: tl.constexpr = S.E // S.GROUPS
    group = column // size
    worth = choice
    for g in range(S.GROUPS):
        inside = free & (group == g)
        first = _best(choice, inside, column, S)
        value = tl.max(tl.where(inside, choice, float("-inf")), 1)
        if S.GROUP_SUM:
            others = inside & (column != first[:, None])
            value += tl.max(tl.where(others, choice, float("-inf")), 1)
        worth = tl.where(inside, value[:, None], worth)
    opened = column < 0
    for _ in range(S.TOP_GROUPS):
        best = _best(worth, free & (opened == 0), column, S)
        opened = opened | (group == (best // size)[:, None])
    return opened & free


@triton.jit
def route_block(block, x, gate, selection_bias, ids, weights, num_tokens, S: tl.constexpr):
    """Choose experts and weights for a block of tokens."""
    token = block * S.BG + tl.arange(0, S.BG)
    logits = _logits(token, x, gate, num_tokens, S)
    column = tl.full([S.BG, S.EP], 0, tl.int32) + tl.arange(0, S.EP)[None, :]
    free = column < S.E
    logits = tl.where(free, logits, float("-inf"))
    if S.SCORE == "softmax":
        raised = tl.exp(logits - tl.max(logits, 1)[:, None])
        wanted = raised / tl.sum(raised, 1)[:, None]
    elif S.SCORE == "sigmoid":
        wanted = tl.sigmoid(logits)
    else:
        tl.static_assert(S.SCORE == "topk_softmax", "no such score on the device")
        wanted = logits
    choice = wanted
    if selection_bias is not None:
        experts = tl.arange(0, S.EP)
        bias = tl.load(selection_bias + experts, mask=experts < S.E, other=0.0)
        choice += bias.to(tl.float32)[None, :]
    if S.GROUPS > 1:
        free = _open_groups(choice, free, column, S)
    place = tl.full([S.BG, S.KP], 0, tl.int32) + tl.arange(0, S.KP)[None, :]
    chosen = tl.full([S.BG, S.KP], 0, tl.float32)
    expert = tl.full([S.BG, S.KP], 0, tl.int32)
    for k in range(S.K):
        best = _best(choice, free, column, S)
        here = column == best[:, None]
        weight = tl.sum(tl.where(here, wanted, 0.0), 1)
        lost = best >= S.E
        weight = tl.where(lost, float("nan"), weight)
        best = tl.where(lost, k, best)
        chosen = tl.where(place == k, weight[:, None], chosen)
        expert = tl.where(place == k, best[:, None], expert)
        free = free & (here == 0)
    if S.SCORE == "topk_softmax":
        first = tl.where(place < S.K, chosen, float("-inf"))
        raised = tl.exp(first - tl.max(first, 1)[:, None])
        chosen = raised / tl.sum(raised, 1)[:, None]
    elif S.NORMALIZE:
        chosen = chosen / (tl.sum(chosen, 1)[:, None] + 1e-20)
    keep = (place < S.K) & (token < num_tokens)[:, None]
    target = token[:, None] * S.K + place
    tl.store(ids + target, expert, mask=keep)
    tl.store(weights + target, chosen * S.SCALE, mask=keep)


@triton.jit
def _rank(v, launch, first_rank, S: tl.constexpr):
    """Return rank v of this launch."""
    first = tl.load(launch.token_first + v)
    tokens = tl.load(launch.token_first + v + 1) - first
    chunks = tl.maximum((tokens * S.K + S.CHUNK - 1) // S.CHUNK, 1)
    return Rank(
        first_rank + v,
        tl.load(launch.control + EPOCH) + 1,
        launch.control + v * launch.control_words,
        launch.stats + v * 4 * S.P,
        launch.limit_ns,
        first.to(tl.int64),
        tokens,
        chunks,
    )


@triton.jit
def _at(v, launch, t, p):
    """Return the private tables of rank v of this launch."""
    at = tl.cast(launch.scratch_words, tl.int64) * v
    tables = Tables(
        t.counts + at, t.num_tiles + at, t.tile_expert + at, t.tile_first + at, t.tile_stop + at,
        t.slot_of_row + at, t.tile_of_slot + at,
    )  # fmt: skip
    private = Plan(
        p.totals + at, p.own_first + at, p.return_row + at, p.expert_first + at,
        p.return_first + at, p.return_tile + at, p.return_address + at // 2,
        p.word_address + at // 2, p.count_address + at // 2, p.count_rows + at,
        p.count_upper + at, p.recv_tiles + at, p.recv_expert + at, p.recv_first + at,
        p.recv_stop + at,
    )  # fmt: skip
    return tables, private


@triton.jit(do_not_specialize=["first_rank", "max_lag", "combine_columns"])
def one_sided_kernel(
    given, w13, w2, gate, selection_bias, launch, heap, t, p, inner, first_rank, max_lag,
    combine_columns, S: tl.constexpr,
):  # fmt: skip
    """Count, announce, place, plan, dispatch, both products, combine: one launch."""
    _place(given, gate, selection_bias, launch, heap, t, p, first_rank, S)
    _send(given, launch, heap, t, p, first_rank, S)
    _products(given, w13, w2, launch, heap, t, p, inner, first_rank, max_lag, S)
    _combine(given, None, launch, heap, t, p, first_rank, combine_columns, S)
    _leave(launch, heap, first_rank, S)


@triton.jit(do_not_specialize=["first_rank"])
def scatter_kernel(given, row_expert, launch, heap, t, p, first_rank, S: tl.constexpr):
    """Send rows [T, H] to their experts' ranks; row_expert says what came, and for whom."""
    _place(given, None, None, launch, heap, t, p, first_rank, S)
    _send(given, launch, heap, t, p, first_rank, S)
    for v in range(S.V):
        r = _rank(v, launch, first_rank, S)
        _, mine = _at(v, launch, t, p)
        tiles = received_tiles(r, mine, S)
        experts = row_expert + tl.cast(launch.max_rows, tl.int64) * v
        ticket = take(r.control, 3)
        while ticket < tiles:
            local, begin, end = arrived(ticket, r, heap, mine, S)
            row = begin + tl.arange(0, S.BM)
            tl.store(experts + row, tl.full([S.BM], 0, tl.int32) + local, mask=row < end)
            ticket = take(r.control, 3)


@triton.jit(do_not_specialize=["first_rank", "combine_columns"])
def gather_kernel(
    given, rows, scalars, scalars_out, launch, heap, t, p, first_rank, combine_columns,
    S: tl.constexpr,
):  # fmt: skip
    """Return a row of [R, H] for each that came, and add them up for every token."""
    for v in range(S.V):
        r = _rank(v, launch, first_rank, S)
        _, mine = _at(v, launch, t, p)
        own_rows = tl.cast(launch.max_rows, tl.int64) * v
        tiles = received_tiles(r, mine, S)
        ticket = take(r.control, 5)
        while ticket < tiles:
            local, begin, end = arrived(ticket, r, heap, mine, S)
            if begin < end:
                address_rows(ticket, local, begin, end, r, heap, mine, S)
                tl.debug_barrier()  # other threads read the addresses
                return_rows(
                    ticket, begin, end, rows + own_rows * S.H, scalars + own_rows, r, mine, S
                )
            ticket = take(r.control, 5)
    _combine(given, scalars_out, launch, heap, t, p, first_rank, combine_columns, S)
    _leave(launch, heap, first_rank, S)


@triton.jit
def _place(given, gate, selection_bias, launch, heap, t, p, first_rank, S: tl.constexpr):
    """Run phases 0 and 1: gate and counts; what peers must know, the places of the rank's rows."""
    for v in range(S.V):
        r = _rank(v, launch, first_rank, S)
        tables, _ = _at(v, launch, t, p)
        ids = given.ids + r.first_token * S.K
        gates = 0
        if gate is not None:
            gates += (r.tokens + S.BG - 1) // S.BG
        ticket = take(r.control, 0)
        while ticket < gates + r.chunks:
            if ticket >= gates:
                if wait(r.control + GATED_BLOCKS, gates, r.control, r.limit_ns):
                    count_chunk(ticket - gates, ids, tables, r.tokens * S.K, S)
                    publish(r.control + COUNTED)
            elif gate is not None:
                route_block(
                    ticket, given.x + r.first_token * S.H, gate, selection_bias, ids,
                    given.weights + r.first_token * S.K, r.tokens, S,
                )  # fmt: skip
                publish(r.control + GATED_BLOCKS)
            ticket = take(r.control, 0)
    for v in range(S.V):
        r = _rank(v, launch, first_rank, S)
        tables, mine = _at(v, launch, t, p)
        good = wait(r.control + COUNTED, r.chunks, r.control, r.limit_ns)
        ticket = take(r.control, 1)
        while (ticket < S.P + r.chunks) & good:
            if ticket < S.P:
                announce(ticket, r, heap, tables, mine, S)
            else:
                ids = given.ids + r.first_token * S.K
                place_chunk(ticket - S.P, ids, tables, r.tokens * S.K, r.chunks, S)
                publish(r.control + PLACED)
            ticket = take(r.control, 1)


@triton.jit
def _send(given, launch, heap, t, p, first_rank, S: tl.constexpr):
    """Run phase 2: the plan first, then one task for each row tile of the rank's own."""
    for v in range(S.V):
        r = _rank(v, launch, first_rank, S)
        tables, mine = _at(v, launch, t, p)
        good = wait(r.control + PLACED, r.chunks, r.control, r.limit_ns)
        good = wait(r.control + ANNOUNCED, S.P, r.control, r.limit_ns) & good
        tiles = 0
        if good:
            tiles = tl.load(tables.num_tiles)
        ticket = take(r.control, 2)
        while ticket <= tiles:
            if ticket == 0:
                if S.C == 0:
                    plan(r, heap, mine, launch.max_rows, S)
                else:
                    publish(r.control + PLANNED)
            elif wait(r.control + PLANNED, 1, r.control, r.limit_ns):
                dispatch(ticket - 1, r, given, heap, tables, mine, S)
            ticket = take(r.control, 2)


@triton.jit
def _products(
    given, w13, w2, launch, heap, t, p, inner, first_rank, max_lag, S: tl.constexpr
):  # fmt: skip
    """Run phase 3: both products on received rows, in the order of the single kernel."""
    first_columns: tl.constexpr = (S.I + S.BN - 1) // S.BN
    second_columns: tl.constexpr = (S.H + S.BN2 - 1) // S.BN2
    in_group: tl.constexpr = S.GROUP * (first_columns + second_columns)
    for v in range(S.V):
        r = _rank(v, launch, first_rank, S)
        _, mine = _at(v, launch, t, p)
        first_done = r.control + FLAGS + S.E
        apart = tl.cast(launch.scratch_words, tl.int64) * (4 // S.BYTES) * v
        own_inner = inner + tl.multiple_of(apart, 16)
        tiles = received_tiles(r, mine, S)
        ticket = take(r.control, 3)
        while ticket < (tiles + S.GROUP - 1) // S.GROUP * in_group:
            groups = (tiles + S.GROUP - 1) // S.GROUP
            lag = tl.minimum(max_lag, groups)
            second, group, place = product_task(
                ticket, groups, lag, S.GROUP * first_columns, S.GROUP * second_columns
            )
            m = group * S.GROUP + place % S.GROUP
            n = place // S.GROUP
            if m < tiles:
                local, begin, end = arrived(m, r, heap, mine, S)
                expert = v * S.L + local
                if begin < end:
                    if not second:
                        if n == 0:
                            address_rows(m, local, begin, end, r, heap, mine, S)
                        received_product(
                            n, begin, end, expert, w13, given.b13, own_inner, r, heap, S
                        )
                        publish(first_done + m)
                    elif wait(first_done + m, first_columns, r.control, r.limit_ns):
                        returned_product(
                            m, n, begin, end, expert, w2, given.b2, own_inner, r, mine, S
                        )
            ticket = take(r.control, 3)
            if S.C == 0:  # loaded again, so that no register keeps it through a product
                tiles = tl.load(mine.recv_tiles)


@triton.jit
def _combine(
    given, scalars_out, launch, heap, t, p, first_rank, combine_columns, S: tl.constexpr
):  # fmt: skip
    """Run phase 4: sums of the rows that came back, and the numbers that came with them."""
    parts = (S.H + combine_columns - 1) // combine_columns
    for v in range(S.V):
        r = _rank(v, launch, first_rank, S)
        tables, mine = _at(v, launch, t, p)
        ticket = take(r.control, 4)
        while ticket < (r.tokens + S.BT - 1) // S.BT * parts:
            block = ticket // parts
            first = ticket % parts * combine_columns
            combine_returned(block, first, combine_columns, r, given, heap, tables, mine, S)
            if S.SCALARS:
                if first == 0:
                    scalars_back(block, scalars_out, r, heap, tables, mine, S)
            ticket = take(r.control, 4)


@triton.jit
def _leave(launch, heap, first_rank, S: tl.constexpr):
    """Count this program out; the last one clears what the next launch counts, and ends the epoch.

    All rows of this epoch are back, so no peer adds to the counts cleared.
    """
    if last_to_leave(launch.control):
        epoch = tl.load(launch.control + EPOCH) + 1
        for v in range(S.V):
            clear_control(launch.control + v * launch.control_words, S.E + launch.max_tiles)
            base = tl.load(heap.bases + first_rank + v)
            clear(section(base, heap.return_counts, tl.int32), launch.num_return_counts)
        tl.debug_barrier()
        tl.store(launch.control + LEFT, 0)
        tl.store(launch.control + EPOCH, epoch)
