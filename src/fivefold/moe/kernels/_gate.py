# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""The gate as a task of the kernel: router logits of a block of tokens, scores, and the top k.

What ``route`` does, with the logits in float32 whatever the tokens are. All experts of a token are
in one tile, so nothing travels between programs. Ties go to the lower expert, and to the lower
group. A token whose logits are not numbers keeps K distinct experts, with weights that are none.
"""

import triton
import triton.language as tl

from fivefold.moe.kernels._products import add_product


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
    """The lowest column among the free ones with the largest value; EP where it is no number."""
    largest = tl.max(tl.where(free, value, float("-inf")), 1)
    return tl.min(tl.where(free & (value == largest[:, None]), column, S.EP), 1)


@triton.jit
def _open_groups(choice, free, column, S: tl.constexpr):
    """Which experts are in the best groups."""
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
