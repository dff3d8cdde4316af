"""Rows to the ranks of their experts and back, with anything in between.

The exchange kernel does everything in one launch. Here it is cut in two at its products: what a
rank received lies in its heap, a table says for which expert each row is, and a row has to be made
for each. So another backend can compute the experts, and so does the backward, which sends tokens
and gradients out side by side, and brings gradients of tokens and of routing weights back.

Shapes: T tokens of this process, K experts per token, H width, R rows that a rank has room for, V
ranks of this process, L experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.moe._activations import activation_named
from fivefold.moe._backends import Backend
from fivefold.moe._exchange import ExpertExchange
from fivefold.moe._exchange_layout import constants_of, heap_layout

_Tensor = torch.Tensor
_Optional = torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Operands:
    """One call's operands, checked; and who computes them.

    Attributes:
        x: [T, H].
        w13: Of this process's experts.
        w2: Of this process's experts.
        ids: Among all experts, [T, K].
        weights: [T, K].
        b13: Of this process's experts, or None.
        b2: Likewise.
        counts: Tokens of each rank of this process.
        weight_on_input: As in ``fused_moe``.
        backend: Computes the experts.
    """

    x: _Tensor
    w13: _Tensor
    w2: _Tensor
    ids: _Tensor
    weights: _Tensor
    b13: _Optional
    b2: _Optional
    counts: tuple[int, ...]
    weight_on_input: bool
    backend: Backend


def forward_apart(exchange: ExpertExchange, given: Operands) -> torch.Tensor:
    """The operator in three steps: dispatch, this process's experts, combination.

    Args:
        exchange: Between the ranks.
        given: Operands.

    Returns:
        [T, H].

    Raises:
        CommunicationError: As in a call of the exchange.
        DataError: Likewise.
    """
    rows, experts = _scatter(exchange, given, given.x, weights=given.weight_on_input)

    def compute(place: int, here: _Tensor | slice, ids: _Tensor) -> None:
        mine = _share(exchange, given, place)
        entering = rows[place][here].contiguous()
        weight = entering.new_ones(len(entering), 1, dtype=torch.float32)
        if given.weight_on_input:
            weight = _sent_weights(exchange, place)[here].unsqueeze(1)
        results[place][here] = given.backend.forward(
            entering,
            *mine[:2],
            ids,
            weight,
            b13=mine[2],
            b2=mine[3],
            **_options(exchange, given),
            workspace=None,
        )

    results = rows.new_empty(rows.shape)
    _by_rank(experts, compute)
    return _gather(exchange, given, results, None)[0]


def backward_apart(
    exchange: ExpertExchange, given: Operands, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the operator, by the same way out and back.

    A token's row goes out with the row of its gradient; the experts' ranks compute the first
    product again.

    Args:
        exchange: Between the ranks, made for training.
        given: Operands of the forward.
        gradient: Of the output, [T, H].

    Returns:
        Of x, w13, w2, weights, b13 and b2; None where there is none.

    Raises:
        CommunicationError: As in a call of the exchange.
        DataError: Likewise.
    """
    width = exchange.config.hidden
    both = torch.cat([given.x, gradient.to(given.x.dtype)], dim=1)
    rows, experts = _scatter(exchange, given, both, weights=True)
    out = rows.new_empty(*rows.shape[:2], width)
    of_weights = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
    parts: list[tuple[_Optional, ...]] = []

    def compute(place: int, here: _Tensor | slice, ids: _Tensor) -> None:
        mine = _share(exchange, given, place)
        received = rows[place][here]
        entering, incoming = received[:, :width], received[:, width:]
        weight = _sent_weights(exchange, place)[here].unsqueeze(1)
        d_x, d_w13, d_w2, d_weight, d_b13, d_b2 = given.backend.backward(
            incoming.contiguous(),
            entering.contiguous(),
            *mine[:2],
            ids,
            weight,
            b13=mine[2],
            b2=mine[3],
            **_options(exchange, given),
            hidden=None,
        )
        assert d_x is not None, "a backend gives all gradients"
        assert d_weight is not None, "a backend gives all gradients"
        out[place][here] = d_x
        of_weights[place][here] = d_weight.squeeze(1)
        parts.append((d_w13, d_w2, d_b13, d_b2))

    _by_rank(experts, compute)
    d_x, d_weights = _gather(exchange, given, out, of_weights)
    d_w13, d_w2, d_b13, d_b2 = (_stacked(found) for found in zip(*parts, strict=True))
    return d_x, d_w13, d_w2, d_weights, d_b13, d_b2


