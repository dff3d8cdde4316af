"""Capacity: at most so many tokens per expert, with a stated rule for who is dropped.

FlashMoE's published kernel drops by arrival, which differs from run to run. Here the rule is a
function of the routing alone.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from fivefold.errors import ConfigurationError

DropPolicy = Literal["position", "weight"]
_MOST = 2**62  # more than there are assignments, and an int64


def check_capacity(capacity: int | None, policy: str) -> int | None:
    """Return the capacity as a number that tensors can be compared with.

    Args:
        capacity: Most tokens per expert, or None.
        policy: Who is dropped.

    Returns:
        The capacity.

    Raises:
        ConfigurationError: It is no whole number or negative, or the policy is unknown.
    """
    if policy not in {"position", "weight"}:
        raise ConfigurationError(f"drop policy is {policy!r}", hint='use "position" or "weight"')
    if capacity is None:
        return None
    if isinstance(capacity, bool | float):
        raise ConfigurationError(
            f"capacity is {capacity!r}",
            hint="it is a whole number of tokens; capacity_for makes one from a factor",
        )
    if capacity < 0:
        raise ConfigurationError(f"capacity must not be negative; got {capacity}")
    return min(capacity, _MOST)


def capacity_for(num_tokens: int, num_experts: int, *, top_k: int, factor: float = 1.0) -> int:
    """Tokens per expert at a capacity factor: ceil(T K / E * factor), at least 1 where T > 0.

    Examples:
        >>> capacity_for(10, 4, top_k=2, factor=1.25)
        7
    """
    # Rounded first: 1.1 * 10 is a little more than 11 in binary.
    return math.ceil(round(num_tokens * top_k / num_experts * factor, 9))


def drop_beyond_capacity(
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    capacity: int,
    policy: DropPolicy = "position",
) -> torch.Tensor:
    """Return which assignments stay when no expert takes more than ``capacity``.

    Args:
        ids: Experts, shape [T, K]; -1 for none.
        weights: Shape [T, K].
        num_experts: E.
        capacity: Most tokens per expert.
        policy: ``"position"``: first choices of all tokens first, in token order, then second
            choices, and so on. ``"weight"``: larger weights first, ties as by position.

    Returns:
        True where an assignment stays, shape [T, K].

    Raises:
        ConfigurationError: The capacity is no whole number or negative, or the policy unknown.

    Examples:
        >>> ids, weights = torch.tensor([[0], [0], [1]]), torch.tensor([[0.2], [0.9], [0.5]])
        >>> kept = drop_beyond_capacity(ids, weights, num_experts=2, capacity=1, policy="weight")
        >>> kept.flatten().tolist()
        [False, True, True]
    """
    most = check_capacity(capacity, policy)
    assert most is not None, "a number stays one"
    named = torch.where(ids < num_experts, ids, -1)
    by_slot = named.t().reshape(-1)  # first choices of all tokens, then second choices
    order = torch.arange(by_slot.numel(), device=ids.device)
    if policy == "weight":
        order = torch.sort(weights.detach().t().reshape(-1), descending=True, stable=True).indices
    experts = by_slot[order]
    grouped = torch.sort(experts, stable=True)
    counts = counts_of(experts, num_experts)
    starts = torch.cumsum(counts, 0) - counts + (len(experts) - counts.sum())
    rank = torch.arange(len(experts), device=ids.device) - starts[grouped.values.clamp_min(0)]
    kept = torch.empty_like(experts, dtype=torch.bool)
    kept[order[grouped.indices]] = (rank < most) & (grouped.values >= 0)
    return kept.view(ids.shape[1], ids.shape[0]).t().contiguous()


def counts_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the assignments of each expert, int64 [E]; what is no expert's number is not counted.

    Not ``bincount``: that waits for the device, and its shape depends on the values.
    """
    flat = ids.reshape(-1).long()
    place = torch.where((flat >= 0) & (flat < num_experts), flat + 1, 0)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, place, torch.ones_like(place))[1:]
