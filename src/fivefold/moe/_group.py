"""The operator over ranks that share the experts out: one-sided by a heap, or by all-to-all.

One-sided, the forward is the exchange kernel, one launch; the backward goes the same way with three
steps: tokens and gradients out, this rank's share of the backward, gradients back.

A group's calls are collective, and so are their backward passes: all ranks run them, in one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from fivefold.errors import ConfigurationError
from fivefold.moe._backends import backend_for
from fivefold.moe._capacity import DropPolicy
from fivefold.moe._exchange import ExpertExchange
from fivefold.moe._exchange_checks import check_call, dropped_by_rank
from fivefold.moe._exchange_rows import Operands, backward_apart, forward_apart
from fivefold.moe._operands import PRECISIONS, check_ids, check_weight_on_input

_Optional = torch.Tensor | None


@torch.compiler.disable  # a call reaches other processes: it must be neither left out nor repeated
def exchange_moe(  # noqa: PLR0913 - the operator's own operands and options
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    exchange: ExpertExchange,
    activation: str,
    b13: _Optional,
    b2: _Optional,
    weight_on_input: bool,
    capacity: int | None,
    drop_policy: DropPolicy,
    backend: str,
    precision: str,
    check: bool | None,
) -> torch.Tensor:
    """``fused_moe`` between the ranks of an exchange; differentiable.

    Args:
        x: Tokens of this process, [T, H].
        w13: Of this process's experts.
        w2: Of this process's experts.
        ids: Among all experts.
        weights: [T, K].
        exchange: Between the ranks.
        activation: As in ``fused_moe``; the exchange's.
        b13: As in ``fused_moe``.
        b2: As in ``fused_moe``.
        weight_on_input: As in ``fused_moe``.
        capacity: Most tokens of a rank that go to one expert.
        drop_policy: As in ``fused_moe``.
        backend: "fused" for one launch; "split" and "reference" compute the experts between two.
            "auto" is "fused" on a GPU and "reference" on the CPU.
        precision: As in ``fused_moe``; the exchange's or a lower one.
        check: As in ``fused_moe``.

    Returns:
        [T, H].

    Raises:
        CommunicationError: A rank did not answer in time.
        ConfigurationError: Operands or options do not fit the exchange.
        DataError: A rank would get more rows than it has room for.
        UnsupportedError: The backend is not available here.
    """
    config = exchange.config
    exchange.check_whole()
    _check_options(exchange, activation=activation, precision=precision, dtype=x.dtype)
    counts = exchange.token_counts(len(x)) if x.ndim == 2 else None
    counts = check_call(
        config, exchange.heap, (x, w13, w2, ids, weights), biases=(b13, b2), num_tokens=counts
    )
    check_weight_on_input(ids, weight_on_input=weight_on_input)
    if check or (check is None and x.device.type == "cpu"):
        check_ids(ids, config.experts)
    for most in (capacity, config.capacity):
        if most is not None:
            ids = dropped_by_rank(
                ids,
                weights,
                counts=counts,
                experts=config.experts,
                capacity=most,
                policy=drop_policy,
            )
    if backend == "auto":
        backend = "fused" if x.device.type == "cuda" else "reference"
    given = Operands(
        x=x,
        w13=w13,
        w2=w2,
        ids=ids,
        weights=weights,
        b13=b13,
        b2=b2,
        counts=counts,
        weight_on_input=weight_on_input,
        backend=backend_for(backend, x),
    )
    floats = (x, w13, w2, weights, b13, b2)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
    if wanted and not config.training:
        message = "this exchange has no room for a backward"
        raise ConfigurationError(
            message, hint="make it with ExchangeConfig(training=True), or use torch.no_grad()"
        )
    result: torch.Tensor = _Exchanged.apply(*floats, given, exchange)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


def _check_options(
    exchange: ExpertExchange, *, activation: str, precision: str, dtype: torch.dtype
) -> None:
    config = exchange.config
    if activation != config.activation:
        raise ConfigurationError(
            f"activation is {activation!r}, the exchange was made for {config.activation!r}",
            hint="make ExchangeConfig and the call with the same activation",
        )
    lower = PRECISIONS.index(config.precision) > PRECISIONS.index(precision)
    if dtype == torch.float32 and lower:
        raise ConfigurationError(
            f"precision is {precision!r}, the exchange computes in {config.precision!r}",
            hint=f"ask for precision={config.precision!r}, or make the exchange with {precision!r}",
        )


class _Exchanged(Function):
    """One call and its gradients."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd wants every tensor in its place
        ctx: Any,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        b13: _Optional,
        b2: _Optional,
        given: Operands,
        exchange: ExpertExchange,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w13, w2, given.ids, weights, b13, b2)
        # The tensors come back from ctx, so that torch sees when one was changed in between.
        ctx.exchange, ctx.counts = exchange, given.counts
        ctx.weight_on_input, ctx.backend = given.weight_on_input, given.backend
        if given.backend.name != "fused":
            return forward_apart(exchange, given)
        return exchange.forward(
            (x, w13, w2, given.ids, weights),
            (b13, b2),
            given.counts,
            weight_on_input=given.weight_on_input,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, w13, w2, ids, weights, b13, b2 = ctx.saved_tensors
        given = Operands(
            x=x,
            w13=w13,
            w2=w2,
            ids=ids,
            weights=weights,
            b13=b13,
            b2=b2,
            counts=ctx.counts,
            weight_on_input=ctx.weight_on_input,
            backend=ctx.backend,
        )
        ctx.exchange.check_whole()
        found = backward_apart(ctx.exchange, given, gradients[0].contiguous())
        return *found, None, None