def _stacked(parts: tuple[_Optional, ...]) -> _Optional:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


def _options(exchange: ExpertExchange, given: Operands) -> dict[str, Any]:
    return {
        "activation": activation_named(exchange.config.activation),
        "weight_on_input": given.weight_on_input,
        "precision": exchange.config.precision,
    }


def _share(
    exchange: ExpertExchange, given: Operands, place: int
) -> tuple[_Tensor, _Tensor, _Optional, _Optional]:
    local = exchange.config.local_experts
    here = slice(place * local, (place + 1) * local)
    b13, b2 = (None if bias is None else bias[here] for bias in (given.b13, given.b2))
    return given.w13[here], given.w2[here], b13, b2


def _by_rank(experts: _Tensor, compute: Callable[[int, _Tensor | slice, _Tensor], None]) -> None:
    """Call ``compute(place, rows, ids)`` for each rank of this process.

    On the CPU with the rows that came only. Elsewhere with all that there is room for, -1 marking
    those that did not come: to know their number would be to wait for the device.
    """
    for place, of_rank in enumerate(experts):
        if experts.device.type == "cpu":
            here = (of_rank >= 0).nonzero().squeeze(1)
            compute(place, here, of_rank[here].unsqueeze(1))
        else:
            compute(place, slice(None), of_rank.unsqueeze(1))


def _sent_weights(exchange: ExpertExchange, place: int) -> _Tensor:
    first, count, kind = heap_layout(exchange.config).sections["at_weights"]
    return exchange.heap.own[place, first : first + count * kind.itemsize].view(kind)


def _scatter(
    exchange: ExpertExchange, given: Operands, rows: _Tensor, *, weights: bool
) -> tuple[_Tensor, _Tensor]:
    """Send rows [T, W]; what came [V, R, W], and its local experts [V, R], -1 for no row."""
    from fivefold.moe import _exchange_rows_triton as kernels  # noqa: PLC0415 - optional

    heap, config = exchange.heap, exchange.config
    width = rows.shape[1]
    experts = torch.full(
        (heap.num_local, config.room_rows), -1, dtype=torch.int32, device=rows.device
    )
    changes = {
        "x": rows.contiguous(),
        "ids": given.ids.contiguous(),
        "weights": given.weights.contiguous(),
        "row_expert": experts,
        **_constants(exchange),
        "W": width,
        "SEND_WEIGHTS": weights,
    }
    exchange.launch(kernels.scatter_kernel, changes, given.counts)
    first, _, kind = heap_layout(config).sections["at_receive"]
    stop = first + config.room_rows * width * kind.itemsize
    return heap.own[:, first:stop].view(kind).view(heap.num_local, -1, width), experts


def _gather(
    exchange: ExpertExchange, given: Operands, rows: _Tensor, scalars: _Optional
) -> tuple[_Tensor, _Optional]:
    """Return a row [V, R, H], and a number, for each that came; their sums [T, H], and [T, K].

    Sums are weighted unless there are numbers, or the weights are on the input.
    """
    from fivefold.moe import _exchange_rows_triton as kernels  # noqa: PLC0415 - optional

    out = torch.empty_like(given.x, memory_format=torch.contiguous_format)
    numbers = torch.empty(given.ids.shape, dtype=torch.float32, device=out.device)
    weights = given.weights.contiguous()
    changes = {
        "rows": rows,
        "scalars": numbers if scalars is None else scalars,
        "weights": weights,
        "out": out,
        "scalars_out": numbers,
        **_constants(exchange),
        "PLAIN_SUM": given.weight_on_input or scalars is not None,
        "SCALARS": scalars is not None,
    }
    exchange.launch(kernels.gather_kernel, changes, given.counts)
    exchange.check_if_cheap()
    return out, None if scalars is None else numbers.to(weights.dtype)


def _constants(exchange: ExpertExchange) -> dict[str, Any]:
    return constants_of(
        exchange.config, num_local=exchange.heap.num_local, weight_on_input=False
    ) | {"room_rows": exchange.config.room_rows}
