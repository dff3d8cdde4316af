"""Checks of what an exchange is called with, and words for what went wrong in the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe._activations import activation_named
from fivefold.moe._capacity import DropPolicy, drop_beyond_capacity
from fivefold.moe._exchange_layout import ExchangeConfig
from fivefold.moe._heap import SymmetricHeap
from fivefold.moe._operands import check_operands
from fivefold.moe._routing import Router

_SCORES = frozenset({"softmax", "topk_softmax", "sigmoid"})  # of the kernel's gate

_KINDS = {
    1: "a task of its own",
    2: "the counts",
    3: "rows",
    4: "the rows it sent to come back",
}


def check_call(
    config: ExchangeConfig,
    heap: SymmetricHeap,
    operands: tuple[torch.Tensor, ...],
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    num_tokens: Sequence[int] | None,
) -> tuple[int, ...]:
    """Check a call's operands against the exchange, without looking at values.

    Args:
        config: Of the exchange.
        heap: Of the exchange.
        operands: x, w13, w2, ids, weights.
        biases: b13 and b2.
        num_tokens: Of each rank of this process; None: the same for all.

    Returns:
        Tokens of each rank of this process.

    Raises:
        ConfigurationError: They do not fit.
    """
    b13, b2 = biases
    x, w13, w2, ids, weights = operands
    kind = activation_named(config.activation)
    check_operands(x, w13, w2, ids, weights, activation=kind, b13=b13, b2=b2)
    wanted = (heap.num_local * config.local_experts, config.hidden, config.intermediate)
    if tuple(w2.shape) != wanted or ids.shape[1] != config.top_k or x.dtype != config.dtype:
        raise ConfigurationError(
            f"w2 {tuple(w2.shape)}, top_k {ids.shape[1]} and {x.dtype} are not those of the "
            f"exchange: {wanted}, {config.top_k}, {config.dtype}",
            hint="a rank passes the weights of its own experts, a virtual heap those of all",
        )
    if x.device != heap.device:
        raise ConfigurationError(f"x is on {x.device}, the heap on {heap.device}")
    if num_tokens is None:
        if len(x) % heap.num_local:
            raise ConfigurationError(
                f"{len(x)} tokens cannot be shared out evenly among {heap.num_local} ranks",
                hint="say with num_tokens how many each has",
            )
        num_tokens = [len(x) // heap.num_local] * heap.num_local
    counts = tuple(num_tokens)
    if len(counts) != heap.num_local or sum(counts) != len(x) or min(counts) < 0:
        raise ConfigurationError(
            f"num_tokens is {counts}, for {heap.num_local} ranks and {len(x)} tokens",
            hint="give one count for every rank of this process; they add up to len(x)",
        )
    if max(counts) > config.max_tokens:
        raise ConfigurationError(
            f"a rank has {max(counts)} tokens, the exchange was made for {config.max_tokens}",
            hint="make it with a larger max_tokens, on all ranks",
        )
    return counts


def dropped_by_rank(
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    counts: Sequence[int],
    experts: int,
    capacity: int,
    policy: DropPolicy,
) -> torch.Tensor:
    """Ids with -1 for what is beyond a capacity; a rank's tokens compete among themselves.

    Args:
        ids: Of all ranks of this process, [T, K].
        weights: Likewise.
        counts: Tokens of each rank.
        experts: E.
        capacity: Most tokens per rank and expert.
        policy: As in ``drop_beyond_capacity``.

    Returns:
        [T, K].
    """
    kept = [
        drop_beyond_capacity(part, weight, num_experts=experts, capacity=capacity, policy=policy)
        for part, weight in zip(
            torch.split(ids, list(counts)), torch.split(weights, list(counts)), strict=True
        )
    ]
    return ids.masked_fill(~torch.cat(kept), -1)


def check_gate(
    config: ExchangeConfig,
    x: torch.Tensor,
    gate: torch.Tensor,
    router: Router,
    *,
    selection_bias: torch.Tensor | None,
) -> None:
    """Check the operands of a gate in the launch.

    Args:
        config: Of the exchange.
        x: Tokens.
        gate: The router's weight.
        router: How logits become a routing.
        selection_bias: Of the router, or None.

    Raises:
        ConfigurationError: They do not fit.
        UnsupportedError: The capacity might drop something, or the kernel has no such router.
    """
    router.check_experts(config.experts)
    if router.score not in _SCORES or router.epsilon != Router(top_k=1).epsilon:
        raise UnsupportedError(
            f"the gate in the launch has no score {router.score!r} with epsilon {router.epsilon}",
            hint="route first, and give the exchange ids and weights",
        )
    if router.top_k != config.top_k:
        raise ConfigurationError(
            f"the router has top_k {router.top_k}, the exchange {config.top_k}"
        )
    if config.capacity is not None and config.capacity < config.max_tokens:
        raise UnsupportedError(
            f"capacity is {config.capacity}, below max_tokens {config.max_tokens}: who is "
            "dropped is decided before the launch",
            hint="route first, or use the compact layout",
        )
    for name, tensor, shape in (
        ("gate", gate, (config.experts, config.hidden)),
        ("selection_bias", selection_bias, (config.experts,)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.device != x.device):
            raise ConfigurationError(
                f"{name} is {tuple(tensor.shape)} on {tensor.device}; it must be {shape} on "
                f"{x.device}"
            )
    if gate.dtype != x.dtype:
        raise ConfigurationError(f"gate has dtype {gate.dtype}, x has {x.dtype}")


def described(rank: int, kind: int, peer: int, detail: int, *, timeout_s: float, epoch: int) -> str:
    """Say what an error word of the kernel means.

    Args:
        rank: Whose it is.
        kind: As in ``_exchange_sync_triton``.
        peer: Who was waited for.
        detail: A local expert, where rows were waited for.
        timeout_s: How long.
        epoch: In which call.

    Returns:
        A sentence.
    """
    if kind not in _KINDS:
        return f"rank {rank} wrote a row that rank {peer} had written in epoch {epoch}"
    whom = "" if kind == 1 else f" of rank {peer}"
    if kind == 4:
        whom = f" from rank {peer}"
    where = f" for its expert {detail}" if kind == 3 else ""
    return (
        f"rank {rank} waited {timeout_s:g} s for {_KINDS[kind]}{whom}{where} in "
        f"epoch {epoch} and gave up"
    )
