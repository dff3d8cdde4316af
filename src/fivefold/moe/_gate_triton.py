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

from fivefold.moe._tasks_triton import _multiply


@triton.jit
def _logits(
    token, x, gate, num_tokens, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    INTERPRETED: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EP)
    total = tl.zeros([BG, EP], tl.float32)
    for start in range(0, H, BD):
        depth = start + tl.arange(0, BD)
        a = tl.load(
            x + token.to(tl.int64)[:, None] * H + depth[None, :],
            mask=(token < num_tokens)[:, None] & (depth < H)[None, :],
            other=0.0,
        )
        b = tl.load(
            gate + expert[:, None] * H + depth[None, :],
            mask=(expert < E)[:, None] & (depth < H)[None, :],
            other=0.0,
        )
        total = _multiply(a, b, total, "ieee", INTERPRETED)
    return total


@triton.jit
def _best(value, free, column, EP: tl.constexpr):
    """The lowest column among the free ones with the largest value; EP where it is no number."""
    largest = tl.max(tl.where(free, value, float("-inf")), 1)
    return tl.min(tl.where(free & (value == largest[:, None]), column, EP), 1)


@triton.jit
def _open_groups(
    choice, free, column, E: tl.constexpr, EP: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SUM: tl.constexpr,
):  # fmt: skip
    """Which experts are in the best groups."""
    size: tl.constexpr = E // GROUPS
    group = column // size
    worth = choice
    for g in range(GROUPS):
        inside = free & (group == g)
        first = _best(choice, inside, column, EP)
        value = tl.max(tl.where(inside, choice, float("-inf")), 1)
        if GROUP_SUM:
            others = inside & (column != first[:, None])
            value += tl.max(tl.where(others, choice, float("-inf")), 1)
        worth = tl.where(inside, value[:, None], worth)
    opened = column < 0
    for _ in range(TOP_GROUPS):
        best = _best(worth, free & (opened == 0), column, EP)
        opened = opened | (group == (best // size)[:, None])
    return opened & free


@triton.jit
def route_block(
    block, x, gate, selection_bias, ids, weights, num_tokens, H: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SUM: tl.constexpr, INTERPRETED: tl.constexpr,
    BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Choose experts and weights for a block of tokens."""
    token = block * BG + tl.arange(0, BG)
    logits = _logits(token, x, gate, num_tokens, H, E, EP, INTERPRETED, BG, BD)
    column = tl.zeros([BG, EP], tl.int32) + tl.arange(0, EP)[None, :]
    free = column < E
    logits = tl.where(free, logits, float("-inf"))
    if SCORE == "softmax":
        raised = tl.exp(logits - tl.max(logits, 1)[:, None])
        wanted = raised / tl.sum(raised, 1)[:, None]
    elif SCORE == "sigmoid":
        wanted = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORE == "topk_softmax", "no such score on the device")
        wanted = logits
    choice = wanted
    if selection_bias is not None:
        experts = tl.arange(0, EP)
        bias = tl.load(selection_bias + experts, mask=experts < E, other=0.0)
        choice += bias.to(tl.float32)[None, :]
    if GROUPS > 1:
        free = _open_groups(choice, free, column, E, EP, GROUPS, TOP_GROUPS, GROUP_SUM)
    place = tl.zeros([BG, KP], tl.int32) + tl.arange(0, KP)[None, :]
    chosen = tl.zeros([BG, KP], tl.float32)
    expert = tl.zeros([BG, KP], tl.int32)
    for k in range(K):
        best = _best(choice, free, column, EP)
        here = column == best[:, None]
        weight = tl.sum(tl.where(here, wanted, 0.0), 1)
        lost = best >= E
        weight = tl.where(lost, float("nan"), weight)
        best = tl.where(lost, k, best)
        chosen = tl.where(place == k, weight[:, None], chosen)
        expert = tl.where(place == k, best[:, None], expert)
        free = free & (here == 0)
    if SCORE == "topk_softmax":
        first = tl.where(place < K, chosen, float("-inf"))
        raised = tl.exp(first - tl.max(first, 1)[:, None])
        chosen = raised / tl.sum(raised, 1)[:, None]
    elif NORMALIZE:
        chosen = chosen / (tl.sum(chosen, 1)[:, None] + 1e-20)
    keep = (place < K) & (token < num_tokens)[:, None]
    target = token[:, None] * K + place
    tl.store(ids + target, expert, mask=keep)
    tl.store(weights + target, chosen * SCALE, mask=keep)
